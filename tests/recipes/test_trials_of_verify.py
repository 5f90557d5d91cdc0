"""What verify reports over several trials is the worst of them."""

import pytest
import torch
from torch import nn

from halfulp.recipes import _verify, verify


@pytest.mark.parametrize("offs", [(0.0, 0.5, 0.25), (0.5, 0.0, 0.0), (0.0, 0.0, 0.125)])
def test_a_report_is_the_maximum_over_trials(monkeypatch, offs):
    model = nn.Linear(3, 2)
    seen = []

    def difference(wanted, got):
        # Two parameters a trial.
        seen.append(offs[len(seen) // 2])
        return seen[-1]

    monkeypatch.setattr(_verify, "difference", difference)
    found = verify(model, torch.ones(4, 3), "scaled-fp16", trials=3)
    assert len(seen) == 6
    assert set(found.gradients.values()) == {max(offs)}
    assert not found.passed
