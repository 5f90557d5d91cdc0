"""The ranks that torchrun started, as the workers of one run: each trains its share, rank 0 keeps all results."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from ..._messages import first_line
from ._plan import Trial
from ._pool import Event, TrialError, train_all
from ._store import find_difference

# Seconds until all have met, and until one that is not heard of is given up.
MEET, SILENT = 300.0, 60.0
# Seconds between signs of life, between looks at what others sent, and between a rank's reports of progress.
_BEAT, _LOOK, _REPORT = 2.0, 0.2, 2.0
# Seconds for the others to read how rank 0 ended, before it takes its store along.
_LEAVE = 10.0


class Ranks:
    """This process as one of torchrun's ranks, and the store of torchrun, over which results travel.

    Only rank 0 needs the output folder. Every trial has one rank, by its place among the missing ones.

    Attributes:
        unfinished: on rank 0, the keys of the trials of each rank that have no result.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self.unfinished: list[list[str]] = [[] for _ in range(size)]
        self._sent = 0
        self._read = [0] * size
        self._heard = [(0, time.monotonic() + MEET)] * size
        self._lost = ""
        store.set_timeout(datetime.timedelta(seconds=SILENT))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="halfulp-rank")
        self._thread.start()

    def train(self, trials: Sequence[Trial], missing: Sequence[Trial], on: bool) -> Generator[Event, None, None]:
        """Train on rank 0 its share of what is missing, and yield the events of all ranks."""
        shares = [missing[rank :: self.size] for rank in range(self.size)]
        self.unfinished = [[trial.key for trial in share] for share in shares]
        self._put("trials", {trial.key: trial.settings() for trial in trials})
        self._put("missing", [trial.key for trial in missing])
        known = {trial.key: trial for trial in missing}
        for kind, trial, content in train_all(shares[0], 1, on=on, tick=_LOOK):
            if kind in ("done", "failed"):
                self.unfinished[0].remove(trial.key)
            if kind != "tick":
                yield kind, trial, content
            yield from self._receive(known)
        while any(self.unfinished):
            yield from self._receive(known)
            time.sleep(_LOOK)

    def serve(self, trials: Sequence[Trial], on: bool) -> int:
        """Train another rank's share, send what comes of it, and return the exit code of rank 0 once that has ended."""
        try:
            if not self._wait_for("missing"):
                return int(self._get("over"))
            self._check_plan(trials)
            known = {trial.key: trial for trial in trials}
            share = [known[key] for key in self._get("missing")[self.rank :: self.size]]
            with contextlib.closing(train_all(share, 1, on=on, tick=_LOOK)) as events:
                reported = 0.0
                for kind, trial, content in events:
                    if self._has("over"):
                        break
                    if kind == "tick" or (kind == "progress" and time.monotonic() - reported < _REPORT):
                        continue
                    reported = time.monotonic()
                    self._send(kind, trial.key, content)
        except TrialError as error:
            self._send("error", error.trial.key if error.trial else "", [str(error), error.details])
        self._wait_for("over")
        return int(self._get("over"))

    def end(self, code: int) -> None:
        """Tell the others that this rank ends with an exit code; rank 0 waits a while for them to have read it."""
        with contextlib.suppress(TrialError):
            self._put("over" if self.rank == 0 else f"left/{self.rank}", code)
            until = time.monotonic() + _LEAVE
            others = [f"left/{rank}" for rank in range(1, self.size)] if self.rank == 0 else []
            while not all(map(self._has, others)) and time.monotonic() < until:
                time.sleep(_LOOK / 4)
        self._ended.set()
        self._thread.join(_LEAVE)  # torch aborts a process that ends while a thread is in its store

    def describe_unfinished(self) -> str:
        """Return which trials each rank leaves without a result, in words; nothing where there are none."""
        shown = []
        for rank, keys in enumerate(self.unfinished):
            if keys:
                more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
                shown.append(f"of rank {rank} {', '.join(keys[:3])}{more}")
        return f"without a result are {'; '.join(shown)}" if shown else ""

    def _receive(self, known: dict[str, Trial]) -> Iterator[Event]:
        """Yield what other ranks have sent since the last look."""
        for rank in range(1, self.size):
            while self._has(key := f"event/{rank}/{self._read[rank]}"):
                kind, trial, content = self._get(key)
                self._read[rank] += 1
                if kind == "error":
                    message, details = content
                    raise TrialError(f"rank {rank}: {message}", known.get(trial), details)
                if kind in ("done", "failed"):
                    self.unfinished[rank].remove(trial)
                yield kind, known[trial], content
            if self.unfinished[rank]:
                self._check_alive(rank)
                # It may have ended after its last event was read.
                if self._has(f"left/{rank}") and not self._has(f"event/{rank}/{self._read[rank]}"):
                    raise TrialError(f"rank {rank} has ended; its own message says why")

    def _check_plan(self, trials: Sequence[Trial]) -> None:
        """Raise where this rank was started for other trials than rank 0, or in another environment."""
        ours = json.loads(json.dumps({trial.key: trial.settings() for trial in trials}))
        theirs = self._get("trials")
        if ours == theirs:
            return
        where, _, _ = find_difference(theirs, ours)
        raise TrialError(f"{where} is another one than on rank 0: start all ranks by one command in one environment")

    def _check_alive(self, rank: int) -> None:
        """Raise where a rank has given no sign of life for too long."""
        beats, until = self._heard[rank]
        if (now := int(self._ask(lambda: self._store.add(f"alive/{rank}", 0)))) != beats:
            self._heard[rank] = (now, time.monotonic() + SILENT)
        elif time.monotonic() > until:
            waited = f"has not been heard of for {SILENT:.0f} s" if beats else f"did not come within {MEET:.0f} s"
            raise TrialError(f"rank {rank} {waited}")

    def _wait_for(self, key: str) -> bool:
        """Wait for something from rank 0; False if that has ended instead."""
        while not self._has(key):
            if self._has("over"):
                return False
            self._check_alive(0)
            time.sleep(_LOOK)
        return True

    def _beat(self) -> None:
        """Give signs of life until this rank ends (a thread)."""
        with contextlib.suppress(RuntimeError):  # the store goes with its process
            while not self._ended.is_set():
                self._store.add(f"alive/{self.rank}", 1)
                self._ended.wait(_BEAT)

    def _send(self, kind: str, key: str, content: Any) -> None:
        self._put(f"event/{self.rank}/{self._sent}", [kind, key, content])
        self._sent += 1

    def _put(self, key: str, content: Any) -> None:
        text = json.dumps(content)
        self._ask(lambda: self._store.set(key, text))

    def _get(self, key: str) -> Any:
        return json.loads(self._ask(lambda: self._store.get(key)))

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def _ask(self, question: Any) -> Any:
        """Call a function of the store; raise where the store has gone with rank 0."""
        if not self._lost:
            try:
                return question()
            except RuntimeError as error:  # torch.distributed's errors are
                self._lost = first_line(error) or "no answer"
        raise TrialError(f"the store of torchrun does not answer any more: {self._lost}")


def serve_other_rank(workers: object, trials: Sequence[Trial], on: bool = False) -> None:
    """Train the share of a rank other than the first and end its process; do nothing on any other process."""
    if isinstance(workers, Ranks) and workers.rank:
        raise SystemExit(workers.serve(trials, on))


def count_ranks() -> int:
    """Return how many processes torchrun started; 1 without it."""
    given = os.environ.get("WORLD_SIZE") or "1"
    if not given.isdigit() or given == "0":
        raise ValueError(f"the environment has WORLD_SIZE={given}: unset it, or start the ranks by torchrun")
    return int(given)


@contextlib.contextmanager
def join_ranks() -> Iterator[Ranks | None]:
    """Meet the other ranks of torchrun for the length of a block; yield None where this process is alone.

    How rank 0 leaves the block is the exit code of the others, which are in `Ranks.serve` then.
    """
    if count_ranks() == 1:
        yield None
        return
    ranks = Ranks(*_meet_ranks())
    code = 1
    try:
        yield ranks
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
        raise
    finally:
        ranks.end(code)


def _meet_ranks() -> tuple[Any, int, int]:
    """Return torchrun's store, this process's rank and the number of ranks, once all have come."""
    import torch

    if not torch.distributed.is_available():
        raise ValueError("this torch was built without torch.distributed: start halfulp without torchrun")
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=MEET)))
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that torchrun started several ranks, and they cannot meet: "
            f"{first_line(error)}; start them by torchrun, or unset WORLD_SIZE"
        ) from None
    return torch.distributed.PrefixStore("halfulp", store), rank, size
