"""Attention and recurrences by hand, of the registry of formulas."""

import math

import torch
from torch.nn import functional as F

from ._registry import causal, formula, probabilities, to_target


def _heads(h, p):
    return h[None], (h @ p.w)[None], (h @ p.w.T)[None]


def _attention(h, p, d, fill=float("-inf")):
    q, k, v = _heads(h, p)
    return (probabilities(causal(q @ k.mT / math.sqrt(32), fill)) @ v)[0]


def _alibi(h, p, d):
    q, k, v = _heads(h, p)
    distance = (torch.arange(16)[None] - torch.arange(16)[:, None]).float()
    return (probabilities(causal(q @ k.mT / math.sqrt(32) + 0.25 * distance)) @ v)[0]


def _cosine_attention(h, p, d):
    q, k, v = _heads(h, p)
    scale = p.s.clamp(max=math.log(100)).exp()
    return (probabilities(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * scale) @ v)[0]


def _linear_attention(h, p, d):
    q, k, v = _heads(h, p)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return ((q @ (k.mT @ v)) / (q @ k.sum(1, keepdim=True).mT + 1e-6))[0]


def _performer(h, p, d):
    q, k, v = _heads(h / 4, p)
    q, k = (torch.exp(x @ d.t.T / 4 - (x**2).sum(-1, keepdim=True) / 2) + 1e-4 for x in (q, k))
    return (q @ (k.mT @ v) / (q @ k.sum(1, keepdim=True).mT))[0]


def _sigmoid_attention(h, p, d):
    q, k, v = _heads(h, p)
    return (torch.sigmoid(q @ k.mT / math.sqrt(32) - math.log(16)) @ v)[0]


def _differential(h, p, d):
    q, k, v = _heads(h, p)
    first, second = (probabilities(q[..., s] @ k[..., s].mT / 4) for s in (slice(16), slice(16, 32)))
    return ((first - (p.s.exp() - 0.5) * second) @ v)[0]


def _linear_time(h, p, d):
    """RWKV's weighted average over the past, term by term."""
    k, v, decay = h[:8], (h @ p.w)[:8], torch.exp(-torch.exp(p.v))
    top, bottom = torch.exp(k[0]) * v[0], torch.exp(k[0])
    rows = [v[0]]
    for t in range(1, 8):
        now = torch.exp(p.s + k[t])
        rows.append((top + now * v[t]) / (bottom + now))
        top, bottom = decay * top + torch.exp(k[t]) * v[t], decay * bottom + torch.exp(k[t])
    return torch.cat([torch.stack(rows), h[8:]])


def _rotary(h, p, d):
    angle = torch.arange(16)[:, None] * 10000 ** (-torch.arange(16) / 16)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    q, k, v = (h @ p.w), (h @ p.w.T), h
    q, k = (x * cos + torch.cat([-x[:, 16:], x[:, :16]], -1) * sin for x in (q, k))
    return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], is_causal=True)[0, 0]


def _qk_norm(h, p, d):
    q, k, v = (h @ p.w), (h @ p.w.T), h
    q, k = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * p.v for x in (q, k))
    return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]


def _gumbel(h, p, d):
    noise = -torch.log(-torch.log(d.u.clamp(1e-6, 1 - 1e-6)) + 1e-10)
    return probabilities((h + noise) / 0.5) @ p.w


def _sparsemax(h, p, d):
    z = h.sort(-1, descending=True)[0]
    count = torch.arange(1, 33)
    support = (1 + count * z > z.cumsum(-1)).sum(-1, keepdim=True)
    tau = (z.cumsum(-1).gather(-1, support - 1) - 1) / support
    return (h - tau).clamp(min=0)


def _router(h, p, d):
    value, index = probabilities(h).topk(4, -1)
    return (value / value.sum(-1, keepdim=True) * p.v[index]).sum(-1, keepdim=True) * h


def _balance(h, p, d):
    q = probabilities(h)
    load = F.one_hot(q.argmax(-1), 32).float().mean(0)
    return 32 * (load * q.mean(0)).sum() + 1e-3 * torch.logsumexp(h, -1).pow(2).mean()


to_target("attention, minus infinity", "nanoGPT", _attention)
to_target("attention, -1e9", "annotated transformer", lambda h, p, d: _attention(h, p, d, -1e9))
to_target("ALiBi", "BLOOM", _alibi)
to_target("cosine attention", "Swin V2", _cosine_attention)
to_target("linear attention", "fast-transformers", _linear_attention)
to_target("random features", "Performer", _performer)
to_target("sigmoid attention", "apple/ml-sigmoid-attention", _sigmoid_attention)
to_target("differential attention", "microsoft/unilm", _differential)
to_target("RWKV", "BlinkDL/RWKV-LM", _linear_time)
to_target("rotary attention", "GPT-NeoX", _rotary)
to_target("normalised queries and keys", "ViT-22B", _qk_norm)
to_target("Gumbel softmax", "dVAE of DALL-E", _gumbel)
to_target("sparsemax", "deep-spin/entmax", _sparsemax)
to_target("top-k router", "Mixtral", _router)
formula("balance and z-loss", "Switch, ST-MoE", _balance)


# Recurrences and state spaces.
def _decay(h, p, d):
    return torch.exp(F.logsigmoid(h).cumsum(0)) * d.t


def _segments(h, p, d):
    log = F.logsigmoid(h[:, 0]).cumsum(0)
    return torch.exp(causal((log[:, None] - log[None])[None])[0]) @ h


def _selective(h, p, d):
    step, a = F.softplus(h + p.v), -torch.exp(p.w[0])
    state, rows = torch.zeros(32), []
    for t in range(8):
        state = torch.exp(step[t] * a) * state + step[t] * d.t[t] * p.w[1]
        rows.append(state * p.w[2])
    return torch.cat([torch.stack(rows), h[8:]])


def _real_gated(h, p, d):
    log = -8 * F.softplus(p.v) * torch.sigmoid(h)
    return torch.sqrt(1 - torch.exp(2 * log) + 1e-6) * d.t + torch.exp(log) * d.u


def _min_gru(h, p, d):
    log_a = -F.softplus(h)
    log_b = -F.softplus(-h) + torch.log(F.softplus(h @ p.w) + 0.5)
    total = log_a.cumsum(0)
    return torch.exp(total + torch.logcumsumexp(log_b - total, 0))


def _lstm(h, p, d):
    state = cell = torch.zeros(8)
    rows = []
    for t in range(6):
        i, f, g, o = (h[t] + p.w[:, :8] @ state).chunk(4)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        state = torch.sigmoid(o) * torch.tanh(cell)
        rows.append(state)
    return torch.cat([torch.stack(rows).repeat(1, 4), h[6:]])


to_target("cumulative decay", "GLA, Mamba-2", _decay)
to_target("segment sums", "Mamba-2", _segments)
to_target("selective scan", "state-spaces/mamba", _selective)
to_target("real-gated recurrence", "Griffin", _real_gated)
to_target("minGRU in logarithms", "lucidrains/minGRU", _min_gru)
to_target("LSTM by hand", "textbooks", _lstm)
