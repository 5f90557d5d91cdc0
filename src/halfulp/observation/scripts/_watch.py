"""Observations that begin by themselves, at the first forward pass or step after an optimizer was made."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .._finding import Finding
from ..findings._kind import causes_first
from ..observing._observation import Observation
from ..observing._observe import observe
from ..page import write_page
from ._find import find

# What a compiled module says of a hook on all modules, which is gone before the compiled code runs.
_OF_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


class Watch:
    """Observes whatever trains while the context is open.

    Optimizers are noticed when they are made. The first call of a module after that, or the first step, begins an
    observation of the model that holds their parameters; an optimizer that is made later begins another one.

    Attributes:
        observations: in order; the last one may run still.
        unseen: sentences that say what could not be observed.
        ended: how the run ended, if somebody has said so.
    """

    def __init__(self, interval: int = 50) -> None:
        self.interval = interval
        self.observations: list[Observation] = []
        self.unseen: list[str] = []
        self.ended: str | None = None
        self._made: list[weakref.ref[Optimizer]] = []
        self._observed: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._waiting: RemovableHandle | None = None
        self._init: Any = None
        self._backward: Any = None

    def __enter__(self) -> Watch:
        self._init, self._backward = Optimizer.__init__, torch.autograd.backward
        Optimizer.__init__ = self._noticing(self._init)  # type: ignore[method-assign]
        torch.autograd.backward = self._logging(self._backward)
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Optimizer.__init__ = self._init  # type: ignore[method-assign]
        torch.autograd.backward = self._backward
        self._stop_waiting()
        for handle in self._handles:
            handle.remove()
        for observation in self.observations:
            observation.stop()

    @property
    def findings(self) -> list[Finding]:
        """Those of all observations, the worst first."""
        return causes_first(finding for observation in self.observations for finding in observation.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold: the findings of all, and the observation of most steps."""
        longest = max(self.observations, key=len, default=None)
        if longest is None:
            return {"findings": [], "steps": 0, "interval": self.interval, "record": {"unseen": self.unseen}}
        plain = longest.to_dict()
        plain["findings"] = [finding.to_dict() for finding in self.findings]
        plain["ended"] = self.ended
        plain["record"]["unseen"] = [*self.unseen, *plain["record"].get("unseen", ())]
        return plain

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all.

        Raises:
            ValueError: jinja2 is missing, or the file cannot be written.
        """
        write_page("observe", self.to_dict(), path)

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.observations), *self.unseen])

    @property
    def steps(self) -> int:
        """Optimizer steps that were seen."""
        return sum(map(len, self.observations))

    def _noticing(self, init: Any) -> Any:
        @functools.wraps(init)
        def noticed(optimizer: Optimizer, *args: Any, **options: Any) -> None:
            init(optimizer, *args, **options)
            if self._is_own():
                return
            self._made.append(weakref.ref(optimizer))
            if self._waiting is None:
                warnings.filterwarnings("ignore", message=_OF_GLOBAL_HOOKS)
                self._waiting = register_module_forward_pre_hook(self._before_forward)

        return noticed

    def _is_own(self) -> bool:
        """Whether an observation is at work, which makes optimizers of its own to learn what updates should be."""
        return any(observation.book.inside for observation in self.observations)

    def _logging(self, backward: Any) -> Any:
        """`torch.autograd.backward`, which tells a sampled step what its loss is."""

        @functools.wraps(backward)
        def logged(tensors: Any, *args: Any, **options: Any) -> Any:
            seen = self.observations[-1] if self.observations else None
            if seen is not None and seen.book.sampling and isinstance(tensors, torch.Tensor) and not tensors.dim():
                seen.log_loss(tensors.detach() / seen.loss_scale)
            return backward(tensors, *args, **options)

        return logged

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._begin()

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if id(optimizer) not in self._observed and not self._is_own():
            self._made.append(weakref.ref(optimizer))
            self._begin()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None

    @torch.compiler.disable
    def _begin(self) -> None:
        """Observe the optimizers that live now; those before are taken along."""
        self._stop_waiting()
        alive = list({id(one): one for one in (ref() for ref in self._made) if one is not None}.values())
        alive = [one for one in alive if any(group["params"] for group in one.param_groups)]
        if not alive or {id(one) for one in alive} <= self._observed:
            return
        self._observed |= {id(one) for one in alive}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # living objects may warn when they are looked at
            found = find(alive)
        if found is None:
            self.unseen.append("an optimizer steps parameters that no module holds: they are not observed")
            return
        if self.observations:
            self.observations[-1].stop()
            if not len(self.observations[-1]):
                self.observations.pop()
        observation = observe(
            found.model, alive, interval=self.interval, scaler=found.scaler, scheduler=found.scheduler
        )
        self.observations.append(observation.start())
