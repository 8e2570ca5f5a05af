"""Writes lbfgs.jsonl: runs of torch.optim.LBFGS on small problems. Needs torch 2.9.1 and nothing else.

    python tests/golden/lbfgs.py > tests/golden/lbfgs.jsonl
"""

import json
import sys

import torch

torch.set_num_threads(1)


def grid(*shape, seed):
    """Reproducible numbers between -1 and 1, multiples of 1/64, so that JSON and both dtypes hold them exactly."""
    count, state, values = 1, seed, []
    for n in shape:
        count *= n
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        values.append(((state >> 16) % 129 - 64) / 64)
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def rosenbrock(params, data):
    x, y = params
    a = 1 - x
    b = y - x * x
    return (a * a + b * b * 100).sum()


def least_squares(params, data):
    """`unused` has no gradient."""
    u, v, unused = params
    r = data["a"] @ u + data["b"] @ v - data["c"]
    return (r * r).sum() * 0.5


def logistic(params, data):
    w, b = params
    z = data["x"] @ w + b
    return torch.nn.functional.binary_cross_entropy_with_logits(z, data["y"]) + (w * w).sum() * 0.01


def embedding(params, data):
    """The gradient of the table is sparse."""
    (table,) = params
    e = torch.nn.functional.embedding(torch.tensor([3, 0, 3, 5]), table, sparse=True) - data["target"]
    return (e * e).sum()


PROBLEMS = {
    "rosenbrock": (rosenbrock, {}, [torch.tensor([-1.25, 0.5, 2.0]), torch.tensor([1.0, -0.75, 1.5])]),
    "least_squares": (
        least_squares,
        {"a": grid(12, 4, seed=1), "b": grid(12, 3, seed=2), "c": grid(12, 1, seed=3)},
        [grid(4, 1, seed=4), grid(3, 1, seed=5), grid(2, seed=6)],
    ),
    "logistic": (
        logistic,
        {"x": grid(20, 5, seed=7), "y": (grid(20, 1, seed=8) > 0).double()},
        [grid(5, 1, seed=9), torch.zeros(1)],
    ),
    "embedding": (embedding, {"target": grid(4, 2, seed=10)}, [grid(6, 2, seed=11)]),
}

# Problem, dtypes, steps, options.
RUNS = [
    ("rosenbrock", ("f64", "f32"), 3, {"max_iter": 5, "line_search_fn": "strong_wolfe"}),
    ("rosenbrock", ("f64",), 2, {"line_search_fn": "strong_wolfe", "history_size": 3}),
    ("rosenbrock", ("f64",), 3, {"line_search_fn": "strong_wolfe", "max_eval": 8}),
    ("rosenbrock", ("f64",), 3, {"lr": 4.0, "max_iter": 6, "line_search_fn": "strong_wolfe"}),
    ("rosenbrock", ("f64",), 3, {"lr": 1e-3, "max_iter": 4, "line_search_fn": "strong_wolfe"}),
    ("rosenbrock", ("f64", "f32"), 4, {"lr": 0.1, "max_iter": 4}),
    ("rosenbrock", ("f64",), 3, {"lr": 0.05, "max_eval": 5, "history_size": 2}),
    ("least_squares", ("f64", "f32"), 3, {"max_iter": 4, "line_search_fn": "strong_wolfe"}),
    ("least_squares", ("f64",), 2, {"line_search_fn": "strong_wolfe"}),
    ("least_squares", ("f64", "f32"), 3, {"max_iter": 5}),
    ("least_squares", ("f64",), 3, {"lr": 0.5, "history_size": 1}),
    ("least_squares", ("f64",), 3, {"tolerance_grad": 0.05}),
    ("least_squares", ("f64",), 3, {"tolerance_change": 1e-3}),
    ("logistic", ("f64", "f32"), 3, {"max_iter": 4, "line_search_fn": "strong_wolfe"}),
    ("logistic", ("f64",), 2, {"line_search_fn": "strong_wolfe", "history_size": 5, "tolerance_grad": 1e-5}),
    ("logistic", ("f64", "f32"), 3, {"max_iter": 6}),
    ("logistic", ("f64",), 5, {"max_iter": 1}),
    ("embedding", ("f64", "f32"), 2, {"max_iter": 3}),
    ("embedding", ("f64",), 2, {"max_iter": 4, "lr": 0.3, "line_search_fn": "strong_wolfe"}),
]


def array(tensor):
    return {"shape": list(tensor.shape), "value": tensor.double().flatten().tolist()}


def run(problem, dtype, steps, options):
    function, data, start = PROBLEMS[problem]
    kind = {"f32": torch.float32, "f64": torch.float64}[dtype]
    data = {name: value.to(kind) for name, value in data.items()}
    params = [value.to(kind).clone().requires_grad_() for value in start]
    optimizer = torch.optim.LBFGS(params, **options)

    def closure():
        optimizer.zero_grad()
        loss = function(params, data)
        loss.backward()
        return loss

    line = {
        "id": f"{problem} {dtype} " + " ".join(f"{k}={v}" for k, v in options.items()),
        "problem": problem,
        "dtype": dtype,
        "options": options,
        "data": {name: array(value) for name, value in data.items()},
        "params": [array(p.detach()) for p in params],
        "steps": [],
    }
    for _ in range(steps):
        loss = optimizer.step(closure).item()
        state = optimizer.state[params[0]]
        line["steps"].append(
            {
                "first_loss": loss,
                "iterations": state["n_iter"],
                "evaluations": state["func_evals"],
                "params": [p.detach().double().flatten().tolist() for p in params],
            }
        )
    return line


def main():
    assert torch.__version__.startswith("2.9.1"), torch.__version__
    for problem, dtypes, steps, options in RUNS:
        for dtype in dtypes:
            json.dump(run(problem, dtype, steps, options), sys.stdout, separators=(",", ":"))
            print()


main()
