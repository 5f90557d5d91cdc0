"""halfulp forecast: at which step of a planned training rounding freezes each layer."""

from typing import Annotated

import typer

from .._out import Out, prepare, write_out
from .._output import Json, print_json


def forecast(
    checkpoint: Annotated[
        str, typer.Argument(help="Weights: a file of safetensors or torch.save, a sharded or a DCP folder.")
    ],
    lr: Annotated[float | None, typer.Option(help="Learning rate before the schedule; default: as saved.")] = None,
    schedule: Annotated[str, typer.Option(help="constant, linear, cosine or wsd.")] = "constant",
    steps: Annotated[int | None, typer.Option(help="Steps of the whole run.")] = None,
    warmup: Annotated[int, typer.Option(help="Steps over which the rate rises.")] = 0,
    decay: Annotated[int | None, typer.Option(help="Steps of wsd's fall; default: a fifth.")] = None,
    final_lr: Annotated[float, typer.Option(help="Learning rate at the end.")] = 0.0,
    start: Annotated[int | None, typer.Option(help="Steps made so far; default: as saved, else 0.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, adam, sgd or lion; default: as saved, else adamw.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="What weights are trained in, as bf16; default: as saved.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Default: as saved, else the optimizer's.")] = None,
    beta1: Annotated[float | None, typer.Option(help="Default: as saved, else the optimizer's.")] = None,
    beta2: Annotated[float | None, typer.Option(help="Default: as saved, else the optimizer's.")] = None,
    out: Out = None,
    json: Json = False,
) -> int:
    """Say before a training which layers rounding to nearest will freeze, when, and what would keep them moving.

    The exit code is 0 with nothing above a note, 1 with a finding, 2 on bad input.
    """
    from ...observation import forecast
    from ...observation._finding import worst_severity

    prepare(out, "forecast")
    if (beta1 is None) != (beta2 is None):
        raise ValueError("give --beta1 and --beta2 together")
    found = forecast(
        checkpoint,
        lr,
        schedule,
        steps=steps,
        warmup=warmup,
        decay=decay,
        final_lr=final_lr,
        start=start,
        optimizer=optimizer,
        dtype=dtype,
        weight_decay=weight_decay,
        betas=None if beta1 is None or beta2 is None else (beta1, beta2),
    )
    if json:
        print_json(found.to_dict())
    else:
        print(found)
    write_out(out, "forecast", found)
    return 0 if worst_severity(found.findings) in (None, "note") else 1
