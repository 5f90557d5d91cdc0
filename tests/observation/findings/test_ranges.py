"""Numbers that leave a format's range: thresholds of the findings on records made by hand."""

import pytest
import torch

from .records import BRAIN, HALF, SINGLE, found, parameter, severity, tensor, tensors, with_scale


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": HALF}, "error"),
        ({"dtype": HALF, "state_dtypes": {"exp_avg_sq": SINGLE}}, None),
        ({"dtype": BRAIN}, None),
        ({"dtype": HALF, "options": {"eps": 1e-7}}, None),
        # The tie between 0 and the smallest float16 goes to the even one.
        ({"dtype": HALF, "options": {"eps": 2.0**-25}}, "error"),
        ({"dtype": HALF, "options": {"eps": 0.0}}, None),
        ({"dtype": HALF, "options": {"lr": 0.1}}, None),
        ({"dtype": HALF, "optimizer_module": "halfulp.optim._algorithms"}, None),
        ({"dtype": HALF, "optimizer": None, "optimizer_module": ""}, None),
    ],
)
def test_eps_zero(fields, expected):
    assert severity("eps-zero", parameter(**fields)) == expected


@pytest.mark.parametrize("role", ["activation gradient", "weight gradient"])
@pytest.mark.parametrize(
    ("histogram", "dtype", "expected"),
    [
        ({}, HALF, None),
        ({-24: 1000, -23: 1000}, HALF, "error"),
        ({-24: 120, -20: 880}, HALF, "warning"),
        ({-18: 600, -10: 400}, HALF, "warning"),
        ({-18: 400, -10: 600}, HALF, None),
        ({-24: 1000}, BRAIN, None),
        ({-24: 31}, HALF, None),
        ({-9: 1000}, torch.float8_e4m3fn, "error"),
    ],
)
def test_gradient_underflow(role, histogram, dtype, expected):
    assert severity("gradient-underflow", tensor(role, histogram=histogram, dtype=dtype)) == expected
    assert severity("gradient-underflow", tensor("weight", histogram=histogram, dtype=dtype)) is None


@pytest.mark.parametrize(
    ("dtype", "amax", "steps", "expected"),
    [
        (HALF, 0.0, 8, "error"),
        (torch.float8_e5m2, 0.0, 3, "error"),
        (HALF, 1.0, 8, None),
        (HALF, 0.0, 2, None),
        (SINGLE, 0.0, 8, None),
        (BRAIN, 0.0, 8, None),
    ],
)
def test_gradients_that_are_all_zero_in_a_narrow_format_underflowed_at_the_loss(dtype, amax, steps, expected):
    fields = {"elements": 32768, "steps": steps, "histogram": {}, "amax": amax}
    record = tensors(
        ("activation gradient", "head", {"dtype": dtype, **fields}),
        ("activation gradient", "body", {"dtype": dtype, **fields}),
        ("weight gradient", "body.weight", {"dtype": SINGLE, **fields}),
        ("weight gradient", "body.empty", {"dtype": dtype, **fields, "elements": 0, "amax": 0.0}),
    )
    assert severity("gradient-underflow", record) == expected
    if expected:
        (finding,) = found("gradient-underflow", record)
        assert finding.where == ("head",)


@pytest.mark.parametrize(
    ("fields", "source", "expected"),
    [
        ({}, {}, "error"),
        ({}, {"dtype": HALF}, "error"),
        ({}, {"amax": 2.0**-25}, "error"),
        ({}, {"amax": 2.0**-24}, None),
        ({}, {"amax": 0.0}, None),
        ({}, {"nonfinite": 1}, None),
        ({}, {"scale": 0.5}, None),
        ({"steps": 2}, {}, None),
        ({"amax": 2.0**-24}, {}, None),
        ({"dtype": BRAIN}, {}, None),
        ({"dtype": torch.float8_e5m2}, {}, None),
    ],
)
def test_gradients_that_a_cast_makes_zero_underflowed_there(fields, source, expected):
    zeros = {"dtype": HALF, "histogram": {}, "amax": 0.0, **fields}
    record = tensors(
        ("activation gradient", "head", {"dtype": SINGLE}),
        ("activation gradient", "cast", {"dtype": SINGLE, "histogram": {-40: 9}, "amax": 1e-12, **source}),
        ("weight gradient", "body.weight", zeros),
        ("activation gradient", "body", zeros),
        ("activation gradient", "gate", zeros),
    )
    assert severity("gradient-underflow", record) == expected
    assert [one.where for one in found("gradient-underflow", record)] == ([("body",)] if expected else [])


def test_the_cure_of_an_underflow_depends_on_whether_the_loss_is_scaled():
    record = tensor("weight gradient", histogram={-24: 1000})
    assert "GradScaler, or hu.AdaptiveGradScaler" in found("gradient-underflow", record)[0].cure
    assert found("gradient-underflow", with_scale(record))[0].cure.startswith("hu.AdaptiveGradScaler")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"amax": 2.0**-18, "rms": 2.0**-21, "histogram": {-21: 1000}}, "warning"),
        ({"amax": 2.0**-23, "rms": 2.0**-25, "histogram": {-24: 1000}}, "error"),
        # Small numbers beside a large one, as in a softmax.
        ({"amax": 1.0, "rms": 2.0**-22, "histogram": {-22: 1000}}, None),
        ({"amax": 2.0**-18, "rms": 2.0**-21, "histogram": {-21: 31}}, None),
        ({"amax": 0.0, "rms": 0.0, "histogram": {}}, None),
        ({"amax": 2.0**-18, "rms": 2.0**-21, "histogram": {-21: 1000}, "dtype": BRAIN}, None),
    ],
)
def test_activation_underflow(fields, expected):
    assert severity("activation-underflow", tensor(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"amax": 16377.0}, "warning"),
        ({"amax": 16376.0}, None),
        ({"amax": 65504.0}, "warning"),
        ({"amax": 0.0}, None),
        ({"amax": 60000.0, "scale": 0.5}, None),
        ({"amax": 400.0, "dtype": torch.float8_e4m3fn}, None),
        ({"amax": 60000.0, "dtype": BRAIN}, None),
        ({"amax": 3.0e38, "dtype": SINGLE}, "warning"),
        ({"amax": torch.finfo(SINGLE).max, "dtype": SINGLE}, None),
    ],
)
def test_overflow_near(fields, expected):
    assert severity("overflow-near", tensor(**fields)) == expected


def test_a_loss_scale_brings_gradients_near_overflow_on_purpose():
    record = tensor("activation gradient", amax=60000.0)
    assert severity("overflow-near", record) == "warning"
    assert severity("overflow-near", with_scale(record)) is None


def nonfinite(step: int, order: int, steps: int = 1) -> dict:
    return {"nonfinite": 7, "first_nonfinite": (step, order), "nonfinite_steps": steps}


def test_first_nonfinite_is_the_earliest():
    record = tensors(
        ("activation", "blocks.1", nonfinite(3, 5)),
        ("activation", "blocks.0", nonfinite(3, 2)),
        ("activation", "embedding", {}),
        ("activation", "head", nonfinite(4, 0)),
    )
    (finding,) = found("first-nonfinite", record)
    assert finding.where == ("blocks.0",)
    assert finding.severity == "error"
    assert finding.evidence["step"] == 3
    assert finding.evidence["tensors"] == 3


def test_weights_that_are_broken_as_a_step_begins_are_the_cause_of_what_their_module_makes():
    record = tensors(
        ("activation", "head", nonfinite(4, 1)),
        ("weight", "body.weight", nonfinite(4, 2)),
        ("weight", "head.weight", nonfinite(4, 3)),
        ("weight", "late.weight", nonfinite(5, 0)),
    )
    (finding,) = found("first-nonfinite", record)
    assert finding.where == ("head.weight",)
    assert finding.severity == "error"
    assert finding.evidence["weights"] == 2
    assert "before step 4 began, as 1 other weight did; at step 3" in finding.summary
    assert finding.cure.endswith("observe from there with interval=1 to see where the first one comes from")
    del record.tensors["activation", "head"]
    record.sampled_steps = [4]
    (finding,) = found("first-nonfinite", record)
    assert finding.where == ("body.weight",)
    assert finding.cure.startswith("load the last clean checkpoint, which `halfulp audit` finds")


def test_an_infinite_mask_alone_is_a_note():
    assert severity("first-nonfinite", tensor(**nonfinite(0, 0))) == "note"
    assert severity("first-nonfinite", tensor("weight gradient", **nonfinite(0, 0))) == "error"
    assert severity("first-nonfinite", tensor()) is None


def test_gradients_that_overflow_now_and_then_under_a_loss_scale_are_no_finding():
    now_and_then = tensor("activation gradient", **nonfinite(0, 0, steps=2))
    assert severity("first-nonfinite", with_scale(now_and_then)) is None
    assert severity("first-nonfinite", with_scale(tensor("activation gradient", **nonfinite(0, 0, steps=8)))) == "error"
