"""Dtypes and formats that were asked for, beside those that are there."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import nn

from ..._messages import name_type
from ...formats import BlockFormat, Format, get
from ...formats._block import get_format_or_block
from ...optim.parameters._local_tensors import get_payload
from ...rounding import quantize
from .._record import DtypeExpectation, Record, Role, TensorRecord
from .._text import name_dtype
from ._sampler import SAMPLED_RUN_LENGTH

ExpectedFormats: TypeAlias = Mapping[str, torch.dtype | str | Format]


def parse_expected_formats(expect: ExpectedFormats | None) -> dict[str, Format]:
    """Return the formats that are asked for, by globs over the names of modules and parameters."""
    expect = {} if expect is None else expect
    pairs = expect.items() if isinstance(expect, Mapping) else [(expect, None)]
    for pattern, asked in pairs:
        if not isinstance(pattern, str) or not isinstance(asked, str | torch.dtype | Format):
            got = f"{pattern!r}: {name_type(asked)}" if isinstance(expect, Mapping) else name_type(expect)
            raise TypeError(
                f'expect= takes a dict such as {{"*.norm": torch.float32, "lm_head": "bf16"}}, got {got}; a '
                "hu.contract compares a run that is resumed: contract.check(model, optimizer)"
            )
    expected = {pattern: get(asked) for pattern, asked in expect.items()}
    for format in expected.values():
        if format.torch_dtype_name is None:
            raise ValueError(
                f"expect= compares dtypes, and torch has none for {format.name}: quantized= names formats that "
                "outputs are rounded to"
            )
    return expected


def compare_expected_dtypes(model: nn.Module, expected: Mapping[str, Format], record: Record) -> list[DtypeExpectation]:
    """Compare the dtypes of parameters and of recorded outputs with those that were asked for."""
    found = [DtypeExpectation(pattern, asked.name) for pattern, asked in expected.items()]
    outputs = {name: tensor.dtype for (role, name), tensor in record.tensors.items() if role == "activation"}
    for one in found:
        modules = [name for name, _ in model.named_modules() if name and fnmatch.fnmatchcase(name, one.pattern)]
        one.matched += modules
        for name, parameter in model.named_parameters(remove_duplicate=False):  # a tied head has its own name
            matched = fnmatch.fnmatchcase(name, one.pattern)
            one.matched += [name] if matched else []
            dtype = get_payload(parameter).dtype
            inside = matched or any(name.startswith(f"{module}.") for module in modules)
            if inside and dtype.is_floating_point and name_dtype(dtype) != one.asked:
                one.other[name] = name_dtype(dtype)
        for name in modules:
            if name in outputs and name_dtype(outputs[name]) != one.asked:
                one.other[name] = f"{name_dtype(outputs[name])} outputs"
    return found


FormatsByPattern: TypeAlias = Mapping[str, Format | BlockFormat | str | torch.dtype]
QUANTIZED_ROLES: tuple[Role, ...] = ("activation", "activation gradient")


def map_module_names_to_formats(model: nn.Module, given: FormatsByPattern | None) -> dict[str, Format | BlockFormat]:
    """Return the formats that tensors of modules are quantized to, by name; of several patterns the first counts."""
    formats: dict[str, Format | BlockFormat] = {}
    if given is None:
        return formats
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise TypeError(f'quantized= takes a dict such as {{"layers.*": "mxfp8_e4m3"}}, got {given!r}')
    names = [name for name, _ in model.named_modules()]
    for pattern, format in given.items():
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"quantized=: {pattern!r} matches no module: take names from model.named_modules(), with * for a "
                f"layer's number, such as {', '.join(map(repr, names[1:4])) or repr('')}"
            )
        found = get_format_or_block(format)
        if isinstance(found, BlockFormat) and SAMPLED_RUN_LENGTH % found.block:
            raise ValueError(
                f"quantized=: {found.name} has blocks of {found.block} elements, and samples are runs of "
                f"{SAMPLED_RUN_LENGTH}: give block formats whose block divides {SAMPLED_RUN_LENGTH}"
            )
        for name in matched:
            formats.setdefault(name, found)
    return formats


def record_quantization_error(record: TensorRecord, format: Format | BlockFormat, sample: torch.Tensor) -> None:
    """Write the error of rounding a tensor's sample of aligned runs to a format into the tensor's record."""
    record.asked_format = format.name
    finite = torch.where(sample.isfinite(), sample, 0.0)
    if isinstance(format, BlockFormat):
        finite = nn.functional.pad(finite, (0, -len(finite) % format.block))
        blocks, rounded = (one.view(-1, format.block) for one in (finite, quantize(finite, format)))
        hidden = (blocks != 0) & (rounded == 0) & (rounded != 0).any(-1, keepdim=True)
        record.block_hidden = (record.block_hidden or 0) + int(hidden.sum())
        rounded = rounded.flatten()
    else:
        rounded = quantize(finite, format)
        record.asked_overflow += int(quantize(finite, format, overflow="nan").isnan().sum())
    error = float((rounded.double() - finite.double()).square().sum())
    record.quantization_error = math.sqrt(error / len(sample))
