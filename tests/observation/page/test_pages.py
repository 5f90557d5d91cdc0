"""The three pages as text: made from plain data alone, self-contained, escaped, written whole."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch

import halfulp as hu
from halfulp.observation.page import forecast_html, observation_html
from halfulp.observation.page._findings import finding_cards
from halfulp.observation.page._history import history_data, history_words
from halfulp.observation.page._magnitudes import format_limits


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
    for make, found in ((observation_html, observation), (forecast_html, forecast)):
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
    text = forecast_html(forecast.to_dict())
    for layer in forecast.layers:
        assert f"<code>{layer.name}</code>" in text
        if layer.freeze_step is not None:
            assert f">{layer.freeze_step:,}<" in text
    steps, rates = zip(*forecast.learning_rates)
    assert (steps[0], steps[-1]) == (0, 999)
    assert max(rates) == pytest.approx(6e-4, rel=1e-2)


def test_a_page_of_nan_from_the_first_step() -> None:
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, float("nan"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observation.observe(model, optimizer, interval=1) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert "first-nonfinite" in observation_html(seen.to_dict())


def test_findings_of_one_code_and_cure_share_a_card() -> None:
    rows = [
        hu.observation.Finding("updates-lost", (f"{name}.weight",), "error", sure, {"lost": lost}, "cure", "said")
        for name, sure, lost in (("a", 1.0, 0.5), ("b", 0.5, float("nan")))
    ]
    other = hu.observation.Finding("updates-lost", ("c",), "note", 1.0, {}, "cure", "said")
    cards = finding_cards([one.to_dict() for one in (*rows, other)])
    assert [(card["severity"], len(card["lines"]), card["sure"]) for card in cards] == [
        ("error", 2, "50 to 100%"),
        ("note", 1, "100%"),
    ]
    assert cards[0]["lines"][1]["evidence"] == [("lost", "nan")]


@pytest.mark.parametrize("name", hu.formats.names())
def test_limits_of_formats_are_those_of_quantize(name: str) -> None:
    format, limits = hu.formats.get(name), format_limits(name)
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
    found = history_data(history)
    assert found is not None
    (panel,) = found["panels"]
    assert panel["lines"][0]["points"] == [(0, 3.0), (3, 2.0), (5, None), (7, 1.0)]
    assert panel["crosses"] == [5]
    assert history_words(history) == "8 steps on record; loss from 3 to 1; loss NaN or infinite in 1 of 4 steps."
    broken = history_data([{"step": step, "loss": "inf", **plain} for step in range(3)])
    assert broken is not None
    assert broken["panels"][0]["note"] == "× 3 steps with NaN or infinity"


def test_without_a_step_the_headline_does_not_say_that_all_is_well() -> None:
    assert "Nothing was observed" in observation_html({"findings": [], "steps": 0})
    twice = [
        {"number": k, "model": "M", "optimizers": [], "steps": 60, "overlaps": [], "shown": k == 1} for k in (1, 2)
    ]
    for one in twice:
        one["findings"] = []
    assert "Nothing to mend in 120 steps of 2 trainings" in observation_html(
        {"findings": [], "steps": 60, "trainings": twice}
    )


def test_a_card_says_what_its_code_means_and_links_nowhere() -> None:
    finding = hu.observation.Finding("updates-lost", ("a",), "error", 1.0).to_dict()
    text = observation_html({"findings": [finding], "steps": 1})
    assert 'class="meaning">Updates are smaller than half the spacing' in text
    assert "href=" not in text.partition("<main")[2]
