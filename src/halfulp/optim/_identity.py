"""The identity that keys a parameter's random bits: its qualified name where names were given, else its position."""

from __future__ import annotations

import hashlib


def name_identity(name: str) -> int:
    """63 bits of a hash of a name.

    >>> name_identity("layers.0.weight") == name_identity("layers.0.weight")
    True
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


def assign_identities(group: dict, earlier: list[dict]) -> None:
    """Give every parameter of a group its identity, unless it came with them."""
    if "identities" in group and len(group["identities"]) == len(group["params"]):
        return
    names, start = group.get("param_names"), sum(len(other["params"]) for other in earlier)
    count = len(group["params"])
    group["identities"] = [name_identity(n) for n in names] if names else list(range(start, start + count))
