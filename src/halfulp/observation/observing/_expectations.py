"""Dtypes and formats that were asked for, beside those that are there."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..._messages import a_kind
from ...formats import BlockFormat, Format, get
from ...optim.parameters._local_tensors import get_memory
from ...rounding import quantize
from .._record import Expectation, Record, Role, TensorRecord
from .._text import name_dtype
from ..sampling._sampler import FormatLike, find_format

ExpectedFormats: TypeAlias = Mapping[str, torch.dtype | str | Format]
# What autocast computes in the lower precision.
PRODUCT_LAYERS = (nn.Linear, _ConvNd)


class Expectations:
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
                got = f"{pattern!r}: {a_kind(asked)}" if isinstance(expect, Mapping) else a_kind(expect)
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
        self._autocast: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def note_autocast_output(self, module: nn.Module, name: str, output: Any) -> None:
        """Note the dtype that autocast gave a product's output."""
        device = output.device.type if isinstance(output, torch.Tensor) else ""
        watched = isinstance(module, PRODUCT_LAYERS) and device and torch.is_autocast_enabled(device)
        if watched and output.dtype != torch.float64:  # which autocast leaves alone
            self._autocast[name] = torch.get_autocast_dtype(device), output.dtype

    def compare_with_record(self, record: Record) -> list[Expectation]:
        """Compare what the user and autocast asked for with the record."""
        outputs = {name: tensor.dtype for (role, name), tensor in record.tensors.items() if role == "activation"}
        found = [self._compare_pattern(pattern, asked.name, outputs) for pattern, asked in self._expect.items()]
        by_dtype: dict[torch.dtype, Expectation] = {}
        for name, (asked, there) in self._autocast.items():
            one = by_dtype.setdefault(asked, Expectation("*", name_dtype(asked), source="autocast"))
            one.matched.append(name)
            if there != asked:
                one.other[name] = f"{name_dtype(there)} outputs"
        return [*found, *by_dtype.values()]

    def _compare_pattern(self, pattern: str, asked: str, outputs: dict[str, torch.dtype]) -> Expectation:
        one = Expectation(pattern, asked)
        modules = [name for name, _ in self._model.named_modules() if name and fnmatch.fnmatchcase(name, pattern)]
        one.matched += modules
        for name, parameter in self._model.named_parameters(remove_duplicate=False):  # a tied head has its own name
            matched = fnmatch.fnmatchcase(name, pattern)
            one.matched += [name] if matched else []
            dtype = get_memory(parameter).dtype
            inside = matched or any(name.startswith(f"{module}.") for module in modules)
            if inside and dtype.is_floating_point and name_dtype(dtype) != asked:
                one.other[name] = name_dtype(dtype)
        for name in modules:
            if name in outputs and name_dtype(outputs[name]) != asked:
                one.other[name] = f"{name_dtype(outputs[name])} outputs"
        return one


FormatsByPattern: TypeAlias = Mapping[str, FormatLike]
QUANTIZED_ROLES: tuple[Role, ...] = ("activation", "activation gradient")


class QuantizedModules:
    """Names the format that each module's tensors are quantized to, and measures the error of that on samples.

    Args:
        given: formats by patterns over the names of its modules; of several that match the first counts.

    Raises:
        TypeError: no mapping from patterns to formats.
        ValueError: an unknown format, or a pattern that matches no module.
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
            found = find_format(format)
            for name in matched:
                self.formats.setdefault(name, found)

    def note_quantization(self, record: TensorRecord, sample: torch.Tensor) -> None:
        """Write the format of a tensor, and the error of rounding its sample to it, into its record.

        Args:
            sample: its sampled elements, in aligned runs.
        """
        format = self.formats.get(record.name) if record.role in QUANTIZED_ROLES else None
        if format is None:
            return
        record.asked_format = format.name
        finite = torch.where(sample.isfinite(), sample, 0.0)
        short = -len(finite) % format.block if isinstance(format, BlockFormat) else 0
        rounded = quantize(nn.functional.pad(finite, (0, short)), format)[: len(finite)]
        error: Any = (rounded.double() - finite.double()).square().mean().sqrt()
        record.quantization_error = float(error) if len(finite) else None
