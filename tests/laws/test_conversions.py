"""Law: over every copy, conversion, recipe and optimizer, frozen parameters stay frozen and trainable ones train."""

import contextlib
import copy
import inspect
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp import optim, recipes
from halfulp.mctensor import single_component
from halfulp.scaled import unscalify

from .optim.cases import optimizer_names


def net() -> nn.Module:
    """Frozen and trainable parameters beside each other, in one module and in several, tied ones too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[0].bias.requires_grad_(False)
    model[1].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    model[3].weight = model[0].weight
    return model


def grads(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}


WANTED = grads(net())

# Models as they are when something is done with them.
STARTS: dict[str, Callable[[], nn.Module]] = {
    "plain": net,
    "scaled": lambda: hu.scalify(net()),
    "components": lambda: hu.multicomponent(net(), 2, torch.float16),
    "converted": lambda: hu.convert(net(), "bf16-kahan"),
}


def pickled(x: object) -> object:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def loaded(model: nn.Module, **options) -> nn.Module:
    other = copy.deepcopy(model).requires_grad_(True)
    model.load_state_dict(other.state_dict(), **options)
    return model


def parameter_by_parameter(copied: Callable) -> Callable[[nn.Module], nn.Module]:
    def way(model: nn.Module) -> nn.Module:
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    setattr(module, key, made.setdefault(id(parameter), copied(parameter)))
        return model

    return way


def trained(model: nn.Module, make: Callable) -> nn.Module:
    """A step, its state and the float32 weights saved and loaded."""
    # Frozen parameters go in as they do by model.parameters().
    optimizer = make(model)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if hasattr(optimizer, "load_float32_state_dict"):
        optimizer.load_float32_state_dict(model, optimizer.float32_state_dict(model))
    return model


def averaged(model: nn.Module) -> nn.Module:
    ema = optim.EMA(model)
    ema.update()
    with ema.apply():
        assert grads(model) == WANTED
    return model


# Copies, and whatever hands a model on, of any start.
COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": pickled,
    "parameters: deepcopy": parameter_by_parameter(copy.deepcopy),
    "parameters: torch.save": parameter_by_parameter(pickled),
    "parameters: pickle": parameter_by_parameter(lambda p: pickle.loads(pickle.dumps(p))),
    "to": lambda model: model.to("cpu", torch.float64),
    "half": lambda model: model.half(),
    "load_state_dict": loaded,
    "load_state_dict, assign": lambda model: loaded(model, assign=True),
    "share_memory": lambda model: model.share_memory(),
    "float32_gradients": hu.float32_gradients,
    "float32_products": hu.float32_products,
    "float32_products, off again": lambda model: hu.float32_products(hu.float32_products(model), enabled=False),
}
# Conversions of a plain model.
CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "scalify": hu.scalify,
    "scalify, e5m2": lambda model: hu.scalify(model, torch.float8_e5m2),
    "emulate": lambda model: hu.emulate(model, "e8m5") and model,
    **{
        f"multicomponent, {dtype}, {mode}": lambda model, dtype=dtype, mode=mode: hu.multicomponent(
            model, 2, dtype, gradients=mode
        )
        for dtype in (torch.float16, torch.float32)
        for mode in ("first", "components")
    },
    "scalify and back": lambda model: unscalify(hu.scalify(model)),
    "scalify again": lambda model: hu.scalify(hu.scalify(model), torch.bfloat16),
    "scalify, rescale": lambda model: hu.scalify(model, rescale=None),
    "multicomponent and back": lambda model: single_component(hu.multicomponent(model)),
    "multicomponent again": lambda model: hu.multicomponent(hu.multicomponent(model, 2), 3),
    **{f"convert, {name}": lambda model, name=name: hu.convert(model, name) for name in recipes.names()},
    **{f"revert, {name}": lambda model, name=name: hu.revert(hu.convert(model, name)) for name in recipes.names()},
    "AdaptiveGradScaler": lambda model: hu.AdaptiveGradScaler(model) and model,
    "verify": lambda model: hu.verify(model, torch.randn(3, 4), "scaled-fp16") and model,
    "explain": lambda model: hu.explain(model, "bf16") and model,
    "fallbacks": lambda model: (hu.fallbacks(hu.scalify(model)), model)[1],
    "EMA": averaged,
    "wrap": lambda model: trained(model, lambda m: optim.wrap(torch.optim.SGD, m.parameters(), lr=0.1)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("start", STARTS)
def test_copies_keep_requires_grad(start: str, way: str, seed: int) -> None:
    assert grads(STARTS[start]()) == WANTED
    after = COPIES[way](STARTS[start]())
    assert grads(after) == WANTED
    # torch unties what it assigns.
    assert after[3].weight is after[0].weight or way == "load_state_dict, assign"


@pytest.mark.parametrize("way", CONVERSIONS)
def test_conversions_keep_requires_grad(way: str, seed: int) -> None:
    after = CONVERSIONS[way](net())
    assert grads(after) == WANTED
    assert after[3].weight is after[0].weight


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", optimizer_names())
def test_optimizers_keep_requires_grad(rule: str, dtype: torch.dtype | None, seed: int) -> None:
    model = net()
    model.register_forward_pre_hook(lambda module, args: (args[0].to(module[0].weight.dtype),))
    make = optim.OPTIMIZERS[rule]

    def made(m):
        matrices = {"params": [p for p in m.parameters() if p.dim() == 2]}
        others = {"params": [p for p in m.parameters() if p.dim() != 2], "use_muon": False, "lr": 0.1}
        return make([matrices, others] if rule == "Muon" else m.parameters(), lr=0.1, param_dtype=dtype)

    assert grads(trained(model, made)) == WANTED


@pytest.mark.parametrize("start", ["scaled", "converted"])
def test_the_whole_course_of_a_training_keeps_requires_grad(start: str, seed: int) -> None:
    model = trained(STARTS[start](), lambda m: optim.AdamW(m.named_parameters(), lr=0.1))
    assert grads(model) == WANTED
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert frozen


def watched(model: nn.Module) -> nn.Module:
    with hu.observe(model, torch.optim.SGD(model.parameters(), lr=0.1), interval=1):
        model(torch.randn(3, 4)).square().mean().backward()
    model.zero_grad()
    return model


def forecast(model: nn.Module) -> nn.Module:
    hu.forecast(model, 1e-3, "linear", steps=10, dtype=torch.bfloat16)
    return model


def contracted(model: nn.Module) -> nn.Module:
    hu.contract(model).check(model)
    return model


# Functions that look at a model and leave it as it is.
READERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "observe": watched,
    "forecast": forecast,
    "contract": contracted,
}


# Functions that leave codes in the place of weights.
AFTER_TRAINING = ("multipoint",)


@pytest.mark.parametrize("reader", READERS)
def test_readers_keep_requires_grad(reader: str, seed: int) -> None:
    assert grads(READERS[reader](net())) == WANTED


def test_every_function_of_the_face_that_takes_a_model_is_here() -> None:
    """Whoever adds one adds it to the lists above."""
    named = " ".join([*COPIES, *CONVERSIONS, *READERS, *AFTER_TRAINING])
    for name in dir(hu):
        found = getattr(hu, name)
        if not callable(found) or inspect.ismodule(found):
            continue
        with contextlib.suppress(ValueError, TypeError):
            if next(iter(inspect.signature(found).parameters), None) == "model":
                assert name in named, f"hu.{name} takes a model: does it keep requires_grad?"
