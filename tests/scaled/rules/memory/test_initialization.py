"""torch.nn.init on scaled tensors: every function works, with torch's own numbers."""

import pytest
import torch
from torch import nn

from halfulp.scaled import ScaledTensor

INITS = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
ARGUMENTS = {"constant_": (0.3,), "sparse_": (0.2,)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("is_parameter", [False, True])
def test_every_initialization(name, dtype, is_parameter, seed):
    shape = (4, 4, 3) if name == "dirac_" else (6, 4)
    weight = ScaledTensor.encode(torch.full(shape, 9.0), dtype)
    weight = nn.Parameter(weight) if is_parameter else weight
    plain = torch.full(shape, 9.0)
    initialize, given = getattr(nn.init, name), ARGUMENTS.get(name, ())
    torch.manual_seed(seed)
    assert initialize(weight, *given) is weight
    torch.manual_seed(seed)
    initialize(plain, *given)
    found = weight.detach().decode()
    assert found.isfinite().all()
    assert (found != 9.0).all()
    # Truncated draws are made by writes in place, each rounded; the inverse error function magnifies the first.
    is_rounded_often = name == "trunc_normal_" and dtype != torch.float16
    if name not in ("orthogonal_", "sparse_") and not is_rounded_often:
        assert torch.allclose(found, plain, rtol=0.07, atol=0.01 * plain.abs().max().item())


@pytest.mark.parametrize("sizes", [(4,), (3, 5), (0, 2)])
def test_eye_is_written_into_a_scaled_tensor(sizes):
    shape = sizes * 2 if len(sizes) == 1 else sizes
    x = ScaledTensor.encode(torch.randn(shape), torch.float16)
    assert torch.eye(*sizes, out=x) is x
    assert torch.equal(x.decode(), torch.eye(*sizes))
