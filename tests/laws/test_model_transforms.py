"""Law: derivatives in forward mode, torch.jit.trace and make_fx of a model are its own, or are refused with a way out.

Under every recipe and everything else that changes a model's tensors, products or gradients. What is refused is known
from the tensors, and the advice works."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import halfulp as hu
from halfulp import MCTensor, ScaledTensor
from halfulp.kernels import same_bits

WIDTH = 8
pytestmark = [
    # Of torch, which calls what it deprecates, and warns of every condition that it records.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:aten.convolution:halfulp.subclass._rule_table.FallbackWarning"),
    # Of derivatives of norms, which torch takes apart into these.
    pytest.mark.filterwarnings("ignore:prims:halfulp.subclass._rule_table.FallbackWarning"),
]


def normed():
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def convolved():
    # Without the large eps a group of nearly equal numbers amplifies their rounding, and the derivative's error too.
    head = nn.Unflatten(1, (2, WIDTH // 2)), nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4, eps=1.0), nn.SiLU()
    return nn.Sequential(*head, nn.Flatten(), nn.Softmax(-1), nn.Linear(4 * (WIDTH // 2 - 2), 4))


def scaled(model, **options):
    # A scaler lives as long as somebody holds it.
    model.scaler = hu.AdaptiveGradScaler(model, **options)
    return model


# What concerns the optimizer or the scaler alone; of the recipes that change a model alike one is taken.
_OUTSIDE_MODELS = ("description", "weight_update", "state_dtype", "perturb", "gradient_scale", "gradient_rounding")


def recipe_names():
    found = {}
    for name in hu.recipes.names():
        recipe = hu.recipes.get(name)
        fields = {key: value for key, value in recipe.to_dict().items() if key not in ("name", *_OUTSIDE_MODELS)}
        found.setdefault(repr(fields), name)
    return found.values()


FEATURES = {name: lambda model, name=name: hu.convert(model, name) for name in recipe_names()} | {
    "scalify": hu.scalify,
    "scalify to bfloat16": lambda model: hu.scalify(model, dtype=torch.bfloat16),
    "scalify to float32": lambda model: hu.scalify(model, dtype=torch.float32),
    "scalify with fp8": lambda model: hu.scalify(model, matmul="fp8"),
    "multicomponent": lambda model: hu.multicomponent(model, components=2),
    "multicomponent of float16": lambda model: hu.multicomponent(model, components=2, dtype=torch.float16),
    "scaler": scaled,
    "scaler with a format": lambda model: scaled(model, format="e5m2"),
    "float32_products of bfloat16": lambda model: hu.float32_products(model.bfloat16()) or model,
    "float32_products of float16": lambda model: hu.float32_products(model.half()) or model,
    "float32_gradients of bfloat16": lambda model: hu.float32_gradients(model.bfloat16()) or model,
    "float32_gradients of float16": lambda model: hu.float32_gradients(model.half()) or model,
}
# Functions of a plain tensor, each of which has the derivative 2.
FUNCTIONS = {
    "encode": lambda x: (ScaledTensor.encode(x) * 2).decode(),
    "encode in another storage": lambda x: (ScaledTensor.encode(x, torch.bfloat16) * 2).decode(),
    "with_scale": lambda x: ScaledTensor.encode(x).with_scale(64.0).decode() * 2,
    "rescale": lambda x: hu.scaled.rescale(ScaledTensor.encode(x)).decode() * 2,
    "rescale gradients": lambda x: hu.scaled.rescale(ScaledTensor.encode(x), side="gradient").decode() * 2,
    "cast": lambda x: hu.scaled.cast(x, forward=torch.float8_e4m3fn, backward=torch.float8_e5m2) * 2,
    "cast of a scaled tensor": lambda x: hu.scaled.cast(ScaledTensor.encode(x), forward=torch.bfloat16).decode() * 2,
    "components": lambda x: (MCTensor.encode(x, 2, torch.float16) * 2).decode(),
    "components of float32": lambda x: MCTensor.encode(x, 2).decode(torch.float32) * 2,
    "a plain operand": lambda x: (x * MCTensor.encode(torch.full_like(x, 2.0))).decode(),
    "a product of several dtypes": lambda x: F.linear(
        x, MCTensor.encode(2 * torch.eye(len(x)), 2, torch.float16)
    ).decode(),
}
# Relative errors of derivatives, by the narrowest type that a model computes in; of others float32's.
NEAR = {
    "fp8": 0.3,
    "bf16": 0.05,
    "bfloat16": 0.05,
    "fp16": 1e-2,
    "float16": 1e-2,
    "scalify": 1e-2,
    "mixed-precision": 1e-2,
}


def jvp(model, x):
    return torch.func.jvp(model, (x,), (x.cos(),))


def forward_mode(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos())))


def traced(model, x):
    return torch.jit.trace(model, (x + 0.5,))(x), None


def recorded(model, x):
    return make_fx(model)(x + 0.5)(x), None


TRANSFORMS = {"jvp": jvp, "forward mode": forward_mode, "jit.trace": traced, "make_fx": recorded}


def values(x):
    x = x.detach()
    return x.decode(torch.float64) if hasattr(x, "decode") else x.double()


def refuses(name, model, x):
    """Whether a transform of a model is refused, by what its parameters are."""
    kinds = {type(p.data) for p in model.parameters()}
    if name in ("make_fx", "jit.trace"):
        return bool(kinds & {ScaledTensor, MCTensor})
    return name == "jvp" and any(type(p.data) is MCTensor and p.dtype != x.dtype for p in model.parameters())


def followed(error, model, x):
    """The model and the input that a refusal asks for."""
    if way := re.search(r"halfulp\.(scaled|mctensor)\.(\w+)\(copy", str(error)):
        plain = getattr(getattr(hu, way[1]), way[2])(copy.deepcopy(model))
        return plain, x.to(next(plain.parameters()).dtype)
    assert "dtype" in str(error) or "type" in str(error), error  # torch's own words
    return model, x.to(next(model.parameters()).dtype)


def check(name, transform, model, plain, x):
    wanted = values(model(x))
    found, tangent = TRANSFORMS[transform](model, x)
    if "fp8" in name and transform == "jvp":
        # Inside torch.func layers do not see that a tensor is scaled, and round it to eight bits at once.
        assert (values(found) - wanted).norm() < 0.05 * wanted.norm()
    else:
        assert same_bits(values(found), wanted), (name, transform)
    if tangent is None:
        assert transform in ("jit.trace", "make_fx"), (name, transform, "the derivative is lost")
        return
    # Few bits move the derivative by more than a bound could tell: there it is that at the rounded numbers.
    reference = copy.deepcopy(model if name in ("fp8-training", "mxfp8", "nvfp4") else plain).double()
    with torch.no_grad():
        for own, p in zip(reference.parameters(), model.parameters()):
            own.copy_(values(p))
    _, exact = torch.func.jvp(reference, (x.double(),), (x.double().cos(),))
    near = max([size for word, size in NEAR.items() if word in name], default=1e-4)
    assert (values(tangent) - exact).norm() < near * exact.norm(), (name, transform)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("make", [normed, convolved])
@pytest.mark.parametrize("name", FEATURES)
def test_transforms_of_models(name, make, transform, seed):
    plain = make()
    model = FEATURES[name](copy.deepcopy(plain))
    x = torch.randn(3, WIDTH)
    if name.startswith("float32_"):
        x = x.to(next(model.parameters()).dtype)
    if not refuses(transform, model, x):
        check(name, transform, model, plain, x)
        return
    with pytest.raises((NotImplementedError, RuntimeError)) as refused:
        TRANSFORMS[transform](model, x)
    advised, given = followed(refused.value, model, x)
    check(name, transform, advised, plain, given)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_the_derivative_in_forward_mode(name, requires_grad, seed):
    x = torch.randn(6).requires_grad_(requires_grad)
    wanted = FUNCTIONS[name](x)
    with forward_ad.dual_level():
        found, tangent = forward_ad.unpack_dual(FUNCTIONS[name](forward_ad.make_dual(x, x.detach().cos())))
        assert same_bits(values(found), values(wanted))
        torch.testing.assert_close(values(tangent), 2 * x.detach().double().cos(), rtol=1e-2, atol=1e-2)


def test_a_recorded_encoding_is_refused_in_words(seed):
    x = torch.randn(6)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace would record .* of MCTensors"):
        torch.jit.trace(FUNCTIONS["components"], (x,))
    for function, kind in (
        (FUNCTIONS["components"], "MCTensor"),
        (lambda x: MCTensor.encode(x, 2).components[0], "MCTensor"),
        (FUNCTIONS["encode"], "ScaledTensor"),
        (lambda x: ScaledTensor.encode(x).payload, "ScaledTensor"),
    ):
        with pytest.raises(NotImplementedError, match=f"make_fx would record constants in place of {kind}s"):
            make_fx(function)(x)


def test_gradients_by_torch_func_of_products_in_eight_bits(seed):
    model, x = hu.scalify(normed(), matmul="fp8"), torch.randn(3, WIDTH)
    found = torch.func.grad(lambda x: model(x).sum())(x)
    x = x.requires_grad_()
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    assert (values(found) - values(wanted)).norm() < 0.1 * values(wanted).norm()
