"""The step in plain torch, one tensor at a time: slow, runs anywhere; the compiled step must give the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...kernels import IndexMap, float32_root, in_float64, on_tensors
from ...rounding._random_bits import random_words
from ..states._scaled import Scaled, finite_amax
from ..states._state import Int8Blocks
from ._spec import Draw, StepSpec, draws_of


def reference_step(
    spec: StepSpec,
    parts: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    states: Sequence[list[torch.Tensor]],
    constants: Sequence[float],
    keys: Sequence[int],
    index_map: IndexMap,
) -> tuple[float, float, float, float] | None:
    """One step of one parameter, in place.

    Args:
        spec: the step specification.
        parts: the parameter and its auxiliary tensors.
        gradient: of the parameter's shape.
        states: the tensors of each state.
        constants: of the specification, rounded to float32 here.
        keys: one 64-bit key per random word.
        index_map: the parameter's place in the whole.

    Returns:
        For a metered specification: updates wanted, updates cancelled, sum u^2, sum u (realised change).
    """
    c, scales = _constants(spec, constants, gradient)
    weight_draws, state_draws, _ = draws_of(spec)
    words = [random_words(key, global_index(index_map, gradient.device)) for key in keys]
    w, g = _operands(spec, parts, gradient, scales)
    u, new_states, constants_used, grow = _run_rule(spec, w, g, states, c)
    u = torch.where(g == w, 0.0, u) if spec.rule.assigns else u  # an infinity that stays
    random = [_take(words, draw) for draw in weight_draws]
    if spec.assigns:
        new = spec.update.put(spec.store, parts, g, random)
    elif spec.scaled:
        ratio = scales["weight_ratio"].item()
        moved = {} if ratio == 1.0 else {"ratio": ratio}
        new = spec.update.write(spec.store, parts, u * scales["weight_inverse"], random, **moved) * scales["new_scale"]
    else:
        new = spec.update.write(spec.store, parts, u, random)
    if spec.update.feeds_back and spec.rule.error_feedback is not None:
        lost = (w + u) - new
        lost = torch.where((lost - lost) == 0, lost, 0.0)
        new_states[0] = on_tensors(spec.rule.error_feedback)(lost, *new_states, *constants_used)
    for k, (codec, slot) in enumerate(zip(spec.codecs, spec.rule.states)):
        value, draw = new_states[k], _take(words, state_draws[k])
        if isinstance(codec, Int8Blocks):
            root = float32_root(value) if slot.degree == 2 else value
            codec.encode_roots(states[k], root if grow is None else root * grow, draw)
        elif isinstance(codec, Scaled):
            root = float32_root(value) if codec.squared else value
            codec.encode_payload(states[k], root * scales[f"inverse_{k}"], draw)
        else:
            times = () if grow is None else (grow,) * slot.degree
            for factor in times:
                value = value * factor
            codec.encode(states[k], value, draw)
    return _measure(u, new, w) if spec.metered else None


def reference_amax(
    spec: StepSpec,
    parts: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    states: Sequence[list[torch.Tensor]],
    constants: Sequence[float],
) -> list[float]:
    """The largest finite magnitudes of the weight and of each scaled state that a step would store; nothing changes."""
    c, scales = _constants(spec, constants, gradient)
    w, g = _operands(spec, parts, gradient, scales)
    u, new, _, _ = _run_rule(spec, w, g, states, c)
    held = [float32_root(new[k]) if codec.squared else new[k] for k, codec in spec.scaled_states.items()]
    return [finite_amax(w + u), *map(finite_amax, held)]


def _constants(
    spec: StepSpec, constants: Sequence[float], like: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the rule's constants in order, and the scales by name, in float32."""
    made = [torch.tensor(value, dtype=torch.float32, device=like.device) for value in constants]
    own = len(spec.rule.constants)
    return made[:own], dict(zip(spec.constants[own:], made[own:]))


def _operands(spec: StepSpec, parts: Sequence[torch.Tensor], gradient: torch.Tensor, scales: Mapping) -> tuple:
    """The weight and the gradient as float32 values."""
    w, g = spec.update.read(spec.store, parts), spec.gradient.decode(gradient)
    return (w * scales["weight_scale"], g * scales["gradient_scale"]) if spec.scaled else (w, g)


def _run_rule(spec: StepSpec, w, g, states, c):
    """The rule on the states' values; blocked states of a homogeneous rule shrink elements too large to square."""
    rule = spec.rule
    update = on_tensors(rule.update)
    w = torch.where((w - w) == 0, w, 0.0) if rule.decays else w
    roots = [
        codec.decode_roots(s) if isinstance(codec, Int8Blocks) else codec.decode(s)
        for codec, s in zip(spec.codecs, states)
    ]
    if not spec.shrinks:
        values = [
            q * q if isinstance(codec, Int8Blocks) and codec.squared else q for codec, q in zip(spec.codecs, roots)
        ]
        u, *new = update(w, g, *values, *c)
        return u, new, c, None
    large = g.abs() > 2.0**60
    for codec, slot, q in zip(spec.codecs, rule.states, roots):
        if slot.degree == 2:
            large = large | (q > (2.0**60 if isinstance(codec, Int8Blocks) else 2.0**120))
    shrink, grow = _either(large, 2.0**-80, 1.0), _either(large, 2.0**80, 1.0)
    values = []
    for codec, slot, q in zip(spec.codecs, rule.states, roots):
        q = q * shrink
        square = slot.degree == 2
        values.append(q * q if square and isinstance(codec, Int8Blocks) else q * shrink if square else q)
    inner = rule.homogeneous or ()
    scaled = [value * shrink if name in inner else value for name, value in zip(rule.constants, c)]
    u, *new = update(w, g * shrink, *values, *scaled)
    return u, new, scaled, grow


def _take(words: Sequence[torch.Tensor], draw: Draw) -> torch.Tensor | None:
    if draw.part == "none":
        return None
    whole = words[draw.word]
    return {"full": whole, "high": whole >> 16, "low": whole & 0xFFFF}[draw.part]


def _measure(u: torch.Tensor, new: torch.Tensor, w: torch.Tensor) -> tuple[float, float, float, float]:
    u, new, w = in_float64(u), in_float64(new), in_float64(w)
    change = new - w
    asked = (u.abs() > 0) & change.isfinite() & u.isfinite()
    u, change = u[asked], change[asked]
    return float(asked.sum()), float((new == w)[asked].sum()), float((u * u).sum()), float((u * change).sum())


def global_index(index_map: IndexMap, device: torch.device) -> torch.Tensor:
    """The global flat index of every element of a local tensor, in its shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    whole = index_map.global_shape
    stride = 1
    for d in reversed(range(len(whole))):
        along = torch.arange(index_map.shape[d], dtype=torch.int64, device=device)
        along = along * index_map.step[d] + index_map.offset[d]
        index = index + (along * stride).reshape([-1 if k == d else 1 for k in range(len(whole))])
        stride *= whole[d]
    return index.reshape(index_map.shape)


def _either(large: torch.Tensor, yes: float, no: float) -> torch.Tensor:
    """torch.where of two numbers, in float32 whatever the default dtype is."""
    return torch.full_like(large, no, dtype=torch.float32).masked_fill(large, yes)
