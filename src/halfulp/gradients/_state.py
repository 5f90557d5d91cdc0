"""A scaler's state as plain data and back."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from .._messages import name_differences
from ..formats import Format
from ._site import GLOBAL_KEY, UNIFORM_SCALE_REASON, OverflowMemory, Site, Sites, parse_scale_exponent


def save_sites(sites: Sites, resumes: int) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return exponents and histories as plain data: pairs of a site's key and its entries.

    A tuple is one entry to torch.distributed.checkpoint, which of a dict loads only the names that it finds before.
    Processes have exponents of their own, and it may be any of them that writes an entry: what exponents are meant for
    stands in the same one, and the iteration from which they follow losses.
    """
    found: dict[str, dict[str, Any]] = {
        site.key: {
            "exponent": site._exponent,
            "merged": site.merged,
            "measured": site.measured,
            "narrow": site.format is not None,
            "overflows": site.overflows,
            "memory": [site.memory.exponent, site.memory.until],
            "history": [dict(entry) for entry in site.history],
        }
        for site in sites
    }
    found[GLOBAL_KEY]["reference"] = [sites.global_site.loss_binade, resumes]
    return tuple(found.items())


# By the name of an entry: its type, or of how many whole numbers, or None, it is a list.
_TORCH_ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("scale", "growth_factor", "backoff_factor"), (int, float)),
    **dict.fromkeys(("growth_interval", "_growth_tracker"), int),
}
_SITE_ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("exponent", "overflows"), int),
    **dict.fromkeys(("measured", "narrow"), bool),
    "history": (list, tuple),
    "memory": 2,
    "merged": (str, type(None)),
}


def read_sites(state_dict: Any) -> dict[str, Any] | None:
    """Check a scaler's state and return its sites by key; None for a GradScaler's, which has no sites."""
    _check_fields("the state_dict", state_dict, _TORCH_ENTRIES)
    parse_scale_exponent("'scale' of the state_dict", state_dict["scale"])
    if not {"sites", "progress"} & state_dict.keys():
        return None
    _check_fields("the state_dict", state_dict, {"sites": (list, tuple, dict), "progress": 7})
    try:
        sites = dict(state_dict["sites"])
    except (TypeError, ValueError):
        sites = {}
    if GLOBAL_KEY not in sites:
        raise ValueError("'sites' of the state_dict is damaged: load what a scaler's state_dict() gave")
    for key, values in sites.items():
        place = f"site {key!r} of the state_dict"
        _check_fields(place, values, _SITE_ENTRIES | ({"reference": 2} if key == GLOBAL_KEY else {}))
        for entry in values["history"]:
            names = entry if isinstance(entry, Mapping) else ("received",)
            _check_fields(f"an entry of 'history' of {place}", entry, dict.fromkeys(names, (int, float)))
    scale, exponent = state_dict["scale"], sites[GLOBAL_KEY]["exponent"]
    if scale != 2.0**exponent:
        raise ValueError(
            f"'scale' of the state_dict is 2^{exponent}, the exponent of its site {GLOBAL_KEY!r}, got {scale!r}: leave "
            "'sites' and 'progress' out to start from the scale alone"
        )
    return sites


def _check_fields(place: str, given: object, kinds: dict[str, Any]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is a dict with {', '.join(kinds)}, got {reprlib.repr(given)}")
    for name, kind in kinds.items():
        value = given.get(name, "nothing")
        if isinstance(kind, int):
            is_row = isinstance(value, (list, tuple)) and len(value) == kind
            holds = is_row and all(isinstance(one, (int, type(None))) for one in value)
        else:
            holds = name in given and isinstance(value, kind)
        if not holds:
            raise ValueError(
                f"{name!r} of {place} is damaged, got {reprlib.repr(value)}: load what a scaler's state_dict() gave"
            )


def check_sites(given: dict[str, Any], own: set[str], modules: set[str]) -> None:
    """Compare the sites of a state with those of a scaler, or with the modules of models that have not run yet."""
    known = len(own) > 1
    missing = sorted(own - given.keys()) if known else []
    unknown = sorted(
        key for key in given.keys() - own if known or not _is_key_of_module(key.partition("#")[0], modules)
    )
    if missing or unknown:
        raise ValueError(
            f"this state_dict is of another model: it {name_differences(missing, unknown)}. Load the one that was "
            "saved with this model"
        )


def _is_key_of_module(key: str, modules: set[str]) -> bool:
    """Return whether a key names a module, an operator in one, or a derivative that only a compiled graph has."""
    place, _, name = key.rpartition(".")
    is_operator = any(hasattr(home, name) for home in (torch, torch.Tensor, torch.nn.functional))
    return key in modules or (is_operator and place in modules) or place == "backward"


def load_sites(given: dict[str, Any], sites: Sites, narrow: Format) -> None:
    """Load every site of a state; ``narrow`` is the format of those that have one."""
    for key, values in given.items():
        site: Site = sites.global_site if key == GLOBAL_KEY else sites.open_site(key)
        site.exponent = values["exponent"]
        # Whether one scale serves all sites comes from the current policy, not from the file.
        if site.merged != UNIFORM_SCALE_REASON:
            site.merged = None if values["merged"] == UNIFORM_SCALE_REASON else values["merged"]
        site.measured = values["measured"]
        site.format = narrow if values["narrow"] else None
        site.overflows = values["overflows"]
        site.memory = OverflowMemory(*values["memory"])
        site.history.clear()
        site.history.extend(dict(entry) for entry in values["history"])
