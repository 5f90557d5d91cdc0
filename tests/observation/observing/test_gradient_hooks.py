"""Sums that rounding takes from: gradients of micro-batches, residual streams; positions; a format that saturates."""

import pytest
import torch
from torch import Tensor, nn

import halfulp as hu

BRAIN, HALF = torch.bfloat16, torch.float16


def accumulated(count: int, spread: float, dtype: torch.dtype) -> hu.observation.Observation:
    model = nn.Linear(16, 16, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(3):
            for _ in range(count):
                noisy = torch.linspace(0.5, 1.5, 16) * (1 + spread * torch.randn(16))
                (model(torch.ones(1, 16, dtype=dtype)).float() * noisy).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_sums_of_many_micro_batches_are_compared_with_exact_ones(seed):
    seen = accumulated(96, 0.05, BRAIN)
    off = seen.record.parameters["weight"].accumulation_error
    assert off > 0.02
    found = [one for one in seen.findings if one.code == "accumulation-swamped"]
    assert [one.severity for one in found] == ["warning"]
    assert "sums in .grad are off by" in found[0].summary
    assert found[0].evidence["error"] == off


@pytest.mark.parametrize(("count", "spread", "dtype"), [(8, 0.05, BRAIN), (96, 0.05, HALF), (96, 0.05, torch.float32)])
def test_sums_of_few_or_in_more_digits_are_no_finding(seed, count, spread, dtype):
    seen = accumulated(count, spread, dtype)
    assert not [one for one in seen.findings if one.code == "accumulation-swamped"]
    assert seen.record.parameters["weight"].accumulation_error < 0.02


def test_the_error_of_a_sum_is_that_of_additions_one_by_one(seed):
    seen = accumulated(5, 0.5, BRAIN)
    assert 2.0**-12 < seen.record.parameters["weight"].accumulation_error < 2.0**-7
    assert accumulated(1, 0.5, BRAIN).record.parameters["weight"].accumulation_error is None


@pytest.mark.parametrize("way", ["cleared", "kept zeros", "clipped", "scaled"])
def test_what_is_done_to_a_sum_between_additions_is_no_error(seed, way):
    model = nn.Linear(16, 16, bias=False).to(BRAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(3):
            for part in range(6):
                model(torch.randn(4, 16, dtype=BRAIN)).float().mul(torch.randn(16)).sum().backward()
                if part == 2 and way in ("cleared", "kept zeros"):  # as after a batch that was not finite
                    optimizer.zero_grad(set_to_none=way == "cleared")
                elif way == "clipped":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                elif way == "scaled":
                    model.weight.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert seen.record.parameters["weight"].accumulation_error < 0.02
    assert not [one for one in seen.findings if one.code == "accumulation-swamped"]
    assert not seen.record.unseen


class Block(nn.Module):
    """Two layers beside a stream, in one of the ways in which such blocks are written."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm, self.first, self.second = way, nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "turned":
            return self.second(self.first(self.norm(x))) + x
        if self.way == "after":
            return self.norm(x + self.second(self.first(x))) * x.detach().abs().max()
        if self.way == "two":
            x = x + self.first(self.norm(x))
            return x + self.second(self.norm(x))
        return x + self.second(self.first(self.norm(x)).relu())


@pytest.mark.parametrize("way", ["plain", "turned", "two"])
@pytest.mark.parametrize("factor", [3e5, 1.0])
def test_a_stream_that_swamps_what_is_added_is_found_in_the_layer_that_adds(seed, way, factor):
    model = nn.Sequential(nn.Linear(8, 32), Block(way), Block(way), nn.LayerNorm(32), nn.Linear(32, 4)).to(BRAIN)
    with torch.no_grad():
        model[0].weight.mul_(factor)
    optimizer = torch.optim.SGD([*model[1:].parameters()], lr=1e-4)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(3):
            model(torch.randn(4, 16, 8, dtype=BRAIN)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = {name for one in seen.findings if one.code == "residual-swamped" for name in one.where}
    adding = {f"{k}.{layer}" for k in (1, 2) for layer in (["first", "second"] if way == "two" else ["second"])}
    assert found == (adding if factor > 1 else set())
    assert set(seen.record.residuals) - {"0"} <= adding, "where the stream is the smaller one, it is what is added"
    assert not seen.record.unseen


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_a_float32_stream_and_sums_of_other_things_are_no_residuals(seed, dtype):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) * self.second(x) + 1e6 * x.detach() + x.sum() * 0

    model = nn.Sequential(nn.Linear(8, 32), Other(), nn.Linear(32, 4)).to(dtype)
    with hu.observe(model, torch.optim.SGD(model.parameters(), lr=1e-4), interval=1) as seen:
        model(torch.randn(4, 16, 8, dtype=dtype)).float().square().mean().backward()
    assert not seen.record.residuals


class Rotary(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = 10000 ** -torch.linspace(0, 1, 16)
        positions = torch.arange(x.shape[-2])
        if self.way == "counted":
            angles = positions.to(x.dtype)[:, None] * frequencies.to(x.dtype)
        elif self.way == "angles":
            angles = (positions[:, None] * frequencies).to(x.dtype)
        else:
            angles = positions[:, None] * frequencies
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.rotary, self.head = Rotary(way), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rotary(x)
        return self.head(x * cos + x * sin)


@pytest.mark.parametrize(
    ("way", "dtype", "length", "found"),
    [
        ("counted", BRAIN, 300, True),
        ("counted", BRAIN, 1500, True),
        ("angles", BRAIN, 700, True),
        ("counted", HALF, 2500, True),
        ("counted", BRAIN, 250, False),
        ("counted", HALF, 1500, False),
        ("exact", BRAIN, 1500, False),
        ("exact", HALF, 2500, False),
        ("counted", torch.float32, 1500, False),
    ],
)
def test_positions_that_were_counted_in_16_bits(way, dtype, length, found, seed):
    model = Model(way).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with hu.observe(model, optimizer, interval=1) as seen:
        model(torch.randn(1, length, 16, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    there = [one for one in seen.findings if one.code == "positions-collide"]
    assert [one.where for one in there] == ([("rotary",)] if found else [])
    assert not seen.record.unseen


def test_a_format_that_a_run_rounds_to_afterwards_saturates(seed):
    for factor, expected in ((2000.0, [("error", ("0",))]), (20.0, [])):
        model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 4))
        with torch.no_grad():
            model[0].weight.mul_(factor)
        optimizer = torch.optim.SGD([*model[1:].parameters()], lr=1e-4)
        with hu.observe(model, optimizer, interval=1, quantized={"0": "e4m3fn", "2": "mxfp8_e4m3"}) as seen:
            for _ in range(2):
                model(torch.randn(32, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        loud = [one for one in seen.findings if one.code == "payload-saturated"]
        assert [(one.severity, one.where) for one in loud] == expected
        assert all("beyond e4m3fn's largest number, 448" in one.summary for one in loud)
