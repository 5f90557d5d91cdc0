"""One part of `python -m benchmarks gpu` at work: its device, tables and time, saved after every row."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .._results import Table

PACKAGES = ("torch", "triton", "numpy", "llvmlite", "safetensors", "lazy_loader", "filelock", "pytest", "hypothesis")


class Unavailable(Exception):
    """What a device, a version or a package cannot do: its row says so, and nothing has failed."""


class ContextLost(RuntimeError):
    """The device answers no more in this process: what is left of the part needs another one."""


@dataclass
class Run:
    """A part's view of the world, and what it has found.

    Attributes:
        part: the part's name: a module beside this one, or a dotted module.
        device: "cuda", or "cpu" in a dry run.
        tiny: whether sizes are those of a dry run.
        seconds: after which the part begins nothing more.
        share, shares: which of how many processes this is, each with every ``shares``-th attempt.
        first: the number of the first attempt: those before it were made by a process that died.
        path: where the findings are kept as JSON.
        facts: device and versions.
        tables: what was measured; `keys` names, by title, the columns that tell apart rows of counts.
        failures: what failed, one line each.
        late: what was not begun for lack of time.
        attempted: how many attempts were begun, by this process and by those before it.
    """

    part: str
    device: str
    tiny: bool
    seconds: float
    share: int = 0
    shares: int = 1
    first: int = 0
    path: Path | None = None
    facts: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    keys: dict[str, list[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    attempted: int = 0
    done: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU to wait for and to ask for its memory."""
        return self.device == "cuda"

    def left(self) -> float:
        """The seconds left."""
        return self.seconds - (time.monotonic() - self.started)

    def table(self, title: str, columns: dict[str, str], note: str = "", keys: list[str] | None = None) -> Table:
        """A new table; with `keys`, one of counts, whose rows are told apart by these columns."""
        made = Table(title, columns, note=note)
        self.tables.append(made)
        if keys:
            self.keys[title] = keys
        return made

    def add(self, table: Table, **cells: object) -> None:
        """A row, kept at once."""
        table.add(**cells)
        self.save()

    def count(self, table: Table, cells: dict, **more: float) -> None:
        """Counts of a row, which is made at its first count; met as long as nothing differs or fails."""
        row = next((row for row in table.rows if all(row[key] == cells[key] for key in cells)), None)
        if row is None:
            row = {**cells, "met": True}
            table.rows.append(row)
        for name, value in more.items():
            row[name] = row.get(name, 0) + value
        row["met"] = not row.get("differ") and not row.get("failed")
        self.save()

    def note(self, table: Table, cells: dict, **more: str | None) -> None:
        """Words in a row of counts, which has been counted before; ``met=None`` where nothing is shown."""
        next(row for row in table.rows if all(row[key] == cells[key] for key in cells)).update(more)
        self.save()

    def fail(self, what: str, error: BaseException | str) -> None:
        """A line of what failed; the whole traceback goes to the standard error stream."""
        if isinstance(error, BaseException):
            traceback.print_exception(error)
        self.failures.append(f"{what}: {one_line(error)}")
        self.save()

    def attempt(self, what: str, action: Callable[[], object], refused: Callable[[str], object] | None = None) -> None:
        """Do one thing if it is this process's and there is time; if it fails, say so and go on.

        Args:
            what: it is, in the words of its row.
            action: measures, and adds rows.
            refused: adds the row of what the device cannot do, or has no memory for, given the reason.

        Raises:
            ContextLost: the device has failed in a way that ends its use in this process.
        """
        number, self.attempted = self.attempted, self.attempted + 1
        if number < self.first or number % self.shares != self.share:
            return
        if self.left() <= 0:
            self.late.append(what)
            self.save()
            return
        self.save()
        try:
            action()
        except Unavailable as reason:
            self._refuse(what, str(reason), refused)
        except Exception as error:
            if is_out_of_memory(error):
                self._refuse(what, f"out of memory ({one_line(error)[:100]})", refused)
            else:
                self.fail(what, error)
        self.free(what)

    def _refuse(self, what: str, reason: str, refused: Callable[[str], object] | None) -> None:
        if refused is None:
            self.late.append(f"{what}: {reason}")
        else:
            refused(reason)
        self.save()

    def free(self, what: str) -> None:
        """Give memory back, and make sure that the device still answers."""
        if not self.on_gpu:
            return
        gc.collect()
        import torch

        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            raise ContextLost(f"after {what}: {one_line(error)}") from error

    def save(self) -> None:
        """Write everything so far, whole or not at all."""
        if self.path is None:
            return
        names = ("part", "facts", "keys", "failures", "late", "attempted", "done")
        data = {name: getattr(self, name) for name in names} | {"tables": [asdict(table) for table in self.tables]}
        data["attempted"] = max(self.first, self.attempted)  # also where it dies before its first
        write_whole(self.path, json.dumps(data, default=float))


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one move, so that nobody reads half of it."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(text)
    os.replace(aside, path)


def one_line(error: BaseException | str) -> str:
    """An error's kind and first line."""
    if isinstance(error, str):
        return error
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little memory."""
    import torch

    return isinstance(error, torch.cuda.OutOfMemoryError)


def facts(device: str) -> dict[str, str]:
    """Device and versions; a package that is not there is "missing"."""
    import torch

    found = {name: version(name) for name in PACKAGES}
    found["torch"] = torch.__version__
    if device == "cuda":
        one = torch.cuda.get_device_properties(0)
        found["device"] = f"{one.name}, {one.total_memory / 2**30:.0f} GiB, compute capability {one.major}.{one.minor}"
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
    else:
        found["device"] = "CPU (dry run)"
    return found


def version(name: str) -> str:
    """A package's version, found without importing it."""
    if importlib.util.find_spec(name) is None:
        return "missing"
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "there"


def work(run: Run) -> None:
    """Do a part, with what fails on the way noted."""
    module = run.part if "." in run.part else f"{__package__}.{run.part}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.facts = facts(run.device)
            run.save()
            importlib.import_module(module).measure(run)
        run.done = True
    except ContextLost as error:
        run.fail(run.part, error)
    except Exception as error:
        run.done = True  # to begin again would fail again
        run.fail(run.part, error)
    with contextlib.suppress(OSError):
        run.save()


def main() -> None:
    """One share of one part, in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("NUMBER", "OF"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true")
    chosen = parser.parse_args()
    device = "cpu" if chosen.dry_run else "cuda"
    run = Run(chosen.part, device, chosen.dry_run, chosen.seconds, *chosen.share, chosen.first, chosen.json)
    # Asked to end, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    work(run)


if __name__ == "__main__":
    main()
