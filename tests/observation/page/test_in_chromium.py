"""Pages in a browser: they sort, filter, count again for another format, follow the reader's colours, and are quiet."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from halfulp.observation.page import render_observation_page

from .conftest import EVIL

VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]


def column(tab: Any, table: str, index: int) -> list[str]:
    return tab.eval_on_selector_all(f"#{table} tbody tr", f"rows => rows.map(row => row.cells[{index}].textContent)")


def choose_format(tab: Any, name: str) -> None:
    """Choose a format of the map, which says whether it is the one that stores the tensors."""
    labels = tab.eval_on_selector_all("[name=format] option", "options => options.map(one => one.textContent)")
    (label,) = [one for one in labels if one in (f"{name}, as stored", f"if this were {name}")]
    tab.locator("[name=format]").select_option(label=label)


def visible(tab: Any, selector: str) -> bool:
    return tab.locator(selector).first.is_visible()


def test_a_click_sorts_and_another_turns_around(show: Callable, data: dict) -> None:
    tab = show(render_observation_page(data)).tab
    head = tab.locator("#updates thead th").nth(4)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    falling = [float(text.rstrip("%")) for text in column(tab, "updates", 4)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 29
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert float(column(tab, "updates", 4)[0].rstrip("%")) == 0


def test_the_keyboard_sorts_by_name_with_numbers_in_order(show: Callable, data: dict) -> None:
    tab = show(render_observation_page(data)).tab
    tab.locator("#updates thead th button").first.focus()
    tab.keyboard.press("Enter")
    names = column(tab, "updates", 0)
    assert names[1:4] == ["layers.1.weight", "layers.2.weight", "layers.3.weight"]
    assert tab.locator("#updates thead th").first.get_attribute("aria-sort") == "ascending"


def test_words_filter_and_all_rows_can_be_shown(show: Callable, data: dict) -> None:
    tab = show(render_observation_page(data)).tab
    assert len(column(tab, "storage", 0)) == 24
    tab.locator("#storage button.more").click()
    assert len(column(tab, "storage", 0)) == 31
    tab.locator("#storage input[type=search]").fill("layers.3.weight bf16")
    assert column(tab, "storage", 0) == ["layers.3.weight"]
    assert column(tab, "storage", 2) == ["fp32"]
    assert tab.locator("#storage .count").text_content() == "1 of 31"
    tab.locator("#storage input[type=search]").fill("nothing has this name")
    assert column(tab, "storage", 0) == []


def set_scale(tab: Any, power: int) -> None:
    tab.eval_on_selector(
        "[name=scale]", f"field => {{ field.value = {power}; field.dispatchEvent(new Event('input')); }}"
    )


def test_a_scale_moves_what_underflows(show: Callable, data: dict) -> None:
    """By powers of two, the count at 2^k is that of the histogram's bins below the limit less k, for fp16 2^-25."""
    tab = show(render_observation_page(data)).tab
    tab.locator(".segments input[value='weight gradient']").check()
    choose_format(tab, "fp16")
    tab.locator("#map details summary").click()
    tab.locator("#numbers-table input[type=search]").fill("layers.20.weight")
    (one,) = [one for one in data["record"]["tensors"] if one["name"] == "layers.20.weight"]
    bins = {int(bin): many for bin, many in one["histogram"].items()}
    for power in (-3, 9):
        set_scale(tab, power)
        tab.locator("#numbers-table input[type=search]").fill("layers.20.weight")
        cells = tab.locator("#numbers-table tbody tr td")
        assert int(cells.nth(3).get_attribute("data-count")) == sum(m for b, m in bins.items() if b + power < -25)
        assert int(cells.nth(4).get_attribute("data-count")) == sum(
            m for b, m in bins.items() if -25 <= b + power < -14
        )
    assert "2⁹" in tab.locator("#map .said").text_content()
    assert "by powers of two" in tab.locator("#map .said").text_content()


def test_to_centre_on_a_tensor_sets_the_scale_that_loses_least_of_it(show: Callable, data: dict) -> None:
    tab = show(render_observation_page(data)).tab
    tab.locator(".segments input[value='weight gradient']").check()
    choose_format(tab, "e4m3fn")
    tab.locator("[name=centre]").select_option(label="layers.25.weight")
    (one,) = [one for one in data["record"]["tensors"] if one["name"] == "layers.25.weight"]
    bins = {int(bin): many for bin, many in one["histogram"].items()}

    def loss(power: int) -> float:
        zero = sum(m for b, m in bins.items() if b + power < -10)
        over = sum(m if b + power > 8 else m * (9 - 8.857981) for b, m in bins.items() if b + power >= 8)
        return zero + round(over) + sum(m for b, m in bins.items() if -10 <= b + power < -6) / 4

    power = int(tab.locator("[name=scale]").input_value())
    assert power > 0
    assert loss(power) == min(map(loss, range(-48, 49)))


def test_the_map_shows_the_tensors_in_order_and_the_most_lost_first(show: Callable, data: dict) -> None:
    tab = show(render_observation_page(data)).tab
    tab.locator(".segments input[value='weight gradient']").check()
    choose_format(tab, "fp16")
    tab.locator("[name=order]").select_option("lost")
    shares = [
        tab.eval_on_selector_all(f"#map svg text.{key}", "texts => texts.map(text => text.textContent)")
        for key in ("zero", "over")
    ]
    lost = [sum(0.005 if one.startswith("<") else float(one.rstrip("%")) for one in both) for both in zip(*shares)]
    assert lost[0] > 30
    assert all(more >= less - 0.2 for more, less in itertools.pairwise(lost))


def test_the_map_opens_on_the_first_finding_and_the_other_formats_say_if(show: Callable, data: dict) -> None:
    named = json.loads(json.dumps(data))
    named["findings"][0] |= {"role": "weight gradient", "where": ["layers.5.weight"]}
    tab = show(render_observation_page(named)).tab
    assert tab.locator(".segments input:checked").get_attribute("value") == "weight gradient"
    first = tab.locator("#map svg g.row text").first
    assert (first.text_content(), first.get_attribute("font-weight")) == ("layers.5.weight", "700")
    assert tab.locator("[name=format] option:checked").text_content() == "fp32, as stored"
    assert "stored in fp32" in tab.locator("#map svg").text_content()
    choose_format(tab, "fp16")
    assert "if this were fp16" in tab.locator("#map svg").text_content()
    tab.locator(".segments input[value=activation]").check()
    assert tab.locator("[name=format] option:checked").text_content() == "if this were fp16", "what was chosen stays"


def test_the_code_of_a_cure_is_copied(show: Callable, data: dict) -> None:
    cured = json.loads(json.dumps(data))
    cured["findings"][0]["write"] = 'a = "<b>"\nc = a'
    tab = show(render_observation_page(cured)).tab
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.locator("button.copy").first.click()
    tab.locator("button.copy", has_text="Copied").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()") == 'a = "<b>"\nc = a'


def test_it_follows_the_readers_colours(show: Callable, data: dict) -> None:
    text = render_observation_page(data)
    paper = [
        show(text, scheme=scheme).tab.evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    light, dark = (sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) for colour in paper)
    assert light > 700
    assert dark < 100


def test_nothing_in_a_name_or_cure_is_markup(show: Callable, data: dict) -> None:
    tab = show(render_observation_page(data)).tab
    assert tab.locator("main b:text('evil'), main i:text('cure')").count() == 0
    assert tab.locator("#updates code", has_text=EVIL).count() <= 1
    tab.locator("#map details summary").click()
    assert tab.locator("#numbers-table code").first.text_content() == EVIL.removesuffix(".weight")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("scheme", "width"), VIEWS)
@pytest.mark.parametrize("instrument", ["observe", "audit", "forecast"])
def test_axe_finds_nothing_and_nothing_scrolls_sideways(
    show: Callable, pages: dict, instrument: str, scheme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    tab = show(pages[instrument], width, scheme).tab
    for summary in tab.locator("details > summary").all():
        if summary.is_visible():
            summary.click()
    found = axe.Axe().run(tab).response["violations"]
    assert [f"{one['id']}: {one['nodes'][0]['html'][:150]}" for one in found] == []
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_the_map_fits_a_phone_and_a_wide_screen(show: Callable, data: dict) -> None:
    for width in (390, 1280):
        tab = show(render_observation_page(data), width).tab
        drawn = tab.eval_on_selector("#map svg", "svg => svg.getBoundingClientRect().right")
        assert drawn <= width


def test_names_are_whole_on_a_phone(show: Callable, pages: dict, data: dict) -> None:
    """They stand above their rows there, where left of them a third of each would be cut."""
    long = json.loads(json.dumps(data).replace("layers.", "model.decoder.layers."))
    for text, chart in ((render_observation_page(long), "map"), (pages["forecast"], "shares")):
        tab = show(text, 390).tab
        names = tab.eval_on_selector_all(
            f"#{chart} svg g > text[font-family]",
            "all => all.map(one => [one, one.getBoundingClientRect()]).map(([one, box]) => "
            "[one.textContent, box.left, box.right])",
        )
        assert names
        assert not [name for name, _, _ in names if "…" in name and len(name) < 48]
        assert all(0 <= left < right <= 390 for _, left, right in names)


def test_the_map_says_which_tensors_are_stored_in_which_format(show: Callable, data: dict) -> None:
    mixed = json.loads(json.dumps(data))
    own = [one for one in mixed["record"]["tensors"] if one["role"] == "activation" and one["sampled"]]
    for one in own:
        one["dtype"] = "float32"
    said = lambda: show(render_observation_page(mixed)).tab.locator("#map .said").text_content()  # noqa: E731
    assert said().startswith(f"All {len(own)} tensors are fp32. ")
    for one in own[:2]:
        one["dtype"] = "bfloat16"
    names = f"{own[0]['name'] or '(model)'}, {own[1]['name'] or '(model)'}"
    assert said().startswith(f"Only 2 of {len(own)} tensors are bf16 ({names}), the rest fp32. ")
    for one in own[2:6]:
        one["dtype"] = "float16"
    assert said().startswith(f"Only 2 of {len(own)} tensors are bf16 ({names}), 4 fp16, the rest fp32. ")


def test_a_saved_map_stands_alone(show: Callable, data: dict) -> None:
    tab = show(render_observation_page(data)).tab
    with tab.expect_download() as waiting:
        tab.locator("#map .save").click()
    text = waiting.value.path().read_text(encoding="utf-8")
    assert waiting.value.suggested_filename == "activation-fp32.svg"
    assert text.startswith("<svg")
    assert "--kept:#" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_nan_and_infinity_have_a_column_of_the_map_and_crosses_over_the_steps(show: Callable, data: dict) -> None:
    broken = json.loads(json.dumps(data))
    for one in broken["record"]["tensors"]:
        if one["role"] == "activation":
            one["nonfinite"] = one["elements"] // 2
    for one in broken["record"]["history"]:
        one["loss"] = "nan" if one["sampled"] else None
    tab = show(render_observation_page(broken)).tab
    shares = tab.eval_on_selector_all("#map svg text.broken", "texts => texts.map(text => text.textContent)")
    assert shares[:3] == ["50%"] * 3
    assert "of the tensors' elements are NaN or infinite" in tab.locator("#map .said").text_content()
    assert tab.locator("#history svg", has_text="2 steps with NaN or infinity").count() == 1
    tab.locator(".segments input[value='weight gradient']").check()
    assert tab.locator("#map svg text.broken").count() == 0


def test_a_loss_known_at_some_steps_is_one_line_through_dots(show: Callable, data: dict) -> None:
    sparse = json.loads(json.dumps(data))
    for one in sparse["record"]["history"]:
        one["loss"] = 3.0 / (one["step"] + 1) if one["step"] % 25 == 0 else None
    tab = show(render_observation_page(sparse)).tab
    assert tab.locator("#history svg circle").count() == 4
    lines = tab.eval_on_selector_all(
        "#history svg path[stroke='var(--c0)']", "all => all.map(one => one.getAttribute('d'))"
    )
    assert [line.count("L") for line in lines] == [3]


def test_an_audit_says_what_moved_and_sorts(show: Callable, pages: dict) -> None:
    tab = show(pages["audit"]).tab
    assert tab.locator("h1").text_content() == "norm.weight: did not move"
    moved = "60 optimizer steps from A to B · 2 of 4 tensors moved · 1 did not move at all"
    assert tab.locator(".lead").text_content() == f"1 finding (1 error) in 4 tensors · {moved}"
    assert column(tab, "groups", 1)[0] == "did not move"
    tab.locator("#groups thead th").nth(4).locator("button").click()
    assert column(tab, "groups", 0)[0] == EVIL
    assert column(tab, "groups", 4) == ["16", "4", "2", "0"]
    assert column(tab, "states", 4)[0] == "90%"
    assert "step 3 is <b>lost</b>" in tab.locator("main").text_content()


def test_a_forecast_marks_where_layers_freeze(show: Callable, pages: dict) -> None:
    tab = show(pages["forecast"]).tab
    steps = [text for text in column(tab, "layers", 4) if text != "never"]
    assert steps
    assert tab.locator("#shares svg g path").count() == len(steps)
    assert tab.locator("#shares svg text", has_text="learning rate").count() == 1


def test_a_page_of_an_empty_observation(show: Callable) -> None:
    tab = show(render_observation_page({"findings": [], "causes": [], "steps": 0})).tab
    assert tab.locator("h1").text_content() == "Nothing was observed: no optimizer stepped"
    assert not visible(tab, "#map")
