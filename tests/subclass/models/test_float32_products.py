"""float32_products: every layer that multiplies, and whatever else happens to a model that has it."""

import copy
import gc
import inspect
import io
import pickle
import re
import threading
import types
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfulp as hu
from halfulp import recipes
from halfulp.arithmetic._float32_products import NAME_BY_PRODUCT_FUNCTION
from halfulp.environment._narrow_products import (
    SIXTEEN_BIT_DTYPES,
    force_float32_products,
    list_dtypes_multiplied_in_float32,
)
from halfulp.kernels import count_fallbacks, same_bits
from halfulp.subclass.models._float32_products import _WIDENED_MARK_ATTRIBUTE

DTYPES = pytest.mark.parametrize("dtype", SIXTEEN_BIT_DTYPES, ids=["bf16", "fp16"])
# One of every class of torch.nn that multiplies, with the shapes of its inputs.
LAYERS = {
    "Linear": (lambda: nn.Linear(6, 4), [(3, 6)]),
    "Bilinear": (lambda: nn.Bilinear(6, 5, 4), [(3, 6), (3, 5)]),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), [(2, 3, 9)]),
    "Conv2d, reflected": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), [(2, 3, 8, 8)]),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), [(2, 2, 4, 4, 4)]),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 4, 3), [(2, 3, 9)]),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), [(2, 3, 6, 6)]),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), [(2, 2, 4, 4, 4)]),
    "RNN": (lambda: nn.RNN(6, 4), [(5, 3, 6)]),
    "LSTM": (lambda: nn.LSTM(6, 4, num_layers=2, bidirectional=True), [(5, 3, 6)]),
    "GRU": (lambda: nn.GRU(6, 4), [(5, 3, 6)]),
    "RNNCell": (lambda: nn.RNNCell(6, 4), [(3, 6)]),
    "LSTMCell": (lambda: nn.LSTMCell(6, 4), [(3, 6)]),
    "GRUCell": (lambda: nn.GRUCell(6, 4), [(3, 6)]),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), [(5, 3, 8)] * 3),
    "MultiheadAttention, own sizes": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4),
        [(5, 3, 8), (5, 3, 6), (5, 3, 4)],
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), [(5, 3, 8)]),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0), [(5, 3, 8)] * 2),
    "Transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), [(5, 3, 8)] * 2),
}
IDLE = (
    "AdaptiveLogSoftmaxWithLoss",
    "LazyBilinear",
    "RNNBase",
    "RNNCellBase",
    "TransformerDecoder",
    "TransformerEncoder",
)


@pytest.fixture(autouse=True)
def _seeded(seed):
    torch.manual_seed(seed)


class Net(nn.Module):
    """Products of every kind of call: layers, functions and operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.first(x).unflatten(-1, (3, 8)).unbind(-2)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.norm(self.second(y)) @ self.second.weight.t()


def net(dtype: torch.dtype, kind: type = Net) -> nn.Module:
    return hu.float32_products(kind().to(dtype))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The outputs and all gradients."""
    model.zero_grad()
    out = model(x)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def agree(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b))


def products() -> int:
    """How many products were computed in float32 so far."""
    return sum(count for name, count in count_fallbacks().items() if name.startswith("float32 products"))


class NarrowProducts(TorchDispatchMode):
    """The products that torch's kernels are given 16-bit operands for."""

    NAMES = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "_trilinear", "convolution")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._opname
        multiplies = name.removesuffix("_backward") in self.NAMES or any(
            x in name for x in ("attention", "rnn", "lstm")
        )
        if multiplies and any(isinstance(x, Tensor) and x.dtype in SIXTEEN_BIT_DTYPES for x in args):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LAYERS)
@DTYPES
def test_every_layer_that_multiplies(name, dtype):
    make, shapes = LAYERS[name]
    model = make().to(dtype)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    with force_float32_products(*SIXTEEN_BIT_DTYPES):
        plain = model(*inputs)
        before = products()
        hu.float32_products(model)
        with NarrowProducts() as narrow:
            out = model(*inputs)
            assert products() > before
            _first(out).float().sum().backward()
        assert narrow.found == []
    wide = copy.deepcopy(hu.float32_products(model, False)).float()(*(x.float() for x in inputs))
    # Nothing but rounding separates the three, and the roundings of float32 products are fewer.
    error = (_first(out).float() - _first(wide)).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps * max(1.0, float(_first(wide).detach().abs().max()))
    assert _first(out).dtype == _first(plain).dtype == dtype
    assert all(p.grad is None or p.grad.dtype == dtype for p in model.parameters())


def test_no_layer_of_torch_is_forgotten():
    """By their sources: a class of torch.nn whose code names a product is in the list."""
    words = "|".join(name for name in set(NAME_BY_PRODUCT_FUNCTION.values()) if not name.startswith("_"))
    words += "|multi_head_attention_forward|linear_cross_entropy"
    multiplies = re.compile(rf"(?:F|torch|_VF|functional)\.(?:{words})\(")
    known = {name.partition(",")[0] for name in LAYERS} | {"RNNBase", "RNNCellBase"}
    found = {
        name
        for name, kind in vars(nn).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and not name.startswith("Lazy")
        if multiplies.search(inspect.getsource(kind))
    }
    # The one has a test of its own, the other speaks of a product.
    assert found - known <= {"LinearCrossEntropyLoss", "Unfold"}


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch has no LinearCrossEntropyLoss")
def test_the_loss_that_multiplies():
    loss = hu.float32_products(nn.LinearCrossEntropyLoss(8, 10).half())
    with force_float32_products(torch.float16), NarrowProducts() as narrow:
        loss(torch.randn(3, 8).half(), torch.randint(0, 10, (3,))).backward()
    assert narrow.found == []


def _first(out):
    while isinstance(out, tuple):
        out = out[0]
    return out


@DTYPES
def test_attention_rounds_its_intermediate_products(dtype):
    """As hardware does: queries, keys and values are rounded before they are multiplied."""
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).to(dtype), torch.randn(2, 5, 8).to(dtype)
    with force_float32_products(dtype):
        got, weights = hu.float32_products(model)(x, x, x)
    q, k, v = (x.float() @ w.float().mT for w in model.in_proj_weight.chunk(3))
    q, k, v = ((y.to(dtype).float() + b.float()) for y, b in zip((q, k, v), model.in_proj_bias.chunk(3)))
    q, k, v = (y.to(dtype).unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k, v))
    wanted = ((q * 0.5).float() @ k.float().mT).to(dtype).softmax(-1)
    assert (weights - wanted.mean(1)).abs().max() <= 4 * torch.finfo(dtype).eps
    assert got.dtype == weights.dtype == dtype


@DTYPES
def test_copies_and_pickles_compute_alike_and_with_their_own_weights(dtype):
    model, x = net(dtype), torch.randn(2, 5, 8).to(dtype)
    with force_float32_products(dtype):
        wanted = step(model, x)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            before = products()
            assert agree(step(other, x), wanted)
            assert products() == before + 4
            with torch.no_grad():
                other.second.weight.zero_()
            assert not other(x).any()


@DTYPES
def test_a_forward_that_is_bound_anew_runs_the_module_it_is_bound_to(dtype):
    """accelerate wraps `model.forward.__func__` and binds it to the model; a deepcopy of that is bound to the copy."""
    model, x = net(dtype), torch.randn(2, 5, 8).to(dtype)
    with force_float32_products(dtype):
        wanted = model(x)
        inner = model.forward.__func__

        def wrapped(self, *args):
            return inner(self, *args)

        model.forward = types.MethodType(wrapped, model)
        other = copy.deepcopy(model)
        assert same_bits(other(x), wanted)
        with torch.no_grad():
            other.second.weight.zero_()
        assert not other(x).any()
        assert same_bits(model(x), wanted)


@DTYPES
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_has_the_same_bits(dtype, reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            x = x.detach().requires_grad_()
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model, x = net(dtype), torch.randn(2, 5, 8).to(dtype)
    other = net(dtype, Checkpointed)
    other.load_state_dict(model.state_dict())
    with force_float32_products(dtype):
        if reentrant:
            # What runs again is a function, not a module: its layers are widened, its own products are torch's.
            other.norm.weight.requires_grad_(True)
            wanted, got = step(model, x), step(other, x)
            assert same_bits(got[0], wanted[0])
            assert all(torch.allclose(a.float(), b.float(), rtol=0.1, atol=0.1) for a, b in zip(got, wanted))
        else:
            assert agree(step(other, x), step(model, x))


@DTYPES
def test_hooks_of_others_keep_narrow_tensors(dtype):
    model, x, kept = net(dtype), torch.randn(2, 5, 8).to(dtype), []

    def pack(tensor):
        kept.append(tensor.dtype)
        return tensor

    with force_float32_products(dtype):
        wanted = step(model, x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            got = step(model, x)
    assert agree(got, wanted)
    assert kept.count(dtype) >= 9


@DTYPES
def test_errors_and_interrupts_leave_no_mode_behind(dtype):
    class Failing(nn.Module):
        def forward(self, error):
            raise error

    model = hu.float32_products(Failing())
    for error in (ValueError("so"), KeyboardInterrupt()):
        with force_float32_products(dtype), pytest.raises(type(error)):
            model(error)
        assert torch._C._len_torch_function_stack() == 0


@DTYPES
def test_modes_of_others_see_the_products_that_the_model_asked_for(dtype):
    class Seen(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.dtypes = set()

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is functional.linear:
                self.dtypes |= {x.dtype for x in args}
            return function(*args, **(kwargs or {}))

    model, x = net(dtype), torch.randn(2, 5, 8).to(dtype)
    with force_float32_products(dtype):
        wanted = model(x)
        with Seen() as seen:
            assert same_bits(model(x), wanted)
            assert torch._C._len_torch_function_stack() == 1
    assert seen.dtypes == {dtype}


@DTYPES
def test_parts_called_by_themselves_and_models_inside_models(dtype):
    model = net(dtype)
    outer = hu.float32_products(nn.Sequential(model, nn.Linear(8, 2).to(dtype)))
    x = torch.randn(2, 5, 8).to(dtype)
    with force_float32_products(dtype):
        before = products()
        part = model.second(x)
        assert products() == before + 1
        outer(x)
        assert products() == before + 6
    linear = model.second
    assert same_bits(part, functional.linear(x.float(), linear.weight.float(), linear.bias.float()).to(dtype))


@DTYPES
def test_threads_do_not_share_the_mode(dtype):
    model, x, found = net(dtype), torch.randn(2, 5, 8).to(dtype), []

    def other() -> None:
        found.append(torch._C._len_torch_function_stack())

    class Starting(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return x

    with force_float32_products(dtype):
        hu.float32_products(nn.Sequential(Starting(), model))(x)
    assert found == [0]


def test_where_the_processor_has_instructions_nothing_changes():
    model, x = Net().bfloat16(), torch.randn(2, 5, 8).bfloat16()
    with force_float32_products():
        wanted = step(model, x)
        before = products()
        assert agree(step(hu.float32_products(model), x), wanted)
        assert products() == before


@DTYPES
def test_it_is_taken_off_again(dtype):
    model, x = net(dtype), torch.randn(2, 5, 8).to(dtype)
    assert any(_WIDENED_MARK_ATTRIBUTE in vars(module) for module in model.modules())
    hu.float32_products(model, False)
    assert not any(_WIDENED_MARK_ATTRIBUTE in vars(module) for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    with force_float32_products(dtype):
        before = products()
        model(x)
        assert products() == before
    model = net(dtype)
    inner = model.forward
    model.forward = lambda *args: inner(*args)  # somebody wraps it
    hu.float32_products(model, False)
    with force_float32_products(dtype):
        model(x)
        assert products() == before


@DTYPES
def test_float32_models_under_autocast(dtype):
    model, x = hu.float32_products(Net()), torch.randn(2, 5, 8)
    with torch.autocast("cpu", dtype):
        plain = model(x) if dtype not in list_dtypes_multiplied_in_float32() else None
        with force_float32_products(dtype):
            before = products()
            got = step(model, x)
            assert products() == before + 4
    assert got[0].dtype == dtype
    assert all(gradient.dtype == torch.float32 for gradient in got[1:])
    if plain is not None:
        assert (plain.float() - got[0].float()).abs().max() <= 16 * torch.finfo(dtype).eps * plain.abs().max()


def test_converted_models_have_it_and_reverted_ones_do_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    hu.convert(model, "bf16-kahan")
    with force_float32_products(torch.bfloat16):
        before = products()
        model(torch.randn(2, 4))
        assert products() == before + 1
    assert not any(_WIDENED_MARK_ATTRIBUTE in vars(module) for module in hu.revert(model).modules())


def test_scaled_payloads_of_bfloat16_multiply_in_float32():
    x, y = (hu.ScaledTensor.encode(torch.randn(5, 33), dtype=torch.bfloat16) for _ in range(2))
    with force_float32_products():
        native = (x @ y.mT).decode()
    with force_float32_products(torch.bfloat16):
        got = (x @ y.mT).decode()
    exact = x.decode(torch.float64) @ y.decode(torch.float64).mT
    eps = torch.finfo(torch.bfloat16).eps
    for result in (native, got):
        assert ((result.double() - exact).abs() <= eps * exact.abs() + 33 * 2.0**-22).all()


@DTYPES
def test_an_adaptive_scaler_sees_the_same_sites_and_gradients(dtype):
    found = []
    for widen in (True, False):
        torch.manual_seed(3)
        model = Net().to(dtype)
        hu.float32_gradients(model)
        if widen:
            hu.float32_products(model)
        scaler = hu.AdaptiveGradScaler(model, policy="constant", init_scale=4.0)
        opt = hu.optim.SGD(model.named_parameters(), lr=1e-3)
        with force_float32_products(dtype):
            scaler.scale(model(torch.ones(2, 5, 8, dtype=dtype)).float().square().mean()).backward()
            scaler.step(opt)
            scaler.update()
        found.append(([row.site for row in scaler.sites()], [p.grad.clone() for p in model.parameters()]))
    (sites, gradients), (plain_sites, plain_gradients) = found
    assert sites == plain_sites
    for a, b in zip(gradients, plain_gradients):
        assert (a - b).abs().max() <= 64 * torch.finfo(dtype).eps * b.abs().max()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_products_are_those_of_eager(backend, fresh_compiler):
    class Chain(Net):
        def forward(self, x):
            query, key, value = self.first(x).unflatten(-1, (3, 8)).unbind(-2)
            return self.second(functional.scaled_dot_product_attention(query, key, value, is_causal=True))

    model, x = net(torch.bfloat16, Chain), torch.randn(2, 5, 8).bfloat16()
    with force_float32_products(torch.bfloat16):
        wanted, before = step(model, x), products()
        got = step(torch.compile(model, backend=backend, fullgraph=True), x)
        # Inductor leaves out a rounding between operators that it runs as one.
        bounds = [64 * torch.finfo(torch.bfloat16).eps * float(y.abs().max()) for y in wanted]
        assert agree(got, wanted) if backend == "aot_eager" else True
        assert all((a - b).abs().max() <= bound for a, b, bound in zip(got, wanted, bounds))
        assert products() == before + 3


@pytest.mark.parametrize("first", ["scaler", "products"])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_graphs_of_a_scalers_backend_keep_the_models_products(first, fresh_compiler):
    """It finds sites by the products that the model writes; the report says that torch multiplies there."""
    model = Net().half()
    hu.float32_gradients(model)
    if first == "products":
        hu.float32_products(model)
    scaler = hu.AdaptiveGradScaler(model)
    hu.float32_products(model)
    with force_float32_products(torch.float16):
        left = "float32 products: left to torch in a graph that an AdaptiveGradScaler's backend compiles"
        before = count_fallbacks().get(left, 0)
        compiled = torch.compile(model, backend=scaler.backend("aot_eager"))
        scaler.scale(compiled(torch.randn(2, 5, 8).half()).float().square().mean()).backward()
        scaler.step(torch.optim.SGD(model.parameters(), lr=1e-3))
        scaler.update()
        assert count_fallbacks()[left] > before
    assert {row.site for row in scaler.sites()} >= {"first", "second"}
    scaler.detach()
    assert {vars(module)["_halfulp_float32_products"] for module in model.modules()} == {"everywhere"}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_an_exported_program_has_the_models_own_operators(strict, fresh_compiler):
    model = hu.float32_products(nn.Linear(4, 4).bfloat16())
    with force_float32_products(torch.bfloat16):
        graph = torch.export.export(model, (torch.randn(2, 4).bfloat16(),), strict=strict).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.linear.default]


def test_bad_input():
    with pytest.raises(TypeError, match=r"float32_products takes a torch.nn.Module, got"):
        hu.float32_products(torch.ones(3))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_has_the_models_own_operators():
    model, x = hu.float32_products(Scripted().bfloat16()), torch.randn(2, 4).bfloat16()
    script = torch.jit.script(model)
    with force_float32_products(torch.bfloat16):
        before = products()
        script(x)
        assert products() == before


@DTYPES
def test_shallow_copies_and_replicas_compute_with_their_own_weights(dtype):
    layer, x = hu.float32_products(nn.Linear(4, 4).to(dtype)), torch.randn(2, 4).to(dtype)
    with force_float32_products(dtype):
        for other in (copy.copy(layer), layer._replicate_for_data_parallel()):
            other._parameters = {"weight": nn.Parameter(torch.zeros(4, 4, dtype=dtype)), "bias": None}
            before = products()
            assert not other(x).any()
            assert products() == before + 1
        assert layer(x).any()


def test_no_cycle_keeps_a_model_alive():
    gc.collect()
    gc.disable()
    try:
        model = hu.convert(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "bf16-kahan")
        held = weakref.ref(model), weakref.ref(model[0]), weakref.ref(model[0].weight)
        del model
        assert [reference() for reference in held] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_without_numbers_of_the_dtype_run_as_they_did(dtype):
    """torch's fast path of encoders, which a mode would switch off, included."""

    class Depth(nn.Module):
        def forward(self, x):
            depths.append(torch._C._len_torch_function_stack())
            return x

    depths: list[int] = []
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(dtype).eval()
    x = torch.randn(2, 5, 16).to(dtype)
    with torch.no_grad(), force_float32_products(torch.float16):
        wanted = model(x)
        assert same_bits(hu.float32_products(model)(x), wanted)
        hu.float32_products(nn.Sequential(Depth(), model, Depth()))(x)
    assert depths == [0, 0]


def test_narrow_models_inside_wide_ones_are_found():
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = [hu.float32_products(nn.Linear(4, 4).half())]  # none of its modules
            self.outer = nn.Linear(4, 4)

        def forward(self, x):
            return self.outer(x) + self.inner[0](x.half()).float()

    with force_float32_products(torch.float16):
        before = products()
        hu.float32_products(Teacher())(torch.randn(2, 4))
        assert products() == before + 1


def test_the_class_keeps_its_name_its_signature_and_its_instances():
    model = hu.float32_products(Net())
    assert type(model).__name__ == "Net"
    assert isinstance(model, Net)
    assert repr(model) == repr(Net())
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    assert type(hu.float32_products(model, False)) is Net


def test_parametrizations_after_it():
    layer, x = hu.float32_products(nn.Linear(4, 4).half()), torch.randn(2, 4).half()
    nn.utils.parametrizations.weight_norm(layer)
    with force_float32_products(torch.float16):
        for one in (layer, copy.deepcopy(layer)):
            before = products()
            one(x)
            assert products() == before + 1
        hu.float32_products(layer, False)
        before = products()
        layer(x)
        assert products() == before


def test_a_forward_that_a_module_was_given_itself_is_covered_inside_a_model():
    layer, x = nn.Linear(4, 4).half(), torch.randn(2, 4).half()
    own = layer.forward
    layer.forward = lambda x: own(x)
    model = hu.float32_products(nn.Sequential(layer))
    with force_float32_products(torch.float16):
        before = products()
        model(x)
        assert products() == before + 1
    hu.float32_products(model, False)
    assert layer.forward.__name__ == "<lambda>"


@pytest.mark.parametrize("change", [Tensor.contiguous, lambda x: x.clone(memory_format=torch.contiguous_format)])
def test_hooks_of_others_may_change_the_order_in_memory(change):
    layers = ((nn.Conv2d(3, 4, 3), (2, 3, 8, 8)), (nn.Linear(6, 4), (6, 5)))
    for layer, shape in layers:
        hu.float32_products(layer.half())
        x = torch.randn(shape).half()
        x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.t()
        with force_float32_products(torch.float16):
            wanted = step(layer, x)
            with torch.autograd.graph.saved_tensors_hooks(change, lambda x: x):
                got = step(layer, x)
        assert agree(got, wanted)


def test_what_the_backward_pass_does_not_need_is_freed():
    frozen = hu.float32_products(nn.Linear(4, 4).half().requires_grad_(False))
    x = torch.randn(2, 4).half().requires_grad_() * 1
    held = weakref.ref(x)
    with force_float32_products(torch.float16):
        y = frozen(x)
    del x
    gc.collect()
    assert held() is None
    y.sum().backward()


def test_an_unknown_wish_is_refused_at_once(in_bare_process):
    script = """
        import torch, halfulp as hu
        try:
            hu.float32_products(torch.nn.Linear(2, 2))
        except ValueError as error:
            print(error)
    """
    assert "HALFULP_FLOAT32_PRODUCTS='yes' is unknown" in in_bare_process(script, HALFULP_FLOAT32_PRODUCTS="yes")


def test_a_recipe_that_rounds_gradients_still_asks_for_its_scaler():
    recipe = recipes.get("fp32").replace(name="rounded", gradient_format="fp16")
    model = hu.float32_products(hu.convert(nn.Sequential(nn.Linear(4, 4)), recipe))
    opt = recipes.optimizer(model, "AdamW", lr=1e-3)
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="these were not rounded"):
        opt.step()


def test_views_stay_views_and_autocast_narrows_what_it_narrows():
    class Views(nn.Module):
        def forward(self, x):
            torch.einsum("ii->i", x).fill_(1)
            return x

    class Angles(nn.Module):
        def forward(self, t):
            return torch.einsum("i,j->ij", t, t)

    with force_float32_products(torch.float16):
        assert (hu.float32_products(Views())(torch.zeros(3, 3).half()).diagonal() == 1).all()
        with torch.autocast("cpu", torch.float16):
            assert hu.float32_products(Angles())(torch.tensor([1001.0, 10.01])).dtype == torch.float32


@DTYPES
def test_what_torch_refuses_in_16_bits_stays_refused(dtype):
    class Inverse(nn.Module):
        def forward(self, x):
            return torch.linalg.matrix_power(x, -1)

    with force_float32_products(dtype), pytest.raises(RuntimeError, match="Low precision dtypes not supported"):
        hu.float32_products(Inverse())(torch.eye(3, dtype=dtype))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_derivatives_of_derivatives(fresh_compiler):
    model = hu.float32_products(nn.Linear(3, 1, bias=False).half())
    weight = {"weight": torch.tensor([[0.5, -1.0, 2.0]]).half()}
    x = torch.tensor([[0.25, 0.5, -0.125]]).half()

    def loss(weight):
        return torch.func.functional_call(model, weight, (x,)).float().square().sum()

    def second(weight):
        return torch.func.jvp(torch.func.grad(loss), (weight,), (weight,))[1]["weight"]

    with force_float32_products(torch.float16):
        wanted = second(weight)
        assert wanted.any()
        torch.testing.assert_close(torch.compile(second, backend="eager")(weight), wanted)


def test_results_that_are_kept_make_no_cycle():
    layer = hu.float32_products(nn.GRU(4, 4).half())
    with force_float32_products(torch.float16):
        gc.collect()
        gc.disable()
        try:
            x = torch.randn(3, 2, 4).half().requires_grad_() * 1
            held = weakref.ref(x)
            layer(x)
            del x
            assert held() is None
        finally:
            gc.enable()


def test_operands_that_torch_copies_are_kept_narrow():
    class Scores(nn.Module):
        def forward(self, x, y):
            return x.transpose(1, 2) @ y.transpose(1, 2).transpose(-1, -2)

    kept = []
    pack = lambda x: (kept.append(x.dtype), x)[1]  # noqa: E731
    x, y = (torch.randn(2, 5, 3, 4).half().requires_grad_() for _ in range(2))
    with force_float32_products(torch.float16), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hu.float32_products(Scores())(x, y).sum().backward()
    assert set(kept) == {torch.float16}


@pytest.mark.parametrize("covered", ["whole", "layer"])
def test_checkpoints_around_functions_and_covered_layers(covered):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            attend = lambda x: functional.scaled_dot_product_attention(*[self.layer(x)] * 3)  # noqa: E731
            return checkpoint(attend, x, use_reentrant=False)

    model = Around().half()
    hu.float32_products(model if covered == "whole" else model.layer)
    with force_float32_products(torch.float16):
        model(torch.randn(2, 2, 5, 8).half().requires_grad_()).sum().backward()
    assert model.layer.weight.grad.isfinite().all()


def test_emulated_models_are_refused():
    with hu.emulate(nn.Linear(2, 2), "bf16") as emulation, pytest.raises(ValueError, match="emulated"):
        hu.float32_products(emulation.target)


def test_classes_that_allow_none_made_of_them_are_covered_inside_a_model():
    class Strict(nn.Linear):
        def __init_subclass__(cls, **options):
            raise TypeError("no")

    for layer in (Strict(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))):
        kind = type(layer)
        model = hu.float32_products(nn.Sequential(layer.half()))
        why = "parametrizations" if kind is not Strict else "no subclass"
        assert any(f"{kind.__name__}, which" in told and why in told for told in count_fallbacks())
        with force_float32_products(torch.float16):
            for one in (model, copy.deepcopy(model)):
                before = products()
                one(torch.randn(2, 4).half())
                assert products() == before + 1
        hu.float32_products(model, False)
        assert type(layer) is kind


def test_lazy_layers_before_their_first_batch():
    model = hu.float32_products(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)))
    x = torch.randn(2, 4)
    assert model(x).shape == model.half()(x.half()).shape
    with force_float32_products(torch.float16):
        before = products()
        model(x.half())
        assert products() == before + 2


def test_a_graph_module_is_noted():
    hu.float32_products(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    assert any("torch.fx.GraphModule calls by itself" in told for told in count_fallbacks())
