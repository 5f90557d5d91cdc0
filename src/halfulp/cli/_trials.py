"""Running trials from the command line: progress on stderr, and what is kept where they end early."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._errors import fail


def run_trials(trained: Callable[..., Any], out: str, **options: Any) -> Any:
    """Call `compare` or `tune` with a folder and progress bars; what ends it early says how to go on."""
    from ..trials import TrialError
    from ..trials.running._progress import Progress

    check_alone()
    with Progress() as progress:
        try:
            return trained(out=out, listen=progress, **options)
        except KeyboardInterrupt:
            progress.bars.stop()
            fail(f"interrupted; {_describe_kept(progress, out)}")
        except TrialError as error:
            progress.bars.stop()
            more = ""
            if error.details:
                Path(out, "error.log").write_text(error.details, encoding="utf-8")
                more = f" (more in {Path(out, 'error.log')})"
            fail(f"{error}{more}; {_describe_kept(progress, out)}")
        except ValueError as error:  # such as a disk that fills up
            progress.bars.stop()
            fail(f"{error}; {_describe_kept(progress, out)}" if progress.kept else error)


def check_alone() -> None:
    """Fail where several processes were started to train as one, as torchrun does."""
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        fail("halfulp trains on one device, by processes of its own, and not under torchrun: start it without")


def _describe_kept(progress: Any, out: str) -> str:
    return f"{progress.kept} of {progress.total} trials are kept in {out}, --resume continues"
