"""torch's contract of arguments: what a number may be, closures, groups, mixed dtypes, switches of implementation."""

import math

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits

KINDS = ["SGD", "Adam", "AdamW", "Lion", "wrap"]


def _made(name, parameters, options):
    if name == "wrap":
        return hu.optim.wrap(torch.optim.Adagrad, parameters, **options)
    return getattr(hu.optim, name)(parameters, **options)


def _numbers():
    """Every hyper-parameter that is a number, of every optimizer, with how it is given and a value."""
    for name in ("SGD", "Adam", "AdamW", "Lion"):
        yield name, "lr", lambda value: {"lr": value}, 0.25
        yield name, "weight_decay", lambda value: {"weight_decay": value}, 0.5
        if name == "SGD":
            yield name, "momentum", lambda value: {"momentum": value}, 0.5
            yield name, "dampening", lambda value: {"momentum": 0.5, "dampening": value}, 0.25
            continue
        yield name, "beta", lambda value: {"betas": (value, 0.5)}, 0.75
        if name != "Lion":
            yield name, "eps", lambda value: {"eps": value}, 0.125


NUMBERS = [pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in _numbers()]
WRONG = {
    "bool": (True, TypeError, "is bool: give a number"),
    "text": ("fast", ValueError, "is no number: write it as"),
    "bool tensor": (torch.tensor(True), TypeError, "is a tensor of torch.bool: give a real number"),
    "complex tensor": (torch.tensor(0.5 + 0j), TypeError, "is a tensor of torch.complex64: give a real number"),
    "two": (torch.tensor([0.5, 0.5]), ValueError, r"is a tensor of shape \(2,\) on cpu.*: give one number"),
    "meta": (torch.tensor(0.5, device="meta"), ValueError, "on meta.*: give one number, in memory"),
    "gradient": (torch.tensor(0.5, requires_grad=True), ValueError, r"requires_grad=True.*such as \w+\.detach\(\)"),
}


def _after_two_steps(optimizer, parameters):
    for step in range(2):
        for k, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(10 * k + step)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        with hu.kernels.engine("reference"):
            optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize(("name", "key", "given", "value"), NUMBERS)
def test_a_number_may_be_a_tensor_of_one(name, key, given, value):
    found = []
    for number in (value, torch.tensor(value), torch.tensor([value], dtype=torch.float64), torch.tensor(value).half()):
        parameters = [torch.nn.Parameter(torch.ones(4, 4).bfloat16())]
        found += _after_two_steps(getattr(hu.optim, name)(parameters, **given(number)), parameters)
    assert all(same_bits(found[0], other) for other in found[1:])


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("name", "key", "given", "value"), NUMBERS)
def test_what_is_no_number_is_refused(name, key, given, value, wrong):
    number, error, words = WRONG[wrong]
    parameter = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(error, match=f"^{key}.*{words}"):
        getattr(hu.optim, name)([parameter], **given(number))


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lion"])
def test_a_scheduler_writes_into_a_rate_that_is_a_tensor(name):
    found = []
    for rate in (0.5, torch.tensor(0.5)):
        parameters = [torch.nn.Parameter(torch.ones(4).bfloat16())]
        optimizer = getattr(hu.optim, name)(parameters, lr=rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            _after_two_steps(optimizer, parameters)
            scheduler.step()
        assert isinstance(optimizer.param_groups[0]["lr"], type(rate))
        found += parameters
    assert same_bits(found[0].detach(), found[1].detach())


@pytest.mark.parametrize("name", KINDS)
def test_dtypes_may_stand_in_one_group(name):
    """Each parameter steps as it does alone; what none of them can be is refused by name."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    together = [torch.nn.Parameter(torch.linspace(-1, 1, 64).to(dtype)) for dtype in dtypes]
    alone = [torch.nn.Parameter(parameter.detach().clone()) for parameter in together]
    options = {"weight_update": "master", "state_dtype": torch.float32}
    options = {"weight_update": "master"} if name == "wrap" else options
    found = _after_two_steps(_made(name, together, {"lr": 0.1, **options}), together)
    for k, parameter in enumerate(alone):
        own = dict(options)
        if parameter.dtype == torch.float32:
            del own["weight_update"]
        optimizer = _made(name, [parameter], {"lr": 0.1, **own})
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * k + step)
            parameter.grad = torch.randn(64, generator=generator).to(parameter.dtype)
            with hu.kernels.engine("reference"):
                optimizer.step()
        assert same_bits(found[k], parameter.detach()), parameter.dtype
    for dtype in (torch.complex64, torch.float64):
        with pytest.raises(ValueError, match=rf"parameter #3 is {dtype}: allowed are bfloat16, float16 and float32"):
            _made(name, [*together, torch.nn.Parameter(torch.ones(2, dtype=dtype))], {"lr": 0.1})


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, 65519.0), (torch.bfloat16, 3.396e38)])
@pytest.mark.parametrize("is_added", [False, True])
def test_values_that_narrowing_would_make_infinite_are_refused_before_any_is_narrowed(dtype, largest, is_added):
    def make(value):
        parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.tensor([1.0, value, torch.inf]))]
        if not is_added:
            return parameters, lambda: hu.optim.AdamW(parameters, lr=0.1, param_dtype=dtype)
        opt = hu.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1, param_dtype=dtype)
        return parameters, lambda: opt.add_param_group({"params": parameters})

    parameters, narrow = make(-1.001 * largest)
    with pytest.raises(ValueError, match=r"'#1' has values beyond b?float16's largest, .*param_dtype=None"):
        narrow()
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    parameters, narrow = make(-largest)
    narrow()
    assert parameters[1].tolist() == [1.0, -torch.finfo(dtype).max, torch.inf]


@pytest.mark.parametrize("name", KINDS)
def test_groups_may_be_empty(name):
    parameter = torch.nn.Parameter(torch.ones(4).bfloat16())
    optimizer = _made(name, [{"params": []}, {"params": [parameter]}, {"params": [], "lr": 0.5}], {"lr": 0.1})
    _after_two_steps(optimizer, [parameter])
    assert not torch.equal(parameter, torch.ones(4))
    other = _made(name, [{"params": []}, {"params": [parameter]}, {"params": []}], {"lr": 0.1})
    other.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1, 0.5]


@pytest.mark.parametrize("name", KINDS)
def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(name):
    parameter = torch.nn.Parameter(torch.full((4,), 2.0))
    optimizer, calls = _made(name, [parameter], {"lr": 0.1}), []

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad(), hu.kernels.engine("reference"):
        losses = [optimizer.step(closure) for _ in range(3)]
    assert losses == calls, "once a step"
    assert losses[0] == 16.0
    assert losses[0] > losses[1] > losses[2] > parameter.square().sum()
    assert optimizer.step(lambda: None) is None


SWITCHES = {
    "foreach": {True: "is ignored: one fused kernel", False: None, None: None},
    "capturable": {True: "outside CUDA graphs", False: None, None: None},
    "differentiable": {True: "not differentiable", False: None, None: None},
    "fused": {True: None, False: "is ignored: one fused kernel", None: None},
}


@pytest.mark.parametrize(("switch", "value"), [(switch, value) for switch in SWITCHES for value in SWITCHES[switch]])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Lion"])
def test_switches_of_implementation_are_right_ignored_or_refused_in_groups_too(name, switch, value):
    words, parameter = SWITCHES[switch][value], torch.nn.Parameter(torch.ones(2))
    kind = getattr(hu.optim, name)

    def whole():
        return kind([parameter], **{switch: value})

    def group():
        return kind([{"params": [parameter], switch: value}])

    def added():
        kind([torch.nn.Parameter(torch.ones(2))]).add_param_group({"params": [parameter], switch: value})

    for make in (whole, group, added):
        if words is None:
            make()
            continue
        if "ignored" in words:
            with pytest.warns(UserWarning, match=rf"{name}\({switch}={value}\) {words}"):
                make()
            continue
        with pytest.raises(NotImplementedError, match=rf"{name}\({switch}={value}\): .*{words}"):
            make()


def test_switches_of_a_file_of_torchs_choose_nothing():
    parameter = torch.nn.Parameter(torch.ones(2))
    theirs = torch.optim.AdamW([parameter], foreach=True)
    parameter.grad = torch.ones(2)
    theirs.step()
    optimizer = hu.optim.AdamW([parameter])
    optimizer.load_state_dict(theirs.state_dict())
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 2


def test_what_torch_takes_by_position_and_this_does_not_is_no_other_option():
    with pytest.raises(TypeError, match="positional"):  # torch's capturable
        hu.optim.RMSprop([torch.nn.Parameter(torch.ones(2))], 0.1, 0.9, 1e-8, 0, 0, False, True)


TINY, LAST = 2.0**-1074, 1 - 2.0**-53
NOT_NEGATIVE = ((0.0, TINY, 2.0), (-TINY, math.inf, math.nan))
WHOLE = ((0, 1, 2**63 - 1), (-1, 2**63, 1.0, True))
ENDS = {
    "SGD.lr": (lambda x: {"lr": x}, *NOT_NEGATIVE),
    "SGD.momentum": (lambda x: {"momentum": x}, *NOT_NEGATIVE),
    "SGD.dampening": (lambda x: {"momentum": 0.5, "dampening": x}, (-1.0, 0.0, 2.0), (math.inf, -math.inf, math.nan)),
    "AdamW.eps": (lambda x: {"eps": x}, *NOT_NEGATIVE),
    "AdamW.weight_decay": (lambda x: {"weight_decay": x}, *NOT_NEGATIVE),
    "AdamW.beta1": (lambda x: {"betas": (x, 0.5)}, (0.0, LAST), (-TINY, 1.0, math.nan)),
    "AdamW.beta2": (lambda x: {"betas": (0.5, x)}, (0.0, LAST), (-TINY, 1.0, math.nan)),
    "Adan.beta3": (lambda x: {"betas": (0.5, 0.5, x)}, (0.0, LAST), (-TINY, 1.0, math.nan)),
    "AdamW.seed": (lambda x: {"seed": x}, *WHOLE),
    "AdamW.report_interval": (lambda x: {"report_interval": x}, *WHOLE),
    "Adafactor.first eps": (lambda x: {"eps": (x, 0.1)}, (None, 0.0, 1.0), (-TINY, math.inf, math.nan)),
    "Adafactor.second eps": (lambda x: {"eps": (None, x)}, (0.0, 1.0), (None, -TINY, math.inf, math.nan)),
    "Adafactor.beta2_decay": (lambda x: {"beta2_decay": x}, (0.0, -TINY, -2.0), (TINY, math.nan)),
    "Adafactor.d": (lambda x: {"d": x}, (1.0, 2.0), (LAST, 0.0, math.nan)),
    "Muon.ns_steps": (lambda x: {"ns_steps": x}, (0, 99), (-1, 100, 5.0, True)),
    "SGDScheduleFree.momentum": (lambda x: {"momentum": x}, (TINY, LAST), (0.0, 1.0, math.nan)),
    "AdamWScheduleFree.beta1": (lambda x: {"betas": (x, 0.5)}, (TINY, LAST), (0.0, 1.0, math.nan)),
    "Prodigy.d0": (lambda x: {"d0": x}, (TINY, 1.0, 2.0), (0.0, -1.0, math.nan)),
    "Prodigy.growth_rate": (lambda x: {"growth_rate": x}, (1.0, 2.0, math.inf), (LAST, 0.0, math.nan)),
    "Prodigy.beta1": (lambda x: {"betas": (x, 0.5)}, (TINY, LAST), (0.0, 1.0, math.nan)),
    "HALP.bits": (lambda x: {"lr": 0.1, "bits": x}, (None, 2, 16), (1, 17, 4.0)),
    "HALP.mu": (lambda x: {"lr": 0.1, "mu": x}, (None, TINY, 2.0), (0.0, math.inf, math.nan, True)),
    "HALP.lr": (lambda x: {"lr": x}, (TINY, 2.0), (0.0, math.inf, math.nan, True)),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_a_range_are_in_it_and_what_lies_beyond_is_refused(name):
    given, allowed, refused = ENDS[name]
    make = getattr(hu.optim, name.partition(".")[0])
    for value in allowed:
        make([torch.nn.Parameter(torch.ones(4, 4))], **given(value))
    for value in refused:
        with pytest.raises(ValueError, match=r"not allowed|is needed|HALP\(|in \(0, 1\)"):
            make([torch.nn.Parameter(torch.ones(4, 4))], **given(value))


@pytest.mark.parametrize(("decay", "is_allowed"), [(0.0, True), (1.0, True), (-TINY, False), (1 + 2.0**-52, False)])
@pytest.mark.parametrize("is_schedule", [False, True])
def test_the_decay_of_an_average_is_from_0_to_1(decay, is_allowed, is_schedule):
    model = torch.nn.Linear(2, 2)
    given = (lambda step: decay) if is_schedule else decay
    if is_allowed:
        hu.optim.EMA(model, decay=given).update()
        return
    with pytest.raises(ValueError, match=r"a decay is from 0 .* to 1"):
        hu.optim.EMA(model, decay=given).update()
