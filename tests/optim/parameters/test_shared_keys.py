"""Optimizers of one training that share random bits unasked are told of, once; runs that are compared are not."""

import copy
import itertools
import warnings

import pytest
import torch

import halfulp as hu
from halfulp.kernels import _engine as _engines
from halfulp.optim.parameters import _random_identity

TOLD = r"\(SGD, AdamW\) of unnamed parameters step in turn.*seed=0.*named_parameters\(\).*another seed="


@pytest.fixture(autouse=True)
def _untold(monkeypatch):
    monkeypatch.setattr(_engines, "_fallback_counts", type(_engines._fallback_counts)())
    monkeypatch.setattr(_random_identity._Last, "optimizer", None)


def _model(*widths):
    return torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in itertools.pairwise(widths))).bfloat16()


def _optimizer(model, kind=hu.optim.AdamW, **options):
    return kind(model.parameters(), **{"lr": 2.0**-9, "weight_update": "stochastic", **options})


def _step(optimizer, times=1):
    with hu.kernels.engine("reference"):
        for _ in range(times):
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = torch.full_like(parameter, 2.0**-5)
            optimizer.step()


def _in_turn(*optimizers, times=4):
    for _ in range(times):
        for optimizer in optimizers:
            _step(optimizer)


def _quietly(*optimizers, times=4):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _in_turn(*optimizers, times=times)


@pytest.mark.parametrize("times", [1, 3])
def test_two_models_of_one_training_are_told_of_once_at_the_users_line(seed, times):
    """As the two of a GAN; one may step more often than the other."""
    first, second = _optimizer(_model(4, 8), hu.optim.SGD), _optimizer(_model(8, 3, 1))
    with pytest.warns(RuntimeWarning, match=TOLD) as told:
        _in_turn(*(first,) * times, second)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_equal_layers_with_an_optimizer_each_are_told_of(seed):
    layers = [_model(4, 4) for _ in range(3)]
    with pytest.warns(RuntimeWarning, match="step in turn"):
        _in_turn(*map(_optimizer, layers))


def test_the_advice_works(seed):
    _quietly(_optimizer(_model(4, 8)), _optimizer(_model(8, 3), seed=1))
    one, other = _model(4, 8), _model(8, 3)
    named = [[(f"{prefix}.{name}", p) for name, p in m.named_parameters()] for prefix, m in (("g", one), ("d", other))]
    _quietly(*(hu.optim.AdamW(given, weight_update="stochastic") for given in named))


def test_optimizers_that_draw_nothing_or_share_nothing_are_not_told_of(seed):
    options = {"weight_update": "split", "state_dtype": torch.float32}
    _quietly(_optimizer(_model(4, 8), **options), _optimizer(_model(8, 3), **options))
    model = _model(4, 8)
    _quietly(_optimizer(model), _optimizer(model))  # over the same parameters


def test_runs_one_after_the_other_are_not_told_of(seed):
    runs = [_optimizer(_model(4, width)) for width in (8, 3, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in runs:
            _step(optimizer, 5)
        _step(runs[0])


@pytest.mark.parametrize("other", [{}, {"weight_update": "kahan-stochastic"}, {"lr": 2.0**-6}])
def test_runs_that_are_compared_are_not_told_of(seed, other):
    model = _model(4, 8, 2)
    _quietly(_optimizer(model), _optimizer(copy.deepcopy(model), **other))


def test_a_resumed_run_beside_the_uninterrupted_one_is_not_told_of(seed):
    model = _model(4, 8, 2)
    optimizer = _optimizer(model)
    _step(optimizer, 3)
    again = copy.deepcopy(model)
    resumed = _optimizer(again)
    resumed.load_state_dict(optimizer.state_dict())
    _quietly(optimizer, resumed)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters()))


@pytest.mark.parametrize("kind", ["scaled", "components", "float8 values"])
def test_parameters_of_every_kind_are_looked_at(seed, kind):
    models = [_model(4, 8).float(), _model(8, 3).float()]
    options = {"weight_update": "stochastic"}
    if kind == "scaled":
        models = [hu.scalify(model) for model in models]
    elif kind == "components":
        options = {"weight_update": hu.Components(2, "stochastic"), "param_dtype": torch.bfloat16}
    else:
        options |= {"format": "e4m3"}
    first, second = (_optimizer(model, **options) for model in models)
    with pytest.warns(RuntimeWarning, match="step in turn"):
        _in_turn(first, second)
