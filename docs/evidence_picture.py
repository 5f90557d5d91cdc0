"""Draws docs/img/evidence-light.svg and -dark.svg of docs/results/evidence.json: `python docs/evidence_picture.py`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from halfulp.trials import Evidence
from halfulp.trials._defaults import REFERENCE_RECIPE, TONE_BY_VERDICT
from halfulp.trials.evidence._row import FinishedTrials, Row
from halfulp.trials.page._curves import SVG_SETTINGS, render_figure_as_svg

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.papers_suite import COMMON_RECIPES, SUITE_TASKS  # noqa: E402

THEMES = {
    "light": {"ink": "#1f2328", "faint": "#d1d9e0", "bad": "#c4320a", "good": "#067647", "open": "#6b7280"},
    "dark": {"ink": "#e6edf3", "faint": "#3d444d", "bad": "#ff8a65", "good": "#4fd18b", "open": "#9aa4af"},
}
LINEAR, REACH = 1.0, 100.0  # per cent of float32's loss: linear up to, and where the axis ends


def draw_figure(evidence: FinishedTrials, theme: str) -> str:
    """Return an SVG of each recipe's gap to float32 on each task, with its spread over seeds, for light or dark pages.

    The axis is in per cent of float32's loss, linear up to 1%, logarithmic up to 100%; a cross is a divergence.
    """
    colours = THEMES[theme]
    common = [recipe if isinstance(recipe, str) else recipe.name for recipe in COMMON_RECIPES]
    found = dict.fromkeys(record["settings"]["recipe"]["name"] for record in evidence.trials)
    # Those of all tasks come first.
    names = [name for name in dict.fromkeys([*common, *found]) if name in found and name != REFERENCE_RECIPE]
    tasks = [task for task in SUITE_TASKS if task in evidence.tasks()]
    with rc_context(SVG_SETTINGS):
        drawn = Figure(figsize=(1.6 + 1.05 * len(tasks), 0.9 + 0.19 * len(names)), layout="constrained")
        FigureCanvasSVG(drawn)
        drawn.patch.set_alpha(0)
        panels = drawn.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
        for axes, task in zip(panels, tasks):
            draw_task(axes, {row.recipe: row for row in evidence.rows(task)}, names, colours)
            axes.set_title(task.replace("-", "-\n", 1), fontsize=8, color=colours["ink"])
        panels[0].set_yticks(range(len(names)), names, color=colours["ink"], fontsize=8)
        panels[0].invert_yaxis()
        drawn.supxlabel("gap to float32, % of its loss", fontsize=8, color=colours["ink"])
        return render_figure_as_svg(drawn)


def draw_task(axes: Any, rows: dict[str, Row], names: Sequence[str], colours: dict[str, str]) -> None:
    """Draw the gaps of one task's recipes, by place."""
    axes.patch.set_alpha(0)
    axes.set_xscale("symlog", linthresh=LINEAR)
    axes.set_xlim(-REACH, 1.6 * REACH)
    axes.set_xticks([-10, -1, 0, 1, 10, 100], ["−10", "", "0", "", "10", ""])
    axes.tick_params(colors=colours["ink"], length=0, labelsize=7)
    axes.minorticks_off()
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colours["faint"])
    axes.axvline(0, color=colours["ink"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=colours["faint"], linewidth=0.5)
    reference = rows["fp32"].loss
    for place, name in enumerate(names):
        row = rows.get(name)
        if row is None:
            continue
        tone = TONE_BY_VERDICT.get(row.verdict or "", "open")
        if row.diverged or row.gap is None or not reference:
            axes.plot([1.3 * REACH], [place], marker="x", color=colours["bad"], markersize=5)
            continue
        gap, spread = (100 * value / abs(reference) for value in (row.gap, row.gap_spread or 0.0))
        shown = min(max(gap, -REACH), REACH)
        axes.plot(
            [max(gap - spread, -REACH), min(gap + spread, REACH)], [place] * 2, color=colours[tone], linewidth=1.4
        )
        marker = "o" if abs(gap) <= REACH else ">" if gap > 0 else "<"
        axes.plot([shown], [place], marker=marker, color=colours[tone], markersize=4, clip_on=False)


def main() -> None:
    """Draw the figure for light and dark pages."""
    found = Evidence.from_json((HERE / "results" / "evidence.json").read_text(encoding="utf-8"))
    for theme in THEMES:
        (HERE / "img" / f"evidence-{theme}.svg").write_text(draw_figure(found, theme), encoding="utf-8")


if __name__ == "__main__":
    main()
