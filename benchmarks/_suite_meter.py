"""A plugin of pytest that notes what every test and file costs its process: `pytest -p benchmarks._suite_meter`.

HALFULP_SUITE_METER names a folder; each process that runs tests writes a file there, a JSON object a line.
"""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

FOLDER = "HALFULP_SUITE_METER"
TICKS = os.sysconf("SC_CLK_TCK")


def children(process: int | str) -> list[int]:
    """The processes that one started and that still run."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def resident(process: int | str, line: str = "VmHWM") -> int:
    """Bytes that a process has resident, at most ("VmHWM") or now ("VmRSS"); 0 where it is gone."""
    with suppress(OSError):
        for text in Path(f"/proc/{process}/status").read_text().splitlines():
            if text.startswith(f"{line}:"):
                return 1024 * int(text.split()[1])
    return 0


def cpu_seconds() -> float:
    """User and system time of this process, of those that it waited for, and of those that still run."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = 0
    for child in children("self"):
        with suppress(OSError):
            # After the name in parentheses: utime, stime, cutime and cstime are the fields 14 to 17 of proc(5).
            ticks += sum(map(int, Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + ticks / TICKS


class Meter:
    """Writes a line per test and a line per file, in the order in which this process ran them."""

    def __init__(self, folder: str) -> None:
        self.output = (Path(folder) / f"{os.getpid()}.jsonl").open("w")
        self.file_begin = self.test_begin = cpu_seconds()
        self.write(collected=self.test_begin, now=resident("self", "VmRSS"), peak=resident("self"))

    def write(self, **fields: Any) -> None:
        """One line."""
        print(json.dumps(fields), file=self.output, flush=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """What one test takes, and after a file's last one what the file takes; its peak begins anew with each."""
        try:
            return (yield)
        finally:
            now = cpu_seconds()
            self.write(test=item.nodeid, cpu=now - self.test_begin)
            if nextitem is None or nextitem.path != item.path:
                file = item.path.relative_to(item.config.rootpath).as_posix()
                peak = resident("self")
                self.write(file=file, cpu=now - self.file_begin, now=resident("self", "VmRSS"), peak=peak)
                with suppress(OSError):
                    Path("/proc/self/clear_refs").write_text("5")
                self.file_begin = now
            self.test_begin = now


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins where collecting ends, in processes that run tests: the controller of workers runs none."""
    controls = getattr(session.config.option, "dist", "no") != "no" and not hasattr(session.config, "workerinput")
    if (folder := os.environ.get(FOLDER)) and not controls:
        session.config.pluginmanager.register(Meter(folder), "halfulp_suite_meter")
