"""What the payloads of a model do, as a report."""

import json

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.scaled import ScaledTensor, drift
from halfulp.subclass import FallbackWarning
from halfulp.subclass import _rule_table as _fallback


class Net(nn.Module):
    """Two named layers and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def test_rows_name_module_operator_and_pass(seed):
    model = hu.scalify(Net())
    before = dict(model.first._forward_pre_hooks)
    with drift(model) as report:
        model(torch.randn(8, 16)).square().sum().backward()
    found = {(row.side, row.module, row.operator) for row in report.rows}
    assert {("forward", "first", "addmm"), ("forward", "second", "addmm"), ("forward", "", "relu")} <= found
    assert {("backward", "second", "mm"), ("backward", "first", "mm")} <= found
    assert all(row.calls >= 1 for row in report.rows)
    assert report.fallbacks == {}
    assert not model.first._forward_hooks
    assert dict(model.first._forward_pre_hooks) == before


class Trained(nn.Module):
    """A network that a module's own forward pass trains."""

    class Trainer(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            y.square().sum().backward()
            return y.detach()

    def __init__(self) -> None:
        super().__init__()
        self.net, self.trainer = Net(), self.Trainer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trainer(self.net(x))


def test_sums_of_gradients_are_of_no_module(seed):
    """A node that adds to a parameter's gradient was made by no forward pass, wherever a backward one runs it."""
    model = hu.scalify(Trained())
    with drift(model) as report:
        for _ in range(2):
            model(torch.randn(8, 16))
    rows = [(row.operator, row.module) for row in report.rows if row.side == "backward"]
    assert [module for operator, module in rows if operator == "add_"] == [""]
    assert ("pow", "trainer") in rows
    assert ("mm", "net.second") in rows


def test_the_measures(seed):
    x = ScaledTensor(torch.tensor([4.0, -4.0, 0.0, torch.inf]).half(), 2.0**-20)
    with drift(nn.Identity()) as report:
        x * 1.0
        ScaledTensor(torch.tensor([2.0**-10, 65504.0]).half(), 1.0) * 1.0
    (row,) = report.rows
    assert (row.lowest, row.calls, row.elements, row.saturated) == (2.0, 2, 4, 1)
    assert row.share("float16") == 1
    assert row.share("float8_e4m3fn") == 0.5
    assert row.share("float8_e5m2") == 0.75
    assert report.worst("forward") is row
    assert report.worst("backward") is None


def test_it_prints_and_goes_into_json(seed):
    model = hu.scalify(Net())
    with drift(model) as report:
        model(torch.randn(8, 16))
    text = str(report)
    assert text.splitlines()[0].split() == [
        *("side", "module", "operator", "payload", "calls", "log2", "rms"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "saturated"),
    ]
    assert "addmm" in text
    again = json.loads(json.dumps(report.to_dict()))
    assert again["rows"][0]["side"] == "forward"
    assert 0 <= again["rows"][0]["inside"]["float16"] <= 1


@pytest.fixture
def without_rule(monkeypatch) -> torch._ops.OpOverload:
    """An operator that has no rule, and has not been warned of."""
    monkeypatch.setattr(_fallback, "_warned_fallbacks", set())
    library = torch.library.Library("halfulp_test", "FRAGMENT")
    library.define("drifting(Tensor x) -> Tensor")
    library.impl("drifting", lambda x: x.clone(), "CompositeExplicitAutograd")
    yield torch.ops.halfulp_test.drifting.default
    library._destroy()


def test_it_counts_fallbacks(without_rule):
    x = ScaledTensor.encode(torch.rand(4))
    with pytest.warns(FallbackWarning), drift(nn.Identity()) as report:
        without_rule(x)
    assert report.fallbacks == {"halfulp_test.drifting.default": 1}
    assert "fallback: halfulp_test.drifting.default, 1 times" in str(report)


def test_a_model_that_raises_is_left_as_it_was(seed):
    model = hu.scalify(Net())
    with pytest.raises(RuntimeError), drift(model):
        model(torch.randn(8, 3))
    assert not model.first._forward_hooks
    assert model(torch.randn(8, 16)).shape == (8, 4)


def test_of_plain_passes_there_is_nothing_to_measure(seed):
    model, message = Net(), r"this Net has no scaled parameters: hu\.scalify\(model\)"
    with pytest.raises(ValueError, match=message), drift(model):
        model(torch.randn(8, 16)).sum().backward()
    with drift(Net()) as report:
        ScaledTensor.encode(torch.ones(2)) * 2.0
    assert report.rows
