"""Block formats as data, formats of one's own under a name, and all that have a name as rows of plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from .._names import register_entry
from ._catalog import FORMAT_BY_NAME, e2m1fn, e2m3fn, e3m2fn, e4m3fn, e5m2, e8m0, find_format, get
from ._format import Format

if TYPE_CHECKING:
    import torch

ScaleRounding = Literal["up", "floor", "nearest"]


@dataclass(frozen=True)
class BlockFormat:
    """Elements of one format in blocks that share one scale: ``value = payload * scale [* tensor scale]``.

    Elements saturate: a block's scale is chosen for its largest magnitude, so that what lies beyond is rounding.

    Args:
        name: What reports call it.
        element: Format of the payloads.
        scale: Format of the scales.
        block: Elements that share a scale, along the last dimension.
        tensor_scale: Whether a float32 scale of the whole tensor, ``amax / (element.max * scale.max)``, brings the
            blocks' scales into the range of ``scale``.
        scale_rounding: Which number of ``scale``'s a block gets. ``"up"``: the smallest that is at least
            ``amax / element.max``, so that no element saturates. ``"floor"``: ``2^(floor(log2 amax) -
            element.emax)``, as the OCP Microscaling specification v1.0 writes in section 6.3, which lets elements
            saturate. ``"nearest"``: the nearest to ``amax / element.max``, ties to even.

    Raises:
        ValueError: If a field does not fit the others.
        TypeError: If ``element`` or ``scale`` is no `Format`.

    >>> print(mxfp4)
    mxfp4: blocks of 32 e2m1fn with a scale in e8m0, 4.25 bits a value
    >>> print(nvfp4)
    nvfp4: blocks of 16 e2m1fn with a scale in e4m3fn, 4.5 bits a value, and a float32 scale per tensor
    """

    name: str
    element: Format
    scale: Format
    block: int
    tensor_scale: bool = False
    scale_rounding: ScaleRounding = "up"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a format's name is a non-empty string, got {self.name!r}")
        for field in ("element", "scale"):
            if not isinstance(getattr(self, field), Format):
                given = type(getattr(self, field)).__name__
                raise TypeError(f"{self.name}: {field} is a hu.Format (hu.formats.get gives one), got {given}")
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1:
            raise ValueError(f"{self.name}: block is a number of elements, 1 or more; got {self.block!r}")
        if not isinstance(self.tensor_scale, bool):
            raise ValueError(f"{self.name}: tensor_scale is True or False, got {self.tensor_scale!r}")
        if self.scale_rounding not in get_args(ScaleRounding):
            allowed = ", ".join(get_args(ScaleRounding))
            raise ValueError(f"{self.name}: scale_rounding is one of {allowed}; got {self.scale_rounding!r}")
        if self.scale_rounding == "floor" and self.scale.mantissa_bits:
            raise ValueError(
                f"{self.name}: scale_rounding='floor' gives powers of two, and {self.scale.name} has mantissa bits;"
                " take 'up' or 'nearest', or the scale e8m0"
            )
        formats = (self.element._key, self.scale._key)
        object.__setattr__(
            self, "_key", repr((self.name, *formats, self.block, self.tensor_scale, self.scale_rounding))
        )

    if TYPE_CHECKING:

        @property
        def _key(self) -> str: ...

    @property
    def bits_per_value(self) -> float:
        """Bits of an element with its share of the block's scale."""
        return self.element.bits + self.scale.bits / self.block

    def __str__(self) -> str:
        tail = ", and a float32 scale per tensor" if self.tensor_scale else ""
        return (
            f"{self.name}: blocks of {self.block} {self.element.name} with a scale in {self.scale.name},"
            f" {self.bits_per_value:g} bits a value{tail}"
        )


# OCP Microscaling formats v1.0, with scales rounded up: floor clips, and training was seen to diverge by it
# (arXiv 2506.08027).
mxfp8_e4m3: BlockFormat = BlockFormat("mxfp8_e4m3", e4m3fn, e8m0, 32)
mxfp8_e5m2: BlockFormat = BlockFormat("mxfp8_e5m2", e5m2, e8m0, 32)
mxfp6_e3m2: BlockFormat = BlockFormat("mxfp6_e3m2", e3m2fn, e8m0, 32)
mxfp6_e2m3: BlockFormat = BlockFormat("mxfp6_e2m3", e2m3fn, e8m0, 32)
mxfp4: BlockFormat = BlockFormat("mxfp4", e2m1fn, e8m0, 32)

# NVIDIA's FP4 (arXiv 2509.25149).
nvfp4: BlockFormat = BlockFormat("nvfp4", e2m1fn, e4m3fn, 16, tensor_scale=True, scale_rounding="nearest")

BLOCK_FORMAT_BY_NAME = {b.name: b for b in (mxfp8_e4m3, mxfp8_e5m2, mxfp6_e3m2, mxfp6_e2m3, mxfp4, nvfp4)}


def block_names() -> list[str]:
    """Return the names of the block formats.

    >>> block_names()
    ['mxfp8_e4m3', 'mxfp8_e5m2', 'mxfp6_e3m2', 'mxfp6_e2m3', 'mxfp4', 'nvfp4']
    """
    return list(BLOCK_FORMAT_BY_NAME)


def get_block(format: BlockFormat | str) -> BlockFormat:
    """Return the block format that a name stands for; a `BlockFormat` is handed back.

    Raises:
        ValueError: If the name is not one of `block_names()`.
        TypeError: If it is neither.

    >>> get_block("nvfp4").block
    16
    """
    if isinstance(format, BlockFormat):
        return format
    if not isinstance(format, str):
        raise TypeError(f"a block format is a hu.BlockFormat or a name such as 'mxfp4'; got {type(format).__name__}")
    key = format.strip().lower().replace("-", "_")
    if key not in BLOCK_FORMAT_BY_NAME:
        raise ValueError(
            f"unknown block format {format!r}: known are {', '.join(BLOCK_FORMAT_BY_NAME)}; your own is"
            ' hu.BlockFormat("mine", element=hu.formats.e2m1fn, scale=hu.formats.e8m0, block=32)'
        )
    return BLOCK_FORMAT_BY_NAME[key]


def get_format_or_block(format: Format | BlockFormat | str | torch.dtype) -> Format | BlockFormat:
    """Return the format, or block format, that an argument stands for or looks like; raises as `get` and `get_block`.

    >>> get_format_or_block("bf16").name, get_format_or_block("MXFP4").name
    ('bf16', 'mxfp4')
    """
    if isinstance(format, BlockFormat):
        return format
    if isinstance(format, str):
        name = format.strip().lower().replace("-", "_")
        if name in BLOCK_FORMAT_BY_NAME or (name.startswith(("mx", "nvfp")) and name not in FORMAT_BY_NAME):
            return get_block(format)
    return get(format)


AnyFormat = TypeVar("AnyFormat", Format, BlockFormat)


def register(format: AnyFormat) -> AnyFormat:
    """Make a format known by its name wherever a format's name is taken.

    Optimizers, recipes, `quantize`, `emulate`, the command line and files know it then as they know a catalogued one. A
    format need not be registered to be used: the object serves as well.

    Args:
        format: the format; its name is in lower case, with _ for -.

    Returns:
        The format.

    Raises:
        TypeError: it is no format.
        ValueError: the name stands for another format already, or no look-up finds it: it has capitals, "-", or begins
            with "torch.".

    >>> register(Format("bfloat16", exponent_bits=4, mantissa_bits=5))
    Traceback (most recent call last):
    ...
    ValueError: the name 'bfloat16' stands for bf16 already: choose another name
    """
    if not isinstance(format, Format | BlockFormat):
        raise TypeError(f"a format is a hu.Format or a hu.BlockFormat; got {type(format).__name__}")
    registry: dict[str, Any] = FORMAT_BY_NAME if isinstance(format, Format) else BLOCK_FORMAT_BY_NAME
    if format.name != format.name.lower().replace("-", "_").removeprefix("torch."):
        raise ValueError(
            f"a format is looked up in lower case, with _ for - and without torch.: name it so, not {format.name!r}"
        )
    known = find_format(format.name) or BLOCK_FORMAT_BY_NAME.get(format.name)
    if known is not None and known != format and registry.get(format.name) != format:
        raise ValueError(f"the name {format.name!r} stands for {known.name} already: choose another name")
    register_entry("format", registry, format.name, format, str(format))
    return format


def rows() -> list[dict[str, Any]]:
    """Return one dict of plain values per format: its fields, its derived properties, and its dtype's names.

    >>> row = rows()[3]
    >>> row["name"], row["bits"], row["max"], row["binades"], row["torch_dtype"]
    ('fp16', 16, 65504.0, 40, 'float16')
    """
    fields: tuple[str, ...] = ("name", "bits", "exponent_bits", "mantissa_bits", "bias", "max", "min")
    fields += ("smallest_normal", "smallest_subnormal", "eps", "emax", "emin", "binades")
    fields += ("infinities", "nan", "subnormals", "signed", "signed_zero", "zero", "overflow")
    return [
        {field: getattr(format, field) for field in fields}
        | {"torch_dtype": format.torch_dtype_name, "ml_dtypes_name": format.ml_dtypes_name}
        for format in FORMAT_BY_NAME.values()
    ]


def block_rows() -> list[dict[str, Any]]:
    """Return one dict of plain values per block format.

    >>> block_rows()[-1]
    {'name': 'nvfp4', 'element': 'e2m1fn', 'scale': 'e4m3fn', 'block': 16, 'tensor_scale': True,
     'scale_rounding': 'nearest', 'bits_per_value': 4.5}
    """
    fields = ("block", "tensor_scale", "scale_rounding", "bits_per_value")
    return [
        {"name": format.name, "element": format.element.name, "scale": format.scale.name}
        | {field: getattr(format, field) for field in fields}
        for format in BLOCK_FORMAT_BY_NAME.values()
    ]
