"""Every way to change a parameter meets everyone who may hold it: all goes on as if nobody did, or is refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.subclass.models._parameter_holders import has_common_memory


class Net(nn.Module):
    """Two square layers, so that either's weight can be the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def narrowed(model: nn.Module) -> torch.optim.Optimizer:
    return hu.optim.AdamW(model.named_parameters(), lr=0.01, param_dtype=torch.bfloat16)


def scaled(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(hu.scalify(model).parameters(), lr=0.1)


def components(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(hu.multicomponent(model, 2, torch.bfloat16).parameters(), lr=0.1)


REPLACERS = {"param_dtype": narrowed, "scalify": scaled, "multicomponent": components}


def tied(model: nn.Module) -> object:
    model.second.weight = model.first.weight


def tied_through_data(model: nn.Module) -> object:
    model.second.weight.data = model.first.weight.data


def overlapping(model: nn.Module) -> object:
    memory = torch.randn(32)
    model.first.weight.data, model.second.weight.data = memory[:16].view(4, 4), memory[8:24].view(4, 4)


def shared_with_processes(model: nn.Module) -> object:
    model.share_memory()


def alias(model: nn.Module) -> object:
    return [parameter.detach() for parameter in model.parameters()]


def tensor_hook(model: nn.Module) -> object:
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)


def post_accumulate_hook(model: nn.Module) -> object:
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    model.first.weight.register_post_accumulate_grad_hook(halve)


def graph(model: nn.Module) -> object:
    return model(torch.ones(2, 4)).sum()


def optimizer(model: nn.Module) -> object:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def parametrization(model: nn.Module) -> object:
    nn.utils.parametrizations.weight_norm(model.first)


def compiled(model: nn.Module) -> object:
    run = torch.compile(model, backend="eager")
    run(torch.ones(2, 4))
    return run


def averaged(model: nn.Module) -> object:
    return torch.optim.swa_utils.AveragedModel(model)


EVERYONE = set(REPLACERS)
REPLACING = {"scalify", "multicomponent"}
# Who holds a parameter, and which of the replacers refuse it, in which words.
HOLDERS: dict[Callable, tuple[set[str], str]] = {
    tied: (set(), ""),
    tied_through_data: (EVERYONE, r"tied through \.data.*Tie them by one parameter"),
    overlapping: (EVERYONE, "overlapping views of one memory"),
    shared_with_processes: (EVERYONE, r"other processes share.*call share_memory\(\) after"),
    alias: (set(), ""),
    tensor_hook: (REPLACING, "has hooks, which would never run"),
    post_accumulate_hook: (REPLACING, "has hooks, which would never run"),
    graph: (set(), ""),
    optimizer: (REPLACING, "SGD holds parameter 'first.weight'"),
    parametrization: (set(), ""),
    compiled: (set(), ""),
    averaged: (set(), ""),
}


def trained(model: nn.Module, steps: torch.optim.Optimizer, run: Callable) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if model.first.bias.dtype == torch.bfloat16 else torch.float32
    inputs = torch.linspace(-1, 1, 12).view(3, 4).to(dtype)
    for _ in range(2):
        steps.zero_grad()
        run(inputs).square().mean().backward()
        steps.step()
    return values(model)


def values(model: nn.Module) -> list[torch.Tensor]:
    found = (p.detach() for p in model.parameters())
    return [p.decode() if hasattr(p, "decode") else p.clone() for p in found]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__)
@pytest.mark.parametrize("replacer", REPLACERS)
def test_held_parameters_train_as_others_or_are_refused(replacer, holder, seed, fresh_compiler):
    model = Net()
    plain = copy.deepcopy(model)
    held = holder(model)
    refusing, words = HOLDERS[holder]
    if replacer in refusing:
        before, dtypes = values(model), [p.dtype for p in model.parameters()]
        with pytest.raises(ValueError, match=words):
            REPLACERS[replacer](model)
        assert all(map(torch.equal, values(model), before))
        assert [p.dtype for p in model.parameters()] == dtypes
        return
    # The same model in the same shape, which nobody else holds any more.
    if holder in (tied, parametrization, tensor_hook, post_accumulate_hook):
        holder(plain)
        plain.load_state_dict(model.state_dict())
    wanted = trained(plain, REPLACERS[replacer](plain), plain)
    steps = REPLACERS[replacer](model)
    got = trained(model, steps, held if holder is compiled else model)
    assert all(map(torch.equal, got, wanted))
    if holder is tied:
        assert model.first.weight is model.second.weight


def test_hooks_run_on_narrowed_parameters(seed):
    model, seen = Net(), []
    model.first.weight.register_hook(lambda gradient: seen.append(gradient.dtype))
    model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    trained(model, narrowed(model), model)
    assert seen == [torch.bfloat16] * 4


@pytest.mark.parametrize("ours", [True, False], ids=["hu.optim.EMA", "AveragedModel"])
def test_averages_made_before_narrowing_follow(ours, seed, needs_torch):
    if not ours:
        needs_torch("AveragedModel beside a model of another dtype")
    model = Net()
    averages = hu.optim.EMA(model, 0.5) if ours else torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=None)
    start = values(model)
    trained(model, narrowed(model), model)
    if ours:
        averages.update()
        got = [averages.float32_state_dict()[name] for name, _ in model.named_parameters()]
    else:
        averages.update_parameters(model)
        averages.update_parameters(model)
        got = values(averages.module)
    for average, first, now in zip(got, start, values(model), strict=True):
        assert average.dtype == torch.float32
        wanted = (first + now.float()) / 2 if ours else now.float()
        torch.testing.assert_close(average, wanted, rtol=2**-6, atol=2**-8)


def test_garbage_holds_nothing(seed):
    model = Net()
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    other.loop = other
    del other
    scaled(model)
    assert isinstance(model.first.weight, hu.ScaledTensor)


def test_a_refused_group_leaves_all_others_as_they_were(seed):
    model = Net()
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters(), "state_dtype": "9bit"}]
    with pytest.raises(ValueError, match="9bit"):
        hu.optim.AdamW(groups, param_dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    optimizer = hu.optim.AdamW(model.first.parameters(), param_dtype=torch.bfloat16)
    model.second.weight.data = model.second.weight.data.bfloat16()
    model.second.bias.data = model.first.bias.data
    with pytest.raises(ValueError, match="two parameters over one memory"):
        optimizer.add_param_group({"params": list(model.second.parameters())})
    assert len(optimizer.param_groups) == 1


def test_overlap_looks_at_memory_from_the_first_byte_to_the_last():
    x = torch.zeros(4, 6)
    assert has_common_memory(x[:, :3], x[:, 3:])  # which lie between each other
    assert not has_common_memory(x[:2], x[2:])
    assert has_common_memory(x[:, :4], x[:, 3:])
    assert has_common_memory(x, x.view(torch.int8)[2:3, 5:9])
    assert not has_common_memory(x[0], x[1])


@pytest.mark.parametrize("whole", [True, False], ids=["flat", "original"])
def test_fsdp1_is_refused(whole, seed):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    alone = ShardingStrategy.NO_SHARD  # one process, which has nothing to shard
    options = {"device_id": torch.device("cpu"), "use_orig_params": not whole, "sharding_strategy": alone}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(Net(), **options)
        with pytest.raises(ValueError, match=r"held by .*FSDP1.*call param_dtype= before wrapping"):
            narrowed(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.distributed.optim scripts functions
def test_zero_redundancy_optimizers_are_refused(process_group, seed):
    """A rank narrows its own share alone, which its broadcasts would write into float32 parameters elsewhere."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Net()
    with pytest.raises(ValueError, match=r"held by ZeroRedundancyOptimizer.*hu\.convert.*leave out param_dtype="):
        ZeroRedundancyOptimizer(model.parameters(), hu.optim.AdamW, param_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    hu.convert(model, "bf16-kahan")
    outer = ZeroRedundancyOptimizer(model.parameters(), hu.optim.AdamW, weight_update="kahan")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    outer.step()
