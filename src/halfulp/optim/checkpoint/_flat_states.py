"""What is said of a flat state (torch's flatten_optimizer_state_dict) that another kind of optimizer has saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..._messages import listed
from ...rounding._random_bits import STREAM_VERSION

_GROUPS, _STATES = "param_groups.", "state."


def explain_missing_entry(key: str, flat: Mapping[str, Any]) -> str:
    """Return why a flat state lacks an entry, and what to write.

    Args:
        key: the entry, "param_groups.<parameter>.<option>" or "state.<parameter>.<state>".
        flat: the state that lacks it.
    """
    place = _STATES if key.startswith(_STATES) else _GROUPS
    parameter, _, entry = key.removeprefix(place).rpartition(".")
    if not any(held.startswith(f"{place}{parameter}.") for held in flat):
        return (
            f"the flat state holds nothing of parameter {parameter}, which this optimizer steps: it is of another "
            "model, or of other parts of it; give the state of all parameters that are stepped here"
        )
    lack = f"the flat state lacks {entry!r} of parameters {listed(_parameters(flat, place, entry))}"
    if entry == "identities":
        return (
            f"{lack}: it was saved by an optimizer over named parameters, and this one has no names: make it from "
            "model.named_parameters()"
        )
    if entry == "param_names":
        return (
            f"{lack}: it was saved by an optimizer over unnamed parameters, and this one has names: make it from "
            "model.parameters(); to go over to names, load it there, and give its state_dict() to the load_state_dict "
            "of an optimizer made from model.named_parameters()"
        )
    if entry == "random_stream":
        return (
            f"{lack}: it was saved under version 1 of the stream of random bits; to go on with those of version "
            f"{STREAM_VERSION}, which are others than the saved run's, give each parameter that entry, {STREAM_VERSION}"
        )
    return (
        f"{lack}: another optimizer, or one with other options, has saved it; load it into an optimizer made as that "
        "one was, and go on there"
    )


def _parameters(flat: Mapping[str, Any], place: str, entry: str) -> list[str]:
    """Return the parameters of which a flat state holds something, but not an entry."""
    options = {key.removeprefix(place).rpartition(".")[0] for key in flat if key.startswith(place)}
    return sorted(name for name in options if f"{place}{name}.{entry}" not in flat)
