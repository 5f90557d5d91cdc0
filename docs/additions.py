"""What somebody adds to the library, each in under 15 lines; CONTRIBUTING.md shows the cells, and tests run them."""

# %% format
import halfulp as hu

e3m8 = hu.formats.register(hu.Format("e3m8", exponent_bits=3, mantissa_bits=8))

# %% update-rule
from halfulp.kernels import sign_of


def signum(w, g, m, take, step, decay):
    """m = m + (1 - b) (g - m); u = -lr sign(m) - lr wd w (arXiv 1802.04434)."""
    m = m + take * (g - m)
    return -(step * sign_of(m)) - decay * w, m


@hu.optim.register_optimizer
class Signum(hu.optim.Optimizer):
    """SGD that steps by the sign of the gradients' running mean."""

    def __init__(self, params, lr=1e-3, beta=0.9, weight_decay=0.0, **options):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay}, **options)

    def rule(self, group):
        values = lambda group, step: (1 - group["beta"], group["lr"], group["lr"] * group["weight_decay"])
        mean = hu.optim.StateSlot("mean", degree=1)
        return hu.optim.UpdateRule("signum", signum, (mean,), values)


# %% update-rule-with-sums
weight, gradient, step_by = lambda w: w, lambda w, g: g, lambda w, g, rate: (-(rate * g),)


def trust(group, step, sums):
    """The step is as long as the tensor, times lr."""
    return (group["lr"] * (sums[0] / sums[1]) ** 0.5 if min(sums) > 0 else group["lr"],)


NORMS = (hu.optim.Reduction(weight, squares=True), hu.optim.Reduction(gradient, squares=True))
RULE = hu.optim.UpdateRule("lars", step_by, (), lambda *_: (), reductions=NORMS, late_values=trust)


@hu.optim.register_optimizer
class LARS(Signum):
    """SGD by lr |w|/|g| (arXiv 1708.03888)."""

    rule = lambda self, group: RULE


# %% weight-update
from dataclasses import dataclass
from halfulp.optim.weight_updates._weight_update import WeightUpdate, read_plain, make_store_bindings, write_plain


@dataclass(frozen=True)
class Dithered(WeightUpdate):
    """p = Q_SR(w + u): right on average."""

    name = "dithered"

    def list_random_bits_per_draw(self, store):
        return (store.random_bits,)

    def make_bindings(self, store):
        return {"read_weight": read_plain, "write_weight": write_plain} | make_store_bindings(store, True)


hu.optim.register_weight_update(Dithered())


# %% rounding
@hu.rounding.register_rounding
class HalfTowardZero(hu.rounding.Rounding):
    """The nearer neighbour; at a tie the one nearer to zero."""

    name = "half_toward_zero"

    @staticmethod
    def goes_away(fraction, half, odd, negative):
        return fraction > half


# %% state
import numpy as np
import torch
from halfulp.kernels._operations import add, bit_and, load16, real, shl, shr, store16, word
from halfulp.optim._storage import Store

BITS, DROPPED, HALF, ONE = (np.uint32(n) for n in (15, 0x7FFF, 0x3FFF, 1))
as_real = lambda code: real(shl(code, BITS))
nearest = lambda x, random: shr(add(add(word(x), HALF), bit_and(shr(word(x), BITS), ONE)), BITS)
drawn = lambda x, random: shr(add(word(x), bit_and(random, DROPPED)), BITS)
store = Store("ubf16", torch.int16, load16, store16, as_real, nearest, drawn, 16, 8, -126)
hu.optim.register_state_store(store, "bfloat16 with one more bit in the place of the sign, for second moments")

# %% rule
import torch
from halfulp.scaled.rules import Family, homogeneous, register_family

torch.library.define("mine::cube_times", "(Tensor x, Tensor y) -> Tensor")
torch.library.impl("mine::cube_times", "CPU")(lambda x, y: x * x * x * y)
register_family(Family("cubes", payload="p_x^3 p_y", scale="s_x^3 s_y"))
homogeneous(torch.ops.mine.cube_times.default, x=3, y=1, family="cubes")


# %% policy
@dataclass(frozen=True)
class Coarse(hu.gradients.Amax):
    """The exponent of "amax", rounded down to a multiple of four."""

    name = "coarser"

    def exponent(self, site):
        exact = super().exponent(site)
        return None if exact is None else exact // 4 * 4


# %% task
@hu.trials.tasks.register
class Sides(hu.trials.tasks.Task):
    """256 points on a line."""

    name, title, target = "sides", "which side of 0 a number is on", "number"
    rule, hyper, steps, batch = "Signum", {"lr": 1e-2}, 50, 32

    def load(self):
        x = torch.linspace(-1, 1, 256)[:, None]
        return hu.trials.tasks.Data((x, (x[:, 0] > 0).long()), (x, (x[:, 0] > 0).long()), self.__doc__)

    def model(self, data, seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(1, 2)


# %% recipe
hu.recipes.register(
    hu.Recipe(
        name="coarse-e3m8",
        description="float32 weights, gradients in e3m8 under coarse exponents",
        gradient_format="e3m8",
        gradient_scale="coarser",
    )
)

# %% finding
from halfulp.observation import FindingKind, register_finding


@register_finding
class ShortRun(FindingKind):
    """Fewer than ten steps were looked at."""

    code, cure = "short-run", "watch more steps, or take interval=1"

    def find_in_record(self, record):
        if len(record.sampled_steps) < 10:
            yield self.make_finding((), "note", 1.0, f"{len(record.sampled_steps)} steps were looked at")
