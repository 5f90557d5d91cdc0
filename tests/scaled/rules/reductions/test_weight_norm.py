"""The gradient of weight normalisation."""

import pytest
import torch

from halfulp.scaled import ScaledTensor
from halfulp.subclass import strict


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float16, 1e-2)])
def test_it_is_the_plain_gradient_under_any_scales(dtype, most, dim, seed):
    v = torch.randn(16, 3, 12)
    g = torch.rand(v.norm(dim=[i for i in range(3) if i != dim], keepdim=True).shape) + 0.5
    plain = [v.clone().requires_grad_(), g.clone().requires_grad_()]
    powers = [2.0 ** int(k) for k in torch.randint(-6, 7, (2,))]
    scaled = [ScaledTensor((x / s).to(dtype), s).requires_grad_() for x, s in zip((v, g), powers)]
    cotangent = torch.randn(v.shape)
    with strict():
        for given in (plain, scaled):
            (torch._weight_norm(*given, dim) * cotangent).sum().backward()
    for x, y in zip(plain, scaled):
        assert (y.grad.decode() - x.grad).norm() <= most * x.grad.norm()
