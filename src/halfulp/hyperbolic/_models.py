"""The models of hyperbolic space by name."""

from __future__ import annotations

from ._half_space import HalfSpace
from ._manifold import Manifold
from ._poincare_ball import PoincareBall

_MODELS: dict[str, Manifold] = {model.name: model for model in (HalfSpace(), PoincareBall())}


def manifold(which: str | Manifold) -> Manifold:
    """Return the model of a name, "half-space" or "ball"; a Manifold is returned as it is.

    Raises:
        ValueError: no model has that name.

    >>> manifold("ball")
    PoincareBall()
    """
    if isinstance(which, Manifold):
        return which
    if which not in _MODELS:
        raise ValueError(f"manifold={which!r} is unknown: choose one of {', '.join(map(repr, _MODELS))}")
    return _MODELS[which]
