"""The mammals task on a small tree: its data, its start in every format, a trial."""

import pickle
from pathlib import Path

import pytest
import torch

from halfulp import recipes
from halfulp.hyperbolic import HalfSpace
from halfulp.mctensor import MCTensor
from halfulp.trials.tasks._mammals import (
    RANKING_LOSS_DISTANCE_SCALE,
    Mammals,
    compute_ranking_scores,
    convert_points_to_recipe,
)


def recipe(dtype: str | None = "float64", components: int = 1, **other) -> recipes.Recipe:
    several = {"components": components} if components > 1 else {}
    return recipes.Recipe(name="mine", param_dtype=dtype, **several, **other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The closure of a binary tree of 63 nodes, in the schema of the real file."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    edges = []
    for node in range(1, 63):
        above = node
        while above:
            above = (above - 1) // 2
            edges.append((f"n{node}", f"n{above}"))
    root = tmp_path_factory.mktemp("data")
    (root / "wordnet_mammals").mkdir()
    first, second = zip(*edges)
    table = pa.table({"id1": first, "id2": second, "weight": ["1"] * len(edges)})
    parquet.write_table(table, root / "wordnet_mammals" / "closure.parquet")
    return root


@pytest.fixture
def task(folder: Path) -> Mammals:
    return Mammals(data=str(folder))


def test_data(task):
    edges, names = task.read_edges()
    assert (len(names), tuple(edges.shape)) == (63, (258, 2))
    assert {names[k] for k in edges[:, 0].unique().tolist()} == set(names) - {"n0"}
    data = task.load()
    assert torch.equal(data.train[0][:, :2], edges)
    assert "258 edges between 63 synsets" in data.note
    assert pickle.loads(pickle.dumps(task)).settings() == task.settings()


def test_missing_data_says_how_to_get_it(tmp_path):
    for given in (None, str(tmp_path)):
        with pytest.raises(ValueError, match="https://"):
            Mammals(data=given)


def test_burn_in(task):
    assert [task.lr_factor(step, 1000) for step in (0, 19, 20, 999)] == [0.01, 0.01, 1.0, 1.0]
    assert len(list(task.draw_ranking_sets(task.read_edges()[0], 0, 20))) == 20


@pytest.mark.parametrize(("dtype", "components"), [(None, 1), ("float64", 1), ("float64", 2), ("float32", 2)])
def test_a_trial_learns(task, dtype, components, seed):
    data = task.load()
    seen = []
    result = task.trial(recipe(dtype, components), seed, 700, data, lambda step, loss: seen.append((step, loss)))
    assert result["diverged_at"] is None
    assert result["curve"][-1][1] < 0.8 * result["curve"][0][1]
    assert seen[-1] == tuple(result["curve"][-1])
    assert 0.4 < result["map"] <= 1
    assert 1 <= result["mean_rank"] < 10
    assert result["own"]["accuracy"] == result["map"]
    assert result["bytes_per_parameter"] == (8 if dtype == "float64" else 4) * (components + 1)


def test_formats_start_alike_and_part_late(task, seed):
    data = task.load()
    edges = data.train[0][:, :2]
    plain = convert_points_to_recipe(recipe(), task.model(data, seed).points.detach(), seed)
    wide = convert_points_to_recipe(recipe(components=2), task.model(data, seed).points.detach(), seed)
    assert isinstance(wide, MCTensor)
    assert torch.equal(plain, wide.decode())
    for points in (plain, wide):
        task.train_points(points, edges, seed, 5)
    assert torch.allclose(plain.detach(), wide.detach().decode(), rtol=1e-11, atol=1e-12)


def test_the_loss_of_all_edges(task, seed):
    edges, names = task.read_edges()
    points = torch.rand(len(names), 2, dtype=torch.float64) + 0.1
    known = {tuple(edge) for edge in edges.tolist()}
    total = 0.0
    for u, v in edges.tolist():
        others = [k for k in range(len(names)) if k not in (u, v) and (u, k) not in known]
        logits = -RANKING_LOSS_DISTANCE_SCALE * HalfSpace().distance(points[u], points[[v, *others]])
        total += float(logits.logsumexp(0) - logits[0])
    assert compute_ranking_scores(points, edges)["loss"] == pytest.approx(total / len(edges))


@pytest.mark.parametrize("name", ["bf16-kahan", "e8m3"])
def test_recipes_that_do_not_fit(task, name):
    with pytest.raises(ValueError, match="choose 'fp32', 'fp64' or 'fp64-mc2'"):
        task.trial(recipes.get(name), 0, 2, task.load())


def test_the_control_starts_elsewhere(task):
    data = task.load()
    model = task.model(data, 0)
    a = convert_points_to_recipe(recipes.get("fp32"), model.points.detach(), 0)
    b = convert_points_to_recipe(recipes.get("fp32-twin"), model.points.detach(), 0)
    assert torch.equal(a, model.points)
    assert not torch.equal(a, b)
    assert torch.allclose(a, b, rtol=1e-5)
