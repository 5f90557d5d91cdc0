"""Lines of a comparison are told apart without colour too."""

from halfulp.trials.page._curves import choose_line_styles


def test_no_two_recipes_share_marker_and_dash() -> None:
    styles = choose_line_styles([f"recipe-{k}" for k in range(24)])
    assert len({(style.marker, style.dash) for style in styles.values()}) == 24


def test_the_controls_keep_their_look_wherever_they_stand() -> None:
    first, last = choose_line_styles(["fp32", "fp32-twin", "bf16"]), choose_line_styles(["bf16", "fp32-twin", "fp32"])
    assert first == last
    assert first["fp32"].marker is None
    assert first["fp32-twin"].dash is not None
