"""Lookup of torch's operators by name; one that the installed torch lacks is marked absent, and registries skip it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from .._messages import ENVIRONMENT

_absent: set[str] = set()


def torch_operators(namespace: str) -> Operators:
    """Return the operators of a namespace, such as "aten", to be used as torch.ops.aten is.

    >>> aten = torch_operators("aten")
    >>> aten.add.Tensor is torch.ops.aten.add.Tensor, aten.gone_since.default
    (True, <aten::gone_since.default, which torch ... lacks>)
    >>> present([aten.neg.default, aten.gone_since.default])
    [<OpOverload(op='aten.neg', overload='default')>]
    """
    return Operators(namespace)


def present(operators: Iterable[Any]) -> list[Any]:
    """Return those operators that the installed torch has."""
    return [operator for operator in operators if not isinstance(operator, AbsentOperator)]


def absent_operators() -> list[str]:
    """Return the operators that were looked up by now and that the installed torch lacks."""
    return sorted(_absent)


class AbsentOperator:
    """A placeholder for an overload that the installed torch lacks; it cannot be called, and registries skip it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, which torch {torch.__version__} lacks>"

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"torch {torch.__version__} has no operator {self.name}: install another torch; {ENVIRONMENT}"
        )


class _Lookup:
    """A namespace whose attributes are looked up once each."""

    _private = "__"

    def __getattr__(self, name: str) -> Any:
        # Such as __wrapped__; torch has aten.__and__.
        found = self._find(name)
        if found is None and name.startswith(self._private):
            raise AttributeError(name)
        vars(self)[name] = found = self._entry(name, found)
        return found


class Operators(_Lookup):
    """A namespace of torch.ops; its attributes are operators, present or not."""

    def __init__(self, namespace: str) -> None:
        self._name = namespace

    def _find(self, name: str) -> Any:
        return getattr(getattr(torch.ops, self._name), name, None)

    def _entry(self, name: str, found: Any) -> OperatorPacket:
        return OperatorPacket(f"{self._name}::{name}", found)


class OperatorPacket(_Lookup):
    """The overloads of one operator; none where the installed torch lacks it."""

    # No overload begins with an underscore; unittest.mock's call asks everything that doctest finds for _mock_name.
    _private = "_"

    def __init__(self, name: str, packet: Any) -> None:
        self._name, self._packet = name, packet

    def _find(self, name: str) -> Any:
        return getattr(self._packet, name, None)

    def _entry(self, name: str, found: Any) -> Any:
        if found is None:
            _absent.add(f"{self._name}.{name}")
            return AbsentOperator(f"{self._name}.{name}")
        return found

    def overloads(self) -> list[str]:
        """Return the names of the overloads."""
        if self._packet is None:
            _absent.add(self._name)
            return []
        return self._packet.overloads()
