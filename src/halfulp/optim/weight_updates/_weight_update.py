"""The weight update: how a float32 update enters a narrow parameter. The only code that writes a parameter."""

# ruff: noqa: F821  names that are free here (weight_load, fitting, ...) are bound when a kernel is written
from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from ..._names import read_own_docstring, register_entry
from ...kernels import Trace, run_trace_on_tensors
from ...kernels._device_function import ElementTraceBuilder, bind_free_variables
from ...kernels._trace import RecordedFunction
from .._storage import Store, make_nan_canonical

WeightTensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class WeightUpdate:
    """The base of weight updates: how an update u is added to a parameter of few bits.

    A subclass gives the tensors that lie beside the parameter, and its arithmetic once, as device functions
    (`make_bindings`); torch runs them on tensors, and kernels are written from them. One that `compensates` adds u to
    its parts and not to the weight that they stand for. One that `scales` keeps floats that one power of two
    multiplies, as the payload of a scaled parameter wants.
    """

    name: ClassVar[str]
    feeds_back: ClassVar[bool] = False
    compensates: ClassVar[bool] = False
    scales: ClassVar[bool] = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Trainers save param groups as they are, as Lightning's BaseFinetuning does, and load with weights_only.
        if type(WEIGHT_UPDATE_BY_NAME.get(self.name)) is type(self):
            return find_weight_update, (self.to_dict(),)
        return super().__reduce_ex__(protocol)

    def check_store(self, store: Store) -> None:
        """Raise ValueError if this weight update does not apply to parameters of this store."""

    def describe_auxiliary_tensors(self, store: Store) -> tuple[tuple[str, torch.dtype], ...]:
        """Name and dtype of each tensor kept beside the parameter."""
        return ()

    def list_random_bits_per_draw(self, store: Store) -> tuple[int, ...]:
        """Return the random bits of each stochastic rounding that a step makes."""
        return ()

    def make_bindings(self, store: Store) -> dict[str, object]:
        """Return `read_weight(a0, a1, a2, a3, i)` and `write_weight(a0, a1, a2, a3, i, w, h0, h1, h2, u, r0, r1)`.

        The first returns the weight and three values for the second, which returns the weight it has stored. Where a
        step changes the scale of a scaled parameter, w, h0 and h1 arrive under the new one, and h2 as it was returned.
        One with auxiliary tensors gives `fill_weight(a0, a1, a2, a3, i, value)` too, which stores what is nearest to a
        float32, without draws; by default the parameter alone is written.

        Free names in them stand for what is bound beside them (`make_store_bindings`): `weight_load(address, i)` is the
        code of a parameter's element, `weight_save(address, i, code)` writes it, `weight_real(code)` is its float32,
        and `weight_nearest(x, random)` and `weight_round(x, random)` are the codes for a float32, the latter by the
        rounding of the weight.
        """
        raise AssertionError("every weight update binds its device functions")

    def read(self, store: Store, parts: WeightTensors) -> torch.Tensor:
        """Return the float32 weight that the parameter and its auxiliary tensors represent."""
        reader = _record_reader(self, store)
        return run_trace_on_tensors(reader.trace, parts, results=reader.results)[0][0]

    def fill(self, store: Store, parts: WeightTensors, value: torch.Tensor) -> None:
        """Set the parts to the nearest representation of a float32 value."""
        run_trace_on_tensors(_record_filler(self, store), parts, {"value": value})

    def make_neutral_values(self, store: Store, payload: torch.Tensor) -> torch.Tensor | int:
        """Return the value of each auxiliary tensor beside a parameter that is the whole weight by itself."""
        return 0

    def to_dict(self) -> dict[str, object]:
        """Return the name and the fields, as plain data."""
        return {"name": self.name, **dataclasses.asdict(self)}


@functools.cache
def _record_reader(update: WeightUpdate, store: Store) -> RecordedFunction:
    element, names = ElementTraceBuilder(4), update.make_bindings(store)
    read: Any = names["read_weight"]
    return RecordedFunction(
        element.trace, (bind_free_variables(read, names)(*element.arrays, element.index)[0].number,)
    )


@functools.cache
def _record_filler(update: WeightUpdate, store: Store) -> Trace:
    nearest: dict[str, object] = {"weight_round": store.round_to_nearest, "residual_round": store.round_to_nearest}
    element, names = ElementTraceBuilder(4), update.make_bindings(store) | nearest
    fill: Any = names.get("fill_weight", fill_plain_weight)
    bind_free_variables(fill, names)(*element.arrays, element.index, make_nan_canonical(element.add_input("value")))
    return element.trace


@functools.cache
def check_drawn_words(update: WeightUpdate, store: Store) -> None:
    """Raise ValueError if a weight update looks at random words that it does not name: they would be zeros."""
    element, names = ElementTraceBuilder(4), update.make_bindings(store)
    words = [element.add_input(name, "w32") for name in ("r0", "r1")]
    arrays, u = (*element.arrays, element.index), element.add_input("u")
    read, write = (bind_free_variables(cast(Any, names[name]), names) for name in ("read_weight", "write_weight"))
    write(*arrays, *read(*arrays), u, *words)
    draws = update.list_random_bits_per_draw(store)
    undrawn = {word.number for word in words[len(draws) :]}
    if any(undrawn & set(operands) for _, operands, _ in element.trace.lines):
        raise ValueError(
            f"weight update {update.name!r} rounds by more random words than the {len(draws)} of its "
            "list_random_bits_per_draw: give the bits of each there, as (store.random_bits,)"
        )


def read_plain(a0, a1, a2, a3, i):
    """Device function: a weight that is its parameter."""
    w = weight_real(weight_load(a0, i))
    return w, w, w, w


def write_plain(a0, a1, a2, a3, i, w, h0, h1, h2, u, r0, r1):
    """Device function: the sum, rounded into the parameter."""
    code = weight_round(w + u, r0)
    weight_save(a0, i, code)
    return weight_real(code)


def fill_plain_weight(a0, a1, a2, a3, i, value):
    """Device function: the parameter nearest to a value."""
    weight_save(a0, i, weight_nearest(value, value))


def make_store_bindings(store: Store, stochastic: bool) -> dict[str, object]:
    """Return, by name, the device functions that read, write and round a parameter of a store."""
    return {
        "weight_load": store.load_code,
        "weight_save": store.store_code,
        "weight_real": store.decode_code,
        "weight_nearest": store.round_to_nearest,
        "weight_round": store.round_stochastically if stochastic else store.round_to_nearest,
        **dict(store.constants),
    }


def read_rounding_name(given: object) -> str:
    """Return the name of a rounding that a weight update can use, from its name or object."""
    name = given if isinstance(given, str) else getattr(given, "name", None)
    if name not in ("nearest", "stochastic"):
        raise ValueError(f"a weight update rounds by 'nearest' or 'stochastic', got {given!r}")
    if getattr(given, "seed", None) is not None:
        raise ValueError(f"{given!r} has a seed of its own: inside an optimizer give seed= to the optimizer instead")
    return name


WEIGHT_UPDATE_BY_NAME: dict[str, WeightUpdate] = {}


def register_weight_update(weight_update: WeightUpdate) -> None:
    """Make a weight update known by its name, to optimizers, recipes and files.

    Raises:
        TypeError: it is no WeightUpdate.
        ValueError: another weight update has the name, or the class of this one has no docstring.
    """
    if not isinstance(weight_update, WeightUpdate):
        raise TypeError(f"a weight update is an object of a subclass of hu.optim.WeightUpdate, got {weight_update!r}")
    if weight_update.name in WEIGHT_UPDATE_BY_NAME:
        raise ValueError(f"weight update {weight_update.name!r} exists already: choose another name")
    register_entry(
        "weight update",
        WEIGHT_UPDATE_BY_NAME,
        weight_update.name,
        weight_update,
        read_own_docstring(type(weight_update)),
    )


def find_weight_update(given: WeightUpdate | str | dict[str, Any]) -> WeightUpdate:
    """Return a weight update by object, by name, or from its `to_dict`."""
    if isinstance(given, WeightUpdate):
        return given
    name = given.get("name") if isinstance(given, dict) else given
    if not isinstance(name, str) and hasattr(given, "name"):
        name = read_rounding_name(given)
    if not isinstance(name, str):
        raise TypeError(f"weight_update takes a name or a WeightUpdate object, got {given!r}")
    if name not in WEIGHT_UPDATE_BY_NAME:
        near = difflib.get_close_matches(name, WEIGHT_UPDATE_BY_NAME, 3, 0.4) or sorted(WEIGHT_UPDATE_BY_NAME)
        raise ValueError(f"weight_update {name!r} is unknown: did you mean {' or '.join(near)}?")
    found = WEIGHT_UPDATE_BY_NAME[name]
    if not isinstance(given, dict):
        return found
    fields = {k: find_weight_update(v) if isinstance(v, dict) else v for k, v in given.items() if k != "name"}
    if name in ("split", "split-stochastic") and fields.pop("rounding", None) == "stochastic":
        found = WEIGHT_UPDATE_BY_NAME["split-stochastic"]  # files say so in a field too
    return dataclasses.replace(found, **fields)
