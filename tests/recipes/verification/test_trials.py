"""What verify reports over several trials is the worst of them."""

import pytest
import torch
from torch import nn

from halfulp.recipes import _verify, verify
from halfulp.recipes._training_step import one_step


@pytest.mark.parametrize("offs", [(0.0, 0.5, 0.25), (0.5, 0.0, 0.0), (0.0, 0.0, 0.125)])
def test_a_report_is_the_maximum_over_trials(monkeypatch, offs):
    model = nn.Linear(3, 2)
    left = list(offs)

    def step(*arguments, **options):
        run, off = one_step(*arguments, **options), left.pop(0)
        return type(run)(run.values, {name: grad * (1 + off) for name, grad in run.gradients.items()})

    monkeypatch.setattr(_verify, "one_step", step)
    found = verify(model, torch.ones(4, 3), "scaled-fp16", trials=3)
    assert not left
    assert list(found.gradients.values()) == [pytest.approx(max(offs))] * 2
    assert found.wrong == ["gradient 'weight'", "gradient 'bias'"]
    assert not found.passed
