"""Learning rates by step: the schedules by name against their equations and torch's own, and what is refused."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

from halfulp.observation.forecasting._inputs import compute_learning_rates


def optimizer(rates=(0.1, 0.2)):
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates], lr=0.1)


def by_running(scheduler, steps: int) -> list[list[float]]:
    """The rates of a scheduler that is really advanced."""
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return [list(rates) for rates in zip(*found)]


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=20, cycle_momentum=False),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "in a row": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.StepLR(o, 3, 0.7)], o
    ),
}


@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("made", [0, 3])
def test_a_scheduler_gives_what_it_gives_when_run_and_is_not_advanced(name, made):
    mine, theirs = SCHEDULERS[name](optimizer()), SCHEDULERS[name](optimizer())
    for scheduler in (mine, theirs):
        for _ in range(made):
            scheduler.optimizer.step()
            scheduler.step()
    before = mine.state_dict().get("last_epoch", None)
    rates = compute_learning_rates(mine, [0.1, 0.2], steps=15, start=0)
    assert mine.state_dict().get("last_epoch") == before
    assert [group["lr"] for group in mine.optimizer.param_groups] == [
        group["lr"] for group in theirs.optimizer.param_groups
    ]
    torch.testing.assert_close(rates, torch.tensor(by_running(theirs, 15), dtype=torch.float64))


def test_names_are_their_equations():
    at = torch.arange(100, dtype=torch.float64)
    cosine = compute_learning_rates("cosine", [2.0], steps=100)[0]
    torch.testing.assert_close(cosine, 1 + torch.cos(math.pi * at / 100), rtol=1e-12, atol=1e-15)
    linear = compute_learning_rates("linear", [2.0], steps=100, final=1.0)[0]
    torch.testing.assert_close(linear, 2 - at / 100, rtol=1e-12, atol=0)
    wsd = compute_learning_rates("wsd", [1.0], steps=100, warmup=10, decay=25)[0]
    assert wsd[:10].tolist() == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert wsd[10:76].tolist() == [1.0] * 66
    assert wsd[75:].tolist() == pytest.approx([1 - k / 25 for k in range(25)])
    assert compute_learning_rates(None, [3.0]).tolist() == [[3.0] * 1000]


def test_a_start_leaves_out_the_steps_that_were_made():
    for name in ("constant", "linear", "cosine", "wsd"):
        whole = compute_learning_rates(name, [1.0, 2.0], steps=50, warmup=5)
        torch.testing.assert_close(
            compute_learning_rates(name, [1.0, 2.0], steps=50, warmup=5, start=20), whole[:, 20:]
        )
    assert compute_learning_rates(lambda step: step / 10, [1.0], steps=5, start=3).tolist() == [[0.3, 0.4]]
    assert compute_learning_rates([4, 3, 2, 1], [1.0], start=1).tolist() == [[3.0, 2.0, 1.0]]


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        ("cosin", {"steps": 5}, "did you mean 'cosine'"),
        ("cosine", {}, "needs the length of the run: give steps="),
        ("cosine", {"steps": 5, "start": 5}, "above the 5 steps"),
        ("cosine", {"steps": True}, "a whole number"),
        ("cosine", {"steps": 5, "decay": 2}, "is for schedule 'wsd'"),
        ("constant", {"steps": 5, "final": 0.1}, "'constant' does not"),
        ("linear", {"steps": 5, "warmup": 6}, "from 0 to steps=5"),
        ([1.0, 2.0], {"steps": 3}, "leave steps out"),
        ([1.0, 2.0], {"warmup": 3}, "leave it out"),
        ([1.0, math.nan], {}, "finite numbers from 0"),
        ([], {}, "above the 0 steps"),
        (lambda step: -1.0, {"steps": 5}, "finite numbers from 0"),
    ],
)
def test_what_is_wrong_is_said(schedule, options, words):
    with pytest.raises(ValueError, match=words):
        compute_learning_rates(schedule, [1.0], **options)


def test_what_is_no_schedule_is_a_type_error():
    with pytest.raises(TypeError, match="a list of learning rates; got an int"):
        compute_learning_rates(3, [1.0])
    with pytest.raises(TypeError, match="a learning rate is a number"):
        compute_learning_rates(lambda step: "high", [1.0], steps=3)
    with pytest.raises(TypeError, match="a learning rate is a number"):
        compute_learning_rates(["high", 0.1, 0.1], [1.0], start=1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer())
    with pytest.raises(NotImplementedError, match="depends on losses"):
        compute_learning_rates(plateau, [0.1, 0.2], steps=5)
