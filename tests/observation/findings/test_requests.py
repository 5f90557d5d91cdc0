"""What was asked for and is not there: findings on records made by hand."""

import pytest
import torch

from halfulp.observation._record import DtypeExpectation, Record

from .records import BRAIN, HALF, SINGLE, found, parameter, severity

OTHER = {"layers.0": "fp32", "layers.1": "fp32"}


def asking(**fields) -> Record:
    return Record(
        expectations=[DtypeExpectation(**{"pattern": "layers.*", "asked": "bf16", "matched": list(OTHER), **fields})]
    )


def test_dtype_not_asked():
    (finding,) = found("dtype-not-asked", asking(other=OTHER))
    assert finding.severity == "error"
    assert str(finding).startswith("layers.{0,1}: bf16 was asked for; 2 have fp32; ")
    assert severity("dtype-not-asked", asking()) is None


def test_pattern_empty():
    assert severity("pattern-empty", asking(matched=[])) == "error"
    assert severity("pattern-empty", asking()) is None
    assert severity("pattern-empty", Record()) is None


@pytest.mark.parametrize(
    ("dtype", "states", "expected"),
    [
        (BRAIN, {"exp_avg": BRAIN, "step": SINGLE}, None),
        (BRAIN, {"exp_avg": SINGLE}, "warning"),
        (SINGLE, {"exp_avg": BRAIN, "exp_avg_sq": SINGLE}, "error"),
        (BRAIN, {"momentum_buffer": HALF}, "warning"),
        (torch.int8, {"exp_avg": SINGLE}, None),
        (SINGLE, {}, None),
    ],
)
def test_state_mismatch(dtype, states, expected):
    assert severity("state-mismatch", parameter(dtype=dtype, state_dtypes=states)) == expected
    other = parameter(dtype=dtype, state_dtypes=states, optimizer_module="torchao.optim.adam")
    assert severity("state-mismatch", other) is None
