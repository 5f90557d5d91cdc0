"""The loss curves as SVG text whose colours are CSS variables, so that one drawing serves light and dark."""

import dataclasses
import io
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .._defaults import REFERENCE_RECIPE, TWIN_RECIPE

# The style sheet of the page has --c0 to --c7: the reference, its twin, and six that stay apart, by at least 16 units
# of CAM02-UCS, under each kind of colour blindness.
COLOUR_COUNT = 8
_RECIPE_COLOUR_COUNT = 6


# Markers of curves: matplotlib's name of each, and its outline in a box of 12 by 12 for the page's key.
_CURVE_MARKERS = (
    ("o", "M6 2a4 4 0 1 0 .01 0z"),
    ("s", "M2.5 2.5h7v7h-7z"),
    ("^", "M6 1.5 10.5 10h-9z"),
    ("D", "M6 1 11 6 6 11 1 6z"),
    ("v", "M6 10.5 10.5 2h-9z"),
    ("P", "M4.3 1.5h3.4v2.8h2.8v3.4H7.7v2.8H4.3V7.7H1.5V4.3h2.8z"),
)
# In units of the line's width, as both matplotlib and SVG take them; None is solid.
_DASH_PATTERNS = (None, (5.0, 2.0), (1.0, 1.5), (6.0, 1.5, 1.0, 1.5))


@dataclasses.dataclass(frozen=True)
class LineStyle:
    """The colour (--c0 to --c7), marker and dashes of a recipe's curve; the reference and its twin have no marker."""

    colour_index: int
    marker: tuple[str, str] | None = None
    dash: tuple[float, ...] | None = None


def choose_line_styles(recipes: Sequence[str]) -> dict[str, LineStyle]:
    """Return the style of each recipe of a comparison, the same in curves, key and table.

    Twenty-four differ beside the reference and its twin; then they come again.

    >>> styles = choose_line_styles(["fp32", "bf16", *(f"recipe-{k}" for k in range(23))])
    >>> styles["fp32"].colour_index, styles["bf16"].marker[0], len(set(styles.values()))
    (0, 'o', 25)
    >>> styles["bf16"].marker == styles["recipe-5"].marker, styles["bf16"].dash, styles["recipe-5"].dash
    (True, None, (5.0, 2.0))
    """
    controls = {REFERENCE_RECIPE: LineStyle(0), TWIN_RECIPE: LineStyle(1, dash=_DASH_PATTERNS[1])}
    styles: dict[str, LineStyle] = {}
    for recipe in recipes:
        turn, place = divmod(sum(other not in controls for other in styles), _RECIPE_COLOUR_COUNT)
        own = LineStyle(2 + place, _CURVE_MARKERS[place], _DASH_PATTERNS[turn % len(_DASH_PATTERNS)])
        styles[recipe] = controls.get(recipe, own)
    return styles


# recipe -> seed -> step -> mean loss of the window that ends there
LossesByRecipe: TypeAlias = Mapping[str, Mapping[int, Mapping[int, float]]]

# Text stays text, and the same drawing the same bytes.
SVG_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "halfulp",
    "font.size": 9,
    "font.family": "sans-serif",
}
# Stand-ins that matplotlib writes and that become var(--name) afterwards.
_INK_COLOUR, _FAINT_COLOUR = "#010101", "#020202"
_PANEL_TITLES = ("training loss, nats", "difference to fp32 on the same batches, nats", "the close ones, magnified")
_PLACEHOLDER_COLOURS = [f"#0a00{index:02x}" for index in range(COLOUR_COUNT)]


def draw_loss_curves(curves: LossesByRecipe, key: str, width: float, height: float) -> str:
    """Draw the training loss of recipes, beneath it their gaps to fp32, as an SVG.

    Where some recipes stay much closer to fp32 than others, a third panel shows theirs alone, magnified. All are means
    over seeds; the difference is paired, step by step and seed by seed, and shaded from the smallest to the largest
    seed. Recipes are told apart by markers and dashes too. The key tells the drawing from others of a page; sizes are
    in CSS pixels.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(SVG_SETTINGS):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        near = _choose_magnified_recipes(curves)
        panels = figure.subplots(3 if near else 2, 1, sharex=True)
        styles = choose_line_styles(list(curves))
        for index, (recipe, seeds) in enumerate(curves.items()):
            look = _make_plot_options(styles[recipe], index)
            steps = _find_common_steps(list(seeds.values()))
            means = [statistics.fmean(points[step] for points in seeds.values()) for step in steps]
            panels[0].plot(steps, means, **look)
            pairs = _pair_with_reference(curves, recipe)
            if not pairs:
                continue
            steps = _find_common_steps([points for pair in pairs for points in pair])
            gaps = [[ours[step] - theirs[step] for ours, theirs in pairs] for step in steps]
            for axes in panels[1:] if recipe in near else panels[1:2]:
                axes.plot(steps, [statistics.fmean(gap) for gap in gaps], **look)
            if len(pairs) > 1:
                low, high = [min(gap) for gap in gaps], [max(gap) for gap in gaps]
                panels[1].fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
        _style_plot_panels(panels, curves)
        return _replace_svg_colours(render_figure_as_svg(figure), f"{key}-{int(width)}")


def render_figure_as_svg(figure: Any) -> str:
    """Return the bare <svg> element of a figure of matplotlib, without a date, so that it is the same every time."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def _pair_with_reference(curves: LossesByRecipe, recipe: str) -> list[tuple[Mapping[int, float], Mapping[int, float]]]:
    """Return a recipe's points beside float32's of the same seed; none for float32 itself."""
    reference = curves[REFERENCE_RECIPE] if recipe != REFERENCE_RECIPE else {}
    return [(points, reference[seed]) for seed, points in curves[recipe].items() if seed in reference]


def _choose_magnified_recipes(curves: LossesByRecipe) -> list[str]:
    """Return the recipes for a magnified panel, ten times closer to fp32 than the furthest; none if all are close."""
    sizes = {}
    for recipe in curves:
        pairs = _pair_with_reference(curves, recipe)
        gaps = [abs(ours[step] - theirs[step]) for ours, theirs in pairs for step in ours if step in theirs]
        if gaps:
            sizes[recipe] = statistics.fmean(gaps)
    largest = max(sizes.values(), default=0.0)
    near = [recipe for recipe, size in sizes.items() if size < largest / 10]
    return near if any(sizes[recipe] > 0 for recipe in near) else []


def _find_common_steps(curves: Sequence[Mapping[int, float]]) -> list[int]:
    return sorted(set.intersection(*(set(points) for points in curves))) if curves else []


def _make_plot_options(style: LineStyle, index: int) -> dict[str, Any]:
    """Return matplotlib's plot options; markers stand at different places, so that overlapping lines show."""
    if style.colour_index == 0:
        return {"color": _INK_COLOUR, "linewidth": 3.6, "zorder": 2}
    look = {"color": _PLACEHOLDER_COLOURS[style.colour_index], "linewidth": 1.3, "zorder": 4}
    look["linestyle"] = "-" if style.dash is None else (0, style.dash)
    if style.marker is None:
        return {**look, "linewidth": 1.2, "zorder": 3}
    places = (0.03 + 0.021 * (index % 6), 0.13)
    return {**look, "marker": style.marker[0], "markersize": 4.2, "markeredgewidth": 0, "markevery": places}


def _style_plot_panels(panels: Sequence[Any], curves: LossesByRecipe) -> None:
    """Style axes in the page's ink, and cut off the high losses of the first steps."""
    for axes, title in zip(panels, _PANEL_TITLES):
        axes.patch.set_alpha(0)
        axes.grid(axis="y", color=_FAINT_COLOUR, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK_COLOUR, length=0, labelsize=9)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_FAINT_COLOUR)
        axes.margins(x=0.01)
        axes.set_title(title, loc="left", fontsize=10, color=_INK_COLOUR)
    losses = [loss for seeds in curves.values() for points in seeds.values() for loss in list(points.values())[5:]]
    if losses:
        low, high = min(losses), sorted(losses)[int(0.97 * (len(losses) - 1))]
        room = 0.06 * (high - low) or 0.01
        panels[0].set_ylim(low - room, high + room)
    for axes in panels[1:]:
        axes.axhline(0, color=_INK_COLOUR, linewidth=1)
    panels[-1].set_xlabel("step", color=_INK_COLOUR)
    panels[-1].xaxis.get_major_locator().set_params(integer=True)


def _replace_svg_colours(text: str, prefix: str) -> str:
    """Return an <svg> element with ids unique on the page, and colours and fonts left to the style sheet."""
    text = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{prefix}-", text)
    text = text.replace(_INK_COLOUR, "var(--ink)").replace(_FAINT_COLOUR, "var(--faint)")
    for index, colour in enumerate(_PLACEHOLDER_COLOURS):
        text = text.replace(colour, f"var(--c{index})")
    text = re.sub(r"font: ([^;\"]*?)px '[^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font: ([^;\"]*?)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return re.sub(r"\n\s*", "\n", text)
