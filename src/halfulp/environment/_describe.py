"""What a bug report needs: versions, processor, engines, cache, devices and variables, as data and as lines."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from .._torch_floor import OLDEST_TORCH, is_older
from ._processor import core_count, list_instructions, processor_name

_LISTED_PACKAGES = ("torch", "numpy", "llvmlite", "triton", "safetensors", "typer", "rich", "jinja2")
_VARIABLE_PREFIXES = (
    *("HALFULP_", "ONEDNN_", "DNNL_", "ATEN_", "MKL_", "OMP_", "KMP_", "TRITON_", "PYTORCH_", "TORCH_"),
    *("CUDA_VISIBLE", "HIP_VISIBLE", "ROCR_VISIBLE", "HSA_OVERRIDE", "ZE_AFFINITY", "XDG_CACHE_HOME"),
)


def describe_environment() -> dict[str, Any]:
    """Return plain data for a bug report; a part that cannot be found out holds the reason.

    >>> sorted(describe_environment())
    ['cache', 'devices', 'engines', 'processor', 'products', 'system', 'torch', 'variables', 'versions']
    """
    from .. import __version__

    parts: dict[str, Callable[[], Any]] = {
        "versions": lambda: {
            "halfulp": __version__,
            "Python": platform.python_version(),
            **{name: find_version(name) for name in _LISTED_PACKAGES},
        },
        "system": lambda: {
            "platform": platform.platform(),
            "executable": sys.executable,
            "output encoding": str(getattr(sys.stdout, "encoding", None)),
        },
        "processor": lambda: {
            "name": processor_name(),
            "architecture": platform.machine(),
            "cores": core_count(),
            "instructions": list(list_instructions()),
        },
        "torch": _describe_torch,
        "products": _describe_products,
        "engines": _describe_engines,
        "cache": describe_cache,
        "devices": _list_devices,
        "variables": lambda: {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLE_PREFIXES)
        },
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
    {'cache folder': '/home/me/.cache/halfulp', 'cache writable': 'yes', 'devices': 'none'}
    """
    for part, content in found.items():
        if isinstance(content, dict):
            for name, value in content.items():
                yield name if part in ("versions", "variables") else f"{part} {name}", _format_value(value)
            if not content:
                yield part, "none"
        elif isinstance(content, list):
            for value in content or ["none"]:
                yield part, _format_value(value)
        else:
            yield part, _format_value(content)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value(one)}" for name, one in value.items() if one is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value)) or "none that matters here is known"
    return "not there" if value is None else str(value)


def find_version(package: str) -> str | None:
    """Return the version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_torch() -> dict[str, Any]:
    import torch

    built = {"cuda": torch.version.cuda, "hip": torch.version.hip, "xpu": getattr(torch.version, "xpu", None)}
    return {
        "version": f"{torch.__version__}{f', older than {OLDEST_TORCH}' if is_older(torch.__version__) else ''}",
        "built for": [f"{name} {version}" for name, version in built.items() if version] or ["cpu"],
        "processor capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _describe_products() -> dict[str, Any]:
    """Say what runs products of 16-bit tensors: oneDNN's kernels, float32, or torch's loops."""
    from ._narrow_products import SIXTEEN_BIT_DTYPES, find_native_dtypes, widened_dtypes

    found = {}
    for dtype in SIXTEEN_BIT_DTYPES:
        native, widened = dtype in find_native_dtypes(), dtype in widened_dtypes()
        how = "float32" if widened else "native" if native else "torch's loops"
        why = "no instructions" if not native else "instructions there" if widened else ""
        found[str(dtype).removeprefix("torch.")] = how + (f" ({why})" if why else "")
    return found


def _describe_engines() -> dict[str, str]:
    from ..kernels._engine import choose_engine

    kinds = ["cpu", *dict.fromkeys(device["kind"] for device in _list_devices())]
    found = {}
    for kind in kinds:
        try:
            name, reason = choose_engine(kind)
            found[kind] = f"{name} ({reason})" if reason else name
        except (ValueError, ImportError) as error:
            found[kind] = f"refused: {error}"
    return found


def describe_cache() -> dict[str, Any]:
    """Return where compiled kernels are kept, and why they cannot be."""
    from ..kernels.vector._machine_function import cache_folder

    folder = cache_folder()
    if folder is None:
        return {"folder": None, "writable": False, "reason": "no home folder"}
    there = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there):  # permissions do not tell of full disks
            return {"folder": str(folder), "writable": True}
    except OSError as error:
        return {"folder": str(folder), "writable": False, "reason": f"{there}: {error.strerror or error}"}


def _list_devices() -> list[dict[str, Any]]:
    """Return every accelerator that torch finds, by the kind that tensors on it name."""
    import torch

    found: list[dict[str, Any]] = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_available():
            found += [_describe_device(module, kind, index) for index in range(module.device_count())]
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is not None and current.type not in {device["kind"] for device in found}:
        found.append({"kind": current.type, "index": 0, "name": current.type, "capability": None})
    return found


def _describe_device(module: Any, kind: str, index: int) -> dict[str, Any]:
    """Describe one device; where its driver fails, by the error."""
    import torch

    device: dict[str, Any] = {"kind": kind, "index": index}
    if kind == "cuda" and torch.version.hip:
        device["by"] = f"ROCm {torch.version.hip}"
    try:
        properties = module.get_device_properties(index)
        device["name"] = module.get_device_name(index)
        version = [str(getattr(properties, name)) for name in ("major", "minor") if hasattr(properties, name)]
        device["capability"] = getattr(properties, "gcnArchName", None) or ".".join(version) or None
        device["memory"] = f"{properties.total_memory / 2**30:.1f} GiB"
    except Exception as error:
        device["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return device
