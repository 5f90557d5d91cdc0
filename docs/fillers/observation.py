"""Findings: the codes by what they are about, and how reliably they are found."""

import sys

from ._places import place
from ._tables import benchmark_rows, benchmark_table, grid, whole_table

INSTRUMENTS = {"observe": "`hu.observe`", "audit": "`hu.audit`", "forecast": "`hu.forecast`"}


@place
def findings_index() -> str:
    """All codes, by the files of the source, with what they say and what shows them."""
    from halfulp.observation.findings import FINDING_KINDS

    rooms: dict[str, list[list[str]]] = {}
    for code, kind in sorted(FINDING_KINDS.items()):
        if not kind.__module__.startswith("halfulp."):
            continue  # a user's
        about = (sys.modules[kind.__module__].__doc__ or "").removeprefix("Findings about ").partition(":")[0]
        shown = ", ".join(INSTRUMENTS[name] for name in kind.list_instruments())
        rooms.setdefault(about[:1].upper() + about[1:], []).append(
            [f"[{code}](findings/{code}.md)", kind.__doc__ or "", shown]
        )
    tables = (f"### {title.rstrip('.')}\n\n" + _grid(rows) for title, rows in sorted(rooms.items()))
    return "\n\n".join(tables)


def _grid(rows: list[list[str]]) -> str:
    return grid(["code", "what it says", "shown by"], rows)


@place
def findings_measured() -> str:
    """How often a fault in one layer comes first, by code."""
    return benchmark_table("findings", "Faults in one layer", ["code", "planted", "first, with layer and cure"])


@place
def tuned() -> str:
    """What `hu.tune` found on two tasks."""
    return whole_table("tune", "The cheapest recipe")


@place
def findings_cured() -> str:
    """How many of the faults with cures are found first, how many healthy twins are silent, what cures mend."""
    found = {row["what"]: row["found"] for row in benchmark_rows("plants", "Bars")}
    rows = benchmark_rows("plants", "Twenty-eight faults")
    if not rows:
        return ""
    first, silent, gone, mended = found.values()
    worst = max(row["cured"] / row["faulty"] for row in rows)
    return (
        f"Of faults of {len({row['code'] for row in rows})} codes in one layer of a residual network, {first} come "
        f"first, with the layer and the cure; {silent} of the same trainings without the fault show nothing above a "
        f"note. With the cure applied {gone} are not found any more, and {mended} lose more than half of their harm, "
        f"{1 - worst:.0%} at least: of the movement, the gradient or the output that float32 has."
    )


@place
def findings_healthy() -> str:
    """How many healthy runs are silent."""
    rows = benchmark_rows("findings", "Healthy runs")
    if not rows:
        return ""
    models, loud = len({row["model"] for row in rows}), sum(row["above a note"] != "nothing" for row in rows)
    return f"Of {len(rows)} healthy runs of {models} models, float32 and mixed precision, {loud} show more than a note."
