"""The step specification: what the parameters of one fused call have in common, and what follows from it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass

import torch

from ..rules._update_rule import UpdateRule
from ..states._scaled import Scaled
from ..states._state import Codec, Int8Blocks
from ..states._storage import Store
from ..weight_updates._weight_update import WeightUpdate

POINTERS_BEFORE_STATES = 5
# The scale that a payload is read under, the reciprocal of the one it is written under, the gradient's; what the
# payload as read is multiplied by to be under the new scale, and that scale.
# Of each sum of a rule, the power of two that its values are multiplied by, and what they are rounded beside.
SUM_SCALES = ("sum_inverse", "sum_anchor", "sum_low_anchor")
WEIGHT_SCALES = ("weight_scale", "weight_inverse", "gradient_scale", "weight_ratio", "new_scale")


@dataclass(frozen=True)
class StepSpec:
    """The specification of a fused call: rule, weight update, storage of the weight and the states.

    Attributes:
        rule: the update rule.
        update: the weight update.
        store: of the parameter.
        gradient: of the gradient.
        codecs: of the states, in the rule's order.
        metered: whether lost updates are counted.
        scaled: whether the parameter is a payload with a scale; scales are then further constants.
        finds_amax: nothing is written; the largest finite magnitudes that a step would store are found.
        reduces: nothing is written; of the values that the rule adds up, the "largest" finite magnitudes or the "sums"
            are found.
        factor_names: of the tensors that the rule prepares a step with, beside the states.
        in_parameter: the auxiliary tensors are components of the parameter itself; the kernel is the same.
    """

    rule: UpdateRule
    update: WeightUpdate
    store: Store
    gradient: Store
    codecs: tuple[Codec, ...]
    metered: bool = False
    scaled: bool = False
    finds_amax: bool = False
    reduces: str = ""
    factor_names: tuple[str, ...] = ()
    in_parameter: bool = False

    def __hash__(self) -> int:
        """Return a hash, computed once: every step looks its kernel up by the specification."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(self.__getstate__().values()))

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes alone: hashes of strings are another process's own."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def rule_constants(self) -> tuple[str, ...]:
        """The variables of the rule's constants in generated source, none of whose other names begins like them."""
        return tuple(f"rule_{name}" for name in self.rule.constants)

    @property
    def constants(self) -> tuple[str, ...]:
        """The variables of the rule's constants, then of the scales before and after the step."""
        sums = range(len(self.rule.reductions) if self.reduces else 0)
        of_sums = [f"{name}_{k}" for k in sums for name in SUM_SCALES]
        if not self.scaled:
            return (*self.rule_constants, *of_sums)
        own = [name for k in self.scaled_states for name in (f"scale_{k}", f"inverse_{k}")]
        return (*self.rule_constants, *WEIGHT_SCALES, *own, *of_sums)

    @functools.cached_property
    def constant_places(self) -> dict[str, int]:
        """The position of each constant."""
        return {name: place for place, name in enumerate(self.constants)}

    @property
    def scaled_states(self) -> dict[int, Scaled]:
        """The codecs of the states that have a scale, by the states' numbers."""
        return {k: codec for k, codec in enumerate(self.codecs) if isinstance(codec, Scaled)}

    @property
    def blocked_states(self) -> dict[int, Int8Blocks]:
        """The codecs of the states in blocks of 8-bit codes, by the states' numbers."""
        return {k: codec for k, codec in enumerate(self.codecs) if isinstance(codec, Int8Blocks)}

    @property
    def block(self) -> int | None:
        """Length of the 8-bit blocks, None if there are none."""
        return next((codec.block for codec in self.blocked_states.values()), None)

    @property
    def shrinks(self) -> bool:
        """Whether elements too large to square in float32, but not for 8-bit codes, are scaled down for the rule."""
        squares = any(state.degree == 2 for state in self.rule.states)
        return bool(self.block) and not self.scaled and squares and self.rule.homogeneous is not None

    @property
    def digests(self) -> bool:
        """Whether a compiled step computes digests of the payload, to which auxiliary tensors belong."""
        return bool(self.update.auxiliary_tensors(self.store)) and self.writes

    @property
    def writes(self) -> bool:
        """Whether anything is written."""
        return not (self.finds_amax or self.reduces)

    @functools.cached_property
    def draws(self) -> bool:
        """Whether a step draws random bits."""
        return any(draws_of(self)[0] + draws_of(self)[1])

    @property
    def assigns(self) -> bool:
        """Whether the new weight itself is written, instead of the sum of the old one and a difference."""
        return self.rule.assigns and not self.update.compensates

    @functools.cached_property
    def metered_twin(self) -> StepSpec:
        """The same specification, metered."""
        return dataclasses.replace(self, metered=True)

    @functools.cached_property
    def auxiliary_names(self) -> tuple[str, ...]:
        """The names of the auxiliary tensors beside the parameter."""
        return () if self.in_parameter else tuple(name for name, _ in self.update.auxiliary_tensors(self.store))

    @functools.cached_property
    def state_tensors(self) -> tuple[tuple[str, ...], ...]:
        """Per state of the rule, the names of its tensors."""
        return tuple(
            tuple(codec.tensors(state.name, torch.Size([1]))) for codec, state in zip(self.codecs, self.rule.states)
        )

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that a parameter's state holds: auxiliary tensors, then states, then factors."""
        return tuple(itertools.chain(self.auxiliary_names, *self.state_tensors, self.factor_names))

    @property
    def name(self) -> str:
        """The name in messages and in the cache."""
        suffix = "_amax" if self.finds_amax else f"_{self.reduces}" if self.reduces else ""
        suffix += "_scaled" if self.scaled and not self.finds_amax else ""
        return f"{self.rule.name}_{self.update.name}_{self.store.name}{suffix}".replace("-", "_")


@dataclass(frozen=True)
class Draw:
    """The source of a stochastic rounding's bits: so many bits of an element's random word, from one on."""

    word: int
    shift: int
    bits: int


@functools.cache
def draws_of(spec: StepSpec) -> tuple[tuple[Draw | None, ...], tuple[Draw | None, ...]]:
    """The draws of the weight update and of the states; None where nothing is drawn.

    Each gets all bits that it uses, so that no chance is off. Those of up to 16 take the upper and the lower half of
    the first word, then the upper halves of further ones: two lower halves depend on each other. Those of more take a
    word. States in blocks, which are rounded apart from all else, come first.
    """
    of_weight = spec.update.draws(spec.store)
    wanted = [*of_weight, *(codec.random_bits for codec in spec.codecs)]
    blocked = [len(of_weight) + k for k in spec.blocked_states]
    placed: list[Draw | None] = [None] * len(wanted)
    words, halves = itertools.count(), list[Draw]()
    for place in sorted(range(len(wanted)), key=lambda place: place not in blocked):
        bits = wanted[place]
        if bits > 16:
            placed[place] = Draw(next(words), 0, 32)
        elif bits and len(halves) == 1:
            halves.append(Draw(halves[0].word, 16 - bits, bits))
            placed[place] = halves[1]
        elif bits:
            drawn = placed[place] = Draw(next(words), 32 - bits, bits)
            halves = halves or [drawn]
    return tuple(placed[: len(of_weight)]), tuple(placed[len(of_weight) :])


def pointer_count(spec: StepSpec) -> int:
    """Columns of the pointer table: parameter, three auxiliary tensors, gradient, states' tensors, what is prepared."""
    return POINTERS_BEFORE_STATES + sum(codec.columns for codec in spec.codecs) + (spec.rule.prepare is not None)


def state_pointers(spec: StepSpec) -> list[int]:
    """Return the first column of each state's tensors in the pointer table."""
    widths = [codec.columns for codec in spec.codecs]
    return [POINTERS_BEFORE_STATES + before for before in itertools.accumulate([0, *widths[:-1]])] if widths else []
