"""Findings as the pages list them, and the headline they make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..._names import described
from ...pages import count, number
from .._finding import SEVERITIES, in_words

_MOST_NAMES = 60


def finding_cards(findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the template needs: findings of one code, severity and cure share a card, the worst first.

    Args:
        findings: as `Finding.to_dict` gives them, ranked.
    """
    cards: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for one in findings:
        cards.setdefault((one["code"], one["severity"], one["cure"]), []).append(one)
    meanings = described("finding")
    return [
        {
            "code": code,
            "meaning": meanings.get(code, ""),
            "severity": severity,
            "cure": cure,
            "sure": _sure([one["confidence"] for one in same]),
            "lines": [_line(one) for one in same],
        }
        for (code, severity, cure), same in cards.items()
    ]


def _line(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "where": in_words(one["where"]),
        "summary": one["summary"] + _in_trainings(one.get("trainings", ())),
        "names": _names(one["where"]),
        "evidence": [(key.replace("_", " "), _value(value)) for key, value in one["evidence"].items()],
    }


def _in_trainings(numbers: Sequence[int]) -> str:
    """Which trainings of a script a finding is of, where it has several.

    >>> _in_trainings([1, 3]), _in_trainings([2]), _in_trainings([])
    (' (trainings 1, 3)', ' (training 2)', '')
    """
    if not numbers:
        return ""
    return f" (training{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))})"


def _sure(confidences: Sequence[float]) -> str:
    low, high = (f"{100 * one:.0f}" for one in (min(confidences), max(confidences)))
    return f"{low}%" if low == high else f"{low} to {high}%"


def headline(findings: Sequence[Mapping[str, Any]], of: str) -> str:
    """Return how many findings of each severity there are, in words.

    >>> headline([{"severity": "error"}, {"severity": "note"}, {"severity": "note"}], "401 steps")
    '1 error and 2 notes in 401 steps'
    >>> headline([], "401 steps")
    'Nothing to mend in 401 steps'
    """
    found = Counter(one["severity"] for one in findings)
    said = [f"{found[one]} {one}{'' if found[one] == 1 else 's'}" for one in reversed(SEVERITIES) if found[one]]
    if not said:
        return f"Nothing to mend in {of}"
    return f"{' and '.join([', '.join(said[:-1]), said[-1]] if len(said) > 1 else said)} in {of}"


def _names(where: Sequence[str]) -> list[str]:
    names = [name or "(model)" for name in where[:_MOST_NAMES]]
    return names + ([f"and {len(where) - _MOST_NAMES} more"] if len(where) > _MOST_NAMES else [])


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return count(value)
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return number(value)
