"""torch and halfulp imported in either order: files and graphs are read; a torch that is too old is refused by name."""

import io
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch

import halfulp as hu
from halfulp import _torch_floor, _torch_import
from halfulp._messages import ENV_HINT


def in_a_fresh_process(code: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("order", ["import halfulp, torch", "import torch, halfulp"])
def test_files_and_operators_are_found_without_another_import(order, tmp_path, in_bare_process):
    run = in_bare_process if order == "import torch, halfulp" else in_a_fresh_process
    x = hu.MCTensor.encode(torch.tensor([0.1, -2.0], dtype=torch.float64), components=2, dtype=torch.float64)
    s = hu.ScaledTensor.encode(torch.tensor([1.0, 3.0], dtype=torch.float32), dtype=torch.float8_e5m2)
    torch.save({"x": x, "s": s, "update": hu.optim.Kahan()}, tmp_path / "file.pt")
    assert "[0.1, -2.0] [1.0, 3.0]" in run(
        f"""
        import sys
        {order}
        assert "halfulp.mctensor" not in sys.modules and "llvmlite" not in sys.modules
        assert type(torch.__spec__.loader).__name__ == "SourceFileLoader"
        assert "exec_module" not in vars(torch.__spec__.loader)
        assert not any("halfulp" in getattr(finder, "__module__", "") for finder in sys.meta_path)
        found = torch.load(sys.argv[1], weights_only=True)
        assert type(found["x"]).__name__ == "MCTensor" and type(found["s"]).__name__ == "ScaledTensor"
        assert found["update"].name == "kahan"
        print(found["x"].decode().tolist(), found["s"].decode().tolist())
        assert torch.ops.halfulp.quantize.default.name() == "halfulp::quantize"
        assert not hasattr(torch.ops.halfulp, "no_such_operator")
        """,
        str(tmp_path / "file.pt"),
    )


def test_every_function_that_files_name_is_listed():
    for x in (
        hu.MCTensor.encode(torch.ones(2, dtype=torch.float64), components=2, dtype=torch.float64),
        hu.ScaledTensor.encode(torch.ones(2, dtype=torch.float32)),
    ):
        function = x.__reduce_ex__(2)[0]
        assert f"{function.__module__}.{function.__qualname__}" in _torch_import.REBUILD_FUNCTIONS_OF_SAVED_TENSORS
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True).decode(), x.decode())


def test_every_package_that_defines_operators_is_listed():
    root = Path(hu.__file__).parent
    users = {p.relative_to(root).parts[0] for p in root.rglob("*.py") if "= define_operator(" in p.read_text()}
    assert users == set(_torch_import.SUBPACKAGES_DEFINING_OPERATORS)


def test_an_import_of_torch_that_fails_is_tried_again(tmp_path):
    (tmp_path / "torch.py").write_text("import pathlib\n1 / len(list(pathlib.Path(__file__).parent.glob('ready')))\n")
    in_a_fresh_process(
        """
        import pathlib, sys
        import halfulp
        sys.path.insert(0, sys.argv[1])
        for attempt in range(2):
            try:
                import torch
            except ZeroDivisionError:
                assert "torch" not in sys.modules
            except AttributeError as error:
                assert attempt and "__version__" in str(error), error
                break
            pathlib.Path(sys.argv[1], "ready").touch()
        else:
            raise AssertionError("nothing was registered")
        """,
        str(tmp_path),
    )


def test_a_torch_below_the_floor_is_one_sentence(in_bare_process):
    said = in_bare_process(
        """
        import torch
        torch.__version__ = "2.5.1+cu124"
        try:
            import halfulp
        except ImportError as error:
            print(error)
        """
    )
    floor = _torch_floor.OLDEST_TORCH
    remedy = f"run pip install --upgrade 'torch>={floor}'; {ENV_HINT}"
    assert said == f"halfulp needs torch {floor} or newer and found torch 2.5.1+cu124: {remedy}\n"


def test_a_torch_below_the_floor_that_is_imported_later_is_refused_at_the_first_use():
    in_a_fresh_process(
        """
        import importlib, sys
        import halfulp as hu
        import torch
        torch.__version__ = "2.5.1"
        lazy = {"formats", "recipes", "testing", "trials"}
        without_tensors = {"Format", "BlockFormat", "Recipe", "Evidence", "compare"}
        for name in set(hu.__all__) - lazy - without_tensors:
            try:
                getattr(hu, name)
            except ImportError as error:
                assert "needs torch" in str(error), error
            else:
                raise AssertionError(name)
        """
    )


def test_the_floor_is_that_of_the_metadata_and_the_page():
    root = Path(__file__).parent.parent
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={_torch_floor.OLDEST_TORCH}" in wanted
    assert f"\ntorch {_torch_floor.OLDEST_TORCH} or later, " in (root / "docs/compatibility.md").read_text()
    assert not _torch_floor.is_older(torch.__version__)


def test_a_call_comes_after_an_import_or_at_once(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    found = []
    _torch_import.call_after_import("imported_late", lambda module: found.append(module.value))
    assert not found
    assert "imported_late" not in sys.modules
    import imported_late

    assert found == [3]
    assert "exec_module" not in vars(imported_late.__spec__.loader)
    _torch_import.call_after_import("imported_late", lambda module: found.append(module))
    assert found == [3, imported_late]
    del sys.modules["imported_late"]
