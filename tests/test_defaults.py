"""torch's global defaults (dtype and device) change nothing: no tensor is made without naming both."""

import ast
import json
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "halfulp"
MAKERS = {
    *("zeros", "ones", "empty", "full", "tensor", "scalar_tensor", "as_tensor", "asarray", "empty_strided", "eye"),
    *(
        "arange",
        "range",
        "linspace",
        "logspace",
        "rand",
        "randn",
        "randint",
        "randperm",
        "tril_indices",
        "triu_indices",
    ),
    *("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window", "empty_permuted"),
}
# Of a wrapper subclass, under the name that files give it.
WRAPPERS = ("torch.Tensor._make_wrapper_subclass", "_make")
LAST_NAMES = {name.rpartition(".")[2] for name in WRAPPERS}


def last_name(function: ast.expr) -> str | None:
    """What a called function's name ends with."""
    return getattr(function, "attr", None) or getattr(function, "id", None)


def named(call: ast.Call, kinds: dict[str, set[str]]) -> set[str]:
    """The keywords of a call, with those of `**name` where name is a dict written out in the same file."""
    found = {keyword.arg for keyword in call.keywords if keyword.arg}
    for keyword in call.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Name):
            found |= kinds.get(keyword.value.id, set())
    return found


def written_out(tree: ast.AST) -> dict[str, set[str]]:
    """The keys of dicts that are written out and assigned to a name; of several under one name, those of all."""
    kinds: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
            keys = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
            name = node.targets[0].id
            kinds[name] = kinds[name] & keys if name in kinds else keys
    return kinds


def made_by_default(text: str) -> list[str]:
    """Calls that make a tensor whose dtype or device torch's defaults would choose."""
    tree = ast.parse(text)
    kinds = written_out(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node.func) in LAST_NAMES and ast.unparse(node.func) in WRAPPERS:
            if not {"dtype", "device"} <= named(node, kinds):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
            continue
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        if node.func.attr in MAKERS and not {"dtype", "device"} <= named(node, kinds):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if node.func.attr == "where" and len(node.args) == 3 and all(_is_number(x) for x in node.args[1:]):
            found.append(f"line {node.lineno}: {ast.unparse(node)}: a choice of two floats takes the default dtype")
    return found


DRAWING = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson")


def drawn_from_elsewhere(text: str) -> list[str]:
    """Random numbers in a function that is given a generator, and draws them from another one."""
    found = []
    if "generator" not in text:
        return found
    tree = ast.parse(text)
    kinds = written_out(tree)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = function.args
        names = {x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        for node in ast.walk(function) if "generator" in names else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            made = ast.unparse(node.func.value) == "torch" and node.func.attr in DRAWING
            written = node.func.attr.removesuffix("_") in (*DRAWING, "uniform", "exponential", "random")
            written &= node.func.attr.endswith("_")
            others = [x for x in node.keywords if x.arg == "generator" and ast.unparse(x.value) != "generator"]
            if (made or written) and (others or "generator" not in named(node, kinds)):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_whoever_is_given_a_generator_draws_from_it():
    found = {path.relative_to(SOURCE): drawn_from_elsewhere(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    found = [f"{path}, {line}" for path, lines in found.items() for line in lines]
    assert not found, "generator=generator:\n" + "\n".join(found)
    assert drawn_from_elsewhere("def f(generator):\n    return torch.rand(2)")
    assert drawn_from_elsewhere("def f(x, generator=None):\n    return x.normal_(0, 1, generator=other)")


def _is_number(node: ast.expr) -> bool:
    """Whether an expression is a Python float by its looks."""
    if any(isinstance(part, ast.Attribute | ast.Call | ast.Name) for part in ast.walk(node)):
        return ast.unparse(node) in ("torch.inf", "torch.nan", "-torch.inf", "math.inf", "math.nan")
    return any(isinstance(part, ast.Constant) and isinstance(part.value, float) for part in ast.walk(node))


def test_no_tensor_is_made_by_default():
    found = {path.relative_to(SOURCE): made_by_default(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    found = [f"{path}, {line}" for path, lines in found.items() for line in lines]
    assert not found, "name dtype and device:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "torch.zeros(3)",
        "torch.zeros(3, dtype=torch.float32)",
        "torch.arange(3, device=x.device)",
        "torch.tensor(1)",
        "torch.where(x, 0.0, -torch.inf)",
        "_make(cls, x.shape, dtype=x.dtype)",
        "kind = {'dtype': 1}\ntorch.rand(2, **kind)",
    ],
)
def test_the_search_finds_what_it_is_for(text):
    assert made_by_default(text)


def test_the_search_lets_named_ones_pass():
    assert not made_by_default("kind = {'dtype': 1, 'device': 'cpu'}\ntorch.rand(2, **kind)\ntorch.where(x, 1, 2)")


def test_a_fresh_process_under_other_defaults_has_the_same_bits(benchmark_module, in_bare_process):
    bench_defaults = benchmark_module("bench_defaults")
    expected = bench_defaults.run("float32 cpu", few=True)
    assert expected.keys() == set(bench_defaults.FEW)
    assert not [line for line in expected.values() if ":" in line], expected
    command = ["bench_defaults", "--default", "float16 meta", "--few"]
    said = in_bare_process(
        f"""
        import runpy, sys, warnings
        warnings.simplefilter("ignore")
        import torch
        from halfulp._torch_floor import is_older
        if is_older(torch.__version__, "2.11"):
            import torch._dynamo  # which torch 2.6 and 2.8, their own optimizers included, cannot under these
        sys.argv = {command}
        runpy.run_path({bench_defaults.__file__!r}, run_name="__main__")
        """
    )
    assert json.loads(said.splitlines()[-1]) == expected
