"""The fused step of one kind of parameter: pieces joined into one loop and compiled once."""

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
    root,
    shr,
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
from ..states._state import Blocks, Codec
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
class Kind:
    """What the parameters of one fused call have in common.

    Attributes:
        rule: the update rule.
        update: the weight update.
        store: of the parameter.
        gradient: of the gradient.
        codecs: of the states, in the rule's order.
        metered: whether lost updates are counted.
        scaled: whether the parameter is a payload with a scale; scales are then further constants.
        peaks: nothing is written, and the largest finite magnitudes that would be are found.
        inside: the weight update's companions are components of the parameter itself; its kernel is the same.
    """

    rule: UpdateRule
    update: WeightUpdate
    store: Store
    gradient: Store
    codecs: tuple[Codec, ...]
    metered: bool = False
    scaled: bool = False
    peaks: bool = False
    inside: bool = False

    @property
    def constants(self) -> tuple[str, ...]:
        """The names of the rule's constants, then of the scales, present and to be."""
        if not self.scaled:
            return self.rule.constants
        own = [name for k in self.scaled_states for name in (f"scale_{k}", f"inverse_{k}")]
        return (*self.rule.constants, *WEIGHT_SCALES, *own)

    @functools.cached_property
    def constant_places(self) -> dict[str, int]:
        """Where each constant stands."""
        return {name: place for place, name in enumerate(self.constants)}

    @property
    def scaled_states(self) -> tuple[int, ...]:
        """Which states have a scale."""
        return tuple(k for k, codec in enumerate(self.codecs) if isinstance(codec, Scaled))

    @property
    def block(self) -> int | None:
        """Length of the 8-bit blocks, None where there are none."""
        return next((codec.block for codec in self.codecs if isinstance(codec, Blocks)), None)

    @property
    def shrinks(self) -> bool:
        """Whether elements too large to square are brought down for the rule: float32 would lose them, codes not."""
        squares = any(slot.degree == 2 for slot in self.rule.states)
        return bool(self.block) and not self.scaled and squares and self.rule.homogeneous is not None

    @property
    def assigns(self) -> bool:
        """Whether the new weight itself is written, which no sum of the old one and a difference always equals."""
        return self.rule.assigns and not self.update.compensates

    @functools.cached_property
    def metered_twin(self) -> Kind:
        """The same, metered."""
        return dataclasses.replace(self, metered=True)

    @functools.cached_property
    def companions(self) -> tuple[str, ...]:
        """The names of the tensors beside the parameter."""
        return () if self.inside else tuple(name for name, _ in self.update.companions(self.store))

    @functools.cached_property
    def state_tensors(self) -> tuple[tuple[str, ...], ...]:
        """Per state of the rule, the names of its tensors."""
        return tuple(
            tuple(codec.tensors(slot.name, torch.Size([1]))) for codec, slot in zip(self.codecs, self.rule.states)
        )

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that a parameter's state holds: companions, then states."""
        return tuple(itertools.chain(self.companions, *self.state_tensors))

    @property
    def name(self) -> str:
        """For messages and the cache."""
        kind = "_peaks" if self.peaks else "_scaled" if self.scaled else ""
        return f"{self.rule.name}_{self.update.name}_{self.store.name}{kind}".replace("-", "_")


@dataclass(frozen=True)
class Draw:
    """Where a stochastic rounding takes its bits: a word of its own, or the high or low half of one."""

    word: int
    part: str


@functools.cache
def draws_of(kind: Kind) -> tuple[tuple[Draw, ...], tuple[Draw, ...], int]:
    """The draws of the weight update, of the states, and the number of words. Halves of one word are shared."""
    first_pass = [("weight", bits) for bits in kind.update.draws(kind.store)]
    first_pass += [(k, codec.random_bits) for k, codec in enumerate(kind.codecs) if not isinstance(codec, Blocks)]
    second_pass = [(k, codec.random_bits) for k, codec in enumerate(kind.codecs) if isinstance(codec, Blocks)]
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
    return weight, tuple(of_state[k] for k in range(len(kind.codecs))), words


def pointer_count(kind: Kind) -> int:
    """Columns of the pointer table: parameter, three companions, gradient, then the tensors of the states."""
    return POINTERS_BEFORE_STATES + sum(codec.columns for codec in kind.codecs)


@functools.cache
def compiled(kind: Kind) -> Callable:
    """The kernel `step(first, last, chunks, pointers, rows, constants, keys, meter)` of one kind."""
    if kind.inside:
        return compiled(dataclasses.replace(kind, inside=False))
    namespace: dict = {}
    exec(compile(source(kind), f"<halfulp step {kind.name}>", "exec"), namespace)
    function = namespace["step"]
    function.__name__ = function.__qualname__ = f"step_{kind.name}"
    function.__module__ = __name__
    return compile_kernel(function, SIGNATURE, bindings(kind))


def bindings(kind: Kind) -> dict[str, object]:
    """What every name in the source of a kind stands for."""
    bound: dict[str, object] = {
        "add": add, "bit_and": bit_and, "shr": shr, "draw": draw, "stream_start": stream_start, "WEYL": WEYL,
        "S16": np.uint32(16), "LOW": np.uint32(0xFFFF), "UNDRAWN": np.uint32(0), "root": root, "real": real,
        "update_rule": kind.rule.update, "gradient_load": kind.gradient.load, "gradient_real": kind.gradient.real,
        "load8": load8, "load16": load16, "load32": load32, "store8": store8, "store16": store16, "word": word,
        "store32": store32, "empty": np.empty, "float32": np.float32, "float64": np.float64,
        "decode_signed": decode_signed, "decode_squared": decode_squared, "encode_signed": encode_signed,
        "encode_squared": encode_squared, "BLOCK": np.int64(kind.block or 1), "HUGE": HUGE, "GROW": GROW,
        "HUGE_SQUARED": HUGE_SQUARED, "SHRINK": SHRINK, "UNIT": np.float32(1.0), "ZERO": np.float32(0.0),
        "higher": higher,
    }  # fmt: skip
    if kind.rule.repay is not None:
        bound["repay_rule"] = kind.rule.repay
    for k, codec in enumerate(kind.codecs):
        if not isinstance(codec, Blocks):
            bound |= codec.bindings(k)
    return bound | kind.update.bindings(kind.store)


def source(kind: Kind) -> str:
    """The text of a kind's kernel."""
    lines = [
        "def step(first, last, chunks, pointers, rows, constants, keys, meter):",
        *_buffers(kind),
        "    for c in range(first, last):",
        "        t, begin, index = chunks[c, 0], chunks[c, 1], chunks[c, 3]",
        "        end = begin + chunks[c, 2]",
        "        " + "; ".join(f"a{j} = pointers[t, {j}]" for j in range(pointer_count(kind))),
        *(f"        {name} = constants[rows[t], {j}]" for j, name in enumerate(kind.constants)),
        *(["        seen = cancelled = wanted = kept = 0.0"] if kind.metered else []),
        *([f"        {name} = UNDRAWN" for name in peak_names(kind)] if kind.peaks else []),
        *(_blocked_loop(kind) if kind.block else _plain_loop(kind)),
        *(_meter_out(METER) if kind.metered else []),
        *(_meter_out([f"real({name})" for name in peak_names(kind)]) if kind.peaks else []),
        *_keep_buffers(kind),
    ]
    return "\n".join(lines) + "\n"


def state_pointers(kind: Kind) -> list[int]:
    """Where each state's tensors stand in the pointer table."""
    widths = [codec.columns for codec in kind.codecs]
    return [POINTERS_BEFORE_STATES + before for before in itertools.accumulate([0, *widths[:-1]])] if widths else []


def _plain_loop(kind: Kind) -> list[str]:
    words = range(0 if kind.peaks else draws_of(kind)[2])
    body = element_update(kind, words) + _advance(words)
    return [*_counters(words, "index", 8), "        for i in range(begin, end):", *_indent(body, 12)]


def _advance(words: range) -> list[str]:
    return [f"counter{word} = add(counter{word}, WEYL)" for word in words]


def _rule_call(kind: Kind, gradient: str, values: Sequence[str], scaled: bool = False) -> str:
    results = "".join(f", n{k}" for k in range(len(values)))
    inner = kind.rule.homogeneous or () if scaled else ()
    constants = [f"{name} * shrink" if name in inner else name for name in kind.rule.constants]
    target = f"u{results}" if results else "u,"
    weight = "w if w - w == ZERO else ZERO" if kind.rule.decays else "w"
    return f"{target} = update_rule({', '.join([weight, gradient, *values, *constants])})"


def _weight_write(kind: Kind, draws: Sequence[Draw], scaled: bool = False) -> list[str]:
    bits = [bits_of(draw) for draw in draws]
    bits += ["UNDRAWN"] * (2 - len(bits))
    terms = "g, h0, h1, h2, -ZERO" if kind.assigns else "w, h0, h1, h2, u"
    if kind.scaled:
        terms = "p * weight_ratio, h0 * weight_ratio, h1 * weight_ratio, h2, u * weight_inverse"
    lines = [f"new = write_weight(a0, a1, a2, a3, i, {terms}, {bits[0]}, {bits[1]})"]
    if kind.update.feeds_back:
        values = ", ".join(f"n{k}" for k in range(len(kind.codecs)))
        inner = kind.rule.homogeneous or () if scaled else ()
        constants = ", ".join(f"{name} * shrink" if name in inner else name for name in kind.rule.constants)
        lines += [
            "lost = (w + u) - new",
            f"n0 = repay_rule(lost if lost - lost == ZERO else ZERO, {values}, {constants})",
        ]
    if kind.metered:
        lines += ["new = new * new_scale"] if kind.scaled else []
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


def peak_names(kind: Kind) -> list[str]:
    """What holds the largest words of the weight and of the scaled states."""
    return ["top_weight", *(f"top_{k}" for k in kind.scaled_states)]


def _peaks(kind: Kind) -> list[str]:
    """The largest of what is about to be stored."""
    lines = [f"top_{k} = higher(top_{k}, {kind.codecs[k].measured(k)})" for k in kind.scaled_states]
    return ["top_weight = higher(top_weight, w + u)", *lines]


def _buffers(kind: Kind) -> list[str]:
    if not kind.block:
        return []
    held = [k for k, codec in enumerate(kind.codecs) if isinstance(codec, Blocks)]
    return _indent([f"buffer{k} = empty({TILE}, float32); new{k} = buffer{k}.ctypes.data" for k in held], 4)


def _keep_buffers(kind: Kind) -> list[str]:
    """A last use: Numba frees an array after its last use, and an address is none."""
    return [f"    buffer{k}[0] = ZERO" for k, codec in enumerate(kind.codecs) if isinstance(codec, Blocks)]


def _blocked_loop(kind: Kind) -> list[str]:
    """Tile by tile: codes to float32 in the first-level cache, the update there, then scales and codes."""
    weight_draws, state_draws, words = draws_of(kind)
    first_pass = [*weight_draws, *(d for d, codec in zip(state_draws, kind.codecs) if not isinstance(codec, Blocks))]
    own = max((draw.word for draw in first_pass), default=-1) + 1
    pointers = state_pointers(kind)
    blocked = [(k, codec, at) for (k, codec), at in zip(enumerate(kind.codecs), pointers) if isinstance(codec, Blocks)]
    inner = [f"stop = min(start + {TILE}, end)"]
    inner += [f"decode_{form_of(codec)}(a{at}, a{at + 1}, start, stop, new{k})" for k, codec, at in blocked]
    if not kind.peaks:
        inner += _counters(range(words), "index + (start - begin)", 0)
    own = 0 if kind.peaks else own
    body = element_update(
        kind,
        range(own),
        lambda k: f"real(load32(new{k}, i - start))",
        lambda k, value: f"store32(new{k}, i - start, word({value}))",
    )
    inner += ["for i in range(start, stop):", *_indent(body + _advance(range(own)), 4)]
    for k, codec, at in () if kind.peaks else blocked:
        drawn = state_draws[k]
        shift = "S16" if drawn.part == "high" else "UNDRAWN"
        inner += _counters([drawn.word], "index + (start - begin)", 0)
        inner += [f"encode_{form_of(codec)}(a{at}, a{at + 1}, start, stop, new{k}, counter{drawn.word}, {shift})"]
    return [f"        for start in range(begin, end, {TILE}):", *_indent(inner, 12)]


def form_of(codec: Blocks) -> str:
    """Which pieces decode and encode 8-bit states."""
    return "squared" if codec.squared else "signed"


def element_update(
    kind: Kind,
    words: range,
    decode: Callable[[int], str] | None = None,
    encode: Callable[[int, str], str] | None = None,
) -> list[str]:
    """What happens to one element i, given the counters of its random words.

    Args:
        kind: of step.
        words: which random words to draw.
        decode: 8-bit state k -> the text of its value, before squaring.
        encode: (8-bit state k, text of the value) -> the text that stores it.
    """
    weight_draws, state_draws, _ = draws_of(kind)
    rescaled = kind.shrinks
    if kind.scaled:
        body = ["p, h0, h1, h2 = read_weight(a0, a1, a2, a3, i)", "w = p * weight_scale"]
        body += ["g = gradient_real(gradient_load(a4, i)) * gradient_scale"]
    else:
        body = ["w, h0, h1, h2 = read_weight(a0, a1, a2, a3, i)", "g = gradient_real(gradient_load(a4, i))"]
    values, after, large = [], [], ["abs(g) > HUGE"]
    for k, (codec, slot, at) in enumerate(zip(kind.codecs, kind.rule.states, state_pointers(kind))):
        square, blocked = slot.degree == 2, isinstance(codec, Blocks)
        body += [f"q{k} = {decode(k) if blocked else codec.loaded(k, at)}"]
        large += [f"q{k} > {'HUGE' if blocked else 'HUGE_SQUARED'}"] if square else []
        times, back = (" * shrink", " * grow") if rescaled else ("", "")
        if blocked:
            values += [f"(q{k}{times}) * (q{k}{times})" if square else f"q{k}{times}"]
            after += [encode(k, f"{f'root(n{k})' if square else f'n{k}'}{back}")]
        else:
            values += [f"q{k}{times}{times if square else ''}"]
            after += [codec.saved(k, at, f"n{k}{back}{back if square else ''}", bits_of(state_draws[k]))]
    if rescaled:
        body += [f"huge = {' or '.join(large)}", "shrink = SHRINK if huge else UNIT", "grow = GROW if huge else UNIT"]
    body += [_rule_call(kind, "g * shrink" if rescaled else "g", values, rescaled)]
    body += ["u = ZERO if g == w else u"] if kind.rule.assigns else []  # an infinity that stays
    if kind.peaks:
        return body + _peaks(kind)
    body += [f"x{word} = draw(counter{word})" for word in words]
    return body + _weight_write(kind, weight_draws, rescaled) + after
