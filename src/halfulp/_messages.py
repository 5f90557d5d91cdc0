"""What messages share: a class with its article, names that are missing or unknown."""

from __future__ import annotations

from collections.abc import Iterable

_MOST = 5


def a_kind(given: object) -> str:
    """What something is, with the article that its class's name wants.

    >>> a_kind(3), a_kind({}), a_kind(None)
    ('an int', 'a dict', 'None')
    """
    if given is None:
        return "None"
    name = type(given).__name__
    # Abbreviations are read letter by letter: an LSTM, an MCTensor, a GRU.
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "aeioAEIO"
    return f"{'an' if name[:1] in vowels else 'a'} {name}"


def listed(names: Iterable[object]) -> str:
    """Some names in words, the first of many.

    >>> listed(["a", "b"]), listed("abcdefg")
    ("'a', 'b'", "'a', 'b', 'c', 'd', 'e' and 2 more")
    """
    names = list(names)
    rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(map(repr, names[:_MOST])) + rest


def differences(missing: Iterable[object], unknown: Iterable[object]) -> str:
    """Which names a file lacks, and which it has that nobody knows; at least one of the two has some.

    >>> differences(["a"], []), differences(["a"], ["b"])
    ("lacks 'a'", "lacks 'a' and has the unknown 'b'")
    """
    lacks = [f"lacks {listed(missing)}"] if missing else []
    return " and ".join(lacks + ([f"has the unknown {listed(unknown)}"] if unknown else []))
