"""Normalisations: bits do not depend on scales, statistics are moved in place, extremes stay finite."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.scaled import ScaledTensor
from halfulp.scaled._registry import FAMILY_BY_OPERATOR
from halfulp.subclass import strict
from halfulp.testing import check_rule

aten = torch.ops.aten


def rows():
    return torch.randn(4, 6), torch.randn(6), torch.randn(6)


def images():
    return torch.randn(3, 4, 5, 2), torch.randn(4), torch.randn(4)


CASES = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), rows),
    "layer_norm plain": (lambda x, w, b: F.layer_norm(x, (4, 6)), rows),
    "layer_norm large eps": (lambda x, w, b: F.layer_norm(x, (6,), w, b, 10.0), rows),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), images),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), images),
    "batch_norm flat": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), rows),
    "batch_norm eval": (lambda x, w, b: F.batch_norm(x, w.detach(), b.detach() ** 2 + 0.1, w, b), images),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), images),
    "fused_rms_norm": (lambda x, w, b: aten._fused_rms_norm(x, (6,), w, 1e-5)[0], rows),
    "local_response_norm": (lambda x, w, b: F.local_response_norm(x, 2), images),
}


@pytest.mark.parametrize("case", CASES)
def test_under_all_scales(case, seed, needs_torch):
    if "rms" in case:
        needs_torch("_fused_rms_norm with its statistics")
    with strict():
        check_rule(*CASES[case], seed=seed, trials=2, exact=1e-5)


@pytest.mark.parametrize("case", ["layer_norm", "group_norm", "batch_norm", "fused_rms_norm"])
def test_narrow_payloads(case, differences, seed, needs_torch):
    if "rms" in case:
        needs_torch("_fused_rms_norm with its statistics")
    function, make = CASES[case]
    shapes = [x.shape for x in make()][: 2 if "rms" in case else 3]
    assert max(differences(lambda x, w, b=None: function(x, w, b), shapes)) < 2e-2


def test_layer_norm_is_exact(seed):
    with strict():
        check_rule(*CASES["layer_norm"], seed=seed, trials=4)


@pytest.mark.parametrize("scaled_statistics", [False, True])
def test_running_statistics_move_as_in_float32(scaled_statistics, seed):
    plain = torch.nn.BatchNorm2d(4)
    mean, variance = torch.zeros(4), torch.ones(4)
    if scaled_statistics:
        mean, variance = (ScaledTensor.encode(x, torch.float32) for x in (mean, variance))
    for _ in range(3):
        x = torch.randn(3, 4, 5, 2) * 3 + 1
        plain(x)
        with strict():
            F.batch_norm(ScaledTensor.encode(x, torch.float32), mean, variance, training=True)
    found = [x.decode() if scaled_statistics else x for x in (mean, variance)]
    assert torch.allclose(found[0], plain.running_mean, rtol=1e-5, atol=1e-6)
    assert torch.allclose(found[1], plain.running_var, rtol=1e-5)


EPS, MOMENTUM = 1e-3, 0.3


def _forward(x, w, b, mean, variance, training):
    """torch's results, and where it moves the running statistics, those."""
    mean, variance = mean.clone(), variance.clone()
    return (*aten.native_batch_norm.default(x, w, b, mean, variance, training, MOMENTUM, EPS), mean, variance)


def _moving(call):
    """An operator that moves running statistics in place, with those as further results."""

    def run(x, w, b, mean, variance, training):
        mean, variance = mean.clone(), variance.clone()
        return (*call(x, w, b, mean, variance, training)[:3], mean, variance)

    return run


# Every operator of a batch normalisation, whatever the order of its arguments: whether it trains, and as which one.
FORWARD = {
    "native_batch_norm": (None, _moving(lambda *a: aten.native_batch_norm.default(*a, MOMENTUM, EPS))),
    "_native_batch_norm_legit": (None, _moving(lambda *a: aten._native_batch_norm_legit.default(*a, MOMENTUM, EPS))),
    "_native_batch_norm_legit.no_stats": (
        True,
        lambda x, w, b, mean, variance, training: aten._native_batch_norm_legit.no_stats(x, w, b, True, MOMENTUM, EPS),
    ),
    "_native_batch_norm_legit_no_training": (
        False,
        _moving(lambda *a: aten._native_batch_norm_legit_no_training.default(*a[:5], MOMENTUM, EPS)),
    ),
    "_native_batch_norm_legit_functional": (
        None,
        lambda *a: aten._native_batch_norm_legit_functional.default(*a, MOMENTUM, EPS),
    ),
    "_batch_norm_with_update": (
        True,
        _moving(lambda *a: aten._batch_norm_with_update.default(*a[:5], MOMENTUM, EPS)),
    ),
    "_batch_norm_with_update_functional": (
        True,
        lambda *a: [
            x
            for i, x in enumerate(aten._batch_norm_with_update_functional.default(*a[:5], MOMENTUM, EPS))
            if i != 3  # the reserve
        ],
    ),
    "_batch_norm_no_update": (False, _moving(lambda *a: aten._batch_norm_no_update.default(*a[:5], MOMENTUM, EPS))),
    "cudnn_batch_norm": (None, _moving(lambda *a: aten.cudnn_batch_norm.default(*a, MOMENTUM, EPS))),
    "miopen_batch_norm": (None, _moving(lambda *a: aten.miopen_batch_norm.default(*a, MOMENTUM, EPS))),
}
BACKWARD = {
    "native_batch_norm_backward": (None, lambda *a: aten.native_batch_norm_backward.default(*a, EPS, [True] * 3)),
    "batch_norm_backward": (
        None,
        lambda *a: aten.batch_norm_backward.default(*a, EPS, [True] * 3, torch.empty(0, dtype=torch.uint8)),
    ),
    "cudnn_batch_norm_backward": (
        True,
        lambda g, x, *a: aten.cudnn_batch_norm_backward.default(x, g, *a[:-1], EPS, torch.empty(0, dtype=torch.uint8)),
    ),
    "miopen_batch_norm_backward": (
        True,
        lambda g, x, *a: aten.miopen_batch_norm_backward.default(x, g, *a[:-1], EPS),
    ),
}


def test_every_batch_normalisation_is_held_to_torchs():
    held = {
        str(x).removeprefix("aten.").removesuffix(".default")
        for x, family in FAMILY_BY_OPERATOR.items()
        if family == "norm"
    }
    assert {name for name in held if "batch_norm" in name} == FORWARD.keys() | BACKWARD.keys()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
@torch.no_grad()
def test_every_batch_normalisation_gives_torchs_results(name, training, seed):
    only, call = (FORWARD | BACKWARD)[name]
    if only is (not training):
        pytest.skip("not what this operator does")
    g, x, w = torch.randn(3, 4, 5), torch.randn(3, 4, 5) * 3 + 1, torch.randn(4)
    mean, variance = torch.randn(4), torch.rand(4) + 0.5
    if name in FORWARD:
        plain, reference = (x, w, torch.randn(4), mean, variance, training), _forward
    else:
        saved = aten.native_batch_norm.default(x, w, None, None, None, True, 0.0, EPS)[1:]
        plain, reference = (g, x, w, mean, variance, *saved, training), BACKWARD["native_batch_norm_backward"][1]
    scaled = [ScaledTensor(y * 8, 0.125) if isinstance(y, torch.Tensor) else y for y in plain]
    with strict():
        found = [y.decode() if isinstance(y, ScaledTensor) else y for y in call(*scaled)]
    for y, wanted in zip(found, reference(*plain)):
        assert torch.allclose(y, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e15])
def test_extremes_stay_finite_with_gradients(size, dtype, seed):
    x = torch.randn(4, 6)
    x[:, :2] = torch.tensor([-1.0, 1.0])  # in a row whose elements are alike, float16 leaves nothing of their spread
    x = x * size
    given = ScaledTensor.encode(x, dtype).requires_grad_()
    y = F.layer_norm(given, (6,))
    g = torch.randn(4, 6)
    y.backward(ScaledTensor.encode(g, dtype))
    wide = x.double().requires_grad_()
    expected = F.layer_norm(wide, (6,))
    expected.backward(g.double())
    assert torch.allclose(y.decode().double(), expected, rtol=2e-2, atol=2e-3)
    difference = (given.grad.decode(torch.float64) - wide.grad).norm() / wide.grad.norm()
    assert difference < 2e-2


def test_zeros_like_have_gradients_of_the_size_that_eps_allows(seed):
    x = torch.zeros_like(ScaledTensor.encode(torch.randn(4, 6), torch.float16)).requires_grad_()
    g = torch.randn(4, 6)
    F.layer_norm(x, (6,)).backward(ScaledTensor.encode(g, torch.float16))
    plain = torch.zeros(4, 6, requires_grad=True)
    F.layer_norm(plain, (6,)).backward(g)
    assert torch.allclose(x.grad.decode(), plain.grad, rtol=1e-2, atol=1e-2 * plain.grad.abs().max())


@pytest.mark.parametrize("exponent", [-36, -24])
def test_what_is_far_below_eps_keeps_its_digits_in_sixteen_bits(exponent, seed):
    x = ScaledTensor.encode(torch.randn(4, 32) * 2.0**exponent)
    for norm in (torch.nn.LayerNorm(32), torch.nn.GroupNorm(4, 32), torch.nn.RMSNorm(32, eps=1e-5)):
        found, wanted = norm(x).detach().decode(), norm(x.decode()).detach()
        assert (found - wanted).norm() <= 2e-3 * wanted.norm()


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
