"""Reductions, sorting, pooling and losses of scaled tensors."""

import pytest
import torch
import torch.nn.functional as F

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


@pytest.mark.parametrize("exponent", [-90, 90])
@pytest.mark.parametrize("order", [0.5, 3.0])
def test_norms_of_other_orders_keep_the_range_of_scales(order, exponent, seed):
    x = ScaledTensor.encode(torch.randn(4, 3) * 2.0**exponent, torch.float32)
    torch.testing.assert_close(
        x.norm(order, 1).decode().double(), x.decode(torch.float64).norm(order, 1), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("case", ["sum", "mean over", "norm", "amax", "logsumexp", "cumsum", "var", "std"])
def test_narrow_payloads(case, differences, seed):
    assert max(differences(EXACT[case], [(8, 5)])) < 2e-2  # a deviation of fewer may be next to 0 by chance


WITH_DTYPE = {
    "sum": lambda x, dtype: x.sum(dtype=dtype),
    "sum over": lambda x, dtype: x.sum(1, keepdim=True, dtype=dtype),
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


def table():
    return (torch.randn(6, 8),)


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: torch.sort(x, dim=0, descending=True),
        lambda x: torch.sort(x, stable=True),
        lambda x: torch.topk(x, 3),
        torch.argsort,
        torch.msort,
    ],
)
def test_sorting(seed, operator):
    check_rule(operator, table, seed=seed, trials=3)


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        lambda x: torch.unique(x, dim=0),
        lambda x: torch.unique_consecutive(x, return_counts=True),
        lambda x: torch.unique_consecutive(x, dim=1),
        lambda x: torch.histc(x, 5, -2, 2),
        lambda x: torch.histogram(x, 5, range=(-2.0, 2.0)),
        lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    ],
)
def test_counting(seed, operator):
    check_rule(operator, lambda: (torch.randint(-3, 4, (6, 8)) * 0.5,), seed=seed, trials=3, gradients=False)


def test_plain_numbers_are_counted_between_scaled_edges(seed):
    x, edges = torch.rand(50, 2), [torch.tensor([0.0, 0.25, 0.5, 1.0]), torch.tensor([0.0, 0.5, 1.0])]
    with strict():
        found = torch.histogramdd(x, [ScaledTensor.encode(one, torch.float32) for one in edges]).hist
    assert torch.equal(found.decode(), torch.histogramdd(x, edges).hist)


def test_searching(seed):
    check_rule(torch.searchsorted, lambda: (torch.randn(20).sort()[0], torch.randn(5)), seed=seed, trials=3)
    check_rule(torch.bucketize, lambda: (torch.randn(5), torch.randn(20).sort()[0]), seed=seed, trials=3)
    index = torch.randint(0, 6, (10,))
    check_rule(lambda w: torch.bincount(index, w), lambda: (torch.rand(10),), seed=seed, trials=3, gradients=False)


@pytest.mark.parametrize("name", ["floor", "ceil", "round", "trunc", "frac", "fix"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_rounding(seed, name, size):
    check_rule(getattr(torch, name), lambda: (torch.randn(20) * size,), seed=seed, trials=3)
    x = ScaledTensor.encode(torch.randn(20) * size)
    torch.testing.assert_close(getattr(x, name)().decode(), getattr(x.decode(), name)(), rtol=1e-3, atol=0)


def test_rounding_to_decimals(seed):
    check_rule(lambda x: torch.round(x, decimals=2), table, seed=seed, trials=3)


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.bfloat16])
def test_order_of_narrow_payloads(storage):
    x = ScaledTensor.encode(torch.tensor([3.0, 1.0, 2.0]), storage)
    values, indices = x.sort()
    assert values.payload.dtype == storage
    assert indices.tolist() == [1, 2, 0]
    assert values.decode().tolist() == sorted(x.tolist())


def images():
    return (torch.randn(2, 4, 6, 6),)


def rows():
    return (torch.randn(2, 4, 8),)


def volumes():
    return (torch.randn(1, 2, 4, 4, 4),)


CASES = {
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), rows),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), images),
    "max_pool2d indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), images),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), volumes),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), rows),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), images),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), volumes),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 3), rows),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), images),
    "adaptive_avg_pool2d mean": (lambda x: F.adaptive_avg_pool2d(x, 1), images),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 3), volumes),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 4), images),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 3), volumes),
    "fractional_max_pool2d": (
        lambda x: F.fractional_max_pool2d(x, 2, 3, _random_samples=torch.full((2, 4, 2), 0.3)),
        images,
    ),
    "max_unpool2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), images),
    "fold": (lambda x: F.fold(F.unfold(x, 3), (6, 6), 3), images),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), images),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), images),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), images),
    "nearest 1d": (lambda x: F.interpolate(x, scale_factor=1.5), rows),
    "nearest 3d": (lambda x: F.interpolate(x, scale_factor=2), volumes),
    "linear": (lambda x: F.interpolate(x, 5, mode="linear"), rows),
    "trilinear": (lambda x: F.interpolate(x, 3, mode="trilinear"), volumes),
}
CASES |= {
    mode: (lambda x, mode=mode: F.interpolate(x, (9, 5), mode=mode), images)
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
}
CASES |= {
    f"{mode} antialias": (lambda x, mode=mode: F.interpolate(x, (4, 3), mode=mode, antialias=True), images)
    for mode in ("bilinear", "bicubic")
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_plain_tensors_under_all_scales(case, seed):
    with strict():
        check_rule(*CASES[case], seed=seed, trials=2)


def test_lp_pool_is_close(seed):
    with strict():
        check_rule(lambda x: F.lp_pool2d(x, 2, 2), images, seed=seed, exact=1e-5)


@pytest.mark.parametrize("case", ["max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "bilinear", "fold"])
def test_pools_of_narrow_payloads(case, differences, seed):
    function, make = CASES[case]
    assert max(differences(function, [make()[0].shape])) < 1e-2


LABELS = torch.tensor([1, 0, 3, -100])
SIGNS = torch.tensor([[1.0, -1.0, 1.0, -1.0]])


def one_row():
    return (torch.randn(4, 4),)


def pair():
    return torch.randn(4, 4), torch.randn(4, 4)


def shares():
    return torch.rand(4, 4) * 0.9 + 0.05, torch.rand(4, 4)


def classes():
    return (torch.randn(2, 4, 2, 3),)


LOSSES = {
    "nll": (lambda x: F.nll_loss(x, LABELS), one_row),
    "nll one": (lambda x: F.nll_loss(x[0], LABELS[0]), one_row),
    "nll sum": (lambda x: F.nll_loss(x, LABELS, reduction="sum"), one_row),
    "nll weights": (lambda x, w: F.nll_loss(x, LABELS, w[0].detach().abs()), pair),
    "nll images": (lambda x: F.nll_loss(x, torch.arange(12).view(2, 2, 3) % 4), classes),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS), one_row),
    "cross_entropy none": (lambda x: F.cross_entropy(x, LABELS, reduction="none"), one_row),
    "cross_entropy smooth": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1), one_row),
    "cross_entropy soft": (lambda x, t: F.cross_entropy(x, t.softmax(1)), pair),
    "cross_entropy weights": (lambda x, w: F.cross_entropy(x, LABELS, w[0].detach().abs()), pair),
    "mse": (F.mse_loss, pair),
    "mse sum": (lambda x, t: F.mse_loss(x, t, reduction="sum"), pair),
    "mse none": (lambda x, t: F.mse_loss(x, t, reduction="none"), pair),
    "l1": (F.l1_loss, pair),
    "smooth_l1": (lambda x, t: F.smooth_l1_loss(x, t, beta=0.3), pair),
    "huber": (lambda x, t: F.huber_loss(x, t, delta=0.7), pair),
    "bce": (F.binary_cross_entropy, shares),
    "bce_with_logits": (lambda x, t: F.binary_cross_entropy_with_logits(x, t.sigmoid()), pair),
    "bce weights": (
        lambda x, t: F.binary_cross_entropy_with_logits(x, t.sigmoid(), pos_weight=t[0].detach().exp()),
        pair,
    ),
    "kl_div": (lambda x, t: F.kl_div(x, t, reduction="batchmean"), shares),
    "soft_margin": (lambda x: F.soft_margin_loss(x, SIGNS.expand(4, 4)), one_row),
    "multi_margin": (lambda x: F.multi_margin_loss(x, LABELS.clamp(min=0)), one_row),
    "multilabel_margin": (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, 0, -1, 0]]).expand(4, 4)),
        one_row,
    ),
    "hinge_embedding": (lambda x: F.hinge_embedding_loss(x, SIGNS.expand(4, 4)), one_row),
    "margin_ranking": (lambda x, t: F.margin_ranking_loss(x, t, SIGNS.expand(4, 4), 0.1), pair),
    "triplet": (lambda x, t: F.triplet_margin_loss(x, t, x + t), pair),
    "cosine_embedding": (lambda x, t: F.cosine_embedding_loss(x, t, SIGNS[0]), pair),
    "poisson": (lambda x, t: F.poisson_nll_loss(x, t.abs()), pair),
    "gaussian": (lambda x, t: F.gaussian_nll_loss(x, t, t.detach().abs() + 0.1), pair),
    "softmax": (lambda x: x.softmax(1), one_row),
    "log_softmax": (lambda x: x.log_softmax(0), one_row),
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses_under_all_scales(case, seed):
    with strict():
        check_rule(*LOSSES[case], seed=seed, trials=2, exact=1e-5)


@pytest.mark.parametrize("case", ["nll images", "cross_entropy", "mse", "l1", "huber", "bce_with_logits", "softmax"])
def test_losses_of_narrow_payloads(case, differences, seed):
    function, make = LOSSES[case]
    assert max(differences(function, [x.shape for x in make()])) < 2e-2


def test_a_loss_has_a_number_and_gradients(seed):
    logits = torch.randn(4, 4)
    x = ScaledTensor.encode(logits, torch.float16).requires_grad_()
    loss = F.cross_entropy(x, LABELS)
    assert isinstance(loss, ScaledTensor)
    assert loss.item() == pytest.approx(F.cross_entropy(logits, LABELS).item(), rel=1e-2)
    loss.backward()
    assert isinstance(x.grad, ScaledTensor)
    assert x.grad[3].tolist() == [0.0] * 4


def test_the_gradient_of_a_mean_over_many_does_not_vanish():
    count = 2**20
    x = ScaledTensor.encode(torch.zeros(count, 2), torch.float16).requires_grad_()
    F.cross_entropy(x, torch.zeros(count, dtype=torch.long)).backward()
    assert x.grad[0].tolist() == [-(2.0**-21), 2.0**-21]


def test_gradients_of_images_are_not_lost_in_zeros(seed):
    x = ScaledTensor.encode(torch.randn(2, 4, 2, 3), torch.float16).requires_grad_()
    F.nll_loss(x, torch.zeros(2, 2, 3, dtype=torch.long)).backward()
    assert torch.allclose(x.grad[:, 0].decode(), torch.full((2, 2, 3), -1 / 12), rtol=1e-3)
    assert not x.grad[:, 1:].any()


@pytest.mark.parametrize("loss", [F.huber_loss, F.smooth_l1_loss, F.mse_loss])
@pytest.mark.parametrize("exponent", [-30, -16, 0])
def test_small_residuals_keep_their_gradients_in_sixteen_bits(loss, exponent, seed):
    x = ScaledTensor.encode(torch.randn(64) * 2.0**exponent).detach().requires_grad_()
    plain = x.detach().decode().requires_grad_()
    for given in (x, plain):
        loss(given, torch.zeros(64)).backward()
    assert (x.grad.decode() - plain.grad).norm() <= 2e-3 * plain.grad.norm()
