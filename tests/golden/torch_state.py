"""Writes torch_state/*.safetensors: optimizers of torch in the middle of a training, and how it went on. Needs torch 2.9.1 and safetensors.

    python tests/golden/torch_state.py tests/golden/torch_state

The arrays of a file: `state.P.K` as `rankgrad::checkpoint::read_state_dict` reads them, with the groups in its metadata; beside them the parameters
`params.P` at that moment, and for each further step T the gradients `grads.T.P` and what they led to, `expected.T.P`.
"""

import json
import sys

import torch
from safetensors.torch import save_file

torch.set_num_threads(1)

CASES = [
    ("SGD", dict(lr=0.05, momentum=0.9, nesterov=True), torch.float64),
    ("Adam", dict(lr=0.02, betas=(0.8, 0.95), amsgrad=True), torch.float64),
    ("AdamW", dict(lr=0.02, weight_decay=0.1), torch.float32),
    ("RMSprop", dict(lr=0.01, centered=True, momentum=0.5), torch.float64),
    ("NAdam", dict(lr=0.02), torch.float64),
    ("RAdam", dict(lr=0.02), torch.float64),
    ("ASGD", dict(lr=0.02, t0=2), torch.float64),
    ("Adagrad", dict(lr=0.05, initial_accumulator_value=0.1), torch.float64),
    ("Adadelta", dict(lr=0.5), torch.float64),
    ("Adamax", dict(lr=0.02), torch.float64),
    ("Rprop", dict(lr=0.02), torch.float64),
]


def main(folder):
    for name, options, dtype in CASES:
        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        params = [draw(3, 2), draw(4), draw(), draw(2)]
        for p in params:
            p.requires_grad_()
        kind = getattr(torch.optim, name)
        # The last one never gets a gradient, so it has no state.
        optimizer = kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.5 * options["lr"]}], **options)

        def step():
            grads = [draw(*p.shape) for p in params[:3]]
            for p, g in zip(params, grads):
                p.grad = g.clone()
            optimizer.step()
            return grads

        for _ in range(3):
            step()
        d = optimizer.state_dict()
        arrays = {f"state.{p}.{k}": v.clone() for p, s in d["state"].items() for k, v in s.items() if torch.is_tensor(v)}
        arrays |= {f"params.{p}": v.detach().clone() for p, v in enumerate(params)}
        for t in range(4):
            arrays |= {f"grads.{t}.{p}": g for p, g in enumerate(step())}
            arrays |= {f"expected.{t}.{p}": v.detach().clone() for p, v in enumerate(params)}
        groups = [{**g, "rule": name} for g in d["param_groups"]]
        save_file(arrays, f"{folder}/{name}.safetensors", metadata={"param_groups": json.dumps(groups)})


main(sys.argv[1])
