"""multipoint against the paper's greedy search on a dense grid, and its errors against outputs that layers give."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.recipes._multipoint import pack_codes, unpack_codes

LAYERS = {
    "linear": (lambda: nn.Linear(12, 5), (9, 12)),
    "linear over sequences": (lambda: nn.Linear(12, 5), (3, 4, 12)),
    "strided": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (5, 4, 7, 8)),
    "grouped, dilated": (lambda: nn.Conv2d(4, 8, (3, 2), dilation=(2, 1), groups=2, bias=False), (5, 4, 9, 8)),
    "depthwise, reflecting": (lambda: nn.Conv1d(6, 6, 3, padding=1, groups=6, padding_mode="reflect"), (5, 6, 11)),
    "three dimensions, same": (lambda: nn.Conv3d(2, 3, (3, 1, 3), padding="same"), (2, 2, 4, 3, 5)),
}


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_codes_come_back(bits, seed):
    generator = torch.Generator().manual_seed(seed)
    most = 2 ** (bits - 1)
    codes = torch.randint(-most, most, (37,), generator=generator)
    packed = pack_codes(codes, bits)
    assert packed.numel() == -(-37 * bits // 8)
    assert torch.equal(unpack_codes(packed, bits, 37).to(torch.int64), codes)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("budget", [1.0, 2.5])
def test_errors_are_those_of_the_outputs(name, budget, seed):
    """The oracle is the layer itself, run in float64 with the old and the new weight."""
    make, shape = LAYERS[name]
    torch.manual_seed(seed % 2**31)
    model = nn.Sequential(make()).double()
    x = torch.randn(shape, dtype=torch.float64)
    plain = copy.deepcopy(model)
    made = hu.multipoint(model, 3, [x], budget=budget).layers["0"]
    bias = (
        0 if plain[0].bias is None else plain[0].bias.view(-1, *(1 for _ in shape[2:]) if "linear" not in name else ())
    )
    with torch.no_grad():
        wanted, got = plain(x) - bias, model(x) - bias
    assert made.error == pytest.approx(float((got - wanted).square().mean() / wanted.square().mean()), rel=1e-5)
    assert made.error <= made.before
    assert made.error < (0.2 if budget == 1 else 0.03)
    assert type(model[0]).__name__ == "MultipointLayer"


def dense_search(row, most, points):
    """The paper's greedy points by a dense grid over a, in NumPy: the residual's norm after each."""
    left, norms = row.copy(), []
    for _ in range(points):
        grid = np.linspace(0.05, 1.3, 4000)[:, None] * np.abs(left).max() / most
        codes = np.clip(np.round(left / grid), -most, most)
        errors = ((left - grid * codes) ** 2).sum(1)
        k = errors.argmin()
        left = left - grid[k] * codes[k]
        norms.append(errors[k])
    return norms


@pytest.mark.parametrize("bits", [2, 4])
def test_points_are_as_good_as_a_dense_search(bits, seed):
    """White inputs, so that the error of outputs is the error of weights."""
    rng = np.random.default_rng(seed)
    model = nn.Sequential(nn.Linear(64, 16, bias=False))
    model[0].weight.data = torch.tensor(rng.standard_normal((16, 64)), dtype=torch.float32)
    weight = model[0].weight.detach().double().numpy()
    # Later points depend on what the ones before left: sums differ by 10% and 25% (one standard deviation).
    for points, bound in ((1, 1.05), (2, 1.6), (3, 2.3)):
        one = copy.deepcopy(model)
        made = hu.multipoint(one, bits, [torch.eye(64)], budget=points + 0.6)
        counts = made.layers["0"].points
        left = ((one[0].weight.double().numpy() - weight) ** 2).sum(1)
        searched = [dense_search(row, 2 ** (bits - 1) - 1, int(n))[-1] for row, n in zip(weight, counts)]
        assert left.sum() < bound * sum(searched)


def test_bytes_are_those_of_the_buffers_and_within_the_budget(seed):
    torch.manual_seed(seed % 2**31)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    for budget in (1.0, 1.1, 1.5):
        one = copy.deepcopy(model)
        made = hu.multipoint(one, 4, [torch.randn(50, 64)], budget=budget)
        assert made.bytes <= budget * made.single_bytes
        held = 0
        for layer in (one[0], one[2]):
            extra = len(layer.scales) - layer.shape[0]
            held += layer.codes.numel() + 4 * layer.scales.numel() + 4 * extra
        assert made.bytes == held
        assert f"{made.bytes:,} bytes" in str(made)


def test_a_layer_is_saved_copied_and_differentiated(seed):
    torch.manual_seed(seed % 2**31)
    x = torch.randn(20, 6)
    model, other = (nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)) for _ in range(2))
    for one in (model, other):
        hu.multipoint(one, 4, [x], budget=2.0, keep=["1"])
    assert isinstance(model[1], nn.Linear)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    if len(model[0].scales) == len(other[0].scales):
        other.load_state_dict(torch.load(stored, weights_only=True))
        assert torch.equal(other(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    x.requires_grad_()
    model(x).sum().backward()
    assert bool(x.grad.abs().sum() > 0)
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_keep_their_digits_when_a_model_is_converted(dtype, seed):
    torch.manual_seed(seed % 2**31)
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(20, 6)
    hu.multipoint(model, 6, [x], budget=2.0)
    weight, scales = model[0].weight, model[0].scales.clone()
    assert model.to(dtype)(x.to(dtype)).dtype is dtype
    assert torch.equal(model[0].weight, weight.to(dtype))
    assert torch.equal(model.float()[0].weight, weight)
    assert model[0].scales.dtype is torch.float32
    assert torch.equal(model[0].scales, scales)
    assert model.to("meta")[0].weight.is_meta


def test_a_layer_in_two_places_is_quantized_in_both(seed):
    torch.manual_seed(seed % 2**31)
    layer, x = nn.Linear(6, 6), torch.randn(20, 6)
    model = nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer))
    wanted = model(x)
    made = hu.multipoint(model, 8, [x])
    assert list(made.layers) == ["0"]
    assert model[0] is model[2][0]
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=0.1)


def test_a_layer_that_is_called_by_name_is_quantized_as_any_other(seed):
    class Named(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(input=x)

    named, x = Named(nn.Linear(12, 5)), torch.randn(9, 12)
    plain = nn.Sequential(copy.deepcopy(named.layer))
    made = [hu.multipoint(model, 3, [x], budget=1.5) for model in (named, plain)]
    assert torch.equal(named(x), plain(x))
    assert made[0].bytes == made[1].bytes


def test_a_transformers_layer_still_takes_its_fast_path(seed):
    torch.manual_seed(seed % 2**31)
    model, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    hu.multipoint(model, 8, [x])
    slow = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), slow, rtol=1e-4, atol=1e-4)


def test_a_dead_channel_and_a_model_in_training_stay_so():
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).train()
    model[0].weight.data[1] = 0
    x = torch.randn(10, 6)
    made = hu.multipoint(model, 4, [{"input": x}], budget=3.0)
    assert model.training
    assert model[1].training
    assert bool((model[0].weight[1] == 0).all())
    assert int(made.layers["0"].points[1]) == 1


def test_batches_do_not_move_the_averages_of_a_model_in_training():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)).train()
    hu.multipoint(model, 4, [torch.randn(10, 6) + 3])
    assert int(model[0].num_batches_tracked) == 0


def test_a_layer_under_two_names_is_replaced_under_both():
    shared = nn.Linear(6, 6)
    model, x = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared)), torch.randn(10, 6)
    before = model(x)
    hu.multipoint(model, 8, [x])
    assert model[0] is model[2][0]
    assert torch.allclose(model(x), before, atol=0.1)


@pytest.mark.parametrize("broken", ["weight", "input"])
def test_what_is_not_finite_is_refused_and_nothing_changes(broken):
    model, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(3, 6)
    (model[0].weight.data if broken == "weight" else x)[0, 0] = torch.nan
    says = {"weight": "the weight of layer 0 is not finite", "input": "what 0 read is not finite"}[broken]
    with pytest.raises(ValueError, match=says):
        hu.multipoint(model, 4, [x])
    assert type(model[0]) is nn.Linear


def test_codes_are_not_converted(seed):
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8))
    x = torch.randn(64, 16)
    hu.multipoint(model, 4, [x])
    before = model(x)
    with pytest.raises(ValueError, match=r"0 has multipoint weights, which are codes and not trained: model\.to\("):
        hu.convert(model, "bf16-kahan")
    assert torch.equal(model(x), before)
    model.to(torch.bfloat16)(x.bfloat16())


def test_what_it_refuses():
    def model():
        return nn.Sequential(nn.Linear(6, 4), nn.ReLU())

    x = torch.randn(3, 6)
    with pytest.raises(ValueError, match=r"budget=0\.9 is met by no choice: one point of 4 bits .* takes 28 bytes"):
        hu.multipoint(model(), 4, [x], budget=0.9)
    with pytest.raises(TypeError, match=r"budget='1\.1' is a str: give a number, 1\.1 for a tenth more bytes"):
        hu.multipoint(model(), 4, [x], budget="1.1")
    with pytest.raises(ValueError, match="2 to 8"):
        hu.multipoint(model(), 1, [x])
    with pytest.raises(ValueError, match="holds nothing"):
        hu.multipoint(model(), 4, [])
    with pytest.raises(ValueError, match="no linear layer or convolution is left"):
        hu.multipoint(model(), 4, [x], keep=["*"])
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        hu.multipoint(x, 4, [x])
    hooked = model()
    hooked[0].register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="layer 0 has forward hooks, which its successor does not run"):
        hu.multipoint(hooked, 4, [x])
    broken = model()
    broken[0].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the weight of layer 0 is not finite"):
        hu.multipoint(broken, 4, [x])
    with pytest.raises(ValueError, match="what 0 read is not finite"):
        hu.multipoint(model(), 4, [x * torch.inf])
    unused = nn.Sequential(nn.Linear(6, 4))
    unused[0].aside = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"do not reach 0\.aside"):
        hu.multipoint(unused, 4, [x])
    assert type(unused[0]) is nn.Linear
    with pytest.raises(ValueError, match=r"keep=\['head'\] matches none of the layers 0"):
        hu.multipoint(model(), 4, [x], keep="head")
    quantized = model()
    hu.multipoint(quantized, 4, [x])
    with pytest.raises(ValueError, match="there is none"):
        hu.multipoint(quantized, 4, [x])
