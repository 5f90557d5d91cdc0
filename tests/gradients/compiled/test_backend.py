"""Gradient exponents inside torch.compile: the bits of the plain graph, and no graph more as exponents change."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import halfulp as hu
from halfulp.gradients._compiled_backend import make_torch_compile_backend, plan_sites
from halfulp.gradients._policy import get_policy
from halfulp.gradients._site import GLOBAL_SITE_KEY, Sites
from halfulp.gradients.eager._attach import attach_scaler
from halfulp.gradients.eager._backward import BackwardHooks
from halfulp.kernels import same_bits
from halfulp.rounding import Nearest

from ...samples import drawn
from ..models.architectures import Case, build
from ..models.sequences import GPT, Layer, predicted

# torch's own compilers use what torch warns of.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning",
        "ignore:.*should not be instantiated:DeprecationWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning",  # by Dynamo of torch 2.11
    ),
]

NAMES = [
    *("multilayer-perceptron", "resnet", "unet", "ssd", "vit", "gpt", "gpt-fused-tied", "encoder-decoder", "lstm-cell"),
    *("moe-returned-auxiliary", "tied-autoencoder", "siamese", "checkpoint-non-reentrant", "straight-through"),
    *("in-place-columns", "complex-layers", "loss-inside", "dataclass-outputs", "hf-llama"),
]
# `python -m benchmarks.bench_gradient_exactness` compiles all.
CHOSEN = drawn(NAMES, 2, "compiled")
# How many sites each has at least.
SITES = [
    *(("multilayer-perceptron", 3), ("gpt", 17), ("unet", 3), ("lstm-cell", 2)),
    *(("checkpoint-non-reentrant", 8), ("torch-transformer-encoder", 6)),
]


def _watched(model: nn.Module, exponent: int = 0) -> BackwardHooks:
    backward = BackwardHooks(Sites(exponent), get_policy("amax"), None, Nearest())
    attach_scaler(model, backward, wide=None, prefix="")
    return backward


def _compiled(model: nn.Module, backward: BackwardHooks, name: str = "aot_eager", **given):
    return torch.compile(model, backend=make_torch_compile_backend(backward, name), **given)


def _backpropagate(loss: torch.Tensor, model: nn.Module, backward: BackwardHooks | None = None) -> dict:
    """The gradients, in true units, of a loss that a scaler scales."""
    for p in model.parameters():
        p.grad = None
    exponent = 0 if backward is None else backward.sites.global_site.exponent
    loss = loss * 2.0**exponent
    if backward is not None:
        loss.grad_fn.register_prehook(backward.activate_edge_hooks)
    loss.backward()
    return {name: p.grad * 2.0**-exponent for name, p in model.named_parameters() if p.grad is not None}


def _same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(same_bits(found[name], expected[name]) for name in found)


def _shuffle(backward: BackwardHooks) -> None:
    for site in backward.sites.values():
        site.exponent = random.randint(-12, 24)


def _exact(
    make: Callable[[], Case], compiler: str, seed: int, times: int, reference: str | None = None
) -> BackwardHooks:
    """The gradients of one architecture under random exponents, against those of the same compiler without.

    ``reference``: another compiler in its place.
    """

    def run(case, model):
        torch.manual_seed(seed)
        return case.loss(model(**case.batch) if isinstance(case.batch, dict) else model(*case.batch))

    case = make()
    plain = torch.compile(case.model, backend=reference or compiler, dynamic=False)
    expected = _backpropagate(run(case, plain), case.model)
    torch._dynamo.reset()
    case = make()
    backward = _watched(case.model)
    model = _compiled(case.model, backward, compiler, dynamic=False)
    assert _same(_backpropagate(run(case, model), case.model, backward), expected)
    counters.clear()
    for _ in range(times):
        _shuffle(backward)
        assert _same(_backpropagate(run(case, model), case.model, backward), expected)
    assert not counters["stats"].get("unique_graphs")
    return backward


@pytest.mark.parametrize("name", CHOSEN)
def test_parameter_gradients_have_the_bits_of_the_plain_graph_under_any_exponents(name, seed, needs_torch):
    if name == "hf-llama":
        needs_torch("torch.compiler.is_exporting, which transformers calls")
    backward = _exact(lambda: build(name, seed % 1000), "aot_eager", seed % 1000, times=3)
    assert len(list(backward.sites)[1:]) >= 2


def test_inductor_keeps_the_bits_of_attention(seed):
    _exact(lambda: build("multihead-attention", seed % 3), "inductor", seed % 3, times=2)


class Added(nn.Module):
    """Sums of two-dimensional products, which Inductor computes as it adds where nothing moves between both."""

    def __init__(self):
        super().__init__()
        self.inner, self.left, self.right = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        x = x + self.inner(x).relu()
        return self.left(x) * self.right(x)


def test_inductor_makes_the_sums_of_eager(seed):
    # Its own sums of a plain model begin with what is added, and differ in the last bit on some processors (Zen 5).
    def make():
        torch.manual_seed(seed)
        return Case(nn.Sequential(nn.Linear(6, 12), Added()), (torch.randn(3, 6),), lambda out: out.square().mean())

    _exact(make, "inductor", seed, times=2, reference="eager")


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize(("name", "least"), drawn(SITES, 3, "sites"))
def test_sites_have_the_keys_of_the_eager_front_end_and_are_reached_from_the_loss(name, least, seed):
    keys = []
    for compiled in (False, True):
        case = build(name, 0)
        backward = _watched(case.model)
        model = _compiled(case.model, backward) if compiled else case.model
        _backpropagate(case.loss(model(*case.batch)), case.model, backward)
        keys.append([site.key for site in backward.reached_sites])
        _check_edges(backward, compiled)
    assert len(keys[1]) >= least
    embeddings = {name for name, module in case.model.named_modules() if isinstance(module, nn.Embedding)}
    assert keys[1] == [key for key in keys[0] if key not in embeddings]


def test_a_module_that_is_called_global_has_the_global_exponent(seed):
    model, x = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("first", GLOBAL_SITE_KEY, "last")}), torch.randn(4, 6)
    model.forward = lambda x: model["last"](model[GLOBAL_SITE_KEY](model["first"](x)).relu())
    expected = _backpropagate(model(x).square().sum(), model)
    backward = _watched(model)
    run = _compiled(model, backward)
    _shuffle(backward)
    assert _same(_backpropagate(run(x).square().sum(), model, backward), expected)
    assert list(backward.sites) == [GLOBAL_SITE_KEY, "first", "last"]


def test_a_graph_without_sources_is_planned_by_the_model_alone():
    model, graph = nn.Linear(3, 2), torch.fx.Graph()
    backward = _watched(model)
    graph.output(graph.placeholder("weight"))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert plan_sites(module, [model.weight], backward).is_parameter_by_input == (True,)


class Adapted(nn.Module):
    """A frozen layer between trained ones."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(self.frozen(self.first(x)))


def test_a_product_with_a_frozen_parameter_has_the_key_of_the_eager_front_end(seed):
    keys = []
    for compiled in (False, True):
        model = Adapted()
        backward = _watched(model)
        run = _compiled(model, backward) if compiled else model
        _backpropagate(run(torch.randn(2, 6)).square().sum(), model, backward)
        keys.append(list(backward.sites))
    assert keys[0] == keys[1] == [GLOBAL_SITE_KEY, "first", "linear", "last"]


def test_inductor_keeps_no_graph_in_its_caches(seed):
    """Graphs depend on more than the caches' keys say, such as the version of halfulp."""
    model = nn.Sequential(nn.Linear(6, 3))
    backward = _watched(model)
    counters.clear()
    _backpropagate(_compiled(model, backward, "inductor")(torch.randn(2, 6)).square().sum(), model, backward)
    assert not [name for name in counters["aot_autograd"] if name.startswith("autograd_cache")]
    assert not [name for name in counters["inductor"] if name.startswith("fxgraph_cache")]


def _check_edges(backward: BackwardHooks, compiled: bool) -> None:
    """Edges, by which the sites behind an overflow are told from the one that made it, are the ways from the loss."""
    edges, reached, todo = set(backward.edge_hooks), set(), [backward.sites.global_site]
    while todo:
        site = todo.pop()
        reached.add(site)
        todo += [reader for reader, passing in edges if passing is site and reader not in reached]
    assert len(backward.reached_sites) >= 2
    if not compiled:
        assert set(backward.reached_sites) <= reached
    # In a graph, gradients that reach parameters alone keep the global exponent and cross no edge.
    moved = {(target, source) for _, pairs in backward.edges_by_json.values() for source, target in pairs}
    assert moved == (edges if compiled else set())
    assert len(reached) >= 2


def test_each_of_several_models_has_sites_of_its_own(seed):
    models, backward, x = (
        [_mlp(), _mlp()],
        BackwardHooks(Sites(0), get_policy("amax"), None, Nearest()),
        torch.randn(5, 6),
    )
    for i, model in enumerate(models):
        attach_scaler(model, backward, wide=None, prefix=str(i))
    compiled = [_compiled(model, backward) for model in models]
    loss = sum(one(x).square().sum() for one in compiled)
    loss.register_hook(lambda _: backward.activate_edge_hooks(()))
    loss.backward()
    assert {site.key for site in backward.reached_sites} == {f"{i}.{j}" for i in (0, 1) for j in (0, 2, 4)}


def test_exponents_do_nothing_without_a_scaled_loss(seed):
    model, x = _mlp(), torch.randn(5, 6, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    backward = _watched(model)
    compiled = _compiled(model, backward)
    _backpropagate(compiled(x).square().sum(), model, backward)
    _shuffle(backward)
    found = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not backward.is_active


def test_exponents_that_change_between_forward_and_backward(seed):
    model, x = _mlp(), torch.randn(5, 6)
    expected = _backpropagate(model(x).square().sum(), model)
    backward = _watched(model)
    compiled = _compiled(model, backward)
    for _ in range(3):
        loss = compiled(x).square().sum()
        _shuffle(backward)
        assert _same(_backpropagate(loss, model, backward), expected)


def test_a_gradient_that_would_be_lost_is_saved_by_its_site(seed):
    class Quiet(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.last(self.first(x) * 2.0**-20)

    model, x = Quiet(), torch.randn(64, 8)
    backward = _watched(model)
    compiled = _compiled(model, backward)

    def gradient():
        with torch.autocast("cpu", torch.float16):
            loss = compiled(x).square().mean() * 2.0**-10
        return _backpropagate(loss, model, backward)["first.weight"]

    assert not gradient().any()
    backward.sites["first"].exponent = 28
    backward.sites["last"].exponent = 12
    expected = _backpropagate(model(x).square().mean() * 2.0**-10, model)["first.weight"]
    assert (gradient() - expected).norm() <= 0.02 * expected.norm()


def test_float16_gradients_of_one_exponent_are_those_of_a_scaled_loss(seed):
    torch.manual_seed(seed)
    case = predicted(GPT(Layer(causal=True, fused=True)))
    with torch.autocast("cpu", torch.float16):
        loss = case.loss(torch.compile(case.model, backend="aot_eager")(*case.batch).float())
    expected = _backpropagate(loss * 2.0**10, case.model)
    torch._dynamo.reset()
    backward = _watched(case.model, 10)
    with torch.autocast("cpu", torch.float16):
        loss = case.loss(_compiled(case.model, backward)(*case.batch))
    found = _backpropagate(loss, case.model, backward)
    assert all(torch.equal(found[name] * 2.0**10, expected[name]) for name in expected)


def test_readings_are_those_of_the_eager_front_end(seed):
    read = []
    model, x = _mlp(), torch.randn(5, 6)
    for compiled in (False, True):
        backward = _watched(model, 3)
        run = _compiled(model, backward) if compiled else model
        _backpropagate(run(x).square().sum(), model, backward)
        _shuffle(backward)
        backward.is_measuring = False
        _backpropagate(run(x).square().sum(), model, backward)
        backward.is_measuring = True
        backward.measurements.read_flags_and_measurements([])
        _backpropagate(run(x).square().sum(), model, backward)
        rows = backward.measurements.read_flags_and_measurements([])[1]
        read.append({(one.site.key, one.kind): one.reading for one in rows if one.reading.element_count > 16})
        del model.forward
    kinds = {(key, kind) for key in ("0", "2", "4") for kind in ("passed", "weight")} - {("0", "passed")}
    assert kinds <= read[1].keys()
    for kind in kinds:
        assert read[0][kind].amax == pytest.approx(read[1][kind].amax, rel=1e-5)


def test_nothing_is_measured_unless_asked(seed):
    model = _mlp()
    backward = _watched(model)
    compiled = _compiled(model, backward)
    for measuring in (False, True):
        backward.is_measuring = measuring
        _backpropagate(compiled(torch.randn(5, 6)).sum(), model, backward)
        assert bool(backward.measurements.unread_statistics) is measuring
    backward.measurements.read_flags_and_measurements([])
    compiled(torch.randn(5, 6)).sum().backward()
    assert not backward.measurements.unread_statistics


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_dynamic_batch(dynamic, seed):
    model = _mlp()
    backward = _watched(model)
    compiled = _compiled(model, backward, dynamic=dynamic)
    plain = torch.compile(build_copy(model), backend="aot_eager", dynamic=dynamic)
    for rows in (9, 5, 12):
        x = torch.randn(rows, 6)
        expected = _backpropagate(plain(x).square().sum(), plain)
        found = _backpropagate(compiled(x).square().sum(), model, backward)
        assert all(torch.equal(a, b) for a, b in zip(found.values(), expected.values(), strict=True))
        _shuffle(backward)


def test_a_whole_model_under_a_checkpoint(seed):
    model, x = _mlp(), torch.randn(9, 6)
    backward, plain = _watched(model), build_copy(model)

    def checkpointed(one):
        return lambda x: checkpoint(one, x, use_reentrant=False).square().sum()

    expected = _backpropagate(torch.compile(checkpointed(plain), backend="aot_eager")(x), plain)
    compiled = torch.compile(checkpointed(model), backend=make_torch_compile_backend(backward, "aot_eager"))
    for _ in range(2):
        assert _same(_backpropagate(compiled(x), model, backward), expected)
        _shuffle(backward)
    assert len(backward.reached_sites) > 1


def build_copy(model: nn.Module) -> nn.Module:
    """Another module with the same parameters' values."""
    other = _mlp()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("name", ["eager", "aot_eager", "inductor"])
def test_a_model_compiled_by_another_backend_is_refused(name, seed):
    model = _mlp()
    _watched(model)
    with pytest.raises(ValueError, match=r"backend=scaler.backend\(\"inductor\"\)"):
        torch.compile(model, backend=name)(torch.randn(5, 6))


def test_a_model_compiled_by_the_backend_of_another_scaler_is_refused(seed):
    model, other = _mlp(), BackwardHooks(Sites(0), get_policy("amax"), None, Nearest())
    _watched(model)
    with pytest.raises(ValueError, match="of the same scaler"):
        torch.compile(model, backend=make_torch_compile_backend(other, "aot_eager"))(torch.randn(5, 6))


def test_a_model_that_is_evaluated_may_be_compiled_by_any(seed):
    model, x = _mlp(), torch.randn(5, 6)
    expected = model(x)
    _watched(model)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_graph_that_breaks_is_exact(seed):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = _mlp(), nn.Linear(3, 4)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.last(x)

    model, x = Broken(), torch.randn(5, 6)
    expected = _backpropagate(model(x).square().sum(), model)
    backward = _watched(model)
    compiled = _compiled(model, backward)
    for _ in range(3):
        assert _same(_backpropagate(compiled(x).square().sum(), model, backward), expected)
        _shuffle(backward)
    assert len(list(backward.sites)[1:]) == 4


@pytest.mark.parametrize("eager_first", [True, False])
def test_steps_may_run_compiled_and_not(eager_first, seed):
    model, x = _mlp(), torch.randn(5, 6)
    expected = _backpropagate(model(x).square().sum(), model)
    backward = _watched(model)
    compiled = _compiled(model, backward)
    for run in [model, compiled, model, compiled, model][not eager_first :]:
        assert _same(_backpropagate(run(x).square().sum(), model, backward), expected)
        _shuffle(backward)


def test_a_gradient_that_its_function_does_not_take_linearly_has_the_global_exponent(seed):
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return (gradient + 0.5).clamp(-1, 1) * gradient.abs() / gradient.norm()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.last(Clipped.apply(self.first(x)))

    model, x = Model(), torch.randn(5, 6)
    compiled = torch.compile(model, backend="aot_eager")
    expected = _backpropagate(compiled(x).square().sum() * 2.0**4, model)
    torch._dynamo.reset()
    backward = _watched(model)
    compiled = _compiled(model, backward)
    for _ in range(3):
        backward.sites.global_site.exponent = 4
        found = _backpropagate(compiled(x).square().sum(), model, backward)
        assert all(torch.equal(found[name] * 2.0**4, expected[name]) for name in expected)
        _shuffle(backward)


def test_input_gradients_are_at_the_global_exponent(seed):
    model, x = _mlp(), torch.randn(5, 6, requires_grad=True)
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    backward = _watched(model)
    compiled = _compiled(model, backward)
    for _ in range(3):
        x.grad = None
        _backpropagate(compiled(x).square().sum(), model, backward)
        assert torch.equal(x.grad * 2.0 ** -backward.sites[GLOBAL_SITE_KEY].exponent, expected)
        _shuffle(backward)


def test_names_of_backends(seed):
    backward = BackwardHooks(Sites(0), get_policy("amax"), None, Nearest())
    with pytest.raises(ValueError, match="one of inductor, aot_eager, got 'eager'"):
        make_torch_compile_backend(backward, "eager")


def test_a_model_is_compiled_by_the_scalers_backend_alone(seed):
    model, x = _mlp(), torch.randn(5, 6)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    scaler = hu.AdaptiveGradScaler(model)
    other = torch.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match="compiled by another backend"):
        other(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=scaler.backend("aot_eager"))
    for _ in range(3):
        model.zero_grad()
        scaler.scale(compiled(x).square().sum()).backward()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad / scaler.get_scale(), wanted)
        scaler.set_exponents({row.site: random.randint(-12, 24) for row in scaler.sites()})
