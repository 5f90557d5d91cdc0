"""Trainings of a script: which optimizers are observed together, when a training ends, and what it leaves alive."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from halfulp.observation.scripts import ScriptWatch, tell_backward_losses
from halfulp.observation.scripts import _watch as watch_module
from halfulp.observation.scripts._find import JointModel, find_training


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


def steps_of(watch: ScriptWatch) -> list[int]:
    return [len(training) for training in watch.trainings]


def test_folds_are_trainings_of_their_own_and_nothing_keeps_their_models():
    gone = []
    with ScriptWatch(2) as watch:
        for fold in range(3):
            model = net()
            optimizer = torch.optim.AdamW(model.parameters())
            train(model, optimizer, 3 + fold)
            if fold:
                gc.collect()
                assert [ref() for ref in gone] == [None] * len(gone), "a fold's model lives on after the next began"
            gone += [weakref.ref(model), weakref.ref(optimizer)]
        del model, optimizer
        gc.collect()
        assert {ref() for ref in gone} == {None}
    assert steps_of(watch) == [2, 3, 4]
    found = watch.make_report("finished").to_dict()
    assert [(one["number"], one["steps"], one["shown"]) for one in found["trainings"]] == [
        (1, 2, False),
        (2, 3, False),
        (3, 4, True),
    ]
    assert found["steps"] == 4
    names = [[one["name"] for one in each["record"]["parameters"]] for each in found["trainings"][:2]]
    assert names == [[name for name, _ in net().named_parameters()]] * 2, "names of the model, none before them"
    assert {role for role, _ in watch.trainings[0].summary.record.tensors} >= {
        "activation",
        "weight gradient",
        "update",
    }


def test_models_made_before_the_first_is_trained_are_trainings_of_their_own():
    models = [net() for _ in range(3)]
    with ScriptWatch(5) as watch:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for model, optimizer in zip(models, optimizers):
            train(model, optimizer, 7)
    assert steps_of(watch) == [6, 6, 6]
    assert [training.model for training in watch.trainings] == ["Sequential"] * 3
    for training in watch.trainings:
        assert any(role == "activation" for role, _ in training.summary.record.tensors), "a later step is seen whole"
        assert training.summary.record.unseen == []


def test_models_that_are_trained_together_by_optimizers_of_their_own_are_trainings_beside_each_other():
    maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    with ScriptWatch(2) as watch:
        optimizers = [torch.optim.Adam(one.parameters()) for one in (maker, critic)]
        for step in range(6):
            with torch.no_grad():
                fake = maker(torch.randn(3, 4))
            critic(fake).mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            if step % 2:
                critic(maker(torch.randn(3, 4))).mean().backward()
                optimizers[0].step()
                optimizers[0].zero_grad()
    assert sorted(steps_of(watch)) == [2, 5]
    for training in watch.trainings:
        assert list(training.summary.record.parameters) == ["weight", "bias"]
        assert {role for role, _ in training.summary.record.tensors} >= {"activation", "weight gradient", "update"}


def test_models_of_one_optimizer_are_one_training_and_each_is_named_by_its_class():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with ScriptWatch(1) as watch:
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for _ in range(2):
            second(first(torch.randn(3, 4))).sum().backward()
            optimizer.step()
    assert watch.trainings[0].model == "Linear + Linear_2"


def test_another_optimizer_of_the_same_model_begins_another_training():
    model = net()
    with ScriptWatch(2) as watch:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 4)
    assert steps_of(watch) == [2, 3]
    assert [training.optimizer_names for training in watch.trainings] == [["SGD"], ["AdamW"]], (
        "the one that is gone is not there"
    )


def test_an_optimizer_made_at_each_step_is_bounded(monkeypatch):
    monkeypatch.setattr(watch_module, "MOST_TRAININGS", 4)
    model = net()
    with ScriptWatch(1) as watch:
        for _ in range(9):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert steps_of(watch) == [1] * 4
    assert "5 in all, are not observed" in watch.unseen[-1]


def test_a_model_that_several_optimizers_step_is_one_training():
    model = net()
    with ScriptWatch(2) as watch:
        one = torch.optim.SGD(model[0].parameters(), lr=0.1)
        two = torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()])
        for _ in range(4):
            model(torch.randn(3, 4)).mean().backward()
            one.step()
            two.step()
    assert steps_of(watch) == [3]
    assert watch.trainings[0].optimizer_names == ["SGD", "AdamW"]


def test_what_holds_models_together_is_not_found_as_a_model():
    model = net()
    together = JointModel([model, net(), type("a.b", (nn.Linear,), {})(2, 2)])
    assert list(together._modules) == ["Sequential", "Sequential_2", "a_b"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert find_training([optimizer]).model is model


def test_a_copy_of_the_model_in_a_sampled_step_ends_nothing():
    model = net()
    with ScriptWatch(1) as watch:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, 2)
        copied = copy.deepcopy(model)
        copied(torch.randn(3, 4)).sum().backward()
        del copied
        gc.collect()
        train(model, optimizer, 2)
    assert steps_of(watch) == [3]


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_losses_are_those_before_the_scaler(share):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    weight = torch.randn(3, requires_grad=True)
    seen: list[float] = []
    before = torch.autograd.backward, torch.amp.GradScaler.scale
    with tell_backward_losses(lambda loss: seen.append(float(loss))):
        loss = weight.square().sum()
        (scaler.scale(loss) * share).backward()
        weight.sum().backward()
        torch.autograd.backward([weight.prod()])
    weight = weight.detach()
    assert seen == pytest.approx([weight.square().sum().item() * share, weight.sum().item(), weight.prod().item()])
    assert (torch.autograd.backward, torch.amp.GradScaler.scale) == before


def test_an_average_whose_construction_failed_is_none():
    """It may live on in a traceback, without the model that it averages."""
    half = AveragedModel.__new__(AveragedModel)
    nn.Module.__init__(half)
    model = net()
    found = find_training([torch.optim.SGD(model.parameters(), lr=0.1)])
    assert found.model is model
    assert found.average is None
