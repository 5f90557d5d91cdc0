"""The name by which messages call a parameter that came without one."""

from __future__ import annotations

import torch

from ...subclass.models._parameter_holders import named_beside
from ._random_identity import plain_names


class UnnamedParameter(str):
    """A parameter's position in its group, which a message replaces by the name that a living module has for it.

    Modules are searched for where it is formatted alone, so that steps pay nothing; `str` gives the position.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> name = UnnamedParameter.at(1, model[0].bias)
    >>> f"{name}", f"{name!r}", str(name)
    ('0.bias', "'0.bias'", '#1')
    """

    __slots__ = ("key",)
    key: int

    @classmethod
    def at(cls, position: int, parameter: torch.Tensor) -> UnnamedParameter:
        """Return the name of the parameter at a position."""
        name = cls(f"#{position}")
        # By its id: a name keeps no parameter alive, and messages are about living ones.
        name.key = id(parameter)
        return name

    def __format__(self, spec: str) -> str:
        """Return the name that a module has for it, else the position."""
        return format(self._found(), spec)

    def __repr__(self) -> str:
        """Return the same in quotes."""
        return repr(self._found())

    def _found(self) -> str:
        named = named_beside(self.key)
        plain = zip(plain_names(name for name, _ in named), named, strict=True)
        return next((name for name, (_, tensor) in plain if id(tensor) == self.key), str(self))
