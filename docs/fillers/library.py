"""What the library lists by itself: formats, tasks and recipes."""

import ast
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

from ._places import place
from ._tables import grid


@place
def formats() -> str:
    """The catalogue."""
    from halfulp.formats import rows

    lines = []
    for row in rows():
        special = [word for word, has in (("inf", row["infinities"]), ("NaN", row["nan"])) if has]
        numbers = [f"{row[field]:.4g}" for field in ("max", "smallest_normal", "smallest_subnormal", "eps")]
        name = f"`{row['name']}`"
        lines.append([name, str(row["bits"]), *numbers, str(row["binades"]), ", ".join(special) or "none"])
    headers = ["format", "bits", "max", "smallest normal", "smallest", "eps", "powers of two", "specials"]
    return grid([*headers], lines)


@place
def block_formats() -> str:
    """The block formats."""
    from halfulp.formats import block_rows

    fields = ("element", "scale", "block", "scale_rounding", "bits_per_value")
    lines = [[f"`{row['name']}`", *(f"{row[field]}" for field in fields)] for row in block_rows()]
    return grid(["format", "element", "scale", "block", "scale rounded", "bits a value"], lines)


@place
def tasks() -> str:
    """What can be trained."""
    from halfulp.trials.tasks import find_task_class, names
    from halfulp.trials.tasks._registry import has_data_folder_field

    lines = []
    for kind in map(find_task_class, names()):
        hyper = ", ".join(f"{key} {value}" for key, value in kind.hyper.items())
        reads = "`--data`" if has_data_folder_field(kind) else "embedded"
        loss = kind.judged_by.replace("_", " ").replace("train ", "training ")
        lines.append(
            [f"`{kind.name}`", kind.title, f"{kind.rule}, {hyper}", f"{kind.steps:,}", str(kind.batch), loss, reads]
        )
    return grid(["task", "what it is", "optimizer", "steps", "batch", "judged by", "data"], lines)


@place
def recipes() -> str:
    """The named recipes."""
    from halfulp.recipes import get, names

    return grid(["recipe", "what it is"], [[f"`{name}`", get(name).description] for name in names()])


@place
def extensions() -> str:
    """The examples of extension, with their lines of code: without blank lines, comments and docstrings."""
    folder = Path(__file__).resolve().parents[2] / "examples" / "extending"
    lines = []
    for path in sorted(folder.glob("*.py")):
        about = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        lines.append([f"`{path.name}`", about, str(lines_of_code(path.read_text()))])
    return grid(["file", "what it adds", "lines of code"], lines)


def additions() -> dict[str, str]:
    """The cells of docs/additions.py by the kind of thing that they add."""
    text = (Path(__file__).resolve().parents[1] / "additions.py").read_text(encoding="utf-8")
    _, *cells = re.split(r"^# %% (.*)\n", text, flags=re.MULTILINE)
    return {kind: code.strip("\n") for kind, code in zip(cells[::2], cells[1::2])}


def _addition(kind: str) -> Callable[[], str]:
    def addition() -> str:
        return f"```python\n{additions()[kind]}\n```"

    addition.__name__ = f"addition_{kind.replace('-', '_')}"
    return addition


for _kind in additions():
    place(_addition(_kind))


def lines_of_code(source: str) -> int:
    """Count lines that hold code: not blank, no comment, no docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    words = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type in words for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)
