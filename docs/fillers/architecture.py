"""The house: its floors by who imports whom, and its rooms by their own first lines."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from ._places import place
from ._tables import ROOT, grid

SOURCE = ROOT / "src" / "halfulp"


def _imported(file: Path) -> Iterator[str]:
    """The first-level packages of halfulp that a file imports."""
    package = ["halfulp", *file.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *filter(None, (node.module or "").split("."))]
            yield from (".".join([*base, name.name]).split(".")[1] for name in node.names)


@functools.cache
def _packages() -> dict[str, set[str]]:
    """Each package, and the packages that it imports; packages that import less come first."""
    names = {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()}
    found = {
        name: {other for file in (SOURCE / name).rglob("*.py") for other in _imported(file)} & names - {name}
        for name in names
    }
    return {name: found[name] for name in sorted(found, key=lambda name: (len(_below(name, found)), name))}


def _below(name: str, imports: dict[str, set[str]]) -> set[str]:
    """All packages that one stands on, directly or not."""
    return imports[name].union(*(_below(other, imports) for other in imports[name]))


@place
def architecture_floors() -> str:
    """Who imports whom, without the arrows that follow from others."""
    imports = _packages()
    lines = [
        f"    {name} --> {other}"
        for name, others in imports.items()
        for other in sorted(others - set().union(*(_below(between, imports) for between in others)))
    ]
    return "\n".join(["```mermaid", "flowchart TB", *lines, "```"])


def _first_line(folder: Path) -> str:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


@place
def architecture_rooms() -> str:
    """Every folder of the library, in the words of its own first line."""
    rows = []
    for package in _packages():
        folders = [file.parent for file in sorted((SOURCE / package).rglob("__init__.py"))]
        for folder in folders:
            files = len([file for file in folder.glob("*.py") if file.name != "__init__.py"])
            rows.append([f"`{folder.relative_to(SOURCE)}/`", str(files), _first_line(folder)])
    return grid(["folder", "files", "what it holds"], rows)
