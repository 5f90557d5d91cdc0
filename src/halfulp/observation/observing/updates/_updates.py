"""Updates: samples of weights, gradients and states around an optimizer's step, beside what was wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....optim import Optimizer
from ...record._record import Realised, Role
from ...sampling._plain import Stored, stored
from ...sampling._reference import sample_of
from .._notebook import Notebook
from ._elementwise import ELEMENTWISE, WHOLE, Shadow, decay_factor
from ._halfulp_updates import decoded_states, halfulp_change, represented
from ._realised import add_changes
from ._rounding_decisions import RoundingDecisions, draws

# Roles of states, by their names in torch.optim and here.
MOMENTS: dict[str, Role] = {
    **dict.fromkeys(("exp_avg", "momentum_buffer", "grad_avg", "prev"), "first moment"),
    **dict.fromkeys(("exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq", "exp_inf", "acc_delta"), "second moment"),
}


@dataclass(slots=True)
class Stepped:
    """One parameter around a step.

    Attributes:
        name, kind: of its record.
        parameter: itself.
        options: its group.
        elements: of its memory.
        weight, gradient: samples before the step.
        states: samples of its states before the step; of a whole tensor's numbers copies.
        change: the wanted change where the optimizer computes it in a way of its own.
        wanted_states: samples of the states that it wants then.
        unplanned: whether the optimizer has yet to lay out this parameter's states, so that nothing is known.
    """

    name: str
    kind: str
    parameter: torch.Tensor
    options: dict[str, Any]
    elements: int
    weight: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, Any] = field(default_factory=dict)
    change: torch.Tensor | None = None
    wanted_states: dict[str, torch.Tensor] = field(default_factory=dict)
    unplanned: bool = False


class Updates:
    """Watches the steps of one optimizer.

    Args:
        book: what is written to.
        optimizer: the optimizer.
        names: of its parameters, by id.
    """

    def __init__(self, book: Notebook, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
        self.book, self.optimizer, self._names = book, optimizer, names
        self._stepped: list[Stepped] = []
        self._shadows: dict[int, Shadow] = {}
        self._directions: dict[str, RoundingDecisions] = {}

    def before(self, arrived: set[str]) -> None:
        """Sample what the step is about to change.

        Args:
            arrived: names whose gradients were looked at when they arrived.
        """
        self._stepped = []
        divisor = _number(getattr(self.optimizer, "grad_scale", None), 1.0)
        entries, weights, gradients = [], [], []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None or parameter.grad is None:
                    continue
                weight, gradient = stored(parameter), stored(parameter.grad)
                self._note(name, group, parameter)
                if weight is None or gradient is None or gradient.flat.numel() != weight.flat.numel():
                    self.book.missed(f"{name}: a parameter or gradient whose numbers cannot be read")
                    continue
                kind = self.book.record.parameters[name].kind
                if draws(self.optimizer, parameter):
                    self.book.fixed.add(name)
                entries.append((name, kind, parameter, group, weight))
                weights.append((name, kind, weight))
                gradients.append((name, kind, gradient))
        late = [entry for entry in gradients if entry[0] not in arrived]
        if late:
            self.book.look_all("weight gradient", late)
        samples = self.book.look_all("weight", weights)
        for (name, kind, parameter, group, weight), sample, (_, _, gradient) in zip(entries, samples, gradients):
            size = weight.flat.numel()
            slopes = self._sample(name, gradient).mul_(gradient.scale / divisor)
            one = Stepped(name, kind, parameter, group, size, _scaled(sample, weight), slopes)
            one.states = {key: self._state(name, key, value, size) for key, value in self._state_of(parameter).items()}
            self._represent(one)
            self._stepped.append(one)
            record = self.book.record.parameters[name]
            record.gradients += 1
            record.nonzero_gradients += int(torch.count_nonzero(slopes))

    def _represent(self, one: Stepped) -> None:
        """Of halfulp's optimizers: the float32 weight behind a parameter, and the change that their rule wants."""
        if isinstance(self.optimizer, Optimizer):
            key = self.book.key(one.name)
            one.unplanned = self.optimizer._plans.get(one.parameter) is None
            shown = represented(self.optimizer, one.parameter, key)
            one.weight = one.weight if shown is None else shown
            found = halfulp_change(self.optimizer, one.parameter, one.options, one.gradient, one.weight, key)
            if found is not None:
                one.change, one.wanted_states = found
                one.states = dict(decoded_states(self.optimizer._plans[one.parameter], key))

    def after(self) -> None:
        """Compare with what the step has made of it."""
        stepped, self._stepped = self._stepped, []
        if not stepped or _number(getattr(self.optimizer, "found_inf", None), 0.0):
            return
        now = [self._weight_now(one) for one in stepped]
        known: list[int] = []
        for positions in self._batches(stepped):
            known += self._compare(positions, stepped, now)
        others = [k for k in range(len(stepped)) if k not in set(known)]
        if others:
            self._count_unknown([stepped[k] for k in others], [now[k] for k in others])
        self._look_at_states(stepped)

    def _batches(self, stepped: Sequence[Stepped]) -> list[list[int]]:
        """Positions of the parameters that one step of a shadow serves: of one group, at one count of steps."""
        if type(self.optimizer) not in ELEMENTWISE:
            return []
        batches: dict[tuple, list[int]] = {}
        for k, one in enumerate(stepped):
            whole = tuple((key, _number(value, 0.0)) for key, value in one.states.items() if key in WHOLE)
            if not any(value is None for value in one.states.values()):
                batches.setdefault((id(one.options), whole, *one.states), []).append(k)
        return list(batches.values())

    def _compare(self, positions: list[int], stepped: Sequence[Stepped], now: list[torch.Tensor]) -> list[int]:
        """Step a shadow of some parameters, and count what was wanted against what took place."""
        group = [stepped[k] for k in positions]
        options, sizes = group[0].options, [len(one.weight) for one in group]
        weights, gradients = (torch.cat([getattr(one, n).double() for one in group]) for n in ("weight", "gradient"))
        states = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group[0].states.items()
            if key in WHOLE
        }
        before = {
            key: torch.cat([one.states[key].double() for one in group]) for key in group[0].states if key not in states
        }
        shadow = self._shadows.setdefault(id(options), Shadow(self.optimizer))
        moved, wanted_states = shadow.step(
            weights, gradients, {**states, **{key: value.clone() for key, value in before.items()}}, options
        )
        records = [self.book.record.parameters[one.name] for one in group]
        after = torch.cat([now[k].double() for k in positions])
        change = moved - weights
        add_changes([record.update for record in records], weights, after, change, sizes)
        for one, wanted, stored_now in zip(group, moved.split(sizes), after.split(sizes)):
            self._follow_directions(one, wanted, stored_now)
        self._look_at_updates(group, change.split(sizes))
        for key, value in wanted_states.items():
            if key not in WHOLE and isinstance(value, torch.Tensor) and value.shape == weights.shape:
                self._compare_state(key, group, before.get(key), value, sizes)
        self._compare_decay(group, weights, sizes)
        return positions

    def _compare_state(
        self, key: str, group: list[Stepped], before: Any, wanted: torch.Tensor, sizes: list[int]
    ) -> None:
        there = torch.zeros_like(wanted) if before is None else before
        samples = [self._state(one.name, key, self._state_of(one.parameter).get(key), one.elements) for one in group]
        if any(sample is None for sample in samples):
            return
        after = torch.cat([sample.double() for sample in samples])
        records = [self.book.record.parameters[one.name].states.setdefault(key, Realised()) for one in group]
        add_changes(records, there, after, wanted - there, sizes)

    def _compare_decay(self, group: list[Stepped], weights: torch.Tensor, sizes: list[int]) -> None:
        """Decay that is decoupled from the gradient, rounded by itself as torch's loop does."""
        factor = decay_factor(self.optimizer, group[0].options)
        if factor is None:
            return
        records = []
        for one in group:
            record = self.book.record.parameters[one.name]
            if record.decay is None:
                record.decay = Realised()
            records.append(record.decay)
        decayed = [(one.weight.to(one.parameter.dtype) * factor).double() for one in group]
        add_changes(records, weights, torch.cat(decayed), weights * (factor - 1), sizes)

    def _count_unknown(self, group: list[Stepped], now: list[torch.Tensor]) -> None:
        for one, after in zip(group, now):
            if one.unplanned:
                continue
            record, known = self.book.record.parameters[one.name], one.change is not None
            self._compare_own_states(one)
            wanted = one.gradient if one.change is None else one.change
            add_changes([record.update], one.weight, after, wanted, [len(one.weight)], known)
            if one.change is not None:
                self._follow_directions(one, one.weight.double() + one.change.double(), after.double())
            self._look_at_updates([one], [one.change if known else after.double() - one.weight.double()])

    def _follow_directions(self, one: Stepped, wanted: torch.Tensor, after: torch.Tensor) -> None:
        """Count the directions of stochastic rounding."""
        if one.name in self.book.fixed:
            decisions = self._directions.setdefault(one.name, RoundingDecisions())
            record = self.book.record.parameters[one.name]
            decisions.add(record, record.dtype, wanted, after)

    def _compare_own_states(self, one: Stepped) -> None:
        """States of halfulp's optimizers, decoded from however they are stored."""
        if not one.wanted_states:
            return
        assert isinstance(self.optimizer, Optimizer)
        records = self.book.record.parameters[one.name].states
        after = decoded_states(self.optimizer._plans[one.parameter], self.book.key(one.name))
        for key, wanted in one.wanted_states.items():
            before = one.states[key]
            change = wanted.double() - before.double()
            add_changes([records.setdefault(key, Realised())], before, after[key], change, [len(before)])

    def _look_at_updates(self, group: Sequence[Stepped], changes: Sequence[torch.Tensor | None]) -> None:
        found = []
        for one, change in zip(group, changes):
            if change is not None:
                dtype = self.book.record.parameters[one.name].dtype
                flat = change if one.weight.dtype == torch.float64 else change.float()
                found.append((one.name, one.kind, Stored(flat.contiguous(), _held(dtype))))
        self.book.look_all("update", found)

    def _look_at_states(self, stepped: Sequence[Stepped]) -> None:
        by_role: dict[Role, list[tuple[str, str, Stored]]] = {}
        for one in stepped:
            record = self.book.record.parameters[one.name]
            for key, value in self._state_of(one.parameter).items():
                if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and key not in WHOLE:
                    record.state_dtypes[key] = value.dtype
                    found = stored(value)
                    if key in MOMENTS and found is not None:
                        by_role.setdefault(MOMENTS[key], []).append((one.name, one.kind, found))
        for role, named in by_role.items():
            self.book.look_all(role, named)

    def _note(self, name: str, group: dict[str, Any], parameter: torch.Tensor) -> None:
        record = self.book.record.parameters[name]
        assert parameter.grad is not None
        record.gradient_dtype = parameter.grad.dtype
        record.options = {key: _plain_option(value) for key, value in group.items() if _is_option(key, value)}
        if isinstance(self.optimizer, Optimizer):
            chosen = group.get("weight_update")
            record.weight_update = str(getattr(chosen, "name", chosen) or record.weight_update)

    def _sample(self, name: str, found: Stored) -> torch.Tensor:
        return sample_of(found.flat.reshape(-1), self.book.key(name))

    def _weight_now(self, one: Stepped) -> torch.Tensor:
        if isinstance(self.optimizer, Optimizer):
            shown = represented(self.optimizer, one.parameter, self.book.key(one.name))
            if shown is not None:
                return shown
        found = stored(one.parameter)
        assert found is not None
        return _scaled(self._sample(one.name, found), found)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        # Indexing a defaultdict would make an entry that the optimizer takes for a started one.
        return self.optimizer.state.get(parameter, {})

    def _state(self, name: str, key: str, value: Any, size: int) -> Any:
        """A state's sample, a copy of a number of the whole tensor; None of what is neither."""
        if key in WHOLE or not isinstance(value, torch.Tensor):
            return value.clone() if isinstance(value, torch.Tensor) else value
        found = stored(value)
        if found is None or found.flat.numel() != size:
            return None  # it belongs to no element
        return _scaled(self._sample(name, found), found)


def _scaled(sample: torch.Tensor, found: Stored) -> torch.Tensor:
    return sample if found.scale == 1.0 else sample * found.scale


def _number(value: Any, otherwise: float) -> float:
    if value is None:
        return otherwise
    return float(value) if isinstance(value, int | float | torch.Tensor) else otherwise


def _held(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.float32


def _is_option(key: str, value: Any) -> bool:
    if key in ("params", "param_names", "identities"):
        return False
    return isinstance(value, bool | int | float | str | tuple) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )


def _plain_option(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain_option, value))
    return value.item() if isinstance(value, torch.Tensor) else value
