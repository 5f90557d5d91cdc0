"""What of other ranks is not known, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Heard:
    """What was heard of one rank.

    Attributes:
        ended: whether its observation has ended.
        last: its last sampled step; None before one.
        common: the last sampled step at which it was compared with this rank; None before one.
        apart: whether one of the two began to observe later than the other.
    """

    ended: bool = False
    last: int | None = None
    common: int | None = None
    apart: bool = False


def sentences(
    heard: Mapping[int, Heard], ranks: Sequence[int], steps: Sequence[int], failed: str | None = None, first: int = 0
) -> list[str]:
    """Return what is missing of other ranks.

    Args:
        heard: by rank.
        ranks: that this one compares itself with.
        steps: sampled steps of this rank at which it could have been compared by now, in order.
        failed: why nothing more can be heard, if so.
        first: number of the step from which steps are counted here.

    >>> sentences({1: Heard(True, 10, 10), 2: Heard(False, 50, 50)}, [1, 2, 3], [0, 10, 50])
    ['rank 3 did not observe this run: not compared', 'rank 1 ended after step 10: compared until then']
    """
    if not steps and failed is None:
        return []
    by_words: dict[str, list[int]] = {}
    for rank in ranks:
        known = heard.get(rank, Heard())
        if known.common is None or not steps or known.common < steps[-1]:
            words = _words(known, rank in heard, failed, first)
            by_words.setdefault(words, []).append(rank)
    return [f"{_named(found)} {words}" for words, found in sorted(by_words.items())]


def _words(known: Heard, observes: bool, failed: str | None, first: int) -> str:
    reason = "" if failed is None else f" ({failed})"
    if known.common is not None:
        ended, at = known.ended and known.last == known.common, first + known.common
        said = f"ended after step {at}: compared until then" if ended else f"last compared at step {at}"
    elif failed is not None:
        said = "not compared"
    elif not observes:
        said = "did not observe this run: not compared"
    elif known.apart:
        said = "did not begin to observe at the same step: not compared"
    else:
        said = f"sampled {'no step' if known.last is None else 'other steps than this rank'}: not compared"
    return said + reason


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
