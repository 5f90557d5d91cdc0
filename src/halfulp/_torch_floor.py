"""The oldest torch that halfulp runs on, and the sentence for an older one."""

import re
import sys

from ._messages import ENV_HINT

# The oldest version that is taken; docs/compatibility.md says what the test suite gives on it and on later ones.
OLDEST_TORCH = "2.6"


def check_torch_version() -> None:
    """Raise ImportError if the torch that this process has imported is older than OLDEST_TORCH."""
    found = getattr(sys.modules.get("torch"), "__version__", None)
    if found is not None and is_older(found):
        raise ImportError(
            f"halfulp needs torch {OLDEST_TORCH} or newer and found torch {found}: run pip install --upgrade "
            f"'torch>={OLDEST_TORCH}'; {ENV_HINT}"
        )


def is_older(version: str, floor: str = OLDEST_TORCH) -> bool:
    """Return whether a version of torch lies below the floor, by major and minor number.

    >>> is_older("2.5.1+cu124", "2.12"), is_older("2.12.1", "2.12"), is_older("2.15.0a0+git1f2e", "2.12")
    (True, False, False)
    """
    return _parse_version(version) < _parse_version(floor)


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", str(version))[:2])
