"""An observation by compiled kernels beside one in plain torch: the same record, whatever the tensors are."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.kernels import engine, plain_address


class Model(nn.Module):
    """Layers whose samples are whole, of 32 runs, and of runs of which the last one is short."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        layers = nn.Linear(70, 61), nn.LayerNorm(61), nn.Linear(61, 130), nn.Linear(130, 3)
        self.layers = nn.ModuleList(layers).to(dtype)
        self.turned = nn.Parameter(torch.randn(67, 70, dtype=dtype).t())  # not contiguous
        self.wide = nn.Parameter(torch.randn(70, dtype=torch.float64))
        self.none = nn.Parameter(torch.randn(0, 4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + (x @ self.turned).mean() + self.wide.mean().to(x.dtype)
        for layer in self.layers:
            x = nn.functional.relu(layer(x))
        return x.float().square().mean() + self.none.sum().float()


def two_groups(model: Model) -> list[dict]:
    others = [model.turned, model.wide, model.none]
    return [{"params": model.layers.parameters(), "momentum": 0.9}, {"params": others}]


def of_one_dtype(model: Model) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.dtype != torch.float64 and p.numel()]


MAKERS: dict[str, Callable[[Model], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True),
    "two groups": lambda model: torch.optim.SGD(two_groups(model), lr=0.1),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "Adafactor": lambda model: torch.optim.Adafactor(of_one_dtype(model), lr=1e-2),
    "halfulp": lambda model: hu.optim.AdamW(of_one_dtype(model), lr=1e-2),
}


def observed(
    name: str, maker: str, dtype: torch.dtype, start: int, threads: int = 1, interval: int = 1, steps: int = 3
) -> dict:
    """The record of some steps, as plain data."""
    torch.manual_seed(start)
    model = Model(dtype)
    optimizer = MAKERS[maker](model)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with engine(name), hu.observe(model, optimizer, interval=interval) as seen:
            for step in range(steps):
                loss = model(torch.randn(5, 70, dtype=dtype))
                if step == 2:
                    loss = loss * torch.inf
                for _ in range(2 if step == 1 else 1):  # gradients that are added to others
                    loss.backward(retain_graph=True)
                optimizer.step()
                optimizer.zero_grad()
            return dataclasses.asdict(seen.record)
    finally:
        torch.set_num_threads(before)


def check_same(one: object, other: object, where: str = "") -> None:
    """Two plain values are equal; sums in another order nearly so."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            check_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for k, pair in enumerate(zip(one, other)):
            check_same(*pair, f"{where}.{k}")
    elif isinstance(one, float) and not math.isnan(one):
        assert math.isclose(one, other, rel_tol=1e-9), (where, one, other)
    elif isinstance(one, float):
        assert math.isnan(other), where
    else:
        assert one == other, where


DTYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_kernels_and_plain_torch_write_the_same_record(seed, maker, dtype):
    start = int(torch.randint(2**31, ()))
    check_same(observed("llvm", maker, dtype, start), observed("reference", maker, dtype, start))


@pytest.mark.parametrize("maker", ["AdamW", "halfulp"])
def test_steps_that_are_not_sampled_change_nothing(seed, maker):
    start = int(torch.randint(2**31, ()))
    check_same(*(observed(name, maker, torch.bfloat16, start, interval=3, steps=4) for name in ("llvm", "reference")))


def test_threads_write_the_same_record(seed):
    start = int(torch.randint(2**31, ()))
    names = "llvm", "reference"
    check_same(*(observed(name, "two groups", torch.bfloat16, start, threads=2, steps=1) for name in names))


def test_an_engine_that_changes_between_steps(seed):
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observe(model, optimizer, interval=1) as seen:
        for name in ("llvm", "reference", "llvm"):
            with engine(name):
                model(torch.randn(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    for record in seen.record.tensors.values():
        assert record.steps == 3, record.role
        assert record.elements == record.sampled, record.role


def test_only_plain_memory_has_an_address():
    x = torch.ones(4, 6)
    plain = (x, nn.Parameter(x), x[1:], x.bfloat16(), torch.ones(()), torch.inference_mode()(torch.ones)(3))
    assert all(plain_address(one) == one.data_ptr() for one in plain)
    scaled = hu.scalify(nn.Linear(4, 4)).weight
    others = [x.t(), x[:, 1:], x.to_sparse(), torch._neg_view(x), torch._efficientzerotensor(3), x.to("meta")]
    others += [scaled, torch.empty(0), torch.ones(3, dtype=torch.complex64).conj().imag]
    assert [plain_address(one) for one in others] == [0] * len(others)

    def check(one: torch.Tensor) -> torch.Tensor:
        assert plain_address(one) == 0
        return one.sum()

    torch.vmap(check)(x)
    torch.func.grad(check)(x)
