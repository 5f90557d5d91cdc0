"""The training of a script: which optimizers are observed together, and what is said of those that come later."""

import copy
import gc
import sys

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.observation.scripts import ScriptWatch, listen_to_backward_losses, run_script
from halfulp.observation.scripts._watch import JointlyTrainedModels, find_trained_model


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


def test_a_second_training_is_named_and_left_alone():
    with ScriptWatch(2) as watch:
        for fold in range(3):
            model = net()
            train(model, torch.optim.AdamW(model.parameters()), 3 + fold)
    assert len(watch.observation) == 2
    (said,) = watch.unseen
    assert said.startswith("AdamW made its first step when others had made two: what it steps is not observed; put")
    found = watch.make_report("finished").to_dict()
    assert (found["steps"], found["ended"], found["record"]["unseen"][0]) == (2, "finished", said)
    assert [one["name"] for one in found["record"]["parameters"]] == [name for name, _ in net().named_parameters()]


def test_models_whose_optimizers_take_turns_are_observed_together():
    maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    with ScriptWatch(2) as watch:
        optimizers = [torch.optim.Adam(one.parameters()) for one in (critic, maker)]
        for _ in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
                critic(maker(torch.randn(3, 4))).mean().backward()
                optimizer.step()
    assert len(watch.observation) == 4
    assert watch.rank == 0
    record = watch.observation.record
    names = ["Linear.weight", "Linear.bias", "Linear_2.weight", "Linear_2.bias"]
    assert list(record.parameters) == names
    assert all(one.update.seen for one in record.parameters.values())
    assert {name for role, name in record.tensors if role == "activation"} == {"Linear", "Linear_2"}
    assert watch.unseen == []


def test_models_of_one_optimizer_are_observed_together():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with ScriptWatch(1) as watch:
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for _ in range(2):
            second(first(torch.randn(3, 4))).sum().backward()
            optimizer.step()
    assert list(watch.observation.model) == ["Linear", "Linear_2"]


def test_a_model_that_several_optimizers_step_is_observed_with_all():
    model = net()
    with ScriptWatch(2) as watch:
        one = torch.optim.SGD(model[0].parameters(), lr=0.1)
        two = torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()])
        for _ in range(4):
            model(torch.randn(3, 4)).mean().backward()
            one.step()
            two.step()
    assert len(watch.observation) == 3
    assert watch.observation.model is model
    assert [one.optimizer for one in watch.observation.record.parameters.values()] == ["SGD"] * 2 + ["AdamW"] * 4


def test_what_holds_models_together_is_not_found_as_a_model():
    model, other = net(), net()
    together = JointlyTrainedModels({"a": model, "b": other})
    assert find_trained_model([torch.optim.SGD(model.parameters(), lr=0.1)]) is model
    both = find_trained_model([torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1)])
    assert both is not together
    assert list(both.items()) == [("Sequential", other), ("Sequential_2", model)]


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
    assert len(watch.observation) == 3


def test_a_scalers_skips_are_counted_from_the_first_step_on():
    """Of 5 iterations after the first, the scaler skips the next one, before any step from which it could be found."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0)
    with ScriptWatch(1) as watch:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            loss = model(torch.randn(3, 4)).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert (len(watch.observation), watch.observation.record.skipped) == (4, 1)


def test_a_forked_process_writes_no_lines(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ScriptWatch(1, tmp_path / "seen.jsonl") as watch:
        train(model, optimizer, 3)
        watch._own_pid += 1
        train(model, optimizer, 3)
    assert len((tmp_path / "seen.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_losses_are_those_before_the_scaler(share):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    weight = torch.randn(3, requires_grad=True)
    seen: list[float] = []
    before = torch.autograd.backward, torch.amp.GradScaler.scale
    with listen_to_backward_losses(lambda loss: seen.append(float(loss))):
        loss = weight.square().sum()
        (scaler.scale(loss) * share).backward()
        weight.sum().backward()
        torch.autograd.backward([weight.prod()])
    weight = weight.detach()
    assert seen == pytest.approx([weight.square().sum().item() * share, weight.sum().item(), weight.prod().item()])
    assert (torch.autograd.backward, torch.amp.GradScaler.scale) == before


def test_a_script_in_a_folder_that_is_gone_crashes_and_leaves_argv_and_path(tmp_path, monkeypatch):
    argv, search = sys.argv, list(sys.path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run_script("train.py", ["3"]) == (1, "crashed")
    assert sys.argv is argv
    assert sys.path == search


def test_a_hook_that_fails_is_a_sentence(monkeypatch):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observe(model, optimizer) as seen:
        monkeypatch.setattr(seen.recorder, "record_tensor", None)
        train(model, optimizer, 1)
    assert "could not observe outputs: it raised TypeError" in seen.record.unseen
