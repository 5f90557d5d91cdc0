"""The option --out of commands that have a page to show: a folder for the page and the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..pages import check_writable, require, write_whole
from ._errors import writing

if TYPE_CHECKING:
    from ..observation.page._write import Instrument

Out = Annotated[str | None, typer.Option(help="Folder for the page and the JSON, named after the command.")]


def prepare(out: str | None, name: Instrument | Literal["compare-script"]) -> None:
    """Create the output folder and check, before any work, that a page can be written into it.

    Raises:
        ValueError: jinja2 is missing, the folder cannot be written, or its name is that of a page.
    """
    if out is None:
        return
    if out.endswith((".html", ".json")) and not Path(out).is_dir():
        raise ValueError(f"--out {out} looks like a file: give a folder, and {name}.html and {name}.json stand in it")
    require(instead="leave --out away")
    with writing(out):
        Path(out).mkdir(parents=True, exist_ok=True)
    for path in _name_files(out, name):
        check_writable(path)


def write_out(out: str | None, name: Instrument, found: Any) -> None:
    """Write what an instrument found as NAME.html and NAME.json, each whole or not at all; without a folder nothing.

    Args:
        out: the folder, as `prepare` made it.
        name: of the instrument.
        found: an Observation, an Audit or a Forecast.

    Raises:
        ValueError: a file cannot be written.
    """
    if out is None:
        return
    from ..observation.page import write_page

    page, data = _name_files(out, name)
    content = found.to_dict()
    write_whole(data, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    write_page(name, content, page)


def _name_files(out: str, name: str) -> tuple[Path, Path]:
    return Path(out) / f"{name}.html", Path(out) / f"{name}.json"
