"""A scaler's state as plain data, and back."""

from __future__ import annotations

from typing import Any

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


def load_sites(given: dict[str, Any], sites: Sites) -> None:
    """Take over every site of a state."""
    for key, values in given.items():
        site: Site = sites.anchor if key == GLOBAL else sites.open(key)
        site.exponent = values["exponent"]
        site.merged = values["merged"]
        site.overflows = values["overflows"]
        site.history.clear()
        site.history.extend(dict(entry) for entry in values["history"])
