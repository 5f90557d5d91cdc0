"""The precision contract: which dtypes, weight updates, states and scales a run has, to be saved and checked."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._messages import name_type, quote
from ..mctensor import MCTensor
from ..optim import Optimizer
from ..optim._optimizer import unwrap_optimizer
from ..optim.parameters._narrow_groups import read_parameter_name, walk_group_parameters
from ..optim.parameters._random_identity import strip_wrapper_prefixes
from ..scaled import ScaledTensor

CONTRACT_KEY = "precision_contract"
_CONTRACT_VERSION = 1
_MOST_PRINTED_DIFFERENCES = 5


@dataclass(frozen=True)
class TensorPrecision:
    """The precision of one tensor: dtype, storage, weight update, states, scale.

    Attributes:
        dtype: what autograd and the model see.
        storage: dtype of the stored numbers; "2 x bfloat16" of two components.
        weight_update: of an optimizer of halfulp, "nearest" of any other; None for what no optimizer steps.
        states: dtype of each of the optimizer's states; empty before the first step.
        scale: "none", "per tensor" or "per component set" (one scale for all components).
    """

    dtype: str
    storage: str
    weight_update: str | None = None
    states: Mapping[str, str] = field(default_factory=dict)
    scale: str = "none"


@dataclass(frozen=True)
class Contract:
    """A precision contract: the precision of every parameter and floating-point buffer, by name.

    Attributes:
        tensors: in the order of the model.
    """

    tensors: Mapping[str, TensorPrecision]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, for a dict that torch.save writes (key "precision_contract"), or for DCP."""
        return {"version": _CONTRACT_VERSION, "tensors": {name: asdict(one) for name, one in self.tensors.items()}}

    def metadata(self) -> dict[str, str]:
        """Return the contract as the metadata of `safetensors.torch.save_file(..., metadata=)`."""
        return {CONTRACT_KEY: json.dumps(self.to_dict())}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Contract:
        """Return the contract that `to_dict` gave, alone, as JSON, or under its key of a checkpoint or metadata.

        Raises:
            ValueError: it holds none, or one of a later version.
        """
        given: object = data[CONTRACT_KEY] if isinstance(data, Mapping) and CONTRACT_KEY in data else data
        try:
            held: Any = json.loads(given) if isinstance(given, str) else given
            version, tensors = held["version"], held.get("tensors") or {}
            if version == _CONTRACT_VERSION:
                return cls({name: TensorPrecision(**{"states": {}, **one}) for name, one in tensors.items()})
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                f"no precision contract in {name_type(given)}: give what hu.contract(...).to_dict() returned"
            ) from None
        raise ValueError(
            f"the precision contract is of version {version!r}, known is {_CONTRACT_VERSION}: update halfulp"
        )

    def check(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        allow: Iterable[str] = (),
    ) -> None:
        """Raise unless model and optimizer are as this contract says: on load, and before a resumed run's first step.

        Args:
            model: that resumes.
            optimizer: its optimizer, or several; without one, weight updates and states are not compared.
            allow: globs over names, each with a field after a colon where only that may differ: "head.*",
                "*:weight_update".

        Raises:
            TypeError: no module or no optimizer.
            ValueError: a difference that is not allowed.
        """
        here = contract(model, optimizer)
        globs = [allow] if isinstance(allow, str) else list(allow)
        wrong = [
            (name, key, words)
            for name, key, words in _list_differences(self.tensors, here.tensors, optimizer is not None)
            if not any(fnmatch.fnmatchcase(x, glob) for glob in globs for x in (name, f"{name}:{key}"))
        ]
        if wrong:
            shown = wrong[:_MOST_PRINTED_DIFFERENCES]
            rest = f"; and {len(wrong) - len(shown)} more" if len(wrong) > len(shown) else ""
            said = "; ".join(f"{name}: {words}" for name, _, words in shown)
            raise ValueError(
                f"the precision contract does not hold: {said}{rest}. Convert the model and make the optimizer as the "
                f"run did that saved it, or allow it: allow=({':'.join(wrong[0][:2])!r},)"
            )

    def __str__(self) -> str:
        """Return one line for each precision, with the names of its tensors."""
        kinds: dict[str, list[str]] = {}
        for name, precision in self.tensors.items():
            kinds.setdefault(_describe_precision(precision), []).append(name)
        return "\n".join(f"{words}: {quote(names)}" for words, names in kinds.items())


def contract(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
) -> Contract:
    """Return how every parameter and floating-point buffer is held: dtype, storage, weight update, states, scale.

    Save it beside a checkpoint (``to_dict()`` under "precision_contract", or ``metadata()`` in safetensors) and `check`
    it on load and on resume: a run that comes back in another precision is an error, not a worse loss.

    Args:
        model: plain, with scaled or multi-component parameters, or sharded by fully_shard.
        optimizer: its optimizer, or several, of torch or halfulp; None leaves weight updates and states out.

    Raises:
        TypeError: no module, or no optimizer.
        ValueError: an optimizer of another model.

    >>> import halfulp as hu
    >>> model = nn.Linear(4, 2).bfloat16()
    >>> held = contract(model, hu.optim.AdamW(model.named_parameters(), weight_update="kahan"))
    >>> print(held)
    bfloat16, weight_update kahan: 'weight', 'bias'
    >>> held.check(model.float())
    Traceback (most recent call last):
    ...
    ValueError: the precision contract does not hold: weight: dtype was bfloat16, is float32; ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {name_type(model)}: give a torch.nn.Module")
    given: Any = [] if optimizer is None else optimizer
    optimizers = [unwrap_optimizer(one) for one in (given if isinstance(given, list | tuple) else [given])]
    for one in optimizers:
        if not isinstance(getattr(one, "param_groups", None), list):
            raise TypeError(f"the optimizer is {name_type(one)}: give a torch optimizer, a list of them, or None")
    stepped = {
        id(parameter): _describe_update_and_states(one, group, position)
        for one in optimizers
        for group, position, parameter in walk_group_parameters(one)
    }
    held: list[tuple[str, Tensor]] = list(model.named_parameters())
    held += [(name, x) for name, x in model.named_buffers() if x.is_floating_point() or x.is_complex()]
    if stepped and not any(id(tensor) in stepped for _, tensor in held):
        raise ValueError(
            f"the optimizer holds none of the parameters of this {type(model).__name__}: give the one that trains it"
        )
    names = strip_wrapper_prefixes(name for name, _ in held)
    tensors = {name: tensor for name, (_, tensor) in zip(names, held, strict=True)}
    return Contract(
        {name: _describe_tensor_precision(x, *stepped.get(id(x), (None, {}))) for name, x in tensors.items()}
    )


def _list_differences(
    before: Mapping[str, TensorPrecision], after: Mapping[str, TensorPrecision], with_optimizer: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield name and field of what differs, "tensor" where one side has none, in words; states where both have some."""
    for name in {**before, **after}:
        ours, theirs = before.get(name), after.get(name)
        if ours is None or theirs is None:
            a, b = ("absent" if x is None else _describe_precision(x) for x in (ours, theirs))
            yield name, "tensor", f"tensor was {a}, is {b}"
            continue
        for key in asdict(ours):
            old, new = getattr(ours, key), getattr(theirs, key)
            unknown = key in ("weight_update", "states") and (not with_optimizer or not old or not new)
            if old != new and not unknown:
                yield name, key, f"{key} was {_format_contract_value(old)}, is {_format_contract_value(new)}"


def _describe_update_and_states(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], position: int
) -> tuple[str, dict[str, str]]:
    """Return the weight update of a parameter and the dtypes of its states."""
    update, parameter = "nearest", group["params"][position]
    if isinstance(optimizer, Optimizer):
        # A plan would make the states that it lacks; its specification does not.
        update = optimizer._choose_step_spec(group, parameter, None, read_parameter_name(group, position)).update.name
    states = {key: value for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}
    return update, {key: _name_dtype(x.dtype) for key, x in states.items() if key != "step" and "checksum" not in key}


def _describe_tensor_precision(tensor: Tensor, weight_update: str | None, states: dict[str, str]) -> TensorPrecision:
    inner = getattr(tensor, "_local_tensor", tensor)
    storage, scale = _name_dtype(inner.dtype), "none"
    if isinstance(inner, MCTensor):
        storage = f"{len(inner.components)} x {_name_dtype(inner.components[0].dtype)}"
        scale = "none" if inner.scale is None else "per component set"
    elif isinstance(inner, ScaledTensor):
        storage, scale = _name_dtype(inner.payload.dtype), "per tensor"
    return TensorPrecision(_name_dtype(tensor.dtype), storage, weight_update, states, scale)


def _describe_precision(precision: TensorPrecision) -> str:
    said = {
        f"stored as {precision.storage}": precision.storage != precision.dtype,
        f"scale {precision.scale}": precision.scale != "none",
        f"weight_update {precision.weight_update}": precision.weight_update is not None,
        f"states {_format_contract_value(precision.states)}": precision.states,
    }
    return ", ".join([precision.dtype, *(words for words, is_said in said.items() if is_said)])


def _format_contract_value(given: object) -> str:
    if isinstance(given, Mapping):
        return " and ".join(f"{key} {value}" for key, value in given.items()) or "none"
    return str(given)


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
