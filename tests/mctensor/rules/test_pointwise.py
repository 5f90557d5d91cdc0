"""Element-wise functions at special operands, compiled, and far beyond usual ranges."""

import math
import random

import pytest
import torch

from halfulp.kernels import same_bits
from halfulp.mctensor import MCTensor

from ..function_values import CASES


@pytest.mark.parametrize("kind", [(torch.bfloat16, 2), (torch.float64, 2)], ids=str)
def test_divisions_at_special_operands_are_torchs(kind):
    grid = torch.tensor([0.0, -0.0, 1.0, -1.0, 7.0, -5.5, 0.7, math.inf, -math.inf, math.nan]).to(kind[0])
    a, b = (t.flatten() for t in torch.meshgrid(grid, grid, indexing="ij"))
    x, y = (MCTensor.encode(t, kind[1], kind[0]) for t in (a, b))
    for name in ("remainder", "fmod", "trunc_divide", "floor_divide"):
        found, wanted = CASES[name].call(x, y).components[0], CASES[name].call(a.double(), b.double())
        odd = ~torch.isfinite(wanted) | (wanted == 0)
        assert same_bits(torch.where(odd, found.double(), 0.0), torch.where(odd, wanted, 0.0)), name


def test_a_compiled_remainder_is_the_eager_one():
    for kind in (torch.bfloat16, torch.float64):
        x = MCTensor.encode(torch.tensor([7.0, -7.0, random.uniform(1, 99)]), 2, kind)
        compiled = torch.compile(lambda x: torch.remainder(x, 0.7), backend="aot_eager")(x)
        assert all(same_bits(a, b) for a, b in zip(compiled.components, torch.remainder(x, 0.7).components))


def test_what_the_reports_showed():
    tall = MCTensor.from_components([torch.tensor(-(2.0**100)).double(), torch.tensor(-(2.0**40)).double()])
    assert [float(f(tall)) for f in (torch.exp, torch.expm1, torch.sigmoid)] == [0.0, -1.0, 0.0]
    large = MCTensor.encode(torch.tensor(1e200, dtype=torch.float64))
    assert float(torch.hypot(large, large)) == math.hypot(1e200, 1e200)
    assert abs(float(torch.erfc(MCTensor.encode(torch.tensor(20.0).double()))) / math.erfc(20.0) - 1) < 1e-15
    x = MCTensor.encode([100000.25, 2.0**21], 2, torch.bfloat16)
    assert (torch.sin(x).decode() - torch.sin(x.decode())).abs().max() < 2.0**-12
