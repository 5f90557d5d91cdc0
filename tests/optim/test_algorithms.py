"""The optimizers beside torch.optim's: the same signature, the same numbers."""

import copy
import inspect
import itertools

import pytest
import torch

import halfulp as hu

from ..laws.optim.cases import narrow_updates
from .training import STEPS, make_problem, train

SGD_OPTIONS = [
    {"momentum": m, "dampening": d, "weight_decay": w, "nesterov": n, "maximize": x}
    for m, d, w, n, x in itertools.product((0, 0.9), (0, 0.3), (0, 0.1), (False, True), (False, True))
    if (m or not d) and not (n and (d or not m))
]
ADAM_OPTIONS = [
    {"weight_decay": w, "amsgrad": a, "maximize": x, "betas": b}
    for w, a, x, b in itertools.product((0, 0.1), (False, True), (False, True), ((0.9, 0.999), (0.0, 0.9)))
]


def _grid(**values):
    return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]


TORCH_OPTIONS = {
    "Adagrad": _grid(
        weight_decay=(0, 0.1), lr_decay=(0, 0.1), initial_accumulator_value=(0, 0.5), maximize=(False, True)
    ),
    "RMSprop": _grid(weight_decay=(0, 0.1), momentum=(0, 0.9), centered=(False, True), alpha=(0.9,), eps=(1e-3,)),
    "NAdam": _grid(weight_decay=(0, 0.1), momentum_decay=(4e-3, 0.1), decoupled_weight_decay=(False, True)),
    "RAdam": _grid(weight_decay=(0, 0.1), decoupled_weight_decay=(False, True), betas=((0.9, 0.999), (0.0, 0.9))),
}


def _name(options):
    return "-".join(f"{key}={value}" for key, value in options.items() if value) or "plain"


def _assert_close(mine, torchs, lr):
    for a, b in zip(mine, torchs):
        # Both are float32 chains of STEPS steps; their sums are ordered differently.
        torch.testing.assert_close(a, b, rtol=STEPS * 2**-22, atol=STEPS * lr * 2**-20)


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=_name)
def test_sgd_agrees_with_torch(seed, options):
    problem = make_problem(seed)
    mine, _ = train(hu.optim.SGD, *problem, lr=0.01, **options)
    theirs, _ = train(torch.optim.SGD, *problem, lr=0.01, **options)
    _assert_close(mine, theirs, 0.01 * 100)


@pytest.mark.parametrize("options", ADAM_OPTIONS, ids=_name)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_agrees_with_torch(seed, name, options):
    problem = make_problem(seed)
    mine, _ = train(getattr(hu.optim, name), *problem, lr=0.01, **options)
    theirs, _ = train(getattr(torch.optim, name), *problem, lr=0.01, **options)
    _assert_close(mine, theirs, 0.01)


@pytest.mark.parametrize(("name", "options"), [(n, one) for n, grid in TORCH_OPTIONS.items() for one in grid])
def test_the_others_agree_with_torch(seed, name, options):
    problem = make_problem(seed)
    mine, optimizer = train(getattr(hu.optim, name), *problem, lr=0.01, **options)
    theirs, reference = train(getattr(torch.optim, name), *problem, lr=0.01, **options)
    _assert_close(mine, theirs, 0.1)
    names = {key for state in reference.state.values() for key in state}
    assert {key for state in optimizer.state.values() for key in state} <= names, "torch's names of states"


@pytest.mark.parametrize("name", TORCH_OPTIONS)
def test_a_run_of_torchs_goes_on_here(seed, name):
    start, gradients = make_problem(seed)
    theirs, reference = train(getattr(torch.optim, name), start, gradients[:20], lr=0.01, weight_decay=0.1)
    mine, optimizer = train(getattr(hu.optim, name), theirs, [])
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for gradient in gradients[20:]:
        for kind, parameters in ((reference, theirs), (optimizer, mine)):
            for parameter, one in zip(parameters, gradient):
                parameter.grad = one.clone()
            kind.step()
    _assert_close(mine, theirs, 0.1)


@pytest.mark.parametrize(
    ("name", "option"),
    [("Adagrad", "lr_decay"), ("RMSprop", "alpha"), ("NAdam", "momentum_decay"), ("AdEMAMix", "alpha_warmup")],
)
def test_a_negative_option_is_refused_by_its_name(name, option):
    with pytest.raises(ValueError, match=f"{option}=-1.0 is not allowed"):
        getattr(hu.optim, name)([torch.nn.Parameter(torch.zeros(3))], **{option: -1.0})


def test_a_centered_rmsprop_is_exact_where_nothing_was_chosen():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = hu.optim.RMSprop([parameter], centered=True, momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = {key: value.dtype for key, value in optimizer.state[parameter].items() if key in ("square_avg", "grad_avg")}
    assert set(held.values()) == {torch.float32}
    with pytest.raises(ValueError, match="uses 'square_avg', 'grad_avg' to the last digits"):
        hu.optim.RMSprop([parameter], centered=True, state_dtype="8bit")


@pytest.mark.parametrize("update", narrow_updates(but=["nearest", "kahan-literal"]))
def test_a_bfloat16_optimizer_stays_near_float32(seed, update):
    start, gradients = make_problem(seed, torch.bfloat16)
    options = {"lr": 1e-3, "weight_decay": 0.1, "state_dtype": torch.float32}
    narrow, optimizer = train(hu.optim.AdamW, start, gradients, weight_update=update_of(update), **options)
    largest = [tensor.float().abs() for tensor in start]

    def grow(parameters):
        for top, parameter in zip(largest, parameters):
            torch.maximum(top, parameter.detach().abs(), out=top)

    whole, _ = train(hu.optim.AdamW, [tensor.float() for tensor in start], gradients, grow, **options)
    noisy = update in ("stochastic", "feedback")
    for a, b, top in zip(narrow, whole, largest):
        plan = optimizer._plans[a]
        decoded = plan.spec.update.read(plan.spec.store, plan.parts)
        # One unit in the last place of bfloat16 per step, at random, or of what the companions hold: a unit of the
        # largest that the weight was on its way, for it may end near 0.
        ulp = top.clamp(min=2.0**-20) * (2**-7 if noisy else 2**-14)
        assert ((decoded - b).abs() <= ulp * (5 * STEPS**0.5 if noisy else STEPS)).all()


def update_of(name):
    from ..laws.optim.cases import UPDATES

    return UPDATES[name]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", *TORCH_OPTIONS])
def test_torchs_whole_signature_is_accepted(name):
    own = inspect.signature(getattr(torch.optim, name).__init__).parameters
    given = {
        key: value.default for key, value in own.items() if key not in ("self", "params") and key != "weight_decay_type"
    }
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = getattr(hu.optim, name)([parameter], **given)
    for key in set(optimizer.defaults) & set(given):
        assert optimizer.defaults[key] == given[key], key
    positional = [key for key, value in own.items() if value.kind is value.POSITIONAL_OR_KEYWORD][2:]
    getattr(hu.optim, name)([parameter], *[own[key].default for key in positional])


@pytest.mark.parametrize(
    ("name", "switch", "value"),
    [
        ("SGD", "foreach", True),
        ("SGD", "differentiable", True),
        ("SGD", "fused", False),
        ("AdamW", "foreach", True),
        ("AdamW", "capturable", True),
        ("Adam", "differentiable", True),
        ("Adam", "fused", False),
    ],
)
def test_what_asks_for_another_implementation_is_refused_with_a_reason(name, switch, value):
    with pytest.raises(NotImplementedError, match=f"{switch}={value}"):
        getattr(hu.optim, name)([torch.nn.Parameter(torch.zeros(3))], **{switch: value})


@pytest.mark.parametrize("switches", [{"fused": True}, {"foreach": False}, {"fused": None, "foreach": None}])
def test_what_asks_for_this_implementation_is_accepted(switches):
    hu.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], **switches)


def test_sgd_refuses_nesterov_without_momentum_as_torch_does():
    for options in ({"nesterov": True}, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}):
        for kind in (hu.optim.SGD, torch.optim.SGD):
            with pytest.raises(ValueError, match=r"[Nn]esterov"):
                kind([torch.nn.Parameter(torch.zeros(3))], lr=0.1, **options)
