"""A checkpoint of any layout as weights, optimizer states and options, each by its parameter's name."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import logging
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._messages import name_type, quote
from ...kernels import get_plain_address_or_zero
from ...mctensor import MCTensor
from ...optim.parameters._local_tensors import get_local
from ...optim.parameters._random_identity import strip_wrapper_prefixes
from ...scaled import ScaledTensor


@dataclass(slots=True)
class OptimizerStates:
    """An optimizer's saved options and states."""

    # By the parameter's number, or name: tensors and numbers by their name.
    state: dict[Any, dict[str, Any]]
    # Options of each param group; "params" are numbers or names, "param_names" names if there are any.
    groups: list[dict[str, Any]]

    @property
    def keys_by_group(self) -> list[list[Any]]:
        """The parameters' numbers, or names, of each group."""
        return [list(group.get("params") or ()) for group in self.groups]


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint that is open for reading; tensors of files are mapped, so that they cost no memory before use."""

    path: str
    tensors: dict[str, Tensor]
    is_ordered: bool = True  # whether the tensors' order is that of the model, and not an alphabet's
    optimizers: list[OptimizerStates] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)  # sentences that say what could not be read, and why
    config_path: Path | None = None  # the model's config of transformers beside it

    @property
    def optimizer_parameter_count(self) -> int:
        """The number of parameters that its optimizers hold."""
        return sum(len(keys) for optimizer in self.optimizers for keys in optimizer.keys_by_group)


# As `Trainer.get_decay_parameter_names` of transformers has them (transformers/trainer.py).
_UNDECAYED_NAME_PATTERN = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def list_parameter_names_from_config(config: Path, tensors: Mapping[str, Tensor]) -> list[str] | None:
    """Return the parameter names of a transformers model in its own order, made from its config on the meta device.

    Its class is that of the installed transformers; code beside the config is not run.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    level = logging.root.manager.disable
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            logging.disable()
            given = json.loads(config.read_text(encoding="utf-8"))
            transformers = importlib.import_module("transformers")
            kind: Any = getattr(transformers, given["architectures"][0])
            assert issubclass(kind, transformers.PreTrainedModel), "a config names a model"
            plain_config = {key: value for key, value in given.items() if key != "auto_map"}
            model = kind(kind.config_class.from_dict(plain_config))
    except Exception:  # whatever another version of transformers makes of the config
        return None
    finally:
        logging.disable(level)
    # A tied weight is saved once.
    return [name for name, _ in model.named_parameters() if name in tensors]


RUNNING_STATISTICS_NAMES = ("running_mean", "running_var", "num_batches_tracked", "n_averaged")
_COMPONENT_OR_SCALE_PATTERN = re.compile(r"\.(component_[1-3]|component_scale|payload_scale)$")


def refuse_components_and_scales(names: Collection[str]) -> None:
    """Raise NotImplementedError where parts of tensors of several components or with a scale are among tensors."""
    parts = [
        name for name in names if (match := _COMPONENT_OR_SCALE_PATTERN.search(name)) and name[: match.start()] in names
    ]
    if parts:
        raise _make_components_and_scales_error(parts)


def _make_components_and_scales_error(names: Sequence[str]) -> NotImplementedError:
    return NotImplementedError(
        f"{quote(names)} are parts of tensors of several components or with a scale, whose updates are not those of "
        "plain floating-point numbers: forecast the model before it is converted, and audit decoded values, "
        "{name: x.decode() for name, x in model.named_parameters()}"
    )


@dataclass(slots=True)
class NamedParameterState:
    """States of one parameter by their names, tensors and numbers, and the options that its group shares."""

    state: dict[str, Any]
    options: dict[str, Any]


def name_optimizer_states(checkpoint: Checkpoint, unseen: list[str]) -> dict[str, NamedParameterState]:
    """Return the states of every parameter of a checkpoint; sentences on those that have no name go to `unseen`."""
    found: dict[str, NamedParameterState] = {}
    for optimizer in checkpoint.optimizers:
        groups = {key: group for keys, group in zip(optimizer.keys_by_group, optimizer.groups) for key in keys}
        names = _read_parameter_names_of_optimizer(optimizer, list(groups))
        names = _name_states_in_order(checkpoint, optimizer, len(groups)) if names is None else names
        if names is None:
            order = ", or install the transformers that saved it, which has the model's order"
            unseen.append(
                f"the {len(groups)} optimizer states of the checkpoint have no names and no order: they were not "
                "compared; make the optimizer from model.named_parameters(), which saves names"
                + (order if checkpoint.config_path else "")
            )
            continue
        strange = [name for name in names.values() if name not in checkpoint.tensors]
        if strange:
            unseen.append(
                f"the optimizer's states of {quote(strange)} were not compared: no tensor of the checkpoint has such "
                "a name; save weights and states under the same names"
            )
        left_out = ("params", "param_names", "identities", "random_stream", "halfulp")
        options = {id(one): {k: value for k, value in one.items() if k not in left_out} for one in optimizer.groups}
        for key, name in names.items():
            found[name] = NamedParameterState(optimizer.state.get(key) or {}, options[id(groups[key])])
    return found


def _read_parameter_names_of_optimizer(optimizer: OptimizerStates, keys: list[Any]) -> dict[Any, str] | None:
    if keys and all(isinstance(key, str) for key in keys):
        return dict(zip(keys, strip_wrapper_prefixes(keys), strict=True))
    given = [group.get("param_names") for group in optimizer.groups]
    own = [list(names) if isinstance(names, list | tuple) else [] for names in given]
    if not keys or list(map(len, own)) != list(map(len, optimizer.keys_by_group)):
        return None
    return dict(zip(keys, strip_wrapper_prefixes(itertools.chain(*own)), strict=True))


def _name_states_in_order(checkpoint: Checkpoint, optimizer: OptimizerStates, count: int) -> dict[Any, str] | None:
    """Return names in the order of the model, where numbers and shapes of all parameters agree with it."""
    candidates = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if name.rpartition(".")[2] not in RUNNING_STATISTICS_NAMES
        and (tensor.is_floating_point() or tensor.is_complex())
    }
    order = (
        None if checkpoint.config_path is None else list_parameter_names_from_config(checkpoint.config_path, candidates)
    )
    order = list(candidates) if checkpoint.is_ordered else order
    if order is None or not len(order) == len(candidates) == count:
        return None
    candidates = {name: candidates[name] for name in order}
    # The usual rules of weight decay: by names as transformers with norms told by shape, and matrices alone.
    matrices = {name for name, stored in candidates.items() if len(stored.shape) >= 2}
    weights = [name for name in candidates if name.rpartition(".")[2] == "weight"]
    vectors = {name.rpartition(".")[0] for name in weights if len(candidates[name].shape) == 1}
    others = {name for name in candidates if name.rpartition(".")[0] not in vectors}
    by_name = {name for name in others if not _UNDECAYED_NAME_PATTERN.search(name.lower())}
    found: list[dict[Any, str]] = []
    for decaying in (by_name, matrices):
        names = _assign_parameter_names(candidates, optimizer, decaying)
        if names is not None and names not in found:
            found.append(names)
    return found[0] if len(found) == 1 else None


def _assign_parameter_names(
    tensors_in_order: Mapping[str, Tensor], optimizer: OptimizerStates, decaying: Collection[str]
) -> dict[Any, str] | None:
    """Return names in order, each given to the group whose next state fits, of several the one that decays or not."""
    waiting = optimizer.keys_by_group
    found = {}
    for name, stored in tensors_in_order.items():
        fitting = []
        for number, keys in enumerate(waiting):
            state = optimizer.state.get(keys[0]) if keys else None
            shapes = [value.shape for value in (state or {}).values() if isinstance(value, Tensor)]
            # The largest tensor of a parameter's state has its shape.
            if keys and (not shapes or max(shapes, key=lambda one: (len(one), one)) == stored.shape):
                fitting.append(number)
        if len(fitting) > 1:
            fitting = [n for n in fitting if bool(optimizer.groups[n].get("weight_decay")) == (name in decaying)]
        if len(fitting) != 1:
            return None
        found[waiting[fitting[0]].pop(0)] = name
    return found


_MODEL_KEY_PATTERN = re.compile(
    r"^(model|net|network|module|weights|params|model_?state|(model_?)?state_?dict|model_state_dict)$", re.I
)
# What runs keep beside their weights: tensors here are a generator's state, a best score, a counter. Some are whole
# words, as an upsampler or a hypernet is a model's part.
_AUXILIARY_KEY_PATTERN = re.compile(
    r"rng|random|callback|schedul|metric|history|globalstep|bestloss|valloss|trainargs|argument|"
    r"(?:^|[_ .-])(?:loop|(?:grad)?scaler|loss(?:es)?|sampler|hyper|h(?:yper)?param(?:eter)?|config|arg|step|epoch)s?"
    r"(?:$|[_ .\d-])",
    re.I,
)
_DEEPEST_NESTING = 64
_TensorsByPath = dict[tuple[Any, ...], Tensor]


def parse_checkpoint_content(content: object, path: str) -> Checkpoint:
    """Return the parts of what a file holds: nested mappings and lists of tensors and plain data."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds {name_type(content)}: give a checkpoint with a model's state_dict")
    leaves: _TensorsByPath = {}
    found = Checkpoint(path, {})
    for where, leaf in walk_checkpoint_leaves(content, ()):
        if isinstance(leaf, OptimizerStates):
            found.optimizers.append(leaf)
        elif isinstance(leaf, ValueError):
            found.unseen.append(f"{'.'.join(map(str, where)) or 'the file'} was not compared: {leaf}")
        elif isinstance(leaf, Tensor):
            if isinstance(leaf, MCTensor | ScaledTensor):
                raise _make_components_and_scales_error([".".join(map(str, where))])
            leaves[where] = get_local(leaf).detach()
    found.tensors = _name_model_tensors(leaves, found.unseen)
    # Of several names of one memory, under which tied weights are saved, the first one stays.
    first: dict[object, str] = {}
    for name, tensor in found.tensors.items():
        memory = get_plain_address_or_zero(tensor) if tensor.numel() else 0
        first.setdefault((memory, tensor.dtype, tensor.shape) if memory else name, name)
    kept = set(first.values())
    if tied := [name for name in found.tensors if name not in kept]:
        found.unseen.append(f"{quote(tied)} are tied to tensors of other names, and stand under these")
        found.tensors = {name: tensor for name, tensor in found.tensors.items() if name in kept}
    refuse_components_and_scales(found.tensors)
    if not found.tensors:
        rest = "only an optimizer's states" if found.optimizers else f"no tensors, only {quote(content)}"
        rest += f" ({'; '.join(found.unseen)})" if found.unseen else ""
        raise ValueError(f"{path} holds {rest if content else 'nothing'}: give a checkpoint with a model's state_dict")
    return found


def walk_checkpoint_leaves(content: Any, where: tuple) -> Iterator[tuple[tuple, Any]]:
    """Yield what nested data holds with its path: leaves, and the states of whole optimizers."""
    if len(where) > _DEEPEST_NESTING:
        raise ValueError(
            f"a checkpoint is nested more than {_DEEPEST_NESTING} levels deep, or holds itself: give the model's "
            "state_dict"
        )
    if isinstance(content, Mapping) and "param_groups" in content:
        yield where, _read_optimizer_states(content)
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from walk_checkpoint_leaves(value, (*where, key))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from walk_checkpoint_leaves(value, (*where, number))
    elif isinstance(content, Tensor) and (content.layout != torch.strided or content.is_meta):
        kind = "on the meta device, without numbers" if content.is_meta else f"a tensor of layout {content.layout}"
        yield where, ValueError(f"it is {kind}")
    elif where:
        yield where, content


def _read_optimizer_states(content: Mapping[Any, Any]) -> OptimizerStates | ValueError:
    state, groups = content.get("state") or {}, content["param_groups"]
    groups = list(groups.values()) if isinstance(groups, Mapping) else groups
    whole = isinstance(state, Mapping) and isinstance(groups, list | tuple)
    if not whole or not all(
        isinstance(group, Mapping) and isinstance(group.get("params") or (), list | tuple) for group in groups
    ):
        return ValueError("its param_groups and state are not those of a torch optimizer")
    kept = {
        key: {name: get_local(one).detach() if isinstance(one, Tensor) else one for name, one in value.items()}
        for key, value in state.items()
        if isinstance(value, Mapping)
    }
    return OptimizerStates(kept, [dict(group) for group in groups])


def _name_model_tensors(leaves: _TensorsByPath, unseen: list[str]) -> dict[str, Tensor]:
    """Return the model's tensors by name."""
    while leaves and len({where[0] for where in leaves}) == 1 and all(len(where) > 1 for where in leaves):
        leaves = {where[1:]: leaf for where, leaf in leaves.items()}
    groups: dict[Any, _TensorsByPath] = {}
    for where, leaf in leaves.items():
        groups.setdefault(where[0] if len(where) > 1 else None, {})[where] = leaf
    models: list[Any] = [key for key in groups if isinstance(key, str) and _MODEL_KEY_PATTERN.match(key)]
    if not models:
        models = [key for key in groups if key is None or not _is_auxiliary_key(key)]
        if None in groups and _is_state_dict(leaves):
            merged = {where: leaf for where, leaf in leaves.items() if len(where) == 1 or where[0] in models}
            groups, models = groups | {None: merged}, [None]
        # A loose tensor beside models' dicts is a loss or a counter.
        models = [key for key in models if key is not None or len(models) == 1]
    found: dict[str, Tensor] = {}
    read: set[tuple[Any, ...]] = set()
    for key in models:
        prefix, own = f"{key}." if len(models) > 1 else "", groups[key]
        names = strip_wrapper_prefixes(".".join(map(str, where if key is None else where[1:])) for where in own)
        found |= {prefix + name: leaf for name, leaf in zip(names, own.values(), strict=True)}
        read |= own.keys()
    unread = [where for where, leaf in leaves.items() if where not in read and not _is_training_state(where[0], leaf)]
    if loose := [where[0] for where in unread if len(where) == 1]:
        unseen.append(f"{quote(loose)} were not read: they stand beside the model's tensors")
    keys = dict.fromkeys(where[0] for where in unread if len(where) > 1)
    unseen += [f"tensors under {key!r} were not read: they are not the model's" for key in keys]
    return found


def _is_state_dict(leaves: _TensorsByPath) -> bool:
    """Return whether the top is one module's state_dict, in which extra state and packed weights are nested."""
    loose = [where[0] for where in leaves if len(where) == 1 and not _is_auxiliary_key(where[0])]
    keys = {where[0] for where in leaves}
    return len(loose) > 1 or "_extra_state" in keys or any("." in str(key) for key in keys)


def _is_training_state(key: object, leaf: Tensor) -> bool:
    """Return whether a tensor stands under an auxiliary key and is no array of floats: a counter, a random state."""
    has_numbers = leaf.numel() > 1 and (leaf.is_floating_point() or leaf.is_complex())
    return _is_auxiliary_key(key) and not has_numbers


def _is_auxiliary_key(key: object) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(key))  # of camel case
    return isinstance(key, int) or bool(_AUXILIARY_KEY_PATTERN.search(words))


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
    refuse_components_and_scales(found.tensors)
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
    return parse_checkpoint_content(load_torch_file(path), str(path))


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
        found.config_path = folder / "config.json"
    return found


def _open_weight_files(folder: Path, files: list[Path]) -> Checkpoint:
    indices = [path for path in files if path.name.endswith(".safetensors.index.json")]
    torch_indices = [path for path in files if path.name.endswith(".bin.index.json")]
    weights = [path for path in files if not _FILES_WITHOUT_WEIGHTS_PATTERN.match(path.name)]
    tensors = [path for path in weights if path.suffix == ".safetensors"]
    saved = [path for path in weights if path.suffix in _TORCH_SUFFIXES]
    for group in (indices, torch_indices, tensors, saved):
        # Variants, as model.fp16.safetensors, stand beside the file that loading takes.
        known = [path for path in group if Path(path.name.removesuffix(".index.json")).stem in _WEIGHT_FILE_STEMS]
        if len(known) == 1 or len(group) == 1:
            found = _open_file((known or group)[0])
            rest = [path.name for path in group if path not in (known[:1] or group)]
            if rest:
                found.unseen.append(f"{quote(rest)} lie beside {known[0].name}, and were not compared")
            return found
        if group:
            names = quote(path.name for path in group)
            without = " and no index" if group in (tensors, saved) else ""
            raise ValueError(f"{folder} holds several checkpoints ({names}){without}: give one of the files")
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
    absent = [name for name in strip_wrapper_prefixes(placed) if name not in found.tensors]
    if absent:
        raise ValueError(f"the shards of {index} lack {quote(absent)}: index and shards are of different checkpoints")
    return found


def _open_safetensors(paths: list[Path]) -> Checkpoint:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= read_safetensors(path)
    named = dict(zip(strip_wrapper_prefixes(tensors), tensors.values(), strict=True))
    return Checkpoint(str(paths[0]), named, is_ordered=False)


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
    found: dict[str, Tensor] = {}
    for name in file.offset_keys() if hasattr(file, "offset_keys") else file.keys():
        try:
            found[name] = file.get_tensor(name)
        except (SafetensorError, AttributeError) as error:  # a dtype without one of torch, or of a later torch
            said = " ".join(str(error).split())
            raise ValueError(
                f"{path} holds {name!r} in {file.get_slice(name).get_dtype()}, which the installed safetensors and "
                f"torch cannot read ({said}): save it in a dtype of torch, or install later versions of both"
            ) from None
    return found
