"""The places: a name in a page, and the function that says what stands there."""

from collections.abc import Callable

PLACES: dict[str, Callable[[], str]] = {}


def place(function: Callable[[], str]) -> Callable[[], str]:
    """List a function that fills `<!-- fill its-name -->`.

    Raises:
        ValueError: there is one of that name.
    """
    name = function.__name__.replace("_", "-")
    if name in PLACES:
        raise ValueError(f"two functions fill {name!r}: rename one of them")
    PLACES[name] = function
    return function
