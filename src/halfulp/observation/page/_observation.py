"""The page of an observation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...pages import number, render
from ._findings import finding_cards, headline
from ._history import history_data, history_words
from ._magnitudes import map_data
from ._storage import extra_tables, storage_table, updates_table
from ._words import plural, versions

_STORAGE = (
    "Parameters, and outputs of the modules that were seen: the dtype asked for, where one was, and the one there."
)


def observation_html(data: Mapping[str, Any]) -> str:
    """Return the page of an observation as text; it refers to nothing outside itself.

    Args:
        data: what `Observation.to_dict` gives, also when read back from JSON: the fields of a record
            (`record._plain.plain_record`), `findings`, and `cost` where it is known.

    Raises:
        ValueError: jinja2 is missing.
    """
    history = data.get("history", [])
    charts: dict[str, Any] = map_data(data.get("tensors", ()))
    has_map = bool(charts["tensors"])
    curves = history_data(history)
    parameters = data.get("parameters", [])
    findings = data.get("findings", [])
    return render(
        __package__,
        "observation.html.j2",
        headline=headline(findings, plural(_steps(history), "step")),
        lead=_lead(data),
        findings=finding_cards(findings),
        has_map=has_map,
        updates=updates_table(parameters),
        has_history=curves is not None,
        history_words=history_words(history),
        storage=storage_table(data),
        storage_words=_STORAGE,
        extras=extra_tables(data),
        unseen=data.get("unseen", []),
        cost=[(key.replace("_", " "), number(value)) for key, value in data.get("cost", {}).items()],
        versions=versions(),
        data=(charts if has_map else {}) | ({"history": curves} if curves else {}),
    )


def _steps(history: list[Mapping[str, Any]]) -> int:
    return int(history[-1]["step"]) + 1 if history else 0


def _lead(data: Mapping[str, Any]) -> str:
    """What was observed: sampled steps, parameters, optimizers."""
    parameters = data.get("parameters", [])
    elements = sum(one["numel"] for one in parameters)
    optimizers = dict.fromkeys(one["optimizer"] for one in parameters if one["optimizer"])
    said = [f"{plural(len(data.get('sampled_steps', ())), 'step')} sampled"]
    said.append(f"{plural(len(parameters), 'parameter tensor')} of {plural(elements, 'element')}")
    said += [", ".join(optimizers)] if optimizers else ["no optimizer"]
    rank, ranks = data.get("replica_of", (0, 1))
    said += [f"rank {rank} of {ranks}"] if ranks > 1 else []
    return " · ".join(said)
