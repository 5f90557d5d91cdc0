"""Lists of names in options: how they are split, what the help says of them, what a shell completes them to."""

from collections.abc import Callable, Sequence


def several(kind: str, default: Sequence[str]) -> str:
    """The help of an option that takes several names."""
    return f"{kind}, separated by commas or one option each. Default: {', '.join(default)}"


def split(given: list[str] | None, default: Sequence[str]) -> list[str]:
    """``["a,b", "c"]`` as ``["a", "b", "c"]``; the default where nothing was given.

    >>> split(["digits, text", "cifar10"], ["text"]), split(None, ["text"])
    (['digits', 'text', 'cifar10'], ['text'])
    """
    if given is None:
        return list(default)
    return [name.strip() for part in given for name in part.split(",") if name.strip()]


def complete(names: Callable[[], Sequence[str]]) -> Callable[[str], list[str]]:
    """What a shell completes the last of some names to, those before it kept; torch is not imported for it.

    >>> complete(lambda: ["digits", "text", "two-heads"])("digits,t")
    ['digits,text', 'digits,two-heads']
    """

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        known = before.split(",")
        return [before + comma + name for name in names() if name.startswith(last) and name not in known]

    return completed


def recipe_names() -> list[str]:
    """All recipes."""
    from ..recipes import names

    return names()


def task_names() -> list[str]:
    """All tasks."""
    from ..trials.tasks import names

    return names()
