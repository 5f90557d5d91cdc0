"""The named recipes."""

from typing import Any

from .._names import enter, unknown
from ._recipe import Recipe


def _bf16(suffix: str, description: str, **fields: Any) -> Recipe:
    return Recipe(name=f"bf16{suffix}", description=description, param_dtype="bfloat16", **fields)


def _fp16(suffix: str, description: str, **fields: Any) -> Recipe:
    return Recipe(name=f"fp16{suffix}", description=description, param_dtype="float16", **fields)


def _scaled_recipe(name: str, description: str, **fields: Any) -> Recipe:
    return Recipe(name=name, description=description, payload="float16", **fields)


def _few_bits(format: str, bits: int, update: str) -> Recipe:
    suffix = "" if update == "nearest" else f"-{update}"
    return Recipe(
        name=f"{format}{suffix}",
        description=f"{bits}-bit floats everywhere, {update} weight updates",
        weight_update="kahan-literal" if update == "kahan" else update,
        state_dtype=format,
        format=format,
        emulate=format,
    )


def _gradients(format: str, name: str, words: str, scale: str | float | None, rounding: str = "nearest") -> Recipe:
    """Return the recipe in float32 but for the gradients that products read and make."""
    return Recipe(
        name=f"{format}-{name}",
        description=f"float32 weights, gradients rounded to {format}, {words}",
        gradient_format=format,
        gradient_scale=scale,
        gradient_rounding=rounding,
    )


_SCALES = (
    ("none", "no scale", None),
    ("dynamic", "one scale, halved by an overflow", "dynamic"),
    ("adaptive", "a scale per layer by its largest gradient", "amax"),
)
_POLICIES = (
    ("measured", "one scale by the largest of all gradients", "measured"),
    ("underflow-bound", "a scale per layer by the papers' underflow bound", "underflow-bound"),
    ("element-wise", "a scale per layer by the products of elements", "element-wise"),
    ("abs-range", "a scale per layer by the range of its operands", "abs-range"),
)

_MIX = (("*Embedding*", "kahan"), ("*Norm*", "kahan"), ("*", "stochastic"))

_RECIPES = (
    Recipe(name="fp32", description="float32 everywhere, the reference"),
    Recipe(name="fp32-twin", description="float32 from a start that differs by 1e-7, the control", perturb=1e-7),
    _bf16("", "bfloat16, updates rounded to nearest", weight_update="nearest"),
    _bf16("-stochastic", "bfloat16, updates rounded stochastically", weight_update="stochastic"),
    _bf16("-kahan", "bfloat16 with a 16-bit residual", weight_update="kahan"),
    _bf16("-kahan-stochastic", "bfloat16 with a residual and stochastic rounding", weight_update="kahan-stochastic"),
    _bf16("-split", "bfloat16 plus 16 bits: exact float32 weights", weight_update="split"),
    _bf16("-split8", "bfloat16 plus 8 bits, 8-bit moments", weight_update="split8", state_dtype="8bit"),
    _bf16("-feedback", "bfloat16, the lost part goes into the first moment", weight_update="feedback"),
    _bf16("-master", "bfloat16 with a float32 master copy", weight_update="master"),
    _bf16("-mixed", "Kahan on embeddings and norms, stochastic elsewhere", weight_update=_MIX, float32=()),
    _bf16(
        "-mc2",
        "Collage: weights and second moment as two bfloat16 each",
        weight_update="components",
        state_dtype="bfloat16x2",
    ),
    _fp16("", "float16, no scale, updates rounded to nearest", weight_update="nearest"),
    _fp16("-kahan", "float16 with a 16-bit residual", weight_update="kahan"),
    _fp16("-split8", "float16 plus 8 bits, 8-bit moments", weight_update="split8", state_dtype="8bit"),
    _fp16("-master", "float16 with a float32 master copy", weight_update="master"),
    _fp16("-mc2", "MCTensor: weights as two float16 components, computed with as such", components=2),
    _fp16("-mc3", "MCTensor: weights as three float16 components, computed with as such", components=3),
    _scaled_recipe(
        "scaled-fp16-master",
        "Scalify, row 1: float16 with scales, float32 masters",
        weight_update="master",
        state_dtype="float32",
    ),
    _scaled_recipe(
        "scaled-fp16",
        "Scalify, row 2: float16 with scales, weights too",
        weight_update="nearest",
        state_dtype="float32",
    ),
    _scaled_recipe(
        "scaled-fp8",
        "Scalify, row 3: the same, products in eight bits",
        matmul="fp8",
        weight_update="nearest",
        state_dtype="float32",
    ),
    _scaled_recipe(
        "scaled-fp8-state16",
        "Scalify, row 4: the same, moments float16 with scales",
        matmul="fp8",
        weight_update="nearest",
        state_dtype="float16",
    ),
    _scaled_recipe(
        "scaled-fp16-kahan",
        "float16 with scales, moments too, a residual per weight",
        weight_update="kahan",
        state_dtype="float16",
    ),
    _scaled_recipe(
        "scaled-fp16-stochastic",
        "float16 with scales, moments too, stochastic updates",
        weight_update="stochastic",
        state_dtype="float16",
    ),
    _scaled_recipe(
        "scaled-fp8-stochastic",
        "the same, products and moments in eight bits",
        matmul="fp8",
        weight_update="stochastic",
        state_dtype="fp8",
    ),
    Recipe(name="fp64", description="float64 everywhere, a wider reference", param_dtype="float64"),
    Recipe(
        name="fp64-mc2", description="MCTensor: weights as two float64 components", param_dtype="float64", components=2
    ),
    *(
        _few_bits(format, bits, update)
        for format, bits in (("e8m5", 14), ("e8m3", 12), ("e8m1", 10))
        for update in ("nearest", "stochastic", "kahan", "kahan-stochastic")
    ),
    *(_gradients("fp16", *choice) for choice in _SCALES),
    *(
        _gradients("fp16", f"constant-{scale}", f"one scale, {scale}", scale)
        for scale in (1, 16, 128, 1024, 4096, 16384)
    ),
    *(_gradients("fp16", *choice) for choice in _POLICIES),
    *(_gradients("e5m2", *choice) for choice in _SCALES),
    _gradients("e5m2", "adaptive-stochastic", "stochastically, a scale per layer", "amax", "stochastic"),
    _gradients("e4m3fn", *_SCALES[-1]),
    Recipe(
        name="mixed-precision",
        description="Micikevicius et al.: float16 operands and gradients, float32 masters, one loss scale",
        operand_format="fp16",
        gradient_format="fp16",
        gradient_scale="dynamic",
    ),
    Recipe(
        name="fp8-training",
        description="Mellempudi et al.: e5m2 operands and stochastic gradients, stochastic float16 masters, a floor",
        operand_format="e5m2",
        gradient_format="e5m2",
        gradient_rounding="stochastic",
        gradient_scale="rising-floor",
        format="fp16",
        weight_update="stochastic",
    ),
    *(
        Recipe(
            name=name,
            description=f"operands of all products in blocks of {words}, to nearest, float32 weights and sums",
            operand_format=format,
        )
        for name, format, words in (
            ("mxfp8", "mxfp8_e4m3", "32 e4m3 with a power of two"),
            ("nvfp4", "nvfp4", "16 e2m1 with an e4m3 scale"),
        )
    ),
)
_CATALOG = {recipe.name: recipe for recipe in _RECIPES}


def names() -> list[str]:
    """Return the names of all recipes in the catalogue.

    >>> names()[:4]
    ['fp32', 'fp32-twin', 'bf16', 'bf16-stochastic']
    """
    return list(_CATALOG)


def get(name: str | Recipe) -> Recipe:
    """Return the recipe of that name; a Recipe is returned as it is.

    Raises:
        ValueError: no recipe has that name; the message lists near ones.

    >>> get("bf16-kahan").weight_update
    'kahan'
    """
    if isinstance(name, Recipe):
        return name
    if name not in _CATALOG:
        raise ValueError(unknown("recipe", name, _CATALOG))
    return _CATALOG[name]


def register(recipe: Recipe) -> Recipe:
    """Make a recipe known by its name: to `halfulp.convert`, to comparisons and to the command line.

    Returns:
        The recipe.

    Raises:
        TypeError: it is no Recipe.
        ValueError: another recipe has the name, or this one has no description.

    >>> register(Recipe(name="bf16-kahan", description="another", param_dtype="bfloat16"))
    Traceback (most recent call last):
    ...
    ValueError: recipe 'bf16-kahan' exists already: choose another name
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"a recipe is a hu.Recipe, got {type(recipe).__name__}")
    enter("recipe", _CATALOG, recipe.name, recipe, recipe.description)
    return recipe
