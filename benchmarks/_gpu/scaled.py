"""Scaled tensors on the 12-layer GPT beside plain ones: time and loss, eager and compiled, eight-bit products too."""

from __future__ import annotations

import statistics

from . import _gpt, _timers
from ._engines import no_silent_fallback
from ._run import Run, Unavailable

STEPS, TINY_STEPS = 8, 2
RATE = 1e-4
# Weights of the second and third start differ from the first one's by this share: what eight steps do by chance.
MOVED, STARTS = 1e-3, 3
SLOW = 75  # seconds that a graph for each of the blocks may take
COLUMNS = {
    "model": "", "mode": "", "first call s": ".1f", "forward and backward ms": ".1f", "x plain bfloat16": ".2f",
    "loss": ".4f", "range": ".4f", "difference from float32": "+.4f", "fallbacks": "", "failed": "",
}  # fmt: skip
MODELS = ("plain float32", "plain bfloat16", "scaled bfloat16", "scaled float16", "scaled float16, fp8 products")


def converted(name: str, model):
    """A float32 model as a row's name says."""
    import torch

    import halfulp as hu

    if name.startswith("plain"):
        return model.to(getattr(torch, name.split()[1]))
    if name.endswith("fp8 products"):
        return hu.scalify(model, torch.float16, matmul="fp8")
    return hu.scalify(model, getattr(torch, name.split()[1]))


def optimizer_of(name: str, model):
    """AdamW whose bfloat16 and float16 weights keep what rounding would lose."""
    import torch

    import halfulp as hu

    if name == "plain float32":
        return torch.optim.AdamW(model.parameters(), lr=RATE)
    return hu.optim.AdamW(model.parameters(), lr=RATE, weight_update="kahan", report_interval=0)


def start(run: Run, model, seed: int):
    """Give a converted model the weights of a start: the first one's are those it was made with."""
    import torch

    fresh, batch = _gpt.model_and_batch(run)
    generator = torch.Generator(device=run.device).manual_seed(seed)
    with torch.no_grad():
        for own, weight in zip(model.parameters(), fresh.parameters(), strict=True):
            noise = torch.randn(weight.shape, generator=generator, device=run.device)
            own.copy_(weight * (1 + MOVED * noise) if seed else weight)
    return batch


def loss_after(run: Run, name: str, model, steps: int, seed: int) -> float:
    """Train from a start, and return the loss after so many steps on one batch."""
    batch = start(run, model, seed)
    optimizer = optimizer_of(name, model)
    model.zero_grad()
    for _ in range(steps):
        _gpt.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(_gpt.loss_of(model, batch).detach())


def compile_blocks(run: Run, model) -> None:
    """Compile each block of the model; the first one's graph serves all, but where layers have eight-bit products.

    Those have a forward of their own each, so that every block has a graph: more than torch allows by default.
    """
    import torch._dynamo.config

    for name in ("recompile_limit", "cache_size_limit"):  # of newer and of older versions
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 64)
    for block in model.blocks:
        block.compile(backend="inductor" if run.on_gpu else "eager", fullgraph=True)


def measure(run: Run) -> None:
    """Every model, eager and compiled."""
    steps = TINY_STEPS if run.tiny else STEPS
    note = f"{_gpt.describe(run)}; compiled: each block, one graph. The loss is the mean after {steps} steps on one "
    note += f"batch from {STARTS} starts, whose weights differ by {MOVED:.0e} of themselves, with AdamW, Kahan weights "
    note += "but for float32; the range is over the starts. Times are of passes without the optimizer."
    table = run.table("Scaled tensors on a GPT", COLUMNS, note)
    found: dict[str, dict] = {}
    chosen = [(name, "eager") for name in MODELS] + [(name, "compiled") for name in MODELS[1:]]
    if run.tiny:
        chosen = [(name, "eager") for name in MODELS] + [("scaled float16", "compiled")]
    for name, mode in chosen:
        cells = {"model": name, "mode": mode}
        run.attempt(
            f"{name}, {mode}",
            lambda cells=cells: _row(run, table, cells, steps, found),
            lambda why, cells=cells: run.add(table, **cells, failed=why),
        )


def _row(run: Run, table, cells: dict, steps: int, found: dict[str, dict]) -> None:
    import torch

    import halfulp as hu
    from halfulp.scaled import eight_bit_engine

    name = cells["model"]
    if name.endswith("fp8 products") and run.on_gpu and eight_bit_engine("cuda") == "emulated":
        raise Unavailable("the device has no eight-bit products")
    graphs = _gpt.sizes(run)[0]["layers"]
    if name.endswith("fp8 products") and cells["mode"] == "compiled" and run.on_gpu and run.left() < SLOW:
        raise Unavailable(f"{run.left():.0f} s are too few for {graphs} graphs")
    torch.compiler.reset()
    model, batch = _gpt.model_and_batch(run)
    model = converted(name, model)
    if cells["mode"] == "compiled":
        compile_blocks(run, model)
    with no_silent_fallback(scaled=name.startswith("scaled")):

        def passes() -> None:
            model.zero_grad()  # as a training loop does: gradients that add up are another matter
            _gpt.loss_of(model, batch).backward()

        cells["first call s"] = _timers.seconds_of(run, passes)
        losses = [loss_after(run, name, model, steps, seed) for seed in range(1 if run.tiny else STARTS)]
        cells["loss"], cells["range"] = statistics.fmean(losses), max(losses) - min(losses)
        seconds = min(_timers.seconds_of(run, passes) for _ in range(1 if run.tiny else 5))
    cells["forward and backward ms"] = 1e3 * seconds
    if name.startswith("scaled"):
        counted = hu.fallbacks(model)
        cells["fallbacks"] = ", ".join(f"{key} {count}" for key, count in counted.items()) or "none"
    found[f"{name}, {cells['mode']}"] = cells
    if plain := found.get(f"plain bfloat16, {cells['mode']}"):
        cells["x plain bfloat16"] = seconds * 1e3 / plain["forward and backward ms"]
    if wide := found.get("plain float32, eager"):
        cells["difference from float32"] = cells["loss"] - wide["loss"]
    run.add(table, **cells)
    if cells["loss"] != cells["loss"]:
        run.fail(f"{name}, {cells['mode']}", "the loss is NaN")
