"""The cheapest recipe within a tolerance, on steps made so that it is known which one that is."""

import json
import re
import types

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.trials import _tune
from halfulp.trials.tasks import Step


def far(seed: int, *, lr: float, steps: int = 40, distance: float = 0.5) -> Step:
    """Weights that start beside 1 and are to move by a distance, in updates of about `lr`."""
    torch.manual_seed(seed)
    start = nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        start.weight.fill_(1.0)
    goal = 1 + distance * torch.rand(64)

    def step(model: nn.Module, number: int) -> torch.Tensor:
        noise = torch.randn(64, generator=torch.Generator().manual_seed(number))
        return (model.weight[0].float() - goal - 0.01 * noise).square().sum()

    return Step(step, start, steps=steps, rule="SGD", lr=lr, momentum=0.0)


def found(tuned: hu.trials.Tuned) -> dict[str, str]:
    return {one.recipe.name: one.outcome for one in tuned.candidates}


def test_lost_updates_rule_nearest_out(seed: int) -> None:
    """Updates below 2^-9 beside 1 are below half of bfloat16's spacing: nothing moves."""
    tuned = hu.tune(far(seed, lr=1.5e-3, steps=120), 0.05)
    assert tuned.recipe.weight_update in ("stochastic", "split8", "kahan", "split")
    assert found(tuned)["bf16"] == "worse"
    holds = [one for one in tuned.candidates if one.outcome == "holds"]
    assert min(holds, key=lambda one: one.bytes_per_parameter).recipe == tuned.recipe


class Two(nn.Module):
    """Two kinds of weights: `low` begins at 0, `high` at 64, where bfloat16's spacing is a half."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.ParameterList(nn.Parameter(torch.zeros(256)) for _ in range(2))
        self.high = nn.ParameterList(nn.Parameter(torch.full((64,), 64.0)) for _ in range(2))


def drifts(distance: float, steps: int = 128) -> Step:
    """All weights drift at a constant speed, half of their way in float32: `low` by 1/2, `high` by half a distance.

    The gradient does not depend on the weights. Judged is the mean square of what is left of each way, 1/4.
    """
    start, lr = Two(), 1e-2

    def step(model: nn.Module, number: int) -> torch.Tensor:
        ways = [-0.5 * w.float().sum() / (steps * lr) for w in model.low]
        return torch.stack([*ways, *(-0.5 * distance * w.float().sum() / (steps * lr) for w in model.high)]).sum()

    def judge(model: nn.Module, number: int) -> torch.Tensor:
        left = torch.cat([1 - w.float() for w in model.low]).square().mean()
        return (left + torch.cat([1 - (w.float() - 64) / distance for w in model.high]).square().mean()) / 2

    return Step(step, start, judge=judge, judged=1, steps=steps, rule="SGD", lr=lr, momentum=0.0)


def test_nearest_will_do_where_updates_are_large(seed: int) -> None:
    """Updates of 2^-8 below 1/2 and of 4 below 1024 are whole spacings: nothing is rounded at all."""
    tuned = hu.tune(drifts(1024.0))
    assert tuned.recipe.weight_update == "nearest"
    assert tuned.bytes_per_parameter == min(one.bytes_per_parameter for one in tuned.candidates)
    assert [outcome for outcome in found(tuned).values() if outcome != "not trained"] == ["holds", "holds"]
    assert all(one.outcome == "not trained" for one in tuned.candidates[1:-1])
    assert tuned.evidence.row("step", tuned.recipe.name).gap == 0


def test_recipes_of_ones_own_are_tried_by_their_bytes(seed: int) -> None:
    task = far(seed, lr=1.5e-3, steps=120)
    tuned = hu.tune(task, 0.05, recipes=["bf16-split", "bf16-kahan", "bf16", "fp32"])
    assert next(one.recipe.name for one in tuned.candidates) == "bf16"
    assert found(tuned)["bf16"] == "worse"
    assert tuned.recipe.name in ("bf16-kahan", "bf16-split")
    assert {row.recipe for row in tuned.evidence.rows()} >= {"fp32", "fp32-twin", "bf16", tuned.recipe.name}


def test_float32_remains_where_nothing_holds(seed: int) -> None:
    tuned = hu.tune(far(seed, lr=1.5e-3, steps=120), 0.05, recipes=["bf16"])
    assert tuned.recipe.name == "fp32"
    assert "no candidate is within 5.0% of float32; float32 remains" in str(tuned)


def test_what_it_found_is_plain_data_and_words(seed: int, tmp_path) -> None:
    events: list[str] = []
    task = drifts(1024.0)
    tuned = hu.tune(task, 0.2, out=tmp_path / "out", listen=lambda kind, *_: events.append(kind))
    data = json.loads(json.dumps(tuned.to_dict(), allow_nan=False))
    assert data["recipe"]["name"] == tuned.recipe.name
    assert re.search(r"step: .* within 20\.0% of float32, at \d\.\d bytes per parameter instead of", str(tuned))
    assert (tmp_path / "out" / "compare.html").exists()
    trained = events.count("done")
    events.clear()
    assert trained == len(tuned.evidence.trials)
    with pytest.raises(ValueError, match="nothing tells whether its function, model and data are those"):
        hu.tune(task, 0.2, out=tmp_path / "out", resume=True, listen=lambda kind, *_: events.append(kind))
    assert events.count("done") == 0


def test_bad_input(seed: int) -> None:
    task = far(seed, lr=0.4, steps=5)
    for tolerance in (0, 1, -0.1, True, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1, or None; got"):
            hu.tune(task, tolerance)
    with pytest.raises(ValueError, match="a verdict needs three seeds, got 2"):
        hu.tune(task, seeds=2)
    with pytest.raises(ValueError, match="no candidate beside float32"):
        hu.tune(task, recipes=["fp32"])
    with pytest.raises(ValueError, match="between 0 and 1, or None; got 'much'"):
        hu.tune(task, "much")
    with pytest.raises(TypeError, match=r"a Task or a halfulp\.trials\.tasks\.Step, got an int"):
        hu.tune(3)


def test_a_tolerance_below_what_seeds_can_tell_leaves_float32(seed: int) -> None:
    tuned = hu.tune(far(seed, lr=0.4), 1e-5, recipes=["bf16-kahan"])
    assert tuned.recipe.name == "fp32"
    assert found(tuned)["bf16-kahan"] != "holds"


def test_float32_that_diverges(seed: int) -> None:
    with pytest.raises(ValueError, match="task 'step' diverges in float32 from 3 of 3 seeds"):
        hu.tune(far(seed, lr=1e30))


@pytest.mark.parametrize("rule", ["AdamW", "SGD", "Lion"])
def test_candidates_have_names_of_their_own_and_rise_in_bytes(rule: str) -> None:
    """A name stands for one recipe: that of the catalogue, or none of the catalogue's."""
    task = Step(lambda model, number: model, nn.Linear(128, 64), steps=1, rule=rule, lr=0.1)
    model = task.model(task.load(), 0)
    left = _tune.list_candidates(task, model)
    names = [candidate.recipe.name for candidate in left]
    assert len(set(names)) == len(names) >= 5
    sizes = [candidate.bytes_per_parameter for candidate in left]
    assert sizes == sorted(sizes)
    for candidate in left:
        if candidate.recipe.name in hu.recipes.names():
            assert candidate.recipe == hu.recipes.get(candidate.recipe.name)


class Rehearsal:
    """A run whose first seed and whose three seeds have given rows, beside a float32 whose loss is 2."""

    def __init__(self, first: dict, whole: dict) -> None:
        self.rows, self.trained = [first, whole], []

    def train_trials_without_result(self, trials) -> None:
        self.trained.append([trial.seed for trial in trials])

    def make_evidence(self):
        common = {"diverged": 0, "seeds": len(self.trained[-1]), "interval": None, "tolerance": 0.25}
        own = {**common, **self.rows[len(self.trained) - 1]}
        rows = {"fp32": types.SimpleNamespace(loss=-2.0), "bf16": types.SimpleNamespace(**own)}
        return types.SimpleNamespace(row=lambda task, name: rows[name])


@pytest.mark.parametrize(
    ("tolerance", "first", "gap", "interval", "outcome"),
    [
        # None: the rows' own tolerance, 0.25; 0.125 of float32's 2 is the same. A first seed may be three times as far.
        (None, 0.75, 0.0, 0.25, "holds"),
        (0.125, 0.75, 0.0, 0.25, "holds"),
        (None, 0.7501, None, None, "worse"),
        (0.125, 0.7501, None, None, "worse"),
        (None, 0.0, 0.125, 0.125, "holds"),
        (0.125, 0.0, 0.125, 0.125, "holds"),
        (None, 0.0, 0.125, 0.126, "unclear"),
        (0.125, 0.0, 0.125, 0.126, "unclear"),
        # As `compare` judges: a gap beyond its interval, above or below float32; or above the tolerance for certain.
        (None, 0.0, 0.0625, 0.03125, "worse"),
        (0.125, 0.0, 0.0625, 0.03125, "holds"),
        (None, 0.0, -0.5, 0.25, "holds"),
        (0.125, 0.0, -0.5, 0.25, "holds"),
        (None, 0.0, -0.25, 0.25, "unclear"),
        (0.125, 0.0, -0.25, 0.25, "holds"),
        (0.125, 0.0, 0.5, 0.25, "unclear"),
        (0.125, 0.0, 0.5001, 0.25, "worse"),
    ],
)
def test_outcomes_at_their_edges(tolerance, first, gap, interval, outcome) -> None:
    run = Rehearsal({"gap": first}, {"gap": gap, "interval": interval})
    candidate = _tune.Candidate(hu.recipes.get("bf16"), 4.0)
    found = _tune._train_and_judge_candidate(candidate, hu.trials.tasks.get("digits"), (5, 6, 7), 3, tolerance, run)
    assert (found.outcome, found.gap) == (outcome, first if gap is None else gap)
    assert run.trained == ([[5]] if gap is None else [[5], [5, 6, 7]])
    assert found.why == ("its first seed is 3 times the tolerance above float32" if gap is None else found.why)
    assert ("more of them (seeds=) would tell" in found.why) is (outcome == "unclear")
    assert (found.recipe, found.bytes_per_parameter) == (candidate.recipe, 4.0)


@pytest.mark.parametrize("lost", [{"diverged": 2, "gap": None}, {"diverged": 1, "gap": 0.0}])
@pytest.mark.parametrize("late", [False, True])
def test_a_candidate_that_diverges(lost, late) -> None:
    run = Rehearsal({"gap": 0.0} if late else lost, lost)
    found = _tune._train_and_judge_candidate(
        _tune.Candidate(hu.recipes.get("bf16"), 4.0), hu.trials.tasks.get("digits"), (0, 1, 2), 3, None, run
    )
    assert (found.outcome, found.gap) == ("diverged", None)
    assert found.why == f"its loss is not finite from {lost['diverged']} of {3 if late else 1} seeds"
