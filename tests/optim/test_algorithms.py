"""The optimizers beside torch.optim's: the same signature, the same numbers."""

import copy
import inspect
import itertools
import math

import pytest
import torch

import halfulp as hu
from halfulp.optim.rules import _momentum as _muon

from ..laws.optim.cases import decoded, narrow_updates
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
    "Adafactor": _grid(weight_decay=(0, 0.1), maximize=(False, True), eps=((None, 1e-3), (1e-6, 1e-2)), d=(2.0,)),
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
    theirs, reference = train(getattr(torch.optim, name), start, gradients[:10], lr=0.01, weight_decay=0.1)
    mine, optimizer = train(getattr(hu.optim, name), theirs, [])
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for gradient in gradients[10:]:
        for kind, parameters in ((reference, theirs), (optimizer, mine)):
            for parameter, one in zip(parameters, gradient):
                parameter.grad = one.clone()
            kind.step()
    _assert_close(mine, theirs, 0.1)


MUON_OPTIONS = _grid(
    nesterov=(False, True), momentum=(0.95, 0.5), adjust_lr_fn=(None, "match_rms_adamw"), weight_decay=(0.1,)
)


@pytest.mark.parametrize("options", MUON_OPTIONS, ids=_name)
def test_each_step_of_muon_is_torchs(seed, options, monkeypatch):
    monkeypatch.setattr(_muon, "_choose_product_dtype", lambda device: torch.bfloat16)  # also where it is float32
    generator = torch.Generator().manual_seed(seed)
    for shape in ((7, 5), (16, 64)):
        mine = torch.nn.Parameter(torch.randn(shape, generator=generator))
        theirs = torch.nn.Parameter(mine.detach().clone())
        optimizer, reference = hu.optim.Muon([mine], lr=0.02, **options), torch.optim.Muon([theirs], lr=0.02, **options)
        for _ in range(5):
            mine.grad = torch.randn(shape, generator=generator)
            theirs.grad = mine.grad.clone()
            optimizer.step()
            reference.step()
            torch.testing.assert_close(mine, theirs, rtol=2**-22, atol=2**-22)
            buffers = [one.state[p]["momentum_buffer"] for one, p in ((optimizer, mine), (reference, theirs))]
            torch.testing.assert_close(*buffers, rtol=2**-22, atol=2**-22)
            # In the next step a last digit more would be rounded to another bfloat16.
            with torch.no_grad():
                theirs.copy_(mine)
                buffers[1].copy_(buffers[0])


def test_muon_takes_matrices_and_leaves_the_rest_to_adamw(seed):
    shapes = {"w": (8, 6), "b": (8,)}
    with pytest.raises(ValueError, match=r"#1 of shape \(8,\) is no matrix.*use_muon=False"):
        hu.optim.Muon([torch.nn.Parameter(torch.zeros(s)) for s in shapes.values()])
    w, b, same = (torch.nn.Parameter(torch.ones(shape)) for shape in ((8, 6), (8,), (8,)))
    optimizer = hu.optim.Muon([{"params": [w]}, {"params": [b], "use_muon": False, "lr": 1e-3}], lr=0.02)
    alone = hu.optim.AdamW([same], lr=1e-3, weight_decay=0.1)
    for _ in range(3):
        for parameter in (w, b, same):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        alone.step()
    assert torch.equal(b, same)
    again = hu.optim.Muon([{"params": [w]}, {"params": [b], "use_muon": False}])
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[1]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Adafactor", {"eps": 1e-8}, "give two numbers"),
        ("Adafactor", {"eps": (None, None)}, "the second one"),
        ("Adafactor", {"d": 0.5}, "1 or more"),
        ("Adafactor", {"beta2_decay": 0.5}, "0 or less"),
        ("Muon", {"ns_steps": 100}, "a whole number below 100"),
        ("Muon", {"ns_coefficients": (1.0, 2.0)}, "give three numbers"),
        ("Muon", {"adjust_lr_fn": "rms"}, "match_rms_adamw"),
    ],
)
def test_what_they_refuse(name, options, words):
    with pytest.raises(ValueError, match=words):
        getattr(hu.optim, name)([torch.nn.Parameter(torch.zeros(3, 3))], **options)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
@pytest.mark.parametrize("update", ["split8", "kahan", "stochastic", "nearest"])
def test_prepared_steps_read_the_whole_weight_and_go_on_from_a_file(seed, name, update):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(6, 8, generator=generator).bfloat16()
    gradients = [torch.randn(6, 8, generator=generator).bfloat16() for _ in range(10)]
    kind = getattr(hu.optim, name)

    def run(optimizer, parameter, steps):
        for gradient in steps:
            parameter.grad = gradient.clone()
            optimizer.step()

    runs = []
    for engine in ("llvm", "reference"):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], lr=0.01, weight_update=update)
        with hu.kernels.engine(engine):
            run(optimizer, parameter, gradients)
        runs.append((parameter, optimizer))
    first = torch.nn.Parameter(start.clone())
    before = kind([first], lr=0.01, weight_update=update)
    run(before, first, gradients[:5])
    second = torch.nn.Parameter(first.detach().clone())
    after = kind([second], lr=0.01, weight_update=update)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    run(after, second, gradients[5:])
    whole, optimizer = runs[0]
    for parameter, other in (runs[1], (second, after)):
        assert torch.equal(whole, parameter)
        for key, value in optimizer.state[whole].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state[parameter][key])), key
    float32, _ = train(kind, [start.float()], [[one.float()] for one in gradients], lr=0.01)
    error = (decoded(optimizer, whole) - float32[0]).abs().max()
    # Ten roundings, by half a unit in the last place to nearest; six standard deviations of as many random ones.
    unit = 2.0 ** (math.frexp(float(start.abs().max()) + 0.5)[1] - 8)
    half = unit / 2
    bounds = {"split8": 2e-3, "kahan": 2e-3, "stochastic": 6 * half * 10**0.5, "nearest": 10 * half}
    assert error <= bounds[update] + 2e-3


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
    narrow, optimizer = train(hu.optim.AdamW, start, gradients, weight_update=choose_update(update), **options)
    largest = [tensor.float().abs() for tensor in start]

    def grow(parameters):
        for top, parameter in zip(largest, parameters):
            torch.maximum(top, parameter.detach().abs(), out=top)

    whole, _ = train(hu.optim.AdamW, [tensor.float() for tensor in start], gradients, grow, **options)
    noisy = update in ("stochastic", "feedback")
    for a, b, top in zip(narrow, whole, largest):
        plan = optimizer._plans[a]
        decoded = plan.spec.update.read(plan.spec.store, plan.weight_tensors)
        # One unit in the last place of bfloat16 per step, at random, or of what the companions hold: a unit of the
        # largest that the weight was on its way, for it may end near 0.
        ulp = top.clamp(min=2.0**-20) * (2**-7 if noisy else 2**-14)
        assert ((decoded - b).abs() <= ulp * (5 * STEPS**0.5 if noisy else STEPS)).all()


def choose_update(name):
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
    before_switches = itertools.takewhile(lambda key: key not in ("foreach", "capturable"), positional)
    getattr(hu.optim, name)([parameter], *[own[key].default for key in before_switches])


@pytest.mark.parametrize(
    ("name", "switch", "value"),
    [
        ("SGD", "differentiable", True),
        ("AdamW", "capturable", True),
        ("Adam", "differentiable", True),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3), (0, 0)])
def test_adafactor_steps_beside_an_empty_parameter(shape, dtype):
    values = torch.linspace(0.5, 1, 12, dtype=dtype).reshape(3, 4)

    def stepped(*more):
        parameters = [torch.nn.Parameter(values.clone()), *more]
        optimizer = hu.optim.Adafactor(parameters, lr=0.1)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = parameter.detach().clone()
            optimizer.step()
        assert all(optimizer.state[parameter]["step"] == 2 for parameter in parameters)
        return parameters[0]

    assert torch.equal(stepped(), stepped(torch.nn.Parameter(torch.ones(shape, dtype=dtype))))


def test_muon_tells_embeddings_and_heads_by_their_names():
    others = (
        "tok_embeddings",
        "transformer.wpe",
        "wte",
        "word_embeddings",
        "posemb",
        "lm_head",
        "heads.0",
        "head2",
        "cls_head.out",
    )
    matrices = ("multihead_attn.out_proj", "multi_head_attention.wq", "member", "blocks.0.mlp")
    named = [(f"{name}.weight", torch.nn.Parameter(torch.ones(2, 2))) for name in (*others, *matrices)]
    own, split = hu.optim.Muon.split_groups(named)
    assert [name.removesuffix(".weight") for name, _ in own["params"]] == [*matrices]
    assert (own["use_muon"], split["use_muon"]) == (True, False)
    weight = named[0][1]
    (group,) = hu.optim.Muon.split_groups([{"params": weight, "lr": 0.5}])
    assert group == {"params": [weight], "use_muon": True, "lr": 0.5}


def test_muons_others_have_adamws_options():
    """With the bits of AdamW beside it; a scheduler scales both rates, and files hold neither default."""
    options = {"adamw_lr": "3e-3", "adamw_betas": (0.8, 0.9), "adamw_eps": 1e-6, "adamw_weight_decay": 0.3}
    models = [torch.nn.Linear(8, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    one = hu.optim.Muon(hu.optim.Muon.split_groups(models[0].named_parameters()), lr=0.02, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(one, 1, 0.5)
    muon = hu.optim.Muon([models[1].weight], lr=0.02)
    adamw = hu.AdamW([models[1].bias], lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    x = torch.linspace(-1, 1, 24).view(3, 8)
    for _ in range(3):
        for model, optimizers in zip(models, ([one], [muon, adamw])):
            model(x).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert all(hu.kernels.same_bits(a.detach(), b.detach()) for a, b in zip(*(model.parameters() for model in models)))
    matrices, others = one.param_groups
    assert (matrices["lr"], matrices["weight_decay"], others["lr"]) == (0.02, 0.1, 3e-3)
    assert not any(name.startswith("adamw_") for group in one.state_dict()["param_groups"] for name in group)
    scheduler.step()
    assert (matrices["lr"], others["lr"]) == (0.01, 1.5e-3)
    again = copy.deepcopy(one)
    again.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(2)))], "use_muon": False, "lr": 1.0})
    assert (again.param_groups[2]["lr"], again.param_groups[2]["betas"]) == (1.0, (0.8, 0.9))
    with pytest.raises(ValueError, match=r"lr=-1\.0 is not allowed"):
        hu.optim.Muon([{"params": [models[0].bias], "use_muon": False}], adamw_lr=-1.0)
    for key in ("adamw_lr", "use_fallback"):
        with pytest.raises(ValueError, match=rf"a param group has \['{key}'\]: give use_muon=False"):
            hu.optim.Muon([{"params": [models[0].bias], key: 1e-4}], lr=0.02)
    words = {"use_muon": "false", "lr": "1e-4"}
    worded = hu.optim.Muon([{"params": [models[0].bias], **words}], lr=0.02)
    assert (worded.param_groups[0]["lr"], worded.param_groups[0]["use_muon"]) == (1e-4, False)


def test_users_choose_muons_parameters():
    named = [*torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).named_parameters()]
    for use_muon in ("1.weight", "1.w*", lambda name, p: p.dim() == 2 and name.startswith("1")):
        groups = hu.optim.Muon.split_groups(named, use_muon)
        assert [name for name, _ in groups[0]["params"]] == ["1.weight"]
    with pytest.raises(ValueError, match=r"'2\.\*' matches no name"):
        hu.optim.Muon.split_groups(named, "2.*")
    with pytest.raises(TypeError, match="give one glob over names, or a function"):
        hu.optim.Muon.split_groups(named, ["1.w*", "2.*"])
    with pytest.raises(TypeError, match="positional"):
        hu.AdamW.split_groups(named, "1.weight")


# Of optimizers that torch does not have in all its versions: as their papers' code has them.
DEFAULTS = {
    "Muon": {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "eps": 1e-7, "ns_steps": 5}
    | {"ns_coefficients": (3.4445, -4.775, 2.0315), "adjust_lr_fn": None, "adamw_lr": None}
    | {"adamw_betas": (0.9, 0.999), "adamw_eps": 1e-8, "adamw_weight_decay": None},
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0, "maximize": False},
    "Adan": {"lr": 1e-3, "betas": (0.98, 0.92, 0.99), "eps": 1e-8, "weight_decay": 0, "no_prox": False}
    | {"maximize": False},
    "AdEMAMix": {"lr": 1e-3, "betas": (0.9, 0.999, 0.9999), "alpha": 2.0, "eps": 1e-8, "weight_decay": 0}
    | {"beta3_warmup": None, "alpha_warmup": None, "maximize": False},
    "LAMB": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "bias_correction": True}
    | {"trust_clip": False, "always_adapt": False, "maximize": False},
    "SGDScheduleFree": {"lr": 1.0, "momentum": 0.9, "weight_decay": 0, "warmup_steps": 0, "r": 0.0}
    | {"weight_lr_power": 2.0, "maximize": False, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True},
    "AdamWScheduleFree": {"lr": 2.5e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "warmup_steps": 0}
    | {"r": 0.0, "weight_lr_power": 2.0, "maximize": False}
    | {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True},
    "Prodigy": {"lr": 1.0, "betas": (0.9, 0.999), "beta3": None, "eps": 1e-8, "weight_decay": 0, "decouple": True}
    | {"use_bias_correction": False, "safeguard_warmup": False, "d0": 1e-6, "d_coef": 1.0, "growth_rate": math.inf}
    | {"maximize": False, "d": 0.0, "d_max": 0.0, "d_numerator": 0.0, "k": 0},
}


OWN = [name for name, kind in hu.optim.OPTIMIZERS.items() if kind.__module__.startswith("halfulp.")]


@pytest.mark.parametrize("name", OWN)
def test_what_is_not_given_is_torchs_or_the_papers(name):
    parameters = [torch.nn.Parameter(torch.zeros(3, 3))]
    options = dict.fromkeys(("weight_update", "state_dtype", "param_dtype", "format"))
    options |= {"seed": 0, "report_interval": 50}
    found = hu.optim.OPTIMIZERS[name](parameters).defaults
    wanted = DEFAULTS.get(name)
    if wanted is None:
        switches = ("foreach", "fused", "capturable", "differentiable")
        theirs = getattr(torch.optim, name)(parameters).defaults
        wanted = {key: value for key, value in theirs.items() if key not in switches}
        wanted |= {
            key: found[key] for key in ("maximize", "decoupled_weight_decay") if key not in theirs and key in found
        }
    assert found == wanted | options
