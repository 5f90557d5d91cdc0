"""Operators by name: what torch lacks is absent and skipped, and nothing is looked up in another way."""

import ast
from pathlib import Path

import pytest
import torch

import halfulp as hu
from halfulp.kernels import find_operator_namespace, list_absent_operators, list_present_operators
from halfulp.subclass import RuleTable

ROOT = Path(hu.__file__).parent
# Of the operators that halfulp has rules for, those that a torch from the floor on lacks, with that torch. A name that
# is spelt wrongly would be absent everywhere.
LACKING = {
    **dict.fromkeys(
        (
            "aten::_fused_adagrad_.tensor_lr",
            "aten::_fused_rms_norm.default",
            "aten::_grouped_mm.default",
            *(f"aten::{name}.dtype" for name in ("addmm", "baddbmm", "bmm", "mm")),
        ),
        "2.6",
    ),
    **dict.fromkeys(("aten::_fused_rms_norm_backward.default", "aten::hash_tensor"), "2.6 and 2.8"),
    "aten::_upsample_lanczos2d_aa.default": "2.11 and older",
    "aten::_upsample_lanczos2d_aa_backward.default": "2.11 and older",
    "aten::cholesky": "2.14 and newer",
    "aten::cholesky.default": "2.14 and newer",
}
aten = find_operator_namespace("aten")


def test_what_is_there_is_torchs_own():
    assert aten.add.Tensor is torch.ops.aten.add.Tensor
    assert aten.__and__.Tensor is torch.ops.aten.__and__.Tensor
    assert aten.add.overloads() == torch.ops.aten.add.overloads()
    assert not hasattr(aten, "__wrapped__")
    assert not hasattr(aten.add, "__wrapped__")
    assert not hasattr(aten.add, "_mock_name")


def test_what_is_not_there_is_skipped_and_refuses_to_run():
    gone = aten.no_such_operator.default
    overload = aten.add.no_such_overload
    assert list_present_operators([gone, aten.neg.default, overload]) == [aten.neg.default]
    assert aten.no_such_operator.overloads() == []
    table = RuleTable()
    rule = table.implements(gone, aten.neg.default, overload)(abs)
    assert (rule, table.rules) == (abs, {aten.neg.default: abs})
    with pytest.raises(NotImplementedError, match="has no operator aten::no_such_operator"):
        gone(torch.ones(2, dtype=torch.float32))


def test_every_name_is_an_operator_of_some_torch():
    import halfulp.gradients
    import halfulp.mctensor  # noqa: F401

    made_here = ("no_such", "gone_since")
    assert {name for name in list_absent_operators() if not any(word in name for word in made_here)} <= set(LACKING)


def test_nothing_that_is_imported_needs_an_operator(in_bare_process):
    """As if torch lacked every operator that a rule is for."""
    code = """
import halfulp.kernels._operator as operators
begin = operators.TorchOperators.__init__
operators.TorchOperators.__init__ = lambda self, name, held: begin(self, name, held if "::" in name else object())
import halfulp as hu
for name in hu.__all__:
    getattr(hu, name)
assert len(operators.list_absent_operators()) > 500
"""
    in_bare_process(code)


def _looked_up_on_import(tree: ast.AST) -> list[str]:
    """torch.ops.<namespace> outside of functions."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef):
            for part in (*node.decorator_list, node.args) if not isinstance(node, ast.Lambda) else ():
                found += _looked_up_on_import(part)
            continue
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.ops."):
            found.append(ast.unparse(node))
        found += _looked_up_on_import(node)
    return found


def test_nothing_is_looked_up_in_torch_ops_when_it_is_imported():
    for path in (path for path in ROOT.rglob("*.py") if "torch.ops" in path.read_text()):
        assert not _looked_up_on_import(ast.parse(path.read_text())), path
    seen = "@implements(torch.ops.aten.add.Tensor)\ndef f(x):\n    return torch.ops.aten.neg(x)\n"
    assert _looked_up_on_import(ast.parse(seen))
    assert not _looked_up_on_import(ast.parse("def f(x):\n    return torch.ops.aten.neg(x)\n"))


def test_own_operators_say_torchs_module_so_that_compilers_pickle_them():
    assert torch.ops.halfulp.quantize.__module__ == torch.ops.aten.add.__module__.replace("aten", "halfulp")
