"""Policies and preferences, of the registry of formulas."""

import math

import torch
from torch.nn import functional as F

from ._registry import chosen, formula, pairs, probabilities


def _reinforce(h, p, d):
    return -(chosen(probabilities(h), d.y).log() * d.r).mean()


def _categorical(h, p, d):
    q = torch.distributions.Categorical(probabilities(h))
    return -(q.log_prob(d.y) * d.r).mean() - 0.01 * q.entropy().mean()


def _ppo(h, p, d):
    log = chosen(F.log_softmax(h, -1), d.y)
    ratio = (log - log.detach() - 0.1 * d.u[:, 0]).exp()
    gain = (d.r - d.r.mean()) / (d.r.std() + 1e-8)
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def _value_clip(h, p, d):
    old = d.t[:, 0]
    clipped = old + (h[:, 0] - old).clamp(-0.2, 0.2)
    return 0.5 * torch.max((h[:, 0] - d.r) ** 2, (clipped - d.r) ** 2).mean()


def _gaussian(h, d):
    """Mean, deviation and a draw, as SAC has them."""
    mu, log_std = h.chunk(2, -1)
    std = log_std.clamp(-20, 2).exp()
    return mu, std, mu + std * d.t[:, :16]


def _sac(h, p, d):
    mu, std, u = _gaussian(h, d)
    log = -0.5 * ((u - mu) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
    return (log - torch.log(1 - torch.tanh(u).pow(2) + 1e-6)).sum(-1).mean()


def _sac_stable(h, p, d):
    mu, std, u = _gaussian(h, d)
    log = -0.5 * ((u - mu) / std) ** 2 - std.log()
    return (log.sum(-1) - (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)).mean()


def _gaussian_kl(h, p, d):
    (a, sa), (b, sb) = ((x[:, :16], x[:, 16:].clamp(-5, 5).exp()) for x in pairs(h))
    return (torch.log(sb / sa) + (sa**2 + (a - b) ** 2) / (2 * sb**2) - 0.5).sum(-1).mean()


def _v_trace(h, p, d):
    rho = torch.exp(chosen(F.log_softmax(h, -1), d.y) - chosen(F.log_softmax(d.t, -1), d.y)).clamp(max=1)
    value = h @ p.v / 8
    return (rho * (d.r[:-1].mean() + 0.99 * value.roll(1) - value)).pow(2).mean()


def _cql(h, p, d):
    return (torch.logsumexp(h, -1) - chosen(h, d.y)).mean() + F.mse_loss(chosen(h, d.y), d.r)


def _expectile(h, p, d):
    gap = d.r - h[:, 0]
    return (torch.where(gap > 0, 0.7, 0.3) * gap**2).mean()


def _awr(h, p, d):
    weight = torch.exp((d.r - h[:, 0]).detach() / 0.5).clamp(max=20)
    return -(weight * chosen(F.log_softmax(h, -1), d.y)).mean() + F.mse_loss(h[:, 0], d.r)


def _mpo(h, p, d):
    eta = F.softplus(p.s) + 1e-3
    return (eta * 0.1 + eta * (torch.logsumexp(h / eta, -1) - math.log(32)).mean()).sum()


def _preferences(h, d):
    """Log-ratios of two answers' likelihoods to a reference."""
    a, b = (chosen(F.log_softmax(x, -1), y) for x, y in zip(pairs(h), (d.y[:8], d.y[8:])))
    return a + 3.5 + 0.1 * d.r[:8], b + 3.5 + 0.1 * d.r[8:]


def _dpo(h, p, d):
    a, b = _preferences(h, d)
    return -F.logsigmoid(0.1 * (a - b)).mean()


def _kto(h, p, d):
    a, b = _preferences(h, d)
    return (1 - torch.sigmoid(0.1 * a)).mean() + (1 - torch.sigmoid(-0.1 * b)).mean()


def _orpo(h, p, d):
    a, b = (chosen(F.log_softmax(x, -1), y) for x, y in zip(pairs(h), (d.y[:8], d.y[8:])))
    odds = (a - b) - (torch.log1p(-torch.exp(a)) - torch.log1p(-torch.exp(b)))
    return -a.mean() - 0.1 * F.logsigmoid(odds).mean()


def _grpo(h, p, d):
    log = chosen(F.log_softmax(h, -1), d.y)
    reference = -3.5 + 0.1 * d.r
    k3 = torch.exp(reference - log) - (reference - log) - 1
    return -((log - log.detach()).exp() * (d.r - d.r.mean()) / (d.r.std() + 1e-4) - 0.04 * k3).mean()


formula("REINFORCE on probabilities", "pytorch/examples", _reinforce)
formula("Categorical of probabilities", "A2C tutorials", _categorical)
formula("PPO", "openai/baselines", _ppo)
formula("PPO's values", "openai/baselines", _value_clip)
formula("SAC's tanh", "rail-berkeley/softlearning", _sac)
formula("SAC's tanh, stable", "openai/spinningup", _sac_stable)
formula("KL of Gaussians", "TRPO ports", _gaussian_kl)
formula("V-trace", "torchbeast", _v_trace)
formula("conservative Q", "aviralkumar2907/CQL", _cql)
formula("expectiles", "IQL", _expectile)
formula("advantage weights", "AWR", _awr)
formula("MPO's dual", "acme", _mpo)
formula("DPO", "huggingface/trl", _dpo)
formula("KTO", "huggingface/trl", _kto)
formula("ORPO", "huggingface/trl", _orpo)
formula("GRPO", "huggingface/trl", _grpo)
