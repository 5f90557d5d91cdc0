"""A process that flushes subnormal numbers steps to the same bits, whenever it began to."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import _canary, same_bits

COUNT = 256


def _trained(dtype, update, state_dtype, flushed):
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(COUNT, generator=generator) * torch.logspace(-9, 0, COUNT)
    start[:64], start[64:96] = torch.arange(64) * 2.0**-24, torch.arange(32) * 2.0**-133
    weight = torch.nn.Parameter(start.to(dtype))
    gradients = [torch.randn(COUNT, generator=generator) * torch.logspace(-20, 0, COUNT) for _ in range(3)]
    optimizer = hu.optim.AdamW([weight], lr=2.0**-20, weight_update=update, state_dtype=state_dtype)
    try:
        for step, gradient in enumerate(gradients):
            weight.grad = gradient.to(dtype)
            if step == flushed:
                torch.set_flush_denormal(True)
            optimizer.step()
            assert (torch.tensor(2.0**-126) * 0.5 == 0) == (flushed is not None and step >= flushed)
        whole = optimizer.float32_state_dict(torch.nn.ParameterList([weight]))["0"]
    finally:
        torch.set_flush_denormal(False)
    held = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    return [weight.detach(), whole, *held]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("state_dtype", [None, "8bit"])
@pytest.mark.parametrize("update", ["split8", "kahan", "stochastic", "master"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flushing_changes_no_bit(monkeypatch, dtype, update, state_dtype, engine):
    with hu.kernels.engine(engine):
        plain = _trained(dtype, update, state_dtype, None)
        for flushed in (0, 2):
            monkeypatch.setattr(
                _canary, "_verified_kernel_keys", set()
            )  # from the start: kernels are compared under it too
            for one, other in zip(plain, _trained(dtype, update, state_dtype, flushed), strict=True):
                assert same_bits(one, other), flushed
