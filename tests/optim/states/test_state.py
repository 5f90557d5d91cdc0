"""Optimizer states: right on average in bfloat16, within three hundredths of an update in 8 bits, at any scale."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import run_trace_on_tensors
from halfulp.kernels._device_function import ElementTraceBuilder
from halfulp.optim.states._int8_blocks import Int8Blocks

from ...laws.optim.cases import CODECS, RULES, build, differing, snapshot


def _adamw(elements, state_dtype, **options):
    """AdamW on float32 zeros at rate 1, so that a weight is its update and only the states are narrow."""
    parameter = torch.nn.Parameter(torch.zeros(elements))
    given = {"lr": 1.0, "weight_decay": 0.0, "report_interval": 0, "state_dtype": state_dtype, **options}
    return parameter, hu.optim.AdamW([parameter], **given)


@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.999, 0.9999])
def test_the_second_moment_follows_a_tenfold_drop(seed, beta2):
    """Stored sqrt(v), in the mean over elements, within 0.1% of float32's: before, amid and after the fall.

    The mean square is what stochastic rounding keeps; the mean of roots lies lower by an eighth of v's variance.
    """
    elements = 16_384
    steps = {0.9: 100, 0.99: 600}.get(beta2, 1500)
    held = [_adamw(elements, dtype, betas=(0.9, beta2), lr=1e-6) for dtype in (torch.bfloat16, torch.float32)]
    for step in range(2 * steps):
        gradient = torch.randn(elements) * (1.0 if step < steps else 0.1)
        for parameter, optimizer in held:
            parameter.grad = gradient
            optimizer.step()
        if step in (steps - 1, steps + steps // 4, 2 * steps - 1):
            stored, exact = (optimizer.state[p]["exp_avg_sq"].double() for p, optimizer in held)
            assert abs(float((stored.mean() / exact.mean()).sqrt()) - 1) <= 0.001


def _update_error(magnitude, eps, state_dtype="8bit", steps=20, elements=8192):
    """|u - u64| / |u64| of the last update, over all elements, against AdamW in float64 on the same gradients."""
    parameter, optimizer = _adamw(elements, state_dtype, eps=eps)
    m, v = torch.zeros(2, elements, dtype=torch.float64)
    for _ in range(steps):
        gradient = (magnitude * torch.randn(elements, dtype=torch.float64)).float()
        parameter.grad = gradient
        with torch.no_grad():
            parameter.zero_()
        optimizer.step()
        m = 0.9 * m + 0.1 * gradient.double()
        v = 0.999 * v + 0.001 * gradient.double() ** 2
    wanted = -(m / (1 - 0.9**steps)) / ((v / (1 - 0.999**steps)).sqrt() + eps)
    return float((parameter.detach().double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("exponent", [-30, -20, -10, -6, -5, -3, 0, 10, 20, 30])
def test_an_update_of_8_bit_states_is_within_three_hundredths(seed, exponent):
    assert _update_error(10.0**exponent, 1e-8) <= 0.03
    if exponent >= -10:  # below, squares vanish in float32 itself, and only AdamW's own eps is left to divide by
        assert _update_error(10.0**exponent, 10.0 ** (exponent - 6)) <= 0.03


def test_one_loud_element_does_not_blow_up_its_neighbours(seed):
    """Elements beside one of 200 times their gradient: float32's largest update is about 1, a lost v makes it 1e8."""
    elements = 8192
    parameter, optimizer = _adamw(elements, "8bit")
    loud, worst = torch.arange(elements) % 32 == 7, 0.0
    for _ in range(100):
        gradient = torch.randn(elements)
        parameter.grad = torch.where(loud, 200 * gradient, gradient)
        with torch.no_grad():
            parameter.zero_()
        optimizer.step()
        worst = max(worst, float(parameter.detach()[~loud].abs().max()))
    assert worst <= 10


def test_a_positive_second_moment_never_becomes_zero(seed):
    elements = 8192
    parameter, optimizer = _adamw(elements, "8bit")
    for step in range(40):
        scale = 10.0 ** torch.empty(elements).uniform_(-18, 18)
        signs = torch.randint(0, 2, (elements,)) * 2 - 1  # torch.randn draws a 0 once in eight million
        parameter.grad = signs * (scale if step < 20 else 1e-15)
        optimizer.step()
        assert (optimizer.state[parameter]["exp_avg_sq_codes"] > 0).all()
    parameter.grad = torch.zeros(elements)
    fresh, other = _adamw(elements, "8bit")
    fresh.grad = torch.zeros(elements)
    other.step()
    assert (other.state[fresh]["exp_avg_sq_codes"] == 0).all(), "a zero is a zero"


def _save_roots(codec, held, roots):
    element = ElementTraceBuilder(2)
    given = element.add_input("root"), element.add_input("random", "w32")
    codec.store_before_squaring(element.arrays, element.index, element.emit_block_index(), *given)
    random = torch.randint(0, 2**16, roots.shape, dtype=torch.int32)
    run_trace_on_tensors(element.trace, held, {"root": roots, "random": random}, block=codec.block_length)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("block", [16, 128])
def test_codes_are_right_on_average_and_bounded(seed, squared, block):
    """The values (codes for second moments) at all ratios to the block's largest, by float64's own cube roots."""
    codec = Int8Blocks(block, squared)
    most = 255 if squared else 127
    roots = torch.randn(64 * block) * 10.0 ** torch.empty(64 * block).uniform_(-6, 0)
    roots = (roots.abs() if squared else roots) * 10.0 ** torch.empty(64).uniform_(-12, 12).repeat_interleave(block)
    held = [torch.empty(size, dtype=dtype) for size, dtype in codec.describe_tensors("x", roots.shape).values()]
    total = torch.zeros(roots.shape, dtype=torch.float64)
    rounds = 200
    for _ in range(rounds):
        _save_roots(codec, held, roots)
        total += held[0].double() if squared else codec.decode(held).double()
    scale = held[1].double().repeat_interleave(block)
    top = roots.abs().reshape(-1, block).amax(1).repeat_interleave(block).double()
    assert ((top <= scale) & (scale <= 1.25 * top)).all()
    size = roots.abs().double()
    below = ((size / scale) ** (1 / 3) * most).floor()
    step = scale * (((below + 1) / most) ** 3 - (below / most) ** 3)
    exact = (size / scale) ** (1 / 3) * most if squared else roots.double()
    error = (total / rounds - exact) / (1.0 if squared else step)
    kept = (below > 0) | (not squared)  # else kept from zero, which is upwards
    # Near a code float64's floor and the kernel's may differ by one, and the step with them: by a half at most.
    assert error[kept].abs().max() < 1.6 * 6 * 0.5 / rounds**0.5
    assert abs(float(error[kept].mean())) < 6 * 0.5 / (rounds * int(kept.sum())) ** 0.5 + 1e-3


def test_special_values_in_blocks():
    codec = Int8Blocks(16, False)
    values = torch.zeros(48)
    values[0], values[1], values[16], values[17] = torch.nan, 1.0, torch.inf, 2.0
    held = [torch.empty(size, dtype=dtype) for size, dtype in codec.describe_tensors("x", values.shape).values()]
    codec.encode(held, values, torch.zeros(48, dtype=torch.int64))
    back = codec.decode(held)
    assert back[0].isnan()
    assert not back[1:].isnan().any(), "a NaN stays with its element"
    assert abs(back[1] - 1.0) <= 2**-23
    assert abs(back[16] - 2.0) <= 2**-22, "an infinity is kept out of the scale, and stored as the largest code"
    assert back[17] == back[16]
    assert (back[32:] == 0).all()


@pytest.mark.parametrize(
    ("name", "shape", "dtypes"),
    [
        ("8bit", (64, 32), {torch.int8, torch.uint8}),
        ("8bit", (4096,), {torch.int8, torch.uint8}),
        ("8bit", (100,), {torch.bfloat16}),
        ("8bit", (64, 30), {torch.bfloat16}),
        ("8bit", (8, 4, 8), {torch.int8, torch.uint8}),
        ("bf16", (5,), {torch.bfloat16}),
        ("fp32", (5,), {torch.float32}),
        ("bf16x2", (5,), {torch.bfloat16}),
        ("default", (5,), {torch.bfloat16}),
    ],
)
def test_which_parameters_get_which_states(name, shape, dtypes):
    parameter = torch.nn.Parameter(torch.zeros(shape).bfloat16())
    optimizer = hu.optim.AdamW([parameter], state_dtype=CODECS[name])
    optimizer.bytes_per_parameter()
    state = optimizer.state[parameter]
    codes = "_codes" if torch.int8 in dtypes else ""
    assert {state[f"{key}{codes}"].dtype for key in ("exp_avg", "exp_avg_sq")} == dtypes
    assert ("exp_avg_scale" in state) == (torch.int8 in dtypes)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.float16, ValueError, "allowed are torch.float32 and 'bfloat16x2' there"),
        (hu.Components(3), ValueError, "larger than float32"),
        ("2bit", ValueError, "allowed are torch.float32"),
        ({"exp_average": "8bit"}, ValueError, "it keeps .*exp_avg_sq"),
        (3, ValueError, "allowed are"),
    ],
)
def test_a_state_dtype_that_does_not_exist_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        hu.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], state_dtype=given)


@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "up"},
        {"block": 33},
        {"block": 8},
        {"dtype": "8bit", "rounding": "nearest"},
        {"dtype": "fp4"},
        {"dtype": "bfloat16x2", "rounding": "stochastic"},
    ],
)
def test_a_state_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=r"allowed|stochastically"):
        hu.optim.State(**options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", [name for name in CODECS if name not in ("default", "bf16-nearest")])
@pytest.mark.parametrize("rule", ["adamw", "momentum", "nesterov", "lion"])
def test_constant_gradients_move_as_in_float64_for_every_beta(seed, rule, codec):
    """The mean displacement, within 1%: a moment that is rounded to nearest stops short of its gradient."""
    sizes = 10 ** torch.empty(64, 64).uniform_(-1, 0)
    for keep in (0.5, 0.9, 0.95, 0.99, 0.999):
        steps = 250 if keep == 0.999 else 100
        more = {"momentum": keep, "dampening": 0.0} if "betas" not in build(rule, "exact", [_one()]).defaults else {
            "betas": (keep, 0.999)}  # fmt: skip
        more |= {"weight_decay": 0.0, "lr": 2.0**-10, "maximize": False}
        parameter = torch.nn.Parameter(torch.zeros(64, 64))
        states = CODECS[codec]
        if codec.startswith("4bit") and rule == "adamw":  # whose second moments are no less than 1/16 of the largest
            states = {"exp_avg": states}
        optimizer = build(rule, "exact", [parameter], "fp32", state_dtype=states, **more)
        moment, wanted = 0.0, 0.0
        for _ in range(steps):
            parameter.grad = sizes
            optimizer.step()
            moment = keep * moment + 1
            wanted += keep * moment + 1 if rule == "nesterov" else moment
        exact = wanted * sizes.double() if "betas" not in more else torch.full((64, 64), steps, dtype=torch.float64)
        kept = float((-parameter.detach().double() / (2.0**-10 * exact)).mean())
        assert abs(kept - 1) <= 0.01, (keep, kept)


def _one():
    return torch.nn.Parameter(torch.zeros(1))


def _scheduled(group, step):
    """Every number of a group, changed from step to step: whatever a scheduler may write."""
    for key, value in group.items():
        if key in ("seed", "every", "report_interval", "beta2_decay") or isinstance(value, bool):
            continue
        if isinstance(value, float):
            group[key] = (
                value * (1 + 0.1 * step) if key in ("lr", "eps") or value == 0 else 1 - (1 - value) / (1 + step)
            )
        elif isinstance(value, tuple) and all(isinstance(one, float) for one in value):
            group[key] = tuple(1 - (1 - one) * 0.7 for one in value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["default", "8bit", "bf16x2"])
@pytest.mark.parametrize("rule", RULES)
def test_a_run_resumed_under_schedules_of_every_number_has_the_same_bits(seed, rule, codec):
    gradients = torch.randn(6, 16, 32).bfloat16()

    def made():
        parameter = torch.nn.Parameter(torch.ones(16, 32).bfloat16())
        more = {"momentum": 0.5} if "momentum" in RULES[rule][1] else {}
        return build(rule, "split8", [parameter], state_dtype=CODECS[codec], **more)

    def walk(optimizer, first, last):
        for step in range(first, last):
            _scheduled(optimizer.param_groups[0], step)
            optimizer.param_groups[0]["params"][0].grad = gradients[step]
            optimizer.step()
        return optimizer

    with hu.kernels.engine("reference"):
        whole, part, other = walk(made(), 0, 6), walk(made(), 0, 3), made()
        with torch.no_grad():
            other.param_groups[0]["params"][0].copy_(part.param_groups[0]["params"][0])
        other.load_state_dict(part.state_dict())
        assert differing(snapshot(whole), snapshot(walk(other, 3, 6))) == []


@pytest.mark.parametrize(("ratio", "spike"), [(1e-2, 0), (1e-4, 0), (1.0, 1e4), (1.0, torch.inf)])
def test_8_bit_states_keep_the_displacement_beside_a_large_element(seed, ratio, spike):
    """Within 5% of float64's mean, beside one of 1 / ratio times the gradient, and after one spike."""
    parameter, optimizer = _adamw((256, 32), "8bit", eps=1e-16)
    size = torch.full((32,), ratio)
    size[0] = 1.0
    m, v, wanted = torch.zeros(3, 256, 32, dtype=torch.float64)
    for step in range(1, 201):
        gradient = size * (torch.randn(256, 32) + 0.3)
        gradient[:, 0] = spike if spike and step == 10 else gradient[:, 0]
        parameter.grad = gradient
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient.double(), 0.999 * v + 0.001 * gradient.double() ** 2
        wanted -= m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-16)
    assert abs(float(parameter.detach().double()[:, 1:].sum() / wanted[:, 1:].sum()) - 1) <= 0.05
