"""Forecasts: layers and findings against trainings, and weights of odd kinds."""

import json
import math

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp import formats
from halfulp.observation.forecasting._layers import (
    UpdateModel,
    find_freeze_step,
    find_neighbour_gaps,
    simulate_adam_rms,
    simulate_weight_walk,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_gaps_are_those_between_neighbours_of_a_whole_format(dtype):
    format = formats.get(dtype)
    values = torch.tensor(sorted({float(value) for value in formats.all_values(format) if abs(value) <= format.max}))
    values = values.double()
    up, down = find_neighbour_gaps(values, format)
    assert torch.equal(up[:-1], values.diff())
    assert torch.equal(down[1:], values.diff())


def normal_sizes(count: int, deviation: float, steps: int) -> UpdateModel:
    zeros = torch.zeros(count, dtype=torch.float64)
    ones = torch.ones(steps, dtype=torch.float64)
    return UpdateModel(torch.ones(count, dtype=torch.bool), zeros, zeros + deviation, ones, 1.0, False, "a test")


def test_the_share_that_moves_is_that_of_real_additions(seed):
    weights = (torch.randn(200_000) * 0.02).bfloat16()
    for rate in (1e-4, 1e-5, 1e-6):
        update = torch.randn(len(weights)) * rate
        changed = (weights.float() + update).bfloat16() != weights
        sizes = normal_sizes(len(weights), 1.0, 1)
        rates = torch.tensor([rate], dtype=torch.float64)
        options = {
            "decay": 0.0,
            "decays_separately": True,
            "max_leaps": 1,
            "generator": torch.Generator().manual_seed(0),
        }
        moved = float(simulate_weight_walk(weights.double(), sizes, rates, formats.bf16, **options)[0][0])
        share = float(changed.double().mean())
        # Five standard deviations of a mean over 200,000 elements.
        assert abs(moved - share) < 5 * (share * (1 - share) / len(weights)) ** 0.5


def test_decay_that_is_rounded_by_itself_is_lost_below_half_a_spacing(seed):
    weights = torch.randn(5000).bfloat16().double()
    sizes, options = (
        normal_sizes(5000, 1e-30, 1),
        {"decays_separately": True, "max_leaps": 1, "generator": torch.Generator()},
    )
    for factor, lost in ((1e-4, 1.0), (2.0**-10, 1.0)):
        rates = torch.tensor([factor], dtype=torch.float64)
        _, wanted, made = simulate_weight_walk(weights, sizes, rates, formats.bf16, decay=1.0, **options)
        assert 1 - made / wanted == lost
    rates = torch.tensor([0.01], dtype=torch.float64)
    _, _, made = simulate_weight_walk(weights, sizes, rates, formats.bf16, decay=1.0, **options)
    after = (weights.float() * (1 - 0.01)).bfloat16().double()
    assert made == pytest.approx(float((weights.abs() - after.abs()).sum()), rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5, 48, 1000])
def test_crossing_is_that_of_binomial_numbers(count):
    """Poisson's numbers for the binomial ones, summed exactly, are a step off at most."""
    shares, needed = [0.5 * 0.9**step for step in range(100)], max(1, -(-count // 100))
    below = [sum(math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(needed)) for p in shares]
    exact = next(step for step in range(101) if math.prod(below[step:]) >= 0.5)
    assert abs(find_freeze_step(torch.tensor(shares, dtype=torch.float64), count, 1.0) - exact) <= 1


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_few_elements_that_move_at_each_step_do_not_freeze_at_the_end(share):
    """A bias of one element, of which updates keep their sign over some steps, is no chance less at the last ones."""
    for count in (1, 2, 5):
        assert find_freeze_step(torch.full((100,), share, dtype=torch.float64), count, 5.0) is None
    ahead = hu.forecast(nn.Linear(20, 1), 1e-3, steps=100)
    assert ahead.findings == []
    assert [layer.freeze_step for layer in ahead.layers] == [None, None]


def test_adams_size_on_noise_is_the_known_one():
    sizes = simulate_adam_rms(0.9, 0.95, torch.float32, 300)
    assert float(sizes[0]) == pytest.approx(1.0, abs=1e-3)
    # sqrt((1 - beta1) / (1 + beta1)) is 0.229, and a little less as both moments hold the same large gradients.
    assert 0.22 < float(sizes[-100:].mean()) < 0.23
    stuck = simulate_adam_rms(0.9, 0.999, torch.bfloat16, 5000)
    assert float(stuck[3000]) < 0.21, "a bfloat16 second moment that cannot decay stays too large"
    assert len(stuck) == 5000
    assert stuck[4000:].unique().numel() == 1


def test_a_second_moment_that_cannot_decay_freezes_layers_earlier(seed):
    # Of one layer the steps scatter by some per cent.
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16))).bfloat16()
    found = [hu.forecast(model, 1e-4, "cosine", steps=10_000, betas=(0.9, beta2)) for beta2 in (0.95, 0.999)]
    earlier, later = (sum(layer.freeze_step for layer in one.layers) for one in reversed(found))
    assert earlier < later


def trained(schedule, steps: int, at: int):
    """A small regression in pure bfloat16: shares that move per step, and state at one step."""
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule(0), betas=(0.9, 0.95), weight_decay=0.1)
    shares = {name: [] for name, _ in model.named_parameters()}
    for step in range(steps):
        x = torch.randn(16, 32).bfloat16()
        optimizer.zero_grad()
        (model(x).float() - torch.randn(16, 64)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = schedule(step)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        for name, parameter in model.named_parameters():
            updated = optimizer.state[parameter]["exp_avg"] != 0
            shares[name].append(float((parameter != before[name])[updated].double().mean()))
        if step + 1 == at:
            found = hu.forecast(model, optimizer, schedule, steps=steps)
    return shares, found


@pytest.mark.parametrize(
    "schedule",
    [lambda step: 2e-4 * (1 - step / 300) ** 2, lambda step: 2e-4 * min(1.0, (301 - step) / 150) ** 2],
    ids=["falling", "flat, then falling"],
)
def test_the_step_at_which_a_layer_freezes_is_the_measured_one(schedule):
    """Of one training, as the step of a few thousand elements is chance by some hundredths; more: bench_forecast."""
    torch.manual_seed(0)
    shares, found = trained(schedule, 300, 100)
    assert found.start == 100
    for layer in found.layers:
        above = [step for step, share in enumerate(shares[layer.name]) if share >= 0.01]
        measured = max(100, above[-1] + 1 if above else 0)
        forecast = layer.freeze_step if layer.freeze_step is not None else 300
        if layer.elements > 1000 or layer.name == "1.weight":
            assert forecast == pytest.approx(measured, rel=0.1), layer.name


def test_norms_freeze_and_float32_does_not():
    norm = nn.LayerNorm(256)
    found = hu.forecast(norm, 1e-4, "cosine", steps=100, dtype="bf16")
    weight = found.layers[0]
    assert (weight.freeze_step, weight.freeze_lr, weight.lost_share) == (0, 1e-4, 1.0)
    [first, *_] = found.findings
    assert (first.code, first.severity) == ("freeze-ahead", "error")
    assert "weight" in first.where
    assert "kahan" in first.cure
    healthy = hu.forecast(norm, 1e-4, "cosine", steps=100)
    assert not [finding for finding in healthy.findings if finding.severity != "note"]
    assert healthy.layers[0].dtype == torch.float32


def test_halfulps_own_weight_updates_do_not_freeze():
    model = nn.LayerNorm(64).bfloat16()
    optimizer = hu.optim.AdamW(model.named_parameters(), lr=1e-5, weight_update="kahan")
    found = hu.forecast(model, optimizer, "cosine", steps=100)
    assert {layer.weight_update for layer in found.layers} == {"kahan"}
    assert not found.findings
    nearest = hu.optim.AdamW(model.named_parameters(), lr=1e-5, weight_update="nearest")
    codes = [finding.code for finding in hu.forecast(model, nearest, "cosine", steps=100).findings]
    assert codes[0] == "freeze-ahead"
    assert "weight-decay-lost" not in codes


def test_what_is_lost_beside_the_weights():
    model = nn.Linear(64, 64)
    narrow = hu.forecast(model, 1e-3, "linear", steps=100, dtype=torch.bfloat16)
    by_code = {finding.code: finding for finding in narrow.findings}
    assert by_code["weight-decay-lost"].evidence["lost"] == 1.0
    other = hu.forecast(model, 1e-3, "linear", steps=100, dtype="fp16", eps=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    assert not [finding for finding in other.findings if finding.severity != "note"]


def test_sgd_needs_gradients_and_says_so():
    model = nn.Linear(8, 8).bfloat16()
    found = hu.forecast(model, 0.1, optimizer="sgd", steps=10)
    assert {layer.updates for layer in found.layers} == {None}
    assert "not known of 2 of 2 layers" in found.notes[0]
    assert "not known" in str(found)
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sgd.step()
    assert {layer.updates for layer in hu.forecast(model, sgd, steps=10).layers} == {"the momentum buffer"}


def test_a_saved_state_is_read_by_name_and_by_position():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    for parameters in (model.parameters(), model.named_parameters()):
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
        found = hu.forecast(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 1e-3, "linear", steps=10
        )
        assert found.start == 1
        assert [layer.name for layer in found.layers] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert {layer.updates for layer in found.layers} == {"the optimizer's state"}
    unnamed = torch.optim.AdamW(model.parameters()).state_dict()
    found = hu.forecast({"model": model[0].state_dict(), "optimizer": unnamed}, 1e-3, steps=10)
    assert "the 4 optimizer states of the checkpoint have no names" in found.notes[0]


def test_zeros_nan_infinities_and_empty_tensors():
    state = {
        "zeros": torch.zeros(10).bfloat16(),
        "nan": torch.full((10,), torch.nan).bfloat16(),
        "some": torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 2.0**-133]).bfloat16(),
        "empty": torch.zeros(0).bfloat16(),
        "scalar": torch.tensor(1.0).bfloat16(),
        "view": torch.randn(20, 20).bfloat16().T[::2],
        "count": torch.tensor(3),
    }
    found = hu.forecast(state, 1e-4, "cosine", steps=50)
    layers = {layer.name: layer for layer in found.layers}
    assert set(layers) == set(state) - {"count"}
    assert layers["zeros"].lost[0][1] < 1e-6, "every number is an update of 0"
    assert layers["nan"].updates is None
    assert layers["empty"].updates is None
    assert layers["scalar"].freeze_step == 0
    assert layers["some"].elements == 5
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_rate_of_zero_is_no_update():
    found = hu.forecast(nn.LayerNorm(8).bfloat16(), 0.0, [0.0, 0.0])
    assert [layer.freeze_step for layer in found.layers] == [None, None]
    assert not [finding for finding in found.findings if finding.code == "freeze-ahead"]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((3, 0.1), {}, TypeError, "a module, state dict or checkpoint's path; got an int"),
        (({"w": torch.ones(2)}, "fast"), {}, TypeError, "an Optimizer or a learning rate|got a str"),
        (
            ({"w": torch.ones(2)}, torch.optim.SGD([torch.ones(2)])),
            {},
            TypeError,
            "goes with its model, not with a dict",
        ),
        (({}, 0.1), {}, ValueError, "give a checkpoint with a model's state_dict"),
        (({"w": torch.eye(4).to_sparse()}, 0.1), {}, ValueError, "w was not compared: it is a tensor of layout"),
        ((hu.multicomponent(nn.Linear(4, 3), 2).state_dict(), 0.1), {}, NotImplementedError, "before it is converted"),
        (({"w": torch.ones(2)}, 0.1), {"optimizer": "adamx"}, ValueError, "did you mean"),
        (({"w": torch.ones(2)}, 0.1), {"schedule": "cosine"}, ValueError, "give steps="),
        (({"w": torch.ones(2)}, 0.1), {"dtype": "bf61"}, ValueError, "bf61"),
        (
            ({"w": torch.ones(2)}, 0.1),
            {"weight_decay": -5},
            ValueError,
            "weight_decay=-5: give a finite number from 0 on",
        ),
        (({"w": torch.ones(2)}, 0.1), {"weight_decay": math.nan}, ValueError, "weight_decay=nan: give a finite number"),
        (({"w": torch.ones(2)}, 0.1), {"eps": -1}, ValueError, "eps=-1: give a finite number from 0 on"),
        (({"w": torch.ones(2)}, 0.1), {"momentum": "much"}, ValueError, "momentum='much': give a finite number"),
        (({"w": torch.ones(2)}, 0.1), {"start": 2.5}, ValueError, "start=2.5: give the steps made so far, a whole"),
        (({"w": torch.ones(2)}, 0.1), {"start": -5}, ValueError, "start=-5: give the steps made so far, a whole"),
        (({"w": torch.ones(2)}, 0.1), {"dtype": "e2m3fn"}, ValueError, "torch has no dtype of e2m3fn; give"),
    ],
)
def test_what_is_wrong_is_said(arguments, options, error, words):
    with pytest.raises(error, match=words):
        hu.forecast(*arguments, **options)


def test_an_optimizer_of_something_else_or_of_unknown_updates_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        hu.forecast(model, torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    with pytest.raises(NotImplementedError, match="Rprop's updates is not known"):
        hu.forecast(model, torch.optim.Rprop(model.parameters()))
    with pytest.raises(ValueError, match=r"betas=\(0.9, 1.0\): give two numbers from 0 on and below 1"):
        hu.forecast(model, 1e-3, steps=5, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="betas: the optimizer has its own"):
        hu.forecast(model, torch.optim.AdamW(model.parameters()), betas=(0.9, 0.9))


def test_a_scheduler_of_another_optimizer_is_refused():
    model = nn.Linear(2, 2)
    mine, other = torch.optim.AdamW(model.parameters(), 1e-3), torch.optim.SGD(model.parameters(), 0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(other, 0.9)
    with pytest.raises(
        ValueError, match=r"ExponentialLR, is of another optimizer, an SGD, than that given, an AdamW: gi"
    ):
        hu.forecast(model, mine, scheduler, steps=5)
    for own in (other, hu.optim.AdamW(model.parameters(), 1e-3)):
        assert hu.forecast(model, own, torch.optim.lr_scheduler.ExponentialLR(own, 0.9), steps=5, optimizer="adamw")


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9),
        lambda groups: torch.optim.Adam(groups, 1e-4),
        lambda groups: torch.optim.AdamW(groups, 1e-4, betas=(0.9, 0.99)),
        lambda groups: hu.optim.AdamW(groups, 1e-4, weight_update="kahan"),
        lambda groups: hu.optim.Lion(groups, 1e-4, weight_update="stochastic"),
    ],
)
def test_a_checkpoint_says_by_which_optimizer_and_at_which_rates_it_is_stepped(make, tmp_path, needs_torch):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).bfloat16()
    named = list(model.named_parameters())
    optimizer = make([{"params": named[:2]}, {"params": named[2:], "lr": 3e-3}])
    if type(optimizer) is torch.optim.Adam:
        needs_torch("a saved option that tells Adam's decay from AdamW's")
    model(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    saved = hu.forecast(tmp_path / "last.pt", None, "cosine", steps=20)
    live = hu.forecast(model, optimizer, "cosine", steps=20)
    assert saved.rule == live.rule == type(optimizer).__name__
    assert [layer.to_dict() for layer in saved.layers] == [layer.to_dict() for layer in live.layers]
    assert [finding.to_dict() for finding in saved.findings] == [finding.to_dict() for finding in live.findings]


def test_a_checkpoint_of_an_optimizer_that_is_not_known_says_so(tmp_path):
    model = nn.Linear(16, 16)
    optimizer = torch.optim.Adagrad(model.named_parameters(), 1e-3)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    assert "is not known: AdamW's updates are taken" in hu.forecast(tmp_path / "last.pt", steps=10).notes[0]
    assert hu.forecast(tmp_path / "last.pt", steps=10, optimizer="adam").notes == ()


def drifting(start: torch.Tensor, drift: torch.Tensor, lr: float, steps: int = 400, at: int = 80):
    """Weights in bfloat16 under Adam on noise with a drift: forecast and measured freeze step, and the range."""
    model = nn.Module()
    model.weight = nn.Parameter(start.bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    rates, last = [lr * (1 - step / steps) for step in range(steps)], 0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rates[step]
        model.weight.grad = (torch.randn(len(start)) + drift).bfloat16()
        before = model.weight.detach().clone()
        optimizer.step()
        if float((model.weight.detach() != before).double().mean()) >= 0.01:
            last = step + 1
        if step + 1 == at:
            layer = hu.forecast(model, optimizer, rates).layers[0]
    return layer, last


@pytest.mark.parametrize("way", ["each its own", "all down", "none"])
def test_weights_that_walk_across_a_power_of_two_are_followed(way, seed):
    """From 1 down the spacing is half of that above: which way weights go decides when they freeze."""
    start = 1 + 0.02 * torch.rand(2048)
    drift = {"each its own": 0.2 * torch.randn(2048), "all down": torch.full((2048,), 1.0), "none": torch.zeros(2048)}
    layer, measured = drifting(start, drift[way], 1.2e-2)
    assert layer.freeze_step == pytest.approx(measured, rel=0.12), (layer.freeze_step, measured)


def test_a_forecasts_updates_have_the_sign_of_the_steps(seed):
    """Weights just above 1 under gradients of one sign: up they freeze, down they find smaller spacings."""
    frozen = {}
    for sign in (-1.0, 1.0):
        layer, measured = drifting(torch.full((1024,), 1.0), torch.full((1024,), sign), 6e-3)
        frozen[sign] = layer.freeze_step
        assert layer.freeze_step == pytest.approx(measured, rel=0.15, abs=20), sign
    assert frozen[1.0] > frozen[-1.0] + 50


def test_what_no_optimizer_holds_does_not_freeze(tmp_path, seed):
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32)).bfloat16()
    optimizer = torch.optim.AdamW(model[0].named_parameters(), lr=1e-4)
    model(torch.randn(4, 8).bfloat16()).square().mean().backward()
    optimizer.step()
    beside = {"model": model[0].state_dict() | {"average.weight": torch.ones(3)}, "ema": model[1].state_dict()}
    torch.save({**beside, "optimizer": optimizer.state_dict()}, tmp_path / "with.pt")
    found = hu.forecast(tmp_path / "with.pt", None, "cosine", steps=10)
    assert [layer.name for layer in found.layers] == ["weight", "bias"]
    assert "'average.weight' are in no optimizer of the checkpoint: left out" in found.notes
    assert "tensors under 'ema' were not read: they are not the model's" in found.notes


W = torch.ones(8, 8, dtype=torch.bfloat16)


def test_complex_quantized_and_scale_tensors_are_named():
    others = {
        "wave": torch.ones(3, dtype=torch.complex64),
        "codes": torch.ones(3, 3, dtype=torch.int8),
        "scales": torch.ones(3).to(torch.float8_e8m0fnu),
        "pairs": torch.ones(3, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    beside = {"positions": torch.arange(3), "mask": torch.ones(3, dtype=torch.bool), "empty": torch.empty(0)}
    ahead = hu.forecast({"w": W} | others | beside, 1e-3, steps=10)
    assert [layer.name for layer in ahead.layers] == ["w", "empty"]
    (said,) = ahead.notes
    assert all(repr(name) in said for name in others)
    assert not any(name in said for name in beside)
    with pytest.raises(ValueError, match="nothing to forecast"):
        hu.forecast(others, 1e-3, steps=10)


@pytest.mark.parametrize("place", ["weight", "state"])
def test_nan_is_said(place):
    weights = {"w": W.clone(), "v": W.clone()}
    state = {"exp_avg": W.clone(), "exp_avg_sq": W.clone(), "step": torch.tensor(3.0)}
    (weights["w"] if place == "weight" else state["exp_avg_sq"])[2, 2] = math.nan
    states = {"state": {0: state}, "param_groups": [{"params": [0, 1], "param_names": ["w", "v"]}]}
    ahead = hu.forecast({"model": weights, "optimizer": states}, 1e-3, steps=10)
    assert "'w' hold NaN or infinity, in weights as trained or states: these are left out" in ahead.notes
    assert not any("'v'" in note for note in ahead.notes)


def test_weights_beyond_the_format_that_they_are_trained_in_are_said():
    ahead = hu.forecast({"w": torch.tensor([1.0, 1e6]), "v": torch.ones(2)}, 1e-3, steps=10, dtype="fp16")
    assert [note.split(",")[0] for note in ahead.notes] == ["'w' hold NaN or infinity"]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Linear(3, 3, device="meta"), "weight is on the meta device: give a model with weights"),
        (lambda: nn.LazyLinear(3), "weight is uninitialized: run the model once"),
    ],
)
def test_weights_without_numbers_are_refused_by_name(make, said):
    with pytest.raises(NotImplementedError, match=said):
        hu.forecast(make(), 1e-3, steps=10)


def test_more_steps_than_any_training_makes_are_refused():
    with pytest.raises(ValueError, match="give at most 100,000,000 steps ahead"):
        hu.forecast({"w": W}, 1e-3, "cosine", steps=10**9)
