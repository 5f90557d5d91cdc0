"""Scales of a step, chosen before anything is written, so that nothing overflows and no digit is lost."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import IndexMap, address, check_bits, cut_into_chunks, run_chunks, run_on_tensors, select_engine
from ...kernels._device_function import Recording, Table
from ...kernels._operations import add, bit_and, load32, select, shl, shr, store32, sub, to_real, word
from ...kernels.vector._machine_function import address_of
from ...kernels.vector._table_loop import compile_table
from ..parameters._local_tensors import get_scale
from ..parameters._parameter_plan import ParameterPlan
from ..parameters._step_spec import StepSpec
from ..states._codec import Scaled, finite_amax

ConstantRow = tuple[float, ...]
# Binades of a payload's largest magnitude: the first and the last in which a scale is kept; where a new one puts it.
SCALE_WINDOWS = {
    torch.float16: (-4, 13, 3),
    torch.float8_e4m3fn: (-1, 7, 5),
    torch.float8_e5m2: (-4, 14, 4),
    torch.bfloat16: (-40, 40, 0),
    torch.float32: (-40, 40, 0),
}
# Of a payload under the new scale, before the update is added: float32 holds it, and some binades more.
LARGEST_BINADE = 120


def append_present_scales(
    spec: StepSpec, plan: ParameterPlan, constants: ConstantRow, gradient_scale: float
) -> ConstantRow:
    """Return a rule's constants with a parameter's present scales behind them; placeholders for the new ones."""
    scale = plan.scale
    own = [number for k in spec.scaled_states for number in (plan.states[k][1].item(), 1.0)]
    return (*constants, scale, 1 / scale, gradient_scale, 1.0, scale, *own)


def choose_new_scales(
    spec: StepSpec, plans: Sequence[ParameterPlan], constants: Sequence[ConstantRow], amax: np.ndarray
) -> list[ConstantRow]:
    """Return constants with the scales under which a step's results will be stored; tensors are not changed yet.

    A step reads the payload under its present scale and rounds the sum once, under the new one.

    Args:
        plans: of the parameters.
        constants: of each, with its present scales.
        amax: largest finite magnitudes, a row per parameter: of the weight and of each scaled state.
    """
    first, names = len(spec.rule.constants), scale_columns(spec)
    present = torch.tensor([row[first:] for row in constants], dtype=torch.float32, device="cpu").T
    columns = make_unit_columns(spec, len(plans), "cpu")
    columns[: len(names)] = present
    largest = torch.zeros(amax.shape[1] + 1, len(plans), dtype=torch.float32, device="cpu")
    largest[:-1] = torch.from_numpy(amax.T)
    arrays = [*columns, *largest]
    _run_scale_table(spec, arrays)
    moved = columns[names.index("new_scale")] != columns[names.index("weight_scale")]
    for row in moved.nonzero().flatten().tolist():
        largest[-1, row] = finite_amax(plans[row].payloads[0].float())
    if moved.any():
        _run_scale_table(spec, arrays)
    chosen = columns[: len(names)].T.tolist()
    return [(*row[:first], *scales) for row, scales in zip(constants, chosen, strict=True)]


def _run_scale_table(spec: StepSpec, arrays: Sequence[torch.Tensor]) -> None:
    """Fill the columns of the table of scales in place; some hundred operations, 4 ms by plain torch."""
    if select_engine("cpu") == "llvm":
        _run_scale_kernel(_compile_scale_kernel(spec), arrays)
    else:
        run_on_tensors(scale_table(spec).trace, arrays)


def _run_scale_kernel(kernel: Callable[..., None], arrays: Sequence[torch.Tensor]) -> None:
    chunks = cut_into_chunks(IndexMap.whole((len(arrays[0]),)), 0)
    pointers = np.array([[*map(address, arrays)]], np.int64)
    run_chunks(kernel, chunks[:, 2], address_of(chunks), address_of(pointers), *[0] * 4)


@functools.cache
def _compile_scale_kernel(spec: StepSpec) -> Callable[..., None]:
    """Return the kernel of the table of scales, compared with its reference before its first use in a process."""
    table = scale_table(spec)
    kernel = compile_table("scales", table)

    check_bits(
        f"the scales of optimizer step {spec.name}",
        lambda: [fill_fixed_columns(spec, functools.partial(_run_scale_kernel, kernel))],
        lambda: [fill_fixed_columns(spec, functools.partial(run_on_tensors, table.trace))],
    )
    return kernel


_FIXED_EXPONENTS = (-149, -127, -126, -60, -13, 0, 1, 15, 16, 60, 119, 127)


def fill_fixed_columns(
    spec: StepSpec, run: Callable[[list[torch.Tensor]], object], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return the columns of scales after a choice among fixed magnitudes; `run` fills the table's arrays in place."""
    held, largest = (torch.from_numpy(fixed).to(device) for fixed in make_fixed_scales(spec))
    columns = make_unit_columns(spec, held.shape[1], device)
    columns[present_columns(spec)] = held
    run([*columns, *largest.t().contiguous()])
    return columns


def make_fixed_scales(spec: StepSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return scales (a row each, of as many parameters) and the largest magnitudes of each parameter, fixed ones."""
    ends = [0.0, *(f * 2.0**k for k in _FIXED_EXPONENTS for f in (1.0, 1.5)), float(np.finfo(np.float32).max)]
    payloads = [x for x in ends if x <= torch.finfo(spec.store.dtype).max]
    present = [2.0**k for k in (-126, -125, -20, 0, 1, 63, 127)]
    rows = np.array([*itertools.product(present, ends, payloads[:: len(payloads) // 5])], np.float32)
    held = np.stack([np.roll(rows[:, 0], shift) for shift in range(2 + len(spec.scaled_states))])
    largest = [np.roll(rows[:, 1], 3 * shift) for shift in range(1 + len(spec.scaled_states))]
    return held, np.stack([*largest, rows[:, 2]], 1)


def write_kept_scales(spec: StepSpec, plan: ParameterPlan, constants: ConstantRow) -> None:
    """Write the scales of the weight and the states that a step has stored."""
    at = spec.constant_places
    if constants[at["new_scale"]] != constants[at["weight_scale"]]:
        get_scale(plan.parameter).fill_(constants[at["new_scale"]])
    for k in spec.scaled_states:
        plan.states[k][1].fill_(1 / constants[at[f"inverse_{k}"]])


def scale_columns(spec: StepSpec) -> tuple[str, ...]:
    """Return the columns of the table of scales: the constants of a step that are not the rule's."""
    return spec.constants[len(spec.rule.constants) :]


def present_columns(spec: StepSpec) -> list[int]:
    """Return the columns of the present scales: of weights, of gradients, and of each scaled state."""
    names = ["weight_scale", "gradient_scale", *(f"scale_{k}" for k in spec.scaled_states)]
    return [spec.constant_places[name] - len(spec.rule.constants) for name in names]


def make_unit_columns(spec: StepSpec, count: int, device: torch.device | str) -> torch.Tensor:
    """Return the columns of `scale_table` but for the largest magnitudes, all 1, for so many parameters."""
    return torch.ones(len(scale_columns(spec)) + len(spec.scaled_states), count, dtype=torch.float32, device=device)


@functools.cache
def scale_table(spec: StepSpec) -> Table:
    """Return the device function that chooses the scales of a step, of which a parameter is an element.

    Its columns are float32 arrays: those of `scale_columns`, the new scale of each scaled state, and the largest finite
    magnitudes of the weight, of each scaled state, and of the payload as stored.
    """
    states, names = spec.scaled_states, scale_columns(spec)
    element = Recording(len(names) + 2 * len(states) + 2)
    i, columns = element.index, dict(zip((*names, *(f"new_scale_{k}" for k in states)), element.arrays))
    weight, *of_states, stored = (load32(array, i) for array in element.arrays[len(columns) :])
    present = load32(columns["weight_scale"], i)
    new_scale = weight_scale_function(spec.store.dtype)(present, weight, stored)
    chosen = {"new_scale": new_scale, "weight_inverse": invert_scale(new_scale)}
    chosen["weight_ratio"] = compute_scale_ratio(present, new_scale, stored)
    for (k, codec), largest in zip(states.items(), of_states, strict=True):
        chosen[f"new_scale_{k}"] = state_scale_function(codec)(largest)
        chosen[f"inverse_{k}"] = invert_scale(chosen[f"new_scale_{k}"])
    for name, scale in chosen.items():
        store32(columns[name], i, scale)
    return Table(element.trace, len(element.arrays))


def choose_weight_scale(dtype: torch.dtype, present: float, largest: float) -> float:
    """Return the present scale if a magnitude lies well inside the payload's range, else one that puts it there.

    >>> choose_weight_scale(torch.float16, 1.0, 100.0), choose_weight_scale(torch.float16, 1.0, 40000.0)
    (1.0, 4096.0)
    """
    words = (np.float32(number).view(np.uint32) for number in (present, largest, 0.0))
    return float(weight_scale_function(dtype)(*words).view(np.float32))


EXPONENT_BIAS = 512
ZERO_WORD, ONE_WORD, MANTISSA_SHIFT, MANTISSA_MASK, LEAST_NORMAL_WORD, HALF_LEAST_NORMAL_WORD, FLOAT_ONE_WORD = (
    np.uint32(n) for n in (0, 1, 23, 0x7FFFFF, 0x800000, 0x400000, 0x3F800000)
)
NORMAL_OFFSET, SUBNORMAL_OFFSET, ONE_OFFSET = (np.uint32(EXPONENT_BIAS + n) for n in (-127, -127 - 149, 0))
LOWEST_EXPONENT, HIGHEST_EXPONENT = np.uint32(EXPONENT_BIAS - 126), np.uint32(EXPONENT_BIAS + 126)


def normalize_word(x: Any) -> Any:
    """Device function: the word of a positive number, or of it times 2^149 where it is subnormal."""
    return select(x < LEAST_NORMAL_WORD, word(to_real(x)), x)


def biased_exponent(x: Any) -> Any:
    """Device function: floor(log2) of a positive number."""
    return add(shr(normalize_word(x), MANTISSA_SHIFT), select(x < LEAST_NORMAL_WORD, SUBNORMAL_OFFSET, NORMAL_OFFSET))


def make_power_word(e: Any) -> Any:
    """Device function: the word of a power of two from 2^-127 to 2^127."""
    return select(e < LOWEST_EXPONENT, HALF_LEAST_NORMAL_WORD, shl(sub(e, NORMAL_OFFSET), MANTISSA_SHIFT))


def invert_scale(scale: Any) -> Any:
    """Device function: the reciprocal of a scale."""
    return make_power_word(sub(np.uint32(2 * EXPONENT_BIAS), biased_exponent(scale)))


def select_lesser(a: Any, b: Any) -> Any:
    """Device function: the smaller of two words."""
    return select(a < b, a, b)


def select_larger(a: Any, b: Any) -> Any:
    """Device function: the larger of two words."""
    return select(a < b, b, a)


def compute_scale_ratio(present: Any, new: Any, stored: Any) -> Any:
    """Device function: the factor that brings a payload from one scale to another; 1 for a payload of zeros."""
    factor = select_larger(sub(add(biased_exponent(present), ONE_OFFSET), biased_exponent(new)), LOWEST_EXPONENT)
    return select(stored == ZERO_WORD, FLOAT_ONE_WORD, make_power_word(factor))


@functools.cache
def weight_scale_function(dtype: torch.dtype) -> Callable[[Any, Any, Any], Any]:
    """Return the device function (present scale, largest weight, largest payload) -> new scale of a payload's dtype.

    The scale stays while the weight lies in the window; else it moves as far as a factor in float32's range can bring
    the payload there and leave it finite.
    """
    lowest, highest, target = SCALE_WINDOWS[dtype]
    first, last = np.uint32(EXPONENT_BIAS + lowest), np.uint32(EXPONENT_BIAS + highest)
    below, reach = np.uint32(target), np.uint32(EXPONENT_BIAS + LARGEST_BINADE)
    # The payload's own range is wide enough for what a factor in float32's range leaves to do.
    is_wide = torch.finfo(dtype).max > 2.0**LARGEST_BINADE

    def new_scale(present: Any, largest: Any, stored: Any) -> Any:
        now, binade = biased_exponent(present), biased_exponent(largest)
        distance = sub(add(binade, ONE_OFFSET), now)
        wanted = select_larger(select_lesser(sub(binade, below), HIGHEST_EXPONENT), LOWEST_EXPONENT)
        keeps = (largest == ZERO_WORD) | ((distance >= first) & (distance <= last)) | (wanted == now)
        reached = select_larger(
            wanted, add(now, sub(select_larger(add(biased_exponent(stored), ONE_WORD), ONE_OFFSET), reach))
        )
        if is_wide:
            reached = select_lesser(reached, add(now, np.uint32(126)))
        reached = select_lesser(reached, HIGHEST_EXPONENT)
        return select(keeps, present, make_power_word(select(stored == ZERO_WORD, wanted, reached)))

    return new_scale


@functools.cache
def state_scale_function(codec: Scaled) -> Callable[[Any], Any]:
    """Return the device function from the largest magnitude of a state to its scale."""
    greatest = torch.finfo(codec.store.dtype).max
    fraction, above = math.frexp(greatest)
    digits, binade = np.float32(fraction).view(np.uint32) & MANTISSA_MASK, np.uint32(above - 1)

    def scale(largest: Any) -> Any:
        up = select(bit_and(normalize_word(largest), MANTISSA_MASK) > digits, ONE_WORD, ZERO_WORD)
        needed = sub(add(biased_exponent(largest), up), binade)
        return select(
            largest == ZERO_WORD,
            FLOAT_ONE_WORD,
            make_power_word(select_larger(select_lesser(needed, HIGHEST_EXPONENT), LOWEST_EXPONENT)),
        )

    return scale
