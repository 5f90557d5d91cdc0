"""What optimizers of papers do beside their equations, which tests/laws/optim/test_update_rules.py has."""

import copy

import pytest
import torch

import halfulp as hu

from ..laws.optim.cases import decoded, differing, snapshot

FREE = {
    "sgd": (hu.optim.SGDScheduleFree, {"lr": 0.1, "momentum": 0.8}),
    "adamw": (hu.optim.AdamWScheduleFree, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}),
}


def _made(rule, start, **more):
    kind, options = FREE[rule]
    parameter = torch.nn.Parameter(start.clone())
    return parameter, kind([parameter], **{**options, **more})


def _gradients(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 32, generator=generator) for _ in range(count)]


def _walk(parameter, optimizer, gradients, each=lambda: None):
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        each()


@pytest.mark.parametrize("update", [None, "nearest", "stochastic", "kahan", "kahan-stochastic", "split8", "components"])
@pytest.mark.parametrize("rule", FREE)
def test_an_evaluation_changes_training_by_its_rounding_alone(seed, rule, update):
    dtype = torch.float32 if update is None else torch.bfloat16
    start, gradients = torch.ones(6, 32, dtype=dtype), _gradients(seed, 8)
    with hu.kernels.engine("reference"):
        parameter, optimizer = _made(rule, start, weight_update=update)
        other, disturbed = _made(rule, start, weight_update=update)
        _walk(parameter, optimizer, gradients)
        _walk(other, disturbed, gradients, each=lambda: (disturbed.eval(), disturbed.train()))
    near = 2**-5 if update in ("nearest", "stochastic") else 2**-10
    torch.testing.assert_close(decoded(disturbed, other), decoded(optimizer, parameter), rtol=near, atol=near)


@pytest.mark.parametrize("update", ["kahan", "split8"])
@pytest.mark.parametrize("rule", FREE)
def test_the_evaluated_weight_is_the_average_of_the_points(seed, rule, update):
    start, points = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)).bfloat16(), []
    parameter, optimizer = _made(rule, start, weight_update=update)
    _walk(
        parameter, optimizer, _gradients(seed, 9), each=lambda: points.append(optimizer.state[parameter]["z"].clone())
    )
    optimizer.eval()
    wanted = torch.stack(points).double().mean(0)
    torch.testing.assert_close(decoded(optimizer, parameter).double(), wanted, rtol=2**-13, atol=2**-13)


@pytest.mark.parametrize("rule", FREE)
def test_training_goes_on_from_a_file_of_either_mode(seed, rule):
    gradients = _gradients(seed, 6)
    parameter, optimizer = _made(rule, torch.ones(6, 32))
    _walk(parameter, optimizer, gradients[:3])
    files = []
    for mode in (True, False):
        optimizer.train(mode)
        files.append((parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())))
    optimizer.train()
    _walk(parameter, optimizer, gradients[3:])
    for (weight, saved), rtol in zip(files, (1e-5, 1e-5)):
        other, after = _made(rule, weight)
        after.load_state_dict(saved)
        after.train()
        _walk(other, after, gradients[3:])
        torch.testing.assert_close(other, parameter, rtol=rtol, atol=rtol)


def test_weights_written_during_an_evaluation_are_what_training_goes_on_from(seed):
    parameter, optimizer = _made("sgd", torch.ones(6, 32))
    _walk(parameter, optimizer, _gradients(seed, 3))
    optimizer.eval()
    with torch.no_grad():
        parameter.fill_(2.0)
    optimizer.train()
    z = optimizer.state[parameter]["z"]
    torch.testing.assert_close(parameter.detach(), 2.0 + (z - 2.0) * (1 - 0.8))


def test_a_step_in_evaluation_is_refused():
    parameter, optimizer = _made("adamw", torch.ones(2))
    optimizer.eval()
    parameter.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"call its train\(\) before step"):
        optimizer.step()
    optimizer.train()
    optimizer.step()


@pytest.mark.parametrize(("words", "own"), [({}, {"d0": 1e-2}), ({"d0": "1e-2"}, {}), ({}, {"d0": "0.01"})])
def test_prodigys_estimate_starts_from_the_d0_of_its_group(words, own):
    def stepped(group, **options):
        parameter = torch.nn.Parameter(torch.ones(6, 32))
        optimizer = hu.optim.Prodigy([{"params": [parameter], **group}], **options)
        assert (optimizer.param_groups[0]["d"], optimizer.param_groups[0]["d_max"]) == (1e-2, 1e-2)
        _walk(parameter, optimizer, [torch.ones(6, 32)] * 3)
        return optimizer

    expected, found = stepped({}, d0=1e-2), stepped(own, **words)
    assert differing(snapshot(expected), snapshot(found)) == []
    again = hu.optim.Prodigy([{**found.param_groups[0], "params": [torch.nn.Parameter(torch.ones(6, 32))]}])
    assert again.param_groups[0]["d"] == found.param_groups[0]["d"] > 1e-2, "a group that comes with an estimate"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (hu.optim.SGDScheduleFree, {"momentum": 1.0}, "at a share of the average"),
        (hu.optim.AdamWScheduleFree, {"betas": (0.0, 0.9)}, "at a share of the average"),
        (hu.optim.AdamWScheduleFree, {"state_dtype": "8bit"}, "uses 'z' to the last digits"),
        (hu.optim.Prodigy, {"d0": 0.0}, "d0=0.0 is not allowed: give a number above 0"),
        (hu.optim.Prodigy, {"d0": torch.ones(2)}, r"d0 is a tensor of shape \(2,\) .* give one number"),
        (hu.optim.Prodigy, {"growth_rate": 0.5}, "of 1 or more"),
        (hu.optim.Prodigy, {"betas": (0.0, 0.9)}, "a first beta above 0"),
        (hu.optim.Prodigy, {"state_dtype": torch.bfloat16}, "uses 'p0' to the last digits"),
        (hu.optim.Prodigy, {"weight_update": "feedback", "param_dtype": torch.bfloat16}, "does not offer"),
    ],
)
def test_what_they_refuse(kind, options, words):
    with pytest.raises(ValueError, match=words):
        kind([torch.nn.Parameter(torch.zeros(4, 32))], **options)


def test_prodigys_estimate_is_of_all_groups_and_survives_a_file(seed):
    def made():
        parameters = [torch.nn.Parameter(torch.ones(6, 32)) for _ in range(3)]
        groups = [{"params": parameters[:1]}, {"params": parameters[1:2], "weight_decay": 0.1}]
        return parameters, hu.optim.Prodigy([*groups, {"params": parameters[2:], "lr": 0.0}], d0=1e-2)

    def walk(parameters, optimizer, gradients):
        for gradient in gradients:
            for k, parameter in enumerate(parameters):
                parameter.grad = gradient * (k + 1)
            optimizer.step()

    gradients = [gradient + 1 for gradient in _gradients(seed, 6)]
    (whole, one), (parts, two), (others, three) = made(), made(), made()
    walk(whole, one, gradients)
    walk(parts, two, gradients[:3])
    with torch.no_grad():
        for mine, theirs in zip(others, parts):
            mine.copy_(theirs)
    three.load_state_dict(copy.deepcopy(two.state_dict()))
    walk(others, three, gradients[3:])
    assert differing(snapshot(one), snapshot(three)) == []
    assert len({group["d"] for group in one.param_groups}) == 1
    assert one.param_groups[0]["d"] == three.param_groups[0]["d"] > 1e-2
    assert torch.equal(whole[2], torch.ones(6, 32)), "lr=0 leaves a group as it is"
    one.param_groups[1]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"one lr for all param groups, or 0, got \[0.5, 1.0\]"):
        one.step()
