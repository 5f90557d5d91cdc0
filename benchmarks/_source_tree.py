"""A source tree as data: its files, who imports whom, and the names that it defines."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Words with a standard term for what they would say here, each with the kinds of definition that it is avoided for.
FUNCTIONS, CLASSES, VARIABLES = "function", "class", "variable"
_EVERYWHERE = (FUNCTIONS, CLASSES, VARIABLES, "module")
_WORDS = """
door form_of made_over taken_over joined joining of_degree by_degree keeping bounded moves moving places companions
chosen narrowed widened towards in_sight repay debt fold lifted lowered pieces bound peaks wanted_tensors still_true
given saved borders nesting published anchor culprit arrival crossing every known told asked held
"""
AVOIDED = {
    **dict.fromkeys(_WORDS.split(), _EVERYWHERE),
    **dict.fromkeys(("Form", "Place", "Kind", "Slot", "Blocks", "Pair", "ANY"), (CLASSES, VARIABLES)),
    # Properties and data may be a result, a unit or a root; functions say of what.
    **dict.fromkeys(("made", "result", "unit", "root", "larger"), (FUNCTIONS,)),
}
# Entries of the records that `halfulp.observe` writes to files, beside the code dtype-not-asked.
STORED = ("known", "asked")


@dataclass(frozen=True)
class Definition:
    """A name that a file gives to something that is no local variable."""

    file: str
    line: int
    kind: str
    name: str


@dataclass
class SourceTree:
    """A package's files by their names as modules, relative to the package."""

    root: Path

    def __post_init__(self) -> None:
        self.files = sorted(self.root.rglob("*.py"))
        self.trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in self.files}
        self.modules = {_module(path.relative_to(self.root)): path for path in self.files}

    def lines(self) -> dict[Path, int]:
        """Lines of every file."""
        return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in self.files}

    def imports(self) -> dict[str, set[str]]:
        """The modules that each module imports anywhere in it, but for the packages that it lies in."""
        found = {}
        for name, path in self.modules.items():
            targets = {self._nearest(target) for target in self._imported(path)} - {"", name}
            found[name] = {target for target in targets if not name.startswith(f"{target}.")}
        return found

    def _imported(self, path: Path) -> Iterator[str]:
        package = [self.root.name, *path.relative_to(self.root).parent.parts]
        prefix = f"{self.root.name}."
        for node in ast.walk(self.trees[path]):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                base += node.module.split(".") if node.module else []
                names = [".".join([*base, alias.name]) for alias in node.names]
            else:
                continue
            yield from (name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def _nearest(self, name: str) -> str:
        """The module that a dotted name lies in; "" where the package's own `__init__` gives it."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    def circles(self) -> list[list[str]]:
        """Groups of modules each of which reaches all others of the group by imports."""
        imports = self.imports()
        reached = {name: _reached(name, imports) for name in imports}
        groups = {frozenset({a, *(b for b in reached[a] if a in reached[b])}) for a in imports}
        return sorted(sorted(group) for group in groups if len(group) > 1)

    def upward(self, layers: list[set[str]]) -> list[str]:
        """Imports of a package that does not lie below the importer's."""
        level = {name: number for number, names in enumerate(layers) for name in names}
        wrong = []
        for name, targets in self.imports().items():
            home = name.split(".")[0]
            for other in {target.split(".")[0] for target in targets} - {home}:
                if home in level and level.get(other, -1) >= level[home]:
                    wrong.append(f"{name} imports {other}")
        return wrong

    def avoided(self) -> list[Definition]:
        """Definitions, but for stored entries, whose names without outer underscores are avoided words."""
        definitions = (one for path in self.files for one in self._definitions(path))
        found = [one for one in definitions if one.kind in AVOIDED.get(one.name.strip("_"), ())]
        return [one for one in found if one.kind != VARIABLES or one.name not in STORED]

    def _definitions(self, path: Path) -> Iterator[Definition]:
        file = str(path.relative_to(self.root))
        name = path.parent.name if path.name == "__init__.py" else path.stem
        yield Definition(file, 1, "module", name)
        for line, kind, name in _defined(self.trees[path], in_function=False):
            yield Definition(file, line, kind, name)

    def words(self, path: Path) -> set[str]:
        """All names in a file's code, and all strings."""
        nodes = list(ast.walk(self.trees[path]))
        found = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "name", "arg", "value")}
        return {word for word in found if isinstance(word, str)}

    def casts(self) -> int:
        """Calls of typing.cast."""
        nodes = [node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
        return sum(isinstance(node.func, ast.Name) and node.func.id == "cast" for node in nodes)


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix("__init__").rstrip(".")


def _reached(name: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for target in imports[waiting.pop()] - found:
            found.add(target)
            waiting.append(target)
    return found


def _defined(node: ast.AST, in_function: bool) -> Iterator[tuple[int, str, str]]:
    """Functions, classes, and variables of modules, classes and instances: what is no local of a function."""
    for child in ast.iter_child_nodes(node):
        inner = in_function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child.lineno, FUNCTIONS, child.name
            inner = True
        elif isinstance(child, ast.ClassDef):
            yield child.lineno, CLASSES, child.name
            inner = False
        elif isinstance(child, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)):
            for line, name in _targets(child, in_function):
                yield line, VARIABLES, name
        yield from _defined(child, inner)


def _targets(
    node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For, in_function: bool
) -> Iterable[tuple[int, str]]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for part in (part for target in targets for part in ast.walk(target)):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.lineno, part.attr
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and not in_function:
            yield part.lineno, part.id
