"""What a recipe does to each module of a model, before anything is done: asked for, got, and why not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import torch
from torch import nn

from .._messages import listed
from .._qualified_names import pattern_of
from . import _catalog
from ._casts import inside
from ._plan import assign, check, islands, kept_parameters
from ._products import eight_bit_products, rounded_gradients
from ._recipe import Recipe

# A name in a sentence.
_QUOTED = re.compile(r"(?<=')[^']*(?=')")


@dataclasses.dataclass(frozen=True)
class ModulePlan:
    """What becomes of one module's own parameters.

    Attributes:
        name: the module's qualified name, "" for the model itself.
        kind: name of its class.
        parameters: how many elements its own parameters have; tied ones count where they come first.
        asked: what the recipe asks for: "bfloat16, kahan"; empty without parameters of its own.
        held_as: what they will be: "bfloat16", "float16 payload x scale", "2 x float16"; empty without any, but
            "float32" where the module computes in float32 all the same.
        weight_update: of the recipe's optimizer; None where none applies.
        products: "fp8 products", "gradients in float16", where it gets them; None else.
        why: why it gets less than it asks for, or in other words; empty where it gets all.
    """

    name: str
    kind: str
    parameters: int
    asked: str
    held_as: str
    weight_update: str | None
    products: str | None
    why: str

    @property
    def gets(self) -> str:
        """All that it gets, in words."""
        return ", ".join(filter(None, (self.held_as, self.weight_update, self.products)))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns; ``print`` shows a table, modules that differ in numbers alone as one row.

    Attributes:
        recipe: the recipe.
        modules: one `ModulePlan` per module, in the model's order.
        bytes_before, bytes_after: of all parameters, without what an optimizer keeps.
    """

    recipe: Recipe
    modules: tuple[ModulePlan, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        rows = [("module", "class", "asked for", "gets", "why not"), *_rows(self.modules)]
        widths = [max(len(row[k]) for row in rows) for k in range(5)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        bare = list(dict.fromkeys(plan.kind for plan in self.modules if not plan.held_as))
        left = [f"Without parameters of their own: {', '.join(bare)}. {_of_bare(self.recipe)}"] if bare else []
        size = f"{self.bytes_before:,} bytes of parameters become {self.bytes_after:,}."
        return "\n".join([self.recipe.explain(), *table, *left, size])


def explain(model: nn.Module, recipe: Recipe | str) -> Explanation:
    """What `convert` would do to a model, module by module; nothing is changed.

    Args:
        model: with float32 parameters.
        recipe: a Recipe or the name of one.

    Raises:
        ValueError: what `convert` would refuse: an unknown recipe, a glob that matches nothing, parameters without a
            shape yet.
        TypeError: parameters that are not float32, or no module.

    >>> model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.LayerNorm(4))
    >>> print(explain(model, "bf16-kahan"))
    bf16-kahan: Weights are bfloat16, float32 in modules that match '*Norm*'. Each is updated with a second 16-bit
    number per weight that keeps what rounding dropped. Forward and backward run in bfloat16.
    module  class      asked for        gets             why not
    0       Linear     bfloat16, kahan  bfloat16, kahan
    2       LayerNorm  bfloat16, kahan  float32          matches '*Norm*'; float32 needs no weight update
    Without parameters of their own: Sequential, ReLU. They compute in the dtype of what they are given.
    96 bytes of parameters become 64.
    """
    recipe = _catalog.get(recipe)
    check(model, recipe)
    kept = islands(model, recipe)
    walk = _Walk(recipe, kept, kept_parameters(model, kept), assign(recipe, model))
    plans = tuple(walk.plan(name, module) for name, module in model.named_modules())
    return Explanation(recipe, plans, walk.before, walk.after)


class _Walk:
    """The modules in order: which parameters were met before, and the bytes so far."""

    def __init__(
        self, recipe: Recipe, islands: dict[str, str], keeps: set[int], updates: dict[str, str | None]
    ) -> None:
        self._recipe, self._islands, self._keeps, self._updates = recipe, islands, keeps, updates
        self._first: dict[int, str] = {}
        self.before: int = 0
        self.after: int = 0

    def plan(self, name: str, module: nn.Module) -> ModulePlan:
        """Return the plan of the next module."""
        own = {key: p for key, p in module._parameters.items() if p is not None}
        if not own:
            why = self._kept(name)
            return ModulePlan(name, type(module).__name__, 0, "", "float32" if why else "", None, None, why)
        full = {key: f"{name}.{key}" if name else key for key in own}
        first = {key: self._first.setdefault(id(p), full[key]) for key, p in own.items()}
        tied = {key: other for key, other in first.items() if other != full[key]}
        new = {key: p for key, p in own.items() if key not in tied}
        stays = {key for key, p in own.items() if id(p) in self._keeps}
        for key, p in new.items():
            self.before += 4 * p.numel()
            self.after += p.numel() * (4 if key in stays else _bytes(self._recipe))
        wanted = {self._updates[tied.get(key, full[key])] for key in own} - {None}
        got = {self._updates[full[key]] for key, p in new.items() if key not in stays and p.requires_grad} - {None}
        products, why_no_product = self._products(module)
        reasons = [self._why_kept(name, own, stays), *_why_not_updated(own, stays, tied, bool(wanted)), why_no_product]
        return ModulePlan(
            name,
            type(module).__name__,
            sum(p.numel() for p in new.values()),
            ", ".join([_held_as(self._recipe), *sorted(map(str, wanted)), *_asked_products(self._recipe)]),
            _held(own, stays, _held_as(self._recipe)),
            ", ".join(sorted(map(str, got))) or None,
            products,
            "; ".join(filter(None, reasons)),
        )

    def _kept(self, name: str) -> str:
        """Why a module stays float32; empty where it does not."""
        if not inside(name, self._islands):
            return ""
        if name in self._islands:
            return self._islands[name]
        outer = next(island for island in self._islands if inside(name, {island}))
        return f"in {outer!r}, which {self._islands[outer]}"

    def _why_kept(self, name: str, own: dict[str, nn.Parameter], stays: set[str]) -> str:
        kept = self._kept(name)
        if kept or not stays:
            return kept
        return f"shares {listed(sorted(stays))} with a module that stays float32"

    def _products(self, module: nn.Module) -> tuple[str | None, str]:
        if self._recipe.matmul:
            return eight_bit_products(module)
        if self._recipe.gradient_format:
            return rounded_gradients(module, self._recipe.gradient_format)
        return None, ""


def _why_not_updated(own: dict[str, nn.Parameter], stays: set[str], tied: dict[str, str], asked: bool) -> list[str]:
    """Why parameters have no weight update of the recipe's."""
    said = [f"{key!r} is {first!r}" for key, first in tied.items()]
    frozen = [key for key, p in own.items() if not p.requires_grad]
    if frozen:
        said.append("frozen" if len(frozen) == len(own) else f"{listed(frozen)} frozen")
    if asked and any(own[key].requires_grad and key not in tied for key in stays):
        said.append("float32 needs no weight update")
    return said


def _held(own: dict[str, nn.Parameter], stays: set[str], narrow: str) -> str:
    if not stays or len(stays) == len(own):
        return "float32" if stays else narrow
    return f"{narrow}, {listed(sorted(stays))} float32"


def _held_as(recipe: Recipe) -> str:
    if recipe.components:
        return f"{recipe.components} x {recipe.param_dtype}"
    if recipe.payload:
        return f"{recipe.payload} payload x scale"
    return f"float32 with values of {recipe.format}" if recipe.format else recipe.param_dtype or "float32"


def _asked_products(recipe: Recipe) -> list[str]:
    if recipe.matmul:
        return [f"{recipe.matmul} products"]
    return [f"gradients in {recipe.gradient_format}"] if recipe.gradient_format else []


def _of_bare(recipe: Recipe) -> str:
    """What modules without parameters do."""
    if recipe.emulate:
        return f"Their outputs are rounded to {recipe.emulate}."
    if recipe.gradient_format:
        return f"Gradients of products that they compute are in {recipe.gradient_format}."
    if recipe.payload or recipe.components:
        return "They compute with what they are given, payloads with their scales or components."
    return "They compute in the dtype of what they are given."


def _bytes(recipe: Recipe) -> int:
    name = recipe.payload or recipe.param_dtype or "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize * (recipe.components or 1)


def _rows(plans: Iterable[ModulePlan]) -> list[tuple[str, ...]]:
    """A row for each module that gets something; those that differ in numbers alone share one."""
    grouped: dict[tuple[str, ...], list[ModulePlan]] = {}
    for plan in plans:
        if plan.held_as:
            why = _QUOTED.sub(lambda found: pattern_of(found[0]), plan.why)
            grouped.setdefault((pattern_of(plan.name), plan.kind, plan.asked, plan.gets, why), []).append(plan)
    rows: list[tuple[str, ...]] = []
    for (pattern, kind, asked, gets, why), group in grouped.items():
        one = group[0]
        if len(group) == 1:
            rows.append((one.name or "(the model)", kind, asked, gets, one.why))
        else:
            rows.append((f"{pattern} ({len(group)})", kind, asked, gets, why))
    return rows
