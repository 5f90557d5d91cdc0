"""The update rules, weight updates, stores and codecs that the laws of optimizers run over.

A weight update and an optimizer that a user registered need no line: the registries are read. `SPECIAL` holds the
numbers that break arithmetic.
"""

import functools
import importlib.util
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import halfulp as hu
from halfulp.kernels import run_trace_on_tensors, same_bits
from halfulp.kernels._device_function import ElementTraceBuilder, bind_free_variables
from halfulp.optim._storage import STORE_BY_DTYPE, make_format_store
from halfulp.optim.parameters._outside_writes import record_payload_version
from halfulp.optim.parameters._step_spec import refuse_unsupported_feedback
from halfulp.optim.weight_updates._weight_update import WEIGHT_UPDATE_BY_NAME


def _example(name: str):
    """One of examples/extending, whose optimizers pass the laws of those that the library has."""
    path = Path(__file__).resolve().parents[3] / "examples" / "extending" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RULES = {
    "sgd": (hu.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (hu.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (hu.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (hu.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adam-amsgrad": (hu.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (hu.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw-amsgrad": (hu.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "lion": (hu.optim.Lion, {"lr": 0.01, "weight_decay": 0.1}),
    "yogi": (_example("yogi").Yogi, {"lr": 0.01, "weight_decay": 0.1}),
    "adan": (hu.optim.Adan, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.8, 0.9999)}),
    "adagrad": (hu.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1}),
    "rmsprop": (hu.optim.RMSprop, {"lr": 0.01, "weight_decay": 0.01, "momentum": 0.9}),
    "rmsprop-centered": (hu.optim.RMSprop, {"lr": 0.01, "centered": True, "maximize": True, "eps": 1e-3}),
    "nadam": (hu.optim.NAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "radamw": (hu.optim.RAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "lamb": (hu.optim.LAMB, {"lr": 0.01, "weight_decay": 0.1}),
    "adafactor": (hu.optim.Adafactor, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "sgd-schedule-free": (hu.optim.SGDScheduleFree, {"lr": 0.1, "weight_decay": 0.01, "warmup_steps": 5}),
    "adamw-schedule-free": (hu.optim.AdamWScheduleFree, {"lr": 0.01, "weight_decay": 0.1, "r": 1.0}),
    "prodigy": (hu.optim.Prodigy, {"lr": 1.0, "weight_decay": 0.1, "d0": 1e-2}),
    "ademamix": (hu.optim.AdEMAMix, {"lr": 0.01, "weight_decay": 0.1, "alpha_warmup": 15, "beta3_warmup": 15}),
}
# Of these the laws of all combinations take some weight updates, which write the same way whatever the rule.
SAMPLED = (
    "adagrad",
    "rmsprop",
    "rmsprop-centered",
    "nadam",
    "radamw",
    "ademamix",
    "lamb",
    "adafactor",
    "muon",
    "sgd-schedule-free",
    "adamw-schedule-free",
    "prodigy",
)
SAMPLE = ("stochastic", "split8", "kahan", "exact")
WITH_ORACLE = tuple(RULES)  # in test_update_rules
# Its steps are of matrices alone; tests/optim/test_algorithms.py holds them to torch's.
RULES["muon"] = (hu.optim.Muon, {"lr": 0.01, "weight_decay": 0.1})
# An optimizer that a user registered joins under its own name.
_LISTED = {kind for kind, _ in RULES.values()}
RULES |= {name: (kind, {"lr": 0.01}) for name, kind in hu.optim.OPTIMIZERS.items() if kind not in _LISTED}
VARIANTS = {
    "kahan-nearest": hu.Kahan(residual="nearest"),
    "kahan-weight-stochastic": hu.Kahan(weight="stochastic", residual="nearest"),
    "kahan-literal": hu.Kahan(literal=True),
    "components-3": hu.Components(3),
    "components-3-stochastic": hu.Components(3, residual="stochastic"),
    "components-4": hu.Components(4),
}
UPDATES = {**WEIGHT_UPDATE_BY_NAME, **VARIANTS}
# 16-bit tensors, float32 ones, and formats inside float32 ones: 8 exponent bits and fewer, infinities and none.
STORE_NAMES = ("bf16", "fp16", "fp32", "e8m5", "e8m1", "e4m3fn", "e5m2", "bf16-in-fp32", "fp16-in-fp32")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CODECS = {
    "default": None,
    "bf16": torch.bfloat16,
    "bf16-nearest": hu.optim.State(torch.bfloat16, "nearest"),
    "fp32": torch.float32,
    "bf16x2": hu.Components(2),
    "8bit": "8bit",
    "8bit-16": hu.optim.State("8bit", block=16),
    "4bit-64": hu.optim.State("4bit", block=64),
    "4bit-16": hu.optim.State("4bit", block=16),
}
GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)

MIXED = {"exp_avg": "8bit", "exp_avg_sq": torch.float32}
MIXED_PAIR = {"exp_avg": "8bit", "exp_avg_sq": "bfloat16x2"}
TINY = 2.0**-149
# fmt: off
SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 1.0 + 2**-23, 3.0e38, -3.0e38, 1e30, -1e-30, 1e-30, 2.0**-126, -(2.0**-127), TINY, -TINY,
    float("inf"), -float("inf"), float("nan"), 65504.0, -65520.0, 2.0**-14, 2.0**-24, -(2.0**-25), 448.0, 465.0,
    2.0**-6, 2.0**-9, 2.0**-10, 57344.0, 61440.0, 1e-8, 3.1415927, -2.7182817,
]
# fmt: on


def options_of(store: str) -> dict:
    """The keyword that makes an optimizer keep values of a store, beyond the parameter's dtype."""
    if store in (*DTYPES, "fp32"):
        return {}
    return {"format": store.removesuffix("-in-fp32")}


def dtype_of(store: str) -> torch.dtype:
    """The dtype of the tensor that holds a store's values."""
    return DTYPES.get(store, torch.float32)


@functools.cache
def rule_of(name: str) -> hu.optim.UpdateRule:
    """The update rule that an optimizer takes with the options of RULES."""
    kind, given = RULES[name]
    probe = kind([torch.zeros(1, 1, requires_grad=True)], **given)
    return probe.rule(probe.param_groups[0])


def optimizer_names() -> list[str]:
    """The names of all optimizers of RULES, as they are registered."""
    return sorted({kind.__name__ for kind, _ in RULES.values()})


def allowed(rule: str, update: str, store: str) -> bool:
    """Whether an optimizer accepts the three together."""
    options = options_of(store)
    held = make_format_store(options["format"]) if options else STORE_BY_DTYPE[dtype_of(store)]
    if store == "fp32":
        return update == "exact"  # where a float32 parameter ends, whatever it is given
    try:
        UPDATES[update].check_store(held)
        refuse_unsupported_feedback(rule_of(rule), UPDATES[update])
    except ValueError:
        return False
    return True


def stored_updates(rule: str = "adamw") -> list[tuple[str, str]]:
    """Every (weight update, store) that goes together under a rule."""
    return [(u, s) for u, s in itertools.product(UPDATES, STORE_NAMES) if allowed(rule, u, s)]


def narrow_updates(but: Iterable[str] = ()) -> list[str]:
    """The weight updates for bfloat16 parameters under AdamW."""
    return [u for u in UPDATES if allowed("adamw", u, "bf16") and u not in but]


def combinations() -> list[tuple[str, str, str]]:
    """Every (rule, weight update, store) that goes together, but a few of each rule of SAMPLED."""
    combos = [(r, u, s) for r, u, s in itertools.product(RULES, UPDATES, STORE_NAMES) if allowed(r, u, s)]
    return [(r, u, s) for r, u, s in combos if r not in SAMPLED or (u in SAMPLE and s in ("bf16", "fp32"))]


@functools.cache
def covering() -> tuple[tuple[str, str, str, str, torch.dtype], ...]:
    """(rule, update, store, codec, gradient) such that every pair of values that goes together occurs in one row.

    Greedy from a fixed start, so that the cases have the same names in every worker.
    """
    chooser = random.Random(0)
    rows = [(r, u, s, c, g) for (r, u, s), c, g in itertools.product(combinations(), CODECS, GRADIENTS)]
    # A rule without states has no codec to speak of.
    rows = [row for row in rows if rule_of(row[0]).states or row[3] == "default"]
    chooser.shuffle(rows)
    pairs = {row: {(i, row[i], j, row[j]) for i in range(5) for j in range(i)} for row in rows}
    left, found = set().union(*pairs.values()), []
    while left:
        best = max(chooser.sample(rows, min(len(rows), 400)), key=lambda row: len(pairs[row] & left))
        if pairs[best] & left:
            found.append(best)
            left -= pairs[best]
        else:
            rows = [row for row in rows if pairs[row] & left]
    return tuple(found)


def fit(values: torch.Tensor, store: str) -> torch.Tensor:
    """Values rounded into a store, as a fresh parameter's data."""
    options = options_of(store)
    if options:
        return hu.quantize(values, options["format"])
    return values.to(dtype_of(store), copy=True)


def special_pairs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (rows, 64) weight and gradient: all pairs of special values, and random ones over all exponents."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor(SPECIAL)
    w, g = (x.flatten() for x in torch.meshgrid(special, special, indexing="ij"))
    words = torch.randint(-(2**31), 2**31, (2, 2048), generator=generator).to(torch.int32).view(torch.float32)
    ordinary = torch.randn(2, 3072, generator=generator)
    w, g = torch.cat([w, words[0], ordinary[0]]), torch.cat([g, words[1], ordinary[1] * 1e-2])
    order = torch.randperm(w.numel(), generator=generator)
    return w[order].reshape(-1, 64), g[order].reshape(-1, 64)


def storable(rule: str, choice):
    """A `state_dtype=` for all states that may be stored so; exact ones, a maximum and what it is taken of may not."""
    held = rule_of(rule).states
    kept = {name for state in held if state.maximum_of for name in (state.name, state.maximum_of)}
    kept |= {state.name for state in held if state.exact}
    if choice in (None, torch.float32, CODECS["bf16x2"]) or isinstance(choice, dict) or not kept:
        return choice
    return {state.name: choice for state in held if state.name not in kept}


def build(rule: str, update: str | hu.optim.WeightUpdate, tensors: Iterable, store: str = "bf16", **more):
    """An optimizer of a rule over some parameters, or named ones."""
    kind, given = RULES[rule]
    if "state_dtype" in more:
        more["state_dtype"] = storable(rule, more["state_dtype"])
    chosen = None if store == "fp32" else UPDATES[update] if isinstance(update, str) else update
    return kind(tensors, **{**given, "weight_update": chosen, "report_interval": 0, **options_of(store), **more})


def everything(optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that an optimizer holds, parameters first, named."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield f"{number}.{position}", parameter.detach()
            for name, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    yield f"{number}.{position}.{name}", value


def snapshot(optimizer) -> dict[str, torch.Tensor]:
    """A copy of everything an optimizer holds."""
    return {name: tensor.clone() for name, tensor in everything(optimizer)}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ between two snapshots; NaNs count as equal."""
    return [name for name in a.keys() | b.keys() if name not in a or name not in b or not same_bits(a[name], b[name])]


def decoded(optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """The float32 weight that a parameter and its companions stand for."""
    plan = optimizer._plans[parameter]
    return plan.spec.update.read(plan.spec.store, [plan.weight_tensors[0].contiguous(), *plan.weight_tensors[1:]])


def write_update(update, store, parts, u, draws, ratio=1.0):
    """Write weight x ratio + u into the parts, in place, by an update's device functions on tensors.

    The ratio is of the scale that the parts were stored under to the one that they will be under.
    """
    element, names = ElementTraceBuilder(4), update.make_bindings(store)
    p, first, second, last = bind_free_variables(names["read_weight"], names)(*element.arrays, element.index)
    times, given = element.add_input("ratio"), [element.add_input(f"random {k}", "w32") for k in range(2)]
    held = (p * times, first * times, second * times, last, element.add_input("u"))
    bind_free_variables(names["write_weight"], names)(*element.arrays, element.index, *held, *given)
    drawn = {f"random {k}": 0 for k in range(2)}
    for k, (bits, draw) in enumerate(zip(update.list_random_bits_per_draw(store), draws)):
        drawn[f"random {k}"] = (draw & 0xFFFF if bits == 16 else draw).to(torch.int32)
    run_trace_on_tensors(element.trace, parts, {"ratio": ratio, "u": u, **drawn})


class Adder:
    """A weight update at work on one parameter: `add(u)` makes the weight w + u.

    SGD at learning rate 1 with gradient -u has the update u exactly. The reference does it, which costs no compiling,
    unless many steps are to be made.
    """

    def __init__(self, update: str, values: torch.Tensor, store="bf16", seed=0, engine="reference", **more) -> None:
        self.engine = engine
        self.parameter = torch.nn.Parameter(fit(values, store))
        self.parameter.grad_dtype = None
        given = {
            "lr": 1.0,
            "weight_update": UPDATES[update] if store != "fp32" else None,
            "report_interval": 0,
            "seed": seed,
        }
        self.optimizer = hu.optim.SGD([self.parameter], **{**given, **options_of(store), **more})
        self.optimizer.bytes_per_parameter()

    def add(self, u: torch.Tensor) -> None:
        self.parameter.grad = -u
        with hu.kernels.engine(self.engine):
            self.optimizer.step()

    def part(self, name: str) -> torch.Tensor:
        return self.optimizer.state[self.parameter][name]

    @property
    def weight(self) -> torch.Tensor:
        return decoded(self.optimizer, self.parameter)

    @property
    def plan(self):
        return self.optimizer._plans[self.parameter]

    def fill(self, values: torch.Tensor) -> None:
        plan = self.plan
        plan.spec.update.fill(plan.spec.store, plan.weight_tensors, values)
        record_payload_version(plan)
