"""A scaler's state as plain data, and back."""

from __future__ import annotations

from typing import Any

import torch

from ._site import GLOBAL, Site, Sites


def state_of(sites: Sites) -> dict[str, Any]:
    """The exponents, and what policies look back on, by site."""
    return {
        site.key: {
            "exponent": site._exponent,
            "merged": site.merged,
            "overflows": site.overflows,
            "history": [dict(entry) for entry in site.history],
        }
        for site in sites
    }


def check_state(given: dict[str, Any], own: set[str]) -> None:
    """Compare the sites of a state with the keys of a model's.

    Raises:
        ValueError: they differ; the message names what is missing and what is not expected.
    """
    missing = [key for key in own if key not in given]
    unexpected = [key for key in given if key not in own]
    said = [
        f"{word}: {', '.join(sorted(keys)[:8])}{', ...' if len(keys) > 8 else ''}"
        for word, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    if said:
        raise ValueError(
            f"this state_dict is of another model; sites {'; '.join(said)}. Load the one that was saved with this model"
        )


def check_places(given: dict[str, Any], modules: set[str]) -> None:
    """Compare the sites of a state with the modules of models that have not run yet.

    Raises:
        ValueError: a site belongs to no module.
    """
    unexpected = [key for key in given if key != GLOBAL and not _belongs(key.split("#")[0], modules)]
    if unexpected:
        raise ValueError(
            f"this state_dict is of another model; sites unexpected: {', '.join(unexpected[:8])}. Load the one that "
            "was saved with this model"
        )


def _belongs(key: str, modules: set[str]) -> bool:
    """Whether a key is a module's, or an operator's in one."""
    place, _, name = key.rpartition(".")
    operator = any(hasattr(home, name) for home in (torch, torch.Tensor, torch.nn.functional))
    return key in modules or (operator and place in modules)


def load_sites(given: dict[str, Any], sites: Sites) -> None:
    """Take over every site of a state."""
    for key, values in given.items():
        site: Site = sites.anchor if key == GLOBAL else sites.open(key)
        site.exponent = values["exponent"]
        site.merged = values["merged"]
        site.overflows = values["overflows"]
        site.history.clear()
        site.history.extend(dict(entry) for entry in values["history"])
