"""Files that trainers write: torch, safetensors, DCP and DeepSpeed, each read tensor by tensor."""

from __future__ import annotations

import functools
import io
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._torch_versions import find_dtype
from ...kernels import address, to_plain_memory


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        dtype, shape: of the tensor.
        read: returns the whole tensor.
        mapped: whether that takes no memory beyond the file's pages.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    mapped: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


def wrap_tensor(tensor: Tensor, mapped: bool = True) -> StoredTensor:
    """Return a tensor that is in memory, or mapped, already."""
    tensor = tensor.detach()
    return StoredTensor(tensor.dtype, tuple(tensor.shape), lambda: tensor, mapped)


def split_tensors(stored: Sequence[StoredTensor], most: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the elements of stored tensors of one size in parts of at most `most`, side by side."""
    yield from zip(*(one.read().reshape(-1).split(most) for one in stored), strict=True)


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
    tensors: dict[str, StoredTensor]
    ordered: bool = True
    optimizers: list[OptimizerStates] = field(default_factory=list)
    contract: dict[str, Any] | None = None
    unseen: list[str] = field(default_factory=list)
    config: Path | None = None

    def find_memory_place(self, name: str) -> tuple[int, tuple[int, ...]] | None:
        """Return where in memory a tensor lies, and its shape; None where its file tells nothing of ties."""
        stored = self.tensors[name]
        if not self.ordered or not stored.mapped or not stored.numel:
            return None
        try:
            return address(to_plain_memory(stored.read())), stored.shape
        except TypeError:  # a quantized tensor, or another kind without plain memory
            return None

    @property
    def stepped_count(self) -> int:
        """The number of parameters that its optimizers hold."""
        return sum(len(keys) for optimizer in self.optimizers for keys in optimizer.keys)


_REFUSED_GLOBAL_PATTERN = re.compile(r"GLOBAL ([\w.]+)")
_READING_ERRORS = (
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, MemoryError),
    *(OverflowError, zipfile.BadZipFile, struct.error),
)


def load_torch_file(path: Path) -> Any:
    """Load a file of torch.save, memory-mapped if it is a zip archive, as torch has written since 1.6."""
    is_zip = zipfile.is_zipfile(path)
    try:
        if not is_zip or all(one.compress_type == zipfile.ZIP_STORED for one in zipfile.ZipFile(path).infolist()):
            return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except pickle.UnpicklingError as error:
        found = _REFUSED_GLOBAL_PATTERN.search(str(error))
        if found is not None:
            said = f"{path} was not loaded: it holds {found[1]}, which weights_only refuses, since loading it would run"
            said += " code from the file; save the state dicts alone, in torch.save or safetensors"
            raise ValueError(said) from None
        raise ValueError(_describe_damage(path, error)) from None
    except _READING_ERRORS as error:
        raise ValueError(_describe_damage(path, error)) from None
    raise ValueError(f"{path} was zipped again with compression: unpack it, and give what `zip -0 -r` makes of it")


def _describe_damage(path: Path, error: Exception) -> str:
    said = " ".join(str(error).split())[:200]
    return (
        f"{path} cannot be read as a file of torch.save ({type(error).__name__}: {said}): it is damaged, or of "
        "another kind; give a checkpoint in safetensors, torch.save, a sharded folder, or DCP"
    )


def open_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return a file's tensors by name, in the order of the file, and its metadata."""
    from safetensors import SafetensorError, safe_open

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


METADATA_FILE = ".metadata"
# All that an index of tensors is made of. pickle would run whatever else a file names.
_ALLOWED_CLASSES = {
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
        if (module, name) in _ALLOWED_CLASSES or (module == "torch" and find_dtype(name) is not None):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def open_dcp(folder: Path) -> tuple[dict[Any, Any], list[str]]:
    """Return what a folder holds as the nested dict that was saved: Stored tensors, and plain values."""
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

    index = _read_dcp_index(folder)
    _check_dcp_files(folder, index)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(index, is_coordinator=True)

    def read(name: str) -> Tensor:
        entry = index.state_dict_metadata[name]
        target = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: target}, index)
        try:
            reader.read_data(planner.create_local_plan(), planner)
        except (pickle.UnpicklingError, *_READING_ERRORS) as error:
            raise ValueError(
                f"{folder} cannot be read at {name!r} ({type(error).__name__}): it is damaged; copy it again"
            ) from None
        return target

    paths = index.planner_data if isinstance(index.planner_data, dict) else {}
    records = {key.fqn: info for key, info in index.storage_data.items()}
    found: dict[tuple, Any] = {}
    unseen = []
    for name, entry in index.state_dict_metadata.items():
        path = tuple(paths.get(name) or (name,))
        if hasattr(entry, "properties"):
            if sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks) < torch.Size(entry.size).numel():
                raise ValueError(f"{folder} lacks chunks of {name!r}: copy the checkpoint again, of all ranks")
            found[path] = StoredTensor(entry.properties.dtype, tuple(entry.size), functools.partial(read, name), False)
        elif name in records:
            with (folder / records[name].relative_path).open("rb") as file:
                file.seek(records[name].offset)
                content = io.BytesIO(file.read(records[name].length))
            try:  # torch's own planner would execute what these bytes hold
                found[path] = torch.load(content, map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
                unseen.append(f"{name!r} was not loaded: it is damaged, or holds more than plain data")
    nested: dict[Any, Any] = {}
    for path, value in found.items():
        at = nested
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return nested, unseen


def is_inside_folder(name: object) -> bool:
    """Return whether an index's name of a file stays in its folder, where it may be a link to elsewhere."""
    return isinstance(name, str) and bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts


def _check_dcp_files(folder: Path, index: Any) -> None:
    """Raise ValueError unless the folder holds all bytes that its index names."""
    for info in index.storage_data.values():
        file = folder / info.relative_path
        if not is_inside_folder(info.relative_path):
            raise ValueError(
                f"{folder / METADATA_FILE} names {info.relative_path}, a file outside its folder: not read"
            )
        if not file.is_file():
            raise ValueError(f"{folder} lacks {info.relative_path}, which its index names: copy the whole checkpoint")
        if file.stat().st_size < info.offset + info.length:
            raise ValueError(f"{file} is truncated: its index names bytes beyond its end; copy the checkpoint again")


def _read_dcp_index(folder: Path) -> Any:
    try:
        with (folder / METADATA_FILE).open("rb") as file:
            found = _IndexUnpickler(file).load()
        if not all(isinstance(getattr(found, one, None), dict) for one in ("state_dict_metadata", "storage_data")):
            raise ValueError("it holds no index")
        return found
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{folder / METADATA_FILE} was not loaded: it names {error}, which no index of tensors holds, and loading "
            "it might run code from the file"
        ) from None
    except (EOFError, OSError, AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / METADATA_FILE} cannot be read ({type(error).__name__}: {error}): it is truncated or of another "
            "version; copy the checkpoint again"
        ) from None


_PARTITION_PATTERN = re.compile(r"(mp_rank_\d+_(model|optim)_states|^layer_\d+-model_\d+-model_states)\.pt$")


def find_deepspeed_partition(path: Path) -> str | None:
    """Return the name of the first of DeepSpeed's partitions in a folder or its steps' folders, or of the file."""
    inside = [*path.iterdir(), *path.glob("global_step*/*")] if path.is_dir() else [path]
    return min((one.name for one in inside if _PARTITION_PATTERN.search(one.name)), default=None)


def make_partition_error(path: Path, name: str) -> ValueError:
    """Return the error for a file or folder of partitions alone."""
    return ValueError(
        f"{path} holds DeepSpeed's ZeRO partitions ({name}), which are not read: make whole weights of it by the "
        "zero_to_fp32.py that lies beside it (python zero_to_fp32.py FOLDER OUT), and give those; or save with "
        "stage3_gather_16bit_weights_on_model_save"
    )
