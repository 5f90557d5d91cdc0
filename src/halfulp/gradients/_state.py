"""A scaler's state as plain data and back."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
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


def read_sites(state_dict: Any) -> dict[str, dict[str, Any]]:
    """Read a scaler's state and return its sites by key; a GradScaler's, which has none, is refused."""
    place = "the state_dict"
    if isinstance(state_dict, Mapping) and "scale" in state_dict and not {"sites", "progress"} & state_dict.keys():
        raise ValueError(
            "a GradScaler's state has no sites: start from its scale instead, "
            f"AdaptiveGradScaler(model, init_scale={state_dict['scale']!r})"
        )
    try:
        exponent = parse_scale_exponent("'scale' of the state_dict", float(state_dict["scale"]))
        operator.index(state_dict["_growth_tracker"])
        if len([operator.index(number) for number in state_dict["progress"]]) != _PROGRESS_LENGTH:
            raise KeyError("progress")
        found = {}
        for key, values in dict(state_dict["sites"]).items():
            place = f"site {key!r} of the state_dict"
            found[key] = _read_site(values)
        found[GLOBAL_KEY]["reference"] = _read_integers(dict(state_dict["sites"])[GLOBAL_KEY]["reference"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{place} is damaged ({type(error).__name__}: {error}), got {reprlib.repr(state_dict)}: load what a "
            "scaler's state_dict() gave"
        ) from error
    if found[GLOBAL_KEY]["exponent"] != exponent:
        raise ValueError(
            f"'scale' of the state_dict is 2^{exponent}, and that of its sites is not: load what a "
            "scaler's state_dict() gave"
        )
    return found


_PROGRESS_LENGTH = 7


def _read_site(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a site, each of its own type, or raise."""
    return {
        "exponent": operator.index(values["exponent"]),
        "merged": values["merged"],
        "measured": bool(values["measured"]),
        "narrow": bool(values["narrow"]),
        "overflows": operator.index(values["overflows"]),
        "memory": _read_integers(values["memory"]),
        "history": [{kind: size + 0.0 for kind, size in entry.items()} for entry in values["history"]],
    }


def _read_integers(pair: Sequence[int | None]) -> list[int | None]:
    first, second = (None if one is None else operator.index(one) for one in pair)
    return [first, second]


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
