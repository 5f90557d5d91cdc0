"""Several processes: what each rank saw, gathered once when observing stops.

The gather goes by the process group's store and not by a collective: a rank that does not observe, or stops elsewhere,
would make every other rank hang in one, and NCCL ends a process whose collective times out.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...optim.parameters._local_tensors import is_dtensor
from ...rounding import mix64
from ._recorder import Recorder
from ._sampler import hash_parameter_name, make_sampling_key, read_numbers, take_sample

# Seconds that a rank waits, where it stops, for what the others have yet to say.
OTHER_RANKS_WAIT_SECONDS = 5.0
_observation_count_by_key: Counter[str] = Counter()


class RankComparison:
    """Compares the bits of replicas on this rank with those on others, where observing stops; no step waits.

    The lowest rank reads what all others saw, and they read that one.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
        self.recorder, self._model, self._parameters = recorder, model, parameters
        # None before `announce_observing_to_ranks` and behind `compare_ranks`.
        self.other_ranks: list[int] = []

    def announce_observing_to_ranks(self, step: int) -> None:
        """Say that this rank observes from a step on."""
        if not dist.is_available() or not dist.is_initialized():
            return
        self.rank, self._first_step = dist.get_rank(), step
        # How often each rank had begun to observe this model when this one had made its first step.
        self._start_counts: list[int] = []
        # The last sampled step since it began, and hashes of the replicated parameters after it, uint32 by name.
        self._last_step = -1
        self._hash_by_name: dict[str, int] = {}
        self.recorder.record.replica_of = self.rank, dist.get_world_size()
        # Pipelines and experts share a model among some ranks alone, and all groups have models of one kind.
        groups = [m.process_group for m in self._model.modules() if isinstance(m, DistributedDataParallel)]
        found = {tuple(dist.get_process_group_ranks(group)) for group in groups}
        ranks = found.pop() if len(found) == 1 else tuple(range(dist.get_world_size()))
        if len(ranks) == 1:
            return
        self._replicated = find_replicated_parameters(self._model, self._parameters)
        name = f"halfulp/observe/{mix64(*map(hash_parameter_name, (str(ranks), *sorted(self._parameters)))):016x}"
        _observation_count_by_key[name] += 1
        self._store_keys = {rank: f"{name}/{rank}" for rank in sorted(ranks)}
        self._summary_key = f"{self._store_keys[self.rank]}/{_observation_count_by_key[name]}"
        _get_default_store().set(self._store_keys[self.rank], str(_observation_count_by_key[name]))
        self.other_ranks = [rank for rank in self._store_keys if rank != self.rank]

    def hash_replicas_after_step(self) -> None:
        """Keep hashes of the replicated parameters as they are after a sampled step."""
        store, keys = _get_default_store(), list(self._store_keys.values())
        # Ranks that train together have all begun when one has made its first step.
        if self._last_step < 0 and store.check(keys):
            self._start_counts = [int(count) for count in store.multi_get(keys)]
        self._last_step = self.recorder.step - self._first_step
        self._hash_by_name = hash_sampled_elements(self._replicated, self._last_step)

    def compare_ranks(self) -> None:
        """Compare the summaries of other ranks with this one's, and note the missing ones."""
        others, self.other_ranks = self.other_ranks, []
        if not others:
            return
        if not dist.is_initialized():
            self.recorder.note_unobserved(
                "ranks are not compared: the process group was destroyed before observing stopped; keep it till then"
            )
            return
        store = _get_default_store()
        # Else a rank that begins before this one the next time would take it for one that has begun.
        store.delete_key(self._store_keys[self.rank])
        if self._last_step < 0:
            return
        store.set(self._summary_key, pickle.dumps((self._start_counts, self._last_step, self._hash_by_name)))
        if not self._start_counts:
            self.recorder.note_unobserved("ranks are not compared: not all began to observe at the same step")
            return
        keys = {rank: f"{key}/{count}" for (rank, key), count in zip(self._store_keys.items(), self._start_counts)}
        wanted = others if self.rank < others[0] else others[:1]
        with contextlib.suppress(RuntimeError):  # those that are late are named
            store.wait([keys[rank] for rank in wanted], datetime.timedelta(seconds=OTHER_RANKS_WAIT_SECONDS))
        missing = []
        for rank in wanted:
            there = store.check([keys[rank]])
            starts, step, hashes = pickle.loads(store.get(keys[rank])) if there else ([], -1, {})
            if (starts, step) != (self._start_counts, self._last_step):
                missing.append(rank)
            else:
                replicas = self.recorder.record.replicas
                for name in self._hash_by_name.keys() & hashes.keys():
                    replicas[name] = replicas.get(name, True) and self._hash_by_name[name] == hashes[name]
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            self.recorder.note_unobserved(
                f"ranks that are not compared, as they began or ended at another step, or have not stopped: {shown}"
            )


def _get_default_store() -> Any:
    from torch.distributed import distributed_c10d  # torch without distributed lacks the module

    return distributed_c10d._get_default_store()


def find_replicated_parameters(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters of which all ranks should hold the same bits: no shards, and none that DDP ignores."""
    own: set[int] = set()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            named = module.module.named_parameters()
            own |= {id(parameter) for name, parameter in named if name in module.parameters_to_ignore}
        elif any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            own |= {id(parameter) for parameter in module.parameters()}
    found = {}
    for name, parameter in parameters.items():
        if is_dtensor(parameter):
            is_sharded = not all(placement.is_replicate() for placement in parameter.placements)
        else:
            is_sharded = bool(getattr(parameter, "tensor_model_parallel", False))  # Megatron's
        if id(parameter) not in own and not is_sharded and read_numbers(parameter) is not None:
            found[name] = parameter
    return found


def hash_sampled_elements(parameters: Mapping[str, torch.Tensor], step: int) -> dict[str, int]:
    """Return the CRC-32 of each parameter's size, scale and elements that are sampled at a step.

    It differs wherever one element of at most 32 bits alone does, and but for a chance of 2^-32 wherever several do.
    """
    hashes = {}
    for name, parameter in parameters.items():
        if (found := read_numbers(parameter)) is not None:
            size = zlib.crc32(f"{found.values.numel()} {found.scale}".encode())
            sample = take_sample(found.values, make_sampling_key(step, name))
            hashes[name] = zlib.crc32(sample.numpy().data, size)
    return hashes
