"""What tells a recipe's line from the others: a colour, a marker and a dash pattern, none of them needed alone."""

import dataclasses
from collections.abc import Sequence

from ..running._plan import REFERENCE, TWIN

# The style sheet of the page has --c0 to --c7: the reference, its twin, and six that stay apart, by at least 16 units
# of CAM02-UCS, under each kind of colour blindness.
COLOURS = 8
_OWN = 6


@dataclasses.dataclass(frozen=True)
class Marker:
    """A shape on a line: what matplotlib calls it, and its outline in a box of 12 by 12 for the page's key."""

    name: str
    path: str


_MARKERS = (
    Marker("o", "M6 2a4 4 0 1 0 .01 0z"),
    Marker("s", "M2.5 2.5h7v7h-7z"),
    Marker("^", "M6 1.5 10.5 10h-9z"),
    Marker("D", "M6 1 11 6 6 11 1 6z"),
    Marker("v", "M6 10.5 10.5 2h-9z"),
    Marker("P", "M4.3 1.5h3.4v2.8h2.8v3.4H7.7v2.8H4.3V7.7H1.5V4.3h2.8z"),
)
# In units of the line's width, as both matplotlib and SVG take them; None is solid.
_DASHES = (None, (5.0, 2.0), (1.0, 1.5), (6.0, 1.5, 1.0, 1.5))


@dataclasses.dataclass(frozen=True)
class LineStyle:
    """How the line of one recipe is drawn.

    Attributes:
        colour: of --c0 to --c7.
        marker: None for the reference and its twin, which are told by width and dashes.
        dash: lengths of dashes and gaps, None for a solid line.
    """

    colour: int
    marker: Marker | None = None
    dash: tuple[float, ...] | None = None


def line_styles(recipes: Sequence[str]) -> dict[str, LineStyle]:
    """The style of each recipe of a comparison, the same in curves, key and table.

    Twenty-four differ beside the reference and its twin; then they come again.

    >>> styles = line_styles(["fp32", "bf16", *(f"recipe-{k}" for k in range(23))])
    >>> styles["fp32"].colour, styles["bf16"].marker.name, len(set(styles.values()))
    (0, 'o', 25)
    >>> styles["bf16"].marker == styles["recipe-5"].marker, styles["bf16"].dash, styles["recipe-5"].dash
    (True, None, (5.0, 2.0))
    """
    controls = {REFERENCE: LineStyle(0), TWIN: LineStyle(1, dash=_DASHES[1])}
    styles: dict[str, LineStyle] = {}
    for recipe in recipes:
        turn, place = divmod(sum(other not in controls for other in styles), _OWN)
        own = LineStyle(2 + place, _MARKERS[place], _DASHES[turn % len(_DASHES)])
        styles[recipe] = controls.get(recipe, own)
    return styles
