"""How element-wise functions are called: shapes, strides, outputs, threads, torch.compile, refusals."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfulp.arithmetic import average, inverse, matmul, names, pointwise, product, qr, running_sum, solve, total
from halfulp.arithmetic._functions import EXPANSION_FUNCTION_BY_NAME
from halfulp.arithmetic._pointwise import make_pointwise_kernels
from halfulp.kernels import engine, record_function, same_bits


def pair(*shape, dtype=torch.float32):
    head = torch.randn(shape, dtype=torch.float64)
    return head.to(dtype), (head - head.to(dtype).double()).to(dtype)


SHAPES = [
    ((5, 7), (5, 7)),
    ((5, 7), (7,)),
    ((5, 1), (1, 7)),
    ((3, 5, 7), (5, 1)),
    ((), (4,)),
    ((2, 3), ()),
    ((0, 3), (3,)),
    ((1,), (1,)),
    ((3, 1, 200), (200,)),
]


@pytest.mark.parametrize("name", names())
def test_the_arithmetic_is_float32s_where_two_of_them_are_enough(name):
    """Which decides the bits of the last component: a function that any precision serves, of one or two float32."""
    for counts in itertools.product((1, 2, 3), repeat=2):
        for operand, result in itertools.product((torch.float32, torch.bfloat16, torch.float64), repeat=2):
            operands = ((operand, counts[0]), (torch.float32, 1), (torch.float32, 1))
            operands = operands[: EXPANSION_FUNCTION_BY_NAME[name].operands]
            kernels = make_pointwise_kernels(name, operands, counts[1], result)
            few = max(counts) <= 2 and operand == result == torch.float32
            wanted = torch.float32 if few and EXPANSION_FUNCTION_BY_NAME[name].any_precision else torch.float64
            assert kernels.arithmetic == wanted, (operands, counts[1], result)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_operands_broadcast(shapes, dtype, seed):
    x, y = (pair(*shape, dtype=dtype) for shape in shapes)
    got = pointwise("mul", x, y, components=2, dtype=dtype)
    with engine("reference"):
        wanted = pointwise("mul", x, y, components=2, dtype=dtype)
    shape = torch.broadcast_shapes(*shapes)
    assert all(a.shape == shape and same_bits(a, b) for a, b in zip(got, wanted))


def test_views_are_read_as_they_lie(seed):
    x, y = pair(6, 8), pair(8, 6)
    turned = tuple(part.t() for part in y)
    spread = tuple(part[:1].expand(6, 8) for part in x)
    for operand in (turned, spread, tuple(part.flip(0) for part in x), tuple(part[::2].repeat(2, 1) for part in x)):
        got = pointwise("add", x, operand, components=2, dtype=torch.float32)
        wanted = pointwise("add", x, tuple(part.contiguous() for part in operand), components=2, dtype=torch.float32)
        assert all(same_bits(a, b) for a, b in zip(got, wanted))


@pytest.mark.parametrize("shape", [(6, 8), (3, 6, 8)])
def test_a_row_takes_no_memory_of_a_matrix(shape):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), options=None):
            made.append(operator.overloadpacket.__name__)
            return operator(*args, **(options or {}))

    made, matrix, row = [], (torch.ones(shape),), (torch.ones(8),)
    with Watch():
        pointwise("add", matrix, row, components=2, dtype=torch.float32)
    assert made == ["empty_like"] * 2, "the results alone"


def test_out_may_be_an_operand_and_any_layout(seed):
    x, y = pair(50, 3), pair(50, 3)
    wanted = pointwise("add", x, y, components=2, dtype=torch.float32)
    strided = tuple(torch.zeros(3, 50).t() for _ in range(2))
    got = pointwise("add", x, y, components=2, dtype=torch.float32, out=strided)
    assert got is strided
    assert all(same_bits(a, b) for a, b in zip(strided, wanted))
    pointwise("add", x, y, components=2, dtype=torch.float32, out=x)
    assert all(same_bits(a, b) for a, b in zip(x, wanted))


def test_threads_do_not_change_bits(seed):
    x, y = pair(300, 700), pair(300, 700)
    wanted = pointwise("mul", x, y, components=2, dtype=torch.float32)
    torch.set_num_threads(2)
    try:
        got = pointwise("mul", x, y, components=2, dtype=torch.float32)
    finally:
        torch.set_num_threads(1)
    assert all(same_bits(a, b) for a, b in zip(got, wanted))


def test_a_compiled_graph_gives_the_same_bits(seed):
    def work(a, b, c, d):
        total = pointwise("add", (a, b), (c, d), components=2, dtype=torch.float32)
        return pointwise("exp", total, components=2, dtype=torch.float32)

    operands = (*pair(40), *pair(40))
    torch._dynamo.reset()
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    assert all(same_bits(a, b) for a, b in zip(compiled(*operands), work(*operands)))


def _to_compile(trace, known: set) -> int:
    """Instructions, those of a network that is called counted once."""
    digests = {piece.trace.digest(): piece.trace for piece in trace.functions}
    count = len(trace.lines)
    for digest in digests.keys() - known:
        known.add(digest)
        count += _to_compile(digests[digest], known)
    return count


@pytest.mark.parametrize("name", EXPANSION_FUNCTION_BY_NAME)
def test_a_compiler_sees_few_instructions(name):
    """Ten thousand take about a second to compile; pow of four components has many more to run."""
    counts = (4,) * EXPANSION_FUNCTION_BY_NAME[name].operands
    kernels = make_pointwise_kernels(name, tuple((torch.float64, count) for count in counts), 4, torch.float64)
    assert _to_compile(record_function(kernels.function, torch.float64, sum(counts))[0], set()) < 15_000


def test_refusals_say_what_is_allowed():
    x = (torch.ones(2),)
    with pytest.raises(ValueError, match="there are add"):
        pointwise("adds", x, x, components=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="takes 2 operands, got 1"):
        pointwise("add", x, components=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="5 components: allowed are 1 to 4"):
        pointwise("add", x, x, components=5, dtype=torch.float32)
    with pytest.raises(TypeError, match="int32"):
        pointwise("add", x, x, components=2, dtype=torch.int32)
    with pytest.raises(TypeError, match="complex64"):
        pointwise("sqrt", (torch.ones(2, dtype=torch.complex64),), components=2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"angles up to 2\*\*20"):
        pointwise("sin", (torch.full((2,), 1e9),), components=2, dtype=torch.float32)
    assert "exp" in names()


_ONE, _HALF = torch.eye(3), torch.eye(3) / 2
_FUNCTION_BY_NAME = {
    "pointwise": lambda parts: pointwise("add", (_ONE,), parts, components=2, dtype=torch.float32),
    "total": lambda parts: total(parts, None, 2),
    "product": lambda parts: product(parts, 0, 2),
    "average": lambda parts: average(parts, 1, 2),
    "running_sum": lambda parts: running_sum(parts, 0, 2),
    "matmul, left": lambda parts: matmul(parts, (_ONE,), 2, torch.float32),
    "matmul, right": lambda parts: matmul((_ONE,), parts, 2, torch.float32),
    "inverse": lambda parts: inverse(parts, 2, torch.float32),
    "qr": lambda parts: qr(parts, 2, torch.float32),
    "solve": lambda parts: solve((_ONE,), parts, 2, torch.float32),
}


@pytest.mark.parametrize("function", _FUNCTION_BY_NAME.values(), ids=_FUNCTION_BY_NAME)
def test_components_of_one_value_have_one_dtype_and_shape(function):
    """Kernels read all as they read the first one: another dtype, or fewer elements, is memory that they do not own."""
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        with pytest.raises(TypeError, match=f"components of torch.float32 and {dtype}"):
            function((_ONE, _HALF.to(dtype)))
    with pytest.raises(ValueError, match=r"components of shapes \(3, 3\) and \(1, 3\)"):
        function((_ONE, _HALF[:1]))
    with pytest.raises(ValueError, match="0 components"):
        function(())


def test_out_is_components_of_the_result():
    x = (torch.ones(4000, dtype=torch.float64),)
    for out in ([torch.zeros(4000)], [torch.zeros_like(x[0])] * 2, [torch.zeros(4000, dtype=torch.int64)]):
        with pytest.raises(TypeError, match=r"out is 1 tensors of torch\.float64"):
            pointwise("add", x, x, components=1, dtype=torch.float64, out=tuple(out))


def test_writes_into_out_are_seen_by_autograd():
    leaf = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"under torch\.no_grad"):
        pointwise("add", (_ONE[0],), (_ONE[0],), components=1, dtype=torch.float32, out=(leaf,))
    kept = leaf * 1
    loss = (kept * kept).sum()
    pointwise("add", (torch.ones(4),), (torch.ones(4),), components=1, dtype=torch.float32, out=(kept.detach(),))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_reductions_give_1_to_4_components():
    for reduction, components in itertools.product((total, product, average), (0, 5)):
        with pytest.raises(ValueError, match=f"{components} components: allowed are 1 to 4"):
            reduction((_ONE,), None, components)
    with pytest.raises(TypeError, match=r"components of torch\.int64"):
        total((torch.ones(3, dtype=torch.int64),), None, 1)
