"""torch.optim's contract of state_dict and load_state_dict: hooks, foreign keys, older files, names, the identity."""

import copy

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.parameters._random_identity import strip_wrapper_prefixes

from .state_dicts import assert_same, take_steps

KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "Lion": {},
    "wrap": {},
}


def _made(name, parameters, options=None):
    options = KINDS[name] if options is None else options
    if name == "wrap":
        return hu.optim.wrap(torch.optim.Adagrad, parameters, **options)
    return getattr(hu.optim, name)(parameters, **options)


def _model():
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", KINDS)
def test_hooks_run_once_each_in_order_and_may_change_what_is_saved_and_loaded(name):
    model = _model()
    optimizer = _made(name, model.parameters())
    take_steps(list(model.parameters()), optimizer, 0, 2)
    seen = []

    def add_key(opt):
        seen.append("before saving")
        opt.state["ema"] = 3

    def after(opt, saved):
        seen.append("after saving")
        assert isinstance(saved["param_groups"][0]["params"][0], int)
        return {**saved, "note": 7}

    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("second"))
    optimizer.register_state_dict_pre_hook(add_key, prepend=True)
    optimizer.register_state_dict_post_hook(after)
    saved = optimizer.state_dict()
    assert seen == ["before saving", "second", "after saving"]
    assert (saved["note"], saved["state"]["ema"]) == (7, 3)
    fresh = _made(name, copy.deepcopy(model).parameters())
    handle = fresh.register_load_state_dict_pre_hook(lambda opt, given: {**given, "param_groups": halved(given)})
    fresh.register_load_state_dict_pre_hook(lambda opt, given: given.pop("note") and None, prepend=True)
    fresh.register_load_state_dict_post_hook(lambda opt: seen.append(opt.param_groups[0]["lr"]))

    def halved(given):
        return [{**group, "lr": group["lr"] / 2} for group in given["param_groups"]]

    fresh.load_state_dict(saved)
    assert seen[-1] == fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] / 2
    assert fresh.state["ema"] == 3
    assert saved["note"] == 7  # a copy was changed
    handle.remove()
    fresh.load_state_dict(saved)
    assert seen[-1] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("what", ["older", "scheduler", "user's", "names"])
def test_torchs_own_files(name, what):
    """Older files lack options; others carry a scheduler's keys, the user's own, or names; all go through unchanged."""
    wide = [(f"p{k}", torch.nn.Parameter(p.detach().float())) for k, p in enumerate(_model().parameters())]
    theirs = getattr(torch.optim, name)(wide if what == "names" else [p for _, p in wide], **KINDS[name])
    carried = {}
    if what == "scheduler":
        torch.optim.lr_scheduler.OneCycleLR(theirs, 0.1, total_steps=9)
        carried = {key: theirs.param_groups[0][key] for key in ("initial_lr", "max_lr", "min_lr")}
    elif what == "user's":
        carried = {"name": "head", "lr_scale": 0.5}
        theirs.param_groups[0].update(carried)
    elif what == "names":
        carried = {"param_names": [key for key, _ in wide]}
    take_steps([p for _, p in wide], theirs, 0, 2)
    saved = theirs.state_dict()
    if what == "older":
        for key in ("maximize", "foreach", "differentiable", "fused", "capturable", "decoupled_weight_decay"):
            saved["param_groups"][0].pop(key, None)
    ours_parameters = [torch.nn.Parameter(p.detach().clone()) for _, p in wide]
    options = {**KINDS[name], "maximize": True} if what == "older" else KINDS[name]
    ours = _made(name, ours_parameters, options)
    ours.load_state_dict(saved)
    assert {key: ours.param_groups[0][key] for key in carried} == carried
    assert ours.param_groups[0]["maximize"] is False
    take_steps([p for _, p in wide], theirs, 2, 3), take_steps(ours_parameters, ours, 2, 3)
    for mine, (_, other) in zip(ours_parameters, wide):
        torch.testing.assert_close(mine, other, rtol=2**-18, atol=2**-18)
    again = _made(name, [torch.nn.Parameter(p.detach().clone()) for p in ours_parameters])
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert {key: again.param_groups[0][key] for key in carried} == carried


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_dampened_momentum_taken_over_from_torch_goes_on_as_torch(steps, nesterov):
    """torch's SGD keeps no step; its first buffer is the whole gradient, every later one is dampened."""
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0 if nesterov else 0.7, "nesterov": nesterov}
    theirs_parameter = torch.nn.Parameter(torch.linspace(-1, 1, 9))
    theirs = torch.optim.SGD([theirs_parameter], **options)
    take_steps([theirs_parameter], theirs, 0, steps)
    mine = torch.nn.Parameter(theirs_parameter.detach().clone())
    ours = hu.optim.SGD([mine], **options)
    ours.load_state_dict(theirs.state_dict())
    take_steps([theirs_parameter], theirs, steps, 3), take_steps([mine], ours, steps, 3)
    torch.testing.assert_close(mine, theirs_parameter, rtol=2**-20, atol=2**-20)


def test_a_file_with_wrong_names_or_of_another_rule_is_refused():
    model = _model()
    optimizer = hu.optim.AdamW(model.named_parameters())
    for change in ({"param_names": ["a"]}, {"param_names": 3}, {"momentum": 0.9}):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0].update(change)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match="state_dict"):
            optimizer.load_state_dict(saved)
        assert_same(optimizer.state_dict(), before)


WRAPPINGS = [
    ["0.weight", "1.bias"],
    ["_orig_mod.0.weight", "_orig_mod.1.bias"],
    ["module.0.weight", "module.1.bias"],
    ["module._orig_mod.0.weight", "module._orig_mod.1.bias"],
    ["_orig_mod.module.0.weight", "_orig_mod.module.1.bias"],
    ["0._orig_mod.weight", "1.bias"],
    ["0._checkpoint_wrapped_module.weight", "_fsdp_wrapped_module.1.bias"],
]


@pytest.mark.parametrize("names", WRAPPINGS, ids="-".join)
def test_wrapped_models_have_the_plain_models_names_bits_and_files(names):
    assert strip_wrapper_prefixes(names) == WRAPPINGS[0]
    assert strip_wrapper_prefixes(["module.a", "b"]) == ["module.a", "b"]  # somebody's own module

    def made(given):
        parameters = [torch.nn.Parameter(torch.linspace(0.1, 1, 64).bfloat16()) for _ in given]
        return parameters, hu.optim.SGD(list(zip(given, parameters)), lr=2.0**-10, weight_update="stochastic", seed=4)

    (plain, one), (wrapped, two) = made(WRAPPINGS[0]), made(names)
    take_steps(plain, one, 0, 3), take_steps(wrapped, two, 0, 3)
    for a, b in zip(plain, wrapped):
        assert same_bits(a.detach(), b.detach())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    one.load_state_dict(copy.deepcopy(two.state_dict()))
    assert two.param_groups[0]["param_names"] == names
