"""What the optimizer knows of one parameter between steps: its tensors, its place in the whole, its kind of step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..kernels import IndexMap
from ..scaled import ScaledTensor
from ._local_tensors import index_map_of, local, memory, own_parts
from .rules._update_rule import UpdateRule
from .states._float8 import PAYLOADS
from .states._scaled import Scaled
from .states._state import Blocks, Codec, resolve_codecs
from .states._storage import STORES, Store
from .step._kernel import Kind
from .weight_updates._weight_update import WeightUpdate

NARROW = (torch.bfloat16, torch.float16)
SMALL = 1024
# Instead of a version counter in `Agreement`: see there.
ANY, MOVED = -1, -2


@dataclass(slots=True)
class LostUpdates:
    """Counts of one parameter's metered steps."""

    samples: int = 0
    seen: float = 0.0
    cancelled: float = 0.0
    wanted: float = 0.0
    kept: float = 0.0
    mostly_lost: int = 0

    def add(self, seen: float, cancelled: float, wanted: float, kept: float) -> None:
        """Count one metered step."""
        self.samples += 1
        self.seen, self.cancelled = self.seen + seen, self.cancelled + cancelled
        self.wanted, self.kept = self.wanted + wanted, self.kept + kept
        self.mostly_lost += cancelled > 0.5 * seen


@dataclass(eq=False, slots=True)
class Agreement:
    """When a parameter and its companions were last known to belong together.

    Attributes:
        version: the parameter's counter then. ANY after loading or copying companions, which go with a payload that may
            be loaded before or after them; MOVED where the parameter has got other memory.
        memory: the parameter's memory then, which tells what it held where it has got other memory since.
        payload: a copy of what it held then, where that is kept.
        steps: how many more steps it is kept for.
        scale: of a scaled parameter then, in whose units its companions are.
        checksums: of the payload that loaded companions go with, row by row; None where the file does not say.
    """

    version: int
    memory: torch.Tensor
    payload: torch.Tensor | None = None
    steps: int = 0
    scale: float = 1.0
    checksums: torch.Tensor | None = None


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter as the step sees it; few objects, as there may be 100,000 of them.

    Attributes:
        reference: to the user's parameter, which a slot does not keep alive, nor its memory.
        options: of its group, as far as the kind of step and the random bits follow from them.
        name: qualified where names were given, else its position.
        identity: what keys its random bits.
        kind: of step, unmetered.
        index_map: the local tensor's place in the whole.
        state: the parameter's entry in the optimizer's state.
        held: its companions, then the tensors of its states, local.
        held_at: their addresses when they were looked at.
        is_small: whether looking at all of them would cost more than a step of their elements.
        address, shape, stride, contiguous: of the local parameter when it was looked at.
        others: addresses of the components behind the first, where the parameter holds several.
        plain: neither a DTensor nor a tensor class of ours.
        lost: the meter, None before the first count.
        agreement: when parameter and companions were last known to belong together, None where there are none.
        stepping, gradient, gradient_scale, step, constants, copied: of the step being made; `stepping` is whose version
            the step counts up, `copied` contiguous copies of a parameter's tensors that are not, whose values go
            back when the step is done.
    """

    reference: weakref.ref
    options: tuple
    name: str
    identity: int
    kind: Kind
    index_map: IndexMap
    state: dict
    held: tuple[torch.Tensor, ...]
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    contiguous: bool
    others: tuple[int, ...]
    plain: bool
    lost: LostUpdates | None = None
    agreement: Agreement | None = None
    stepping: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    gradient_scale: float = 1.0
    step: int = 0
    constants: tuple[float, ...] = ()
    copied: tuple[torch.Tensor, ...] | None = None
    held_at: Sequence[int] = ()
    is_small: bool = False

    def __post_init__(self) -> None:
        """Note where the tensors lie."""
        self.held_at = [tensor.data_ptr() for tensor in self.held]
        self.is_small = bool(self.held) and math.prod(self.shape) < SMALL

    @property
    def parameter(self) -> torch.Tensor:
        """The user's parameter."""
        parameter = self.reference()
        assert parameter is not None, "a slot is used only while its parameter is at hand"
        if hasattr(parameter, "_fix_weakref"):
            parameter._fix_weakref()
        return parameter

    @property
    def seed(self) -> int:
        """Of the random bits."""
        return self.options[3]

    @property
    def companions(self) -> tuple[torch.Tensor, ...]:
        """The tensors beside the parameter, local."""
        return self.held[: len(self.kind.companions)]

    @property
    def accompanied(self) -> bool:
        """Whether there are companions, and a counter that tells of writes to the parameter."""
        return bool(self.kind.companions) and not self.parameter.is_inference()

    @property
    def payloads(self) -> list[torch.Tensor]:
        """The parameter's own tensors, local."""
        return [part.detach() for part in own_parts(self.parameter)]

    @property
    def parts(self) -> list[torch.Tensor]:
        """Parameter and companions, local."""
        return [*self.payloads, *self.companions]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Companions and state tensors, local, with their names in the optimizer's state."""
        return dict(zip(self.kind.tensors, self.held))

    @property
    def watched(self) -> list[torch.Tensor]:
        """The copy of the parameter that is kept for some steps after somebody else has written it."""
        return [] if self.agreement is None or self.agreement.payload is None else [self.agreement.payload]

    @property
    def states(self) -> list[list[torch.Tensor]]:
        """The tensors of each state, local."""
        tensors = self.tensors
        return [[tensors[name] for name in names] for names in self.kind.state_tensors]

    @property
    def addresses(self) -> list[int]:
        """One row of the pointer table; that of the gradient is filled in at each step."""
        pointers, beside, inside = self.held_at, len(self.kind.companions), len(self.others)
        weight = [self.address, *self.others, *pointers[:beside], *[0] * (3 - beside - inside)]
        return [*weight, 0, *pointers[beside:]]

    def count(self, seen: float, cancelled: float, wanted: float, kept: float) -> None:
        """Count the updates of one metered step."""
        if self.lost is None:
            self.lost = LostUpdates()
        self.lost.add(seen, cancelled, wanted, kept)


def options_of(group: Mapping) -> tuple:
    """What of a group decides how its parameters are stepped, beside the rule."""
    return group["weight_update"], group["state_dtype"], group["format"], group["seed"]


def still_true(slot: Slot, parameter: torch.Tensor, rule: UpdateRule, options: tuple, state: dict) -> bool:
    """Whether what is known of a parameter is still so: its memory, its group's options, its state."""
    part, kind = parameter if slot.plain else memory(parameter), slot.kind
    if not (
        part.data_ptr() == slot.address
        and part.dtype is kind.store.dtype
        and part.shape == slot.shape
        and part.stride() == slot.stride
        and rule is kind.rule
        and state is slot.state
        and options == slot.options
    ):
        return False
    if kind.inside and tuple([other.data_ptr() for other in own_parts(parameter)[1:]]) != slot.others:
        return False
    held, addresses = slot.held, slot.held_at
    for key, tensor in zip(kind.tensors, held):
        kept = state.get(key)
        if kept is not tensor and local(kept) is not tensor:
            return False
    if slot.is_small:  # of its companions and states a step looks at the memory of one, by turns
        turn = slot.step % len(held)
        return held[turn].data_ptr() == addresses[turn]
    return [tensor.data_ptr() for tensor in held] == addresses


def store_of(dtype: torch.dtype, format_store: Store | None, name: str, scaled: bool = False) -> Store:
    """The store of a parameter of some dtype, or of the payload of a scaled one.

    Raises:
        ValueError: a dtype that cannot be trained here, or format= on a parameter that is not float32.
    """
    if scaled:
        if format_store is not None:
            raise ValueError(f"format= is for plain float32 parameters, but {name} is scaled: leave format out")
        return PAYLOADS[dtype]
    if dtype not in STORES:
        raise ValueError(f"parameter {name} is {dtype}: allowed are bfloat16, float16 and float32; convert it first")
    if format_store is None:
        return STORES[dtype]
    if dtype != torch.float32:
        raise ValueError(f"format= keeps values of a format in float32 parameters, but {name} is {dtype}")
    return format_store


def codecs_for(
    rule: UpdateRule, update: WeightUpdate, group: Mapping, parameter: torch.Tensor, store: Store, name: str
) -> tuple[Codec, ...]:
    """The codecs of a parameter's states; bfloat16 beside 16-bit parameters unless chosen otherwise."""
    default = torch.bfloat16 if store.dtype in NARROW else torch.float32
    is_scaled = isinstance(parameter, ScaledTensor)
    if is_scaled and store.dtype != torch.float32:
        default = torch.float16
    codecs = resolve_codecs(group["state_dtype"], rule.states, default, parameter.shape)
    if not is_scaled and any(isinstance(codec, Scaled) for codec in codecs):
        raise ValueError(
            f"float16 and fp8 states have one scale per tensor, which plain parameters such as {name} do not take: "
            "allowed are torch.float32, torch.bfloat16 and '8bit' there, or scale the model by hu.scalify"
        )
    if any(isinstance(codec, Blocks) for codec in codecs):
        _refuse_cut_blocks(parameter, codecs, name)
    return codecs


def _refuse_cut_blocks(parameter: torch.Tensor, codecs: tuple[Codec, ...], name: str) -> None:
    block = max(codec.block for codec in codecs if isinstance(codec, Blocks))
    cut = (index_map_of(parameter).runs()[:, 1:] % block).any()
    inner = any(getattr(placement, "dim", 0) for placement in getattr(parameter, "placements", ()))
    if cut or (inner and parameter.shape[-1] % block):
        raise ValueError(
            f"parameter {name} of shape {tuple(parameter.shape)} is sharded so that blocks of {block} 8-bit states "
            "are cut: shard dimension 0, or give it a group with state_dtype=torch.bfloat16"
        )


def refuse_other_states(state: Mapping, wanted: Mapping, name: str) -> None:
    """States of a parameter that was converted or resized since they were made mean nothing for it.

    Raises:
        ValueError: a state of another shape or dtype than is wanted.
    """
    for key, (shape, dtype) in wanted.items():
        held = local(state[key]) if key in state else None
        if held is not None and (held.shape != shape or held.dtype != dtype):
            raise ValueError(
                f"state {key!r} of parameter {name} is {held.dtype} of shape {tuple(held.shape)}, but {dtype} of shape "
                f"{tuple(shape)} is needed: convert a model before its optimizer is made, or make a new optimizer"
            )


def refuse_other_dtype(parameter: torch.Tensor, kind: Kind, name: str) -> None:
    """A parameter that came into a group, or was converted, without the optimizer's doing.

    Raises:
        ValueError: it does not have the dtype of its group's parameters.
    """
    if memory(parameter).dtype != kind.store.dtype:
        raise ValueError(
            f"parameter {name} is {memory(parameter).dtype}, but its group holds {kind.store.dtype}: add parameters by "
            "add_param_group, which narrows them, and do not convert a model after its optimizer is made"
        )


def allocate(tensors: dict, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Zeros for each (local shape, dtype), on the parameter's device."""
    device = local(parameter).device
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in tensors.items()}


def wanted_tensors(kind: Kind, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Every tensor that a parameter's state holds: companions, then states."""
    companions = () if kind.inside else kind.update.companions(kind.store)
    wanted = {name: (shape, dtype) for name, dtype in companions}
    for codec, slot in zip(kind.codecs, kind.rule.states):
        wanted |= codec.tensors(slot.name, shape)
    return wanted


def refuse_unscalable(group: Mapping, parameter: torch.Tensor, update: WeightUpdate, name: str) -> None:
    """What has no meaning for a scaled parameter.

    Raises:
        ValueError: a weight update that keeps bits instead of floats, or param_dtype=.
        NotImplementedError: a shard of a scaled tensor.
    """
    if isinstance(local(parameter), ScaledTensor) and not isinstance(parameter, ScaledTensor):
        raise NotImplementedError(f"parameter {name} is a DTensor of scaled tensors: torch.optim steps it")
    if not isinstance(parameter, ScaledTensor):
        return
    if group["param_dtype"] is not None:
        raise ValueError(
            f"param_dtype= narrows plain parameters, but {name} is scaled: choose the payload's dtype by "
            "hu.scalify(dtype=...) or parameter.cast_(dtype)"
        )
    if not update.scales:
        raise ValueError(
            f"weight_update {update.name!r} keeps bits or debts that a scale does not multiply, and parameter {name} "
            "is scaled: use 'stochastic' (no more memory), 'kahan' (as much again), 'nearest' or 'master'"
        )


def refuse_feedback(rule: UpdateRule, update: WeightUpdate) -> None:
    """Feedback needs a first moment that the update is proportional to."""
    if update.feeds_back and rule.repay is None:
        raise ValueError(
            f"weight_update 'feedback' puts the lost part into a first moment, which {rule.name} does not offer "
            "(it takes a sign, a running maximum, or keeps none): use 'stochastic', 'split8' or 'kahan'"
        )
