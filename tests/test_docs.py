"""The pages: their code runs and prints what they say, links lead somewhere, names exist, figures are in step."""

import ast
import contextlib
import doctest
import functools
import importlib.util
import io
import json
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch
from docs.fillers.library import additions, lines_of_code

import halfulp as hu
from halfulp._torch_floor import is_older
from halfulp.observation.findings import FINDING_KINDS, _kind

from .kernels.triton.interpreted import interpreted

ROOT = Path(__file__).resolve().parents[1]
PINNED = "2.13"  # of constraints.txt: the torch that the pages were made with
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
WRITTEN = [page for page in PAGES if page.parent.name != "benchmarks"]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
FENCE = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = (
    '    pip install -c constraints.txt -e ".[cli]" && halfulp compare',
    '    pip install -c constraints.txt -e ".[cli,test]" && pytest -n 2',
)
SAME = doctest.OutputChecker()
RULES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def after(diff: str) -> str:
    """The code that a diff leaves."""
    return "\n".join(line[2:] for line in diff.splitlines() if line[:1] != "-")


def blocks(text: str) -> list[tuple[str, str, str | None, int]]:
    """Kind, code, the output printed below it if any, and the line of each block that runs."""
    fences = list(FENCE.finditer(text))
    found = []
    for this, following in zip(fences, [*fences[1:], None]):
        if this[1] not in ("python", "diff"):
            continue
        adjacent = following is not None and not text[this.end() : following.start()].strip()
        output = following[2] if adjacent and following[1] == "text" else None
        code = after(this[2]) if this[1] == "diff" else this[2]
        found.append((this[1], code, output, text[: this.start()].count("\n") + 1))
    return found


def slug(heading: str) -> str:
    """The anchor that Markdown viewers give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)}


def numbers_replaced(printed: str, wanted: str) -> str:
    """What was printed with numbers of another text that are within 5%: older torch has other last bits."""
    numbers = re.compile(r"\d+(?:\.\d+)?")
    mine, others = numbers.findall(printed), numbers.findall(wanted)
    if len(mine) != len(others):
        return printed
    near = iter(b if abs(float(a) - float(b)) <= 0.05 * float(b) else a for a, b in zip(mine, others))
    return numbers.sub(lambda number: next(near), printed)


def test_numbers_of_older_torch_may_be_near_and_words_may_not_differ():
    assert numbers_replaced("94.6% of 7", "94.7% of 7") == "94.7% of 7"
    assert numbers_replaced("94.6% of 7", "94.7% of 8") == "94.7% of 7"
    assert numbers_replaced("94.6% of x", "94.7% of y") == "94.7% of x"


@functools.cache
def filler():
    specification = importlib.util.spec_from_file_location("fill", ROOT / "docs" / "fill.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for name, function in module.PLACES.items():  # several tests fill the same places
        module.PLACES[name] = functools.cache(function)
    return module


@pytest.mark.parametrize(
    # What CONTRIBUTING adds to registries is run in a process of its own.
    "page",
    [page for page in WRITTEN if page != CONTRIBUTING and blocks(page.read_text())],
    ids=name_of,
)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch, needs_torch):
    if page.name == "replicas-differ.md":
        needs_torch("gloo that prints nothing of its own")
    older = is_older(torch.__version__, PINNED)
    monkeypatch.chdir(tmp_path)
    # A code of the page's own would be found in the runs of other tests.
    monkeypatch.setattr(_kind, "FINDING_KINDS", dict(FINDING_KINDS))
    namespace: dict = {"__name__": "page"}
    for _, code, output, line in blocks(page.read_text()):
        said = io.StringIO()
        # Dynamo of torch 2.6 would read the page as Python.
        compiled = compile("\n" * line + code, "<page>" if older else str(page), "exec")
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compiled, namespace)
        if output is not None:
            printed = said.getvalue()
            if older:  # rows that are sorted by their numbers may change places
                printed, output = ("\n".join(sorted(text.splitlines())) for text in (printed, output))
                printed = numbers_replaced(printed, output)
            assert SAME.check_output(output, printed, RULES), f"{page.name}:{line} prints\n{said.getvalue()}"


# What the additions of CONTRIBUTING are good for, once all of them have run.
ADDED = """
import os

ENGINES = ("auto", "reference", *["triton"] * (os.environ.get("TRITON_INTERPRET") == "1"))
names = {word for entries in (
    hu.formats.names(), hu.optim.OPTIMIZERS, hu.recipes.names(), hu.trials.tasks.names()) for word in entries}
assert {"e3m8", "Signum", "LARS", "coarse-e3m8", "sides"} <= names
assert hu.quantize(torch.tensor([0.3]), "e3m8").item() == 0.2998046875

task = hu.trials.tasks.get("sides")
data = task.load()
model = hu.convert(task.model(data, 0), "coarse-e3m8")
optimizer = hu.recipes.optimizer(model, "Signum", lr=1e-2)
scaler = hu.recipes.scaler(hu.recipes.get("coarse-e3m8"), model)
assert scaler._controller.policy.name == "coarser"
before = model.weight.detach().clone()
with hu.observe(model, optimizer, interval=1) as seen:
    for inputs, targets in task.batches(data, 0, 5):
        scaler.scale(task.loss(model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
assert not torch.equal(before, model.weight) and "short-run" in [one.code for one in seen.findings]

torch.manual_seed(0)
start = torch.full((1 << 16,), 1.0, dtype=torch.bfloat16)
make = lambda word: Signum([torch.nn.Parameter(start.clone())], lr=2.0**-12, weight_update=word)
steps = [make("dithered"), make("nearest")]
for one in steps:
    weight = one.param_groups[0]["params"][0]
    weight.grad = torch.ones_like(weight)
    one.step()
dithered, nearest = (one.param_groups[0]["params"][0].double().mean().item() for one in steps)
assert nearest == 1.0 and abs(dithered - (1 - 2.0**-12)) < 1e-4, (nearest, dithered)

long = torch.nn.Parameter(torch.full((4,), 3.0))
long.grad = torch.ones(4)
LARS([long], lr=0.125).step()
assert long.tolist() == [2.625] * 4

assert hu.quantize(torch.tensor([2.5, -2.5, 3.6]), "e8m1", "half_toward_zero").tolist() == [2.0, -2.0, 4.0]
moments = {}
for engine in ENGINES:
    with hu.kernels.engine(engine):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
        optimizer = hu.optim.AdamW([weight], lr=1e-2, state_dtype={"exp_avg_sq": "ubf16"}, seed=3)
        for step in range(20):
            weight.grad = torch.linspace(1, 2 + step, 1000)
            optimizer.step()
        held = optimizer.state[weight]["exp_avg_sq"]
        assert held.dtype == torch.int16
        moments[engine] = held.clone(), weight.detach().clone()
        again = hu.optim.AdamW([weight], lr=1e-2, state_dtype={"exp_avg_sq": "ubf16"}, seed=3)
        again.load_state_dict(optimizer.state_dict())
        assert torch.equal(again.state[weight]["exp_avg_sq"], held)
assert all(all(map(torch.equal, held, moments["reference"])) for held in moments.values())
exact = sum(.001 * .999**(19 - step) * torch.linspace(1, 2 + step, 1000).double()**2 for step in range(20))
shown = (moments["auto"][0].to(torch.int32) << 15 & 0x7FFFFFFF).view(torch.float32).double()
assert (shown / exact - 1).abs().max() < 20 * 2.0**-8 and abs((shown / exact).mean().item() - 1) < 1e-3

kinds = {
    "weight update": lambda w: Signum([w], lr=2.0**-9, weight_update="dithered", seed=2),
    "sums": lambda w: LARS([w], lr=0.125, weight_update="kahan", seed=2),
}
for kind, make in kinds.items():
    held = {}
    for engine in ENGINES:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 1000).bfloat16())
        optimizer = make(weight)
        for step in range(3):
            weight.grad = torch.linspace(-1 - step, 2, 1000).bfloat16()
            with hu.kernels.engine(engine):
                optimizer.step()
        held[engine] = weight.detach().clone()
    assert all(torch.equal(found, held["reference"]) for found in held.values()), kind
rounded = {}
for engine in ENGINES:
    with hu.kernels.engine(engine):
        rounded[engine] = hu.quantize(torch.linspace(-9, 9, 5000), "e8m1", "half_toward_zero")
assert all(torch.equal(found, rounded["reference"]) for found in rounded.values())

make = lambda: (torch.randn(5), torch.randn(5))
hu.testing.check_rule(torch.ops.mine.cube_times, make, gradients=False)
print("every addition works")
"""


def test_the_additions_of_contributing_are_short_and_known_by_name(in_process):
    cells = additions()
    assert set(re.findall(r"<!-- fill addition-([\w-]+) -->", CONTRIBUTING.read_text())) == set(cells)
    assert {kind: lines for kind in cells if (lines := lines_of_code(cells[kind])) >= 15} == {}
    in_process("\n".join([*cells.values(), ADDED]))


def test_the_additions_of_contributing_run_in_tritons_interpreter():
    shown = interpreted("tests.test_docs", "test.run_additions()")
    assert "every addition works" in shown


def run_additions() -> None:
    """Run every addition and what it is good for, by all three writers of kernels."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no Triton kernel")
        exec(compile("\n".join([*additions().values(), ADDED]), "additions", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset)=\"([^\"]+)\"", text):
        target = "".join(target)
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        aim = page if not path else (page.parent / path)
        assert aim.exists(), f"{page.name} links to {target}, which is not there"
        if anchor and aim.suffix == ".md":
            assert anchor in anchors(aim.read_text()), f"{page.name} links to {target}: no such heading"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_names_of_the_library_exist(page):
    for dotted in sorted(set(re.findall(r"\bhu\.([A-Za-z_][\w.]*\w)", page.read_text()))):
        thing = hu
        for part in dotted.split("."):
            assert hasattr(thing, part), f"{page.name} speaks of hu.{dotted}, which does not exist"
            thing = getattr(thing, part)


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_commands_have_the_options_that_a_page_gives_them(page):
    typer = pytest.importorskip("typer")
    from halfulp.cli import make_application

    root = typer.main.get_command(make_application())
    of_all = {option for parameter in root.params for option in parameter.opts}
    text = page.read_text()
    lines = [line for kind, code in FENCE.findall(text) if kind in ("sh", "console") for line in code.splitlines()]
    lines += re.findall(r"`(halfulp [^`]*)`", text)
    for line in lines:
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            if words[:1] != ["halfulp"] or len(words) == 1:
                continue
            command = next((word for word in words[1:] if word in root.commands), None)
            assert command or words[1] in of_all, f"{page.name}: halfulp has no command {words[1]}"
            params = root.commands[command].params if command else []
            known = {option for parameter in params for option in parameter.opts}
            given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
            assert given <= known | of_all, f"{page.name}: halfulp {command} has no {given - known - of_all}"


@pytest.mark.parametrize("page", filler().pages(), ids=name_of)
def test_figures_are_in_step_with_the_files_that_hold_them(page, needs_torch):
    text = page.read_text(encoding="utf-8")
    filled = filler().filled(text)
    if page.name == "scaled-rules.md" and filled != text:
        needs_torch("all operators of the pinned version, whose rules the page counts")
    assert filled == text, f"{page.name} is not in step: run python docs/fill.py"


def test_the_pages_of_benchmarks_are_in_step_and_show_every_table():
    """Also beside files that other programs keep in the same folder."""
    filler()
    from benchmarks import _results, tables

    pages = {area: tables.page(area) for area in tables.areas()}
    found = [json.loads(path.read_text()) for path in _results.FOLDER.glob("*.json")]
    titles = [table["title"] for result in found for table in result.get("tables", ())]
    assert titles
    assert not [title for title in titles if not any(f"### {title}\n" in page for page in pages.values())]
    assert pages == {path.stem: path.read_text() for path in tables.PAGES.glob("*.md")}, "python -m benchmarks.tables"


def test_missed_bars_come_first():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert re.search(r"^## (.*)$", text, re.MULTILINE)[1] == "What was missed"


def test_no_place_to_fill_stays_empty():
    empty = [name for name, function in filler().PLACES.items() if not function().strip()]
    assert not empty, f"nothing stands in the files for {empty}"


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.name != "CHANGELOG.md"], ids=name_of)
def test_a_page_fits_three_screens(page):
    """Sixty lines each; tables that a program fills have pages of their own or do not count, and changes grow."""
    written = filler().PLACE.sub("", page.read_text(encoding="utf-8"))
    assert written.count("\n") <= 180, f"{page.name} answers more than one question: split it"


def test_every_place_to_fill_is_used_and_closed():
    text = "".join(page.read_text() for page in filler().pages())
    assert text.count("<!-- fill ") == len(filler().PLACE.findall(text))
    assert {name for _, name, _, _ in filler().PLACE.findall(text)} == set(filler().PLACES)


def test_a_place_with_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="nothing fills 'speeed'; there are"):
        filler().filled("<!-- fill speeed -->\n<!-- end -->")


def test_every_figure_is_shown_and_every_page_is_reachable():
    text = "".join(page.read_text() for page in WRITTEN)
    for image in (ROOT / "docs" / "img").glob("*"):
        assert re.search(rf'img/{re.escape(image.name)}[")#]', text), f"{image.name} is on no page"
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name}" in index, f"docs/index.md does not lead to {page.name}"
    codes = (ROOT / "docs" / "findings.md").read_text()
    for page in (ROOT / "docs" / "findings").glob("*.md"):
        assert f"(findings/{page.name})" in codes, f"docs/findings.md does not lead to {page.name}"
    for page in (ROOT / "docs" / "problems").glob("*.md"):
        assert f"(problems/{page.name})" in index, f"docs/index.md does not lead to {page.name}"
    measured = (ROOT / "docs" / "benchmarks.md").read_text()
    for page in (ROOT / "docs" / "benchmarks").glob("*.md"):
        assert f"(benchmarks/{page.name})" in measured, f"docs/benchmarks.md does not lead to {page.name}"


def test_the_site_has_every_page_and_every_package():
    """mkdocs build --strict checks the rest, which .ci/run does."""
    lines = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md|[\w/-]+/)$", lines, re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert not {page for page in pages if page not in listed and f"{page.partition('/')[0]}/" not in listed}
    hooks = ast.parse((ROOT / "docs" / "mkdocs_hooks.py").read_text())
    packages = next(ast.literal_eval(n.value) for n in hooks.body if ast.unparse(n).startswith("PACKAGES = "))
    face = ast.parse((ROOT / "src" / "halfulp" / "__init__.pyi").read_text())
    named = {a.name for n in face.body if isinstance(n, ast.ImportFrom) and not n.module for a in n.names}
    defined = {n.module for n in face.body if isinstance(n, ast.ImportFrom) and n.module}
    assert named <= set(packages)
    assert defined <= set(packages)


def test_the_readme_starts_with_its_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines[0] == "# halfulp"
    assert tuple(line for line in lines if line.startswith("    pip install")) == COMMANDS


# What an example needs beside what it imports itself.
ALSO = {"hf_trainer.py": {"accelerate"}, "timm_optimizer.py": {"torchvision"}}


def imports_of(script: Path) -> set[str]:
    """The packages that a script imports."""
    found = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_examples_run(example, tmp_path, monkeypatch):
    for package in sorted(imports_of(example) | ALSO.get(example.name, set())):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{example.name} needs {package}, which is not installed")
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        if not imports_of(example) <= {"halfulp", "torch", *sys.stdlib_module_names}:
            warnings.simplefilter("ignore")  # those of other libraries about each other
        runpy.run_path(str(example), run_name="__main__")
    assert said.getvalue().strip()


def test_the_architecture_page_names_files_that_exist():
    said = re.findall(
        r"`([a-z_]+/[a-z_/]+(?:\.py|/))`", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    )
    assert len(said) > 40
    assert [name for name in said if not any((base / name).exists() for base in (ROOT, ROOT / "src/halfulp"))] == []
