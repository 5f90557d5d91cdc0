"""A scaler's state as plain data and back, and its pickles."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .._messages import name_differences
from ..formats import Format
from ._site import GLOBAL_KEY, HIGHEST, LOWEST, UNIFORM_SCALE_REASON, OverflowMemory, Site, Sites, parse_scale_exponent

# No gradient of float64 has a binade beyond.
_FARTHEST_BINADE = 1200
# By the name of an entry, whether a value may be it.
_EntryChecks = dict[str, Callable[[Any], bool]]


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


def index_sites(state_dict: Any) -> Any:
    """Convert a state's sites from the pairs that `save_sites` returns to a dict; return any other state unchanged."""
    pairs = state_dict.get("sites") if isinstance(state_dict, Mapping) else None
    if not pairs or not isinstance(pairs, (tuple, list)):
        return state_dict
    is_pairs = all(isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)
    return {**state_dict, "sites": dict(pairs)} if is_pairs else state_dict


def check_entries(state_dict: Any) -> None:
    """Check every entry of a scaler's state, or of a GradScaler's, which has neither sites nor progress."""
    _check_fields("the state_dict", state_dict, _TORCH_ENTRIES)
    parse_scale_exponent("'scale' of the state_dict", state_dict["scale"])
    if not {"sites", "progress"} & state_dict.keys():
        return
    _check_fields("the state_dict", state_dict, _HALFULP_ENTRIES)
    for key, values in state_dict["sites"].items():
        _check_fields(
            f"site {key!r} of the state_dict", values, _GLOBAL_SITE_ENTRIES if key == GLOBAL_KEY else _SITE_ENTRIES
        )
    scale, exponent = state_dict["scale"], state_dict["sites"][GLOBAL_KEY]["exponent"]
    if scale != 2.0**exponent:
        raise ValueError(
            f"'scale' of the state_dict is 2^{exponent}, the exponent of its site {GLOBAL_KEY!r}, got {scale!r}: leave "
            "'sites' and 'progress' out to start from the scale alone"
        )


def _check_fields(place: str, given: object, wanted: _EntryChecks) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is a dict with {', '.join(wanted)}, got {reprlib.repr(given)}")
    for name, holds in wanted.items():
        if name not in given:
            raise ValueError(f"{place} lacks {name!r}: load what a scaler's state_dict() gave")
        if not holds(given[name]):
            raise ValueError(
                f"{name!r} of {place} is damaged, got {reprlib.repr(given[name])}: load what a scaler's state_dict() "
                "gave"
            )


def _make_whole_number_check(low: float = 0, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda given: type(given) is int and bool(low <= given <= high)


def _is_bool(given: object) -> bool:
    return isinstance(given, bool)


def _is_finite_size(given: Any) -> bool:
    return type(given) in (int, float) and bool(0 <= given < math.inf)


def _allow_none(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda given: given is None or kind(given)


def _make_row_check(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check for a list of as many numbers as there are kinds, each of its kind."""
    return lambda given: (
        isinstance(given, (list, tuple))
        and len(given) == len(kinds)
        and all(kind(one) for kind, one in zip(kinds, given))
    )


def _is_history(given: object) -> bool:
    return isinstance(given, (list, tuple)) and all(
        isinstance(entry, Mapping) and all(map(_is_finite_size, entry.values())) for entry in given
    )


# Of `Controller.progress`, whose measured iterations are not counted from a later one.
_is_row_of_counts = _make_row_check(*([_make_whole_number_check()] * 2), _is_bool, *([_make_whole_number_check()] * 4))
_TORCH_ENTRIES: _EntryChecks = {
    "scale": _is_finite_size,
    "growth_factor": _is_finite_size,
    "backoff_factor": _is_finite_size,
    "growth_interval": _make_whole_number_check(),
    "_growth_tracker": _make_whole_number_check(),
}
_HALFULP_ENTRIES: _EntryChecks = {
    "sites": lambda given: (
        isinstance(given, Mapping) and GLOBAL_KEY in given and all(isinstance(k, str) for k in given)
    ),
    "progress": lambda given: _is_row_of_counts(given) and given[4] <= given[0],
}
_SITE_ENTRIES: _EntryChecks = {
    "exponent": _make_whole_number_check(LOWEST, HIGHEST),
    "merged": _allow_none(lambda given: isinstance(given, str)),
    "measured": _is_bool,
    "narrow": _is_bool,
    "overflows": _make_whole_number_check(),
    "memory": _make_row_check(_allow_none(_make_whole_number_check(LOWEST, HIGHEST)), _make_whole_number_check()),
    "history": _is_history,
}
_GLOBAL_SITE_ENTRIES: _EntryChecks = {
    **_SITE_ENTRIES,
    "merged": lambda given: given is None,
    "reference": _make_row_check(
        _allow_none(_make_whole_number_check(-_FARTHEST_BINADE, _FARTHEST_BINADE)), _make_whole_number_check()
    ),
}


def check_sites(given: dict[str, Any], own: set[str], modules: set[str]) -> None:
    """Compare the sites of a state with those of a scaler, or with the modules of models that have not run yet."""
    known = len(own) > 1
    missing = sorted(own - given.keys()) if known else []
    unknown = [key for key in given if key not in own and (known or not _is_key_of_module(key.split("#")[0], modules))]
    if missing or unknown:
        raise ValueError(
            f"this state_dict is of another model: it {name_differences(missing, sorted(unknown))}. Load the one "
            "that was saved with this model"
        )


def _is_key_of_module(key: str, modules: set[str]) -> bool:
    """Return whether a key names a module, an operator in one, or a derivative that only a compiled graph has."""
    place, _, name = key.rpartition(".")
    operator = any(hasattr(home, name) for home in (torch, torch.Tensor, torch.nn.functional))
    return key in modules or (operator and place in modules) or place == "backward"


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


def reduce_scaler(scaler: Any, base: type) -> tuple:
    """Return the result of ``__reduce__``: how to make the scaler again, and its state.

    ``base`` is AdaptiveGradScaler itself, whose ``__init__`` takes models and options.
    """
    if scaler._enabled and (scaler._per_optimizer_states or scaler._controller.backward.passes):
        raise ValueError(
            "a scaler is pickled or copied before scaler.scale(loss).backward() or after scaler.update(), as a "
            "torch.amp.GradScaler is: in between, gradients wait at its scale"
        )
    models = [one() for one in scaler._models]
    # What is left of a scaler whose model is gone is its state.
    models = [nn.Identity()] if None in models else models
    own = {name: value for name, value in vars(scaler).items() if name not in scaler._own}
    state = {"state": scaler.state_dict(), "last_step": scaler.last_step, "device": scaler._device, "own": own}
    return restore_scaler, (base, type(scaler), models, {**scaler._options, "enabled": scaler._enabled}), state


def restore_scaler(base: type[Any], kind: type[object], models: list[nn.Module], options: dict[str, Any]) -> Any:
    """Return a new scaler of a class (``base`` or a subclass of it) with the given models and options."""
    if not all("_modules" in vars(model) for model in models):
        raise ValueError(
            "the scaler's model holds the scaler, so that neither can be copied before the other: keep the scaler "
            "beside the model, and copy both at once, copy.deepcopy((model, scaler))"
        )
    scaler = kind.__new__(kind)
    # A subclass may be made in another way: what it has of its own comes with the state.
    base.__init__(scaler, models, **options)
    return scaler


def resume_scaler(scaler: Any, state: dict[str, Any]) -> None:
    """Restore the state of a scaler that `restore_scaler` made."""
    vars(scaler).update(state["own"])
    scaler.last_step, scaler._device = state["last_step"], state["device"]
    if scaler._enabled:
        scaler._load_checked_state(state["state"])
