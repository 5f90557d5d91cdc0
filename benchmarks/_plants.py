"""Twenty-eight faults, each in one layer: the code and the place that must come first, the cure, and what it mends."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._plant_net import (
    WIDTH,
    Function,
    Net,
    Setup,
    apart,
    batch,
    float32_twin,
    groups,
    missing,
)

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
STATES = ("healthy", "faulty", "cured")
LR = 1e-3


@dataclass(frozen=True)
class Plant:
    """A fault.

    Attributes:
        name: in words.
        code: what must be found first.
        place: what a name of the first finding must be or begin with, within the block; "" is the block itself.
        cure: a word that the finding's cure must have.
        mended: what is done, in words.
        measured: what is measured, in words.
        make: makes the training of a state in the block of a number.
    """

    name: str
    code: str
    place: str
    cure: str
    mended: str
    measured: str
    make: Callable[[str, int], Setup]


PLANTS: dict[str, Plant] = {}


def plant(name: str, code: str, place: str, cure: str, mended: str, measured: str) -> Callable:
    """List a function that makes the three states of a fault."""

    def enter(make: Callable[[str, int], Setup]) -> Callable:
        PLANTS[name] = Plant(name, code, place, cure, mended, measured, make)
        return make

    return enter


def adamw(params: list, **options) -> torch.optim.Optimizer:
    """The usual optimizer."""
    return torch.optim.AdamW(params, **{"lr": LR, "weight_decay": 0.0, **options})


def ours(params: list, **options) -> torch.optim.Optimizer:
    """The usual optimizer of halfulp."""
    import halfulp as hu

    return hu.optim.AdamW(params, **{"lr": LR, "weight_decay": 0.0, **options})


def inside(model: Net, layer: int, *before: nn.Module, after: tuple[nn.Module, ...] = ()) -> None:
    """Put modules before and after a block's perceptron."""
    own = OrderedDict((f"before{k}", one) for k, one in enumerate(before))
    own |= model.blocks[layer].mlp._modules
    own |= {f"after{k}": one for k, one in enumerate(after)}
    model.blocks[layer].mlp = nn.Sequential(own)


def seen_output(model: nn.Module, name: str) -> Tensor:
    """The output of a module for a batch."""
    kept: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda module, inputs, output: kept.append(output))
    with torch.no_grad():
        model(batch(0)[0])
    handle.remove()
    return kept[0].float()


# updates ----------------------------------------------------------------------------------------------------------


def narrow_layer(name: str, lr: float, state: str, layer: int, mended: dict[str, str], **options) -> Setup:
    """A module in bfloat16 with a learning rate of its own; healthy is float32, the cure a weight update or float32."""
    model, start = Net(), f"blocks.{layer}.{name}"
    module, own = model.get_submodule(start), {f"{start}.": {"lr": lr, **options}}
    if state != "healthy":
        module.bfloat16().float()  # the same weights in all states
    first = copy.deepcopy(model)

    def train(twin: nn.Module) -> None:
        Setup(twin, adamw(groups(twin, own)), lambda: 0.0, steps=24).train()

    twin = float32_twin(model, train)
    if state != "healthy" and not (state == "cured" and mended["kind"] == "float32"):
        module.bfloat16()
    kahan = state == "cured" and mended["kind"] == "kahan"
    optimizer = ours(groups(model, own), weight_update="kahan") if kahan else adamw(groups(model, own))

    def measure() -> float:
        shown = copy.deepcopy(model)
        if kahan:
            shown.float().load_state_dict(optimizer.float32_state_dict(model))
        return max(0.0, missing(shown, first, twin, f"{start}.weight"))

    return Setup(model, optimizer, measure, steps=24)


@plant(
    "bfloat16 weights at lr 1e-5",
    "updates-lost",
    "mlp.up",
    "kahan",
    "weight_update='kahan'",
    "movement that float32 makes and this does not",
)
def small_lr(state: str, layer: int) -> Setup:
    """Updates below half a spacing."""
    return narrow_layer("mlp.up", 1e-5, state, layer, {"kind": "kahan"})


@plant(
    "a bfloat16 norm at lr 3e-4",
    "updates-lost",
    "norm",
    "float32",
    "the norm in float32",
    "movement that float32 makes and this does not",
)
def norm_weights(state: str, layer: int) -> Setup:
    """Weights of 1."""
    return narrow_layer("norm", 3e-4, state, layer, {"kind": "float32"})


@plant(
    "bfloat16 weights that do not decay",
    "weight-decay-lost",
    "mlp.down",
    "kahan",
    "weight_update='kahan'",
    "distance from float32's weights, over that of its decay",
)
def decay(state: str, layer: int) -> Setup:
    """Updates are large enough, their decay is not."""
    name = f"blocks.{layer}.mlp.down"
    model = Net()
    own = {f"{name}.": {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.9)}}
    module = model.get_submodule(name).bfloat16().float()
    first, twin = module.weight.detach().clone(), copy.deepcopy(model)
    if state != "healthy":
        module.bfloat16()
    kahan = state == "cured"
    optimizer = ours(groups(model, own), weight_update="kahan") if kahan else adamw(groups(model, own))
    generators = {id(one): torch.Generator().manual_seed(5) for one in (model, twin)}

    def drive(one: nn.Module) -> None:
        """Gradients that are random numbers leave decay as all that happens on average."""
        weight, generator = one.get_parameter(f"{name}.weight"), generators[id(one)]
        draw = lambda gradient: torch.randn(gradient.shape, generator=generator).to(gradient.dtype)  # noqa: E731
        weight.register_hook(draw)

    drive(model), drive(twin)
    Setup(twin, adamw(groups(twin, own)), lambda: 0.0, steps=60).train()

    def share(weight: Tensor) -> float:
        return float((weight.detach().float() * first).sum() / (first * first).sum())

    def measure() -> float:
        shown = optimizer.float32_state_dict(model)[f"{name}.weight"] if kahan else module.weight
        wanted = 1 - (1 - 2e-4) ** 60
        return abs(share(shown) - share(twin.get_parameter(f"{name}.weight"))) / wanted

    return Setup(model, optimizer, measure, steps=60)


@plant(
    "a weight that is written back",
    "weight-frozen",
    "mlp.up",
    "writes its old value back",
    "the line that writes it removed",
    "movement that float32 makes and this does not",
)
def written_back(state: str, layer: int) -> Setup:
    """A copy of before the training is put back after each step."""
    model, name = Net(), f"blocks.{layer}.mlp.up"
    first = copy.deepcopy(model)
    twin = float32_twin(model, lambda one: Setup(one, adamw(groups(one, {})), lambda: 0.0).train())
    weight, kept = model.get_submodule(name).weight, first.get_submodule(name).weight.detach()

    def after() -> None:
        with torch.no_grad():
            weight.copy_(kept)

    measure = lambda: missing(model, first, twin, f"{name}.weight")  # noqa: E731
    setup = Setup(model, adamw(groups(model, {})), measure)
    if state == "faulty":
        setup.after = after
    return setup


@plant(
    "a layer left out of the optimizer",
    "never-stepped",
    "mlp.down",
    "give it to the optimizer",
    "given to the optimizer",
    "movement that float32 makes and this does not",
)
def left_out(state: str, layer: int) -> Setup:
    """Parameters that the optimizer was not given."""
    model, name = Net(), f"blocks.{layer}.mlp.down"
    first = copy.deepcopy(model)
    twin = float32_twin(model, lambda one: Setup(one, adamw(groups(one, {})), lambda: 0.0).train())
    optimizer = adamw(groups(model, {}, (f"{name}.",) if state == "faulty" else ()))
    return Setup(model, optimizer, lambda: missing(model, first, twin, f"{name}.weight"))


# sums -------------------------------------------------------------------------------------------------------------


@plant(
    "a bfloat16 second moment that cannot fall",
    "second-moment-stuck",
    "mlp.up",
    "state_dtype",
    "state_dtype=torch.float32",
    "distance of the second moment from float32's",
)
def second_moment(state: str, layer: int) -> Setup:
    """Gradients fall to a thirtieth after three steps."""
    name = f"blocks.{layer}.mlp.up"
    model, own = Net(), {f"blocks.{layer}.mlp.up.": {"lr": 1e-2}}
    scale = lambda step: 30.0 if step < 3 else 1.0  # noqa: E731
    twin = copy.deepcopy(model)
    wide = adamw(groups(twin, own))
    Setup(twin, wide, lambda: 0.0, 40, scale).train()
    if state != "healthy":
        model.get_submodule(name).bfloat16()
    cured = state == "cured"
    optimizer = ours(groups(model, own), state_dtype=SINGLE) if cured else adamw(groups(model, own))

    def measure() -> float:
        weight = model.get_submodule(name).weight
        wanted = wide.state[twin.get_submodule(name).weight]["exp_avg_sq"]
        held = optimizer.state[weight]
        return apart(held["exp_avg_sq" if "exp_avg_sq" in held else "second_moment"].float(), wanted)

    return Setup(model, optimizer, measure, 40, scale)


def summed(state: str, layer: int, micro: int, penalty: float, spread: float) -> Setup:
    """Gradients of micro-batches in a bfloat16 layer, after a penalty."""
    import halfulp as hu

    model, name = Net(), f"blocks.{layer}.mlp.down"
    module = model.get_submodule(name).bfloat16()
    if state == "healthy":
        module.float()
    if state == "cured":
        hu.float32_gradients(model)
    weight = module.weight
    exact, errors = torch.zeros(weight.shape, dtype=torch.float64), []
    generator = torch.Generator().manual_seed(3)
    tilt = torch.linspace(0.5, 1.5, weight.numel()).reshape(weight.shape)

    def arrives(gradient: Tensor) -> Tensor:
        if spread:  # gradients of examples that are much alike
            noise = 1 + spread * torch.randn(weight.shape, generator=generator)
            gradient = (tilt * noise).to(gradient.dtype) * 1e-3
        exact.add_(gradient.double())
        return gradient

    weight.register_hook(arrives)
    optimizer = (ours if state == "cured" else adamw)(groups(model, {f"{name}.": {"lr": 1e-2}}))

    def before() -> None:
        exact.zero_()
        if penalty:
            (penalty * weight.float().sum()).backward()

    def added(*_) -> None:
        total = getattr(weight, "float32_grad", None)
        total = (weight.grad if total is None else total).detach().double()
        errors.append(float((total - exact).norm() / (exact - penalty).norm()))

    optimizer.register_step_pre_hook(added)
    return Setup(model, optimizer, lambda: max(errors), 4, micro=micro, before=before, size=16)


@plant(
    "a penalty before the micro-batches",
    "accumulation-swamped",
    "mlp.down",
    "float32_gradients",
    "hu.float32_gradients(model)",
    "distance of the summed gradient from the exact sum",
)
def penalty_first(state: str, layer: int) -> Setup:
    """A large term in a bfloat16 sum."""
    return summed(state, layer, 6, 30.0, 0.0)


@plant(
    "96 micro-batches summed in bfloat16",
    "accumulation-swamped",
    "mlp.down",
    "float32_gradients",
    "hu.float32_gradients(model)",
    "distance of the summed gradient from the exact sum",
)
def many_micro_batches(state: str, layer: int) -> Setup:
    """Each addition is small beside the sum."""
    return summed(state, layer, 96, 0.0, 0.05)


@plant(
    "an average of the weights in bfloat16",
    "average-stuck",
    "mlp.up",
    "EMA",
    "hu.optim.EMA",
    "distance of the average from float32's, over its movement",
)
def average(state: str, layer: int) -> Setup:
    """An EMA one layer of which is in bfloat16."""
    import halfulp as hu

    model, name = Net(), f"blocks.{layer}.mlp.up.weight"
    exact = model.get_parameter(name).detach().clone()
    first = exact.clone()
    decay = 0.999
    if state == "cured":
        averaged = hu.optim.EMA(model, decay=decay)
        update = averaged.update
    else:
        averaged = torch.optim.swa_utils.AveragedModel(model, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(decay))
        averaged.update_parameters(model)
        if state == "faulty":
            averaged.module.blocks[layer].mlp.up.bfloat16()
        update = lambda: averaged.update_parameters(model)  # noqa: E731

    def after() -> None:
        exact.lerp_(model.get_parameter(name).detach(), 1 - decay)
        update()

    def measure() -> float:
        found = (
            averaged.float32_state_dict()[name] if state == "cured" else averaged.module.get_parameter(name).detach()
        )
        start = first.bfloat16() if state == "faulty" else first
        return apart(found.float() - start.float(), exact - first)

    return Setup(model, adamw(groups(model, {})), measure, 24, after=after, watched={"average": averaged})


@plant(
    "a bfloat16 stream that is too large",
    "residual-swamped",
    "mlp.down",
    "float32",
    "the stream in float32",
    "share of what the layer adds that is not in the sum",
)
def residual(state: str, layer: int) -> Setup:
    """The stream is scaled up before a block, and down after it."""
    model = Net()
    block, factor = model.blocks[layer], 1.0 if state == "healthy" else 3000.0
    lost: list[float] = []

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = block.norm, block.mlp
            self.leave = Function(lambda stream: stream.float() / factor)

        def forward(self, x: Tensor) -> Tensor:
            stream = (x * factor).to(SINGLE if state == "cured" else BRAIN)
            added = self.mlp(self.norm(stream).to(BRAIN))
            out = stream + added
            change = out.detach().double() - stream.detach().double()
            wanted = added.detach().double()
            lost.append(1 - float((change * wanted).sum() / wanted.square().sum()))
            return self.leave(out) + added.float() * (1 - 1 / factor)

    model.blocks[layer] = Scaled()
    return Setup(model, adamw(groups(model, {})), lambda: abs(lost[-1]))


@plant(
    "positions counted in bfloat16",
    "positions-collide",
    "positions",
    "float32",
    "positions in int64, angles in float32",
    "share of neighbouring positions with one code",
)
def positions(state: str, layer: int) -> Setup:
    """600 positions in a block."""
    model, length = Net(), 600
    counted = BRAIN if state == "faulty" else SINGLE
    block = model.blocks[layer]

    def codes(x: Tensor) -> Tensor:
        angles = torch.arange(length, dtype=counted)[:, None] * 10000 ** -torch.linspace(0, 1, WIDTH // 2).to(counted)
        return torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.norm, self.mlp = Function(codes), block.norm, block.mlp

        def forward(self, x: Tensor) -> Tensor:
            spread = x[:, None] + self.positions(x)[None]
            return x + self.mlp(self.norm(spread)).mean(1)

    model.blocks[layer] = Placed()

    def measure() -> float:
        rows = codes(torch.zeros(1))
        return float((rows[1:] == rows[:-1]).all(1).double().mean())

    return Setup(model, adamw(groups(model, {})), measure, 6, size=4)
