"""Law: the ends that an argument's range names are in it, and what lies beside it is refused by its name.

Options of optimizers are in tests/optim/test_arguments.py, those of policies in tests/gradients/policies.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp import formats, recipes, rounding
from halfulp.gradients import AdaptiveGradScaler, UnderflowBound
from halfulp.hyperbolic import RankingSets
from halfulp.mctensor import MCTensor
from halfulp.observation import Finding
from halfulp.recipes import verify
from halfulp.testing import assert_precision_ok
from halfulp.trials.running._plan import plan_trials
from halfulp.trials.running._training import open_training_run
from halfulp.trials.tasks import Step

TINY, BELOW_1, ABOVE_1 = 2.0**-1074, 1 - 2.0**-53, 1 + 2.0**-52


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def watch(interval: Any) -> None:
    ours = model()
    with hu.observe(ours, torch.optim.SGD(ours.parameters()), interval=interval):
        pass


def start_run(workers: Any) -> None:
    with open_training_run(None, workers, None, False, False):
        pass


def block_format(block: Any) -> formats.BlockFormat:
    return formats.BlockFormat("x", formats.get("e2m1fn"), formats.get("e8m0fnu"), block)


BATCH = torch.ones(3, 4)
EDGES = torch.tensor([[0, 1], [1, 2]])
Case = tuple[Callable[[Any], Any], tuple[Any, ...], tuple[Any, ...]]
CASES: dict[str, Case] = {
    "interval of observe": (watch, (1, 2), (0, True, 1.0)),
    "confidence of a finding": (lambda x: Finding("updates-lost", (), "note", x), (0, 1), (-TINY, ABOVE_1, math.nan)),
    "digits of to_strings": (lambda x: MCTensor.encode(1.0).to_strings(x), (1, 40), (0, -1)),
    "seed of Stochastic": (lambda x: rounding.Stochastic(seed=x), (None, 0, 2**64 - 1), (-1, 2**64, True, 1.0)),
    "bits of multipoint": (lambda x: hu.multipoint(model(), x, [BATCH]), (2, 8), (1, 9, True, 4.0)),
    "budget of multipoint": (lambda x: hu.multipoint(model(), 4, [BATCH], budget=x), (1, 1.5), (BELOW_1, math.nan)),
    "perturb of a Recipe": (lambda x: recipes.get("fp32").replace(perturb=x), (0, TINY), (-TINY, math.inf, math.nan)),
    "trials of verify": (lambda x: verify(model(), BATCH, "scaled-fp16", trials=x), (1,), (0, -1)),
    "interval of a scaler": (lambda x: AdaptiveGradScaler(model(), interval=x), (1, 2), (0, True, 1.0)),
    "share of UnderflowBound": (lambda x: UnderflowBound(share=x), (TINY, BELOW_1), (0, 1, math.nan, -TINY)),
    "u of round_exact": (
        lambda x: formats.round_exact(1.5, formats.get("bf16"), "stochastic", u=x),
        (0, BELOW_1, Fraction(1, 3)),
        (1, -TINY),
    ),
    "code of decode": (lambda x: formats.decode(x, formats.get("e5m2")), (0, 255), (-1, 256, 1.0)),
    "block of a BlockFormat": (block_format, (1, 2), (0, -1, True, 2.0)),
    "others of RankingSets": (lambda x: RankingSets(EDGES, 9, others=x), (1,), (0,)),
    "batch of RankingSets": (lambda x: RankingSets(EDGES, 9, batch=x), (1,), (0,)),
    "nodes of RankingSets": (lambda x: RankingSets(EDGES, x), (4,), (2,)),
    "steps of a Step": (lambda x: Step(lambda m, k: m, model(), steps=x), (1,), (0,)),
    "judged of a Step": (lambda x: Step(lambda m, k: m, model(), steps=1, judged=x), (1,), (0,)),
    "steps of assert_precision_ok": (lambda x: assert_precision_ok(model(), BATCH, "fp32", steps=x), (2,), (1, True)),
    "tolerance of assert_precision_ok": (
        lambda x: assert_precision_ok(model(), BATCH, "fp32", steps=2, tolerance=x),
        (TINY, 1),
        (0, -TINY, math.nan),
    ),
    "steps of trials": (lambda x: plan_trials("digits", "fp32", 1, x, None), (None, 1), (0, -1)),
    "seeds of trials": (lambda x: plan_trials("digits", "fp32", x, 1, None), (1, [0], [0, 2]), (0, -1, [], [-1])),
    "workers of trials": (start_run, (None, 1, 2), (0, -1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_ends_are_in_the_range_and_what_lies_beside_it_is_refused(name: str, seed: int) -> None:
    call, allowed, refused = CASES[name]
    for value in allowed:
        call(value)
    for value in refused:
        with pytest.raises(ValueError, match=name.split()[0] if name != "u of round_exact" else "u lies in"):
            call(value)
