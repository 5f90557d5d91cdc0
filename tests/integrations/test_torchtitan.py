"""Optimizers by name in torchtitan's container; skipped where torchtitan is missing."""

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.kernels import same_bits

components = pytest.importorskip("torchtitan.components.optimizer")
from halfulp.integrations import torchtitan as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def _model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)).bfloat16()


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    container = components.OptimizersContainer
    monkeypatch.setattr(container, "_resolve_optimizer_factory", staticmethod(container._resolve_optimizer_factory))
    ours.register()


def _config(kind, first=r"^1\.", **options):
    groups = [
        components.ParamGroupConfig(
            pattern=first, optimizer_name="halfulp.AdamW", optimizer_kwargs={"lr": "1e-2", "weight_update": "split"}
        ),
        components.ParamGroupConfig(
            pattern=".*", optimizer_name="halfulp.AdamW", optimizer_kwargs={"lr": 1e-2, "weight_update": "stochastic"}
        ),
    ]
    return kind.Config(param_groups=groups, **options)


def _train(container, model, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 8, generator=generator).bfloat16()).float().square().mean().backward()
        container.step()
        container.zero_grad()


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_the_bits_are_those_of_the_plain_loop(implementation, seed):
    model, plain = _model(seed), _model(seed)
    container = components.OptimizersContainer(
        _config(components.OptimizersContainer, implementation=implementation), model_parts=[model]
    )
    _train(container, model, 0, 4)
    named = list(plain.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if n.startswith("1.")], "weight_update": "split"},
        {"params": [(n, p) for n, p in named if not n.startswith("1.")], "weight_update": "stochastic"},
    ]
    _train(hu.AdamW(groups, lr=1e-2), plain, 0, 4)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_flat_state_resumes_to_the_bit(seed):
    whole, half, other = _model(seed), _model(seed), _model(seed + 1)

    def make(model):
        return components.OptimizersContainer(_config(components.OptimizersContainer), model_parts=[model])

    _train(make(whole), whole, 0, 6)
    first, second = make(half), make(other)
    _train(first, half, 0, 3)
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in first.state_dict().items()}
    other.load_state_dict(half.state_dict())
    second.load_state_dict(saved)
    _train(second, other, 3, 6)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(whole.parameters(), other.parameters(), strict=True))


def test_stages_of_a_pipeline_go_on_from_a_file_of_the_whole_model_and_the_other_way(seed):
    """A flat state has each entry once per name; the step of rate 0 by which torch makes states moves no weight."""
    whole, split = _model(seed), _model(seed)

    def make(model, stages):
        return components.OptimizersContainer(
            _config(components.OptimizersContainer, first="weight$"), model_parts=stages
        )

    def stages(model):
        parts = [nn.Module(), nn.Module()]
        for name, layer in model.named_children():
            parts[int(name) > 0].add_module(name, layer)
        return parts

    one, two = make(whole, [whole]), make(split, stages(split))
    for container, model in ((one, whole), (two, split)):
        _train(container, model, 0, 3)
    assert one.state_dict().keys() == two.state_dict().keys()
    ends = []
    for saved, model, parts in ((one, whole, stages), (two, split, lambda model: [model])):
        other = _model(seed + 1)
        other.load_state_dict(model.state_dict())
        container = make(other, parts(other))
        container.load_state_dict({k: v.clone() if torch.is_tensor(v) else v for k, v in saved.state_dict().items()})
        assert all(same_bits(a.detach(), b.detach()) for a, b in zip(model.parameters(), other.parameters()))
        _train(container, other, 3, 6)
        ends.append(other)
    _train(one, whole, 3, 6)
    for other in ends:
        assert all(same_bits(a.detach(), b.detach()) for a, b in zip(whole.parameters(), other.parameters()))


def test_registered_names_are_known_to_every_container(seed):
    container = components.OptimizersContainer
    made = container(_config(container), model_parts=[_model(seed)])
    assert type(made.optimizers[0]) is hu.optim.AdamW
    assert container._resolve_optimizer_factory("AdamW") is torch.optim.AdamW


def test_what_is_unknown_is_said():
    with pytest.raises(ValueError, match=r"did you mean 'halfulp\.Adam'"):
        ours.find_optimizer("halfulp.AdamV")
    with pytest.raises(NotImplementedError, match="not added"):
        ours.find_optimizer("AdamV")
