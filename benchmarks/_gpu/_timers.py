"""Seconds, bandwidth and memory of a device; on a CPU its clock, and no memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from ._run import Run

NO_PEAK = "not measured on a CPU"


def synchronize(run: Run) -> None:
    """Wait until the device has done all that it was given."""
    if run.on_gpu:
        import torch

        torch.cuda.synchronize()


def seconds_of(run: Run, call: Callable[[], object], calls: int = 1) -> float:
    """Seconds per call: between two events of the device's stream, which is idle at the first."""
    if not run.on_gpu:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def interleaved(
    run: Run, contenders: Mapping[str, Callable[[], object]], rounds: int = 7, window: float = 0.04
) -> dict[str, list[float]]:
    """Seconds per call of each contender in every round, in which all take turns.

    Each runs for about ``window`` seconds of a round, after one call that is not timed; in a dry run twice. Rounds end
    when the part's time does; there is at least one.
    """
    calls = {}
    for name, call in contenders.items():
        call()  # compiles
        once = min(seconds_of(run, call) for _ in range(2))
        calls[name] = 2 if run.tiny else max(1, min(200, round(window / max(once, 1e-6))))
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(2 if run.tiny else rounds):
        if number and run.left() <= 0:
            break
        for name, call in contenders.items():
            call()
            found[name].append(seconds_of(run, call, calls[name]))
    return found


def ratio(found: Mapping[str, list[float]], name: str, peer: str) -> float:
    """The median over rounds of one contender's time over another's in the same round."""
    return statistics.median(mine / other for mine, other in zip(found[name], found[peer]))


def median(seconds: list[float]) -> float:
    """The median."""
    return statistics.median(seconds)


def copy_bandwidth(run: Run) -> float:
    """Bytes per second, read and written, of the device's fastest copy of a large tensor."""
    import torch

    source = torch.ones(2**16 if run.tiny else 2**30, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(seconds_of(run, lambda: target.copy_(source), 4) for _ in range(5))
    return 2 * source.numel() / best


def peak_bytes(run: Run, call: Callable[[], object]) -> int | None:
    """The most memory that tensors held while a call ran; None on a CPU."""
    if not run.on_gpu:
        call()
        return None
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def held_bytes(run: Run) -> int | None:
    """The memory that tensors hold now; None on a CPU."""
    if not run.on_gpu:
        return None
    import torch

    return torch.cuda.memory_allocated()


def free_bytes(run: Run) -> float:
    """The device's free memory; on a CPU as much as anybody asks for."""
    if not run.on_gpu:
        return float("inf")
    import torch

    return float(torch.cuda.mem_get_info()[0])
