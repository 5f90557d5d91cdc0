"""What MkDocs asks while it builds the site: the API reference, pages of files outside of docs/, links to them.

The pages of docs/ are written for whoever reads them in the repository, with links to files beside docs/. Here such a
file becomes a page of its own, so that the site is whole wherever it is opened.
"""

import ast
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "halfulp"
# The packages of the API reference, in the order of the site.
PACKAGES = (
    "optim",
    "rounding",
    "formats",
    "gradients",
    "scaled",
    "scaled.rules",
    "mctensor",
    "arithmetic",
    "emulation",
    "recipes",
    "observation",
    "trials",
    "trials.tasks",
    "testing",
    "hyperbolic",
    "kernels",
    "subclass",
)
TRAINERS = ("transformers", "accelerate", "lightning", "timm", "diffusers", "torchtitan")
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# Tables of hundreds of rows, which would fill the index with figures.
UNSEARCHED = ("source/", "benchmarks/mctensor-operators", "benchmarks/scaled-operators")
DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Shows the examples of docstrings as code, which Markdown would take for quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence each example."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def on_config(config: Any) -> Any:
    """Replace the folders of the navigation by their pages."""
    _expand(config["nav"], Path(config["docs_dir"]))
    return config


def _expand(entries: list[Any], folder: Path) -> None:
    for place in reversed(range(len(entries))):
        entry = entries[place]
        if isinstance(entry, dict):
            for value in entry.values():
                if isinstance(value, list):
                    _expand(value, folder)
        elif entry == "api/":
            entries[place : place + 1] = list(api_pages())
        elif entry.endswith("/"):
            entries[place : place + 1] = [f"{entry}{path.name}" for path in sorted((folder / entry).glob("*.md"))]


def on_files(files: Any, config: Any) -> Any:
    """Add the API reference and a page for each file outside of docs/ that a page links to."""
    made = dict(api_pages())
    for name, page in ROOT_PAGES.items():
        if page != "index.md":
            made[page] = (ROOT / name).read_text(encoding="utf-8")
    texts = {f.src_uri: f.content_string for f in files.documentation_pages()} | made
    for uri, text in texts.items():
        for _, target, _, _ in LINK.findall(FENCE.sub("", text)):
            outside = _outside(uri, target)
            if outside and outside not in ROOT_PAGES:
                made[_source_page(outside)] = _shown(ROOT / outside)
    for uri, text in made.items():
        where = InclusionLevel.NOT_IN_NAV if uri.startswith("source/") else InclusionLevel.INCLUDED
        files.append(File.generated(config, uri, content=text, inclusion=where))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside of docs/ lead to their pages, and take the marks of generated places out."""
    uri = page.file.src_uri
    if uri.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    elif uri.startswith("benchmarks/"):
        page.meta["search"] = {"boost": 0.2}

    def lead(match: re.Match) -> str:
        outside = _outside(uri, match[2])
        if outside is None:
            return match[0]
        if outside.startswith("docs/"):  # of a page from the root
            target = outside.removeprefix("docs/")
        else:
            target = ROOT_PAGES.get(outside) or _source_page(outside)
        return f"{match[1]}{os.path.relpath(target, os.path.dirname(uri) or '.')}{match[3] or ''}{match[4]}"

    markdown = re.sub(r"^<!-- (?:fill [\w-]+|end) -->\n?", "\n", markdown, flags=re.MULTILINE)
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(lead, part) for part in parts)


def _outside(uri: str, target: str) -> str | None:
    """The path in the repository of a link that leads out of docs/; None for any other."""
    if target.startswith(("http://", "https://", "mailto:")) or uri.startswith(("api/", "source/")):
        return None
    home = ROOT if uri in ROOT_PAGES.values() and uri != "index.md" else (ROOT / "docs" / uri).parent
    path = os.path.relpath(os.path.normpath(home / target), ROOT)
    inside = path.startswith("docs/") and home != ROOT
    return None if inside or path.startswith("..") or not (ROOT / path).exists() or path == "docs" else path


def _source_page(path: str) -> str:
    return f"source/{path.replace('.', '-')}.md"


def _shown(path: Path) -> str:
    """A file as a page, or what a folder holds."""
    name = path.relative_to(ROOT)
    if path.is_dir():
        return f"# {name}\n\n" + "\n".join(f"- `{child.name}`" for child in sorted(path.iterdir()) if child.is_file())
    kind = {".py": "python", ".toml": "toml"}.get(path.suffix, "text")
    return f"# {path.name}\n\n`{name}`\n\n````{kind}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"


def api_pages() -> dict[str, str]:
    """The pages of the API reference, by address: each public name under its package."""
    tops = "\n".join(f"| `hu.{name}` | [{where}][halfulp.{where}] |" for name, where in _top_level().items())
    pages = {
        "api/index.md": "# API reference\n\n`import halfulp as hu`. What stands in the first column is short for the "
        f"second; the packages have more, a page each.\n\n| short | defined as |\n| --- | --- |\n{tops}\n"
    }
    for package in PACKAGES:
        entries = "\n\n".join(f"::: halfulp.{package}.{name}" for name in public_names(package))
        pages[f"api/{package}.md"] = f"# hu.{package}\n\n{_docstring(package)}\n\n{entries}\n"
    for trainer in TRAINERS:
        source = SOURCE / "integrations" / f"{trainer}.py"
        tree = ast.parse(source.read_text(encoding="utf-8"))
        defined = [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name[0] != "_"]
        entries = "\n\n".join(f"::: halfulp.integrations.{trainer}.{name}" for name in defined)
        head = f"# halfulp.integrations.{trainer}\n\n{ast.get_docstring(tree)}"
        pages[f"api/integrations-{trainer}.md"] = f"{head}\n\n{entries}\n"
    return pages


def _face(package: str) -> ast.Module:
    """The file that lists a package's names: its stub where it has one."""
    stem = SOURCE / package.replace(".", "/") / "__init__"
    stub = stem.with_suffix(".pyi")
    return ast.parse((stub if stub.exists() else stem.with_suffix(".py")).read_text(encoding="utf-8"))


def _docstring(package: str) -> str:
    return ast.get_docstring(_face(package)) or ""


def _exported(tree: ast.Module) -> list[tuple[str, str]]:
    """Name and module of what a package hands on as `from .module import name as name`."""
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module]
    return [(n.name, f.module or "") for f in froms for n in f.names if n.asname == n.name and n.name[0] != "_"]


def public_names(package: str) -> list[str]:
    """The public names of a package: its `__all__`, or what it hands on."""
    tree = _face(package)
    listed = [
        name
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AugAssign) and "__all__" in ast.unparse(node).partition("=")[0]
        if isinstance(node.value, ast.List)
        for name in ast.literal_eval(node.value)
    ]
    return sorted(listed) if listed else [name for name, _ in _exported(tree)]


def _top_level() -> dict[str, str]:
    """The short names of halfulp, each with the package of the reference that defines it."""
    return {name: f"{module}.{name}" for name, module in _exported(_face("")) if module in PACKAGES}
