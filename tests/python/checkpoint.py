"""Reads the checkpoints that tests/python.rs has made, with numpy and safetensors, and makes one step from the first to the second.

    python tests/python/checkpoint.py FOLDER

Where torch is installed, torch makes that step, too.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file


def read(folder):
    """All arrays of a checkpoint by name, and its manifest; checked by sizes and checksums."""
    text = (folder / "manifest.json").read_bytes()
    manifest = json.loads(text)
    assert zlib.crc32(text.split(b"\n", 1)[1]) == manifest["crc32"]
    arrays = {}
    for shard in manifest["shards"]:
        data = (folder / shard["file"]).read_bytes()
        assert (len(data), zlib.crc32(data)) == (shard["bytes"], shard["crc32"])
        arrays |= load_file(folder / shard["file"])
    return arrays, manifest


def state_dict(arrays, manifest, optimizer):
    """The optimizer's state as torch's `state_dict` has it."""
    facts = manifest["optimizers"][optimizer]
    groups, state = [], {}
    places = {name: place for place, name in enumerate(name for g in facts["groups"] for name in g["parameters"])}
    for group in facts["groups"]:
        groups.append({**group["options"], "params": [places[name] for name in group["parameters"]]})
    for name, names in facts["state"].items():
        keys = names["scalars"] + names["arrays"]
        state[places[name]] = {key: arrays[f"optim.{optimizer}.state.{name}.{key}"] for key in keys}
    return {"state": state, "param_groups": groups}


def adamw(p, g, state, lr, betas, eps, weight_decay, **_):
    """One step, as torch documents it."""
    t = state["step"] + 1
    m = betas[0] * state["exp_avg"] + (1 - betas[0]) * g
    v = betas[1] * state["exp_avg_sq"] + (1 - betas[1]) * g * g
    p = p - lr * weight_decay * p
    return p - lr / (1 - betas[0] ** t) * m / (np.sqrt(v / (1 - betas[1] ** t)) + eps)


def close(found, expected):
    limit = 1e-12 if expected.dtype == np.float64 else 2e-6
    np.testing.assert_allclose(found, expected, rtol=limit, atol=0)


def main(folder):
    (before, first), (after, second) = read(folder / "step-0000000003"), read(folder / "step-0000000004")
    names = ["0.weight", "0.bias", "scale"]
    parts = ["table[0:2]", "table[2:5]"]
    assert sorted(first["parameters"]) == sorted(names + parts + ["ids"]) and first["values"]["epoch"] == 3
    for name, facts in first["parameters"].items():
        array = before[f"model.{name}"]
        assert list(array.shape) == facts["shape"]
        assert facts["version"] == (0 if name in parts + ["ids"] else 3) and facts["requires_grad"] == (name != "ids")
    assert before["model.0.bias"].dtype == np.float32 and before["model.ids"].tolist() == [7, 8]
    assert [part["parameter"] for part in first["arrays"]["table"]] == parts
    table = np.concatenate([before["model." + part["parameter"]] for part in first["arrays"]["table"]])
    assert table.tolist() == np.arange(10.0).reshape(5, 2).tolist()

    dict_of = state_dict(before, first, "optimizer")
    assert [g["params"] for g in dict_of["param_groups"]] == [[0, 1], [2]] and dict_of["state"][0]["step"] == 3
    for place, name in enumerate(names[:2]):
        p, options = before[f"model.{name}"], dict_of["param_groups"][0]
        close(adamw(p, 2 * p, dict_of["state"][place], **options), after[f"model.{name}"])
    p, options = before["model.scale"], dict_of["param_groups"][1]
    buffer = options["momentum"] * dict_of["state"][2]["momentum_buffer"] + 2 * p
    close(p - options["lr"] * buffer, after["model.scale"])
    close(buffer, after["optim.optimizer.state.scale.momentum_buffer"])

    # The state of the optimizer alone, as a file of its own.
    with safe_open(folder / "state.safetensors", "np") as file:
        groups = json.loads(file.metadata()["param_groups"])
        assert [g["rule"] for g in groups] == ["AdamW", "SGD"] and groups[0]["params"] == names[:2]
        close(file.get_tensor("state.0.weight.exp_avg"), dict_of["state"][0]["exp_avg"])

    said = f"read {len(first['shards'])} shards of step 3 and {len(second['shards'])} of step 4"
    print(said + with_torch(before, after, dict_of, names))


def with_torch(before, after, dict_of, names):
    try:
        import torch
    except ImportError:
        return ", without torch"
    for place, name in enumerate(names[:2]):
        p = torch.from_numpy(before[f"model.{name}"].copy()).requires_grad_()
        optimizer = torch.optim.AdamW([p])
        loaded = {key: torch.from_numpy(np.array(value)) for key, value in dict_of["state"][place].items()}
        group = {**optimizer.state_dict()["param_groups"][0], **dict_of["param_groups"][0], "params": [0]}
        optimizer.load_state_dict({"state": {0: loaded}, "param_groups": [group]})
        p.grad = 2 * p.detach()
        optimizer.step()
        close(p.detach().numpy(), after[f"model.{name}"])
    return ", with torch too"


main(Path(sys.argv[1]))
