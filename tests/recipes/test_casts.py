"""Casts at the borders of modules: numbers stay finite, arguments stay the ones they were, and so do writes."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from halfulp import recipes
from halfulp.kernels import same_bits
from halfulp.recipes._casts import cast_with_clamping

LEAST = torch.finfo(torch.float32).min
NARROW = ["bf16-kahan", "bf16-mixed", "fp16-kahan"]
SPECIAL = [0.0, -0.0, 1.0, 65519.0, 65520.0, -1e9, 3.3895313892515355e38, LEAST, -LEAST, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_cast_keeps_finite_numbers_finite(dtype: torch.dtype, wide: torch.dtype, seed: int) -> None:
    x = torch.cat([torch.tensor(SPECIAL, dtype=torch.float64), torch.randn(99, dtype=torch.float64) * 1e5]).to(wide)
    exact, largest = x.double(), torch.finfo(dtype).max
    beyond = x.to(dtype).isinf() & x.isfinite()
    wanted = torch.where(beyond, torch.full_like(exact, largest).copysign(exact), exact).to(dtype)
    views = [x, x[::3], x.reshape(-1, 1).expand(-1, 4), x[:0], *x.unbind(), x.reshape(3, 37).T]
    expected = [
        wanted,
        wanted[::3],
        wanted[:, None].expand(-1, 4),
        wanted[:0],
        *wanted.unbind(),
        wanted.reshape(3, 37).T,
    ]
    for given, right in zip(views, expected, strict=True):
        assert same_bits(cast_with_clamping(given, dtype), right)
    whole = torch.vmap(lambda row: cast_with_clamping(row, dtype))(x.reshape(3, 37))
    assert same_bits(whole, wanted.reshape(3, 37))
    leaf = x.clone().requires_grad_()
    cast_with_clamping(leaf, dtype).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.ones_like(x))


def test_a_cast_of_what_is_stored_otherwise(seed: int) -> None:
    dense = torch.tensor([[0.0, LEAST], [-math.inf, 2.0]])
    wanted = torch.tensor([[0.0, torch.finfo(torch.float16).min], [-math.inf, 2.0]], dtype=torch.float16)
    assert torch.equal(cast_with_clamping(dense.to_sparse(), torch.float16).to_dense(), wanted)
    nested = torch.nested.nested_tensor(list(dense), layout=torch.jagged)
    assert torch.equal(cast_with_clamping(nested, torch.float16).values(), wanted.flatten())
    meta = cast_with_clamping(dense.to("meta"), torch.bfloat16)
    assert (meta.dtype, meta.shape) == (torch.bfloat16, (2, 2))
    assert cast_with_clamping(dense.long(), torch.float16).dtype == torch.int64


def test_a_compiled_cast_is_the_eager_one(seed: int) -> None:
    x = torch.tensor(SPECIAL)
    compiled = torch.compile(lambda x: cast_with_clamping(x, torch.bfloat16), backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(x), cast_with_clamping(x, torch.bfloat16))


def test_what_is_given_twice_stays_one_tensor(seed: int) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, query: Tensor, key: Tensor, *, value: list[Tensor]) -> Tensor:
            assert query is key is value[0]
            return query @ self.weight

    x = torch.randn(2, 4)
    recipes.convert(Holder(), "bf16")(x, x, value=[x])


class Part(nn.Module):
    """A layer with a square weight, whose forward pass is a test's."""

    def __init__(self, run: Callable, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.run, self.inner = run, inner

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.run(self, x, *args, **kwargs)
        return x @ self.weight


@dataclasses.dataclass
class Memory:
    """What a layer remembers."""

    keys: Tensor
    other: Tensor


def _set_new(memory: Memory) -> None:
    setattr(memory, "new", 5)  # noqa: B010 - which no field declares


WRITES = {
    "tensor": (lambda: torch.zeros(3), lambda x: x.add_(1)),
    "slice": (lambda: torch.zeros(3, 2), lambda x: x[0].zero_()),
    "in a dict": (lambda: {"keys": torch.zeros(3)}, lambda x: x["keys"].add_(1)),
    "in a tuple": (lambda: ({"keys": torch.zeros(3)},), lambda x: x[0]["keys"].add_(1)),
    "entry": (lambda: {"keys": torch.zeros(3)}, lambda x: x.update(keys=torch.ones(1))),
    "new entry": (lambda: {"keys": torch.zeros(3)}, lambda x: x.update(more=1)),
    "append": (lambda: [torch.zeros(3)], lambda x: x.append(1)),
    "swap": (lambda: [torch.zeros(3), torch.zeros(3)], lambda x: x.reverse()),
    "pop": (lambda: {"keys": torch.zeros(3)}, lambda x: x.pop("keys")),
    "field": (lambda: Memory(torch.zeros(1), torch.zeros(1)), lambda x: setattr(x, "keys", torch.ones(1))),
    "new field": (lambda: Memory(torch.zeros(1), torch.zeros(1)), _set_new),
}


@pytest.mark.parametrize("recipe", ["bf16", "fp16-kahan", "fp64"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("make", "write"), WRITES.values(), ids=WRITES)
def test_writes_into_a_cast_argument_are_refused(recipe: str, context: Callable, make: Any, write: Any) -> None:
    model = recipes.convert(nn.Sequential(Part(lambda layer, x, given: write(given))), recipe)[0]
    reading = recipes.convert(nn.Sequential(Part(lambda layer, x, given: None)), recipe)[0]
    with context():
        reading(torch.ones(2, 4), make())
        with pytest.raises(RuntimeError, match=r"a Part wrote into an argument, .* make what it writes into"):
            model(torch.ones(2, 4), make())


def test_writes_into_what_needs_no_cast_are_seen() -> None:
    model = recipes.convert(nn.Sequential(Part(lambda layer, x, keys, empty: (keys.add_(1), empty.append(x)))), "bf16")
    keys, empty = torch.zeros(3, dtype=torch.bfloat16), []
    model[0](torch.ones(2, 4), keys, empty)
    assert keys.tolist() == [1, 1, 1]
    assert empty[0].dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", NARROW)
def test_layers_of_ones_own_run_in_graphs(recipe: str, seed: int) -> None:
    def run(layer: Part, x: Tensor) -> None:
        pass

    model = recipes.convert(nn.Sequential(nn.Linear(4, 4), Part(run), nn.LayerNorm(4)), recipe)
    x = torch.randn(2, 4)
    with torch.no_grad():
        wanted = model(x)
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), wanted)
        assert torch.equal(make_fx(model)(x)(x), wanted)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4)], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_that_is_cast_after_its_conversion_is_refused(norm: nn.Module, dtype: torch.dtype, seed: int) -> None:
    model = recipes.convert(nn.Sequential(nn.Linear(4, 4), copy.deepcopy(norm)), "bf16-kahan")
    model(torch.randn(3, 4))
    twin = copy.deepcopy(model).to(dtype)
    with pytest.raises(
        TypeError, match=r"parameter '1\.weight' is torch\.\w+, but halfulp.convert keeps .*Norm.* in float32"
    ):
        twin(torch.randn(3, 4))
    # What it advises works.
    assert recipes.revert(twin).to(torch.bfloat16)(torch.randn(3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    model(torch.randn(3, 4))


class Frequencies(nn.Module):
    """Times multiplied by frequencies, as networks of diffusion embed them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16) * 16, requires_grad=False)

    def forward(self, times: Tensor) -> Tensor:
        angles = times[:, None] * self.weight * (2 * math.pi)
        return torch.cat([angles.sin(), angles.cos()], 1)


@pytest.mark.parametrize("recipe", ["bf16-kahan", "fp16-kahan"])
def test_frequencies_keep_all_digits(recipe: str, seed: int) -> None:
    model = nn.Sequential(Frequencies(), nn.Linear(32, 4))
    why = {plan.name: plan.why for plan in recipes.explain(model, recipe).modules}
    assert why["0"] == "has vectors alone, which scale or shift; frozen"
    ours, times, seen = recipes.convert(copy.deepcopy(model), recipe), torch.rand(64), []
    ours[0].register_forward_hook(lambda module, args, out: seen.append(out))
    out = ours(times)
    assert (seen[0].float() - model[0](times)).abs().max() <= torch.finfo(seen[0].dtype).eps / 2
    torch.testing.assert_close(out, model(times), rtol=0.02, atol=0.02)
    assert ours[0].weight.dtype == torch.float32
    assert torch.equal(recipes.revert(ours)[0].weight, model[0].weight)


def masks(kind: str) -> Tensor:
    """Return a causal attention mask of 4 x 4."""
    if kind == "bool":
        return torch.ones(4, 4).triu(1).bool()
    return torch.full((4, 4), LEAST if kind == "least" else -1e9).triu(1)


@pytest.mark.parametrize("recipe", NARROW)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_row_that_is_masked_everywhere_stays_finite(recipe: str, training: bool, seed: int) -> None:
    attention, x, mask = (
        nn.MultiheadAttention(8, 2, batch_first=True).train(training),
        torch.randn(2, 4, 8),
        masks("least"),
    )
    mask[2] = LEAST
    ours = recipes.convert(copy.deepcopy(attention), recipe)
    wanted, got = (layer(x, x, x, attn_mask=mask)[0] for layer in (attention, ours))
    assert bool(got.isfinite().all())
    # float16's least number leaves scores beside it, float32's swallows them: such a row means nothing.
    rows = [0, 1, 3] if recipe == "fp16-kahan" else [0, 1, 2, 3]
    torch.testing.assert_close(got[:, rows], wanted[:, rows], rtol=0.02, atol=0.02)


def padding() -> Tensor:
    return torch.tensor([[False, False, True, True], [False, False, False, False]])


def r(*shape: int) -> Tensor:
    return torch.randn(*shape)


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return r(*shape), r(*shape)


X, Q = (2, 4, 8), {"batch_first": True}
_Inputs = Callable[[], tuple[tuple, dict[str, Any]]]
_Make = Callable[[], nn.Module]


def of(make: _Make, *inputs: Any, **options: Any) -> tuple[_Make, _Inputs]:
    """A case: the module, and its inputs, of which a tuple is the shape of a random tensor."""
    draw = lambda x: r(*x) if isinstance(x, tuple) else x() if callable(x) else x  # noqa: E731
    return make, lambda: (tuple(map(draw, inputs)), {k: draw(x) for k, x in options.items()})


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0, **Q, **options), 2, enable_nested_tensor=not options
    )


def decoder() -> nn.TransformerDecoder:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0, **Q), 2)


def transformer() -> nn.Transformer:
    return nn.Transformer(8, 2, 1, 1, 16, dropout=0, **Q)


def packed() -> Any:
    return nn.utils.rnn.pack_sequence([r(4, 8), r(2, 8)])


def integers(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, shape)


# By class: a module of every class of torch.nn that has parameters, in train and eval, with every mask it takes.
CASES: dict[str, list[tuple[_Make, _Inputs]]] = {
    "AdaptiveLogSoftmaxWithLoss": [
        of(lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], 2.0), (6, 8), integers(20, 6))
    ],
    "BatchNorm1d": [of(lambda: nn.BatchNorm1d(8), (4, 8))],
    "BatchNorm2d": [
        of(lambda: nn.BatchNorm2d(8), (2, 8, 4, 4)),
        of(lambda: nn.BatchNorm2d(8, affine=False), (2, 8, 4, 4)),
    ],
    "BatchNorm3d": [of(lambda: nn.BatchNorm3d(8), (2, 8, 2, 2, 2))],
    "Bilinear": [of(lambda: nn.Bilinear(8, 8, 3), (2, 8), (2, 8))],
    "Conv1d": [of(lambda: nn.Conv1d(8, 3, 3), (2, 8, 7))],
    "Conv2d": [of(lambda: nn.Conv2d(8, 3, 3, padding=1, padding_mode="circular"), (2, 8, 7, 7))],
    "Conv3d": [of(lambda: nn.Conv3d(8, 3, 2), (2, 8, 3, 3, 3))],
    "ConvTranspose1d": [of(lambda: nn.ConvTranspose1d(8, 3, 3), (2, 8, 7))],
    "ConvTranspose2d": [of(lambda: nn.ConvTranspose2d(8, 3, 3), (2, 8, 5, 5))],
    "ConvTranspose3d": [of(lambda: nn.ConvTranspose3d(8, 3, 2), (2, 8, 3, 3, 3))],
    "Embedding": [of(lambda: nn.Embedding(9, 8, padding_idx=0), integers(9, 4))],
    "EmbeddingBag": [
        of(lambda: nn.EmbeddingBag(9, 8, mode="sum"), integers(9, 2, 3), None, (2, 3)),
        of(lambda: nn.EmbeddingBag(9, 8, mode="max"), integers(9, 2, 3)),
    ],
    "GRU": [of(lambda: nn.GRU(8, 4, 2), (5, 2, 8), (2, 2, 4)), of(lambda: nn.GRU(8, 4), packed)],
    "GRUCell": [of(lambda: nn.GRUCell(8, 4), (2, 8), (2, 4))],
    "GroupNorm": [of(lambda: nn.GroupNorm(2, 8), (2, 8, 4))],
    "InstanceNorm1d": [of(lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True), (2, 8, 4))],
    "InstanceNorm2d": [of(lambda: nn.InstanceNorm2d(8, affine=True), (2, 8, 4, 4))],
    "InstanceNorm3d": [of(lambda: nn.InstanceNorm3d(8, affine=True), (2, 8, 2, 2, 2))],
    "LSTM": [
        of(lambda: nn.LSTM(8, 4, 2), (5, 2, 8), lambda: (r(2, 2, 4), r(2, 2, 4))),
        of(lambda: nn.LSTM(8, 4, bidirectional=True), packed),
    ],
    "LSTMCell": [of(lambda: nn.LSTMCell(8, 4), (2, 8), lambda: pair(2, 4))],
    "LayerNorm": [of(lambda: nn.LayerNorm(8), X)],
    "Linear": [of(lambda: nn.Linear(8, 3), X), of(lambda: nn.Linear(8, 3, bias=False), (8,))],
    "LinearCrossEntropyLoss": [of(lambda: nn.LinearCrossEntropyLoss(8, 5), (6, 8), integers(5, 6))],
    "MultiheadAttention": [
        *(
            of(lambda: nn.MultiheadAttention(8, 2, **Q), X, X, X, attn_mask=lambda kind=kind: masks(kind))
            for kind in ("least", "-1e9", "bool")
        ),
        of(lambda: nn.MultiheadAttention(8, 2, **Q), X, X, X, key_padding_mask=padding, need_weights=False),
        of(lambda: nn.MultiheadAttention(8, 2, **Q, kdim=6, vdim=5, add_bias_kv=True), X, (2, 3, 6), (2, 3, 5)),
    ],
    "PReLU": [of(lambda: nn.PReLU(8), (2, 8, 4))],
    "RMSNorm": [of(lambda: nn.RMSNorm(8), X)],
    "RNN": [of(lambda: nn.RNN(8, 4, nonlinearity="relu"), (5, 2, 8)), of(lambda: nn.RNN(8, 4), packed)],
    "RNNCell": [of(lambda: nn.RNNCell(8, 4), (2, 8), (2, 4))],
    "SyncBatchNorm": [],  # takes tensors of a GPU alone
    "Transformer": [
        of(
            transformer,
            X,
            X,
            tgt_mask=lambda: masks("least"),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
    ],
    "TransformerDecoder": [of(decoder, X, X, tgt_mask=lambda: masks("-1e9"), memory_key_padding_mask=padding)],
    "TransformerDecoderLayer": [
        of(lambda: nn.TransformerDecoderLayer(8, 2, 16, 0, **Q), X, X, tgt_mask=lambda: masks("least"))
    ],
    "TransformerEncoder": [
        of(encoder, X, src_key_padding_mask=padding),
        of(encoder, X, mask=lambda: masks("least")),
        of(lambda: encoder(norm_first=True), X, mask=lambda: masks("bool")),
    ],
    "TransformerEncoderLayer": [
        of(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0, **Q), X, src_key_padding_mask=padding),
        of(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0, **Q), X, src_mask=lambda: masks("least")),
    ],
    "parametrized": [
        of(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)), X),
        of(lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 3, 2)), (2, 8, 4)),
        *(
            of(lambda kind=kind: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map=kind), X)
            for kind in ("matrix_exp", "cayley", "householder")
        ),
        of(lambda: nn.utils.spectral_norm(nn.Linear(8, 3)), X),
        of(lambda: nn.Sequential(nn.Linear(8, 8), nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2)), X),
    ],
}

# Classes without parameters: they meet no weight, and take what they are given.
BARE = """
AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
AlphaDropout AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss CELU CTCLoss ChannelShuffle CircularPad1d
CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d Container CosineEmbeddingLoss
CosineSimilarity CrossEntropyLoss CrossMapLRN2d DataParallel Dropout Dropout1d Dropout2d Dropout3d ELU
FeatureAlphaDropout Flatten Fold FractionalMaxPool2d FractionalMaxPool3d GELU GLU GaussianNLLLoss Hardshrink
Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss Identity KLDivLoss L1Loss LPPool1d LPPool2d LPPool3d
LeakyReLU LocalResponseNorm LogSigmoid LogSoftmax MSELoss MarginRankingLoss MaxPool1d
MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d Mish Module ModuleDict ModuleList MultiLabelMarginLoss
MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss NLLLoss2d PairwiseDistance ParameterDict ParameterList
PixelShuffle PixelUnshuffle PoissonNLLLoss RNNBase RNNCellBase RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d
ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU Sequential SiLU Sigmoid SmoothL1Loss
SoftMarginLoss Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold
TripletMarginLoss TripletMarginWithDistanceLoss Unflatten Unfold Upsample UpsamplingBilinear2d
UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d
"""


def test_every_class_of_torch_is_among_the_cases() -> None:
    """Lazy ones become the others before a recipe takes them."""
    named = {name for name, x in vars(nn).items() if isinstance(x, type) and issubclass(x, nn.Module)}
    known = set(CASES) | set(BARE.split())
    assert {name for name in named - known if not name.startswith("Lazy")} == set()


def ran(module: nn.Module, args: tuple, kwargs: dict, training: bool) -> list[Tensor]:
    """A module's floating outputs."""
    out = module.train(training)(*args, **kwargs)
    return [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("recipe", NARROW)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        pytest.param(*case, id=f"{name}-{k}")
        for name, cases in CASES.items()
        if hasattr(nn, name) or name == "parametrized"
        for k, case in enumerate(cases)
    ],
)
def test_every_module_runs_as_in_float32(make: _Make, inputs: _Inputs, training: bool, recipe: str, seed: int) -> None:
    module = make()
    ours = make()
    ours.load_state_dict(module.state_dict())
    args, kwargs = inputs()
    if "attention" in type(module).__name__.lower() and args[0].shape == args[1].shape:
        args = (args[0],) * 3
    recipes.convert(ours, recipe)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            wanted = ran(module, *copy.deepcopy((args, kwargs)), training)
            got = ran(ours, *copy.deepcopy((args, kwargs)), training)
        for mine, right in zip(got, wanted, strict=True):
            assert mine.dtype == torch.float32
            # torch's fused encoder makes what is padding 0.
            told = right != 0 if "Encoder" in type(module).__name__ else torch.ones_like(right, dtype=torch.bool)
            assert bool(mine.isfinite().all())
            torch.testing.assert_close(mine[told], right[told], rtol=0.05, atol=0.15)
        loss = sum(x.square().sum() for x in got)
        if grad and list(ours.parameters()):
            loss.backward()
    gradients = [p.grad for p in ours.parameters() if p.grad is not None]
    assert bool(gradients) == bool(list(ours.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
