"""Recipe: which formats and weight updates a training uses, as frozen data, and the named ones."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .._names import describe_unknown_name, read_registered_descriptions, register_entry
from ..formats import block_names
from ..formats import get as get_format

# Pairs from glob to weight update.
UpdateByGlob = tuple[tuple[str, str], ...]

PARAMETER_DTYPES = ("bfloat16", "float16", "float32", "float64")
STATE_DTYPES = ("bfloat16", "bfloat16x2", "float16", "float32", "8bit", "4bit", "fp8")
PAYLOAD_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32")
MATMUL_FORMATS = ("fp8",)

# BatchNorm, LayerNorm, GroupNorm, InstanceNorm, RMSNorm of torch, and what other libraries call so.
NORM_GLOBS = ("*Norm*",)

GRADIENT_ROUNDINGS = ("nearest", "stochastic")
_FIELDS_NAMING_FORMATS = ("format", "emulate", "operand_format", "gradient_format")

# The weight updates, each with what `Recipe.explain` says of it.
DESCRIPTION_BY_WEIGHT_UPDATE = {
    "nearest": "rounded to the nearest value, so that a small update is lost",
    "stochastic": "rounded up or down at random, right on average",
    "kahan": "with a second 16-bit number per weight that keeps what rounding dropped",
    "kahan-literal": "by Kahan's algorithm, all of it rounded to nearest",
    "kahan-stochastic": "with a second number that keeps what rounding dropped, and stochastic rounding",
    "split": "with the missing 16 bits beside it, together an exact float32",
    "split-stochastic": "with the missing 16 bits beside it, their last one rounded at random",
    "split8": "with 8 more bits beside it, stored by stochastic rounding",
    "feedback": "rounded at random, the lost part put back into the first moment",
    "master": "as a copy of a float32 master weight",
    "components": "as the first of two components of that type, which take the update exactly cut",
    "components-3": "as the first of three components of that type, which take the update exactly cut",
}

# The policies of gradient scales, each with what `Recipe.explain` says of it.
DESCRIPTION_BY_GRADIENT_SCALE = {
    "amax": "each layer has a scale of its own, by the largest gradient seen lately",
    "underflow-bound": "each layer has a scale of its own, so that few underflow if gradients are Gaussian",
    "element-wise": "each layer has a scale of its own, so that no product of two elements underflows",
    "abs-range": "each layer has a scale of its own, so that the product of the smallest operands does not underflow",
    "constant": "all have one scale, 65536",
    "measured": "all have one scale, by the largest gradient of all",
    "dynamic": "all have one scale, halved after an overflow and doubled after 2000 steps without",
    "rising-floor": "all have one scale, halved after an overflow, above a least one that rises by schedule",
}
# The fields of a recipe that are described by names: their registries and the library's own descriptions.
_REGISTRY_AND_DESCRIPTIONS_BY_FIELD = {
    "weight_update": ("weight update", DESCRIPTION_BY_WEIGHT_UPDATE),
    "gradient_scale": ("policy", DESCRIPTION_BY_GRADIENT_SCALE),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The choices that turn a float32 training into one in fewer bits; plain data, no behaviour.

    Args:
        name: What tables call it.
        description: One line for a person.
        param_dtype: ``"bfloat16"`` or ``"float16"``, by name or dtype; None leaves float32. Also ``"float64"``, for
            a reference, and ``"float32"`` where there are ``components``: these run on ``torch.optim``.
        weight_update: One name for every parameter, or ordered pairs (or a dict) from glob to name. A glob
            is matched against the parameter's qualified name (``"blocks.0.up.weight"``) and against the class
            of the module that holds it (``"Embedding"``, ``"*Norm"``); the first match wins.
        payload: What parameters, activations and gradients are stored in, each tensor with a scale (`hu.scalify`):
            ``"float16"``, ``"bfloat16"``, ``"float8_e4m3fn"``, ``"float8_e5m2"`` or ``"float32"``; in the place of
            ``param_dtype``. ``state_dtype`` is then ``"float32"``, ``"float16"`` or ``"fp8"``, with scales too.
        matmul: ``"fp8"`` with ``payload``: linear layers multiply e4m3fn operands forward and e5m2 gradients backward.
        components: The parameters as sums of so many components of ``param_dtype``, which forward and backward compute
            with; excludes ``weight_update`` and ``state_dtype``.
        state_dtype: What the optimizer's moments are stored in: ``"bfloat16"``, ``"float32"``, ``"8bit"``,
            ``"bfloat16x2"`` (second moments as two bfloat16, the others as one), or the same name as ``format``; None
            is the optimizer's own choice. States that a rule uses to the last digits (``z`` of schedule-free ones)
            stay float32.
        format: Name of a format whose values the float32 parameters are held to.
        emulate: Name of a format to which every operator's output is rounded, forward and backward.
        operand_format: Name of a format to which linear layers and convolutions round their inputs, weights and results
            in the forward pass, to nearest, with float32 sums between, but for modules that match ``float32``. The
            parameters stay the wide master copy. Under a block format (``"mxfp8_e4m3"``, ``"nvfp4"``) it is the
            operands of all three products, forward and backward, in blocks along what each sums over, in layers with
            torch's own forward; results stay float32, and gradients have no gradients.
        gradient_format: Name of a format to which every gradient that a product (a linear layer, a convolution,
            attention) reads or makes is rounded, as a tensor core would: narrow operands, float32 sums, a narrow
            result. Everything else stays float32. Such a training goes through a `halfulp.AdaptiveGradScaler`.
        gradient_scale: With ``gradient_format``: what gradients are multiplied by on their way. None is nothing, a
            number a constant power of two from 2^-30 to 2^60, a name a policy of `halfulp.gradients`: ``"amax"``,
            ``"underflow-bound"``, ``"element-wise"``, ``"abs-range"``, ``"measured"``, ``"dynamic"``,
            ``"rising-floor"``, ``"constant"``.
        gradient_rounding: With ``gradient_format``: ``"nearest"``, or ``"stochastic"``, right on average.
        float32: With ``param_dtype`` of 16 bits, or an ``operand_format``: which modules keep float32 parameters and
            compute in float32, as globs
            over their qualified names (with all that is inside) and over the names of their classes and base classes
            (of modules that hold no others). By default every norm; ``()`` for none.
        perturb: In float32, each starting weight is multiplied by 1 + perturb * N(0, 1): the control that shows how far
            two runs drift apart by themselves.

    Raises:
        ValueError: an unknown name, or choices that exclude each other; the message lists near names.
        TypeError: weight updates that are neither a name nor pairs.

    >>> Recipe(name="mine", param_dtype="bfloat16", weight_update="kahan").replace(name="yours").name
    'yours'
    """

    name: str
    description: str = ""
    param_dtype: str | None = None
    weight_update: str | UpdateByGlob | None = None
    payload: str | None = None
    matmul: str | None = None
    components: int | None = None
    state_dtype: str | None = None
    format: str | None = None
    emulate: str | None = None
    float32: tuple[str, ...] = NORM_GLOBS
    perturb: float = 0.0
    operand_format: str | None = None
    gradient_format: str | None = None
    gradient_scale: str | float | None = None
    gradient_rounding: str = "nearest"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"a recipe needs a name, got {self.name!r}")
        self._normalize_fields()
        scale = self.gradient_scale
        states = (*_list_all_names(STATE_DTYPES, "state store"), *((self.format,) if self.format else ()))
        policies = _list_all_names(DESCRIPTION_BY_GRADIENT_SCALE, "policy")
        named: tuple[tuple[str, tuple[str, ...], tuple[str | None, ...]], ...] = (
            ("param_dtype", PARAMETER_DTYPES, (self.param_dtype,)),
            ("state_dtype", states, (self.state_dtype,)),
            (
                "weight update",
                _list_all_names(DESCRIPTION_BY_WEIGHT_UPDATE, "weight update"),
                self.list_weight_update_names(),
            ),
            ("payload", PAYLOAD_DTYPES, (self.payload,)),
            ("matmul", MATMUL_FORMATS, (self.matmul,)),
            ("gradient rounding", GRADIENT_ROUNDINGS, (self.gradient_rounding,)),
            ("gradient scale", policies, (scale,) if isinstance(scale, str) else ()),
        )
        for kind, allowed, given in named:
            for name in given:
                if name not in (None, *allowed):
                    raise ValueError(describe_unknown_name(kind, name, allowed))
        for field in _FIELDS_NAMING_FORMATS:
            name = getattr(self, field)
            if name not in (None, *block_names()):
                get_format(name)
            elif name is not None and field != "operand_format":
                raise ValueError(
                    f"{name} is a block format, whose scales products read: it goes with operand_format= alone"
                )
        if not isinstance(scale, str | None) and not (
            isinstance(scale, float) and math.frexp(scale)[0] == 0.5 and 2.0**-30 <= scale <= 2.0**60
        ):
            raise ValueError(
                f"gradient_scale={scale!r}: allowed are a power of two from 2^-30 to 2^60, or a policy: "
                f"{', '.join(policies)}"
            )
        if self.components not in (None, 1, 2, 3, 4) or isinstance(self.components, bool):
            raise ValueError(f"components={self.components!r}: allowed are 1 to 4")
        if not isinstance(self.perturb, int | float) or not math.isfinite(self.perturb) or self.perturb < 0:
            raise ValueError(f"perturb is a finite number >= 0, got {self.perturb!r}")
        for why in self._describe_conflicts():
            raise ValueError(f"recipe {self.name!r} has {why}")

    def _normalize_fields(self) -> None:
        """Hold dtypes and formats as their names, pairs and globs as tuples, a whole number as a float."""
        given = {**vars(self)}
        for field in ("param_dtype", "payload", "state_dtype", *_FIELDS_NAMING_FORMATS):
            if given[field] is not None and not isinstance(given[field], str):
                given[field] = getattr(given[field], "name", None) or str(given[field]).removeprefix("torch.")
        if isinstance(given["gradient_scale"], int) and not isinstance(given["gradient_scale"], bool):
            given["gradient_scale"] = float(given["gradient_scale"])
        globs, pairs = given["float32"], given["weight_update"]
        if not isinstance(globs, list | tuple) or not all(isinstance(glob, str) and glob for glob in globs):
            raise ValueError(f"float32={globs!r}: give a list of globs over names of modules and classes, () for none")
        given["float32"] = tuple(globs)
        if pairs is not None and not isinstance(pairs, str):
            try:
                pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
                given["weight_update"] = tuple((str(glob), str(name)) for glob, name in pairs)
            except (TypeError, ValueError):
                raise TypeError(
                    f"weight_update={pairs!r}: give a name, pairs of a glob and a name, or a dict from glob to name"
                ) from None
        vars(self).update(given)

    def _describe_conflicts(self) -> Iterator[str]:
        """Yield which fields cannot be together, and what to do."""
        updates, rounds_randomly = self.list_weight_update_names(), self.gradient_rounding != "nearest"
        wide = self.param_dtype or self.payload or self.emulate
        leave = "leave out param_dtype, payload, components and emulate"
        if self.perturb and (wide or self.format):
            yield "perturb=, which shows how far float32 itself drifts: leave out the formats of parameters"
        if self.format and self.param_dtype:
            yield f"param_dtype and format={self.format!r}, which lives inside float32 parameters: give one of the two"
        if updates and not (self.format or self.param_dtype or self.payload):
            yield "a weight update of float32 parameters, which lose nothing: give param_dtype=, payload= or format="
        if self.components and not self.param_dtype:
            yield f"components={self.components} of no type: give param_dtype= too"
        if self.param_dtype == "float32" and not self.components:
            yield "param_dtype='float32', which is for components=: leave it out for plain float32 parameters"
        if self.is_stepped_by_torch and (updates or self.state_dtype or self.emulate):
            yield (
                "components or float64, stepped by torch.optim, which takes no weight_update, state_dtype or emulate: "
                "leave them out; weight_update='components' keeps components in the optimizer instead"
            )
        if self.matmul and not self.payload:
            yield f"matmul={self.matmul!r}, whose operands carry scales: give payload= too"
        if self.state_dtype in ("float16", "fp8") and not self.payload:
            yield f"state_dtype={self.state_dtype!r}, which needs a scale: give payload= too"
        if self.payload and (self.param_dtype or self.format or self.emulate):
            yield "a payload, which goes with neither param_dtype, format, emulate nor components: leave them out"
        if (self.gradient_scale is not None or rounds_randomly) and not self.gradient_format:
            yield "float32 gradients, which need no gradient_scale and no gradient_rounding: give gradient_format= too"
        if self.operand_format and wide:
            rounds = f"operand_format={self.operand_format!r}, which rounds what products read of float32 parameters"
            yield f"{rounds}: {leave}"
        if self.gradient_format and wide:
            yield f"gradient_format={self.gradient_format!r}, which rounds gradients of float32 parameters: {leave}"
        if self.gradient_format and self.operand_format in block_names():
            blocks = f"operand_format={self.operand_format!r}, whose blocks the backward products read too"
            yield f"{blocks}: leave out gradient_format"

    @property
    def is_narrow(self) -> bool:
        """Whether parameters become plain tensors of 16 bits."""
        return self.param_dtype in ("bfloat16", "float16") and self.components is None

    @property
    def is_stepped_by_torch(self) -> bool:
        """Whether ``torch.optim`` steps it: parameters of several components, or of float64."""
        return self.components is not None or self.param_dtype == "float64"

    def list_weight_update_names(self) -> tuple[str, ...]:
        """Return the weight updates that this recipe uses, in order, without repeats."""
        if self.weight_update is None:
            return ()
        pairs = (("*", self.weight_update),) if isinstance(self.weight_update, str) else self.weight_update
        return tuple(dict.fromkeys(name for _, name in pairs))

    def replace(self, **changes: Any) -> Recipe:
        """Return a copy with some fields changed; an unknown field is a ValueError with near names."""
        _refuse_unknown_fields(changes)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold; ``Recipe.from_dict`` is its inverse."""
        data = {**dataclasses.asdict(self), "float32": list(self.float32)}
        if isinstance(self.weight_update, tuple):
            data["weight_update"] = [list(pair) for pair in self.weight_update]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Return the recipe that ``to_dict`` described.

        >>> Recipe.from_dict({"name": "x", "param_dtyp": "bfloat16"})
        Traceback (most recent call last):
        ValueError: unknown field of a recipe 'param_dtyp'; did you mean 'param_dtype'? Allowed: ...
        """
        _refuse_unknown_fields(data)
        if "name" not in data:
            raise ValueError(f"a recipe needs a name, got the fields {', '.join(data) or 'none'}")
        return cls(**data)

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Return the recipe that ``to_json`` wrote; text that is not a JSON object is a ValueError."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not the JSON of a recipe: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"not the JSON of a recipe: expected an object, got {type(data).__name__}")
        return cls.from_dict(data)

    def explain(self) -> str:
        """Return the description and, a line each, the fields that are not left at their defaults, in words.

        >>> import halfulp.recipes
        >>> print(halfulp.recipes.get("bf16-kahan").explain())
        bf16-kahan: bfloat16 with a 16-bit residual
          param_dtype: bfloat16
          weight_update: kahan, with a second 16-bit number per weight that keeps what rounding dropped
          float32: *Norm*
        """
        lines = [f"{self.name}: {self.description or 'a recipe of your own'}"]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            # The default of float32, every norm, means something in these recipes alone.
            if value != field.default or (field.name == "float32" and (self.is_narrow or self.operand_format)):
                lines += [f"  {field.name}: {said}" for said in _describe_field(field.name, value)]
        return "\n".join(lines)


def _describe_field(field: str, value: Any) -> list[str]:
    """Return a field's value in words; pairs of globs and weight updates one by one."""
    if field == "weight_update" and isinstance(value, tuple):
        return [f"{glob!r} {said}" for glob, name in value for said in _describe_field(field, name)]
    if isinstance(value, tuple):
        written = ", ".join(value) or "none"
    else:
        written = f"{value:g}" if isinstance(value, float) else str(value)
    registry, words = _REGISTRY_AND_DESCRIPTIONS_BY_FIELD.get(field, ("", {}))
    return [", ".join(filter(None, (written, {**read_registered_descriptions(registry), **words}.get(value))))]


def _list_all_names(names: Iterable[str], kind: str) -> tuple[str, ...]:
    """Return the library's names followed by those that were registered."""
    return tuple({**dict.fromkeys(names), **read_registered_descriptions(kind)})


def _refuse_unknown_fields(data: Mapping[str, Any]) -> None:
    allowed = [field.name for field in dataclasses.fields(Recipe)]
    for key in data:
        if key not in allowed:
            raise ValueError(describe_unknown_name("field of a recipe", key, allowed))


# Suffix of the name, words and policy of recipes whose gradients are rounded to a format, and the formats that have it.
_GRADIENT_RECIPE_VARIANTS: tuple[tuple[str, str, str | float | None, tuple[str, ...]], ...] = (
    ("none", "no scale", None, ("fp16", "e5m2")),
    ("dynamic", "one scale, halved by an overflow", "dynamic", ("fp16", "e5m2")),
    ("adaptive", "a scale per layer by its largest gradient", "amax", ("fp16", "e5m2", "e4m3fn")),
    ("adaptive-stochastic", "stochastically, a scale per layer", "amax", ("e5m2",)),
    *((f"constant-{scale}", f"one scale, {scale}", scale, ("fp16",)) for scale in (1, 16, 128, 1024, 4096, 16384)),
    ("measured", "one scale by the largest of all gradients", "measured", ("fp16",)),
    ("underflow-bound", "a scale per layer by the papers' underflow bound", "underflow-bound", ("fp16",)),
    ("element-wise", "a scale per layer by the products of elements", "element-wise", ("fp16",)),
    ("abs-range", "a scale per layer by the range of its operands", "abs-range", ("fp16",)),
)


def _make_catalogue() -> dict[str, Recipe]:
    """Return the recipes of the catalogue by name, in its order."""
    made: dict[str, Recipe] = {}

    def add(name: str, description: str, **fields: Any) -> None:
        made[name] = Recipe(name=name, description=description, **fields)

    bf16, fp16 = functools.partial(add, param_dtype="bfloat16"), functools.partial(add, param_dtype="float16")
    mixed = (("*Embedding*", "kahan"), ("*Norm*", "kahan"), ("*", "stochastic"))
    add("fp32", "float32 everywhere, the reference")
    add("fp32-twin", "float32 from a start that differs by 1e-7, the control", perturb=1e-7)
    bf16("bf16", "bfloat16, updates rounded to nearest", weight_update="nearest")
    bf16("bf16-stochastic", "bfloat16, updates rounded stochastically", weight_update="stochastic")
    bf16("bf16-kahan", "bfloat16 with a 16-bit residual", weight_update="kahan")
    bf16("bf16-kahan-stochastic", "bfloat16 with a residual and stochastic rounding", weight_update="kahan-stochastic")
    bf16("bf16-split", "bfloat16 plus 16 bits: exact float32 weights", weight_update="split")
    bf16("bf16-split8", "bfloat16 plus 8 bits, 8-bit moments", weight_update="split8", state_dtype="8bit")
    bf16("bf16-feedback", "bfloat16, the lost part goes into the first moment", weight_update="feedback")
    bf16("bf16-master", "bfloat16 with a float32 master copy", weight_update="master")
    # The mix of updates has one for norms.
    bf16("bf16-mixed", "Kahan on embeddings and norms, stochastic elsewhere", weight_update=mixed, float32=())
    words = "Collage: weights and second moment as two bfloat16 each"
    bf16("bf16-mc2", words, weight_update="components", state_dtype="bfloat16x2")
    fp16("fp16", "float16, no scale, updates rounded to nearest", weight_update="nearest")
    fp16("fp16-kahan", "float16 with a 16-bit residual", weight_update="kahan")
    fp16("fp16-split8", "float16 plus 8 bits, 8-bit moments", weight_update="split8", state_dtype="8bit")
    fp16("fp16-master", "float16 with a float32 master copy", weight_update="master")
    fp16("fp16-mc2", "MCTensor: weights as two float16 components, computed with as such", components=2)
    fp16("fp16-mc3", "MCTensor: weights as three float16 components, computed with as such", components=3)
    # Scalify's rows, and more of their kind.
    for name, words, update, states in (
        ("scaled-fp16-master", "Scalify, row 1: float16 with scales, float32 masters", "master", "float32"),
        ("scaled-fp16", "Scalify, row 2: float16 with scales, weights too", "nearest", "float32"),
        ("scaled-fp8", "Scalify, row 3: the same, products in eight bits", "nearest", "float32"),
        ("scaled-fp8-state16", "Scalify, row 4: the same, moments float16 with scales", "nearest", "float16"),
        ("scaled-fp16-kahan", "float16 with scales, moments too, a residual per weight", "kahan", "float16"),
        ("scaled-fp16-stochastic", "float16 with scales, moments too, stochastic updates", "stochastic", "float16"),
        ("scaled-fp8-stochastic", "the same, products and moments in eight bits", "stochastic", "fp8"),
    ):
        matmul = "fp8" if name.startswith("scaled-fp8") else None
        add(name, words, payload="float16", weight_update=update, state_dtype=states, matmul=matmul)
    add("fp64", "float64 everywhere, a wider reference", param_dtype="float64")
    add("fp64-mc2", "MCTensor: weights as two float64 components", param_dtype="float64", components=2)
    for format, bits in (("e8m5", 14), ("e8m3", 12), ("e8m1", 10)):
        everywhere = functools.partial(add, format=format, emulate=format, state_dtype=format)
        for suffix in ("", "-stochastic", "-kahan", "-kahan-stochastic"):
            update = suffix[1:] or "nearest"
            words = f"{bits}-bit floats everywhere, {update} weight updates"
            everywhere(format + suffix, words, weight_update="kahan-literal" if update == "kahan" else update)
    for format in ("fp16", "e5m2", "e4m3fn"):
        for suffix, words, scale, formats in _GRADIENT_RECIPE_VARIANTS:
            if format in formats:
                add(
                    f"{format}-{suffix}",
                    f"float32 weights, gradients rounded to {format}, {words}",
                    gradient_format=format,
                    gradient_scale=scale,
                    gradient_rounding="stochastic" if suffix.endswith("stochastic") else "nearest",
                )
    add(
        "mixed-precision",
        "Micikevicius et al.: float16 operands and gradients, float32 masters, one loss scale",
        operand_format="fp16",
        gradient_format="fp16",
        gradient_scale="dynamic",
    )
    add(
        "fp8-training",
        "Mellempudi et al.: e5m2 operands and stochastic gradients, stochastic float16 masters, a floor",
        operand_format="e5m2",
        gradient_format="e5m2",
        gradient_rounding="stochastic",
        gradient_scale="rising-floor",
        format="fp16",
        weight_update="stochastic",
    )
    for name, format, blocks in (
        ("mxfp8", "mxfp8_e4m3", "32 e4m3 with a power of two"),
        ("nvfp4", "nvfp4", "16 e2m1 with an e4m3 scale"),
    ):
        words = f"operands of all products in blocks of {blocks}, to nearest, float32 weights and sums"
        add(name, words, operand_format=format)
    return made


_RECIPES_BY_NAME = _make_catalogue()


def names() -> list[str]:
    """Return the names of all recipes in the catalogue.

    >>> names()[:4]
    ['fp32', 'fp32-twin', 'bf16', 'bf16-stochastic']
    """
    return list(_RECIPES_BY_NAME)


def get(name: str | Recipe) -> Recipe:
    """Return the recipe of that name; a Recipe is returned as it is.

    Raises:
        ValueError: no recipe has that name; the message lists near ones.

    >>> get("bf16-kahan").weight_update
    'kahan'
    """
    if isinstance(name, Recipe):
        return name
    if name not in _RECIPES_BY_NAME:
        raise ValueError(describe_unknown_name("recipe", name, _RECIPES_BY_NAME))
    return _RECIPES_BY_NAME[name]


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
    register_entry("recipe", _RECIPES_BY_NAME, recipe.name, recipe, recipe.description)
    return recipe
