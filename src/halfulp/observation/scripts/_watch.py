"""Watch the trainings of an unmodified script, and report what they show."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...optim._gradient_release import StepWatcher
from ...optim.parameters._narrow_groups import walk_model_parameters
from ...sinks import Row, RowFile
from .._finding import Finding, plain_causes
from ..findings._kind import rank_with_causes
from ..page import write_page
from ._find import Found, Training, find, tell_backward_losses
from ._run import Children, replace_function

# What a compiled module says of a hook on all modules, which is gone before the compiled code runs.
_OF_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
# So many trainings are kept; a search over hyper-parameters may have thousands.
MOST_TRAININGS = 32
_LOOSE = "an optimizer steps parameters that no module holds: they are not observed"


class Watch(StepWatcher):
    """Observes whatever trains while the context is open.

    Optimizers are noticed when they are made. The first call of a module after that begins the training of those that
    wait: one observation of all, where several models are called before the first step (a generator and its critic).
    An optimizer that waits still when it steps begins a training then. One that holds parameters of a model that is
    observed already ends that training and begins another, with the optimizers of before that live on. A training ends
    with its model: nothing here keeps models or optimizers alive.

    Args:
        lines: a file that gets a line of JSON of each sampled step, with the number of its training, while the script
            runs; a file that is there is begun anew by the first one.

    Attributes:
        trainings: in order; those without a step are left out at the end.
        unseen: sentences that say what could not be observed.
        children: processes that the script starts.
    """

    def __init__(self, interval: int = 50, lines: str | os.PathLike[str] | None = None) -> None:
        self.interval = interval
        self._lines = None if lines is None else RowFile(lines, (), anew=True)
        if self._lines is not None:
            self._lines.check()
        self._own: int = os.getpid()
        self._numbers = itertools.count(1)
        self.trainings: list[Training] = []
        self.unseen: list[str] = []
        # Optimizers that have no training yet, in order.
        self._waiting: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self._training_of: weakref.WeakKeyDictionary[Optimizer, Training | None] = weakref.WeakKeyDictionary()
        self._used: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        self._calls: RemovableHandle | None = None
        # Of a training of several models before its first step: the model that each module belongs to.
        self._members: dict[int, int] = {}
        self._called: set[int] = set()
        self._late: set[Training] = set()
        self._ticks: int = 0
        self._left_out: int = 0
        self._open = contextlib.ExitStack()
        self.children: Children = Children()

    def __enter__(self) -> Watch:
        self._open.enter_context(replace_function(Optimizer, "__init__", self._noticing))
        self._open.enter_context(tell_backward_losses(self._log))
        self._open.enter_context(self.children.watch())
        self._open.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._open.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._end_calls()
        for training in self.trainings:
            training.end()
        trainings = [training for training in self.trainings if len(training)]
        self.trainings = sorted(trainings, key=lambda one: math.inf if one.number is None else one.number)
        if self._left_out:
            self.unseen.append(
                f"the first {MOST_TRAININGS} trainings are kept: optimizers that began others later, "
                f"{self._left_out} in all, are not observed"
            )
        if self.children.spawned and self.trainings:
            self.unseen.append(f"of the script, {self.children.why_unseen()}")

    @property
    def rank(self) -> int:
        """This process's number among those that train together."""
        ranks = [one.record.replica_of[0] for one in self.trainings if one.record is not None]
        return max(ranks, default=0)

    def report(self, ended: str | None = None) -> Report:
        """Return the report of all trainings, after the end."""
        return Report(self.trainings, list(self.unseen), self.interval, ended)

    # hooks ----------------------------------------------------------------------------------------------------

    def _noticing(self, init: Any) -> Any:
        def noticed(optimizer: Optimizer, *args: Any, **options: Any) -> None:
            init(optimizer, *args, **options)
            if self._is_own():
                return
            self._waiting[optimizer] = None
            if self._calls is None:
                warnings.filterwarnings("ignore", message=_OF_GLOBAL_HOOKS)
                self._calls = register_module_forward_pre_hook(self._before_forward)

        return noticed

    def _is_own(self) -> bool:
        """Return whether a running observation creates the optimizer itself, to learn what the updates should be."""
        running = (training.observation for training in self.trainings)
        return any(observation.book.inside for observation in running if observation is not None)

    def _log(self, loss: torch.Tensor) -> None:
        """Tell sampled steps their loss: each keeps the last one before its end."""
        for training in self.trainings:
            observation = training.observation
            if observation is not None and observation.book.sampling:
                observation.log_loss(loss)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """Hook on all modules: only between the making of an optimizer and the next call, or the next step."""
        if not self._members:
            self._end_calls()
            self._begin_waiting()
        member = self._members.get(id(module))
        if member is not None:
            self._called.add(member)

    def _end_calls(self) -> None:
        if self._calls is not None:
            self._calls.remove()
            self._calls = None

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self.begin_step(optimizer)

    def begin_step(self, optimizer: Optimizer) -> None:
        """Begin a training of an optimizer that steps, if it has none."""
        if self._is_own():
            return
        if self._members:
            self._choose_called()
        if optimizer not in self._training_of:
            self._begin_late(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self.end_step(optimizer)

    def end_step(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer."""
        training = self._training_of.get(optimizer)
        if training is None or self._is_own():
            return
        self._ticks += 1
        training.stepped(self._ticks)
        if training in self._late:
            self._late.discard(training)
            training.sample_next()

    # beginnings -----------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _begin_waiting(self) -> None:
        """Begin a training of the optimizers that wait."""
        training = self._begin(list(self._waiting))
        models = [] if training is None else training.models()
        # A hook on all modules would go into the graph of compiled ones.
        if training is not None and len(models) > 1 and not training.compiled:
            # Which of them are called before the first step is not known yet.
            self._members = {id(part): k for k, model in enumerate(models) for part in model.modules()}
            self._called = set()
            self._calls = register_module_forward_pre_hook(self._before_forward)

    @torch.compiler.disable
    def _choose_called(self) -> None:
        """Keep, at a training's first step, only those of its models that were called."""
        self._members, called = {}, self._called
        self._end_calls()
        training = self.trainings[-1]
        models = training.models()
        if not called or len(called) == len(models):
            return
        own = {id(p) for k in called for p in models[k].parameters()}
        parts = [one for one in self._optimizers_of(training) if own & _parameters(one)]
        others = [one for one in self._optimizers_of(training) if not own & _parameters(one)]
        if not parts or not others:
            return
        training.end()
        self.trainings.remove(training)
        for one in others:
            del self._training_of[one]
            self._waiting[one] = None
        begun = self._begin(parts)
        if begun is not None:
            self._late.add(begun)

    @torch.compiler.disable
    def _begin_late(self, optimizer: Optimizer) -> None:
        """Begin a training at an optimizer's step, with those that wait and step the same model."""
        self._end_calls()
        found = _quietly_found([optimizer], self._used)
        own = set() if found is None else {id(p) for p in found.model.parameters()}
        del found
        same = [one for one in self._waiting if one is not optimizer and own & _parameters(one)]
        training = self._begin([optimizer, *same])
        if training is not None:
            self._late.add(training)

    def _begin(self, optimizers: list[Optimizer]) -> Training | None:
        """Begin a training; None where that is impossible, or there are too many."""
        optimizers = [one for one in optimizers if any(group["params"] for group in one.param_groups)]
        if not optimizers:
            return None
        for one in optimizers:
            self._training_of[one] = None
            self._waiting.pop(one, None)
        gc.collect()  # ends trainings whose model is gone
        self.trainings = [one for one in self.trainings if one.observation is not None or len(one)]
        if len(self.trainings) >= MOST_TRAININGS:
            self._left_out += len(optimizers)
            return None
        found = _quietly_found(optimizers, self._used)
        if found is None:
            if _LOOSE not in self.unseen:
                self.unseen.append(_LOOSE)
            return None
        earlier = self._end_sharing({id(p) for p in found.model.parameters()})
        if earlier:
            optimizers = [*earlier, *optimizers]
            found = _quietly_found(optimizers, self._used) or found
        training = Training(found, optimizers, self.interval, None if self._lines is None else self._write)
        if found.scaler is not None:
            self._used.add(found.scaler)
        self._training_of.update(dict.fromkeys(optimizers, training))
        self.trainings.append(training)
        return training

    def _end_sharing(self, parameters: set[int]) -> list[Optimizer]:
        """End trainings of some parameters, and return their optimizers that live on."""
        ended = [
            training
            for training in self.trainings
            if any(id(parameter) in parameters for model in training.models() for parameter in model.parameters())
        ]
        for training in ended:
            training.end()
        if ended:
            gc.collect()
        self.trainings = [one for one in self.trainings if one not in ended or len(one)]
        return [optimizer for training in ended for optimizer in self._optimizers_of(training)]

    def _write(self, training: Training, row: Row) -> None:
        """Write a line; not in a process that the script has forked, which would write as if it were this one."""
        if self._lines is None or os.getpid() != self._own:
            return
        if training.number is None:
            training.number = next(self._numbers)
        self._lines.write([{"training": training.number, **row}])

    def _optimizers_of(self, training: Training) -> list[Optimizer]:
        return [one for one, own in self._training_of.items() if own is training]


def _quietly_found(optimizers: list[Optimizer], used: Any) -> Found | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # living objects may warn when they are looked at
        return find(optimizers, used)


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for _, _, parameter in walk_model_parameters(optimizer)}


@dataclass
class Report:
    """The ended trainings of a script.

    Attributes:
        trainings: in order, each with at least one step.
        unseen: sentences that say what could not be observed.
        ended: how the script ended, if somebody has said so.
    """

    trainings: Sequence[Training]
    unseen: list[str] = field(default_factory=list)
    interval: int = 50
    ended: str | None = None

    @property
    def findings(self) -> list[Finding]:
        """The findings of all trainings, the worst first."""
        return rank_with_causes(finding for training in self.trainings for finding in training.findings)

    @property
    def steps(self) -> int:
        """Optimizer steps that were seen."""
        return sum(map(len, self.trainings))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold: the findings of all trainings, and the longest one whole.

        Under `trainings` stands each: number, names of its model and optimizers, steps, the numbers of those whose
        steps lie between its own, its findings, and, but for the one that the rest is of, its record.
        """
        longest = max(self.trainings, key=len)
        of_each = [[finding.to_dict() for finding in training.findings] for training in self.trainings]
        found = longest.to_dict()
        findings = self.findings
        found["findings"] = [_number_trainings(finding.to_dict(), of_each) for finding in findings]
        found["causes"] = plain_causes(findings)
        found["ended"] = self.ended
        found["trainings"] = [
            self._entry(number, training, findings, training is longest)
            for number, (training, findings) in enumerate(zip(self.trainings, of_each), 1)
        ]
        found["record"]["unseen"] = [*self.unseen, *found["record"].get("unseen", ())]
        return found

    def _entry(self, number: int, training: Training, findings: list[dict[str, Any]], shown: bool) -> dict[str, Any]:
        entry = {
            "number": number,
            "model": training.model,
            "optimizers": training.kinds,
            "steps": len(training),
            "overlaps": self._overlapping(training),
            "shown": shown,
            "findings": findings,
        }
        if not shown:
            full = training.to_dict()
            entry |= {key: full[key] for key in ("interval", "overhead", "record")}
        return entry

    def _overlapping(self, training: Training) -> list[int]:
        others = enumerate(self.trainings, 1)
        return [k for k, other in others if other is not training and training.overlaps(other)]

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page, whole or not at all."""
        write_page("observe", self.to_dict(), path)

    def __str__(self) -> str:
        unseen = [f"not observed: {said}" for said in self.unseen]
        if len(self.trainings) == 1:
            return "\n".join([str(self.trainings[0]), *unseen])
        return "\n\n".join([*self._each(), *unseen])

    def _each(self) -> list[str]:
        """Return each training's findings under a heading; shortened where they repeat an earlier one's."""
        said: list[str] = []
        before: dict[tuple[Any, ...], int] = {}
        for number, training in enumerate(self.trainings, 1):
            others = ", ".join(map(str, self._overlapping(training)))
            beside = f", beside training {others}" if others else ""
            head = f"training {number} of {len(self.trainings)}: {training.model}, {', '.join(training.kinds)}{beside}"
            key = (training.model, *((one.code, one.severity, one.where) for one in training.findings))
            first = before.setdefault(key, number)
            alike = f"{head}; {len(training)} steps, whose findings are those of training {first}"
            said.append(f"{head}\n{training}" if first == number else alike)
        return said


def _number_trainings(finding: dict[str, Any], of_each: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return a finding with the numbers of the trainings that have it, where there are several."""
    if len(of_each) == 1:
        return finding
    return finding | {
        "trainings": [k for k, own in enumerate(of_each, 1) if any(_is_part(one, finding) for one in own)]
    }


def _is_part(one: dict[str, Any], merged: dict[str, Any]) -> bool:
    same = (one["code"], one["severity"], one["cure"]) == (merged["code"], merged["severity"], merged["cure"])
    return same and (one["where"] == merged["where"] or bool(set(one["where"]) & set(merged["where"])))
