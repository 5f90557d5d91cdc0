"""What a home does to storages: autocast's list widens, products bring back, gradients accumulate in the home."""

import contextlib
import copy
import itertools
import pickle

import pytest
import torch
from torch.nn import functional

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor
from halfulp.scaled._operands import (
    choose_home_for_storage,
    find_operand_preparation,
    is_outer_broadcast,
    round_second_moment_above_zero,
    round_to_home,
)
from halfulp.scaled._registry import FAMILY_BY_NAME, FAMILY_BY_OPERATOR, Family, implements, register_family

HOMES = (torch.float16, torch.bfloat16)


def tensor(*shape: int, home: torch.dtype = torch.float16) -> ScaledTensor:
    return ScaledTensor.encode(torch.randn(shape), home, home=home).requires_grad_()


def kind(x: ScaledTensor) -> tuple:
    return x.payload.dtype, x.home


def test_every_family_says_what_it_does_to_storages():
    own = {family for operator, family in FAMILY_BY_OPERATOR.items() if "halfulp_doc" not in operator.name()}
    assert own <= FAMILY_BY_NAME.keys()
    with pytest.raises(ValueError, match="'gated' already"):
        register_family(Family("gated", "f(p s) / s", "s"))
    with pytest.raises(ValueError, match="say in words"):
        register_family(Family("of no words", "", "s"))
    with pytest.raises(ValueError, match="operands='wide': allowed are 'float32'"):
        register_family(Family("of no storage", "p", "s", operands="wide"))
    with pytest.raises(ValueError, match="unknown family 'gate'; did you mean 'gated'"):
        implements(torch.ops.aten.erfc.default, family="gate")


def test_an_outer_sum_is_one_in_which_broadcasting_repeats_both():
    sizes = [size for rank in range(4) for size in itertools.product((1, 2, 3), repeat=rank)]
    empty = {size: torch.empty(size, device="meta") for size in sizes}
    for one, other in itertools.product(sizes, repeat=2):
        with contextlib.suppress(RuntimeError):
            is_outer = torch.broadcast_shapes(one, other) not in (one, other)
            assert is_outer == is_outer_broadcast(empty[one], empty[other]), (one, other)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "widening",
    [
        *(torch.exp, torch.log1p, torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.sqrt, torch.rsqrt),
        *(torch.reciprocal, torch.sum, torch.mean, torch.var, torch.norm, torch.cumsum),
    ],
)
def test_what_autocast_computes_in_float32_keeps_a_float32_payload(widening, home, seed):
    x = tensor(4, 8, home=home)
    dims = (0,) if widening is torch.cumsum else ()
    assert kind(widening(x, *dims)) == (torch.float32, home)


def test_chains_of_pointwise_operators_stay_wide_until_a_product(seed):
    x, weight, bias = tensor(4, 8), tensor(6, 8), tensor(6)
    wide, narrow = (torch.float32, torch.float16), (torch.float16, torch.float16)
    assert kind(x + x) == kind(x * 2) == kind(x / 2) == kind(x.relu()) == narrow
    assert kind(x.exp() + x) == kind((x.exp() * 2).view(8, 4)) == kind(torch.cat([x, x.exp()])) == wide
    assert kind(x / x) == kind(x - x) == kind(x**2) == kind(x.softmax(-1)) == wide
    assert kind(functional.linear(x.exp(), weight, bias)) == kind(x.exp() @ x.mT) == narrow
    assert kind(functional.layer_norm(x, (8,))) == narrow
    assert kind(functional.embedding(torch.tensor([1]), weight.exp())) == narrow
    query = tensor(1, 2, 4, 8)
    assert kind(functional.scaled_dot_product_attention(query.exp(), query, query)) == narrow
    assert kind(functional.conv1d(query[0].exp(), tensor(2, 4, 1))) == narrow


def test_without_a_home_no_operator_changes_storage(seed):
    x = ScaledTensor.encode(torch.randn(4, 8))
    for y in (x.exp(), x / x, x.softmax(-1), x.sum(), x**2, x - x):
        assert kind(y) == (torch.float16, None)


def test_gradients_of_leaves_are_in_the_home(seed):
    x, weight, bias = tensor(4, 8), tensor(6, 8), tensor(6)
    for _ in range(2):  # the first is stored, the second added
        (functional.linear(x, weight, bias).softmax(-1).log() * bias).sum().backward()
        assert {kind(p.grad) for p in (x, weight, bias)} == {(torch.float16, torch.float16)}
    (found,) = torch.autograd.grad(bias.exp().sum(), bias)
    assert kind(found) == (torch.float32, torch.float16)


def test_writing_in_place_keeps_the_storage(seed):
    x = tensor(4, 8).detach()
    x.exp_()
    x += x.exp()
    assert kind(x) == (torch.float16, torch.float16)
    plain = ScaledTensor.encode(torch.randn(4, 8))
    plain.add_(x)
    assert kind(plain) == (torch.float16, None)


def test_a_home_goes_with_copies_and_views(seed):
    x = tensor(4, 8)
    copies = [copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.nn.Parameter(x.detach()), x.with_scale(4.0)]
    for y in (*copies, x.data, x[0], x.T, x.to(torch.bfloat16), torch.zeros_like(x), *x.unbind()):
        assert y.home == torch.float16
    wide = copy.deepcopy(x.exp().detach())
    assert kind(wide) == kind(pickle.loads(pickle.dumps(wide))) == (torch.float32, torch.float16)


def test_plain_gradients_come_back_with_the_home(seed):
    x = tensor(4)
    x.decode().square().sum().backward()
    assert kind(x.grad) == (torch.float16, torch.float16)
    given = torch.randn(4, requires_grad=True)
    ScaledTensor.encode(given, home=torch.float16).exp().sum().backward()
    assert type(given.grad) is torch.Tensor


def test_bringing_home_loses_half_an_ulp(seed):
    x = tensor(64).detach().exp() * 1e-9
    near = round_to_home(x)
    assert ((near.decode() - x.decode()).abs() <= 2.0**-11 * x.decode().abs()).all()
    special = ScaledTensor(torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0]), 1.0, home=torch.float16)
    assert same_bits(round_to_home(special).decode(), special.decode())
    assert round_to_home(ScaledTensor(torch.zeros(3), 8.0, home=torch.float16)).tolist() == [0.0] * 3
    assert round_to_home(ScaledTensor(torch.zeros(0, 3), 1.0, home=torch.float16)).shape == (0, 3)


def test_modes_of_autograd_give_the_same(seed):
    x, weight = tensor(4, 8), tensor(6, 8)

    def computed() -> torch.Tensor:
        return (functional.linear(x.softmax(-1), weight).log_softmax(-1) / x.sum()).detach().decode()

    with torch.no_grad():
        without = computed()
    with torch.inference_mode():
        assert same_bits(computed(), without)
    assert same_bits(computed(), without)


def test_what_writes_or_is_made_of_steps_leaves_its_operands():
    aten = torch.ops.aten
    assert find_operand_preparation(aten.add_.Tensor) is None
    assert find_operand_preparation(aten.linear.default) is None
    assert choose_home_for_storage(torch.float8_e4m3fn, "autocast") == torch.float16
    assert choose_home_for_storage(torch.float32, "autocast") is None
    assert choose_home_for_storage(torch.float16, "none") is None


@pytest.mark.parametrize("home", [torch.float32, torch.float8_e5m2, "float16"])
def test_other_homes_are_refused(home):
    with pytest.raises(ValueError, match=r"allowed are torch\.float16, torch\.bfloat16 and None"):
        ScaledTensor.encode(torch.ones(2), home=home)
    with pytest.raises(ValueError, match=r"allowed are torch\.float16"):
        ScaledTensor(torch.ones(2), 1.0, home=home)


def test_results_do_not_depend_on_how_wide_values_are_split(seed):
    weight, bias = tensor(6, 8), tensor(6)
    payload = torch.randn(4, 8)
    gradient = ScaledTensor.encode(torch.randn(4, 6), home=torch.float16)
    found = []
    for power in (0, 9, -13):
        x = ScaledTensor(payload * 2.0**-power, 2.0**power, home=torch.float16).requires_grad_()
        y = functional.linear(x * x.sigmoid(), weight, bias)
        y.backward(gradient)
        found.append([v.decode() for v in (y.detach(), x.grad, weight.grad, bias.grad)])
        weight.grad = bias.grad = None
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other))


def test_an_optimizer_of_torch_trains_them_as_without(seed):
    start, x = torch.nn.Linear(8, 4), torch.randn(16, 8)
    ends = []
    for wide in ("autocast", "none"):
        model = hu.scalify(copy.deepcopy(start), wide=wide)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), torch.arange(16) % 4).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert {p.payload.dtype for p in model.parameters()} == {torch.float16}
        ends.append(model.weight.detach().decode())
    moved = (ends[1] - start.weight.detach()).norm()
    assert (ends[0] - ends[1]).norm() <= 3e-2 * moved


@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e5m2, torch.bfloat16, torch.float32], ids=str)
def test_a_second_moment_of_something_is_above_0(storage):
    """The larger of what it was and what is added keeps it so; a number below 0, which none has, does not."""
    tiny = 2.0**-30
    pairs = [*itertools.product([0.0, tiny, 0.5, -tiny], [0.0, tiny, 0.5, -tiny])]
    before, added = (torch.tensor(column) for column in zip(*pairs))
    x = ScaledTensor(before.to(storage), 1.0)
    total = ScaledTensor(before + added, 1.0)
    found = round_second_moment_above_zero(total, x, ScaledTensor(added, 1.0))
    assert found.payload.dtype == storage
    least = torch.finfo(storage).smallest_normal * torch.finfo(storage).eps
    for payload, held, (a, b) in zip(found.payload.double().tolist(), x.payload.double().tolist(), pairs):
        if abs(a + b) <= least / 2:
            assert payload == (least if held >= 0 and b >= 0 and max(held, b) > 0 else 0.0), (a, b)
        else:
            assert payload == pytest.approx(a + b)
