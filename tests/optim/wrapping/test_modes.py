"""train() and eval(): nothing to do without two weights, and refused where a wrapped optimizer has them."""

import pytest
import torch

import halfulp as hu


class TwoWeights(torch.optim.SGD):
    """One weight to train and another to evaluate, as in schedule-free optimizers."""

    def train(self):
        pass


def test_a_wrapped_optimizer_with_two_weights_is_refused():
    with pytest.raises(NotImplementedError, match=r"TwoWeights switches .* take hu\.optim\.AdamWScheduleFree"):
        hu.optim.wrap(TwoWeights, [torch.nn.Parameter(torch.ones(4).bfloat16())])


def test_other_optimizers_have_the_methods_and_stay():
    for make in (hu.AdamW, lambda p: hu.optim.wrap(torch.optim.AdamW, p)):
        parameter = torch.nn.Parameter(torch.ones(4).bfloat16())
        optimizer = make([parameter])
        optimizer.eval()
        optimizer.train()
        assert parameter.tolist() == [1] * 4
        assert not optimizer.state_dict()["state"]
