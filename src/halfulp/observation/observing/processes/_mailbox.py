"""What each rank of a run says of itself, under keys of the process group's store.

A store's keys are set and read in no order that ranks would have to keep: nothing here waits for another rank, and
nothing can be taken for a collective of the run's own.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

ROOT = "halfulp/observe"
# A server that is gone answers no request: it is then given up after so long.
PATIENCE = datetime.timedelta(seconds=2)


class Mailbox:
    """One rank's place in a run that several observe.

    A run is what ranks observe under one name at overlapping times. Its keys are deleted when the last rank has left;
    what stays are two counts of each name.

    Args:
        name: of the run; only ranks that give the same name meet.
        rank: of this process.
        size: number of processes.

    Attributes:
        number: of the run among those of its name, from 1.

    Raises:
        RuntimeError, ValueError: the process group has no store, or one that cannot be reached.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = _own_connection(_get_default_store())
        self._name = f"{ROOT}/{name}"
        self.number: int = self._enter()
        self._run = f"{self._name}/{self.number}"
        self._lowest()

    def _enter(self) -> int:
        """The run that others are in and this rank was not in yet, else a new one."""
        store, current = self._store, f"{self._name}/current"
        number, last = store.add(current, 0), store.add(f"{self._name}/last/{self.rank}", 0)
        if number > last and store.add(f"{self._name}/{number}/inside", 0) > 0:
            store.add(f"{self._name}/{number}/inside", 1)
        else:
            # Another rank may be first, with the same number.
            store.add(f"{self._name}/{number + 1}/inside", 1)
            store.compare_set(current, str(number), str(number + 1))
            number += 1
        store.add(f"{self._name}/last/{self.rank}", number - last)
        return number

    def _lowest(self) -> None:
        """Be the hub unless a lower rank is."""
        key, own = f"{self._run}/hub", str(self.rank)
        found = self._store.compare_set(key, "", own)
        while int(found) > self.rank:
            found = self._store.compare_set(key, found.decode(), own)

    @property
    def hub(self) -> int:
        """The lowest rank of those that ever were in this run."""
        return int(self._store.get(f"{self._run}/hub"))

    def say(self, words: bytes) -> None:
        """Replace what this rank says."""
        self._store.set(self._key(self.rank), words)

    def hear(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return what some ranks say, of those that have said anything."""
        ranks = list(ranks)
        keys = [self._key(rank) for rank in ranks]
        # To get a key that is not there would wait for it.
        if keys and not self._store.check(keys):
            there = [rank for rank, key in zip(ranks, keys) if self._store.check([key])]
            return self.hear(there) if len(there) < len(ranks) else {}
        return dict(zip(ranks, self._store.multi_get(keys))) if keys else {}

    def leave(self) -> None:
        """Leave the run; what this rank said stays until all have left."""
        if self._store.add(f"{self._run}/inside", -1) > 0:
            return
        for key in (*map(self._key, range(self.size)), f"{self._run}/hub", f"{self._run}/inside"):
            self._store.delete_key(key)

    def _key(self, rank: int) -> str:
        return f"{self._run}/{rank}"


def _own_connection(store: Any) -> Any:
    """A store of its own connection, so that no thread that waits at the run's own is waited for."""
    own = store.clone()
    server = own
    while isinstance(server, dist.PrefixStore):
        server = server.underlying_store
    # Others' clones share their limits with the run's own store.
    if isinstance(server, dist.TCPStore):
        own.set_timeout(PATIENCE)
    return own


def _get_default_store() -> Any:
    # torch without distributed lacks the module.
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
