"""What cannot be scaled is refused with a message that says what to do, and no parameter changes."""

import contextlib
import copy
import functools
import math
import operator

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.gradients import Amax, Constant, Dynamic, Measured, RisingFloor

from .exponents import WIDTH, assert_same, batch, clear, mean_square, mlp, plainly


@contextlib.contextmanager
def untouched(model):
    """No parameter of the model changes in here."""
    before = [p.detach().clone() for p in model.parameters()]
    yield
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))


def refused(model, error, match, **options):
    with untouched(model), pytest.raises(error, match=match):
        hu.AdaptiveGradScaler(model, **options)
    plain = [module for module in model.modules() if module._forward_hooks or "forward" in vars(module)]
    assert not plain


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_model(seed):
    compiled = torch.compile(mlp(), backend="eager")
    with pytest.raises(ValueError, match=r"is compiled.*compile it afterwards.*scaler\.backend"):
        hu.AdaptiveGradScaler(compiled)
    whole = mlp()
    whole.compile(backend="eager")
    refused(whole, ValueError, "the model is compiled")
    part = nn.Sequential(mlp(), nn.Linear(WIDTH, WIDTH))
    part[0].compile(backend="eager")
    refused(part, ValueError, "'0' is compiled")


def test_a_model_with_a_scaler(seed):
    model = mlp()
    first = hu.AdaptiveGradScaler(model)
    with untouched(model), pytest.raises(ValueError, match=r"has an AdaptiveGradScaler already.*detach\(\)"):
        hu.AdaptiveGradScaler(model)
    with pytest.raises(ValueError, match="already"):
        hu.AdaptiveGradScaler(nn.Sequential(model, nn.ReLU()))
    first.detach()
    hu.AdaptiveGradScaler(model)


def test_tensors_with_scales_or_components_of_their_own(seed):
    model = hu.multicomponent(mlp(), components=2)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is an MCTensor.*plain tensors"):
        hu.AdaptiveGradScaler(model)
    model = hu.scalify(mlp())
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is a ScaledTensor.*plain tensors"):
        hu.AdaptiveGradScaler(model)


def test_data_parallel(seed):
    model = mlp()
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        hu.AdaptiveGradScaler(nn.DataParallel(model))


@pytest.mark.parametrize(
    "given",
    [
        "a model",
        None,
        [],
        [mlp(), 3],
    ],
)
def test_no_module(given):
    with pytest.raises((TypeError, ValueError), match=r"give a torch\.nn\.Module"):
        hu.AdaptiveGradScaler(given)


OPTIONS = [
    ({"init_scale": 3.0}, r"init_scale is a power of two from 2\^-60 to 2\^60, got 3\.0"),
    ({"init_scale": 0.0}, "init_scale is a power of two"),
    ({"init_scale": -2.0}, "init_scale is a power of two"),
    ({"init_scale": math.inf}, "init_scale is a power of two"),
    ({"init_scale": math.nan}, "init_scale is a power of two"),
    ({"init_scale": 2.0**61}, "init_scale is a power of two"),
    ({"floor": 5, "ceiling": 4}, "floor <= ceiling.* got 5 and 4"),
    ({"floor": -61}, "-60 <= floor"),
    ({"ceiling": 61}, "ceiling <= 60"),
    ({"floor": 1.5}, "floor and ceiling are integers"),
    ({"interval": 0}, "interval is a number of iterations, at least 1, got 0"),
    ({"interval": 2.5}, "interval is a number of iterations"),
    ({"policy": "best"}, "unknown policy 'best'; the policies are amax, "),
    ({"format": "fp17"}, "fp17"),
]


@pytest.mark.parametrize(("options", "match"), OPTIONS, ids=lambda value: str(value)[:40])
def test_options(options, match, seed):
    refused(mlp(), ValueError, match, **options)


@pytest.mark.parametrize("policy", [3, Amax, None])
def test_no_policy(policy, seed):
    refused(mlp(), TypeError, "a policy is a name or a Policy, got ", policy=policy)


def test_no_format(seed):
    refused(mlp(), TypeError, "format", format=3)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Amax(headroom=-1), "headroom is an integer from 0 to 30, got -1"),
        (lambda: Amax(measurements=0), "measurements is an integer from 1 to 64, got 0"),
        (lambda: Amax(headroom=1.5), "headroom is an integer"),
        (lambda: Measured(headroom=31), "headroom is an integer from 0 to 30, got 31"),
        (lambda: Dynamic(growth_interval=0), "growth_interval is an integer from 1"),
        (lambda: RisingFloor(floors=((5, 1), (3, 2))), "by rising steps"),
        (lambda: RisingFloor(floors=((-1, 1),)), "by rising steps"),
    ],
)
def test_options_of_policies(make, match):
    with pytest.raises(ValueError, match=match):
        make()
    assert Constant() == Constant()


def ready(**options):
    model, x = mlp(), batch()
    scaler, opt = hu.AdaptiveGradScaler(model, **options), torch.optim.SGD(model.parameters(), lr=0.1)
    return model, scaler, opt, lambda: mean_square(model(x))


def test_nothing_scaled(seed):
    model, scaler, opt, loss = ready()
    loss().backward()
    for call in (scaler.step, scaler.unscale_):
        with untouched(model), pytest.raises(ValueError, match=r"no backward pass started at scaler\.scale\(loss\)"):
            call(opt)
    clear(model)
    scaler.scale(loss())
    with untouched(model), pytest.raises(ValueError, match="no backward pass started"):
        scaler.step(opt)


def test_update_before_step(seed):
    model, scaler, opt, loss = ready()
    with pytest.raises(ValueError, match=r"update\(\) before a step.*scaler\.step\(optimizer\)"):
        scaler.update()
    scaler.scale(loss()).backward()
    with untouched(model), pytest.raises(ValueError, match=r"update\(\) before a step"):
        scaler.update()
    scaler.step(opt)
    scaler.update()
    with pytest.raises(ValueError, match=r"update\(\) before a step"):
        scaler.update()


def test_the_order_of_calls(seed):
    model, scaler, opt, loss = ready()
    scaler.scale(loss()).backward()
    scaler.unscale_(opt)
    with untouched(model), pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(opt)
    scaler.step(opt)
    with untouched(model):
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(opt)
        with pytest.raises(RuntimeError, match=r"after step\(\)"):
            scaler.unscale_(opt)
    scaler.update()


def test_a_closure(seed):
    model, scaler, opt, loss = ready()
    scaler.scale(loss()).backward()
    with untouched(model), pytest.raises(ValueError, match=r"a closure would be called without the scale"):
        scaler.step(opt, closure=lambda: loss())
    with untouched(model), pytest.raises(ValueError, match=r"a closure would be called without the scale"):
        scaler.step(opt, lambda: loss())


def test_an_optimizer_without_gradients(seed):
    _, scaler, _, loss = ready()
    scaler.scale(loss()).backward()
    with pytest.raises(ValueError, match="no gradients"):
        scaler.step(torch.optim.SGD(mlp().parameters(), lr=0.1))


@pytest.mark.parametrize("new", [3.0, 0.0, math.inf, -4.0])
def test_a_new_scale(new, seed):
    model, scaler, opt, loss = ready()
    scaler.scale(loss()).backward()
    scaler.step(opt)
    with untouched(model), pytest.raises(ValueError, match="new_scale is a power of two"):
        scaler.update(new)
    assert scaler.get_scale() == 2.0**16


def test_scales_beyond_floor_and_ceiling(seed):
    model, scaler, opt, loss = ready(floor=-4, ceiling=20)
    scaler.scale(loss()).backward()
    scaler.step(opt)
    before = scaler.sites().to_dict()
    with pytest.raises(ValueError, match=r"new_scale is 2\^-5, beyond floor=-4"):
        scaler.update(2.0**-5)
    for exponent in (-5, 21, 2.0, 2.5, float("nan"), "3", None):
        with untouched(model), pytest.raises(ValueError, match=r"the (scale|exponent) of '0' is"):
            scaler.set_exponents({"global": 3, "0": exponent})
    assert scaler.sites().to_dict() == before


def saved_state():
    _, scaler, opt, loss = ready()
    scaler.scale(loss()).backward()
    scaler.step(opt)
    scaler.update()
    return by_name(scaler.state_dict())


def by_name(state):
    """A state whose sites are in a dict."""
    return {**state, "sites": dict(state["sites"])}


def saved(state):
    """The state as a scaler gives it."""
    sites = state.get("sites")
    return {**state, "sites": tuple(sites.items())} if isinstance(sites, dict) else state


def test_an_empty_state(seed):
    _, scaler, _, _ = ready()
    with pytest.raises(ValueError, match=r"the state_dict is empty.*enabled=False"):
        scaler.load_state_dict({})


ABSENT = object()
PLACES = {"state": [], "site": ["sites", "0"], "global": ["sites", "global"]}
DAMAGED = [
    ("state", "scale", [ABSENT, None, "8", "65536.0", 10**400, 3.0, 0.0, -4.0, math.nan, 2.0**61, [4.0], 2.0**17]),
    ("state", "_growth_tracker", [ABSENT, None, math.nan]),
    ("state", "sites", [ABSENT, None, [], [1, 2], {}, {"0": {}}]),
    ("state", "progress", [ABSENT, None, 3, [1, 1, True, 0], [0] * 6, {*range(5)}, [1, math.nan, True, 0, 0]]),
    ("site", "memory", [ABSENT, None, [], [0, 0, None], [0, 0.5]]),
    ("site", "exponent", [ABSENT, None, "3", 3.0, math.nan]),
    ("global", "exponent", [ABSENT, 17]),
    ("site", "merged", [ABSENT, True, 3]),
    ("site", "measured", [ABSENT, None, "no"]),
    ("global", "reference", [ABSENT, None, 3, [], [0], [0.5, 0], [None, None]]),
    ("site", "overflows", [ABSENT, None, 1.5]),
    ("site", "history", [ABSENT, None, {}, [3.0], [{"received": None}]]),
    ("global", "history", [""]),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("place", "name", "value"), [(place, name, value) for place, name, values in DAMAGED for value in values]
)
@pytest.mark.parametrize("known", [True, False])
def test_a_damaged_state(place, name, value, known, seed):
    _, scaler, _, loss = ready()
    if known:
        scaler.scale(loss())
    before, whole = copy.deepcopy(scaler.state_dict()), saved_state()
    state = copy.deepcopy(whole)
    home = functools.reduce(operator.getitem, PLACES[place], state)
    home.pop(name) if value is ABSENT else home.update({name: value})
    part = "the state_dict" if place == "state" else f"site '{PLACES[place][-1]}' of the state_dict"
    with pytest.raises(ValueError, match=rf"{part} is damaged \(|'scale' of the state_dict is 2\^"):
        scaler.load_state_dict(saved(state))
    assert scaler.state_dict() == before
    scaler.load_state_dict(saved(whole))
    assert by_name(scaler.state_dict()) == whole


def test_a_state_of_another_version_names_what_to_do(seed):
    _, scaler, _, _ = ready()
    with pytest.raises(
        ValueError, match=r"has 7 numbers, not 5.* in this version of halfulp, or start anew.*init_scale="
    ):
        scaler.load_state_dict({**saved_state(), "progress": [3, 0, False, 0, 0, 0, 0]})


@pytest.mark.parametrize("state", [3, ["scale"], "scale"])
def test_no_state(state, seed):
    _, scaler, _, _ = ready()
    with pytest.raises(ValueError, match=r"the state_dict is damaged .*load what"):
        scaler.load_state_dict(state)


@pytest.mark.parametrize("place", ["site", "global"])
def test_a_site_that_is_no_dict(place, seed):
    _, scaler, _, _ = ready()
    state = saved_state()
    state["sites"][PLACES[place][-1]] = 3
    with pytest.raises(ValueError, match=rf"site '{PLACES[place][-1]}' of the state_dict is damaged"):
        scaler.load_state_dict(saved(state))


@pytest.mark.parametrize("outputs", [3.0, None])
def test_no_loss(outputs, seed):
    _, scaler, _, _ = ready()
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable"):
        scaler.scale(outputs)


def test_float16_parameters_with_float16_gradients(seed):
    model, x = mlp().half(), batch().half()
    scaler = hu.AdaptiveGradScaler(model)
    with untouched(model), pytest.raises(TypeError, match=r"call halfulp\.float32_gradients\(model\) before"):
        scaler.scale(mean_square(model(x).float())).backward()


class Keeping(nn.Module):
    """Keeps what it made in an attribute."""

    def __init__(self, keep):
        super().__init__()
        self.first, self.last, self.keep = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), keep

    def forward(self, x):
        h = self.first(x)
        self.kept = self.keep(h)
        return self.last(h)


def test_a_tensor_that_left_by_an_attribute(seed):
    model, x = Keeping(lambda h: h.tanh()), batch()
    scaler = hu.AdaptiveGradScaler(model)
    with untouched(model), pytest.raises(ValueError, match=r"not part of the model's output.*return it from forward"):
        scaler.scale(mean_square(model(x)) + mean_square(model.kept))
    scaler.scale(mean_square(model(x))).backward()
    number = Keeping(lambda h: h.square().mean())
    (mean_square(number(x)) + number.kept).backward()
    wanted = [p.grad.clone() for p in number.parameters()]
    clear(number)
    scaler = hu.AdaptiveGradScaler(number)
    mean_square(number(x))
    for key, site in enumerate(scaler._controller.sites.values()):
        site.exponent = 3 * key
    scaler.scale(mean_square(number(x)) + number.kept).backward()
    assert all(torch.equal(p.grad / scaler.get_scale(), g) for p, g in zip(number.parameters(), wanted))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("part", [lambda: nn.Linear(WIDTH, WIDTH), lambda: mlp(2)], ids=["a layer", "with parts"])
def test_a_scripted_part(part, seed):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(part()))
    with untouched(model), pytest.raises(ValueError, match=r"'1' is a script module.*give the plain Python module"):
        hu.AdaptiveGradScaler(model)


def test_a_function_that_writes_into_its_argument(seed):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(Doubled.apply(self.first(x)))

    model, x = Model(), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    with untouched(model), pytest.raises(NotImplementedError, match=r"writes into its argument.*on a clone"):
        scaler.scale(mean_square(model(x))).backward()
    scaler.detach()
    assert_same(plainly(seed, lambda: mean_square(model(x)), model), wanted)
