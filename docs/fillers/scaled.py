"""Scaled tensors: rules by family, coverage, architectures and cost."""

import textwrap

from ._places import place
from ._tables import all_tables, benchmark_table, grid, text_and_note

# What `halfulp.scaled` does with a family of operators: the payload of the result, and its scale.
_SCALED_RULES = {
    "pass-through": ("op(p)", "s"),
    "bilinear": ("product: p₁ p₂; sum of K products: (Σ p₁ p₂) / c", "s₁ s₂; s₁ s₂ c with c = p2(√K)"),
    "attention": ("torch's fused kernel of p_q s_q s_k, p_k, p_v", "s_v; gradients s_g s_v s_k/c, s_g s_v s_q/c, s_g"),
    "alignment": ("op(p₁ s₁/s, p₂ s₂/s)", "s = max(s₁, s₂); constants have no say"),
    "reduction": ("sum of n, norm: op(p) / c; mean, deviation: op(p)", "s c with c = p2(√n); s; products: measured"),
    "gated": ("f(p s) / s", "s; max(s, 1) where f(0) is not 0; gradients s_g"),
    "unit output": ("f(p s)", "1; min(s, 1) where f(x) is about x near 0; more where the largest result needs it"),
    "power law": ("pⁿ, √p, √(2 p) for an odd power of two", "sⁿ, √s, √(s/2); measured for other exponents"),
    "norm": ("(p − mean) / √(var + eps/s²)", "1; gradients s_g/s, of weights s_g c"),
    "loss": ("by loss", "s or measured; gradients of a mean over n: about s_g/n"),
    "recurrent": ("torch's fused layer on values", "measured"),
    "indexing": ("op(p₁ s₁/s, p₂ s₂/s)", "s = max(s₁, s₂); constants have no say"),
    "pooling": ("op(p)", "s"),
    "order": ("to whole numbers: op(p s) / scale; histograms: on values", "max(s, 1); measured"),
    "random": ("on values, by torch's generator", "measured; draws of 0 and 1: 1; dropout's gradient: s_g"),
    "linear algebra": ("on values", "measured"),
    "special": ("on values", "measured"),
    "complex": ("on values", "none: plain complex tensors"),
    "comparison": ("on values", "none: plain truth values and indices"),
    "creation": ("the constant over its power of two", "the power of two next to it; 2⁻¹²⁶ for zeros"),
    "writing": ("p s/s′", "s′ = s where all memory is written; else the scale that stands there"),
    "rescaling": ("p / 2ᵏ, rounded by a cast", "s 2ᵏ, 2ᵏ next to the payload's rms"),
    "foreach": ("the operator's own rule on each tensor", "by tensor"),
    "collectives": ("p s/s′, then the collective", "s′ = the largest of the ranks', times p2(√ranks) for sums"),
}


def _scaled_families() -> dict[str, list[str]]:
    """The library's own registered operators by family, in the order of the rules above."""
    from halfulp.scaled._registry import FAMILIES

    found: dict[str, list[str]] = {}
    for operator, family in FAMILIES.items():
        namespace, name = operator._schema.name.split("::")
        if namespace in ("aten", "c10d", "_c10d_functional", "halfulp"):
            name = name.removeprefix("_foreach_").removesuffix("_") if family == "foreach" else name
            found.setdefault(family, []).append(name)
    if found.keys() ^ _SCALED_RULES.keys():
        raise ValueError(f"families with operators or words alone: {sorted(found.keys() ^ _SCALED_RULES.keys())}")
    return {family: found[family] for family in _SCALED_RULES}


@place
def scaled_rules() -> str:
    """What each family does to payload and scale."""
    lines = [[name, *_SCALED_RULES[name], str(len(found))] for name, found in _scaled_families().items()]
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
