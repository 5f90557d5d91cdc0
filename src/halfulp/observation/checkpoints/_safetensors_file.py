"""Files of safetensors, read by memory map."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._torch_versions import find_dtype
from ._other_kinds import refuse_other_kind
from ._stored import Stored

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": find_dtype("float8_e8m0fnu"),
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def open_safetensors(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return a file's tensors by name, in the order of the file, and its metadata.

    Raises:
        ValueError: it is truncated, of another kind or no file of safetensors.
    """
    from safetensors import SafetensorError, safe_open

    refuse_other_kind(path)
    try:
        file = safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"{path} cannot be read as safetensors ({said}): it is truncated, damaged or of another kind; copy it "
            "again, or take another checkpoint"
        ) from None
    found = {}
    for name in file.offset_keys() if hasattr(file, "offset_keys") else file.keys():
        part = file.get_slice(name)
        dtype = DTYPES.get(part.get_dtype())
        read = functools.partial(_read, file, name)
        found[name] = Stored(read(None).dtype if dtype is None else dtype, tuple(part.get_shape()), read)
    return found, dict(file.metadata() or {})


def _read(file: Any, name: str, rows: slice | None) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    return tensor if rows is None else tensor[rows]
