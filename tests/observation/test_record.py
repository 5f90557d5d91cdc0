"""A record as JSON: nothing is lost but types, nothing that JSON lacks is left."""

import dataclasses
import json

import pytest
import torch

from halfulp.observation import _record
from halfulp.observation._record import (
    ParameterRecord,
    RealisedChanges,
    Record,
    StepRecord,
    TensorRecord,
    record_to_plain_data,
)


def a_record() -> Record:
    tensor = TensorRecord("weight", "a.weight", "Linear", torch.float16, steps=[0], histogram={-2: 3, 5: 1})
    tensor.amax = float("inf")
    parameter = ParameterRecord("a.weight", "Linear", torch.float16, (2, 2), 4, True)
    parameter.options = {"lr": 1e-3, "betas": (0.9, 0.99), "name": "x", "lists": [object()]}
    parameter.states["exp_avg"] = RealisedChanges(5, 1, 2.0, 1.0)
    record = Record(history=[StepRecord(0, True, 1e-3, loss=float("nan"), exponents=(-3, 4))], unseen=["nothing"])
    record.tensors["weight", "a.weight"] = tensor
    record.parameters["a.weight"] = parameter
    return record


def test_json_holds_it() -> None:
    data = json.loads(json.dumps(record_to_plain_data(a_record()), allow_nan=False))
    assert data["tensors"][0]["histogram"] == {"-2": 3, "5": 1}
    assert data["tensors"][0]["amax"] == "inf"
    assert data["parameters"][0]["dtype"] == "float16"
    assert data["parameters"][0]["states"]["exp_avg"] == {
        "seen": 5,
        "cancelled": 1,
        "wanted": 2.0,
        "kept": 1.0,
        "known": True,
        "lost_share": 0.2,
        "realised_share": 0.5,
    }
    assert data["history"][0]["loss"] == "nan"
    assert data["history"][0]["exponents"] == [-3, 4]
    assert data["unseen"] == ["nothing"]


def test_an_empty_record() -> None:
    data = record_to_plain_data(Record())
    assert data["parameters"] == data["tensors"] == data["averages"] == []
    assert data["loss_dtype"] is None


RECORDS = [kind for kind in vars(_record).values() if dataclasses.is_dataclass(kind)]
# What is said of a tensor, parameter or process by itself, of which nothing was observed.
UNOBSERVED = {"scale": 1.0, "known": True, "is_wrappable": True, "weight_update": "nearest", "replica_of": (0, 1)}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_a_record_begins_without_a_count_a_name_or_an_entry(kind) -> None:
    """And shares none with another one."""
    needed = [x for x in dataclasses.fields(kind) if dataclasses.MISSING is x.default is x.default_factory]
    one, other = (kind(*("given" for _ in needed)) for _ in range(2))
    assert one == other
    for field in dataclasses.fields(kind)[len(needed) :]:
        value = getattr(one, field.name)
        if field.name in UNOBSERVED:
            assert value == UNOBSERVED[field.name], field.name
        elif dataclasses.is_dataclass(value):
            assert value == type(value)()
        else:
            assert not value, field.name
        shared = getattr(other, field.name) is value
        assert not shared or not isinstance(value, dict | list), field.name
