"""Codecs by their device functions: the base, one number, a sum of two bfloat16, payloads under a scale per tensor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...kernels import Trace, compute_float32_square_root, run_trace_on_tensors
from ...kernels._device_function import ElementTraceBuilder
from ...kernels._operations import add, bit_and, load16, select, shr, sqrt, store16, sub, to_real, word
from ...kernels._trace import RecordedFunction, block_largest
from .._storage import (
    EIGHT,
    EXPONENT_MASK,
    MAGNITUDE_MASK,
    ONE,
    TWO_TO_MINUS_24,
    Store,
    decode_bf16,
    make_nan_canonical,
    mask_random_words,
    round_to_bf16,
)

ZERO_WORD, ZERO = np.uint32(0), np.float32(0.0)
ZERO_MINUS_EXPONENT_MASK = np.uint32(0x80800000)  # 0, less infinity's word


class TensorCodec:
    """The base of codecs, hashable, with the device functions `load_element` and `store_element`."""

    tensor_count: ClassVar[int] = 1  # the tensors that hold a state
    random_word_for_nearest: ClassVar[int] = 0  # the random word by which a stochastic rounding is one to nearest

    @property
    def random_bits(self) -> int:
        """Random bits of each rounding."""
        return 0

    @property
    def scale_block_length(self) -> int | None:
        """The number of elements that share a scale; None where none do."""
        return None

    @property
    def nearest_rounding_codec(self) -> TensorCodec:
        """This codec with rounding to nearest."""
        return self

    # (name, shape) -> shape and dtype of each tensor of a state, by its name.
    describe_tensors: ClassVar[Callable[..., dict[str, tuple[torch.Size, torch.dtype]]]]
    # Device function (arrays, i, block_index, tensor_scale): the float32 of element i, in a block, under a scale.
    load_element: ClassVar[Callable[..., Any]]
    # Device function (arrays, i, block_index, value, inverse, random): store element i, under the scale of
    # an inverse.
    store_element: ClassVar[Callable[..., None]]

    def decode(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the float32 values."""
        reader = _record_reader(self)
        return run_trace_on_tensors(
            reader.trace, tensors, self.make_trace_inputs(tensors), reader.results, self.scale_block_length
        )[0][0]

    def encode(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor | None = None) -> None:
        """Store values: to nearest, or by a random word per element."""
        codec = self.nearest_rounding_codec if random is None else self
        drawn = self.random_word_for_nearest if random is None else mask_random_words(random, self.random_bits)
        inputs = {**self.make_trace_inputs(tensors), "value": value, "random": drawn}
        run_trace_on_tensors(_record_writer(codec), tensors, inputs, block=self.scale_block_length)

    def make_trace_inputs(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor | float]:
        """Return "scale" and "inverse" of a codec with a scale per tensor."""
        return {}


@functools.cache
def _record_reader(codec: TensorCodec) -> RecordedFunction:
    element = ElementTraceBuilder(codec.tensor_count)
    found = codec.load_element(element.arrays, element.index, element.emit_block_index(), element.add_input("scale"))
    return RecordedFunction(element.trace, (found.number,))


@functools.cache
def _record_writer(codec: TensorCodec) -> Trace:
    element = ElementTraceBuilder(codec.tensor_count)
    value, inverse = make_nan_canonical(element.add_input("value")), element.add_input("inverse")
    random = element.add_input("random", "w32")
    codec.store_element(element.arrays, element.index, element.emit_block_index(), value, inverse, random)
    return element.trace


@dataclass(frozen=True)
class PlainCodec(TensorCodec):
    """One number per element, by a store and a rounding."""

    store: Store
    stochastic: bool

    @property
    def random_bits(self) -> int:
        return self.store.random_bits if self.stochastic else 0

    @property
    def nearest_rounding_codec(self) -> PlainCodec:
        return dataclasses.replace(self, stochastic=False)

    def describe_tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (shape, self.store.dtype)}

    def load_element(self, arrays: Sequence[Any], i: Any, block_index: Any, tensor_scale: Any) -> Any:
        return self.store.decode_code(self.store.load_code(arrays[0], i))

    def store_element(
        self, arrays: Sequence[Any], i: Any, block_index: Any, value: Any, inverse: Any, random: Any
    ) -> None:
        rounded = self.store.round_stochastically if self.stochastic else self.store.round_to_nearest
        self.store.store_code(arrays[0], i, rounded(value, random))


@dataclass(frozen=True)
class DoubleBF16(TensorCodec):
    """value = first + residual, both rounded to nearest: 16 bits, so that a share of 0.999 is kept, where 8 stall."""

    tensor_count: ClassVar[int] = 2

    def describe_tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (shape, torch.bfloat16), f"{name}_residual": (shape, torch.bfloat16)}

    def load_element(self, arrays: Sequence[Any], i: Any, block_index: Any, tensor_scale: Any) -> Any:
        first, residual = arrays
        return decode_bf16(load16(first, i)) + decode_bf16(load16(residual, i))

    def store_element(
        self, arrays: Sequence[Any], i: Any, block_index: Any, value: Any, inverse: Any, random: Any
    ) -> None:
        first, residual = arrays
        code = round_to_bf16(value, value)
        store16(first, i, code)
        rest = value - decode_bf16(code)
        lost = rest - rest
        low = round_to_bf16(rest, rest)
        # 0 beside an infinity or NaN.
        store16(residual, i, select(lost == lost, low, sub(low, low)))


@dataclass(frozen=True)
class TensorScaleCodec(PlainCodec):
    """value = payload x scale, or its square for second moments, whose roots are stored: half the range, no sign.

    The scale is a power of two per tensor, chosen at each step from the largest finite magnitude that is about to be
    stored, so that it falls into the highest binade of the store: nothing overflows, and no digit is given away. Roots
    are rounded so that their square is right on average, and a positive one never to 0, which would divide by eps.
    """

    tensor_count: ClassVar[int] = 2

    is_second_moment: bool

    def describe_tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (shape, self.store.dtype), f"{name}_scale": (torch.Size([]), torch.float32)}

    def encode(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor | None = None) -> None:
        """Store values under a scale of their own."""
        largest = compute_finite_amax(compute_float32_square_root(value) if self.is_second_moment else value)
        tensors[1].fill_(self.fit_scale(np.float64(largest)).item())
        super().encode(tensors, value, random)

    def make_trace_inputs(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor | float]:
        return {"scale": tensors[1], "inverse": 1.0 / tensors[1]}

    def fit_scale(self, largest: Any) -> Any:
        """Return the least powers of two under which magnitudes, float64 arrays, fit into the payload; 1 for 0."""
        where, share = get_array_module(largest).where, largest / torch.finfo(self.store.dtype).max
        power = floor_to_power_of_two(share)
        return where(largest == 0, 1.0, where(power < share, 2 * power, power).clip(2.0**-126, 2.0**126))

    def load_element(self, arrays: Sequence[Any], i: Any, block_index: Any, tensor_scale: Any) -> Any:
        value = super().load_element(arrays, i, block_index, tensor_scale) * tensor_scale
        return value * value if self.is_second_moment else value

    def store_element(
        self, arrays: Sequence[Any], i: Any, block_index: Any, value: Any, inverse: Any, random: Any
    ) -> None:
        store, x = self.store, self.take_root_of_second_moment(value) * inverse
        if not self.is_second_moment:
            super().store_element(arrays, i, block_index, x, inverse, random)
            return
        code = store.round_to_nearest(x, random)
        if self.stochastic:
            code = select(store.decode_code(code) > x, sub(code, ONE), code)
            low, high = store.decode_code(code), store.decode_code(add(code, ONE))
            chance = to_real(shr(random, EIGHT)) * TWO_TO_MINUS_24
            code = select(chance * ((high - low) * (high + low)) < (x - low) * (x + low), add(code, ONE), code)
        store.store_code(arrays[0], i, select((code == ZERO_WORD) & (x > ZERO), ONE, code))

    def take_root_of_second_moment(self, value: Any) -> Any:
        """Device function: what must fit into the payload."""
        return sqrt(value) if self.is_second_moment else value


def find_finite_magnitude_word(x):
    """Device function: the word of |x|; 0 for infinities and NaN."""
    magnitude = bit_and(word(x), MAGNITUDE_MASK)
    return select(magnitude < EXPONENT_MASK, magnitude, ZERO_WORD)


def find_block_amax_word(x):
    """Device function: the word of the largest finite |x| of a block; 0 if there is none."""
    # Less infinity's word, those of infinities and NaN are the smallest of all.
    top = block_largest(sub(bit_and(word(x), MAGNITUDE_MASK), EXPONENT_MASK))
    return select(top >= ZERO_MINUS_EXPONENT_MASK, add(top, EXPONENT_MASK), ZERO_WORD)


def compute_finite_amax(x: torch.Tensor) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    magnitude = x.abs()
    return torch.where(magnitude < torch.inf, magnitude, 0.0).amax().item() if x.numel() else 0.0


def get_array_module(x: Any) -> Any:
    """Return the module of an array's functions: torch for tensors, else NumPy, which costs less for few numbers."""
    return torch if isinstance(x, torch.Tensor) else np


def floor_to_power_of_two(x: Any) -> Any:
    """Return 2^floor(log2 x) of normal float64 numbers, arrays of NumPy or tensors; 0 for 0."""
    library = get_array_module(x)
    return (x.view(library.int64) & 0x7FF0000000000000).view(library.float64)
