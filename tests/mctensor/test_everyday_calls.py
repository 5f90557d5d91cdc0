"""What people call on a tensor every day: each works on an MCTensor, and agrees with float64 on the same values."""

import copy
import math
import operator
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from halfulp.kernels import engine
from halfulp.mctensor import MCTensor
from halfulp.subclass import record_fallbacks

FORMATS = {
    "float32 x2": (torch.float32, 2, 2.0**-40),
    "float64 x2": (torch.float64, 2, 2.0**-44),
    "bfloat16 x2": (torch.bfloat16, 2, 2.0**-9),
    "float16 x2": (torch.float16, 2, 2.0**-14),
}

CALLS = {
    # operators, on either side, with tensors, numbers and NumPy's
    "a + b": lambda o: o.a + o.b,
    "a - b": lambda o: o.a - o.b,
    "a * b": lambda o: o.a * o.b,
    "a / b": lambda o: o.a / o.p,
    "a @ b": lambda o: o.a @ o.b.T,
    "-a": lambda o: -o.a,
    "+a": lambda o: +o.a,
    "abs(a)": lambda o: abs(o.a),
    "a ** 2": lambda o: o.a**2,
    "a ** -1": lambda o: o.p**-1,
    "a ** 0.5": lambda o: o.p**0.5,
    "a ** b": lambda o: o.p**o.b,
    "a ** 3": lambda o: o.a**3,
    "a ** 2.5": lambda o: o.p**2.5,
    "2 ** a": lambda o: 2**o.a,
    "a % 1": lambda o: o.p % 0.7,
    "a // b": lambda o: o.a // 0.3,
    "a + 1": lambda o: o.a + 1,
    "1 - a": lambda o: 1 - o.a,
    "3 / a": lambda o: 3 / o.p,
    "2.5 * a": lambda o: 2.5 * o.a,
    "numpy scalar * a": lambda o: np.float64(2.5) * o.a,
    "a * numpy scalar": lambda o: o.a * np.float32(2.5),
    "tensor + a": lambda o: o.t + o.a,
    "tensor * a": lambda o: o.t * o.a,
    "tensor / a": lambda o: o.t / o.p,
    "tensor @ a": lambda o: o.t @ o.a.T,
    "a @ tensor": lambda o: o.a @ o.t.T,
    "(4,) + (3, 4)": lambda o: o.v + o.a,
    "(3, 1) + (1, 4)": lambda o: o.a[:, :1] + o.b[:1],
    "0-d + a": lambda o: o.a[0, 0] + o.a,
    "a == b": lambda o: o.a == o.a.clone(),
    "a != b": lambda o: o.a != o.b,
    "a < b": lambda o: o.a < o.b,
    "a <= 0.3": lambda o: o.a <= 0.3,
    "0 < a": lambda o: o.a > 0,
    "a >= tensor": lambda o: o.a >= o.t,
    # indexing and iteration
    "a[0]": lambda o: o.a[0],
    "a[0:1]": lambda o: o.a[0:1],
    "a[..., None]": lambda o: o.a[..., None],
    "a[:, ::2]": lambda o: o.a[:, ::2],
    "a[[2, 0]]": lambda o: o.a[[2, 0]],
    "a[mask]": lambda o: o.a[o.mask],
    "a[-1, -1]": lambda o: o.a[-1, -1],
    "list(a)": lambda o: list(o.a),
    "len(a)": lambda o: len(o.a),
    "a[0] = b": lambda o: _written(o.a, lambda x: operator.setitem(x, 0, o.b[1])),
    "a[mask] = 2": lambda o: _written(o.a, lambda x: operator.setitem(x, o.mask, 2.0)),
    "a[:, 1] *= 2": lambda o: _written(o.a, lambda x: x[:, 1].mul_(2)),
    "item": lambda o: o.a[1, 2].item(),
    "float(a)": lambda o: float(o.a[0, 1]),
    "bool(a)": lambda o: bool(o.a[0, 1] != 0),
    "tolist": lambda o: torch.tensor(o.a.tolist(), dtype=torch.float64),
    "format": lambda o: float(f"{o.p[0, 0]:.2e}") * 0,
    # shape
    "T": lambda o: o.a.T,
    "reshape": lambda o: o.a.T.reshape(2, 6),
    "view": lambda o: o.a.view(-1),
    "flatten": lambda o: o.x4.flatten(1),
    "permute": lambda o: o.x4.permute(3, 0, 2, 1),
    "transpose": lambda o: o.x4.transpose(1, 2),
    "squeeze, unsqueeze": lambda o: o.a.unsqueeze(-1).squeeze(-1),
    "expand": lambda o: o.v.expand(3, 4),
    "expand_as": lambda o: o.v.expand_as(o.a),
    "repeat": lambda o: o.a.repeat(2, 1),
    "narrow": lambda o: o.a.narrow(1, 1, 2),
    "chunk": lambda o: o.a.chunk(2, 1),
    "split": lambda o: o.a.split([1, 3], 1),
    "unbind": lambda o: o.a.unbind(1),
    "cat": lambda o: torch.cat([o.a, o.b], -1),
    "cat with a tensor": lambda o: torch.cat([o.a, o.t]),
    "stack": lambda o: torch.stack([o.a, o.b], 1),
    "flip, roll": lambda o: o.a.flip(0).roll(1, 1),
    "diag, tril": lambda o: (o.s.diag(), o.s.tril()),
    "pad": lambda o: F.pad(o.a, (1, 0, 2, 1), value=0.5),
    "contiguous, clone, detach": lambda o: o.a.T.contiguous().clone().detach(),
    "size, numel, dim": lambda o: (o.a.numel(), o.a.dim(), o.a.size(1)),
    # functions
    "torch.sub": lambda o: torch.sub(o.a, o.b, alpha=2),
    "torch.add": lambda o: torch.add(o.t, o.a, alpha=0.5),
    "sqrt, rsqrt": lambda o: (o.p.sqrt(), o.p.rsqrt()),
    "exp, log": lambda o: (o.a.exp(), o.p.log()),
    "expm1, log1p": lambda o: (o.a.expm1(), o.p.log1p()),
    "log2, log10, exp2": lambda o: (o.p.log2(), o.p.log10(), torch.exp2(o.a)),
    "sin, cos, tan": lambda o: (o.a.sin(), o.a.cos(), o.a.tan()),
    "asin, acos, atan": lambda o: (o.w.asin(), o.w.acos(), o.a.atan()),
    "atan2": lambda o: torch.atan2(o.a, o.b),
    "sinh, cosh, tanh": lambda o: (o.a.sinh(), o.a.cosh(), o.a.tanh()),
    "asinh, acosh, atanh": lambda o: (o.a.asinh(), (o.p + 1).acosh(), o.w.atanh()),
    "erf": lambda o: o.a.erf(),
    "sigmoid": lambda o: torch.sigmoid(o.a),
    "square, reciprocal": lambda o: (o.a.square(), o.p.reciprocal()),
    "floor, ceil, round, trunc": lambda o: (o.a.floor(), o.a.ceil(), o.a.round(), o.a.trunc()),
    "sign, neg": lambda o: (o.a.sign(), o.a.neg()),
    "clamp": lambda o: o.a.clamp(-0.5, 0.5),
    "clamp(min=)": lambda o: o.a.clamp(min=0.25),
    "maximum, minimum": lambda o: (torch.maximum(o.a, o.b), torch.minimum(o.a, o.t)),
    "where": lambda o: torch.where(o.a > 0, o.a, o.b),
    "where with a number": lambda o: torch.where(o.mask, o.a, 0.0),
    "masked_fill": lambda o: o.a.masked_fill(o.mask, -1.5),
    "lerp": lambda o: torch.lerp(o.a, o.b, 0.3),
    "addcmul, addcdiv": lambda o: (torch.addcmul(o.a, o.b, o.t, value=0.5), torch.addcdiv(o.a, o.b, o.p, value=-2)),
    "isnan, isfinite, isinf": lambda o: (o.a.isnan(), o.a.isfinite(), o.a.isinf()),
    # reductions and order
    "sum": lambda o: o.a.sum(),
    "sum(dim)": lambda o: (o.a.sum(0), o.x4.sum((1, 3), keepdim=True)),
    "mean": lambda o: (o.a.mean(), o.a.mean(-1)),
    "prod": lambda o: (o.a.prod(), o.a.prod(1)),
    "cumsum": lambda o: o.a.cumsum(1),
    "cumprod": lambda o: o.a.cumprod(0),
    "norm": lambda o: (o.a.norm(), o.a.norm(dim=1), o.a.norm(p=1)),
    "var, std": lambda o: (o.a.var(), o.a.std(1), o.a.var(0, unbiased=False)),
    "logsumexp": lambda o: o.a.logsumexp(1),
    "max, min": lambda o: (o.a.max(), o.a.min(1)),
    "amax, argmax": lambda o: (o.a.amax(0), o.a.argmax(), o.a.argmin(1)),
    "any, all": lambda o: ((o.a > 0).any(), (o.a > -9).all()),
    "sort": lambda o: o.a.sort(1, descending=True),
    "argsort": lambda o: o.a.argsort(0),
    "topk": lambda o: (o.a.topk(2).values, o.a.gather(1, o.a.topk(2).indices)),  # which of two ties is anyone's
    "median": lambda o: o.a.median(1),
    "gather": lambda o: o.a.gather(1, o.index),
    "index_select": lambda o: o.a.index_select(0, torch.tensor([2, 2, 0])),
    "scatter_add": lambda o: o.a.scatter_add(1, o.index, o.b),
    "index_add": lambda o: o.a.index_add(0, torch.tensor([1, 1, 1]), o.b),
    "index_put": lambda o: o.a.index_put((torch.tensor([0, 0]), torch.tensor([1, 1])), o.v[:2], accumulate=True),
    "scatter": lambda o: o.a.scatter(1, o.index[:, :1], o.b),
    # matrices
    "1-D @ 2-D": lambda o: o.v @ o.s,
    "2-D @ 1-D": lambda o: o.a @ o.v,
    "dot": lambda o: o.v.dot(o.a[0]),
    "mm, mv": lambda o: (torch.mm(o.a, o.s), torch.mv(o.a, o.v)),
    "bmm": lambda o: torch.bmm(o.x4[0], o.x4[1].transpose(1, 2)),
    "5-D matmul": lambda o: o.x4[None] @ o.x4.transpose(-1, -2),
    "batch @ 1-D": lambda o: o.x4 @ o.v,
    "addmm": lambda o: torch.addmm(o.v, o.a, o.s, beta=0.5, alpha=2),
    "baddbmm": lambda o: torch.baddbmm(o.x4[0], o.x4[1], o.s.expand(2, 4, 4)),
    "outer": lambda o: torch.outer(o.v, o.a[0]),
    "einsum": lambda o: torch.einsum("ij,kj->ik", o.a, o.b),
    "tensordot": lambda o: torch.tensordot(o.x4, o.a, dims=([3], [1])),
    "trace": lambda o: o.s.trace(),
    # layers and losses
    "linear": lambda o: F.linear(o.x4, o.a, o.a[:, 0]),
    "relu, leaky_relu": lambda o: (F.relu(o.a), F.leaky_relu(o.a, 0.1)),
    "gelu": lambda o: (F.gelu(o.a), F.gelu(o.a, approximate="tanh")),
    "silu, softplus, elu": lambda o: (F.silu(o.a), F.softplus(o.a), F.elu(o.a)),
    "F.softmax": lambda o: F.softmax(o.a, -1),
    "F.log_softmax": lambda o: F.log_softmax(o.a, dim=0),
    "layer_norm": lambda o: F.layer_norm(o.a, (4,), o.v, o.v),
    "rms_norm": lambda o: F.rms_norm(o.a, (4,), o.v, eps=1e-6),
    "group_norm": lambda o: F.group_norm(o.x4, 2),
    "batch_norm": lambda o: F.batch_norm(o.a, None, None, o.v, o.v, training=True),
    "mse_loss": lambda o: F.mse_loss(o.a, o.b),
    "l1_loss, smooth_l1_loss": lambda o: (F.l1_loss(o.a, o.b), F.smooth_l1_loss(o.a, o.b)),
    "cross_entropy": lambda o: F.cross_entropy(o.a, torch.tensor([0, 3, 1])),
    "cross_entropy, soft": lambda o: F.cross_entropy(o.a, o.b.softmax(1), label_smoothing=0.1),
    "nll_loss": lambda o: F.nll_loss(o.a, torch.tensor([0, 3, 1])),
    "binary_cross_entropy": lambda o: (
        F.binary_cross_entropy_with_logits(o.a, o.b.sigmoid()),
        F.binary_cross_entropy(o.a.sigmoid(), o.b.sigmoid()),
    ),
    "embedding": lambda o: F.embedding(torch.tensor([[0, 2], [1, 1]]), o.a),
    "conv1d": lambda o: F.conv1d(o.x4[0], o.x4[0, :, :, :2], padding=1),
    "conv2d": lambda o: F.conv2d(o.x4, o.x4[:, :1, :2, :3].transpose(0, 1).expand(2, 2, 2, 3), stride=2, padding=1),
    "conv_transpose2d": lambda o: F.conv_transpose2d(o.x4, o.x4[:, :, :2, :2], o.v[:2], stride=2),
    "max_pool2d": lambda o: F.max_pool2d(o.x4, 2),
    "attention": lambda o: F.scaled_dot_product_attention(o.x4, o.x4, o.x4, is_causal=True),
    "dropout": lambda o: F.dropout(o.a, 0.5, training=False),
    "cosine_similarity, normalize": lambda o: (F.cosine_similarity(o.a, o.b), F.normalize(o.a)),
    # making and keeping
    "zeros_like, ones_like, full_like": lambda o: (
        torch.zeros_like(o.a),
        torch.ones_like(o.a),
        torch.full_like(o.a, 3),
    ),
    "new_zeros": lambda o: o.a.new_zeros(2, 2),
    "add_, mul_, div_": lambda o: _written(o.a, lambda x: x.add_(o.b, alpha=-0.5).mul_(o.t).div_(3)),
    "copy_, fill_, zero_": lambda o: _written(o.a, lambda x: (x.copy_(o.b), x[0].fill_(0.1), x[1].zero_())),
    "clamp_, sqrt_": lambda o: _written(o.p, lambda x: x.clamp_(min=0.5).sqrt_()),
    "deepcopy": lambda o: copy.deepcopy(o.a),
    "pickle": lambda o: pickle.loads(pickle.dumps(o.a)),
    "allclose, equal": lambda o: (torch.allclose(o.a, o.a), torch.equal(o.a, o.b), torch.isclose(o.a, o.b)),
}

# Where terms may cancel, the error is relative to the sum of their magnitudes.
SUMS = {"a @ b", "sum", "sum(dim)", "mean", "cumsum", "dot", "mm, mv", "trace", "1-D @ 2-D", "2-D @ 1-D", "nll_loss"}


def _written(x, write):
    x = x.clone()
    write(x)
    return x


def _operands(dtype, components):
    def draw(*shape):
        return MCTensor.encode(torch.randn(*shape, dtype=torch.float64), components, dtype)

    o = SimpleNamespace(a=draw(3, 4), b=draw(3, 4), v=draw(4), s=draw(4, 4), x4=draw(2, 2, 4, 4))
    o.p = MCTensor.encode(torch.rand(3, 4, dtype=torch.float64) + 0.5, components, dtype)
    o.w = MCTensor.encode(torch.rand(3, 4, dtype=torch.float64) * 1.8 - 0.9, components, dtype)
    o.t = torch.randn(3, 4).to(dtype)
    o.mask = torch.rand(3, 4) < 0.5
    o.index = torch.randint(0, 4, (3, 4))
    return o


def _plain(x):
    if isinstance(x, MCTensor):
        return x.decode()
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _leaves(x):
    return [leaf for one in x for leaf in _leaves(one)] if isinstance(x, (list, tuple)) else [x]


def _close(found, wanted, bound, terms):
    if not isinstance(wanted, torch.Tensor):
        return math.isclose(found, wanted, rel_tol=bound)
    found = _plain(found)
    if not wanted.is_floating_point():
        return bool((found == wanted).all())
    size = terms[terms.isfinite()].abs().max() if terms.isfinite().any() else 1.0
    return bool(((found - wanted).abs() <= bound * size).all()) or torch.equal(found, wanted)


# Beyond float64 these run in it.
BEYOND_FLOAT64 = ("float64 x2",)
COUNTED = {
    *("a % 1", "a // b", "log2, log10, exp2", "sin, cos, tan", "asin, acos, atan", "atan2", "sinh, cosh, tanh"),
    *("asinh, acosh, atanh", "erf", "floor, ceil, round, trunc", "cumprod", "median", "gelu", "conv1d", "conv2d"),
    *("conv_transpose2d", "attention"),
}
# Compiled for one format; for the others by the reference, whose bits the kernels have (tests/arithmetic).
COMPILED = "float32 x2"


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", FORMATS)
def test_an_everyday_call_agrees_with_float64(kind, call, seed):
    dtype, components, bound = FORMATS[kind]
    operands = _operands(dtype, components)
    plain = SimpleNamespace(**{name: _plain(x) for name, x in vars(operands).items()})
    with record_fallbacks() as counts, engine("auto" if kind == COMPILED else "reference"):
        found = _leaves(CALLS[call](operands))
    wanted = _leaves(CALLS[call](plain))
    sizes = SimpleNamespace(**{name: x.abs() if x.is_floating_point() else x for name, x in vars(plain).items()})
    terms = _leaves(CALLS[call](sizes)) if call in SUMS else wanted
    assert not counts or (call in COUNTED and kind in BEYOND_FLOAT64)
    assert len(found) == len(wanted)
    for x, y, term in zip(found, wanted, terms):
        assert _close(x, y, bound, term), f"{x} is not {y}"
        if isinstance(y, torch.Tensor):
            assert x.shape == y.shape
            if y.is_floating_point() and call != "tolist":
                assert isinstance(x, MCTensor), "the digits were dropped"
                assert len(x.components) >= components


def test_there_are_all_of_them():
    assert len(CALLS) >= 123


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.numpy(),
        lambda x: x.apply_(abs),
        np.asarray,
        lambda x: x.__dlpack__(),
        lambda x: x.to(torch.complex64),
    ],
)
def test_what_has_no_meaning_refuses_with_a_reason(call):
    x = MCTensor.encode([0.1, 2.0])
    with pytest.raises(TypeError, match="decode"):
        call(x)
