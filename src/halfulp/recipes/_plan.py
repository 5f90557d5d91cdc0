"""Which modules and parameters of a model a recipe changes, what each gets, and why not all: explain."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Container, Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from .._messages import align_columns, name_type, quote
from .._qualified_names import make_name_pattern
from ..formats import block_names
from ..scaled._scalify import find_eight_bit_forward
from ..scaled.rules._products import EIGHT_BIT_MATRIX_SIDE_MULTIPLE
from ..subclass.models._float32_products import get_original_class
from . import _recipe as _catalog
from ._casts import is_inside_modules
from ._recipe import NORM_GLOBS, Recipe


def check_float32_model(model: nn.Module) -> None:
    """Raise for a model that no recipe starts from."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {name_type(model)}: give a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one batch through the model first")
        if parameter.dtype != torch.float32:
            cure = "make it a buffer"
            if parameter.dtype.is_floating_point:
                cure = "call model.float() or build the model in float32"
            elif parameter.dtype.is_complex:
                cure = "make torch.view_as_real(it) the parameter, and take torch.view_as_complex of that in forward"
            raise TypeError(f"a recipe starts from float32 parameters, but {name!r} is {parameter.dtype}; {cure}")


def find_float32_modules_with_reasons(model: nn.Module, recipe: Recipe) -> dict[str, str]:
    """Return the names of the modules that a narrow recipe keeps in float32, the outermost ones, each with why.

    These are the ones that the recipe's globs match, losses with weights, modules whose weight is computed from float32
    buffers before each forward pass, and, where norms are kept, modules with vectors alone, which enter no product.

    >>> from halfulp import recipes
    >>> find_float32_modules_with_reasons(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), recipes.get("bf16"))
    {'1': "matches '*Norm*'"}
    """
    if not recipe.is_narrow:
        return {}
    found: dict[str, str] = {}
    matched: set[str] = set()
    keeps_norms = set(NORM_GLOBS) <= set(recipe.float32)
    for name, module in model.named_modules():
        globs = [glob for glob in recipe.float32 if _is_module_matched_by_glob(glob, name, module)]
        matched.update(globs)
        if is_inside_modules(name, found):
            continue
        if globs:
            found[name] = f"matches {globs[0]!r}"
        elif any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
            found[name] = "has a spectral norm with float32 buffers"
        elif isinstance(module, nn.modules.loss._Loss) and any(True for _ in module.parameters()):
            found[name] = "is a loss, which is computed with all digits"
        elif keeps_norms and module is not model and _has_only_vectors(module):
            found[name] = "has vectors alone, which scale or shift"
    for glob in recipe.float32:
        if glob not in matched and glob not in NORM_GLOBS:
            raise ValueError(
                f"recipe {recipe.name!r} keeps {glob!r} in float32, which is the name of no module of the model and of "
                "no class of its modules without children; globs are matched against both"
            )
    return found


def _has_only_vectors(module: nn.Module) -> bool:
    """Return whether a layer that is none of torch's has vectors alone, whose products are element by element."""
    if get_original_class(module).__module__.startswith("torch.nn.") or any(True for _ in module.children()):
        return False
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return bool(own) and all(parameter.ndim <= 1 for parameter in own)


def list_float32_parameter_ids(model: nn.Module, kept: Container[str]) -> set[int]:
    """Return the ids of the parameters that stay float32, under any of their names."""
    inner = [module for name, module in model.named_modules() if is_inside_modules(name, kept)]
    return {id(p) for module in inner for p in module._parameters.values() if p is not None}


def assign_weight_updates(recipe: Recipe, model: nn.Module) -> dict[str, str | None]:
    """Return which weight update each parameter gets; None where the recipe leaves it to the optimizer.

    >>> from halfulp import recipes
    >>> assign_weight_updates(recipes.get("bf16-mixed"), nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)))
    {'0.weight': 'stochastic', '1.weight': 'kahan', '1.bias': 'kahan'}
    """
    names = [name for name, _ in model.named_parameters()]
    if recipe.weight_update is None or isinstance(recipe.weight_update, str):
        return dict.fromkeys(names, recipe.weight_update)
    found: dict[str, str | None] = {}
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        for glob, update in recipe.weight_update:
            if fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(type(module).__name__, glob):
                found[name] = update
                break
        else:
            globs = ", ".join(repr(glob) for glob, _ in recipe.weight_update)
            raise ValueError(
                f"recipe {recipe.name!r}: parameter {name!r} of {name_type(module)} matches none of {globs}; "
                "end the list with the glob '*'"
            )
    return found


def _is_module_matched_by_glob(glob: str, name: str, module: nn.Module) -> bool:
    """Return whether a glob matches a module's name, or the class of one without children: wrappers share names."""
    if fnmatch.fnmatchcase(name, glob):
        return True
    classes = () if any(True for _ in module.children()) else type(module).__mro__
    return any(fnmatch.fnmatchcase(kind.__name__, glob) for kind in classes)


_CONVOLUTION_CLASSES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RECURRENT_LAYERS = (nn.RNNBase, nn.RNNCellBase)
_LAYERS_WITH_PRODUCTS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.modules.conv._ConvNd, *_RECURRENT_LAYERS)


def describe_eight_bit_products(module: nn.Module) -> tuple[str | None, str]:
    """Return which products of a module ``matmul="fp8"`` makes 8-bit, and why not all.

    >>> describe_eight_bit_products(nn.Linear(32, 10))
    ('fp8 products', '32 x 10: units take multiples of 16, else fp8 is emulated')
    >>> describe_eight_bit_products(nn.Conv2d(3, 8, 3))
    (None, 'fp8 is for products that linear layers compute by their own forward')
    """
    # MultiheadAttention multiplies by its output layer without calling it.
    is_called = not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    if not is_called or find_eight_bit_forward(module) is None:
        words = "fp8 is for products that linear layers compute by their own forward"
        return None, words if isinstance(module, _LAYERS_WITH_PRODUCTS) else _explain_missing_narrow_product(module)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    sides = [module.in_features, module.out_features] if isinstance(module, nn.Linear) else list(weight.shape)
    words = f"{sides[0]} x {sides[1]}: units take multiples of {EIGHT_BIT_MATRIX_SIDE_MULTIPLE}, else fp8 is emulated"
    return "fp8 products", words if any(side % EIGHT_BIT_MATRIX_SIDE_MULTIPLE for side in sides) else ""


def has_rounded_operands(recipe: Recipe, name: str, module: nn.Module) -> bool:
    """Return whether a recipe rounds a module's operands: of linear layers and convolutions that it does not exempt."""
    layer = isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and "weight" in module._parameters
    if (
        not recipe.operand_format
        or not layer
        or any(_is_module_matched_by_glob(glob, name, module) for glob in recipe.float32)
    ):
        return False
    # Block formats replace torch's own forward, so that a class or an object with another one is left as it is.
    forward = vars(module).get("forward")
    is_plain = forward is None or hasattr(forward, "quantize_in_example_blocks")
    is_torchs = get_original_class(module).forward in {kind.forward for kind in (nn.Linear, *_CONVOLUTION_CLASSES)}
    return recipe.operand_format not in block_names() or (is_plain and is_torchs)


def _explain_missing_narrow_product(module: nn.Module) -> str:
    """Describe a module that is none of torch's layers that multiply."""
    return "no product" if type(module).__module__.startswith("torch.nn.") else "only where its forward multiplies"


@dataclasses.dataclass(frozen=True)
class ModulePlan:
    """The planned conversion of one module's own parameters.

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
    """The conversion that `explain` describes; ``print`` shows a table, alike modules as one row.

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
        rows = [("module", "class", "asked for", "gets", "why not"), *_make_plan_rows(self.modules)]
        size = f"{self.bytes_before:,} bytes of parameters become {self.bytes_after:,}."
        return "\n".join([self.recipe.explain(), *align_columns(rows), size])


def explain(model: nn.Module, recipe: Recipe | str) -> Explanation:
    """Report what `convert` would do to a model, module by module; nothing is changed.

    Args:
        model: with float32 parameters.
        recipe: a Recipe or the name of one.

    Raises:
        ValueError: what `convert` would refuse: an unknown recipe, a glob that matches nothing, parameters without a
            shape yet.
        TypeError: parameters that are not float32, or no module.

    >>> model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.LayerNorm(4))
    >>> print(explain(model, "bf16-kahan"))
    bf16-kahan: bfloat16 with a 16-bit residual
      param_dtype: bfloat16
      weight_update: kahan, with a second 16-bit number per weight that keeps what rounding dropped
      float32: *Norm*
    module  class      asked for        gets             why not
    0       Linear     bfloat16, kahan  bfloat16, kahan
    2       LayerNorm  bfloat16, kahan  float32          matches '*Norm*'; float32 needs no weight update
    96 bytes of parameters become 64.
    """
    recipe = _catalog.get(recipe)
    check_float32_model(model)
    float32_modules = find_float32_modules_with_reasons(model, recipe)
    keeps, updates = list_float32_parameter_ids(model, float32_modules), assign_weight_updates(recipe, model)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    given = recipe, float32_modules, keeps, updates, first
    plans = tuple(_plan_module(name, module, *given) for name, module in model.named_modules())
    before = sum(4 * p.numel() for p in model.parameters())
    dtype: torch.dtype = getattr(torch, recipe.payload or recipe.param_dtype or "float32")
    size = dtype.itemsize * (recipe.components or 1)
    after = sum(p.numel() * (4 if id(p) in keeps else size) for p in model.parameters())
    return Explanation(recipe, plans, before, after)


def _plan_module(
    name: str,
    module: nn.Module,
    recipe: Recipe,
    float32_modules: dict[str, str],
    keeps: set[int],
    updates: dict[str, str | None],
    first: dict[int, str],
) -> ModulePlan:
    """Return the plan of a module's own parameters; tied ones are another's, under the first name."""
    own = {key: p for key, p in module._parameters.items() if p is not None}
    why_kept = float32_modules.get(name, "")
    if not why_kept and is_inside_modules(name, float32_modules):
        outer = next(outer_name for outer_name in float32_modules if is_inside_modules(name, {outer_name}))
        why_kept = f"in {outer!r}, which {float32_modules[outer]}"
    if not own:
        return ModulePlan(name, type(module).__name__, 0, "", "float32" if why_kept else "", None, None, why_kept)
    names = {key: first[id(p)] for key, p in own.items()}
    tied = {key: other for key, other in names.items() if other != (f"{name}.{key}" if name else key)}
    stays = [key for key, p in sorted(own.items()) if id(p) in keeps]
    if stays and not why_kept:
        why_kept = f"shares {quote(stays)} with a module that stays float32"
    wanted = {updates[other] for other in names.values()} - {None}
    stepped = [key for key, p in own.items() if key not in tied and key not in stays and p.requires_grad]
    got = {updates[names[key]] for key in stepped} - {None}
    products, why_no_product = _describe_narrow_products(recipe, name, module)
    storage = recipe.param_dtype or "float32"
    if recipe.components:
        storage = f"{recipe.components} x {recipe.param_dtype}"
    elif recipe.payload:
        storage = f"{recipe.payload} payload x scale"
    elif recipe.format:
        storage = f"float32 with values of {recipe.format}"
    held_as = storage if not stays else "float32" if len(stays) == len(own) else f"{storage}, {quote(stays)} float32"
    formats = {"operands": recipe.operand_format, "gradients": recipe.gradient_format}
    asked = [f"{recipe.matmul} products"] if recipe.matmul else []
    asked += [f"{what} in {format}" for what, format in formats.items() if format]
    reasons = [why_kept, *(f"{key!r} is {other!r}" for key, other in tied.items())]
    frozen = [key for key, p in own.items() if not p.requires_grad]
    if frozen:
        reasons.append("frozen" if len(frozen) == len(own) else f"{quote(frozen)} frozen")
    if wanted and any(own[key].requires_grad and key not in tied for key in stays):
        reasons.append("float32 needs no weight update")
    reasons.append(why_no_product)
    return ModulePlan(
        name,
        type(module).__name__,
        sum(p.numel() for key, p in own.items() if key not in tied),
        ", ".join([storage, *sorted(map(str, wanted)), *asked]),
        held_as,
        ", ".join(sorted(map(str, got))) or None,
        products,
        "; ".join(filter(None, reasons)),
    )


def _describe_narrow_products(recipe: Recipe, name: str, module: nn.Module) -> tuple[str | None, str]:
    """Return which products of a module are narrow, and why not all."""
    if recipe.matmul:
        return describe_eight_bit_products(module)
    narrow, why = [], ""
    if has_rounded_operands(recipe, name, module):
        narrow.append(f"operands in {recipe.operand_format}")
    elif recipe.operand_format:
        why = "operands are rounded in linear layers and convolutions that are not exempt"
        why += ", by torch's own forward" if recipe.operand_format in block_names() else ""
    if recipe.gradient_format and isinstance(module, _LAYERS_WITH_PRODUCTS):
        narrow.append(f"gradients in {recipe.gradient_format}")
    elif recipe.gradient_format:
        why = _explain_missing_narrow_product(module)
    return ", ".join(narrow) or None, why


def _make_plan_rows(plans: Iterable[ModulePlan]) -> list[tuple[str, ...]]:
    """Return a row for each module that gets something; those that differ in numbers alone share one."""
    grouped: dict[tuple[str, ...], list[ModulePlan]] = {}
    for plan in plans:
        if plan.held_as:
            # Names in the reasons of alike modules differ in numbers, too.
            why = re.sub(r"(?<=[.'])\d+(?=[.'])", "*", plan.why)
            grouped.setdefault((make_name_pattern(plan.name), plan.kind, plan.asked, plan.gets, why), []).append(plan)
    return [
        (group[0].name or "(the model)", *words[1:4], group[0].why)
        if len(group) == 1
        else (f"{words[0]} ({len(group)})", *words[1:])
        for words, group in grouped.items()
    ]
