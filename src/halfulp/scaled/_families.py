"""Families of operators: what tables say of their results, and which storage their operands take under a home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operands = Literal["float32", "home", "widest", "rule"]
OPERANDS = ("float32", "home", "widest", "rule")


@dataclass(frozen=True, slots=True)
class Family:
    """A family of operators that treat payloads p and scales s alike.

    Attributes:
        name: the heading in tables, and what `implements(..., family=name)` takes.
        payload: of the result, for tables.
        scale: of the result, for tables.
        operands: the storage of operands where tensors have a home: "float32", as torch.autocast computes it; "home",
            as it computes products; "widest", that of the widest operand; "rule", left to the rule.
    """

    name: str
    payload: str
    scale: str
    operands: Operands = "widest"


FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Make a family known by its name to `implements` and to the tables.

    Raises:
        ValueError: another family has the name, its words are missing, or `operands` is none of those allowed.

    >>> _ = register_family(Family("doc example", "op(p)", "s", operands="float32"))
    >>> FAMILIES.pop("doc example").operands
    'float32'
    """
    if family.name in FAMILIES:
        raise ValueError(f"a family is called {family.name!r} already: give another name")
    if not (family.name.strip() and family.payload.strip() and family.scale.strip()):
        raise ValueError(f"{family}: say in words what the payload and the scale of a result are")
    if family.operands not in OPERANDS:
        raise ValueError(f"operands={family.operands!r}: allowed are {', '.join(map(repr, OPERANDS))}")
    FAMILIES[family.name] = family
    return family


for _family in (
    Family("pass-through", "op(p)", "s"),
    Family(
        "bilinear",
        "product: p₁ p₂; sum of K products: (Σ p₁ p₂) / c",
        "s₁ s₂; s₁ s₂ c with c = p2(√K)",
        operands="home",
    ),
    Family(
        "attention",
        "torch's fused kernel of p_q s_q s_k, p_k, p_v",
        "s_v; gradients s_g s_v s_k/c, s_g s_v s_q/c, s_g",
        operands="home",
    ),
    Family("alignment", "op(p₁ s₁/s, p₂ s₂/s)", "s = max(s₁, s₂); constants have no say"),
    Family(
        "reduction",
        "sum of n, norm: op(p) / c; mean, deviation: op(p)",
        "s c with c = p2(√n); s; products: measured",
        operands="float32",
    ),
    Family("gated", "f(p s) / s", "s; max(s, 1) where f(0) is not 0; gradients s_g"),
    Family(
        "unit output",
        "f(p s)",
        "1; min(s, 1) where f(x) is about x near 0; more where the largest result needs it",
        operands="float32",
    ),
    Family(
        "power law",
        "pⁿ, √p, √(2 p) for an odd power of two",
        "sⁿ, √s, √(s/2); measured for other exponents",
        operands="float32",
    ),
    Family("norm", "(p − mean) / √(var + eps/s²)", "1; gradients s_g/s, of weights s_g c", operands="rule"),
    Family("loss", "by loss", "s or measured; gradients of a mean over n: about s_g/n", operands="float32"),
    Family("recurrent", "torch's fused layer on values", "measured", operands="home"),
    Family("indexing", "op(p₁ s₁/s, p₂ s₂/s)", "s = max(s₁, s₂); constants have no say"),
    Family("pooling", "op(p)", "s"),
    Family("order", "to whole numbers: op(p s) / scale; histograms: on values", "max(s, 1); measured"),
    Family(
        "random",
        "on values, by torch's generator",
        "measured; draws of 0 and 1: 1; dropout's gradient: s_g",
        operands="rule",
    ),
    Family("linear algebra", "on values", "measured", operands="float32"),
    Family("special", "on values", "measured", operands="float32"),
    Family("complex", "on values", "none: plain complex tensors"),
    Family("comparison", "on values", "none: plain truth values and indices"),
    Family(
        "creation",
        "the constant over its power of two",
        "the power of two next to it; 2⁻¹²⁶ for zeros",
        operands="rule",
    ),
    Family(
        "writing", "p s/s′", "s′ = s where all memory is written; else the scale that stands there", operands="rule"
    ),
    Family("rescaling", "p / 2ᵏ, rounded by a cast", "s 2ᵏ, 2ᵏ next to the payload's rms", operands="rule"),
    Family("foreach", "the operator's own rule on each tensor", "by tensor", operands="rule"),
    Family(
        "collectives",
        "p s/s′, then the collective",
        "s′ = the largest of the ranks', times p2(√ranks) for sums",
        operands="rule",
    ),
    Family("own", "by its rule", "by its rule"),
):
    register_family(_family)
