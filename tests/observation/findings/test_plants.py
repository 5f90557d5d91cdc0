"""Each code is found first in a real run that has the fault, and nothing above a note is in its healthy twin."""

import re

import pytest

from halfulp.observation._finding import group_by_cause, make_cause_dict
from halfulp.observation.findings import FINDING_KINDS

from ..plants.registry import PLANTS

# Found in two processes: test_replicas.py.
ELSEWHERE = {"replicas-differ"}


@pytest.mark.filterwarnings("ignore")  # torch's, about what the fault does
@pytest.mark.parametrize("code", sorted(PLANTS))
def test_a_plant_is_found_and_its_healthy_twin_is_silent(code, seed, needs_torch):
    for faulty in (True, False):
        if code == "compiled-differs" and not faulty:
            needs_torch("Inductor's emulate_precision_casts on the CPU")
        loud = [finding for finding in PLANTS[code](faulty).findings() if finding.severity != "note"]
        if faulty:
            assert [finding.code for finding in loud][:1] == [code], list(map(str, loud))
            (first, *_) = group_by_cause(loud)
            assert first[0].code == code
            assert not first[0].says or "{" not in re.sub(r"\{[\d,-]+\}", "", make_cause_dict(first)["headline"]), (
                "a place in the template"
            )
            last = first[0].where[0].removesuffix(".weight").removesuffix(".bias") if first[0].where else ""
            assert re.sub(r"\d+.*", "", last) in make_cause_dict(first)["headline"], "the diagnosis names the layer"
        else:
            assert loud == [], list(map(str, loud))


def test_each_code_is_planted():
    own = {code for code, kind in FINDING_KINDS.items() if kind.__module__.startswith("halfulp.")}
    assert set(PLANTS) | ELSEWHERE == own
