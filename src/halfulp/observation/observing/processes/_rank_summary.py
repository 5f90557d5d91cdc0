"""What a rank says of itself after a sampled step, and its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
# Only the last steps are said: a rank that is further behind meets them when the others have ended.
MOST_STEPS = 4


@dataclass(slots=True)
class StepSummary:
    """One sampled step of a rank.

    Attributes:
        bits: uint32: a hash of the sampled bits of each replicated parameter, in the order of its RankSummary's names.
        errors: by the key of a sharded parameter, a number that names its shard, and its rounding errors as int8.
    """

    bits: Array
    errors: dict[int, tuple[int, Array]] = field(default_factory=dict)


@dataclass(slots=True)
class RankSummary:
    """What a rank says of itself.

    Attributes:
        ended: whether its observation has ended.
        late: whether it began after others had sampled a step, so that its steps are not theirs.
        replicated: uint64: keys of its replicated parameters.
        steps: its last sampled steps, by their number since its observation began.
        tensors: uint64: keys of the roles and names that it has looked at.
        extremes: float64 of shape (tensors, 2): largest and smallest nonzero magnitudes.
        differing: uint64: keys of the replicated parameters that it knows to differ between ranks.
    """

    ended: bool
    late: bool
    replicated: Array
    steps: dict[int, StepSummary]
    tensors: Array
    extremes: Array
    differing: Array

    @property
    def last_step(self) -> int | None:
        """Its last sampled step; None before one."""
        return max(self.steps, default=None)

    def to_bytes(self) -> bytes:
        """Return it as a safetensors file."""
        from safetensors.numpy import save

        said = sorted(self.steps)[-MOST_STEPS:]
        bits = [self.steps[step].bits for step in said]
        arrays = {
            "state": np.array([self.ended, self.late], np.uint8),
            "replicated": self.replicated,
            "steps": np.array(said, np.int64),
            "bits": np.stack(bits) if bits else np.zeros((0, len(self.replicated)), np.uint32),
            "tensors": self.tensors,
            "extremes": self.extremes,
            "differing": self.differing,
        }
        for step in said:
            for key, (shard, errors) in self.steps[step].errors.items():
                arrays[f"errors/{step}/{key}/{shard}"] = errors
        return save(arrays)

    @classmethod
    def from_bytes(cls, words: bytes) -> RankSummary:
        """Return what `to_bytes` made bytes of."""
        from safetensors.numpy import load

        arrays = load(words)
        steps = {int(step): StepSummary(bits) for step, bits in zip(arrays["steps"], arrays["bits"])}
        for name, errors in arrays.items():
            if name.startswith("errors/"):
                step, key, shard = map(int, name.split("/")[1:])
                steps[step].errors[key] = shard, errors
        told = (arrays[name] for name in ("tensors", "extremes", "differing"))
        ended, late = map(bool, arrays["state"])
        return cls(ended, late, arrays["replicated"], steps, *told)


def keys_array(keys: Iterable[int]) -> Array:
    """Return 64-bit keys as an array."""
    return np.array(list(keys), np.uint64)


def in_both(mine: Array, theirs: Array) -> tuple[Array, Array]:
    """Return where the keys that two arrays share stand in each."""
    _, here, there = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    return here, there
