"""torch's fused steps on MCTensors are its steps one by one, bit for bit."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits

OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_steps_have_the_bits_of_single_ones(name, dtype, seed):
    torch.manual_seed(seed)
    make, options = OPTIMIZERS[name]
    start, gradients = torch.randn(6), [torch.randn(6).to(dtype) for _ in range(3)]
    ended = []
    for how in ({"fused": True}, {"foreach": False}):
        held = torch.nn.Parameter(hu.MCTensor.encode(start, 2, dtype))
        optimizer = make([held], **options, **how)
        for gradient in gradients:
            held.grad = gradient.clone()
            optimizer.step()
        ended.append(held.detach().components)
    assert all(same_bits(a, b) for a, b in zip(*ended, strict=True))
    assert not torch.equal(ended[0][0], start.to(dtype))


def test_a_step_that_has_no_rule_says_what_to_do():
    held = torch.nn.Parameter(hu.MCTensor.encode(torch.ones(3)))
    optimizer = torch.optim.Adagrad([held], fused=True)
    held.grad = torch.ones(3)
    with pytest.raises(NotImplementedError, match="fused=False"):
        optimizer.step()
