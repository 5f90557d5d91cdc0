"""The library as a thing to read: `python -m benchmarks.bench_house [--before REVISION] [--pyright COMMAND]`."""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from docs.fillers.library import lines_of_code

from ._harness import ROOT
from ._results import Result, Table, save, show
from ._source_tree import SourceTree
from ._walks import walk_all

TEXT = """What whoever opens the source meets, at an earlier commit and now: sizes, who imports whom, names, types. A \
circle is a group of files that reach each other by imports, those inside functions included. An avoided word is one \
with a standard term for what it says here (benchmarks/_source_tree.py lists them); what is counted are definitions \
of modules, classes, functions and attributes under such a name. The type checkers run with today's settings. A walk \
is the files that one call enters, the kernels compiled. An example of extension is one file: no code of the library \
names what it registers."""
MOST_LINES = 800
EXAMPLES = ROOT / "examples" / "extending"
# What each example registers, as the laws' cases are named; the spirals are trained by AdaBelief.
ENTRIES = {
    "adabelief": ("AdaBelief", "adabelief"),
    "adopt": ("ADOPT",),
    "coarse_policy": ("coarse", "e5m2-coarse"),
    "format_e4m3b11fnuz": ("e4m3b11fnuz",),
    "half_away_rounding": ("half_away",),
    "spiral_task": ("spirals",),
    "swiglu_rule": ("swiglu",),
    "yogi": ("Yogi", "yogi"),
}
# Those that tests/laws does not import by itself.
LOADED = ("adabelief", "adopt", "coarse_policy", "format_e4m3b11fnuz", "half_away_rounding", "spiral_task")


def layers(tree: Path) -> list[set[str]]:
    """The order of packages that a tree's own layer test holds."""
    for node in ast.parse((tree / "tests" / "test_layers.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return ast.literal_eval(node.value)
    raise ValueError(f"{tree}/tests/test_layers.py has no LAYERS")


def figures(tree: Path) -> dict[str, object]:
    """What can be counted without running anything."""
    source = SourceTree(tree / "src" / "halfulp")
    lines = source.lines()
    circles = source.circles()
    longest = max(lines, key=lambda path: lines[path])
    return {
        "files": len(lines),
        "lines of src": sum(lines.values()),
        "longest file": f"{lines[longest]} ({longest.relative_to(source.root)})",
        f"files over {MOST_LINES} lines": sum(count > MOST_LINES for count in lines.values()),
        "circles of imports": f"{len(circles)} ({sum(map(len, circles))} files)" if circles else 0,
        "upward imports": len(source.upward(layers(tree))),
        "definitions under an avoided word": len(source.avoided()),
        "ignores of type checkers": ignores(tree),
        "casts": source.casts(),
    }


def ignores(tree: Path) -> int:
    """Comments that silence a type checker, in the sources, the typed tests and the examples."""
    files = [path for top in ("src", "tests/typed", "examples") for path in (tree / top).rglob("*.py*")]
    texts = (path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".pyi"))
    return sum(len(re.findall(r"# (?:type|pyright|mypy): *ignore", text)) for text in texts)


def by_folder(before: Path, now: Path) -> Table:
    """The files and lines of each folder of the library, and how many of its lines now are docstrings and comments."""
    columns = dict.fromkeys(("folder", "files before", "files", "lines before", "lines", "docstrings", "comments"), "")
    table = Table("By folder", columns)
    counts = [_count_by_folder(tree / "src" / "halfulp") for tree in (before, now)]
    for name in sorted(counts[1], key=lambda name: -counts[1][name][1]):
        then, here = (count.get(name, [0] * 4) for count in counts)
        cells = {"files before": then[0], "lines before": then[1], "docstrings": here[2], "comments": here[3]}
        table.add(folder=name, files=here[0], lines=here[1], **cells)
    return table


def _count_by_folder(root: Path) -> dict[str, list[int]]:
    """Files, lines, lines of docstrings and lines of comments, by the first folder of a file."""
    source, found = SourceTree(root), dict[str, list[int]]()
    for path, count in source.lines().items():
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        owners = [node for node in ast.walk(source.trees[path]) if isinstance(node, kinds)]
        texts = [node.body[0] for node in owners if ast.get_docstring(node, clean=False) is not None]
        parts, lines = path.relative_to(root).parts, path.read_text(encoding="utf-8").splitlines()
        row = found.setdefault(parts[0] if len(parts) > 1 else "(top)", [0] * 4)
        row[0] += 1
        row[1] += count
        row[2] += sum(node.end_lineno - node.lineno + 1 for node in texts)
        row[3] += sum(line.strip().startswith("#") for line in lines)
    return found


def mypy(tree: Path) -> str:
    """Complaints of mypy about the sources, under today's settings."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-warn-unused-configs"]
    done = subprocess.run([*command, "src/halfulp"], cwd=tree, capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines()[-1]
    found = re.search(r"Found (\d+) errors? in (\d+)", said)
    return f"{found[1]} in {found[2]} files" if found else "0" if "no issues" in said else said


def pyright(tree: Path, command: str) -> dict[str, object]:
    """Complaints of pyright's strict mode about a person's code, and the completeness of the public types."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(tree / "src")}

    def output_of(*options: str) -> dict:
        words = [command, *options, "--outputjson"]
        done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        return json.loads(done.stdout)

    complete = output_of("--verifytypes", "halfulp", "--ignoreexternal")["typeCompleteness"]
    found: dict[str, object] = {"completeness of public types (pyright)": f"{complete['completenessScore']:.1%}"}
    if (tree / "tests" / "typed" / "pyrightconfig.json").exists():
        found["pyright strict on tests/typed"] = output_of("--project", "tests/typed")["summary"]["errorCount"]
    return found


def laws() -> dict[str, list[str]]:
    """By example, the laws of tests/laws that its entries passed, each with its number of cases.

    Raises:
        RuntimeError: a law fails.
    """
    words = " or ".join(word for names in ENTRIES.values() for word in names)
    # Of the fused step one weight update: each of its kernels is compiled for seconds.
    choice = f"({words}) and (not test_compiled_equals_reference or split)"
    plugins = [word for name in LOADED for word in ("-p", name)]
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-rA", "-k", choice]
    path = os.pathsep.join([str(EXAMPLES), str(ROOT / "src")])
    command = [sys.executable, "-m", "pytest", *plugins, *options, "tests/laws"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the laws fail: {done.stdout[-3000:]}{done.stderr[-1000:]}")
    passed = re.findall(r"^PASSED \S*?laws/(\S+?)\.py::(\w+)\[(.*)\]", done.stdout, re.MULTILINE)
    found: dict[str, dict[str, int]] = {name: {} for name in ENTRIES}
    for file, law, case in passed:
        for name, entries in ENTRIES.items():
            if any(re.search(rf"(?<![a-z]){re.escape(entry)}(?![a-z])", case) for entry in entries):
                law = f"{file.removeprefix('optim/').removeprefix('test_')}: {law.removeprefix('test_')}"
                found[name][law] = found[name].get(law, 0) + 1
    return {name: [f"{law} ({count})" for law, count in of.items()] for name, of in found.items()}


def named_elsewhere(entries: tuple[str, ...]) -> list[str]:
    """Files of the library whose code has what an example registers as a name or as a string."""
    source = SourceTree(ROOT / "src" / "halfulp")
    return [str(path.relative_to(ROOT)) for path in source.files if source.words(path) & set(entries)]


def rule_law() -> str:
    """The law of a scaled tensor's rule of one's own: the same values under random powers of two.

    Raises:
        RuntimeError: it does not hold.
    """
    code = """
import torch, halfulp as hu, swiglu_rule
hu.testing.check_rule(torch.ops.extending.swiglu, lambda: (torch.randn(5), torch.randn(5)), gradients=False)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(ROOT / "src")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the rule fails: {done.stderr[-2000:]}")
    return "testing: check_rule (1)"


def examples() -> Table:
    """What a stranger wrote, and what holds for it."""
    table = Table(
        "What a stranger adds: examples/extending",
        {"file": "", "lines of code": "", "files touched": "", "laws": "", "cases": "", "which": "", "met": ""},
    )
    passed = laws()
    passed["swiglu_rule"].append(rule_law())
    for name, entries in ENTRIES.items():
        touched = 1 + len(named_elsewhere(entries))
        cases = sum(int(re.search(r"\((\d+)\)$", law)[1]) for law in passed[name])
        table.add(
            file=f"{name}.py",
            **{"lines of code": lines_of_code((EXAMPLES / f"{name}.py").read_text()), "files touched": touched},
            laws=len(passed[name]),
            cases=cases,
            which=", ".join(passed[name]),
            met=touched == 1 and cases > 0,
        )
    return table


def bars() -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """The bar of each quantity that has one: in words, and whether a value meets it."""
    nothing = ("0", lambda value: value in (0, "0"))
    return {
        "files": ("at most 320", lambda value: value <= 320),
        "lines of src": ("at most 52,000", lambda value: value <= 52_000),
        f"files over {MOST_LINES} lines": nothing,
        "circles of imports": nothing,
        "upward imports": nothing,
        "definitions under an avoided word": nothing,
        "ignores of type checkers": ("under 30", lambda value: value < 30),
        "complaints of mypy": nothing,
        "pyright strict on tests/typed": nothing,
        "completeness of public types (pyright)": ("100%", lambda value: value == "100.0%"),
    }


def counted(tree: Path, command: str | None) -> dict[str, object]:
    """All figures of a tree."""
    return figures(tree) | {"complaints of mypy": mypy(tree)} | (pyright(tree, command) if command else {})


def definition_line(node: ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign) -> str:
    """What a reader of the source sees of a name where it is defined: its parameters, base classes or value, cut."""
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        text = f"def {node.name}({ast.unparse(node.args)}){returns}"
    elif isinstance(node, ast.ClassDef):
        text = f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    else:
        text = ast.unparse(node).splitlines()[0]
    return text if len(text) <= 200 else f"{text[:197]}..."


def sample(seed: int) -> list[tuple[str, str, str]]:
    """Draws 60 documented functions and classes and 80 other names: kind, qualified name, and what is read beside it.

    That is the first line of the docstring of the former, the line that defines the latter.
    """
    documented, names = [], []

    def collect(node: ast.AST, prefix: str, of_module: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{prefix}.{child.name}"
                names.append((name, definition_line(child)))
                text = ast.get_docstring(child)
                if text:
                    documented.append((name, text.splitlines()[0]))
                collect(child, name, False)
            elif isinstance(child, (ast.Assign, ast.AnnAssign)) and of_module:
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                line = definition_line(child)
                names.extend((f"{prefix}.{target.id}", line) for target in targets if isinstance(target, ast.Name))

    tree = SourceTree(ROOT / "src" / "halfulp")
    for name, path in sorted(tree.modules.items()):
        collect(tree.trees[path], name or "halfulp", True)
    names = [entry for entry in names if not entry[0].rpartition(".")[2].startswith("__")]
    random = Random(seed)
    drawn = [("docstring", *entry) for entry in random.sample(documented, 60)]
    return drawn + [("name", *entry) for entry in random.sample(names, 80)]


def save_judgements(seed: int, path: Path) -> None:
    """Save what a reader wrote, a line an entry: right, wrong or riddle, a tab, and what they took the thing for.

    Raises:
        ValueError: the file has another number of lines than the sample.
    """
    columns = dict.fromkeys(("kind", "name", "line", "taken for", "verdict"), "")
    found = Table(f"Seed {seed}: each entry at first reading", columns)
    counts = Table(f"Seed {seed}: understood at first reading", dict.fromkeys(("", "drawn", "right", "bar", "met"), ""))
    for (kind, name, line_read), line in zip(sample(seed), path.read_text().splitlines(), strict=True):
        verdict, taken_for = line.split("\t")
        cells = {"taken for": taken_for, "verdict": verdict}
        found.add(kind=kind, name=name, line=line_read, **cells)
    for kind, bar in (("docstring", 55), ("name", 75)):
        verdicts = [row["verdict"] for row in found.rows if row["kind"] == kind]
        right = verdicts.count("right")
        counts.add(**{"": f"{kind}s", "bar": f"at least {bar}"}, drawn=len(verdicts), right=right, met=right >= bar)
    text = (
        "A reader who has not seen the code says what each entry is: of 60 from the name and the docstring's first "
        "line, of 80 from the name and the line that defines it; before seed 301048960 from the bare name. Names are "
        "as they were then: most that were misjudged have another one since. Of all but the last two samples the "
        "counts alone are kept."
    )
    command = "python -m benchmarks.bench_house --sample SEED --judgements FILE"
    result = Result("house_sample", "Names and first lines at first reading", text, command, tables=[counts, found])
    others = [table for table in result.earlier_tables() if not table.title.startswith(f"Seed {seed}:")]
    entries = [table for table in others if "each entry" in table.title]
    # Of samples before the last, the counts alone stand.
    result.tables = [table for table in others if table not in entries[:-1]] + result.tables
    save(result)


def main() -> None:
    """Print the tables and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default="ca487c45", help="the earlier commit")
    parser.add_argument("--pyright", help="the command basedpyright, beside an environment with Lightning")
    parser.add_argument("--walks", action="store_true", help="print the files that five calls go through, no more")
    parser.add_argument("--sample", type=int, metavar="SEED", help="print what a reader is to judge, no more")
    parser.add_argument("--judgements", type=Path, help="save a reader's judgements of the sample")
    given = parser.parse_args()
    if given.sample is not None:
        if given.judgements:
            save_judgements(given.sample, given.judgements)
            return
        print("seed", given.sample, *("\t".join(entry) for entry in sample(given.sample)), sep="\n")
        return
    if given.walks:
        show(Result("walks", "Walks", "", "", tables=[walk_all()]))
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(tree), given.before], cwd=ROOT, check=True)
        try:
            before, folders = counted(tree, given.pyright), by_folder(tree, ROOT)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    now, wanted = counted(ROOT, given.pyright), bars()
    table = Table(f"The source at {given.before} and now", {"": "", "before": "", "now": "", "bar": "", "met": ""})
    for name, value in now.items():
        bar, meets = wanted.get(name, ("", None))
        met = meets(value) if meets else None
        table.add(**{"": name}, before=before.get(name, ""), now=value, bar=bar, met=met)
    command = "python -m benchmarks.bench_house --pyright basedpyright"
    save(
        Result("house", "The source as a thing to read", TEXT, command, tables=[table, folders, walk_all(), examples()])
    )


if __name__ == "__main__":
    main()
