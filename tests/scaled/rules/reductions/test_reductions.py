"""Sums, means, norms, extrema and running sums: bits do not depend on scales; nothing overflows on the way."""

import pytest
import torch

from halfulp.scaled import ScaledTensor
from halfulp.subclass import strict
from halfulp.testing import check_rule


def one():
    return (torch.randn(3, 5),)


EXACT = {
    "sum": lambda x: x.sum(),
    "sum over": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(),
    "mean over": lambda x: x.mean((0, 1)),
    "nansum": lambda x: x.nansum(0),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(0, correction=0),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "std_mean": lambda x: torch.std_mean(x),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1, 1),
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf"), 0),
    "norm -inf": lambda x: torch.linalg.vector_norm(x, -float("inf"), 0),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0, 0),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(),
    "aminmax": lambda x: torch.aminmax(x, dim=0),
    "max": lambda x: x.max(),
    "max over": lambda x: x.max(1),
    "min over": lambda x: x.min(0),
    "median": lambda x: x.median(1),
    "nanmedian": lambda x: x.nanmedian(),
    "mode": lambda x: x.mode(1),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "argmax": lambda x: x.argmax(1),
    "any": lambda x: (x.any(), x.all(0)),
    "count_nonzero": lambda x: x.relu().count_nonzero(0),
    "logsumexp": lambda x: x.logsumexp(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "trace": lambda x: x.trace(),
    "cumsum": lambda x: x.cumsum(1),
    "cummax": lambda x: x.cummax(1),
    "cummin": lambda x: x.cummin(0),
}
# A product is computed in float64 and rounded once; norms of other orders go through powers.
CLOSE = {
    "prod": lambda x: x.prod(),
    "prod over": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1),
    "sum float64": lambda x: x.sum(dtype=torch.float64),
    "cumsum float64": lambda x: x.cumsum(1, dtype=torch.float64),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3.0, 1),
    "norm 0.5": lambda x: torch.linalg.vector_norm(x.abs() + 1, 0.5, 1),
}


@pytest.mark.parametrize("case", [*EXACT, *CLOSE])
def test_under_all_scales(case, seed, needs_torch):
    if case == "aminmax":
        needs_torch("derivative of aminmax")
    with strict():
        check_rule(EXACT.get(case) or CLOSE[case], one, seed=seed, trials=2, exact=True if case in EXACT else 1e-5)


@pytest.mark.parametrize("case", ["sum", "mean over", "norm", "amax", "logsumexp", "cumsum", "var", "std"])
def test_narrow_payloads(case, differences, seed):
    assert max(differences(EXACT[case], [(8, 5)])) < 2e-2  # a deviation of fewer may be next to 0 by chance


WITH_DTYPE = {
    "sum": lambda x, dtype: x.sum(dtype=dtype),
    "sum over": lambda x, dtype: x.sum(1, keepdim=True, dtype=dtype),
    "nansum": lambda x, dtype: x.nansum(1, dtype=dtype),
    "mean": lambda x, dtype: x.mean(dtype=dtype),
    "mean over": lambda x, dtype: x.mean((0, 1), dtype=dtype),
    "cumsum": lambda x, dtype: x.cumsum(1, dtype=dtype),
    "prod": lambda x, dtype: x.prod(dtype=dtype),
    "prod over": lambda x, dtype: x.prod(1, keepdim=True, dtype=dtype),
    "cumprod": lambda x, dtype: x.cumprod(0, dtype=dtype),
    "norm": lambda x, dtype: torch.norm(x, dtype=dtype),
    "norm over": lambda x, dtype: torch.norm(x, 2, 1, dtype=dtype),
    "norm 0": lambda x, dtype: torch.linalg.vector_norm(x, 0, dtype=dtype),
    "norm 3": lambda x, dtype: torch.linalg.vector_norm(x, 3.0, 1, dtype=dtype),
}


def cancelling():
    """A matrix whose sums have no digit in float32."""
    large, small = torch.randn(3, 2) * 2.0**13, torch.randn(3, 5) * 2.0**-13
    return torch.cat([large, small, -large], 1)


@pytest.mark.parametrize("case", WITH_DTYPE)
def test_float64_is_computed_in_float64(case, seed):
    x = ScaledTensor.encode(cancelling(), torch.float32)
    with strict():
        found = WITH_DTYPE[case](x, torch.float64)
    wanted = WITH_DTYPE[case](x.decode(torch.float64), torch.float64)
    assert isinstance(found, ScaledTensor)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.decode(), wanted, rtol=2.0**-23, atol=0.0)


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16])
def test_float64_is_rounded_once_to_narrow_payloads(storage, seed):
    large = torch.randn(50) * 2.0**9
    x = ScaledTensor.encode(torch.cat([large, torch.rand(1), -large]), storage)
    found = x.sum(dtype=torch.float64)
    assert (found.dtype, found.payload.dtype) == (torch.float64, storage)
    wanted = x.decode(torch.float64).sum()
    torch.testing.assert_close(found.decode(), wanted, rtol=torch.finfo(storage).eps, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.complex128])
@pytest.mark.parametrize("case", WITH_DTYPE)
def test_dtypes_without_scales_are_as_torch_has_them(case, dtype, seed):
    x = ScaledTensor.encode(torch.randn(3, 5) * 4)
    try:
        wanted = WITH_DTYPE[case](x.decode(), dtype)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            WITH_DTYPE[case](x, dtype)
        return
    found = WITH_DTYPE[case](x, dtype)
    assert (type(found), found.dtype) == (torch.Tensor, dtype)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", ["sum", "mean over", "cumsum", "prod over"])
def test_other_logical_dtypes(case, dtype, seed):
    x = ScaledTensor.encode(torch.randn(3, 5), torch.float16)
    found, wide = WITH_DTYPE[case](x, dtype), WITH_DTYPE[case](x, None)
    assert (found.dtype, found.payload.dtype) == (dtype, torch.float16)
    assert torch.equal(found.decode(torch.float32), wide.decode(torch.float32))


def ones(count, value=1.0):
    return ScaledTensor.encode(torch.full((count,), value), torch.float16)


def test_long_sums_fit_narrow_payloads():
    x = ones(200_000, 3e-7)
    assert abs(x.sum().item() / 0.06 - 1) < 1e-3
    assert abs(x.norm(1).item() / 0.06 - 1) < 1e-2
    assert abs(x.cumsum(0)[-1].item() / 0.06 - 1) < 1e-3
    assert abs((x * 1e6).square().sum().item() / 18000 - 1) < 1e-2
    assert torch.linalg.vector_norm(x, 0).item() == pytest.approx(200_000, rel=1e-3)


def test_products_of_many_scales_do_not_overflow():
    x = ones(1000, 1e-3)
    assert (x * 1000).prod().item() == pytest.approx(1.0, rel=2.0)  # (1 + half an ulp)^1000
    assert ScaledTensor(torch.full((64,), 2.0**10), 2.0**-10).prod().item() == 1.0
    assert ScaledTensor(torch.full((64,), 2.0**-12), 2.0**12).cumprod(0)[-1].item() == 1.0


def test_zeros_infinities_and_what_is_empty():
    zeros = torch.zeros_like(ones(4))
    for f in (torch.sum, torch.mean, torch.var, torch.std, torch.norm, torch.amax, torch.prod):
        assert f(zeros).item() == 0.0
    assert zeros.logsumexp(0).item() == pytest.approx(1.3862944, rel=1e-3)
    masked = ones(4).masked_fill(torch.tensor([True, False, True, True]), -float("inf"))
    assert masked.logsumexp(0).item() == pytest.approx(1.0, rel=1e-3)
    assert masked.softmax(0).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert masked.log_softmax(0)[1].item() == 0.0
    assert masked.amax().item() == 1.0
    empty = ones(4)[:0]
    assert empty.sum().item() == 0.0
    assert empty.prod().item() == 1.0
    assert ScaledTensor.encode(torch.tensor(3.0)).sum().item() == 3.0


def test_softmax_with_masked_rows_has_gradients_without_nan():
    x = ScaledTensor.encode(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.float16).requires_grad_()
    mask = torch.tensor([[True, False], [False, False]])
    x.masked_fill(mask, -float("inf")).softmax(1).square().sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[0].tolist() == [0.0, 0.0]
