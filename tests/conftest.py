"""Shared fixtures: one thread everywhere, and a fresh seed that every failure prints."""

import os
import random

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed, fixed by HALFULP_TEST_SEED and printed with the test's output."""
    value = int(os.environ.get("HALFULP_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"HALFULP_TEST_SEED={value}")
    torch.manual_seed(value)
    random.seed(value)
    return value
