"""Two computations that should agree: thresholds of the findings on records made by hand."""

import math

import pytest
import torch

from halfulp.observation._record import OutputDifference, Record, StepRecord

from .records import found, severity


def test_replicas_differ():
    record = Record(replicas={"a": True, "b": False, "c": False}, replica_of=(0, 2))
    (finding,) = found("replicas-differ", record)
    assert finding.where == ("b", "c")
    assert "between 2 ranks" in finding.summary
    assert severity("replicas-differ", Record(replicas={"a": True})) is None
    assert severity("replicas-differ", Record()) is None


@pytest.mark.parametrize(
    ("dtypes", "differing", "relative", "expected"),
    [
        (("fp32", "fp32"), 0.0, 0.0, None),
        (("fp32", "fp32"), 0.9, 2.0**-18, None),
        (("fp32", "fp32"), 1.0, 2.0**-9, "warning"),
        (("bf16", "bf16"), 0.3, 2.0**-9, None),
        (("bf16", "bf16"), 1.0, 2.0**-6, "warning"),
        (("int8", "int8"), 0.1, 0.1, "warning"),
    ],
)
def test_compiled_differs(dtypes, differing, relative, expected):
    assert (
        severity("compiled-differs", Record(compiled=[OutputDifference("m", dtypes, differing, relative)])) == expected
    )


@pytest.mark.parametrize(
    ("dtypes", "differing", "relative", "expected"),
    [
        (("bf16", "bf16"), 0.0, 0.0, None),
        (("bf16", "fp32"), 0.0, 0.0, "error"),
        (("fp32", "fp32"), 0.5, 1.4, "error"),
        (("fp32", "fp32"), 0.5, 2.0**-22, None),
    ],
)
def test_recompute_differs(dtypes, differing, relative, expected):
    assert (
        severity("recompute-differs", Record(recomputed=[OutputDifference("m", dtypes, differing, relative)]))
        == expected
    )


@pytest.mark.parametrize(
    ("gap", "losses", "expected"),
    [
        (None, 8, None),
        (0.99, 8, None),
        (1.0, 8, "warning"),
        (math.inf, 8, "warning"),
        (math.nan, 8, None),
        (9.0, 3, None),
    ],
)
def test_loss_cancels(gap, losses, expected):
    history = [StepRecord(i, True, 1e-3, loss=1.0) for i in range(losses)]
    record = Record(history=history, loss_gap=gap, loss_dtype=torch.bfloat16)
    assert severity("loss-cancels", record) == expected
