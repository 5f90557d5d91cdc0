"""The optimizers of a run and the parameters that they step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...optim import Optimizer
from ...optim._gradient_release import model_parameters
from ...optim.parameters._local_tensors import local, memory
from ...optim.parameters._random_identity import plain_names
from .._record import ParameterRecord, Record
from ..sampling._sample_places import place_key, stored
from ..sampling._sampler import sampled


class Optimizers:
    """Puts one optimizer that holds another in order, and counts steps.

    A ZeroRedundancyOptimizer steps this rank's share of the parameters by an optimizer that it holds, and gets the
    others from their ranks: the one inside follows the share, in the arithmetic of its own class, and the one outside
    the rest. One that holds several in a list, tuple or dict, and steps nothing but their parameters, as torchtitan's
    container does, is none of its own: those in it follow their parameters. Of any other pair the one outside follows
    all.

    A step of the run ends with the step of one optimizer, which leads: the last one to step before another steps again.
    Where one steps again while the lead does not, it leads from then on.

    Args:
        given: the optimizers, in any order, with or without those that they hold.
    """

    def __init__(self, given: Sequence[torch.optim.Optimizer]) -> None:
        given = list({id(part): part for one in given for part in parts_of(one)}.values())
        shares = {id(one): share for one in given if (share := share_of(one)) is not None}
        inside = {id(share) for share in shares.values()}
        held = {id(part) for one in given for part in vars(one).values() if isinstance(part, torch.optim.Optimizer)}
        self.all: list[torch.optim.Optimizer] = []
        for one in given:
            if id(one) not in held:
                self.all += [one] if id(one) not in shares else [one, shares[id(one)]]
        self._inside = inside
        self._shares = shares
        outside = [one for one in self.all if id(one) not in inside]
        self._lead: torch.optim.Optimizer | None = outside[0] if len(outside) == 1 else None
        self._stepped: list[torch.optim.Optimizer] = []

    def followed(self, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[int, str]:
        """Return which of the named parameters, by id, an optimizer follows."""
        share = self._shares.get(id(optimizer))
        if share is None:
            return names
        elsewhere = {id(p) for group in share.param_groups for p in group["params"]}
        return {key: name for key, name in names.items() if key not in elsewhere}

    def ends_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step of the run ends with a step that an optimizer has just made."""
        if id(optimizer) in self._inside:
            return False
        self._stepped.append(optimizer)
        if optimizer is self._lead:
            self._stepped.clear()
            return True
        return False

    def begins_step(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """Return the optimizer with which a step of the run has ended, where the next one's step shows it only now."""
        if not any(one is optimizer for one in self._stepped):
            return None
        last = self._stepped[-1]
        self._lead = last if self._lead is None else optimizer
        self._stepped.clear()
        return last

    def unended(self) -> torch.optim.Optimizer | None:
        """Return the optimizer that stepped last where no step of the run has ended yet, and end it."""
        if self._lead is not None or not self._stepped:
            return None
        self._lead = self._stepped[-1]
        self._stepped.clear()
        return self._lead


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a container holds, or the optimizer itself.

    >>> class Container(torch.optim.SGD):
    ...     def __init__(self, parts):
    ...         self.parts = parts
    ...         super().__init__([p for one in parts for group in one.param_groups for p in group["params"]])
    >>> parts = [torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))]) for _ in range(2)]
    >>> parts_of(Container(parts)) == parts, parts_of(parts[0]) == parts[:1]
    (True, True)
    """
    found: dict[int, torch.optim.Optimizer] = {}
    for value in vars(optimizer).values():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        found |= {id(one): one for one in held if isinstance(one, torch.optim.Optimizer)}
    inside = {id(p) for one in found.values() for p in _parameters(one)}
    if not found or not all(id(p) in inside for p in _parameters(optimizer)):
        return [optimizer]
    return [part for one in found.values() for part in parts_of(one)]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def share_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer of this rank's share that a ZeroRedundancyOptimizer holds; None of any other."""
    share = getattr(optimizer, "optim", None)
    named = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
    return share if named and isinstance(share, torch.optim.Optimizer) else None


class Parameters:
    """Names, records and first values of a model's and its optimizers' parameters.

    Attributes:
        named: every parameter once, by name.
        names: the names by the parameter's id, and by that of the copy that an optimizer steps for it.
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
        places = {id(group): k for k, group in enumerate(optimizer.param_groups)}
        for group, position, parameter in model_parameters(optimizer):
            name, given = self.names.get(id(parameter)), group.get("param_names")
            if name is None:
                name = f"{place}.{given[position]}" if given else f"{place}.{places[id(group)]}.{position}"
                self._enter(name, parameter, "")
            self.names[id(group["params"][position])] = name
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
