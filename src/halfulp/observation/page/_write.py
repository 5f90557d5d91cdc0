"""write_page: what an instrument found as one HTML file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from ...pages import write_whole
from ._audit import audit_html
from ._forecast import forecast_html
from ._observation import observation_html

Instrument = Literal["observe", "audit", "forecast"]


def write_page(instrument: Instrument, data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write what an instrument found as one self-contained HTML file, whole or not at all.

    Args:
        data: what its result's `to_dict` gives, also when read back from JSON.
        path: of the file; one that is there is replaced.

    Raises:
        ValueError: jinja2 is missing, or the file cannot be written.
    """
    make = {"observe": observation_html, "audit": audit_html, "forecast": forecast_html}[instrument]
    write_whole(path, make(data))
