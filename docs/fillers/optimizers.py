"""Weight updates, optimizer states and their speed."""

import json

from ._places import place
from ._tables import RESULTS, benchmark_table, grid, measured


def _plots(name: str) -> dict | None:
    path = RESULTS / "plots.json"
    return json.loads(path.read_text()).get(name) if path.exists() else None


@place
def theorem1() -> str:
    """Distances by learning rate."""
    found = _plots("theorem1")
    if found is None:
        return ""
    columns = [*found["distances"], "floor of theorem 1"]
    values = [*found["distances"].values(), found["floor"]]
    rows = [[f"{rate:g}", *(f"{v[i]:.3g}" for v in values)] for i, rate in enumerate(found["rates"])]
    return grid(["learning rate x L", *columns], rows)


@place
def drift() -> str:
    """What is kept of a constant update, with its deviation."""
    found = _plots("drift")
    if found is None:
        return ""
    shown = [e for e in (-8, -11, -14, -16, -18, -21) if e in found["exponents"]]
    rows = []
    for name, kept in found["kept"].items():
        places = [found["exponents"].index(e) for e in shown]
        rows.append([name, *(f"{kept['mean'][i]:.3f} ({kept['deviation'][i]:.3f})" for i in places)])
    return grid(["weight update", *(f"2^{e}" for e in shown)], rows)


@place
def moment() -> str:
    """The second moment's error at the end, in a sentence."""
    found = _plots("moment")
    if found is None:
        return ""
    last = found["steps"][-1] - found["drop after"]
    ends = "; ".join(f"{name}: {values[-1]:.3f}" for name, values in found["ratios"].items())
    return f"Stored sqrt(v) over the exact one, {last:,} steps after the gradients shrank tenfold. {ends}."


@place
def bytes_table() -> str:
    """Bytes per parameter of AdamW."""
    found = _plots("memory")
    if found is None:
        return ""
    words = {"float32": "float32", "bfloat16": "bfloat16", "8bit": "8-bit"}
    rows = [
        [
            f"`{row['update']}`" if row["update"] != "float32" else "float32 parameters",
            words[row["state"]],
            *(f"{row[part]:g}" for part in ("weight", "companion", "states", "gradient")),
            f"{row['total']:.3f}".rstrip("0").rstrip("."),
        ]
        for row in sorted(found["rows"], key=lambda row: row["total"])
    ]
    return grid(["weight update", "states are", "weight", "companion", "states", "gradient", "total"], rows)


_BY_MEMORY = {
    "split8": "default: 24-bit weights, the last bit stochastic",
    "split": "float32 weights, exactly (bfloat16 only)",
    "kahan": "updates far below a float32's spacing",
    "stochastic": "least memory, some noise",
    "nearest": "what torch.optim does: loses small updates",
}


@place
def by_memory() -> str:
    """What each weight update is for, and its bytes per parameter under AdamW."""
    found = _plots("memory")
    if found is None:
        return ""
    totals = {(row["update"], row["state"]): f"{row['total']:.3f}".rstrip("0").rstrip(".") for row in found["rows"]}
    rows = [
        [f'`"{update}"`', words, totals[update, "bfloat16"], totals[update, "8bit"]]
        for update, words in _BY_MEMORY.items()
    ]
    return grid(["weight update", "what it is for", "bfloat16 states", "8-bit states"], rows)


def _speed(threads: int) -> str:
    title = f"AdamW step, 20.8M parameters, {threads} thread"
    return benchmark_table("adamw", title, ("optimizer", "x torch", "range"))


@place
def speed_one_thread() -> str:
    """AdamW's step on one thread."""
    return _speed(1)


@place
def speed_short() -> str:
    """The rows of AdamW's step that decide, on one thread."""
    shown = ("torch fused", "halfulp stochastic", "halfulp kahan", "halfulp split", "torchao", "heavyball", "optimi")
    left_out = ("halfulp kahan-stochastic", "optimi kahan, foreach", "halfulp stochastic, 8-bit states")

    def kept(row: dict) -> bool:
        return row["optimizer"].startswith(shown) and row["optimizer"] not in left_out

    title = "AdamW step, 20.8M parameters, 1 thread"
    return benchmark_table("adamw", title, ("optimizer", "x torch"), kept)


@place
def quantize_speed() -> str:
    """quantize beside a copy."""
    columns = ("format", "rounding", "dtype", "x copy", "range", "what", "bar")
    return benchmark_table("quantize", "", columns)


@place
def decay() -> str:
    """What is left of the weights after weight decay."""
    return benchmark_table("claims", "Weight decay", ("weight update", "states", "sum(w sign w0) / sum|w0|"))


@place
def small_updates() -> str:
    """How much of small updates each weight update keeps."""
    columns = ("weight update", "bytes", *(f"2^-{k}" for k in ("9", "15", "21", "23.25", "24", "25", "26.6")))
    return benchmark_table("small_updates", "Share of the displacement kept", columns)


@place
def state_displacement() -> str:
    """What 8-bit states keep of the displacement."""
    return benchmark_table("states", "Displacement", ("elements", "size", "halfulp 8-bit", "torchao 8-bit"))


@place
def running_maximum() -> str:
    """AMSGrad's mean steps under narrow states."""
    columns = ("storage", "bytes", "alike", "small", "taken")
    return benchmark_table("running_maximum", "Mean step under AMSGrad", columns)


@place
def state_errors() -> str:
    """What 8-bit states do to one update."""
    shown = ("1e-30", "1e-5", "1e0", "1e30")

    def kept(row: dict) -> bool:
        return row["eps"] == "1e-08" and (row["what"].endswith(shown) or not row["what"].startswith("one"))

    return benchmark_table("claims", "AdamW with 8-bit states", ("what", "8-bit", "float32 states"), kept)


@place
def accuracy_digits() -> str:
    """The few-bit formats, every operator rounded."""
    columns = ("recipe", "bits", "accuracy", "spread", "train loss")
    return benchmark_table("accuracy", "scikit-learn digits", columns)


@place
def mammals() -> str:
    """The embedding of WordNet's mammals."""
    result = measured("mammals")
    return benchmark_table("mammals", "", list(result.tables[0].columns)) if result else ""


@place
def forecast_steps() -> str:
    """Forecast and measured freeze steps, by schedule."""
    columns = ["schedule", "tensors", "within 10%", "of 1,000 elements and more", "median error", "largest error"]
    return benchmark_table("forecast", "Forecast and measured", columns)
