"""A checkpoint of any layout as weights, optimizer states and options."""

from __future__ import annotations

import json
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._messages import quote
from ...optim.parameters._random_identity import strip_wrapper_names
from ._names import Checkpoint, OptimizerStates, refuse_tensor_parts, sort_checkpoint_content, walk_checkpoint_leaves

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_WEIGHT_FILE_STEMS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
_OPTIMIZER_FILE_NAMES = ("optimizer.pt", "optimizer.bin", "optimizer.pth")
_FILES_WITHOUT_WEIGHTS_PATTERN = re.compile(
    r"^(optimizer|scheduler|scaler|rng_state|training_args|random_states|sampler)", re.I
)
_NUMBERED_OPTIMIZER_PATTERN = re.compile(r"^optimizer_\d+\.(pt|bin|pth)$")
CHECKPOINT_REMEDY = "give a file of safetensors or torch.save, or a sharded folder with its index"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint for reading, tensor by tensor; nothing that it holds is executed.

    Known are files of safetensors and of torch.save (with a state_dict at the top or inside, as Lightning's), sharded
    folders of safetensors with an index, folders with model.safetensors or pytorch_model.bin beside
    optimizer.pt, as of HF's Trainer.
    """
    path = Path(path)
    try:
        if path.is_dir():
            found = _open_folder(path)
        elif path.is_file():
            found = _open_file(path)
        else:
            said = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise ValueError(f"{path} {said}: {CHECKPOINT_REMEDY}")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}; {CHECKPOINT_REMEDY}") from None
    if not found.tensors:
        raise ValueError(f"{path} holds no tensors: {CHECKPOINT_REMEDY}")
    refuse_tensor_parts(found.tensors)
    if not any(tensor.numel() for tensor in found.tensors.values()):
        raise ValueError(
            f"{path} holds only empty tensors, as ZeRO-3 leaves them: give whole weights, as the zero_to_fp32.py that "
            "lies beside them makes"
        )
    found.path = str(path)
    return found


def _open_file(path: Path) -> Checkpoint:
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: {CHECKPOINT_REMEDY}")
    if path.name.endswith(".index.json"):
        return _open_sharded(path)
    with path.open("rb") as file:
        head = file.read(9)
    is_safe = head[8:] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size
    if path.suffix == ".safetensors" or is_safe:
        return _open_safetensors([path])
    return sort_checkpoint_content(load_torch_file(path), str(path))


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / ".metadata").is_file():
        raise ValueError(
            f"{folder} is of torch.distributed.checkpoint, whose own tool makes one file of it: python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} checkpoint.pt"
        )
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = _open_weight_files(folder, files)
    for path in (folder / name for name in _OPTIMIZER_FILE_NAMES):
        if path.is_file() and not found.optimizers:
            leaves = walk_checkpoint_leaves(load_torch_file(path), ())
            found.optimizers = [leaf for _, leaf in leaves if isinstance(leaf, OptimizerStates)]
            if not found.optimizers:
                found.unseen.append(f"{path.name} holds no state_dict of a torch optimizer, and was not compared")
    more = [path.name for path in files if _NUMBERED_OPTIMIZER_PATTERN.match(path.name)]
    if more:
        found.unseen.append(f"{quote(more)} are further optimizers' states, and were not compared")
    if (folder / "config.json").is_file():
        found.config = folder / "config.json"
    return found


def _open_weight_files(folder: Path, files: list[Path]) -> Checkpoint:
    indices = sorted(path for path in files if path.name.endswith((".safetensors.index.json", ".bin.index.json")))
    if indices:
        return _open_sharded(indices[0])
    tensors = [
        path for path in files if path.suffix == ".safetensors" and not _FILES_WITHOUT_WEIGHTS_PATTERN.match(path.name)
    ]
    saved = [
        path for path in files if path.suffix in _TORCH_SUFFIXES and not _FILES_WITHOUT_WEIGHTS_PATTERN.match(path.name)
    ]
    for group in (tensors, saved):
        known = [path for path in group if path.stem in _WEIGHT_FILE_STEMS]
        if len(known) == 1 or len(group) == 1:
            found = _open_file((known or group)[0])
            rest = [path.name for path in group if path not in (known[:1] or group)]
            if rest:
                found.unseen.append(f"{quote(rest)} lie beside {known[0].name}, and were not compared")
            return found
        if group:
            names = quote(path.name for path in group)
            raise ValueError(f"{folder} holds several checkpoints ({names}) and no index: give one of the files")
    inner = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
    if inner:
        raise ValueError(f"{folder} is no checkpoint, but holds the folders {quote(inner)}: give one of them")
    raise ValueError(f"{folder} {'holds no checkpoint' if files else 'is an empty folder'}: {CHECKPOINT_REMEDY}")


def _open_sharded(index: Path) -> Checkpoint:
    try:
        read = json.loads(index.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ValueError(f"{index} holds no JSON object: it is damaged; copy it again")
    placed = read.get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index} has no weight_map: it is no index of shards; {CHECKPOINT_REMEDY}")
    # A link to elsewhere is a file of the folder all the same.
    strange = [
        name
        for name in placed.values()
        if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts
    ]
    if strange:
        raise ValueError(
            f"{index} names {quote(strange)}, which are no files of its folder: not read; copy the index again"
        )
    shards = [index.parent / name for name in dict.fromkeys(placed.values())]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ValueError(f"{index.parent} lacks the shards {quote(missing)}, which {index.name} names: copy them too")
    if any(shard.suffix != ".safetensors" for shard in shards):
        raise ValueError(
            f"{index} names shards of torch.save: load the model from them, and save it in safetensors, as "
            "save_pretrained does"
        )
    found = _open_safetensors(shards)
    absent = [name for name in strip_wrapper_names(placed) if name not in found.tensors]
    if absent:
        raise ValueError(f"the shards of {index} lack {quote(absent)}: index and shards are of different checkpoints")
    return found


def _open_safetensors(paths: list[Path]) -> Checkpoint:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= read_safetensors(path)
    named = dict(zip(strip_wrapper_names(tensors), tensors.values(), strict=True))
    return Checkpoint(str(paths[0]), named, ordered=False)


_GLOBAL_REFUSED_BY_TORCH_PATTERN = re.compile(r"GLOBAL ([\w.]+)")
_TORCH_LOAD_ERRORS = (
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, MemoryError),
    *(OverflowError, zipfile.BadZipFile, struct.error, pickle.UnpicklingError),
)


def load_torch_file(path: Path) -> Any:
    """Load a file of torch.save, memory-mapped if it is a zip archive, as torch has written since 1.6."""
    is_zip = zipfile.is_zipfile(path)
    try:
        if not is_zip or all(one.compress_type == zipfile.ZIP_STORED for one in zipfile.ZipFile(path).infolist()):
            return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except _TORCH_LOAD_ERRORS as error:
        found = isinstance(error, pickle.UnpicklingError) and _GLOBAL_REFUSED_BY_TORCH_PATTERN.search(str(error))
        if found:
            raise ValueError(
                f"{path} was not loaded: it holds {found[1]}, which weights_only refuses, since loading it would run "
                "code from the file; save the state dicts alone, in torch.save or safetensors"
            ) from None
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} cannot be read as a file of torch.save ({type(error).__name__}: {said}): it is damaged, or of "
            "another kind; give a checkpoint in safetensors, torch.save, a sharded folder"
        ) from None
    raise ValueError(f"{path} was zipped again with compression: unpack it, and give what `zip -0 -r` makes of it")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors by name, in the order of the file, each mapped."""
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
    return {name: file.get_tensor(name) for name in names}
