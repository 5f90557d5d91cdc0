"""What each function of a backward graph is to the gradients that it reads, by torch's own results."""

from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims  # which defines prims.fma

from halfulp._torch_floor import is_older
from halfulp.gradients import _compiled_placement
from halfulp.gradients._compiled_placement import (
    _FACTOR_POSITIONS_BY_PRODUCT,
    SitePlacement,
    SitePlan,
    classify_gradient_use,
)
from halfulp.gradients._site import GLOBAL_SITE_KEY

aten = torch.ops.aten
# All matrix products of two dimensions and more, and the shapes of their arguments; what is added comes first.
SHAPES = {
    "mm": ((2, 3), (3, 4)),
    "bmm": ((5, 2, 3), (5, 3, 4)),
    "mv": ((2, 3), (3,)),
    "dot": ((3,), (3,)),
    "vdot": ((3,), (3,)),
    "outer": ((2,), (3,)),
    "addmm": ((2, 4), (2, 3), (3, 4)),
    "baddbmm": ((5, 2, 4), (5, 2, 3), (5, 3, 4)),
    "addmv": ((2,), (2, 3), (3,)),
    "addbmm": ((2, 4), (5, 2, 3), (5, 3, 4)),
}


@pytest.mark.parametrize(
    "table",
    [
        "_LINEAR_OPERATOR_NAMES",
        "_VIEW_OPERATOR_NAMES",
        "_SHAPE_READING_OPERATOR_NAMES",
        "_CAST_OPERATOR_NAMES",
        "_LINEAR_ONLY_IF_ZERO_POSITIONS_BY_OPERATOR",
        "_FACTOR_POSITIONS_BY_PRODUCT",
        "_FACTOR_POSITIONS_BY_MULTIPLY_ADD",
    ],
)
def test_functions_that_are_known_by_name_are_torchs(table):
    if is_older(torch.__version__, "2.13"):
        pytest.skip("older versions lack some of the operators")
    spaces = (aten, torch.ops.prims, torch.ops.mkldnn)
    names = [*getattr(_compiled_placement, table)]
    assert [name for name in names if not any(hasattr(space, name) for space in spaces)] == []


def _node(name: str, shapes: tuple, space: Any = aten) -> tuple[torch.fx.Node, list[torch.fx.Node]]:
    graph = torch.fx.Graph()
    operands = []
    for i, shape in enumerate(shapes):
        operands.append(graph.placeholder(f"operand{i}"))
        operands[-1].meta["val"] = torch.empty(shape, device="meta")
    operator = getattr(space, name).default
    node = graph.call_function(operator, tuple(operands))
    node.meta["val"] = operator(*(x.meta["val"] for x in operands))
    return node, operands


def test_every_matrix_product_is_in_the_table():
    assert _FACTOR_POSITIONS_BY_PRODUCT.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_a_product_is_linear_in_the_factors_at_its_places(name, seed):
    values = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES[name]]
    operator = getattr(aten, name).default

    def of(*given):
        return operator(*given)

    for place in _FACTOR_POSITIONS_BY_PRODUCT[name]:
        zero, twice = list(values), list(values)
        zero[place], twice[place] = torch.zeros_like(values[place]), 2 * values[place]
        rest = of(*zero)
        torch.testing.assert_close(of(*twice) - rest, 2 * (of(*values) - rest))
        # What is added to a product is no factor: it is left where a factor is 0.
        assert bool(rest.any()) == (len(values) == 3)


@pytest.mark.parametrize("name", SHAPES)
def test_a_product_of_one_gradient_is_a_product_and_of_two_none(name):
    node, operands = _node(name, SHAPES[name])
    factors = [operands[-2], operands[-1]]
    added = dict.fromkeys(operands[:-2])
    for factor in factors:
        assert classify_gradient_use(node, {factor: None, **added}) == "product"
        if added:
            assert (
                classify_gradient_use(node, {factor: None}) == "other"
            )  # a constant beside a gradient has no exponent
    assert classify_gradient_use(node, dict.fromkeys(operands)) == "other"
    assert classify_gradient_use(node, added) == "other"


@pytest.mark.parametrize(("space", "name", "added"), [(aten, "addcmul", 0), (torch.ops.prims, "fma", 2)])
def test_a_product_by_elements_is_linear_in_one_gradient(space, name, added):
    node, operands = _node(name, ((3, 4),) * 3, space)
    addend = operands.pop(added)
    for factor in operands:
        assert classify_gradient_use(node, {factor: None, addend: None}) == "linear"
        assert classify_gradient_use(node, {factor: None}) == "other"  # a constant has no exponent
    assert classify_gradient_use(node, dict.fromkeys(operands)) == "other"
    assert classify_gradient_use(node, dict.fromkeys([*operands, addend])) == "other"
    assert classify_gradient_use(node, {addend: None}) == "other"


def test_a_product_by_elements_that_is_added_to_zeros_is_linear():
    node, (added, *factors) = _node("addcmul", ((3, 4),) * 3)
    with node.graph.inserting_before(node):
        zeros = node.graph.call_function(aten.zeros_like.default, (factors[1],))
    zeros.meta["val"] = added.meta["val"]
    node.replace_input_with(added, zeros)
    for factor in factors:
        assert classify_gradient_use(node, {factor: None}) == "linear"
    assert classify_gradient_use(node, dict.fromkeys(factors)) == "other"


def _of(operator, gradient: torch.Tensor, other, *rest) -> torch.fx.Node:
    """A node that reads a gradient, and what else it reads."""
    graph = torch.fx.Graph()
    operands = [graph.placeholder("gradient"), graph.placeholder("other")]
    for operand, value in zip(operands, (gradient, other)):
        operand.meta["val"] = value
    node = graph.call_function(operator, tuple(operands[x] if isinstance(x, _Place) else x for x in rest))
    node.meta["val"] = operator(*((gradient, other)[x] if isinstance(x, _Place) else x for x in rest))
    return node


class _Place(int):
    """Which of the two tensors stands here."""


GRADIENT, OTHER = _Place(0), _Place(1)
X = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("operator", "other", "rest", "role"),
    [
        (aten.index_fill.int_Scalar, torch.tensor([1]), (GRADIENT, 1, OTHER, 0), "linear"),
        (aten.index_fill.int_Scalar, torch.tensor([1]), (GRADIENT, 1, OTHER, 2.5), "other"),  # a constant beside it
        (aten.copy.default, X, (OTHER, GRADIENT), "linear"),  # what a write into a view begins with
        (aten.copy.default, X.half(), (OTHER, GRADIENT), "other"),  # a cast, which comes before no move
        (aten.copy.default, X, (GRADIENT, OTHER), "other"),  # other numbers than a gradient's
    ],
)
def test_writes_are_linear_in_what_they_keep_and_write(operator, other, rest, role):
    node = _of(operator, X, other, *rest)
    gradient = next(one for one in node.all_input_nodes if one.name == "gradient")
    assert classify_gradient_use(node, {gradient: None}) == role


def test_zeros_in_the_shape_of_a_gradient_are_none():
    node = _of(aten.copy.default, X, X, GRADIENT, OTHER)
    shape, zeros = node.args
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.zeros_like.default, (zeros,))
    made.meta["val"] = X
    node.replace_input_with(zeros, made)
    assert classify_gradient_use(node, {shape: None}) == "shape"


def test_a_later_site_of_the_forward_pass_goes_before_an_earlier_one_and_the_global_one_behind_all():
    graph = torch.fx.Graph()
    graph.output(())
    placement = SitePlacement(torch.fx.GraphModule({}, graph), SitePlan((), {"first": "0", "second": "2"}))
    keys = ["0", GLOBAL_SITE_KEY, "2", "backward.mm"]
    assert sorted(keys, key=placement._get_rank) == [GLOBAL_SITE_KEY, "backward.mm", "0", "2"]
