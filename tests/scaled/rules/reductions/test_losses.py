"""Losses: bits do not depend on scales, and a loss has a number and gradients."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.scaled import ScaledTensor
from halfulp.subclass import strict
from halfulp.testing import check_rule

LABELS = torch.tensor([1, 0, 3, -100])
SIGNS = torch.tensor([[1.0, -1.0, 1.0, -1.0]])


def one():
    return (torch.randn(4, 4),)


def pair():
    return torch.randn(4, 4), torch.randn(4, 4)


def shares():
    return torch.rand(4, 4) * 0.9 + 0.05, torch.rand(4, 4)


def images():
    return (torch.randn(2, 4, 2, 3),)


CASES = {
    "nll": (lambda x: F.nll_loss(x, LABELS), one),
    "nll one": (lambda x: F.nll_loss(x[0], LABELS[0]), one),
    "nll sum": (lambda x: F.nll_loss(x, LABELS, reduction="sum"), one),
    "nll weights": (lambda x, w: F.nll_loss(x, LABELS, w[0].detach().abs()), pair),
    "nll images": (lambda x: F.nll_loss(x, torch.arange(12).view(2, 2, 3) % 4), images),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS), one),
    "cross_entropy none": (lambda x: F.cross_entropy(x, LABELS, reduction="none"), one),
    "cross_entropy smooth": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1), one),
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
    "soft_margin": (lambda x: F.soft_margin_loss(x, SIGNS.expand(4, 4)), one),
    "multi_margin": (lambda x: F.multi_margin_loss(x, LABELS.clamp(min=0)), one),
    "multilabel_margin": (lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, 0, -1, 0]]).expand(4, 4)), one),
    "hinge_embedding": (lambda x: F.hinge_embedding_loss(x, SIGNS.expand(4, 4)), one),
    "margin_ranking": (lambda x, t: F.margin_ranking_loss(x, t, SIGNS.expand(4, 4), 0.1), pair),
    "triplet": (lambda x, t: F.triplet_margin_loss(x, t, x + t), pair),
    "cosine_embedding": (lambda x, t: F.cosine_embedding_loss(x, t, SIGNS[0]), pair),
    "poisson": (lambda x, t: F.poisson_nll_loss(x, t.abs()), pair),
    "gaussian": (lambda x, t: F.gaussian_nll_loss(x, t, t.detach().abs() + 0.1), pair),
    "softmax": (lambda x: x.softmax(1), one),
    "log_softmax": (lambda x: x.log_softmax(0), one),
}


@pytest.mark.parametrize("case", CASES)
def test_under_all_scales(case, seed):
    with strict():
        check_rule(*CASES[case], seed=seed, trials=2, exact=1e-5)


@pytest.mark.parametrize("case", ["nll images", "cross_entropy", "mse", "l1", "huber", "bce_with_logits", "softmax"])
def test_narrow_payloads(case, differences, seed):
    function, make = CASES[case]
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
