"""Findings as lines for a terminal: each cause once, with its diagnosis, its cure, and what shows it."""

from __future__ import annotations

from collections.abc import Sequence

from ._causes import Cause, causes_of
from ._finding import Finding, in_words

_INDENT = " " * 9
_MOST_LINES = 3
REST = "in `findings`, on the page and in its JSON"


def listing(findings: Sequence[Finding], most: int = 10) -> list[str]:
    """Return lines that list findings, those of one cause together.

    Args:
        findings: in the order of `ranked`.
        most: how many causes are listed; what is left out is counted, with where it stands.

    >>> says = "{place} [loses|lose] {lost:share} of [its|their] updates"
    >>> lost = [
    ...     Finding("my-code", (name,), "error", 1.0, {"lost": part}, "keep it in float32", f"{part:.0%} lost", says)
    ...     for name, part in (("up.0.weight", 0.97), ("up.1.weight", 0.95))
    ... ]
    >>> print(*listing(lost), sep="\\n")
    2 findings, of one cause:
    error    my-code: up.{0,1} lose up to 97% of their updates
             cure: keep it in float32
             up.0.weight: 97% lost
             up.1.weight: 95% lost
    >>> listing([])
    ['no findings']
    """
    if not findings:
        return ["no findings"]
    causes = causes_of(findings)
    many = f"{len(findings)} finding{'s' if len(findings) > 1 else ''}"
    lines = [
        f"{many}, of {'one cause' if len(causes) == 1 else f'{len(causes)} causes'}:"
        if len(findings) > 1
        else f"{many}:"
    ]
    for cause in causes[:most]:
        lines += _lines(cause)
    left = sum(len(cause.findings) for cause in causes[most:])
    if left:
        lines.append(f"{left} more: {REST}")
    return lines


def _lines(cause: Cause) -> list[str]:
    head, own = cause.head, cause.own
    lines = [f"{cause.severity:<8} {head.code}: {cause.headline}"]
    said = [cause.meaning, f"cure: {head.cure}" if head.cure else ""]
    first, *more = cause.write.splitlines() or [""]
    said += [f"write: {first}" if first else "", *(f"       {line}" for line in more)]
    if len(own) > 1 or not cause.headline.lower().endswith(head.summary.lower()):
        said += [f"{in_words(one.where)}: {one.summary}" for one in own[:_MOST_LINES]]
        said += [f"{len(own) - _MOST_LINES} more: {REST}"] if len(own) > _MOST_LINES else []
    for code, found in cause.following.items():
        names = in_words(name for one in found for name in one.where)
        numbers = len({one.summary for one in found})
        rest = f" (and {len(found) - 1} more, with other numbers)" if numbers > 1 else ""
        said.append(f"with it {code}: {names}: {found[0].summary}{rest}")
    return lines + [_INDENT + line for line in said if line]
