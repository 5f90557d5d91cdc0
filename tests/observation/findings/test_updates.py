"""What becomes of updates: thresholds of the findings on records made by hand."""

import copy
import math

import pytest
import torch

import halfulp as hu
from halfulp.observation._record import RealisedChanges, RoundingDirectionRecord, StepRecord

from .records import BRAIN, SINGLE, found, parameter, realised, severity, tensor


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (realised(0.0), "error"),
        (realised(0.49), "error"),
        (realised(0.51), "warning"),
        (realised(0.89), "warning"),
        (realised(0.91), None),
        # The larger updates are nearly all of the movement; the smaller ones are still lost.
        (realised(1.02, lost=0.6), "warning"),
        (realised(0.99, lost=0.5), "warning"),
        (realised(0.99, lost=0.49), None),
        (realised(0.0, seen=31), None),
        (RealisedChanges(), None),
        (realised(math.nan, lost=0.5), None),
        (realised(0.0, lost=0.9, known=False), "warning"),
        (realised(0.0, lost=0.4, known=False), None),
    ],
)
def test_updates_lost(update, expected):
    assert severity("updates-lost", parameter(update=update)) == expected


def test_what_float32_loses_is_no_finding_but_a_frozen_weight():
    given = {"dtype": SINGLE, "update": realised(0.0), "moved": 0.0, "decay": realised(0.0)}
    assert severity("weight-frozen", parameter(**given)) == "note"
    for code in ("updates-lost", "weight-decay-lost"):
        assert severity(code, parameter(**given)) is None
    assert severity("updates-lost", parameter(dtype=SINGLE, update=realised(0.0, known=False))) is None


def test_updates_lost_in_words():
    record = parameter("blocks.0.norm.weight", update=realised(0.0), options={"lr": 3e-5})
    record.parameters |= parameter("blocks.1.norm.weight", update=realised(0.0), options={"lr": 3e-5}).parameters
    first, _ = found("updates-lost", record)
    assert str(first).startswith(
        "blocks.0.norm.weight: 100% of updates lost in bf16 at lr 3e-05; weight_update='kahan'"
    )
    assert first.evidence["lost"] == 1.0


def test_stochastic_rounding_that_is_right_on_average_is_no_loss():
    rounding = RoundingDirectionRecord(seen=1000)
    few = parameter(update=realised(0.8, lost=0.99, seen=1000), rounding=rounding, weight_update="stochastic")
    assert severity("updates-lost", few) is None
    many = parameter(update=realised(0.8, lost=0.9, seen=10**6), rounding=rounding, weight_update="stochastic")
    assert severity("updates-lost", many) == "warning"


def test_no_updates_are_lost_where_no_optimizer_is_or_the_rate_is_zero():
    assert severity("updates-lost", parameter(update=realised(0.0), optimizer=None)) is None
    still = parameter(update=realised(0.0, lost=1.0, known=False), options={"lr": 0.0})
    assert severity("updates-lost", still) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "error"),
        ({"moved": None}, None),
        ({"moved": 0.001}, None),
        ({"options": {"lr": 0.0}}, None),
        ({"options": {"lr": torch.tensor(0.0)}}, None),
        ({"nonzero_gradients": 0}, None),
        ({"update": realised(0.5)}, None),
        # An element at a power of two that went down and came back: most updates are lost all the same.
        ({"update": realised(0.05)}, "error"),
        ({"update": realised(0.0, seen=7)}, None),
        ({"update": RealisedChanges()}, None),
        ({"optimizer": None}, None),
    ],
)
def test_weight_frozen(fields, expected):
    record = parameter(**{"moved": 0.0, "update": realised(0.0), **fields})
    assert severity("weight-frozen", record) == expected
    record.sampled_steps = [0]
    assert severity("weight-frozen", record) is None


@pytest.mark.parametrize("kind", ["kahan", "stochastic", "split"])
@pytest.mark.parametrize(("step", "expected"), [(99, None), (199, "error")])
def test_what_is_kept_beside_a_weight_is_frozen_only_where_it_should_have_shown(kind, step, expected):
    """100 updates of 5e-5 are less than the 2^-7 between a bfloat16 1 and the next number, 200 are more."""
    record = parameter("layer", moved=0.0, update=realised(1.0), weight_update=kind)
    record.tensors |= tensor("weight gradient").tensors
    record.tensors |= tensor("weight", amax=1.0).tensors | tensor("update", amax=5e-5).tensors
    record.history = [StepRecord(step, True, 1e-5)]
    assert severity("weight-frozen", record) == expected


def test_unknown_updates_are_not_taken_for_lost_where_they_are_kept():
    for kind, expected in (("nearest", "warning"), ("kahan", None), ("stochastic", None)):
        record = parameter(update=realised(0.0, lost=0.9, known=False), weight_update=kind)
        assert severity("updates-lost", record) == expected


@pytest.mark.parametrize(("variance", "expected"), [(3.0, None), (40.0, "error")])
def test_a_few_stochastic_updates_may_all_be_lost_by_chance(variance, expected):
    rounding = RoundingDirectionRecord(seen=64, variance=variance)
    record = parameter(update=realised(0.0, lost=1.0, seen=64), weight_update="stochastic", rounding=rounding)
    assert severity("updates-lost", record) == expected


@pytest.mark.parametrize(("zeros", "expected"), [(0, "error"), (16383, "error"), (16384, None), (32768, None)])
def test_a_weight_that_is_written_back_is_frozen_and_rows_that_no_batch_has_are_not(zeros, expected):
    record = parameter("layer", moved=0.0, update=realised(1.0))
    record.tensors |= tensor("weight gradient", histogram={0: 32768 - zeros}).tensors
    assert severity("weight-frozen", record) == expected
    assert not expected or found("weight-frozen", record)[0].cure.startswith("find what writes its old value back")


def test_a_few_movements_that_came_back_are_no_sign_of_somebody_who_writes():
    record = parameter("layer", moved=0.0, update=realised(0.05))
    record.tensors |= tensor("weight gradient").tensors
    assert found("weight-frozen", record)[0].cure.startswith("keep it in float32")
    record.parameters["layer"].update = realised(0.5, seen=30)
    assert severity("weight-frozen", record) is None
    record.parameters["layer"].update = realised(0.5, seen=32)
    assert found("weight-frozen", record)[0].cure.startswith("find what writes its old value back")


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (None, None),
        (realised(0.0), "warning"),
        (realised(0.49), "warning"),
        (realised(0.51), None),
        (realised(0.0, seen=31), None),
        (realised(0.0, known=False), "warning"),
        (realised(1.0, lost=0.99), None),
    ],
)
def test_weight_decay_lost(decay, expected):
    assert severity("weight-decay-lost", parameter(decay=decay)) == expected


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (None, None),
        (RoundingDirectionRecord(), None),
        (RoundingDirectionRecord(seen=4096, excess=10.0, variance=700.0), None),
        (RoundingDirectionRecord(seen=4096, excess=200.0, variance=700.0), "error"),
        (RoundingDirectionRecord(seen=4096, excess=-200.0, variance=700.0), "error"),
        # Significant with so many, and too small to matter.
        (RoundingDirectionRecord(seen=10**7, excess=10**4, variance=10**6), None),
        (RoundingDirectionRecord(seen=2**20, variance=2.0**17, repeated=0.09), None),
        (RoundingDirectionRecord(seen=2**20, variance=2.0**17, repeated=0.11), "error"),
        # Eight steps, each as open as 350 throws of a coin: 6 standard deviations of a correlation are 0.32.
        (RoundingDirectionRecord(seen=4096, variance=700.0, repeated=0.32), None),
        (RoundingDirectionRecord(seen=4096, variance=700.0, repeated=0.33), "error"),
        # Four of each step's 4096 elements are expected to go up: chance, however large the correlation.
        (RoundingDirectionRecord(seen=2**15, variance=32.0, repeated=0.9), None),
        (RoundingDirectionRecord(seen=300, repeated=0.3), None),
    ],
)
def test_random_bits_repeat(rounding, expected):
    record = parameter(rounding=rounding, weight_update="stochastic", dtype=BRAIN)
    assert severity("random-bits-repeat", record) == expected


def test_never_stepped():
    left_out = parameter(optimizer=None)
    assert severity("never-stepped", left_out) is None, "no optimizer was given at all"
    left_out.parameters |= parameter("other.weight").parameters
    assert severity("never-stepped", left_out) == "note", "as of an EMA or a target network"
    left_out.tensors |= tensor("weight gradient", "layer.weight", amax=0.0).tensors
    assert severity("never-stepped", left_out) == "note"
    left_out.tensors |= tensor("weight gradient", "layer.weight").tensors
    assert severity("never-stepped", left_out) == "error"
    assert severity("never-stepped", parameter(optimizer=None, requires_grad=False)) is None
    assert severity("never-stepped", parameter(gradients=0)) == "warning"
    assert severity("never-stepped", parameter(gradients=0, numel=0, shape=(0,))) is None
    assert severity("never-stepped", parameter()) is None
    before = parameter(gradients=0)
    before.sampled_steps = []
    assert severity("never-stepped", before) is None


@pytest.mark.parametrize(
    ("weight_update", "dtype", "expected"),
    [
        (None, BRAIN, "warning"),
        ("nearest", BRAIN, "warning"),
        ("kahan", BRAIN, None),
        ("split8", BRAIN, None),
        ("stochastic", BRAIN, None),
        (None, SINGLE, None),
    ],
)
def test_most_updates_lost_in_little_of_the_movement_is_said_of_runs_and_of_checkpoints(weight_update, dtype, expected):
    model = torch.nn.Linear(64, 64, bias=False).to(dtype)
    torch.nn.init.ones_(model.weight)
    # A few large elements are all but a millionth of the movement.
    slope = torch.full((64, 64), 2.0**-11)
    slope[::16] = 0.5
    options = {"lr": 2.0**-3, "momentum": 0.9}
    if weight_update is None:
        optimizer = torch.optim.SGD(model.named_parameters(), **options)
    else:
        optimizer = hu.optim.SGD(model.named_parameters(), weight_update=weight_update, **options)

    def step():
        model.weight.grad = slope.to(dtype)
        optimizer.step()
        return {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}

    with hu.observe(model, optimizer, interval=1) as seen:
        first = step()
        second = step()
    for findings in (seen.findings, hu.audit(first, second).findings):
        lost = [finding for finding in findings if finding.code == "updates-lost"]
        assert [finding.severity for finding in lost] == ([expected] if expected else [])
        if expected:
            assert lost[0].evidence["lost"] == pytest.approx(15 / 16, abs=0.01)
            assert lost[0].evidence["realised"] > 0.95
            assert "of the movement took place" in lost[0].summary
