"""Draws docs/img/compare-light.svg and compare-dark.svg of docs/results/compare.json: `python docs/readme_picture.py`.

The picture of README.md: by how much the training loss of each recipe exceeds float32's on the same batches, step by
step, the mean over seeds and their range, as `halfulp compare` measured it.
"""

from __future__ import annotations

import io
import re
import statistics
from pathlib import Path

from halfulp.trials import Evidence
from halfulp.trials.evidence._evidence import read_loss_curves

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "results" / "compare.json"
TASK, WINDOW = "text", 5
WORDS = {
    "bf16": "to nearest",
    "bf16-kahan": "kahan",
    "bf16-stochastic": "stochastic",
    "bf16-split8": "split8 (default)",
}
THEMES = {
    "light": {"ink": "#1f2328", "faint": "#d1d9e0", "lines": ("#c0392b", "#8250df", "#b35900", "#0969da")},
    "dark": {"ink": "#e6edf3", "faint": "#3d444d", "lines": ("#ff7b72", "#c297ff", "#f0a04b", "#58a6ff")},
}


def gaps(evidence: Evidence) -> dict[str, dict[int, list[float]]]:
    """Per recipe and step, the difference of each seed's loss to float32's, averaged over neighbouring windows."""
    curves = read_loss_curves(evidence, TASK)
    found: dict[str, dict[int, list[float]]] = {}
    for recipe in WORDS:
        seeds = curves[recipe]
        steps = sorted(next(iter(seeds.values())))
        raw = {step: [seeds[seed][step] - curves["fp32"][seed][step] for seed in seeds] for step in steps}
        found[recipe] = {
            steps[place]: [
                statistics.fmean(values)
                for values in zip(*(raw[step] for step in steps[place - WINDOW + 1 : place + 1]))
            ]
            for place in range(WINDOW - 1, len(steps))
        }
    return found


def draw(found: dict[str, dict[int, list[float]]], theme: str) -> str:
    """The picture as SVG in the colours of a theme."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    colours = THEMES[theme]
    settings = {"svg.fonttype": "none", "svg.hashsalt": "halfulp", "font.size": 12, "font.family": "sans-serif"}
    with rc_context(settings):
        figure = Figure(figsize=(7.6, 3.1), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        axes.axhline(0, color=colours["ink"], linewidth=1)
        ends = {}
        for (recipe, points), colour in zip(found.items(), colours["lines"]):
            means = {step: statistics.fmean(values) for step, values in points.items()}
            axes.plot(list(means), list(means.values()), color=colour, linewidth=2)
            low, high = [min(values) for values in points.values()], [max(values) for values in points.values()]
            axes.fill_between(list(points), low, high, color=colour, alpha=0.18, linewidth=0)
            ends[recipe] = (max(means), means[max(means)], colour)
        apart, last = 0.0056, -1.0
        for recipe, (step, value, colour) in sorted(ends.items(), key=lambda end: end[1][1]):
            last = max(value, last + apart)
            axes.annotate(
                WORDS[recipe],
                (step, last),
                (8, 0),
                textcoords="offset points",
                color=colour,
                va="center",
                annotation_clip=False,
            )
        axes.set_title("training loss of bfloat16 above float32's, nats", loc="left", fontsize=12, color=colours["ink"])
        axes.set_xlabel("step of a character-level GPT", color=colours["ink"])
        axes.grid(axis="y", color=colours["faint"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=colours["ink"], length=0)
        axes.margins(x=0)
        axes.set_ylim(bottom=-0.004)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(colours["faint"])
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", target.getvalue(), flags=re.DOTALL)
    return re.sub(r"font: ([^;\"]*?)px [^;\"]*", r"font: \1px system-ui, sans-serif", text)


def main() -> None:
    """Draw the picture in light and dark."""
    found = gaps(Evidence.from_json(SOURCE.read_text(encoding="utf-8")))
    for theme in THEMES:
        (HERE / "img" / f"compare-{theme}.svg").write_text(draw(found, theme), encoding="utf-8")


if __name__ == "__main__":
    main()
