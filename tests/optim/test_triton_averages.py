"""Averages on an accelerator: weights that optimizers keep in parts are read, and averaged, in one launch each."""

import warnings

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.kernels._device_function import PointerTableFunction
from halfulp.kernels.triton._launch import PointerTableKernel
from halfulp.kernels.triton._writer import COMPILE_OPTIONS
from halfulp.optim._float32 import _record_read_trace
from halfulp.optim._storage import STORE_BY_DTYPE
from halfulp.optim.weight_updates._weight_update import find_weight_update

from ..kernels.triton.compiled import inexact
from ..kernels.triton.interpreted import interpreted
from ..kernels.triton.source import check_source

UPDATES = ("kahan", "split", "split8", "components", "master")


def _averaged(engine, update, device):
    """Averages, and their auxiliary tensors, after some steps of a model of odd sizes."""
    torch.manual_seed(3)
    layers = torch.nn.Linear(13, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 48), torch.nn.Linear(48, 400)
    model = torch.nn.Sequential(*layers).bfloat16()
    generator = torch.Generator().manual_seed(4)
    gradients = [[torch.randn(p.shape, generator=generator).bfloat16() for p in model.parameters()] for _ in range(3)]
    model.to(device)
    with hu.kernels.engine(engine), np.errstate(all="ignore"):
        optimizer = hu.optim.AdamW(model.parameters(), lr=1e-2, weight_update=update)
        averages = hu.optim.EMA(model, 0.9, optimizer=optimizer)
        for step in gradients:
            for parameter, gradient in zip(model.parameters(), step):
                parameter.grad = gradient.to(device)
            optimizer.step()
            averages.update()
        found = {**averages.float32_state_dict(), **averages.state_dict()["tensors"]}
    return {name: tensor.cpu() for name, tensor in found.items()}


def compare(device):
    """Which averages differ between Triton on a device and plain torch on the CPU."""
    warnings.simplefilter("error")
    found = []
    for update in UPDATES:
        wanted, made = _averaged("reference", update, "cpu"), _averaged("triton", update, device)
        found += [f"{update}: {name}" for name in wanted if not hu.kernels.same_bits(wanted[name], made[name])]
    return found + [text for text in hu.kernels.count_fallbacks() if "Triton" in text]


def test_interpreted_averages_equal_plain_torch_bit_for_bit():
    assert interpreted("tests.optim.test_triton_averages", "test.compare('cpu')") == "[]"


@pytest.mark.cuda
def test_averages_on_a_gpu_equal_plain_torch_bit_for_bit():
    pytest.importorskip("triton", reason="Triton is not installed")
    assert compare("cuda") == []


@pytest.mark.cuda
def test_an_average_waits_for_nothing_and_reads_in_one_launch(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).bfloat16().cuda()
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-2, weight_update="kahan", report_interval=0)
    averages = hu.optim.EMA(model, 0.9, optimizer=optimizer, report_interval=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        optimizer.step()
        averages.update()
    calls = []
    run = PointerTableKernel.__call__
    monkeypatch.setattr(PointerTableKernel, "__call__", lambda self, *given: calls.append(run(self, *given)))
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        averages.update()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert len(calls) == 1


@pytest.mark.parametrize("update", UPDATES)
def test_reading_is_written_in_what_triton_can_compile(update):
    assert {"element", "run"} <= check_source(_kernel(update).source)


def _kernel(update):
    return PointerTableKernel(
        PointerTableFunction(_record_read_trace(find_weight_update(update), STORE_BY_DTYPE[torch.bfloat16]), 5)
    )


@pytest.mark.parametrize("capability", [80, 90])
def test_the_compiler_reads_whole_vectors(capability, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", "3.5", reason="Triton is not installed, or older than 3.5")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = _kernel("kahan").triton_function
    types = {"chunks": "*i64", "rows": "*i64", "width": "i64", "aligned": "constexpr"}
    source = triton.compiler.ASTSource(kernel, types, {(3,): True}, {(k,): [["tt.divisibility", 16]] for k in (0, 1)})
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=COMPILE_OPTIONS).asm["ptx"]
    found = [line.split()[0] for line in ptx.splitlines() if line.startswith("\t") and line.split()]
    assert inexact(found) == []
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= {word for line in ptx.splitlines() for word in line.split()}
