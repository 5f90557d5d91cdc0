"""Records made by hand: a parameter, a tensor or steps with the fields that a test is about.

What is found in each, to the last number and word, is on record in tests/vectors/findings.json, under the finding's
code and a digest of the record.
"""

import dataclasses
import hashlib
import json
from typing import Any

import torch

from halfulp.observation._finding import Finding
from halfulp.observation._record import (
    ParameterRecord,
    RealisedChanges,
    Record,
    StepRecord,
    TensorRecord,
    record_to_plain_data,
    to_plain_data,
)
from halfulp.observation.findings import FINDING_KINDS

from ...records import REMEDY, list_differences, read_record

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def realised(share: float, *, lost: float | None = None, seen: int = 4096, known: bool = True) -> RealisedChanges:
    """Changes of which a share took place, and another was cancelled (what did not take place, unless it is given)."""
    return RealisedChanges(seen, round(seen * (1 - share if lost is None else lost)), 1.0, share, known)


def parameter(name: str = "layer.weight", **fields: Any) -> Record:
    given: dict[str, Any] = {
        "kind": "Linear",
        "dtype": BRAIN,
        "shape": (64, 64),
        "numel": 4096,
        "requires_grad": True,
        "optimizer": "AdamW",
        "optimizer_module": "torch.optim.adamw",
        "options": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8},
        "gradients": 8,
        "nonzero_gradients": 4096,
        "gradient_dtype": BRAIN,
        "moved": 1.0,
        "update": realised(1.0),
    }
    record = Record(sampled_steps=list(range(8)))
    record.parameters[name] = ParameterRecord(name, **{**given, **fields})
    return record


def tensor(role: str = "activation", name: str = "layer", **fields: Any) -> Record:
    return tensors((role, name, fields))


def tensors(*given: tuple[str, str, dict[str, Any]]) -> Record:
    record = Record(sampled_steps=list(range(8)))
    for order, (role, name, fields) in enumerate(given):
        plain: dict[str, Any] = {
            "kind": "Linear",
            "dtype": HALF,
            "order": order,
            "steps": 8,
            "elements": 32768,
            "amax": 4.0,
            "last_amax": 4.0,
            "sampled": 32768,
            "histogram": {-1: 16384, 0: 16384},
            "rms": 1.0,
        }
        record.tensors[role, name] = TensorRecord(role, name, **{**plain, **fields})
    return record


def with_scale(record: Record, scales: list[float] = [65536.0], **fields: Any) -> Record:  # noqa: B006  read only
    record.history = [StepRecord(i, True, 1e-3, scale) for i, scale in enumerate(scales)]
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def found(code: str, record: Record) -> list[Finding]:
    """What one code finds, after a look whether it is that on record."""
    there = list(FINDING_KINDS[code]().find_in_record(record))
    if there:
        digest = hashlib.sha256(json.dumps(record_to_plain_data(record)).encode()).hexdigest()
        told = [
            {field.name: value for field in dataclasses.fields(one) if (value := getattr(one, field.name))}
            for one in there
        ]
        told = [to_plain_data({key: value for key, value in one.items() if key != "code"}) for one in told]
        differing = list_differences(told, read_record("findings", f"{code} {digest[:12]}", told), 1e-9, code)
        assert not differing, REMEDY
    return there


def severity(code: str, record: Record) -> str | None:
    """Severity of the only finding of a code, None without one."""
    there = found(code, record)
    assert len(there) <= 1
    for finding in there:
        assert finding.code == code
        assert finding.summary
        assert finding.cure
        assert 0 < finding.confidence <= 1
        assert finding.to_dict()
    return there[0].severity if there else None
