"""Twelve and ten bits for everything, as in section 5 of arXiv 2010.06192: what survives."""

import pytest

from halfulp import recipes
from halfulp.trials import tasks
from halfulp.trials.running import _trial
from halfulp.trials.running._plan import Trial

from ..samples import drawn


def accuracy(recipe: str) -> float:
    """After a fifth of the task's steps; `python -m benchmarks.bench_accuracy` makes all of them."""
    task = tasks.get("digits-fpu")
    result = _trial.run_trial(Trial(task, recipes.get(recipe), 0, int(0.2 * task.steps)), task.load())
    return result["own"]["accuracy"]


KEPT = ["e8m3-stochastic", "e8m3-kahan", "e8m3-kahan-stochastic"]


@pytest.mark.parametrize("recipe", drawn(KEPT, 1, "few bits"))
def test_twelve_bits_keep_the_accuracy(recipe: str) -> None:
    assert accuracy(recipe) >= 0.92


def test_twelve_bits_to_nearest_lose_it() -> None:
    assert accuracy("e8m3") < 0.60


def test_ten_bits_need_more_than_kahan() -> None:
    assert accuracy("e8m1-kahan-stochastic") >= 0.88
    assert accuracy("e8m1") < 0.30
    assert accuracy("e8m1-kahan") < 0.60
