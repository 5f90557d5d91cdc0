"""DistributedDataParallel's ``join()``, where processes run out of inputs at different iterations."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import JoinHook


class WatchedJoin:
    """A wrapper's ``join_hook``, which also tells a scaler when a ``join()`` begins and ends.

    Args:
        wrapper: whose hook it takes the place of.
        end: called in every process when all have run out of inputs.

    """

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel, end: Callable[[], None]) -> None:
        self.wrapper = weakref.ref(wrapper)
        self._begun = False
        self._end = end
        wrapper.__dict__["join_hook"] = self

    @property
    def active(self) -> bool:
        """Whether a ``join()`` is active, in which processes may have run out of inputs."""
        wrapper = self.wrapper()
        if wrapper is None:
            return False
        config = wrapper._join_config
        return self._begun and config.enable and not config.throw_on_early_termination

    def __call__(self, **kwargs: Any) -> JoinHook:
        """Return the hook of a ``join()``: the wrapper's own, then the scaler's."""
        wrapper = self.wrapper()
        assert wrapper is not None  # it calls this
        self._begun = True
        return _Hook(type(wrapper).join_hook(wrapper, **kwargs), self)

    def end(self) -> None:
        """End the ``join()``: no process has inputs left."""
        self._begun = False
        self._end()

    def restore(self) -> None:
        """Restore the wrapper's own hook."""
        wrapper = self.wrapper()
        if wrapper is not None and wrapper.__dict__.get("join_hook") is self:
            del wrapper.__dict__["join_hook"]

    def __reduce__(self) -> tuple:
        # A copy of the wrapper has no scaler.
        return plain_join_hook, (self.wrapper(),)


def plain_join_hook(wrapper: nn.parallel.DistributedDataParallel) -> Callable[..., JoinHook]:
    """The ``join_hook`` of a wrapper's class."""
    return lambda **kwargs: type(wrapper).join_hook(wrapper, **kwargs)


class _Hook(JoinHook):
    def __init__(self, own: JoinHook, watched: WatchedJoin) -> None:
        self._own = own
        self._watched = watched

    def main_hook(self) -> None:
        """Run the wrapper's own hook for a process without inputs; the scaler sends nothing."""
        self._own.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the model and the scaler's counters of the last process."""
        self._own.post_hook(is_last_joiner)
        self._watched.end()
