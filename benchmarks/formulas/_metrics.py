"""Contrast, embeddings and distances, of the registry of formulas."""

import math

import torch
from torch.nn import functional as F

from ._registry import formula, pairs, unit


def _info_nce(h, p, d):
    a, b = (unit(x) for x in pairs(h))
    return F.cross_entropy(a @ b.T / 0.07, torch.arange(8))


def _info_nce_exp(h, p, d):
    z = unit(h)
    weights = (z @ z.T / 0.5).exp() * ~torch.eye(16, dtype=torch.bool)
    positive = (unit(h[:8]) * unit(h[8:])).sum(-1).div(0.5).exp().repeat(2)
    return -torch.log(positive / weights.sum(-1)).mean()


def _clip(h, p, d):
    a, b = (F.normalize(x, dim=-1) for x in pairs(h))
    logits = p.s.exp() * a @ b.T
    return (F.cross_entropy(logits, torch.arange(8)) + F.cross_entropy(logits.T, torch.arange(8))) / 2


def _siglip(h, p, d):
    a, b = (F.normalize(x, dim=-1) for x in pairs(h))
    return -F.logsigmoid((2 * torch.eye(8) - 1) * (a @ b.T * p.s.exp() - 1)).sum() / 8


def _supcon(h, p, d):
    z = F.normalize(h, dim=1)
    logits = z @ z.T / 0.1
    logits = logits - logits.max(1, keepdim=True)[0].detach()
    other = 1 - torch.eye(16)
    same = (d.y[:, None] % 4 == d.y % 4).float() * other
    logs = logits - torch.log((logits.exp() * other).sum(1, keepdim=True))
    return -((same * logs).sum(1) / same.sum(1).clamp(min=1)).mean()


def _barlow(h, p, d):
    a, b = ((x - x.mean(0)) / x.std(0) for x in pairs(h))
    c = a.T @ b / 8
    on = torch.eye(32, dtype=torch.bool)
    return ((c - 1) ** 2 * on).sum() + 5e-3 * (c**2 * ~on).sum()


def _vicreg(h, p, d):
    x = h - h.mean(0)
    cov = x.T @ x / 15
    off = cov.pow(2).sum() - cov.diagonal().pow(2).sum()
    return F.relu(1 - torch.sqrt(x.var(0) + 1e-4)).mean() + off / 32


def _arcface(h, p, d):
    cos = F.normalize(h) @ F.normalize(p.w).T
    theta = torch.acos(cos.clamp(-1 + 1e-7, 1 - 1e-7))
    one = F.one_hot(d.y, 32)
    return F.cross_entropy(30 * (one * torch.cos(theta + 0.5) + (1 - one) * cos), d.y)


def _cosface_sine(h, p, d):
    cos = F.normalize(h) @ F.normalize(p.w).T
    phi = cos * math.cos(0.5) - torch.sqrt((1.0 - cos.pow(2)).clamp(0, 1)) * math.sin(0.5)
    return F.cross_entropy(16 * torch.where(F.one_hot(d.y, 32) > 0, phi, cos), d.y)


def _mmd(h, p, d):
    distances = (h[:, None] - d.t[None]).pow(2).sum(-1)
    return torch.exp(-distances / distances.mean()).mean() + sum(torch.exp(-distances / s).mean() for s in (16, 64))


def _tsne(h, p, d):
    q = 1 / (1 + (h[:, None] - h[None]).pow(2).sum(-1))
    q = q * (1 - torch.eye(16))
    q = q / q.sum()
    wanted = F.softmax(d.t[:, :16], -1) / 16
    return (wanted * torch.log(wanted / (q + 1e-8))).sum()


def _dec(h, p, d):
    q = 1.0 / (1.0 + ((h[:, None] - p.w[None]) ** 2).sum(-1))
    q = q / q.sum(1, keepdim=True)
    weight = (q**2 / q.sum(0)).detach()
    weight = weight / weight.sum(1, keepdim=True)
    return F.kl_div(q.log(), weight, reduction="batchmean")


def _sinkhorn(h, p, d):
    q = torch.exp(h / 8 - (h / 8).detach().max()).T
    q = q / q.sum()
    for _ in range(3):
        q = q / q.sum(1, keepdim=True) / 32
        q = q / q.sum(0, keepdim=True) / 16
    return (q * d.t.T).sum() * 16


def _sinkhorn_log(h, p, d):
    a = h / 2
    for _ in range(3):
        a = a - torch.logsumexp(a, 1, keepdim=True)
        a = a - torch.logsumexp(a, 0, keepdim=True)
    return (a.exp() * d.t).sum()


def _mine(h, p, d):
    return -(h[:, 0].mean() - (torch.logsumexp(h[:, 1], 0) - math.log(16)))


def _poincare(h, p, d):
    u, v = (0.9 * torch.tanh(x.norm(dim=-1, keepdim=True)) * unit(x) for x in pairs(h))
    top = ((u - v) ** 2).sum(-1)
    return torch.acosh(1 + 2 * top / ((1 - (u**2).sum(-1)) * (1 - (v**2).sum(-1)))).mean()


def _lorentz(h, p, d):
    a, b = pairs(h)
    at, bt = (torch.sqrt(1 + x.pow(2).sum(-1)) for x in (a, b))
    return torch.acosh((at * bt - (a * b).sum(-1)).clamp(min=1 + 1e-7)).mean()


def _rotate(h, p, d):
    phase = p.v[:16] * math.pi
    re = h[:, :16] * phase.cos() - h[:, 16:] * phase.sin() - d.t[:, :16]
    im = h[:, :16] * phase.sin() + h[:, 16:] * phase.cos() - d.t[:, 16:]
    return F.softplus(torch.stack([re, im]).norm(dim=0).sum(-1) - 6).mean()


formula("InfoNCE, rows without eps", "MoCo", _info_nce)
formula("NT-Xent by exp", "SimCLR ports", _info_nce_exp)
formula("CLIP", "openai/CLIP", _clip)
formula("SigLIP", "big_vision", _siglip)
formula("SupCon", "HobbitLong/SupContrast", _supcon)
formula(
    "BYOL",
    "lucidrains/byol-pytorch",
    lambda h, p, d: (2 - 2 * (F.normalize(h[:8], dim=-1) * F.normalize(h[8:], dim=-1)).sum(-1)).mean(),
)
formula("Barlow Twins", "facebookresearch/barlowtwins", _barlow)
formula("VICReg", "facebookresearch/vicreg", _vicreg)
formula(
    "triplet margin",
    "FaceNet",
    lambda h, p, d: F.relu((h[:5] - h[5:10]).pow(2).sum(1) - (h[:5] - h[10:15]).pow(2).sum(1) + 0.2).mean(),
)
formula("ArcFace by acos", "insightface", _arcface)
formula("ArcFace by sines", "ronghuaiyang/arcface-pytorch", _cosface_sine)
formula(
    "center loss",
    "KaiyangZhou/pytorch-center-loss",
    lambda h, p, d: (h - p.w[d.y]).pow(2).sum(1).clamp(1e-12, 1e12).mean(),
)
formula("MMD", "domain adaptation", _mmd)
formula("CORAL", "domainbed", lambda h, p, d: (torch.cov(h.T) - torch.cov(d.t.T)).pow(2).mean())
formula("t-SNE", "parametric t-SNE", _tsne)
formula("deep clustering", "DEC", _dec)
formula("Sinkhorn, exp", "SwAV", _sinkhorn)
formula("Sinkhorn, log", "SuperGlue", _sinkhorn_log)
formula("MINE", "MINE ports", _mine)
formula("Poincare distance", "facebookresearch/poincare-embeddings", _poincare)
formula("Lorentz distance", "geoopt", _lorentz)
formula("RotatE", "KnowledgeGraphEmbedding", _rotate)
formula("TransE", "OpenKE", lambda h, p, d: F.softplus((h + p.v - d.t).norm(p=1, dim=-1) - 12).mean())
formula(
    "GloVe",
    "stanfordnlp/GloVe ports",
    lambda h, p, d: ((d.u * 50 / 100).clamp(max=1) ** 0.75 * (h @ p.w - torch.log(d.u * 50 + 1)) ** 2).mean(),
)
formula(
    "energy score", "scoringrules", lambda h, p, d: torch.cdist(h, d.t).mean() - 0.5 * torch.cdist(h[:8], h[8:]).mean()
)
formula(
    "cosine similarity",
    "sentence-transformers",
    lambda h, p, d: F.mse_loss(F.cosine_similarity(h[:8], h[8:]), d.u[:8, 0]),
)
formula(
    "orthogonality",
    "SRIP",
    lambda h, p, d: (p.w.T @ p.w - torch.eye(32)).norm() + (h.T @ h / 16 - torch.eye(32)).pow(2).sum(),
)
formula("group lasso", "structured pruning", lambda h, p, d: p.w.norm(dim=1).sum() + h.norm(dim=0).sum())
