"""Wrappers around parameters with companions: checkpoints through them, and what is refused as it wraps."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import halfulp as hu
from halfulp.kernels import same_bits


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2, bias=False)))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


Parallel = nn.parallel.DistributedDataParallel
CHANGES = {
    "float16": hu.scalify,
    "e4m3": lambda model: hu.scalify(model, torch.float8_e4m3fn),
    "two components": lambda model: hu.multicomponent(model, 2, torch.bfloat16),
    "three with a scale": lambda model: hu.multicomponent(model, 3, torch.float16),
    "one layer of two": lambda model: hu.scalify(model, where="0.*"),
}
WRAPS = {
    "DistributedDataParallel": Parallel,
    "compiled": compiled,
    "compiled, then parallel": lambda model: Parallel(compiled(model)),
    "parallel, then compiled": lambda model: compiled(Parallel(model)),
    "parallel inside": lambda model: nn.Sequential(nn.Tanh(), Parallel(model)),
}
INNER = {"parallel inside": lambda model: nn.Sequential(nn.Tanh(), model)}


def plain(model: nn.Module) -> nn.Module:
    return model


def made(change, wrap, architecture=net) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(CHANGES[change](architecture()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def bits(x: object) -> list[torch.Tensor]:
    x = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x)
    inner = [getattr(x, name) for name in ("payload", "scale", "components") if hasattr(x, name)]
    return [one for part in inner or [x] for one in (part if isinstance(part, tuple) else [part]) if one is not None]


def all_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = [*model.parameters(), *model.buffers(), *(x for s in optimizer.state.values() for x in s.values())]
    return [one for x in held for one in bits(x)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_of_a_wrapped_model_is_loaded_into_the_inner_one(change, wrap, seed):
    for architecture in (net, tied) if wrap == "DistributedDataParallel" else (net,):
        first, second = made(change, WRAPS[wrap], architecture), made(change, INNER.get(wrap, plain), architecture)
        saved = get_state_dict(*first)
        names = [name for name in saved[0] if "module." in name or "_orig_mod." in name]
        assert not names
        set_state_dict(*second, model_state_dict=saved[0], optim_state_dict=saved[1])
        assert all(same_bits(a, b) for a, b in zip(all_bits(*first), all_bits(*second), strict=True))


@pytest.mark.parametrize("wrap", WRAPS)
def test_one_that_is_loaded_through_a_wrapper_names_the_entries(wrap, seed):
    model, optimizer = made("two components", WRAPS[wrap])
    saved = get_state_dict(model, optimizer)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*component_1"):
        set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])


@pytest.mark.parametrize("change", ["float16", "two components"])
def test_a_checkpoint_goes_through_checkpoint_wrappers(change, seed):
    first, second = (made(change, lambda model: nn.Sequential(nn.Tanh(), checkpoint_wrapper(model))) for _ in range(2))
    model_state, optimizer_state = get_state_dict(*first)
    set_state_dict(*second, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert all(same_bits(a, b) for a, b in zip(all_bits(*first), all_bits(*second), strict=True))


def test_a_wrapper_that_stands_already_is_named(seed):
    model = net()
    wrapped = Parallel(model)
    with pytest.raises(ValueError, match=r"'0.weight' is held by DistributedDataParallel.*before wrapping the model"):
        hu.multicomponent(model, 2, torch.bfloat16)
    assert type(wrapped.module[0].weight) is nn.Parameter


def test_entries_of_nobody_are_still_told(seed):
    model = Parallel(hu.scalify(net()))
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "0.weight.payload_scale"'):
        model.load_state_dict({**state, "0.weight.payload_scale": torch.tensor(1.0), "3.weight": torch.ones(2)})


def sharded(model: nn.Module, **options) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), **options)


def half(model: nn.Module) -> None:
    sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))


def planned(model: nn.Module, **options) -> None:
    plan = {"0": ColwiseParallel(), "2.0": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (1,)), plan, **options)


def planned_without_sending(model: nn.Module) -> None:
    planned(model, src_data_rank=None)


def distributed(model: nn.Module) -> None:
    distribute_module(model, init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrap", [sharded, half, planned, planned_without_sending, distributed])
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu")
def test_what_cannot_be_wrapped_is_refused_as_it_is_wrapped(change, wrap, seed, needs_torch):
    if wrap is planned_without_sending:
        needs_torch("parallelize_module(src_data_rank=)")
    with pytest.raises(NotImplementedError, match=r"Use DistributedDataParallel, or (shard|give)"):
        wrap(CHANGES[change](net()))
