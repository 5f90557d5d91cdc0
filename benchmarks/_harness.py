"""Interleaved timing in one process: contenders against a named peer, with a guard against a busy machine."""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STARVED = 1.1  # a peer that took longer than this times its fastest tenth had to share memory bandwidth or cache
BUSY = 0.9  # process CPU time under this share of threads x wall time means that somebody else had the core
HALF = 0.5  # the same for one thread, whose CPU time leaves out what others took and is what counts


@dataclass
class Contender:
    """Something to time: a call, and how many threads it can keep busy (None: as many as are stated).

    A contender whose code runs on one thread whatever is asked for is judged undisturbed by that one thread.
    """

    name: str
    call: Callable[[], object]
    threads: int | None = None
    calls: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Timing:
    """One contender's figures: the ratio to the peer in the same round, and its own time per call."""

    name: str
    ratio: float
    low: float
    high: float
    milliseconds: float
    rounds: int
    dropped: int

    def to_dict(self) -> dict:
        """Plain data for a JSON file."""
        return dict(self.__dict__)


def calibrate(contender: Contender, window: float) -> None:
    """Warms a contender up and picks the number of calls that fills the window."""
    contender.call()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        contender.call()
        best = min(best, time.perf_counter() - start)
        if best > window:
            break
    contender.calls = max(1, min(10_000, round(window / max(best, 1e-7))))


def clock(contender: Contender, threads: int) -> tuple[float, bool]:
    """Seconds per call over one window, and whether nothing else was on our cores.

    Of one thread the seconds are CPU time: on a virtual machine the host takes milliseconds at any time, which are no
    part of it. Of several threads they are wall time.

    One untimed call goes first: it refills the caches that the previous contender used and lets another
    library's worker threads fall asleep.
    """
    used = min(threads, contender.threads or threads)
    contender.call()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(contender.calls):
        contender.call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if threads == 1:
        return cpu / contender.calls, cpu >= HALF * wall
    return wall / contender.calls, cpu >= BUSY * used * wall


def measure(
    contenders: Sequence[Contender],
    peer: str,
    *,
    threads: int,
    rounds: int = 9,
    window: float = 0.02,
    patience: float = 60.0,
) -> dict[str, Timing]:
    """Times all contenders in turn, round after round, against the one called ``peer``.

    A round of a contender lies between two of the peer, whose mean is its reference, and counts when all three were
    undisturbed: process CPU time at least 0.9 x threads x wall time (half of wall time for one thread, whose time is
    CPU time), and the reference at most 1.1 x what the fastest tenth of the peer's took in this process (a peer starved
    of memory bandwidth would flatter everybody else). Measuring stops when every contender has ``rounds`` such rounds,
    or after ``patience`` seconds; what was dropped is counted, and fewer than 7 rounds raise.

    Args:
        contenders: what to time; one of them is named ``peer``.
        peer: the name that every ratio is taken to.
        threads: the threads that torch and the kernels were told to use.
        rounds: undisturbed rounds wanted.
        window: seconds that one contender runs per round.
        patience: seconds after which the measuring ends with what there is.

    Returns:
        Name -> Timing.

    Raises:
        RuntimeError: fewer than 7 undisturbed rounds within the patience.
    """
    for contender in contenders:
        calibrate(contender, window)
    kept: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in contenders}
    dropped = dict.fromkeys(kept, 0)
    start = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        while min(map(len, fed(kept, peer).values())) < rounds and time.perf_counter() - start < patience:
            one_round(contenders, peer, threads, rounds, kept, dropped)
    finally:
        gc.enable()
    good = fed(kept, peer)
    return {name: summary(name, good[name], dropped[name] + len(kept[name]) - len(good[name])) for name in kept}


def fed(kept: dict[str, list[tuple[float, float]]], peer: str) -> dict[str, list[tuple[float, float]]]:
    """The rounds whose reference was not starved."""
    times = sorted(seconds for seconds, _ in kept[peer])
    best = times[len(times) // 10] if times else 0.0
    return {name: [pair for pair in pairs if pair[1] <= STARVED * best] for name, pairs in kept.items()}


def one_round(contenders, peer, threads, rounds, kept, dropped) -> None:
    """Runs every contender that still lacks rounds between two runs of the peer, the earlier one its reference."""
    base = next(contender for contender in contenders if contender.name == peer)

    def reference() -> tuple[float, bool]:
        seconds, calm = clock(base, threads)
        if calm:
            kept[peer].append((seconds, seconds))
        else:
            dropped[peer] += 1
        return seconds, calm

    seconds, calm = reference()
    enough = {name for name, pairs in fed(kept, peer).items() if len(pairs) >= rounds}
    for contender in contenders:
        if contender is base or contender.name in enough:
            continue
        found, still = clock(contender, threads)
        after, again = reference()
        if still and calm and again:
            kept[contender.name].append((found, (seconds + after) / 2))
        else:
            dropped[contender.name] += 1
        seconds, calm = after, again


def summary(name: str, pairs: list[tuple[float, float]], dropped: int) -> Timing:
    """The medians of one contender's undisturbed rounds."""
    if len(pairs) < 7:
        raise RuntimeError(
            f"{name}: {len(pairs)} undisturbed rounds, {dropped} dropped, at least 7 are needed; "
            "the machine is busy, try again when it is quiet"
        )
    ratios = sorted(seconds / reference for seconds, reference in pairs)
    quarter = len(ratios) // 4
    return Timing(
        name=name,
        ratio=statistics.median(ratios),
        low=ratios[quarter],
        high=ratios[-1 - quarter],
        milliseconds=statistics.median(seconds for seconds, _ in pairs) * 1e3,
        rounds=len(pairs),
        dropped=dropped,
    )


def in_processes(module: str, arguments: Sequence[str], processes: int) -> list[dict]:
    """Runs ``python -m module *arguments --json FILE`` in fresh processes, one after another.

    Args:
        module: such as "benchmarks.bench_adamw"; its command line takes --json and writes one JSON object there.
        arguments: further arguments.
        processes: how many.

    Returns:
        What each wrote; a process that found the machine too busy is tried again up to twice.

    Raises:
        RuntimeError: a process failed three times.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(processes):
            path = Path(folder) / f"{index}.json"
            command = [sys.executable, "-m", module, *arguments, "--json", str(path)]
            for _ in range(3):
                done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
                if done.returncode == 0 and path.exists():
                    break
            else:
                raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
            results.append(json.loads(path.read_text()))
    return results


def over_processes(runs: Sequence[dict[str, dict]], name: str) -> dict:
    """One contender over several processes: the median of the ratios and their range."""
    ratios = sorted(run[name]["ratio"] for run in runs)
    return {
        "ratio": statistics.median(ratios),
        "low": ratios[0],
        "high": ratios[-1],
        "milliseconds": statistics.median(run[name]["milliseconds"] for run in runs),
        "rounds": sum(run[name]["rounds"] for run in runs),
        "dropped": sum(run[name]["dropped"] for run in runs),
    }


def set_threads(threads: int) -> None:
    """Tells torch, and so the kernels, how many threads to use; call before the first operation."""
    import torch

    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
