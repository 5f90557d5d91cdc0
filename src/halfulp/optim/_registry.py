"""The optimizers by their classes' names, and how a user adds one."""

from __future__ import annotations

from typing import TypeVar

from .._names import enter, words_of
from ._algorithms import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, RAdam, RMSprop
from ._optimizer import Optimizer
from ._published_algorithms import LAMB, AdamWScheduleFree, Adan, AdEMAMix, Lion, Prodigy, SGDScheduleFree

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])

_KINDS = (
    SGD,
    Adam,
    AdamW,
    Lion,
    Adagrad,
    RMSprop,
    NAdam,
    RAdam,
    Adafactor,
    Muon,
    Adan,
    AdEMAMix,
    LAMB,
    SGDScheduleFree,
    AdamWScheduleFree,
    Prodigy,
)
OPTIMIZERS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in _KINDS}


def register_optimizer(kind: OptimizerClass) -> OptimizerClass:
    """Make an optimizer known by its class's name, to tasks, recipes and comparisons; a decorator of the class.

    Returns:
        The class.

    Raises:
        TypeError: it is no subclass of Optimizer, or has no `rule`.
        ValueError: another optimizer has the name, or this one has no docstring.

    >>> import torch
    >>> register_optimizer(torch.optim.Adagrad)
    Traceback (most recent call last):
    ...
    TypeError: an optimizer is a subclass of hu.optim.Optimizer, got <class 'torch.optim.adagrad.Adagrad'>
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"an optimizer is a subclass of hu.optim.Optimizer, got {kind!r}")
    if kind.rule is Optimizer.rule:
        raise TypeError(f"{kind.__name__} has no rule: write rule(self, group), which gives an UpdateRule")
    enter("optimizer", OPTIMIZERS, kind.__name__, kind, words_of(kind))
    return kind
