"""Tests compare bits by `same_bits` alone: a comparison of one's own may take NaN for a number or -0 for 0."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def _exact(call: ast.Call) -> bool:
    """Whether a comparison allows no difference."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    allowed = {word.arg: ast.unparse(word.value) for word in call.keywords}
    nothing = {allowed.get("rtol"), allowed.get("atol")} <= {"0", "0.0"}
    return nothing or name in ("equal", "array_equal", "assert_array_equal")


def _own_comparisons(source: str) -> list[int]:
    """Lines that make NaN a number before they compare, or take NaNs for equal on their own."""
    if not any(word in source for word in ("nan_to_num", "equal_nan", "isnan")):
        return []
    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and _exact(node)]
    lines = [x.lineno for x in calls if any(word in ast.unparse(x) for word in ("nan_to_num(", "equal_nan=True"))]
    either = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)]
    lines += [x.lineno for x in either if "==" in (text := ast.unparse(x)) and text.count("isnan(") >= 2]
    return sorted(set(lines))


def test_no_comparison_of_its_own():
    found = {str(path.relative_to(TESTS)): _own_comparisons(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}, "halfulp.kernels.same_bits compares bits"


@pytest.mark.parametrize(
    "source",
    [
        "torch.equal(a.nan_to_num(7), b.nan_to_num(7))",
        "np.array_equal(a, b, equal_nan=True)",
        "torch.testing.assert_close(a, b, rtol=0, atol=0.0, equal_nan=True)",
        "((a == b) | (a.isnan() & b.isnan())).all()",
    ],
)
def test_one_of_its_own_is_found(source):
    assert _own_comparisons(source) == [1]
    assert _own_comparisons("same_bits(a, b)\ntorch.testing.assert_close(a, b, equal_nan=True)") == []
