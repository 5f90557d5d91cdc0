"""Optimizers on scaled parameters: float32's steps, one set of bits, no value out of range, states in a third."""

import io
import itertools
import math
import warnings

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.kernels import engine, same_bits
from halfulp.optim._storage import PAYLOAD_STORE_BY_DTYPE
from halfulp.optim.states._codec import TensorScaleCodec
from halfulp.optim.step._scales import PAYLOAD_BINADE_WINDOW_BY_DTYPE, fit_weight_scale
from halfulp.scaled import ScaledTensor

from ... import samples

HALF, E4M3, E5M2 = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
RULES = {
    "sgd": (hu.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (hu.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "lion": (hu.optim.Lion, {"lr": 1e-2, "weight_decay": 0.1}),
}


@pytest.fixture(autouse=True)
def _reference():
    """Compiling costs seconds a kind: only the tests that ask for it do."""
    with engine("reference"):
        yield


def _parameter(values, dtype=HALF):
    return torch.nn.Parameter(ScaledTensor.encode(values, dtype))


def _make(rule, parameters, **options):
    kind, given = RULES[rule]
    return kind(parameters, **{"report_interval": 0, **given, **options})


def _step(optimizer, gradients, dtype=HALF):
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients):
        parameter.grad = ScaledTensor.encode(gradient, dtype)
    optimizer.step()


def _held(optimizer):
    found = []
    for parameter in optimizer.param_groups[0]["params"]:
        found += [parameter.payload.detach().clone(), parameter.scale.clone()]
        found += [x.clone() for _, x in sorted(optimizer.state[parameter].items()) if isinstance(x, torch.Tensor)]
    return found


def _same(a, b):
    return len(a) == len(b) and all(map(same_bits, a, b))


@pytest.mark.parametrize("rule", RULES)
def test_a_float32_payload_makes_float32s_steps_whatever_its_scale(seed, rule):
    value = torch.randn(5, 7)
    plain = torch.nn.Parameter(value.clone())
    scaled = torch.nn.Parameter(ScaledTensor(value * 2.0**-20, 2.0**20))
    own, other = _make(rule, [scaled]), _make(rule, [plain])
    for _ in range(5):
        plain.grad = torch.randn(5, 7) * 1e-3
        scaled.grad = ScaledTensor(plain.grad * 2.0**30, 2.0**-30)
        own.step(), other.step()
    assert same_bits(scaled.detach().decode(), plain.detach())


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1e4])
def test_float16_states_follow_float32_under_its_own_eps(seed, size):
    value = torch.randn(40, 8)
    plain, scaled = torch.nn.Parameter(value.clone()), _parameter(value, torch.float32)
    other = torch.optim.AdamW([plain], lr=1e-2, eps=1e-8)
    own = hu.optim.AdamW([scaled], lr=1e-2, eps=1e-8, state_dtype=HALF, report_interval=0)
    for _ in range(10):
        plain.grad = torch.randn(40, 8) * size
        scaled.grad = ScaledTensor.encode(plain.grad, torch.float32)
        own.step(), other.step()
    moved = (plain.detach() - value).norm()
    assert (scaled.detach().decode() - plain.detach()).norm() <= 1e-2 * moved


@pytest.mark.parametrize(
    ("rule", "update", "dtype", "gradient", "states"),
    [
        ("adamw", "stochastic", HALF, HALF, HALF),
        ("adamw", "kahan", HALF, E5M2, "fp8"),
        ("sgd", "nearest", E4M3, E5M2, HALF),
        ("lion", "stochastic", E5M2, torch.bfloat16, E5M2),
    ],
)
def test_the_compiled_step_is_the_reference(seed, rule, update, dtype, gradient, states):
    shapes, found = ((9, 70), (3,), (0, 2)), []
    values = [[torch.randn(shape) * 2.0**k for shape in shapes] for k in (-9, -12, -3, -30)]
    for chosen in ("reference", "llvm"):
        parameters = [_parameter(value, dtype) for value in values[0]]
        optimizer = _make(rule, parameters, weight_update=update, state_dtype=states, seed=seed, report_interval=2)
        with engine(chosen):
            for gradients in values[1:]:
                _step(optimizer, gradients, gradient)
        found.append(_held(optimizer))
    assert _same(*found)


@pytest.mark.parametrize("update", ["nearest", "stochastic", "kahan", "kahan-stochastic", "master"])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, E4M3, E5M2])
def test_every_payload_moves_as_float32_does(seed, update, dtype):
    value, step = torch.randn(64, 8), torch.randn(64, 8)
    parameter = _parameter(value, dtype)
    start = parameter.detach().decode()
    _step(hu.optim.SGD([parameter], lr=1.0, weight_update=update, seed=seed), [-step], torch.float32)
    error = (parameter.detach().decode() - (start + step)).abs()
    assert (error <= torch.finfo(dtype).eps * (start + step).abs() + 2.0**-8 * torch.finfo(dtype).eps * 8).all()


@pytest.mark.parametrize("dtype", [HALF, E4M3, E5M2])
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e9, 1e30])
def test_a_weight_that_leaves_the_range_takes_its_scale_along_in_the_same_step(seed, dtype, factor):
    target = torch.randn(30) * factor
    for update in ("nearest", "kahan"):
        parameter = _parameter(torch.zeros(30) if update == "nearest" else torch.randn(30), dtype)
        start = parameter.detach().decode()
        _step(hu.optim.SGD([parameter], lr=1.0, weight_update=update), [-target], torch.float32)
        wanted = start + target
        error = (parameter.detach().decode() - wanted).abs().max()
        assert error <= torch.finfo(dtype).eps * wanted.abs().max()
        assert parameter.payload.float().isfinite().all()


def choose_weight_scale(dtype, present, largest):
    return fit_weight_scale(dtype, *map(np.float64, (present, largest, 0.0)))[0]


def test_a_scale_is_kept_inside_its_window_and_powers_of_two_are_exact(seed):
    for dtype, (low, high, target) in PAYLOAD_BINADE_WINDOW_BY_DTYPE.items():
        assert torch.finfo(dtype).max >= 2.0 ** (high + 1) * 0.99
        for binade in range(low, high + 1):
            assert choose_weight_scale(dtype, 2.0**-5, 1.5 * 2.0 ** (binade - 5)) == 2.0**-5
        for binade in (low - 1, high + 1, low - 60):
            assert choose_weight_scale(dtype, 1.0, 1.5 * 2.0**binade) == 2.0 ** (binade - target)
        assert choose_weight_scale(dtype, 8.0, 0.0) == 8.0


def test_zero_gradients_leave_zeros(seed):
    value = torch.randn(20)
    parameter = _parameter(value)
    before = parameter.payload.detach().clone()
    optimizer = _make("adamw", [parameter], weight_decay=0.0, state_dtype="fp8")
    for _ in range(3):
        _step(optimizer, [torch.zeros(20)])
    assert same_bits(parameter.payload.detach(), before)
    assert not optimizer.state[parameter]["exp_avg"].float().any()
    _step(optimizer, [torch.ones(20)])
    assert (parameter.detach().decode() < value).all()


@pytest.mark.parametrize("dtype", [HALF, E4M3])
@pytest.mark.parametrize("states", [HALF, "fp8"])
def test_a_nan_gradient_is_a_nan_there_and_nothing_elsewhere(seed, dtype, states):
    found = []
    for broken in (0.0, float("nan")):
        torch.manual_seed(seed)
        parameter, gradient = _parameter(torch.randn(20), dtype), torch.randn(20)
        gradient[0], gradient[4] = 0.0, broken
        optimizer = _make("adamw", [parameter], state_dtype=states)
        _step(optimizer, [gradient])
        found.append([parameter.detach().decode(), optimizer.state[parameter]["exp_avg"].float()])
    others = torch.arange(20) != 4
    for whole, holed in zip(*found):
        assert holed[4].isnan()
        assert same_bits(whole[others], holed[others])


def test_moments_of_decaying_gradients_stay_finite_until_float32_holds_none(seed):
    for states in (HALF, "fp8"):
        parameter = _parameter(torch.randn(16))
        optimizer = _make("adamw", [parameter], state_dtype=states, betas=(0.5, 0.9))
        for step in range(200):
            _step(optimizer, [torch.ones(16) * 0.4**step])
        state = optimizer.state[parameter]
        assert all(x.float().isfinite().all() for x in _held(optimizer))
        assert state["exp_avg_sq"].float().max() >= torch.finfo(state["exp_avg_sq"].dtype).max / 2.1


def test_roots_of_second_moments_are_right_on_average(seed):
    parameter, steps = _parameter(torch.zeros(4000)), 60
    optimizer = hu.optim.AdamW([parameter], betas=(0.9, 0.95), state_dtype="fp8", seed=seed, report_interval=0)
    for _ in range(steps):
        _step(optimizer, [torch.full((4000,), 0.37)], torch.float32)
    state = optimizer.state[parameter]
    value = (state["exp_avg_sq"].double() * state["exp_avg_sq_scale"]) ** 2
    wanted = (1 - 0.95**steps) * 0.37**2
    assert abs(value.mean().item() / wanted - 1) < 6 * value.std().item() / wanted / 4000**0.5 + 1e-3


@pytest.mark.parametrize("states", [HALF, "fp8"])
def test_a_resumed_run_is_an_uninterrupted_one_and_its_file_loads_with_weights_only(seed, states):
    gradients = [[torch.randn(6, 8) * 2.0**-k] for k in range(6)]
    parameter = _parameter(torch.randn(6, 8))
    optimizer = _make("adamw", [parameter], state_dtype=states, weight_update="kahan", seed=seed)
    for given in gradients[:3]:
        _step(optimizer, given)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "parameter": parameter}, file)
    for given in gradients[3:]:
        _step(optimizer, given)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again = _make("adamw", [saved["parameter"]], state_dtype=states, weight_update="kahan")
    again.load_state_dict(saved["optimizer"])
    for given in gradients[3:]:
        _step(again, given)
    assert _same(_held(optimizer), _held(again))


def test_states_of_other_kinds_are_loaded_by_value(seed):
    gradient = [torch.randn(6, 8)]
    first = _make("adamw", [_parameter(torch.randn(6, 8))], state_dtype=torch.float32)
    _step(first, gradient)
    wanted = first.state_dict()["state"][0]
    second = _make("adamw", [_parameter(torch.randn(6, 8))], state_dtype=HALF)
    second.load_state_dict(first.state_dict())
    (plan,) = second._plans.values()
    for codec, tensors, name in zip(plan.spec.codecs, plan.states, ("exp_avg", "exp_avg_sq")):
        torch.testing.assert_close(codec.decode(tensors), wanted[name], rtol=2e-3, atol=0)
    with pytest.raises(ValueError, match="was saved as 'exp_avg_scale'"):
        first.load_state_dict(second.state_dict())


def test_float32_weights_out_and_in(seed):
    model = torch.nn.Linear(8, 4, bias=False)
    model.weight = _parameter(model.weight.detach())
    optimizer = hu.optim.SGD(model.named_parameters(), lr=1e-3, weight_update="master")
    model.weight.grad = ScaledTensor.encode(torch.randn(4, 8))
    optimizer.step()
    weights = optimizer.float32_state_dict(model)
    assert type(weights["weight"]) is torch.Tensor
    torch.testing.assert_close(weights["weight"], model.weight.detach().decode(), rtol=2.0**-11, atol=1e-7)
    larger = {name: value * 1e7 for name, value in weights.items()}
    optimizer.load_float32_state_dict(model, larger)
    assert same_bits(optimizer.float32_state_dict(model)["weight"], larger["weight"])
    assert model.weight.payload.isfinite().all()


def test_parameters_and_states_take_half_of_float32s_memory_and_fp8_states_a_third():
    for states, most in ((HALF, 6.1), ("fp8", 4.1)):
        parameter = _parameter(torch.randn(100, 100))
        optimizer = _make("adamw", [parameter], state_dtype=states)
        _step(optimizer, [torch.randn(100, 100)])
        assert sum(x.numel() * x.element_size() for x in _held(optimizer)) <= most * 10_000
        assert optimizer.bytes_per_parameter() <= most + 2


def test_the_meter_sees_what_nearest_loses_and_kahan_keeps(seed):
    found = {}
    for update in ("nearest", "kahan"):
        parameter = _parameter(torch.ones(64) + torch.rand(64))
        optimizer = hu.optim.SGD([parameter], lr=1.0, weight_update=update, report_interval=1)
        for _ in range(3):
            _step(optimizer, [torch.full((64,), 2.0**-14)])
        found[update] = optimizer.report().cancelled
        assert "lost updates" in repr(optimizer)
    assert found == {"nearest": 1.0, "kahan": 0.0}


def test_a_plain_gradient_and_a_transposed_one_are_what_they_are(seed):
    value, gradient = torch.randn(3, 5), torch.randn(5, 3)
    results = []
    for given in (gradient.t(), ScaledTensor(gradient * 4, 0.25).t(), ScaledTensor(gradient.t().contiguous(), 1.0)):
        parameter = _parameter(value, torch.float32)
        optimizer = hu.optim.SGD([parameter], lr=0.5)
        parameter.grad = given
        optimizer.step()
        results.append(parameter.detach().decode())
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_update": "split8"}, "use 'stochastic'"),
        ({"weight_update": "split"}, "use 'stochastic'"),
        ({"weight_update": "feedback"}, "use 'stochastic'"),
        ({"param_dtype": torch.bfloat16}, "cast_"),
        ({"format": "e4m3fn"}, "leave format out"),
        ({"state_dtype": "fp9"}, "allowed are"),
    ],
)
def test_what_has_no_meaning_for_a_scaled_parameter_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        hu.optim.AdamW([_parameter(torch.randn(4))], **options)


def test_wrap_refuses_scaled_parameters_and_nearest_fp8_states_are_refused():
    with pytest.raises(ValueError, match="on it unwrapped"):
        hu.optim.wrap(torch.optim.AdamW, [_parameter(torch.randn(4))])
    with pytest.raises(ValueError, match="stall"):
        hu.optim.State("fp8", "nearest")
    with pytest.raises(ValueError, match="scale the model"):
        hu.optim.AdamW([torch.nn.Parameter(torch.zeros(4))], state_dtype="fp8")


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam"])
@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_optimizers_run_unmodified_on_float32_payloads(seed, name, foreach):
    kind, options = getattr(torch.optim, name), {"momentum": 0.9} if name == "SGD" else {}
    value = torch.randn(6, 8)
    plain, scaled = torch.nn.Parameter(value.clone()), _parameter(value, torch.float32)
    optimizers = [kind([p], lr=1e-2, foreach=foreach, **options) for p in (plain, scaled)]
    for _ in range(6):
        plain.grad = torch.randn(6, 8) * 1e-3
        scaled.grad = ScaledTensor.encode(plain.grad, torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # operators without a rule are counted elsewhere
            for optimizer in optimizers:
                optimizer.step()
    moved = (plain.detach() - value).norm()
    assert (scaled.detach().decode() - plain.detach()).norm() <= 1e-4 * moved
    assert (scaled.detach().decode() - plain.detach()).norm() <= 1e-6 * plain.norm()


# That updates of moments in float16 are lost is told, and tested elsewhere.
@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:.*moves a ScaledTensor of:RuntimeWarning")
@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax"])
@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_optimizers_do_not_divide_by_what_float16_cannot_hold(seed, name, foreach):
    value, sizes = torch.randn(64), torch.logspace(-12, 0, 64)
    plain, scaled = torch.nn.Parameter(value.clone()), _parameter(value, torch.float16)
    optimizers = [getattr(torch.optim, name)([p], lr=1e-2, foreach=foreach) for p in (plain, scaled)]
    direction = torch.randn(64)
    for step in range(60):
        plain.grad = direction * sizes * 0.9**step
        scaled.grad = ScaledTensor.encode(plain.grad, torch.float16)
        for optimizer in optimizers:
            optimizer.step()
    moved = scaled.detach().decode() - value
    assert moved.isfinite().all()
    # Without the squares of small elements a step is a thousand times as large.
    assert moved.abs().max() <= 8 * (plain.detach() - value).abs().max() + 1e-2


@pytest.mark.parametrize("shape", [(16, 16), (8, 2)])
@pytest.mark.parametrize("storage", [torch.float32, torch.float16])
def test_torchs_muon_multiplies_matrices_again_and_again(seed, storage, shape):
    value, gradient = torch.randn(shape), torch.randn(shape) * 1e-6
    plain, scaled = torch.nn.Parameter(value.clone()), _parameter(value, storage)
    plain.grad, scaled.grad = gradient, ScaledTensor.encode(gradient, storage)
    for p in (plain, scaled):
        torch.optim.Muon([p], lr=1e-2, weight_decay=0.0).step()
    moved, wanted = scaled.detach().decode() - value, plain.detach() - value
    # torch multiplies in bfloat16.
    assert (moved - wanted).norm() <= 0.3 * wanted.norm() + 2e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("storage", [E4M3, E5M2])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta"])
def test_torchs_optimizers_stay_finite_on_eight_bit_parameters(seed, name, storage):
    """Squares have no room beside eight-bit weights: what is made like a parameter is float16."""
    layers = torch.nn.Linear(8, 24), torch.nn.ReLU(), torch.nn.Linear(24, 4)
    model = hu.scalify(torch.nn.Sequential(*layers), storage)
    x, y = torch.randn(32, 8), torch.randint(4, (32,))
    optimizer, losses = getattr(torch.optim, name)(model.parameters(), lr=3e-2), []
    for _ in range(12):
        losses.append(torch.nn.functional.cross_entropy(model(x), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(loss.detach().decode().isfinite() for loss in losses)
    if name in ("Adam", "AdamW", "RMSprop"):
        assert losses[-1].item() < 0.9 * losses[0].item()
    states = [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, ScaledTensor) and v.dim()
    ]
    assert {v.payload.dtype for v in states} <= {HALF}


STATES = [dtype for dtype in PAYLOAD_STORE_BY_DTYPE if dtype not in (torch.float32, torch.bfloat16)]
GREATEST = float(np.finfo(np.float32).max)


def _weight_scale(dtype, scale, largest, stored):
    """The new scale of a weight, by Python's floats, and the factor that brings the payload there."""
    low, high, target = PAYLOAD_BINADE_WINDOW_BY_DTYPE[dtype]
    binade = math.frexp(largest)[1] - 1
    if largest == 0 or low <= binade - (math.frexp(scale)[1] - 1) <= high:
        return scale, 1.0
    wanted = math.ldexp(1.0, min(max(binade - target, -126), 126))
    if wanted == scale or stored == 0:
        return wanted, 1.0
    reached = max(wanted, math.ldexp(scale, max(math.frexp(stored)[1], 0) - 120))
    if torch.finfo(dtype).max > 2.0**120:
        reached = min(reached, math.ldexp(scale, 126))
    reached = min(reached, 2.0**126)
    return reached, max(scale / reached, 2.0**-126)


def _magnitudes(seed):
    """Zero, the ends of float32's range, both sides of powers of two, and some numbers between."""
    powers = [
        2.0**k for k in (-149, -148, -140, -127, -126, -125, -60, -24, -1, 0, 1, 14, 15, 16, 60, 118, 119, 126, 127)
    ]
    sides = [float(np.nextafter(np.float32(p), np.float32(to))) for p in powers for to in (0.0, np.inf)]
    drawn = np.exp2(np.random.default_rng(seed).uniform(-149, 127, 12)).astype(np.float32).tolist()
    return [0.0, *powers, *sides, *drawn, GREATEST]


@pytest.mark.parametrize("library", [np.array, torch.tensor])
@pytest.mark.parametrize("dtype", PAYLOAD_BINADE_WINDOW_BY_DTYPE)
def test_the_scale_of_a_weight_and_the_factor_to_it_are_pythons(seed, dtype, library):
    most, magnitudes = torch.finfo(dtype).max, _magnitudes(seed)
    stored = [x for x in magnitudes[::3] if x <= most] + [most]
    scales = [2.0**k for k in (-126, -125, -63, -1, 0, 5, 90, 126, 127)]
    pairs = itertools.product(scales, magnitudes)
    every = 1 if samples.IS_WHOLE else 4  # neighbouring pairs take the next ones
    given = [(*pair, x) for k, pair in enumerate(pairs) for x in stored[k % every :: every]]
    wanted = [_weight_scale(dtype, *numbers) for numbers in given]
    found = fit_weight_scale(dtype, *map(library, np.array(given).T))
    assert [*zip(*(x.tolist() for x in found))] == wanted
    assert all(2.0**-126 <= scale <= 2.0**127 for scale, _ in wanted)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("dtype", STATES)
def test_the_scale_of_a_state_is_the_least_that_it_fits_under(seed, dtype, squared):
    codec = TensorScaleCodec(PAYLOAD_STORE_BY_DTYPE[dtype], stochastic=True, is_second_moment=squared)
    most = torch.finfo(dtype).max
    edges = [math.ldexp(most, k) for k in range(-160, 112)]
    sides = [float(np.nextafter(np.float32(x), np.float32(to))) for x in edges for to in (0.0, np.inf)]
    given = (*_magnitudes(seed), *map(float, np.float32(edges)), *sides)
    for largest, scale in zip(given, codec.fit_scale(np.array(given)).tolist()):
        assert math.frexp(scale)[0] == 0.5
        assert 2.0**-126 <= scale <= 2.0**126
        if largest:
            assert largest <= scale * most or scale == 2.0**126, largest
            assert largest > scale / 2 * most or scale == 2.0**-126, largest
    assert (
        codec.fit_scale(torch.tensor(given, dtype=torch.float64)).tolist() == codec.fit_scale(np.array(given)).tolist()
    )
    assert codec.fit_scale(np.zeros(1)) == 1
