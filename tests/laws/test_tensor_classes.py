"""Law: every tensor class that stands in for a plain tensor gives, within its bound, float64's values and gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfulp as hu


@dataclass(frozen=True)
class Representation:
    """A tensor class, how plain numbers become one, and how near its results are to float64's."""

    name: str
    encode: Callable[[Tensor], Tensor]
    convert: Callable[[nn.Module], nn.Module]
    tolerance: float

    def __str__(self) -> str:
        return self.name


REPRESENTATIONS = [
    Representation("plain", lambda x: x.clone(), lambda model: model, 2e-6),
    Representation(
        "two-float32",
        lambda x: hu.MCTensor.encode(x, components=2, dtype=torch.float32, gradients="components"),
        lambda model: hu.multicomponent(model, components=2, dtype=torch.float32),
        2e-6,
    ),
    Representation(
        "three-bfloat16",
        lambda x: hu.MCTensor.encode(x, components=3, dtype=torch.bfloat16, gradients="components"),
        lambda model: hu.multicomponent(model, components=3, dtype=torch.bfloat16),
        2e-5,
    ),
    Representation(
        "scaled-float32",
        lambda x: hu.ScaledTensor.encode(x, dtype=torch.float32, scale=0.25),
        lambda model: hu.scalify(model, dtype=torch.float32),
        2e-6,
    ),
    Representation(
        "scaled-float16",
        lambda x: hu.ScaledTensor.encode(x, dtype=torch.float16),
        lambda model: hu.scalify(model, dtype=torch.float16),
        4e-3,
    ),
]
each = pytest.mark.parametrize("kind", REPRESENTATIONS, ids=str)


def value(x: Tensor) -> Tensor:
    """The numbers that a tensor stands for, in float64."""
    if isinstance(x, hu.MCTensor):
        return x.detach().decode(torch.float64)
    return (x.detach().decode() if isinstance(x, hu.ScaledTensor) else x.detach()).double()


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    found, wanted = value(found), wanted.detach().double()
    finite = wanted.isfinite()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[wanted.isinf()], wanted[wanted.isinf()])
    size = wanted[finite].abs().amax() if finite.any() else torch.tensor(0.0)
    torch.testing.assert_close(found[finite], wanted[finite], rtol=tolerance, atol=float(tolerance * size))


VIEWS = {
    "select": lambda x: x[1],
    "slice": lambda x: x[1:4:2],
    "column": lambda x: x[:, 2],
    "transpose": lambda x: x.t()[1:3],
    "diagonal": lambda x: x.diagonal(),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "unfold": lambda x: x.unfold(0, 2, 2)[1],
    "flattened": lambda x: x.view(-1)[3:9],
}
WRITES = {
    "mul_": lambda x: x.mul_(0.5),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.full(x.shape, 0.375)),
    "neg_": lambda x: x.neg_(),
    "clamp_": lambda x: x.clamp_(-0.25, 0.25),
}


@pytest.mark.sampled(2)
@each
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_write_through_a_view_leaves_other_elements_as_they_were(kind, view, write, seed):
    plain = value(kind.encode(torch.rand(5, 5) - 0.5))
    held = kind.encode(plain.float())
    before = value(held)
    WRITES[write](VIEWS[view](held))
    WRITES[write](VIEWS[view](plain))
    touched = torch.zeros(5, 5, dtype=torch.bool)
    VIEWS[view](touched).fill_(True)
    assert torch.equal(value(held)[~touched], before[~touched])
    assert_near(held, plain, kind.tolerance)


@each
@pytest.mark.parametrize("rows", [[[-torch.inf] * 3], [[torch.inf, 0.0, -torch.inf]], [[torch.nan, 1.0, -torch.inf]]])
def test_logsumexp_and_softmax_of_infinite_rows_are_torchs(kind, rows):
    x = torch.tensor([*rows, [0.5, -1.0, 2.0]])
    for operator in (lambda t: t.logsumexp(1), lambda t: t.softmax(1), lambda t: t.log_softmax(1)):
        assert_near(operator(kind.encode(x)), operator(x.double()), kind.tolerance)


@each
@pytest.mark.parametrize("bounds", [(torch.nan, None), (None, torch.nan), (0.0, torch.nan), (torch.nan, 0.0)], ids=str)
def test_a_bound_that_is_nan_gives_nan(kind, bounds):
    plain = torch.tensor([1.0, -2.0, torch.inf, torch.nan])
    if not plain.clamp(*bounds).isnan().all():
        pytest.skip("this torch takes a number that is NaN for no bound")
    x = kind.encode(plain)
    assert value(x.clamp(*bounds)).isnan().all()
    assert value(x.clamp(*(torch.tensor(b) if b is not None else b for b in bounds))).isnan().all()


@pytest.mark.sampled(2)
@each
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm1d])
def test_running_statistics_are_torchs(kind, norm, momentum, seed):
    if norm is nn.InstanceNorm1d and momentum is None:
        return  # torch takes its mean over no batch
    plain = norm(4, momentum=momentum, track_running_stats=True, affine=True)
    model = norm(4, momentum=momentum, track_running_stats=True, affine=True)
    model.load_state_dict(plain.state_dict())
    model = kind.convert(model)
    shape = (6, 4, 3, 2) if norm is nn.BatchNorm2d else (6, 4, 5)
    for _ in range(3):
        x = 3 * torch.randn(shape) + 1
        plain(x)
        model(x)
    assert int(model.num_batches_tracked) == int(plain.num_batches_tracked)
    # torch's instance_norm rounds the statistics to the dtype that its weight says it has.
    narrow = norm is nn.InstanceNorm1d and model.weight.dtype == torch.bfloat16
    tolerance = 2.0**-7 if narrow else max(kind.tolerance, 2e-6)
    assert_near(model.running_mean, plain.running_mean, tolerance)
    assert_near(model.running_var, plain.running_var, tolerance)


@each
def test_inference_mode_changes_no_number(kind, seed):
    x, w = torch.randn(4, 8), torch.randn(3, 8)

    def view(a: Tensor) -> list[Tensor]:
        return [a.t(), a[0], a.view(-1), a.reshape(8, 4), a[None].expand(2, 4, 8), *a.chunk(2), *a, a.detach()]

    def run(a: Tensor, b: Tensor) -> list[Tensor]:
        results = [F.gelu(F.linear(a, b)), F.layer_norm(a, (8,)), (a * a).sum(1), a.softmax(1), a @ b.t(), x @ b.t()]
        return [value(result) for result in results + view(a)]

    made = kind.encode(x), kind.encode(w)
    plain = run(*made)
    with torch.inference_mode():
        inside, outside = run(kind.encode(x), kind.encode(w)), run(*made)
        views = view(made[0])
    assert not any(one.is_inference() for one in views)
    for results in (inside, outside):
        assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))


@each
def test_a_model_is_saved_in_inference_mode(kind, seed):
    model = kind.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[1].weight = model[0].weight
    wanted = model.state_dict()
    with torch.inference_mode():
        saved, made_inside = model.state_dict(), kind.convert(nn.Linear(4, 4)).state_dict()
    assert made_inside
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[name], x) for name, x in wanted.items())
    assert saved["0.weight"].data_ptr() == saved["1.weight"].data_ptr()


OPTIONS = {
    "embedding": lambda w: F.embedding(torch.tensor([0, 2, 2, 3]), w),
    "embedding scale_grad_by_freq": lambda w: F.embedding(torch.tensor([0, 2, 2, 3]), w, scale_grad_by_freq=True),
    "embedding padding_idx": lambda w: F.embedding(torch.tensor([0, 2, 2, 3]), w, padding_idx=2),
    "embedding_bag mean": lambda w: F.embedding_bag(torch.tensor([[0, 2], [2, 3]]), w, mode="mean"),
    "embedding_bag sum": lambda w: F.embedding_bag(torch.tensor([[0, 2], [2, 3]]), w, mode="sum"),
    "embedding_bag scale_grad_by_freq": lambda w: F.embedding_bag(
        torch.tensor([[0, 2], [2, 3]]), w, mode="sum", scale_grad_by_freq=True
    ),
    "cross_entropy smoothing": lambda w: F.cross_entropy(w, torch.tensor([1, 0, 3, 2]), label_smoothing=0.2),
    "cross_entropy ignore": lambda w: F.cross_entropy(w, torch.tensor([1, -100, 3, 2])),
    "cross_entropy weight": lambda w: F.cross_entropy(
        w, torch.tensor([1, 0, 3, 2]), weight=torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 1.0])
    ),
    "sum keepdim": lambda w: w.sum(0, keepdim=True),
    "var correction": lambda w: w.var(1, correction=0),
    "layer_norm": lambda w: F.layer_norm(w, (6,), eps=0.3),
    "avg_pool count": lambda w: F.avg_pool1d(w[None], 2, padding=1, count_include_pad=False),
    "avg_pool divisor": lambda w: F.avg_pool2d(w[None, None], 2, divisor_override=3),
    "conv groups": lambda w: F.conv1d(w[None, :, :], torch.ones(4, 2, 3), groups=2, padding=2, dilation=2, stride=2),
    "interpolate": lambda w: F.interpolate(w[None, None], scale_factor=2, mode="bilinear", align_corners=True),
    "cumsum": lambda w: w.cumsum(1),
    "clamp": lambda w: w.clamp(-0.3, 0.4),
    "softplus": lambda w: F.softplus(w, beta=3.0, threshold=1.0),
    "gelu tanh": lambda w: F.gelu(w, approximate="tanh"),
    "elu": lambda w: F.elu(w, alpha=0.7),
    "pow": lambda w: (w * w + 1).pow(1.5),
}


# Convolutions beyond float64 are float64's, and say so.
@pytest.mark.filterwarnings("ignore:aten.convolution:halfulp.subclass.FallbackWarning")
@pytest.mark.sampled(2)
@each
@pytest.mark.parametrize("option", OPTIONS)
def test_a_gradient_is_the_plain_one_under_every_option(kind, option, seed):
    start = torch.randn(4, 6)
    leaf = kind.encode(start).detach().requires_grad_()
    plain = value(leaf).float().requires_grad_()
    for w in (leaf, plain):
        result = OPTIONS[option](w)
        weights = torch.linspace(0.5, 1.5, result.numel()).view(result.shape)
        (result * weights).sum().backward()
    assert_near(leaf.grad, plain.grad, max(20 * kind.tolerance, 1e-5))


@pytest.mark.parametrize("operator", ["linear", "conv2d", "conv_transpose1d"])
def test_a_biass_gradient_scales_with_every_operand(operator, seed):
    """The same values under other powers of two: the gradient of the bias has the same bits."""
    shapes = {
        "linear": ((5, 3), (4, 3)),
        "conv2d": ((2, 3, 5, 5), (4, 3, 3, 3)),
        "conv_transpose1d": ((2, 3, 5), (3, 4, 3)),
    }
    call, (input_shape, weight_shape) = getattr(F, operator), shapes[operator]
    operands = [torch.randn(input_shape), torch.randn(weight_shape), torch.randn(4)]
    ahead = torch.randn(call(*operands).shape)
    wanted = None
    for moved in (None, 0, 1, 2, 3):
        scales = [2.0 ** (11 if k == moved else 0) for k in range(4)]
        given = [hu.ScaledTensor.encode(x, dtype=torch.float32, scale=s) for x, s in zip(operands, scales)]
        leaves = [x.detach().requires_grad_() for x in given]
        call(*leaves).backward(hu.ScaledTensor.encode(ahead, dtype=torch.float32, scale=scales[3]))
        found = [value(leaf.grad) for leaf in leaves]
        wanted = wanted or found
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), f"operand {moved}"


@pytest.mark.sampled(2)
@each
@pytest.mark.parametrize("count", [1, 7, 8, 9, 127, 128, 129, 1023, 1024, 1025, 4097])
def test_a_mean_is_float64s_on_both_sides_of_every_block_size(kind, count, seed):
    x = kind.encode(torch.rand(2, count) + 1)
    assert_near(x.mean(1), value(x).mean(1), kind.tolerance)
    assert_near(x.mean(), value(x).mean(), kind.tolerance)
    assert_near(x.t().contiguous().mean(0), value(x).mean(1), kind.tolerance)
