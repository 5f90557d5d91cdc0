"""Rounding of what linear layers and convolutions read in the forward pass, as a narrow tensor core would."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..rounding import straight_through
from ..subclass.models._module_parameters import remove_hooks
from ._plan import rounds_operands
from ._recipe import Recipe


class RoundOperands:
    """Pre-hook of a layer: its input and its weight are rounded to nearest, with the gradient of the identity.

    The weight is shadowed by an attribute for one forward pass: the parameter keeps its numbers and its name.
    """

    def __init__(self, format: str) -> None:
        self.format = format

    def __call__(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        vars(layer)["weight"] = straight_through(layer._parameters["weight"], self.format)
        return tuple(straight_through(x, self.format) if _is_floating(x) else x for x in inputs)


class RoundResult:
    """Hook of a layer: its result is rounded, and its weight is the parameter again, also where it raised."""

    def __init__(self, format: str) -> None:
        self.format = format

    def __call__(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        vars(layer).pop("weight", None)
        return straight_through(output, self.format) if _is_floating(output) else None


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def install(model: nn.Module, recipe: Recipe) -> None:
    """Let the layers of a model round what they read and give."""
    for name, module in model.named_modules():
        if rounds_operands(recipe, name, module):
            module.register_forward_pre_hook(RoundOperands(str(recipe.operand_format)))
            module.register_forward_hook(RoundResult(str(recipe.operand_format)), always_call=True)


def remove(model: nn.Module) -> None:
    """Undo `install`."""
    remove_hooks(model.modules(), lambda hook: isinstance(hook, RoundOperands | RoundResult))
