"""Evidence as data, text and a page."""

import functools
import json
import math
import operator
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from halfulp import recipes
from halfulp.trials import Evidence
from halfulp.trials.evidence._evidence import render_comparison_page
from halfulp.trials.evidence._table import describe_recipes_without_pass, write_comparison_headline

from ...pages.words import check_page
from ...records import list_differences

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
COMPARISONS = [path for path in sorted(RESULTS.glob("*.json")) if "trials" in json.loads(path.read_text("utf-8"))]
RUN = {"workers": 2, "cores": 2, "seconds": 1.0, "trained": 1, "reused": 0}


def page_of(evidence: Evidence, folder: Path) -> str:
    evidence.to_html(folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.fixture
def evidence(make_record) -> Evidence:
    losses = {"fp32": 1.0, "fp32-twin": 1.0, "bf16": 1.2, "bf16-kahan": 1.00001, "e8m3": 1.1}
    records = [make_record(recipe, seed, loss + 0.01 * seed) for seed in range(3) for recipe, loss in losses.items()]
    return Evidence(trials=tuple(records), run=RUN)


def test_json_round_trip(evidence: Evidence) -> None:
    again = Evidence.from_json(evidence.to_json())
    assert again == evidence
    assert again.rows() == evidence.rows()
    assert [row["recipe"] for row in json.loads(evidence.to_json())["rows"]] == [row.recipe for row in again.rows()]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99, "trials": [], "run": {}}'])
def test_json_of_something_else(text: str) -> None:
    with pytest.raises(ValueError, match="not the JSON of a comparison"):
        Evidence.from_json(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trials", []),
        ("run", {"workers": 2}),
        ("trials.0.settings.seed", "0"),
        ("trials.0.settings.steps", None),
        ("trials.0.settings.versions", 3),
        ("trials.0.settings.task.title", None),
        ("trials.0.result.parameters", None),
        ("trials.0.result.float32.validation.loss", math.nan),
        ("trials.0.result.float32.validation.loss", 1e308),
        ("trials.0.result.float32.validation.loss", 10**400),
        ("trials.0.result.curve", [1, 2]),
        ("trials.0.result.curve", [[1, "2"]]),
    ],
)
def test_json_that_was_edited_is_refused_where_it_is_read(evidence: Evidence, path: str, value) -> None:
    content = json.loads(evidence.to_json())
    *parts, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    functools.reduce(operator.getitem, parts, content)[last] = value
    with pytest.raises(ValueError, match="not the JSON of a comparison"):
        Evidence.from_json(json.dumps(content))


@pytest.mark.parametrize("step_ms", [None, 0])
def test_steps_that_took_no_time_have_no_speed(evidence: Evidence, step_ms) -> None:
    content = json.loads(evidence.to_json())
    for trial in content["trials"]:
        trial["result"]["step_ms"] = step_ms
    again = Evidence.from_json(json.dumps(content))
    assert {row.speed for row in again.rows()} == {None}
    assert "None" not in again.table()


def test_diverged_trials_are_valid_json(make_record) -> None:
    records = (make_record("fp32", 0, 1.0), make_record("bf16", 0, None))
    evidence = Evidence(trials=records, run=RUN)
    json.loads(evidence.to_json(), parse_constant=pytest.fail)
    assert "diverged (1 of 1)" in evidence.table()


def test_table(evidence: Evidence) -> None:
    lines = str(evidence).splitlines()
    assert lines[0] == "tiny"
    line = {text.split()[0]: text for text in lines if text}
    assert "no difference" in line["bf16-kahan"]
    assert "worse" in line["bf16"]
    assert "+0.2000" in line["bf16"]
    assert "50.0%" in line["bf16"]
    assert "emulated" in line["e8m3"]


@pytest.fixture
def with_gradients(make_record) -> Evidence:
    records = []
    for seed in range(3):
        records.append(make_record("fp32", seed, 1.0))
        records.append(make_record("fp16-dynamic", seed, 1.4, skipped=10 + seed % 2))
        records.append(make_record("fp16-adaptive", seed, 1.0, skipped=0))
        records.append(make_record("fp16-constant-1024", seed, 2.0, skipped=20))
    return Evidence(trials=tuple(records), run=RUN)


def test_table_of_gradients(with_gradients: Evidence) -> None:
    line = {text.split()[0]: text for text in with_gradients.table().splitlines() if text}
    assert " 10.3 " in line["fp16-dynamic"]
    assert "emulated" in line["fp16-adaptive"]
    assert "emulated" not in line["fp32"]
    assert " 20 " in line["fp16-constant-1024"]
    assert "skipped" in line["recipe"]
    assert "Skipped:" in with_gradients.table()


def test_no_gradient_columns_without_such_recipes(evidence: Evidence) -> None:
    assert "skipped" not in evidence.table().lower()


def test_page_of_gradients(with_gradients: Evidence, evidence: Evidence, tmp_path: Path) -> None:
    pages = [page_of(one, tmp_path) for one in (with_gradients, evidence)]
    assert "steps skipped" in pages[0]
    assert "fp16-adaptive keeps float32’s accuracy with gradients in fp16." in pages[0]
    assert "steps skipped" not in pages[1]


def test_unknown_row(evidence: Evidence) -> None:
    assert evidence.row("tiny", "bf16").verdict == "worse"
    with pytest.raises(ValueError, match="no trial of recipe"):
        evidence.row("tiny", "bf17")


class Links(HTMLParser):
    """Collects what a page would load, its ids and its unclosed tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "link", "img", "iframe", "object", "embed"):
            self.loads.append(tag)
        self.loads += [value for key, value in attrs if key in ("src", "href") and not (value or "").startswith("#")]
        self.ids += [given["id"]] if "id" in given else []
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_self_contained(evidence: Evidence, tmp_path: Path) -> None:
    text = page_of(evidence, tmp_path)
    links = Links()
    links.feed(text)
    assert links.loads == []
    assert links.open == []
    assert len(links.ids) == len(set(links.ids))
    assert not re.search(r"@import|url\((?!#)", text)
    assert re.findall(r'https?://[^"<\s]*', text.replace("http://www.w3.org", "")) == []
    assert len(text) < 1_000_000


def test_page_says_what_was_found(evidence: Evidence, tmp_path: Path) -> None:
    text = page_of(evidence, tmp_path)
    assert "bf16-kahan keeps float32’s accuracy at 8.0 bytes per parameter instead of 16.0." in text
    assert "a &lt;b&gt;task&lt;/b&gt;" in text
    assert "<b>task</b>" not in text
    assert ">validation loss</th>" in text
    for row in evidence.rows():
        assert row.recipe in text


def test_page_of_two_seeds_only_indicates(make_record, tmp_path: Path) -> None:
    records = [make_record(recipe, seed, 1.0) for recipe in ("fp32", "bf16-kahan") for seed in (0, 1)]
    text = page_of(Evidence(trials=tuple(records), run=RUN), tmp_path)
    assert "Too few seeds for a verdict" in text
    assert "An indication" in text


@pytest.fixture
def scattered(make_record) -> Evidence:
    losses = {"fp32": [1.0] * 3, "bf16": [1.5] * 3, "bf16-split": [0.5, 1.0, 1.5], "bf16-kahan": [2.0, 4.0, 9.0]}
    records = [make_record(recipe, seed, loss) for recipe, own in losses.items() for seed, loss in enumerate(own)]
    return Evidence(trials=tuple(records), run=RUN)


def test_table_of_what_is_unclear(scattered: Evidence, evidence: Evidence) -> None:
    line = {text.split()[0]: text for text in scattered.table().splitlines() if text}
    assert " unclear " in line["bf16-kahan"]
    assert "More will: --seeds 6 --resume." in scattered.table()
    assert "unclear" not in evidence.table().lower()


def test_page_of_what_is_unclear(scattered: Evidence, tmp_path: Path) -> None:
    text = page_of(scattered, tmp_path)
    assert "<h1>No recipe is sure to stay with float32.</h1>" in text
    assert "Worse than fp32 on tiny: bf16 (+0.500)" in text
    assert "In need of more seeds for a verdict on tiny: bf16-split (" in text
    assert text.count('<span class="chip open">unclear</span>') == 2
    assert '<span class="chip good">' not in text


def test_one_unclear_recipe_keeps_no_other_from_the_headline(evidence: Evidence, make_record) -> None:
    more = tuple(make_record("bf16-split", seed, loss) for seed, loss in enumerate((0.5, 1.0, 1.5)))
    again = Evidence(trials=evidence.trials + more, run=RUN)
    assert write_comparison_headline(again).startswith("bf16-kahan keeps float32’s accuracy")
    assert describe_recipes_without_pass(again)[-1].startswith(
        "In need of more seeds for a verdict on tiny: bf16-split ("
    )


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_stored_rows_follow_from_their_trials(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = json.loads(Evidence.from_json(text).to_json())["rows"]
    assert not list_differences(found, json.loads(text)["rows"], 1e-9), "run python docs/fill.py"


@pytest.mark.parametrize("name", ["compare", "e5m2", "scaled"])
def test_a_page_shows_what_is_on_record(name: str) -> None:
    evidence = Evidence.from_json((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    check_page(f"compare {name}", render_comparison_page(evidence))


def test_page_when_nothing_kept_up(make_record, tmp_path: Path) -> None:
    records = [make_record("fp32", seed, 1.0) for seed in range(3)]
    records += [make_record("bf16", seed, None, curve=[]) for seed in range(3)]
    text = page_of(Evidence(trials=tuple(records), run=RUN), tmp_path)
    assert "No recipe is sure to stay with float32" in text
    assert "Diverged on tiny: bf16." in text


def test_a_page_of_many_recipes_has_a_colour_for_each(make_record, tmp_path: Path) -> None:
    records = [make_record(recipe, 0, 1.0) for recipe in recipes.names()[:20]]
    text = page_of(Evidence(trials=tuple(records), run=RUN), tmp_path)
    assert set(re.findall(r"var\((--\w+)\)", text)) <= set(re.findall(r"(--\w+):", text))
    key = [re.sub(r' style="[^"]*"', "", swatch) for swatch in re.findall(r"<li>(<svg.*?</svg>)", text)]
    assert len(set(key)) == len(key) == 20  # told apart without their colours
