"""Machine code on disk: found again, never stale, and never in the way."""

import hashlib
import io
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest

from halfulp import kernels
from halfulp.kernels import compute_source_digest, get_array_address
from halfulp.kernels.vector._machine_function import compile_machine_function, find_kernel_cache_folder

QUANTIZE = """
    import torch, halfulp.rounding as r
    from halfulp import kernels
    q = r.quantize(torch.tensor([1.3, -2.7]), "e5m2")
    assert q.tolist() == [1.25, -2.5], q
    print(sorted(kernels.count_fallbacks()))
"""
# A cache that cannot be written is a warning, once, and kernels work.
TOLD = """
    import warnings
    warnings.simplefilter("always", RuntimeWarning)
    warnings.showwarning = lambda message, *_: print("warned:", message)
"""


def assert_told(printed: str) -> None:
    """The warning came once, with the remedy, and the report has it."""
    *warned, report = printed.splitlines()
    assert len(warned) == 1, printed
    assert re.match("warned: .*cannot be written.*HALFULP_CACHE_DIR", warned[0])
    assert "cannot be written" in report


def entries(folder) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir()}


def test_a_second_process_finds_it(cache, forked_python):
    forked_python(QUANTIZE)
    first = entries(cache)
    assert len(first) == 1
    forked_python(QUANTIZE)
    assert entries(cache) == first
    program = """
        from halfulp.kernels.vector import _machine_function
        _machine_function._compile_object = None   # any compilation would fail
    """
    forked_python(program, QUANTIZE)


def test_an_edited_piece_in_another_file(cache, forked_python, tmp_path):
    """The next process picks up an edit of a file that a kernel only inlines."""
    (tmp_path / "rule.py").write_text("def rule(x): return x + x\n")
    (tmp_path / "piece.py").write_text("from rule import rule\ndef piece(x): return [rule(x)]\n")
    program = """
        import torch
        from halfulp.kernels import compile_trace, record_function
        from piece import piece
        trace, (result,) = record_function(piece, torch.float64, 1)
        kernel = compile_trace("edited", trace, [result.number], [torch.float64], [torch.float64])
        x, y = torch.tensor([5.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        table = torch.tensor([1, 1, x.data_ptr(), 1, 1, y.data_ptr(), 1, 1])
        kernel(0, 1, table.data_ptr())
        print(y.item())
    """
    assert forked_python(program) == "10.0\n"
    (tmp_path / "rule.py").write_text("def rule(x): return x * x\n")
    os.utime(tmp_path / "rule.py", (0, 0))
    assert forked_python(program) == "25.0\n"


def doubles() -> list[int]:
    def write(b, count, array):
        with b.loop(b.int64(0), count, 1) as i:
            place = b.pointer(array, i, b.i32)
            word = b.b.load(place, align=4)
            b.b.store(b.b.add(word, word), place, align=4)

    x = np.array([5, 7], np.uint32)
    compile_machine_function("double", "of this test", 2, write)(2, get_array_address(x))
    return x.tolist()


@pytest.fixture
def notes(monkeypatch):
    """What is reported during one test."""
    monkeypatch.setattr(kernels._engine, "_fallback_counts", type(kernels._engine._fallback_counts)())
    return lambda: " ".join(kernels.count_fallbacks())


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign", "pickle"])
def test_a_damaged_entry_is_compiled_again(cache, notes, damage):
    assert doubles() == [10, 14]
    (entry,) = cache.iterdir()
    blob = entry.read_bytes()
    payload = b"not a pickle"
    changed = {
        "cut": blob[: len(blob) // 2],
        "flipped": blob[:100] + bytes([blob[100] ^ 1]) + blob[101:],
        "empty": b"",
        "foreign": b"something else" * 100,
        "pickle": blob[:16] + hashlib.sha256(payload).digest() + payload,
    }[damage]
    entry.write_bytes(changed)
    assert doubles() == [10, 14]
    assert "unreadable" in notes()
    written, said = entry.read_bytes(), kernels.count_fallbacks()
    assert doubles() == [10, 14]
    assert (entry.read_bytes(), kernels.count_fallbacks()) == (written, said)


def test_a_full_disk(cache, notes, monkeypatch):
    """Writing stops in the middle: the kernel works, and nothing half written is left."""
    real = os.fdopen

    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    def full(handle, mode):
        real(handle, mode).close()
        return Full()

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.warns(RuntimeWarning, match=r"No space left.*HALFULP_CACHE_DIR"):
        assert doubles() == [10, 14]
    assert "No space left" in notes()
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path, forked_python):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert_told(forked_python(TOLD, QUANTIZE, HALFULP_CACHE_DIR=str(blocker / "cache")))


def test_a_folder_that_the_system_cannot_look_into(tmp_path, forked_python):
    """Such as another user's: root may look into those, but not into one whose name is too long."""
    assert_told(forked_python(TOLD, QUANTIZE, HALFULP_CACHE_DIR=str(tmp_path / ("x" * 300))))


def test_a_read_only_home(tmp_path, forked_python):
    """As an ordinary user; root may write everywhere, and there the folder is on a file instead."""
    home = tmp_path / "home"
    home.mkdir()
    if os.geteuid() == 0:
        (home / ".cache").write_text("")
    else:
        home.chmod(stat.S_IRUSR | stat.S_IXUSR)
    clean = {"HALFULP_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": str(home)}
    assert_told(forked_python(TOLD, QUANTIZE, **clean))


def test_without_a_home_folder_kernels_work(notes, monkeypatch):
    for name in ("HALFULP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    with pytest.warns(RuntimeWarning, match=r"no home folder.*HALFULP_CACHE_DIR"):
        assert doubles() == [10, 14]


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HALFULP_CACHE_DIR", str(tmp_path / "a"))
    assert find_kernel_cache_folder() == tmp_path / "a"
    monkeypatch.delenv("HALFULP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_kernel_cache_folder() == tmp_path / "halfulp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_kernel_cache_folder() == tmp_path / ".cache" / "halfulp"
    monkeypatch.setenv("HALFULP_CACHE_DIR", "~/kernels")
    assert find_kernel_cache_folder() == tmp_path / "kernels"


def test_import_does_no_work(python, cache):
    program = """
        import sys
        import halfulp.rounding, halfulp.kernels
        print("llvmlite" in sys.modules)
    """
    assert python(program) == "False\n"
    assert not cache.exists()


@pytest.mark.parametrize("ingredient", ["llvmlite", "processor", "machinery", "key"])
def test_a_file_belongs_to_a_compiler_a_processor_and_a_key(cache, monkeypatch, ingredient):
    """Machine code that another of them made is another file."""
    import llvmlite

    from halfulp.kernels.vector import _machine_function as _cache

    before = _cache.find_kernel_cache_file("kernel", "a key", llvmlite.__version__)
    changes = {
        "processor": (_cache, "find_llvm_target", lambda: ("x86_64", "another", "")),
        "machinery": (_cache, "compute_source_digest", lambda *folders: "edited"),
    }
    if ingredient in changes:
        monkeypatch.setattr(*changes[ingredient])
    key = "another key" if ingredient == "key" else "a key"
    compiler = "0" if ingredient == "llvmlite" else llvmlite.__version__
    after = _cache.find_kernel_cache_file("kernel", key, compiler)
    assert before != after
    assert before.parent == after.parent


def test_the_digest_of_sources_tells_every_edit_of_any_of_them(tmp_path):
    digests = []
    for name, text in (("_a.py", "a = 1\n"), ("_a.py", "a = 2\n"), ("_b.py", ""), ("_b.py", "b = 1\n")):
        (tmp_path / name).write_text(text)
        compute_source_digest.cache_clear()
        digests.append(compute_source_digest(tmp_path))
    assert digests[1] == digests[2], "an empty file generates nothing"
    assert len(set(digests)) == 3
    assert compute_source_digest(tmp_path) == digests[-1]


def test_every_code_generator_has_a_say_in_the_digest():
    from halfulp.kernels.vector import _machine_function as _cache

    whole = compute_source_digest(*_cache._COMPILER_SOURCE_FILES)
    for one in _cache._COMPILER_SOURCE_FILES:
        others = [other for other in _cache._COMPILER_SOURCE_FILES if other != one]
        assert compute_source_digest(*others) != whole, one
