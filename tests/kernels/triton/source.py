"""What Triton compiles, as far as the text of a generated module shows it."""

import ast
import re

FORBIDDEN = (ast.IfExp, ast.BoolOp, ast.For, ast.While, ast.Lambda, ast.ListComp, ast.AugAssign)
OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv),
    *(ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift),
)
DECORATOR = re.compile(r"triton\.jit(\(do_not_specialize=\[('\w+'(, )?)+\]\))?")
# What a kernel is compiled apart for.
SWITCHES = ("aligned", "ragged")
TYPE_TESTS = ("x.dtype == tl.float64", "a.dtype == tl.float64", "w.dtype == tl.uint64")


def check_source(text: str) -> set[str]:
    """Assert that a module holds functions that Triton compiles, and nothing that none defines; return their names."""
    known: set[str] = set()
    for function in (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)):
        assert all(DECORATOR.fullmatch(ast.unparse(decorator)) for decorator in function.decorator_list)
        assert len(function.decorator_list) == 1
        assert function.name not in known, "defined twice"
        own = {a.arg for a in function.args.args} | {
            n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        for node in ast.walk(function):
            negated = isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant)
            assert not negated, ast.unparse(node)
            assert not isinstance(node, FORBIDDEN), ast.unparse(node)
            if isinstance(node, ast.If):
                assert ast.unparse(node.test) in SWITCHES + TYPE_TESTS
            if isinstance(node, ast.BinOp):
                assert isinstance(node.op, OPERATORS), ast.unparse(node)
                # Of float32 it is correctly rounded by div_rn alone.
                assert not isinstance(node.op, ast.Div) or function.name == "div", ast.unparse(node)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                assert node.id in own | known | {"tl", "triton"}, f"{function.name} uses {node.id}"
        known.add(function.name)
    return known
