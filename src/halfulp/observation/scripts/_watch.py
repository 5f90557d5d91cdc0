"""A user's training script, run as Python does and watched: its models, scaler and losses are found as it runs."""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ...gradients import AdaptiveGradScaler
from ...kernels import to_float64
from ...optim.parameters._narrow_groups import walk_group_parameters
from ...sinks import GuardedSink, JsonLinesFile, Row
from ..observing._observation import Observation, RunSummary, find_living_objects, observe

INTERRUPTED_EXIT_CODE = 130
TERMINATED_EXIT_CODE = 143
# What the script's names hold lives to the end of the process, as in Python: handlers at exit find it, and a process
# group whose threads are still ending is not taken apart under their feet, which can wait for ever.
_SCRIPT_STATE_KEPT_ALIVE: list[object] = []
# What trains in processes that a script starts is not seen.
CHILD_PROCESS_REMEDY = (
    "where a script trains in processes that it starts, put `with hu.observe(model, optimizer, interval=50) as seen:` "
    "around the loop there, and `seen.to_html('observe.html')` after it: rank 0 writes the page"
)


@contextlib.contextmanager
def replace_function_temporarily(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module or a class, for a while, by another that takes it as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call_replacement(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    setattr(owner, name, call_replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


class ScriptEnding(NamedTuple):
    """The exit code that Python would have ended a script with, and why it ended."""

    code: int
    reason: Literal["finished", "exited", "crashed", "interrupted", "terminated"]


def run_script(
    path: str,
    arguments: Sequence[str] = (),
    reraised: type[BaseException] | tuple[type[BaseException], ...] = (),
    module: bool = False,
) -> ScriptEnding:
    """Run a script, or a module as `python -m` does, to its end; the traceback of a crash is printed.

    sys.argv, sys.path[0], __name__ and __file__ are what the script would find; they are put back afterwards. What is
    `reraised` are the caller's exceptions and not the script's.
    """
    argv, search = sys.argv, list(sys.path)
    try:
        sys.argv = [path, *arguments]
        if not sys.flags.safe_path:
            sys.path[0:1] = [os.getcwd() if module else str(Path(path).resolve().parent)]
        if module:
            names = runpy.run_module(path, run_name="__main__", alter_sys=True)
        else:
            names = runpy.run_path(path, run_name="__main__")
        _SCRIPT_STATE_KEPT_ALIVE[:] = [names]
    except reraised:
        raise
    except SystemExit as ending:
        _SCRIPT_STATE_KEPT_ALIVE[:] = [ending]
        if ending.code is None or isinstance(ending.code, int):
            return ScriptEnding((ending.code or 0) & 0xFF, "exited")
        print(ending.code, file=sys.stderr)
        return ScriptEnding(1, "exited")
    except KeyboardInterrupt as interrupt:
        _SCRIPT_STATE_KEPT_ALIVE[:] = [interrupt]
        return ScriptEnding(INTERRUPTED_EXIT_CODE, "interrupted")
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        traceback.print_exception(error)
        _SCRIPT_STATE_KEPT_ALIVE[:] = [error]
        return ScriptEnding(1, "crashed")
    finally:
        sys.argv = argv
        sys.path[:] = search
    return ScriptEnding(0, "finished")


@contextlib.contextmanager
def report_and_exit_on_sigterm(report: Callable[[ScriptEnding], int]) -> Iterator[Callable[[ScriptEnding], int]]:
    """Answer SIGTERM by a report and `os._exit` with its code, so that no code of the script holds that up.

    A script that handles SIGTERM itself, and processes forked from it, are as they would be without. Yielded is the
    report for other endings, during which SIGTERM is ignored.
    """
    own, has_begun = os.getpid(), False

    def report_undisturbed(ending: ScriptEnding) -> int:
        nonlocal has_begun
        has_begun = True
        return report(ending)

    def end_process(number: int, frame: FrameType | None) -> None:
        if has_begun:  # launchers and batch systems may both send one
            return
        if os.getpid() == own:
            code = TERMINATED_EXIT_CODE
            try:
                code = report_undisturbed(ScriptEnding(TERMINATED_EXIT_CODE, "terminated"))
            except SystemExit:  # said already
                code = 2
            except BaseException:
                traceback.print_exc()
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(code)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # Only the main thread can catch signals.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield report
        return
    signal.signal(signal.SIGTERM, end_process)
    try:
        yield report_undisturbed
    finally:
        if signal.getsignal(signal.SIGTERM) is end_process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class ScriptWatch:
    """Observes what trains while the context is open, as one run.

    The models of all optimizers that make their first step before one of them makes its second are observed together,
    from the second step on. They live until the end of the watch. A .jsonl file, begun anew, gets a line of JSON of
    each sampled step.
    """

    def __init__(self, interval: int = 50, lines: str | os.PathLike[str] | None = None) -> None:
        self.interval = interval
        # None before the first step.
        self.observation: Observation | None = None
        # Sentences that say what could not be observed.
        self.unseen: list[str] = []
        self._lines_file = None if lines is None else JsonLinesFile(lines, overwrite=True)
        if self._lines_file is not None:
            self._lines_file.check()
        self._own_pid: int = os.getpid()
        self._optimizers: list[Optimizer] = []
        self._found_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._exit_stack = contextlib.ExitStack()

    def __enter__(self) -> ScriptWatch:
        self._exit_stack.enter_context(listen_to_backward_losses(self._log_loss))
        self._exit_stack.callback(register_optimizer_step_post_hook(self._handle_optimizer_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()
        if self.observation is not None:
            self.observation.stop()

    @property
    def rank(self) -> int:
        """This process's number among those that train together."""
        return 0 if self.observation is None else self.observation.record.replica_of[0]

    def make_report(self, ended: str | None = None) -> RunSummary | None:
        """Return what was observed, after the end; None where no step was."""
        if self.observation is None or not len(self.observation):
            return None
        made = self.observation.summarize()
        return replace(made, record=replace(made.record, unseen=[*self.unseen, *made.record.unseen]), ended=ended)

    def _log_loss(self, loss: torch.Tensor) -> None:
        """Tell a sampled step its loss: it keeps the last one before its end."""
        if self.observation is not None and self.observation.recorder.is_sampling:
            self.observation.log_loss(loss)

    def _handle_optimizer_step(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer not in self._found_optimizers:
            self._found_optimizers.add(optimizer)
            why_not = self._add_optimizer(optimizer)
            if why_not is not None and why_not not in self.unseen:
                self.unseen.append(why_not)

    @torch.compiler.disable
    def _add_optimizer(self, optimizer: Optimizer) -> str | None:
        """Begin the observation anew with one more optimizer; return why not, where it is too late or has no model."""
        if self.observation is not None and len(self.observation):
            return (
                f"{type(optimizer).__name__} made its first step when others had made two: what it steps is not "
                "observed; put `with hu.observe(model, optimizer) as seen:` around that training in the script"
            )
        model = find_trained_model([*self._optimizers, optimizer])
        if model is None:
            return "an optimizer steps parameters that no module holds: they are not observed"
        self._optimizers.append(optimizer)
        if self.observation is not None:
            self.observation.stop()
        sinks = [] if self._lines_file is None else [GuardedSink("the file of JSON lines", self._write_row)]
        observed = observe(model, self._optimizers, interval=self.interval, scaler=find_living_scaler(), sinks=sinks)
        self.observation = observed.start()
        return None

    def _write_row(self, row: Row) -> None:
        """Write a line; not in a process that the script has forked, which would write as if it were this one."""
        if self._lines_file is not None and os.getpid() == self._own_pid:
            self._lines_file.write(row)


_SCALER_TYPES = (torch.amp.GradScaler, AdaptiveGradScaler)


class JointlyTrainedModels(nn.ModuleDict):
    """Several models that are trained together, as one to observe."""


def find_trained_model(optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module | None:
    """Return the outermost module, without wrappers, that holds the parameters which optimizers step; None without one.

    Several models are one `JointlyTrainedModels`, in which each is named by its class.
    """
    order = [id(parameter) for one in optimizers for _, _, parameter in walk_group_parameters(one)]
    wanted = {key: position for position, key in reversed(list(enumerate(order)))}
    modules = _find_living_modules()
    children = {id(child) for module in modules for child in module.children()}
    found = {module: _collect_parameter_ids(module) & wanted.keys() for module in modules if id(module) not in children}
    # As few modules as together hold all parameters that any holds, those of most parameters first.
    left, chosen = set[int]().union(*found.values()), []
    for module, held in sorted(found.items(), key=lambda root: (-len(root[1]), sum(1 for _ in root[0].modules()))):
        if held & left:
            chosen.append((min(wanted[key] for key in held), _unwrap_module(module)))
            left -= held
    models = list(dict.fromkeys(model for _, model in sorted(chosen, key=lambda pair: pair[0])))
    if len(models) < 2:
        return models[0] if models else None
    names = [type(model).__name__.replace(".", "_") for model in models]
    numbers = [names[:k].count(name) for k, name in enumerate(names)]
    named = (f"{name}_{number + 1}" if number else name for name, number in zip(names, numbers))
    return JointlyTrainedModels(dict(zip(named, models)))


def find_outermost_module_of_parameters(parameters: Iterable[nn.Parameter]) -> nn.Module | None:
    """Return the outermost module that holds all of some parameters, None where none does."""
    wanted = {id(parameter) for parameter in parameters}
    holding = [module for module in _find_living_modules() if wanted <= _collect_parameter_ids(module)]
    return _unwrap_module(max(holding, key=lambda module: sum(1 for _ in module.modules()))) if holding else None


def find_living_scaler() -> torch.amp.GradScaler | None:
    """Return the one gradient scaler that is alive; None without one, or of several."""
    found = find_living_objects(_SCALER_TYPES)
    return found[0] if len(found) == 1 else None


def _find_living_modules() -> list[nn.Module]:
    """Return the living modules whose construction is done, but those that hold models together for an observation."""
    ready = [one for one in find_living_objects(nn.Module) if "_parameters" in vars(one) and "_modules" in vars(one)]
    return [module for module in ready if not isinstance(module, JointlyTrainedModels)]


def _collect_parameter_ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _unwrap_module(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._orig_mod  # type: ignore[assignment]
        elif "_forward_module" in module._modules:  # Fabric's
            module = module._forward_module  # type: ignore[assignment]
        else:
            return module


@contextlib.contextmanager
def listen_to_backward_losses(listener: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Tell a listener each loss of one element, detached, that a backward pass begins with, before it does.

    `torch.autograd.backward` and the scalers' `scale` are wrapped for that time; a scaler's factor is taken off.
    """
    # What the last scale was, until a backward pass has begun with the scaled loss.
    factors: list[torch.Tensor] = []

    def tell_loss_and_run_backward(backward: Any, tensors: Any, *args: Any, **options: Any) -> Any:
        single = tensors[0] if isinstance(tensors, Sequence) and len(tensors) == 1 else tensors
        if isinstance(single, torch.Tensor) and single.numel() == 1:
            loss = single.detach()
            if factors:
                factor = factors.pop()
                known = factor.isfinite() & (factor != 0)
                loss = torch.where(known, (to_float64(loss) / factor).to(loss.dtype), loss)
            listener(loss)
        return backward(tensors, *args, **options)

    def scale_and_note_factor(scale: Any, scaler: Any, outputs: Any) -> Any:
        result = scale(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
            factors[:] = [to_float64(result.detach()) / to_float64(outputs.detach())]
        return result

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(replace_function_temporarily(torch.autograd, "backward", tell_loss_and_run_backward))
        for kind in _SCALER_TYPES:
            replaced.enter_context(replace_function_temporarily(kind, "scale", scale_and_note_factor))
        yield
