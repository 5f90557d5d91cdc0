"""A checkpoint of any layout as weights, optimizer states and options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..._messages import listed
from ...optim.parameters._random_identity import strip_wrapper_names
from ._files import (
    METADATA_FILE,
    Checkpoint,
    OptimizerStates,
    StoredTensor,
    find_deepspeed_partition,
    is_inside_folder,
    load_torch_file,
    make_partition_error,
    open_dcp,
    open_safetensors,
)
from ._names import CONTRACT_KEY, read_checkpoint_content, refuse_tensor_parts, walk_content

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_WEIGHT_FILE_STEMS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
_OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin", "optimizer.pth")
_NO_WEIGHTS_PATTERN = re.compile(r"^(optimizer|scheduler|scaler|rng_state|training_args|random_states|sampler)", re.I)
_NUMBERED_OPTIMIZER_PATTERN = re.compile(r"^optimizer_\d+\.(pt|bin|pth)$")
CHECKPOINT_REMEDY = "give a file of safetensors or torch.save, a sharded folder with its index, or a DCP folder"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint for reading, tensor by tensor; nothing that it holds is executed.

    Known are files of safetensors and of torch.save (with a state_dict at the top or inside, as Lightning's), sharded
    folders with an index (safetensors and .bin), folders with model.safetensors or pytorch_model.bin beside
    optimizer.pt, as of HF's Trainer, and folders of torch.distributed.checkpoint.
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
    if not any(stored.numel for stored in found.tensors.values()):
        raise ValueError(f"{path} holds only empty tensors, as ZeRO-3 leaves them: give a checkpoint of whole weights")
    found.path = str(path)
    return found


def _open_file(path: Path) -> Checkpoint:
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: {CHECKPOINT_REMEDY}")
    if (partition := find_deepspeed_partition(path)) is not None:
        raise make_partition_error(path, partition)
    if path.name.endswith(".index.json"):
        return _open_sharded(path)
    with path.open("rb") as file:
        head = file.read(9)
    is_safe = head[8:] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size
    if path.suffix == ".safetensors" or is_safe:
        return _open_safetensors([path])
    return read_checkpoint_content(load_torch_file(path), str(path))


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / METADATA_FILE).is_file():
        content, unseen = open_dcp(folder)
        found = read_checkpoint_content(content, str(folder))
        found.unseen += unseen
        found.ordered = False
        return found
    partition = find_deepspeed_partition(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file() and find_deepspeed_partition(path) is None)
    weights = [path.name for path in files if path.suffix in (".safetensors", *_TORCH_SUFFIXES)]
    if partition is not None and all(map(_NO_WEIGHTS_PATTERN.match, weights)):
        raise make_partition_error(folder, partition)
    found = _open_weight_files(folder, files)
    if partition is not None:
        found.unseen.append(f"DeepSpeed's partitions of the optimizer's states ({partition}) were not compared")
    for path in (folder / name for name in _OPTIMIZER_FILES):
        if path.is_file() and not found.optimizers:
            leaves = walk_content(load_torch_file(path), ())
            found.optimizers = [leaf for _, leaf in leaves if isinstance(leaf, OptimizerStates)]
            if not found.optimizers:
                found.unseen.append(f"{path.name} holds no state_dict of a torch optimizer, and was not compared")
    more = [path.name for path in files if _NUMBERED_OPTIMIZER_PATTERN.match(path.name)]
    if more:
        found.unseen.append(f"{listed(more)} are further optimizers' states, and were not compared")
    if (folder / "config.json").is_file():
        found.config = folder / "config.json"
    beside = folder / f"{CONTRACT_KEY}.json"
    if found.contract is None and beside.is_file():
        found.contract = _parse_json_object(beside.read_text(encoding="utf-8", errors="replace"), beside)
    return found


def _open_weight_files(folder: Path, files: list[Path]) -> Checkpoint:
    for kind in (".safetensors.index.json", ".bin.index.json"):
        for index in files:
            if index.name.endswith(kind):
                return _open_sharded(index)
    tensors = [path for path in files if path.suffix == ".safetensors" and not _NO_WEIGHTS_PATTERN.match(path.name)]
    saved = [path for path in files if path.suffix in _TORCH_SUFFIXES and not _NO_WEIGHTS_PATTERN.match(path.name)]
    for group, opened in ((tensors, _open_safetensors), (saved, _open_torch_files)):
        known = [path for path in group if path.stem in _WEIGHT_FILE_STEMS]
        if len(known) == 1 or len(group) == 1:
            found = opened(known[:1] or group)
            rest = [path.name for path in group if path not in (known[:1] or group)]
            if rest:
                found.unseen.append(f"{listed(rest)} lie beside {known[0].name}, and were not compared")
            return found
        if group:
            names = listed(path.name for path in group)
            raise ValueError(f"{folder} holds several checkpoints ({names}) and no index: give one of the files")
    inner = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
    if inner:
        raise ValueError(f"{folder} is no checkpoint, but holds the folders {listed(inner)}: give one of them")
    raise ValueError(f"{folder} {'holds no checkpoint' if files else 'is an empty folder'}: {CHECKPOINT_REMEDY}")


def _open_sharded(index: Path) -> Checkpoint:
    placed = _parse_json_object(index.read_text(encoding="utf-8", errors="replace"), index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index} has no weight_map: it is no index of shards; {CHECKPOINT_REMEDY}")
    strange = [name for name in placed.values() if not is_inside_folder(name)]
    if strange:
        raise ValueError(
            f"{index} names {listed(strange)}, which are no files of its folder: not read; copy the index again"
        )
    shards = [index.parent / name for name in dict.fromkeys(placed.values())]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ValueError(f"{index.parent} lacks the shards {listed(missing)}, which {index.name} names: copy them too")
    is_safe = all(shard.suffix == ".safetensors" for shard in shards)
    found = _open_safetensors(shards) if is_safe else _open_torch_files(shards)
    wanted = dict(zip(placed, strip_wrapper_names(placed), strict=True))
    absent = [name for name, plain in wanted.items() if plain not in found.tensors]
    if absent:
        raise ValueError(f"the shards of {index} lack {listed(absent)}: index and shards are of different checkpoints")
    if not is_safe:
        found.tensors = {plain: found.tensors[plain] for plain in wanted.values()}
    return found


def _open_safetensors(paths: list[Path]) -> Checkpoint:
    tensors: dict[str, StoredTensor] = {}
    contract = None
    for path in paths:
        part, metadata = open_safetensors(path)
        tensors |= part
        if CONTRACT_KEY in metadata:
            contract = _parse_json_object(metadata[CONTRACT_KEY], path)
    named = dict(zip(strip_wrapper_names(tensors), tensors.values(), strict=True))
    return Checkpoint(str(paths[0]), named, ordered=False, contract=contract)


def _open_torch_files(paths: list[Path]) -> Checkpoint:
    parts = [read_checkpoint_content(load_torch_file(path), str(path)) for path in paths]
    found = parts[0]
    for part in parts[1:]:
        found.tensors |= part.tensors
        found.optimizers += part.optimizers
        found.unseen += part.unseen
    return found


def _parse_json_object(text: str, path: Path) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ValueError(f"{path} holds no JSON object: it is damaged; copy it again")
    return read
