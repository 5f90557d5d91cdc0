"""The fused step kernel of one step specification: device functions joined into one loop, compiled once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels import compile_kernel
from ...kernels.scalar._operations import (
    add,
    bit_and,
    load8,
    load16,
    load32,
    real,
    shr,
    sqrt,
    store8,
    store16,
    store32,
    word,
)
from ...rounding._random_bits import WEYL, draw, stream_start
from ..rules._update_rule import UpdateRule
from ..states._int8_device_functions import (
    GROW,
    HUGE,
    HUGE_SQUARED,
    SHRINK,
    decode_signed,
    decode_squared,
    encode_signed,
    encode_squared,
)
from ..states._scaled import Scaled, higher
from ..states._state import Codec, Int8Blocks
from ..states._storage import Store
from ..weight_updates._weight_update import WeightUpdate

SIGNATURE = "void(int64, int64, int64[:,::1], int64[:,::1], int64[::1], float32[:,::1], uint32[:,::1], float64[:,::1])"
POINTERS_BEFORE_STATES = 5
# The scale that a payload is read under, the reciprocal of the one it is written under, the gradient's; what the
# payload as read is multiplied by to be under the new scale, and that scale.
WEIGHT_SCALES = ("weight_scale", "weight_inverse", "gradient_scale", "weight_ratio", "new_scale")
METER = ("seen", "cancelled", "wanted", "kept")
TILE = 1024


@dataclass(frozen=True)
class StepSpec:
    """What the parameters of one fused call have in common: rule, weight update, storage of weight and states.

    Attributes:
        rule: the update rule.
        update: the weight update.
        store: of the parameter.
        gradient: of the gradient.
        codecs: of the states, in the rule's order.
        metered: whether lost updates are counted.
        scaled: whether the parameter is a payload with a scale; scales are then further constants.
        finds_amax: nothing is written; the largest finite magnitudes that a step would store are found.
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
    in_parameter: bool = False

    @property
    def constants(self) -> tuple[str, ...]:
        """The names of the rule's constants, then of the scales before and after the step."""
        if not self.scaled:
            return self.rule.constants
        own = [name for k in self.scaled_states for name in (f"scale_{k}", f"inverse_{k}")]
        return (*self.rule.constants, *WEIGHT_SCALES, *own)

    @functools.cached_property
    def constant_places(self) -> dict[str, int]:
        """The position of each constant."""
        return {name: place for place, name in enumerate(self.constants)}

    @property
    def scaled_states(self) -> tuple[int, ...]:
        """The numbers of the states that have a scale."""
        return tuple(k for k, codec in enumerate(self.codecs) if isinstance(codec, Scaled))

    @property
    def block(self) -> int | None:
        """Length of the 8-bit blocks, None if there are none."""
        return next((codec.block for codec in self.codecs if isinstance(codec, Int8Blocks)), None)

    @property
    def shrinks(self) -> bool:
        """Whether elements too large to square in float32, but not for 8-bit codes, are scaled down for the rule."""
        squares = any(state.degree == 2 for state in self.rule.states)
        return bool(self.block) and not self.scaled and squares and self.rule.homogeneous is not None

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
        """The names of all tensors that a parameter's state holds: auxiliary tensors, then states."""
        return tuple(itertools.chain(self.auxiliary_names, *self.state_tensors))

    @property
    def name(self) -> str:
        """The name in messages and in the cache."""
        suffix = "_amax" if self.finds_amax else "_scaled" if self.scaled else ""
        return f"{self.rule.name}_{self.update.name}_{self.store.name}{suffix}".replace("-", "_")


@dataclass(frozen=True)
class Draw:
    """The source of a stochastic rounding's bits: a random word, or its high or low half."""

    word: int
    part: str


@functools.cache
def draws_of(spec: StepSpec) -> tuple[tuple[Draw, ...], tuple[Draw, ...], int]:
    """The draws of the weight update, of the states, and the number of words. Halves of one word are shared."""
    first_pass = [("weight", bits) for bits in spec.update.draws(spec.store)]
    first_pass += [(k, codec.random_bits) for k, codec in enumerate(spec.codecs) if not isinstance(codec, Int8Blocks)]
    second_pass = [(k, codec.random_bits) for k, codec in enumerate(spec.codecs) if isinstance(codec, Int8Blocks)]
    placed: list[tuple[object, Draw]] = []
    words, half = 0, None
    for position, (owner, bits) in enumerate(first_pass + second_pass):
        if position == len(first_pass):
            half = None
        if bits == 0:
            placed.append((owner, Draw(-1, "none")))
        elif bits > 16:
            placed.append((owner, Draw(words, "full")))
            words += 1
        elif half is None:
            placed.append((owner, Draw(words, "high")))
            half, words = words, words + 1
        else:
            placed.append((owner, Draw(half, "low")))
            half = None
    weight = tuple(draw for owner, draw in placed if owner == "weight")
    of_state = {owner: draw for owner, draw in placed if owner != "weight"}
    return weight, tuple(of_state[k] for k in range(len(spec.codecs))), words


def pointer_count(spec: StepSpec) -> int:
    """Columns of the pointer table: parameter, three auxiliary tensors, gradient, then the tensors of the states."""
    return POINTERS_BEFORE_STATES + sum(codec.columns for codec in spec.codecs)


@functools.cache
def compiled(spec: StepSpec) -> Callable:
    """Return the kernel `step(first, last, chunks, pointers, rows, constants, keys, meter)` of a specification."""
    if spec.in_parameter:
        return compiled(dataclasses.replace(spec, in_parameter=False))
    namespace: dict = {}
    exec(compile(source(spec), f"<halfulp step {spec.name}>", "exec"), namespace)
    function = namespace["step"]
    function.__name__ = function.__qualname__ = f"step_{spec.name}"
    function.__module__ = __name__
    return compile_kernel(function, SIGNATURE, bindings(spec))


def bindings(spec: StepSpec) -> dict[str, object]:
    """Return what every name in the kernel's source is bound to."""
    bound: dict[str, object] = {
        "add": add, "bit_and": bit_and, "shr": shr, "draw": draw, "stream_start": stream_start, "WEYL": WEYL,
        "S16": np.uint32(16), "LOW": np.uint32(0xFFFF), "UNDRAWN": np.uint32(0), "sqrt": sqrt, "real": real,
        "update_rule": spec.rule.update, "gradient_load": spec.gradient.load, "gradient_real": spec.gradient.real,
        "load8": load8, "load16": load16, "load32": load32, "store8": store8, "store16": store16, "word": word,
        "store32": store32, "empty": np.empty, "float32": np.float32, "float64": np.float64,
        "decode_signed": decode_signed, "decode_squared": decode_squared, "encode_signed": encode_signed,
        "encode_squared": encode_squared, "BLOCK": np.int64(spec.block or 1), "HUGE": HUGE, "GROW": GROW,
        "HUGE_SQUARED": HUGE_SQUARED, "SHRINK": SHRINK, "UNIT": np.float32(1.0), "ZERO": np.float32(0.0),
        "higher": higher,
    }  # fmt: skip
    if spec.rule.error_feedback is not None:
        bound["feedback_rule"] = spec.rule.error_feedback
    for k, codec in enumerate(spec.codecs):
        if not isinstance(codec, Int8Blocks):
            bound |= codec.bindings(k)
    return bound | spec.update.bindings(spec.store)


def source(spec: StepSpec) -> str:
    """Return the kernel's source."""
    lines = [
        "def step(first, last, chunks, pointers, rows, constants, keys, meter):",
        *_buffers(spec),
        "    for c in range(first, last):",
        "        t, begin, index = chunks[c, 0], chunks[c, 1], chunks[c, 3]",
        "        end = begin + chunks[c, 2]",
        "        " + "; ".join(f"a{j} = pointers[t, {j}]" for j in range(pointer_count(spec))),
        *(f"        {name} = constants[rows[t], {j}]" for j, name in enumerate(spec.constants)),
        *(["        seen = cancelled = wanted = kept = 0.0"] if spec.metered else []),
        *([f"        {name} = UNDRAWN" for name in amax_names(spec)] if spec.finds_amax else []),
        *(_blocked_loop(spec) if spec.block else _plain_loop(spec)),
        *(_meter_out(METER) if spec.metered else []),
        *(_meter_out([f"real({name})" for name in amax_names(spec)]) if spec.finds_amax else []),
        *_keep_buffers(spec),
    ]
    return "\n".join(lines) + "\n"


def state_pointers(spec: StepSpec) -> list[int]:
    """Return the first column of each state's tensors in the pointer table."""
    widths = [codec.columns for codec in spec.codecs]
    return [POINTERS_BEFORE_STATES + before for before in itertools.accumulate([0, *widths[:-1]])] if widths else []


def _plain_loop(spec: StepSpec) -> list[str]:
    words = range(0 if spec.finds_amax else draws_of(spec)[2])
    body = element_update(spec, words) + _advance(words)
    return [*_counters(words, "index", 8), "        for i in range(begin, end):", *_indent(body, 12)]


def _advance(words: range) -> list[str]:
    return [f"counter{word} = add(counter{word}, WEYL)" for word in words]


def _rule_call(spec: StepSpec, gradient: str, values: Sequence[str], scaled: bool = False) -> str:
    results = "".join(f", n{k}" for k in range(len(values)))
    inner = spec.rule.homogeneous or () if scaled else ()
    constants = [f"{name} * shrink" if name in inner else name for name in spec.rule.constants]
    target = f"u{results}" if results else "u,"
    weight = "w if w - w == ZERO else ZERO" if spec.rule.decays else "w"
    return f"{target} = update_rule({', '.join([weight, gradient, *values, *constants])})"


def _weight_write(spec: StepSpec, draws: Sequence[Draw], scaled: bool = False) -> list[str]:
    bits = [bits_of(draw) for draw in draws]
    bits += ["UNDRAWN"] * (2 - len(bits))
    terms = "g, h0, h1, h2, -ZERO" if spec.assigns else "w, h0, h1, h2, u"
    if spec.scaled:
        terms = "p * weight_ratio, h0 * weight_ratio, h1 * weight_ratio, h2, u * weight_inverse"
    lines = [f"new = write_weight(a0, a1, a2, a3, i, {terms}, {bits[0]}, {bits[1]})"]
    if spec.update.feeds_back:
        values = ", ".join(f"n{k}" for k in range(len(spec.codecs)))
        inner = spec.rule.homogeneous or () if scaled else ()
        constants = ", ".join(f"{name} * shrink" if name in inner else name for name in spec.rule.constants)
        lines += [
            "lost = (w + u) - new",
            f"n0 = feedback_rule(lost if lost - lost == ZERO else ZERO, {values}, {constants})",
        ]
    if spec.metered:
        lines += ["new = new * new_scale"] if spec.scaled else []
        lines += [
            "change = float64(new) - float64(w)",
            "asked = abs(u) > ZERO and change - change == ZERO and u - u == ZERO",
            "seen += 1.0 if asked else 0.0",
            "cancelled += 1.0 if asked and new == w else 0.0",
            "wanted += float64(u) * float64(u) if asked else 0.0",
            "kept += float64(u) * change if asked else 0.0",
        ]
    return lines


def bits_of(draw: Draw) -> str:
    """The text of the random bits of a rounding."""
    form = {"none": "UNDRAWN", "full": "x{}", "high": "shr(x{}, S16)", "low": "bit_and(x{}, LOW)"}[draw.part]
    return form.format(draw.word)


def _counters(words: Sequence[int] | range, index: str, depth: int) -> list[str]:
    return _indent(
        [f"counter{w} = stream_start(keys[t, {2 * w}], keys[t, {2 * w + 1}], {index})" for w in words], depth
    )


def _indent(lines: Sequence[str], depth: int) -> list[str]:
    return [" " * depth + line for line in lines]


def _meter_out(names: Sequence[str]) -> list[str]:
    return _indent([f"meter[c, {j}] = {name}" for j, name in enumerate(names)], 8)


def amax_names(spec: StepSpec) -> list[str]:
    """Return the names of the variables that hold the amax of the weight and of each scaled state."""
    return ["top_weight", *(f"top_{k}" for k in spec.scaled_states)]


def _amax_lines(spec: StepSpec) -> list[str]:
    """Return the lines that update these variables by what is about to be stored."""
    lines = [f"top_{k} = higher(top_{k}, {spec.codecs[k].measured(k)})" for k in spec.scaled_states]
    return ["top_weight = higher(top_weight, w + u)", *lines]


def _buffers(spec: StepSpec) -> list[str]:
    if not spec.block:
        return []
    held = [k for k, codec in enumerate(spec.codecs) if isinstance(codec, Int8Blocks)]
    return _indent([f"buffer{k} = empty({TILE}, float32); new{k} = buffer{k}.ctypes.data" for k in held], 4)


def _keep_buffers(spec: StepSpec) -> list[str]:
    """Return a last use of the buffers: Numba frees an array after its last use, and an address is none."""
    return [f"    buffer{k}[0] = ZERO" for k, codec in enumerate(spec.codecs) if isinstance(codec, Int8Blocks)]


def _blocked_loop(spec: StepSpec) -> list[str]:
    """Return a loop over tiles: codes to float32 in the first-level cache, the update there, then scales and codes."""
    weight_draws, state_draws, words = draws_of(spec)
    first_pass = [
        *weight_draws,
        *(d for d, codec in zip(state_draws, spec.codecs) if not isinstance(codec, Int8Blocks)),
    ]
    own = max((draw.word for draw in first_pass), default=-1) + 1
    pointers = state_pointers(spec)
    blocked = [
        (k, codec, at) for (k, codec), at in zip(enumerate(spec.codecs), pointers) if isinstance(codec, Int8Blocks)
    ]
    inner = [f"stop = min(start + {TILE}, end)"]
    inner += [f"decode_{codec_name(codec)}(a{at}, a{at + 1}, start, stop, new{k})" for k, codec, at in blocked]
    if not spec.finds_amax:
        inner += _counters(range(words), "index + (start - begin)", 0)
    own = 0 if spec.finds_amax else own
    body = element_update(
        spec,
        range(own),
        lambda k: f"real(load32(new{k}, i - start))",
        lambda k, value: f"store32(new{k}, i - start, word({value}))",
    )
    inner += ["for i in range(start, stop):", *_indent(body + _advance(range(own)), 4)]
    for k, codec, at in () if spec.finds_amax else blocked:
        drawn = state_draws[k]
        shift = "S16" if drawn.part == "high" else "UNDRAWN"
        inner += _counters([drawn.word], "index + (start - begin)", 0)
        inner += [f"encode_{codec_name(codec)}(a{at}, a{at + 1}, start, stop, new{k}, counter{drawn.word}, {shift})"]
    return [f"        for start in range(begin, end, {TILE}):", *_indent(inner, 12)]


def codec_name(codec: Int8Blocks) -> str:
    """Which pieces decode and encode 8-bit states."""
    return "squared" if codec.squared else "signed"


def element_update(
    spec: StepSpec,
    words: range,
    decode: Callable[[int], str] | None = None,
    encode: Callable[[int, str], str] | None = None,
) -> list[str]:
    """What happens to one element i, given the counters of its random words.

    Args:
        spec: of step.
        words: which random words to draw.
        decode: 8-bit state k -> the text of its value, before squaring.
        encode: (8-bit state k, text of the value) -> the text that stores it.
    """
    weight_draws, state_draws, _ = draws_of(spec)
    rescaled = spec.shrinks
    if spec.scaled:
        body = ["p, h0, h1, h2 = read_weight(a0, a1, a2, a3, i)", "w = p * weight_scale"]
        body += ["g = gradient_real(gradient_load(a4, i)) * gradient_scale"]
    else:
        body = ["w, h0, h1, h2 = read_weight(a0, a1, a2, a3, i)", "g = gradient_real(gradient_load(a4, i))"]
    values, after, large = [], [], ["abs(g) > HUGE"]
    for k, (codec, state, at) in enumerate(zip(spec.codecs, spec.rule.states, state_pointers(spec))):
        square, blocked = state.degree == 2, isinstance(codec, Int8Blocks)
        body += [f"q{k} = {decode(k) if blocked else codec.loaded(k, at)}"]
        large += [f"q{k} > {'HUGE' if blocked else 'HUGE_SQUARED'}"] if square else []
        times, back = (" * shrink", " * grow") if rescaled else ("", "")
        if blocked:
            values += [f"(q{k}{times}) * (q{k}{times})" if square else f"q{k}{times}"]
            after += [encode(k, f"{f'sqrt(n{k})' if square else f'n{k}'}{back}")]
        else:
            values += [f"q{k}{times}{times if square else ''}"]
            after += [codec.saved(k, at, f"n{k}{back}{back if square else ''}", bits_of(state_draws[k]))]
    if rescaled:
        body += [f"huge = {' or '.join(large)}", "shrink = SHRINK if huge else UNIT", "grow = GROW if huge else UNIT"]
    body += [_rule_call(spec, "g * shrink" if rescaled else "g", values, rescaled)]
    body += ["u = ZERO if g == w else u"] if spec.rule.assigns else []  # an infinity that stays
    if spec.finds_amax:
        return body + _amax_lines(spec)
    body += [f"x{word} = draw(counter{word})" for word in words]
    return body + _weight_write(spec, weight_draws, rescaled) + after
