"""What comes back with its memory or its version is the weight that the optimizer left."""

import pytest
import torch

import halfulp as hu

from ...laws.optim.cases import UPDATES, differing, narrow_updates, snapshot

SIZE = 96


@pytest.mark.parametrize("update", [name for name in narrow_updates() if not UPDATES[name].feeds_back])
def test_other_memory_for_a_while_changes_no_bit(update):
    def run(away):
        generator = torch.Generator().manual_seed(7)
        weight = torch.nn.Parameter(torch.randn(SIZE, generator=generator))
        optimizer = hu.optim.AdamW([weight], lr=1e-3, weight_update=UPDATES[update], param_dtype=torch.bfloat16)
        for _ in range(4):
            old = weight.data
            if away:
                weight.data = old + 0.25
            weight.data = old.clone() if away else old
            weight.grad = torch.randn(SIZE, generator=generator).bfloat16()
            with hu.kernels.engine("reference"):
                optimizer.step()
        return snapshot(optimizer)

    assert differing(run(False), run(True)) == []


@pytest.mark.parametrize("apart", [True, False], ids=["two groups", "one group"])
@pytest.mark.parametrize("update", ["split8", "split", "kahan", "master"])
def test_parameters_cut_from_one_tensor_keep_their_companions(update, apart):
    """They share a version counter: one whose gradient is missing sees the others' steps on it."""

    def run(whole):
        parts = [torch.nn.Parameter(part if whole else part.clone()) for part in start.clone().chunk(3)]
        groups = [{"params": [part]} for part in parts] if apart else parts
        optimizer = hu.optim.AdamW(groups, lr=1e-3, weight_update=update)
        generator = torch.Generator().manual_seed(1)
        for step in range(6):
            for number, part in enumerate(parts):
                gradient = torch.randn(part.shape, generator=generator).bfloat16()
                part.grad = None if number == step % 3 else gradient
            with hu.kernels.engine("reference"):
                optimizer.step()
        return snapshot(optimizer)

    start = torch.randn(12, 8).bfloat16()
    assert differing(run(True), run(False)) == []
