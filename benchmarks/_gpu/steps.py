"""Bits of optimizer steps: every rule x weight update x state on the device against the reference on the CPU."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace

from ._engines import engine_note, engine_of, no_silent_fallback
from ._run import Run

ELEMENTS, WIDTH, TINY = 1_000_000, 64, 4096
STEPS = 2
SHOWN = 30

RULES = {
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "adamw-amsgrad": ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "adam": ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    "adam-amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "lion": ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "sgd": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
}
STATES = ("bf16", "8bit", "fp32", "bf16x2", "bf16-nearest", "8bit-16")
# Formats inside float32 parameters: 8 exponent bits and fewer, infinities and none.
FORMATS = ("e8m5", "e8m1", "e4m3fn", "e5m2")
SPECIAL = (0.0, 1.0, 1.0 + 2**-23, 3.0e38, 1e30, 1e-30, 2.0**-126, 2.0**-127, 2.0**-149, float("inf"), float("nan"),
           65504.0, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25, 448.0, 465.0, 2.0**-6, 2.0**-9, 1e-8)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One combination; ``store`` is a parameter's dtype, or a format inside of float32."""

    rule: str
    update: str
    store: str
    state: str
    gradient: str = "same"
    ragged: bool = False
    metered: bool = False

    def __str__(self) -> str:
        more = f"{', many shapes' * self.ragged}{', metered' * self.metered}"
        return f"{self.rule}, {self.update}, {self.store}, states {self.state}, gradients {self.gradient}{more}"


@functools.cache
def updates() -> dict[str, object]:
    """Every registered weight update, and further forms of those that have options."""
    import halfulp as hu
    from halfulp.optim.weight_updates._weight_update import WEIGHT_UPDATE_BY_NAME

    more = {
        "kahan-nearest": hu.Kahan(residual="nearest"),
        "kahan-literal": hu.Kahan(literal=True),
        "components-3": hu.Components(3),
    }
    return {**WEIGHT_UPDATE_BY_NAME, **more}


@functools.cache
def states() -> dict[str, object]:
    """Every state codec."""
    import torch

    import halfulp as hu

    return {
        "bf16": torch.bfloat16,
        "8bit": "8bit",
        "fp32": torch.float32,
        "bf16x2": hu.Components(2),
        "bf16-nearest": hu.optim.State(torch.bfloat16, "nearest"),
        "8bit-16": hu.optim.State("8bit", block=16),
    }


def rules() -> dict[str, tuple]:
    """The rules above, and every optimizer registered besides."""
    import halfulp as hu

    known = {name for name, _ in RULES.values()}
    return {**RULES, **{name: (name, {"lr": 0.01}) for name in hu.optim.OPTIMIZERS if name not in known}}


def cases() -> list[Case]:
    """All combinations, the common ones first; which of them exist is asked of the optimizers."""
    names = list(updates())
    main = [Case("adamw", update, "bf16", "bf16") for update in names]
    main += [Case("adamw", "exact", "fp32", "fp32")]
    main += [Case("adamw", "split8", "bf16", "8bit", ragged=True, metered=True)]
    main += [Case("adamw", "stochastic", "bf16", "bf16", ragged=True, metered=True)]
    main += [Case(rule, "split8", "bf16", "bf16") for rule in rules()]
    main += [Case("adamw", "stochastic", "bf16", state) for state in STATES]
    main += [Case("adamw", "kahan", "fp16", "bf16"), Case("adamw", "kahan", "bf16", "bf16", "fp32")]
    rest = [Case(rule, update, "bf16", state) for rule in rules() for update in names for state in STATES]
    rest += [Case("adamw", update, store, "bf16") for update in names for store in ("fp16", *FORMATS)]
    rest += [Case(rule, "exact", "fp32", state) for rule in rules() for state in STATES]
    rest += [Case("adamw", update, "bf16", "bf16", gradient) for update in names for gradient in ("fp32", "fp16")]
    random.Random(0).shuffle(rest)
    # SGD without momentum has no states to speak of.
    return list(dict.fromkeys(case for case in main + rest if case.rule != "sgd" or case.state == "bf16"))


def dtypes() -> dict:
    """The dtype of the tensor that holds a store's values."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@functools.cache
def numbers(count: int, seed: int):
    """Float32 values in rows: special ones, random words, and ordinary ones."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * (1.0 if seed == 0 else 1e-2)
    words = torch.randint(-(2**31), 2**31, (count // 3,), generator=generator, dtype=torch.int64)
    special = torch.tensor([*SPECIAL, *(-value for value in SPECIAL)])
    x[::3][: len(words)] = words.to(torch.int32).view(torch.float32)[: len(x[::3])]
    picked = torch.randint(len(special), (len(x[1::8]),), generator=generator)
    x[1::8] = special[picked]
    return x.reshape(-1, WIDTH)


def optimizer_of(case: Case, count: int, device: str):
    """Parameters on a device, and the optimizer over them."""
    import torch

    import halfulp as hu

    name, given = rules()[case.rule]
    dtype, options = dtypes().get(case.store, torch.float32), {}
    values = [numbers(count, 0)]
    if case.ragged:
        flat = values[0].reshape(-1)
        values += [flat[:7], flat[7 : 7 + 165].reshape(33, 5), flat[200], flat[:0].reshape(0, 3), flat[300:2349]]
    if case.store in FORMATS:
        options["format"] = case.store
        values = [hu.quantize(value, case.store) for value in values]
    parameters = [torch.nn.Parameter(value.to(dtype, copy=True).to(device)) for value in values]
    if case.update != "exact":
        options["weight_update"] = updates()[case.update]
    if case.rule != "sgd":
        choice = states()[case.state]
        few = given.get("amsgrad") and case.state not in ("fp32", "bf16x2")
        # A running maximum, and what it is taken of, need more bits.
        options["state_dtype"] = {"exp_avg": choice} if few else choice
    interval = 1 if case.metered else 0
    made = getattr(hu.optim, name)(parameters, seed=3, report_interval=interval, **given, **options)
    return parameters, made


def exists(case: Case) -> bool:
    """Whether an optimizer takes the combination; a float32 parameter has one weight update, "exact"."""
    try:
        parameters, made = optimizer_of(replace(case, ragged=False), WIDTH, "cpu")
        made.bytes_per_parameter()
    except (ValueError, TypeError):
        return False
    plan = made._plans.get(parameters[0])
    return (plan.spec.update.name == "exact") == (case.update == "exact")


def stepped(case: Case, count: int, device: str, engine: str) -> tuple[dict, list]:
    """Every tensor after some steps, on the CPU, and what the meter counted."""
    import torch

    import halfulp as hu

    parameters, made = optimizer_of(case, count, device)
    gradient = parameters[0].dtype if case.gradient == "same" else dtypes()[case.gradient]
    with hu.kernels.engine(engine):
        for step in range(STEPS):
            source = numbers(count, step + 1)
            for parameter in parameters:
                if gradient != parameter.dtype:
                    parameter.grad_dtype = None
                part = source if parameter.shape == source.shape else source.reshape(-1)[: parameter.numel()]
                parameter.grad = part.reshape(parameter.shape).to(gradient, copy=True).to(device)
            made.step()
    found = {}
    for number, parameter in enumerate(parameters):
        found[f"{number}"] = parameter.detach().cpu()
        for name, value in made.state[parameter].items():
            if isinstance(value, torch.Tensor):
                found[f"{number}.{name}"] = value.cpu()
    meter = [(row.updates, row.cancelled, row.samples) for row in made.report().rows] if case.metered else []
    return found, meter


def compare(run: Run, tables: tuple, case: Case, count: int) -> None:
    """Count one combination."""
    import torch

    from halfulp.kernels import same_bits

    cells = {"weight update": case.update, "parameter": case.store}
    other = case.gradient != "same" and dtypes()[case.gradient] != dtypes().get(case.store, torch.float32)
    if other and not hasattr(torch.Tensor, "grad_dtype"):
        return  # such a gradient cannot be set in this version of torch
    try:
        with no_silent_fallback():
            here, mine = stepped(case, count, run.device, engine_of(run))
    except Exception as error:
        run.count(tables[0], cells, combinations=1, failed=1)
        run.fail(str(case), error)
        return
    there, theirs = stepped(case, count, "cpu", "reference")
    wrong = [name for name in there if not same_bits(here[name], there[name])]
    elements = sum(tensor.numel() for name, tensor in there.items() if "." not in name)
    wrong += ["the meter's counts"] if mine != theirs else []
    run.count(tables[0], cells, combinations=1, elements=elements, equal=not wrong, differ=bool(wrong), failed=0)
    if wrong:
        many = sum(int((here[name] != there[name]).sum()) for name in wrong if name in there)
        if len(tables[1].rows) < SHOWN:
            run.add(tables[1], combination=str(case), tensors=", ".join(wrong), elements=many)
        run.fail(str(case), f"other bits in {', '.join(wrong)} ({many} elements)")


def measure(run: Run) -> None:
    """All combinations."""
    count = TINY if run.tiny else ELEMENTS
    columns = {"weight update": "", "parameter": "", "combinations": ",d", "elements": ",d", "equal": ",d"}
    columns |= {"differ": ",d", "failed": ",d", "met": ""}
    note = f"{STEPS} steps on {count:,} elements, special values and random words among them, against plain torch on "
    note += f"the CPU, bit for bit; all optimizers and states of a combination. {engine_note(run)}"
    table = run.table("Steps: bits", columns, note, keys=["weight update", "parameter"])
    shown = run.table("Steps with other bits", {"combination": "", "tensors": "", "elements": ",d"})
    known = (case for case in cases() if exists(case))
    for case in (next(known), next(case for case in known if case.ragged)) if run.tiny else [*known]:
        run.attempt(str(case), lambda case=case: compare(run, (table, shown), case, count))
