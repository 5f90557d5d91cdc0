"""One wording for every unknown name: what was given, the near names, what is allowed."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, given: object, allowed: Iterable[str]) -> str:
    """The message for a name that is not among those allowed, nearest names first.

    >>> unknown("recipe", "bf16-khan", ["fp32", "bf16-kahan"])
    "unknown recipe 'bf16-khan'; did you mean 'bf16-kahan'? Allowed: fp32, bf16-kahan"
    """
    names = [str(name) for name in allowed]
    near = difflib.get_close_matches(str(given), names, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else "."
    return f"unknown {kind} {given!r}{hint} Allowed: {', '.join(names)}"
