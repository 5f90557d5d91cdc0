"""Functions computed on values: special ones, distances, samplers, bags, segments."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.scaled import ScaledTensor
from halfulp.testing import check_rule


def positive():
    return (torch.rand(20) * 3 + 0.5,)


def pair():
    return torch.rand(20) + 0.5, torch.rand(20) + 0.5


UNARY = "lgamma digamma i0 special.log_ndtr special.erfcx special.entr special.bessel_y0 special.modified_bessel_k1"
BINARY = "xlogy special.xlog1py logaddexp logaddexp2 nextafter special.zeta ldexp"


def function(name):
    return torch.special.__dict__[name.removeprefix("special.")] if "." in name else getattr(torch, name)


@pytest.mark.parametrize("name", UNARY.split())
def test_one_argument(seed, name):
    check_rule(function(name), positive, seed=seed, trials=3, gradients=False)


@pytest.mark.parametrize("name", BINARY.split())
def test_two_arguments(seed, name):
    check_rule(function(name), pair, seed=seed, trials=3, gradients=False, exact=1e-6)


@pytest.mark.parametrize("name", ["lgamma", "digamma", "xlogy", "logaddexp", "special.entr"])
def test_gradients(seed, name):
    arguments = pair if name in BINARY.split() else positive
    check_rule(function(name), arguments, seed=seed, trials=3, exact=1e-5)


def test_orders_and_polynomials(seed):
    check_rule(lambda x: torch.polygamma(2, x), positive, seed=seed, trials=3, exact=1e-5)
    check_rule(lambda x: torch.special.multigammaln(x + 2, 2), positive, seed=seed, trials=3, exact=1e-5)
    for name in ("chebyshev_polynomial_t", "hermite_polynomial_h", "legendre_polynomial_p"):
        check_rule(function(f"special.{name}"), lambda: (*positive(), torch.tensor(3)), seed=seed, gradients=False)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, float("inf")])
def test_distances(seed, p):
    check_rule(lambda x, y: torch.cdist(x, y, p), lambda: (torch.randn(5, 3), torch.randn(4, 3)), seed=seed, exact=1e-4)
    check_rule(lambda x: F.pdist(x, p), lambda: (torch.randn(5, 3),), seed=seed, trials=3, exact=1e-4)


def test_products_and_norms(seed):
    check_rule(torch.linalg.cross, lambda: (torch.randn(5, 3), torch.randn(5, 3)), seed=seed, trials=3, exact=1e-6)
    check_rule(lambda x: torch.renorm(x, 2, 0, 1.0), lambda: (torch.randn(5, 3),), seed=seed, trials=3, exact=1e-5)
    check_rule(lambda x, y: torch.dist(x, y), lambda: (torch.randn(5), torch.randn(5)), seed=seed, exact=1e-5)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_samplers(seed, mode):
    def plane():
        return torch.randn(2, 3, 5, 5), torch.rand(2, 4, 4, 2) * 2 - 1

    def space():
        return torch.randn(1, 2, 3, 4, 5), torch.rand(1, 2, 3, 2, 3) * 2 - 1

    def sample(x, grid):
        return F.grid_sample(x, grid, mode=mode, align_corners=False)

    check_rule(sample, plane, seed=seed, trials=3)
    if mode != "bicubic":
        check_rule(sample, space, seed=seed, trials=3)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_and_segments(seed, mode):
    index, offsets = torch.randint(0, 6, (10,)), torch.tensor([0, 3, 7])
    check_rule(
        lambda w: F.embedding_bag(index, w, offsets, mode=mode), lambda: (torch.randn(6, 4),), seed=seed, trials=3
    )
    check_rule(
        lambda x: torch.segment_reduce(x, mode, lengths=torch.tensor([2, 3, 5])),
        lambda: (torch.randn(10),),
        seed=seed,
        trials=3,
    )


def test_weighted_bags(seed):
    index, offsets = torch.randint(0, 6, (10,)), torch.tensor([0, 3, 7])
    check_rule(
        lambda w, s: F.embedding_bag(index, w, offsets, mode="sum", per_sample_weights=s),
        lambda: (torch.randn(6, 4), torch.rand(10)),
        seed=seed,
        trials=3,
    )


def test_ctc_loss(seed):
    targets, lengths = torch.randint(1, 5, (2, 3)), (torch.full((2,), 8), torch.full((2,), 3))
    check_rule(
        lambda x: F.ctc_loss(x.log_softmax(-1), targets, *lengths),
        lambda: (torch.randn(8, 2, 5),),
        seed=seed,
        trials=3,
        exact=1e-5,
    )


def test_ctc_loss_of_long_sequences_in_float16(seed):
    """Losses of thousands, whose rounding to float16 is no small number under an exponential."""
    targets, lengths = torch.randint(1, 20, (2, 30)), (torch.full((2,), 500), torch.full((2,), 30))
    x = ScaledTensor.encode((torch.randn(500, 2, 20) * 3).log_softmax(-1)).requires_grad_()
    plain = x.detach().decode().requires_grad_()
    for given in (x, plain):
        F.ctc_loss(given, targets, *lengths, reduction="sum").backward()
    torch.testing.assert_close(x.grad.decode(), plain.grad, rtol=1e-2, atol=1e-2)


def test_sparse_gradients_are_plain():
    weight = ScaledTensor.encode(torch.randn(5, 2)).requires_grad_()
    index = torch.tensor([1, 3, 1])
    F.embedding(index, weight, sparse=True).sum().backward()
    assert weight.grad.is_sparse
    assert weight.grad.to_dense()[:, 0].tolist() == [0, 2, 0, 1, 0]


def test_float16_payloads(seed):
    for name in UNARY.split():
        x = ScaledTensor.encode(*positive())
        torch.testing.assert_close(function(name)(x).decode(), function(name)(x.decode()), rtol=1e-2, atol=1e-2)
