"""Task mammals: WordNet's mammals embedded in the hyperbolic plane, where plain floats run out of digits."""

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...hyperbolic import HalfSpace, RankingSets, RiemannianSGD, evaluate_reconstruction, ranking_loss_and_gradient
from ...mctensor import MCTensor
from ...recipes import Recipe
from ._files import TaskWithDataFiles, read_parquet
from ._task import Data, LossCurveRecorder, ReportLoss

NEGATIVES_PER_EDGE = 50
RANKING_LOSS_DISTANCE_SCALE = 0.3
BURN_IN_SHARE_OF_STEPS = 0.02  # of all steps, at a hundredth of the learning rate
_POINT_DTYPE_BY_NAME = {"float32": torch.float32, "float64": torch.float64}


class Mammals(TaskWithDataFiles):
    """WordNet's 1,180 mammals as points of the hyperbolic half-plane; needs ``data``.

    The experiment of "MCTensor" (arXiv 2207.08867), which trains 1,000 epochs: an animal shall be closer to what it
    is a kind of than to 50 others, by Riemannian SGD. Judged by the ranking loss of all edges against all other
    nodes; accuracy is the mean average precision. Points are float32 or float64, with components or without, so the
    recipes are "fp32" and those that name components.

    Each trial is one run of `train_points`, not of the common training loop.
    """

    name: ClassVar[str] = "mammals"
    title: ClassVar[str] = "WordNet's mammals in the hyperbolic plane"
    rule: ClassVar[str] = "RiemannianSGD"
    hyper: ClassVar[dict[str, Any]] = {
        "lr": 1.7,
        "others": NEGATIVES_PER_EDGE,
        "scale": RANKING_LOSS_DISTANCE_SCALE,
        "burn_in": BURN_IN_SHARE_OF_STEPS,
    }
    batch: ClassVar[int] = 32
    steps: ClassVar[int] = 1000 * 205
    target: ClassVar[str] = "edge"
    folder: ClassVar[str] = "wordnet_mammals"
    files: ClassVar[tuple[str, ...]] = ("closure.parquet",)
    how: ClassVar[str] = (
        "It is the transitive closure of WordNet's mammals (columns id1, id2, weight; 6,540 edges), "
        "https://raw.githubusercontent.com/ydtydr/MCTensor/main/applications/poincare_embedding/wordnet/"
        "mammal_closure.csv as Parquet"
    )

    def load(self) -> Data:
        """Return the edges, and of every edge a fixed set of negatives to validate on."""
        edges, names = self.read_edges()
        sets = RankingSets(edges, len(names), NEGATIVES_PER_EDGE, self.batch)
        fixed = sets.draw(edges, torch.Generator().manual_seed(0))
        targets = torch.zeros(len(edges), dtype=torch.long, device="cpu")
        note = f"the closure of WordNet's mammals: {len(edges):,} edges between {len(names):,} synsets"
        return Data(train=(fixed, targets), validation=(fixed, targets), note=note)

    def read_edges(self) -> tuple[Tensor, list[str]]:
        """Return every edge from a synset to one that it is a kind of, int64 (E, 2), and the synsets' names."""
        columns = read_parquet(f"{self.data}/closure.parquet", ["id1", "id2"])
        numbers: dict[str, int] = {}
        edges = [[numbers.setdefault(name, len(numbers)) for name in pair] for pair in zip(*columns)]
        return torch.tensor(edges, dtype=torch.int64, device="cpu"), list(numbers)

    def model(self, data: Data, seed: int) -> "PointTable":
        """Draw points within 1e-4 of (0, 1)."""
        generator = torch.Generator().manual_seed(seed)
        count = 1 + int(data.train[0][:, :2].max())
        around = torch.rand(count, 2, generator=generator, dtype=torch.float32, device="cpu") * 2 - 1
        return PointTable(1e-4 * around + torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu"))

    def draw_ranking_sets(self, edges: Tensor, seed: int, steps: int) -> Iterator[Tensor]:
        """Yield shuffled epochs of ranking sets, an edge and its negatives a row; in the burn-in popular ones."""
        drawn = RankingSets(edges, 1 + int(edges.max()), NEGATIVES_PER_EDGE, self.batch)
        generator = torch.Generator().manual_seed(seed)
        done = 0
        while done < steps:
            for sets in drawn.epoch(generator, popular=done < BURN_IN_SHARE_OF_STEPS * steps):
                if done < steps:
                    yield sets
                done += 1

    def lr_factor(self, step: int, steps: int) -> float:
        """Return a hundredth during the first fiftieth of the steps (20 epochs of 1,000)."""
        return 0.01 if step < BURN_IN_SHARE_OF_STEPS * steps else 1.0

    def explain_refusal(self, recipe: Recipe) -> str | None:
        """Return why a recipe cannot train points; None where it can."""
        others = (recipe.weight_update, recipe.format, recipe.emulate, recipe.payload, recipe.operand_format)
        if recipe.param_dtype not in (None, *_POINT_DTYPE_BY_NAME) or recipe.gradient_format or any(others):
            return "moves float32 or float64 points, plain or with components, along geodesics"
        return None

    def trial(
        self, recipe: Recipe, seed: int, steps: int, data: Data, report: ReportLoss | None = None
    ) -> dict[str, Any]:
        """Run one trial; return a trial's results with `map` and `mean_rank`."""
        if why := self.explain_refusal(recipe):
            raise ValueError(f"task 'mammals' {why}; {recipe.name!r} does not: choose 'fp32', 'fp64' or 'fp64-mc2'")
        points = convert_points_to_recipe(recipe, self.model(data, seed).points.detach(), seed)
        edges = data.train[0][:, :2]
        course = self.train_points(points, edges, seed, steps, report)
        scores = compute_ranking_scores(points.detach(), edges) if course["diverged_at"] is None else {}
        score = {"loss": scores.pop("loss", None), "accuracy": scores.get("map")}
        size = {"parameters": points.numel(), "targets": len(edges), "data": data.note}
        return {**course, "float32": {"validation": score, "train": score}, "own": score, **size, **scores}

    def train_points(
        self, points: nn.Parameter, edges: Tensor, seed: int, steps: int, report: ReportLoss | None = None
    ) -> dict[str, Any]:
        """Train points in place; return the course of the training as plain data."""
        optimizer, course = RiemannianSGD([points], lr=self.hyper["lr"]), LossCurveRecorder(steps, report)
        for step, sets in enumerate(self.draw_ranking_sets(edges, seed, steps)):
            optimizer.param_groups[0]["lr"] = self.hyper["lr"] * self.lr_factor(step, steps)
            begun = time.process_time()
            loss, points.grad = ranking_loss_and_gradient(points.detach(), sets, RANKING_LOSS_DISTANCE_SCALE)
            if not course.record_step_loss(float(loss)):
                break
            optimizer.step()
            course.seconds.append(time.process_time() - begun)
        size = points.element_size() * (1.0 + len(getattr(points, "components", (0,))))
        return course.make_training_summary(bytes_per_parameter=size)


class PointTable(nn.Module):
    """A table of points."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.points = nn.Parameter(start)


def convert_points_to_recipe(recipe: Recipe, points: Tensor, seed: int) -> nn.Parameter:
    """Return the float32 start in a recipe's format."""
    dtype = _POINT_DTYPE_BY_NAME[recipe.param_dtype or "float32"]
    noise = torch.randn(points.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
    points = (points * (1 + recipe.perturb * noise)).to(dtype)
    components = getattr(recipe, "components", None) or 1
    return nn.Parameter(points if components == 1 else MCTensor.encode(points, components, scale="none"))


@torch.no_grad()
def compute_ranking_scores(points: Tensor, edges: Tensor) -> dict[str, float]:
    """Return the mean average precision, the mean rank, and the ranking loss of all edges against all other nodes."""
    found = evaluate_reconstruction(points, edges)
    barred = torch.eye(len(points), dtype=torch.bool, device="cpu")
    barred[edges[:, 0], edges[:, 1]] = True
    total = 0.0
    for rows in edges.split(256):
        distance = HalfSpace().distance(points[rows[:, 0]].unsqueeze(1), points.unsqueeze(0), dtype=torch.float64)
        logits = -RANKING_LOSS_DISTANCE_SCALE * distance
        mine = logits.gather(1, rows[:, 1:])
        others = logits.masked_fill(barred[rows[:, 0]], -torch.inf).logsumexp(1, keepdim=True)
        total += float((torch.logaddexp(mine, others) - mine).sum())
    return {"loss": total / len(edges), "map": found.mean_average_precision, "mean_rank": found.mean_rank}
