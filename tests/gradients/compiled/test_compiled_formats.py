"""``format=`` and policies that read operands, in graphs that torch compiles: what the eager front end does."""

import functools
import os
import random

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp import rounding
from halfulp._torch_floor import is_older
from halfulp._torch_versions import is_backward, is_gradient_sum
from halfulp.gradients import _compiled_backend as _compiled
from halfulp.gradients._compiled_backend import (
    factors_of_edges,
    name_functions,
    observe_gradients,
    round_gradient,
    watch_loss,
    watch_operands,
)
from halfulp.kernels import same_bits

from ..models.architectures import Case, build

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning", "ignore:.*should not be instantiated:DeprecationWarning"
    ),
]


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def gradients(model, run, scaler, loss_of, batch) -> dict[str, torch.Tensor]:
    """By name, unscaled."""
    model.zero_grad()
    scaler.scale(loss_of(run(*batch))).backward()
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    return {name: p.grad / scaler.get_scale() for name, p in named}


def both(make, seed: int, compiler: str = "aot_eager", **options) -> list[dict[str, torch.Tensor]]:
    """The gradients of one case, eager and compiled, with the same exponents: the state of the first."""
    found, state = [], None
    for compiled in (False, True):
        case = make()
        scaler = hu.AdaptiveGradScaler(case.model, init_scale=2.0**8, **options)
        run = torch.compile(case.model, backend=scaler.backend(compiler), dynamic=False) if compiled else case.model
        torch.manual_seed(seed)
        gradients(case.model, run, scaler, case.loss, case.batch)
        draw = random.Random(seed)
        scaler.set_exponents({one.site: draw.randint(2, 10) for one in scaler.sites()})
        state = state or scaler.state_dict()
        scaler.load_state_dict(state)
        found.append(gradients(case.model, run, scaler, case.loss, case.batch))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("format", ["e5m2", "e4m3fn", "bf16"])
def test_a_chain_has_the_bits_of_the_eager_front_end(compiler, format, seed):
    torch.manual_seed(seed)
    model, x = chain(), torch.randn(32, 6)
    found = []
    for compiled in (False, True):
        scaler = hu.AdaptiveGradScaler(model, format=format, init_scale=2.0**4, policy="constant")
        run = torch.compile(model, backend=scaler.backend(compiler)) if compiled else model
        found.append(gradients(model, run, scaler, lambda out: out.square().mean(), [x]))
        scaler.detach()
    # Sums differ in their last bits, so that what lies between two numbers of the format may go to the other.
    different = sum(int((a != b).sum()) for a, b in zip(found[0].values(), found[1].values(), strict=True))
    assert different <= (4 if compiler == "inductor" else 0)
    if format != "bf16":
        assert torch.equal(rounding.quantize(found[1]["2.weight"] * 16, format), found[1]["2.weight"] * 16)


class Grouped(nn.Module):
    """Attention in which several queries share a key."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, width) for width in (16, 8, 8))
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        made = [made.unflatten(2, (-1, 4)).transpose(1, 2) for made in (self.query(x), self.key(x), self.value(x))]
        out = nn.functional.scaled_dot_product_attention(*made, is_causal=True, enable_gqa=True)
        return self.last(out.transpose(1, 2).flatten(2))


class Written(nn.Module):
    """Writes into whole tensors and views of them, with and without a clone that autograd keeps."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x):
        one, other = self.first(x), self.second(x)
        one.mul_(other.sigmoid())
        one[:, 1] = other[:, 0].tanh()
        one[:, 2:].mul_(other[:, :10].cos())
        one.neg_().add_(other, alpha=0.5)
        one += other.abs().clone().mul_(1.5).sub_(one.mean(1, keepdim=True))
        one[:, ::2].copy_(other[:, ::2].exp()).clamp_(max=3)
        return self.last(one.div_(other.square().add_(1)).masked_fill_(other > 1, 0))


class Routed(nn.Module):
    """Experts whose weights are picked by the places that a function of a gate gives beside its scores."""

    def __init__(self):
        super().__init__()
        self.gate, self.last = nn.Linear(8, 4), nn.Linear(6, 3)
        self.up = nn.Parameter(torch.randn(4, 6, 8) / 3)

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(1).topk(2)
        weights = self.up[chosen.flatten()]
        made = torch.bmm(weights, x.repeat_interleave(2, 0).unsqueeze(2)).squeeze(2).relu()
        return self.last((made.unflatten(0, (-1, 2)) * scores.unsqueeze(2)).sum(1))


def _own(make: type[nn.Module], seed: int) -> Case:
    torch.manual_seed(seed)
    return Case(make(), (torch.randn(*((2, 5, 8) if make is Grouped else (5, 8))),), lambda out: out.square().sum())


OWN = {"grouped-query-attention": Grouped, "written-in-place": Written, "routed": Routed}
# Embeddings, norms, residuals and gates; functions that are several products, or several steps, in a graph; writes.
SAME = [
    *("resnet", "complex-layers", "gpt-fused-tied", "highway", "multihead-attention", "bilinear", "lstm-cell"),
    *("siamese", "in-place-sums", "in-place-columns", "truncated", "checkpoint-reentrant", "gradient-reversal"),
    "several-outputs-function",
]
CHOSEN = random.Random(int(os.environ["HALFULP_TEST_SEED"])).sample(SAME, 3)


@pytest.mark.parametrize("name", [*OWN, *CHOSEN])
def test_gradients_have_the_bits_of_the_eager_front_end(name, seed):
    """Both round the same gradients, at the same sites; benchmarks/bench_compiled_formats.py has all architectures."""
    make = functools.partial(_own, OWN[name]) if name in OWN else functools.partial(build, name)
    eager, compiled = both(lambda: make(seed % 1000), seed % 1000, format="e5m2")
    assert eager.keys() == compiled.keys()
    for key, gradient in eager.items():
        if name != "truncated":
            assert same_bits(compiled[key], gradient), key
            continue
        # A sum that lies between two numbers of the format goes to the other one where its last bit differs.
        moved = compiled[key] != gradient
        assert int(moved.sum()) <= gradient.numel() // 100, key
        assert ((compiled[key] - gradient).abs() <= 0.25 * gradient.abs())[moved].all(), key


def test_every_derivative_is_of_a_function(seed, monkeypatch, needs_torch):
    """Sums of gradients are of none; the eager front end's bits hang on what all others are of."""
    unnamed, named = [], 0

    def checked(joint):
        nonlocal named
        name_functions(joint)
        made = [node for node in joint.graph.nodes if is_backward(node) and node.op == "call_function"]
        made = [node for node in made if not is_gradient_sum(node)]
        named += len(made)
        unnamed.extend(node.format_node() for node in made if not node.meta.get("fwd_source_fn_stack"))

    monkeypatch.setattr(_compiled, "name_functions", checked)
    needs_torch("slices of some dimensions alone")  # in torch 2.6 the others' are copies of no function
    for case in (_own(Written, seed), build("in-place-columns", seed % 1000)):
        scaler = hu.AdaptiveGradScaler(case.model, format="e5m2")
        run = torch.compile(case.model, backend=scaler.backend("aot_eager"))
        scaler.scale(case.loss(run(*case.batch))).backward()
    assert named > 100
    assert unnamed == []


def test_calls_of_one_module_are_rounded_each(seed):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.often, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(sum(self.often(x * (1 + 0.1 * i)).tanh() for i in range(4)))

    torch.manual_seed(seed)
    model, x, found = Shared(), torch.randn(64, 8), []
    for compiled in (False, True):
        scaler = hu.AdaptiveGradScaler(model, format="e5m2", policy="constant", init_scale=2.0**4)
        run = torch.compile(model, backend=scaler.backend("aot_eager")) if compiled else model
        found.append(gradients(model, run, scaler, lambda out: out.square().mean(), [x]))
        scaler.detach()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class Quiet(nn.Module):
    """Between its layers gradients shrink, and what the last one makes for its weight is far larger."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.first(x).relu() * 1e-4)


class Branches(nn.Module):
    """Residual branches of little weight; what is added up is wide, and becomes narrow inside of a branch."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*shape) for _ in range(3)) for shape in ((16, 32), (32, 16)))
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x).float()
        for norm, up, down in zip(self.norms, self.ups, self.downs):
            x = x + 1e-3 * down(nn.functional.gelu(up(norm(x))))
        return self.last(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", ["e5m2", None])
@pytest.mark.parametrize("make", [Quiet, Branches])
def test_all_that_may_overflow_is_measured(make, format, seed):
    torch.manual_seed(seed)
    model, x, y = make(), torch.randn(64, 8), torch.randn(64, 3)
    scaler = hu.AdaptiveGradScaler(model, format=format)
    run = torch.compile(model, backend=scaler.backend("aot_eager"))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    applied = []
    for _ in range(40):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=format is None):
            out = run(x)
        scaler.scale((out.float() - y).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
        applied.append(scaler.last_step.applied)
    assert all(applied[12:])


class Products(nn.Module):
    """Every form of product that a policy looks at."""

    def __init__(self):
        super().__init__()
        self.start, self.grouped = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, groups=4)
        self.wider, self.last = nn.ConvTranspose2d(12, 4, 2, groups=2), nn.Linear(4, 5)

    def forward(self, x):
        x = self.wider(self.grouped(self.start(x).relu()).relu()).flatten(2)
        return self.last(x.mT @ x.tanh() @ x.mT)


@pytest.mark.parametrize("policy", ["underflow-bound", "abs-range", "element-wise"])
def test_policies_see_the_operands_of_products(policy, seed):
    torch.manual_seed(seed)
    model, x = Products(), torch.randn(4, 3, 7, 7)
    proposed = []
    for compiled in (False, True):
        scaler = hu.AdaptiveGradScaler(model, format="e5m2", init_scale=2.0**8, policy=policy)
        run = torch.compile(model, backend=scaler.backend("aot_eager")) if compiled else model
        scaler.scale(run(x).square().mean()).backward()
        proposed.append({site.key: sorted(site.proposals) for site in scaler._controller.sites if site.proposals})
        scaler.detach()
    assert proposed[0] == proposed[1]
    assert proposed[0].keys() == {"start", "grouped", "wider", "matmul", "matmul#1", "last"}
    assert len(proposed[0]["matmul"]) == 2


def test_a_policy_that_reads_operands_sets_exponents_of_a_compiled_model(seed):
    torch.manual_seed(seed)
    model, x = chain(), torch.randn(64, 6)
    scaler = hu.AdaptiveGradScaler(model, format="e5m2", policy="underflow-bound")
    run = torch.compile(model, backend=scaler.backend("aot_eager"))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    applied = 0
    for _ in range(12):
        opt.zero_grad()
        scaler.scale(run(x).square().mean() * 2.0**-12).backward()
        scaler.step(opt)
        scaler.update()
        applied += scaler.last_step.applied
    assert applied >= 4
    assert len({one.exponent for one in scaler.sites()}) > 1


def test_an_overflow_of_the_format_is_seen_and_blamed(seed):
    torch.manual_seed(seed)
    model, x = chain(), torch.randn(32, 6)
    scaler = hu.AdaptiveGradScaler(model, format="e4m3fn", init_scale=2.0**4)
    run = torch.compile(model, backend=scaler.backend("aot_eager"))
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    for overflows in (False, True):
        if overflows:
            scaler.set_exponents({one.site: 60 if one.site == "2" else 4 for one in scaler.sites()})
        opt.zero_grad()
        scaler.scale(run(x).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
        assert scaler.last_step.applied is not overflows
        if overflows:
            assert [key for key, _ in scaler.last_step.overflow_sources] == ["2"]


def test_stochastic_rounding_is_right_on_average_and_drawn_anew(seed):
    model = nn.Linear(1, 4096)
    scaler = hu.AdaptiveGradScaler(model, policy="constant", init_scale=1.0, format="e5m2", rounding="stochastic")
    run = torch.compile(model, backend=scaler.backend("aot_eager"))
    found = []
    for _ in range(2):
        model.zero_grad()
        scaler.scale((run(torch.zeros(1, 1)) * 1.1015625).sum()).backward()
        found.append(model.bias.grad.clone())
    assert set(found[0].tolist()) == {1.0, 1.25}
    share = 0.1015625 / 0.25
    for one in found:
        assert abs((one == 1.25).double().mean() - share) < 7 * (share * (1 - share) / 4096) ** 0.5
    assert not torch.equal(*found)


def test_a_seed_replays_in_a_graph(seed):
    runs = []
    for _ in range(2):
        model = nn.Linear(1, 512)
        scaler = hu.AdaptiveGradScaler(
            model, policy="constant", init_scale=1.0, format="e5m2", rounding=rounding.Stochastic(seed=seed)
        )
        run = torch.compile(model, backend=scaler.backend("aot_eager"))
        for _ in range(2):
            model.zero_grad()
            scaler.scale((run(torch.zeros(1, 1)) * 1.1015625).sum()).backward()
            runs.append(model.bias.grad.clone())
    assert torch.equal(runs[0], runs[2])
    assert torch.equal(runs[1], runs[3])
    assert not torch.equal(runs[0], runs[1])


def test_nothing_is_rounded_without_a_scaled_loss(seed):
    model, x = chain(), torch.randn(5, 6)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    scaler = hu.AdaptiveGradScaler(model, format="e5m2")
    run = torch.compile(model, backend=scaler.backend("aot_eager"))
    found = torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:(Graph break due to unsupported|Dynamo does not know how to trace):UserWarning")
def test_a_graph_that_breaks_is_refused_where_its_rest_would_not_be_rounded(seed):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.recurrent, self.last = nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.recurrent(self.first(x))[0])

    def make() -> Case:
        torch.manual_seed(seed)
        return Case(Broken(), (torch.randn(3, 2, 4),), lambda out: out.square().sum())

    if is_older(torch.__version__, "2.12"):  # which gives the whole model up
        with pytest.warns(UserWarning, match="It runs uncompiled, as the whole does"):
            eager, compiled = both(make, seed, format="e5m2")
        assert all(same_bits(compiled[key], gradient) for key, gradient in eager.items())
        return
    case = make()
    run = torch.compile(case.model, backend=hu.AdaptiveGradScaler(case.model, format="e5m2").backend("aot_eager"))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"'recurrent'.*would not be rounded to e5m2"):
        run(*case.batch)


@pytest.mark.parametrize("operator", [factors_of_edges, observe_gradients, round_gradient, watch_operands, watch_loss])
def test_no_cuda_graph_replays_what_the_scaler_decides(operator, needs_torch):
    needs_torch("Tag.cudagraph_unsafe")
    assert torch.Tag.cudagraph_unsafe in operator.tags
