"""Several processes: whether replicas hold the same bits, and extremes of all ranks, by one small reduction."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...optim.parameters._local_tensors import is_dtensor, local
from ...rounding import mix64
from ..sampling._places import name_key
from ..sampling._plain import stored
from ..sampling._sampler import sampled
from ..sampling._totals import AMAX, AMIN, LAST_AMAX
from ._notebook import Notebook

_MASK = (1 << 53) - 1


class Processes:
    """Joins what the ranks of a run saw.

    Every rank must sample the same steps, as ranks do whose optimizers step together. Counts stay those of each rank's
    own shards and batches; whether replicas agree, and the largest and smallest magnitudes, are those of all.

    Args:
        book: what is written to.
        parameters: by name.
    """

    def __init__(self, book: Notebook, parameters: dict[str, torch.Tensor]) -> None:
        self.book = book
        active = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if active else 0
        self.size: int = dist.get_world_size() if active else 1
        book.record.replica_of = (self.rank, self.size)
        replicated = parameters.items() if self.size > 1 else ()
        self._replicated = {name: p for name, p in replicated if not _is_sharded(name, p) and stored(p) is not None}
        self._device = next((local(p).device for p in parameters.values()), torch.device("cpu"))

    def join(self) -> None:
        """Reduce, after a sampled step."""
        if self.size == 1 or not dist.is_initialized():
            return
        sums = [self._checksum(name, parameter) for name, parameter in self._replicated.items()]
        keys = sorted(self.book.totals)
        names = [*(f"{role} {name}" for role, name in keys), *self._replicated]
        layout = float(mix64(len(sums), *map(name_key, names)) & _MASK)
        # What follows has the same length on all ranks only where this number agrees.
        top, bottom = self._largest([layout, -layout])
        if top != -bottom:
            self.book.missed("ranks ran different modules: extremes are those of each rank alone, replicas unknown")
            return
        extremes = [value for key in keys for value in self._extremes(key)]
        merged = self._largest([*sums, *(-one for one in sums), *extremes])
        for name, top, bottom in zip(self._replicated, merged, merged[len(sums) :]):
            self.book.record.replicas[name] = self.book.record.replicas.get(name, True) and top == -bottom
        for k, key in enumerate(keys):
            self._take(key, merged[2 * len(sums) + 3 * k :][:3])

    def _largest(self, numbers: list[float]) -> list[float]:
        """The largest of each number over all ranks, by a reduction where the parameters are."""
        vector = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(self._device)
        dist.all_reduce(vector, dist.ReduceOp.MAX)
        return vector.tolist()

    def _extremes(self, key: tuple) -> tuple[float, float, float]:
        reals = self.book.totals[key].reals
        return float(reals[AMAX]), -float(reals[AMIN]), float(reals[LAST_AMAX])

    def _take(self, key: tuple, merged: list[float]) -> None:
        reals = self.book.totals[key].reals
        reals[AMAX], reals[AMIN], reals[LAST_AMAX] = merged[0], -merged[1], merged[2]

    def _checksum(self, name: str, parameter: torch.Tensor) -> float:
        """A number below 2^53 of the sampled elements' bits; the same on ranks that hold the same."""
        found = stored(parameter)
        if found is None or not found.flat.numel():
            return 0.0
        sample = sampled(found.flat, self.book.key(name)).double().view(torch.int64)
        weights = torch.arange(1, len(sample) + 1, dtype=torch.int64, device="cpu") * 0x9E3779B97F4A7C1 | 1
        return float(int((sample * weights).sum()) & _MASK)


def _is_sharded(name: str, parameter: torch.Tensor) -> bool:
    """Whether ranks hold different numbers: shards of a DTensor, of FSDP1, or of Megatron's tensor parallelism."""
    if is_dtensor(parameter):
        return not all(placement.is_replicate() for placement in parameter.placements)
    return "_fsdp_wrapped_module" in name or bool(getattr(parameter, "tensor_model_parallel", False))
