"""Options that take several names: splitting, help texts and shell completion."""

from collections.abc import Callable, Sequence


def describe_option(kind: str, default: Sequence[str]) -> str:
    """Return the help text of an option that takes several names."""
    return f"{kind}, separated by commas or one option each. Default: {', '.join(default)}"


def split(given: list[str] | None, default: Sequence[str]) -> list[str]:
    """Split ``["a,b", "c"]`` into ``["a", "b", "c"]``; return the default for an empty list.

    >>> split(["digits, text", "cifar10"], ["text"]), split(None, ["text"])
    (['digits', 'text', 'cifar10'], ['text'])
    """
    if given is None:
        return list(default)
    return [name.strip() for part in given for name in part.split(",") if name.strip()]


def complete(names: Callable[[], Sequence[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes the last of several names for a shell; torch is not imported.

    >>> complete(lambda: ["digits", "text", "two-heads"])("digits,t")
    ['digits,text', 'digits,two-heads']
    """

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        known = before.split(",")
        return [before + comma + name for name in names() if name.startswith(last) and name not in known]

    return completed


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    from ..recipes import names

    return names()


def task_names() -> list[str]:
    """Return the names of all tasks."""
    from ..trials.tasks import names

    return names()
