"""What Triton compiles, as far as the text of a generated module shows it."""

import ast
import re

FORBIDDEN = (ast.For, ast.While, ast.AugAssign)
OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv),
    *(ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift),
)
DECORATOR = re.compile(r"triton\.jit(\(do_not_specialize=\[('\w+'(, )?)+\]\))?")
# What a kernel is compiled apart for.
SWITCHES = ("aligned", "ragged")
TYPE_TESTS = ("x.dtype == tl.float64", "a.dtype == tl.float64", "w.dtype == tl.uint64")


def check_functions(text: str) -> set[str]:
    """Assert that each function of a module is defined once, after all that it names, in expressions that Triton takes.

    Return the functions' names.
    """
    known: set[str] = set()
    for function in _list_functions(text):
        assert function.name not in known, f"{function.name} is defined twice"
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        own = {a.arg for a in function.args.args} | {node.id for node in names if isinstance(node.ctx, ast.Store)}
        # Annotations and decorators stand among them.
        unknown = {node.id for node in names} - own - known - {"tl", "triton", "range"}
        assert not unknown, f"{function.name} uses {unknown}"
        for node in ast.walk(function):
            assert not isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp)), ast.unparse(node)
            negated = isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant)
            assert not negated, ast.unparse(node)
        known.add(function.name)
    return known


def check_source(text: str) -> set[str]:
    """Assert of a module of functions on elements that Triton compiles them; return their names."""
    for function in _list_functions(text):
        assert all(DECORATOR.fullmatch(ast.unparse(decorator)) for decorator in function.decorator_list)
        assert len(function.decorator_list) == 1
        for node in ast.walk(function):
            assert not isinstance(node, FORBIDDEN), ast.unparse(node)
            if isinstance(node, ast.If):
                assert ast.unparse(node.test) in SWITCHES + TYPE_TESTS
            if isinstance(node, ast.BinOp):
                assert isinstance(node.op, OPERATORS), ast.unparse(node)
                # Of float32 it is correctly rounded by div_rn alone.
                assert not isinstance(node.op, ast.Div) or function.name == "div", ast.unparse(node)
    return check_functions(text)


def _list_functions(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
