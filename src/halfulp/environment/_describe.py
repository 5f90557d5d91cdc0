"""What a bug report needs: versions, processor, engines, cache, devices and variables, as data and as lines."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from .._torch_floor import OLDEST_TORCH, is_older
from ._processor import count_cores, list_processor_instructions, read_processor_name

_LISTED_PACKAGES = ("torch", "numpy", "llvmlite", "triton", "safetensors", "typer", "rich", "jinja2")
_LISTED_VARIABLE_PREFIXES = (
    *("HALFULP_", "ONEDNN_", "DNNL_", "ATEN_", "MKL_", "OMP_", "KMP_", "TRITON_", "PYTORCH_", "TORCH_"),
    *("CUDA_VISIBLE", "HIP_VISIBLE", "ROCR_VISIBLE", "HSA_OVERRIDE", "ZE_AFFINITY", "XDG_CACHE_HOME"),
)


def describe_environment() -> dict[str, Any]:
    """Return plain data for a bug report; a part that cannot be found out holds the reason.

    >>> sorted(describe_environment())
    ['cache', 'devices', 'engines', 'platform', 'processor', 'products', 'torch', 'variables', 'versions']
    """
    from .. import __version__

    python = {"halfulp": __version__, "Python": platform.python_version()}
    parts: dict[str, Callable[[], Any]] = {
        "versions": lambda: python | {name: find_version(name) for name in _LISTED_PACKAGES},
        "platform": platform.platform,
        "processor": _describe_processor_parts,
        "torch": _describe_torch,
        "products": _describe_16_bit_products,
        "engines": _describe_engines,
        "cache": describe_cache,
        "devices": _list_devices,
        "variables": lambda: {k: v for k, v in sorted(os.environ.items()) if k.startswith(_LISTED_VARIABLE_PREFIXES)},
    }
    found: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:  # one broken driver does not end the report
            found[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return found


def list_environment_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield `describe_environment`'s result as pairs of words: a name, and its value.

    >>> dict(list_environment_lines({"cache": {"folder": "/home/me/.cache/halfulp", "writable": True}, "devices": []}))
    {'cache folder': '/home/me/.cache/halfulp', 'cache writable': 'True', 'devices': 'none'}
    """
    for part, content in found.items():
        named = content if isinstance(content, dict) else {"": content}
        for name, value in named.items():
            words = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
            yield name if part in ("versions", "variables") else f"{part} {name}".strip(), words


def find_version(package: str) -> str | None:
    """Return the version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_processor_parts() -> dict[str, Any]:
    return {"name": read_processor_name(), "cores": count_cores(), "instructions": list(list_processor_instructions())}


def _describe_torch() -> dict[str, Any]:
    import torch

    built = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    old = f", older than {OLDEST_TORCH}" if is_older(torch.__version__) else ""
    return {
        "version": f"{torch.__version__}{old}",
        "built for": ", ".join(f"{name} {version}" for name, version in built.items() if version) or "cpu",
        "processor capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _describe_16_bit_products() -> dict[str, str]:
    """Say what runs products of 16-bit tensors: oneDNN's kernels, float32, or torch's loops."""
    from ._narrow_products import SIXTEEN_BIT_DTYPES, find_natively_multiplied_dtypes, list_dtypes_multiplied_in_float32

    native = dict.fromkeys(find_natively_multiplied_dtypes(), "instructions of the processor")
    found = native | dict.fromkeys(list_dtypes_multiplied_in_float32(), "float32")
    return {str(dtype).removeprefix("torch."): found.get(dtype, "torch's loops") for dtype in SIXTEEN_BIT_DTYPES}


def _describe_engines() -> dict[str, str]:
    from ..kernels._engine import choose_engine_and_fallback_reason

    found = {}
    for kind in ("cpu", *dict.fromkeys(device.split()[0] for device in _list_devices())):
        try:
            name, reason = choose_engine_and_fallback_reason(kind)
            found[kind] = f"{name} ({reason})" if reason else name
        except (ValueError, ImportError) as error:
            found[kind] = f"refused: {error}"
    return found


def describe_cache() -> dict[str, Any]:
    """Return where compiled kernels are kept, and why they cannot be."""
    from ..kernels.vector._machine_function import find_kernel_cache_folder

    folder = find_kernel_cache_folder()
    if folder is None:
        return {"folder": None, "writable": False, "reason": "no home folder"}
    there = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there):  # permissions do not tell of full disks
            return {"folder": str(folder), "writable": True}
    except OSError as error:
        return {"folder": str(folder), "writable": False, "reason": f"{there}: {error.strerror or error}"}


def _list_devices() -> list[str]:
    """Return every accelerator that torch finds: the kind that tensors on it name, its number, and its name."""
    import torch

    found = [f"cuda {index}: {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or ([] if current is None else [f"{current.type} 0"])
