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
import tarfile
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


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint that is open for reading.

    Attributes:
        ordered: whether their order is that of the model, and not an alphabet's.
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
    """Refuse a file of weights that is of a known other kind.

    Raises:
        ValueError: it is; the message says what it is and what to give instead.
    """
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
# Weights hardly compress; what unpacks to more than this many times its size, and to more than so many bytes, is none.
_MOST_RATIO, _MOST_BYTES = 100, 2**30

_UNREADABLE = (
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, MemoryError),
    *(OverflowError, zipfile.BadZipFile, struct.error),
)


def load_torch_file(path: Path) -> Any:
    """Load a file of torch.save, memory-mapped if it is a zip archive, as torch has written since 1.6.

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


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": find_dtype("float8_e8m0fnu"),
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def open_safetensors(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return a file's tensors by name, in the order of the file, and its metadata.

    Raises:
        ValueError: it is truncated, of another kind or no file of safetensors.
    """
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
    found = {}
    for name in file.offset_keys() if hasattr(file, "offset_keys") else file.keys():
        part = file.get_slice(name)
        dtype = DTYPES.get(part.get_dtype())
        read = functools.partial(_read, file, name)
        found[name] = Stored(read(None).dtype if dtype is None else dtype, tuple(part.get_shape()), read)
    return found, dict(file.metadata() or {})


def _read(file: Any, name: str, rows: slice | None) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    return tensor if rows is None else tensor[rows]


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
    mapped = _map_file(file, file.stat().st_mtime_ns)
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
def _map_file(path: Path, _changed: int) -> mmap.mmap:
    # Private and writable, as torch wants memory to be: nothing is written.
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _plain_value(folder: Path, info: Any) -> Any:
    with (folder / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)


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
