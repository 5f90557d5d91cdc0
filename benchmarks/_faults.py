"""Places where a fault can be planted: one change of an expression or statement, as a span of bytes and new text."""

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

KINDS = ("arithmetic", "comparison", "constant", "dropped statement", "swapped arguments", "lost state", "lost keyword")
OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
# What speaks to people, starts the library, draws pages or runs only on another device is not planted in.
LEFT_OUT = re.compile(
    r"__init__|/cli/|/_torch_import|/_torch_floor|/_needs_torch|triton|mctensor/_repr|_names"
    r"|trials/_(progress|page|curves|headline|line_style|table|defaults)"
)
SPEAKING = re.compile(r"__repr__|__str__|extra_repr|message|describe|_text|report|wording|_words|refus|__doc__|triton")
CALLS_LEFT_OUT = {"warn", "note", "warning", "TypeVar", "NamedTuple", "namedtuple", "print", "format", "join"}
SYMMETRIC = {"min", "max", "maximum", "minimum", "isinstance", "issubclass", "getattr", "setattr", "hasattr", "zip"}
KEYWORDS_LEFT_OUT = {"stacklevel", "help", "maxsize", "frozen", "slots", "repr", "strict", "tags", "schema"}


@dataclass(frozen=True)
class Fault:
    """One change: where, of what kind, and the bytes that take the place of others."""

    file: str
    function: str
    line: int
    kind: str
    start: int
    end: int
    new: str
    change: str
    again: int = 0
    exactly: str = ""

    @property
    def package(self) -> str:
        """The part of the library that it lies in."""
        return Path(self.file).parts[2].removesuffix(".py")

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What names it whatever else changes in its file."""
        return self.file, self.function, self.change, self.again

    def rank(self, seed: int) -> str:
        """A number drawn from the seed and the change alone: other changes of the source leave it."""
        return hashlib.sha256(repr((seed, self.kind, *self.key)).encode()).hexdigest()


def short(text: str) -> str:
    """Source on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:60]} ... {line[-25:]}"


class Finder:
    """All the faults of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0, *(m.end() for m in re.finditer(rb"\n", source))]
        self.found: list[Fault] = []
        self.counts: dict[tuple, int] = defaultdict(int)
        self.tree = ast.parse(source)

    def all(self) -> list[Fault]:
        """Every change that a fault can be."""
        self.body(self.tree, "")
        return self.found

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The bytes of a node."""
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.AST) -> str:
        """The source of a node."""
        start, end = self.span(node)
        return self.source[start:end].decode()

    def add(self, kind: str, function: str, node: ast.AST, start: int, end: int, new: str) -> None:
        """One fault in a node."""
        first, last = self.span(node)
        after = self.source[first:start].decode() + new + self.source[end:last].decode()
        change = f"{short(self.text(node))} -> {short(after)}"
        self.counts[function, change] += 1
        again = self.counts[function, change] - 1
        exactly = f"{short(self.source[start:end].decode())} -> {short(new)}"
        self.found.append(Fault(self.file, function, node.lineno, kind, start, end, new, change, again, exactly))

    def between(self, kind: str, function: str, node: ast.AST, left: ast.AST, right: ast.AST, word: str, new: str):
        """Replaces the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda m: b" " * len(m[0]), self.source[start:end])
        pattern = word if word[0].isalpha() else re.escape(word)
        if found := re.search(pattern.encode(), gap):
            self.add(kind, function, node, start + found.start(), start + found.end(), new)

    def body(self, node: ast.AST, function: str) -> None:
        """Faults in a node and in all that it holds."""
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if SPEAKING.search(node.name):
                return
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Call) and (
            name_of(node.func) in CALLS_LEFT_OUT or name_of(node.func).endswith("Error")
        ):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        for find in (self.arithmetic, self.comparison, self.constant, self.statement, self.call, self.state):
            find(node, function)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.body(child, function)

    def arithmetic(self, node: ast.AST, function: str) -> None:
        """Another operator."""
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            if any(isinstance(x, ast.Constant) and not isinstance(x.value, int | float) for x in ast.walk(node)):
                return
            word, new = OPERATORS[type(node.op)]
            self.between("arithmetic", function, node, node.left, node.right, word, new)
        elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            word, new = OPERATORS[type(node.op)]
            self.between("arithmetic", function, node, node.target, node.value, f"{word}=", f"{new}=")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            start, _ = self.span(node)
            self.add("arithmetic", function, node, start, start + 1, "")

    def comparison(self, node: ast.AST, function: str) -> None:
        """The other side of a bound, the other connective, no negation."""
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, operator, right in zip(operands, node.ops, operands[1:]):
                self.between("comparison", function, node, left, right, *COMPARISONS[type(operator)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:]):
                self.between("comparison", function, node, left, right, *words)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start, _ = self.span(node)
            self.add("comparison", function, node, start, start + 3, "")

    def constant(self, node: ast.AST, function: str) -> None:
        """The next number, twice the number, the other truth value."""
        if not isinstance(node, ast.Constant) or not isinstance(node.value, int | float):
            return
        start, end = self.span(node)
        if isinstance(node.value, bool):
            new = str(not node.value)
        elif isinstance(node.value, int):
            new = str(node.value + 1)
        else:
            new = repr(2 * node.value if node.value else 1.0)
        line = self.source[self.starts[node.lineno - 1] :].split(b"\n", 1)[0].decode()
        self.add("constant", function, node, start, end, new)
        column = node.col_offset
        before, after = line[max(0, column - 30) : column], line[node.end_col_offset :][:30]
        self.found[-1] = replace(self.found[-1], change=short(f"{before}[{self.text(node)} -> {new}]{after}"))

    def statement(self, node: ast.AST, function: str) -> None:
        """A call, an update or a guard that is not there."""
        update = isinstance(node, ast.AugAssign | ast.Delete)
        update |= isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if isinstance(node, ast.Expr) and update:
            update = name_of(node.value.func) not in CALLS_LEFT_OUT
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            update = any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(node.value))
        if isinstance(node, ast.If) and not node.orelse:
            update = isinstance(node.body[-1], ast.Return | ast.Continue | ast.Raise)
        if update:
            self.add("dropped statement", function, node, *self.span(node), "pass")

    def call(self, node: ast.AST, function: str) -> None:
        """Two arguments in each other's place, and a keyword that is not given."""
        if not isinstance(node, ast.Call):
            return
        if name_of(node.func) not in SYMMETRIC:
            for left, right in zip(node.args, node.args[1:]):
                if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
                    continue
                (a, b), (c, d) = self.span(left), self.span(right)
                new = self.text(right) + self.source[b:c].decode() + self.text(left)
                self.add("swapped arguments", function, node, a, d, new)
        items = [*node.args, *node.keywords]
        for k, keyword in enumerate(items):
            if isinstance(keyword, ast.keyword) and keyword.arg and keyword.arg not in KEYWORDS_LEFT_OUT:
                start, end = self.without(items, k)
                self.add("lost keyword", function, node, start, end, "")

    def without(self, items: list, k: int) -> tuple[int, int]:
        """The bytes of one of several items and of the comma that goes with it."""
        start, end = self.span(items[k])
        if k + 1 < len(items):
            return start, self.span(items[k + 1])[0]
        return (self.span(items[k - 1])[1] if k else start), end

    def state(self, node: ast.AST, function: str) -> None:
        """An attribute or item that is not written, and an entry of a dictionary that is not there."""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            self.add("lost state", function, node, *self.span(node), "pass")
        elif isinstance(node, ast.Dict) and None not in node.keys:
            for k, (key, value) in enumerate(zip(node.keys, node.values)):
                start, end = self.span(key)[0], self.span(value)[1]
                if k + 1 < len(node.keys):
                    end = self.span(node.keys[k + 1])[0]
                self.add("lost state", function, node, start, end, "")


def name_of(function: ast.AST) -> str:
    """The last name of what is called."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def planted(source: bytes, fault: Fault) -> bytes:
    """A file with the fault in it, and not another byte changed."""
    return source[: fault.start] + fault.new.encode() + source[fault.end :]


def is_another_program(source: bytes, fault: Fault) -> bool:
    """Whether the planted file can be parsed and says something else."""
    try:
        return ast.dump(ast.parse(planted(source, fault))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def all_faults(root: Path) -> Iterator[Fault]:
    """Every fault that could be planted in the library."""
    for path in sorted((root / "src").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if not LEFT_OUT.search(file):
            yield from Finder(file, path.read_bytes()).all()


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """How many of the faults fall on each package: by the root of its size, so that no package is only touched."""
    roots = {name: size**0.5 for name, size in sizes.items()}
    exact = {name: count * root / sum(roots.values()) for name, root in roots.items()}
    given = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: given[name] - exact[name])[: count - sum(given.values())]:
        given[name] += 1
    return given


def sample(root: Path, count: int, seed: int, without: Collection[str] = ()) -> list[Fault]:
    """Faults of all packages and kinds in an order drawn by the seed, at most one of a function, none in some files."""
    groups: dict[str, list[Fault]] = defaultdict(list)
    for fault in sorted(all_faults(root), key=lambda fault: fault.rank(seed)):
        if fault.file not in without:
            groups[fault.package].append(fault)
    chosen = []
    given = shares({name: len(group) for name, group in groups.items()}, count)
    for number, (name, group) in enumerate(sorted(groups.items())):
        used: set[tuple[str, str]] = set()
        for k in range(given[name]):
            kinds = [KINDS[(k + number + step) % len(KINDS)] for step in range(len(KINDS))]
            left = [fault for fault in group if (fault.file, fault.function) not in used]
            wanted = (fault for kind in kinds for fault in left if fault.kind == kind)
            first = next((x for x in wanted if is_another_program((root / x.file).read_bytes(), x)), None)
            if first is None:
                break
            used.add((first.file, first.function))
            chosen.append(first)
    return sorted(chosen, key=lambda fault: fault.rank(seed))
