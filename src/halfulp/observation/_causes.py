"""What one cause explains, as one: its diagnosis in a line, its cure, and the findings that show it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from .._names import described
from .._qualified_names import braced, pattern_of
from ._code import for_groups
from ._finding import SEVERITIES, Finding, Severity, in_words, meet, worst_severity
from ._words import at_lr, percent

_ONE_OR_SEVERAL = re.compile(r"\[([^|\]]*)\|([^\]]*)\]")
_MOST_PLACES = 3


@dataclass(frozen=True)
class Cause:
    """Findings that one cause explains: a card of a page, a paragraph in a terminal.

    Attributes:
        findings: ranked; the first is the cause's own.
    """

    findings: tuple[Finding, ...]

    @property
    def head(self) -> Finding:
        """The first finding."""
        return self.findings[0]

    @property
    def own(self) -> tuple[Finding, ...]:
        """The findings of the cause's own code and cure."""
        return tuple(one for one in self.findings if (one.code, one.cure) == (self.head.code, self.head.cure))

    @property
    def following(self) -> dict[str, list[Finding]]:
        """The others, by code."""
        found: dict[str, list[Finding]] = {}
        for one in self.findings:
            if one not in self.own:
                found.setdefault(one.code, []).append(one)
        return found

    @property
    def severity(self) -> Severity:
        """The highest among its findings."""
        return worst_severity(self.findings) or "note"

    @property
    def meaning(self) -> str:
        """A plain sentence that says what the code stands for; empty for a code that is not known here."""
        return described("finding").get(self.head.code, "")

    @property
    def write(self) -> str:
        """Lines of code that are the cure of all its own findings; empty where words alone say it."""
        codes = dict.fromkeys(one.write for one in self.own)
        return self.head.write if len(codes) == 1 else for_groups(self.head.write)

    @property
    def headline(self) -> str:
        """The diagnosis in one line: of those that are as bad as the first."""
        return diagnosis([one for one in self.own if one.severity == self.head.severity])


def causes_of(findings: Iterable[Finding]) -> list[Cause]:
    """Put together what has one cause: one code and cure at any place, and what is explained by it at the same place.

    Notes of a code stay apart from its warnings and errors.

    Args:
        findings: as `ranked` orders them.

    >>> lost = Finding("updates-lost", ("a.weight",), "error", 1.0, cure="float32")
    >>> decay = Finding("weight-decay-lost", ("a.weight",), "warning", 1.0, explained_by=("updates-lost",))
    >>> other = Finding("weight-decay-lost", ("b.weight",), "warning", 1.0, explained_by=("updates-lost",))
    >>> [[one.code for one in cause.findings] for cause in causes_of([lost, decay, other])]
    [['updates-lost', 'weight-decay-lost'], ['weight-decay-lost']]
    """
    groups = [[finding] for finding in findings]
    at = 0
    while at < len(groups):
        group = groups[at]
        other = next((one for one in groups[at + 1 :] if _belong_together(group, one)), None)
        if other is None:
            at += 1
        else:
            group += other
            groups = [one for one in groups if one is not other]
    return [Cause(tuple(group)) for group in groups]


def _belong_together(group: Sequence[Finding], others: Sequence[Finding]) -> bool:
    return any(_is_same(group[0], other) or any(_explains(one, other) for one in group) for other in others)


def _is_same(one: Finding, other: Finding) -> bool:
    return (one.code, one.cure, one.severity == "note") == (other.code, other.cure, other.severity == "note")


def _explains(cause: Finding, finding: Finding) -> bool:
    """Return whether two findings are of one cause: at the same place, or where the same lines of code mend both."""
    follows, leads = cause.code in finding.explained_by, finding.code in cause.explained_by
    if cause.write != "" and cause.write == finding.write:
        return follows or leads
    return follows and meet(cause.where, finding.where)


def diagnosis(findings: Sequence[Finding]) -> str:
    """Return in one line what findings of one code say together, the numbers those of the worst.

    >>> says = "{place} [loses|lose] {lost:share} of [its|their] updates: {dtype} weights{at_lr}"
    >>> rows = [
    ...     Finding("updates-lost", (f"h.4.mlp.{name}",), "error", 1.0, {"lost": lost, "dtype": "bf16"}, says=says)
    ...     for name, lost in (("up.weight", 0.5), ("up.bias", 0.25), ("down.weight", 0.5))
    ... ]
    >>> diagnosis(rows[:1])
    'h.4.mlp.up loses 50% of its updates: bf16 weights'
    >>> diagnosis(rows)
    'h.4.mlp loses up to 50% of its updates: bf16 weights'
    """
    places = places_of(name for one in findings for name in one.where)
    place = _in_few_words(places)
    template = findings[0].says
    share = next((key for _, key, spec, _ in Formatter().parse(template) if key and spec == "share"), None)
    worst = max(findings, key=lambda one: _size(one.evidence.get(share))) if share else findings[0]
    if template:
        several = len(places) > 1 or any(mark in place for mark in "*{")
        words = _ONE_OR_SEVERAL.sub(lambda match: match[2] if several else match[1], template)
        values = {"place": place or "the model", "at_lr": at_lr(worst.evidence), **worst.evidence}
        others = {percent(_size(one.evidence.get(share))) for one in findings} if share else set()
        try:
            return _capitalized(_filled(words, values, up_to=len(others) > 1))
        except (KeyError, TypeError, ValueError):
            pass  # evidence of another instrument, which lacks a number
    names = [name for one in findings for name in one.where]
    where = in_words(names) if len({pattern_of(name) for name in names}) <= _MOST_PLACES else place
    return f"{where}: {worst.summary}" if where else worst.summary[:1].upper() + worst.summary[1:]


def _filled(template: str, values: dict[str, Any], up_to: bool) -> str:
    said = []
    for literal, key, spec, _ in Formatter().parse(template):
        said.append(literal)
        if key is None:
            continue
        value = values[key]
        if value is None:
            raise KeyError(key)
        if spec == "share":
            said.append(f"up to {percent(value)}" if up_to else percent(value))
        else:
            said.append(format(value, spec or (".3g" if isinstance(value, float) else "")))
    return "".join(said)


def _size(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else -1.0


def _capitalized(words: str) -> str:
    """Return a sentence that begins with no name with a capital letter."""
    first = words.split(" ", 1)[0]
    return words[:1].upper() + words[1:] if first.isalpha() and first in ("the", "gradients", "outputs") else words


def places_of(names: Iterable[str]) -> list[str]:
    """Return the few modules that parameters lie in: one that holds all of them, else one for each kind of layer.

    >>> places_of(["h.4.mlp.up.weight", "h.4.mlp.up.bias", "h.4.mlp.down.weight"]), places_of(["norm.weight"])
    (['h.4.mlp'], ['norm'])
    >>> places_of(["h.0.ln.weight", "h.1.ln.weight", "head.weight"])
    ['h.{0,1}.ln', 'head']
    """
    modules = list(dict.fromkeys(_module(name) for name in names))
    if len(modules) < 2:
        return [one or "the model" for one in modules]
    parts = [one.split(".") for one in modules]
    shared = 0
    while all(len(one) > shared for one in parts) and len({one[shared] for one in parts}) == 1:
        shared += 1
    following = {one[shared] if len(one) > shared else "" for one in parts}
    if shared and not any(one.isdecimal() for one in following):
        return [".".join(parts[0][:shared])]
    kinds: dict[str, list[str]] = {}
    for one in modules:
        kinds.setdefault(pattern_of(one), []).append(one)
    return [braced(group) for group in kinds.values()]


def _module(name: str) -> str:
    head, _, last = name.rpartition(".")
    return head if last in ("weight", "bias") and head else name


def _in_few_words(places: Sequence[str]) -> str:
    said = list(places)
    if len(said) > _MOST_PLACES:
        return f"{said[0]} and {len(said) - 1} other kinds of layers"
    return " and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said)


def plain_causes(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return causes as plain data that JSON can hold; their findings as positions in the list that is given."""
    at = {id(one): k for k, one in enumerate(findings)}
    return [
        {
            "headline": cause.headline,
            "code": cause.head.code,
            "severity": cause.severity,
            "meaning": cause.meaning,
            "cure": cause.head.cure,
            "write": cause.write,
            "findings": [at[id(one)] for one in cause.findings],
        }
        for cause in causes_of(findings)
    ]


def headline(causes: Sequence[Any], of: str) -> str:
    """Return the first diagnosis; where there are notes alone or nothing, that there is nothing to mend.

    Args:
        causes: as `plain_causes` gives them.
        of: how much was looked at.

    >>> headline([{"severity": "error", "headline": "head loses 50% of its updates"}], "401 steps")
    'head loses 50% of its updates'
    >>> headline([{"severity": "note", "headline": "a"}], "401 steps"), headline([], "401 steps")
    ('Nothing to mend in 401 steps', 'Nothing to mend in 401 steps')
    """
    worst = next((one for one in causes if one["severity"] != "note"), None)
    return worst["headline"] if worst is not None else f"Nothing to mend in {of}"


def counted(causes: Sequence[Any], of: str) -> str:
    """Return how many causes of each severity there are, in words.

    Args:
        causes: as `plain_causes` gives them.
        of: how much was looked at, with the word before it.

    >>> counted([{"severity": "error"}, {"severity": "note"}, {"severity": "note"}], "after 401 steps")
    '3 findings (1 error, 2 notes) after 401 steps'
    >>> counted([{"severity": "error"}], "after 401 steps"), counted([], "in 4 tensors")
    ('1 finding of grade error after 401 steps', 'no findings in 4 tensors')
    """
    many = {severity: sum(one["severity"] == severity for one in causes) for severity in reversed(SEVERITIES)}
    said = [(number, one) for one, number in many.items() if number]
    if not said:
        return f"no findings {of}"
    total = sum(many.values())
    findings = f"{total} finding{'' if total == 1 else 's'}"
    if len(said) == 1:
        return f"{findings} of grade {said[0][1]} {of}"
    return f"{findings} ({', '.join(f'{number} {one}' + ('' if number == 1 else 's') for number, one in said)}) {of}"
