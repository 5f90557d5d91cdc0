"""Lines of a comparison: what is drawn, told apart without colour too."""

import numpy as np
import pytest

from halfulp.trials.page import _curves
from halfulp.trials.page._curves import choose_line_styles


def test_no_two_recipes_share_marker_and_dash() -> None:
    styles = choose_line_styles([f"recipe-{k}" for k in range(24)])
    assert len({(style.marker, style.dash) for style in styles.values()}) == 24


def test_the_controls_keep_their_look_wherever_they_stand() -> None:
    first, last = choose_line_styles(["fp32", "fp32-twin", "bf16"]), choose_line_styles(["bf16", "fp32-twin", "fp32"])
    assert first == last
    assert first["fp32"].marker is None
    assert first["fp32-twin"].dash is not None


CURVES = {
    "fp32": {seed: {step: 2.0 + seed - step / 100 for step in range(1, 41)} for seed in range(3)},
    "fp32-twin": {seed: {step: 2.001 + seed - step / 100 for step in range(1, 41)} for seed in range(3)},
    "bf16": {seed: {step: 3.0 + 2 * seed - step / 100 for step in range(3, 44)} for seed in range(1, 4)},
    "alone": {7: dict.fromkeys(range(1, 41), 5.0)},
}


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list:
    """The axes of what is drawn."""
    figures = []
    monkeypatch.setattr(_curves, "render_figure_as_svg", lambda figure: figures.append(figure) or "<svg></svg>")
    _curves.draw_loss_curves(CURVES, "task", 720, 480)
    assert figures[0].get_size_inches().tolist() == [10.0, 480 / 72]
    return figures[0].axes


def test_the_first_panel_has_means_over_seeds_at_the_steps_that_all_have(panels) -> None:
    drawn = [line.get_xydata().tolist() for line in panels[0].lines]
    means = [(2.0 + 1, 1, 41), (2.001 + 1, 1, 41), (3.0 + 4, 3, 44), (5.0, 1, 41)]
    for found, (start, first, end) in zip(drawn, means, strict=True):
        slope = 0 if start == 5.0 else 1 / 100
        assert np.allclose(found, [(step, start - slope * step) for step in range(first, end)])


def test_the_others_have_differences_to_the_reference_paired_by_seed(panels) -> None:
    """Of the recipes with a seed of the reference's, at common steps; the twin, so close, has a panel of its own."""
    assert [panel.get_title(loc="left") for panel in panels] == list(_curves._PANEL_TITLES)
    zero = [[0.0, 0.0], [1.0, 0.0]]
    twin, bf16 = [[step, 0.001] for step in range(1, 41)], [[step, 1 + 1.5] for step in range(3, 41)]
    for panel, wanted in ((panels[1], [twin, bf16, zero]), (panels[2], [twin, zero])):
        for line, points in zip(panel.lines, wanted, strict=True):
            assert np.allclose(line.get_xydata(), points)
    twin, bf16 = (shade.get_paths()[0].vertices for shade in panels[1].collections)
    assert np.allclose([twin.min(0), twin.max(0)], [(1, 0.001), (40, 0.001)])
    assert np.allclose([bf16.min(0), bf16.max(0)], [(3, 2.0), (40, 3.0)])
    assert not panels[2].collections


def test_the_axes_leave_a_little_room_and_cut_off_the_first_losses(panels) -> None:
    losses = sorted(loss for seeds in CURVES.values() for one in seeds.values() for loss in list(one.values())[5:])
    low, high = losses[0], losses[int(0.97 * (len(losses) - 1))]
    assert panels[0].get_ylim() == pytest.approx((low - 0.06 * (high - low), high + 0.06 * (high - low)))
    assert [panel.get_xlabel() for panel in panels] == ["", "", "step"]
