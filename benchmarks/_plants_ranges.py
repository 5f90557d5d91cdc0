"""The other half of the plants: numbers that leave a range, quantizers, and two computations that should agree."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ._plant_net import FakeQuantize, Function, Net, Setup, apart, back, groups, sized, to
from ._plants import BRAIN, HALF, SINGLE, adamw, inside, plant, seen_output

Make = Callable[[str, int], Setup]


def nonfinite(tensor: Tensor) -> float:
    """The share of NaN and infinities."""
    return 1 - float(tensor.isfinite().double().mean())


def gradient(setup: Setup, name: str, scale: float = 1.0) -> Tensor:
    """The true gradient of a parameter for a batch, as a training's loss scale lets it arrive."""
    setup.optimizer.zero_grad()
    setup.loss(10_000, scale).backward()
    if setup.scaler is not None:
        setup.scaler.unscale_(setup.optimizer)
        setup.scaler.update()
    found = setup.model.get_parameter(name).grad
    assert found is not None
    found = found.detach().clone()
    setup.optimizer.zero_grad()
    return found


# ranges -----------------------------------------------------------------------------------------------------------


def cast_small(state: str, layer: int, down: float, scale: float) -> Setup:
    """Small numbers in float16; the cure multiplies by a power of two before the cast and divides after it."""
    model, small = Net(), 1.0 if state == "healthy" else down
    up = scale if state == "cured" else 1.0
    inside(model, layer, sized(small * up), to(HALF), to(SINGLE), sized(1 / (small * up)))
    place = f"blocks.{layer}"
    measure = lambda: apart(seen_output(model, f"{place}.mlp.before3"), seen_output(model, f"{place}.norm"))  # noqa: E731
    return Setup(model, adamw(groups(model, {})), measure)


SMALL = ("mlp.before1", "power of two", "multiplied by a power of two", "distance of the layer's input from float32's")


@plant("float16 outputs of size 1e-7", "activation-underflow", *SMALL)
def subnormal_outputs(state: str, layer: int) -> Setup:
    """All of them subnormal."""
    return cast_small(state, layer, 1e-7, 2.0**20)


@plant("float16 outputs of size 1e-10", "activation-underflow", *SMALL)
def vanished_outputs(state: str, layer: int) -> Setup:
    """All of them zero."""
    return cast_small(state, layer, 1e-10, 2.0**32)


def cast_steep(state: str, layer: int, factor: float, scale: float) -> Setup:
    """A float16 perceptron with small gradients; the cure scales the loss."""
    model = Net()
    steep = 1.0 if state == "healthy" else factor
    inside(model, layer, back(1 / steep), to(HALF), after=(to(SINGLE), back(steep)))
    setup = Setup(model, adamw(groups(model, {})), lambda: 0.0)
    if state == "cured":
        setup.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def measure() -> float:
        wide = copy.deepcopy(model)
        wide.blocks[layer].mlp.before1 = to(SINGLE)
        exact = Setup(wide, adamw(groups(wide, {})), lambda: 0.0)
        name = f"blocks.{layer}.mlp.up.weight"
        return apart(gradient(setup, name), gradient(exact, name))

    setup.measure = measure
    return setup


STEEP = ("mlp", "GradScaler", "a loss scale", "distance of the layer's gradient from float32's")


@plant("float16 gradients at the smallest numbers", "gradient-underflow", *STEEP)
def subnormal_gradients(state: str, layer: int) -> Setup:
    """A part of them is zero."""
    return cast_steep(state, layer, 2.0**-13, 2.0**13)


@plant("float16 gradients below the smallest number", "gradient-underflow", *STEEP)
def vanished_gradients(state: str, layer: int) -> Setup:
    """All of them are zero, those before and behind are not."""
    return cast_steep(state, layer, 2.0**-36, 2.0**36)


@plant(
    "a massive channel in float16",
    "overflow-near",
    "mlp.before1",
    "bfloat16",
    "the layer in bfloat16",
    "largest magnitude over the format's largest number",
)
def massive(state: str, layer: int) -> Setup:
    """One channel is 30,000."""
    model, large = Net(), 3.0 if state == "healthy" else 3e4
    dtype = BRAIN if state == "cured" else HALF
    mark = Function(lambda x: torch.cat([torch.full_like(x[..., :1], large), x[..., 1:]], -1))
    clear = Function(lambda x: torch.cat([torch.zeros_like(x[..., :1]), x[..., 1:]], -1))
    inside(model, layer, to(dtype), mark, to(SINGLE), clear)
    measure = lambda: float(seen_output(model, f"blocks.{layer}.mlp.before1").max()) / torch.finfo(dtype).max  # noqa: E731
    return Setup(model, adamw(groups(model, {})), measure)


def broken(layer: int, modules: tuple[nn.Module, ...], looked_at: str) -> Setup:
    """Modules before a perceptron; measured is how much of one's output is not finite, before any step."""
    model = Net()
    inside(model, layer, *modules)
    fresh = copy.deepcopy(model)
    measure = lambda: nonfinite(seen_output(fresh, f"blocks.{layer}.mlp.{looked_at}"))  # noqa: E731
    return Setup(model, adamw(groups(model, {})), measure, 6)


@plant(
    "an exponential in float16",
    "first-nonfinite",
    "mlp.before1",
    "float32 or bfloat16",
    "the layer in float32",
    "share of outputs that are not finite",
)
def exponential(state: str, layer: int) -> Setup:
    """Beyond 11 it is infinite."""
    steep = 1.0 if state == "healthy" else 8.0
    grow, undo = Function(lambda x: (steep * x).exp()), Function(lambda x: x.float().log() / steep)
    return broken(layer, (to(SINGLE if state == "cured" else HALF), grow, undo), "before1")


@plant(
    "a logarithm of negative numbers",
    "first-nonfinite",
    "mlp.before0",
    "bound",
    "its argument bounded",
    "share of outputs that are not finite",
)
def logarithm(state: str, layer: int) -> Setup:
    """In float32, which is no cure of it."""
    own = {"faulty": torch.log, "cured": lambda x: x.clamp_min(1e-3).log(), "healthy": lambda x: x}[state]
    return broken(layer, (Function(own),), "before0")


@plant(
    "a root of zero on the way back",
    "first-nonfinite",
    "norm",
    "eps inside",
    "an eps inside the root",
    "share of gradients that are not finite",
)
def root(state: str, layer: int) -> Setup:
    """The output of mlp.before0 is finite, and the gradient that it gives the norm before it 0 times infinity."""
    eps = 0.0 if state == "faulty" else 1e-6
    spread = 1.0 if state == "healthy" else 0.0
    setup = broken(layer, (Function(lambda x: (x.square() * spread + eps).sqrt() + x),), "before0")
    fresh = copy.deepcopy(setup.model)
    exact = Setup(fresh, adamw(groups(fresh, {})), lambda: 0.0)
    setup.measure = lambda: nonfinite(gradient(exact, f"blocks.{layer}.norm.weight"))
    return setup


@plant(
    "an eps of 0 in float16",
    "eps-zero",
    "mlp.up",
    "eps=",
    "eps=1e-4",
    "share of weights that are not finite",
)
def eps(state: str, layer: int) -> Setup:
    """The default, where second moments underflow too."""
    model, name = Net(), f"blocks.{layer}.mlp.up"
    if state != "healthy":
        model.get_submodule(name).half()
    own = {f"{name}.": {"eps": 1e-4} if state == "cured" else {}}
    measure = lambda: nonfinite(model.get_parameter(f"{name}.weight").detach())  # noqa: E731
    return Setup(model, adamw(groups(model, own)), measure, 6)


class Wide(nn.Sequential):
    """Runs in float32 whatever is around it."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@plant(
    "a layer that holds the loss scale",
    "site-holds-scale",
    "mlp",
    "in float32",
    "the layer in float32",
    "distance of another layer's gradient from float32's",
)
def holding(state: str, layer: int) -> Setup:
    """Its gradients are 2^32 times the others'."""
    model, steep = Net(), 1.0 if state == "healthy" else 2.0**32
    inside(model, layer, back(1 / steep), after=(back(steep),))
    if state == "cured":
        model.blocks[layer].mlp = Wide(OrderedDict(model.blocks[layer].mlp._modules))
    setup = Setup(model, adamw(groups(model, {})), lambda: 0.0, 30, lambda step: 2.0**-20, autocast=True)
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1)

    def measure() -> float:
        wide = copy.deepcopy(model)
        exact = Setup(wide, adamw(groups(wide, {})), lambda: 0.0)
        name = f"blocks.{(layer + 3) % 6}.mlp.up.weight"
        return apart(gradient(setup, name, 2.0**-20), gradient(exact, name, 2.0**-20))

    setup.measure = measure
    return setup


# quantizers -------------------------------------------------------------------------------------------------------


def stored(state: str, layer: int, modules: dict[str, tuple[nn.Module, ...]]) -> Setup:
    """A quantizer before a perceptron; measured is how far its output is from its input."""
    model = Net()
    inside(model, layer, *modules[state])
    place, last = f"blocks.{layer}", len(modules[state]) - 1
    measure = lambda: apart(seen_output(model, f"{place}.mlp.before{last}"), seen_output(model, f"{place}.norm"))  # noqa: E731
    return Setup(model, adamw(groups(model, {})), measure)


QUANTIZED = ("scale from the data", "distance of its output from its input")


@plant("a quantizer's step that is too large", "quantized-to-zero", "mlp.before0", QUANTIZED[0], "mxfp8", QUANTIZED[1])
def coarse(state: str, layer: int) -> Setup:
    """Calibrated on other data; the cure takes scales from blocks."""
    import halfulp as hu

    def steps(size: float) -> tuple[nn.Module, ...]:
        return (FakeQuantize(lambda x: x + (torch.round(x / size) * size - x).detach()),)

    blocks = FakeQuantize(lambda x: x + (hu.quantize(x, "mxfp8_e4m3") - x).detach())
    return stored(state, layer, {"healthy": steps(0.01), "faulty": steps(50.0), "cured": (blocks,)})


@plant(
    "an e4m3 scale from long ago",
    "payload-saturated",
    "mlp.before0",
    "scale",
    "the scale from the present tensor",
    "distance of its output from its input",
)
def old_scale(state: str, layer: int) -> Setup:
    """A quarter of the elements are cut off."""
    chosen: list[Any] = [2.0**-9 if state == "faulty" else 2.0**-6]

    def put(x: Tensor) -> Tensor:
        if state == "cured":
            chosen[0] = 2 * x.detach().abs().amax() / 448  # with a binade to spare: what rounds to 448 is not cut off
        return (x / chosen[0]).clamp(-448, 448).to(torch.float8_e4m3fn)

    modules = (Function(put), Function(lambda x: x.float() * chosen[0]))
    return stored(state, layer, dict.fromkeys(("healthy", "faulty", "cured"), modules))


def afterwards(state: str, layer: int, before: tuple[nn.Module, ...], place: str, formats: dict[str, str]) -> Setup:
    """A module whose output is rounded to a format afterwards, as `quantized=` says."""
    import halfulp as hu

    model = Net()
    inside(model, layer, *before)
    name, format = f"blocks.{layer}.{place}", formats[state]

    def measure() -> float:
        out = seen_output(model, name)
        return apart(hu.quantize(out, format), out)

    # Gradients are rounded to the format too: the loss is as large as that needs.
    return Setup(
        model, adamw(groups(model, {})), measure, scale=lambda step: 256.0, watched={"quantized": {name: format}}
    )


@plant(
    "outputs beyond e4m3 under quantized=",
    "payload-saturated",
    "mlp.before0",
    "scale",
    "mxfp8_e4m3",
    "distance of the rounded output from the output",
)
def beyond(state: str, layer: int) -> Setup:
    """Rounded without a scale."""
    large = 1.0 if state == "healthy" else 1000.0
    formats = {"healthy": "e4m3fn", "faulty": "e4m3fn", "cured": "mxfp8_e4m3"}
    return afterwards(state, layer, (sized(large), sized(1 / large)), "mlp.before0", formats)


@plant(
    "a massive channel in mxfp4",
    "block-hidden",
    "mlp.before0",
    "mxfp8_e5m2",
    "mxfp8_e5m2",
    "share of elements that become 0",
)
def hidden(state: str, layer: int) -> Setup:
    """One in each block of 32."""
    import halfulp as hu

    large = 1.0 if state == "healthy" else 1000.0
    mark = Function(lambda x: torch.cat([torch.full_like(x[..., :1], large), x[..., 1:]], -1))
    formats = {"healthy": "mxfp4", "faulty": "mxfp4", "cured": "mxfp8_e5m2"}
    clear = Function(lambda x: torch.cat([torch.zeros_like(x[..., :1]), x[..., 1:]], -1))
    setup = afterwards(state, layer, (mark, clear), "mlp.before0", formats)

    def measure() -> float:
        out = seen_output(setup.model, f"blocks.{layer}.mlp.before0")
        return float((hu.quantize(out, formats[state]) == 0).double().mean())

    setup.measure = measure
    return setup


@plant(
    "gradients in e2m1 without a scale",
    "gradient-below-noise",
    "mlp.down",
    "smaller blocks",
    "nvfp4",
    "distance of the rounded gradient from the gradient",
)
def noise(state: str, layer: int) -> Setup:
    """Four bits for gradients that are small beside the format's smallest number."""
    import halfulp as hu

    formats = {"healthy": "mxfp8_e4m3", "faulty": "e2m1fn", "cured": "nvfp4"}
    setup = afterwards(state, layer, (), "mlp.down", formats)
    setup.scale = lambda step: 1.0

    def measure() -> float:
        kept: list[Tensor] = []
        hook = lambda module, inputs, output: output.register_hook(kept.append) and None  # noqa: E731
        handle = setup.model.blocks[layer].mlp.down.register_forward_hook(hook)
        setup.loss(0, setup.scale(0)).backward()
        handle.remove()
        return apart(hu.quantize(kept[0], formats[state]), kept[0])

    setup.measure = measure
    return setup


# two computations -------------------------------------------------------------------------------------------------


@plant(
    "a checkpointed layer that draws again",
    "recompute-differs",
    "mlp",
    "preserve_rng_state",
    "preserve_rng_state=True",
    "distance of the gradient from that without a checkpoint",
)
def recomputed(state: str, layer: int) -> Setup:
    """Dropout in a layer that runs twice."""
    model = Net()
    up, act, down = model.blocks[layer].mlp
    inner = nn.Sequential(up, act, nn.Dropout(0.0 if state == "healthy" else 0.3), down)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.off = inner, False

        def forward(self, x: Tensor) -> Tensor:
            if self.off:
                return self.layers(x)
            return checkpoint(self.layers, x, use_reentrant=False, preserve_rng_state=state == "cured")

    held = model.blocks[layer].mlp = Checkpointed()
    setup = Setup(model, adamw(groups(model, {})), lambda: 0.0, watched={"check": True})

    def measure() -> float:
        found = []
        for held.off in (True, False):
            torch.manual_seed(7)
            found.append(gradient(setup, f"blocks.{layer}.mlp.layers.0.weight"))
        return apart(found[1], found[0])

    setup.measure = measure
    return setup


@plant(
    "states from before a cast",
    "state-mismatch",
    "mlp.up",
    "make the optimizer after",
    "the optimizer made after the cast",
    "distance of the momentum from float32's",
)
def mismatched(state: str, layer: int) -> Setup:
    """One step in bfloat16, then the rest in float32."""
    model, name = Net(), f"blocks.{layer}.mlp.up"

    def sgd(one: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups(one, {}), lr=0.01, momentum=0.9)

    setup = Setup(model, sgd(model), lambda: 0.0)
    twin: list[Setup] = []

    def prepare(_) -> None:
        if state != "healthy":
            model.get_submodule(name).bfloat16()
            setup.step(100)
            model.get_submodule(name).float()
        if state == "cured":
            setup.optimizer = sgd(model)
        other = copy.deepcopy(model)
        exact = Setup(other, sgd(other), lambda: 0.0)
        if state == "faulty":
            own = {id(a): b for a, b in zip(model.parameters(), other.parameters(), strict=True)}
            for parameter, held in setup.optimizer.state.items():
                exact.optimizer.state[own[id(parameter)]] = {"momentum_buffer": held["momentum_buffer"].float()}
        twin.append(exact)

    def measure() -> float:
        twin[0].train()
        buffers = [
            one.optimizer.state[one.model.get_submodule(name).weight]["momentum_buffer"] for one in (setup, *twin)
        ]
        return apart(buffers[0].float(), buffers[1])

    setup.prepare, setup.measure = prepare, measure
    return setup
