"""The sampler: the numbers behind a tensor, extremes of the whole, and histograms of a sample.

A sample is 32 aligned runs of 128 elements. The k-th run is floor((k + u_k) R / 32) of the tensor's R runs in row-major
order, u_k uniform in [0, 1) and a pure function of (step, name): every run has the same chance 32 / R, whatever R
is, so that counts over the sample are unbiased, and no period of the tensor's rows can hide from them. A tensor of up
to 4096 elements is taken whole.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from typing import NamedTuple

import numpy as np
import torch

from ...kernels import get_plain_address_or_zero, keeping_subnormals, to_plain_memory
from ...mctensor import MCTensor
from ...optim.parameters._local_tensors import get_local
from ...rounding import mix64
from ...scaled import ScaledTensor
from .._record import TensorRecord

SAMPLED_RUN_LENGTH = 128
RUNS_PER_SAMPLE = 32
SAMPLE_SIZE = SAMPLED_RUN_LENGTH * RUNS_PER_SAMPLE


def hash_parameter_name(name: str) -> int:
    """Return 64 bits that stand for a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(4096)
def make_sampling_key(step: int, name: str) -> int:
    """Return the key of a tensor's places at a step."""
    return mix64(0, step, hash_parameter_name(name))


@functools.lru_cache(4096)
def draw_sampled_run_indices(key: int, elements: int) -> torch.Tensor:
    """Return the numbers, in ascending order, of the sampled runs of a tensor of more than 4096 elements.

    >>> runs = draw_sampled_run_indices(7, 10_000)
    >>> len(runs), bool(((0 <= runs) & (runs < 79)).all())
    (32, True)
    """
    draw, runs = random.Random(key).random, -(-elements // SAMPLED_RUN_LENGTH)
    drawn = [int((k + draw()) * runs / RUNS_PER_SAMPLE) for k in range(RUNS_PER_SAMPLE)]
    return torch.tensor(drawn, dtype=torch.int64, device="cpu")


SIXTEEN_BIT_DTYPES = (torch.float16, torch.bfloat16)
_PLAIN_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
PLAIN_TENSOR_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


class StoredNumbers(NamedTuple):
    """A tensor's numbers: contiguous, without history, of any shape, to be multiplied by `scale`."""

    # The payload of a scaled tensor, the values of an expansion.
    values: torch.Tensor
    # Of the storage: a payload's, a component's.
    dtype: torch.dtype
    scale: float = 1.0


def read_numbers(tensor: torch.Tensor) -> StoredNumbers | None:
    """Return a tensor's numbers in row-major order, of a DTensor those of this process; None where none can be read.

    A sparse, quantized, nested, fake or meta tensor, and one inside a transform of torch.func, has none.
    """
    if tensor.dtype in _PLAIN_DTYPES and get_plain_address_or_zero(tensor):
        return StoredNumbers(tensor.detach(), tensor.dtype)
    tensor = get_local(tensor)
    if not tensor.dtype.is_floating_point:
        return None
    try:
        if isinstance(tensor, ScaledTensor):
            payload = to_plain_memory(tensor.payload.detach())
            return StoredNumbers(payload.contiguous(), payload.dtype, float(tensor.scale))
        if isinstance(tensor, MCTensor):
            dtype = tensor.components[0].dtype
            decoded = tensor.detach().decode(torch.float32 if dtype in SIXTEEN_BIT_DTYPES else torch.float64)
            return StoredNumbers(to_plain_memory(decoded).contiguous(), dtype)
        flat = to_plain_memory(tensor.detach())
    except TypeError:
        return None
    return StoredNumbers(flat if flat.is_contiguous() else flat.contiguous(), flat.dtype)


@keeping_subnormals()
def record_amax_and_count_nonfinite(numbers: StoredNumbers, record: TensorRecord) -> int:
    """Count all elements of a tensor, and note its largest; return how many are NaN or infinite."""
    flat, nonfinite = widen_eight_bit_floats(numbers.values), 0
    record.elements += flat.numel()
    if not flat.numel():
        return 0
    low, high = torch.aminmax(flat)
    amax, largest = max(-low.item(), high.item()), torch.finfo(numbers.dtype).max
    if not amax < largest:  # at the largest number, beyond it, or NaN
        magnitude = flat.abs()
        finite = magnitude.isfinite()
        nonfinite = flat.numel() - int(finite.sum())
        record.nonfinite += nonfinite
        record.largest += int((magnitude == largest).sum())
        amax = float(torch.where(finite, magnitude, 0.0).max())
    record.last_amax, record.amax = max(record.last_amax, amax), max(record.amax, amax)
    return nonfinite


@keeping_subnormals()
def add_sample_to_histogram(sample: torch.Tensor, record: TensorRecord) -> None:
    """Add a sample, float64 on the CPU, to the histogram of a record; float64's subnormal numbers as one power."""
    values = sample.numpy()
    record.sampled += len(values)
    bins = np.bincount((values.view(np.int64) >> 52) & 2047)
    if len(bins) > 2047:
        values = values[np.isfinite(values)]
    if len(bins) and bins[0]:
        bins[0] -= len(values) - np.count_nonzero(values)  # without zeros
    with np.errstate(over="ignore"):
        record.rms = math.sqrt(values @ values / max(1, len(values)))
    powers = bins[:2047].nonzero()[0]
    for power, count in zip((powers - 1023).tolist(), bins[powers].tolist()):
        record.histogram[power] = record.histogram.get(power, 0) + count


def widen_eight_bit_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return eight-bit floating-point numbers as bfloat16, which holds them all, and others as they are, contiguous."""
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    return tensor.to(torch.bfloat16) if tensor.dtype.itemsize == 1 else tensor


@keeping_subnormals()
def take_sample(flat: torch.Tensor, key: int) -> torch.Tensor:
    """Return a copy of the sampled elements of a contiguous tensor without history, flat, in float64 on the CPU."""
    given, elements = widen_eight_bit_floats(flat).view(-1), flat.numel()
    if elements <= SAMPLE_SIZE:
        taken = given.cpu()
        return taken.clone() if taken.dtype == torch.float64 else taken.double()
    runs, rest = draw_sampled_run_indices(key, elements).to(given.device), elements % SAMPLED_RUN_LENGTH
    if not rest:
        return given.view(-1, SAMPLED_RUN_LENGTH).index_select(0, runs).view(-1).cpu().double()
    short = runs[runs == elements // SAMPLED_RUN_LENGTH]  # the last run, of fewer than 128 elements
    whole = given[: elements - rest].view(-1, SAMPLED_RUN_LENGTH)
    taken = whole.index_select(0, runs[: RUNS_PER_SAMPLE - len(short)]).view(-1)
    return (torch.cat([taken, given[elements - rest :]]) if len(short) else taken).cpu().double()
