"""What an observation keeps: plain data per tensor, parameter and step, and the same for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import torch

Role = Literal[
    "activation", "weight", "activation gradient", "weight gradient", "update", "first moment", "second moment"
]


@dataclass(slots=True)
class RealisedChanges:
    """The share of wanted changes of sampled elements that took place, where the change is rounded.

    Attributes:
        seen: elements whose wanted change is not zero.
        cancelled: those of them that stayed as they were, bit for bit.
        wanted: as `seen`, of steps whose wanted changes w have squares that are not 0.
        kept: sum over steps of their elements times sum(w * realised) / sum(w^2); kept / wanted is 1 where all moved
            as wanted, whatever the learning rates of the steps.
        known: whether the wanted change was computed; without, only `seen` (nonzero gradients) and `cancelled` count.
    """

    seen: int = 0
    cancelled: int = 0
    wanted: float = 0.0
    kept: float = 0.0
    known: bool = True

    @property
    def lost_share(self) -> float:
        """Share of the wanted changes that left their element as it was; 0 where none was wanted."""
        return self.cancelled / self.seen if self.seen else 0.0

    @property
    def realised_share(self) -> float | None:
        """Share of the wanted movement that took place; None where it is not known."""
        return self.kept / self.wanted if self.known and self.wanted else None


@dataclass(slots=True)
class TensorRecord:
    """One tensor role at one name over all sampled steps.

    Attributes:
        name: the parameter's, or the module's whose output or output's gradient it is ("" is the model itself).
        kind: class name of that module.
        dtype: of the stored tensor; a scaled or multi-component tensor's payload.
        order: position among the activations of the first sampled step, in order of computation.
        elements, nonfinite, largest: exact counts over the whole tensors of all these steps: all elements; NaN and
            infinities; those at the largest finite magnitude of the storage format.
        amax: exact largest finite magnitude over all these steps; 0 without any.
        last_amax: exact largest finite magnitude in the last of these steps.
        input_amax: activations that are all zeros in the last step: largest magnitude of the module's floating-point
            inputs; None else.
        weight_amax: of the same, where the module has parameters of its own: their largest magnitude; None else.
        first_nonfinite: the first sampled step with NaN or infinity, and its position in that step's order.
        nonfinite_steps: sampled steps with NaN or infinity.
        histogram: sampled nonzero finite elements by floor(log2 |x|).
        scale: a scaled tensor's scale, or the power of two of the tensor's gradient exponent or loss scale; 1 else.
        asked_format: name of a format that its values are known to be quantized to, beyond its dtype; None else.
        asked_overflow: sampled finite elements beyond the largest number of asked_format.
        block_hidden: where asked_format has blocks, sampled nonzero elements that become zero in a block whose largest
            does not; None else.
        quantization_error: root mean square of x - quantize(x) in asked_format over the last sample; None else.
        rms: root mean square of the last sample.
    """

    role: Role
    name: str
    kind: str
    dtype: torch.dtype
    order: int = 0
    steps: int = 0
    elements: int = 0
    nonfinite: int = 0
    largest: int = 0
    amax: float = 0.0
    last_amax: float = 0.0
    input_amax: float | None = None
    weight_amax: float | None = None
    first_nonfinite: tuple[int, int] | None = None
    nonfinite_steps: int = 0
    sampled: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    scale: float = 1.0
    asked_format: str | None = None
    asked_overflow: int = 0
    block_hidden: int | None = None
    quantization_error: float | None = None
    rms: float = 0.0

    @property
    def is_zero_in_all_steps(self) -> bool:
        """Whether all elements were zeros in all these steps."""
        return bool(self.elements) and not self.amax and not self.nonfinite


@dataclass(slots=True)
class RoundingDirectionRecord:
    """Directions in which stored updates were rounded, of an optimizer that seems to round stochastically.

    Attributes:
        seen: sampled elements whose wanted value lies strictly between two neighbours, and became one of them.
        excess: sum of (rounded up) - (probability to round up).
        variance: sum of probability times (1 - probability).
        repeated: largest share, over pairs of steps, of elements whose direction is the same beyond what probability
            explains, as a correlation from -1 to 1; None before two steps.
    """

    seen: int = 0
    excess: float = 0.0
    variance: float = 0.0
    repeated: float | None = None


@dataclass(slots=True)
class ParameterRecord:
    """One parameter: how it is stored, who steps it, and what became of its updates.

    Attributes:
        kind: class name of the module that holds it.
        dtype, shape, numel: of its storage.
        optimizer: class name of the optimizer that holds it; None if none does.
        optimizer_module: name of the module that defines that class: what starts with "torch.optim." computes in the
            dtypes of parameter and states, what starts with "halfulp." in float32; empty where unknown.
        is_wrappable: whether `hu.optim.wrap` takes that class.
        weight_update: of halfulp's optimizers; "nearest" for every other.
        options: numbers of its group (lr, weight_decay, eps, betas, momentum) at the last step.
        gradients: sampled steps in which it had a gradient.
        nonzero_gradients: sampled elements with a nonzero gradient.
        moved: share of sampled elements that differ from the first sampled step; None before a second one.
        decay: of weight decay alone, where the optimizer decays the weight apart from the gradient; None elsewhere.
        accumulation: of gradients that were added to one that was there; None where none was.
        states: of each floating-point state tensor, by its name in the optimizer's state; of averages of squares their
            decreases alone.
        rounding: None unless its updates are rounded stochastically.
    """

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    requires_grad: bool
    optimizer: str | None = None
    optimizer_module: str = ""
    is_wrappable: bool = True
    weight_update: str = "nearest"
    options: dict[str, Any] = field(default_factory=dict)
    gradients: int = 0
    nonzero_gradients: int = 0
    gradient_dtype: torch.dtype | None = None
    moved: float | None = None
    update: RealisedChanges = field(default_factory=RealisedChanges)
    decay: RealisedChanges | None = None
    accumulation: RealisedChanges | None = None
    states: dict[str, RealisedChanges] = field(default_factory=dict)
    state_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    rounding: RoundingDirectionRecord | None = None

    @property
    def is_held_by_halfulp_optimizer(self) -> bool:
        """Whether one of halfulp's optimizers holds it."""
        return self.optimizer_module.startswith("halfulp.")


@dataclass(slots=True)
class AverageRecord:
    """An averaged parameter beside the weights, named in its own module, and the changes of its sampled elements."""

    name: str
    dtype: torch.dtype
    change: RealisedChanges = field(default_factory=RealisedChanges)


@dataclass(slots=True)
class ResidualStreamRecord:
    """The rounding losses of a module's output added to a stream beside it, in the 16-bit type of both.

    `stream` and `added` are root mean squares of the last samples, `change` is of the stream's sampled elements.
    """

    name: str
    dtype: torch.dtype
    stream: float = 0.0
    added: float = 0.0
    change: RealisedChanges = field(default_factory=RealisedChanges)


@dataclass(slots=True)
class PositionCollisionRecord:
    """A module's output in which neighbouring positions are one, as `dtype` rounds whole numbers up to `length`."""

    name: str
    dtype: torch.dtype
    length: int


@dataclass(slots=True)
class StepRecord:
    """One optimizer step, thinned to at most some thousands in a long run.

    Attributes:
        step: its number since the observation began, from 0.
        lr: of the first group.
        loss_scale: of the gradient scaler; None without one, and where reading it would wait for a device.
        skipped: steps that the scaler skipped since the scale was read before.
        scheduled: steps of the learning-rate scheduler since the record before; None without one.
        loss: if one was seen.
        exponents: smallest and largest gradient exponent of the sites, None without.
    """

    step: int
    sampled: bool
    lr: float | None
    loss_scale: float | None = None
    skipped: int = 0
    scheduled: int | None = None
    loss: float | None = None
    exponents: tuple[int, int] | None = None


@dataclass(slots=True)
class DtypeExpectation:
    """The dtype asked for by a glob over qualified names, the names that match, and what `other` dtype some have."""

    pattern: str
    asked: str
    matched: list[str] = field(default_factory=list)
    other: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class OutputDifference:
    """Two computations of one module's output on the same inputs.

    `differing` is the share of elements whose values differ, `relative` the root mean square of the difference over
    that of the first.
    """

    name: str
    dtypes: tuple[str, str]
    differing: float
    relative: float


@dataclass(slots=True)
class Record:
    """All that an observation keeps; every field is plain data.

    Attributes:
        parameters: by qualified name.
        tensors: by (role, name).
        averages: of the weights, by name.
        residuals: outputs that are added to a stream of their own 16-bit type, by the module's name.
        positions: outputs whose positions were counted in 16 bits, by the module's name.
        history: steps in order.
        sampled_steps: numbers of the steps whose tensors were looked at.
        expectations: dtypes and formats that were asked for.
        replicas: by parameter name, whether all ranks that should hold the same bits do, at the sampled steps that
            they have in common; only what was compared. Rank 0's record compares all ranks, another one that rank with
            rank 0 (the lowest that observes).
        recomputed: modules that ran twice in a step, as gradient checkpointing makes them (`check=True`).
        compiled: compiled modules beside their eager originals (`check=True`).
        loss_dtype: dtype of the loss, if one was seen.
        loss_gap: largest distance between neighbouring numbers of that dtype at the losses seen, over the losses'
            median absolute change from sampled step to sampled step; None where unknown.
        loss_scale: of the gradient scaler when the record was read, None without one.
        skipped: steps that the scaler skipped in all.
        sites: gradient exponents per site, from an AdaptiveGradScaler.
        replica_of: (rank, number of ranks).
        unseen: sentences that say what could not be observed, and why.
    """

    parameters: dict[str, ParameterRecord] = field(default_factory=dict)
    tensors: dict[tuple[Role, str], TensorRecord] = field(default_factory=dict)
    averages: dict[str, AverageRecord] = field(default_factory=dict)
    residuals: dict[str, ResidualStreamRecord] = field(default_factory=dict)
    positions: dict[str, PositionCollisionRecord] = field(default_factory=dict)
    history: list[StepRecord] = field(default_factory=list)
    sampled_steps: list[int] = field(default_factory=list)
    expectations: list[DtypeExpectation] = field(default_factory=list)
    replicas: dict[str, bool] = field(default_factory=dict)
    recomputed: list[OutputDifference] = field(default_factory=list)
    compiled: list[OutputDifference] = field(default_factory=list)
    loss_dtype: torch.dtype | None = None
    loss_gap: float | None = None
    loss_scale: float | None = None
    skipped: int = 0
    sites: list[dict[str, Any]] = field(default_factory=list)
    replica_of: tuple[int, int] = (0, 1)
    unseen: list[str] = field(default_factory=list)


def to_plain_data(value: Any) -> Any:
    """Return a record as dicts, lists, numbers, strings, booleans and None.

    A dtype becomes its name, a number that JSON has no word for becomes "inf", "-inf" or "nan", a tuple a list; records
    keyed by name become lists, since each holds its name. The two shares of `RealisedChanges` stand beside its counts.

    >>> from halfulp.observation._record import RealisedChanges, TensorRecord
    >>> to_plain_data(RealisedChanges(seen=4, cancelled=3, wanted=2.0, kept=0.5))["lost_share"]
    0.75
    >>> entry = to_plain_data(TensorRecord("weight", "head.weight", "Linear", torch.bfloat16, histogram={-3: 7}))
    >>> entry["dtype"], entry["histogram"]
    ('bfloat16', {'-3': 7})
    """
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: to_plain_data(getattr(value, field.name)) for field in fields(value)}
        if isinstance(value, RealisedChanges):
            found |= {name: to_plain_data(getattr(value, name)) for name in ("lost_share", "realised_share")}
        return found
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): to_plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain_data(item) for item in value]
    return str(value)


def record_to_plain_data(record: Record) -> dict[str, Any]:
    """Return a record as plain data: its fields, with `parameters`, `tensors` and `averages` as lists."""
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    for keyed in ("parameters", "tensors", "averages"):
        found[keyed] = list(found[keyed].values())
    return {key: to_plain_data(value) for key, value in found.items()}
