"""A scaler's state as plain data and back."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch

from .._messages import write_differing_names
from ..formats import Format
from ._site import (
    GLOBAL_SITE_KEY,
    UNIFORM_SCALE_REASON,
    OverflowMemory,
    Site,
    Sites,
    get_exponent_of_power_of_two_scale,
)


def convert_sites_to_plain_data(sites: Sites, resume_iteration: int) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return exponents and histories as plain data: pairs of a site's key and its entries.

    A tuple is one entry to torch.distributed.checkpoint, which of a dict loads only the names that it finds before.
    """
    found: dict[str, dict[str, Any]] = {
        site.key: {
            "exponent": site._exponent,
            "merged": site.merge_reason,
            "measured": site.is_measured,
            "narrow": site.format is not None,
            "overflows": site.overflow_count,
            "memory": [site.memory.exponent, site.memory.until_iteration],
            "history": [dict(entry) for entry in site.amax_history],
        }
        for site in sites.values()
    }
    # Processes have exponents of their own, and any may write this entry: what they are meant for belongs in it, too.
    found[GLOBAL_SITE_KEY]["reference"] = [sites.global_site.reference_binade, resume_iteration]
    return tuple(found.items())


def read_site_entries_by_key(state_dict: Any) -> dict[str, dict[str, Any]]:
    """Read a scaler's state and return its sites by key; a GradScaler's, which has none, is refused."""
    place = "the state_dict"
    if isinstance(state_dict, Mapping) and "scale" in state_dict and not {"sites", "progress"} & state_dict.keys():
        raise ValueError(
            "a GradScaler's state has no sites: start from its scale instead, "
            f"AdaptiveGradScaler(model, init_scale={state_dict['scale']!r})"
        )
    try:
        exponent = get_exponent_of_power_of_two_scale(
            "'scale' of the state_dict", _read_entry(state_dict, "scale", int, float)
        )
        _read_entry(state_dict, "_growth_tracker", int)
        progress = _read_entry(state_dict, "progress", list, tuple)
        count = len([_read_entry(progress, i, int) for i in range(len(progress))])
        if count != _PROGRESS_COUNTERS_LENGTH:
            raise ValueError(f"'progress' has {count} numbers, not {_PROGRESS_COUNTERS_LENGTH}")
        given = dict(_read_entry(state_dict, "sites", list, tuple, dict))
        found = {}
        for key in (*given, GLOBAL_SITE_KEY):
            place = f"site {key!r} of the state_dict"
            found[key] = _read_site_entries(_read_entry(given, key, Mapping))
        reference = _read_entry(given[GLOBAL_SITE_KEY], "reference", list, tuple)
        found[GLOBAL_SITE_KEY]["reference"] = [_read_entry(reference, 0, int, NoneType), _read_entry(reference, 1, int)]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{place} is damaged ({type(error).__name__}: {error}), got {reprlib.repr(state_dict)}: load what a "
            "scaler's state_dict() gave in this version of halfulp, or start anew, as from "
            "AdaptiveGradScaler(model, init_scale=state_dict['scale'])"
        ) from error
    if found[GLOBAL_SITE_KEY]["exponent"] != exponent:
        raise ValueError(
            f"'scale' of the state_dict is 2^{exponent}, and that of its sites is not: load what a "
            "scaler's state_dict() gave"
        )
    return found


_PROGRESS_COUNTERS_LENGTH = 5
# The types of a site's entries that hold one value.
_TYPES_BY_SITE_ENTRY: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("exponent", "overflows"), (int,)),
    **dict.fromkeys(("measured", "narrow"), (bool,)),
    "merged": (str, NoneType),
}


def _read_entry(given: Any, name: Any, *kinds: type) -> Any:
    """Return an entry that is of one of these types, or raise."""
    if not isinstance(given[name], kinds):
        raise TypeError(f"{name!r} is {reprlib.repr(given[name])}")
    return given[name]


def _read_site_entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a site, each of its own type, or raise."""
    memory, history = (_read_entry(values, name, list, tuple) for name in ("memory", "history"))
    if len(memory) != 2:
        raise ValueError("'memory' has two numbers")
    return {
        **{name: _read_entry(values, name, *types) for name, types in _TYPES_BY_SITE_ENTRY.items()},
        "memory": [_read_entry(memory, i, int, NoneType) for i in range(2)],
        "history": [{kind: _read_entry(entry, kind, int, float) for kind in dict(entry)} for entry in history],
    }


def check_saved_sites_match(given: dict[str, Any], own: set[str], modules: set[str]) -> None:
    """Compare the sites of a state with those of a scaler, or with the modules of models that have not run yet."""
    known = len(own) > 1
    missing = sorted(own - given.keys()) if known else []
    unknown = sorted(key for key in given.keys() - own if known or not _is_key_of_module(key, modules))
    if missing or unknown:
        raise ValueError(
            f"this state_dict is of another model: it {write_differing_names(missing, unknown)}. Load the one that was "
            "saved with this model"
        )


def _is_key_of_module(key: str, modules: set[str]) -> bool:
    """Return whether a key names a module, an operator in one, or a derivative that only a compiled graph has."""
    key = key.partition("#")[0]
    place, _, name = key.rpartition(".")
    is_operator = any(hasattr(home, name) for home in (torch, torch.Tensor, torch.nn.functional))
    return key in modules or (is_operator and place in modules) or place == "backward"


def load_sites(given: dict[str, Any], sites: Sites, narrow_format: Format) -> None:
    """Load every site of a state; ``narrow_format`` is the format of those that have one."""
    for key, values in given.items():
        site: Site = sites.global_site if key == GLOBAL_SITE_KEY else sites.get_or_create_site(key)
        site.exponent = values["exponent"]
        # Whether one scale serves all sites comes from the current policy, not from the file.
        if site.merge_reason != UNIFORM_SCALE_REASON:
            site.merge_reason = None if values["merged"] == UNIFORM_SCALE_REASON else values["merged"]
        site.is_measured = values["measured"]
        site.format = narrow_format if values["narrow"] else None
        site.overflow_count = values["overflows"]
        site.memory = OverflowMemory(*values["memory"])
        site.amax_history.clear()
        site.amax_history.extend(dict(entry) for entry in values["history"])
