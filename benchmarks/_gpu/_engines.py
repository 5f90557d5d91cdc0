"""The engine that a part's steps run by: Triton on a GPU, its interpreter in a dry run, or what there is."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator

from ._run import Run

LOST = "no Triton kernel"
PLAIN = "by plain torch operations"


def has_triton() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


def engine_of(run: Run) -> str:
    """The engine's name for `hu.kernels.engine`."""
    if run.on_gpu:
        return "auto"
    return "triton" if has_triton() and os.environ.get("TRITON_INTERPRET") == "1" else "auto"


def engine_note(run: Run) -> str:
    """What a table says of its engine."""
    if not has_triton():
        how = "plain torch operations" if run.on_gpu else "the CPU's own kernels"
        return f"triton is not installed: {how} instead."
    if run.on_gpu:
        return "Steps by Triton."
    return "Steps by Triton's interpreter." if engine_of(run) == "triton" else "Steps by the CPU's own kernels."


@contextlib.contextmanager
def no_silent_fallback(scaled: bool = False) -> Iterator[None]:
    """Raise RuntimeError at the end if a step's Triton kernel could not be used and torch took over.

    Scaled parameters have no Triton kernel, and without triton nothing has: then that is no failure.
    """
    import halfulp as hu

    before = hu.kernels.count_fallbacks()
    yield
    if not has_triton():
        return
    for text, count in hu.kernels.count_fallbacks().items():
        if count > before.get(text, 0) and (LOST in text or (PLAIN in text and not scaled)):
            raise RuntimeError(text)
