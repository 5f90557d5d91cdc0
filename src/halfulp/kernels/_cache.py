"""The on-disk cache of machine code: a kernel is compiled once per machine."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._messages import ENVIRONMENT
from ._engine import note_and_warn_once, note_fallback
from .vector._processor import processor

_FOLDER_REMEDY = f"set HALFULP_CACHE_DIR to a folder that can be written; {ENVIRONMENT}"
_ENTRY_TAG = b"halfulp-kernel-1"
# How many kernels this process found, compiled and wrote, and the bytes that it wrote.
statistics = Counter[str]()
_GENERATOR_SOURCES = tuple(Path(__file__).parent / name for name in ("_operations.py", "vector"))


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


class CacheEntry:
    """One kernel's file in the cache.

    An entry that cannot be written (a read-only home, a full disk) or read (cut short, damaged) costs a compilation
    in memory and nothing else; `halfulp.kernels.report()` says so, and of the former a warning. Processes that need an
    entry at the same time, such as the ranks of a training, each compile it, and the last one's file stays.

    Args:
        name: the beginning of the file's name.
        key: whatever the machine code depends on, short of the compilers and the processor.
        compilers: names and versions.
    """

    def __init__(self, name: str, key: str, compilers: tuple[str, ...]) -> None:
        self._name, self._key, self._compilers = name, key, compilers

    def read(self, rebuild: Callable[[bytes], Any]) -> Any:
        """Return `rebuild` of the file; None where there is none that can be read."""
        path, found = self._find_path(), None
        if path is not None and path.is_file():
            try:
                blob = path.read_bytes()
                tag, checksum, payload = blob[:16], blob[16:48], blob[48:]
                if tag != _ENTRY_TAG or hashlib.sha256(payload).digest() != checksum:
                    raise ValueError("damaged")
                found = rebuild(payload)
            except (OSError, ValueError, RuntimeError) as e:  # the last one is LLVM's
                note_fallback("cache", f"unreadable kernel cache entry ignored ({type(e).__name__}); compiled again")
        statistics["found" if found is not None else "compiled"] += 1
        return found

    def write(self, payload: bytes) -> None:
        """Write an entry whole or not at all."""
        path = self._find_path()
        if path is None:
            note_and_warn_once("cache", f"no home folder: kernels are compiled in every process; {_FOLDER_REMEDY}")
            return
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".part")
            with os.fdopen(handle, "wb") as file:
                file.write(_ENTRY_TAG + hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, path)
            statistics.update(written=1, bytes=len(payload))
        except OSError as e:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            note_and_warn_once(
                "cache",
                f"kernel cache {path.parent} cannot be written ({e.strerror}): kernels are compiled in every process; "
                f"{_FOLDER_REMEDY}",
            )

    def _find_path(self) -> Path | None:
        folder = cache_folder()
        machine = (*self._compilers, processor(), source_digest(*_GENERATOR_SOURCES))
        key = hashlib.sha256(repr((self._key, machine)).encode()).hexdigest()[:32]
        return None if folder is None else folder / f"{self._name}-{key}.kernel"


@functools.cache
def source_digest(*sources: Path) -> str:
    """Return a hash of source files and folders: the part of a cache key that changes with code generators."""
    files = [file for one in sources for file in (sorted(one.glob("*.py")) if one.is_dir() else [one])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
