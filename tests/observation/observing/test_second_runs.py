"""`check=True` runs compiled modules a second time: the run is not changed by it, and no verdict is a false one."""

import collections
import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfulp as hu

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # of dynamo's own, where a graph goes on
]


def wrong(graph, inputs):
    """A backend whose results are off by a hundredth."""
    return lambda *given: tuple(out * 1.01 if torch.is_tensor(out) else out for out in graph(*given))


class Net(nn.Module):
    """A layer around a function of its own."""

    def __init__(self, function=lambda self, h: h):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 6), nn.Linear(6, 3), function

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


def run(model, check, backend="aot_eager", steps=3, given=None, context=None):
    """Train a compiled copy; weights, buffers, gradients, random numbers drawn afterwards, and what was seen."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = []
    with hu.observe(compiled, optimizer, interval=1, check=check) as seen:
        for _ in range(steps):
            x = torch.randn(4, 6) if given is None else given()
            with context() if context else torch.enable_grad():
                compiled(x).float().square().sum().backward()
            inputs.append(x.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, inputs, [torch.rand(3).tolist(), random.random(), np.random.rand()], model, seen


def same_run(model, **options):
    """Run with and without the check: the same bits everywhere; what the check saw, and its model."""
    state, inputs, drawn, *_ = run(model, False, **options)
    checked, given, after, trained, seen = run(model, True, **options)
    assert drawn == after
    assert all(torch.equal(a, b) for a, b in zip(inputs, given, strict=True))
    assert state.keys() == checked.keys()
    assert all(torch.equal(state[name], checked[name]) for name in state)
    return seen, trained


def said(seen):
    return " ".join(sentence for sentence in seen.record.unseen if "not compared" in sentence)


def codes(seen):
    return [finding.code for finding in seen.findings]


def test_a_compiler_that_rounds_otherwise_is_found_and_a_good_one_is_not(seed):
    assert "compiled-differs" in codes(run(Net(), True, wrong)[-1])
    seen, _ = same_run(Net())
    assert [pair.differing for pair in seen.record.compiled] == [0.0]
    assert not said(seen)


def test_copies_run_with_gradients_recorded_as_the_module_does(seed):
    seen, _ = same_run(Net(lambda self, h: h * (2.0 if torch.is_grad_enabled() else 3.0)))
    assert [pair.differing for pair in seen.record.compiled] == [0.0]


def drop_path(self, h):
    return h * torch.empty(h.shape[0], 1).bernoulli_(0.5)


RANDOM = {
    "functional dropout": lambda self, h: F.dropout(h, 0.5, self.training),
    "drop path": drop_path,
    "noise": lambda self, h: h + torch.randn_like(h),
    "stochastic depth": lambda self, h: h if random.random() < 0.5 else h.relu(),
    "numpy": lambda self, h: h * float(np.random.rand()),
}


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.filterwarnings("ignore")
def test_no_verdict_where_random_numbers_are_drawn(seed, kind):
    seen, _ = same_run(Net(RANDOM[kind]), backend=wrong)
    assert not seen.record.compiled
    assert "draws random numbers" in said(seen)
    assert "compiled-differs" not in codes(seen)


def test_dropout_modules_are_compared_in_evaluation_alone(seed):
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    seen, _ = same_run(model)
    assert "draws random numbers" in said(seen)
    assert not seen.record.compiled
    seen, _ = same_run(model.eval())
    assert not said(seen)
    assert len(seen.record.compiled) == 1


@pytest.mark.filterwarnings("ignore")
def test_inductors_own_random_numbers_give_no_verdict(seed):
    seen, _ = same_run(Net(RANDOM["functional dropout"]), backend="inductor", steps=2)
    assert "compiled-differs" not in codes(seen)
    assert "draws random numbers" in said(seen)


def test_a_generator_of_a_modules_own_is_not_advanced(seed):
    def noisy(self, h):
        torch._dynamo.graph_break()
        return h + torch.randn(h.shape, generator=self.generator)

    model = Net(noisy)
    model.generator = torch.Generator().manual_seed(3)
    a, b = (copy.deepcopy(model) for _ in range(2))
    _, _, _, plain, _ = run(a, False)
    _, _, _, checked, seen = run(b, True)
    assert torch.equal(plain.generator.get_state(), checked.generator.get_state())
    assert "compiled-differs" not in codes(seen)


class Stateful(nn.Module):
    """Changes a buffer, attributes and containers, and multiplies by the buffer, which its backward pass needs."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("gain", torch.ones(6))
        self.calls, self.history, self.counts = 0, [], collections.Counter()
        self.nested = {"seen": [torch.zeros(())]}

    def forward(self, x):
        torch._dynamo.graph_break()
        self.calls += 1
        self.history.append(self.calls)
        self.counts["calls"] += 1
        self.nested["seen"][0].add_(1)
        self.gain += 0.5
        return self.norm(self.layer(x)) * self.gain


@pytest.mark.filterwarnings("ignore")
def test_buffers_and_attributes_are_as_if_there_were_one_run(seed):
    seen, model = same_run(Stateful(), steps=2)
    assert not said(seen)
    assert [pair.differing for pair in seen.record.compiled] == [0.0]
    assert (model.calls, model.history, model.counts["calls"], int(model.nested["seen"][0])) == (2, [1, 2], 2, 2)
    assert model.norm.num_batches_tracked == 2


@pytest.mark.parametrize("cache", [True, False])
def test_gradients_under_autocast_are_those_of_the_run_alone(seed, cache):
    def context():
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return x @ self.weight.t() @ self.weight

    inner = Shared()
    results = []
    for check in (False, True):
        torch.manual_seed(1)
        model = copy.deepcopy(inner)
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hu.observe(compiled, optimizer, interval=1, check=check) as seen, context():
            x = torch.randn(4, 6)
            loss = compiled(x).sum() + (x @ model.weight).sum()  # which would take a weight from the cache
            loss.backward()
            assert torch.is_autocast_cache_enabled() == cache
            results.append(model.weight.grad.clone())
    assert torch.equal(*results)
    assert [pair.differing for pair in seen.record.compiled] == [0.0]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_inputs_that_are_changed_in_place_are_what_they_were(seed, requires_grad):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, extra):
            x.mul_(2)
            extra["scale"].add_(1)
            return self.layer(x * extra["scale"])

    results = []
    for check in (False, True):
        torch.manual_seed(2)
        model = InPlace()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, extra = torch.randn(4, 6, requires_grad=requires_grad) * 1, {"scale": torch.ones(())}
        with hu.observe(compiled, optimizer, interval=1, check=check) as seen:
            compiled(x, extra).square().sum().backward()
            optimizer.step()
        results.append((x.detach(), extra["scale"], model.layer.weight.detach()))
    assert all(map(torch.equal, *results))
    assert [pair.differing for pair in seen.record.compiled] == [0.0]


@pytest.mark.parametrize("where", ["module", "global"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_hooks_of_the_user_run_once(seed, where):
    calls = []
    model = Net()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(module, given, output):
        calls.append(type(module))
        return output * 2 if module is model.first and where == "module" else None

    if where == "module":
        handle = model.first.register_forward_hook(hook)
    else:
        handle = nn.modules.module.register_module_forward_hook(hook)
    counts = []
    try:
        for check in (False, True):
            torch._dynamo.reset()
            calls.clear()
            with hu.observe(compiled, optimizer, interval=1, check=check) as seen:
                compiled(torch.randn(4, 6)).sum().backward()
                optimizer.step()
            counts.append(len(calls))
    finally:
        handle.remove()
    assert counts[0] == counts[1] > 0
    assert "compiled-differs" not in codes(seen)
    assert "hooks on its modules" in said(seen)


def test_packed_tensors_are_the_users_run_alone(seed):
    packed = []

    def context():
        return torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(1) or x, lambda x: x)

    counts = []
    for check in (False, True):
        packed.clear()
        run(Net(), check, backend="eager", context=context)
        counts.append(len(packed))
    assert counts[0] == counts[1] > 0


def test_parameters_changed_in_place_are_copies_and_modes_give_no_verdict(seed):
    model = nn.Sequential(nn.Embedding(5, 6, max_norm=0.1), nn.Linear(6, 3))
    seen, _ = same_run(model, backend="eager", given=lambda: torch.arange(4))
    assert [pair.differing for pair in seen.record.compiled] == [0.0]
    assert not said(seen)

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    seen = run(Net(), True, backend="eager", context=Watching)[-1]
    assert "under a mode" in said(seen)


def test_results_that_differ_from_run_to_run_give_no_verdict(seed):
    ticks = iter(range(1000))

    def drifting(self, h):
        torch._dynamo.graph_break()
        return h + next(ticks)

    seen = run(Net(drifting), True, backend="eager")[-1]
    assert not seen.record.compiled
    assert "two eager runs" in said(seen)


def test_inputs_in_objects_are_copied_and_what_cannot_be_is_said(seed):
    class Batch:
        def __init__(self, x):
            self.x, self.used = x, 0

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, batch):
            torch._dynamo.graph_break()
            batch.used += 1
            return self.layer(batch.x)

    model = Takes()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = Batch(torch.randn(4, 6))
    with hu.observe(compiled, optimizer, interval=1, check=True) as seen:
        compiled(batch).sum().backward()
        optimizer.step()
    assert batch.used == 1
    assert [pair.differing for pair in seen.record.compiled] == [0.0]

    class Stubborn(Batch):
        def __deepcopy__(self, memo):
            raise TypeError("one of a kind")

    with hu.observe(compiled, optimizer, interval=1, check=True) as seen:
        compiled(Stubborn(torch.randn(4, 6))).sum().backward()
        optimizer.step()
    assert "it cannot be copied, or its copy cannot run (TypeError)" in said(seen)


def test_the_worst_step_and_output_count(seed):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            y = self.layer(x)
            return y, {"also": y * 2}

    calls = iter(range(100))

    def once(graph, inputs):
        def run(*given):
            out, *rest = graph(*given)
            return (out, *(other * (1.5 if next(calls) == 0 else 1.0) for other in rest))

        return run

    model = Two()
    compiled = torch.compile(model, backend=once)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hu.observe(compiled, optimizer, interval=1, check=True) as seen:
        for _ in range(3):
            compiled(torch.randn(4, 6))[0].sum().backward()
            optimizer.step()
    (pair,) = seen.record.compiled
    assert pair.differing == 1.0
    assert pair.relative == pytest.approx(0.5, rel=1e-3)


def test_the_check_compiles_nothing_anew(seed):
    from torch._dynamo.utils import counters

    graphs = []
    for check in (False, True):
        counters.clear()
        run(Net(), check, steps=4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]
