"""Sums, means, norms, extrema and running sums: bits do not depend on scales; nothing overflows on the way."""

import pytest
import torch

from halfulp.scaled import ScaledTensor
from halfulp.tensors import strict
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
    "sum float64": lambda x: x.abs().sum(dtype=torch.float64),  # summed in float32: what cancels has no digits
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3.0, 1),
    "norm 0.5": lambda x: torch.linalg.vector_norm(x.abs() + 1, 0.5, 1),
}


@pytest.mark.parametrize("case", [*EXACT, *CLOSE])
def test_under_all_scales(case, seed):
    with strict():
        check_rule(EXACT.get(case) or CLOSE[case], one, seed=seed, trials=2, exact=True if case in EXACT else 1e-5)


@pytest.mark.parametrize("case", ["sum", "mean over", "norm", "amax", "logsumexp", "cumsum", "var", "std"])
def test_narrow_payloads(case, differences, seed):
    assert max(differences(EXACT[case], [(8, 5)])) < 2e-2  # a deviation of fewer may be next to 0 by chance


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
