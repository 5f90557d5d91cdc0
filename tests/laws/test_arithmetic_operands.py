"""Law: functions of expansions read the values of their operands, however these are laid out in memory."""

import pytest
import torch
from torch import Tensor

from halfulp import arithmetic
from halfulp.kernels import same_bits

FUNCTIONS = {
    "total": lambda a, b: arithmetic.total(a, 0, 2),
    "total of all": lambda a, b: arithmetic.total(a, None, 2),
    "average": lambda a, b: arithmetic.average(a, 1, 2, keepdim=True),
    "product": lambda a, b: arithmetic.product(a, 0, 2),
    "running_sum": lambda a, b: arithmetic.running_sum(a, 0, 2),
    **{
        name: lambda a, b, name=name: arithmetic.pointwise(name, a, b, components=2, dtype=a[0].dtype)
        for name in ("add", "sub", "mul", "div")
    },
    "exp": lambda a, b: arithmetic.pointwise("exp", a, components=2, dtype=a[0].dtype),
    "compare": lambda a, b: (arithmetic.compare(a, b),),
    "renormalize": lambda a, b: arithmetic.renormalize((*a, *b), 3),
    "merge": lambda a, b: (arithmetic.merge((*a, *b)),),
    "split": lambda a, b: arithmetic.split(a[0].double(), torch.float32, 2),
    "matmul": lambda a, b: arithmetic.matmul(a, b, 2, a[0].dtype),
    "solve": lambda a, b: arithmetic.solve(a, b, 2, a[0].dtype),
    "inverse": lambda a, b: arithmetic.inverse(a, 2, a[0].dtype),
    "det": lambda a, b: arithmetic.det(a, 2, a[0].dtype),
    "qr": lambda a, b: [part for parts in arithmetic.qr(a, 2, a[0].dtype) for part in parts],
    "exact_sum": lambda a, b: (arithmetic.exact_sum(a[0], 0),),
    "exact_dot": lambda a, b: (arithmetic.exact_dot(a[0][0], b[0][0]),),
}


def _behind_another(x: Tensor) -> Tensor:
    return torch.cat([x.new_ones(1), x.flatten()])[1:].view(x.shape)


LAYOUTS = {
    "negated when it is read": lambda x: torch._neg_view(-x),
    "transposed": lambda x: x.mT.contiguous().mT,
    "with gaps": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "not at the memory's start": _behind_another,
    "negated and transposed": lambda x: torch._neg_view(-x.mT.contiguous()).mT,
    "zeros that are nowhere": lambda x: x if x.any() else torch._efficientzerotensor(x.shape, dtype=x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_layout_of_an_operand_changes_no_bit(name: str, layout: str, dtype: torch.dtype, seed: int) -> None:
    wide = torch.randn(2, 5, 5, dtype=torch.float64) + 4 * torch.eye(5, dtype=torch.float64)
    a, b = (arithmetic.split(x, dtype, 2) for x in wide)
    if layout.startswith("zeros"):
        a, b = (a[0], torch.zeros_like(a[1])), (b[0], torch.zeros_like(b[1]))
    moved = [tuple(map(LAYOUTS[layout], parts)) for parts in (a, b)]
    wanted, found = FUNCTIONS[name](a, b), FUNCTIONS[name](*moved)
    assert len(wanted) == len(found)
    assert all(map(same_bits, found, wanted))
