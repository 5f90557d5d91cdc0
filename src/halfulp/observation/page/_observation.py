"""The page of an observation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...pages import render
from .._finding import counted, headline
from .._text import LOST_AND_KEPT, plural, times
from ._findings import cause_cards, codes_on
from ._history import history_data, history_words
from ._magnitudes import map_data
from ._storage import extra_tables, storage_table, updates_table
from ._trainings import shown_words, trainings_table
from ._words import versions

_STORAGE = (
    "Parameters, and outputs of the modules that were seen: the dtype asked for, where one was, and the one there."
)


def observation_html(data: Mapping[str, Any]) -> str:
    """Return the page of an observation as text; it refers to nothing outside itself.

    Args:
        data: what `Observation.to_dict` gives, also when read back from JSON.

    Raises:
        ValueError: jinja2 is missing.
    """
    record, cards = data.get("record", {}), cause_cards(data)
    history, parameters = record.get("history", []), record.get("parameters", [])
    charts: dict[str, Any] = map_data(record.get("tensors", ()), parameters, *_first(cards, data["findings"]))
    has_map = bool(charts["tensors"])
    curves = history_data(history)
    return render(
        __package__,
        "observation.html.j2",
        headline=_headline(cards, data),
        lead=_lead(cards, data, record),
        findings=cards,
        codes=codes_on(cards),
        trainings=trainings_table(data.get("trainings", ())),
        shown=shown_words(data.get("trainings", ())),
        has_map=has_map,
        updates=updates_table(parameters),
        updates_words=LOST_AND_KEPT,
        has_history=curves is not None,
        history_words=history_words(history),
        storage=storage_table(record),
        storage_words=_STORAGE,
        extras=extra_tables(record),
        unseen=record.get("unseen", []),
        cost=_cost(data),
        versions=versions(),
        data=(charts if has_map else {}) | ({"history": curves} if curves else {}),
    )


def _headline(cards: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> str:
    """The first diagnosis; of no steps, that nothing was observed."""
    return headline(cards, _extent(data)) if cards or data["steps"] else "Nothing was observed: no optimizer stepped"


def _first(cards: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The role of the tensors that show the first cause, and its names."""
    own = [findings[k] for card in cards[:1] for k in card["findings"] if findings[k]["code"] == card["code"]]
    return (own[0].get("role", "") if own else ""), [name for one in own for name in one["where"]]


def _extent(data: Mapping[str, Any]) -> str:
    """How much was observed: steps, of how many trainings."""
    steps = [one["steps"] for one in data.get("trainings", ())] or [data["steps"]]
    of = "" if len(steps) == 1 else f" of {len(steps)} trainings"
    return f"{plural(sum(steps), 'step')}{of}"


def _cost(data: Mapping[str, Any]) -> str:
    """What observing cost, where that is known."""
    overhead = data.get("overhead")
    every = f"Tensors of one step in {data['interval']:,} were looked at. " if data.get("interval") else ""
    return f"{every}Observing took {times(overhead)} the run's own time." if overhead is not None else ""


def _lead(cards: Sequence[Mapping[str, Any]], data: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """How many causes, and what was observed: sampled steps, parameters, optimizers."""
    parameters = record.get("parameters", [])
    elements = sum(one["numel"] for one in parameters)
    optimizers = dict.fromkeys(one["optimizer"] for one in parameters if one["optimizer"])
    said = [counted(cards, f"after {_extent(data)}")] if cards else []
    said.append(f"{plural(len(record.get('sampled_steps', ())), 'step')} sampled")
    said.append(f"{plural(len(parameters), 'parameter tensor')} of {plural(elements, 'element')}")
    said += [", ".join(optimizers)] if optimizers else ["no optimizer"]
    rank, ranks = record.get("replica_of", (0, 1))
    said += [f"rank {rank} of {ranks}"] if ranks > 1 else []
    return " · ".join(said)
