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
from ._sampler import RUN_LENGTH

ExpectedFormats: TypeAlias = Mapping[str, torch.dtype | str | Format]


class DtypeExpectations:
    """Compares the dtypes that were asked for with those of parameters and outputs.

    Args:
        expect: dtypes by pattern, a glob over the names of modules and parameters; None for none.

    Raises:
        TypeError: no mapping from patterns to dtypes.
        ValueError: an unknown format, or one that is no dtype of torch's.
    """

    def __init__(self, model: nn.Module, expect: ExpectedFormats | None) -> None:
        self._model = model
        expect = {} if expect is None else expect
        pairs = expect.items() if isinstance(expect, Mapping) else [(expect, None)]
        for pattern, asked in pairs:
            if not isinstance(pattern, str) or not isinstance(asked, str | torch.dtype | Format):
                got = f"{pattern!r}: {name_type(asked)}" if isinstance(expect, Mapping) else name_type(expect)
                raise TypeError(
                    f'expect= takes a dict such as {{"*.norm": torch.float32, "lm_head": "bf16"}}, got {got}; a '
                    "hu.contract compares a run that is resumed: contract.check(model, optimizer)"
                )
        self._expect = {pattern: get(asked) for pattern, asked in expect.items()}
        for format in self._expect.values():
            if format.torch_dtype_name is None:
                raise ValueError(
                    f"expect= compares dtypes, and torch has none for {format.name}: quantized= names formats that "
                    "outputs are rounded to"
                )

    def compare_with_record(self, record: Record) -> list[DtypeExpectation]:
        """Compare what was asked for with the record."""
        outputs = {name: tensor.dtype for (role, name), tensor in record.tensors.items() if role == "activation"}
        return [self._compare_pattern(pattern, asked.name, outputs) for pattern, asked in self._expect.items()]

    def _compare_pattern(self, pattern: str, asked: str, outputs: dict[str, torch.dtype]) -> DtypeExpectation:
        one = DtypeExpectation(pattern, asked)
        modules = [name for name, _ in self._model.named_modules() if name and fnmatch.fnmatchcase(name, pattern)]
        one.matched += modules
        for name, parameter in self._model.named_parameters(remove_duplicate=False):  # a tied head has its own name
            matched = fnmatch.fnmatchcase(name, pattern)
            one.matched += [name] if matched else []
            dtype = get_payload(parameter).dtype
            inside = matched or any(name.startswith(f"{module}.") for module in modules)
            if inside and dtype.is_floating_point and name_dtype(dtype) != asked:
                one.other[name] = name_dtype(dtype)
        for name in modules:
            if name in outputs and name_dtype(outputs[name]) != asked:
                one.other[name] = f"{name_dtype(outputs[name])} outputs"
        return one


FormatsByPattern: TypeAlias = Mapping[str, Format | BlockFormat | str | torch.dtype]
QUANTIZED_ROLES: tuple[Role, ...] = ("activation", "activation gradient")


class QuantizedModules:
    """Names the format that each module's tensors are quantized to, and measures the error of that on samples.

    Args:
        given: formats by patterns over the names of its modules; of several that match the first counts.

    Raises:
        TypeError: no mapping from patterns to formats.
        ValueError: an unknown format, blocks that the sampled runs do not hold a whole number of, or a pattern that
            matches no module.
    """

    def __init__(self, model: nn.Module, given: FormatsByPattern | None) -> None:
        self.formats: dict[str, Format | BlockFormat] = {}
        if given is None:
            return
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
            if isinstance(found, BlockFormat) and RUN_LENGTH % found.block:
                raise ValueError(
                    f"quantized=: {found.name} has blocks of {found.block} elements, and samples are runs of "
                    f"{RUN_LENGTH}: give block formats whose block divides {RUN_LENGTH}"
                )
            for name in matched:
                self.formats.setdefault(name, found)

    def note_quantization(self, record: TensorRecord, sample: torch.Tensor) -> None:
        """Write the format of a tensor, and the error of rounding its sample to it, into its record.

        Args:
            sample: its sampled elements, in aligned runs.
        """
        format = self.formats.get(record.name) if record.role in QUANTIZED_ROLES else None
        if format is None or not len(sample):
            return
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
