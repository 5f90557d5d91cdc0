"""Several processes: what each rank saw, gathered when observing stops, and what follows from it.

The gather goes by the process group's store and not by a collective: a rank that does not observe, or stops elsewhere,
would make every other rank hang in one, and NCCL ends a process whose collective times out.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...optim.parameters._local_tensors import is_dtensor
from ...rounding import mix64
from ..sampling._sampler import hash_name, make_place_key, read_numbers, take_sample
from ._recorder import Recorder

# Seconds that a rank waits, where it stops, for what the others have yet to say.
SECONDS_TO_WAIT = 5.0
# Sampled steps that are compared at the end: ranks that differ stay different, and an early stop is met within these.
MOST_COMPARED_STEPS = 16
_observation_starts: Counter[str] = Counter()


@dataclass(slots=True)
class RankSummary:
    """One rank's observations, to be compared with the others'.

    Attributes:
        starts_by_rank: how often each rank had begun to observe this model when this one had made its first step.
        parameter_hashes: by sampled step since it began, uint32 hashes of the replicated parameters by name.
        tensor_extremes: by role and name, largest and smallest nonzero magnitudes.
    """

    starts_by_rank: dict[int, int] = field(default_factory=dict)
    parameter_hashes: dict[int, dict[str, int]] = field(default_factory=dict)
    tensor_extremes: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)


class RankComparison:
    """Compares this rank with others that train the same model.

    The lowest rank that observes, the hub, reads what all others saw, and they read the hub: whether replicas hold the
    same bits, and the largest and smallest magnitudes. Ranks that began at another step, sampled no step in common or
    are late are named in the record's `unseen`; nothing hangs, and no step waits.

    Attributes:
        other_ranks: ranks to compare with, none before `begin_observing` and behind `compare_ranks`.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
        self.recorder, self._model, self._parameters = recorder, model, parameters
        self._said: list[str] = []
        self.other_ranks: list[int] = []

    def begin_observing(self, step: int) -> None:
        """Say that this rank observes from a step on."""
        active = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if active else 0
        size = dist.get_world_size() if active else 1
        self.recorder.record.replica_of = self.rank, size
        self.recorder.record.unseen[:] = [one for one in self.recorder.record.unseen if one not in self._said]
        self._said, self._first, self._own, self._failed = [], step, RankSummary(), ""
        shared = find_sharing_ranks(self._model) if active else None
        self.other_ranks = [rank for rank in shared or range(size) if rank != self.rank]
        if not self.other_ranks:
            return
        self._replicated = find_replicated_parameters(self._model, self._parameters)
        name = f"halfulp/observe/{mix64(*map(hash_name, (str(shared), *sorted(self._parameters)))):016x}"
        _observation_starts[name] += 1
        self._name, self._before = name, _observation_starts[name] - 1
        self._try_with_store(lambda: _get_default_store().set(f"{name}/{self.rank}", str(_observation_starts[name])))

    def note_sampled_step(self) -> None:
        """Keep hashes of the replicated parameters as they are after a sampled step."""
        if self._failed:
            return
        step = self.recorder.step - self._first
        if not self._own.starts_by_rank:
            self._try_with_store(self._read_other_starts)
        self._own.parameter_hashes[step] = hash_parameters(self._replicated, lambda name: make_place_key(step, name))
        if len(self._own.parameter_hashes) > MOST_COMPARED_STEPS:
            del self._own.parameter_hashes[min(self._own.parameter_hashes)]

    def _read_other_starts(self) -> None:
        """Read who else observes: ranks that train together have all begun when one has made its first step."""
        ranks = sorted([self.rank, *self.other_ranks])
        store, keys = _get_default_store(), [f"{self._name}/{rank}" for rank in ranks]
        if not store.check(keys):
            there = [store.check([key]) for key in keys]
            ranks, keys = list(itertools.compress(ranks, there)), list(itertools.compress(keys, there))
        self._own.starts_by_rank = {rank: int(count) for rank, count in zip(ranks, store.multi_get(keys))}

    def compare_ranks(self, patient: bool) -> None:
        """Compare the summaries of other ranks with this one's, and note the missing ones.

        Args:
            patient: whether to wait for ranks that have yet to say it.
        """
        if not self.other_ranks:
            return
        # Else a rank that begins before this one the next time would take it for one that has begun.
        self._try_with_store(lambda: _get_default_store().delete_key(f"{self._name}/{self.rank}"))
        if not self._own.parameter_hashes and not self._failed:
            return
        heard: dict[int, RankSummary] = {}
        starts_by_rank = self._own.starts_by_rank
        hub = min(starts_by_rank, default=self.rank)
        wanted = self.other_ranks if hub == self.rank else [hub]

        def gather() -> None:
            self._own.tensor_extremes = {
                key: (one.record.amax, one.record.amin) for key, one in self.recorder.totals.items()
            }
            store = _get_default_store()
            store.set(self._store_key(self.rank), pickle.dumps(self._own))
            store.delete_key(f"{self._name}/{self.rank}/{self._before}")  # of the run before, which all have ended
            keys = {rank: self._store_key(rank) for rank in wanted if rank in starts_by_rank}
            if keys and patient:
                with contextlib.suppress(RuntimeError):  # those that are late are named
                    store.wait(list(keys.values()), datetime.timedelta(seconds=SECONDS_TO_WAIT))
            for rank, key in keys.items():
                if store.check([key]):
                    heard[rank] = pickle.loads(store.get(key))

        self._try_with_store(gather)
        words: dict[str, list[int]] = {}
        for rank in wanted:
            said = self._compare_with_rank(rank, heard.get(rank))
            if said:
                words.setdefault(said, []).append(rank)
        self._said = [f"{_name_ranks(ranks)} {said}" for said, ranks in sorted(words.items())]
        self.recorder.record.unseen += self._said
        self.other_ranks = []

    def _store_key(self, rank: int) -> str:
        return f"{self._name}/{rank}/{self._own.starts_by_rank[rank]}"

    def _compare_with_rank(self, rank: int, theirs: RankSummary | None) -> str:
        """Merge another rank's summary into the record; return what is missing of it."""
        if self._failed:
            return f"not compared ({self._failed})"
        if rank not in self._own.starts_by_rank or (
            theirs is not None and theirs.starts_by_rank != self._own.starts_by_rank
        ):
            return "did not begin to observe at the same step: not compared"
        if theirs is None:
            return "had not stopped observing when this one did: not compared"
        self._merge_extremes(theirs)
        common = sorted(self._own.parameter_hashes.keys() & theirs.parameter_hashes.keys())
        replicas = self.recorder.record.replicas
        for step in common:
            for name, own in self._own.parameter_hashes[step].items():
                if name in theirs.parameter_hashes[step]:
                    replicas[name] = replicas.get(name, True) and own == theirs.parameter_hashes[step][name]
        if not common:
            return "sampled other steps than this rank: not compared"
        if common[-1] < max(self._own.parameter_hashes):
            return f"ended after step {self._first + common[-1]}: compared until then"
        return ""

    def _merge_extremes(self, theirs: RankSummary) -> None:
        for key, totals in self.recorder.totals.items():
            if key in theirs.tensor_extremes:
                (largest, smallest), record = theirs.tensor_extremes[key], totals.record
                record.amax, record.amin = max(record.amax, largest), min(record.amin, smallest)

    def _try_with_store(self, act: Any) -> None:
        """Do something with the store of the process group; without one the record says so, and the run goes on."""
        if self._failed:
            return
        try:
            if not dist.is_initialized():
                self._failed = "the process group was destroyed before the observation ended"
            else:
                act()
        except Exception as error:
            # Its words may hold hosts, which neither page nor JSON is to hold.
            self._failed = f"the process group's store cannot be reached: {type(error).__name__}"


def _get_default_store() -> Any:
    from torch.distributed import distributed_c10d  # torch without distributed lacks the module

    return distributed_c10d._get_default_store()


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def find_sharing_ranks(model: nn.Module) -> list[int] | None:
    """Return the ranks of the process group of a model's DistributedDataParallel; None where there is none.

    Pipelines and experts share a model among some ranks alone, and all groups have models of one kind.
    """
    groups = [m.process_group for m in model.modules() if isinstance(m, DistributedDataParallel)]
    found = {tuple(dist.get_process_group_ranks(group)) for group in groups}
    return sorted(found.pop()) if len(found) == 1 else None


def find_replicated_parameters(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters of which all ranks should hold the same bits.

    Not shards of a DTensor, of FSDP1 or of Megatron's tensor parallelism, and not what DistributedDataParallel is told
    to leave to each rank.
    """
    own: set[int] = set()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            named = module.module.named_parameters()
            own |= {id(parameter) for name, parameter in named if name in module.parameters_to_ignore}
        elif any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            own |= {id(parameter) for parameter in module.parameters()}
    return {
        name: parameter
        for name, parameter in parameters.items()
        if id(parameter) not in own and not _is_sharded(parameter) and read_numbers(parameter) is not None
    }


def _is_sharded(parameter: torch.Tensor) -> bool:
    if is_dtensor(parameter):
        return not all(placement.is_replicate() for placement in parameter.placements)
    return bool(getattr(parameter, "tensor_model_parallel", False))


def hash_parameters(parameters: Mapping[str, torch.Tensor], key: Callable[[str], int]) -> dict[str, int]:
    """Return the CRC-32 of each parameter's size, scale and sampled elements.

    It differs wherever one element of at most 32 bits alone does, and but for a chance of 2^-32 wherever several do.

    Args:
        key: of the places where the tensors of a name are sampled.
    """
    hashes = {}
    for name, parameter in parameters.items():
        if (found := read_numbers(parameter)) is not None:
            size = zlib.crc32(f"{found.flat.numel()} {found.scale}".encode())
            hashes[name] = zlib.crc32(take_sample(found.flat, key(name)).numpy().data, size)
    return hashes
