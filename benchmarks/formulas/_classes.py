"""Distributions and classification, of the registry of formulas."""

import torch
from torch.nn import functional as F

from ._registry import chosen, formula, pairs, probabilities


def _entropy(h, p, d):
    q = probabilities(h)
    return -(q * q.log()).sum(-1).mean()


def _js(h, p, d):
    a, b = (probabilities(x) for x in pairs(h))
    m = 0.5 * (a + b)
    return 0.5 * ((a * (a.log() - m.log())).sum() + (b * (b.log() - m.log())).sum())


def _label_smoothing(h, p, d):
    logs = F.log_softmax(h, -1)
    return (0.9 * -chosen(logs, d.y) - 0.1 * logs.mean(-1)).mean()


def _sigmoid_focal(h, p, d):
    q, t = h.sigmoid(), (d.u > 0.9).float()
    loss = F.binary_cross_entropy_with_logits(h, t, reduction="none")
    right = q * t + (1 - q) * (1 - t)
    return ((0.25 * t + 0.75 * (1 - t)) * loss * (1 - right) ** 2).mean()


def _softmax_focal(h, p, d):
    q = chosen(probabilities(h), d.y)
    return (-((1 - q) ** 2) * q.log()).mean()


def _dice(h, p, d):
    q, t = h.sigmoid(), d.m.float()
    return 1 - (2 * (q * t).sum() + 1) / (q.sum() + t.sum() + 1)


def _tversky(h, p, d):
    q, t = h.sigmoid(), d.m.float()
    hit, wrong, missed = (q * t).sum(), (q * (1 - t)).sum(), ((1 - q) * t).sum()
    return (1 - hit / (hit + 0.3 * wrong + 0.7 * missed + 1e-6)) ** 0.75


def _bce(h, p, d):
    q, t = h.sigmoid(), d.m.float()
    return -(t * torch.log(q + 1e-7) + (1 - t) * torch.log(1 - q + 1e-7)).mean()


def _asymmetric(h, p, d):
    q, t = h.sigmoid(), d.m.float()
    other = (1 - q + 0.05).clamp(max=1)
    loss = t * q.clamp(min=1e-8).log() + (1 - t) * other.clamp(min=1e-8).log()
    return -(loss * (1 - q * t - other * (1 - t)).pow(t + 4 * (1 - t))).sum()


def _poly1(h, p, d):
    return F.cross_entropy(h, d.y) + (1 - chosen(probabilities(h), d.y)).mean()


def _evidential(h, p, d):
    a = F.softplus(h) + 1
    total = a.sum(-1, keepdim=True)
    return (F.one_hot(d.y, 32) * (torch.digamma(total) - torch.digamma(a))).sum(-1).mean()


formula("entropy of a softmax", "openai/baselines, A2C", _entropy)
formula(
    "KL of two softmaxes",
    "TRPO of openai/baselines",
    lambda h, p, d: (lambda a, b: (a * (a.log() - b.log())).sum(-1).mean())(*map(probabilities, pairs(h))),
)
formula("Jensen-Shannon", "AugMix", _js)
formula("F.cross_entropy", "torch", lambda h, p, d: F.cross_entropy(h, d.y))
formula("cross-entropy over a softmax", "textbooks", lambda h, p, d: -chosen(probabilities(h), d.y).log().mean())
formula(
    "cross-entropy over exp and sum",
    "nanoGPT exercises",
    lambda h, p, d: (
        -((h - h.amax(-1, True)).exp() / (h - h.amax(-1, True)).exp().sum(-1, keepdim=True))[torch.arange(16), d.y]
        .log()
        .mean()
    ),
)
formula("label smoothing", "fairseq", _label_smoothing)
formula("focal loss, sigmoid", "torchvision", _sigmoid_focal)
formula("focal loss, softmax", "RetinaNet ports", _softmax_focal)
formula("dice loss", "segmentation_models.pytorch", _dice)
formula("focal Tversky", "segmentation_models.pytorch", _tversky)
formula("binary cross-entropy by hand", "pix2pix ports", _bce)
formula("F.binary_cross_entropy_with_logits", "torch", lambda h, p, d: F.binary_cross_entropy_with_logits(h, d.u))
formula("asymmetric loss", "Alibaba-MIIL/ASL", _asymmetric)
formula("poly-1 loss", "PolyLoss", _poly1)
formula("evidential digamma", "edl-pytorch", _evidential)
formula(
    "distillation",
    "Hinton, HF distillation",
    lambda h, p, d: F.kl_div(F.log_softmax(h / 4, -1), F.softmax(d.t, -1), reduction="batchmean") * 16,
)
formula(
    "reverse KL distillation",
    "MiniLLM",
    lambda h, p, d: (probabilities(h) * (F.log_softmax(h, -1) - F.log_softmax(d.t, -1))).sum(-1).mean(),
)
formula(
    "DINO",
    "facebookresearch/dino",
    lambda h, p, d: (-F.softmax((d.t - d.t.mean(0)) / 0.04, -1) * F.log_softmax(h / 0.1, -1)).sum(-1).mean(),
)
formula(
    "soft cross-entropy of mixup", "timm", lambda h, p, d: (-F.softmax(d.t, -1) * F.log_softmax(h, -1)).sum(-1).mean()
)
formula("hinge of a critic", "BigGAN", lambda h, p, d: F.relu(1 - h[:8]).mean() + F.relu(1 + h[8:]).mean())
formula("non-saturating GAN", "StyleGAN2", lambda h, p, d: F.softplus(-h[:8]).mean() + F.softplus(h[8:]).mean())
formula(
    "GAN by log sigmoid",
    "GAN tutorials",
    lambda h, p, d: -(torch.sigmoid(h[:8]) + 1e-8).log().mean() - (1 - torch.sigmoid(h[8:]) + 1e-8).log().mean(),
)
formula("gradient penalty of norms", "WGAN-GP", lambda h, p, d: ((h.norm(2, dim=1) - 1) ** 2).mean())
formula("log sigmoid by hand", "word2vec ports", lambda h, p, d: -torch.log(torch.sigmoid(h)).mean())
formula(
    "softplus by hand", "WaveRNN ports", lambda h, p, d: torch.log(1 + torch.exp(-h.abs())).mean() + F.relu(h).mean()
)
formula(
    "CTC",
    "DeepSpeech",
    lambda h, p, d: F.ctc_loss(F.log_softmax(h[:, None], -1), d.y[None, :4].clamp(min=1), (16,), (4,)),
)
formula("CRF forward", "pytorch-crf", lambda h, p, d: _crf(h.view(4, 4, 32), p.w))
formula("ordinal logits", "CORN", lambda h, p, d: -(F.logsigmoid(h) * d.m + (F.logsigmoid(h) - h) * ~d.m).mean())
formula("Cox partial likelihood", "pycox", lambda h, p, d: -(h[:, 0] - torch.logcumsumexp(h[:, 0], 0)).mean())
formula(
    "ListNet", "allRank", lambda h, p, d: -(F.softmax(d.t, -1) * torch.log(F.softmax(h, -1) + 1e-10)).sum(-1).mean()
)
formula("RankNet", "allRank", lambda h, p, d: F.softplus(-(h[:, :1] - h[:, 1:])).mean())
formula(
    "Plackett-Luce",
    "ListMLE",
    lambda h, p, d: (torch.log(h.exp().flip(-1).cumsum(-1).flip(-1) + 1e-10) - h).sum(-1).mean(),
)
formula("BPR", "RecBole", lambda h, p, d: -torch.log(1e-10 + torch.sigmoid(h[:8] - h[8:])).mean())


def _crf(h, transitions):
    score = h[0]
    for row in h[1:]:
        score = torch.logsumexp(score.unsqueeze(2) + transitions + row.unsqueeze(1), 1)
    return torch.logsumexp(score, 1).mean()
