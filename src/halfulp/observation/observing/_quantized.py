"""Formats that modules' outputs and gradients go through after they are made, and the noise that this adds."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from ...formats import BlockFormat, Format
from ...rounding import quantize
from .._record import Role, TensorRecord
from ..sampling._candidates import AnyFormat, candidate

Formats: TypeAlias = Mapping[str, AnyFormat]
ROLES: tuple[Role, ...] = ("activation", "activation gradient")


class Quantized:
    """Says which format the tensors of a module are quantized to, and compares samples with what that leaves of them.

    Args:
        model: the model.
        given: formats by patterns over the names of its modules; of several that match the first counts.

    Raises:
        TypeError: no mapping from patterns to formats.
        ValueError: an unknown format, or a pattern that matches no module.
    """

    def __init__(self, model: nn.Module, given: Formats | None) -> None:
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
            found = candidate(format)
            for name in matched:
                self.formats.setdefault(name, found)

    def note(self, record: TensorRecord, sample: torch.Tensor) -> None:
        """Write the format of a tensor, and the error of rounding its sample to it, into its record.

        Args:
            record: of the tensor.
            sample: its sampled elements, in aligned runs.
        """
        format = self.formats.get(record.name) if record.role in ROLES else None
        if format is None:
            return
        record.asked_format = format.name
        finite = torch.where(sample.isfinite(), sample, 0.0)
        short = -len(finite) % format.block if isinstance(format, BlockFormat) else 0
        rounded = quantize(nn.functional.pad(finite, (0, short)), format)[: len(finite)]
        error: Any = (rounded.double() - finite.double()).square().mean().sqrt()
        record.quantization_error = float(error) if len(finite) else None
