"""Each code is found first in a real run that has the fault, and nothing above a note is in its healthy twin."""

import pytest

import halfulp as hu

from ..plants.registry import PLANTS


@pytest.mark.filterwarnings("ignore")  # torch's, about what the fault does
@pytest.mark.parametrize("code", sorted(PLANTS))
def test_a_plant_is_found_and_its_healthy_twin_is_silent(code, seed):
    for faulty in (True, False):
        run = PLANTS[code](faulty)
        with hu.observe(run.model, run.optimizer, interval=4, **run.watched) as seen:
            run.train()
        loud = [finding for finding in seen.findings if finding.severity != "note"]
        if faulty:
            assert [finding.code for finding in loud][:1] == [code], seen
        else:
            assert loud == [], seen
