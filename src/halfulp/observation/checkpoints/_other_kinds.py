"""Files of weights that are no training checkpoint: recognized by their first bytes, with what to give instead."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

_CONVERT = "convert it to safetensors with what wrote it, under the parameters' names"


@dataclass(frozen=True)
class OtherKind:
    """A kind of file that is not read.

    Attributes:
        name: what it is, as a sentence's object.
        start: its first bytes, from `offset` on; empty where the name tells alone.
        remedy: what to give instead.
        offset: of those bytes.
        suffix: of files of this kind that have no bytes of their own.
    """

    name: str
    start: bytes
    remedy: str
    offset: int = 0
    suffix: str = ""


# A kind that is met next is one more line; more telling bytes first.
OTHER_KINDS = (
    OtherKind(
        "a GGUF file, llama.cpp's weights for inference, rounded anew and without an optimizer's states",
        b"GGUF",
        "give the checkpoints of safetensors or torch.save that the training wrote, from which it was converted",
    ),
    OtherKind("a GGML file, the weights of llama.cpp before GGUF", b"tjgg", "give what it was converted from"),
    OtherKind("an HDF5 file, as Keras writes weights", b"\x89HDF\r\n\x1a\n", _CONVERT),
    OtherKind("a numpy array", b"\x93NUMPY", _CONVERT),
    OtherKind("a TensorFlow Lite model", b"TFL3", "give the checkpoints that the training wrote", offset=4),
    OtherKind("an ONNX model", b"", "give the checkpoints that the training wrote", suffix=".onnx"),
    OtherKind("a msgpack file, as Flax writes weights", b"", _CONVERT, suffix=".msgpack"),
    OtherKind("compressed by gzip", b"\x1f\x8b", "unpack it (gunzip, or tar -xzf)"),
    OtherKind("compressed by bzip2", b"BZh", "unpack it (bunzip2, or tar -xjf)"),
    OtherKind("compressed by xz", b"\xfd7zXZ\x00", "unpack it (unxz, or tar -xJf)"),
    OtherKind("compressed by zstd", b"\x28\xb5\x2f\xfd", "unpack it (unzstd)"),
    OtherKind("a 7z archive", b"7z\xbc\xaf\x27\x1c", "unpack it"),
    OtherKind("a pointer of git-lfs, in place of the file", b"version https://git-lfs", "fetch it (git lfs pull)"),
    OtherKind("a web page, as a download behind a login leaves", b"<!doctype html", "download it again"),
    OtherKind("a web page, as a download behind a login leaves", b"<html", "download it again"),
)
_HEAD = 64


def refuse_other_kind(path: Path) -> None:
    """Refuse a file of weights that is of a known other kind.

    Raises:
        ValueError: it is; the message says what it is and what to give instead.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for kind in OTHER_KINDS:
        there = head[kind.offset : kind.offset + len(kind.start)]
        if kind.suffix == path.suffix if kind.suffix else there.lower() == kind.start.lower():
            raise ValueError(f"{path} is {kind.name}, which is not read: {kind.remedy}")
    if head[:4] == b"PK\x03\x04" and _holds_arrays_alone(path):
        raise ValueError(f"{path} is an archive of numpy arrays (.npz), which is not read: {_CONVERT}")


def _holds_arrays_alone(path: Path) -> bool:
    """Return whether a zip archive is one of numpy's."""
    if not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, OSError):
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)
