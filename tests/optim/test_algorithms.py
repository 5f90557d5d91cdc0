"""The optimizers beside torch.optim's: the same signature, the same numbers."""

import inspect
import itertools

import pytest
import torch

import halfulp as hu

from .laws import narrow_updates

STEPS = 50
SGD_OPTIONS = [
    {"momentum": m, "dampening": d, "weight_decay": w, "nesterov": n, "maximize": x}
    for m, d, w, n, x in itertools.product((0, 0.9), (0, 0.3), (0, 0.1), (False, True), (False, True))
    if (m or not d) and not (n and (d or not m))
]
ADAM_OPTIONS = [
    {"weight_decay": w, "amsgrad": a, "maximize": x, "betas": b}
    for w, a, x, b in itertools.product((0, 0.1), (False, True), (False, True), ((0.9, 0.999), (0.0, 0.9)))
]


def _name(options):
    return "-".join(f"{key}={value}" for key, value in options.items() if value) or "plain"


def _train(kind, start, gradients, each_step=lambda parameters: None, **options):
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    for parameter in parameters:
        parameter.grad_dtype = None
    optimizer = kind(parameters, **options)
    for step in gradients:
        for parameter, gradient in zip(parameters, step):
            parameter.grad = gradient.clone()
        optimizer.step()
        each_step(parameters)
    return parameters, optimizer


def _problem(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(37, 5), (1,), ()]
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)]
    # Adam's first step divides the sum of gradient and decay by its own size: they must not cancel to their rounding.
    gradients[0] = [gradient + 0.5 * gradient.sign() for gradient in gradients[0]]
    return start, gradients


def _assert_close(mine, torchs, lr):
    for a, b in zip(mine, torchs):
        # Both are float32 chains of STEPS steps; their sums are ordered differently.
        torch.testing.assert_close(a, b, rtol=STEPS * 2**-22, atol=STEPS * lr * 2**-20)


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=_name)
def test_sgd_agrees_with_torch(seed, options):
    problem = _problem(seed)
    mine, _ = _train(hu.optim.SGD, *problem, lr=0.01, **options)
    theirs, _ = _train(torch.optim.SGD, *problem, lr=0.01, **options)
    _assert_close(mine, theirs, 0.01 * 100)


@pytest.mark.parametrize("options", ADAM_OPTIONS, ids=_name)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_agrees_with_torch(seed, name, options):
    problem = _problem(seed)
    mine, _ = _train(getattr(hu.optim, name), *problem, lr=0.01, **options)
    theirs, _ = _train(getattr(torch.optim, name), *problem, lr=0.01, **options)
    _assert_close(mine, theirs, 0.01)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Lion"])
def test_split_is_float32_bit_for_bit(seed, name):
    start, gradients = _problem(seed, torch.bfloat16)
    options = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    kind = getattr(hu.optim, name)
    split, optimizer = _train(kind, start, gradients, weight_update="split", state_dtype=torch.float32, **options)
    whole, other = _train(kind, [tensor.float() for tensor in start], gradients, **options)
    for a, b in zip(split, whole):
        plan = optimizer._plans[a]
        assert torch.equal(plan.spec.update.read(plan.spec.store, plan.parts), b)
        for key, value in other.state[b].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(optimizer.state[a][key], value), key


@pytest.mark.parametrize("update", narrow_updates(but=["nearest", "kahan-literal"]))
def test_a_bfloat16_optimizer_stays_near_float32(seed, update):
    start, gradients = _problem(seed, torch.bfloat16)
    options = {"lr": 1e-3, "weight_decay": 0.1, "state_dtype": torch.float32}
    narrow, optimizer = _train(hu.optim.AdamW, start, gradients, weight_update=update_of(update), **options)
    largest = [tensor.float().abs() for tensor in start]

    def grow(parameters):
        for top, parameter in zip(largest, parameters):
            torch.maximum(top, parameter.detach().abs(), out=top)

    whole, _ = _train(hu.optim.AdamW, [tensor.float() for tensor in start], gradients, grow, **options)
    noisy = update in ("stochastic", "feedback")
    for a, b, top in zip(narrow, whole, largest):
        plan = optimizer._plans[a]
        decoded = plan.spec.update.read(plan.spec.store, plan.parts)
        # One unit in the last place of bfloat16 per step, at random, or of what the companions hold: a unit of the
        # largest that the weight was on its way, for it may end near 0.
        ulp = top.clamp(min=2.0**-20) * (2**-7 if noisy else 2**-14)
        assert ((decoded - b).abs() <= ulp * (5 * STEPS**0.5 if noisy else STEPS)).all()


def update_of(name):
    from .laws import UPDATES

    return UPDATES[name]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
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


def _is_rule(given):
    return isinstance(given, type) and issubclass(given, hu.optim.Optimizer) and given is not hu.optim.Optimizer


RULES = sorted(name for name in dir(hu.optim) if _is_rule(getattr(hu.optim, name)))
# A value of every option that is no optimizer's default.
OTHER = {
    "lr": 0.25,
    "betas": (0.75, 0.5),
    "eps": 0.125,
    "weight_decay": 0.0625,
    "momentum": 0.375,
    "dampening": 0.5,
    "amsgrad": True,
    "nesterov": True,
    "maximize": True,
    "decoupled_weight_decay": True,
    "weight_update": "kahan",
    "param_dtype": torch.bfloat16,
    "state_dtype": torch.float32,
    "format": "bf16",
    "seed": 17,
    "report_interval": 3,
}


@pytest.mark.parametrize("name", RULES)
def test_every_option_arrives_under_its_name(name, monkeypatch):
    kind = getattr(hu.optim, name)
    parameters = inspect.signature(kind).parameters
    switches = ("foreach", "capturable", "differentiable", "fused")
    options = [key for key in parameters if key not in ("params", *switches)]
    assert set(options) <= OTHER.keys()
    seen = {}

    def begun(self, params, defaults, **given):
        assert not seen.keys() & (defaults.keys() | given.keys())
        seen.update(defaults | given)

    monkeypatch.setattr(hu.optim.Optimizer, "__init__", begun)
    for option in options:
        assert parameters[option].default != OTHER[option]
        needed = {"momentum": 0.9} if option == "nesterov" else {}
        seen.clear()
        kind([torch.nn.Parameter(torch.zeros(1))], **needed, **{option: OTHER[option]})
        assert seen[option] == OTHER[option]
        unchanged = {key: parameters[key].default for key in options if key not in (option, *needed)}
        if issubclass(kind, hu.optim.AdamW):
            unchanged["decoupled_weight_decay"] = True
        assert {key: seen[key] for key in unchanged} == unchanged


OWN = {
    "weight_update": None,
    "param_dtype": None,
    "state_dtype": None,
    "format": None,
    "seed": 0,
    "report_interval": 50,
}


@pytest.mark.parametrize("name", RULES)
def test_signatures_say_every_option(name):
    """torch's positional parameters in torch's order, then its keyword-only ones, then the same six of Optimizer."""
    mine = inspect.signature(getattr(hu.optim, name)).parameters
    assert not [key for key, value in mine.items() if value.kind in (value.VAR_KEYWORD, value.VAR_POSITIONAL)]
    assert all(value.annotation is not value.empty for value in mine.values())
    assert list(mine)[-len(OWN) :] == list(OWN)
    assert all(mine[key].default == value and mine[key].kind is mine[key].KEYWORD_ONLY for key, value in OWN.items())
    if hasattr(torch.optim, name):
        torchs = inspect.signature(getattr(torch.optim, name)).parameters
        assert list(mine)[: -len(OWN)] == list(torchs)
        for key, value in torchs.items():
            assert (mine[key].kind, mine[key].default) == (value.kind, value.default), key
    for option, value in OWN.items():
        assert inspect.signature(hu.optim.Optimizer).parameters[option].default == value
    with pytest.raises(TypeError, match="every"):
        getattr(hu.optim, name)([torch.nn.Parameter(torch.zeros(1))], every=3)
