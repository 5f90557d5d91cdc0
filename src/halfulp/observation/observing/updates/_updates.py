"""Updates: samples of weights, gradients and states around an optimizer's step, beside what was wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ....optim import Optimizer
from ...record._record import Realised, Role
from ...sampling._plain import Stored, stored
from ...sampling._sampler import sampled_all
from .._notebook import Notebook
from ._elementwise import ELEMENTWISE, WHOLE, Shadow, decay_factor
from ._halfulp_updates import decoded_states, halfulp_change, represented
from ._realised import add_changes
from ._rounding_decisions import RoundingDecisions, draws

_EMPTY = torch.empty(0, dtype=torch.float32, device="cpu")
# Roles of states, by their names in torch.optim and here.
MOMENTS: dict[str, Role] = {
    **dict.fromkeys(("exp_avg", "momentum_buffer", "grad_avg", "prev"), "first moment"),
    **dict.fromkeys(("exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq", "exp_inf", "acc_delta"), "second moment"),
}
# Averages of squares: what holds them too coarsely loses their decay and keeps their growth, so that decay alone tells.
AVERAGED_SQUARES = ("exp_avg_sq", "square_avg", "acc_delta")


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
        self._after: dict[tuple[str, str], torch.Tensor] = {}
        self.rounded: dict[str, RoundingDecisions] = {}

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
        self._stepped = [
            Stepped(name, kind, parameter, group, weight.flat.numel(), _scaled(sample, weight), _EMPTY)
            for (name, kind, parameter, group, weight), sample in zip(entries, samples)
        ]
        slopes = sampled_all([(found.flat, self.book.key(name)) for name, _, found in gradients])
        for one, slope, (_, _, gradient) in zip(self._stepped, slopes, gradients):
            factor = gradient.scale / divisor
            one.gradient = slope if factor == 1.0 else slope * factor
            record = self.book.record.parameters[one.name]
            record.gradients += 1
            record.nonzero_gradients += int(np.count_nonzero(one.gradient.numpy()))
        self._sample_states(self._stepped)
        for one in self._stepped if isinstance(self.optimizer, Optimizer) else ():
            self._represent(one)

    def _sample_states(self, stepped: list[Stepped]) -> None:
        """Sample the states before the step, and copy the numbers of whole tensors."""
        wanted: list[tuple[Stepped, str, Stored]] = []
        for one in stepped:
            for key, value in self._state_of(one.parameter).items():
                if key in WHOLE or not isinstance(value, torch.Tensor):
                    one.states[key] = value.clone() if isinstance(value, torch.Tensor) else value
                    continue
                found = stored(value)
                one.states[key] = None  # of what belongs to no element
                if found is not None and found.flat.numel() == one.elements:
                    wanted.append((one, key, found))
        samples = sampled_all([(found.flat, self.book.key(one.name)) for one, _, found in wanted])
        for (one, key, found), sample in zip(wanted, samples):
            one.states[key] = _scaled(sample, found)

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
        now = self._weights_now(stepped)
        self._after = self._look_at_states(stepped)
        known: list[int] = []
        for positions in self._batches(stepped):
            known += self._compare(positions, stepped, now)
        others = [k for k in range(len(stepped)) if k not in set(known)]
        if others:
            self._count_unknown([stepped[k] for k in others], [now[k] for k in others])
        self._after = {}

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
        weights, gradients = (torch.cat([getattr(one, n) for one in group]).double() for n in ("weight", "gradient"))
        states = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group[0].states.items()
            if key in WHOLE
        }
        before = {
            key: torch.cat([one.states[key] for one in group]).double() for key in group[0].states if key not in states
        }
        shadow = self._shadows.get(id(options))
        if shadow is None:
            shadow = self._shadows[id(options)] = Shadow(self.optimizer)
        moved, wanted_states = shadow.step(
            weights, gradients, {**states, **{key: value.clone() for key, value in before.items()}}, options
        )
        records = [self.book.record.parameters[one.name] for one in group]
        after = torch.cat([now[k] for k in positions]).double()
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
        found = [self._after.get((one.name, key)) for one in group]
        samples = [sample for sample in found if sample is not None]
        if len(samples) < len(group):
            return
        after = torch.cat(samples)
        records = [self.book.record.parameters[one.name].states.setdefault(key, Realised()) for one in group]
        add_changes(records, there, after, _followed(key, wanted - there), sizes)

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
            decisions = self.rounded.setdefault(one.name, RoundingDecisions())
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
            change = _followed(key, wanted.double() - before.double())
            add_changes([records.setdefault(key, Realised())], before, after[key], change, [len(before)])

    def _look_at_updates(self, group: Sequence[Stepped], changes: Sequence[torch.Tensor | None]) -> None:
        found = []
        for one, change in zip(group, changes):
            if change is not None:
                dtype = self.book.record.parameters[one.name].dtype
                flat = change if one.weight.dtype == torch.float64 else change.float()
                found.append((one.name, one.kind, Stored(flat.contiguous(), _held(dtype))))
        self.book.look_all("update", found)

    def _look_at_states(self, stepped: Sequence[Stepped]) -> dict[tuple[str, str], torch.Tensor]:
        """Count the states after the step, and return their samples by the names of parameter and state."""
        by_role: dict[Role | None, list[tuple[Stepped, str, Stored]]] = {}
        for one in stepped:
            record = self.book.record.parameters[one.name]
            for key, value in self._state_of(one.parameter).items():
                if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or key in WHOLE:
                    continue
                record.state_dtypes[key] = value.dtype
                found = stored(value)
                if found is not None and found.flat.numel() == one.elements:
                    by_role.setdefault(MOMENTS.get(key), []).append((one, key, found))
        samples = {}
        for role, named in by_role.items():
            if role is None:
                taken = sampled_all([(found.flat, self.book.key(one.name)) for one, _, found in named])
            else:
                taken = self.book.look_all(role, [(one.name, one.kind, found) for one, _, found in named])
            for (one, key, found), sample in zip(named, taken):
                samples[one.name, key] = _scaled(sample, found)
        return samples

    def _note(self, name: str, group: dict[str, Any], parameter: torch.Tensor) -> None:
        record = self.book.record.parameters[name]
        assert parameter.grad is not None
        record.gradient_dtype = parameter.grad.dtype
        record.options = {key: _plain_option(value) for key, value in group.items() if _is_option(key, value)}
        if isinstance(self.optimizer, Optimizer):
            chosen = group.get("weight_update")
            record.weight_update = str(getattr(chosen, "name", chosen) or record.weight_update)

    def _weights_now(self, stepped: Sequence[Stepped]) -> list[torch.Tensor]:
        """Samples of the weights after the step."""
        shown: list[torch.Tensor | None] = [None] * len(stepped)
        if isinstance(self.optimizer, Optimizer):
            shown = [represented(self.optimizer, one.parameter, self.book.key(one.name)) for one in stepped]
        found = [stored(one.parameter) for one in stepped]
        samples = sampled_all(
            [(numbers.flat, self.book.key(one.name)) for one, numbers in zip(stepped, found) if numbers is not None]
        )
        given = iter(samples)
        now = [one.weight if numbers is None else _scaled(next(given), numbers) for one, numbers in zip(stepped, found)]
        return [plain if own is None else own for own, plain in zip(shown, now)]

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        # Indexing a defaultdict would make an entry that the optimizer takes for a started one.
        return self.optimizer.state.get(parameter, {})


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


def _followed(key: str, change: torch.Tensor) -> torch.Tensor:
    """Return the wanted changes of a state that are counted; 0 for the others."""
    return change.clamp(max=0) if key in AVERAGED_SQUARES else change
