"""Law: under every policy of gradient exponents zero gradients stop nothing, and recipes know each by its name."""

import pytest
import torch

import halfulp as hu
from halfulp.gradients._policy import _POLICY_BY_NAME

from ..gradients.exponents import batch, mean_square, mlp, stepped


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", ["fp16", "e5m2", None])
@pytest.mark.parametrize("policy", sorted(_POLICY_BY_NAME))
def test_under_every_policy_zero_gradients_stop_nothing(policy, format, seed):
    """They have no largest one and no statistics; the next ones that are not zero are right."""
    model, x = mlp(), batch()
    scaler = hu.AdaptiveGradScaler(model, policy=policy, format=format, interval=1, init_scale=2.0**5)

    def loss(factor):
        with torch.autocast("cpu", torch.float16, enabled=format is None):
            y = model(x)
        return mean_square(y.float()) * factor

    # A scale that rises from zeros may pass what half precision holds, and such a step is skipped.
    applied = [stepped(scaler, model, lambda: loss(0.0)) for _ in range(3)]
    assert any(applied)
    applied = [stepped(scaler, model, lambda: loss(1.0)) for _ in range(12)]
    assert any(applied)
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_policies_are_those_of_the_scaler() -> None:
    from halfulp.gradients._policy import _POLICY_BY_NAME
    from halfulp.recipes._recipe import DESCRIPTION_BY_GRADIENT_SCALE

    assert set(DESCRIPTION_BY_GRADIENT_SCALE) == set(_POLICY_BY_NAME)
