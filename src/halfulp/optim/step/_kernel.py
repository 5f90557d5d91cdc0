"""The fused step kernel of one step specification: device functions joined into one loop, compiled once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from ...kernels import OwnNames, compile_kernel
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
from ..parameters._payload_digests import payload_digest
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
from ..states._scaled import higher
from ..states._state import Int8Blocks
from ._spec import Draw, StepSpec, bits_of, draws_of, pointer_count, state_pointers

SIGNATURE = (
    "void(int64, int64, int64[:,::1], int64[:,::1], int64[::1], float32[:,::1], uint32[:,::1], float64[:,::1], "
    "uint64[::1])"
)
METER = ("seen", "cancelled", "wanted", "kept")
TILE = 1024


@functools.cache
def compiled(spec: StepSpec) -> Callable:
    """Return the kernel of a specification.

    It is `step(first, last, chunks, pointers, rows, constants, keys, meter, digests)`.
    """
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
        "gradient_load": spec.gradient.load, "gradient_real": spec.gradient.real,
        "load8": load8, "load16": load16, "load32": load32, "store8": store8, "store16": store16, "word": word,
        "store32": store32, "empty": np.empty, "float32": np.float32, "float64": np.float64,
        "decode_signed": decode_signed, "decode_squared": decode_squared, "encode_signed": encode_signed,
        "encode_squared": encode_squared, "BLOCK": np.int64(spec.block or 1), "HUGE": HUGE, "GROW": GROW,
        "HUGE_SQUARED": HUGE_SQUARED, "SHRINK": SHRINK, "UNIT": np.float32(1.0), "ZERO": np.float32(0.0),
        "higher": higher, "payload_digest": OwnNames(payload_digest), "update_rule": OwnNames(spec.rule.update),
    }  # fmt: skip
    if spec.rule.error_feedback is not None:
        bound["feedback_rule"] = OwnNames(spec.rule.error_feedback)
    for k, codec in enumerate(spec.codecs):
        if not isinstance(codec, Int8Blocks):
            bound |= codec.bindings(k)
    return bound | spec.update.bindings(spec.store)


def source(spec: StepSpec) -> str:
    """Return the kernel's source."""
    lines = [
        "def step(first, last, chunks, pointers, rows, constants, keys, meter, digests):",
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
        *(_digest(spec) if spec.digests else []),
        *_keep_buffers(spec),
    ]
    return "\n".join(lines) + "\n"


def _plain_loop(spec: StepSpec) -> list[str]:
    words = range(0 if spec.finds_amax else draws_of(spec)[2])
    body = element_update(spec, words) + _advance(words)
    return [*_counters(words, "index", 8), "        for i in range(begin, end):", *_indent(body, 12)]


def _advance(words: range) -> list[str]:
    return [f"counter{word} = add(counter{word}, WEYL)" for word in words]


def _rule_call(spec: StepSpec, gradient: str, values: Sequence[str], scaled: bool = False) -> str:
    results = "".join(f", n{k}" for k in range(len(values)))
    target = f"u{results}" if results else "u,"
    weight = "w if w - w == ZERO else ZERO" if spec.rule.decays else "w"
    return f"{target} = update_rule({', '.join([weight, gradient, *values, *_constants(spec, scaled)])})"


def _constants(spec: StepSpec, scaled: bool) -> list[str]:
    inner = spec.rule.homogeneous or () if scaled else ()
    variables = zip(spec.rule.constants, spec.rule_constants)
    return [f"{variable} * shrink" if name in inner else variable for name, variable in variables]


def _weight_write(spec: StepSpec, draws: Sequence[Draw], scaled: bool = False) -> list[str]:
    bits = [bits_of(draw) for draw in draws]
    bits += ["UNDRAWN"] * (2 - len(bits))
    terms = "g, h0, h1, h2, -ZERO" if spec.assigns else "w, h0, h1, h2, u"
    if spec.scaled:
        terms = "p * weight_ratio, h0 * weight_ratio, h1 * weight_ratio, h2, u * weight_inverse"
    lines = [f"new = write_weight(a0, a1, a2, a3, i, {terms}, {bits[0]}, {bits[1]})"]
    if spec.update.feeds_back:
        values = ", ".join(f"n{k}" for k in range(len(spec.codecs)))
        constants = ", ".join(_constants(spec, scaled))
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


def _counters(words: Sequence[int] | range, index: str, depth: int) -> list[str]:
    return _indent(
        [f"counter{w} = stream_start(keys[t, {2 * w}], keys[t, {2 * w + 1}], {index})" for w in words], depth
    )


def _indent(lines: Sequence[str], depth: int) -> list[str]:
    return [" " * depth + line for line in lines]


def _meter_out(names: Sequence[str]) -> list[str]:
    return _indent([f"meter[c, {j}] = {name}" for j, name in enumerate(names)], 8)


def _digest(spec: StepSpec) -> list[str]:
    size = spec.store.dtype.itemsize
    return [f"        digests[c] = payload_digest(a0 + begin * {size}, (end - begin) * {size})"]


def amax_names(spec: StepSpec) -> list[str]:
    """Return the names of the variables that hold the amax of the weight and of each scaled state."""
    return ["top_weight", *(f"top_{k}" for k in spec.scaled_states)]


def _amax_lines(spec: StepSpec) -> list[str]:
    """Return the lines that update these variables by what is about to be stored."""
    lines = [f"top_{k} = higher(top_{k}, {codec.measured(k)})" for k, codec in spec.scaled_states.items()]
    return ["top_weight = higher(top_weight, w + u)", *lines]


def _buffers(spec: StepSpec) -> list[str]:
    if not spec.block:
        return []
    held = spec.blocked_states
    return _indent([f"buffer{k} = empty({TILE}, float32); new{k} = buffer{k}.ctypes.data" for k in held], 4)


def _keep_buffers(spec: StepSpec) -> list[str]:
    """Return a last use of the buffers: Numba frees an array after its last use, and an address is none."""
    return [f"    buffer{k}[0] = ZERO" for k in spec.blocked_states]


def _blocked_loop(spec: StepSpec) -> list[str]:
    """Return a loop over tiles: codes to float32 in the first-level cache, the update there, then scales and codes."""
    weight_draws, state_draws, words = draws_of(spec)
    first_pass = [
        *weight_draws,
        *(d for d, codec in zip(state_draws, spec.codecs) if not isinstance(codec, Int8Blocks)),
    ]
    own = max((draw.word for draw in first_pass), default=-1) + 1
    pointers = state_pointers(spec)
    blocked = [(k, codec, pointers[k]) for k, codec in spec.blocked_states.items()]
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
    """Return the suffix of the device functions that decode and encode an 8-bit state."""
    return "squared" if codec.squared else "signed"


def _no_blocks(k: int, value: str = "") -> str:
    raise AssertionError("a specification with 8-bit states says how they are read and stored")


def element_update(
    spec: StepSpec,
    words: range,
    decode: Callable[[int], str] = _no_blocks,
    encode: Callable[[int, str], str] = _no_blocks,
) -> list[str]:
    """Return the source lines that update one element i, given the counters of its random words.

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
        body += [f"q{k} = {decode(k) if isinstance(codec, Int8Blocks) else codec.load_text(k, at)}"]
        large += [f"q{k} > {'HUGE' if blocked else 'HUGE_SQUARED'}"] if square else []
        times, back = (" * shrink", " * grow") if rescaled else ("", "")
        if isinstance(codec, Int8Blocks):
            values += [f"(q{k}{times}) * (q{k}{times})" if square else f"q{k}{times}"]
            after += [encode(k, f"{f'sqrt(n{k})' if square else f'n{k}'}{back}")]
        else:
            values += [f"q{k}{times}{times if square else ''}"]
            after += [codec.store_text(k, at, f"n{k}{back}{back if square else ''}", bits_of(state_draws[k]))]
    if rescaled:
        body += [f"huge = {' or '.join(large)}", "shrink = SHRINK if huge else UNIT", "grow = GROW if huge else UNIT"]
    body += [_rule_call(spec, "g * shrink" if rescaled else "g", values, rescaled)]
    body += ["u = ZERO if g == w else u"] if spec.rule.assigns else []  # an infinity that stays
    if spec.finds_amax:
        return body + _amax_lines(spec)
    body += [f"x{word} = draw(counter{word})" for word in words]
    return body + _weight_write(spec, weight_draws, rescaled) + after
