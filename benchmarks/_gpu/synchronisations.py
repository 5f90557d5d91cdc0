"""Device synchronisations per step: none beyond what torch's own optimizer and scaler make."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from . import _gpt
from ._engines import engine_note, engine_of, no_silent_fallback
from ._run import Run
from .adamw import parameters
from .averages import averages_of

SHAPES = [(512, 256), (256, 512), (512,), (33, 5), (7,)]
TINY_SHAPES = [(32, 16), (33,)]
STEPS = 4
WARNING = "called a synchronizing CUDA operation"
# What asks the host for a number, where there is no device that would count.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")
COLUMNS = {
    "step": "",
    "synchronisations": ".2f",
    "torch's own": ".2f",
    "kernels": ".0f",
    "bar": "",
    "met": "",
    "failed": "",
}


def counted(run: Run, step: Callable[[], object]) -> float:
    """Synchronisations per step, once what is made at first is there."""
    for _ in range(3):
        step()
    return _warned(step) if run.on_gpu else _read(step)


def _warned(step: Callable[[], object]) -> float:
    """How often torch says that it waits for the device; its debug mode sees every way that it has."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(STEPS):
                step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return sum(WARNING in str(one.message) for one in said) / STEPS


def _read(step: Callable[[], object]) -> float:
    """On a CPU: how often a number of a tensor is asked for."""
    return _profiled(step, on_gpu=False)[0]


def _profiled(step: Callable[[], object], on_gpu: bool) -> tuple[float, float]:
    """By torch's profiler: numbers that are read, and kernels that are launched, per step."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=kinds) as seen:
        for _ in range(STEPS):
            step()
    counts = {event.key: event.count for event in seen.key_averages()}
    launches = sum(count for key, count in counts.items() if key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    return sum(counts.get(name, 0) for name in READS) / STEPS, launches / STEPS


def optimizers(run: Run) -> dict[str, Callable[[], object]]:
    """Name -> a maker of an optimizer's step."""
    import torch

    import halfulp as hu
    from halfulp.optim.weight_updates._weight_update import WEIGHT_UPDATE_BY_NAME

    shapes = TINY_SHAPES if run.tiny else SHAPES

    def made(kind, dtype, **options):
        return lambda: kind(parameters(shapes, dtype, run.device), lr=1e-3, **options).step

    narrow, ours = torch.bfloat16, {"report_interval": 0}
    rows = {
        "torch AdamW, fused": made(torch.optim.AdamW, torch.float32, fused=True),
        "torch AdamW, foreach": made(torch.optim.AdamW, torch.float32, foreach=True),
        "AdamW, float32": made(hu.optim.AdamW, torch.float32, **ours),
    }
    for update in [name for name in WEIGHT_UPDATE_BY_NAME if name != "exact"]:
        rows[f"AdamW, {update}"] = made(hu.optim.AdamW, narrow, weight_update=update, state_dtype=narrow, **ours)
    eight = {"weight_update": "split8", "state_dtype": "8bit"}
    rows["AdamW, split8, 8-bit states"] = made(hu.optim.AdamW, narrow, **eight, **ours)
    rows["Lion, stochastic"] = made(hu.optim.Lion, narrow, weight_update="stochastic", **ours)
    rows["SGD with momentum, kahan"] = made(hu.optim.SGD, narrow, weight_update="kahan", momentum=0.9, **ours)
    rows["AdamW, kahan, every step metered"] = made(hu.optim.AdamW, narrow, weight_update="kahan", report_interval=1)
    if run.tiny:
        rows = {name: rows[name] for name in ("torch AdamW, fused", "AdamW, float32", "AdamW, split8, 8-bit states")}
    return rows


def operations(run: Run) -> dict[str, Callable[[], object]]:
    """Name -> a maker of a call that torch's own counterpart waits for nothing in."""
    import torch

    import halfulp as hu

    shapes = TINY_SHAPES if run.tiny else SHAPES

    def summed(kind):
        def make():
            x = torch.randn((2, 3) if run.tiny else (300, 40), device=run.device)
            if kind is None:
                return lambda: (hu.exact_sum(x), hu.exact_sum(x, 0), hu.exact_dot(x, x, 1))
            components = hu.MCTensor.encode(x, components=2, dtype=kind)
            return lambda: (components.sum(), components.mean(0), components + components)

        return make

    rows = {
        "EMA": lambda: averages_of(run, shapes, None).update,
        "EMA of weights that kahan keeps": lambda: averages_of(run, shapes, "kahan").update,
        "exact sums": summed(None),
        "MCTensor: sums of two bfloat16": summed(torch.bfloat16),
        "MCTensor: sums of two float16": summed(torch.float16),
        "MCTensor: sums of two float64": summed(torch.float64),
    }
    return {name: rows[name] for name in list(rows)[:3]} if run.tiny else rows


def trainings(run: Run) -> dict[str, tuple[Callable[[], object], str]]:
    """Name -> a maker of a training step, and the name of the one by torch alone that it stands beside."""
    import torch

    import halfulp as hu

    def scaled(kind):
        def make():
            model, batch = _small(run)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            scaler = kind(model)

            def step() -> None:
                with torch.autocast(run.device, torch.float16):
                    loss = _gpt.loss_of(model, batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

            return step

        return make

    def plain(dtype, convert):
        def make():
            model, batch = _small(run)
            convert(model)
            kind = torch.optim.AdamW if dtype is None else hu.optim.AdamW
            options = {} if dtype is None else {"report_interval": 0, "weight_update": "kahan"}
            optimizer = kind(model.parameters(), lr=1e-3, **options)

            def step() -> None:
                _gpt.loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        return make

    rows = {
        "GradScaler, SGD": (scaled(lambda model: torch.amp.GradScaler(run.device)), ""),
        "AdaptiveGradScaler, SGD": (scaled(hu.AdaptiveGradScaler), "GradScaler, SGD"),
        "plain model, torch AdamW": (plain(None, lambda model: model), ""),
        "bfloat16 model, AdamW, kahan": (plain(torch.bfloat16, lambda model: model.to(torch.bfloat16)),
                                         "plain model, torch AdamW"),
        "scalify to float16, AdamW, kahan": (plain(torch.float16, lambda model: hu.scalify(model)),
                                             "plain model, torch AdamW"),
    }  # fmt: skip
    return {name: rows[name] for name in list(rows)[:2]} if run.tiny else rows


def _small(run: Run):
    """Two layers of the GPT: as many synchronisations per layer as twelve have."""
    import torch

    from halfulp.trials.tasks._text import GPT

    torch.manual_seed(0)
    ids = torch.randint(0, 64, (4, 33)).to(run.device)
    model = GPT(64, width=64, layers=2, heads=2, time=32, fused=True).to(run.device)
    return model, (ids[:, :-1], ids[:, 1:])


def measure(run: Run) -> None:
    """Optimizers and operations by themselves, then steps of trainings beside torch's."""
    how = "torch's debug mode of synchronisations" if run.on_gpu else "numbers read of tensors, on a CPU"
    note = f"Mean of {STEPS} steps after three, by {how}. The metered step reads its counts; by default one in 50 is. "
    table = run.table("Device synchronisations per step", COLUMNS, note + engine_note(run))
    own: dict[str, float] = {}
    for name, make in optimizers(run).items():
        peer = "" if name.startswith("torch") else "torch AdamW, fused"
        _attempt(run, table, name, make, peer, own)
    for name, make in operations(run).items():
        _attempt(run, table, name, make, "torch AdamW, fused", own)
    for name, (make, peer) in trainings(run).items():
        _attempt(run, table, name, make, peer, own)


def _attempt(run: Run, table, name: str, make, peer: str, own: dict[str, float]) -> None:
    run.attempt(
        name, lambda: _row(run, table, name, make, peer, own), lambda why: run.add(table, step=name, failed=why)
    )


def _row(run: Run, table, name: str, make, peer: str, own: dict[str, float]) -> None:
    import halfulp as hu

    with hu.kernels.engine(engine_of(run) if "scalify" not in name else "auto"), no_silent_fallback("scalify" in name):
        step = make()
        own[name] = counted(run, step)
        cells = {"step": name, "synchronisations": own[name]}
        if run.on_gpu:
            try:
                cells["kernels"] = _profiled(step, on_gpu=True)[1]
            except Exception as error:  # a profiler may be refused where all else works
                cells["failed"] = f"no profiler: {type(error).__name__}"
    if peer:
        cells |= {"torch's own": own[peer], "bar": "none beyond torch's own"}
        metered = "metered" in name
        met = own[name] <= own[peer] + metered
        cells |= {"bar": "one, for its counts"} if metered else {}
        cells["met"] = met if run.on_gpu else None
        if run.on_gpu and not met:
            run.fail(name, f"{own[name]:.2f} synchronisations per step, torch's own {own[peer]:.2f}")
    run.add(table, **cells)
