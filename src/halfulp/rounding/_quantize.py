"""quantize: the values of a format, in a tensor of the given dtype."""

from __future__ import annotations

from ast import literal_eval
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch.compiler import is_compiling

from ..formats import BlockFormat, Format, get
from ..formats._block import get_format_or_block
from ..kernels import assume_constant_result, define_operator, get_plain_address_or_zero, hide_own_frames_from_compiler
from ..kernels._engine import allows_machine_code, choose_engine_and_fallback_reason
from ..kernels._plain_memory import (
    has_operator_interceptors,
    is_non_overlapping_and_dense,
    raise_no_plain_memory,
)
from ._blocks import BlockTarget, make_block_target, round_blocks_into
from ._kernels import (
    RoundingPlan,
    has_partial_overlap,
    increment_tensor_version,
    increment_version,
    is_rounded_as_float64,
    prepare_rounding_plan,
    round_into,
    round_memory,
)
from ._modes import ROUNDING_CLASS_BY_NAME, Nearest, Rounding, Stochastic, draw_random_key, get_rounding
from ._random_bits import mix64
from ._target import FLOAT_DTYPES, Target, make_target

AnyFormat: TypeAlias = Format | BlockFormat | str | torch.dtype


def quantize(
    x: torch.Tensor,
    format: AnyFormat,
    rounding: Rounding | str = Nearest(),  # noqa: B008  frozen, and every default call may share it
    *,
    overflow: str | None = None,
    out: torch.Tensor | None = None,
    counter: int = 0,
    dim: int = -1,
) -> torch.Tensor:
    """Round every element of x to a number of the format, once, and keep x's dtype.

    The rules are those of `halfulp.formats.round_exact`, bit for bit: NaN stays NaN, an infinity and what rounds
    beyond the largest number become what the overflow policy says. float64 is rounded directly, not through float32.
    The result carries no gradient, as rounding is flat almost everywhere, and under a transform of torch.func its
    derivative is 0, as torch.round's; `straight_through` is the form for training, whose derivative counts as 1. Under
    vmap over `x` `Stochastic()` follows its `randomness`, and a seeded one draws the same bits for each sample.

    Under a `BlockFormat` every block of elements along `dim` is divided by its scale, rounded and multiplied again;
    elements saturate. The last block of a row may be shorter. A block of zeros stays, and a block with a NaN or an
    infinity becomes NaN, as its scale would be. Where scales are powers of two all is exact, but for products that the
    dtype cannot hold, which are rounded to it; elsewhere quotients and products are rounded in float32 (in float64 for
    a float64 tensor). A tensor's own scale is float32's ``amax / (element.max * scale.max)`` over its finite blocks.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape and strides.
        format: a `Format`, a `BlockFormat`, the name of either, or a torch dtype.
        rounding: a mode or its name.
        overflow: "inf", "nan" or "saturate" in place of the format's own policy.
        out: where the result goes: x's dtype, shape and device; x itself is allowed.
        counter: advances the random bits of `Stochastic`; elements are numbered by their position in x, for a
            `BlockFormat` after `dim` has been moved last.
        dim: for a `BlockFormat`, the dimension along which blocks lie.

    Returns:
        A tensor of x's dtype and shape, without gradient.

    Raises:
        TypeError: If x is no floating-point tensor of one of the four dtypes.
        ValueError: If the format or rounding is unknown, or x's dtype cannot hold the results.

    >>> import halfulp.formats as f
    >>> quantize(torch.tensor([0.1, 1.0, 300.0, 1e6]), f.e4m3fn)
    tensor([1.0156e-01, 1.0000e+00, 2.8800e+02, 4.4800e+02])
    >>> quantize(torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64), "bf16")   # through float32 it would be 1
    tensor([1.0078], dtype=torch.float64)
    """
    if not is_compiling():
        made = _quantize_plain_memory(x, format, rounding, overflow, counter, out)
        if made is not None:
            return made
    rounding = get_rounding(rounding)
    check_tensor(x)
    if out is not None:
        check_out_tensor(out, x)
    format = get_format_or_block(format)
    target, x = encode_target(format, rounding, overflow, x.dtype), x.detach()
    if target is None:
        return x.clone() if out is None else out.copy_(x.clone())  # they may overlap
    in_blocks = isinstance(format, BlockFormat)
    if in_blocks and x.dim() and not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is from {-x.dim()} to {x.dim() - 1} for a tensor of shape {tuple(x.shape)}, got {dim}")
    if not in_blocks or x.dim() < 2:
        return _call_quantize_operator(x, target, rounding, counter, out)
    turned = None if out is None else out.movedim(dim, -1)
    rounded = _call_quantize_operator(x.movedim(dim, -1), target, rounding, counter, turned)
    return rounded.movedim(-1, dim) if out is None else out


@hide_own_frames_from_compiler
def _quantize_plain_memory(
    x: torch.Tensor,
    format: AnyFormat,
    rounding: Rounding | str,
    overflow: str | None,
    counter: int,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """Round plain memory on the processor without torch's dispatcher, which takes longer than a small tensor.

    None where the operator is needed: something watches what runs, a tensor is not plain, or `out` does not fit.
    """
    source = 0 if has_operator_interceptors() else get_plain_address_or_zero(x)
    if not source or not allows_machine_code():
        return None
    global _latest_call
    dtype, (made_for, mode, policy, of, plan, start) = x.dtype, _latest_call
    if made_for is not format or mode is not rounding or policy is not overflow or of is not dtype:
        known = get_rounding(rounding)
        plan = _make_plan_without_operator(format, known, overflow, dtype)
        start = mix64(known.signed_seed) if isinstance(known, Stochastic) else None
        _latest_call = format, rounding, overflow, dtype, plan, start
    if plan is None:
        return None
    key = 0
    if start is not None:
        if type(counter) is not int or not -(2**63) <= counter < 2**63:
            return None
        key = mix64(counter, key=start)
    count = x.numel()
    if out is None:
        out = torch.empty_like(x)
        round_memory(plan, source, out.data_ptr(), count, key)
        return out
    goal = source
    if out is not x:
        goal = get_plain_address_or_zero(out)
        overlaps = 0 < abs(source - goal) < count * plan.element_size
        if not goal or out.dtype is not dtype or out.shape != x.shape or overlaps:
            return None
    is_inference = out.is_inference()
    if out.requires_grad or (is_inference and not torch.is_inference_mode_enabled()):
        return None
    round_memory(plan, source, goal, count, key)
    if not is_inference:
        increment_version((out,))
    return out


# The last call, its plan, and of a stochastic one the key before its counter;
# hashing a format takes as long as rounding 1,000 elements.
_latest_call: tuple[Any, Any, Any, Any, RoundingPlan | None, int | None] = (None, None, None, None, None, None)


@lru_cache(maxsize=1024)
def _make_plan_without_operator(
    format: AnyFormat, rounding: Rounding, overflow: str | None, dtype: torch.dtype
) -> RoundingPlan | None:
    """Return the plan of rounding without an operator; None where one is needed, which also says what is wrong."""
    known = get_format_or_block(format)
    if dtype not in FLOAT_DTYPES or isinstance(known, BlockFormat):
        return None
    if (isinstance(rounding, Stochastic) and rounding.seed is None) or choose_engine_and_fallback_reason("cpu")[
        0
    ] != "llvm":
        return None
    target = find_target(known, rounding, overflow, dtype)
    return None if target is None or is_rounded_as_float64(target, dtype) else prepare_rounding_plan(target, dtype)


def _call_quantize_operator(
    x: torch.Tensor, target: str, rounding: Rounding, counter: int, out: torch.Tensor | None
) -> torch.Tensor:
    """Call the operator that fits; x is detached and all has been checked."""
    draws = isinstance(rounding, Stochastic) and rounding.seed is None
    given: tuple[int, ...] = (counter,)
    if not draws:
        given = (rounding.signed_seed, counter) if isinstance(rounding, Stochastic) else (0, 0)
    if out is None:
        rounded: torch.Tensor = (_quantize_drawing if draws else _quantize)(x, target, *given)
        return rounded
    (_quantize_drawing_into if draws else _quantize_into)(x, target, *given, out)
    return out


def encode_target(
    format: Format | BlockFormat, rounding: Rounding, overflow: str | None, dtype: torch.dtype
) -> str | None:
    """Return the text of a target, as operators take it; None where rounding changes nothing.

    While a compiler traces it is a constant of the graph, guarded by all fields of the format. Of an object that is
    an argument, a compiler makes an integer field a variable once it has seen two values of it, and `Format.max` is no
    arithmetic of variables; a string is compared as a whole. What is raised is raised inside the trace, where a graph
    can break and the caller sees it as it is.
    """
    if not is_compiling():
        return _encode_target(format, rounding, overflow, dtype)
    in_blocks = isinstance(format, BlockFormat)
    text, error, message = _encode_target_in_graph(format._key, in_blocks, rounding.name, overflow, dtype)
    if error:
        raise _ERROR_CLASS_BY_NAME[error](message)
    return text


_ERROR_CLASS_BY_NAME: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (NotImplementedError, TypeError, ValueError)
}


@assume_constant_result
def _encode_target_in_graph(
    key: str, in_blocks: bool, rounding: str, overflow: str | None, dtype: torch.dtype
) -> tuple[str | None, str, str]:
    fields = literal_eval(key)
    if in_blocks:
        name, element, scale, *rest = fields
        fields = name, Format(*literal_eval(element)), Format(*literal_eval(scale)), *rest
    try:
        format = BlockFormat(*fields) if in_blocks else Format(*fields)
        return _encode_target(format, get_rounding(rounding), overflow, dtype), "", ""
    except tuple(_ERROR_CLASS_BY_NAME.values()) as error:
        return None, type(error).__name__, str(error)


@lru_cache(maxsize=1024)
def _encode_target(
    format: Format | BlockFormat, rounding: Rounding, overflow: str | None, dtype: torch.dtype
) -> str | None:
    if isinstance(format, BlockFormat):
        element, scale, *rest = make_block_target(format, rounding, overflow, dtype)
        return repr((tuple(element), tuple(scale), *rest))
    target = find_target(format, rounding, overflow, dtype)
    return None if target is None else repr(tuple(target))


@lru_cache(maxsize=1024)
def _decode_target(text: str) -> Target | BlockTarget:
    """Return the target of an operator's text."""
    first, second, *rest = literal_eval(text)
    target: Target | BlockTarget
    if isinstance(first, tuple):
        target = BlockTarget(Target(*first), Target(*second), *rest)
    else:
        target = Target(first, second, *rest)
    if target.mode not in ROUNDING_CLASS_BY_NAME:
        raise ValueError(
            f"rounding {target.mode!r} is not known in this process: import the module that registers it by "
            "hu.rounding.register_rounding"
        )
    return target


@lru_cache(maxsize=1024)
def find_target(
    format: Format | str | torch.dtype, rounding: Rounding, overflow: str | None, dtype: torch.dtype
) -> Target | None:
    """Return `make_target`'s result, cached."""
    return make_target(get(format), rounding, overflow, dtype)


def check_tensor(x: torch.Tensor) -> None:
    """Raise unless x is a tensor that can be rounded."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a torch.Tensor, got {type(x).__name__}; torch.as_tensor makes one")
    # A graph may not ask for a layout inside of a backward; what it calls as it runs has no sparse tensors.
    if not is_compiling() and (x.layout is not torch.strided or x.is_nested):
        raise_no_plain_memory(x, "x")
    if x.dtype not in FLOAT_DTYPES:
        remedy = "round the parts: torch.view_as_real(x)" if x.dtype.is_complex else "convert it: x.to(torch.float32)"
        raise TypeError(f"x is float16, bfloat16, float32 or float64; got {x.dtype}: {remedy}")


def check_out_tensor(out: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless out can take the result."""
    if out.dtype != x.dtype or out.shape != x.shape or out.device != x.device:
        raise ValueError(
            f"out has x's dtype, shape and device ({x.dtype}, {tuple(x.shape)}, {x.device}); "
            f"got {out.dtype}, {tuple(out.shape)}, {out.device}"
        )
    if not is_compiling() and out.is_neg():
        raise ValueError(
            "out is a view whose signs torch flips when it is read: give memory of its own, as its clone()"
        )
    if not is_compiling() and out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError("out is a tensor of inference mode, which nothing else may write: give its clone()")
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("out requires gradients and would be written in place: write under torch.no_grad()")


# operators ---------------------------------------------------------------------------------------------------


def _round_into_new_tensor(x: torch.Tensor, target: str, seed: int, counter: int) -> torch.Tensor:
    out = _make_empty_result(x, target)
    _round_into(x, target, seed, counter, out)
    return out


def _round_into(x: torch.Tensor, text: str, seed: int, counter: int, out: torch.Tensor) -> None:
    target = _decode_target(text)
    draws = target.mode == "stochastic"
    key = mix64(seed, counter) if draws else 0
    if isinstance(target, BlockTarget):
        round_blocks_into(x, target, key, out)
        return
    same_order = not has_partial_overlap(x, out) and x.stride() == out.stride() and (not draws or x.is_contiguous())
    if same_order and is_non_overlapping_and_dense(x):
        round_into(x, target, key, out)
        increment_tensor_version(out)
        return
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    round_into(x.contiguous(), target, key, result)
    out.copy_(result)


def _make_empty_result(x: torch.Tensor, target: str, *arguments: object) -> torch.Tensor:
    is_block = isinstance(_decode_target(target), BlockTarget)
    return torch.empty_like(x, memory_format=torch.contiguous_format if is_block else torch.preserve_format)


_quantize = define_operator(
    "quantize(Tensor x, str target, int seed, SymInt counter) -> Tensor", _round_into_new_tensor, _make_empty_result
)


def _quantize_under_vmap(
    info: Any, places: Any, x: torch.Tensor, target: str, seed: int, counter: int
) -> tuple[torch.Tensor, int]:
    """Quantize under vmap: elements singly, but random bits and blocks are each sample's own."""
    x = x.movedim(places[0], 0)
    goal = _decode_target(target)
    if isinstance(goal, Target) and goal.mode != "stochastic":
        return _quantize(x, target, seed, counter), 0
    return _stack_samples([_quantize(sample, target, seed, counter) for sample in x], x), 0


def _stack_samples(rounded: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.stack(rounded) if rounded else torch.empty_like(x)


torch.library.register_vmap("halfulp::quantize", _quantize_under_vmap)
_quantize_into = define_operator(
    "quantize_into(Tensor x, str target, int seed, SymInt counter, Tensor(a!) out) -> ()",
    _round_into,
    lambda *given: None,
)
_quantize_drawing = define_operator(
    "quantize_drawing(Tensor x, str target, SymInt counter) -> Tensor",
    lambda x, target, counter: _round_into_new_tensor(x, target, draw_random_key(), counter),
    _make_empty_result,
    is_random=True,
)


def _quantize_drawing_under_vmap(
    info: Any, places: Any, x: torch.Tensor, target: str, counter: int
) -> tuple[torch.Tensor, int]:
    """Quantize under vmap by its `randomness`, as torch's random operators."""
    if info.randomness == "error":
        raise RuntimeError(
            "vmap over stochastic rounding, which draws random bits: give vmap randomness='different' or 'same', or "
            "the rounding a seed, hu.Stochastic(seed=0)"
        )
    if info.randomness == "same":
        return _quantize_under_vmap(info, places, x, target, draw_random_key(), counter)
    x = x.movedim(places[0], 0)
    return _stack_samples([_quantize_drawing(sample, target, counter) for sample in x], x), 0


torch.library.register_vmap("halfulp::quantize_drawing", _quantize_drawing_under_vmap)
_quantize_drawing_into = define_operator(
    "quantize_drawing_into(Tensor x, str target, SymInt counter, Tensor(a!) out) -> ()",
    lambda x, target, counter, out: _round_into(x, target, draw_random_key(), counter, out),
    lambda *given: None,
    is_random=True,
)
