"""Findings as lines for a terminal: those of one code and cure together, with the cure said once."""

from __future__ import annotations

from collections.abc import Sequence

from ._finding import Finding, in_words


def listing(findings: Sequence[Finding], most: int = 10) -> list[str]:
    """Return lines that list findings, ranked before, the first of each group saying what the numbers are.

    Args:
        findings: in the order of `ranked`.
        most: how many groups are listed; what is left out is counted.

    >>> lost = [Finding("updates-lost", (n,), "error", 1.0, {}, "keep it in float32", "97% lost") for n in ("a", "b")]
    >>> print(*listing(lost), sep="\\n")
    2 findings:
    error    updates-lost: a, b
             97% lost
             cure: keep it in float32
    >>> lost += [Finding("updates-lost", ("c",), "error", 1.0, {}, "keep it in float32", "99% lost")]
    >>> print(listing(lost)[2].strip())
    a: 97% lost (2 more, with other numbers)
    >>> listing([])
    ['no findings']
    """
    if not findings:
        return ["no findings"]
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.code, finding.cure), []).append(finding)
    lines = [f"{len(findings)} finding{'s' if len(findings) > 1 else ''}:"]
    for (severity, code, cure), group in list(groups.items())[:most]:
        names = in_words(name for finding in group for name in finding.where)
        lines.append(f"{severity:<8} {code}" + (f": {names}" if names else ""))
        differ = len({finding.summary for finding in group}) > 1
        where = f"{in_words(group[0].where)}: " if differ else ""
        others = f" ({len(group) - 1} more, with other numbers)" if differ else ""
        lines.append(f"{'':<9}{where}{group[0].summary}{others}")
        if cure:
            lines.append(f"{'':<9}cure: {cure}")
    left = sum(len(group) for group in list(groups.values())[most:])
    if left:
        lines.append(f"... and {left} more in `findings`")
    return lines
