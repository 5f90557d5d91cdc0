"""What each rank of a run says of itself, under keys of the process group's store.

A store's keys are set and read in no order that ranks would have to keep: nothing here waits for another rank, and
nothing can be taken for a collective of the run's own. What was asked of a server that does not answer is given up
after five seconds.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ...._torch_versions import HAS_STORE_CLONES, lacks

ROOT = "halfulp/observe"
PATIENCE = 5.0
Answer = TypeVar("Answer")


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
        RuntimeError, ValueError: the process group has no store, or one that cannot be reached; so do all methods.
        TimeoutError: the store's server does not answer; so do all methods.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._name = f"{ROOT}/{name}"
        self.number: int = answered(self._enter)

    def _enter(self) -> int:
        self._store = _own_connection(_get_default_store())
        number = self._number()
        self._run = f"{self._name}/{number}"
        self._lowest()
        return number

    def _number(self) -> int:
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

    def say(self, words: bytes) -> None:
        """Replace what this rank says."""
        answered(lambda: self._store.set(self._key(self.rank), words))

    def hear(self, choose: Callable[[int], Sequence[int]]) -> tuple[int, dict[int, bytes]]:
        """Return the lowest rank of those that ever were in this run, and what some ranks say.

        Args:
            choose: the ranks, given the lowest one; those that have said nothing are left out.
        """

        def ask() -> tuple[int, dict[int, bytes]]:
            hub = int(self._store.get(f"{self._run}/hub"))
            return hub, self._hear(choose(hub))

        return answered(ask)

    def _hear(self, ranks: Sequence[int]) -> dict[int, bytes]:
        keys = [self._key(rank) for rank in ranks]
        # To get a key that is not there would wait for it.
        if keys and not self._store.check(keys):
            there = [rank for rank, key in zip(ranks, keys) if self._store.check([key])]
            return self._hear(there) if len(there) < len(ranks) else {}
        return dict(zip(ranks, self._store.multi_get(keys))) if keys else {}

    def leave(self) -> None:
        """Leave the run; what this rank said stays until all have left."""
        answered(self._leave)

    def _leave(self) -> None:
        if self._store.add(f"{self._run}/inside", -1) > 0:
            return
        for key in (*map(self._key, range(self.size)), f"{self._run}/hub", f"{self._run}/inside"):
            self._store.delete_key(key)

    def _key(self, rank: int) -> str:
        return f"{self._run}/{rank}"


def answered(ask: Callable[[], Answer]) -> Answer:
    """Return what a call returns, made in a thread of its own, whose end is not waited for beyond five seconds.

    Some requests to a store's server have no time limit of their own.
    """
    answers: list[Answer] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="halfulp observe", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"the process group's store gave no answer in {PATIENCE:g} s: its server is gone or stands")
    return answers[0]


def lacking_clones() -> NotImplementedError:
    """Return the refusal to compare ranks over the run's own store, whose requests would wait for others."""
    feature = "ranks are compared over a clone of the process group's store"
    return lacks(feature, "read the observation of each rank by itself")


def _own_connection(store: Any) -> Any:
    """A store of its own connection, so that no thread that waits at the run's own is waited for."""
    if not HAS_STORE_CLONES:
        raise lacking_clones()
    own = store.clone()
    server = own
    while isinstance(server, dist.PrefixStore):
        server = server.underlying_store
    # Others' clones share their limits with the run's own store.
    if isinstance(server, dist.TCPStore):
        own.set_timeout(datetime.timedelta(seconds=PATIENCE))
    return own


def _get_default_store() -> Any:
    # torch without distributed lacks the module.
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
