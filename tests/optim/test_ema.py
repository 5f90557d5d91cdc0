"""EMA: averages that follow float32's, the swap into the model and back, and what is saved."""

import copy
import io

import pytest
import torch

import halfulp as hu

UPDATES = ["stochastic", "kahan", "kahan-stochastic", "split", "split8", "master", "components", hu.Components(3)]


def constant(count, value=1.0, dtype=torch.bfloat16):
    net = torch.nn.Linear(count, 1, bias=False).to(dtype)
    torch.nn.init.constant_(net.weight, value)
    return net


def model(dtype=torch.bfloat16):
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).to(dtype)


def disturb(net):
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape).mul(0.1).to(p.dtype))


HALVES = [(u, d) for u in UPDATES for d in (torch.bfloat16, torch.float16) if (u, d) != ("split", torch.float16)]


def test_split_averages_of_float16_are_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        hu.optim.EMA(constant(4, dtype=torch.float16), weight_update="split")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("update", "dtype"), HALVES, ids=str)
def test_averages_follow_float32_from_one_to_zero(update, dtype, seed):
    net = constant(4_000, dtype=dtype)
    ema = hu.optim.EMA(net, 0.9997, weight_update=update, report_interval=0)
    torch.nn.init.zeros_(net.weight)
    for _ in range(500):
        ema.update()
    value = ema.float32_state_dict()["weight"].double().mean()
    assert float(value) == pytest.approx(0.9997**500, rel=0.01)


def test_nearest_never_moves(seed):
    net = constant(100)
    ema = hu.optim.EMA(net, 0.9999, weight_update="nearest", report_interval=1)
    torch.nn.init.zeros_(net.weight)
    for _ in range(50):
        ema.update()
    assert (ema.float32_state_dict()["weight"] == 1).all()
    assert ema.report().cancelled == 1


def test_long_averages_of_moving_weights(seed):
    net = constant(5_000)
    wide = torch.optim.swa_utils.AveragedModel(
        constant(5_000, dtype=torch.float32), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    )
    ema = hu.optim.EMA(net, 0.999, report_interval=0)
    moved = net.weight.detach().float()
    wide.update_parameters(net.float()), net.bfloat16()
    for _ in range(600):
        moved += torch.randn_like(moved) * 1e-3 - 1e-3
        with torch.no_grad():
            net.weight.copy_(moved)
            wide.update_parameters(copy.deepcopy(net).float())
        ema.update()
    ours, theirs = ema.float32_state_dict()["weight"], wide.module.weight.detach()
    # split8 keeps 16 bits and rounds without bias: a walk of 600 steps of at most 2^-16
    assert (ours - theirs).abs().max() < 2e-3
    assert float((ours - theirs).mean().abs()) < 2e-5


@pytest.mark.parametrize("update", ["split8", "kahan", "stochastic", hu.Components(3)], ids=str)
def test_reference_gives_the_same_bits(update, seed):
    net = model()
    fast, slow = (hu.optim.EMA(net, 0.9, weight_update=update) for _ in range(2))
    for _ in range(5):
        disturb(net)
        fast.update()
        with hu.kernels.engine("reference"):
            slow.update()
    for mine, own in zip(fast.state_dict()["tensors"].values(), slow.state_dict()["tensors"].values()):
        assert hu.kernels.same_bits(mine, own)


def test_float32_models_are_averaged_as_usual(seed):
    net = model(torch.float32)
    wide = {name: p.detach().clone() for name, p in net.named_parameters()}
    ema = hu.optim.EMA(net, 0.9)
    for _ in range(10):
        disturb(net)
        ema.update()
        for name, p in net.named_parameters():
            wide[name].lerp_(p.detach(), 0.1)
    for name, value in wide.items():
        assert torch.allclose(ema.float32_state_dict()[name], value, rtol=1e-5, atol=1e-7)


def test_narrow_averages_of_float32_models(seed):
    net = model(torch.float32)
    wide, ema = hu.optim.EMA(net, 0.99), hu.optim.EMA(net, 0.99, dtype=torch.bfloat16)
    for _ in range(50):
        disturb(net)
        wide.update(), ema.update()
    for name, _ in net.named_parameters():
        a, b = ema.float32_state_dict()[name], wide.float32_state_dict()[name]
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
    with ema.apply():
        assert torch.equal(net[0].weight, ema.float32_state_dict()["0.weight"])


def test_an_optimizers_weights_are_averaged_in_float32(seed):
    net, shown = constant(500), None
    optimizer = hu.optim.SGD(net.parameters(), lr=1.0, weight_update="split")
    ema, blind = (hu.optim.EMA(net, 0.9, optimizer=o, weight_update="split") for o in (optimizer, None))
    for _ in range(100):
        net.weight.grad = torch.full_like(net.weight, 2.0**-16)
        optimizer.step()
        ema.update(), blind.update()
    shown = net.weight.detach().clone()
    expected = 1.0
    for k in range(1, 101):
        expected += 0.1 * (1 - k * 2.0**-16 - expected)
    assert ema.float32_state_dict()["weight"].double() == pytest.approx(expected, abs=1e-6)
    assert (blind.float32_state_dict()["weight"] - expected).abs().min() > 1e-4
    assert torch.equal(net.weight, shown)


@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_of_other_optimizers(wrapped, seed):
    net = model()
    parameters = net.named_parameters()
    optimizer = hu.optim.wrap(torch.optim.NAdam, parameters) if wrapped else hu.optim.AdamW(parameters)
    ema = hu.optim.EMA(net, 0.0, optimizer=optimizer, weight_update="split")
    for _ in range(3):
        net(torch.randn(5, 6).bfloat16()).sum().backward()
        optimizer.step()
        ema.update()
    live, mine = optimizer.float32_state_dict(net), ema.float32_state_dict()
    for name, _ in net.named_parameters():
        assert torch.allclose(mine[name], live[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("fail", [False, True])
def test_apply_swaps_and_restores_every_bit(fail, seed):
    net = model()
    ema = hu.optim.EMA(net, 0.5)
    disturb(net)
    net(torch.randn(5, 6).bfloat16())
    ema.update()
    disturb(net)
    with torch.no_grad():
        net[0].weight[0, 0] = torch.nan
        net[0].weight.view(torch.int16)[0, 1] = 0x7FA5
    before = {name: t.detach().clone() for name, t in net.state_dict().items()}
    pointers = [p.data_ptr() for p in net.parameters()]
    averages = ema.float32_state_dict()
    try:
        with ema.apply() as inside:
            assert inside is net
            for name, tensor in net.state_dict().items():
                value = averages[name]
                assert torch.equal((tensor - value).abs(), (value.to(tensor.dtype) - value).abs())
            if fail:
                raise RuntimeError("stop")
    except RuntimeError:
        assert fail
    for name, tensor in net.state_dict().items():
        words = torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype
        assert torch.equal(tensor.view(words), before[name].view(words))
    assert [p.data_ptr() for p in net.parameters()] == pointers


def test_buffers_are_copied(seed):
    net = model()
    ema = hu.optim.EMA(net, 0.9)
    for _ in range(20):
        net(torch.randn(5, 6).bfloat16())
        ema.update()
    live = net[1].running_mean.clone()
    net(torch.randn(5, 6).bfloat16())
    found = ema.float32_state_dict()
    assert torch.equal(found["1.running_mean"], live.float())
    assert found["1.num_batches_tracked"] == 20


def test_decay_schedules_and_warmup(seed):
    def schedule(step):
        return [0.0, 0.5, 1.0][step - 1]

    net = constant(3)
    ema = hu.optim.EMA(net, schedule)
    seen = []
    for value in (0.0, 4.0, 9.0):
        torch.nn.init.constant_(net.weight, value)
        ema.update()
        seen.append(float(ema.float32_state_dict()["weight"][0, 0]))
    assert seen == [0.0, 2.0, 2.0]
    warm = hu.optim.EMA(constant(1), lambda n: min(0.999, (1 + n) / (10 + n)), weight_update="split")
    torch.nn.init.zeros_(warm.model.weight)
    expected = 1.0
    for step in range(1, 30):
        warm.update()
        expected *= (1 + step) / (10 + step)
    assert float(warm.float32_state_dict()["weight"]) == pytest.approx(expected, rel=1e-5)
    late = hu.optim.EMA(constant(1), lambda step: 2.0 if step > 1 else 0.5)
    late.update()
    with pytest.raises(ValueError, match=r"decay\(step=2\) gave"):
        late.update()


def test_tied_parameters_are_averaged_once(seed):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)).bfloat16()
    net[1].weight = net[0].weight
    ema = hu.optim.EMA(net, 0.5, weight_update="split")
    start = net[0].weight.detach().float()
    torch.nn.init.zeros_(net[0].weight)
    ema.update()
    found = ema.float32_state_dict()
    assert torch.equal(found["0.weight"], start / 2)
    assert torch.equal(found["1.weight"], start / 2)
    with ema.apply():
        assert torch.equal(net[1].weight.float(), (start / 2).bfloat16().float())


@pytest.mark.parametrize("kind", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("update", ["split8", "stochastic", "kahan", "master"])
def test_resumed_is_uninterrupted(update, kind, seed):
    net = model()
    ema = hu.optim.EMA(net, 0.99, weight_update=update)
    for _ in range(3):
        disturb(net)
        ema.update()
    if kind == "deepcopy":
        fresh = copy.deepcopy(ema)
        twin = fresh.model
    else:
        buffer = io.BytesIO()
        torch.save(ema.state_dict(), buffer)
        buffer.seek(0)
        twin = copy.deepcopy(net)
        fresh = hu.optim.EMA(twin, 0.99, weight_update=update)
        fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert fresh.updates == 3
    for _ in range(3):
        disturb(net)
        twin.load_state_dict(net.state_dict())
        ema.update(), fresh.update()
    mine, own = ema.state_dict(), fresh.state_dict()
    assert mine["updates"] == own["updates"] == 6
    assert all(hu.kernels.same_bits(t, own["tensors"][name]) for name, t in mine["tensors"].items())


def test_state_dicts_hold_companions_beside_their_averages(tmp_path, seed):
    from safetensors.torch import load_file, save_file

    ema = hu.optim.EMA(model(), 0.9, weight_update="kahan")
    state = ema.state_dict()
    assert state["tensors"]["0.weight"].dtype == state["tensors"]["0.weight.residual"].dtype == torch.bfloat16
    save_file(state["tensors"], tmp_path / "ema.safetensors")
    ema.load_state_dict({**state, "tensors": load_file(tmp_path / "ema.safetensors")})


def test_wrappers_of_the_model_are_no_part_of_the_names(seed):
    net = model()
    plain = hu.optim.EMA(net, 0.9, weight_update="kahan")
    compiled = hu.optim.EMA(torch.compile(net, backend="eager"), 0.9, weight_update="kahan")
    parallel = torch.nn.Module()
    parallel.module = net  # as DistributedDataParallel holds it
    wrapped = hu.optim.EMA(parallel, 0.9, weight_update="kahan")
    assert compiled.state_dict()["tensors"].keys() == plain.state_dict()["tensors"].keys()
    disturb(net)
    plain.update()
    saved = copy.deepcopy(plain.state_dict())
    for other in (compiled, wrapped):
        other.load_state_dict(saved)
        pairs = zip(other.state_dict()["tensors"].values(), saved["tensors"].values(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
        disturb(net)
        plain.update()
        plain.load_state_dict(other.state_dict())
        assert all(torch.equal(plain.state_dict()["tensors"][name], t) for name, t in saved["tensors"].items())


@pytest.mark.parametrize("update", ["stochastic", "kahan"])
def test_wrappers_of_the_model_change_no_bit(update, seed):
    class Around(torch.nn.Module):
        def __init__(self, net, name):
            super().__init__()
            self.add_module(name, net)

    net = model()
    wrapped = [Around(net, name) for name in ("_orig_mod", "module", "_forward_module")]
    averages = [hu.optim.EMA(one, 0.9, weight_update=update) for one in (net, *wrapped)]
    for _ in range(3):
        disturb(net)
        for one in averages:
            one.update()
    plain, *others = [[*one.state_dict()["tensors"].values()] for one in averages]
    assert all(torch.equal(a, b) for other in others for a, b in zip(plain, other, strict=True))


def test_names_that_a_wrappers_prefix_tells_apart_are_kept(seed):
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self._orig_mod, self.weight = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(3))

    ema = hu.optim.EMA(Around(), 0.9)
    assert ema.state_dict()["tensors"].keys() == {"weight", "_orig_mod.weight", "_orig_mod.bias"}
    ema.load_state_dict(ema.state_dict())


def test_foreign_state_dicts_are_refused_and_change_nothing(seed):
    net = model()
    ema = hu.optim.EMA(net, 0.9, weight_update="kahan")
    disturb(net)
    ema.update()
    good = copy.deepcopy(ema.state_dict())
    lacking = copy.deepcopy(good)
    del lacking["tensors"]["0.weight.residual"]
    shape, dtype, number = (copy.deepcopy(good) for _ in range(3))
    shape["tensors"]["2.weight"] = torch.zeros(1).bfloat16()
    dtype["tensors"]["2.weight"] = good["tensors"]["2.weight"].float()
    number["updates"] = -1
    other = hu.optim.EMA(model(), 0.9, weight_update="split8").state_dict()
    for wrong in (lacking, shape, dtype, number, other, {}, None):
        with pytest.raises(ValueError):
            ema.load_state_dict(wrong)
    after = ema.state_dict()
    assert after["updates"] == 1
    assert all(torch.equal(good["tensors"][name], t) for name, t in after["tensors"].items())


@pytest.mark.parametrize("update", [None, "stochastic", "kahan", "split", "nearest"])
def test_averages_of_another_random_stream_are_refused_where_they_draw(update, seed):
    net = model()
    ema = hu.optim.EMA(net, 0.9, weight_update=update)
    disturb(net)
    ema.update()
    saved = copy.deepcopy(ema.state_dict())
    assert saved["random_stream"] == 2
    older = {name: value for name, value in saved.items() if name != "random_stream"}
    fresh = hu.optim.EMA(net, 0.9, weight_update=update)
    if update in (None, "stochastic", "kahan"):
        for version in ({}, {"random_stream": 3}):
            with pytest.raises(ValueError, match=r"the EMA was saved under version [13] .*: 2 into the state_dict;"):
                fresh.load_state_dict({**older, **version})
        assert fresh.updates == 0
        older["random_stream"] = 2
    fresh.load_state_dict(older)
    assert fresh.updates == 1


def test_a_changed_model_is_noticed(seed):
    net = model()
    ema = hu.optim.EMA(net, 0.9)
    net[2] = torch.nn.Linear(8, 3).bfloat16()
    with pytest.raises(ValueError, match="make a new EMA"):
        ema.update()
    net.half()
    net[2] = torch.nn.Linear(8, 2).half()
    ema.update()


def test_bad_input():
    net = model()
    with pytest.raises(TypeError, match="Module"):
        hu.optim.EMA(net.parameters())
    with pytest.raises(TypeError, match="of hu"):
        hu.optim.EMA(net, optimizer=torch.optim.SGD(net.parameters()))
    for decay in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="a decay is from 0"):
            hu.optim.EMA(net, decay)
    with pytest.raises(ValueError, match="no parameters"):
        hu.optim.EMA(torch.nn.Tanh())
    with pytest.raises(ValueError, match="feedback"):
        hu.optim.EMA(net, weight_update="feedback")
    with pytest.raises(ValueError, match="float64"):
        hu.optim.EMA(torch.nn.Linear(2, 2).double())
    assert repr(hu.optim.EMA(net, 0.9)).startswith("EMA(decay=0.9, updates=0)")
