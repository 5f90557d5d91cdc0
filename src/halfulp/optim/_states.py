"""How optimizer states are stored: float32, bfloat16, two bfloat16, 8-bit codes in blocks, or scaled payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from ._components import Components
from ._eight_bits import PAYLOADS
from ._pair import Pair
from ._rule import StateSlot
from ._scaled_states import Scaled
from ._stores import BF16, F32, Store

PAIR = "bfloat16x2"
SCALED = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class State:
    """A choice of how the states of an optimizer are stored.

    Args:
        dtype: torch.float32, torch.bfloat16, "8bit", or two bfloat16: "bfloat16x2" or Components(2); for scaled
            parameters also torch.float16, torch.float8_e4m3fn (alias "fp8") or torch.float8_e5m2, under a scale per
            tensor.
        rounding: "nearest" or "stochastic", the default: rounded to nearest a bfloat16 moment stalls under steady
            gradients, as does a float16 one that forgets slowly, and a choice by beta would change under a scheduler.
        block: elements that share one bfloat16 scale, for "8bit": a power of two from 16 to 1024.

    >>> State("8bit", block=64)
    State(dtype='8bit', rounding=None, block=64)
    """

    dtype: torch.dtype | str = torch.bfloat16
    rounding: str | None = None
    block: int = 32

    def __post_init__(self) -> None:
        aliases = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": "8bit", "uint8": "8bit"}
        aliases |= {Components(2): PAIR, "fp8": torch.float8_e4m3fn, "float16": torch.float16}
        aliases |= {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
        object.__setattr__(self, "dtype", aliases.get(self.dtype, self.dtype))
        if self.dtype not in (torch.float32, torch.bfloat16, "8bit", PAIR, *SCALED):
            raise ValueError(
                f"state_dtype {self.dtype!r}: allowed are torch.float32, torch.bfloat16 and '8bit', for two "
                f"bfloat16 {PAIR!r} or Components(2) (more of them would be larger than float32), and beside scaled "
                "parameters torch.float16 and 'fp8'"
            )
        if self.rounding not in (None, "nearest", "stochastic"):
            raise ValueError(f"state rounding {self.rounding!r}: allowed are None, 'nearest' and 'stochastic'")
        if self.block not in (16, 32, 64, 128, 256, 512, 1024):
            raise ValueError(f"state block {self.block!r}: allowed are the powers of two from 16 to 1024")
        if self.dtype == "8bit" and self.rounding == "nearest":
            raise ValueError("8-bit states are stored stochastically: nearest codes stall; leave rounding out")
        if self.dtype == PAIR and self.rounding == "stochastic":
            raise ValueError("two bfloat16 are rounded to nearest: allowed are None and 'nearest'")
        if self.dtype in SCALED[1:] and self.rounding == "nearest":
            raise ValueError("fp8 states are stored stochastically: nearest ones stall; leave rounding out")


@dataclass(frozen=True)
class Plain:
    """One number per element, by a store and a rounding."""

    columns: ClassVar[int] = 1

    store: Store
    stochastic: bool

    @property
    def random_bits(self) -> int:
        """What each rounding draws."""
        return self.store.random_bits if self.stochastic else 0

    def tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """The tensors that hold the state."""
        return {name: (shape, self.store.dtype)}

    def decode(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """float32 values."""
        return self.store.decode(tensors[0])

    def encode(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor | None) -> None:
        """Store values; `random` is None for nearest."""
        tensors[0].copy_(self.store.encode(value, random if self.stochastic else None))

    def bindings(self, k: int) -> dict[str, object]:
        """The pieces of state k."""
        store = self.store
        rounded = store.stochastic if self.stochastic else store.nearest
        return {f"load_{k}": store.load, f"save_{k}": store.save, f"real_{k}": store.real, f"round_{k}": rounded}

    def loaded(self, k: int, at: int) -> str:
        """The text of a value whose tensor stands in column `at`."""
        return f"real_{k}(load_{k}(a{at}, i))"

    def saved(self, k: int, at: int, value: str, bits: str) -> str:
        """The text that stores one."""
        return f"save_{k}(a{at}, i, round_{k}({value}, {bits}))"


@dataclass(frozen=True)
class Blocks:
    """8-bit codes in blocks, value = code x scale / most (signed) or its square (second moments).

    The scale is the block's largest magnitude rounded up to bfloat16, so that no code overflows. Codes are rounded
    stochastically between the two representable values around a value, so that the stored value is right on average;
    a positive second moment never gets code 0, which would divide by eps alone.
    """

    columns: ClassVar[int] = 2

    block: int
    squared: bool

    random_bits: int = 16

    def tensors(self, name: str, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Codes of the parameter's shape, and one scale per block."""
        codes = torch.uint8 if self.squared else torch.int8
        blocks = -(-prod(shape) // self.block)
        return {name: (shape, codes), f"{name}_scale": (torch.Size([blocks]), torch.bfloat16)}

    def decode(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """float32 values."""
        values = self.decode_roots(tensors)
        return values * values if self.squared else values

    def decode_roots(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """float32 values before squaring."""
        codes, scale = tensors
        unit = BF16.decode(scale) / (255.0 if self.squared else 127.0)
        values = codes.reshape(-1).float() * self._spread(unit, codes.numel())
        if not self.squared:
            values = torch.where(codes.reshape(-1) == -128, torch.nan, values)
        return values.reshape(codes.shape)

    def encode(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor | None) -> None:
        """Store values; without random words as nearly as the codes allow."""
        random = torch.full(value.shape, 0x8000, device=value.device, dtype=torch.int64) if random is None else random
        self.encode_roots(tensors, value.double().sqrt().float() if self.squared else value, random)

    def encode_roots(self, tensors: list[torch.Tensor], value: torch.Tensor, random: torch.Tensor) -> None:
        """Store values given before squaring."""
        flat = value.reshape(-1)
        scale = self._scales(flat)
        most = 255.0 if self.squared else 127.0
        inverse = torch.where(scale > 0, torch.full_like(scale, most) / scale, 0.0)  # number / tensor would round twice
        t = flat * self._spread(inverse, flat.numel())
        chance = (random.reshape(-1) & 0xFFFF).float() * 2.0**-16
        codes = self._squared_codes(flat, t, chance) if self.squared else self._signed_codes(flat, t, chance)
        tensors[0].copy_(codes.reshape(tensors[0].shape))
        tensors[1].copy_(scale.to(torch.bfloat16))

    def _scales(self, flat: torch.Tensor) -> torch.Tensor:
        words = flat.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
        words = torch.where(words > 0x7F800000, 0, words)
        padding = -flat.numel() % self.block
        top = torch.nn.functional.pad(words, (0, padding)).reshape(-1, self.block).amax(1)
        code = (top + 0xFFFF >> 16).clamp(max=0x7F7F)
        return (code << 16).to(torch.int32).view(torch.float32)

    def _spread(self, per_block: torch.Tensor, count: int) -> torch.Tensor:
        return per_block.repeat_interleave(self.block)[:count]

    @staticmethod
    def _signed_codes(value: torch.Tensor, t: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        t = torch.where(t == t, t, 0.0).clamp(-127.0, 127.0)
        codes = (t + 128.0 + chance).to(torch.int64) - 128
        return torch.where(value == value, codes, -128).to(torch.int8)

    @staticmethod
    def _squared_codes(value: torch.Tensor, t: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        t = torch.where(t == t, t, 255.0).clamp(max=255.0)
        below = t.to(torch.int64)
        k = below.float()
        up = chance * (k + k + 1.0) < (t - k) * (t + k)
        codes = (below + up.to(torch.int64)).clamp(max=255)
        return torch.where((codes == 0) & (value > 0), 1, codes).to(torch.uint8)


Codec = Plain | Pair | Blocks | Scaled
StateChoice = torch.dtype | str | Components | State | Mapping | None


def resolve_codecs(
    given: StateChoice, slots: tuple[StateSlot, ...], default: torch.dtype, shape: torch.Size
) -> tuple[Codec, ...]:
    """The codec of every state of one parameter.

    Args:
        given: `state_dtype=` of the group.
        slots: the rule's states.
        default: dtype where none was chosen.
        shape: the parameter's global shape: 8-bit blocks never depend on how it is sharded.
    """
    chosen = given.values() if isinstance(given, Mapping) else [given]
    lengths = {state.block for state in (as_state(one, default) for one in chosen) if state.dtype == "8bit"}
    if len(lengths) > 1:
        raise ValueError(f"state_dtype gives blocks of {sorted(lengths)}: the states of one parameter share one length")
    if isinstance(given, Mapping):
        unknown = set(given) - {slot.name for slot in slots}
        if unknown:
            names = [slot.name for slot in slots]
            raise ValueError(f"state_dtype names {sorted(unknown)}, which this rule does not keep: it keeps {names}")
        return tuple(_codec(as_state(given.get(slot.name), default), slot, shape) for slot in slots)
    return tuple(_codec(as_state(given, default), slot, shape) for slot in slots)


def as_state(given: torch.dtype | str | Components | State | None, default: torch.dtype) -> State:
    """A State from what a user may give for one."""
    if isinstance(given, State):
        return given
    return State(default if given is None else given)


def holds_blocks(shape: torch.Size, block: int) -> bool:
    """Whether a parameter's states go into blocks: no split along dimension 0 may cut one."""
    if len(shape) < 2:
        return len(shape) == 1 and shape[0] >= 4096 and shape[0] % block == 0
    row = prod(shape[1:])
    return row > 0 and row % block == 0


def _codec(state: State, slot: StateSlot, shape: torch.Size) -> Codec:
    if state.dtype == "8bit" and holds_blocks(shape, state.block):
        return Blocks(state.block, slot.degree == 2)
    if state.dtype == PAIR:
        return Pair()
    store = BF16 if state.dtype == "8bit" else PAYLOADS[state.dtype]
    if store is F32:
        return Plain(F32, False)
    stochastic = state.rounding != "nearest"
    return Scaled(store, slot.degree == 2, stochastic) if state.dtype in SCALED else Plain(store, stochastic)
