"""The public face, name by name, so that none comes or goes unseen; a change here is a change in the changelog."""

import ast
import importlib
import inspect
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

import pytest
import torch

import halfulp as hu

from .records import REMEDY, list_differences, read_record

MOST_NAMES = 48
FACE = {
    "halfulp": {
        *("arithmetic", "formats", "gradients", "hyperbolic", "kernels", "optim", "recipes", "rounding", "scaled"),
        *("mctensor", "observation", "testing", "trials"),
        *("MCTensor", "exact_dot", "exact_partial", "exact_round", "exact_sum", "fallbacks", "multicomponent"),
        *("ScaledTensor", "rescale", "scalify"),
        *("ScaledTensor", "cast", "rescale", "scalify", "verify"),
        *("BlockFormat", "Format", "AdaptiveGradScaler"),
        *("Down", "Nearest", "Stochastic", "TowardZero", "Up", "quantize"),
        *("Adam", "AdamW", "Lion", "SGD"),
        *("Components", "Feedback", "Kahan", "Master", "Split", "float32_gradients", "float32_products"),
        *("Evidence", "Recipe", "compare", "tune", "convert", "emulate", "explain", "multipoint", "revert"),
        *("Finding", "audit", "contract", "observe", "forecast"),
    },
    "halfulp.gradients": {
        *("AdaptiveGradScaler", "LastStep", "Policy", "Amax", "Constant", "Dynamic", "Measured", "RisingFloor"),
        *("UnderflowBound", "ElementWise", "AbsRange", "NarrowAllReduceState", "reduce_in_bfloat16"),
    },
    "halfulp.optim": {
        *(
            "Adagrad",
            "RMSprop",
            "NAdam",
            "RAdam",
            "Adan",
            "AdEMAMix",
            "Prodigy",
            "SGDScheduleFree",
            "AdamWScheduleFree",
            "LAMB",
            "Adafactor",
            "Muon",
            "Reduction",
            "HALP",
        ),
        *("Adam", "AdamW", "Lion", "SGD", "Optimizer", "EMA", "wrap", "float32_gradients"),
        *("WeightUpdate", "Components", "Feedback", "Kahan", "KahanStochastic", "Master", "Split"),
        *("State", "LostUpdateReport", "UpdateRule", "StateSlot", "report"),
        *(
            "OPTIMIZERS",
            "register_optimizer",
            "release_gradients",
            "GradientRelease",
            "register_weight_update",
            "register_state_store",
        ),
    },
}


LAZY = ("halfulp", "halfulp.recipes", "halfulp.testing", "halfulp.trials", "halfulp.trials.tasks")


def _exported(package: str) -> set[str]:
    """The names that a package hands on, each by `from ._x import y as y` in its __init__ or, if it is lazy, stub."""
    path = Path(importlib.import_module(package).__file__)
    stub = path.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else path).read_text())
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if alias.name == "_needs_torch":
                    continue
                assert alias.asname == alias.name, f"{alias.name} is not re-exported as itself"
                found.append(alias.name)
    assert len(found) == len(set(found)), "a name stands there twice"
    return set(found)


@pytest.mark.parametrize("package", FACE)
def test_the_face_is_as_it_was(package):
    assert _exported(package) == FACE[package]
    for name in FACE[package]:
        assert getattr(importlib.import_module(package), name) is not None


@pytest.mark.parametrize("package", FACE)
def test_every_public_thing_says_what_it_is(package):
    module = importlib.import_module(package)
    for name in FACE[package]:
        assert (getattr(module, name).__doc__ or "").strip(), f"{package}.{name} has no docstring"


PUBLIC = [
    *("halfulp", "halfulp.arithmetic", "halfulp.formats", "halfulp.gradients", "halfulp.hyperbolic"),
    *("halfulp.mctensor", "halfulp.observation", "halfulp.optim", "halfulp.recipes", "halfulp.rounding"),
    *("halfulp.scaled", "halfulp.testing", "halfulp.trials", "halfulp.trials.tasks"),
]


def _list_defaults(thing: object) -> dict[str, object]:
    """The defaults of a function's arguments, or of those of a class and of its public methods."""

    def tell(value: object) -> object:
        if isinstance(value, tuple | list):
            return [tell(one) for one in value]
        if value is None or isinstance(value, bool | int | str):
            return value
        return repr(value) if isinstance(value, float | torch.dtype) else f"a {type(value).__name__}"

    calls = {"": thing}
    if inspect.isclass(thing):
        # torch writes a `step` into the class of an optimizer as the first one is made.
        calls |= {name: one for name, one in vars(thing).items() if name[0] != "_" and name != "step"}
    found: dict[str, object] = {}
    for name, call in calls.items():
        call = getattr(call, "__func__", call)
        try:
            parameters = inspect.signature(call).parameters.values() if callable(call) else ()
        except ValueError:  # of what is made in C
            continue
        given = {one.name: tell(one.default) for one in parameters if one.default is not inspect.Parameter.empty}
        found |= {f"{name}({key})" if name else key: value for key, value in given.items()}
    return found


@pytest.mark.parametrize("package", PUBLIC)
def test_defaults_are_as_they_were(package):
    module = importlib.import_module(package)
    things = {name: getattr(module, name) for name in sorted(_exported(package))}
    found = {name: _list_defaults(one) for name, one in things.items() if callable(one)}
    found = {name: defaults for name, defaults in found.items() if defaults}
    differing = list_differences(found, read_record("defaults", package, found), 0.0, package)
    assert not differing, REMEDY


def test_the_face_is_small():
    names = [name for name in FACE["halfulp"] if not inspect.ismodule(getattr(hu, name))]
    assert len(names) <= MOST_NAMES
    assert hu.__version__


@pytest.mark.parametrize(
    "name", ["convert", "float32_gradients", "float32_products", "multicomponent", "revert", "scalify"]
)
def test_what_changes_a_model_returns_the_type_it_was_given(name):
    function = getattr(hu, name)
    hints = typing.get_type_hints(function)
    assert isinstance(hints["model"], typing.TypeVar)
    assert hints["return"] is hints["model"]
    bound = hints["model"].__bound__
    assert isinstance(torch.nn.Linear(1, 1), typing.get_origin(bound) or bound)


def test_public_of_kernels_is_what_rules_and_comparisons_need():
    names = {"sqrt", "divide", "maximum", "sign_of", "select", "floor"}
    names |= {"engine", "count_fallbacks", "same_bits", "KernelMismatchError"}
    assert set(hu.kernels.__all__) == names
    for name in names:
        assert f"`{name}`" in hu.kernels.__doc__
        assert getattr(hu.kernels, name).__doc__.strip()


def test_packages_with_a_stub_are_the_lazy_ones():
    root = Path(hu.__file__).parent
    found = {".".join(("halfulp", *path.parent.relative_to(root).parts)) for path in root.rglob("__init__.pyi")}
    assert found == set(LAZY)


@pytest.mark.parametrize("package", LAZY)
def test_a_stub_is_the_face(package):
    module = importlib.import_module(package)
    names = _exported(package)
    assert set(dir(module)) == set(module.__all__) == names
    for name in names:
        found = getattr(module, name)
        assert found is getattr(module, name)
        owner = sys.modules[package]
        assert vars(owner)[name] is found, "a name that was used is looked up at once"
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        module.nothing_of_the_kind  # noqa: B018


def test_a_lazy_package_does_nothing_but_attach_its_stub():
    for package in LAZY[1:]:
        tree = ast.parse(Path(importlib.import_module(package).__file__).read_text())
        assert [type(node).__name__ for node in tree.body] == ["Expr", "Import", "Assign"], package


def in_a_fresh_process(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_names_without_tensors_need_no_torch():
    in_a_fresh_process("""
        import sys
        import halfulp as hu
        import halfulp.trials, halfulp.recipes
        assert hu.formats.get("bf16").bits == 16 and hu.formats.rows() and hu.formats.block_rows()
        assert hu.Recipe is hu.recipes.Recipe and hu.Format is hu.formats.Format
        assert hu.recipes.get("bf16-kahan") and hu.trials.tasks.names() and halfulp.trials.DEFAULT_RECIPES
        assert dir(hu) and hu.__version__
        heavy = {"torch", "numpy", "llvmlite", "matplotlib", "typer"} & set(sys.modules)
        assert not heavy, heavy
    """)


def test_emulate_is_the_function_and_its_package_has_another_name(in_bare_process):
    in_bare_process("""
        import halfulp.emulation as package
        from halfulp.emulation import Emulation, region
        import halfulp as hu
        assert package.emulate is hu.emulate and callable(hu.emulate) and not isinstance(hu.emulate, type(hu))
        names = {}
        exec("from halfulp import *", names)
        assert names["emulate"] is hu.emulate and set(hu.__all__) <= set(names)
    """)


def test_the_face_may_be_first_used_in_a_compiled_function(in_bare_process):
    in_bare_process("""
        import torch
        import halfulp as hu
        compiled = torch.compile(lambda x: hu.quantize(x, hu.formats.e4m3fn), backend="eager", fullgraph=True)
        assert compiled(torch.tensor([1.06])).item() == 1.0
    """)
