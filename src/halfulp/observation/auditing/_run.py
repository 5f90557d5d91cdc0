"""audit: compare two checkpoints of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._messages import name_type
from ..checkpoints._names import name_optimizer_states, sort_checkpoint_content
from ..checkpoints._open import open_checkpoint
from ..findings import collect_findings
from ._audit import Audit
from ._states import compare_optimizer_states
from ._tensors import compare_tensors

CheckpointOrPath = str | os.PathLike[str] | Mapping[str, Any]


def audit(a: CheckpointOrPath, b: CheckpointOrPath, *, lr: float | None = None) -> Audit:
    """Compare two checkpoints of one run: what did not move, what rounding lost, what is NaN or of another dtype.

    Files are read by memory map, tensor by tensor; no model code is needed, and nothing that they hold is executed.
    Changes are in ulps: the spacing, at the element of A, of the coarser of the two dtypes. Where B holds an Adam's,
    Lion's or SGD's states, its last update is computed again, and rounded to the weight's dtype.

    Args:
        a, b: the earlier and the later checkpoint: a file of safetensors or torch.save, a sharded folder, a folder of
            HF's Trainer, or a state_dict.
        lr: learning rate in place of the one that B's optimizer holds.

    Returns:
        An `Audit`: `print` it, or read `findings`, `tensors`, `states`, `to_dict()`.

    Raises:
        TypeError: a or b is neither a path nor a mapping.
        ValueError: it cannot be read as a checkpoint, or is refused by weights_only; both are the same file, or of
            different models; lr is no number from 0 on.

    >>> import torch
    >>> start = {"norm.weight": torch.ones(64, dtype=torch.bfloat16), "head.weight": torch.ones(64)}
    >>> later = {"norm.weight": torch.ones(64, dtype=torch.bfloat16), "head.weight": torch.full((64,), 1.001)}
    >>> [(found.code, found.where) for found in audit(start, later).findings]
    [('weight-frozen', ('norm.weight',))]
    """
    known = isinstance(lr, int | float) and not isinstance(lr, bool)
    if lr is not None and not (known and 0 <= lr <= sys.float_info.max):
        raise ValueError(f"lr={lr!r}: give a number from 0 on")
    for given, which in ((a, "A"), (b, "B")):
        if not isinstance(given, str | os.PathLike | Mapping):
            raise TypeError(f"checkpoint {which} is {name_type(given)}: give a path or a state_dict")
    is_same = a is b
    if isinstance(a, str | os.PathLike) and isinstance(b, str | os.PathLike):
        with contextlib.suppress(OSError, ValueError):  # what is not there is said when it is opened
            is_same = Path(a).samefile(b)
    if is_same:
        same = name_type(a) if isinstance(a, Mapping) else a
        raise ValueError(f"A and B are the same checkpoint, {same}: give an earlier and a later one of a run")
    before, after = (
        sort_checkpoint_content(given, which) if isinstance(given, Mapping) else open_checkpoint(Path(given))
        for given, which in ((a, "A"), (b, "B"))
    )
    unseen = [*before.unseen, *after.unseen]
    earlier, later = name_optimizer_states(before, unseen), name_optimizer_states(after, unseen)
    after.unseen.clear()
    complete = len(later) >= after.stepped_parameter_count
    tensors = compare_tensors(before, after, set(earlier) | set(later))
    states = compare_optimizer_states(earlier, later, after, lr)
    unseen += [said for said in after.unseen if said not in unseen]
    said = tuple(dict.fromkeys(unseen))
    made = Audit(tensors, states, said, states_complete=complete)
    return dataclasses.replace(made, findings=collect_findings("audit", made))
