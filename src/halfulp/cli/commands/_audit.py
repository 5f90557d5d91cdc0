"""halfulp audit: two checkpoints of one run, compared tensor by tensor."""

import math
from typing import Annotated, Any

import typer

from .._out import Out, prepare, write_out
from .._output import Json, make_console, make_plain_table, print_json

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim", "no": "green", None: ""}


def audit(
    a: Annotated[str, typer.Argument(metavar="A", help="The earlier checkpoint: a file or a folder.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The later checkpoint of the same run.")],
    share: Annotated[
        float, typer.Option(help="Mean change in ulps below which a tensor counts as barely moved.")
    ] = 0.01,
    lr: Annotated[float | None, typer.Option(help="Learning rate in place of the one that B holds.")] = None,
    out: Out = None,
    json: Json = False,
) -> int:
    """Compare two checkpoints of one run: what did not move, what rounding lost, what is NaN or of another dtype.

    Reads safetensors, torch.save (weights_only), sharded folders, folders of HF's Trainer and of
    torch.distributed.checkpoint, by memory map; nothing in them is executed. The exit code is 0 if nothing above a
    note was found, 1 if something was, 2 if a checkpoint cannot be read.
    """
    from ...observation import audit as compare_checkpoints

    prepare(out, "audit")
    found = compare_checkpoints(a, b, share=share, lr=lr)
    if json:
        print_json(found.to_dict())
    else:
        _print(found)
    write_out(out, "audit", found)
    return 0 if found.passed else 1


def _print(found: Any) -> None:
    from rich.text import Text

    from ...observation._finding import listing

    shown = make_console()
    for line in listing(found.findings):
        shown.print(Text(line, style=_STYLES.get(line.split(" ", 1)[0], "")))
    shown.print()
    columns = ["tensors", "dtypes", "elements", "unchanged", "median ulps", "verdict"]
    table = make_plain_table(columns, right=columns[2:5], fold=("tensors", "verdict"))
    for group in found.groups():
        low, high = (f"{value:.3g}" if not math.isnan(value) else "–" for value in group.median)
        table.add_row(
            group.pattern,
            group.dtypes,
            f"{group.numel:,}",
            f"{group.share_unchanged:.1%}",
            low if low == high else f"{low}–{high}",
            Text(group.verdict, style=_STYLES[group.severity]),
        )
    shown.print(table)
    for said in found.unseen:
        shown.print(Text(said, style="dim"))
