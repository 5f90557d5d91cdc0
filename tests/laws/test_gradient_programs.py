"""Law: in eager float32 a scaler's exponents change no bit of any random program's gradients, whoever reads what.

In regions and once the graph is known; without a format. `python -m tests.laws.test_gradient_programs 2000 SEED` tries
as many programs as wanted.
"""

import random
import sys

import pytest

from halfulp.gradients.eager._region import ArgumentGradientMover

from .gradient_programs import FUNCTIONS, MODULES, Program, differs

SAMPLE = 90


@pytest.mark.parametrize("part", range(3))
def test_no_bit_changes_in_random_programs(seed, part):
    chooser = random.Random(seed * 3 + part)
    for _ in range(SAMPLE // 3):
        told = differs(chooser.randrange(2**31))
        assert not told, told


def test_everything_is_drawn(seed):
    drawn = {name for i in range(400) for name, _ in Program(seed + i).steps}
    assert drawn == {*FUNCTIONS, *MODULES}


def test_the_law_sees_a_view_in_the_graph(seed, monkeypatch):
    monkeypatch.setattr(ArgumentGradientMover, "can_move_by_hook", lambda self, tensor: False)
    assert any(differs(seed + i) for i in range(200))


if __name__ == "__main__":
    count, start = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(2**31)
    chooser = random.Random(start)
    print(f"seed {start}, {count} programs", flush=True)
    found = [told for _ in range(count) if (told := differs(chooser.randrange(2**31)))]
    print(*found, f"{len(found)} of {count} differ", sep="\n")
