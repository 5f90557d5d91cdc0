"""The first use of a Triton kernel: compared once, or told and left."""

import warnings

import pytest
import torch

import halfulp as hu
from halfulp.kernels.triton import _launch
from halfulp.kernels.triton._launch import find_checked_kernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch) -> None:
    monkeypatch.setattr(_launch, "_checked_kernel_by_key", {})


def _ones() -> list[torch.Tensor]:
    return [torch.ones(1)]


def test_a_kernel_is_compared_once():
    calls = []

    def run(kernel: str, device: torch.device) -> list[torch.Tensor]:
        calls.append((kernel, device))
        return _ones()

    assert [find_checked_kernel("key", "work", CPU, lambda: "kernel", run, _ones) for _ in range(3)] == ["kernel"] * 3
    assert calls == [("kernel", CPU)]


@pytest.mark.parametrize("fails", [True, False])
def test_a_kernel_of_other_bits_or_none_is_told_once_and_counted(fails):
    def run(kernel: str, device: torch.device) -> list[torch.Tensor]:
        if fails:
            raise RuntimeError("no compiler here\nfor this machine")
        return [torch.zeros(1)]

    reason = "RuntimeError: no compiler here" if fails else "KernelMismatchError"
    name = f"work that {'fails' if fails else 'differs'}"
    with pytest.warns(RuntimeWarning, match=rf"no Triton kernel for {name} on cpu \({reason}"):
        assert find_checked_kernel("key", name, CPU, lambda: "kernel", run, _ones) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_checked_kernel("key", name, CPU, pytest.fail, pytest.fail, pytest.fail) is None
    assert any(f"no Triton kernel for {name} on cpu" in text for text in hu.kernels.count_fallbacks())


def test_a_kernel_is_not_compared_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    given = ("key", "captured work", torch.device("cuda"), pytest.fail, pytest.fail, pytest.fail)
    assert find_checked_kernel(*given) is None
    assert _launch._checked_kernel_by_key == {}, "the next call may compare"
    assert any("captured work by plain torch operations" in text for text in hu.kernels.count_fallbacks())


def test_the_reference_runs_by_plain_torch_whichever_engine_was_asked_for():
    def reference() -> list[torch.Tensor]:
        assert hu.kernels.select_engine("cpu") == "reference"
        return _ones()

    with hu.kernels.engine("triton"):
        assert (
            find_checked_kernel("key", "work", CPU, lambda: "kernel", lambda kernel, device: _ones(), reference)
            == "kernel"
        )
