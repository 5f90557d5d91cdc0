"""Hashes of parameters: the same on ranks that hold the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch

from ...sampling._plain import stored
from ...sampling._sampler import sampled_all


def hashes(parameters: Mapping[str, torch.Tensor], key: Callable[[str], int]) -> list[int]:
    """Return 64 bits of each parameter's sampled elements, scale and size.

    Args:
        parameters: by name.
        key: of the places where the tensors of a name are sampled.
    """
    found = {name: stored(parameter) for name, parameter in parameters.items()}
    numbers = {name: one for name, one in found.items() if one is not None}
    samples = sampled_all([(one.flat, key(name)) for name, one in numbers.items()])
    hashed = dict.fromkeys(found, 0)
    for (name, one), sample in zip(numbers.items(), samples):
        digest = hashlib.blake2b(f"{one.flat.numel()} {one.scale}".encode(), digest_size=8)
        digest.update(sample.numpy().data)
        hashed[name] = int.from_bytes(digest.digest(), "little")
    return list(hashed.values())
