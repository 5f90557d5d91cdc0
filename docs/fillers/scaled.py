"""Scaled tensors: rules by family, coverage, architectures and cost."""

import textwrap

from ._places import place
from ._tables import all_tables, benchmark_table, grid, text_and_note


def _scaled_families() -> dict[str, list[str]]:
    """The library's own registered operators by family, in the order of the families."""
    from halfulp.scaled._registry import FAMILY_BY_NAME, FAMILY_BY_OPERATOR

    found: dict[str, list[str]] = {}
    for operator, family in FAMILY_BY_OPERATOR.items():
        namespace, name = operator._schema.name.split("::")
        if namespace in ("aten", "c10d", "_c10d_functional", "halfulp"):
            name = name.removeprefix("_foreach_").removesuffix("_") if family == "foreach" else name
            found.setdefault(family, []).append(name)
    return {name: found[name] for name in FAMILY_BY_NAME if name in found}


@place
def scaled_rules() -> str:
    """What each family does to payload and scale."""
    from halfulp.scaled._registry import FAMILY_BY_NAME

    families = [(FAMILY_BY_NAME[name], len(found)) for name, found in _scaled_families().items()]
    lines = [[family.name, family.payload, family.scale, str(count)] for family, count in families]
    return grid(["family", "payload of the result", "its scale", "overloads"], lines)


@place
def scaled_operators() -> str:
    """The names of each family's operators."""
    paragraphs = []
    for family, found in _scaled_families().items():
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(found))
        paragraphs.append(textwrap.fill(f"**{family}**: {names}", 120, break_on_hyphens=False, break_long_words=False))
    return "\n\n".join(paragraphs)


@place
def scaled_recipes() -> str:
    """The recipes with scaled payloads."""
    from halfulp.recipes import get, names

    found = [get(name) for name in names() if get(name).payload]
    fields = ("payload", "matmul", "weight_update", "state_dtype")
    rows = [[f"`{r.name}`", *(getattr(r, field) or "–" for field in fields), r.description] for r in found]
    return grid(["recipe", "payload", "products", "weight update", "moments", "what it is"], rows)


@place
def scaled_coverage() -> str:
    """How many of torch's operators are right on scaled tensors."""
    return benchmark_table("op_coverage", "op_db", ("what", "entries", "of", "share", "bar"))


@place
def scaled_exceptions() -> str:
    """Which are wrong or refused."""
    return benchmark_table("op_coverage", "Wrong or refused", ("entry", "why"))


@place
def scaled_architectures() -> str:
    """The gradients of Hugging Face models."""
    columns = ("architecture", "kind", "float32 payload", "bit-equal", "float16 payload", "fallbacks")
    return benchmark_table("scaled_architectures", "gradients", columns)


@place
def scaled_architectures_note() -> str:
    """What the table of architectures says, and how many meet their bar."""
    return text_and_note("scaled_architectures", end=".")


@place
def scaled_cost() -> str:
    """What scaled tensors cost in time and memory."""
    return all_tables("scaled")


@place
def scaled_starts() -> str:
    """Training from other magnitudes and under other scales."""
    return all_tables("scaled_starts")
