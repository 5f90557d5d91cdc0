"""The three pages as text: made from plain data alone, self-contained, escaped, written whole."""

import errno
import html
import json
import os
import re
from pathlib import Path

import pytest
import torch

import halfulp as hu
from halfulp.observation._finding import group_causes_as_dicts
from halfulp.observation.findings import FINDING_KINDS
from halfulp.observation.page import render_forecast_page, render_observation_page
from halfulp.observation.page._pages import (
    _make_chart_row,
    describe_history,
    find_format_range,
    make_cause_cards,
    make_changes_lost_cell,
    make_count_cell,
    make_history_panels,
    make_magnitude_map_data,
    make_movement_kept_cell,
    make_number_cell,
    make_share_cell,
)
from halfulp.pages import Cell


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def forecast(model: torch.nn.Module) -> hu.observation.Forecast:
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    return hu.observation.forecast(model, optimizer, "cosine", steps=1000, warmup=10)


@pytest.fixture(scope="module")
def observation(model: torch.nn.Module) -> hu.observation.Observation:
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    with hu.observation.observe(model, optimizer, interval=2) as seen:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
    return seen


def test_a_page_asks_for_nothing_and_is_small(observation: hu.observation.Observation, tmp_path: Path) -> None:
    observation.to_html(tmp_path / "observe.html")
    text = (tmp_path / "observe.html").read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"'<\s]*", text.replace("http://www.w3.org/2000/svg", "")) == []
    assert not re.search(r"@import|url\((?!#)|<link|<img|<iframe| src=", text)
    code = text[text.rindex("<script>") : text.rindex("</script>")]
    assert len(code.encode()) < 50_000
    assert str(tmp_path) not in text
    assert os.getcwd() not in text


def test_of_several_processes_the_first_writes(
    observation: hu.observation.Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observation.record, "replica_of", (1, 2))
    observation.to_html(tmp_path / "observe.html")
    assert not list(tmp_path.iterdir())


def test_json_makes_the_same_page(observation: hu.observation.Observation, forecast: hu.observation.Forecast) -> None:
    for make, found in ((render_observation_page, observation), (render_forecast_page, forecast)):
        data = found.to_dict()
        assert make(json.loads(json.dumps(data, allow_nan=False))) == make(data)


def test_a_full_disk_leaves_no_page(
    forecast: hu.observation.Forecast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left on device"):
        forecast.to_html(tmp_path / "forecast.html")
    assert list(tmp_path.iterdir()) == []


def test_every_layer_of_a_forecast_is_on_its_page(forecast: hu.observation.Forecast) -> None:
    text = render_forecast_page(forecast.to_dict())
    for layer in forecast.layers:
        assert f"<code>{layer.name}</code>" in text
        if layer.freeze_step is not None:
            assert f">{layer.freeze_step:,}<" in text
            assert f'data-sort="{layer.freeze_lr}"' in text, "a column is sorted by all digits"
    steps, rates = zip(*forecast.learning_rates)
    assert (steps[0], steps[-1]) == (0, 999)
    assert max(rates) == pytest.approx(6e-4, rel=1e-2)


def test_a_layers_row_of_the_chart_is_filled_from_halfway_to_halfway_between_its_steps() -> None:
    layer = {"name": "w", "lost": [(0, 0.5), (10, 0.25), (20, 1.0)], "lost_share": 0.6, "freeze_step": None}
    cells = [[0, 5.0, 0.5, "lost"], [5.0, 15.0, 0.25, "lost"], [15.0, 24, 1.0, "lost"]]
    assert _make_chart_row(layer, 0, 24)["cells"] == cells


def test_a_page_of_nan_from_the_first_step() -> None:
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, float("nan"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observation.observe(model, optimizer, interval=1) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert "first-nonfinite" in render_observation_page(seen.to_dict())


def plain_findings(*findings: hu.observation.Finding) -> dict:
    return {"findings": [one.to_dict() for one in findings], "causes": group_causes_as_dicts(findings)}


def card_of(*findings: hu.observation.Finding, forecast: bool = False) -> list[dict]:
    return make_cause_cards(plain_findings(*findings), forecast)


def test_findings_of_one_code_and_cure_share_a_card_and_notes_have_their_own() -> None:
    rows = [
        hu.observation.Finding("updates-lost", (f"{name}.weight",), "error", sure, {"lost": lost}, "cure", "said")
        for name, sure, lost in (("a", 1.0, 0.5), ("b", 0.5, float("nan")))
    ]
    cards = card_of(*rows, hu.observation.Finding("updates-lost", ("c",), "note", 1.0, {}, "cure", "said"))
    assert [(card["severity"], len(card["lines"]), card["sure"]) for card in cards] == [
        ("error", 2, "of few samples"),
        ("note", 1, ""),
    ]
    assert cards[0]["lines"][1]["evidence"] == [("share lost", "nan"), ("how sure", "50%")]


def test_nothing_is_wholly_sure_and_a_forecast_says_no_share_at_all(forecast: hu.observation.Forecast) -> None:
    assert max(one.confidence for one in forecast.findings) < 1
    finding = hu.observation.Finding("freeze-ahead", ("a",), "error", 1.0, {}, "cure", "said")
    (card,) = card_of(finding)
    assert card["lines"][0]["evidence"] == [("how sure", "over 99%")]
    (card,) = card_of(finding, forecast=True)
    assert (card["sure"], card["lines"][0]["evidence"]) == ("forecast", [])


def run_in_bfloat16(code: str) -> hu.observation.Observation:
    """Observe a bfloat16 model under an optimizer that lines of code make."""
    torch.manual_seed(1)
    layers = torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)
    model = torch.nn.ModuleDict({"mlp": torch.nn.Sequential(*layers)}).to(torch.bfloat16)
    names = {"model": model, "torch": torch}
    exec(code, names)
    optimizer = names["optimizer"]
    with hu.observation.observe(model, optimizer, interval=2) as seen:
        for _ in range(13):
            optimizer.zero_grad()
            model["mlp"](torch.randn(4, 16, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
    return seen


LOSING = "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6, weight_decay=0.1)\n"


@pytest.fixture(scope="module")
def losing() -> hu.observation.Observation:
    """A run whose bfloat16 weights lose nearly all updates, decay and decreases of the second moment."""
    return run_in_bfloat16(LOSING)


def test_the_code_that_is_copied_mends_what_the_card_shows(losing: hu.observation.Observation) -> None:
    (first,) = losing.to_dict()["causes"]
    assert [one.code for one in run_in_bfloat16(LOSING + first["write"]).findings if one.severity != "note"] == []


@pytest.mark.parametrize(
    "made",
    [
        'hu.optim.AdamW(model.parameters(), lr=3e-6, weight_update="nearest")',
        'hu.optim.wrap(torch.optim.NAdam, model.parameters(), lr=3e-6, weight_update="nearest")',
    ],
)
def test_the_code_for_optimizers_of_ones_own_changes_their_groups(made: str) -> None:
    script = f"import halfulp as hu\noptimizer = {made}\n"
    (first, *_) = run_in_bfloat16(script).to_dict()["causes"]
    assert first["code"] == "updates-lost"
    mended = run_in_bfloat16(script + first["write"])
    assert "updates-lost" not in [one.code for one in mended.findings if one.severity != "note"]


def test_the_code_for_several_groups_keeps_their_options() -> None:
    groups = """optimizer = torch.optim.AdamW(
    [{"params": model["mlp"][0].parameters(), "weight_decay": 0.1},
     {"params": model["mlp"][2].parameters(), "weight_decay": 0.0}], lr=3e-6)
"""
    (first, *_) = run_in_bfloat16(groups).to_dict()["causes"]
    seen = run_in_bfloat16(groups + first["write"])
    assert [one.code for one in seen.findings if one.severity != "note"] == []
    assert [group["weight_decay"] for group in seen.optimizers[0].param_groups] == [0.1, 0.0]


def test_updates_second_moment_and_decay_of_one_layer_are_one_card_with_the_code_that_mends_them(
    losing: hu.observation.Observation, forecast: hu.observation.Forecast
) -> None:
    data = losing.to_dict()
    (first,) = data["causes"]
    codes = {data["findings"][k]["code"] for k in first["findings"]}
    assert codes >= {"updates-lost", "weight-decay-lost", "second-moment-stuck"}
    assert re.fullmatch(
        r"mlp\.\{0,2\} lose up to [\d.]+% of their updates: bf16 weights at lr 3e-06", first["headline"]
    )
    assert first["write"].splitlines()[2] == (
        'optimizer = hu.optim.AdamW(optimizer.param_groups, weight_update="kahan")'
    )
    text = render_observation_page(data)
    main = html.unescape(text.partition("<main")[2])
    places = [main.index(said) for said in (first["headline"], first["meaning"], "Cure", "import halfulp", "Where the")]
    assert places == sorted(places), "headline, plain sentence, cure and its code stand first"
    assert sorted(k for cause in data["causes"] for k in cause["findings"]) == list(range(len(data["findings"])))
    ahead = forecast.to_dict()["causes"]
    assert [cause["code"] for cause in ahead if cause["severity"] != "note"] == ["freeze-ahead"]


def test_the_map_opens_on_the_first_cause_in_the_format_that_stores_it(losing: hu.observation.Observation) -> None:
    text = render_observation_page(losing.to_dict())
    shown = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert (shown["role"], shown["order"], shown["stored"]["update"]) == ("update", "lost", "bf16")
    found = [row for row in shown["tensors"] if row["found"]]
    lost = [one for one in losing.findings if one.code == "updates-lost"]
    assert {row["name"] for row in found} == {name for one in lost for name in one.where}
    for row in found:
        update = losing.record.parameters[row["name"]].update
        assert row["lost"] == [update.seen, update.cancelled]


def test_float32_is_a_format_of_the_map_where_it_stores_numbers() -> None:
    model = torch.nn.Linear(4, 4)
    with hu.observation.observe(model, torch.optim.SGD(model.parameters(), lr=0.1), interval=1) as seen:
        model(torch.tensor([[2.0**-130, 1, 1, 1]])).sum().backward()
        seen.optimizers[0].step()
    found = make_magnitude_map_data(seen.to_dict()["record"]["tensors"])
    assert found["stored"] == dict.fromkeys(found["roles"], "fp32")


@pytest.mark.parametrize("name", hu.formats.names())
def test_limits_of_formats_are_those_of_quantize(name: str) -> None:
    format, limits = hu.formats.get(name), find_format_range(name)
    if limits["zero"] > -1000:
        edge = torch.tensor([2.0 ** limits["zero"]], dtype=torch.float64)
        below, above = (hu.quantize(edge * factor, format).item() for factor in (0.999, 1.001))
        assert below == 0 or not format.zero
        assert above > 0
    assert limits["normal"] == format.emin
    if limits["over"] < 1000:
        edge = torch.tensor([2.0 ** limits["over"]], dtype=torch.float64)
        below, above = (
            hu.quantize(edge * factor, format, overflow="nan").isfinite().item() for factor in (0.999, 1.001)
        )
        assert (below, above) == (True, False)


def test_losses_of_sampled_steps_make_one_line_that_nan_alone_interrupts() -> None:
    plain = {"skipped": 0, "exponents": None, "loss_scale": None, "lr": None}
    losses = [3.0, None, None, 2.0, None, "nan", None, 1.0]
    history = [{"step": step, "loss": loss, **plain} for step, loss in enumerate(losses)]
    found = make_history_panels(history)
    assert found is not None
    (panel,) = found["panels"]
    assert panel["lines"][0]["points"] == [(0, 3.0), (3, 2.0), (5, None), (7, 1.0)]
    assert panel["crosses"] == [5]
    assert describe_history(history) == "8 steps on record; loss from 3 to 1."
    broken = make_history_panels([{"step": step, "loss": "inf", **plain} for step in range(3)])
    assert broken is not None
    assert broken["panels"][0]["note"] == "× 3 steps with NaN or infinity"


def test_without_a_step_the_headline_does_not_say_that_all_is_well() -> None:
    assert "Nothing was observed" in render_observation_page({"findings": [], "causes": [], "steps": 0})
    assert "Nothing to mend in 60 steps" in render_observation_page({"findings": [], "causes": [], "steps": 60})


def test_a_card_says_what_its_code_means_and_links_to_the_codes_place_in_the_page_alone() -> None:
    finding = hu.observation.Finding("updates-lost", ("a",), "error", 1.0)
    text = render_observation_page({**plain_findings(finding), "steps": 1}).partition("<main")[2]
    assert 'class="meaning">Updates are smaller than half the gap' in text
    assert re.findall(r'href="([^"]*)"', text) == ["#code-updates-lost"]
    assert text.count('id="code-updates-lost"') == 1
    assert (Path(__file__).parents[3] / re.search(r"docs/findings/[\w-]*\.md", text)[0]).is_file()


def test_a_users_code_has_no_page_in_the_documentation() -> None:
    finding = hu.observation.Finding("mine-alone", ("a",), "error", 1.0)
    text = render_observation_page({**plain_findings(finding), "steps": 1})
    assert 'id="code-mine-alone"' in text
    assert "docs/findings/" not in text


WORDS_OF_BEFORE = re.compile(r"binade|realised|100% sure", re.I)


def test_pages_and_terminal_say_powers_of_two_and_shares_lost(
    pages: dict[str, str], observation: hu.observation.Observation, forecast: hu.observation.Forecast
) -> None:
    for name, text in pages.items():
        shown = re.sub(r"<script.*?</script>", "", text, flags=re.S)
        assert not WORDS_OF_BEFORE.search(shown), name
    for said in (str(observation), str(forecast), str(observation.findings), str(forecast.findings)):
        assert not WORDS_OF_BEFORE.search(re.sub(r"'realised'", "", said))
    for kind in FINDING_KINDS.values():
        assert not WORDS_OF_BEFORE.search(f"{kind.__doc__} {kind.cure} {kind.says}")


@pytest.mark.parametrize(
    ("part", "text", "bar", "tone"),
    [
        *((0.0, "0%", 0, ""), (0.0999, "10%", 0.0999, ""), (0.1, "10%", 0.1, "open"), (0.4999, "50%", 0.4999, "open")),
        *((0.5, "50%", 0.5, "bad"), (1.0, "100%", 1, "bad"), (1.25, "125%", 1, "bad"), (-0.25, "-25%", 0, "")),
    ],
)
def test_the_bar_of_a_lost_share_has_the_colour_of_how_bad_it_is(part, text, bar, tone) -> None:
    assert make_share_cell(part, bar=True, lost=True, title="t") == Cell(text, sort=part, bar=bar, tone=tone, title="t")
    assert make_share_cell(part, bar=True) == Cell(text, sort=part, bar=bar)
    assert make_share_cell(part, lost=True) == make_share_cell(part) == Cell(text, sort=part)


def test_a_cell_is_sorted_by_its_number_and_one_without_stands_last() -> None:
    unknown = Cell("–", sort="")
    assert make_number_cell(1234.5) == Cell("1.23e+03", sort=1234.5)
    assert make_count_cell(1234, "title") == Cell("1,234", sort=1234, title="title")
    assert make_number_cell(None) == make_number_cell("inf") == make_share_cell(None) == unknown
    lost = {"seen": 1200, "cancelled": 900, "known": True, "lost_share": 0.75, "realised_share": 0.25}
    of_all = "900 of 1,200 sampled"
    assert make_changes_lost_cell(lost) == Cell("75%", sort=0.75, title=of_all)
    assert make_changes_lost_cell(lost, bar=True) == Cell("75%", sort=0.75, bar=0.75, tone="bad", title=of_all)
    counted = f"{of_all}; counted where the gradient is not zero"
    assert make_changes_lost_cell({**lost, "known": False}).title == counted
    assert make_changes_lost_cell({**lost, "seen": 0}) == make_changes_lost_cell(None) == unknown
    assert make_movement_kept_cell(lost) == Cell("25%", sort=0.25, bar=0.25)
    assert make_movement_kept_cell({**lost, "realised_share": None}).text == "not known"
    assert make_movement_kept_cell(None) == unknown
