"""The oracles of rounding as fixtures, and every format and rounding as parameters."""

from collections.abc import Callable

import pytest

from .oracle import FORMATS, MODES, all_of, exact_blocks, oracle, random_patterns, tail


@pytest.fixture(name="oracle")
def _oracle() -> Callable:
    return oracle


@pytest.fixture(name="all_of")
def _all_of() -> Callable:
    return all_of


@pytest.fixture(name="random_patterns")
def _random_patterns() -> Callable:
    return random_patterns


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "format" in metafunc.fixturenames:
        metafunc.parametrize("format", FORMATS, ids=lambda format: format.name)
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", MODES)


@pytest.fixture(name="exact_blocks")
def _exact_blocks() -> Callable:
    return exact_blocks


@pytest.fixture(name="tail")
def _tail() -> Callable:
    return tail
