"""Element-wise functions at special operands, compiled, and far beyond usual ranges."""

import warnings

import pytest
import torch

from halfulp.kernels import same_bits
from halfulp.mctensor import MCTensor
from halfulp.subclass import FallbackWarning, record_fallbacks, strict


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
    with record_fallbacks() as counts, warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = call(x)
    assert counts
    assert (found.decode() - call(x.decode())).abs().max() < 2.0**-50


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.floor_divide(x, 1.0),
        lambda x: x.median(0),
        lambda x: x.nanmedian(0),
        lambda x: x.kthvalue(1),
        lambda x: torch.copysign(x, -1.0),
        lambda x: x.put(torch.tensor([0]), x),
    ],
)
def test_a_gap_beyond_float64_is_counted_where_it_decides(call):
    x = MCTensor.from_components([torch.tensor([2.0]), torch.tensor([-(2.0**-60)])])
    with strict(), pytest.raises(NotImplementedError, match="has no rule"):
        call(x)


def test_what_replaces_nan_keeps_gaps():
    x = MCTensor.from_components([torch.tensor([2.0, torch.nan]), torch.tensor([-(2.0**-60), 0.0])])
    with strict():
        assert [part.tolist() for part in x.nan_to_num(3.0).components] == [[2.0, 3.0], [-(2.0**-60), 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_infinities_become_the_ends_of_the_components_range(dtype):
    values = torch.tensor([1.5, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    assert same_bits(MCTensor.encode(values, 2).nan_to_num().decode(dtype), values.nan_to_num())


def test_infinities_and_nan_are_no_gaps():
    x = MCTensor.encode([1.5, torch.inf, torch.nan, -torch.inf], 2, torch.bfloat16)
    with strict():
        assert torch.equal(x.round()[:2].decode(), torch.tensor([2, torch.inf], dtype=torch.float64))
        assert torch.equal(x.nanmedian(), x[0])
