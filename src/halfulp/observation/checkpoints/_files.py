"""Files that trainers write: torch, safetensors, DCP and DeepSpeed, each read tensor by tensor."""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._torch_versions import find_dtype
from ...kernels import address, plain


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        dtype, shape: of the tensor.
        read: the whole tensor, or the rows of a slice of its first dimension.
        mapped: whether reading it whole takes no memory beyond the file's pages.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[slice | None], Tensor]
    mapped: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def rows(self, most: int) -> Iterator[slice | None]:
        """Yield slices of the first dimension with at most `most` elements each, at least a row; None: all at once."""
        if not self.shape or self.numel <= most:
            yield None
            return
        step = max(1, most // max(1, self.numel // self.shape[0]))
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))


def wrap_tensor(tensor: Tensor, mapped: bool = True) -> Stored:
    """Return a tensor that is in memory, or mapped, already."""
    tensor = tensor.detach()

    def read(rows: slice | None) -> Tensor:
        return tensor if rows is None else tensor[rows]

    return Stored(tensor.dtype, tuple(tensor.shape), read, mapped)


@dataclass(slots=True)
class OptimizerStates:
    """An optimizer's saved options and states.

    Attributes:
        state: by the parameter's number, or name: tensors and numbers by their name.
        groups: options of each param group; "params" are numbers or names, "param_names" names if there are any.
    """

    state: dict[Any, dict[str, Any]]
    groups: list[dict[str, Any]]

    @property
    def keys(self) -> list[list[Any]]:
        """The parameters' numbers, or names, of each group."""
        return [list(group.get("params") or ()) for group in self.groups]


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint that is open for reading.

    Attributes:
        ordered: whether the tensors' order is that of the model, and not an alphabet's.
        contract: the precision contract saved with it, None without one.
        unseen: sentences that say what could not be read, and why.
        config: the model's config of transformers beside it, None without one.
    """

    path: str
    tensors: dict[str, Stored]
    ordered: bool = True
    optimizers: list[OptimizerStates] = field(default_factory=list)
    contract: dict[str, Any] | None = None
    unseen: list[str] = field(default_factory=list)
    config: Path | None = None

    def place(self, name: str) -> tuple[int, tuple[int, ...]] | None:
        """Return where in memory a tensor lies, and its shape; None where its file tells nothing of ties."""
        stored = self.tensors[name]
        if not self.ordered or not stored.mapped or not stored.numel:
            return None
        try:
            return address(plain(stored.read(None))), stored.shape
        except TypeError:  # a quantized tensor, or another kind without plain memory
            return None

    @property
    def stepped(self) -> int:
        """The number of parameters that its optimizers hold."""
        return sum(len(keys) for optimizer in self.optimizers for keys in optimizer.keys)


# Files that are no training checkpoint, by first bytes or suffix: what each is, and what to give instead.
OTHER_KINDS: dict[bytes | str, tuple[str, str]] = {
    b"GGUF": (
        "a GGUF file, llama.cpp's weights for inference, rounded anew and without an optimizer's states",
        "give the checkpoints of safetensors or torch.save that the training wrote, from which it was converted",
    ),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file, as Keras writes weights", "convert it to safetensors"),
    ".onnx": ("an ONNX model", "give the checkpoints that the training wrote"),
    b"version https://git-lfs": ("a pointer of git-lfs, in place of the file", "fetch it (git lfs pull)"),
    **dict.fromkeys((b"<!", b"<h", b"<H"), ("a web page, as a download behind a login leaves", "download it again")),
}
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf\x27\x1c")
OTHER_KINDS |= dict.fromkeys(_PACKED, ("compressed", "unpack it"))


def refuse_other_kind(path: Path) -> None:
    """Raise ValueError for a file of a known other kind, which says what it is and what to give instead."""
    with path.open("rb") as file:
        head = file.read(64)
    for mark, (name, remedy) in OTHER_KINDS.items():
        if path.suffix == mark if isinstance(mark, str) else head.startswith(mark):
            raise ValueError(f"{path} is {name}, which is not read: {remedy}")


# Of linux/mman.h, since Linux 5.14; older ones refuse it, and pages come one by one.
_POPULATE_READ = 22


def map_pages(tensor: Tensor) -> None:
    """Map the pages of a contiguous tensor for reading, where the system can; nothing is copied."""
    advise = _madvise()
    if advise is None or not tensor.numel():
        return
    first = address(plain(tensor))
    start = first - first % mmap.PAGESIZE
    advise(start, first + tensor.numel() * tensor.element_size() - start, _POPULATE_READ)


@functools.cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


_REFUSED = re.compile(r"GLOBAL ([\w.]+)")
_UNREADABLE = (
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, MemoryError),
    *(OverflowError, zipfile.BadZipFile, struct.error),
)


def load_torch_file(path: Path) -> Any:
    """Load a file of torch.save, memory-mapped if it is a zip archive, as torch has written since 1.6."""
    refuse_other_kind(path)
    is_zip = zipfile.is_zipfile(path)
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04" and not is_zip:
            raise ValueError(f"{path} is truncated: its end is missing; copy it again, or take another checkpoint")
    try:
        if not is_zip or all(one.compress_type == zipfile.ZIP_STORED for one in zipfile.ZipFile(path).infolist()):
            return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except pickle.UnpicklingError as error:
        found = _REFUSED.search(str(error))
        if found is not None:
            said = f"{path} was not loaded: it holds {found[1]}, which weights_only refuses, since loading it would run"
            said += " code from the file; save the state dicts alone, in torch.save or safetensors"
            raise ValueError(said) from None
        raise ValueError(_describe_damage(path, error)) from None
    except _UNREADABLE as error:
        raise ValueError(_describe_damage(path, error)) from None
    raise ValueError(f"{path} was zipped again with compression: unpack it, and give what `zip -0 -r` makes of it")


def _describe_damage(path: Path, error: Exception) -> str:
    said = " ".join(str(error).split())[:200]
    return (
        f"{path} cannot be read as a file of torch.save ({type(error).__name__}: {said}): it is damaged, or of "
        "another kind; give a checkpoint in safetensors, torch.save, a sharded folder, or DCP"
    )


def open_safetensors(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return a file's tensors by name, in the order of the file, and its metadata."""
    from safetensors import SafetensorError, safe_open

    refuse_other_kind(path)
    try:
        file = safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"{path} cannot be read as safetensors ({said}): it is truncated, damaged or of another kind; copy it "
            "again, or take another checkpoint"
        ) from None
    names = file.offset_keys() if hasattr(file, "offset_keys") else file.keys()
    return {name: wrap_tensor(file.get_tensor(name)) for name in names}, dict(file.metadata() or {})


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
    """Return a folder's entries by their path in the saved dict: Stored tensors, and plain values."""
    index = _read_index(folder)
    paths = index.planner_data if isinstance(index.planner_data, dict) else {}
    files: dict[str, memoryview] = {}
    records: dict[str, list[tuple[tuple, memoryview]]] = {}
    for key, info in (index.storage_data or {}).items():
        if info.relative_path not in files:
            files[info.relative_path] = _map_file(folder, info.relative_path)
        record = files[info.relative_path][info.offset : info.offset + info.length]
        if len(record) < info.length:
            file = folder / info.relative_path
            raise ValueError(f"{file} is truncated: its index names bytes beyond its end; copy the checkpoint again")
        records.setdefault(key.fqn, []).append((tuple(key.offset or ()), record))
    found: dict[tuple, Any] = {}
    unseen = []
    for name, entry in index.state_dict_metadata.items():
        path = tuple(paths.get(name) or (name,))
        if hasattr(entry, "properties"):
            parts = _place_chunks(folder, name, entry, records.get(name, []))
            dtype, shape = entry.properties.dtype, tuple(entry.size)
            whole = _map_chunk(parts[0][2], dtype, shape) if len(parts) == 1 else None
            read = functools.partial(_read_tensor, parts, shape, dtype)
            found[path] = Stored(dtype, shape, read, mapped=False) if whole is None else wrap_tensor(whole)
        elif name in records:
            try:
                found[path] = torch.load(io.BytesIO(records[name][0][1]), map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
                unseen.append(f"{name!r} was not loaded: it is damaged, or holds more than plain data")
    return found, unseen


def is_inside(name: object) -> bool:
    """Return whether an index's name of a file stays in its folder, where it may be a link to elsewhere."""
    return isinstance(name, str) and bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts


def _map_file(folder: Path, name: str) -> memoryview:
    if not is_inside(name):
        raise ValueError(f"{folder / METADATA} names {name}, a file outside its folder: not read")
    if not (folder / name).is_file():
        raise ValueError(f"{folder} lacks {name}, which its index names: copy the whole checkpoint")
    with (folder / name).open("rb") as file:
        size = file.seek(0, io.SEEK_END)
    if not size:
        return memoryview(b"")
    # Private: nothing is written. Python's mmap would hold a descriptor of each file, of which some folders have one
    # per tensor.
    return torch.from_file(str(folder / name), shared=False, size=size, dtype=torch.uint8).numpy().data


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


_Chunk = tuple[tuple[int, ...], tuple[int, ...], memoryview]


def _place_chunks(folder: Path, name: str, entry: Any, records: list[tuple[tuple, memoryview]]) -> list[_Chunk]:
    """Return the offset, size and record of each chunk of a tensor."""
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
    if len(records) == len(sizes) == 1:
        records = [(next(iter(sizes)), records[0][1])]  # a tensor in one piece is named without its offset
    parts = [(offset, sizes[offset], record) for offset, record in records if offset in sizes]
    if sum(torch.Size(size).numel() for _, size, _ in parts) < torch.Size(entry.size).numel():
        raise ValueError(f"{folder} lacks chunks of {name!r}: copy the whole checkpoint, with the files of all ranks")
    return parts


def _read_tensor(parts: list[_Chunk], shape: tuple[int, ...], dtype: torch.dtype, rows: slice | None) -> Tensor:
    if not shape:
        return _read_chunk(parts[0][2], dtype, shape)
    first, last = (0, shape[0]) if rows is None else (rows.start, rows.stop)
    made = torch.empty((last - first, *shape[1:]), dtype=dtype, device="cpu")
    for offset, size, record in parts:
        low, high = max(first, offset[0]), min(last, offset[0] + size[0])
        if low < high and torch.Size(size).numel():
            inner = tuple(slice(start, start + length) for start, length in zip(offset[1:], size[1:]))
            chunk = _read_chunk(record, dtype, size)
            made[(slice(low - first, high - first), *inner)] = chunk[low - offset[0] : high - offset[0]]
    return made


def _read_chunk(record: memoryview, dtype: torch.dtype, size: tuple[int, ...]) -> Tensor:
    mapped = _map_chunk(record, dtype, size)
    if mapped is not None:
        return mapped
    loaded: Tensor = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
    return loaded.detach()


def _map_chunk(record: memoryview, dtype: torch.dtype, size: tuple[int, ...]) -> Tensor | None:
    """Return one chunk as its bytes in the mapped file; None where they do not lie as the tensor does."""
    numel = torch.Size(size).numel()
    file: Any = _View(record)
    place = _data_place(file, record, numel * dtype.itemsize) if numel else None
    if place is None:
        return None
    file.seek(0)
    strides = torch.load(file, map_location="meta", weights_only=True).stride()
    if strides != torch.empty(size, dtype=dtype, device="meta").stride():
        return None
    return torch.frombuffer(record, dtype=dtype, count=numel, offset=place).view(size)


def _data_place(file: Any, record: memoryview, nbytes: int) -> int | None:
    """Return where the only storage of a record of torch.save begins; None where it is laid out otherwise."""
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile:
        return None
    data = [info for info in archive.infolist() if "/data/" in info.filename]
    if len(data) != 1 or data[0].compress_type != zipfile.ZIP_STORED or data[0].file_size != nbytes:
        return None
    header = data[0].header_offset
    # A local header's names may be padded, so that the lengths of the central directory do not hold for it.
    name, extra = (int.from_bytes(record[header + at : header + at + 2], "little") for at in (26, 28))
    return header + 30 + name + extra


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


_PARTITION = re.compile(r"^(zero_pp_rank_\d+_)?(bf16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt$")
_LAYER = re.compile(r"^layer_\d+-model_\d+-model_states\.pt$")
_STEP = re.compile(r"^global_step\d+(_universal)?$")
REMEDY = (
    "make whole weights of it by the zero_to_fp32.py that lies beside it (python zero_to_fp32.py FOLDER OUT), and give "
    "those; or save with stage3_gather_16bit_weights_on_model_save"
)


def is_partition(name: str) -> bool:
    """Return whether a file's name is that of a partition of DeepSpeed's.

    >>> is_partition("zero_pp_rank_0_mp_rank_00_optim_states.pt"), is_partition("mp_rank_00_model_states.pt")
    (True, True)
    >>> is_partition("model_states.pt")
    False
    """
    return bool(_PARTITION.match(name) or _LAYER.match(name))


def find_partitions(folder: Path) -> list[str]:
    """Return the names of DeepSpeed's partitions in a folder, or of the folders that have them."""
    inside = sorted(folder.iterdir())
    return [path.name for path in inside if is_partition(path.name) or (path.is_dir() and _STEP.match(path.name))]


def refuse(path: Path, names: Iterable[str]) -> ValueError:
    """Return the error for a file or folder of partitions alone."""
    first = next(iter(names))
    return ValueError(f"{path} holds DeepSpeed's ZeRO partitions ({first}), which are not read: {REMEDY}")
