"""The parameters of a run: their names, who steps them, and what is known of them before the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...optim import Optimizer
from ...optim.parameters._local_tensors import local, memory
from ...optim.parameters._random_identity import plain_names
from .._record import ParameterRecord, Record
from ..sampling._plain import stored
from ..sampling._sample_places import place_key
from ..sampling._sampler import sampled
from ._optimizers import share_of


class Parameters:
    """Names, records and first values of a model's and its optimizers' parameters.

    Attributes:
        named: every parameter once, by name.
        names: the names by the parameter's id.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], record: Record) -> None:
        self._record = record
        self.named: dict[str, torch.Tensor] = {}
        self.names: dict[int, str] = {}
        self._first: dict[str, torch.Tensor] = {}
        kinds: dict[int, str] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                kinds.setdefault(id(parameter), type(module).__name__)  # a tied one is of the first, as its name is
        named = dict(model.named_parameters())
        for name, parameter in zip(plain_names(named, parallel=False), named.values(), strict=True):
            self._enter(name, parameter, kinds.get(id(parameter), ""))
        for number, optimizer in enumerate(optimizers):
            self._enter_stepped(number if len(optimizers) > 1 else None, optimizer)

    def _enter(self, name: str, parameter: torch.Tensor, kind: str) -> None:
        self.named[name], self.names[id(parameter)] = parameter, name
        dtype, shape = memory(parameter).dtype, tuple(local(parameter).shape)
        count = local(parameter).numel()
        self._record.parameters[name] = ParameterRecord(name, kind, dtype, shape, count, parameter.requires_grad)

    def _enter_stepped(self, number: int | None, optimizer: torch.optim.Optimizer) -> None:
        place = "optimizer" if number is None else f"optimizer.{number}"
        for k, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            for position, parameter in enumerate(group["params"]):
                name = self.names.get(id(parameter))
                if name is None:
                    name = f"{place}.{given[position]}" if given else f"{place}.{k}.{position}"
                    self._enter(name, parameter, "")
                record = self._record.parameters[name]
                rule = type(share_of(optimizer) or optimizer)
                record.optimizer, record.optimizer_module = rule.__name__, rule.__module__
                record.options = {key: group[key] for key in ("lr", "weight_decay", "eps") if key in group}
                if isinstance(optimizer, Optimizer):
                    record.weight_update = "none"

    def trainable(self) -> list[tuple[str, torch.Tensor]]:
        """Return parameters that get gradients."""
        return [(name, parameter) for name, parameter in self.named.items() if parameter.requires_grad]

    def remember(self) -> None:
        """Keep samples of all parameters as they are before the first step."""
        self._first = self._samples()

    def count_moved(self) -> None:
        """Compare with them."""
        for name, now in self._samples().items():
            before = self._first.get(name)
            if before is not None and len(before) == len(now) and len(now):
                self._record.parameters[name].moved = float((before != now).cpu().double().mean())

    def _samples(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.named.items():
            numbers = stored(parameter)
            if numbers is not None:
                found[name] = sampled(numbers.flat, place_key(0, 0, name)).mul_(numbers.scale)
        return found
