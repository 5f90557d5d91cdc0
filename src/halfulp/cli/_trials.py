"""Trials from the command line: progress on stderr, and a sentence on how to go on where they end early."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ._errors import fail


def run_trials(trained: Callable[..., Any], out: str, **options: Any) -> Any:
    """Call `compare` or `tune` with a folder and progress bars; end the command where they end early."""
    from ..trials import TrialError
    from ..trials.running._progress import Progress

    workers = options.get("workers")
    with Progress() as progress:
        try:
            return trained(out=out, listen=progress, **options)
        except KeyboardInterrupt as ending:
            progress.bars.stop()
            fail(f"{str(ending) or 'interrupted'}; {_describe_kept(progress, out, workers)}")
        except TrialError as error:
            progress.bars.stop()
            more = ""
            if error.details:
                Path(out, "error.log").write_text(error.details, encoding="utf-8")
                more = f" (more in {Path(out, 'error.log')})"
            fail(f"{error}{more}; {_describe_kept(progress, out, workers)}")
        except ValueError as error:  # such as a disk that fills up
            progress.bars.stop()
            fail(f"{error}; {_describe_kept(progress, out, workers)}" if progress.kept else error)


@contextlib.contextmanager
def shared_workers(workers: int | None) -> Iterator[Any]:
    """Yield the workers for a command's trials: the ranks of torchrun, or so many processes.

    SIGTERM, which torchrun sends to all ranks when one fails or dies, interrupts a rank as Ctrl-C does.
    """
    from ..trials.running._ranks import count_ranks, join_ranks

    if workers is not None and count_ranks() > 1:
        fail("--workers: under torchrun every rank trains one trial at a time: leave it out")
    with join_ranks() as ranks:
        if ranks is None:
            yield workers
            return
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            yield ranks
        finally:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt("ended by SIGTERM, as torchrun ends all ranks where one failed or died")


def check_alone(command: str, why: str) -> None:
    """Fail where torchrun started several processes, which this command cannot share its work with."""
    from ..trials.running._ranks import count_ranks

    if count_ranks() > 1:
        fail(
            f"{command} does not run under torchrun: {why}. Start it without; `halfulp compare` of tasks shares its "
            "trials among the ranks"
        )


def _describe_kept(progress: Any, out: str, workers: Any) -> str:
    """Return how many trials are kept where, and of ranks, whose are missing."""
    from ..trials.running._ranks import Ranks

    if isinstance(workers, Ranks) and workers.rank:
        return f"this is rank {workers.rank}; rank 0 keeps what has finished"
    kept = f"{progress.kept} of {progress.total} trials are kept in {out}, --resume continues"
    unfinished = workers.describe_unfinished() if isinstance(workers, Ranks) else ""
    return f"{kept}; {unfinished}" if unfinished else kept
