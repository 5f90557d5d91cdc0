"""``rounding=``: how gradients become numbers of the scaler's format."""

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp import formats, rounding

WIDTH = 4096
# Between the neighbours 1 and 1.25 of e5m2, and exact in float32.
WANTED = 1.1015625


def bias_gradient(scaler: hu.AdaptiveGradScaler, model: nn.Linear) -> torch.Tensor:
    """The bias's gradient where every element of the output's is WANTED, unscaled."""
    model.zero_grad()
    scaler.scale((model(torch.zeros(1, 1)) * WANTED).sum()).backward()
    return model.bias.grad / scaler.get_scale()


def scaled(rounding, init_scale: float = 1.0) -> tuple[hu.AdaptiveGradScaler, nn.Linear]:
    model = nn.Linear(1, WIDTH)
    return hu.AdaptiveGradScaler(
        model, policy="constant", init_scale=init_scale, format="e5m2", rounding=rounding
    ), model


def test_stochastic_rounding_is_right_on_average(seed):
    found = bias_gradient(*scaled("stochastic"))
    assert set(found.tolist()) == {1.0, 1.25}
    share = (WANTED - 1) / 0.25
    assert abs((found == 1.25).double().mean() - share) < 7 * (share * (1 - share) / WIDTH) ** 0.5


def test_what_is_below_the_least_number_is_not_lost_on_average(seed):
    least = formats.e5m2.smallest_subnormal
    found = bias_gradient(*scaled("stochastic", init_scale=2.0**-18)) * 2.0**-18
    assert set(found.tolist()) == {0.0, least}
    share = WANTED * 2.0**-18 / least
    assert abs((found == least).double().mean() - share) < 7 * (share * (1 - share) / WIDTH) ** 0.5


@pytest.mark.parametrize(("mode", "wanted"), [("nearest", 1.0), (hu.rounding.Up(), 1.25), ("toward_zero", 1.0)])
def test_every_rounding_is_taken(mode, wanted, seed):
    assert bias_gradient(*scaled(mode)).unique().tolist() == [wanted]


def test_an_exponent_moves_what_is_rounded_and_adds_no_error(seed):
    """Rounded numbers stay numbers of the format at any exponent that keeps them in its normal range."""
    model = nn.Sequential(nn.Linear(1, WIDTH), nn.Identity(), nn.Linear(WIDTH, 1))
    nn.init.uniform_(model[2].weight, 2.0**-8, 2.0**-5)
    scaler = hu.AdaptiveGradScaler(model, format="e5m2", rounding="stochastic", init_scale=2.0**4)
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    scaler.set_exponents({"global": 3, "0": 9, "2": -2})
    model.zero_grad()
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    found = model[0].bias.grad / scaler.get_scale()
    assert torch.equal(rounding.quantize(found, "e5m2"), found)
    weight = model[2].weight[0].detach()
    assert torch.all((found - weight).abs() <= 0.25 * weight)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"rounding": "stochastic"}, ValueError, "give format= too"),
        ({"rounding": "stochastc", "format": "e5m2"}, ValueError, "stochastic"),
        ({"rounding": 3, "format": "e5m2"}, TypeError, "rounding"),
        ({"rounding": rounding.Stochastic(seed=3), "format": "e5m2"}, ValueError, "take 'stochastic' and torch.manual"),
        ({"format": "e8m0"}, ValueError, "e8m0 has no negative numbers"),
    ],
)
def test_refused(options, kind, match):
    model = nn.Linear(2, 2)
    with pytest.raises(kind, match=match):
        hu.AdaptiveGradScaler(model, **options)
    assert "forward" not in vars(model)


def test_a_format_of_ones_own_needs_no_name_that_others_know(seed):
    own = formats.Format("own", exponent_bits=3, mantissa_bits=4)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    scaler = hu.AdaptiveGradScaler(model, format=own)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(8):
        opt.zero_grad()
        scaler.scale(model(torch.randn(16, 4)).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
    assert scaler.last_step.applied
    row = scaler.sites()["2"]
    assert row.format == "own"
    # Three powers of two are left free, and the peak may be as old as four measurements.
    assert own.max / 2**7 <= max(row.amax.values()) * 2.0**row.exponent <= own.max
