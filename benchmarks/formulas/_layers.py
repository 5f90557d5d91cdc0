"""Normalisations and activations by hand, of the registry of formulas."""

import math

import torch
from torch.nn import functional as F

from ._registry import to_target, unit


def _rms_norm(h, p, d):
    return p.v * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))


def _layer_norm(h, p, d):
    return p.v * (h - h.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5)


def _group_norm(h, p, d):
    x = h.view(16, 4, 8)
    x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
    return x.view(16, 32) * p.v


def _adain(h, p, d):
    x = (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True) + 1e-5).sqrt()
    return x * p.w[0].std() + p.w[0].mean()


def _squash(h, p, d):
    x = h.view(16, 4, 8)
    square = (x**2).sum(-1, keepdim=True)
    return (square / (1 + square) * x / torch.sqrt(square + 1e-8)).view(16, 32)


def _demodulated(h, p, d):
    w = p.w[None] * (h[:, None] + 1)
    w = w * torch.rsqrt(w.pow(2).sum(-1, keepdim=True) + 1e-8)
    return (w @ d.t[:, :, None]).squeeze(-1)


def _spectral(h, p, d):
    v = F.normalize(p.w.T @ d.t[0], dim=0)
    u = F.normalize(p.w @ v, dim=0)
    return h @ (p.w / (u @ (p.w @ v))).T


def _standardised(h, p, d):
    w = p.w - p.w.mean(1, keepdim=True)
    return h @ (w / (w.std(1, keepdim=True) + 1e-5)).T / 6


def _minibatch_std(h, p, d):
    return h * torch.sqrt((h - h.mean(0)).pow(2).mean(0) + 1e-8).mean()


to_target("RMS norm", "LLaMA", _rms_norm)
to_target("layer norm", "annotated transformer", _layer_norm)
to_target(
    "batch norm", "d2l.ai", lambda h, p, d: p.v * (h - h.mean(0)) / torch.sqrt(((h - h.mean(0)) ** 2).mean(0) + 1e-5)
)
to_target("group norm", "audio models", _group_norm)
to_target("AdaIN", "StyleGAN ports", _adain)
to_target(
    "pixel norm", "Progressive GAN", lambda h, p, d: h * torch.rsqrt(torch.mean(h**2, dim=1, keepdim=True) + 1e-8)
)
to_target("scale norm", "x-transformers", lambda h, p, d: h / h.norm(dim=-1, keepdim=True).clamp(min=1e-5) * p.s)
to_target("rows of length 1", "metric learning", lambda h, p, d: unit(h))
to_target(
    "weight norm", "Salimans and Kingma", lambda h, p, d: h @ (p.v[:, None] * p.w / p.w.norm(dim=1, keepdim=True)).T
)
to_target("spectral norm", "SN-GAN", _spectral)
to_target("standardised weights", "big transfer", _standardised)
to_target("demodulated weights", "StyleGAN2", _demodulated)
to_target("capsule squash", "CapsNet ports", _squash)
to_target("minibatch deviation", "Progressive GAN", _minibatch_std)
to_target(
    "GRN",
    "ConvNeXt V2",
    lambda h, p, d: (
        p.v * (h * (h.norm(dim=0, keepdim=True) / (h.norm(dim=0, keepdim=True).mean(-1, keepdim=True) + 1e-6))) + h
    ),
)
to_target("dynamic tanh", "DyT", lambda h, p, d: p.v * torch.tanh(p.s * h))


# Activations.
def _gated(name, source, gate):
    def layer(h, p, d):
        a, b = h.chunk(2, -1)
        return gate(a) * b

    layer.width = 16
    to_target(name, source, layer)


to_target(
    "GELU by tanh",
    "GPT-2",
    lambda h, p, d: 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3)))),
)
to_target("GELU by erf", "BERT", lambda h, p, d: h * 0.5 * (1 + torch.erf(h / math.sqrt(2))))
to_target("GELU by sigmoid", "openai/CLIP", lambda h, p, d: h * torch.sigmoid(1.702 * h))
to_target("Swish with a slope", "EfficientNet", lambda h, p, d: h * torch.sigmoid(p.v * h))
to_target("Mish", "YOLOv4", lambda h, p, d: h * torch.tanh(F.softplus(h)))
to_target("squared ReLU", "Primer", lambda h, p, d: F.relu(h) ** 2)
to_target("Snake", "BigVGAN", lambda h, p, d: h + torch.sin(p.v * h) ** 2 / (p.v + 1e-9))
to_target("SIREN", "vsitzmann/siren", lambda h, p, d: torch.sin(3 * h) @ p.w.T)
to_target("SELU", "SNN", lambda h, p, d: 1.0507 * torch.where(h > 0, h, 1.6733 * (h.exp() - 1)))
to_target("ELU", "textbooks", lambda h, p, d: torch.where(h > 0, h, torch.exp(h.clamp(max=0)) - 1))
to_target("softsign", "textbooks", lambda h, p, d: h / (1 + h.abs()))
to_target("softcap", "Gemma 2", lambda h, p, d: 30 * torch.tanh(h / 30))
_gated("GLU", "Dauphin et al.", torch.sigmoid)
_gated("SwiGLU", "LLaMA", F.silu)
_gated("GEGLU", "T5 v1.1", F.gelu)
_gated("WaveNet's gate", "WaveNet ports", lambda a: torch.tanh(a) * torch.sigmoid(a))
