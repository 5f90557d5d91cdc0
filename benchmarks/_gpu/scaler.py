"""AdaptiveGradScaler on the 12-layer GPT under autocast to float16 beside torch's GradScaler, eager and compiled."""

from __future__ import annotations

from . import _gpt, _timers
from ._run import Run

STEPS, TINY_STEPS = 8, 3
KINDS = ("torch GradScaler", "AdaptiveGradScaler")
COLUMNS = {
    "scaler": "", "mode": "", "first step s": ".1f", "step ms": ".1f", "x torch": ".3f", "loss": ".4f",
    "difference from float32": "+.4f", "skipped": "", "sites": "", "failed": "",
}  # fmt: skip


def measure(run: Run) -> None:
    """Both scalers in both modes, and float32 for the loss."""
    steps = TINY_STEPS if run.tiny else STEPS
    note = f"{_gpt.describe(run)}, float32 parameters under autocast to float16, torch's fused AdamW; float32 without "
    note += f"autocast and scaler. The loss is that after {steps} steps on one batch; compiled: the whole model."
    table = run.table("Gradient scalers on a GPT", COLUMNS, note)
    found: dict[str, dict] = {}
    for name, mode in (("none, float32", "eager"), *((kind, mode) for mode in ("eager", "compiled") for kind in KINDS)):
        cells = {"scaler": name, "mode": mode}
        run.attempt(
            f"{name}, {mode}",
            lambda cells=cells: _row(run, table, cells, steps, found),
            lambda why, cells=cells: run.add(table, **cells, failed=why),
        )


class Training:
    """A model under autocast, its scaler and its optimizer."""

    def __init__(self, run: Run, name: str, mode: str) -> None:
        import torch

        import halfulp as hu

        torch.compiler.reset()
        self._run, self._scaler = run, None
        self._model, self._batch = _gpt.model_and_batch(run)
        backend = "inductor" if run.on_gpu else "aot_eager"
        if name == KINDS[0]:
            self._scaler = torch.amp.GradScaler(run.device)
        elif name == KINDS[1]:
            self._scaler = hu.AdaptiveGradScaler(self._model)
            backend = self._scaler.backend(backend)
        self._called = torch.compile(self._model, backend=backend) if mode == "compiled" else self._model
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4, fused=True)
        self._scales: list[float] = []

    def loss(self):
        """The loss of the batch."""
        import torch

        with torch.autocast(self._run.device, torch.float16, enabled=self._scaler is not None):
            return _gpt.loss_of(self._called, self._batch)

    def step(self) -> None:
        """Forward, backward, and the optimizer's step as the scaler allows it."""
        loss = self.loss()
        if self._scaler is None:
            loss.backward()
            self._optimizer.step()
        else:
            self._scaler.scale(loss).backward()
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad()

    def note_scale(self) -> None:
        """Keep the scale after a step; to read it waits for the device, so that no timed step does."""
        if self._scaler is not None:
            self._scales.append(self._scaler.get_scale())

    def skipped(self) -> int:
        """How many steps were skipped, but for the first: after each of them the scale is lower."""
        return sum(later < earlier for earlier, later in zip(self._scales, self._scales[1:]))

    def sites(self) -> int | None:
        """How many exponents there are."""
        return len(self._scaler.sites()) if hasattr(self._scaler, "sites") else None


def _row(run: Run, table, cells: dict, steps: int, found: dict[str, dict]) -> None:
    training = Training(run, cells["scaler"], cells["mode"])
    cells["first step s"] = _timers.seconds_of(run, training.step)
    training.note_scale()
    for _ in range(steps - 1):
        training.step()
        training.note_scale()
    cells["loss"] = float(training.loss().detach())
    seconds = _timers.median([_timers.seconds_of(run, training.step) for _ in range(2 if run.tiny else 9)])
    cells |= {"step ms": 1e3 * seconds, "skipped": training.skipped(), "sites": training.sites()}
    found[f"{cells['scaler']}, {cells['mode']}"] = cells
    if peer := found.get(f"{KINDS[0]}, {cells['mode']}"):
        cells["x torch"] = cells["step ms"] / peer["step ms"]
    if wide := found.get("none, float32, eager"):
        cells["difference from float32"] = cells["loss"] - wide["loss"]
    run.add(table, **cells)
