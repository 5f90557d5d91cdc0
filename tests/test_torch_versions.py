"""Names that not every torch has: looked up in one file, whose ways for older versions do what the newer ones do."""

import ast
import importlib.util
import sys
import uuid
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from halfulp import _torch_versions

ROOT = Path(_torch_versions.__file__).parent
# Where a lookup by another name than a literal is no question about the version, and why.
EXCEPTIONS = {
    "_torch_versions.py": "the one place",
    "_torch_floor.py": "the floor itself, without torch",
    "_torch_import.py": "registers nothing with a torch below the floor",
    "environment/_describe.py": "describes a torch below the floor too, which _torch_versions.py refuses",
    "observation/_text.py": "which optimizers are torch's own",
    "optim/_group_options.py": "which dtype a word names",
    "subclass/_derivation.py": "which operator an in-place one repeats",
}


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _asks_torch(node: ast.AST) -> bool:
    """Whether a node asks which torch is there: by a name that may be absent, or by its version."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        may_lack = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
        return node.func.id == "is_older" or (may_lack and _root(node.args[0]) == "torch")
    if isinstance(node, ast.Compare):
        return "torch.__version__" in ast.unparse(node)
    if isinstance(node, ast.Try):
        imports = [x for x in node.body if isinstance(x, ast.Import | ast.ImportFrom)]
        return any("torch" in ast.unparse(x).split()[1].split(".")[0] for x in imports)
    return False


def test_one_file_asks_which_torch_is_there():
    asking = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(map(_asks_torch, ast.walk(ast.parse(path.read_text()))))
    }
    assert asking == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("hasattr(torch.Tensor, 'x')", True),
        ("getattr(torch, 'x', None)", True),
        ("getattr(torch, name)", False),
        ("hasattr(x, 'torch')", False),
        ("if torch.__version__ >= '2.7': pass", True),
        ("try:\n    from torch.x import y\nexcept ImportError: pass", True),
        ("try:\n    import llvmlite\nexcept ImportError: pass", False),
    ],
)
def test_what_asks_is_found(code, asks):
    assert any(map(_asks_torch, ast.walk(ast.parse(code)))) == asks


@pytest.fixture
def older(monkeypatch):
    """The file as a torch sees it that lacks some names; afterwards torch is whole again."""

    def load(*lacking: tuple[object, str]):
        saved = torch._C._autograd
        for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
            monkeypatch.setattr(saved, name, getattr(saved, name))
        for owner, name in lacking:
            monkeypatch.delattr(owner, name, raising=False)
        spec = importlib.util.spec_from_file_location("halfulp._older_torch_versions", _torch_versions.__file__)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # Dynamo looks for a function's module
        spec.loader.exec_module(module)
        return module

    return load


class Recorded(torch.nn.Module):
    """Twice its input where torch.export records it, three times where another compiler does."""

    def __init__(self, versions):
        super().__init__()
        self.versions = versions

    def forward(self, x):
        if self.versions.is_exporting():
            return x * 2
        return x * 3 if torch.compiler.is_compiling() else x * 4


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("strict", [True, False])
def test_an_export_is_recognized(strict):
    model, x = Recorded(_torch_versions), torch.ones(2)
    assert torch.export.export(model, (x,), strict=strict).module()(x).tolist() == [2, 2]
    assert torch.compile(model, backend="eager", fullgraph=True)(x).tolist() == [3, 3]
    assert model(x).tolist() == [4, 4]


def test_hooks_of_saved_tensors_are_known(older):
    module = older((torch._C._autograd, "_top_saved_tensors_default_hooks"))
    assert module.get_saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(abs, abs):
        with torch.autograd.graph.saved_tensors_hooks(len, abs):
            assert module.get_saved_tensor_hooks()[0] is len
        assert module.get_saved_tensor_hooks() == (abs, abs)
    assert module.get_saved_tensor_hooks() is None
    seen = []
    x = torch.ones(2, requires_grad=True)
    seeing = lambda x: seen.append(module.get_saved_tensor_hooks()[0]) or x.exp()  # noqa: E731
    checkpoint(seeing, x, use_reentrant=False).sum().backward()
    assert [hook.__module__ for hook in seen] == ["torch.utils.checkpoint"] * 2


def test_products_are_whole_by_the_setting_for_all_backends(older):
    module = older((type(torch.backends.mkldnn), "matmul"))
    assert module.has_full_precision_float32_products("cpu")
    try:
        torch.set_float32_matmul_precision("medium")
        assert not module.has_full_precision_float32_products("cpu")
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("fresh_compiler")
def test_frames_are_skipped_by_switching_dynamo_off(older, monkeypatch):
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "skip_code"):
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        skip_code = lambda code: frames.set_code_exec_strategy(code, strategy)  # noqa: E731
        monkeypatch.setattr(frames, "skip_code", skip_code, raising=False)
    skipped = older((frames, "_FrameExecStrategy")).hide_frames_from_dynamo(_twice)
    captured = []

    def backend(module, inputs):
        captured.append(module)
        return module

    entered = torch._dynamo.disable(lambda x: skipped(x), recursive=False)
    run = torch.compile(lambda x: entered(x), backend=backend)
    assert run(torch.ones(1)).tolist() == [2]
    assert not captured
    with pytest.raises(TypeError, match="NoneType"):
        run(None)
    traced = torch.compile(lambda x: skipped(x) + 1, backend=backend, fullgraph=True)
    assert traced(torch.ones(1)).tolist() == [3]
    assert len(captured) == 1


def _twice(x):
    return 2 * (lambda x: x * 1)(x)


class Halves:
    """Partitions as torch does and counts."""

    def __init__(self):
        self.count, self.inner_partition = 0, None

    def __call__(self, module, inputs, **options):
        self.count += 1
        return torch._functorch.partitioners.min_cut_rematerialization_partition(module, inputs, **options)

    def uuid(self):
        return uuid.uuid4().hex  # no cached graph: the partition has to run


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_inductor_partitions_by_a_function_of_ours():
    from torch._inductor import compile_fx

    before, halves = compile_fx.min_cut_rematerialization_partition, Halves()

    def compiled(graph, inputs):
        with _torch_versions.use_graph_partitioner(halves, {}) as settings:
            return compile_fx.compile_fx(graph, inputs, config_patches=settings)

    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x.sin().exp(), backend=compiled)(x).sum().backward()
    assert halves.count == 1
    torch.testing.assert_close(x.grad, (x.sin().exp() * x.cos()).detach())
    assert compile_fx.min_cut_rematerialization_partition is before
