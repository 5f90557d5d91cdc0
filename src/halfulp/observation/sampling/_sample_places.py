"""The numbers behind a tensor as plain memory, and where they are sampled: 32 aligned runs of 128, by a counter.

The k-th run is floor((k + u_k) R / 32) of the tensor's R runs in row-major order, u_k uniform in [0, 1) and a pure
function of (seed, step, name): every run has the same chance 32 / R, whatever R is, so that counts over the sample are
unbiased, and no period of the tensor's rows can hide from them. A tensor of up to 4096 elements is taken whole.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch

from ...kernels import plain, plain_address
from ...mctensor import MCTensor
from ...optim.parameters._local_tensors import local
from ...rounding import mix64, random_words
from ...scaled import ScaledTensor

RUN = 128
RUNS = 32
MOST = RUN * RUNS


def name_key(name: str) -> int:
    """Return 64 bits that stand for a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def place_key(seed: int, step: int, name: str) -> int:
    """Return the key of a tensor's places at a step."""
    return mix64(seed, step, name_key(name))


def sample_size(elements: int) -> int:
    """Return how many elements at most are sampled of a tensor."""
    return min(elements, MOST)


def run_starts(key: int, elements: int) -> list[int]:
    """Return the first elements of the runs that are sampled of a tensor of more than 4096 elements.

    >>> starts = run_starts(7, 10_000)
    >>> len(starts), all(start % 128 == 0 and 0 <= start < 10_000 for start in starts)
    (32, True)
    """
    runs = -(-elements // RUN)
    words = random_words(key, torch.arange(RUNS, dtype=torch.int64, device="cpu")).tolist()
    return [((((k << 32) | word) * runs) >> 37) * RUN for k, word in enumerate(words)]


def sampled_places(key: int, elements: int) -> torch.Tensor:
    """Return the sampled positions of a tensor's elements in row-major order, an int64 tensor.

    The last run of a tensor may be shorter than 128.
    """
    if elements <= MOST:
        return torch.arange(elements, dtype=torch.int64, device="cpu")
    starts = torch.tensor(run_starts(key, elements), dtype=torch.int64, device="cpu")
    places = (starts[:, None] + torch.arange(RUN, dtype=torch.int64, device="cpu")).flatten()
    return places[places < elements]


def sampling_error(share: float, elements: int, steps: int = 1) -> float:
    """Return the standard error of a share that was counted in samples of a tensor; 0 where it was taken whole.

    The bound takes elements of a run for copies of each other, so that 32 runs count as 32 observations: the error of
    tensors whose elements are independent is about a tenth of it.

    Args:
        share: from 0 to 1.
        elements: of the tensor.
        steps: over how many sampled steps.

    >>> round(sampling_error(0.5, 10**6), 3), sampling_error(0.5, 4096)
    (0.088, 0.0)
    """
    return 0.0 if elements <= MOST else math.sqrt(max(0.0, share * (1 - share)) / (RUNS * max(1, steps)))


_NARROW = (torch.float16, torch.bfloat16)
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


class Stored(NamedTuple):
    """A tensor's numbers.

    Attributes:
        flat: contiguous, without history, of any shape; payload of a scaled tensor, values of an expansion.
        dtype: of its storage: a payload's, a component's.
        scale: its values are `flat` times this.
    """

    flat: torch.Tensor
    dtype: torch.dtype
    scale: float = 1.0


def stored(tensor: torch.Tensor) -> Stored | None:
    """Return a tensor's numbers in row-major order; None where it holds none that can be read.

    Floating-point tensors only; of a DTensor the shard on this process. A sparse, quantized, nested, fake or meta
    tensor, and one inside a transform of torch.func, has none.
    """
    if tensor.dtype in _FLOATS and plain_address(tensor):
        return Stored(tensor.detach(), tensor.dtype)
    tensor = local(tensor)
    if not tensor.dtype.is_floating_point:
        return None
    try:
        if isinstance(tensor, ScaledTensor):
            payload = plain(tensor.payload.detach())
            return Stored(payload.contiguous(), payload.dtype, float(tensor.scale))
        if isinstance(tensor, MCTensor):
            dtype = tensor.components[0].dtype
            decoded = tensor.detach().decode(torch.float32 if dtype in _NARROW else torch.float64)
            return Stored(plain(decoded).contiguous(), dtype)
        flat = plain(tensor.detach())
    except TypeError:
        return None
    return Stored(flat if flat.is_contiguous() else flat.contiguous(), flat.dtype)
