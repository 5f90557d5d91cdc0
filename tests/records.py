"""What is on record in tests/vectors, which results that are published stand on.

`HALFULP_WRITE_RECORDS=1 python -m pytest FILE` writes what the tests of a file find instead of comparing it.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

REMEDY = "if this is meant, repeat what was published with it, and see tests/records.py for how to write the record"
_FOLDER = Path(__file__).parent / "vectors"


def read_record(file: str, name: str, found: Any) -> Any:
    """What is on record under a name in a file of JSON; where records are written, what was found, as JSON has it."""
    path = _FOLDER / f"{file}.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    if os.environ.get("HALFULP_WRITE_RECORDS"):
        records[name] = found
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(records[key])}" for key in sorted(records))
        path.write_text(f"{{\n{rows}\n}}\n")
        records = json.loads(path.read_text())
    assert name in records, f"{name} is not on record in {path}; see tests/records.py for how to write it"
    return records[name]


def list_names_on_record(file: str) -> list[str]:
    """The names on record in a file."""
    return list(json.loads((_FOLDER / f"{file}.json").read_text()))


def list_differences(found: Any, recorded: Any, tolerance: float, where: str = "") -> list[str]:
    """List where plain data differ from those on record: floats by more than a share, all else at all."""
    if is_fingerprint(recorded) and is_fingerprint(found):
        near = tolerance * recorded[1]
        same = found[0] == recorded[0] and all(abs(a - b) <= near for a, b in zip(found[1:], recorded[1:]))
        return [] if same else [f"{where}: {found} for {recorded}"]
    if isinstance(recorded, dict) and isinstance(found, dict) and recorded.keys() == found.keys():
        pairs: Any = [(key, found[key], recorded[key]) for key in recorded]
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = zip(range(len(found)), found, recorded)
    elif isinstance(recorded, float) and isinstance(found, (int, float)):
        return [] if math.isclose(found, recorded, rel_tol=tolerance) else [f"{where}: {found} for {recorded}"]
    else:
        return [] if found == recorded else [f"{where}: {found} for {recorded}"]
    return [line for key, a, b in pairs for line in list_differences(a, b, tolerance, f"{where} {key}")]


def fingerprint(x: Tensor) -> list[Any]:
    """A tensor's dtype and shape, its mean magnitude, and its mean after each element is weighted by its place."""
    wide = x.detach().double().flatten()
    weights = 1 + torch.sin(torch.arange(len(wide), dtype=torch.float64))
    return [f"{x.dtype} {list(x.shape)}", wide.abs().mean().item(), (wide * weights).mean().item()]


def is_fingerprint(record: Any) -> bool:
    """Whether it is a tensor's fingerprint, whose weighted mean may cancel."""
    return isinstance(record, list) and len(record) == 3 and str(record[0]).startswith("torch.")
