"""Dtypes and formats that were asked for, beside those that are there."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ..._messages import a_kind
from ..._torch_versions import find_dtype
from ...formats import BlockFormat, Format, get
from ...optim.parameters._local_tensors import memory
from ...recipes._contract import CONTRACT_KEY, Contract, ContractDifference, contract, list_contract_differences
from ...rounding import quantize
from .._record import Expectation, Record, Role, TensorRecord
from .._text import dtype_name
from ..sampling._sampler import FormatLike, find_format, read_numbers

CONTRACT_SOURCE = "contract"


class ContractComparison:
    """Compares how a contract says that tensors are held with how model and optimizers hold them.

    Dtypes and weight updates are those at the time when this is made, since a model may be cast to be saved after the
    run; states are those of the optimizers when they are compared, since a new one has none before its first step.
    """

    def __init__(self, asked: Contract, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._contract, self._model, self._optimizers = asked, model, list(optimizers)
        self._there = contract(model, self._optimizers)

    def list_expectations(self) -> list[Expectation]:
        """Return the contract's tensors of each dtype, and whatever else differs from it."""
        now = contract(self._model, self._optimizers).tensors
        there = {
            name: dataclasses.replace(terms, states=now[name].states if name in now else {})
            for name, terms in self._there.tensors.items()
        }
        found = list_contract_differences(self._contract, Contract(there), with_optimizer=bool(self._optimizers))
        others: dict[tuple[str, str], Expectation] = {}
        for one in found:
            if one.field != "dtype" and not _follows_dtype(one, found):
                asked = others.setdefault((one.field, one.before), _make_expectation(f"{one.field} {one.before}"))
                asked.matched.append(one.name)
                asked.other[one.name] = one.after
        return [*others.values(), *self._list_dtypes(found)]

    def _list_dtypes(self, found: Sequence[ContractDifference]) -> list[Expectation]:
        changed = {one.name: _shorten_dtype(one.after) for one in found if one.field == "dtype"}
        by_dtype: dict[str, Expectation] = {}
        for name, terms in self._contract.tensors.items():
            if name in self._there.tensors:
                asked = by_dtype.setdefault(terms.dtype, _make_expectation(_shorten_dtype(terms.dtype)))
                asked.matched.append(name)
                if name in changed:
                    asked.other[name] = changed[name]
        return list(by_dtype.values())


def _follows_dtype(one: ContractDifference, found: Sequence[ContractDifference]) -> bool:
    """Return whether a plain tensor's storage differs as its dtype does."""
    return one.field == "storage" and any(
        (other.name, other.field, other.before, other.after) == (one.name, "dtype", one.before, one.after)
        for other in found
    )


def _make_expectation(asked: str) -> Expectation:
    return Expectation("*", asked, source=CONTRACT_SOURCE)


def _shorten_dtype(name: str) -> str:
    dtype = find_dtype(name)
    return name if dtype is None else dtype_name(dtype)


ExpectedFormats: TypeAlias = Mapping[str, torch.dtype | str | Format] | Contract
# What autocast computes in the lower precision.
PRODUCT_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def check_expectations(
    expect: Any, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Format] | ContractComparison:
    """Return the formats that are expected, by pattern, or the run that a contract was given for.

    Args:
        expect: dtypes, names or formats by pattern; or a contract, itself or as the plain data that it is saved as.

    Raises:
        TypeError: no mapping from patterns to dtypes, names or formats.
        ValueError: an unknown format; a contract's data that is damaged, or of a later version.
    """
    if expect is None:
        return {}
    if isinstance(expect, Mapping) and (CONTRACT_KEY in expect or {"version", "tensors"} <= expect.keys()):
        expect = Contract.from_dict(expect)
    if isinstance(expect, Contract):
        return ContractComparison(expect, model, optimizers)
    if not isinstance(expect, Mapping) or not all(isinstance(pattern, str) for pattern in expect):
        raise TypeError(
            f'expect= takes a dict such as {{"*.norm": torch.float32, "lm_head": "bf16"}}, or a hu.contract, '
            f"got {a_kind(expect)}"
        )
    return {pattern: get(asked) for pattern, asked in expect.items()}


class Expectations:
    """Compares the formats that were asked for with those of parameters and outputs.

    Args:
        expect: formats by pattern, a glob over the names of modules and parameters; or a run that resumed under a
            contract.
    """

    def __init__(self, model: nn.Module, expect: dict[str, Format] | ContractComparison) -> None:
        self._model = model
        self._resumed = expect if isinstance(expect, ContractComparison) else None
        self._expect = {} if isinstance(expect, ContractComparison) else expect
        self._autocast: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def note_autocast_output(self, module: nn.Module, name: str, output: Any) -> None:
        """Note the dtype that autocast gave a product's output."""
        device = output.device.type if isinstance(output, torch.Tensor) else ""
        watched = isinstance(module, PRODUCT_LAYERS) and device and torch.is_autocast_enabled(device)
        if watched and output.dtype != torch.float64:  # which autocast leaves alone
            self._autocast[name] = torch.get_autocast_dtype(device), output.dtype

    def compare_with_record(self, record: Record) -> list[Expectation]:
        """Compare the user's expectations with the record."""
        outputs = {name: tensor.dtype for (role, name), tensor in record.tensors.items() if role == "activation"}
        found = [self._compare_pattern(pattern, asked, outputs) for pattern, asked in self._expect.items()]
        found += self._resumed.list_expectations() if self._resumed is not None else []
        return found + self._list_autocast_outputs()

    def _compare_pattern(self, pattern: str, asked: Format, outputs: dict[str, torch.dtype]) -> Expectation:
        one = Expectation(pattern, asked.name)
        for name, module in self._model.named_modules():
            if not name or not fnmatch.fnmatchcase(name, pattern):
                continue
            one.matched.append(name)
            for own, parameter in module.named_parameters():
                self._compare_parameter(one, f"{name}.{own}", parameter, asked)
            if name in outputs and dtype_name(outputs[name]) != asked.name and asked.torch_dtype_name is not None:
                one.other[name] = f"{dtype_name(outputs[name])} outputs"
        for name, parameter in self._model.named_parameters():
            if fnmatch.fnmatchcase(name, pattern):
                one.matched.append(name)
                self._compare_parameter(one, name, parameter, asked)
        return one

    def _compare_parameter(self, one: Expectation, name: str, parameter: torch.Tensor, asked: Format) -> None:
        dtype = memory(parameter).dtype
        if dtype.is_floating_point and dtype_name(dtype) != asked.name and not _holds_format_values(parameter, asked):
            one.other[name] = dtype_name(dtype)

    def _list_autocast_outputs(self) -> list[Expectation]:
        found: dict[torch.dtype, Expectation] = {}
        for name, (asked, there) in self._autocast.items():
            one = found.setdefault(asked, Expectation("*", dtype_name(asked), source="autocast"))
            one.matched.append(name)
            if there != asked:
                one.other[name] = f"{dtype_name(there)} outputs"
        return list(found.values())


def _holds_format_values(parameter: torch.Tensor, asked: Format) -> bool:
    """Return whether a wider tensor holds numbers of a format that torch has no dtype for."""
    if asked.torch_dtype_name is not None:
        return False
    found = read_numbers(parameter)
    if found is None or found.flat.dtype.itemsize < 2:
        return False
    return bool((quantize(found.flat, asked) == found.flat).all())


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
