"""Folders of torch.distributed.checkpoint: their index by a closed list of classes, their tensors chunk by chunk."""

from __future__ import annotations

import functools
import io
import mmap
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._torch_versions import find_dtype
from ._stored import Stored

METADATA = ".metadata"
# All that an index of tensors is made of. pickle would run whatever else a file names.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and find_dtype(name) is not None):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def open_dcp(folder: Path) -> tuple[dict[tuple, Any], list[str]]:
    """Return a folder's entries by their path in the saved dict: Stored tensors, and plain values.

    Raises:
        ValueError: a damaged index, one that names classes beyond it, or a missing file of data.
    """
    index = _read_index(folder)
    paths = index.planner_data if isinstance(index.planner_data, dict) else {}
    chunks: dict[str, list[tuple[tuple, Any]]] = {}
    for key, info in (index.storage_data or {}).items():
        file = folder / info.relative_path
        if Path(info.relative_path).is_absolute() or ".." in Path(info.relative_path).parts:
            raise ValueError(f"{folder / METADATA} names {info.relative_path}, a file outside its folder: not read")
        if not file.is_file():
            raise ValueError(f"{folder} lacks {info.relative_path}, which its index names: copy the whole checkpoint")
        if file.stat().st_size < info.offset + info.length:
            raise ValueError(f"{file} is truncated: its index names bytes beyond its end; copy the checkpoint again")
        chunks.setdefault(key.fqn, []).append((tuple(key.offset or ()), info))
    found: dict[tuple, Any] = {}
    unseen = []
    for name, entry in index.state_dict_metadata.items():
        path = tuple(paths.get(name) or (name,))
        if hasattr(entry, "properties"):
            sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
            read = functools.partial(_read_tensor, folder, name, entry, chunks.get(name, []), sizes)
            found[path] = Stored(entry.properties.dtype, tuple(entry.size), read, mapped=len(entry.chunks) == 1)
        elif name in chunks:
            try:
                found[path] = _plain_value(folder, chunks[name][0][1])
            except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
                unseen.append(f"{name!r} was not loaded: it is damaged, or holds more than plain data")
    return found, unseen


def _read_index(folder: Path) -> Any:
    try:
        with (folder / METADATA).open("rb") as file:
            found = _IndexUnpickler(file).load()
        if not isinstance(getattr(found, "state_dict_metadata", None), dict):
            raise ValueError("it holds no index")
        return found
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{folder / METADATA} was not loaded: it names {error}, which no index of tensors holds, and loading it "
            "might run code from the file"
        ) from None
    except (EOFError, OSError, AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / METADATA} cannot be read ({type(error).__name__}: {error}): it is truncated or of another "
            "version; copy the checkpoint again"
        ) from None


def _read_tensor(
    folder: Path, name: str, entry: Any, stored: list[tuple[tuple, Any]], sizes: dict, rows: slice | None
) -> Tensor:
    parts = [(offset, sizes[offset], info) for offset, info in stored if offset in sizes]
    if not parts and len(stored) == len(sizes) == 1:
        parts = [(*next(iter(sizes.items())), stored[0][1])]
    if sum(torch.Size(size).numel() for _, size, _ in parts) < torch.Size(entry.size).numel():
        raise ValueError(f"{folder} lacks chunks of {name!r}: copy the whole checkpoint, with the files of all ranks")
    if len(parts) == 1 and parts[0][1] == tuple(entry.size):
        whole = _chunk(folder, parts[0][2], entry.properties.dtype, parts[0][1])
        return whole if rows is None else whole[rows]
    first, last = (0, entry.size[0]) if rows is None else (rows.start, rows.stop)
    made = torch.empty((last - first, *entry.size[1:]), dtype=entry.properties.dtype, device="cpu")
    for offset, size, info in parts:
        low, high = max(first, offset[0]), min(last, offset[0] + size[0])
        if low >= high or not torch.Size(size).numel():
            continue
        inner = tuple(slice(start, start + length) for start, length in zip(offset[1:], size[1:]))
        chunk = _chunk(folder, info, entry.properties.dtype, size)
        made[(slice(low - first, high - first), *inner)] = chunk[low - offset[0] : high - offset[0]]
    return made


def _chunk(folder: Path, info: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Tensor:
    """Return one chunk: its bytes in the mapped file where they lie as the tensor does, else by torch.load."""
    numel = torch.Size(size).numel()
    if not numel:
        return torch.empty(size, dtype=dtype, device="cpu")
    file = folder / info.relative_path
    mapped = _mapped(file, file.stat().st_mtime_ns)
    record = memoryview(mapped)[info.offset : info.offset + info.length]
    place = _data_place(record, numel * dtype.itemsize)
    if place is None or _strides(record) != torch.empty(size, dtype=dtype, device="meta").stride():
        loaded: Tensor = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
        return loaded.detach()
    return torch.frombuffer(record, dtype=dtype, count=numel, offset=place).view(size)


def _data_place(record: memoryview, nbytes: int) -> int | None:
    """Return where the only storage of a record of torch.save begins; None where it is laid out otherwise."""
    try:
        archive = zipfile.ZipFile(_View(record))
    except zipfile.BadZipFile:
        return None
    data = [info for info in archive.infolist() if "/data/" in info.filename]
    if len(data) != 1 or data[0].compress_type != zipfile.ZIP_STORED or data[0].file_size != nbytes:
        return None
    header = data[0].header_offset
    # A local header's names may be padded, so that the lengths of the central directory do not hold for it.
    name, extra = (int.from_bytes(record[header + at : header + at + 2], "little") for at in (26, 28))
    return header + 30 + name + extra


def _strides(record: memoryview) -> tuple[int, ...] | None:
    file: Any = _View(record)
    made = torch.load(file, map_location="meta", weights_only=True)
    return tuple(made.stride()) if isinstance(made, Tensor) else None


class _View(io.RawIOBase):
    """Bytes in memory as a file, without a copy of them."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._content))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


@functools.lru_cache(maxsize=64)
def _mapped(path: Path, _changed: int) -> mmap.mmap:
    # Private and writable, as torch wants memory to be: nothing is written.
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _plain_value(folder: Path, info: Any) -> Any:
    with (folder / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
