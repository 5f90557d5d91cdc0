"""The papers' suite of benchmarks: which pairs it trains, and why it leaves others out."""

from pathlib import Path

import pytest
from benchmarks import papers_suite


@pytest.mark.usefixtures("forked_workers")
def test_a_run_of_a_part(tmp_path: Path) -> None:
    def run():
        return papers_suite.run_suite(["linear-regression"], ["bf16"], "smoke", [0], None, tmp_path)

    found = run()
    assert [row.recipe for row in found.rows()] == ["fp32", "fp32-twin", "bf16"]
    assert found.run["size"] == "smoke"
    assert run().run["trained"] == 0


def test_what_does_not_go_together_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self, recipe) -> str | None:
        return "takes no scales" if recipe.name == "fp16-adaptive" else None

    monkeypatch.setattr("halfulp.trials.tasks._full_batch.CancerMLP.explain_refusal", refuse)
    recipes, left_out = papers_suite.choose_recipes("cancer-mlp", "smoke", None, None)
    names = {recipe.name for recipe in recipes}
    assert left_out == {"fp16-adaptive": "the task takes no scales"}
    assert "fp16-mc2" in names
    assert "fp16-mc2" not in {one.name for one in papers_suite.choose_recipes("digits-fpu", "smoke", None, None)[0]}


def test_small_leaves_out_what_takes_long_unless_it_is_named() -> None:
    recipes, left_out = papers_suite.choose_recipes("two-heads", "small", None, None)
    assert "left out at small" in left_out["nvfp4"]
    assert "nvfp4" not in {recipe.name for recipe in recipes}
    named, left_out = papers_suite.choose_recipes("two-heads", "small", None, ["nvfp4"])
    assert [recipe.name for recipe in named] == ["fp32", "fp32-twin", "nvfp4"]
    assert not left_out
