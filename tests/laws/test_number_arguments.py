"""Law: a Python number given to an operator on components is the float64 that was written, in every argument.

Each call has numbers that float32 lacks; float64 on the decoded values is the oracle. Numbers that torch's own table of
samples (op_db) gives are bumped off float32 by `bench_op_coverage`'s entries in `test_samples`."""

import pytest
import torch
import torch.nn.functional as F

from halfulp import MCTensor

NEAR = 1e-11
T, P, E = 0.1, 3.3, 0.3
CALLS = {
    "add": lambda x, y: x + T,
    "add alpha": lambda x, y: torch.add(x, y, alpha=T),
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=P),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=T),
    "mul": lambda x, y: x * T,
    "div": lambda x, y: x / P,
    "div of": lambda x, y: P / (x + 9),
    "floor": lambda x, y: torch.div(x, T, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, T, rounding_mode="trunc"),
    "remainder": lambda x, y: torch.remainder(x, T),
    "remainder of": lambda x, y: torch.remainder(P, y.abs() + 1),
    "fmod": lambda x, y: torch.fmod(x, T),
    "pow": lambda x, y: x.abs() ** P,
    "pow of": lambda x, y: P**x,
    "float_power": lambda x, y: torch.float_power(x.abs(), P),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=T),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=T),
    "lerp": lambda x, y: torch.lerp(x, y, T),
    "where other": lambda x, y: torch.where(x > 0, x, T),
    "where self": lambda x, y: torch.where(x > 0, T, x),
    "where of 0-d": lambda x, y: torch.where(x > 0, x.sum(), T),
    "masked_fill": lambda x, y: x.masked_fill(x > 0, T),
    "masked_fill_": lambda x, y: x.clone().masked_fill_(x > 0, T),
    "index_fill": lambda x, y: x.index_fill(0, torch.tensor([0, 2]), T),
    "scatter": lambda x, y: x.scatter(1, torch.zeros(4, 2, dtype=torch.long), T),
    "scatter add": lambda x, y: x.scatter(1, torch.zeros(4, 1, dtype=torch.long), T, reduce="add"),
    "scatter multiply": lambda x, y: x.scatter(1, torch.zeros(4, 1, dtype=torch.long), T, reduce="multiply"),
    "setitem": lambda x, y: _written(x, T),
    "fill": lambda x, y: x.clone().fill_(T),
    "fill_diagonal": lambda x, y: x.clone().fill_diagonal_(T),
    "full_like": lambda x, y: torch.full_like(x, T),
    "new_full": lambda x, y: x.new_full((2,), T),
    "clamp": lambda x, y: x.clamp(-T, E),
    "clamp_min": lambda x, y: x.clamp_min(T),
    "clamp_max_": lambda x, y: x.clone().clamp_max_(T),
    "clip": lambda x, y: torch.clip(x, max=T),
    "add_": lambda x, y: x.clone().add_(y, alpha=T),
    "mul_": lambda x, y: x.clone().mul_(T),
    "lerp_": lambda x, y: x.clone().lerp_(y, T),
    "pow_": lambda x, y: x.abs().pow_(P),
    "heaviside": lambda x, y: torch.heaviside(x * 0, torch.tensor(T, dtype=torch.float64)),
    "nan_to_num": lambda x, y: (x / (x.floor() * 0)).nan_to_num(T, P, -P),
    "threshold": lambda x, y: F.threshold(x, T, P),
    "hardtanh": lambda x, y: F.hardtanh(x, -T, T),
    "leaky_relu": lambda x, y: F.leaky_relu(x, T),
    "elu": lambda x, y: F.elu(x, T),
    "celu": lambda x, y: F.celu(x, P),
    "softplus": lambda x, y: F.softplus(x, P, E),
    "hardshrink": lambda x, y: F.hardshrink(x, T),
    "softshrink": lambda x, y: F.softshrink(x, T),
    "glu of": lambda x, y: F.glu(x * T),
    "logit": lambda x, y: torch.logit(x.sigmoid(), T),
    "xlogy": lambda x, y: torch.xlogy(P, y.abs() + 1),
    "xlogy of": lambda x, y: torch.xlogy(x, P),
    "xlog1py": lambda x, y: torch.special.xlog1py(P, y.abs()),
    "zeta": lambda x, y: torch.special.zeta(x.abs() + 2, P),
    "copysign": lambda x, y: torch.copysign(x, -T),
    "pad": lambda x, y: F.pad(x, (1, 1), value=T),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), eps=T),
    "rms_norm": lambda x, y: F.rms_norm(x, (4,), eps=T),
    "rms_norm of two": lambda x, y: F.rms_norm(x, (4, 4), y, eps=P),
    "group_norm": lambda x, y: F.group_norm(x, 2, eps=T),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, training=True, eps=T),
    "batch_norm averages": lambda x, y: _running_mean(x, T),
    "instance_norm": lambda x, y: F.instance_norm(x[None], eps=T),
    "local_response_norm": lambda x, y: F.local_response_norm(x[None], 2, alpha=T, beta=E, k=P),
    "normalize": lambda x, y: F.normalize(x, P, eps=T),
    "normalize eps": lambda x, y: F.normalize(x, eps=P),
    "norm": lambda x, y: x.norm(P),
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x, P, 1),
    "renorm": lambda x, y: torch.renorm(x, 2, 0, T),
    "renorm of order": lambda x, y: torch.renorm(x, P, 0, T),
    "dist": lambda x, y: torch.dist(x, y, P),
    "cdist": lambda x, y: torch.cdist(x, y, P),
    "pdist": lambda x, y: F.pdist(x, P),
    "pairwise_distance": lambda x, y: F.pairwise_distance(x, y, P, T),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, eps=P),
    "cosine_similarity of dims": lambda x, y: F.cosine_similarity(x[:, None], y[None], -1, P),
    "cosine_embedding": lambda x, y: F.cosine_embedding_loss(x, y, -torch.ones(4), T),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, x.flip(0), P, P, T),
    "margin_ranking": lambda x, y: F.margin_ranking_loss(x, y, torch.ones(4, 4), P),
    "hinge_embedding": lambda x, y: F.hinge_embedding_loss(x, -torch.ones(4, 4), P),
    "multi_margin": lambda x, y: F.multi_margin_loss(x, torch.tensor([0, 1, 2, 3]), margin=T),
    "huber": lambda x, y: F.huber_loss(x, y, delta=T),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, beta=E),
    "cross_entropy": lambda x, y: F.cross_entropy(x, torch.tensor([0, 1, 2, 3]), label_smoothing=T),
    "poisson": lambda x, y: F.poisson_nll_loss(x.abs(), y, log_input=False, eps=T),
    "addmm": lambda x, y: torch.addmm(x, x, y, beta=T, alpha=P),
    "addmv": lambda x, y: torch.addmv(x[0], x, y[0], beta=T, alpha=P),
    "addr": lambda x, y: torch.addr(x, x[0], y[0], beta=T, alpha=P),
    "baddbmm": lambda x, y: torch.baddbmm(x[None], x[None], y[None], beta=T, alpha=P),
    "addbmm": lambda x, y: torch.addbmm(x, x[None], y[None], beta=T, alpha=P),
    "index_add": lambda x, y: x.index_add(0, torch.tensor([0, 0, 1, 2]), y, alpha=T),
    "quantile": lambda x, y: x.quantile(E),
    "quantile of dims": lambda x, y: x.quantile(T, 1, keepdim=True, interpolation="midpoint"),
    "nanquantile": lambda x, y: x.nanquantile(E, 0),
    "var": lambda x, y: torch.var(x, 1, correction=0.3),
    "std": lambda x, y: torch.std(x, correction=0.3),
    "std_mean": lambda x, y: torch.std_mean(x, 1, correction=0.3)[0],
    "trapezoid": lambda x, y: torch.trapezoid(x, dx=T),
    "cumulative_trapezoid": lambda x, y: torch.cumulative_trapezoid(x, dx=T),
    "gradient": lambda x, y: torch.gradient(x, spacing=T)[0],
    "sdpa": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None], scale=T),
    "interpolate": lambda x, y: F.interpolate(x[None], scale_factor=1.7, mode="linear", recompute_scale_factor=False),
    "gumbel tau": lambda x, y: (x / P).softmax(-1),
    "logspace": lambda x, y: x * torch.tensor(T, dtype=torch.float64),
    "foreach add": lambda x, y: torch._foreach_add([x], T)[0],
    "foreach lerp": lambda x, y: torch._foreach_lerp([x], [y], T)[0],
    "foreach addcmul": lambda x, y: torch._foreach_addcmul([x], [x], [y], value=T)[0],
    "foreach clamp": lambda x, y: torch._foreach_clamp_min([x], T)[0],
    "new_tensor": lambda x, y: x.new_tensor([T, P]),
}


def _written(x, number):
    x = x.clone()
    x[1:, :2] = number
    return x


def _running_mean(x, momentum):
    mean, variance = x[0] * 0, x[0] * 0 + 1
    F.batch_norm(x, mean, variance, training=True, momentum=momentum)
    return mean + variance


def two_float32(x):
    return MCTensor.encode(x, 2, torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_numbers_enter_as_written(name, seed):
    torch.manual_seed(seed)
    x, y = (two_float32(torch.randn(4, 4, dtype=torch.float64)) for _ in range(2))
    found, wanted = CALLS[name](x, y), CALLS[name](x.decode(), y.decode())
    assert isinstance(found, MCTensor)
    found = found.decode()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert (found - wanted).nan_to_num().abs().max() <= NEAR * wanted.nan_to_num().abs().max().clamp(min=1.0)
