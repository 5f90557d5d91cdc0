"""One call for all parameters: on threads, in forked workers, the same bits."""

import textwrap

import pytest
import torch

import halfulp as hu
from halfulp.kernels import engine

from ...laws.optim.cases import build, differing, snapshot

HEAD = """
import threading, warnings
import torch
import halfulp as hu
from halfulp.kernels import same_bits

def train(number, steps=3, size=(300, 512), threads=None):
    generator = torch.Generator().manual_seed(number)
    parameter = torch.nn.Parameter(torch.randn(size, generator=generator).bfloat16())
    small = torch.nn.Parameter(torch.randn(7, generator=generator).bfloat16())
    optimizer = hu.optim.AdamW([parameter, small], lr=1e-2, weight_update="split8", state_dtype="8bit", seed=number)
    for step in range(steps):
        for p in (parameter, small):
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        before = torch.get_num_threads()
        torch.set_num_threads(threads if threads and step else before)  # the first step allocates
        optimizer.step()
        torch.set_num_threads(before)
    return [p.detach().clone() for p in (parameter, small)]

def same(a, b):
    return len(a) == len(b) and all(map(same_bits, a, b))
"""


@pytest.fixture
def run(in_processes):
    """Runs a body in a process that has made no thread and no kernel yet."""
    return lambda body, **environment: in_processes(HEAD + textwrap.dedent(body), 1, **environment)


def test_four_threads_step_four_optimizers_at_once(run):
    run(
        """
        torch.set_num_threads(2)
        alone = [train(number) for number in range(4)]
        found = [None] * 4
        gate = threading.Barrier(4)
        def work(number):
            gate.wait()
            for _ in range(3):
                found[number] = train(number)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(same(a, b) for a, b in zip(alone, found))
        """
    )


def test_four_threads_compile_their_first_kernels_at_once(tmp_path, run):
    run(
        """
        found = [None] * 4
        gate = threading.Barrier(4)
        def work(number):
            gate.wait()
            found[number] = train(0)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(same(found[0], other) for other in found[1:])
        """,
        HALFULP_CACHE_DIR=str(tmp_path),
    )


def test_a_forked_worker_quantizes_and_steps_after_its_parent_has(run):
    run(
        """
        warnings.simplefilter("ignore")
        torch.set_num_threads(2)
        parent = train(0)
        x = torch.randn(1 << 17)
        rounded = hu.quantize(x, "e4m3fn")
        class Items(torch.utils.data.Dataset):  # a worker has one thread, for torch's own do not survive a fork
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return same(train(0, threads=1 + i % 2), parent), same_bits(hu.quantize(x, "e4m3fn"), rounded)
        loader = torch.utils.data.DataLoader(Items(), num_workers=2, batch_size=None, multiprocessing_context="fork")
        seen = list(loader)
        assert len(seen) == 4 and all(all(pair) for pair in seen), seen
        assert same(train(0), parent)
        """
    )


@pytest.mark.parametrize(("update", "codec"), [("split8", "8bit"), ("kahan-stochastic", None), ("stochastic", None)])
def test_two_threads_give_the_bits_of_one(seed, update, codec):
    found = []
    for threads in (1, 2):
        torch.manual_seed(seed)
        shapes = [(200, 512), (33,), (64, 1024), (5, 7), (), (0, 4)]
        parameters = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
        optimizer = build("adamw", update, parameters, state_dtype=codec, seed=seed, report_interval=2)
        torch.set_num_threads(threads)
        try:
            for _ in range(4):
                for parameter in parameters:
                    parameter.grad = torch.randn(parameter.shape).bfloat16()
                optimizer.step()
        finally:
            torch.set_num_threads(1)
        found.append((snapshot(optimizer), optimizer.report()))
    assert differing(found[0][0], found[1][0]) == []
    for one, two in zip(found[0][1].rows, found[1][1].rows):
        assert one == two


def test_a_process_without_llvmlite_runs_the_reference_and_says_so(in_bare_process):
    """Its bits are those of the kernels: test_kernel."""
    body = """
        import sys
        sys.modules["llvmlite"] = None
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            without = train(0, size=(16, 64))
        assert sum("llvmlite is not installed" in str(w.message) for w in seen) == 1, seen
        assert hu.kernels.count_fallbacks()
        with hu.kernels.engine("reference"):
            assert same(without, train(0, size=(16, 64)))
        print("right")
        """
    code = HEAD + textwrap.dedent(body)
    assert "right" in in_bare_process(code)


def test_parameters_of_many_kinds_step_together_as_apart(seed):
    """Float32, bfloat16 and float16 parameters, with gradients of other dtypes, in one optimizer."""

    def made():
        torch.manual_seed(seed)
        dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
        parameters = [torch.nn.Parameter(torch.randn(70).to(dtype)) for dtype in dtypes]
        for parameter, dtype in zip(parameters, [torch.float32, torch.float32, torch.float16, torch.bfloat16]):
            parameter.grad_dtype, parameter.grad = None, torch.randn(70).to(dtype)
        return parameters

    joint = made()
    optimizer = build("adamw", "kahan", [(f"p{k}", p) for k, p in enumerate(joint)], seed=seed)
    with engine("reference"):
        optimizer.step()
        for k, parameter in enumerate(made()):
            store = "fp32" if parameter.dtype == torch.float32 else "bf16"
            single = build("adamw", "kahan", [(f"p{k}", parameter)], store, seed=seed)
            single.step()
            assert torch.equal(parameter.detach(), joint[k].detach())


@pytest.mark.parametrize("name", ["llvm", "reference"])
def test_memory_that_a_step_cannot_take_is_refused_at_every_step(name):
    def freed(weight, optimizer):
        weight.untyped_storage().resize_(0)

    def with_gaps(weight, optimizer):
        state = optimizer.state[weight]
        state["exp_avg"].data = torch.zeros(8, 4, dtype=state["exp_avg"].dtype).t()

    def freed_gradient(weight, optimizer):
        weight.grad.untyped_storage().resize_(0)

    for spoil, kind in ((freed, TypeError), (with_gaps, ValueError), (freed_gradient, TypeError)):
        weight = torch.nn.Parameter(torch.ones(4, 8))
        optimizer = hu.optim.AdamW([weight], lr=1e-2)
        with engine(name):
            weight.grad = torch.ones(4, 8)
            optimizer.step()
            before = weight.detach().clone()
            spoil(weight, optimizer)
            for _ in range(3):
                with pytest.raises(kind):
                    optimizer.step()
            if spoil is with_gaps:
                assert torch.equal(weight, before)
