"""What bench_commits times, through names that both commits have; run as a worker, in the checkout on PYTHONPATH.

A worker reads lines "case calls" and answers with the CPU seconds and the wall seconds of so many calls.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import halfulp as hu

UPDATES = {
    "nearest": hu.rounding.Nearest(),
    "stochastic": hu.Stochastic(),
    "kahan": hu.Kahan(),
    "split": hu.Split(),
    "split 8": hu.Split(8),
    "feedback": hu.Feedback(),
    "master": hu.Master(),
}
COMPONENTS = (("add", 2), ("mul", 512), ("matmul", 128), ("sum", 512), ("exp", 64))
FORMATS = ("e4m3fn", "e5m2", "e2m1fn", "bf16")


def _optimizer(update: str, tensors: int, elements: int) -> Callable[[], object]:
    parameters = [nn.Parameter(torch.randn(elements)) for _ in range(tensors)]
    named = [(f"p{k}", p) for k, p in enumerate(parameters)]
    optimizer = hu.optim.AdamW(named, lr=1e-3, param_dtype=torch.bfloat16, weight_update=UPDATES[update])
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return optimizer.step


def _quantize(format: str, rounding: object) -> Callable[[], object]:
    x = torch.randn(1 << 20)
    return lambda: hu.quantize(x, format, rounding)


def _components(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], object]:
    a, b = (hu.MCTensor.encode(torch.randn(shape, dtype=torch.float64), components=2, dtype=dtype) for _ in range(2))
    return {
        "add": lambda: a + b,
        "mul": lambda: a * b,
        "matmul": lambda: a @ b,
        "sum": lambda: a.sum(-1),
        "exp": lambda: a.exp(),
    }[name]


def _network(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _scaled(width: int, depth: int) -> Callable[[], object]:
    model = hu.scalify(_network(width, depth), torch.bfloat16)
    x, y = torch.randn(64, width), torch.randint(0, 10, (64,))
    return lambda: nn.functional.cross_entropy(model(x), y).backward()


def _adaptive(width: int, depth: int, format: str | None) -> Callable[[], object]:
    model = _network(width, depth)
    x, y = torch.randn(64, width), torch.randint(0, 10, (64,))
    scaler = hu.AdaptiveGradScaler(model, format=format)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


CASES: dict[str, Callable[[], Callable[[], object]]] = {
    **{f"AdamW {name}, 4 of 2^18": lambda name=name: _optimizer(name, 4, 1 << 18) for name in UPDATES},
    **{f"AdamW {name}, 200 of 64": lambda name=name: _optimizer(name, 200, 64) for name in ("nearest", "split")},
    **{f"quantize {name}": lambda name=name: _quantize(name, hu.rounding.Nearest()) for name in FORMATS},
    **{f"quantize {name}, stochastic": lambda name=name: _quantize(name, hu.Stochastic(seed=1)) for name in FORMATS},
    **{
        f"2 x {str(dtype)[6:]} {name}, {count} x {count}": lambda n=name, c=count, d=dtype: _components(n, (c, c), d)
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
        for name, count in COMPONENTS
    },
    "scaled step, 256 x 4": lambda: _scaled(256, 4),
    "scaled step, 16 x 20": lambda: _scaled(16, 20),
    "adaptive step, 256 x 4": lambda: _adaptive(256, 4, None),
    "adaptive step, 16 x 20": lambda: _adaptive(16, 20, None),
    "adaptive step in e5m2, 64 x 4": lambda: _adaptive(64, 4, "e5m2"),
}


def _answer() -> None:
    torch.set_num_threads(1)
    ready: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        name, calls = line.rstrip("\n").rsplit(" ", 1)
        if name not in ready:
            torch.manual_seed(0)
            ready = {name: CASES[name]()}
        ready[name]()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(int(calls)):
            ready[name]()
        print(time.process_time() - cpu, time.perf_counter() - wall, flush=True)


if __name__ == "__main__":
    _answer()
