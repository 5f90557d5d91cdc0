"""The step of one element as a device function: recorded, compiled for the processor, and run on tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import IndexMap, Trace, Traced, record_function, run_trace_on_tensors
from ...kernels._device_function import (
    RANDOM_STREAM_INPUT_NAMES,
    ElementTraceBuilder,
    PointerTableFunction,
    bind_free_variables,
    call_users_function,
)
from ...kernels._operations import bit_and, select, shr, sqrt
from ...kernels._trace import RecordedFunction
from ...kernels.vector._table_loop import compile_pointer_table_kernel
from ...rounding._random_bits import (
    WEYL_STEP,
    compute_stream_counters,
    draw_word,
    get_stream_position_trace,
    hash_element,
)
from .._storage import F32
from ..parameters._step_spec import (
    POINTER_COLUMNS_BEFORE_STATES,
    RULE_SUM_SCALE_CONSTANT_NAMES,
    RandomBitDraw,
    StepSpec,
    assign_random_bits_to_roundings,
    count_pointer_columns,
    list_state_columns,
)
from ..rules._update_rule import UpdateRule
from ..states._codec import TensorScaleCodec, find_finite_magnitude_word
from ..states._int8_blocks import DOWNSCALE_FACTOR, RESCALED_ROOT, RESCALED_SQUARE, UPSCALE_FACTOR, Int8Blocks

GRADIENT_COLUMN = 4
ZERO, NEGATIVE_ZERO, ONE = (np.float32(x) for x in (0.0, -0.0, 1.0))
NO_RANDOM_WORD = np.uint32(0)


@functools.cache
def compile_step_kernel(spec: StepSpec) -> Callable:
    """Return the kernel `step(first, last, chunks, pointers, rows, constants, keys, meter)` of a specification."""
    return compile_pointer_table_kernel(f"step_{spec.name}", make_step_table_function(spec))


def make_step_table_function(spec: StepSpec) -> PointerTableFunction:
    """Return the step of a specification as a device function on a table of pointers."""
    return PointerTableFunction(
        record_step(spec),
        count_pointer_columns(spec),
        len(spec.constant_names),
        get_stream_position_trace() if spec.draws_random_bits and not spec.computed_reduction else None,
        int(WEYL_STEP),
        spec.block_length,
    )


@functools.cache
def record_step(spec: StepSpec, finds_payload_amax: bool = False) -> Trace:
    """Return the instructions of one element, on the pointers' addresses, constants and `RANDOM_STREAM_INPUT_NAMES`.

    A metered step sums up updates wanted and cancelled, u^2 and u (realised change); one that finds the largest
    magnitudes has those of the weight and of the scaled states, and `finds_payload_amax` of the payload as read.
    """
    element = ElementTraceBuilder(count_pointer_columns(spec), len(spec.constant_names))
    step = _StepRecorder(spec, element)
    step.record()
    if finds_payload_amax:
        payload = spec.store.decode_code(spec.store.load_code(element.arrays[0], element.index))
        element.trace.emit_total("max", find_finite_magnitude_word(payload))
    return element.trace


class _StepRecorder:
    """One element's values in the traced step of a specification."""

    def __init__(self, spec: StepSpec, element: ElementTraceBuilder) -> None:
        self.spec, self.trace, self.element = spec, element.trace, element
        self.index, self.arrays, numbers = element.index, element.arrays, element.constants
        self.block_index = self.trace.emit("block", (), None, "block")
        count = len(spec.rule.constants)
        self.rule_constants, self.scales = numbers[:count], dict(zip(spec.constant_names[count:], numbers[count:]))
        self.weight_update_bindings = spec.update.make_bindings(spec.store)
        self.downscale = self.upscale = ONE

    def record(self) -> None:
        """Record the step."""
        spec = self.spec
        p, *held = self.bind_weight_update_function("read_weight")(*self.arrays[:4], self.index)
        g = spec.gradient.decode_code(spec.gradient.load_code(self.arrays[GRADIENT_COLUMN], self.index))
        w, g = (p * self.scales["weight_scale"], g * self.scales["gradient_scale"]) if spec.scaled else (p, g)
        roots = [self.load_stored_state(k) for k in range(len(spec.codecs))]
        if spec.rescales_large_elements:  # scale an element down whose square float32 does not hold
            large = abs(g) > RESCALED_ROOT
            for codec, slot, root in zip(spec.codecs, spec.rule.states, roots):
                if slot.degree == 2:
                    large = large | (root > (RESCALED_ROOT if isinstance(codec, Int8Blocks) else RESCALED_SQUARE))
            self.trace.rare_masks.add(large.number)
            self.downscale, self.upscale = select(large, DOWNSCALE_FACTOR, ONE), select(large, UPSCALE_FACTOR, ONE)
        values = [self.convert_state_for_rule(k, root) for k, root in enumerate(roots)]
        if spec.computes_rule_reductions:
            self.record_reductions(w, g, values)
            return
        u, new = self.apply_rule(w, g, values)
        if spec.computed_reduction == "amax":
            self.trace.emit_total("max", find_finite_magnitude_word(w + u))
            for k, codec in spec.scaled_codec_by_state.items():
                self.trace.emit_total("max", find_finite_magnitude_word(codec.take_root_of_second_moment(new[k])))
            return
        weight_draws, state_draws = assign_random_bits_to_roundings(spec)
        written = self.write_weight(p, held, w, g, u, [self.draw_random_bits(draw) for draw in weight_draws])
        if spec.update.feeds_back and spec.rule.error_feedback is not None:
            lost = (w + u) - written
            lost = select(lost - lost == ZERO, lost, ZERO)
            new[0] = spec.rule.error_feedback(lost, *new, *self.rescale_constants())
        if spec.counts_lost_updates:
            self.record_lost_update_sums(w, u, written * self.scales["new_scale"] if spec.scaled else written)
        for k, value in enumerate(new):
            self.store_state(k, value, self.draw_random_bits(state_draws[k]))

    def bind_weight_update_function(self, name: str) -> Callable:
        """Return a device function of the weight update."""
        found: Any = self.weight_update_bindings[name]
        return bind_free_variables(found, self.weight_update_bindings)

    def load_stored_state(self, k: int) -> Any:
        """Load state k as it is stored: a second moment in blocks before squaring."""
        codec, arrays = self.spec.codecs[k], self.list_state_addresses(k)
        if isinstance(codec, Int8Blocks):
            return codec.load_before_squaring(arrays, self.index, self.block_index)
        scale = self.scales[f"scale_{k}"] if isinstance(codec, TensorScaleCodec) else None
        return codec.load_element(arrays, self.index, self.block_index, scale)

    def list_state_addresses(self, k: int) -> Sequence[Any]:
        """Return the addresses of a state's tensors."""
        first = list_state_columns(self.spec)[k]
        return self.arrays[first : first + self.spec.codecs[k].tensor_count]

    def convert_state_for_rule(self, k: int, stored: Any) -> Any:
        """Return state k as the rule takes it."""
        degree, is_root = self.spec.rule.states[k].degree, isinstance(self.spec.codecs[k], Int8Blocks)
        value = self.multiply_if_rescaled(stored, self.downscale)
        if degree == 2 and is_root:
            return value * value
        return self.multiply_if_rescaled(value, self.downscale) if degree == 2 else value

    def multiply_if_rescaled(self, value: Any, factor: Any) -> Any:
        """Multiply a value by a factor, if the step rescales elements."""
        return value * factor if self.spec.rescales_large_elements else value

    def rescale_constants(self) -> list[Any]:
        """Return the rule's constants, those of the gradient's size rescaled."""
        inner = (self.spec.rule.homogeneous or ()) if self.spec.rescales_large_elements else ()
        named = zip(self.spec.rule.constants, self.rule_constants)
        return [value * self.downscale if name in inner else value for name, value in named]

    def apply_rule(self, w: Any, g: Any, values: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Apply the rule: return the difference, or new weight, and the new states."""
        rule = self.spec.rule
        made = call_users_function(rule.update, *self.collect_rule_operands(w, g, values), *self.rescale_constants())
        if not isinstance(made, (tuple, list)) or len(made) != 1 + len(values):
            kept = ", ".join(["the update", *(repr(slot.name) for slot in rule.states)])
            raise TypeError(f"update rule {rule.name!r} returns {made!r}: return a tuple of {kept}")
        u, *new = made
        return select(g == w, ZERO, u) if rule.assigns else u, new  # an infinity that stays

    def collect_rule_operands(self, w: Any, g: Any, values: Sequence[Any]) -> list[Any]:
        """Return what a function of the rule takes before its constants."""
        rule, finite = self.spec.rule, select(w - w == ZERO, w, ZERO) if self.spec.rule.decays else w
        g = self.multiply_if_rescaled(g, self.downscale)
        prepared = [] if rule.prepare is None else [F32.decode_code(F32.load_code(self.arrays[-1], self.index))]
        return [finite, g, *prepared, *values]

    def record_reductions(self, w: Any, g: Any, values: Sequence[Any]) -> None:
        """Add up the values of the rule's sums, or find the largest."""
        constants = self.rescale_constants()
        for k, reduction in enumerate(self.spec.rule.reductions):
            arguments = [*self.collect_rule_operands(w, g, values), *constants]
            taken = arguments[: reduction.of.__code__.co_argcount]
            value = call_users_function(reduction.of, *taken)
            if self.spec.computed_reduction == "largest":
                self.trace.emit_total("max", find_finite_magnitude_word(value))
                continue
            # Split in two by an anchor beside which float64 keeps so few of their digits that sums are exact.
            inverse, *anchors = (self.scales[f"{name}_{k}"] for name in RULE_SUM_SCALE_CONSTANT_NAMES)
            rest = self.to_float64(value * inverse)
            rest = rest * rest if reduction.squares else rest
            for anchor in map(self.to_float64, anchors):
                part = (rest + anchor) - anchor
                self.trace.emit_total("sum", part)
                rest = rest - part

    def write_weight(self, p: Any, held: Sequence[Any], w: Any, g: Any, u: Any, bits: list[Any]) -> Any:
        """Store the weight; return what it now is."""
        spec, scales = self.spec, self.scales
        terms = (g, *held, NEGATIVE_ZERO) if spec.assigns_weight else (w, *held, u)
        if spec.scaled:
            first, second, last = held
            ratio = scales["weight_ratio"]
            terms = (p * ratio, first * ratio, second * ratio, last, u * scales["weight_inverse"])
        given = [*bits, NO_RANDOM_WORD, NO_RANDOM_WORD][:2]
        return self.bind_weight_update_function("write_weight")(*self.arrays[:4], self.index, *terms, *given)

    def record_lost_update_sums(self, w: Any, u: Any, new: Any) -> None:
        """Sum up what updates were asked for, and what became of them."""
        wide, asked_for = self.to_float64(u), abs(u) > ZERO
        change = self.to_float64(new) - self.to_float64(w)
        asked = asked_for & (change - change == np.float64(0.0)) & (u - u == ZERO)
        one, none = np.float64(1.0), np.float64(0.0)
        for value in (one, select(new == w, one, none), wide * wide, wide * change):
            self.trace.emit_total("sum", select(asked, value, none))

    def to_float64(self, x: Traced) -> Traced:
        """Return a float32 as float64."""
        return self.trace.emit("to_float64", (x,), None, "f64")

    def store_state(self, k: int, value: Any, bits: Any) -> None:
        """Store state k."""
        codec, slot = self.spec.codecs[k], self.spec.rule.states[k]
        if isinstance(codec, Int8Blocks):
            root = sqrt(value) if slot.degree == 2 else value
            codec.store_before_squaring(
                self.list_state_addresses(k),
                self.index,
                self.block_index,
                self.multiply_if_rescaled(root, self.upscale),
                bits,
            )
            return
        value = self.multiply_if_rescaled(value, self.upscale)
        value = self.multiply_if_rescaled(value, self.upscale) if slot.degree == 2 else value
        inverse = self.scales[f"inverse_{k}"] if isinstance(codec, TensorScaleCodec) else None
        codec.store_element(self.list_state_addresses(k), self.index, self.block_index, value, inverse, bits)

    def draw_random_bits(self, drawn: RandomBitDraw | None) -> Any:
        """Return random bits: a word of the element's one hash, or some of its bits."""
        if drawn is None:
            return NO_RANDOM_WORD
        word = draw_word(hash_element(*self.element.random_stream_inputs), drawn.word_number)
        word = shr(word, np.uint32(drawn.shift)) if drawn.shift else word
        cut = drawn.shift + drawn.bit_count < 32
        return bit_and(word, np.uint32((1 << drawn.bit_count) - 1)) if cut else word


def run_reference_step(
    spec: StepSpec,
    parts: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    states: Sequence[list[torch.Tensor]],
    constants: Sequence[float],
    key: int | None = None,
    index_map: IndexMap | None = None,
) -> list[float]:
    """Make one step of one parameter, in place; return what the specification adds up or finds the largest of.

    `constants` are rounded to float32 here; `index_map` stands beside a key of random words.
    """
    arrays = {**dict(enumerate(parts)), POINTER_COLUMNS_BEFORE_STATES - 1: gradient}
    arrays |= dict(enumerate((tensor for state in states for tensor in state), POINTER_COLUMNS_BEFORE_STATES))
    rounded = torch.tensor(constants, dtype=torch.float32, device="cpu").tolist()
    inputs: dict[Any, Any] = {("constant", k): value for k, value in enumerate(rounded)}
    if key is not None and index_map is not None:
        inputs |= zip(
            RANDOM_STREAM_INPUT_NAMES, compute_stream_counters(key, make_global_indices(index_map, gradient.device))
        )
    return run_trace_on_tensors(record_step(spec), arrays, inputs, block=spec.block_length)[1]


def compute_rule_change(
    rule: UpdateRule,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    states: Iterable[torch.Tensor],
    constants: Sequence[float],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Apply a rule in float32 to weights, gradients and states; return the change and the new states."""
    given = [weight.float(), gradient.float(), *states]
    rounded = torch.tensor([*constants], dtype=torch.float32, device="cpu").tolist()
    recorded = _record_rule(rule.update, len(given) + len(rounded))
    change, *new = run_trace_on_tensors(recorded.trace, (), dict(enumerate([*given, *rounded])), recorded.results)[0]
    return change, new


@functools.lru_cache(64)
def _record_rule(update: Callable, inputs: int) -> RecordedFunction:
    trace, results = record_function(functools.partial(call_users_function, update), torch.float32, inputs)
    as_values = [x if isinstance(x, Traced) else trace.emit("constant", (), float(x).hex(), "f32") for x in results]
    return RecordedFunction(trace, tuple(x.number for x in as_values))


def make_global_indices(index_map: IndexMap, device: torch.device) -> torch.Tensor:
    """Return the global flat index of every element of a local tensor, in its shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for count, whole, first, step in zip(index_map.shape, index_map.global_shape, index_map.offset, index_map.step):
        along = torch.arange(count, dtype=torch.int64, device=device) * step + first
        index = index.unsqueeze(-1) * whole + along
    return index
