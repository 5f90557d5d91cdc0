"""AdamW steps against torch's fused and foreach steps in the same rounds, and their share of copy bandwidth."""

from __future__ import annotations

from .._workload import OURS, SETTINGS, SHAPES
from . import _timers
from ._engines import engine_note, engine_of, no_silent_fallback
from ._run import Run, Unavailable

LARGE = [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)] * 20
MANY = [(20_000,)] * 1000
SIZES = {"20.8M": SHAPES, "20M in 1,000 tensors": MANY, "1.0B": LARGE}
DRY = {"1,300 in 6 tensors": [(8, 64), (8, 64), (4, 64), (64,), (5,), (1,)]}
FUSED, FOREACH, NARROW = "torch fused float32", "torch foreach float32", "torch fused bf16 (nearest)"
# Of a billion parameters only these, as each is made anew.
OF_LARGE = ("halfulp stochastic", "halfulp kahan", "halfulp split8, 8-bit states", "halfulp master", "halfulp float32")
# The most that two float32 optimizers of torch's and one of ours hold while they take turns, in bytes a parameter.
HELD = 52
COLUMNS = {
    "parameters": "", "optimizer": "", "x fused": ".2f", "low": ".2f", "high": ".2f", "x foreach": ".2f",
    "ms": ".3f", "bytes a parameter": ".1f", "of copy bandwidth": ".0%", "failed": "",
}  # fmt: skip


def parameters(shapes, dtype, device: str) -> list:
    """Parameters with gradients, made on the device."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    made = []
    for shape in shapes:
        weight = torch.empty(shape, device=device).normal_(0, 0.02, generator=generator).to(dtype)
        weight = torch.nn.Parameter(weight)
        weight.grad = torch.empty(shape, device=device).normal_(0, 1e-3, generator=generator).to(dtype)
        made.append(weight)
    return made


def ours(name: str, shapes, device: str):
    """One of halfulp's optimizers."""
    import torch

    import halfulp as hu

    update, state = OURS[name]
    params = parameters(shapes, torch.float32 if update is None else torch.bfloat16, device)
    if update is None:
        return hu.optim.AdamW(params, report_interval=0, **SETTINGS)
    states = torch.bfloat16 if state == "bf16" else state
    return hu.optim.AdamW(params, weight_update=update, state_dtype=states, report_interval=0, **SETTINGS)


def moved(optimizer) -> int:
    """Bytes that a step must move: parameters and their states in and out, gradients in."""
    import torch

    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
            held = [tensor for tensor in (parameter, *state) if tensor.numel() > 1 or parameter.numel() == 1]
            total += 2 * sum(tensor.numel() * tensor.element_size() for tensor in held)
            total += parameter.grad.numel() * parameter.grad.element_size()
    return total


def moves(optimizer) -> None:
    """Raises RuntimeError when a step leaves the largest parameter as it was: nothing idle is timed."""
    weight = max(optimizer.param_groups[0]["params"], key=lambda parameter: parameter.numel())
    before = weight.detach().clone()
    for _ in range(3):
        optimizer.step()
    if bool((weight.detach() == before).all()):
        raise RuntimeError("a step moved nothing")


class Size:
    """torch's two float32 optimizers over the parameters of one size, which every row is measured beside."""

    def __init__(self, run: Run, table, name: str, shapes, bandwidth: float) -> None:
        import torch

        self.run, self.table, self.name, self.shapes, self.bandwidth = run, table, name, shapes, bandwidth
        count = sum(torch.Size(shape).numel() for shape in shapes)
        if (free := _timers.free_bytes(run)) < HELD * count:
            raise Unavailable(f"needs {HELD * count / 1e9:.0f} GB of the device, which has {free / 1e9:.0f} GB free")
        self.count = count
        shared = parameters(shapes, torch.float32, run.device)
        self.fused = torch.optim.AdamW(shared, fused=True, **SETTINGS)
        self.foreach = torch.optim.AdamW(shared, foreach=True, **SETTINGS)

    def peers(self) -> None:
        """The rows of torch."""
        import torch

        narrow = parameters(self.shapes, torch.bfloat16, self.run.device)
        nearest = torch.optim.AdamW(narrow, fused=True, **SETTINGS)
        found = _timers.interleaved(self.run, self._calls() | {NARROW: nearest.step})
        for name, one in ((FUSED, self.fused), (FOREACH, self.foreach), (NARROW, nearest)):
            self._row(found, name, one)

    def measure(self, name: str) -> None:
        """The row of one of ours."""
        import halfulp as hu

        with hu.kernels.engine(engine_of(self.run)), no_silent_fallback():
            mine = ours(name, self.shapes, self.run.device)
            moves(mine)
            found = _timers.interleaved(self.run, self._calls() | {name: mine.step}, rounds=5)
        self._row(found, name, mine)

    def _calls(self) -> dict:
        return {FUSED: self.fused.step, FOREACH: self.foreach.step}

    def _row(self, found, name: str, optimizer) -> None:
        seconds, bytes_moved = _timers.median(found[name]), moved(optimizer)
        ratios = sorted(mine / other for mine, other in zip(found[name], found[FUSED]))
        self.run.add(
            self.table,
            **{
                "parameters": self.name,
                "optimizer": name,
                "x fused": _timers.ratio(found, name, FUSED),
                "low": ratios[0],
                "high": ratios[-1],
                "x foreach": _timers.ratio(found, name, FOREACH),
                "ms": 1e3 * seconds,
                "bytes a parameter": bytes_moved / self.count,
                "of copy bandwidth": bytes_moved / seconds / self.bandwidth,
            },
        )


def measure(run: Run) -> None:
    """Every size and optimizer."""
    bandwidth = _timers.copy_bandwidth(run)
    note = "Median over rounds in which all take turns, and range. Bytes: parameters, companions and states in and "
    note += f"out, gradients in; the device copies at {bandwidth / 1e9:.0f} GB/s, read and written. {engine_note(run)}"
    table = run.table("AdamW steps", COLUMNS, note)
    for name, shapes in (DRY if run.tiny else SIZES).items():
        _size(run, table, name, shapes, bandwidth)
        run.free(name)


def _size(run: Run, table, name: str, shapes, bandwidth: float) -> None:
    made: list[Size] = []

    def refused(what: str):
        return lambda reason: run.add(table, parameters=name, optimizer=what, failed=reason)

    def rows(what: str, action):
        def go() -> None:
            if not made:
                made.append(Size(run, table, name, shapes, bandwidth))
            action(made[0])

        run.attempt(f"{what}, {name}", go, refused(what))

    rows("torch", lambda size: size.peers())
    chosen = OF_LARGE if name == "1.0B" else ("halfulp split8, 8-bit states",) if run.tiny else tuple(OURS)
    for one in chosen:
        rows(one, lambda size, one=one: size.measure(one))
