"""Law: constants, masks and other plain operands never decide a scale, in place as out of place, in both tensors.

Each operator with an addend, a factor or a choice meets a plain operand that is large at a few places, as masks of
-1e9, penalties of 1 + 1e8 m and last distances of 1e10 are. Everywhere else the result has the digits it would have
without, and where the plain operand is large it is as large as infinity is for a softmax, and finite. A new operator of
the families that meet plain operands joins the list, or is named with what makes it none of them."""

import random

import pytest
import torch
import torch.nn.functional as F

from halfulp import MCTensor, ScaledTensor, multicomponent, scalify
from halfulp.scaled._registry import FAMILY_BY_OPERATOR

LOWEST = torch.finfo(torch.float32).min
CONSTANTS = [-1e8, -1e9, -1e10, -1e30, LOWEST, 1e8, 1e9, 1e10, 1e30, -LOWEST]
SHAPE = (4, 6)

# Operators: s is the scaled tensor, a and b are factors of a product in its shape, m marks places, c is the constant.
OUT_OF_PLACE = {
    "add": lambda s, a, b, m, c: s + c * m,
    "add the other way": lambda s, a, b, m, c: c * m + s,
    "add alpha": lambda s, a, b, m, c: torch.add(s, m, alpha=c),
    "sub": lambda s, a, b, m, c: s - c * m,
    "sub alpha": lambda s, a, b, m, c: torch.sub(s, m, alpha=c),
    "rsub": lambda s, a, b, m, c: torch.rsub(s, c * m),
    "mul": lambda s, a, b, m, c: s * (1 + abs(c) * m),
    "div": lambda s, a, b, m, c: s / (1 - m + m / min(abs(c), 1e30)),
    "addcmul": lambda s, a, b, m, c: torch.addcmul(s, m, torch.full(SHAPE, c)),
    "addcmul value": lambda s, a, b, m, c: torch.addcmul(s, m, m, value=c),
    "addcdiv": lambda s, a, b, m, c: torch.addcdiv(s, m, torch.full(SHAPE, 1 / c)),
    "addmm": lambda s, a, b, m, c: torch.addmm(c * m, a, b),
    "addmm beta": lambda s, a, b, m, c: torch.addmm(m, a, b, beta=max(min(c, 1e30), -1e30)),
    "baddbmm": lambda s, a, b, m, c: torch.baddbmm((c * m)[None], a[None], b[None])[0],
    "addbmm": lambda s, a, b, m, c: torch.addbmm(c * m, a[None], b[None]),
    "addr": lambda s, a, b, m, c: torch.addr(c * m, a[:, 0], b[0]),
    "addmv": lambda s, a, b, m, c: torch.stack([torch.addmv(c * m[:, j], a, b[:, j]) for j in range(6)], 1),
    "where": lambda s, a, b, m, c: torch.where(m.bool(), c, s),
    "where mixed": lambda s, a, b, m, c: torch.where(m.bool(), c * m, s),
    "masked_fill": lambda s, a, b, m, c: s.masked_fill(m.bool(), c),
    "index_put": lambda s, a, b, m, c: torch.index_put(s, (m.bool(),), torch.tensor(c)),
    "masked_scatter": lambda s, a, b, m, c: torch.masked_scatter(s, m.bool(), torch.full(SHAPE, c)),
    "scatter_add": lambda s, a, b, m, c: s.scatter_add(1, torch.arange(6).expand(4, 6), c * m),
    "index_add": lambda s, a, b, m, c: s.index_add(0, torch.arange(4), c * m),
    "put": lambda s, a, b, m, c: s.put(torch.arange(24), c * m, accumulate=True),
    "exp of a product": lambda s, a, b, m, c: torch.exp(-torch.relu(s) * (0.1 + abs(c) * m)),
}
IN_PLACE = {
    "add_": lambda s, a, b, m, c: s.add_(c * m),
    "add_ alpha": lambda s, a, b, m, c: s.add_(m, alpha=c),
    "sub_": lambda s, a, b, m, c: s.sub_(c * m),
    "mul_": lambda s, a, b, m, c: s.mul_(1 + abs(c) * m),
    "div_": lambda s, a, b, m, c: s.div_(1 - m + m / min(abs(c), 1e30)),
    "addcmul_": lambda s, a, b, m, c: s.addcmul_(m, torch.full(SHAPE, c)),
    "addcdiv_": lambda s, a, b, m, c: s.addcdiv_(m, torch.full(SHAPE, 1 / c)),
    "masked_fill_": lambda s, a, b, m, c: s.masked_fill_(m.bool(), c),
    "index_put_": lambda s, a, b, m, c: s.index_put_((m.bool(),), torch.tensor(c)),
    "setitem": lambda s, a, b, m, c: s.__setitem__(m.bool(), c) or s,
    "scatter_add_": lambda s, a, b, m, c: s.scatter_add_(1, torch.arange(6).expand(4, 6), c * m),
    "index_add_": lambda s, a, b, m, c: s.index_add_(0, torch.arange(4), c * m),
}
KINDS = {
    "float16": (lambda x: ScaledTensor.encode(x), 2e-3),
    "float16 at home": (lambda x: ScaledTensor.encode(x, home=torch.float16), 2e-3),
    "bfloat16": (lambda x: ScaledTensor.encode(x, torch.bfloat16), 1.6e-2),
    "bfloat16 at home": (lambda x: ScaledTensor.encode(x, torch.bfloat16, home=torch.bfloat16), 1.6e-2),
    "float8_e5m2": (lambda x: ScaledTensor.encode(x, torch.float8_e5m2), 0.2),
    "float32": (lambda x: ScaledTensor.encode(x, torch.float32), 1e-6),
    "two float16": (lambda x: MCTensor.encode(x, 2, torch.float16), 1e-5),
    "three float16": (lambda x: MCTensor.encode(x, 3, torch.float16), 1e-5),
    "two bfloat16": (lambda x: MCTensor.encode(x, 2, torch.bfloat16), 1e-4),
}


def values(x):
    return x.detach().decode().double() if hasattr(x, "decode") else x.detach().double()


def computed(call, encode, size, chance, dtype=None):
    """Return what the operator makes of encoded operands, and of their values; where the plain operand is large."""
    s, a, b = (encode(x) for x in (torch.randn(SHAPE) * size, torch.randn(4, 5) * size, torch.randn(5, 6)))
    m = torch.zeros(SHAPE)
    for place in chance.sample(range(24), chance.randint(1, 8)):
        m.view(-1)[place] = 1.0
    # A bfloat16 component holds no float32 above 2^128 (1 - 2^-9), and has no scale.
    c = chance.choice([c for c in CONSTANTS if abs(c) < 1e38 or not isinstance(s, MCTensor) or s.scale is not None])
    plain = [values(x).float() for x in (s, a, b)]
    return call(s, a, b, m, c), call(*plain, m, c), m.bool(), c


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*OUT_OF_PLACE, *IN_PLACE])
def test_a_plain_operand_does_not_decide_the_scale(name, kind, seed):
    encode, near = KINDS[kind]
    call, chance = (OUT_OF_PLACE | IN_PLACE)[name], random.Random(seed)
    for size in (1.0, 30.0, 1e-2):
        found, wanted, places, c = computed(call, encode, size, chance)
        assert type(found) is type(encode(torch.ones(2))), name
        found, wanted = values(found), wanted.double()
        assert found[wanted.isfinite()].isfinite().all(), (name, c)
        others = ~places
        level = wanted[others].abs().max()
        assert (found - wanted)[others].abs().max() <= near * level, (name, kind, size, c)
        # What stands for infinity does so still, with its sign, or is what it was.
        large = places & (wanted.abs() >= 2.0**24)
        assert torch.equal(found[large].sign(), wanted[large].sign())
        if size <= 1 and not name.startswith(("exp", "mul", "div")):
            assert (found[large].abs() >= 100).all(), (name, kind, c)


# Operators of these families that are given no plain addend, factor or choice.
FAMILIES = ("alignment", "indexing")
COVERED = {"add", "sub", "rsub", "where", "masked_fill", "index_put", "_unsafe_index_put", "scatter_add", "index_add"}
COVERED |= {"put", "masked_scatter", "_index_put_impl_"}
OTHERS = {
    "a choice by size, held to below": ("maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max"),
    "written at places, held to below": (
        *("cat", "stack", "scatter", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"),
        *("index_copy", "index_fill", "scatter_reduce", "index_reduce"),
    ),
    "one number everywhere or around": ("fill", "constant_pad_nd", "nan_to_num", "copy", "zero", "heaviside"),
    "of one tensor, or its gradient": (
        *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "slice_backward", "select_backward"),
        *("replication_pad1d", "replication_pad2d", "replication_pad3d", "diagonal_backward", "unfold_backward"),
        *(f"{kind}_pad{n}d_backward" for kind in ("reflection", "replication") for n in (1, 2, 3)),
        *("masked_scatter_backward", "embedding_dense_backward"),
    ),
    "of the values alone": ("fmod", "remainder", "hypot", "copysign"),
}


def test_every_operator_that_aligns_is_listed():
    known = COVERED | {name for names in OTHERS.values() for name in names}
    found = {op._schema.name.removeprefix("aten::") for op, family in FAMILY_BY_OPERATOR.items() if family in FAMILIES}
    found = {name for name in found if "::" not in name}
    assert found <= known, f"a new operator: {sorted(found - known)}"


WRITES = {
    "maximum": lambda s, m, c: torch.maximum(s, abs(c) * m - 100 * (1 - m)),
    "minimum": lambda s, m, c: torch.minimum(s, -abs(c) * m + 100 * (1 - m)),
    "clamp": lambda s, m, c: torch.clamp(s, abs(c) * m - 100 * (1 - m)),
    "cat": lambda s, m, c: torch.cat([s, c * m])[:4],
    "stack": lambda s, m, c: torch.stack([s, c * m])[0],
    "slice_scatter": lambda s, m, c: torch.slice_scatter(s, torch.where(m.bool(), c, 1.0)[:, :3], 1, 0, 3),
    "select_scatter": lambda s, m, c: torch.select_scatter(s, torch.where(m.bool(), c, 1.0)[0], 0, 0),
    "index_copy": lambda s, m, c: s.index_copy(0, torch.tensor([1]), torch.where(m.bool(), c, 1.0)[1:2]),
    "scatter": lambda s, m, c: s.scatter(1, torch.arange(3).expand(4, 3), torch.where(m.bool(), c, 1.0)[:, :3]),
}


@pytest.mark.parametrize("kind", ["float16", "float16 at home", "bfloat16", "float32"])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_chosen_or_written_does_not_decide_the_scale(name, kind, seed):
    encode, near = KINDS[kind]
    chance = random.Random(seed)
    s, m = encode(torch.randn(SHAPE)), torch.zeros(SHAPE)
    m.view(-1)[chance.sample(range(24), 5)] = 1.0
    c = chance.choice(CONSTANTS)
    found, wanted = values(WRITES[name](s, m, c)), WRITES[name](values(s).float(), m, c).double()
    assert found.isfinite().all()
    others = wanted.abs() < 2.0**20
    assert (found - wanted)[others].abs().max() <= near * wanted[others].abs().max()
    assert (found[~others].abs() >= 100).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("constant", [-1e4, -1e9, LOWEST, -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", ["autocast", "none"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_causal_attention(constant, dtype, wide, need_weights, seed):
    plain = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 4, 16)
    mask = torch.full((4, 4), constant).triu(1)
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    model.load_state_dict(plain.state_dict())
    scalify(model, dtype, wide=wide)
    found = model(x, x, x, attn_mask=mask, need_weights=need_weights)
    wanted = plain(x, x, x, attn_mask=mask, need_weights=need_weights)
    near = 5e-3 if dtype == torch.float16 else 3e-2
    for y, z in zip(found, wanted):
        assert (y is None) == (z is None)
        if y is not None:
            assert (values(y) - z).abs().max() < near


@pytest.mark.parametrize("bias", [1e9, -1e9, LOWEST])
def test_a_plain_bias_of_few_large_elements(bias, seed):
    bias = torch.tensor([0.5, bias, -0.25, 0.0])
    for dtype in (torch.float16, torch.bfloat16):
        x, w = ScaledTensor.encode(torch.randn(3, 5), dtype), ScaledTensor.encode(torch.randn(4, 5), dtype)
        image, kernel = (
            ScaledTensor.encode(torch.randn(2, 3, 6), dtype),
            ScaledTensor.encode(torch.randn(4, 3, 2), dtype),
        )
        for found, wanted in (
            (F.linear(x, w, bias), F.linear(x.decode(), w.decode(), bias)),
            (F.conv1d(image, kernel, bias).mT, F.conv1d(image.decode(), kernel.decode(), bias).mT),
        ):
            kept = [0, 2, 3]
            error = (found.decode() - wanted)[..., kept].abs().max()
            assert error < 1.6e-2 * wanted[..., kept].abs().max()
            assert (found.decode()[..., 1].sign() == wanted[..., 1].sign()).all()


@pytest.mark.parametrize("last", [1e10, 1e8, LOWEST * -1])
@pytest.mark.parametrize("home", [None, torch.float16])
def test_volume_rendering_with_a_last_distance_of_infinity(last, home, seed):
    """alpha = 1 - exp(-relu(density) delta), as radiance fields have it: the loss and its gradient."""
    density, colour = torch.randn(8, 16), torch.rand(8, 16)
    deltas = torch.full((8, 16), 0.1)
    deltas[:, -1] = last

    def loss_of(s):
        alpha = 1 - torch.exp(-torch.relu(s) * deltas)
        through = torch.cumprod(torch.cat([torch.ones(8, 1), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return ((alpha * through * colour).sum(-1) - 0.5).square().mean()

    s = ScaledTensor.encode(density, home=home).detach().requires_grad_()
    x = values(s).float().requires_grad_()
    found, wanted = loss_of(s), loss_of(x)
    found.backward()
    wanted.backward()
    assert abs(found.item() / wanted.item() - 1) < 3e-3
    assert (values(s.grad) - x.grad).norm() < 1e-2 * x.grad.norm()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "home" not in kind])
@pytest.mark.parametrize("padding", [0.0, 1.0])
def test_large_data_with_a_padded_element_stand_for_themselves(kind, padding, seed):
    encode, near = KINDS[kind]
    stamps = 1.7e9 + torch.rand(SHAPE) * 1e6
    stamps[0, 0] = padding
    for call in (
        lambda s, t: s + t,
        lambda s, t: t - s,
        lambda s, t: s * t,
        lambda s, t: t.bool() * torch.addcmul(s, s, t),
        lambda s, t: torch.addcmul(s, t, torch.ones(SHAPE)),
        lambda s, t: torch.where(t > 5, t, s),
        lambda s, t: s.clone().add_(t),
        lambda s, t: s.clone().mul_(t),
    ):
        s = encode(torch.randn(SHAPE))
        found, wanted = values(call(s, stamps)), call(values(s), stamps.double())
        assert (found - wanted).abs().max() <= near * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_a_factor_that_is_large_among_zeros_is_a_factor(dtype, seed):
    x = ScaledTensor.encode(torch.randn(16), dtype)
    factor = torch.zeros(16)
    factor[::3] = 2.0**30
    assert torch.equal((x * factor).decode(), x.decode() * factor)


def test_a_plain_float32_operand_keeps_its_range_at_home(seed):
    """As torch promotes a narrow tensor under autocast: nothing of the product is lost."""
    x = ScaledTensor.encode(torch.randn(8), home=torch.float16)
    wide = torch.logspace(-20, 20, 8)
    for found in (x * wide, torch.addcmul(x, x, wide), torch.where(wide > 1, x * 1, wide), torch.lerp(x, wide, wide)):
        assert found.payload.dtype == torch.float32
    assert torch.allclose((x * wide).decode(), x.decode() * wide)
    assert (x * wide.half()).payload.dtype == torch.float16
    assert (x * torch.tensor(3.0)).payload.dtype == torch.float16


def test_masks_in_components_that_were_converted(seed):
    model = multicomponent(torch.nn.Linear(4, 4), 2, torch.float16)
    scores = model(torch.randn(4, 4).half())
    assert isinstance(scores, MCTensor)
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    wanted = scores.decode().masked_fill(mask, -1e9).softmax(-1)
    assert (scores.masked_fill(mask, -1e9).softmax(-1).decode() - wanted).abs().max() < 1e-5
    assert (torch.where(mask, -1e9, scores).softmax(-1).decode() - wanted).abs().max() < 1e-5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["sub", "mul", "addmm", "where", "addcmul"])
@pytest.mark.parametrize("home", [None, torch.float16])
def test_compiled_operators_go_by_the_same_law(name, home, fresh_compiler, seed):
    m, call = torch.zeros(SHAPE), OUT_OF_PLACE[name]
    m[0, 1] = m[2, 3] = 1.0
    s, a, b = (ScaledTensor.encode(torch.randn(n), home=home) for n in (SHAPE, (4, 5), (5, 6)))
    found = values(torch.compile(lambda s, a, b: call(s, a, b, m, -1e9), backend="aot_eager")(s, a, b))
    wanted, others = call(*(values(x).float() for x in (s, a, b)), m, -1e9).double(), ~m.bool()
    assert (found - wanted)[others].abs().max() <= 2e-3 * wanted[others].abs().max()
    assert (found[m.bool()].abs() >= 100).all()
    assert torch.equal(found[m.bool()].sign(), wanted[m.bool()].sign())
