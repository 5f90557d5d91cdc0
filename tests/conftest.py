"""Shared fixtures: one thread everywhere, and a fresh seed that every failure prints."""

import collections
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import multiprocessing
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from halfulp._torch_floor import is_older
from halfulp._torch_versions import HAS_GRADIENT_DTYPE

from .samples import covering

ROOT = Path(__file__).parents[1]
PINNED = "2.13"  # of constraints.txt

# Sums in another number of threads have other bits: the programs that tests start count as this process does.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

# Inductor compiles a program for each set of instructions that the processor has, to see that g++ knows them: 15 s.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Most of what importing and collecting make stays: the garbage collector need not look through it again and again.
gc.disable()

# A seed for a device that is not there waits for it with the call's stack as text: half a millisecond each.
for _device in (torch.cuda, torch.xpu, torch.mtia):
    if not _device.is_available():
        _device.manual_seed_all = _device.manual_seed = lambda seed: None

# For a line in its log torch.compile measures each graph's guards, with the processor's caches emptied: 50 ms.
if hasattr(torch._C._dynamo.guards, "profile_guard_manager"):
    torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One seed for the whole run, given by HALFULP_TEST_SEED or fresh; workers and hypothesis take the same."""
    value = int(os.environ.setdefault("HALFULP_TEST_SEED", str(random.SystemRandom().randrange(2**31))))
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = value
    # Each worker begins with a part of its own, so that a file's kernels are in one worker, and both end together.
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "worksteal"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked so takes a sample of its cases; what needs a CUDA device is skipped where there is none."""
    left_out = _left_out(items)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases that the samples of a run leave out: of each test that is marked `sampled(times)` its own."""
    cases = collections.defaultdict(dict)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]][tuple(map(id, item.callspec.params.values()))] = item
    found = {item for rows in cases.values() for item in rows.values()}
    for name, rows in cases.items():
        (times,) = next(iter(rows.values())).get_closest_marker("sampled").args
        found -= {rows[row] for row in covering([*rows], times, of=name)}
    return found


def pytest_sessionstart(session: pytest.Session) -> None:
    """The seed is said once at the start, however quiet the run is; workers have no terminal."""
    if terminal := session.config.pluginmanager.get_plugin("terminalreporter"):
        terminal.write_line(f"HALFULP_TEST_SEED={os.environ['HALFULP_TEST_SEED']}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on garbage is collected, more rarely than by default: compilers make many objects and few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _leave_nothing() -> Iterator[None]:
    """What a module's tests compiled goes with them; what stays is not looked through again by gc and `scalify`."""
    yield
    if "torch._dynamo" in sys.modules:
        with warnings.catch_warnings():  # it imports the compiler, which uses what torch has deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            torch._dynamo.reset()
    gc.collect()
    gc.freeze()
    _return_free_memory()


def _return_free_memory() -> None:
    """What was freed between blocks in use goes back to the system, where the C library can do so."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def seed() -> int:
    """The run's seed, printed with the test's output."""
    value = int(os.environ["HALFULP_TEST_SEED"])
    print(f"HALFULP_TEST_SEED={value}")
    torch.manual_seed(value)
    random.seed(value)
    return value


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone, for models that a test wraps.

    The reference outlives the test's DistributedDataParallel: where that holds the last one, it joins gloo's threads
    without releasing the GIL, for which one of them may be waiting.
    """
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    yield
    torch.distributed.destroy_process_group()
    del group


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile without what tests before compiled, and none of this one's afterwards; its counters at 0."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _is_pinned() -> bool:
    """Whether this torch is as new as the pinned one, of which nothing need be compiled to find out what it does."""
    return not is_older(torch.__version__, PINNED)


def _draws_alike() -> bool:
    drawn = []
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        drawn.append(torch.empty(120, dtype=dtype).exponential_(generator=generator).float())
    return torch.allclose(*drawn)


def _averages_over_dtypes() -> bool:
    model = torch.nn.Linear(1, 1)
    averages = torch.optim.swa_utils.AveragedModel(model)
    with contextlib.suppress(RuntimeError):
        for _ in range(2):
            averages.update_parameters(model.bfloat16())
        return True
    return False


def _saves_alone() -> bool:
    from torch.distributed.checkpoint import save

    return "no_dist" in inspect.signature(save).parameters


def _has_scaled_product() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")


def _compiles_embeddings() -> bool:
    """Inductor of torch 2.6 adds some rows twice and others not at all, on some processors."""
    layer, index, found = torch.nn.Embedding(17, 16), torch.arange(48).reshape(4, 12) % 17, []
    for run in (layer, torch.compile(layer)):
        layer.zero_grad()
        run(index).square().sum().backward()
        found.append(layer.weight.grad.clone())
    return torch.allclose(*found)


def _has_derivative_of_aminmax() -> bool:
    with contextlib.suppress(RuntimeError):
        torch.ones(2, requires_grad=True).aminmax()[0].backward()
        return True
    return False


def _keeps_random_order() -> bool:
    """Inductor before torch 2.12 runs first what writes into a tensor, here the last one."""

    def draw(x: torch.Tensor) -> list[torch.Tensor]:
        into = torch.empty_like(x)
        drawn = [hu.quantize(x, name, hu.Stochastic()) for name in ("bf16", "tf32")]
        return [*drawn, hu.quantize(x, "bf16", hu.Stochastic(), out=into)]

    import halfulp as hu

    found, x = [], torch.randn(256)
    for run in (draw, torch.compile(draw)):
        torch.manual_seed(0)
        found.append(run(x))
    return all(map(torch.equal, *found))


def _rounds_softmax_once() -> bool:
    """The CPU kernel of torch 2.6 rounds the sum within to bfloat16, too."""
    gradient, y = torch.linspace(-1, 2, 64).square(), torch.linspace(-2, 2, 64).softmax(-1).bfloat16()
    backward = torch.ops.aten._softmax_backward_data
    narrow = backward(gradient.bfloat16(), y, -1, torch.bfloat16)
    return torch.equal(narrow, backward(gradient.bfloat16().float(), y.float(), -1, torch.float32).bfloat16())


def _adds_products_once() -> bool:
    """The CPU kernel of torch 2.6 rounds the product before it adds."""
    added, matrix, vector = torch.ones(9), torch.zeros(9, 17), torch.zeros(17)
    matrix[:, 0] = vector[0] = 1.859375  # 1 + 1.859375^2 is past a tie, once rounded before the tie
    narrow = torch.addmv(added.bfloat16(), matrix.bfloat16(), vector.bfloat16())
    return torch.equal(narrow, torch.addmv(added, matrix, vector).bfloat16())


def _sums_dots_in_float32() -> bool:
    """The CPU kernel of torch 2.6 rounds the sum at each vector."""
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randn(2, 40, generator=generator).bfloat16() for _ in range(200)]
    return all(
        (torch.dot(x, y).double() - (x.double() * y.double()).sum()).abs() <= 2.0**-7 * torch.dot(x, y).double().abs()
        for x, y in pairs
    )


def _writes_quietly() -> bool:
    from torch.distributed.checkpoint import filesystem

    return "tensor.storage()" not in inspect.getsource(filesystem)


def _captures_counts() -> bool:
    """Dynamo of torch 2.8 leaves such a frame to Python after a graph break."""
    graphs: list = []

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = collections.Counter()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            self.counts["calls"] += 1
            return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(Counting(), backend=lambda graph, _: graphs.append(graph) or graph)(torch.ones(1))
    return bool(graphs)


def _takes_groups() -> bool:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    query, key = torch.ones(1, 2, 4, 8), torch.ones(1, 1, 4, 8)
    with Seen():
        torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    return any("flash_attention" in name for name in seen)


def _has_source_rank() -> bool:
    from torch.distributed.tensor.parallel import parallelize_module

    return "src_data_rank" in inspect.signature(parallelize_module).parameters


def _steps_later_parameters() -> bool:
    optimizer, later = torch.optim.Adagrad([torch.ones(1, requires_grad=True)]), torch.ones(1, requires_grad=True)
    later.sum().backward()
    optimizer.param_groups[0]["params"][0] = later
    with contextlib.suppress(KeyError):
        optimizer.step()
        return True
    return False


def _keeps_casts() -> bool:
    """The C++ that Inductor of torch 2.6 writes leaves out casts to bfloat16 and back, whatever it is told."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.1).to(torch.bfloat16).float() + 0.1

    x = torch.linspace(0, 1, 64)
    return torch.equal(torch.compile(run, options={"emulate_precision_casts": True})(x), run(x))


def _slices_some_alone() -> bool:
    x = torch.ones(2, 4, requires_grad=True)
    return type(x[:, ::2].grad_fn.next_functions[0][0]).__name__ == "AccumulateGrad"


GRADIENT_DTYPES = "gradients of another dtype than the parameter's (Tensor.grad_dtype)"
# What tests of halfulp build on and only newer versions of torch do (what halfulp does: halfulp._torch_versions).
TORCH_FEATURES: dict[str, Callable[[], bool]] = {
    "fully_shard on the CPU": lambda: hasattr(torch.cpu.Stream, "record_event"),
    "fully_shard on the CPU that averages gradients, not sums them": lambda: (
        hasattr(torch.cpu.Stream, "record_event") and not is_older(torch.__version__, "2.11")
    ),
    "parallelize_module(src_data_rank=)": _has_source_rank,
    "AveragedModel beside a model of another dtype": _averages_over_dtypes,
    "distributed.checkpoint.save(no_dist=)": _saves_alone,
    "distributed.checkpoint that writes without torch's own warning": _writes_quietly,
    "distributed.checkpoint that sets dictionaries inside a state": lambda: not is_older(torch.__version__, "2.11"),
    "gloo that prints nothing of its own": lambda: not is_older(torch.__version__, "2.11"),
    "a compiler that captures a module which counts its calls": _captures_counts,
    "torch._scaled_mm on the CPU": _has_scaled_product,
    "an embedding's compiled gradient that counts every index": lambda: _is_pinned() or _compiles_embeddings(),
    "derivative of aminmax": _has_derivative_of_aminmax,
    "a cast to float8_e4m3fn that saturates": lambda: (
        torch.tensor(1e3).to(torch.float8_e4m3fn).float().isfinite().item()
    ),
    "a cast of NaN to float16 that sets the first bit alone": lambda: (
        torch.tensor(float("nan")).half().view(torch.int16).item() & 0x7FFF == 0x7E00
    ),
    "torch.export of tensor subclasses": lambda: not is_older(torch.__version__, "2.7"),
    "strict torch.export of tensor subclasses and modules with hooks": lambda: not is_older(torch.__version__, "2.11"),
    "addmv of bfloat16 that rounds once": _adds_products_once,
    "dot of bfloat16 that sums in float32": _sums_dots_in_float32,
    GRADIENT_DTYPES: lambda: HAS_GRADIENT_DTYPE,
    "_fused_rms_norm with its statistics": lambda: (
        hasattr(torch.ops.aten, "_fused_rms_norm") and len(torch.ops.aten._fused_rms_norm.default._schema.returns) == 2
    ),
    "all operators of the pinned version, whose rules the page counts": lambda: not is_older(torch.__version__, PINNED),
    "settings of precision per backend": lambda: hasattr(torch.backends.mkldnn, "matmul"),
    "a backward pass of bfloat16 softmax that rounds once": _rounds_softmax_once,
    "random operators that Inductor keeps in order": lambda: _is_pinned() or _keeps_random_order(),
    "flash attention of grouped queries on the CPU": _takes_groups,
    "graphs whose only result is a view of a tensor subclass": lambda: not is_older(torch.__version__, "2.11"),
    "products with out_dtype=": lambda: hasattr(torch.ops.aten.mm, "dtype"),
    "torch.nn.functional.grouped_mm": lambda: hasattr(torch.nn.functional, "grouped_mm"),
    "Tag.cudagraph_unsafe": lambda: hasattr(torch.Tag, "cudagraph_unsafe"),
    "torch.compiler.is_exporting, which transformers calls": lambda: hasattr(torch.compiler, "is_exporting"),
    "a ReduceOp that collectives of tensor classes can read": lambda: hasattr(torch.classes.c10d.ReduceOp(), "op"),
    "slices of some dimensions alone": _slices_some_alone,
    "Inductor's emulate_precision_casts on the CPU": lambda: _is_pinned() or _keeps_casts(),
    "a saved option that tells Adam's decay from AdamW's": lambda: (
        "decoupled_weight_decay" in torch.optim.AdamW([torch.ones(1)]).defaults
    ),
    "Adagrad that steps parameters which came after it was made": _steps_later_parameters,
    "exponential_ that draws the same numbers in every dtype": _draws_alike,
    "trunc_normal_ without erfinv, which components of float64 compute in float64": lambda: (
        "new_tensor" in inspect.getsource(torch.nn.init._no_grad_trunc_normal_)
    ),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that meets what an older torch lacks is skipped, by what halfulp or torch says of it."""
    try:
        return (yield)
    except (AttributeError, ImportError, NotImplementedError, RuntimeError) as error:
        feature = _lacking(error) if is_older(torch.__version__, PINNED) else None
        if feature is None:
            raise
    pytest.skip(f"torch {torch.__version__} lacks it: {feature}")


def _lacking(error: Exception) -> str | None:
    """The feature that halfulp refuses by name, or that a test itself, not halfulp, takes from torch."""
    said = str(error)
    if isinstance(error, NotImplementedError) and said.startswith(f"torch {torch.__version__} "):
        return said
    if "attempting to assign a gradient with dtype" in said:
        return GRADIENT_DTYPES
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [path for path in frames if ROOT in path.parents]
    if operator := re.match(r"Could not run 'aten::(\w+)' with arguments from the 'CPU' backend", said):
        return f"torch's {operator[1]} on the CPU"
    if operator := re.match(r'"(\w+)" not implemented for ', said):
        return f"torch's {operator[1]} of such a dtype"
    name = re.search(r"(?:module 'torch|'_OpNamespace' 'aten'|cannot import name).*'(\w+)'", said)
    return f"torch's {name[1]}" if name and ours and ROOT / "src" not in ours[-1].parents else None


@pytest.fixture(scope="session")
def needs_torch() -> Callable[[str], None]:
    """Skips a test whose torch lacks a feature, by its name."""

    def need(feature: str) -> None:
        if not TORCH_FEATURES[feature]():
            pytest.skip(f"torch {torch.__version__} lacks it: {feature}")

    return need


@pytest.fixture
def assembly_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """A function from a processor's name to the list that gets the assembly of what is compiled for it from then on."""
    from halfulp.kernels.vector import _machine_function

    machine = _machine_function._make_target_machine

    def target_machine(written: list[str], *level: int):
        made = machine(*level)
        emit = made.emit_object
        made.emit_object = lambda module: written.append(made.emit_assembly(module)) or emit(module)
        return made

    def start(processor: str) -> list[str]:
        written: list[str] = []
        monkeypatch.setenv("HALFULP_CPU_NAME", processor)
        monkeypatch.setattr(_machine_function, "_make_target_machine", functools.partial(target_machine, written))
        return written

    return start


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], types.ModuleType]]:
    """Imports a module of benchmarks/, given its name there; afterwards none of them is imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    # pytest makes an empty module of a folder's name where it imports one from inside.
    if not hasattr(sys.modules.get("benchmarks"), "__path__"):
        monkeypatch.delitem(sys.modules, "benchmarks", raising=False)

    def load(name: str) -> types.ModuleType:
        module = importlib.import_module(f"benchmarks.{name}")
        # torch looks for a unittest in the whole stack, with its sources, at each of an operator's samples: 30 ms.
        for tools in ("common_utils", "opinfo.core"):
            if known := sys.modules.get(f"torch.testing._internal.{tools}"):
                monkeypatch.setattr(known, "extract_test_fn", lambda: None, raising=False)
        return module

    yield load
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]


class _Branch:
    """A server that another one has forked: to import torch takes seconds, and two that hash differently are enough."""

    def __init__(self, server: "subprocess.Popen | _Branch", prepares: bool = False) -> None:
        with tempfile.TemporaryDirectory() as folder:
            pipes = [str(Path(folder, name)) for name in ("requests", "answers")]
            for pipe in pipes:
                os.mkfifo(pipe)
            print(json.dumps({"pipes": pipes, "prepares": prepares}), file=server.stdin, flush=True)
            self.stdin, self.stdout = open(pipes[0], "w"), open(pipes[1])  # noqa: SIM115

    def communicate(self, timeout: float) -> None:
        """Ends it, as Popen does."""
        self.stdin.close()
        assert not select.select([self.stdout], [], [], timeout)[0] or not self.stdout.read()
        self.stdout.close()


Servers = dict[int | str, subprocess.Popen | _Branch]


@pytest.fixture(scope="session")
def _fork_servers() -> Iterator[Servers]:
    """Processes that have imported torch; those that were needed, by number, and a bare one."""
    started: Servers = {}
    yield started
    for server in reversed(started.values()):
        server.communicate(timeout=60)


def _server(number: int | str, servers: Servers) -> subprocess.Popen | _Branch:
    """One of the processes that have imported torch, which is started where it is not there."""
    if number in (2, 3) and number not in servers:
        servers[number] = _Branch(_server(number - 2, servers))
    if number == 0 and number not in servers:
        servers[number] = _Branch(_server("bare", servers), prepares=True)
    if number not in servers:
        command = [sys.executable, "-W", "error", str(Path(__file__).with_name("fork_server.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        servers[number] = subprocess.Popen([*command, *(["bare"] if number == "bare" else [])], **pipes)
    return servers[number]


class _Forked:
    """A script that runs in the child of a server: its id, what it writes, and how it ends."""

    def __init__(self, server: subprocess.Popen, output: Path, errors: Path, request: dict) -> None:
        self.output, self.errors, self._server, self._code = output, errors, server, None
        for path in (output, errors):
            path.unlink(missing_ok=True)
        environment = {**os.environ, **request["environment"]}
        request = {**request, "environment": environment, "directory": os.getcwd()}
        print(json.dumps({**request, "output": str(output), "errors": str(errors)}), file=server.stdin, flush=True)
        self.pid = int(server.stdout.readline())

    def says(self, line: str, patience: float = 120) -> None:
        """Waits for the first line of its output, which must be this."""
        until, said = time.monotonic() + patience, ""
        while "\n" not in said and time.monotonic() < until and not self._ended(0.02):
            said = self.output.read_text() if self.output.exists() else ""
        assert said.startswith(f"{line}\n"), (said, self.errors.read_text())

    def code(self, patience: float = 240) -> int:
        """How it ended; one that waits for another that is gone would wait on, and is killed."""
        if self._code is None:
            if not self._ended(patience):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            self._code = int(self._server.stdout.readline())
        return self._code

    def _ended(self, patience: float) -> bool:
        return self._code is not None or bool(select.select([self._server.stdout], [], [], max(0, patience))[0])


@pytest.fixture
def in_processes(seed: int, tmp_path: Path, _fork_servers: Servers, needs_torch: Callable) -> Callable[..., None]:
    """Runs a script in some processes that must all succeed; its arguments are rank, path of a store, and seed."""

    def run(script: str, count: int, **given: str) -> None:
        if "fully_shard(" in script:
            needs_torch("fully_shard on the CPU")
        request = {"script": script, "environment": given}
        servers, started = [_server(rank, _fork_servers) for rank in range(count)], []
        for rank, server in enumerate(servers):
            output, arguments = tmp_path / f"output{rank}", [str(rank), str(tmp_path / "store"), str(seed)]
            started.append(_Forked(server, output, output, {**request, "arguments": arguments}))
        until = time.monotonic() + 240
        codes = [forked.code(until - time.monotonic()) for forked in started]
        assert codes == [0] * count, "\n".join(forked.output.read_text() for forked in started)

    return run


@pytest.fixture
def forked(tmp_path: Path, _fork_servers: Servers) -> Callable[..., tuple[int, str]]:
    """Runs a script with arguments in the child of a server, by number or bare: how it ended, and what it printed."""

    def run(
        script: str, *arguments: str, number: int | str = 0, patience: float = 240, **given: str
    ) -> tuple[int, str]:
        output, request = tmp_path / "output", {"script": script, "arguments": arguments, "environment": given}
        code = _Forked(_server(number, _fork_servers), output, output, request).code(patience)
        return code, output.read_text()

    return run


@pytest.fixture
def forking(tmp_path: Path, _fork_servers: Servers) -> Iterator[Callable[..., _Forked]]:
    """Starts a script in a session of its own, of a process that has imported torch, and goes on; one at a time."""
    started: list[_Forked] = []

    def start(script: str, *arguments: str) -> _Forked:
        files = tmp_path / "output", tmp_path / "errors"
        request = {"script": script, "arguments": arguments, "environment": {}, "session": True}
        started.append(_Forked(_server(0, _fork_servers), *files, request))
        return started[-1]

    yield start
    for forked in started:
        forked.code(patience=0)


@pytest.fixture
def in_process(forked: Callable[..., tuple[int, str]], needs_torch: Callable) -> Callable[..., str]:
    """Runs a script in one process that must succeed, the child of the server of a number; what it printed."""

    def run(script: str, number: int = 0, **given: str) -> str:
        if "fully_shard(" in script:
            needs_torch("fully_shard on the CPU")
        code, printed = forked(script, number=number, **given)
        assert code == 0, printed
        return printed

    return run


@pytest.fixture
def in_bare_process(forked: Callable[..., tuple[int, str]]) -> Callable[..., str]:
    """Runs a script with arguments in a process that has imported torch alone, and must succeed; what it printed."""

    def run(script: str, *arguments: str, **given: str) -> str:
        code, printed = forked(textwrap.dedent(script), *arguments, number="bare", **given)
        assert code == 0, printed
        return printed

    return run


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of trials that need not import torch: they fork from a process that has, where the system can."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        from halfulp.trials.running import _pool

        context = multiprocessing.get_context("forkserver")
        modules = [
            "torch._dynamo",
            "llvmlite.binding",
            "halfulp.trials.running._trial",
            "halfulp.trials.tasks",
            "halfulp.optim",
        ]
        context.set_forkserver_preload(modules)
        monkeypatch.setattr(_pool, "multiprocessing", types.SimpleNamespace(get_context=lambda method: context))


@pytest.fixture
def in_two_processes(in_processes: Callable[[str, int], None]) -> Callable[[str], None]:
    """The same, in two processes."""
    return functools.partial(in_processes, count=2)


@pytest.fixture
def nothing_waits() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which a wait for a CUDA device is an error."""
    return _waits_refused


@contextlib.contextmanager
def _waits_refused() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
