"""Generation, geometry and graphs, of the registry of formulas."""

import math

import torch
from torch.nn import functional as F

from ._registry import formula, probabilities, to_target


def _vae(h, p, d):
    mu, log_var = h.chunk(2, -1)
    z = mu + torch.exp(0.5 * log_var) * d.t[:, :16]
    return F.mse_loss(z @ p.w[:16], d.t) - 0.5 * torch.mean(1 + log_var - mu.pow(2) - log_var.exp())


def _vq(h, p, d):
    distance = h.pow(2).sum(1, keepdim=True) - 2 * h @ p.w.T + p.w.pow(2).sum(1)
    z = p.w[distance.argmin(1)]
    share = F.softmax(-distance, -1).mean(0)
    return F.mse_loss(z, h.detach()) + 0.25 * F.mse_loss(h, z.detach()) + (share * (share + 1e-10).log()).sum()


def _coupling(h, p, d):
    log_scale = torch.tanh(h[:, :16]) * p.s
    y = d.t[:, :16] * torch.exp(log_scale) + h[:, 16:]
    return (0.5 * y.pow(2).sum(-1) - log_scale.sum(-1)).mean()


def _flow(h, p, d):
    return (0.5 * (h @ p.w).pow(2).sum(-1)).mean() - torch.linalg.slogdet(p.w + 3 * torch.eye(32))[1]


def _edm(h, p, d):
    sigma = torch.exp(1.2 * d.r - 1.2)[:, None]
    skip, out = 0.25 / (sigma**2 + 0.25), sigma * 0.5 / (sigma**2 + 0.25).sqrt()
    weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
    return (weight * (skip * (d.u + sigma * d.t) + out * h - d.u) ** 2).mean()


def _nerf(h, p, d):
    alpha = 1 - torch.exp(-F.relu(h[:, :16]) * 0.1)
    through = torch.cumprod(torch.cat([torch.ones(16, 1), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    return F.mse_loss((alpha * through)[..., None] * torch.sigmoid(h[:, 16:, None]), d.u[:, :16, None])


def _boxes(h, p, d):
    a, b = torch.sigmoid(h[:, :4]), d.u[:, :4]
    low, high = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, :2] + a[:, 2:], b[:, :2] + b[:, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    union = a[:, 2:].prod(-1) + b[:, 2:].prod(-1) - both + 1e-7
    angle = torch.atan(b[:, 2] / (b[:, 3] + 1e-7)) - torch.atan(a[:, 2] / (a[:, 3] + 1e-7))
    return (1 - both / union + 4 / math.pi**2 * angle**2 + ((a[:, :2] - b[:, :2]) ** 2).sum(-1)).mean()


def _rotation(h, p, d):
    x, y = h[:, :3], h[:, 3:6]
    x = F.normalize(x, dim=-1)
    y = F.normalize(y - (x * y).sum(-1, keepdim=True) * x, dim=-1)
    r = torch.stack([x, y, torch.linalg.cross(x, y)], -1)
    trace = r.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.acos(((trace - 1) / 2).clamp(-1 + 1e-6, 1 - 1e-6)).mean()


def _ssim(h, p, d):
    x, y = torch.sigmoid(h), d.u
    mx, my = x.mean(-1), y.mean(-1)
    vx, vy, both = x.var(-1), y.var(-1), ((x - mx[:, None]) * (y - my[:, None])).mean(-1)
    return 1 - ((2 * mx * my + 1e-4) * (2 * both + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))).mean()


def _graph(h, p, d):
    to = d.y % 16
    scores = F.leaky_relu(h[to] @ p.v[:, None] + h @ p.v[:, None], 0.2).squeeze(-1)
    weight = torch.exp(scores - scores.max())
    total = torch.zeros(16).index_add(0, to, weight) + 1e-16
    return torch.zeros(16, 32).index_add(0, to, (weight / total[to])[:, None] * h)


formula("VAE", "pytorch/examples", _vae)
formula("VQ", "taming-transformers", _vq)
formula("affine coupling", "RealNVP", _coupling)
formula("invertible matrix", "Glow", _flow)
formula("EDM", "NVlabs/edm", _edm)
formula("volume rendering", "NeRF", _nerf)
formula("complete IoU", "YOLOv5", _boxes)
formula("geodesic of 6-D rotations", "PyTorch3D", _rotation)
formula("SSIM", "monodepth2", _ssim)
formula(
    "soft argmax",
    "pose estimation",
    lambda h, p, d: ((probabilities(h * 4) * torch.arange(32)).sum(-1) - d.y).pow(2).mean(),
)
formula(
    "Chamfer distance",
    "PyTorch3D",
    lambda h, p, d: (lambda c: c.min(1)[0].mean() + c.min(0)[0].mean())((h[:, None] - d.t[None]).pow(2).sum(-1)),
)
to_target("graph attention", "GAT", _graph)
to_target(
    "Fourier features", "NeRF", lambda h, p, d: torch.cat([torch.sin(2.0**k * h[:, :8] / 4) for k in range(4)], -1)
)
to_target("soft quantiser", "SoftVQ", lambda h, p, d: probabilities(-torch.cdist(h, p.w)) @ p.w)
