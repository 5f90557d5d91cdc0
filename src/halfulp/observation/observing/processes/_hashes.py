"""Hashes of parameters: the same on ranks that hold the same bits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import numpy as np
import torch

from ...sampling._plain import stored
from ...sampling._sampler import sampled_all
from ._rank_summary import Array


def hashes(parameters: Mapping[str, torch.Tensor], key: Callable[[str], int]) -> Array:
    """Return the CRC-32 of each parameter's size, scale and sampled elements, as uint32.

    It differs wherever one element of at most 32 bits alone does, and but for a chance of 2^-32 wherever several do.

    Args:
        parameters: by name.
        key: of the places where the tensors of a name are sampled.
    """
    found = {name: stored(parameter) for name, parameter in parameters.items()}
    numbers = {name: one for name, one in found.items() if one is not None}
    samples = sampled_all([(one.flat, key(name)) for name, one in numbers.items()])
    hashed = dict.fromkeys(found, 0)
    for (name, one), sample in zip(numbers.items(), samples):
        hashed[name] = zlib.crc32(sample.numpy().data, zlib.crc32(f"{one.flat.numel()} {one.scale}".encode()))
    return np.array(list(hashed.values()), np.uint32)
