"""Templates made into pages: every page extends base.html.j2 and refers to nothing outside itself."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

NEEDED = ("jinja2",)


def require(*modules: str, instead: str = "write no page") -> None:
    """Check, before any work, that what a page is made with is installed.

    Args:
        modules: what it needs beside jinja2.
        instead: what to do without it, as the message says.

    Raises:
        ValueError: a module is missing.
    """
    for name in (*NEEDED, *modules):
        try:
            importlib.import_module(name)
        except ImportError:
            raise ValueError(f"the page needs {name}: pip install 'halfulp[cli]', or {instead}") from None


def render(package: str, template: str, **values: Any) -> str:
    """Return a page as text; every value is escaped unless the template says otherwise.

    Args:
        package: the package whose folder holds the template.
        template: its file name; it extends "base.html.j2".
        values: what the template names. It may also call ``source(name)`` for a style sheet or script, of its own
            folder or of the base, and ``embedded(data)`` for plain data as JSON inside a script element.

    Raises:
        ValueError: jinja2 is missing.
    """
    require()
    import jinja2
    from markupsafe import Markup

    def text(name: str) -> str:
        own = importlib.resources.files(package).joinpath(name)
        return (own if own.is_file() else importlib.resources.files(__package__).joinpath(name)).read_text("utf-8")

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(text), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {
        "source": lambda name: Markup(text(name).rstrip("\n")),
        "embedded": lambda data: Markup(embedded(data)),
    }
    return environment.get_template(template).render(**values)


def embedded(data: Any) -> str:
    """Return plain data as JSON that can stand inside a script element: no text in it ends the element.

    >>> embedded({"name": "</script>", "share": 0.5})
    '{"name":"\\\\u003c/script\\\\u003e","share":0.5}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
