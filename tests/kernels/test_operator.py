"""Operators: shapes under fake tensors, opaque to compilers, the schema of what is written."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfulp.kernels import define_operator
from halfulp.rounding import Stochastic, quantize

FORMATS = ["bf16", "fp16", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", Stochastic(), Stochastic(3)])
def test_fake_tensors(name, rounding):
    real = [torch.randn(4, 32), torch.randn(32, 4).t(), torch.randn(2, 0), torch.randn(3, 5, 2).permute(1, 0, 2)]
    for x in real:
        q = quantize(x, name, rounding)
        with FakeTensorMode() as mode:
            fake = quantize(mode.from_tensor(x), name, rounding)
        assert (fake.shape, fake.dtype, fake.stride()) == (q.shape, q.dtype, q.stride())
    meta = quantize(torch.empty(4, 32, device="meta"), name, rounding)
    assert meta.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_checks_the_operators(dtype):
    """torch's own checks: schema, aliasing, fake tensors, autograd registration, functionalization."""
    x = torch.randn(4, 32, dtype=dtype)
    grabbed = []

    class Grab(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "halfulp":
                grabbed.append((function, args))
            return function(*args, **(kwargs or {}))

    with Grab():
        for name in ("e5m2", "mxfp4"):
            for rounding in ("nearest", Stochastic(3)):
                quantize(x, name, rounding)
                quantize(x, name, rounding, out=torch.empty_like(x))
    assert len(grabbed) == 8
    for function, args in grabbed:
        torch.library.opcheck(function, args)


def test_define():
    def double(x):
        return x * 2

    operator = define_operator("test_only_double(Tensor x) -> Tensor", double, torch.empty_like)
    assert operator(torch.ones(2)).tolist() == [2, 2]
    assert torch.Tag.nondeterministic_seeded not in operator.tags
    assert torch.Tag.nondeterministic_seeded in torch.ops.halfulp.quantize_drawing.default.tags
    with pytest.raises(RuntimeError):
        define_operator("test_only_double(Tensor x) -> Tensor", double, torch.empty_like)
