"""The list of codes: each is whole, an empty run has none, and causes go before consequences."""

import ast
import re
from string import Formatter
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

import halfulp as hu
from halfulp.observation import Finding, FindingKind, register_finding
from halfulp.observation._finding import join_and_rank_findings
from halfulp.observation._record import Record, Role
from halfulp.observation.findings import FINDING_KINDS, collect_findings, get_finding_kind

from .records import parameter, realised


@pytest.mark.parametrize("code", sorted(FINDING_KINDS))
def test_a_code_is_whole(code):
    kind = FINDING_KINDS[code]
    assert code == kind.code
    assert kind.list_instruments(), f"no instrument shows {code}"
    assert all(cause in FINDING_KINDS for cause in kind.explained_by), f"{code} is explained by what does not exist"
    assert len(kind.__doc__.splitlines()) == 1
    assert kind.__doc__.endswith(".")
    assert "  " not in kind.cure
    assert not kind.cure.endswith(".")


@pytest.mark.parametrize("code", sorted(FINDING_KINDS))
def test_a_diagnosis_names_the_place_and_lines_of_code_call_what_exists(code):
    kind = FINDING_KINDS[code]
    assert kind.role in ("", *get_args(Role))
    assert all(other in FINDING_KINDS for other in kind.shares_cause_with)
    if kind.says:
        names = [key for _, key, _, _ in Formatter().parse(kind.says) if key]
        assert "place" in names
        assert not re.search(r"[\[\]]", re.sub(r"\[[^|\[\]]*\|[^|\[\]]*\]", "", kind.says))
        assert not kind.says.endswith(".")
    for node in ast.walk(ast.parse(kind.write)):
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node).split(".")
            if path[0] in ("hu", "torch") and all(map(str.isidentifier, path)):
                found = {"hu": hu, "torch": torch}[path[0]]
                for name in path[1:]:
                    found = getattr(found, name)


def test_no_two_codes_explain_each_other():
    import graphlib

    graphlib.TopologicalSorter({code: kind.explained_by for code, kind in FINDING_KINDS.items()}).prepare()


def test_an_empty_record_shows_nothing():
    assert collect_findings("observe", Record()) == []


def test_a_whole_run_of_one_frozen_weight_names_the_cause_first():
    record = parameter("norm.weight", update=realised(0.0), moved=0.0, decay=realised(0.0))
    assert [finding.code for finding in collect_findings("observe", record)] == [
        "updates-lost",
        "weight-frozen",
        "weight-decay-lost",
    ]


def finding(code: str, *where: str, severity: str = "warning", confidence: float = 0.5) -> Finding:
    return Finding(code, where, severity, confidence, {}, "cure")


KINDS = {code: SimpleNamespace(explained_by=causes) for code, causes in {"b": ["a"], "c": ["b"]}.items()}


def codes(*findings: Finding) -> list[str]:
    return [each.code for each in join_and_rank_findings(findings, KINDS)]


def test_a_cause_is_as_bad_as_what_follows_from_it():
    assert codes(
        finding("d", severity="error", confidence=0.4), finding("b", "x", severity="error"), finding("a", "x")
    ) == [
        "a",
        "d",
        "b",
    ]
    assert codes(finding("c", "x", severity="error"), finding("b", "x"), finding("a", "x", severity="note"))[0] == "a"


def test_what_happens_elsewhere_explains_nothing():
    assert codes(finding("b", "x", confidence=0.9), finding("a", "y")) == ["b", "a"]
    assert codes(finding("b", "x.weight", confidence=0.9), finding("a", "x")) == ["a", "b"]
    assert codes(finding("b", "x", confidence=0.9), finding("a")) == ["a", "b"]
    spreading = {**KINDS, "a": SimpleNamespace(spreads=True)}
    assert [each.code for each in join_and_rank_findings([finding("b", "x"), finding("a", "y")], spreading)] == [
        "a",
        "b",
    ]


def test_layers_of_one_kind_are_joined():
    (joined,) = join_and_rank_findings(
        [finding("a", "layers.0.norm"), finding("a", "layers.1.norm", confidence=0.9)], KINDS
    )
    assert joined.where == ("layers.0.norm", "layers.1.norm")
    assert joined.confidence == 0.9
    assert len(join_and_rank_findings([finding("a", "layers.0.norm"), finding("a", "layers.1.bias")], KINDS)) == 2


def test_an_unknown_code_and_an_unfinished_class_are_refused():
    with pytest.raises(ValueError, match="did you mean 'updates-lost'"):
        get_finding_kind("update-lost")
    with pytest.raises(TypeError, match="subclass of FindingKind"):
        register_finding(object)
    with pytest.raises(ValueError, match="has no cure"):
        register_finding(type("Unfinished", (FindingKind,), {"code": "x", "__doc__": "Something."}))
    with pytest.raises(ValueError, match="exists already"):
        register_finding(type("Again", (FindingKind,), {"code": "updates-lost", "cure": "c", "__doc__": "Something."}))
