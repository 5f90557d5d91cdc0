"""Registration of named formats, recipes, optimizers, tasks and policies, and the message for an unknown name."""

import difflib
from collections.abc import Iterable
from typing import Any

_DESCRIPTIONS_BY_KIND: dict[str, dict[str, str]] = {}


def register_entry(kind: str, registry: dict[str, Any], name: str, entry: object, words: str | None) -> None:
    """Register an entry under its name.

    A class that stands there already may come again from the module that it came from, as when a notebook's cell or a
    file is run twice. Messages name the kind; tables and pages print the words.

    Raises:
        ValueError: the name is no word, another entry has it, or there are no words.

    >>> known = {}
    >>> register_entry("task", known, "spiral", object, "two spirals, told apart")
    >>> register_entry("task", known, "spiral", int, "another spiral")
    Traceback (most recent call last):
    ...
    ValueError: task 'spiral' exists already: choose another name
    """
    if not isinstance(name, str) or not name or name != name.strip() or any(c in name for c in ", /\\\n"):
        raise ValueError(f"{kind}: a name is a word without blanks, commas and slashes, got {name!r}")
    if words is None or not words.strip():
        raise ValueError(f"{kind} {name!r} has no words that say what it is: tables and pages print them")
    there = registry.get(name, entry)
    same = [getattr(there, field, None) == getattr(entry, field, "") for field in ("__module__", "__qualname__")]
    if there != entry and not (isinstance(entry, type) and all(same)):
        raise ValueError(f"{kind} {name!r} exists already: choose another name")
    registry[name] = entry
    _DESCRIPTIONS_BY_KIND.setdefault(kind, {})[name] = " ".join(words.partition("\n\n")[0].split())


def read_own_docstring(cls: type) -> str | None:
    """Return a class's own docstring; None for one that it inherits, and for the signature that dataclass writes.

    >>> import dataclasses
    >>> read_own_docstring(dataclasses.make_dataclass("Point", ["x", "y"])), read_own_docstring(dict)[:6]
    (None, 'dict()')
    """
    text = vars(cls).get("__doc__")
    signature = "__dataclass_fields__" in vars(cls) and str(text).startswith(f"{cls.__name__}(")
    return None if signature else text


def read_registered_descriptions(kind: str) -> dict[str, str]:
    """Return the registered names of one kind, each with the first paragraph of its description, and import nothing."""
    return dict(_DESCRIPTIONS_BY_KIND.get(kind, {}))


def describe_unknown_name(kind: str, given: object, allowed: Iterable[str]) -> str:
    """Return the message for an unknown name: the allowed ones, nearest first.

    >>> describe_unknown_name("recipe", "bf16-khan", ["fp32", "bf16-kahan"])
    "unknown recipe 'bf16-khan'; did you mean 'bf16-kahan'? Allowed: fp32, bf16-kahan"
    """
    names = [str(name) for name in allowed]
    near = difflib.get_close_matches(str(given), names, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else "."
    return f"unknown {kind} {given!r}{hint} Allowed: {', '.join(names)}"
