"""A finding, the cause that explains several, and both as lines for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Any, Literal

from .._names import read_registered_descriptions
from .._qualified_names import join_numbered_names, make_name_pattern
from ._record import to_plain_data
from ._text import describe_lr, format_percent, pluralize

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """A problem that the numbers of a run, a checkpoint or a plan show.

    Attributes:
        code: a stable name of what is wrong, with a page of its own in the docs.
        where: qualified names of the parameters, modules or tensors.
        severity: "note", "warning" or "error".
        confidence: from 0 to 1.
        evidence: the numbers that show it; for several names those of the worst.
        cure: what to do.
        summary: the evidence in words.
        says: a template of the diagnosis over all that one cause explains (`_causes`); empty for place and summary.
        write: lines of code that are the cure, to copy; empty where words alone say it.
        role: of the tensors that show it (`record.Role`); empty where none do.
        explained_by: codes of which this one is the same cause at the same place.
        kind: class name of the modules, where it is known, else what else tells a norm from a linear layer: findings
            of one kind are joined.

    >>> print(
    ...     Finding(
    ...         "updates-lost",
    ...         ("layers.0.norm.weight", "layers.1.norm.weight"),
    ...         "error",
    ...         1.0,
    ...         {"lost": 1.0},
    ...         "weight_update='kahan', or keep these in float32",
    ...         "100% of updates lost in bf16 at lr 3e-05",
    ...     )
    ... )
    layers.{0,1}.norm.weight: 100% of updates lost in bf16 at lr 3e-05; weight_update='kahan', or keep these in float32
    """

    code: str
    where: tuple[str, ...]
    severity: Severity
    confidence: float
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cure: str = ""
    summary: str = ""
    says: str = field(default="", repr=False)
    write: str = field(default="", repr=False)
    role: str = field(default="", repr=False)
    explained_by: tuple[str, ...] = field(default=(), repr=False)
    kind: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity {self.severity!r}: give one of {', '.join(SEVERITIES)}")
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence {self.confidence}: give a number from 0 to 1")

    def __str__(self) -> str:
        """Return one line: where, what is wrong, what to do."""
        head = f"{describe_names(self.where)}: " if self.where else ""
        return f"{head}{self.summary}" + (f"; {self.cure}" if self.cure else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data that JSON can hold; numbers that JSON has no word for become strings."""
        keys = ("code", "where", "severity", "confidence", "evidence", "cure", "summary", "write", "role")
        return {key: to_plain_data(getattr(self, key)) for key in keys}


def describe_names(names: Iterable[str]) -> str:
    """Return names in few words; names that differ only in their numbers are one, with the numbers in braces.

    >>> describe_names(["head.weight"]), describe_names(["layers.0.bias", "layers.1.bias", "head.bias"])
    ('head.weight', 'layers.{0,1}.bias, head.bias')
    """
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(make_name_pattern(name), []).append(name)
    said = [join_numbered_names(group) for group in grouped.values()]
    return ", ".join(said[:4]) + (f" and {len(said) - 4} more" if len(said) > 4 else "")


def join_and_rank_findings(findings: Iterable[Finding], kinds: Mapping[str, Any]) -> list[Finding]:
    """Join findings of one code over layers of one kind, and return the worst first, each consequence after its cause.

    What is joined says the numbers of the worst, and is as sure as the surest. A cause is as bad as what follows.

    `kinds` are the classes registered for codes, which say what explains them and which layer is the worst.

    >>> lost = Finding("updates-lost", ("norm.weight",), "warning", 0.9)
    >>> frozen = Finding("weight-frozen", ("norm.weight",), "error", 1.0)
    >>> from halfulp.observation.findings import FINDING_KINDS
    >>> [finding.code for finding in join_and_rank_findings([frozen, lost], FINDING_KINDS)]
    ['updates-lost', 'weight-frozen']
    """

    def get_kind_attribute(finding: Finding, name: str, otherwise: Any) -> Any:
        return getattr(kinds.get(finding.code), name, otherwise)

    merged: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        patterns = frozenset(map(make_name_pattern, finding.where))
        key = (finding.code, finding.severity, finding.cure, finding.kind, patterns)
        there, measure = merged.get(key, finding), get_kind_attribute(finding, "worst", "")
        most = max(there, finding, key=lambda one: (_measure_badness(one, measure), one.confidence))
        where = tuple(dict.fromkeys([*there.where, *finding.where]))
        merged[key] = replace(most, where=where, confidence=max(there.confidence, finding.confidence))
    found = list(merged.values())
    follows: dict[int, list[int]] = {i: [] for i in range(len(found))}
    for i, consequence in enumerate(found):
        codes = get_kind_attribute(consequence, "explained_by", ())
        for j, cause in enumerate(found):
            spreads = get_kind_attribute(cause, "spreads", False)
            if cause.code in codes and (spreads or have_related_names(cause.where, consequence.where)):
                follows[j].append(i)
    explained = {i for consequences in follows.values() for i in consequences}

    def find_severity_with_consequences(index: int, *visited: int) -> int:
        new = [k for k in follows[index] if k not in visited]
        consequences = [find_severity_with_consequences(k, index, *visited) for k in new]
        return max([SEVERITIES.index(found[index].severity), *consequences])

    keys = [
        (-find_severity_with_consequences(i), i in explained, -finding.confidence, -len(finding.where), finding.code)
        for i, finding in enumerate(found)
    ]
    return [found[i] for i in sorted(follows, key=lambda i: keys[i])]


def have_related_names(first: Iterable[str], second: Iterable[str]) -> bool:
    """Return whether two sets of names have a place in common: a name, or a module and what lies in it."""
    mine, theirs = set(first), set(second)
    if not mine or not theirs or mine & theirs:
        return True
    return any(
        ".".join(name.split(".")[:count]) in others  # "" is the whole model
        for some, others in ((mine, theirs), (theirs, mine))
        for name in some
        for count in range(name.count(".") + 1)
    )


def _measure_badness(finding: Finding, evidence_name: str) -> float:
    """Return how bad a finding is by a number among its evidence; minus infinity where it has none."""
    value = finding.evidence.get(evidence_name.removeprefix("-"))
    if not isinstance(value, int | float) or math.isnan(value):
        return -math.inf
    return -value if evidence_name.startswith("-") else value


def find_worst_severity(findings: Iterable[Finding]) -> Severity | None:
    """Return the highest severity among findings, None without any."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default=None)


_WEIGHT_OR_BIAS_PATTERN = re.compile(r"(?<=.)\.(weight|bias)$")
_SINGULAR_OR_PLURAL_PATTERN = re.compile(r"\[([^|\]]*)\|([^\]]*)\]")


def group_by_cause(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Group findings by their cause: one code and cure at any place, and its consequences at its own place.

    Notes of a code stay apart from its warnings and errors. The first of a group is the cause's own. Findings come as
    `join_and_rank_findings` orders them.

    >>> lost = Finding("updates-lost", ("a.weight",), "error", 1.0, cure="float32")
    >>> decay = Finding("weight-decay-lost", ("a.weight",), "warning", 1.0, explained_by=("updates-lost",))
    >>> other = Finding("weight-decay-lost", ("b.weight",), "warning", 1.0, explained_by=("updates-lost",))
    >>> [[one.code for one in group] for group in group_by_cause([lost, decay, other])]
    [['updates-lost', 'weight-decay-lost'], ['weight-decay-lost']]
    """
    groups = [[finding] for finding in findings]
    at = 0
    while at < len(groups):
        group = groups[at]
        other = next((k for k in range(at + 1, len(groups)) if _is_same_cause(group, groups[k])), None)
        if other is None:
            at += 1
        else:
            group += groups.pop(other)
    return groups


def _is_same_cause(group: Sequence[Finding], others: Sequence[Finding]) -> bool:
    """Return whether others have the cure of a group, or one of them and one of the group have one cause."""
    head = group[0]
    for other in others:
        if (head.code, head.cure, head.severity == "note") == (other.code, other.cure, other.severity == "note"):
            return True
        for one in group:
            follows, leads = one.code in other.explained_by, other.code in one.explained_by
            is_mended_alike = one.write != "" and one.write == other.write
            if (follows or leads) if is_mended_alike else follows and have_related_names(one.where, other.where):
                return True
    return False


def write_diagnosis_sentence(findings: Sequence[Finding]) -> str:
    """Return one sentence for all findings of one code, with the numbers of the worst.

    >>> says = "{place} [loses|lose] {lost:share} of [its|their] updates: {dtype} weights{at_lr}"
    >>> rows = [
    ...     Finding("updates-lost", (f"h.4.mlp.{name}",), "error", 1.0, {"lost": lost, "dtype": "bf16"}, says=says)
    ...     for name, lost in (("up.weight", 0.5), ("up.bias", 0.25), ("down.weight", 0.5))
    ... ]
    >>> write_diagnosis_sentence(rows[:1])
    'h.4.mlp.up loses 50% of its updates: bf16 weights'
    >>> write_diagnosis_sentence(rows)
    'h.4.mlp.up, h.4.mlp.down lose up to 50% of their updates: bf16 weights'
    """
    names = [name for one in findings for name in one.where]
    modules = list(dict.fromkeys(_WEIGHT_OR_BIAS_PATTERN.sub("", name) for name in names))
    place = describe_names(modules)
    template = findings[0].says
    share = next((key for _, key, spec, _ in Formatter().parse(template) if key and spec == "share"), "")
    shares = [float(x) if isinstance(x := one.evidence.get(share), int | float) else -1.0 for one in findings]
    worst = findings[shares.index(max(shares))]
    if template:
        several = len(modules) > 1
        words = _SINGULAR_OR_PLURAL_PATTERN.sub(lambda match: match[2] if several else match[1], template)
        values = {"place": place or "the model", "at_lr": describe_lr(worst.evidence), **worst.evidence}
        try:
            said = _EvidenceFormatter(len(set(map(format_percent, shares))) > 1).vformat(words, (), values)
            begins_with_name = said.split(" ", 1)[0] not in ("the", "gradients", "outputs")
            return said if begins_with_name else said[:1].upper() + said[1:]
        except (KeyError, TypeError, ValueError):
            pass  # evidence of another instrument, which lacks a number
    where = describe_names(names)
    return f"{where}: {worst.summary}" if where else worst.summary[:1].upper() + worst.summary[1:]


class _EvidenceFormatter(Formatter):
    """Fills a template with evidence: shares in per cent, after "up to" if asked; what is None is missing."""

    def __init__(self, writes_up_to: bool) -> None:
        self.writes_up_to = writes_up_to

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            raise KeyError(format_spec)
        if format_spec == "share":
            return f"up to {format_percent(value)}" if self.writes_up_to else format_percent(value)
        return format(value, format_spec or (".3g" if isinstance(value, float) else ""))


def make_cause_dict(group: Sequence[Finding]) -> dict[str, Any]:
    """Return the diagnosis of findings of one cause as plain data that JSON can hold."""
    head = group[0]
    alike = [one for one in group if (one.code, one.cure, one.severity) == (head.code, head.cure, head.severity)]
    return {
        "headline": write_diagnosis_sentence(alike),
        "code": head.code,
        "severity": find_worst_severity(group),
        "meaning": read_registered_descriptions("finding").get(head.code, ""),
        "cure": head.cure,
        "write": head.write,
    }


def group_causes_as_dicts(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return causes as plain data that JSON can hold; their findings as positions in the list that is given."""
    at = {id(one): k for k, one in enumerate(findings)}
    return [
        {**make_cause_dict(group), "findings": [at[id(one)] for one in group]} for group in group_by_cause(findings)
    ]


def choose_headline(causes: Sequence[Any], scope: str) -> str:
    """Return the first diagnosis; where there are notes alone or nothing, that there is nothing to mend.

    >>> choose_headline([{"severity": "error", "headline": "head loses 50% of its updates"}], "401 steps")
    'head loses 50% of its updates'
    >>> choose_headline([{"severity": "note", "headline": "a"}], "401 steps"), choose_headline([], "401 steps")
    ('Nothing to mend in 401 steps', 'Nothing to mend in 401 steps')
    """
    worst = next((one for one in causes if one["severity"] != "note"), None)
    return worst["headline"] if worst is not None else f"Nothing to mend in {scope}"


def describe_counts_by_severity(causes: Sequence[Any], scope: str) -> str:
    """Return how many causes of each severity there are, in words.

    >>> describe_counts_by_severity([{"severity": "error"}, {"severity": "note"}], "after 9 steps")
    '2 findings (1 error, 1 note) after 9 steps'
    >>> describe_counts_by_severity([], "in 4 tensors")
    'no findings in 4 tensors'
    """
    if not causes:
        return f"no findings {scope}"
    many = {severity: sum(one["severity"] == severity for one in causes) for severity in reversed(SEVERITIES)}
    said = ", ".join(pluralize(number, severity) for severity, number in many.items() if number)
    return f"{pluralize(len(causes), 'finding')} ({said}) {scope}"


_CAUSE_LINE_INDENT = " " * 9
_MOST_LISTED_CAUSES = 10
_MOST_FINDINGS_LISTED_PER_CAUSE = 3
_WHERE_OTHER_FINDINGS_STAND = "in `findings`, on the page and in its JSON"


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """Return lines of text that list findings, grouped by their cause; after some causes, the count of the rest.

    >>> says = "{place} [loses|lose] {lost:share} of [its|their] updates"
    >>> lost = [
    ...     Finding("my-code", (name,), "error", 1.0, {"lost": part}, "keep it in float32", f"{part:.0%} lost", says)
    ...     for name, part in (("up.0.weight", 0.97), ("up.1.weight", 0.95))
    ... ]
    >>> print(*format_findings(lost), sep="\\n")
    2 findings, of one cause:
    error    my-code: up.{0,1} lose up to 97% of their updates
             cure: keep it in float32
             up.0.weight: 97% lost
             up.1.weight: 95% lost
    >>> format_findings([])
    ['no findings']
    """
    if not findings:
        return ["no findings"]
    causes = group_by_cause(findings)
    of = f", of {'one cause' if len(causes) == 1 else f'{len(causes)} causes'}" if len(findings) > 1 else ""
    lines = [f"{pluralize(len(findings), 'finding')}{of}:"]
    for group in causes[:_MOST_LISTED_CAUSES]:
        lines += _format_cause_lines(group)
    if left := sum(map(len, causes[_MOST_LISTED_CAUSES:])):
        lines.append(f"{left} more: {_WHERE_OTHER_FINDINGS_STAND}")
    return lines


def _format_cause_lines(group: Sequence[Finding]) -> list[str]:
    cause = make_cause_dict(group)
    own = [one for one in group if (one.code, one.cure) == (cause["code"], cause["cure"])]
    lines = [f"{cause['severity']:<8} {cause['code']}: {cause['headline']}"]
    said = [cause["meaning"], f"cure: {cause['cure']}" if cause["cure"] else ""]
    said += [f"{'       ' if k else 'write: '}{line}" for k, line in enumerate(cause["write"].splitlines())]
    if len(own) > 1 or not cause["headline"].lower().endswith(group[0].summary.lower()):
        said += [f"{describe_names(one.where)}: {one.summary}" for one in own[:_MOST_FINDINGS_LISTED_PER_CAUSE]]
        left = len(own) - _MOST_FINDINGS_LISTED_PER_CAUSE
        said += [f"{left} more: {_WHERE_OTHER_FINDINGS_STAND}"] if left > 0 else []
    following: dict[str, list[Finding]] = {}
    for one in group:
        if one not in own:
            following.setdefault(one.code, []).append(one)
    for code, found in following.items():
        names = describe_names(name for one in found for name in one.where)
        numbers = len({one.summary for one in found})
        rest = f" (and {len(found) - 1} more, with other numbers)" if numbers > 1 else ""
        said.append(f"with it {code}: {names}: {found[0].summary}{rest}")
    return lines + [_CAUSE_LINE_INDENT + line for line in said if line]
