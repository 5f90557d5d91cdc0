"""assert_precision_ok: what passes, what fails and why it says so, and that nothing is left behind."""

import copy
import math
import random
import types
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import halfulp as hu
from halfulp import recipes
from halfulp.testing import PrecisionError, assert_precision_ok
from halfulp.testing._precision import (
    ShortTraining,
    _rank_differences_from_float32,
    compute_default_tolerance,
)

from ..samples import drawn


def model() -> nn.Module:
    layers = {"up": nn.Linear(16, 64), "norm": nn.LayerNorm(64), "act": nn.Tanh(), "head": nn.Linear(64, 4)}
    return nn.Sequential(OrderedDict(layers))


def state(x: nn.Module) -> dict[str, object]:
    """All that a test of a model could change."""
    found = {name: value.clone() for name, value in x.state_dict().items()}
    found |= {f"{name}.grad": None if p.grad is None else p.grad.clone() for name, p in x.named_parameters()}
    for name, module in x.named_modules():
        found[f"{name} hooks"] = (len(module._forward_hooks), len(module._forward_pre_hooks), module.training)
        found[f"{name} own"] = sorted(vars(module))
    found["random"] = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return found


@pytest.mark.parametrize("name", ["fp32", "bf16-kahan", "fp16-adaptive", "scaled-fp16-kahan", "fp16-mc2", "e8m5-kahan"])
def test_a_recipe_that_suits_passes_and_touches_nothing(name, seed):
    ours, x = model(), torch.randn(32, 16)
    ours(x).sum().backward()
    ours.head.eval()
    before = state(ours)
    with torch.no_grad():
        check = assert_precision_ok(ours, x, name, steps=3)
    after = state(ours)
    assert before.keys() == after.keys()
    random_before, random_after = before.pop("random"), after.pop("random")
    assert torch.equal(random_before[0], random_after[0])
    assert random_before[1:] == random_after[1:]
    for key, value in before.items():
        assert torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key], key
    assert check.passed
    assert check.findings == check.too_far == ()
    assert str(check).startswith(f"{name} passes: Sequential, 3 steps of AdamW at lr 0.001")


def test_lost_updates_are_named_with_their_cure_and_can_be_accepted(seed):
    ours, x = model(), torch.randn(32, 16)
    everywhere = recipes.get("bf16").replace(float32=())
    with pytest.raises(AssertionError) as caught:
        assert_precision_ok(ours, x, everywhere, lr=1e-5)
    said = str(caught.value)
    assert isinstance(caught.value, PrecisionError)
    found = caught.value.check.findings
    assert found[0].code == "updates-lost"
    assert any("norm.weight" in one.where for one in found if one.code == "updates-lost")
    assert "updates lost in bf16 at lr 1e-05" in said
    assert "cure: weight_update='kahan' of hu.optim, or keep these in float32" in said
    codes = {one.code for one in found}
    check = assert_precision_ok(ours, x, everywhere, lr=1e-5, accept=codes)
    assert check.findings == ()
    assert codes <= {one.code for one in check.notes}
    assert assert_precision_ok(ours, x, "bf16-kahan", lr=1e-5).passed


KEEPING = ["kahan", "split", "master", "components", "stochastic", "kahan-stochastic"]


@pytest.mark.parametrize("update", drawn(KEEPING, 3, "keeping"))
def test_what_keeps_the_rest_of_updates_is_not_taken_for_frozen(update, seed):
    recipe = recipes.get("bf16").replace(float32=(), weight_update=update)
    assert assert_precision_ok(model(), torch.randn(32, 16), recipe, lr=1e-5).passed


class Cancels(nn.Module):
    """Loses its digits between two large numbers, which no finding of a sampled tensor shows."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.early(x)
        return self.late((h + 512.0) - 512.0)


def test_digits_that_cancel_are_a_difference(seed):
    ours, x = Cancels(), torch.randn(32, 16)
    with pytest.raises(PrecisionError) as caught:
        assert_precision_ok(ours, x, "bf16-kahan", accept=("updates-lost",), loss=lambda out: out.square().mean())
    far = caught.value.check.too_far
    assert {one.name for one in far} & {"gradient 'late.weight'", "output 0"}
    assert [one.relative / one.allowed for one in far] == sorted(one.relative / one.allowed for one in far)[::-1]
    assert "farther from float32 than 0.25 of its norm" in str(caught.value)
    assert "recipe.replace(float32=...)" in str(caught.value)
    assert assert_precision_ok(ours, x, "fp32", loss=lambda out: out.square().mean()).passed


def test_an_overflow_is_found(seed):
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x * 300.0) * 300.0

    with pytest.raises(PrecisionError, match="first-nonfinite") as caught:
        assert_precision_ok(Large(), torch.randn(32, 16), "fp16-kahan", loss=lambda out: out.abs().mean() * 1e-4)
    assert any(one.relative == float("inf") for one in caught.value.check.too_far)


def test_differences_are_those_of_a_step_by_hand(seed):
    ours, x, y = model(), torch.randn(32, 16), torch.randint(0, 4, (32,))

    def loss(out):
        return functional.cross_entropy(out, y)

    check = assert_precision_ok(ours, x, "bf16-master", loss=loss, steps=2)
    by_hand = copy.deepcopy(ours)
    loss(by_hand(x)).backward()
    narrow = hu.convert(copy.deepcopy(ours), "bf16-master")
    # It may turn a weight half-way between two: until then the low bits of all have to fit into 16.
    hu.recipes.optimizer(narrow, "AdamW")
    loss(narrow(x)).backward()
    found = {one.name: one.relative for one in check.differences}
    for name, p in by_hand.named_parameters():
        wanted, got = p.grad.double(), narrow.get_parameter(name).grad.double()
        assert found[f"gradient {name!r}"] == pytest.approx(float((got - wanted).norm() / wanted.norm()), rel=1e-6)
    assert 0 < found["output 0"] < 0.02
    assert set(found) == {
        "losses of 2 steps",
        "output 0",
        *(f"gradient {name!r}" for name, _ in ours.named_parameters()),
    }


def test_a_gradient_that_is_zero_but_for_rounding_is_measured_beside_the_others(seed):
    layers = nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3)
    ours, x, y = nn.Sequential(*layers), torch.randn(16, 4, 12), torch.randint(0, 3, (16,))
    check = assert_precision_ok(ours, x, "bf16-kahan", loss=lambda out: functional.cross_entropy(out, y))
    bias = next(one for one in check.differences if one.name == "gradient '0.bias'")
    assert bias.relative < 0.1


def test_losses_that_cancel_are_measured_beside_their_terms(seed):
    ours, x = nn.Linear(16, 2, bias=False), torch.randn(32, 16)
    with torch.no_grad():
        ours.weight[1] = ours.weight[0] + 1e-4 * torch.randn(16)
    options = {"lr": 1e-6, "steps": 2, "accept": "updates-lost"}  # of a residual's half ulp, some are
    check = assert_precision_ok(ours, x, "bf16-kahan", loss=lambda out: (out[:, 0] - out[:, 1]).sum(), **options)
    losses = next(one for one in check.differences if one.name == "losses of 2 steps")
    assert losses.relative < 0.16


def test_a_frozen_model_fails_by_its_losses_too(seed):
    ours, x = nn.Linear(16, 4, bias=False), torch.randn(64, 16)
    with torch.no_grad():
        ours.weight.fill_(8.0)
    target = x[:, :4].argmax(1)
    everywhere = recipes.get("bf16").replace(name="bf16-everywhere", float32=())
    with pytest.raises(PrecisionError) as found:
        assert_precision_ok(
            ours,
            x,
            everywhere,
            loss=lambda out: nn.functional.cross_entropy(out.float(), target),
            lr=0.01,
            steps=60,
            accept=("updates-lost", "weight-frozen"),
        )
    assert any(one.name.startswith("losses") and one.relative > one.allowed for one in found.value.check.differences)


def test_outputs_before_a_reentrant_checkpoint_are_allowed(seed):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.first(x)
            logits = torch.utils.checkpoint.checkpoint(self.second, hidden, use_reentrant=True)
            return {"hidden": hidden, "logits": logits}

    x = torch.randn(4, 8)
    assert assert_precision_ok(Deep(), x, "bf16-kahan", loss=lambda out: out["logits"].square().mean(), lr=1e-4).passed


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, dropout=0.1)
        self.embedding, self.head = nn.Embedding(17, 32), nn.Linear(32, 4)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(x))).mean(1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(3)]
        self.parts, self.head = nn.ModuleList(parts), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0][:, -1])


def image() -> nn.Module:
    first = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(32, 4))


HEALTHY = {
    "perceptron": (model, lambda: torch.randn(32, 16)),
    "image": (image, lambda: torch.randn(16, 1, 8, 8)),
    "tokens": (Tokens, lambda: torch.randint(0, 17, (8, 12))),
    "residual": (Residual, lambda: torch.randn(32, 32)),
    "recurrent": (Recurrent, lambda: torch.randn(16, 10, 8)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["bf16-kahan", "fp16-adaptive"])
@pytest.mark.parametrize("kind", HEALTHY)
def test_models_that_train_well_stay_within_the_tolerance(kind, name, seed):
    make, batch = HEALTHY[kind]
    check = assert_precision_ok(make(), batch(), name, steps=3)
    assert max(one.relative for one in check.differences) < check.tolerance


def test_masks_of_dropout_are_the_same_in_all_runs(seed):
    ours = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    assert assert_precision_ok(ours, torch.randn(32, 16), "bf16-kahan").passed


def test_the_seed_decides_how_updates_are_rounded(seed):
    ours, x, found = nn.Linear(16, 8), torch.randn(32, 16), []
    for parameter in ours.parameters():  # bfloat16's own numbers: no seed decides how they are converted
        nn.init.ones_(parameter)
    options = {"loss": lambda out: out.float().square().sum(), "steps": 2}
    for own in (1, 1, 2, 3, 4, 5, 6, 7):
        check = assert_precision_ok(ours, x, "bf16-stochastic", seed=own, **options)
        found += [one for one in check.differences if one.name == "losses of 2 steps"]
    assert found[0] == found[1]
    assert len({one.relative for one in found}) > 1


def test_batches_of_keywords_and_losses_of_the_models_own(seed):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x, y=None):
            out = self.layer(x)
            return types.SimpleNamespace(loss=functional.mse_loss(out.float(), y), logits=out)

    x, y = torch.randn(8, 16), torch.randn(8, 4)
    for batch in ({"x": x, "y": y}, (x, y)):
        assert assert_precision_ok(Own(), batch, "bf16-kahan", steps=2, rule="SGD", lr=0.1, momentum=0.9).passed


def test_skipped_iterations_are_no_steps(seed):
    check = assert_precision_ok(
        model(), torch.randn(32, 16), "fp16-dynamic", loss=lambda out: 1e3 * out.square().mean(), steps=3
    )
    assert "3 steps" in check.setting
    assert " skipped" in check.setting


def test_requests_that_make_no_sense_are_refused(seed):
    ours, x = model(), torch.randn(8, 16)
    for change, error, message in (
        ({"model": ours.parameters()}, TypeError, "give a torch.nn.Module"),
        ({"model": model().half()}, TypeError, "starts from float32"),
        ({"recipe": "bf16-khan"}, ValueError, "bf16-kahan"),
        ({"loss": 3}, TypeError, "the loss is an int"),
        ({"loss": lambda out: out}, ValueError, r"the loss has shape \[8, 4\]"),
        ({"loss": lambda out: out.sum() * float("nan")}, ValueError, "in plain float32 the loss is nan"),
        ({"steps": 1}, ValueError, "2 or more"),
        ({"tolerance": 0.0}, ValueError, "above 0"),
        ({"accept": ("updates-lots",)}, ValueError, "updates-lost"),
        ({"rule": "AdamV"}, ValueError, "AdamW"),
    ):
        given = {"model": ours, "batch": x, "recipe": "bf16-kahan", **change}
        with pytest.raises(error, match=message):
            assert_precision_ok(**given)


def test_differences_and_what_is_allowed_by_hand():
    """Norms over float32's own, or over a floor: an eighth of the losses' terms, a tenth of the mean gradient."""
    results = {
        "gradient 'large'": torch.tensor([3.0, 4.0], dtype=torch.float64),
        "gradient 'nothing'": torch.zeros(4, dtype=torch.float64),
        "output 0": torch.tensor([0.0, 2.0], dtype=torch.float64),
        "output 1": torch.zeros(1, dtype=torch.float64),
        "output 2": torch.zeros(1, dtype=torch.float64),
    }

    def run(losses: list[float], **off: float | None) -> ShortTraining:
        moved = {name: x + off.get(name.split()[-1].strip("'"), 0.0) for name, x in results.items()}
        return ShortTraining(losses, [30.0, 40.0], moved, [], 0, [])

    plain = run([0.3, 0.4])
    twin, narrow = run([0.3, 0.9], large=0.01, **{"0": 0.5}), run([0.3, 1.4], large=0.1, nothing=0.2, **{"2": 1.0})
    found = {one.name: one for one in _rank_differences_from_float32(plain, twin, narrow, 0.25)}
    typical = math.sqrt(25 / 6)
    relative = {
        "losses of 2 steps": 1.0 / (50 / 8),
        "gradient 'large'": 0.1 * math.sqrt(2) / 5,
        "gradient 'nothing'": 0.2 * 2 / (0.1 * typical * 2),
        "output 0": 0.0,
        "output 1": 0.0,
        "output 2": math.inf,
    }
    of_the_twin = dict.fromkeys(relative, 0.0) | {
        "losses of 2 steps": 0.5 / (50 / 8),
        "gradient 'large'": 0.01 * math.sqrt(2) / 5,
        "output 0": 0.5 * math.sqrt(2) / 2,
    }
    assert {name: one.relative for name, one in found.items()} == pytest.approx(relative)
    allowed = {name: 0.25 + 4 * off for name, off in of_the_twin.items()}
    assert {name: one.allowed for name, one in found.items()} == pytest.approx(allowed)
    ratios = [one.relative / one.allowed for one in found.values()]
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize("got", [None, torch.ones(3), torch.tensor([1.0, math.nan]), torch.tensor([-math.inf, 1.0])])
def test_a_result_that_is_lacking_or_not_finite_is_infinitely_far(got):
    plain, narrow = (ShortTraining([1.0], [], results, [], 0, []) for results in ({"output 0": torch.ones(2)}, {}))
    narrow.results.update({} if got is None else {"output 0": got})
    far = _rank_differences_from_float32(plain, plain, narrow, 0.25)[0]
    assert (far.name, far.relative) == ("output 0", math.inf)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        *(("fp32", 1e-4), ("fp64", 1e-4), ("bf16", 32 * 2.0**-7), ("fp16-mc2", 1e-4), ("fp16-kahan", 32 * 2.0**-10)),
        *(("e8m5", 0.5), ("scaled-fp8", 0.5), ("scaled-fp16", 32 * 2.0**-10), ("fp16-adaptive", 32 * 2.0**-10)),
    ],
)
def test_the_default_tolerance_is_32_spacings(name, tolerance):
    assert compute_default_tolerance(recipes.get(name)) == tolerance
