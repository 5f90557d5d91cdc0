"""Operators without a rule: refused where they write or view, counted where they lose digits."""

import pytest
import torch

from halfulp.mctensor import MCTensor, implements
from halfulp.subclass import FallbackWarning, fallbacks, record_fallbacks, strict
from halfulp.subclass import _rule_table as _fallback


def test_beyond_float64_a_fallback_is_counted_and_warns_once(monkeypatch):
    monkeypatch.setattr(_fallback, "_warned_fallbacks", set())
    x = MCTensor.encode([0.5, 2.5], 2, torch.float64)
    with record_fallbacks() as counts:
        with pytest.warns(FallbackWarning, match="lgamma"):
            found = torch.lgamma(x)
        torch.lgamma(x)
    ((name, count),) = counts.items()
    assert "lgamma" in name
    assert count == 2
    assert fallbacks()[name] >= 2
    assert torch.equal(found.decode(), torch.lgamma(x.decode()))


def test_where_float64_holds_the_value_nothing_is_lost():
    x = MCTensor.encode([0.5, 2.5], 2, torch.float32)
    with record_fallbacks() as counts, strict():
        found = torch.lgamma(x)
    assert not counts
    assert (found.decode() - torch.lgamma(x.decode())).abs().max() <= 2.0**-46


def test_strict_raises():
    x = MCTensor.encode([0.5], 2, torch.float64)
    with strict(), pytest.raises(NotImplementedError, match="no rule"):
        torch.lgamma(x)


def test_what_writes_or_views_without_a_rule_is_refused():
    x = MCTensor.encode([0.5, 1.0], 2, torch.float32)
    before = x.clone()
    with pytest.raises(NotImplementedError, match="rule"):
        x.resize_(1)
    with pytest.raises(NotImplementedError, match="view"):
        x.view(torch.int32)
    assert torch.equal(x.decode(), before.decode())


def test_an_operator_has_one_rule():
    with pytest.raises(ValueError, match="already"):
        implements(torch.ops.aten.add.Tensor)(lambda a, b: a)
    with pytest.raises(TypeError, match="overload"):
        MCTensor.implements(torch.ops.aten.add)
