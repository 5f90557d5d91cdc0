"""A process that flushes subnormal numbers computes the same bits."""

import pytest
import torch

from halfulp.arithmetic import (
    average,
    cholesky,
    compare,
    det,
    inverse,
    matmul,
    merge,
    pointwise,
    running_sum,
    solve,
    total,
)
from halfulp.kernels import engine, same_bits

F32, F64 = torch.float32, torch.float64
SMALL, LEAST = torch.full((70,), 1e-310, dtype=F64), torch.full((70,), 2.0**-1074, dtype=F64)
SMALL32, ONES = torch.full((70,), 1e-40), torch.ones(70, 1, dtype=F64)
LARGE = torch.eye(2, dtype=F64) * 2.0**1023
FUNCTION_BY_NAME = {
    "add": lambda: pointwise("add", (SMALL,), (SMALL,), components=2, dtype=F64),
    "add a number": lambda: pointwise("add", (SMALL,), (SMALL[0],), components=2, dtype=F64),
    "mul": lambda: pointwise("mul", (SMALL32,), (ONES[:, 0].float(),), components=2, dtype=F32),
    "exp": lambda: pointwise("exp", (ONES * -740,), components=2, dtype=F64),
    "merge": lambda: merge((SMALL32, SMALL32), F32),
    "compare": lambda: compare((SMALL,), (LEAST,)),
    "total": lambda: total((LEAST,), None, 2),
    "average": lambda: average((LEAST,), None, 2),
    "running_sum": lambda: running_sum((LEAST,), 0, 2),
    "matmul of one float32": lambda: matmul((SMALL32[None],), (ONES.float(),), 1, F32),
    "matmul of bfloat16": lambda: matmul((SMALL32[None].bfloat16(),), (ONES.bfloat16(),), 2, torch.bfloat16),
    "matmul of two float64": lambda: matmul((LEAST.expand(40, 70),), (ONES.expand(70, 40),), 2, F64),
    "solve": lambda: solve((torch.eye(70, dtype=F64),), (SMALL[:, None],), 2, F64),
    "inverse": lambda: inverse((LARGE,), 2, F64),
    "det": lambda: det((torch.diag(torch.tensor([2.0**-600, 2.0**-460], dtype=F64)),), 2, F64),
    "cholesky": lambda: cholesky((torch.diag(SMALL[:2]),), 2, F64),
}


@pytest.mark.parametrize("name_of_engine", ["auto", "reference"])
@pytest.mark.parametrize("function", FUNCTION_BY_NAME.values(), ids=FUNCTION_BY_NAME)
def test_flushing_changes_no_bit(function, name_of_engine):
    with engine(name_of_engine):
        wanted = function()
        assert any(bool((part != 0).any()) for part in wanted), "a case without subnormal numbers shows nothing"
        if not torch.set_flush_denormal(True):
            return
        try:
            made = function()
            assert torch.tensor(2.0**-126) * 0.5 == 0, "the caller's mode is as before"
        finally:
            torch.set_flush_denormal(False)
    for one, other in zip(wanted, made, strict=True):
        assert same_bits(one, other)
