"""Schedule: which iterations are measured, by their number alone, so that all processes measure the same ones."""

from __future__ import annotations

_MASK = 2**64 - 1


def is_measured(iteration: int, restart: int, interval: int) -> bool:
    """Return whether an iteration is measured.

    From ``restart`` on, which is the start of the training or the iteration after a skipped step, these are the 0th,
    the 1st, one of the 2nd and 3rd, one of the 4th to 7th, and so on to spans of ``interval`` iterations; then one of
    every further span of that length. Which one of a span it is, is pseudo-random: measurements at a fixed distance
    would fall on the same task of losses that take turns.

    Args:
        iteration: Its number, from 0.
        restart: The number of the iteration from which the spans are counted, at most ``iteration``.
        interval: The length of the longest spans.

    >>> [k for k in range(64) if is_measured(k, 0, 16)]
    [0, 1, 2, 6, 14, 23, 33, 51]
    >>> all(is_measured(k, 0, 1) for k in range(64))
    True
    """
    since = iteration - restart
    if since == 0:
        return True
    length = min(1 << (since.bit_length() - 1), interval)
    if length < interval:
        first = restart + length
    else:
        # Shorter spans go up to the largest power of two that is less than the interval, and end at its double.
        begin = 1 << (interval - 1).bit_length()
        first = restart + begin + (since - begin) // interval * interval
    return iteration == first + _mixed(first) % length


def _mixed(number: int) -> int:
    """A 64-bit hash (the finalizer of SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
