"""Threads, forks and callers at once: right bits, no abort."""

import pytest

PROGRAM = """
    import os, sys, threading, warnings
    import torch
    import halfulp.rounding as r
    warnings.simplefilter("ignore")  # of a fork beside threads, which is what is tested
    torch.set_num_threads(2)
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    def work(): return r.quantize(x, "fp16", r.Stochastic(3))
    wanted = work()
"""


def test_a_forked_child(forked_python):
    """A child that quantizes after its parent has run threads."""
    program = """
        for _ in range(3):
            child = os.fork()
            if child == 0:
                os._exit(0 if torch.equal(work(), wanted) else 1)
            assert os.waitpid(child, 0)[1] == 0
        print(torch.equal(work(), wanted))
    """
    assert forked_python(PROGRAM, program) == "True\n"


def test_a_data_loader_worker(forked_python):
    program = """
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return work()
        loader = torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=2)
        print(all(torch.equal(batch[0], wanted) for batch in loader))
    """
    assert forked_python(PROGRAM, program) == "True\n"


def test_four_callers_at_once(forked_python):
    program = """
        results = [None] * 4
        def call(i):
            results[i] = all(torch.equal(work(), wanted) for _ in range(5))
        callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for caller in callers: caller.start()
        for caller in callers: caller.join()
        print(results)
    """
    assert forked_python(PROGRAM, program) == "[True, True, True, True]\n"


def test_changing_counts_leave_few_threads(forked_python):
    program = """
        import time
        for count in range(2, 40):
            torch.set_num_threads(count)
            assert torch.equal(work(), wanted), count
        end = time.monotonic() + 20
        while (left := sum(one.name.startswith("halfulp") for one in threading.enumerate())) > 100:
            assert time.monotonic() < end, left
            time.sleep(0.01)
    """
    forked_python(PROGRAM, program)


def test_four_first_callers_at_once(forked_python, cache):
    """Compilation itself may happen in several threads."""
    program = """
        import threading, torch, halfulp.rounding as r
        x = torch.randn(1000)
        results = [None] * 4
        def call(i): results[i] = r.quantize(x, "bf16")
        callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for caller in callers: caller.start()
        for caller in callers: caller.join()
        print(all(torch.equal(q, x.bfloat16().float()) for q in results))
    """
    assert forked_python(program) == "True\n"


def test_children_of_a_process_that_compiles_compile_too(forked_python, cache):
    """Whatever lock its threads hold at that time, of ours, of llvmlite's or of functools', belongs to nobody there."""
    program = """
        from halfulp.arithmetic import pointwise
        one, begun, done = torch.ones(5), threading.Event(), threading.Event()
        pointwise("add", (one,), (one,), components=1, dtype=torch.float32)
        def compile_many():
            for components in (2, 1):
                for name in ("exp", "log", "tanh"):
                    pointwise(name, (one,), components=components, dtype=torch.float64)
                    begun.set()
                    if done.is_set(): return
        compiling = threading.Thread(target=compile_many)
        compiling.start()
        assert begun.wait(60)
        for k in (2, 3):
            child = os.fork()
            if child == 0:
                import faulthandler
                faulthandler.dump_traceback_later(60, exit=True)
                pointwise("mul", (one,), (one,), components=k, dtype=torch.float64)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        done.set()
        compiling.join()
        print("done")
    """
    assert forked_python(PROGRAM, program) == "done\n"


def test_an_error_in_a_thread_reaches_the_caller():
    import numpy as np
    import torch

    from halfulp.kernels import run_chunks

    def kernel(first, last):
        if first > 0:
            raise RuntimeError("inside")

    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="inside"):
            run_chunks(kernel, np.full(8, 100_000))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_chunk_once(threads, seed):
    import numpy as np
    import torch

    from halfulp.kernels import run_chunks

    rng = np.random.default_rng(seed)
    torch.set_num_threads(threads)
    try:
        for lengths in (rng.integers(1, 50_000, 37), np.array([10**6, 1, 1]), np.array([5]), np.zeros(0, np.int64)):
            seen = np.zeros(len(lengths), int)

            def kernel(first, last, seen=seen):
                seen[first:last] += 1

            run_chunks(kernel, lengths)
            assert (seen == 1).all()
    finally:
        torch.set_num_threads(1)


def test_a_compiled_function_runs_without_the_gil(cache):
    """Two of them meet: each goes on when it has seen that the other has begun."""
    import threading

    import numpy as np

    from halfulp.kernels import get_array_address
    from halfulp.kernels.vector._machine_function import compile_machine_function

    def meet(vectors, own, other, patience):
        b, word = vectors.b, vectors.int64
        one, place = word(1), vectors.pointer(other, word(0), vectors.i64)
        b.store(one, vectors.pointer(own, word(0), vectors.i64), align=8)
        before = b.block
        head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        turns = b.phi(vectors.i64)
        turns.add_incoming(patience, before)
        left = b.icmp_signed(">", turns, word(0))
        waits = b.icmp_signed("==", b.load_atomic(place, "acquire", align=8), word(0))
        b.cbranch(b.and_(waits, left), body, done)
        b.position_at_end(body)
        turns.add_incoming(b.sub(turns, one), body)
        b.branch(head)
        b.position_at_end(done)
        b.store(b.zext(left, vectors.i64), vectors.pointer(own, one, vectors.i64), align=8)

    kernel = compile_machine_function("meet", "of the test", 3, meet)
    words = np.zeros((2, 2), np.int64)
    places = [get_array_address(row) for row in words]
    thread = threading.Thread(target=kernel, args=(*places, 1 << 33))
    thread.start()
    kernel(*reversed(places), 1 << 33)
    thread.join()
    assert words.tolist() == [[1, 1], [1, 1]]


def run_three_pieces(kernel):
    """Run a kernel on three threads."""
    import numpy as np
    import torch

    from halfulp.kernels import MOST_SERIAL_ELEMENTS, run_chunks

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run_chunks(kernel, np.full(8, MOST_SERIAL_ELEMENTS))
    finally:
        torch.set_num_threads(threads)


def test_an_interrupted_call_ends_no_sooner_than_its_pieces():
    """Kernels are given addresses, of memory that the caller frees behind an exception."""
    import time

    ended = []

    def kernel(first, last):
        if first == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)
        ended.append(first)

    with pytest.raises(KeyboardInterrupt):
        run_three_pieces(kernel)
    assert sorted(ended) == [2, 5]


def test_a_thread_that_cannot_start_ends_no_sooner_than_the_pieces_that_run(monkeypatch):
    """As where a container allows a process no more threads."""
    import time
    from concurrent.futures import ThreadPoolExecutor

    ended, submit = [], ThreadPoolExecutor.submit

    def submit_one(pool, kernel, first, *rest):
        if first == 5:
            raise RuntimeError("can't start new thread")
        return submit(pool, kernel, first, *rest)

    def kernel(first, last):
        time.sleep(0.2)
        ended.append(first)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_three_pieces(kernel)
    assert ended == [2]


def test_threads_of_torch_that_flush_change_no_bit(forked_python):
    """They begin with the first large operator, as flushing as the thread that calls it."""
    program = """
        from halfulp.arithmetic import matmul, pointwise
        small = torch.full((200_000,), 1e-40)
        a, b = (torch.full(shape, value) for shape, value in (((200, 500), 1e-40), ((500, 200), 1.0)))
        assert torch.set_flush_denormal(True)
        assert torch.get_num_threads() == 2 and not (torch.rand(400_000) * 1e-40).any()
        with halfulp.kernels.engine("reference"):
            made = pointwise("add", (small,), (small,), components=1, dtype=torch.float32)
        made += matmul((a,), (b,), 1, torch.float32)
        zeros = [int((part.view(torch.int32) == 0).sum()) for part in made]
        print(zeros, r.fit(small, "fp32").subnormal, torch.get_num_threads())
        assert torch.tensor(2.0**-126) * 0.5 == 0
    """
    assert forked_python(PROGRAM.replace("import torch", "import torch, halfulp"), program) == "[0, 0] 1.0 2\n"


def test_a_child_finds_no_lock_held(forked_python):
    program = """
        from halfulp.gradients.eager import _region
        from halfulp.kernels.vector import _machine_function
        from halfulp.mctensor import _before_autograd
        locks = _region._active_region_count_lock, _machine_function._compile_lock, _before_autograd._mkldnn_lock
        for lock in locks:
            held = threading.Event()
            def hold():
                with lock:
                    held.set()
                    time.sleep(0.2)
            holder = threading.Thread(target=hold)
            holder.start()
            assert held.wait(60)
            child = os.fork()
            if child == 0:
                os._exit(0 if lock.acquire(timeout=10) else 1)
            assert os.waitpid(child, 0)[1] == 0
            holder.join()
        print("free")
    """
    assert forked_python(PROGRAM.replace("threading,", "threading, time,"), program) == "free\n"


def test_nested_contexts_that_keep_subnormals_restore_the_threads(forked_python):
    program = """
        from halfulp.kernels import keeping_subnormals
        assert torch.set_flush_denormal(True)
        with keeping_subnormals():
            torch.set_flush_denormal(True)  # as a module may that is imported meanwhile
            with keeping_subnormals():
                pass
        print(torch.get_num_threads(), (torch.tensor(2.0**-126) * 0.5).item())
    """
    assert forked_python(PROGRAM, program) == "2 0.0\n"
