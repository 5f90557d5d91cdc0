"""out=: results of MCTensors in a given tensor of any kind, or an error and that tensor as it was."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfulp.kernels import same_bits
from halfulp.mctensor import MCTensor

# The factorizations run in float64, and say so.
pytestmark = pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")

# torch computes these by operators of its own that write into a tensor without elements beside the one given.
BESIDE = {
    "logsigmoid": lambda x, **out: torch._C._nn.log_sigmoid(x, **out),
    "msort": torch.msort,
    "cholesky": lambda x, **out: torch.linalg.cholesky(x @ x.T, **out),
    "inv": torch.linalg.inv,
    "solve": lambda x, **out: torch.linalg.solve(x, x[0], **out),
    "lu_factor": torch.linalg.lu_factor,
    "ldl_factor": lambda x, **out: torch.linalg.ldl_factor(x @ x.T, **out),
}
FUNCTIONS = BESIDE | {
    "add": lambda x, **out: torch.add(x, x, **out),
    "addmm": lambda x, **out: torch.addmm(x, x, x, **out),
    "cat": lambda x, **out: torch.cat([x, x], **out),
    "clamp": lambda x, **out: torch.clamp(x, 0.1, 0.2, **out),
    "cumsum": lambda x, **out: torch.cumsum(x, 1, **out),
    "einsum's bmm": lambda x, **out: torch.bmm(x[None], x[None], **out),
    "gather": lambda x, **out: torch.gather(x, 1, torch.ones(3, 1, dtype=torch.int64), **out),
    "index_select": lambda x, **out: torch.index_select(x, 1, torch.tensor([2, 0]), **out),
    "max": lambda x, **out: torch.max(x, 1, **out),
    "mean": lambda x, **out: torch.mean(x, (0, 1), **out),
    "pow": lambda x, **out: torch.pow(x, 3, **out),
    "sin": torch.sin,
    "sort": lambda x, **out: torch.sort(x, **out),
    "split": lambda x, **out: torch.split_with_sizes_copy(x, [1, 2], **out),
    "stack": lambda x, **out: torch.stack([x, x], **out),
    "std": lambda x, **out: torch.std(x, 0, **out),
    "sum": lambda x, **out: torch.sum(x, 0, **out),
    "unbind": lambda x, **out: torch.unbind_copy(x, **out),
    "where": lambda x, **out: torch.where(x.decode() > 0, x, x * 2, **out),
}
INTEGERS = {
    "argmax": torch.argmax,
    "count_nonzero and all": torch.all,
    "eq": lambda x, **out: torch.eq(x, x, **out),
    "matrix_rank": lambda x, **out: torch.linalg.matrix_rank(x @ x.T, hermitian=True, **out),
    "signbit": torch.signbit,
}


def operand() -> MCTensor:
    return MCTensor.encode(torch.randn(3, 3, dtype=torch.float64), 2) / 3


def called(function: Callable, x: Tensor, outputs: list[Tensor]) -> None:
    function(x, out=outputs[0] if len(outputs) == 1 else tuple(outputs))


def like(result: Tensor, make: Callable) -> Tensor:
    return make(result) if isinstance(result, MCTensor) else torch.zeros_like(result)


@pytest.mark.parametrize("form", [(2, torch.float64), (3, torch.float32), (2, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_result_in_a_given_tensor(name, form, seed):
    x, function = operand(), FUNCTIONS[name]
    wanted = tree_leaves(function(x))
    outputs = [like(y, lambda y: MCTensor.encode(torch.ones(y.shape), *form)) for y in wanted]
    called(function, x, outputs)
    for y, out in zip(wanted, outputs, strict=True):
        if isinstance(y, MCTensor):
            assert all(map(same_bits, out.components, MCTensor.encode(y, *form).components))
        else:
            assert torch.equal(out, y)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_plain_tensor_takes_the_value_rounded_once(name, empty, seed):
    x, function = operand(), FUNCTIONS[name]
    wanted = tree_leaves(function(x))
    outputs = [like(y, lambda y: torch.ones((0,) if empty else y.shape, dtype=torch.float64)) for y in wanted]
    called(function, x, outputs)
    for y, out in zip(wanted, outputs, strict=True):
        assert torch.equal(out, y.decode() if isinstance(y, MCTensor) else y)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_holds_no_fractions_or_another_shape_is_refused(name, seed):
    x, function = operand(), FUNCTIONS[name]
    wanted = tree_leaves(function(x))
    wrong = [lambda y, kind=kind: torch.ones(y.shape, dtype=kind) for kind in (torch.int64, torch.bool)]
    for make in (*wrong, lambda y: MCTensor.encode(torch.ones(*y.shape, 2, dtype=torch.float64))):
        outputs = [like(y, make) for y in wanted]
        with pytest.raises((RuntimeError, TypeError, NotImplementedError), match=r"cast|dtype|shape"):
            called(function, x, outputs)
        assert bool((tree_leaves(outputs)[0] == 1).all())


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_truths_in_a_given_tensor(name, seed):
    x, function = operand(), INTEGERS[name]
    out = torch.zeros_like(function(x))
    called(function, x, [out])
    assert torch.equal(out, function(x))
