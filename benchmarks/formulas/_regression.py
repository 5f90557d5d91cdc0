"""Regression and likelihoods, of the registry of formulas."""

import math

import torch
from torch.nn import functional as F

from ._registry import formula


def _gaussian_nll(h, p, d):
    mu, log_var = h.chunk(2, -1)
    return 0.5 * (log_var + (d.t[:, :16] - mu) ** 2 / log_var.exp()).mean()


def _student(h, p, d):
    df, scale = F.softplus(p.s) + 2, F.softplus(h[:, 16:]) + 1e-6
    z = (d.t[:, :16] - h[:, :16]) / scale
    log = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * torch.log(df * math.pi) - scale.log()
    return -(log - (df + 1) / 2 * torch.log1p(z**2 / df)).mean()


def _negative_binomial(h, p, d):
    mu, theta, x = F.softplus(h) + 1e-4, F.softplus(p.v) + 1e-4, (d.u * 20).floor()
    log = torch.log(theta + mu + 1e-8)
    return -(
        theta * (torch.log(theta + 1e-8) - log)
        + x * (torch.log(mu + 1e-8) - log)
        + torch.lgamma(x + theta)
        - torch.lgamma(theta)
        - torch.lgamma(x + 1)
    ).mean()


def _mixture(h, p, d):
    weight, mu, log_sigma = h[:, :8], h[:, 8:16], h[:, 16:24].clamp(-7, 7)
    log = -0.5 * ((d.r[:, None] - mu) / log_sigma.exp()) ** 2 - log_sigma - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(F.log_softmax(weight, -1) + log, -1).mean()


def _logistic_mixture(h, p, d):
    mean, log_scale = h[:, :16], h[:, 16:].clamp(min=-7)
    x = d.u[:, :16] * 2 - 1
    inverse = torch.exp(-log_scale)
    high, low = torch.sigmoid(inverse * (x - mean + 1 / 255)), torch.sigmoid(inverse * (x - mean - 1 / 255))
    return -torch.log((high - low).clamp(min=1e-12)).mean()


def _crps(h, p, d):
    mu, sigma = h[:, 0], F.softplus(h[:, 1]) + 1e-3
    z = (d.r - mu) / sigma
    pdf, cdf = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi), 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    return (sigma * (z * (2 * cdf - 1) + 2 * pdf - 1 / math.sqrt(math.pi))).mean()


def _evidential_regression(h, p, d):
    g, v, a, b = h[:, 0], F.softplus(h[:, 1]) + 1e-6, F.softplus(h[:, 2]) + 1, F.softplus(h[:, 3]) + 1e-6
    two = 2 * b * (1 + v)
    nll = 0.5 * torch.log(math.pi / v) - a * torch.log(two) + (a + 0.5) * torch.log(v * (d.r - g) ** 2 + two)
    return (nll + torch.lgamma(a) - torch.lgamma(a + 0.5)).mean()


def _quantile_huber(h, p, d):
    u = d.t[:, None, :] - h[:, :, None]
    huber = torch.where(u.abs() <= 1, 0.5 * u.pow(2), u.abs() - 0.5)
    return ((torch.arange(32)[:, None] / 32 + 1 / 64 - (u.detach() < 0).float()).abs() * huber).sum(1).mean()


formula("F.mse_loss", "torch", lambda h, p, d: F.mse_loss(h, d.t))
formula("F.smooth_l1_loss", "Fast R-CNN", lambda h, p, d: F.smooth_l1_loss(h, d.t))
formula("log-cosh", "regression losses", lambda h, p, d: torch.log(torch.cosh((h - d.t).clamp(-40, 40))).mean())
formula("log-cosh, stable", "keras ports", lambda h, p, d: (h - d.t + F.softplus(-2 * (h - d.t)) - math.log(2)).mean())
formula("Charbonnier", "EDSR, BasicSR", lambda h, p, d: torch.sqrt((h - d.t) ** 2 + 1e-12).mean())
formula("relative error", "forecasting", lambda h, p, d: ((h - d.t).abs() / ((h.abs() + d.t.abs()) / 2 + 1e-8)).mean())
formula("RMSE", "kaggle kernels", lambda h, p, d: torch.sqrt(F.mse_loss(h, d.t) + 1e-6))
formula("RMSLE", "kaggle kernels", lambda h, p, d: (torch.log1p(F.relu(h)) - torch.log1p(d.u * 9)).pow(2).mean().sqrt())
formula("Gaussian likelihood", "Kendall and Gal", _gaussian_nll)
formula("Laplace likelihood", "monodepth2 ports", lambda h, p, d: ((h - d.t).abs() * torch.exp(-p.v) + p.v).mean())
formula("Student's t likelihood", "gluonts", _student)
formula(
    "Poisson likelihood",
    "F.poisson_nll_loss",
    lambda h, p, d: (torch.exp(h.clamp(max=10)) - (d.u * 9).floor() * h).mean(),
)
formula("negative binomial", "scVI", _negative_binomial)
formula("mixture density", "MDN ports", _mixture)
formula("logistic mixture", "PixelCNN++", _logistic_mixture)
formula("CRPS", "properscoring ports", _crps)
formula("evidential regression", "aamini/evidential-deep-learning", _evidential_regression)
formula(
    "von Mises",
    "angular regression",
    lambda h, p, d: (
        -(
            F.softplus(h[:, 0]) * torch.cos(h[:, 1] - d.r) - torch.log(torch.i0(F.softplus(h[:, 0]).clamp(max=20)))
        ).mean()
    ),
)
formula(
    "uncertainty weights",
    "Kendall, Gal and Cipolla",
    lambda h, p, d: (torch.exp(-p.s) * F.mse_loss(h, d.t) + p.s).sum(),
)
formula("PSNR", "super-resolution", lambda h, p, d: 10 * torch.log10(F.mse_loss(h, d.t) + 1e-8))
formula("SI-SDR", "asteroid", lambda h, p, d: _si_sdr(h - h.mean(-1, True), d.t - d.t.mean(-1, True)))
formula("quantile Huber", "QR-DQN", _quantile_huber)
formula(
    "total variation",
    "neural style",
    lambda h, p, d: (h[1:] - h[:-1]).abs().sum() + torch.sqrt((h[:, 1:] - h[:, :-1]) ** 2 + 1e-8).sum(),
)


def _si_sdr(x, target):
    projected = (x * target).sum(-1, keepdim=True) * target / (target.pow(2).sum(-1, keepdim=True) + 1e-8)
    return -10 * torch.log10(projected.pow(2).sum(-1) / ((x - projected).pow(2).sum(-1) + 1e-8) + 1e-8).mean()
