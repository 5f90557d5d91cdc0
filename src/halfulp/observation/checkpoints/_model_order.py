"""The order of a model's parameters that a file in alphabetical order has lost, and the groups that trainers make."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ._stored import Stored

# Returns whether a parameter decays, given its name and itself.
Decays = Callable[[str, Stored], bool]
# As `Trainer.get_decay_parameter_names` of transformers has them (transformers/trainer.py).
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decay_rules(tensors: Mapping[str, Stored]) -> list[Decays]:
    """Return the usual rules of who decays: of transformers by name, the same with norms by shape, matrices alone."""
    vectors = {
        name.rpartition(".")[0]
        for name, stored in tensors.items()
        if name.rpartition(".")[2] == "weight" and len(stored.shape) == 1
    }
    return [
        lambda name, stored: not _NO_DECAY.search(name.lower()),
        lambda name, stored: not _NO_DECAY.search(name.lower()) and name.rpartition(".")[0] not in vectors,
        lambda name, stored: len(stored.shape) >= 2,
    ]


def order_by_config(config: Path, tensors: Mapping[str, Stored]) -> tuple[list[str], Decays] | None:
    """Return the names of a model of transformers in its own order, and who decays under its Trainer.

    The model is made from its config on the meta device, by the class of the installed transformers that it names; code
    beside the config is not run.

    Returns:
        None without transformers, for a class that it has not, and for a model with other names.
    """
    given = _read(config)
    layers = given.get("num_hidden_layers", 0)
    if not isinstance(layers, int) or layers > len(tensors) or importlib.util.find_spec("transformers") is None:
        return None
    level = logging.root.manager.disable
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            logging.disable()
            model = _model(given)
    except Exception:  # whatever another version of transformers makes of the config
        return None
    finally:
        logging.disable(level)
    if model is None:
        return None
    norms = {
        f"{name}.{own}" for name, module in model.named_modules() for own in module._parameters if _is_norm(module)
    }
    # A tied weight is saved once.
    names = [name for name, _ in model.named_parameters() if name in tensors]
    return names, lambda name, stored: name not in norms and not _NO_DECAY.search(name.lower())


def _is_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.LayerNorm)


def _model(given: Mapping[str, Any]) -> torch.nn.Module | None:
    transformers = importlib.import_module("transformers")
    names = given.get("architectures")
    kind: Any = getattr(transformers, names[0], None) if isinstance(names, list) and len(names) == 1 else None
    if not (inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)):
        return None
    made = kind(kind.config_class.from_dict({key: value for key, value in given.items() if key != "auto_map"}))
    assert isinstance(made, torch.nn.Module), "models of transformers are modules"
    return made


def _read(config: Path) -> dict[str, Any]:
    try:
        read = json.loads(config.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
