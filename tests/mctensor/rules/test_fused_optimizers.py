"""torch's fused steps on MCTensors are refused in words."""

import pytest
import torch

import halfulp as hu


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "SGD"])
def test_a_fused_step_says_what_to_do(name):
    held = torch.nn.Parameter(hu.MCTensor.encode(torch.ones(3)))
    optimizer = getattr(torch.optim, name)([held], fused=True)
    held.grad = torch.ones(3)
    with pytest.raises(NotImplementedError, match="fused=False"):
        optimizer.step()
