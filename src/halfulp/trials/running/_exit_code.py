"""How a process ended, in words: an exit code, or the signal that killed it."""

from __future__ import annotations

import signal


def how_it_ended(code: int | None) -> str:
    """Return the words for the exit code of a process; minus a signal's number where one killed it.

    >>> how_it_ended(3), how_it_ended(-15), how_it_ended(-99), how_it_ended(0xC0000005)
    ('ended with exit code 3', 'was killed by SIGTERM', 'was killed by signal 99', 'ended with exit code 0xC0000005')
    """
    if code is None or 0 <= code < 2**31:
        return f"ended with exit code {code}"
    if code > 0:  # of a crash on Windows, which names it so
        return f"ended with exit code 0x{code:X}"
    names = {member.value: member.name for member in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def is_killed(code: int | None) -> bool:
    """Whether SIGKILL ended a process, as the system does where memory is short; Windows has none.

    >>> is_killed(-9), is_killed(9), is_killed(None)
    (True, False, False)
    """
    return code is not None and -code == getattr(signal, "SIGKILL", 9)
