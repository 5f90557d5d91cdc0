"""The step specification: what the parameters of one fused call have in common, and how a group's options choose it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ...kernels._threads import cached_attribute
from ...mctensor import MCTensor
from ...scaled import ScaledTensor
from .._storage import PAYLOAD_STORE_BY_DTYPE, STORE_BY_DTYPE, Store, make_format_store
from ..rules._update_rule import UpdateRule
from ..states._codec import TensorScaleCodec
from ..states._int8_blocks import Int8Blocks
from ..states._state import BF16_PAIR, Codec, refuse_coarse_states, resolve_codecs
from ..weight_updates._components import choose_mctensor_update
from ..weight_updates._weight_update import WEIGHT_UPDATE_BY_NAME, WeightUpdate, check_drawn_words, find_weight_update
from ._local_tensors import find_index_map, get_local, get_payload
from ._narrowing import is_marked_to_stay_float32

# A chunk's row of sums holds as many largest magnitudes, and the weight's.
MOST_SCALED_STATES = 3
NARROW_DTYPES = (torch.bfloat16, torch.float16)
POINTER_COLUMNS_BEFORE_STATES = 5
# Of each sum of a rule, the power of two that its values are multiplied by, and what they are rounded beside.
RULE_SUM_SCALE_CONSTANT_NAMES = ("sum_inverse", "sum_anchor", "sum_low_anchor")
# The scale that a payload is read under, the reciprocal of the one it is written under, the gradient's; what the
# payload as read is multiplied by to be under the new scale, and that scale.
WEIGHT_SCALE_CONSTANT_NAMES = ("weight_scale", "weight_inverse", "gradient_scale", "weight_ratio", "new_scale")

ComputedReduction = Literal["", "amax", "largest", "sums"]


@dataclass(frozen=True)
class StepSpec:
    """The specification of a fused call: rule, weight update, storage of the weight and the states."""

    rule: UpdateRule
    update: WeightUpdate
    store: Store  # of the parameter
    gradient: Store
    codecs: tuple[Codec, ...]  # of the states, in the rule's order
    counts_lost_updates: bool = False
    scaled: bool = False  # the parameter is a payload with a scale; scales are then further constants
    # What is found instead of writing: "amax", the largest finite magnitudes that a step would store, or of the values
    # that the rule adds up the "largest" finite magnitudes or the "sums".
    computed_reduction: ComputedReduction = ""
    factor_names: tuple[str, ...] = ()  # of the tensors that the rule prepares a step with, beside the states
    has_components_in_parameter: bool = (
        False  # auxiliary tensors are components of the parameter itself; the kernel is the same
    )

    def __hash__(self) -> int:
        """Return a hash, computed once: every step looks its kernel up by the specification."""
        return self._hash

    @cached_attribute
    def _hash(self) -> int:
        return hash(tuple(self.__getstate__().values()))

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes alone: hashes of strings are another process's own."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def constant_names(self) -> tuple[str, ...]:
        """The names of the rule's constants behind "rule_", then of the scales before and after the step."""
        of_rule = [f"rule_{name}" for name in self.rule.constants]
        sums = range(len(self.rule.reductions) if self.computes_rule_reductions else 0)
        of_sums = [f"{name}_{k}" for k in sums for name in RULE_SUM_SCALE_CONSTANT_NAMES]
        if not self.scaled:
            return (*of_rule, *of_sums)
        of_states = [name for k in self.scaled_codec_by_state for name in (f"scale_{k}", f"inverse_{k}")]
        return (*of_rule, *WEIGHT_SCALE_CONSTANT_NAMES, *of_states, *of_sums)

    @cached_attribute
    def constant_columns(self) -> dict[str, int]:
        """The position of each constant."""
        return {name: place for place, name in enumerate(self.constant_names)}

    @property
    def scaled_codec_by_state(self) -> dict[int, TensorScaleCodec]:
        """The codecs of the states that have a scale, by the states' numbers."""
        return {k: codec for k, codec in enumerate(self.codecs) if isinstance(codec, TensorScaleCodec)}

    @property
    def block_length(self) -> int | None:
        """Length of the blocks, None if there are none."""
        return next((codec.scale_block_length for codec in self.codecs if codec.scale_block_length), None)

    @property
    def rescales_large_elements(self) -> bool:
        """Whether elements too large to square in float32, but not for 8-bit codes, are scaled down for the rule."""
        squares = any(state.degree == 2 for state in self.rule.states)
        in_roots = any(isinstance(codec, Int8Blocks) for codec in self.codecs)
        return in_roots and not self.scaled and squares and self.rule.homogeneous is not None

    @property
    def computes_rule_reductions(self) -> bool:
        """Whether the values that the rule adds up are looked at."""
        return self.computed_reduction in ("largest", "sums")

    @cached_attribute
    def draws_random_bits(self) -> bool:
        """Whether a step draws random bits."""
        return any(assign_random_bits_to_roundings(self)[0] + assign_random_bits_to_roundings(self)[1])

    @property
    def assigns_weight(self) -> bool:
        """Whether the new weight itself is written, instead of the sum of the old one and a difference."""
        return self.rule.assigns and not self.update.compensates

    @cached_attribute
    def lost_update_counting_spec(self) -> StepSpec:
        """This specification with lost updates counted."""
        return dataclasses.replace(self, counts_lost_updates=True)

    @cached_attribute
    def auxiliary_names(self) -> tuple[str, ...]:
        """The names of the auxiliary tensors beside the parameter."""
        return (
            ()
            if self.has_components_in_parameter
            else tuple(name for name, _ in self.update.describe_auxiliary_tensors(self.store))
        )

    @cached_attribute
    def state_tensor_names(self) -> tuple[tuple[str, ...], ...]:
        """Per state of the rule, the names of its tensors."""
        return tuple(
            tuple(codec.describe_tensors(state.name, torch.Size([1])))
            for codec, state in zip(self.codecs, self.rule.states)
        )

    @cached_attribute
    def tensor_names(self) -> tuple[str, ...]:
        """The names of all tensors that a parameter's state holds: auxiliary tensors, then states, then factors."""
        return tuple(itertools.chain(self.auxiliary_names, *self.state_tensor_names, self.factor_names))

    @property
    def name(self) -> str:
        """The name in messages and in the cache."""
        suffix = f"_{self.computed_reduction}" if self.computed_reduction else ""
        suffix += "_scaled" if self.scaled and self.computed_reduction != "amax" else ""
        return f"{self.rule.name}_{self.update.name}_{self.store.name}{suffix}".replace("-", "_")


class RandomBitDraw(NamedTuple):
    """The source of a stochastic rounding's bits: so many bits of an element's random word, from one on."""

    word_number: int
    shift: int
    bit_count: int


@functools.cache
def assign_random_bits_to_roundings(
    spec: StepSpec,
) -> tuple[tuple[RandomBitDraw | None, ...], tuple[RandomBitDraw | None, ...]]:
    """Return the draws of the weight update and of the states; None where nothing is drawn.

    Each gets all bits that it uses, so that no chance is off. Those of up to 16 take the upper and the lower half of
    the first word, then the upper halves of further ones: two lower halves depend on each other. Those of more take a
    word. States in blocks, which are rounded apart from all else, come first.
    """
    of_weight = spec.update.list_random_bits_per_draw(spec.store)
    wanted = [*of_weight, *(codec.random_bits for codec in spec.codecs)]
    blocked = [len(of_weight) + k for k, codec in enumerate(spec.codecs) if codec.scale_block_length]
    placed: list[RandomBitDraw | None] = [None] * len(wanted)
    words, halves = itertools.count(), list[RandomBitDraw]()
    for place in sorted(range(len(wanted)), key=lambda place: place not in blocked):
        bits = wanted[place]
        if bits > 16:
            placed[place] = RandomBitDraw(next(words), 0, 32)
        elif bits and len(halves) == 1:
            halves.append(RandomBitDraw(halves[0].word_number, 16 - bits, bits))
            placed[place] = halves[1]
        elif bits:
            drawn = placed[place] = RandomBitDraw(next(words), 32 - bits, bits)
            halves = halves or [drawn]
    return tuple(placed[: len(of_weight)]), tuple(placed[len(of_weight) :])


def count_pointer_columns(spec: StepSpec) -> int:
    """Return the number of pointer columns: parameter, three auxiliary, gradient, states, prepared tensors."""
    return (
        POINTER_COLUMNS_BEFORE_STATES
        + sum(codec.tensor_count for codec in spec.codecs)
        + (spec.rule.prepare is not None)
    )


def list_state_columns(spec: StepSpec) -> list[int]:
    """Return the first column of each state's tensors in the pointer table."""
    widths = [codec.tensor_count for codec in spec.codecs]
    return (
        [POINTER_COLUMNS_BEFORE_STATES + before for before in itertools.accumulate([0, *widths[:-1]])] if widths else []
    )


def choose_step_spec(
    rule: UpdateRule, group: Mapping, parameter: torch.Tensor, gradient: Store | None, name: str
) -> StepSpec:
    """Return the step specification of a parameter; a gradient of None is stored as the parameter is."""
    own = choose_mctensor_update(group, parameter, name) if isinstance(parameter, MCTensor) else None
    scaled, dtype = isinstance(parameter, ScaledTensor), get_payload(parameter).dtype
    narrows = group["param_dtype"] is not None and dtype == torch.float32 and not is_marked_to_stay_float32(parameter)
    store = _choose_store(group["param_dtype"] if narrows else dtype, make_format_store(group["format"]), name, scaled)
    default = "stochastic" if scaled else "split8" if store.dtype in NARROW_DTYPES else "kahan"
    chosen = default if group["weight_update"] is None else group["weight_update"]
    update = own or (WEIGHT_UPDATE_BY_NAME["exact"] if store.name == "fp32" else find_weight_update(chosen))
    _refuse_scaled_options(group, parameter, update, name)
    update.check_store(store)
    check_drawn_words(update, store)
    refuse_unsupported_feedback(rule, update)
    codecs = _choose_codecs(rule, group, parameter, store, name)
    factors = tuple(rule.factors(tuple(parameter.shape))) if rule.factors is not None else ()
    return StepSpec(
        rule,
        update,
        store,
        gradient or store,
        codecs,
        scaled=scaled,
        factor_names=factors,
        has_components_in_parameter=own is not None,
    )


def _choose_store(dtype: torch.dtype, format_store: Store | None, name: str, scaled: bool) -> Store:
    """Return the store of a parameter of some dtype, or of a scaled parameter's payload."""
    if scaled:
        if format_store is not None:
            raise ValueError(f"format= is for plain float32 parameters, but {name} is scaled: leave format out")
        return PAYLOAD_STORE_BY_DTYPE[dtype]
    if dtype.is_complex:
        raise ValueError(
            f"parameter {name} is {dtype}: allowed are bfloat16, float16 and float32; give complex parameters to an "
            "optimizer of torch.optim, which takes them, and the others to this one; or store "
            "torch.view_as_real(parameter) as the parameter and use torch.view_as_complex(parameter) in forward"
        )
    if dtype not in STORE_BY_DTYPE:
        raise ValueError(f"parameter {name} is {dtype}: allowed are bfloat16, float16 and float32; convert it first")
    if format_store is None:
        return STORE_BY_DTYPE[dtype]
    if dtype != torch.float32:
        raise ValueError(f"format= keeps values of a format in float32 parameters, but {name} is {dtype}")
    return format_store


def _choose_codecs(
    rule: UpdateRule, group: Mapping, parameter: torch.Tensor, store: Store, name: str
) -> tuple[Codec, ...]:
    """Return the codecs of a parameter's states; bfloat16 beside 16-bit parameters unless chosen otherwise."""
    is_scaled, is_wide = isinstance(parameter, ScaledTensor), store.dtype == torch.float32
    default = torch.float32 if is_wide else torch.float16 if is_scaled else torch.bfloat16
    codecs = resolve_codecs(group["state_dtype"], rule.states, default, parameter.shape)
    under_scales = [slot.name for slot, codec in zip(rule.states, codecs) if isinstance(codec, TensorScaleCodec)]
    if under_scales and not is_scaled:
        raise ValueError(
            f"float16 and fp8 states have one scale per tensor, which plain parameters such as {name} do not take: "
            f"allowed are torch.float32 and {BF16_PAIR!r} there and, but for a running maximum, torch.bfloat16, '8bit' "
            "and '4bit'; or scale the model by hu.scalify"
        )
    if len(under_scales) > MOST_SCALED_STATES:
        others = ", ".join(f"{slot!r}: torch.float32" for slot in under_scales[MOST_SCALED_STATES:])
        raise ValueError(
            f"{rule.name} keeps {len(under_scales)} states beside the scaled parameter {name}, but at most "
            f"{MOST_SCALED_STATES} can be stored under scales: give state_dtype={{{others}}}, or torch.bfloat16 there"
        )
    refuse_coarse_states(rule, codecs, group["state_dtype"])
    for block in {codec.scale_block_length for codec in codecs if codec.scale_block_length}:
        cut = (find_index_map(parameter).list_contiguous_runs()[:, 1:] % block).any()
        inner = any(getattr(placement, "dim", 0) for placement in getattr(parameter, "placements", ()))
        if cut or (inner and parameter.shape[-1] % block):
            raise ValueError(
                f"parameter {name} of shape {tuple(parameter.shape)} is sharded so that blocks of {block} states "
                "are cut: shard dimension 0, or give it a group with state_dtype=torch.bfloat16"
            )
    return codecs


def _refuse_scaled_options(group: Mapping, parameter: torch.Tensor, update: WeightUpdate, name: str) -> None:
    """Refuse options that have no meaning for a scaled parameter."""
    if isinstance(get_local(parameter), ScaledTensor) and not isinstance(parameter, ScaledTensor):
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


def refuse_unsupported_feedback(rule: UpdateRule, update: WeightUpdate) -> None:
    """Refuse error feedback for rules without a first moment that the update is proportional to."""
    if update.feeds_back and rule.error_feedback is None:
        raise ValueError(
            f"weight_update 'feedback' puts the lost part into a first moment, which {rule.name} does not offer "
            "(it takes a sign, a running maximum, or keeps none): use 'stochastic', 'split8' or 'kahan'"
        )
