"""Files of torch.save, read by memory map and with weights_only: nothing that they hold is executed."""

from __future__ import annotations

import pickle
import re
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from ._other_kinds import refuse_other_kind

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")
# Weights hardly compress; what unpacks to more than this many times its size, and to more than so many bytes, is none.
_MOST_RATIO, _MOST_BYTES = 100, 2**30

_UNREADABLE = (
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, MemoryError),
    *(OverflowError, zipfile.BadZipFile, struct.error),
)


def load_torch_file(path: Path) -> Any:
    """Return what a file of torch.save holds: mapped if it is a zip archive, as torch has written since 1.6.

    An archive that somebody has zipped again, with compression, is unpacked in memory.

    Raises:
        ValueError: it is truncated, of another kind, no file of torch.save, or holds more than tensors and plain data.
    """
    refuse_other_kind(path)
    is_zip = zipfile.is_zipfile(path)
    if not is_zip and _is_cut_zip(path):
        raise ValueError(f"{path} is truncated: its end is missing; copy it again, or take another checkpoint")
    if not is_zip and tarfile.is_tarfile(path):
        raise ValueError(
            f"{path} is a tar archive, of a folder or as torch wrote files before 0.2: unpack it, or load it in "
            "the torch that wrote it and save it again"
        )
    mapped = is_zip and not _is_compressed(path)
    try:
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(path, error)) from None
    except _UNREADABLE as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} cannot be read as a file of torch.save ({type(error).__name__}: {said}): it is damaged, or of "
            "another kind; give a checkpoint in safetensors, torch.save, a sharded folder, or DCP"
        ) from None


def _is_compressed(path: Path) -> bool:
    """Return whether a zip archive has compressed members, whose bytes cannot be mapped.

    Raises:
        ValueError: it would exhaust the memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except _UNREADABLE:
        return False  # torch says what is wrong with it
    size, packed = sum(one.file_size for one in members), path.stat().st_size
    if size > _MOST_BYTES and size > _MOST_RATIO * packed:
        raise ValueError(
            f"{path} unpacks to {size / 1e9:.1f} GB from {packed / 1e6:.1f} MB, which no weights do: not read; if "
            "it is yours, unpack it, and pack it again without compression (zip -0 -r)"
        )
    return any(one.compress_type != zipfile.ZIP_STORED for one in members)


def _is_cut_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _refusal(path: Path, error: Exception) -> str:
    found = _REFUSED.search(str(error))
    if found is None:
        return (
            f"{path} cannot be read with weights_only: it is damaged or no checkpoint of torch.save; give a checkpoint "
            "in safetensors, torch.save, a sharded folder, or DCP"
        )
    return (
        f"{path} was not loaded: it holds {found[1]}, which weights_only refuses, since loading it would run code from "
        "the file; save the state dicts alone, in torch.save or safetensors"
    )
