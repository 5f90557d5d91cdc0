"""Peak memory of a training step of a 12-layer GPT: float32, autocast, and bfloat16 with each weight update."""

from __future__ import annotations

import contextlib

from . import _gpt, _timers
from ._engines import no_silent_fallback
from ._run import Run

COLUMNS = {
    "training": "", "peak GB": ".2f", "peak of a first step GB": ".2f", "between steps GB": ".2f",
    "x float32": ".2f", "loss": ".3f", "failed": "",
}  # fmt: skip


def trainings() -> dict[str, tuple]:
    """Name -> (dtype of parameters, autocast, optimizer: "torch", or options of halfulp's)."""
    import torch

    from halfulp.optim.weight_updates._weight_update import WEIGHT_UPDATE_BY_NAME

    wide, narrow = torch.float32, torch.bfloat16
    rows = {
        "float32, torch AdamW": (wide, False, "torch"),
        "autocast, torch AdamW": (wide, True, "torch"),
        "bfloat16, torch AdamW": (narrow, False, "torch"),
        "float32, halfulp": (wide, False, {}),
    }
    states = {"state_dtype": torch.bfloat16}
    updates = [name for name in WEIGHT_UPDATE_BY_NAME if name != "exact"]
    rows |= {f"bfloat16, {name}": (narrow, False, {"weight_update": name, **states}) for name in updates}
    rows["bfloat16, split8, 8-bit states"] = (narrow, False, {"weight_update": "split8", "state_dtype": "8bit"})
    rows["bfloat16, stochastic, 8-bit states"] = (narrow, False, {"weight_update": "stochastic", "state_dtype": "8bit"})
    return rows


def optimizer_of(parameters, chosen):
    """The optimizer of a row."""
    import torch

    import halfulp as hu

    settings = {"lr": 1e-4, "weight_decay": 0.1}
    if chosen == "torch":
        return torch.optim.AdamW(parameters, fused=True, **settings)
    return hu.optim.AdamW(parameters, report_interval=0, **settings, **chosen)


class Training:
    """A model, its batch and its optimizer."""

    def __init__(self, run: Run, dtype, autocast: bool, chosen) -> None:
        self._run, self._autocast = run, autocast
        self._model, self._batch = _gpt.model_and_batch(run)
        self._model.to(dtype)
        self._optimizer = optimizer_of(list(self._model.parameters()), chosen)

    def step(self) -> None:
        """Forward, backward and the optimizer's step; gradients are freed, as `zero_grad` does."""
        import torch

        inside = torch.autocast(self._run.device, torch.bfloat16) if self._autocast else contextlib.nullcontext()
        with inside:
            loss = _gpt.loss_of(self._model, self._batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.last = loss.detach()


def measure(run: Run) -> None:
    """Each training in turn, the one before it freed."""
    what = "a step's forward pass, backward pass and optimizer"
    note = f"{_gpt.describe(run)}. Bytes that tensors hold at most during {what}: of the third step, and of the first, "
    note += "in which states are made." + ("" if run.on_gpu else f" Memory is {_timers.NO_PEAK}.")
    table = run.table("Memory of a training step", COLUMNS, note)
    known = trainings()
    if run.tiny:
        chosen = ("float32, torch AdamW", "autocast, torch AdamW", "bfloat16, kahan")
        known = {name: known[name] for name in chosen}
    wide: list[int] = []
    for name, row in known.items():
        refused = lambda reason, name=name: run.add(table, training=name, failed=reason)  # noqa: E731
        run.attempt(name, lambda name=name, row=row: _row(run, table, name, row, wide), refused)


def _row(run: Run, table, name: str, row: tuple, wide: list[int]) -> None:
    before = _timers.held_bytes(run) or 0
    with no_silent_fallback():
        training = Training(run, *row)
        first = _timers.peak_bytes(run, training.step)
        training.step()
        peak = _timers.peak_bytes(run, training.step)
        held = _timers.held_bytes(run)
    cells = {"training": name, "loss": float(training.last)}
    if peak is None or first is None or held is None:
        cells |= dict.fromkeys(("peak GB", "peak of a first step GB", "between steps GB"), _timers.NO_PEAK)
    else:
        wide.append(peak - before)
        cells |= {"peak GB": (peak - before) / 1e9, "peak of a first step GB": (first - before) / 1e9}
        cells |= {"between steps GB": (held - before) / 1e9, "x float32": (peak - before) / wide[0]}
    run.add(table, **cells)
