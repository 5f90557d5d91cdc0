"""Processes that a script starts are noted by what runs in them; helpers that load data or hold locks are not."""

import concurrent.futures
import multiprocessing
import subprocess
import sys

import pytest
import torch

from halfulp.observation.scripts._run import ChildProcesses

FORK = multiprocessing.get_context("fork")


def train():
    pass


class Trainer(FORK.Process):
    def run(self):
        pass


def run(process):
    process.start()
    process.join()


def load():
    data = torch.utils.data.TensorDataset(torch.ones(4))
    list(torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork"))


def pool():
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=FORK) as workers:
        workers.submit(train).result()


@pytest.mark.parametrize(
    ("start", "functions", "said"),
    [
        (lambda: run(FORK.Process(target=train)), ["train"], "a process by multiprocessing, where train runs"),
        (lambda: [run(Trainer()) for _ in range(2)], ["Trainer"] * 2, "2 processes by multiprocessing, where Trainer"),
        (lambda: subprocess.run([sys.executable, "-c", ""], check=True), [], ""),
        (load, [], ""),
        (pool, [], ""),
        (lambda: None, [], ""),
    ],
)
def test_what_is_started_is_noted_and_nothing_stays_patched(start, functions, said):
    before, children = multiprocessing.process.BaseProcess.start, ChildProcesses()
    with children.watch_starts():
        start()
    assert multiprocessing.process.BaseProcess.start == before
    assert children.functions == functions
    assert said in children.explain_unseen()
    assert bool(said) == bool(children.explain_unseen())
