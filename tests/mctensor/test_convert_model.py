"""A model's parameters as multi-component tensors, and back."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from halfulp.mctensor import MCTensor
from halfulp.mctensor._convert_model import multicomponent, single_component
from halfulp.scaled import scalify, unscalify
from halfulp.subclass import strict

# Convolutions and attention of two float64 run in one.
pytestmark = pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")
KINDS = [(torch.float16, 2), (torch.bfloat16, 3), (torch.float32, 2), (torch.float64, 2)]


class Net(nn.Module):
    """One of everything, with tied weights and a constant that is cast to the weights' dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("waves", torch.rand(8), persistent=False)
        self.register_buffer("kept", torch.rand(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        x = x + self.waves.cos().to(x.dtype)
        x = x + torch.tanh(self.mix(x.transpose(1, 2)).transpose(1, 2))
        x = self.norm(x)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def net() -> Net:
    return Net()


def ids() -> torch.Tensor:
    return torch.arange(22).reshape(2, 11) % 11


def gradients(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss = nn.functional.cross_entropy(model(ids()).flatten(0, 1), ids().flatten())
    loss.backward()
    value = loss.detach()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    plain = {name: g.decode() if isinstance(g, MCTensor) else g.double() for name, g in grads.items()}
    return float(value.decode() if isinstance(value, MCTensor) else value), plain


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_layer_works_as_in_float64_and_nothing_within_it_falls_back(kind, seed):
    dtype, components = kind
    start = net()
    model = multicomponent(copy.deepcopy(start), components, dtype, gradients="components")
    with contextlib.nullcontext() if dtype == torch.float64 else strict():
        loss, ours = gradients(model)
    wanted_loss, wanted = gradients(start.double())
    tolerance = max(2.0 ** -(components * {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)) * 2**10, 1e-14)
    if dtype == torch.float64:
        tolerance = 1e-6  # the start was a float32 model's: its constant's cosine too
    assert loss == pytest.approx(wanted_loss, abs=tolerance)
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (ours[name] - value).abs().max() <= tolerance * max(1, value.abs().max()), name


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_first_gradients_are_plain_tensors_of_the_components_dtype(kind, seed):
    model = multicomponent(net(), kind[1], kind[0])
    gradients(model)
    for parameter in model.parameters():
        assert type(parameter.grad) is torch.Tensor
        assert parameter.grad.dtype == kind[0]


def test_parameters_stay_parameters_tied_frozen_and_marked(seed):
    model = net()
    model.norm.weight.requires_grad_(False)
    model.norm.bias.no_decay = True
    assert multicomponent(model, 2, torch.bfloat16) is model
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, MCTensor)
        assert parameter.is_leaf
    assert model.head.weight is model.tokens.weight
    assert not model.norm.weight.requires_grad
    assert model.norm.bias.requires_grad
    assert model.norm.bias.no_decay
    assert type(model.kept) is torch.Tensor
    assert isinstance(model.waves, MCTensor)
    assert model.waves.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_and_back(kind, seed):
    model = net()
    start = copy.deepcopy(model)
    gradients(model)
    slopes = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    multicomponent(model, kind[1], kind[0], gradients="components")
    assert all(isinstance(parameter.grad, MCTensor) for parameter in model.parameters())
    assert single_component(model) is model
    assert model.head.weight is model.tokens.weight
    assert model.__dict__.keys() == start.__dict__.keys()
    assert not model._forward_pre_hooks
    assert not model.head._state_dict_hooks
    assert not model._load_state_dict_pre_hooks
    exact = kind not in ((torch.float16, 2),)
    for (name, ours), theirs in zip(model.named_parameters(), start.parameters()):
        assert type(ours) is nn.Parameter
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0 if exact else 2**-21, atol=0 if exact else 2**-30)
        torch.testing.assert_close(ours.grad, slopes[name], rtol=0 if exact else 2**-21, atol=0 if exact else 2**-30)
    assert torch.equal(model.waves, start.waves)
    assert type(model.waves) is torch.Tensor


def test_back_in_another_dtype(seed):
    model = multicomponent(nn.Linear(2, 2).double(), 2, torch.float32)
    assert single_component(copy.deepcopy(model), torch.float32).weight.dtype == torch.float32
    assert single_component(model).weight.dtype == torch.float64
    huge = nn.Linear(2, 2)
    huge.weight.data.fill_(1e20)
    with pytest.raises(ValueError, match=r"'weight' has values beyond torch.float16: give a wider dtype"):
        single_component(multicomponent(huge, 2), torch.float16)


def test_again_with_more_components_keeps_the_value(seed):
    model = multicomponent(net(), 2, torch.bfloat16)
    before = model.head.weight.decode()
    multicomponent(model, 4)
    assert len(model.head.weight.components) == 4
    assert torch.equal(model.head.weight.decode(), before)


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("norm.*", {"norm.weight", "norm.bias"}),
        (["norm.bias", "mix.*"], {"norm.bias", "mix.weight", "mix.bias"}),
        ("head.weight", {"tokens.weight"}),
        (lambda module, name: isinstance(module, nn.Conv1d) and "bias" not in name, {"mix.weight"}),
    ],
)
def test_where(where, wanted, seed):
    model = multicomponent(net(), where=where)
    assert {name for name, parameter in model.named_parameters() if isinstance(parameter, MCTensor)} == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"components": 0}, "components=0: allowed are 1 to 4"),
        ({"components": 5}, "components=5: allowed are 1 to 4"),
        ({"dtype": torch.int32}, "torch.int32"),
        ({"dtype": torch.complex64}, "torch.complex64"),
        ({"where": "norm.wieght"}, r"matches no parameter; did you mean 'norm.weight'"),
        ({"where": "nrm"}, r"matches no parameter; did you mean 'norm.bias' or 'norm.weight'"),
        ({"where": ["norm.*", "zzzzzzzzz"]}, r"'zzzzzzzzz' matches no parameter; the names are"),
        ({"where": lambda module, name: False}, "matches none of the model's"),
        ({"gradients": "second"}, "'first' .* 'components'"),
    ],
)
def test_bad_choices_leave_the_model_alone(given, message, seed):
    model = net()
    with pytest.raises(ValueError, match=message):
        multicomponent(model, **given)
    assert not any(isinstance(parameter, MCTensor) for parameter in model.parameters())


def test_bad_parameters_leave_the_model_alone(seed):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"parameter '1\.weight': torch\.complex64 .* leave it out by where="):
        multicomponent(model)
    with pytest.raises(ValueError, match="run one batch"):
        multicomponent(nn.LazyLinear(3))
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(ValueError, match=r"'weight' is of an .* with sparse=True, whose gradients have neither"):
            multicomponent(kind(3, 2, sparse=True))
    with pytest.raises(TypeError, match="globs over names"):
        multicomponent(model, where=[3])
    huge = nn.Linear(2, 2).double()
    huge.weight.data.fill_(1e39)
    with pytest.raises(ValueError, match=r"parameter 'weight': .*1e\+39.*scale"):
        multicomponent(huge, 2, torch.float32)
    assert not isinstance(huge.weight, MCTensor)


def test_deepcopy_and_pickle(seed):
    model = multicomponent(net(), 2, torch.float16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.head.weight is twin.tokens.weight
        for (name, ours), theirs in zip(twin.named_parameters(), model.parameters()):
            assert isinstance(ours, nn.Parameter), name
            assert all(map(torch.equal, ours.components, theirs.components)), name
            assert torch.equal(ours.scale, theirs.scale)
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(ids()).decode(), model(ids()).decode())
        single_component(twin)
        assert isinstance(model.head.weight, MCTensor)


def test_to_keeps_identity_and_components(seed):
    model = multicomponent(net(), 2, torch.bfloat16)
    weight = model.head.weight
    model.to(torch.float32)
    assert model.head.weight is weight is model.tokens.weight
    assert weight.dtype == torch.float32
    assert len(weight.components) == 2
    model.double().zero_grad()
    assert gradients(model)[1].keys() == dict(model.named_parameters()).keys()


def test_recurrent_modules_see_the_new_weights():
    layer = multicomponent(nn.GRU(2, 3), 2)
    assert layer._flat_weights[0] is layer.weight_ih_l0


def test_functional_calls_transforms_and_stacks(seed):
    layer = multicomponent(nn.Linear(4, 3), 2, torch.float32)
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    x = torch.randn(5, 4)

    def loss(parameters, row):
        return functional_call(layer, parameters, (row,)).square().sum()

    layer(x).square().sum().backward()
    whole = grad(loss)(parameters, x)
    torch.testing.assert_close(whole["weight"], layer.weight.grad)
    rows = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    assert rows["weight"].shape == (5, 3, 4)
    torch.testing.assert_close(rows["weight"].sum(0), layer.weight.grad, rtol=1e-5, atol=1e-5)
    stacked, _ = stack_module_state([layer, copy.deepcopy(layer)])
    assert stacked["weight"].shape == (2, 3, 4)
    assert len(stacked["weight"].components) == 2
    both = vmap(lambda p: functional_call(layer, p, (x,)))({k: v.detach() for k, v in stacked.items()})
    torch.testing.assert_close(both.decode()[1], layer(x).detach().decode(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(
    ("before", "way"),
    [
        (nn.Module.train, multicomponent),
        (multicomponent, single_component),
        (nn.Module.train, scalify),
        (scalify, unscalify),
    ],
)
def test_parameters_with_hooks_leave_the_model_alone(before, way, kind, seed):
    model = before(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    start = dict(model.named_parameters())
    handle = getattr(model[1].weight, kind)(lambda x: None)
    with pytest.raises(ValueError, match=r"parameter '1\.weight' has hooks"):
        way(model)
    assert all(start[name] is p for name, p in model.named_parameters())
    if way in (multicomponent, scalify):
        way(model, where="0.*")
    handle.remove()
    way(model)
    assert not any(start[name] is p for name, p in model.named_parameters())


def test_scaled_parameters_keep_their_scale(seed):
    model = nn.Sequential(nn.Linear(2, 2), scalify(nn.Linear(2, 2)))
    start = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"parameter '1\.weight' is a ScaledTensor: .*unscalify\(model\)"):
        multicomponent(model)
    assert all(start[name] is p for name, p in model.named_parameters())
    multicomponent(unscalify(model))
    assert isinstance(model[1].weight, MCTensor)
