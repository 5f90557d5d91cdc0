"""wrap: every class of torch.optim, bit for bit where the weight update is exact, and all that an optimizer must do."""

import copy
import inspect
import io

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import halfulp as hu
from halfulp.optim import _wrap

CLASSES = sorted(
    (c for c in vars(torch.optim).values() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)),
    key=lambda c: c.__name__,
)
CLASSES.remove(torch.optim.Optimizer)
DENSE = [c for c in CLASSES if c.__name__ not in ("LBFGS", "SparseAdam")]
VARIANTS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "foreach": True}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"maximize": True, "fused": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    *((c, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}) for c in CLASSES if c.__name__ == "Muon"),
]
CASES = [pytest.param(c, {}, id=c.__name__) for c in DENSE]
CASES += [pytest.param(c, o, id=f"{c.__name__}-{'-'.join(o)}") for c, o in VARIANTS]
EXACT = ["split", "master"]
UPDATES = ["nearest", "stochastic", "kahan", "kahan-stochastic", "split", "split8", "master", "components"]
SHAPES = [(12, 10), (7, 33)]
LOWEST = 0.375  # of a quadratic; a bfloat16, or no parameter would ever see a gradient of 0 and LBFGS never rest


def parameters(dtype=torch.bfloat16, scale=0.02):
    """Random narrow parameters, and float32 ones of the same values."""
    values = [torch.randn(shape).mul(scale).to(dtype) for shape in SHAPES]
    return [torch.nn.Parameter(v.clone()) for v in values], [torch.nn.Parameter(v.float()) for v in values]


def feed(optimizers_and_params, steps, step=None):
    """Give every list of parameters the same random gradients, and step."""
    for k in range(steps):
        gradients = [torch.randn(shape).mul(10 ** (k % 3 - 1)).bfloat16() for shape in SHAPES]
        for optimizer, params in optimizers_and_params:
            for p, g in zip(params, gradients):
                p.grad = g.to(p.dtype)
            optimizer.step()


def decoded(optimizer, params):
    """The float32 weights of some parameters."""
    holder = torch.nn.ParameterList(params)
    return list(optimizer.float32_state_dict(holder).values())


@pytest.mark.parametrize("update", EXACT)
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_exact_updates_equal_torch_in_float32_bit_for_bit(cls, options, update, seed):
    narrow, wide = parameters()
    ours = hu.optim.wrap(cls, narrow, lr=1e-2, weight_update=update, **options)
    theirs = cls(wide, lr=1e-2, **options)
    feed([(ours, narrow), (theirs, wide)], 12)
    for mine, own in zip(decoded(ours, narrow), wide):
        assert hu.kernels.same_bits(mine, own.detach())
    for p, own in zip(narrow, wide):
        own = own.detach()
        assert torch.equal((p.detach() - own).abs(), (own.bfloat16() - own).abs())


@pytest.mark.parametrize("update", UPDATES)
def test_every_weight_update_follows_float32(update, seed):
    narrow, wide = parameters(scale=1.0)
    starts = [p.detach().clone() for p in wide]
    ours = hu.optim.wrap(torch.optim.RMSprop, narrow, lr=2e-4, weight_update=update, report_interval=3)
    theirs = torch.optim.RMSprop(wide, lr=2e-4)
    gradients = [torch.randn(shape).bfloat16() for shape in SHAPES]
    for _ in range(100):
        for p, q, g in zip(narrow, wide, gradients):
            p.grad, q.grad = g, g.float()
        ours.step(), theirs.step()
    moved = torch.cat([(m - s).flatten() for m, s in zip(decoded(ours, narrow), starts)]).double()
    wanted = torch.cat([(q.detach() - s).flatten() for q, s in zip(wide, starts)]).double()
    share = float((moved * wanted).sum() / (wanted * wanted).sum())
    if update == "nearest":
        assert share < 0.6
        assert ours.report().cancelled > 0.5
    else:
        # stochastic: a random walk of sd .0125 per element against a movement of .03, over 351 elements, five sigmas
        assert share == pytest.approx(1.0, abs=0.12 if update == "stochastic" else 0.01)
        assert ours.report().realised == pytest.approx(1.0, abs=0.2 if update == "stochastic" else 0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("update", ["split8", "kahan", "components", "master"])
def test_reference_gives_the_same_bits(update, dtype, seed):
    if dtype == torch.float16 and update == "split8":
        update = hu.Split(8)
    narrow, _ = parameters(dtype)
    others = [torch.nn.Parameter(p.detach().clone()) for p in narrow]
    ours = hu.optim.wrap(torch.optim.NAdam, narrow, weight_update=update, report_interval=2)
    slow = hu.optim.wrap(torch.optim.NAdam, others, weight_update=update, report_interval=2)
    for _ in range(4):
        gradients = [torch.randn(shape).to(dtype) for shape in SHAPES]
        for p, q, g in zip(narrow, others, gradients):
            p.grad, q.grad = g, g
        ours.step()
        with hu.kernels.engine("reference"):
            slow.step()
    for p, q in zip(narrow, others):
        assert hu.kernels.same_bits(p.detach(), q.detach())
    for mine, own in zip(decoded(ours, narrow), decoded(slow, others)):
        assert hu.kernels.same_bits(mine, own)
    for row, other in zip(ours.report().rows, slow.report().rows):
        assert (row.name, row.samples, row.updates) == (other.name, other.samples, other.updates)
        assert row.cancelled == other.cancelled
        assert row.realised == pytest.approx(other.realised, rel=1e-9)


@pytest.mark.parametrize("cls", DENSE, ids=lambda c: c.__name__)
def test_float32_parameters_behave_as_torchs(cls, seed):
    _, mine = parameters()
    own = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    ours, theirs = hu.optim.wrap(cls, mine, lr=1e-2), cls(own, lr=1e-2)
    feed([(ours, mine), (theirs, own)], 5)
    for p, q in zip(mine, own):
        assert hu.kernels.same_bits(p.detach(), q.detach())


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_a_few_at_a_time_is_all_at_once(cls, options, seed, monkeypatch):
    narrow, _ = parameters()
    others = [torch.nn.Parameter(p.detach().clone()) for p in narrow]
    ours, apart = (hu.optim.wrap(cls, params, lr=1e-2, **options) for params in (narrow, others))
    state = torch.get_rng_state()
    feed([(ours, narrow)], 4)
    monkeypatch.setattr(_wrap, "MAX_ELEMENTS_AT_ONCE", 1)
    torch.set_rng_state(state)
    feed([(apart, others)], 4)
    for p, q in zip(narrow, others):
        assert hu.kernels.same_bits(p.detach(), q.detach())


def test_a_hook_on_every_optimizer_sees_one_step_of_the_wrapped_one(seed, monkeypatch):
    monkeypatch.setattr(_wrap, "MAX_ELEMENTS_AT_ONCE", 1)
    narrow, _ = parameters()
    ours, seen = hu.optim.wrap(torch.optim.SGD, narrow, lr=0.1), []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        feed([(ours, narrow)], 1)
    finally:
        handle.remove()
    assert len(seen) == 1
    assert seen[0] is ours


def test_shadows_hold_no_memory_between_steps(seed):
    narrow, _ = parameters()
    ours = hu.optim.wrap(torch.optim.SGD, narrow, lr=0.1)
    feed([(ours, narrow)], 1)
    for group in ours.base.param_groups:
        for shadow in group["params"]:
            assert shadow.untyped_storage().nbytes() == 4
            assert shadow.grad is None
    assert ours.bytes_per_parameter() == 2 + 1 + 2


def test_a_failing_step_frees_the_shadows_and_leaves_the_weights(seed):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("stop")

    narrow, _ = parameters()
    before = [p.detach().clone() for p in narrow]
    ours = hu.optim.wrap(Failing, narrow, lr=0.1)
    with pytest.raises(RuntimeError, match="stop"):
        feed([(ours, narrow)], 1)
    assert all(torch.equal(p, b) for p, b in zip(narrow, before))
    assert all(s.untyped_storage().nbytes() == 4 for s in ours.base.param_groups[0]["params"])


def quadratic(params, optimizer, evaluations):
    def closure():
        evaluations.append(1)
        optimizer.zero_grad()
        loss = sum(((p.float() - LOWEST) ** 2).sum() for p in params)
        loss.backward()
        return loss

    return closure


def test_an_optimizer_that_evaluates_trial_points_is_refused():
    with pytest.raises(
        NotImplementedError, match=r"LBFGS\.step needs a closure.*step float32 parameters by LBFGS itself"
    ):
        hu.optim.wrap(torch.optim.LBFGS, [torch.nn.Parameter(torch.ones(2).bfloat16())])


def test_a_plain_closure_is_called_once(seed):
    narrow, _ = parameters()
    ours = hu.optim.wrap(torch.optim.Adamax, narrow)
    calls = []
    loss = ours.step(quadratic(narrow, ours, calls))
    assert len(calls) == 1
    assert loss.requires_grad


def test_sparse_gradients_move_their_rows_only(seed):
    for update in UPDATES:
        embedding = torch.nn.Embedding(50, 8, sparse=True).bfloat16()
        twin = torch.nn.Embedding(50, 8, sparse=True)
        twin.weight.data = embedding.weight.detach().float()
        before = embedding.weight.detach().clone()
        ours = hu.optim.wrap(torch.optim.SparseAdam, embedding.parameters(), lr=1e-2, weight_update=update)
        theirs = torch.optim.SparseAdam(twin.parameters(), lr=1e-2)
        index = torch.tensor([3, 7, 7, 49])
        for _ in range(3):
            for module, optimizer in ((embedding, ours), (twin, theirs)):
                optimizer.zero_grad()
                module(index).float().square().sum().backward()
                if module is twin:
                    twin.weight.grad = embedding.weight.grad.float()
                optimizer.step()
        rows = torch.tensor([k for k in range(50) if k not in (3, 7, 49)])
        assert torch.equal(embedding.weight[rows], before[rows])
        weight = ours.float32_state_dict(embedding)["weight"]
        if update in EXACT:
            assert torch.equal(weight, twin.weight)
        assert not torch.equal(weight[3], before[3].float())


def test_options_reach_the_base_and_come_back(seed):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["seen"] = group.get("seen", 0) + 1
            return super().step(closure)

    narrow, wide = parameters()
    ours = hu.optim.wrap(Counting, [{"params": narrow, "seen": 0}], lr=0.1, momentum=0.9, weight_update="split")
    theirs = torch.optim.SGD(wide, lr=0.1, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=9) for o in (ours, theirs)]
    for _ in range(8):
        feed([(ours, narrow), (theirs, wide)], 1)
        for scheduler in schedulers:
            scheduler.step()
    assert ours.param_groups[0]["seen"] == 8
    assert ours.base.param_groups[0]["momentum"] == pytest.approx(theirs.param_groups[0]["momentum"], abs=0.2)
    assert all(torch.equal(m, q) for m, q in zip(decoded(ours, narrow), wide))


def test_switches_and_tensor_rates_are_passed_on(seed):
    narrow, wide = parameters()
    options = {"lr": torch.tensor(1e-2), "fused": True}
    ours, theirs = (
        hu.optim.wrap(torch.optim.Adam, narrow, weight_update="split", **options),
        torch.optim.Adam(wide, **options),
    )
    feed([(ours, narrow), (theirs, wide)], 4)
    assert ours.base.param_groups[0]["fused"] is True
    assert all(torch.equal(m, q) for m, q in zip(decoded(ours, narrow), wide))


def test_groups_mix_weight_updates(seed):
    narrow, wide = parameters()
    groups = [
        {"params": narrow[:1], "weight_update": "split"},
        {"params": narrow[1:], "lr": 0.0, "weight_update": "stochastic"},
    ]
    ours = hu.optim.wrap(torch.optim.SGD, groups, lr=0.1)
    before = narrow[1].detach().clone()
    feed([(ours, narrow), (torch.optim.SGD(wide, lr=0.1), wide)], 3)
    assert torch.equal(decoded(ours, narrow)[0], wide[0])
    assert torch.equal(narrow[1], before)


def test_add_param_group_later(seed):
    narrow, wide = parameters()
    ours, theirs = hu.optim.wrap(torch.optim.AdamW, narrow[:1], weight_update="split"), torch.optim.AdamW(wide[:1])
    feed([(ours, narrow), (theirs, wide)], 2)
    ours.add_param_group({"params": narrow[1:], "lr": 0.1})
    theirs.add_param_group({"params": wide[1:], "lr": 0.1})
    feed([(ours, narrow), (theirs, wide)], 3)
    assert all(torch.equal(m, q) for m, q in zip(decoded(ours, narrow), wide))
    with pytest.raises(ValueError, match="split"):
        ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(3).half())], "weight_update": "split"})
    assert len(ours.param_groups) == len(ours.base.param_groups) == 2


def test_named_parameters_and_narrowing(seed):
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
    twin = copy.deepcopy(model)
    ours = hu.optim.wrap(
        torch.optim.Adagrad,
        model.named_parameters(),
        param_dtype=torch.bfloat16,
        weight_update="split",
        report_interval=1,
    )
    theirs = torch.optim.Adagrad(twin.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for _ in range(3):
        for p, q in zip(model.parameters(), twin.parameters()):
            p.grad = torch.randn(p.shape).bfloat16()
            q.grad = p.grad.float()
        ours.step(), theirs.step()
    weights = ours.float32_state_dict(model)
    assert all(torch.equal(weights[name], value) for name, value in twin.state_dict().items())
    assert {row.name for row in ours.report().rows} == set(dict(model.named_parameters()))


def test_a_format_in_float32_containers(seed):
    fmt = hu.formats.get("e8m3")
    p = torch.nn.Parameter(hu.quantize(torch.randn(500), fmt))
    q = torch.nn.Parameter(p.detach().clone())
    ours = hu.optim.wrap(torch.optim.RAdam, [p], lr=1e-3, format="e8m3", weight_update="kahan")
    theirs = torch.optim.RAdam([q], lr=1e-3)
    for _ in range(30):
        p.grad = torch.randn(500)
        q.grad = p.grad.clone()
        ours.step(), theirs.step()
    assert torch.equal(p.detach(), hu.quantize(p.detach(), fmt))
    value = decoded(ours, [p])[0]
    assert (value - q.detach()).abs().max() < 2.0**-5 * q.detach().abs().max()
    assert not torch.equal(value, p.detach())


def test_float32_gradients_are_taken_as_they_are(seed):
    model = torch.nn.Linear(8, 8).bfloat16()
    twin = torch.nn.Linear(8, 8)
    twin.load_state_dict(model.state_dict())
    hu.float32_gradients(model)
    ours = hu.optim.wrap(torch.optim.Rprop, model.parameters(), weight_update="split")
    theirs = torch.optim.Rprop(twin.parameters())
    for _ in range(3):
        for p, q in zip(model.parameters(), twin.parameters()):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        ours.step(), theirs.step()
    assert torch.equal(ours.float32_state_dict(model)["weight"], twin.weight)


def resumed(optimizer, narrow, cls, update):
    """The same optimizer over copies."""
    others = [torch.nn.Parameter(p.detach().clone()) for p in narrow]
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    fresh = hu.optim.wrap(cls, others, weight_update=update)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    return fresh, others


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cls", DENSE, ids=lambda c: c.__name__)
def test_resumed_is_uninterrupted(cls, seed):
    narrow, _ = parameters()
    ours = hu.optim.wrap(cls, narrow, weight_update="split8")
    feed([(ours, narrow)], 3)
    fresh, others = resumed(ours, narrow, cls, "split8")
    feed([(ours, narrow), (fresh, others)], 3)
    for p, q in zip(narrow, others):
        assert hu.kernels.same_bits(p.detach(), q.detach())
    for mine, own in zip(decoded(ours, narrow), decoded(fresh, others)):
        assert hu.kernels.same_bits(mine, own)


def test_a_state_dict_of_the_class_itself_is_refused(seed):
    narrow, wide = parameters()
    ours = hu.optim.wrap(torch.optim.AdamW, narrow, weight_update="split")
    with pytest.raises(ValueError, match="not saved by a wrapped AdamW"):
        ours.load_state_dict(torch.optim.AdamW(wide).state_dict())


def test_foreign_state_dicts_are_refused_and_change_nothing(seed):
    narrow, _ = parameters()
    ours = hu.optim.wrap(torch.optim.AdamW, narrow, weight_update="kahan")
    feed([(ours, narrow)], 2)
    before = copy.deepcopy(ours.state_dict())
    other = hu.optim.wrap(torch.optim.SGD, [torch.nn.Parameter(p.detach().clone()) for p in narrow], lr=1e-3)
    wrong_shape = copy.deepcopy(before)
    wrong_shape["state"][0]["base.exp_avg"] = torch.zeros(3)
    lacking = copy.deepcopy(before)
    del lacking["state"][1]["residual"]
    another = hu.optim.wrap(torch.optim.AdamW, [torch.nn.Parameter(p.detach().clone()) for p in narrow])
    for state_dict in (other.state_dict(), wrong_shape, lacking, another.state_dict(), {"state": {}}, 3):
        with pytest.raises(ValueError):
            ours.load_state_dict(state_dict)
    after = ours.state_dict()
    for number, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after["state"][number][name]))


def test_a_grad_scaler_skips_infinite_gradients(seed):
    model = torch.nn.Linear(4, 4).bfloat16()
    ours = hu.optim.wrap(torch.optim.Adam, model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.full((1, 4), torch.inf, dtype=torch.bfloat16)).sum()).backward()
    scaler.step(ours)
    scaler.update()
    assert torch.equal(model.weight, before)
    ours.zero_grad()
    assert model.weight.grad is None
    scaler.scale(model(torch.ones(1, 4, dtype=torch.bfloat16)).sum()).backward()
    scaler.step(ours)
    assert not torch.equal(model.weight, before)


def test_optimizers_from_elsewhere(seed):
    class Plain(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})
            self.own = [p for group in self.param_groups for p in group["params"]]

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.own:
                p -= self.param_groups[0]["lr"] * p.grad

    narrow, wide = parameters()
    ours, theirs = hu.optim.wrap(Plain, narrow, weight_update="split"), Plain(wide)
    feed([(ours, narrow), (theirs, wide)], 3)
    assert all(torch.equal(m, q) for m, q in zip(decoded(ours, narrow), wide))


def test_weight_decay_is_inside_what_is_rounded(seed):
    start = torch.randn(100_000).bfloat16()
    w = torch.nn.Parameter(start.clone())
    ours = hu.optim.wrap(torch.optim.SGD, [w], lr=1e-3, weight_decay=0.1, weight_update="split8")
    for _ in range(100):
        w.grad = torch.zeros_like(w)
        ours.step()
    value = decoded(ours, [w])[0].double()
    kept = float((value * start.double().sign()).sum() / start.double().abs().sum())
    assert kept == pytest.approx((1 - 1e-4) ** 100, abs=2e-5)


def test_bad_input():
    w = torch.nn.Parameter(torch.ones(3).bfloat16())
    with pytest.raises(ValueError, match="weight updates of its own"):
        hu.optim.wrap(hu.optim.AdamW, [w])
    with pytest.raises(ValueError, match="weight updates of its own"):
        hu.optim.wrap(hu.optim.AdamW([w]), [w])
    with pytest.raises(TypeError, match=r"class and parameters, got an SGD: give wrap"):
        hu.optim.wrap(torch.optim.SGD([w]), [w])
    with pytest.raises(TypeError, match="class and parameters"):
        hu.optim.wrap("SGD", [w])
    with pytest.raises(TypeError, match="not one tensor"):
        hu.optim.wrap(torch.optim.SGD, w)
    with pytest.raises(TypeError, match="takes tensors"):
        hu.optim.wrap(torch.optim.SGD, [3])
    with pytest.raises(ValueError, match="empty"):
        hu.optim.wrap(torch.optim.SGD, [])
    with pytest.raises(NotImplementedError, match="state_dtype"):
        hu.optim.wrap(torch.optim.Adam, [w], state_dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="differentiable"):
        hu.optim.wrap(torch.optim.Adam, [w], differentiable=True)
    with pytest.raises(ValueError, match="feedback"):
        hu.optim.wrap(torch.optim.Adam, [w], weight_update="feedback")
    with pytest.raises(ValueError, match="did you mean split"):
        hu.optim.wrap(torch.optim.Adam, [w], weight_update="spilt")
    with pytest.raises(ValueError, match="float64"):
        hu.optim.wrap(torch.optim.Adam, [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))])
    with pytest.raises(ValueError, match="2D"):
        hu.optim.wrap(torch.optim.Muon, [w])
    ours = hu.optim.wrap(torch.optim.Adam, [w])
    ours.param_groups[0]["lr"] = float("nan")
    w.grad = torch.ones_like(w)
    with pytest.raises(ValueError, match="lr=nan"):
        ours.step()
    assert torch.equal(w, torch.ones(3).bfloat16())
    assert repr(ours).startswith("wrap(Adam) (")


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators may not")  # torch 2.6
@pytest.mark.parametrize(
    "cls", [c for c in CLASSES if c.__name__ in ("AdamW", "Muon", "SGD")], ids=lambda c: c.__name__
)
def test_sharded_parameters_step_as_whole_ones(cls, mesh, seed):
    from torch.distributed.tensor import Shard, distribute_tensor

    def sharded(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    narrow, wide = parameters()
    shards = [torch.nn.Parameter(sharded(p.detach().clone())) for p in narrow]
    ours, theirs = hu.optim.wrap(cls, shards, lr=1e-2, weight_update="split"), cls(wide, lr=1e-2)
    ema = hu.optim.EMA(torch.nn.ParameterList(shards), 0.0, optimizer=ours, weight_update="split")
    for k in range(4):
        for p, q in zip(shards, wide):
            q.grad = torch.randn(q.shape).bfloat16().float()
            p.grad = sharded(q.grad.bfloat16())
        if k == 2:
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
        ours.step(), theirs.step()
        ema.update()
    for mine, own, averaged in zip(decoded(ours, shards), wide, ema.float32_state_dict().values()):
        assert torch.equal(mine.full_tensor(), own.detach())
        assert torch.allclose(averaged.full_tensor(), own.detach(), rtol=1e-6)
    with ema.apply():
        assert isinstance(shards[0], torch.distributed.tensor.DTensor)
