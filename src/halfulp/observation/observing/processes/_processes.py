"""Several processes: whether replicas hold the same bits, whether shards share random bits, and all ranks' extremes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...._torch_versions import HAS_STORE_CLONES
from ....rounding import mix64
from ...sampling._sample_places import name_key, place_key
from ...sampling._totals import AMAX, AMIN
from .._notebook import Notebook
from ._hashes import hashes
from ._mailbox import Mailbox, lacking_clones
from ._placements import ranks_that_share, replicated, shards_of
from ._rank_summary import Array, RankSummary, StepSummary, in_both, keys_array
from ._sentences import Heard, sentences
from ._shared_random_bits import SharedRandomBits, key_of, said_errors

# The hub reads so many others at a time, in turn: the time that a step takes does not grow with their number.
AT_ONCE = 16
# Own steps are kept for longer than they are said: a rank that is behind meets them.
MOST_KEPT = 64
# At the end others are waited for: those that were in the run, have not ended it, and are not there yet.
LONGEST_WAIT = 2.0
POLL = 0.005


class Processes:
    """Puts together what the ranks of a run saw, without a collective and without waiting in any step.

    After a sampled step each rank sets one key of the process group's store: hashes of the sampled bits of replicated
    parameters, the largest and smallest magnitudes, some rounding errors of shards. At the end of the step after, the
    lowest rank that observes, the hub, reads what at most 16 others said, and every other rank what the hub said. Ranks
    that sample no step in common, that end earlier or never begin are named in the record's `unseen`.

    Counts stay those of each rank's own shards and batches. Largest and smallest magnitudes are those of all ranks on
    the hub, and on others those of the hub when it was read last.

    Args:
        book: what is written to.
        model: the model.
        parameters: by name.
    """

    def __init__(self, book: Notebook, model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
        self.book, self._model, self._parameters = book, model, parameters
        self._tensor_keys: dict[tuple[str, str], int] = {}
        self._sentences: list[str] = []
        self._enter()

    def _enter(self) -> None:
        """Forget a run before."""
        self._mailbox: Mailbox | None = None
        self._failed: str | None = None
        self._own: dict[int, StepSummary] = {}
        self._heard: dict[int, Heard] = {}
        self._shared = SharedRandomBits()
        self._due: int | None = None
        self._turn: int = 0
        self._hub: int | None = None
        self._first: int = 0
        self._late: bool = False
        self._ranks: list[int] = []
        active = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if active else 0
        self.size: int = dist.get_world_size() if active else 1
        self.book.record.replica_of = (self.rank, self.size)

    # in a run -------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Enter the run that other ranks observe too.

        Args:
            step: number of the step that is next.
        """
        self._enter()
        self._first = step
        if self.size == 1:
            return
        shared = ranks_that_share(self._model)
        self._ranks = [rank for rank in shared or range(self.size) if rank != self.rank]
        if not self._ranks:
            return
        self._replicated = replicated(self._model, self._parameters)
        self._names = {name_key(name): name for name in self._replicated}
        self._keys = keys_array(self._names)
        self._shards = shards_of(self._parameters)
        self._shard_names = {key_of(name, elements): name for name, (_, elements) in self._shards.items()}
        name = mix64(*map(name_key, (str(shared), *sorted(self._parameters))))

        def enter() -> None:
            self._mailbox = Mailbox(f"{name:016x}", self.rank, self.size)
            self._take(self._hear(self._ranks))
            # Ranks that train together begin before any has made a step.
            self._late = any(known.last is not None for known in self._heard.values())
            self._say()

        self._reaching_store(enter)

    def publish(self, errors: Mapping[str, torch.Tensor]) -> None:
        """Say what this rank saw, after a sampled step.

        Args:
            errors: rounding errors of sampled elements by parameter, where updates are rounded stochastically.
        """
        if self._mailbox is None:
            return
        step = self.book.step - self._first
        bits = hashes(self._replicated, lambda name: place_key(0, step, name))
        self._own[step] = StepSummary(bits, said_errors(step, errors, self._shards))
        while len(self._own) > MOST_KEPT:
            del self._own[min(self._own)]
        self._due = self.book.step + 1
        self._reaching_store(self._say)

    def follow(self, at_once: bool = False) -> None:
        """Read what others said by now, in the step after a sampled one.

        Args:
            at_once: whether to read in any step.
        """
        if self._mailbox is None or not (at_once or (self._due is not None and self.book.step >= self._due)):
            return
        self._due = None
        self._reaching_store(self._hear_some)
        self._note()

    def end(self, patient: bool) -> None:
        """Leave the run, with what others said of the last step.

        Args:
            patient: whether to wait for ranks that have yet to say it, two seconds at most.
        """
        if self._mailbox is not None:
            self._reaching_store(lambda: self._finish(patient))
        self._note(ended=True)
        self._mailbox = None

    def _finish(self, patient: bool) -> None:
        assert self._mailbox is not None
        self._say(ended=True)
        until = time.monotonic() + (LONGEST_WAIT if patient else 0.0)
        waiting = self._take(self._hear(self._ranks))
        while waiting and time.monotonic() < until:
            time.sleep(POLL)
            waiting = self._take(self._hear(waiting))
        if self._hub == self.rank:
            self._say(ended=True)
        self._mailbox.leave()

    def _reaching_store(self, act: Callable[[], None]) -> None:
        """Do something with the store of the process group; without one the record says so, and the run goes on."""
        if self.size == 1 or self._failed is not None:
            return
        try:
            if not dist.is_initialized():
                self._failed = "the process group was destroyed before the observation ended"
                self._mailbox = None
                return
            act()
        except Exception as error:
            # Its words may hold hosts, which neither page nor JSON is to hold.
            reason = f"the process group's store cannot be reached: {type(error).__name__}"
            self._failed = reason if HAS_STORE_CLONES else str(lacking_clones())
            self._mailbox = None

    # what is said ---------------------------------------------------------------------------------------------

    def _say(self, ended: bool = False) -> None:
        assert self._mailbox is not None
        tensors, extremes = self._extremes()
        differing = [key for key, name in self._names.items() if not self.book.record.replicas.get(name, True)]
        said = RankSummary(ended, self._late, self._keys, self._own, tensors, extremes, keys_array(differing))
        self._mailbox.say(said.to_bytes())

    def _extremes(self) -> tuple[Array, Array]:
        keys, found = [], []
        for key, totals in self.book.totals.items():
            number = self._tensor_keys.get(key)
            if number is None:
                number = self._tensor_keys[key] = name_key(" ".join(key))
            keys.append(number)
            found.append((totals.reals[AMAX], totals.reals[AMIN]))
        return keys_array(keys), np.array(found, np.float64).reshape(-1, 2)

    # what is heard --------------------------------------------------------------------------------------------

    def _hear(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """What some ranks said, as the hub hears it; other ranks hear the hub."""
        assert self._mailbox is not None
        own = self.rank
        self._hub, heard = self._mailbox.hear(lambda hub: ranks if hub == own else [hub])
        return heard

    def _hear_some(self) -> None:
        first = self._turn % len(self._ranks)
        chosen = (self._ranks[first:] + self._ranks[:first])[:AT_ONCE]
        self._turn = first + len(chosen)
        self._take(self._hear(chosen))

    def _take(self, heard: Mapping[int, bytes]) -> list[int]:
        """Join what ranks said to what this one knows, and return those that have yet to say this rank's last step."""
        behind = []
        for rank, words in heard.items():
            theirs = RankSummary.from_bytes(words)
            known = self._heard.setdefault(rank, Heard())
            known.ended, known.last, known.apart = theirs.ended, theirs.last_step, self._late or theirs.late
            here, there = in_both(self._keys, theirs.replicated)
            for step in sorted(self._own.keys() & theirs.steps) if not known.apart else ():
                if known.common is None or step > known.common:
                    known.common = step
                    self._compare(rank, here, self._own[step], there, theirs.steps[step])
            if not known.apart:
                self._differ(theirs.differing)
            self._join_extremes(theirs)
            behind_by = max(self._own, default=-1) - (-1 if theirs.last_step is None else theirs.last_step)
            if behind_by > 0 and not (theirs.ended or known.apart):
                behind.append(rank)
        return behind

    def _compare(self, rank: int, here: Array, mine: StepSummary, there: Array, theirs: StepSummary) -> None:
        replicas = self.book.record.replicas
        same = mine.bits[here] == theirs.bits[there]
        for key, equal in zip(self._keys[here].tolist(), same.tolist()):
            name = self._names[key]
            replicas[name] = replicas.get(name, True) and equal
        if rank in self._ranks[:AT_ONCE] or rank == self._hub:  # sums are kept for so many
            for key in mine.errors.keys() & theirs.errors.keys():
                self._shared.add(rank, key, mine.errors[key], theirs.errors[key])
                rounding = self.book.record.parameters[self._shard_names[key]].rounding
                if rounding is not None:
                    rounding.between_ranks = self._shared.correlation(key)

    def _differ(self, keys: Iterable[int]) -> None:
        """Take over what the hub knows of other ranks."""
        for key in map(int, keys):
            if key in self._names:
                self.book.record.replicas[self._names[key]] = False

    def _join_extremes(self, theirs: RankSummary) -> None:
        keys, mine = self._extremes()
        here, there = in_both(keys, theirs.tensors)
        top = np.maximum(mine[here, 0], theirs.extremes[there, 0])
        bottom = np.minimum(mine[here, 1], theirs.extremes[there, 1])
        all_totals = list(self.book.totals.values())
        changed = (top != mine[here, 0]) | (bottom != mine[here, 1])
        for k in np.flatnonzero(changed).tolist():
            reals = all_totals[here[k]].reals
            reals[AMAX], reals[AMIN] = top[k], bottom[k]

    # what is not known ----------------------------------------------------------------------------------------

    def _note(self, ended: bool = False) -> None:
        """Say in the record what of other ranks is not known, instead of what was said before."""
        if self.size == 1:
            return
        unseen = self.book.record.unseen
        self.book.record.unseen[:] = [one for one in unseen if one not in self._sentences]
        steps = sorted(self._own)
        compared = self._ranks if self._hub is None or self._hub == self.rank else [self._hub]
        until = steps if ended else steps[:-1]
        self._sentences = sentences(self._heard, compared, until, self._failed, self._first)
        unseen.extend(self._sentences)
