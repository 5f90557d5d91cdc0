"""Law: every optimizer takes each option by its name, and weight_update="split" gives float32's bits."""

import inspect

import pytest
import torch

import halfulp as hu
from halfulp._torch_floor import is_older
from halfulp.optim._group_options import OptimizerOptions

from ...conftest import PINNED
from ...optim.training import make_problem, train
from .cases import optimizer_names


@pytest.mark.parametrize("name", optimizer_names())
def test_split_is_float32_bit_for_bit(seed, name):
    start, gradients = make_problem(seed, torch.bfloat16)
    if name == "Muon":  # which steps matrices
        start, gradients = start[:1], [one[:1] for one in gradients]
    options = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    kind = hu.optim.OPTIMIZERS[name]
    split, optimizer = train(kind, start, gradients, weight_update="split", state_dtype=torch.float32, **options)
    whole, other = train(kind, [tensor.float() for tensor in start], gradients, **options)
    for a, b in zip(split, whole):
        plan = optimizer._plans[a]
        assert torch.equal(plan.spec.update.read(plan.spec.store, plan.weight_tensors), b)
        for key, value in other.state[b].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(optimizer.state[a][key], value), key


# Their signatures are those of torch.optim; a user's optimizer may have any.
OF_THE_LIBRARY = sorted(name for name, kind in hu.optim.OPTIMIZERS.items() if kind.__module__.startswith("halfulp."))
# A value of every option that is no optimizer's default.
OTHER = {
    "lr": 0.25,
    "lr_decay": 0.5,
    "initial_accumulator_value": 0.5,
    "alpha": 0.75,
    "centered": True,
    "momentum_decay": 0.5,
    "no_prox": True,
    "warmup_steps": 9,
    "r": 1.0,
    "weight_lr_power": 1.0,
    "beta3": 0.5,
    "decouple": False,
    "use_bias_correction": True,
    "safeguard_warmup": True,
    "d0": 1e-3,
    "d_coef": 0.5,
    "growth_rate": 1.5,
    "beta2_decay": -0.5,
    "d": 2.0,
    "ns_coefficients": (2.0, -1.5, 0.5),
    "ns_steps": 3,
    "adjust_lr_fn": "match_rms_adamw",
    "adamw_lr": 0.5,
    "adamw_betas": (0.75, 0.5),
    "adamw_eps": 0.125,
    "adamw_weight_decay": 0.0625,
    "bias_correction": False,
    "trust_clip": True,
    "always_adapt": True,
    "alpha_warmup": 7,
    "beta3_warmup": 5,
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


def parameters_of(kind):
    """The parameters that an optimizer says, and those of Optimizer in the place of `**options`."""
    own = inspect.signature(kind).parameters
    shared = inspect.signature(hu.optim.Optimizer).parameters
    return {key: one for key, one in own.items() if key != "options"} | {key: shared[key] for key in OWN}


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_every_option_arrives_under_its_name(name, monkeypatch):
    kind = hu.optim.OPTIMIZERS[name]
    parameters = parameters_of(kind)
    switches = ("foreach", "capturable", "differentiable", "fused")
    options = [key for key in parameters if key not in ("params", *switches)]
    assert set(options) <= OTHER.keys()
    # torch.optim.Muon's nesterov is True by default.
    other = {
        key: not value.default if isinstance(value.default, bool) else OTHER.get(key)
        for key, value in parameters.items()
    }
    seen = {}

    def begun(self, params, defaults, **given):
        assert not seen.keys() & (defaults.keys() | given.keys())
        seen.update(defaults | given)

    monkeypatch.setattr(hu.optim.Optimizer, "__init__", begun)
    for option in options:
        assert parameters[option].default != other[option]
        needed = {"momentum": 0.9} if option == "nesterov" else {}
        seen.clear()
        kind([torch.nn.Parameter(torch.zeros(1))], **needed, **{option: other[option]})
        assert seen[option] == other[option]
        unchanged = {key: parameters[key].default for key in options if key not in (option, *needed, *OWN)}
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
SWITCHES = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_signatures_say_every_option(name):
    """torch's positional parameters in torch's order, then its keyword-only ones, then those of Optimizer, by type.

    Switches of implementation are Optimizer's; what torch takes by position behind one is taken by name alone.
    """
    mine = dict(inspect.signature(hu.optim.OPTIMIZERS[name]).parameters)
    options = mine.pop("options")
    assert options.kind is options.VAR_KEYWORD
    assert options.annotation == "Unpack[OptimizerOptions]"
    assert OptimizerOptions.__optional_keys__ == OWN.keys() | set(SWITCHES)
    assert all(value.annotation is not value.empty for value in mine.values())
    if hasattr(torch.optim, name):
        torchs = inspect.signature(getattr(torch.optim, name)).parameters
        # An older torch has fewer options.
        known = [key for key in mine if key in torchs or not is_older(torch.__version__, PINNED)]
        if name == "Muon":  # which steps other shapes too
            known = [key for key in known if not key.startswith("adamw_")]
        assert known == [key for key in torchs if key not in SWITCHES]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        for key, value in torchs.items():
            kind = inspect.Parameter.KEYWORD_ONLY if key in SWITCHES else max(kind, value.kind)
            if key not in SWITCHES:
                assert (mine[key].kind, mine[key].default) == (kind, value.default), key
    for option, value in (OWN | SWITCHES).items():
        assert inspect.signature(hu.optim.Optimizer).parameters[option].default == value
    with pytest.raises(TypeError, match="every"):
        hu.optim.OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))], every=3)
