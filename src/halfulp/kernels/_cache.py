"""The on-disk cache of machine code: a kernel is compiled once per machine."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import tempfile
from pathlib import Path

from ._engine import note
from .scalar._processor import processor

_TAG = b"halfulp-kernel-1"
_GENERATORS = tuple(Path(__file__).parent / name for name in ("scalar", "vector"))


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels: HALFULP_CACHE_DIR or the user's cache folder; None without either."""
    chosen = os.environ.get("HALFULP_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "halfulp"
    except RuntimeError:
        return None


class MachineCodeCache:
    """One kernel's entry, with the interface that a Numba dispatcher expects of its cache.

    An entry that cannot be written (a read-only home, a full disk) or read (cut short, damaged) costs a compilation
    in memory and nothing else; `halfulp.kernels.report()` says so.
    """

    def __init__(self, name: str, key: str) -> None:
        self._name, self._key = name, key

    def load_overload(self, signature, target):
        """The compiled kernel for a signature, or None."""
        path = self._path(target)
        if path is None or not path.is_file():
            return None
        from numba.core.compiler import CompileResult

        target.refresh()
        try:
            blob = path.read_bytes()
            tag, checksum, payload = blob[:16], blob[16:48], blob[48:]
            if tag != _TAG or hashlib.sha256(payload).digest() != checksum:
                raise ValueError("damaged")
            return CompileResult._rebuild(target, *pickle.loads(payload))
        except (OSError, ValueError, TypeError, EOFError, AttributeError, ImportError, pickle.UnpicklingError) as e:
            note("cache", f"unreadable kernel cache entry ignored ({type(e).__name__}); compiled again")
            return None

    def save_overload(self, signature, result) -> None:
        """Write a compiled kernel whole or not at all."""
        from numba.core.serialize import dumps

        path = self._path(result.target_context)
        if path is None:
            note("cache", "no home folder: kernels are compiled in memory")
            return
        payload = dumps(result._reduce())
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
            with os.fdopen(handle, "wb") as file:
                file.write(_TAG + hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, path)
        except OSError as e:
            note("cache", f"kernel cache {path.parent} cannot be written ({e.strerror}): kernels stay in memory")
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def _path(self, target) -> Path | None:
        import llvmlite
        import numba

        folder = cache_folder()
        machine = (numba.__version__, llvmlite.__version__, processor(), source_digest(*_GENERATORS))
        key = hashlib.sha256(repr((self._key, machine)).encode()).hexdigest()[:32]
        return None if folder is None else folder / f"{self._name}-{key}.kernel"


@functools.cache
def source_digest(*folders: Path) -> str:
    """Return a hash of all sources in folders: the part of a cache key that changes with code generators."""
    files = (file for folder in folders for file in sorted(folder.glob("*.py")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
