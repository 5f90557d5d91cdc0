"""Processes that need a kernel at the same time: one compiles it, and no other waits for it in vain."""

import os
import signal
import textwrap
from pathlib import Path

import filelock
import numpy as np
import pytest

from halfulp import kernels
from halfulp.kernels import _cache, address_of
from halfulp.kernels.vector._machine_function import machine_function

RANK = """
    import os, sys, time
    from pathlib import Path
    import torch
    import halfulp.rounding as r
    from halfulp.kernels._cache import CacheEntry

    rank, folder, written = int(sys.argv[1]), Path(sys.argv[2]).parent, []
    save = CacheEntry.write

    def saved(self, *arguments):
        written.append(self)
        save(self, *arguments)

    CacheEntry.write = saved
    # Both begin at once; without turns both would compile.
    (folder / f"ready{rank}").touch()
    while not all((folder / f"ready{other}").exists() for other in range(2)):
        time.sleep(0.001)
    assert r.quantize(torch.tensor([1.3, -2.7]), "e5m2").tolist() == [1.25, -2.5]
    (folder / f"compiled{rank}").write_text(str(len(written)))
"""


# A compiler that is killed where an entry is written, but is not in its place yet.
WRITER = """
import os, time
from halfulp.kernels.vector._machine_function import machine_function

def write(vectors, count, array):
    with vectors.loop(vectors.word(0), count, 1) as i:
        place = vectors.pointer(array, i, vectors.i32)
        x = vectors.b.load(place)
        vectors.b.store(vectors.b.add(x, x), place)

def hang(*paths):
    print("written", flush=True)
    time.sleep(300)

os.replace = hang
machine_function("double", "of this test", 2, write)
"""


def double(vectors, count, array):
    with vectors.loop(vectors.word(0), count, 1) as i:
        place = vectors.pointer(array, i, vectors.i32)
        x = vectors.b.load(place)
        vectors.b.store(vectors.b.add(x, x), place)


def doubles() -> list[int]:
    x = np.array([5, 7], np.uint32)
    machine_function("double", "of this test", 2, double)(2, address_of(x))
    return x.tolist()


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch):
    """What is reported during one test."""
    monkeypatch.setattr(kernels._engine, "_notes", type(kernels._engine._notes)())
    return lambda: " ".join(kernels.report())


@pytest.fixture
def lock(cache: Path) -> filelock.FileLock:
    """The lock of the kernel's entry, whose name is known by one that was compiled before."""
    assert doubles() == [10, 14]
    (entry,) = cache.iterdir()
    entry.unlink()
    return filelock.FileLock(entry.with_suffix(".lock"))


def test_of_two_processes_one_compiles(cache, in_two_processes, tmp_path):
    in_two_processes(textwrap.dedent(RANK))
    assert sorted((tmp_path / f"compiled{rank}").read_text() for rank in range(2)) == ["0", "1"]
    assert [path.suffix for path in cache.iterdir()] == [".kernel"]


def test_one_that_never_ends_is_waited_for_no_longer(lock, notes, monkeypatch):
    monkeypatch.setattr(_cache, "PATIENCE", 0.05)
    with lock:
        assert doubles() == [10, 14]
        assert "another process did not end compiling a kernel in 0.05 s: compiled here too" in notes()
    assert len(list(Path(lock.lock_file).parent.glob("*.kernel"))) == 1, "it is written all the same"


def test_the_lock_of_one_that_was_killed_is_free(lock, notes):
    Path(lock.lock_file).touch()
    assert doubles() == [10, 14]
    assert notes() == ""
    assert not Path(lock.lock_file).exists()


def test_what_a_killed_compiler_wrote_is_not_used(cache, forking, notes, monkeypatch):
    writer = forking(WRITER)
    writer.says("written")
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.code() == -signal.SIGKILL
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".part"]
    monkeypatch.setattr(_cache, "PATIENCE", 5)
    assert doubles() == [10, 14]
    assert notes() == "", "nobody was waited for"
    part, entry = sorted(cache.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert (part.suffix, entry.suffix) == (".part", ".kernel")


def test_where_files_cannot_be_locked_kernels_are_compiled(lock, notes, monkeypatch):
    def refuse(self, **options):
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert doubles() == [10, 14]
    assert len(list(Path(lock.lock_file).parent.iterdir())) == 1


def test_a_compilation_that_fails_ends_its_turn(cache):
    def broken(vectors, count, array):
        vectors.b.store(absent(count), vectors.pointer(array, count, vectors.i64))  # noqa: F821

    with pytest.raises(Exception, match="absent"):
        machine_function("broken", "of this test", 2, broken)
    assert list(cache.iterdir()) == []
