"""Law: excursions that end where they began, copies, files and looks change no bit of any history of an optimizer.

All weights were written once, so that the optimizer keeps copies of them; a copy or a file is looked at before a write.

`python -m tests.laws.optim.test_histories 500 SEED` tries as many as wanted.
"""

import random
import sys

import pytest

from .histories import differs

SAMPLE = 9


@pytest.mark.filterwarnings("ignore:parameters are written between steps")
@pytest.mark.parametrize("part", range(3))
def test_no_history_differs_from_its_undisturbed_life(seed, part):
    chooser = random.Random(seed * 3 + part)
    for _ in range(SAMPLE // 3):
        told = differs(chooser.randrange(2**31))
        assert not told, told


if __name__ == "__main__":
    count, start = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(2**31)
    chooser = random.Random(start)
    print(f"seed {start}, {count} histories")
    found = [told for _ in range(count) if (told := differs(chooser.randrange(2**31)))]
    print(*found, f"{len(found)} of {count} differ", sep="\n")
