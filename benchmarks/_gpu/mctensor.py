"""MCTensor's operators on the device: their error against float64 or the CPU's own digits, and their time."""

from __future__ import annotations

from . import _timers
from ._run import Run

SIDE, TINY_SIDE = 1024, 16
KINDS = ("bfloat16", "float16", "float32", "float64")
OPERATORS = ("add", "mul", "div", "sqrt", "exp", "log", "sum", "softmax", "matmul", "layer_norm")
# Half an ulp of the last of two components, which lie no gap apart.
UNIT = {"bfloat16": 2.0**-16, "float16": 2.0**-21, "float32": 2.0**-47, "float64": 2.0**-104}
MANY = 2.0**14  # units: with so many an operator has lost the second component
COLUMNS = {
    "operator": "", "components": "", "error": ".1e", "error in units of two components": ".2g", "x torch": ".1f",
    "us": ".0f", "against": "", "failed": "",
}  # fmt: skip


def functions() -> dict:
    """Name -> function of two operands, which may be plain."""
    import torch

    return {
        "add": lambda x, y: x + y,
        "mul": lambda x, y: x * y,
        "div": lambda x, y: x / y,
        "sqrt": lambda x, y: x.sqrt(),
        "exp": lambda x, y: x.exp(),
        "log": lambda x, y: x.log(),
        "sum": lambda x, y: x.sum(-1),
        "softmax": lambda x, y: x.softmax(-1),
        "matmul": lambda x, y: x @ y,
        "layer_norm": lambda x, y: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    }


def operands(run: Run, kind: str):
    """Positive plain operands in float64 on the CPU: exact sums of two components."""
    import torch

    import halfulp as hu

    side = TINY_SIDE if run.tiny else SIDE
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(2):
        x = torch.rand(side, side, dtype=torch.float64, generator=generator) + 0.5
        made.append(hu.MCTensor.encode(x, components=2, dtype=getattr(torch, kind)))
    return made


def measure(run: Run) -> None:
    """Every operator of two components of every dtype."""
    side = TINY_SIDE if run.tiny else SIDE
    note = f"{side} x {side} elements between 0.5 and 1.5. Error: the largest, over the largest magnitude of the exact "
    note += "result, against float64 on the CPU; of two float64 the CPU's own result. x torch: the same operator on "
    note += "plain tensors of the dtype in the same rounds."
    table = run.table("MCTensor operators", COLUMNS, note)
    for kind in KINDS[1::2] if run.tiny else KINDS:
        pair = []
        for name in OPERATORS[:: 4 if run.tiny else 1]:
            cells = {"operator": name, "components": f"two {kind}"}
            run.attempt(
                f"{name}, two {kind}",
                lambda cells=cells, name=name, kind=kind, pair=pair: _row(run, table, cells, name, kind, pair),
                lambda why, cells=cells: run.add(table, **cells, failed=why),
            )


def _row(run: Run, table, cells: dict, name: str, kind: str, pair: list) -> None:
    if not pair:
        pair += operands(run, kind)
    function = functions()[name]
    here = [operand.to(run.device) for operand in pair]
    found = function(*here)
    if kind == "float64":
        error, against = _between(found.to("cpu"), function(*pair)), "the CPU"
    else:
        exact = function(*map(_wide, pair))
        error, against = float((_wide(found.to("cpu")) - exact).abs().max() / exact.abs().max()), "float64"
    plain = [operand.components[0] for operand in here]
    seconds = _timers.interleaved(
        run, {"torch": lambda: function(*plain), "halfulp": lambda: function(*here)}, rounds=5, window=0.01
    )
    run.add(
        table,
        **cells,
        error=error,
        against=against,
        us=1e6 * _timers.median(seconds["halfulp"]),
        **{
            "x torch": _timers.ratio(seconds, "halfulp", "torch"),
            "error in units of two components": error / UNIT[kind],
        },
    )
    if not error <= MANY * UNIT[kind]:
        run.fail(f"{name}, two {kind}", f"error {error:.1e}")


def _wide(value):
    """An MCTensor's value in float64, which two components narrower than that are exact in."""
    import torch

    return value.decode(torch.float64)


def _between(one, other) -> float:
    """The largest difference of two expansions of float64, leading parts first so that little is lost."""
    parts = zip(one.components, other.components)
    difference = sum(mine - theirs for mine, theirs in parts)
    return float(difference.abs().max() / other.components[0].abs().max())
