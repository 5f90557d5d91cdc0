"""Trainings that SIGKILL ends, also inside a save, and their resumes; benchmarks/bench_kills.py does fifty."""

SAMPLE = """
import os, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, os.getcwd())
from benchmarks.bench_kills import kills

for size, count in ((1, 2), (2, 1)):
    found = kills(size, count, int(os.environ["HALFULP_TEST_SEED"]))
    assert all(one.same for one in found), (size, found)
"""


def test_killed_trainings_resume_to_the_bit(in_process, seed):
    in_process(SAMPLE)
