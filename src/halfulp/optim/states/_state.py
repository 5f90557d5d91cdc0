"""The choice of an optimizer state's storage: float32, bfloat16, two bfloat16, blocks of 8 or 4 bits, or payloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..._messages import quote
from ..._names import register_entry
from .._storage import BF16, F32, PAYLOAD_STORE_BY_DTYPE, Store
from ..rules._update_rule import StateSlot, UpdateRule
from ..weight_updates._components import Components
from ._codec import DoubleBF16, PlainCodec, TensorScaleCodec
from ._int4_blocks import Int4Blocks
from ._int8_blocks import BlockCodec, Int8Blocks

BF16_PAIR = "bfloat16x2"
# Codes in blocks, and the usual length of these.
DEFAULT_BLOCK_BY_STORAGE = {"8bit": 32, "4bit": 128}
TENSOR_SCALED_DTYPES = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
# Other names of what `state_dtype=` takes.
_STORAGE_BY_ALIAS: dict[object, object] = {
    **{str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, *TENSOR_SCALED_DTYPES)},
    **{"fp8": torch.float8_e4m3fn, "int8": "8bit", "uint8": "8bit", "int4": "4bit", Components(2): BF16_PAIR},
}


@dataclass(frozen=True)
class State:
    """The options by which an optimizer stores its states: dtype, rounding and block.

    Args:
        dtype: torch.float32, torch.bfloat16, "8bit", "4bit", two bfloat16 ("bfloat16x2" or Components(2)), or the name
            of a storage that `register_state_store` added; for scaled parameters also torch.float16,
            torch.float8_e4m3fn (alias "fp8") or torch.float8_e5m2, under a scale per tensor.
        rounding: "nearest" or "stochastic", the default: rounded to nearest a bfloat16 moment stalls under steady
            gradients, as does a float16 one that forgets slowly, and a choice by beta would change under a scheduler.
        block: elements that share one scale, for "8bit" (32 if None) and "4bit" (128): a power of two from 16 to 1024.

    >>> State("8bit", block=64)
    State(dtype='8bit', rounding=None, block=64)
    """

    dtype: torch.dtype | str | Components = torch.bfloat16
    rounding: str | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _STORAGE_BY_ALIAS.get(self.dtype, self.dtype))
        object.__setattr__(self, "block", self.block or DEFAULT_BLOCK_BY_STORAGE.get(str(self.dtype), 32))
        named = (*DEFAULT_BLOCK_BY_STORAGE, BF16_PAIR, *_user_store_by_name)
        if self.dtype not in (torch.float32, torch.bfloat16, *TENSOR_SCALED_DTYPES, *named):
            own = "".join(f", {name!r}" for name in _user_store_by_name)
            raise ValueError(
                f"state_dtype {self.dtype!r}: allowed are torch.float32, torch.bfloat16{own}, '8bit' and '4bit', for "
                f"two bfloat16 {BF16_PAIR!r} or Components(2) (more of them would be larger than float32), and beside "
                "scaled parameters torch.float16 and 'fp8'"
            )
        if self.rounding not in (None, "nearest", "stochastic"):
            raise ValueError(f"state rounding {self.rounding!r}: allowed are None, 'nearest' and 'stochastic'")
        if self.block not in (16, 32, 64, 128, 256, 512, 1024):
            raise ValueError(f"state block {self.block!r}: allowed are the powers of two from 16 to 1024")
        if self.dtype in DEFAULT_BLOCK_BY_STORAGE and self.rounding == "nearest":
            raise ValueError("states in blocks are stored stochastically: nearest codes stall; leave rounding out")
        if self.dtype == BF16_PAIR and self.rounding == "stochastic":
            raise ValueError("two bfloat16 are rounded to nearest: allowed are None and 'nearest'")
        if self.dtype in TENSOR_SCALED_DTYPES[1:] and self.rounding == "nearest":
            raise ValueError("fp8 states are stored stochastically: nearest ones stall; leave rounding out")


_user_store_by_name: dict[str, Store] = {}


def register_state_store(store: Store, description: str) -> None:
    """Register a storage of optimizer states under its name, for `state_dtype=` of optimizers and recipes.

    Args:
        store: its device functions: the code of a number in memory, and the number that a code stands for.
        description: what tables and pages say of it.

    Raises:
        TypeError: it is no Store.
        ValueError: the name or the dtype is another storage's, there is no description, or the dtype has no codes of
            8, 16 or 32 bits.
    """
    if not isinstance(store, Store):
        raise TypeError(f"a storage of states is a Store, got {store!r}")
    if store.name in (
        *DEFAULT_BLOCK_BY_STORAGE,
        BF16_PAIR,
        *_STORAGE_BY_ALIAS,
        *(own.name for own in PAYLOAD_STORE_BY_DTYPE.values()),
    ):
        raise ValueError(f"state store {store.name!r} exists already: choose another name")
    if store.dtype.is_complex or store.dtype.itemsize > 4 or store.random_bits not in (0, 16, 32):
        raise ValueError(
            f"state store {store.name!r} has codes in {store.dtype} and {store.random_bits} random bits: give a dtype "
            "of 1, 2 or 4 bytes, and 0, 16 or 32 bits"
        )
    others = {
        own.dtype: own.name
        for own in (*PAYLOAD_STORE_BY_DTYPE.values(), *_user_store_by_name.values())
        if own.name != store.name
    }
    if store.dtype in others:
        # A file says by its dtype which storage wrote a state.
        raise ValueError(
            f"state store {store.name!r} has codes in {store.dtype}, as {others[store.dtype]!r} has: give it another "
            "dtype, by which files tell them apart"
        )
    known = _user_store_by_name.get(store.name)
    if known is not None and known.compute_function_digests() == store.compute_function_digests():
        store = known  # a module or a notebook's cell that is run again
    register_entry("state store", _user_store_by_name, store.name, store, description)


Codec = PlainCodec | DoubleBF16 | BlockCodec
OneStateChoice = torch.dtype | str | Components | State | None
StateChoice = OneStateChoice | Mapping[str, OneStateChoice]


def encode_constant_state(codec: Codec, value: float) -> list[torch.Tensor]:
    """Encode a state whose elements all are `value`; return one element (or block) of each tensor it is stored in."""
    shape = torch.Size([codec.scale_block_length or 1])
    made = [torch.zeros(size, dtype=dtype, device="cpu") for size, dtype in codec.describe_tensors("", shape).values()]
    codec.encode(made, torch.full(shape, value, dtype=torch.float32, device="cpu"))
    return [tensor.reshape(-1)[0] for tensor in made]


def resolve_codecs(
    given: StateChoice, slots: tuple[StateSlot, ...], default: torch.dtype, shape: torch.Size
) -> tuple[Codec, ...]:
    """Return the codec of every state of one parameter, whose shape is the global one, however it is sharded."""
    chosen = given.values() if isinstance(given, Mapping) else [given]
    states = [read_state_choice(one, default) for one in chosen]
    lengths = {state.block or 0 for state in states if state.dtype in DEFAULT_BLOCK_BY_STORAGE}
    if len(lengths) > 1:
        raise ValueError(
            f"state_dtype gives blocks of {sorted(lengths)}: the states of one parameter share one "
            "length, such as State('8bit', block=128) has beside '4bit'"
        )
    if isinstance(given, Mapping):
        names = [slot.name for slot in slots]
        unknown = set(given) - {*names}
        if unknown:
            raise ValueError(f"state_dtype names {sorted(unknown)}, which this rule does not keep: it keeps {names}")
        chosen = [given.get(name) for name in names]
    else:
        chosen = [given] * len(slots)
    states = [read_state_choice(one, _choose_default_storage(slot, slots, default)) for one, slot in zip(chosen, slots)]
    return tuple(_choose_codec(state, slot, shape) for state, slot in zip(states, slots))


def _choose_default_storage(slot: StateSlot, slots: tuple[StateSlot, ...], default: torch.dtype) -> torch.dtype | State:
    """Return the default storage of a state: bfloat16 holds no state that a maximum is taken of."""
    if slot.exact:
        return torch.float32
    if default != torch.bfloat16:
        return default
    # The largest of rounded numbers is the rounded largest: to nearest, a maximum neither stalls nor drifts.
    rounded = State(default, "nearest") if slot.maximum_of else default
    return torch.float32 if any(other.maximum_of == slot.name for other in slots) else rounded


# The least bits behind the leading one of a maximum, and of what it is taken of. Largest so far, over 6,000 steps, of a
# second moment stored stochastically: its root is 1.8% too large with 7 bits (bfloat16), .3% with 10 (float16).
_LEAST_MANTISSA_BITS_OF_MAXIMUM, _LEAST_MANTISSA_BITS_OF_SOURCE = 7, 10
_LEAST_MANTISSA_BITS_OF_EXACT_STATE = 16


def refuse_coarse_states(rule: UpdateRule, codecs: tuple[Codec, ...], given: StateChoice) -> None:
    """Refuse a storage that loses digits of an exact state, or whose noise a running maximum would keep."""
    bits = {slot.name: _count_mantissa_bits(codec) for slot, codec in zip(rule.states, codecs)}
    exact = [slot.name for slot in rule.states if slot.exact]
    if any(bits[name] < _LEAST_MANTISSA_BITS_OF_EXACT_STATE for name in exact):
        rest = _make_choice_without_states(exact, rule, given)
        raise ValueError(
            f"{rule.name} uses {quote(exact)} to the last digits, which state_dtype={given!r} does not keep: leave "
            f"them out of it, state_dtype={rest or None!r}, and they are stored in float32 (or as {BF16_PAIR!r})"
        )
    for slot in rule.states:
        if slot.maximum_of is None or (
            bits[slot.maximum_of] >= _LEAST_MANTISSA_BITS_OF_SOURCE
            and bits[slot.name] >= _LEAST_MANTISSA_BITS_OF_MAXIMUM
        ):
            continue
        rest = _make_choice_without_states([slot.name, slot.maximum_of], rule, given)
        raise ValueError(
            f"{rule.name} divides by {slot.name!r}, the largest {slot.maximum_of!r} so far, which keeps every upward "
            f"rounding: under state_dtype={given!r} steps would shrink by about 2% and more. Leave both out of it, "
            f"state_dtype={rest or None!r}: they are then stored with enough bits"
        )


def _make_choice_without_states(names: Sequence[str], rule: UpdateRule, given: StateChoice) -> dict[str, Any]:
    items = given.items() if isinstance(given, Mapping) else [(slot.name, given) for slot in rule.states]
    return {name: one for name, one in items if name not in names}


def _count_mantissa_bits(codec: Codec) -> int:
    """Return the bits behind the leading one that a codec keeps of every element; none where blocks share a scale."""
    if isinstance(codec, DoubleBF16):
        return 16
    return 0 if isinstance(codec, BlockCodec) else codec.store.mantissa_bits


def read_state_choice(given: OneStateChoice, default: torch.dtype | State) -> State:
    """Return a State from what a user may give for one."""
    chosen = default if given is None else given
    return chosen if isinstance(chosen, State) else State(chosen)


def can_hold_blocks(shape: torch.Size, block: int) -> bool:
    """Return whether a parameter's states fit into blocks: no split along dimension 0 may cut one."""
    if len(shape) < 2:
        return len(shape) == 1 and shape[0] >= 4096 and shape[0] % block == 0
    row = prod(shape[1:])
    return row > 0 and row % block == 0


def _choose_codec(state: State, slot: StateSlot, shape: torch.Size) -> Codec:
    if state.dtype in DEFAULT_BLOCK_BY_STORAGE and state.block is not None and can_hold_blocks(shape, state.block):
        kind = Int8Blocks if state.dtype == "8bit" else Int4Blocks
        return kind(state.block, slot.degree == 2)
    if state.dtype == BF16_PAIR:
        return DoubleBF16()
    # Blocks that do not fit are bfloat16.
    known = PAYLOAD_STORE_BY_DTYPE[state.dtype] if isinstance(state.dtype, torch.dtype) else None
    store = known or _user_store_by_name.get(str(state.dtype), BF16)
    if store is F32:
        return PlainCodec(F32, False)
    stochastic = state.rounding != "nearest"
    if state.dtype in TENSOR_SCALED_DTYPES:
        return TensorScaleCodec(store, stochastic, slot.degree == 2)
    return PlainCodec(store, stochastic)
