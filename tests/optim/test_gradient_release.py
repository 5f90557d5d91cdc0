"""Gradients that are freed inside of backward: the bits of a step after it, and the memory."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import halfulp as hu
from halfulp.kernels import same_bits

STEPS = 4


def _model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    tied = nn.Linear(16, 16, bias=False)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), tied, nn.Tanh(), tied, nn.Linear(16, 4)).to(dtype)


def _made(parameters):
    return hu.AdamW(parameters, lr=1e-2, weight_update="split8", state_dtype="8bit")


def _loss(model, step):
    generator = torch.Generator().manual_seed(10 * step)
    return model(torch.randn(4, 8, generator=generator).to(model[0].weight.dtype)).float().square().sum()


def _plain(float32=False):
    model = _model()
    if float32:
        hu.float32_gradients(model)
    optimizer = _made(model.named_parameters())
    for step in range(STEPS):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _released(float32=False):
    model = _model()
    if float32:
        hu.float32_gradients(model)
    released = hu.optim.release_gradients(model, _made)
    for step in range(STEPS):
        released.backward(_loss(model, step))
        assert all(parameter.grad is None for parameter in model.parameters())
    return model


def _equal(one, other):
    return all(same_bits(a.detach(), b.detach()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("float32", [False, True])
def test_the_bits_are_those_of_a_step_after_backward(float32):
    if float32 and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no gradients wider than their parameter")
    assert _equal(_plain(float32), _released(float32))


def test_a_backward_past_it_is_refused():
    model = _model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    released = hu.optim.release_gradients(model, _made)
    scaler = torch.amp.GradScaler("cpu")
    for backward in (_loss(model, 0).backward, scaler.scale(_loss(model, 0)).backward):
        with pytest.raises(RuntimeError, match=r"call released\.backward\(loss\)"):
            backward()
    assert all(same_bits(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    released.remove()


def test_parameters_that_were_frozen_step_when_they_are_not():
    model = _model()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    released = hu.optim.release_gradients(model, _made)
    released.backward(_loss(model, 0))
    assert same_bits(before, model[0].weight.detach())
    model[0].weight.requires_grad_(True)
    released.backward(_loss(model, 1))
    assert not same_bits(before, model[0].weight.detach())
    assert model[0].weight.grad is None


def test_parameters_that_were_moved_to_another_group_step_by_its_options():
    model = _model()
    first, *others = model.parameters()
    released = hu.optim.release_gradients(model, _made([{"params": [first]}, {"params": others, "lr": 0.0}]))
    moving, resting = (group["params"] for group in released.optimizer.param_groups)
    released.backward(_loss(model, 0))
    resting.append(moving.pop())
    moving.append(resting.pop(0))
    before = [parameter.detach().clone() for parameter in (first, *others)]
    released.backward(_loss(model, 1))
    stays = [same_bits(one, other.detach()) for one, other in zip(before, (first, *others), strict=True)]
    assert stays == [True, False, *[True] * (len(others) - 1)]
    del moving[:]  # in no group
    released.backward(_loss(model, 2))
    assert all(map(same_bits, before[2:], (other.detach() for other in others[1:])))
    assert others[0].grad is not None


def test_few_gradients_live_at_a_time():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).bfloat16()
    most, weights = [], [layer.weight for layer in model]
    for weight in weights:  # before the release's own hooks
        weight.register_post_accumulate_grad_hook(
            lambda _: most.append(sum(other.grad is not None for other in weights))
        )
    released = hu.optim.release_gradients(model, lambda params: hu.SGD(params, lr=0.1))
    released.backward(model(torch.ones(2, 64).bfloat16()).sum())
    assert max(most) == 1


def test_hooks_are_taken_off():
    model = _model()
    released = hu.optim.release_gradients(model, _made)
    released.remove()
    _loss(model, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_is_wrong_is_said():
    model = _model()
    with pytest.raises(TypeError, match="release_gradients"):
        hu.optim.release_gradients(list(model.parameters()), _made)
    with pytest.raises(TypeError, match=r"takes an optimizer of hu\.optim"):
        hu.optim.release_gradients(model, torch.optim.SGD)
    for make in (lambda p: hu.optim.wrap(torch.optim.AdamW, p), hu.optim.Prodigy, hu.optim.AdamWScheduleFree):
        with pytest.raises(NotImplementedError, match="steps all parameters together"):
            hu.optim.release_gradients(model, make)
    late = _model(torch.float32)
    released = hu.optim.release_gradients(late, hu.AdamW)
    hu.AdaptiveGradScaler(late)
    with pytest.raises(NotImplementedError, match="unscales gradients after they were freed"):
        released.backward(_loss(late, 0))
    scaled = _model(torch.float32)
    scaler = hu.AdaptiveGradScaler(scaled)
    compiled = torch.compile(scaled, backend=scaler.backend("aot_eager"))
    for given in (scaled, compiled, torch.nn.Sequential(scaled)):
        with pytest.raises(NotImplementedError, match="unscales gradients after they were freed"):
            hu.optim.release_gradients(given, _made)


@pytest.mark.parametrize("weight_update", ["split", "kahan", "master"])
def test_parameters_cut_from_one_tensor_keep_their_low_bits(weight_update):
    def train(release: bool) -> list[torch.Tensor]:
        model = torch.nn.Module()
        model.a, model.b = map(torch.nn.Parameter, torch.ones(64).bfloat16().chunk(2))
        opt = hu.SGD(model.named_parameters(), lr=2.0**-11, weight_update=weight_update)
        released = hu.optim.release_gradients(model, opt) if release else None
        for _ in range(32):
            loss = model.a.sum() + model.b.sum()
            if released is not None:
                released.backward(loss)
            else:
                loss.backward()
                opt.step()
                opt.zero_grad()
        return list(opt.float32_state_dict(model).values())

    found, wanted = train(True), train(False)
    assert all(map(torch.equal, found, wanted))
    assert all(bool((value < 0.99).all()) for value in found)


SHARDED = """
import os, sys, torch
import torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import halfulp as hu

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
limit = timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2, timeout=limit)
mesh = init_device_mesh("cpu", (2,))


def made(parameters):
    return hu.AdamW(parameters, lr=1e-2, weight_update="stochastic")


def trained(releases):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if releases:
        released = hu.optim.release_gradients(model, made)
    else:
        optimizer = made(model.named_parameters())
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + rank)
        loss = model(torch.randn(4, 8, generator=generator).bfloat16()).float().square().sum()
        if releases:
            released.backward(loss)
            assert all(parameter.grad is None for parameter in model.parameters())
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


after, inside = trained(False), trained(True)
assert all(torch.equal(one, other) for one, other in zip(after, inside, strict=True))
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_shards_have_the_bits_of_a_step_after_backward(in_two_processes):
    in_two_processes(SHARDED)


def _clamp(weight):
    with torch.no_grad():
        weight.clamp_(-0.2, 0.2)


def _clamp_data(weight):
    weight.data.clamp_(-0.2, 0.2)


def _replace_data(weight):
    weight.data = weight.data.clamp(-0.2, 0.2)


def test_parameters_that_were_replaced_are_not_taken_for_trained():
    model = _model()
    released = hu.optim.release_gradients(model, _made)
    model.load_state_dict(_model().state_dict(), assign=True)
    with pytest.raises(ValueError, match="holds none of the parameters of this Sequential that require a gradient"):
        released.backward(_loss(model, 0))


@pytest.mark.filterwarnings("ignore:parameters are written between steps")
@pytest.mark.parametrize("write", [None, _clamp, _clamp_data, _replace_data])
def test_averages_have_the_bits_of_those_of_a_step_after_backward(write):
    def run(releases):
        model = _model()
        released = hu.optim.release_gradients(model, _made) if releases else None
        optimizer = released.optimizer if released else _made(model.named_parameters())
        ema = hu.optim.EMA(model, 0.9, optimizer=optimizer)
        for step in range(STEPS):
            if released:
                released.backward(_loss(model, step))
            else:
                _loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            if write:
                write(model[0].weight)
            ema.update()
            with ema.apply():
                assert not same_bits(model[0].weight.detach(), ema._averages["5.weight"])
        return model, optimizer, ema

    (plain, one, before), (model, other, after) = run(False), run(True)
    assert _equal(plain, model)
    weights = zip(one.float32_state_dict(plain).values(), other.float32_state_dict(model).values(), strict=True)
    assert all(same_bits(a, b) for a, b in weights)
    averages = zip(before.float32_state_dict().values(), after.float32_state_dict().values(), strict=True)
    assert all(same_bits(a, b) for a, b in averages)


def test_hooks_of_step_are_refused_before_anything_is_written():
    model = torch.nn.Linear(4, 2)
    released = hu.optim.release_gradients(model, lambda named: hu.optim.SGD(named, lr=0.1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with (
        hu.observe(model, released.optimizer),
        pytest.raises(NotImplementedError, match=r"such as those of hu.observe, would see no step"),
    ):
        released.backward(model(torch.ones(3, 4)).sum())
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        with pytest.raises(NotImplementedError, match="would see no step"):
            released.backward(model(torch.ones(3, 4)).sum())
    finally:
        handle.remove()
    assert all(map(torch.equal, before, model.parameters()))
    released.backward(model(torch.ones(3, 4)).sum())
