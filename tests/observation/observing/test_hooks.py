"""Hooks: what modules return and take, and gradients that are added, beside plain torch."""

import copy
import io
import random

import pytest
import torch
from torch import Tensor, nn

import halfulp as hu
from halfulp.observation.scripts._watch import find_trained_model


class Root(nn.Module):
    """A root of what is 0 for some elements: its gradient there is infinite, times 0 it is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.relu() * 0).sqrt() + x


def test_nan_on_the_way_back_is_said_of_the_output_whose_gradient_has_it_first(seed):
    layer = random.Random(seed).randrange(4)
    model = nn.Sequential(nn.Linear(8, 16), *[nn.Linear(16, 16) for _ in range(4)], nn.Linear(16, 4))
    model.insert(layer + 1, Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hu.observe(model, optimizer, interval=1) as seen:
        model(torch.randn(32, 8)).square().mean().backward()
        optimizer.step()
    first = seen.findings[0]
    assert (first.code, first.severity, first.where) == ("first-nonfinite", "error", (str(layer),)), str(first)
    assert "takes this output" in first.cure
    assert "activation gradient has the first NaN" in first.summary


class Half(nn.Module):
    """A float16 layer beside float32 ones."""

    def __init__(self, down: float, up: float, back: float) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16).half()
        self.down, self.up, self.back = down, up, back

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer((x * self.down).half()).float() * self.up
        return out * self.back + (out * (1 - self.back)).detach() + x


def faulty(down: float, up: float, back: float) -> list:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Half(down, up, back), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[2].layer.bias.zero_()
        model[2].layer.weight.mul_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(4):
            model(torch.randn(32, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not seen.record.unseen
    return [one for one in seen.findings if one.severity != "note"]


def test_a_layer_whose_outputs_are_all_zero_by_underflow_is_found(seed):
    first = faulty(1e-7, 1e7, 1e-7)[0]
    assert (first.code, first.where, first.severity) == ("activation-underflow", ("2.layer",), "error")
    assert "all activations are 0 in fp16" in first.summary


def test_zeros_of_masks_zero_weights_and_dead_units_are_none(seed):
    assert faulty(1.0, 1.0, 1.0) == []

    class Gate(nn.Module):
        def __init__(self, fill: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((16,), fill).half())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class Dead(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 1000).relu() + 0 * x

    for odd in (Gate(0.0), Dead(), nn.Dropout(1.0), nn.Threshold(1000.0, 0.0)):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), odd, nn.Linear(16, 4)).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with hu.observe(model, optimizer, interval=1) as seen:
            for _ in range(4):
                # The sum, not the mean: gradients of biases alone would be subnormal by themselves.
                model(torch.randn(32, 8).half()).float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        codes = {one.code for one in seen.findings}
        assert not codes & {"activation-underflow", "gradient-underflow"}, (odd, list(map(str, seen.findings)))


class _Fabricated(torch.nn.Module):
    """As Fabric wraps a model."""

    def __init__(self, model):
        super().__init__()
        self._forward_module = self._original_module = model

    def forward(self, x):
        return self._forward_module(x).float()


class _Checkpointed(torch.nn.Module):
    """As torch wraps a module whose activations it computes again."""

    def __init__(self, model):
        super().__init__()
        self._checkpoint_wrapped_module = model

    def forward(self, x):
        return self._checkpoint_wrapped_module(x)


def _model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).bfloat16()


def _set_up(model, optimizer):
    fabric = pytest.importorskip("lightning.fabric")
    return fabric.Fabric(accelerator="cpu", devices=1).setup(model, optimizer)


WRAPPERS = {
    "Fabric's shape": lambda model, optimizer: (_Fabricated(model), optimizer),
    "twice": lambda model, optimizer: (_Fabricated(_Fabricated(model)), optimizer),
    "Fabric": _set_up,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_the_models_own(wrapper):
    model = _model()
    wrapped, optimizer = WRAPPERS[wrapper](model, hu.optim.AdamW(model.parameters(), lr=1e-3))
    with hu.observe(wrapped, optimizer, interval=1) as seen:
        wrapped(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    assert list(seen.record.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {name for role, name in seen.record.tensors if role == "activation"} >= {"0", "1"}
    assert find_trained_model([hu.optim.AdamW(model.parameters())]) is model


def test_parameters_of_checkpointed_modules_have_their_own_names_and_parallel_ones_their_modules():
    model = _model()
    model[0] = _Checkpointed(model[0])
    outer = torch.nn.Module()
    outer.module = model
    seen = hu.observe(outer, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(seen.record.parameters) == [f"module.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]


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


@pytest.mark.parametrize(("count", "spread", "dtype"), [(8, 0.05, BRAIN), (96, 0.05, HALF), (96, 0.05, torch.float32)])
def test_sums_of_few_or_in_more_digits_are_no_finding(seed, count, spread, dtype):
    seen = accumulated(count, spread, dtype)
    assert not [one for one in seen.findings if one.code == "accumulation-swamped"]


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
    assert not [one for one in seen.findings if one.code == "accumulation-swamped"]
    assert not seen.record.unseen


class StreamBlock(nn.Module):
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
    blocks = StreamBlock(way), StreamBlock(way)
    model = nn.Sequential(nn.Linear(8, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 4)).to(BRAIN)
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
    exact = {BRAIN: 256, HALF: 2048}.get(dtype)
    assert all((one.evidence["length"], one.evidence["counted"]) == (length, exact) for one in there)
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
        assert all("beyond e4m3fn's largest number and reach" in one.summary for one in loud)


@pytest.mark.parametrize("how", ["copied", "averaged", "pickled"])
def test_copies_of_a_model_that_is_observed_have_no_part_in_it(how, seed):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observe(model, optimizer, interval=1) as seen:
        model(torch.ones(3, 4)).sum().backward()
        if how == "copied":
            copied = copy.deepcopy(model)
        elif how == "averaged":
            copied = torch.optim.swa_utils.AveragedModel(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            copied = torch.load(file, weights_only=False)
        counts = copy.deepcopy(seen.record.tensors)
        copied(torch.ones(3, 4)).sum().backward()
        assert seen.record.tensors == counts
        optimizer.step()
    hooks = [
        one for part in copied.modules() for one in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    ]
    assert hooks
    assert not [hook for hook in hooks if "halfulp" in repr(hook)]
