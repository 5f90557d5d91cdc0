"""torch.optim on multi-component parameters: small updates are kept, and training follows float64's."""

import copy
import io

import pytest
import torch
from torch import nn

from halfulp.mctensor import MCTensor
from halfulp.mctensor._convert_model import multicomponent
from halfulp.subclass import strict

# An eps well above the gradients' errors: without it a first step is the sign of the gradient, and that of one next to
# zero is anyone's.
EPS = {"eps": 0.01}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, **EPS}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, **EPS}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True, **EPS}),
}
# Most that a weight may differ from float64's after thirty steps.
KINDS = {
    "fp16x2": (torch.float16, 2, 2**-15),
    "bf16x3": (torch.bfloat16, 3, 2**-18),
    "fp32x2": (torch.float32, 2, 2**-38),
    "fp64x2": (torch.float64, 2, 2**-40),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    # Exact in every narrow type, so that all start from the same data.
    inputs = (torch.randint(-16, 17, (steps, 16, 4)) / 16).double()
    return [(x, x.sum(1, keepdim=True).sin().bfloat16().double()) for x in inputs]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list, dtype: torch.dtype) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    for x, y in data:
        optimizer.zero_grad()
        (model(x.to(dtype)) - y.to(dtype)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


def distance(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters())
    return max(float((a.detach().decode() - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_follows_float64(name, kind, foreach, seed):
    """Gradients with all components, clipped, under a schedule; nothing falls back."""
    make, options = OPTIMIZERS[name]
    dtype, components, most = KINDS[kind]
    start = net()
    data = batches(30 if kind != "fp64x2" else 8)
    ours = multicomponent(copy.deepcopy(start), components, dtype, gradients="components")
    with strict():
        train(ours, make(ours.parameters(), **options, foreach=foreach), data, dtype)
    train(start, make(start.parameters(), **options), data, torch.float64)
    assert all(isinstance(parameter, MCTensor) for parameter in ours.parameters())
    assert distance(ours, start) <= most


@pytest.mark.parametrize(("dtype", "components"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 2)])
def test_updates_below_half_an_ulp_are_kept_where_one_component_loses_them(dtype, components):
    ulp = torch.finfo(dtype).eps
    update, steps = ulp / 8, 64

    def moved(parameter: nn.Parameter) -> float:
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        for _ in range(steps):
            parameter.grad = torch.full((3,), update, dtype=dtype)
            optimizer.step()
        value = parameter.detach().double() if type(parameter) is nn.Parameter else parameter.detach().decode()
        return float((1 - value).mean())

    assert moved(nn.Parameter(torch.ones(3, dtype=dtype))) < update * steps / 2
    assert moved(nn.Parameter(MCTensor.encode(torch.ones(3, dtype=dtype), components))) == update * steps


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_plain_gradients_train_to_the_precision_of_their_first_component(name, seed):
    make, options = OPTIMIZERS[name]
    start = net()
    data = batches(30)
    ours = multicomponent(copy.deepcopy(start), 2, torch.float32)
    train(ours, make(ours.parameters(), **options), data, torch.float32)
    train(start, make(start.parameters(), **options), data, torch.float64)
    assert distance(ours, start) <= 1e-5


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_optimizers_state_is_saved_and_resumed_with_the_same_bits(name, seed):
    make, options = OPTIMIZERS[name]
    data = batches(6)
    model = multicomponent(net(), 2, torch.bfloat16)
    optimizer = make(model.parameters(), **options)
    train(model, optimizer, data[:3], torch.bfloat16)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = multicomponent(net(), 2, torch.bfloat16)
    other.load_state_dict(saved["model"])
    resumed = make(other.parameters(), **options)
    resumed.load_state_dict(saved["optimizer"])
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, data[3:], torch.bfloat16)
    for a, b in zip(model.parameters(), other.parameters()):
        assert all(map(torch.equal, a.components, b.components))


def test_a_gradient_norm_is_that_of_the_values(seed):
    model = multicomponent(net(), 2, torch.float32, gradients="components")
    start = net()
    model.load_state_dict(start.state_dict())
    x, y = batches(1)[0]
    for one, dtype in ((model, torch.float32), (start, torch.float64)):
        (one(x.to(dtype)) - y.to(dtype)).square().mean().backward()
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, start)]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-6)
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)) == pytest.approx(0.1, rel=1e-4)
