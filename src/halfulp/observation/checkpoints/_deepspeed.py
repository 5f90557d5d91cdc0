"""What DeepSpeed's ZeRO writes: partitions of flat buffers, which are recognized and refused with a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

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


def partitions(folder: Path) -> list[str]:
    """Return what a folder holds of DeepSpeed's: the names of its partitions, or of the folders that have them."""
    inside = sorted(folder.iterdir())
    return [path.name for path in inside if is_partition(path.name) or (path.is_dir() and _STEP.match(path.name))]


def refuse(path: Path, names: Iterable[str]) -> ValueError:
    """Return the error for a file or folder of partitions alone."""
    first = next(iter(names))
    return ValueError(f"{path} holds DeepSpeed's ZeRO partitions ({first}), which are not read: {REMEDY}")
