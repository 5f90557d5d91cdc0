"""Translation of plain Python device functions to the source of a Triton module that works on blocks of elements.

The same pieces that Numba inlines are translated: a choice `a if c else b` becomes a select, `and` and `or` bit
operations on masks, a scalar operation the block operation of `_triton_operations`, a bound name what it stands for,
and a constant a typed scalar. Nothing else is allowed in a piece, so nothing is translated by guess.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import math
import textwrap
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..scalar._compile import OwnNames, resolve
from ..scalar._operations import SCALARS
from . import _operations as operations

Bindings = Mapping[str, object]
LANES = ("lanes", "aligned")
# No fused multiply-add: it rounds once where the reference rounds twice.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_BUILTINS = {"abs": "absolute"}
_TYPES = {np.uint32: "uint32", np.int64: "int64", np.float32: "float32", np.float64: "float64"}
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult)
_PLAIN = (ast.Tuple, ast.Constant, ast.BitAnd, ast.BitOr, ast.cmpop, ast.expr_context, *_ARITHMETIC)


def module_source(text: str, bind: Bindings, kernel: str = "") -> str:
    """The source of a Triton module.

    Args:
        text: one function in the language of pieces; it becomes a function that takes `lanes` and `aligned` besides.
        bind: what the free names of the function and of its pieces stand for.
        kernel: text of the kernel that calls it, in Triton's own language.

    Raises:
        TypeError: a construct or a name that has no form on blocks.

    >>> print(module_source("def twice(x):\\n    return x + x if x > x else -x", {}))
    import triton
    import triton.language as tl
    ...
    @triton.jit
    def twice(x, lanes, aligned: tl.constexpr):
        return tl.where(x > x, x + x, negative(x))
    """
    module = _Module()
    module.add(_definition(text), None, dict(bind), lanes=True)
    return "\n\n\n".join(["import triton\nimport triton.language as tl", *module.parts, *([kernel] if kernel else [])])


@functools.cache
def load_module(source: str) -> dict[str, object]:
    """The names of a generated module; its text stays readable for Triton, which compiles from it.

    Raises:
        ImportError: triton is not installed.
    """
    name = f"<halfulp triton {hashlib.sha256(source.encode()).hexdigest()[:32]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, object] = {"__name__": name, "__file__": name}
    exec(compile(source, name, "exec"), namespace)
    return namespace


class _Module:
    """The functions of a module, each after those that it calls."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._translated: dict[tuple[Callable, bool], str] = {}
        self._takes: dict[str, bool] = {}

    def add(self, tree: ast.FunctionDef, function: Callable | None, bind: dict, lanes: bool = False) -> str:
        """Translate a function under what its names are bound to; returns its name in the module."""
        name = tree.name
        while name in self._takes:
            name += "_"
        self._takes[name] = lanes
        translation = _Translation(self, tree, function, bind)
        body = [translation.visit(node) for node in tree.body if not _is_docstring(node)]
        self._takes[name] = lanes or translation.touches_memory
        arguments = [a.arg for a in tree.args.args] + (["lanes", "aligned: tl.constexpr"] if self._takes[name] else [])
        lines = ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))
        self.parts.append(f"@triton.jit\ndef {name}({', '.join(arguments)}):\n{textwrap.indent(lines, '    ')}")
        return name

    def piece(self, function: Callable, bind: dict) -> str:
        """Return a device function's name in the module; translate it at its first use."""
        place = function, bool(bind)
        if place not in self._translated:
            tree = _definition(textwrap.dedent(inspect.getsource(function)))
            self._translated[place] = self.add(tree, function, bind)
        return self._translated[place]

    def operation(self, name: str) -> str:
        """Return a block operation's name in the module; add it at its first use."""
        function = getattr(operations, name, None)
        if function is None:
            raise TypeError(f"the scalar operation {name} has no form on Triton blocks")
        if name not in self._takes:
            self._takes[name] = "lanes" in inspect.signature(function).parameters
            self.parts.append(f"@triton.jit\n{inspect.getsource(function).rstrip()}")
        return name

    def takes_lanes(self, name: str) -> bool:
        """Return whether a function of the module takes the mask."""
        return self._takes[name]


class _Translation(ast.NodeTransformer):
    """One function's statements in Triton's language."""

    def __init__(self, module: _Module, tree: ast.FunctionDef, function: Callable | None, bind: dict) -> None:
        self._module, self._function, self._bind, self._name = module, function, bind, tree.name
        stored = (n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        self._local = {a.arg for a in tree.args.args} | set(stored)
        self.touches_memory = False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        chained = isinstance(node, ast.Compare) and len(node.ops) > 1
        if chained or not isinstance(node, (ast.Return, ast.Expr, ast.Compare, ast.BinOp, *_PLAIN)):
            raise TypeError(f"kernel piece {self._name} uses {ast.unparse(node)}, which has no form on blocks")
        return super().generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return ast.Assign(node.targets, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        read = ast.Name(node.target.id, ast.Load())
        return ast.Assign([node.target], self.visit(ast.BinOp(read, node.op, node.value)))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return node if node.id in self._local else _literal(self._resolve(node.id), self._module)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return _call("tl.where", [self.visit(node.test), self.visit(node.body), self.visit(node.orelse)])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return functools.reduce(lambda a, b: ast.BinOp(a, operator, b), [self.visit(value) for value in node.values])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if not isinstance(node.op, ast.USub):
            return self.generic_visit(node)
        return _call(self._module.operation("negative"), [self.visit(node.operand)])

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.slice, ast.Constant):
            return self.generic_visit(node)
        return ast.Subscript(self.visit(node.value), node.slice, node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not isinstance(node.func, ast.Name) or node.keywords:
            return self.generic_visit(node)
        name = self._callee(node.func.id)
        more = [ast.Name(lane, ast.Load()) for lane in LANES] if self._module.takes_lanes(name) else []
        self.touches_memory |= bool(more)
        return _call(name, [*map(self.visit, node.args), *more])

    def _callee(self, name: str) -> str:
        if name in _BUILTINS:
            return self._module.operation(_BUILTINS[name])
        value = self._resolve(name)
        if isinstance(value, OwnNames):
            return self._module.piece(value.function, {})
        if value is np.float64:
            return self._module.operation("double")
        if isinstance(value, types.FunctionType):
            is_operation = value.__module__ == operations.__name__ or SCALARS.get(value.__name__) is value
            return self._module.operation(value.__name__) if is_operation else self._module.piece(value, self._bind)
        raise TypeError(f"kernel piece {self._name} calls {name} = {value!r}, which has no form on blocks")

    def _resolve(self, name: str) -> object:
        return resolve(self._function or _no_globals, name, self._bind)


def _no_globals() -> None:
    """A stand-in for the globals of a generated function: it has none."""


def _definition(text: str) -> ast.FunctionDef:
    tree = ast.parse(text).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"a kernel piece is a plain function, got {text.splitlines()[0]!r}")
    return tree


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.parse(name, mode="eval").body, arguments, [])


def _literal(value: Any, module: _Module) -> ast.expr:
    """A constant as a typed scalar; a zero's sign and a NaN by their bits."""
    kind = _TYPES.get(type(value))
    if kind is None:
        raise TypeError(f"a constant {value!r} of type {type(value).__name__} has no form on blocks")
    if kind == "float32" and (not math.isfinite(value) or (value == 0 and np.signbit(value))):
        module.operation("real")
        return ast.parse(f"real(tl.full([], {int(value.view(np.uint32))}, tl.uint32))", mode="eval").body
    return ast.parse(f"tl.full([], {value.item()!r}, tl.{kind})", mode="eval").body
