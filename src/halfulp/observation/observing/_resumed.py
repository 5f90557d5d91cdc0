"""A precision contract beside what a resumed run has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..._torch_versions import find_dtype
from ...recipes._contract import KEY, Contract, ContractDifference, contract, contract_differences
from .._record import Expectation
from .._text import dtype_name

SOURCE = "contract"


def as_contract(given: object) -> Contract | None:
    """Return the contract that is given, itself or as the plain data it is saved as; None where none is.

    Raises:
        ValueError: the data is damaged, or of a later version.
    """
    if isinstance(given, Contract):
        return given
    if isinstance(given, Mapping) and (KEY in given or {"version", "tensors"} <= given.keys()):
        return Contract.from_dict(given)
    return None


class ResumedRun:
    """How a contract says that tensors are held, and how model and optimizers hold them.

    Dtypes and weight updates are those at the time when this is made, since a model may be cast to be saved after the
    run; states are those of the optimizers when they are compared, since a new one has none before its first step.

    Args:
        asked: the contract.
        model: that resumed.
        optimizers: its optimizers.
    """

    def __init__(self, asked: Contract, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._contract, self._model, self._optimizers = asked, model, list(optimizers)
        self._there = contract(model, self._optimizers)

    def compare(self) -> list[Expectation]:
        """Return what the contract says: of each dtype its tensors, and whatever else differs."""
        now = contract(self._model, self._optimizers).tensors
        there = {
            name: dataclasses.replace(terms, states=now[name].states if name in now else {})
            for name, terms in self._there.tensors.items()
        }
        found = contract_differences(self._contract, Contract(there), with_optimizer=bool(self._optimizers))
        others: dict[tuple[str, str], Expectation] = {}
        for one in found:
            if one.field != "dtype" and not _follows(one, found):
                asked = others.setdefault((one.field, one.before), _expected(f"{one.field} {one.before}"))
                asked.matched.append(one.name)
                asked.other[one.name] = one.after
        return [*others.values(), *self._dtypes(found)]

    def _dtypes(self, found: Sequence[ContractDifference]) -> list[Expectation]:
        changed = {one.name: _short(one.after) for one in found if one.field == "dtype"}
        by_dtype: dict[str, Expectation] = {}
        for name, terms in self._contract.tensors.items():
            if name in self._there.tensors:
                asked = by_dtype.setdefault(terms.dtype, _expected(_short(terms.dtype)))
                asked.matched.append(name)
                if name in changed:
                    asked.other[name] = changed[name]
        return list(by_dtype.values())


def _follows(one: ContractDifference, found: Sequence[ContractDifference]) -> bool:
    """Return whether a plain tensor's storage differs as its dtype does."""
    return one.field == "storage" and any(
        (other.name, other.field, other.before, other.after) == (one.name, "dtype", one.before, one.after)
        for other in found
    )


def _expected(asked: str) -> Expectation:
    return Expectation("*", asked, source=SOURCE)


def _short(name: str) -> str:
    dtype = find_dtype(name)
    return name if dtype is None else dtype_name(dtype)
