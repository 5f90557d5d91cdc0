"""Averages of weights and exact sums on the device: the time of what is one or two launches, beside torch's own."""

from __future__ import annotations

from . import _timers
from ._engines import engine_note, engine_of, no_silent_fallback
from ._run import Run

# A GPT of 12 layers of width 768.
LAYER = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,), *[(768,)] * 4]
SHAPES = [(50304, 768), (1024, 768), *LAYER * 12, (768,), (768,)]
TINY_SHAPES = [(16, 32), (33,)]
ELEMENTS, TINY = 2**24, 2**10
COLUMNS = {
    "what": "", "peer": "", "elements": ",d", "ms": ".3f", "ms of the peer": ".3f", "x peer": ".2f", "failed": "",
}  # fmt: skip


def measure(run: Run) -> None:
    """Updates of averages of a GPT, then sums over all elements and along rows."""
    note = "torch's averages: AveragedModel of float32 weights by foreach. " + engine_note(run)
    table = run.table("Averages and exact sums", COLUMNS, note)
    rows = {
        "EMA of bfloat16 weights": (lambda: _averages(run, None), "AveragedModel"),
        "EMA of weights that kahan keeps": (lambda: _averages(run, "kahan"), "AveragedModel"),
        "exact sum of float32": (lambda: _sums(run, None), "torch.sum in float64"),
        "exact sums of rows of float32": (lambda: _sums(run, 1), "torch.sum in float64"),
    }
    for what, (make, peer) in rows.items():
        cells = {"what": what, "peer": peer}
        run.attempt(
            what,
            lambda cells=cells, make=make: _row(run, table, cells, make),
            lambda why, cells=cells: run.add(table, **cells, failed=why),
        )


def _row(run: Run, table, cells: dict[str, str], make) -> None:
    import halfulp as hu

    with hu.kernels.engine(engine_of(run)), no_silent_fallback():
        contenders, count = make()
        found = _timers.interleaved(run, contenders, rounds=5)
    seconds = {name: 1e3 * _timers.median(some) for name, some in found.items()}
    ratio = _timers.ratio(found, "ours", "peer")
    run.add(table, **cells, elements=count, ms=seconds["ours"], **{"ms of the peer": seconds["peer"], "x peer": ratio})


def model_of(run: Run, shapes, dtype):
    """A module of parameters of some shapes, with gradients."""
    import torch

    parameters = [torch.nn.Parameter(torch.randn(shape, device=run.device).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return torch.nn.ParameterList(parameters)


def averages_of(run: Run, shapes, update: str | None):
    """Averages of bfloat16 weights, of which an optimizer's weight update keeps more bits."""
    import torch

    import halfulp as hu

    model, optimizer = model_of(run, shapes, torch.bfloat16), None
    if update is not None:
        optimizer = hu.optim.AdamW(model.parameters(), lr=1e-3, weight_update=update, report_interval=0)
        optimizer.step()
    return hu.optim.EMA(model, 0.999, optimizer=optimizer, report_interval=0)


def _averages(run: Run, update: str | None):
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    shapes = TINY_SHAPES if run.tiny else SHAPES
    ours = averages_of(run, shapes, update)
    model = model_of(run, shapes, torch.float32)
    peer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"ours": ours.update, "peer": lambda: peer.update_parameters(model)}, count


def _sums(run: Run, dim: int | None):
    import torch

    import halfulp as hu

    x = torch.randn(TINY if run.tiny else ELEMENTS, device=run.device)
    x = x if dim is None else x.view(-1, 512 if run.tiny else 4096)
    calls = {"ours": lambda: hu.exact_sum(x, dim), "peer": lambda: x.sum(dim, dtype=torch.float64)}
    wanted = torch.sum(x.double().cpu(), dim)
    error = float((hu.exact_sum(x, dim, dtype=torch.float64).cpu() - wanted).abs().max())
    if not error < 1e-6:
        run.fail("exact sum", f"{error} off a sum in float64")
    return calls, x.numel()
