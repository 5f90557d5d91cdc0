"""Faults that go into one layer of a GPT, each with the code that must be found and a word of its cure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ._finding_gpt import Training
from ._plant_net import FakeQuantize, Function

HALF, BRAIN = torch.float16, torch.bfloat16
NAMES = ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.0", "mlp.2")
PRODUCTS = ("attention.qkv", "attention.out", "mlp.0", "mlp.2")


@dataclass(frozen=True)
class Plant:
    """A fault.

    Attributes:
        code: what must be found.
        cure: a word that its cure must have.
        put: puts it into the layer of a training.
    """

    code: str
    cure: str
    put: Callable[[Training, random.Random], None]


PLANTS: dict[str, Plant] = {}


def plant(code: str, cure: str) -> Callable:
    """List a function that plants a code."""

    def enter(put: Callable[[Training, random.Random], None]) -> Callable:
        PLANTS[code] = Plant(code, cure, put)
        return put

    return enter


class ScaleGradient(torch.autograd.Function):
    """Nothing forward, a factor on the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        """Hand on."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """Multiply."""
        return gradient * ctx.factor, None


class Steep(nn.Module):
    """The same as a module."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return ScaleGradient.apply(x, self.factor)


class Sized(nn.Module):
    """A factor forward, nothing on the way back."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return x + (x * (self.factor - 1)).detach()


class To(nn.Module):
    """A cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return x.to(self.dtype)


def module_of(training: Training, name: str) -> nn.Module:
    """A module of the planted layer."""
    return training.block.get_submodule(name)


def parameters_of(training: Training, name: str) -> list[str]:
    """Full names of the parameters of a module of the planted layer."""
    return [f"blocks.{training.layer}.{name}.{own}" for own, _ in module_of(training, name).named_parameters()]


def narrow(training: Training, name: str, dtype: torch.dtype, **options) -> None:
    """Store a module in a dtype, and step it with options of its own."""
    module_of(training, name).to(dtype)
    training.special |= dict.fromkeys(parameters_of(training, name), options)


def inside(training: Training, *before: nn.Module, after: tuple[nn.Module, ...] = ()) -> None:
    """Put modules before and after the layer's perceptron."""
    training.block.mlp = nn.Sequential(*before, *training.block.mlp, *after)


@plant("updates-lost", "kahan")
def updates_lost(training: Training, draws: random.Random) -> None:
    """bfloat16 weights at a small learning rate."""
    narrow(training, draws.choice(NAMES), BRAIN, lr=draws.choice([1e-5, 3e-5]))


@plant("weight-frozen", "writes its old value back")
def weight_frozen(training: Training, draws: random.Random) -> None:
    """The first value is written back before each forward pass."""
    module = module_of(training, draws.choice(PRODUCTS))
    first = module.weight.detach().clone()

    def write(*_) -> None:
        with torch.no_grad():
            module.weight.copy_(first)

    module.register_forward_pre_hook(write)
    training.after = write


@plant("weight-decay-lost", "kahan")
def weight_decay_lost(training: Training, draws: random.Random) -> None:
    """bfloat16 weights whose updates are large enough, and whose decay is not."""
    narrow(training, draws.choice(PRODUCTS), BRAIN, lr=3e-3, weight_decay=0.1, betas=(0.9, 0.9))


@plant("second-moment-stuck", "state_dtype")
def second_moment_stuck(training: Training, draws: random.Random) -> None:
    """bfloat16 moments with the default betas, of gradients that fall after the first steps."""
    narrow(training, draws.choice(PRODUCTS), BRAIN, lr=1e-2)
    training.steps, training.loss_scale = 32, 30.0
    taken = []

    def fall() -> None:
        taken.append(1)
        training.loss_scale = 30.0 if len(taken) < 3 else 1.0

    training.after = fall


@plant("accumulation-swamped", "float32_gradients")
def accumulation_swamped(training: Training, draws: random.Random) -> None:
    """A penalty on one bfloat16 weight goes before the micro-batches."""
    name = draws.choice(PRODUCTS)
    narrow(training, name, BRAIN, lr=1e-2, betas=(0.9, 0.9))
    weight = module_of(training, name).weight
    training.penalty = lambda: 300 * weight.float().sum()


@plant("eps-zero", "eps=")
def eps_zero(training: Training, draws: random.Random) -> None:
    """float16 weights with the default eps."""
    narrow(training, draws.choice(NAMES), HALF)


@plant("gradient-underflow", "GradScaler")
def gradient_underflow(training: Training, draws: random.Random) -> None:
    """A float16 perceptron with small gradients, and no loss scale."""
    factor = 2.0 ** draws.choice([-12, -14])
    inside(training, Steep(1 / factor), To(HALF), after=(To(torch.float32), Steep(factor)))


@plant("activation-underflow", "power of two")
def activation_underflow(training: Training, draws: random.Random) -> None:
    """A float16 part on a small scale."""
    factor = 10.0 ** -draws.choice([6.5, 7.0])
    inside(training, Sized(factor), To(HALF), To(torch.float32), Sized(1 / factor))


@plant("overflow-near", "bfloat16 or float32")
def overflow_near(training: Training, draws: random.Random) -> None:
    """A massive channel in float16."""
    large = draws.choice([2e4, 3e4, 6e4])
    mark = Function(lambda x: torch.cat([torch.full_like(x[..., :1], large), x[..., 1:]], -1))
    clear = Function(lambda x: torch.cat([torch.zeros_like(x[..., :1]), x[..., 1:]], -1))
    inside(training, To(HALF), mark, To(torch.float32), clear)


@plant("first-nonfinite", "bound what")
def first_nonfinite(training: Training, draws: random.Random) -> None:
    """A logarithm or a division at a wrong place."""
    inside(training, Function(draws.choice([torch.log, torch.sqrt, lambda x: x / (x - x)])))


@plant("site-holds-scale", "AdaptiveGradScaler")
def site_holds_scale(training: Training, draws: random.Random) -> None:
    """A perceptron whose gradients are 2^22 times the others'."""
    inside(training, Steep(2.0**-22), after=(Steep(2.0**22),))
    training.loss_scale, training.steps = 2.0**-8, 40
    training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)


@plant("quantized-to-zero", "scale from the data")
def quantized_to_zero(training: Training, draws: random.Random) -> None:
    """A quantizer with a step that was calibrated on other data."""
    step = draws.choice([50.0, 1000.0])
    inside(training, FakeQuantize(lambda x: x + (torch.round(x / step) * step - x).detach()))


@plant("payload-saturated", "larger scale")
def payload_saturated(training: Training, draws: random.Random) -> None:
    """e4m3 with a scale that is too small."""
    scale = 2.0 ** draws.choice([-9, -10])
    store = Function(lambda x: (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn))
    inside(training, store, Function(lambda x: x.float() * scale))


@plant("never-stepped", "optimizer")
def never_stepped(training: Training, draws: random.Random) -> None:
    """Parameters that the optimizer was not given."""
    training.left_out |= set(parameters_of(training, draws.choice(NAMES)))


@plant("state-mismatch", "load_state_dict")
def state_mismatch(training: Training, draws: random.Random) -> None:
    """A module that is cast after the optimizer made its states."""
    module = module_of(training, draws.choice(NAMES))
    module.to(BRAIN)
    training.optimizer = lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def before(optimizer: torch.optim.Optimizer) -> None:
        training.backward()
        training.step(optimizer)
        module.float()

    training.before = before


@plant("average-stuck", "float32")
def average_stuck(training: Training, draws: random.Random) -> None:
    """An EMA one layer of which is stored in bfloat16."""
    averaged = torch.optim.swa_utils.AveragedModel(
        training.model, multi_avg_fn=None, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.999)
    )
    averaged.update_parameters(training.model)
    averaged.module.blocks[training.layer].to(BRAIN)
    training.after = lambda: averaged.update_parameters(training.model)
    training.watched = {"average": averaged}


@plant("dtype-not-asked", "model.to")
def dtype_not_asked(training: Training, draws: random.Random) -> None:
    """Norms should be float32; a cast took one along."""
    narrow(training, "norm1", BRAIN)
    training.watched = {"expect": {"*norm?": torch.float32}}


@plant("recompute-differs", "preserve_rng_state")
def recompute_differs(training: Training, draws: random.Random) -> None:
    """A checkpointed layer with dropout that draws again."""
    first, between, last = training.block.mlp
    held = nn.Sequential(first, between, nn.Dropout(0.2), last)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = held

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layers, x, use_reentrant=False, preserve_rng_state=False)

    training.block.mlp = Checkpointed()
    training.watched = {"check": True}
