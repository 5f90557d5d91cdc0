"""Element-wise functions at special operands, compiled, and far beyond usual ranges."""

import warnings

import pytest
import torch

from halfulp.mctensor import MCTensor
from halfulp.subclass import FallbackWarning, recorded, strict


def test_what_the_reports_showed():
    tall = MCTensor.from_components([torch.tensor(-(2.0**100)).double(), torch.tensor(-(2.0**40)).double()])
    assert [float(f(tall)) for f in (torch.exp, torch.expm1, torch.sigmoid)] == [0.0, -1.0, 0.0]
    x = MCTensor.encode([100000.25, 2.0**21], 2, torch.bfloat16)
    assert (torch.sin(x).decode() - torch.sin(x.decode())).abs().max() < 2.0**-12


@pytest.mark.parametrize("kind", [(torch.float64, 2), (torch.float32, 3)], ids=str)
@pytest.mark.parametrize(
    "call",
    [torch.erf, torch.atan, torch.round, torch.acosh, lambda x: x % 0.7, lambda x: x.div(3, rounding_mode="floor")],
)
def test_what_is_float64s_beyond_it_is_counted(call, kind):
    x = MCTensor.encode(["1.7", "2.25"], kind[1], kind[0])
    with strict(), pytest.raises(NotImplementedError, match="has no rule"):
        call(x)
    with recorded() as counts, warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = call(x)
    assert counts
    assert (found.decode() - call(x.decode())).abs().max() < 2.0**-50


def test_a_gap_beyond_float64_is_counted_where_it_decides():
    x = MCTensor.from_components([torch.tensor([2.0]), torch.tensor([-(2.0**-60)])])
    with strict(), pytest.raises(NotImplementedError, match="has no rule"):
        torch.floor_divide(x, 1.0)
