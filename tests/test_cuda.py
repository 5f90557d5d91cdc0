"""A step of every system on CUDA tensors, beside the same on the CPU: `pytest -m cuda`."""

import copy

import pytest
import torch
from torch.nn import functional

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.trials.tasks._text import GPT

pytestmark = pytest.mark.cuda
TIME = 32


def _model():
    """A small GPT and a batch, the same on every device."""
    torch.manual_seed(0)
    model = GPT(32, width=32, layers=2, heads=2, time=TIME, fused=True)
    ids = torch.randint(0, 32, (4, TIME + 1), generator=torch.Generator().manual_seed(1))
    return model, ids


def _loss(model, ids):
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def _losses(device, prepare, optimizer_of, steps=5, scaler_of=None, autocast=None):
    """The losses of some steps, each finite."""
    model, ids = _model()
    model, ids = prepare(model.to(device)), ids.to(device)
    optimizer = optimizer_of(model)
    scaler = scaler_of(model) if scaler_of else None
    found = []
    for _ in range(steps):
        with torch.autocast(device, autocast, enabled=autocast is not None):
            loss = _loss(model, ids)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    assert all(loss == loss for loss in found)
    assert found[-1] < found[0], "nothing was learned"
    return found


def _adamw(**options):
    return lambda model: hu.optim.AdamW(model.parameters(), lr=1e-3, report_interval=2, **options)


@pytest.mark.parametrize("update", ["nearest", "stochastic", "kahan", "split8", "master", "feedback", "components"])
def test_a_bfloat16_model_trains_as_on_the_cpu(update):
    given = (lambda model: model.to(torch.bfloat16), _adamw(weight_update=update))
    assert _losses("cuda", *given) == pytest.approx(_losses("cpu", *given), rel=1e-2)


@pytest.mark.parametrize("recipe", ["bf16-kahan", "bf16-split8", "scaled-fp16-kahan", "scaled-fp8-stochastic"])
def test_a_recipe_trains_as_on_the_cpu(recipe):
    given = (
        lambda model: hu.convert(model, recipe),
        lambda model: hu.recipes.optimizer(model, "AdamW", lr=1e-3),
    )
    assert _losses("cuda", *given) == pytest.approx(_losses("cpu", *given), rel=2e-2)


@pytest.mark.parametrize(("dtype", "matmul"), [(torch.float16, None), (torch.bfloat16, None), (torch.float16, "fp8")])
def test_scaled_gradients_are_those_of_the_cpu(dtype, matmul):
    found = []
    for device in ("cpu", "cuda"):
        model, ids = _model()
        hu.scalify(model.to(device), dtype, matmul=matmul)
        _loss(model, ids.to(device)).backward()
        found.append({name: one.grad.decode(torch.float32).cpu() for name, one in model.named_parameters()})
    for name, here in found[1].items():
        there = found[0][name]
        # Keys' biases have no gradient but what is left of rounding.
        assert (here - there).norm() <= 0.2 * there.norm() + 1e-4, name


@pytest.mark.parametrize("policy", ["amax", "underflow-bound", "dynamic"])
def test_the_scaler_trains_as_on_the_cpu(policy):
    given = (lambda model: model, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    scaler_of = lambda model: hu.AdaptiveGradScaler(model, policy=policy)  # noqa: E731
    scaled = _losses("cuda", *given, scaler_of=scaler_of, autocast=torch.float16)
    assert scaled == pytest.approx(_losses("cpu", *given), rel=1e-2)


def test_the_scaler_leaves_gradients_in_float32_as_they_are():
    gradients = []
    for scaled in (False, True):
        model, ids = _model()
        model, ids = model.to("cuda"), ids.to("cuda")
        scaler = hu.AdaptiveGradScaler(model) if scaled else None
        loss = _loss(model, ids)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
        gradients.append([parameter.grad for parameter in model.parameters()])
    # Sums of an embedding's gradients have no order on a GPU.
    for plain, own in list(zip(*gradients, strict=True))[2:]:
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rounding", ["nearest", "toward_zero", "up", "down", hu.Stochastic(seed=3)], ids=str)
@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3fn", "e5m2", "e2m1fn", "mxfp4", "nvfp4"])
def test_quantize_has_the_bits_of_the_cpu(name, rounding, seed):
    words = torch.randint(-(2**31), 2**31, (4096, 32), dtype=torch.int64).to(torch.int32)
    x = torch.cat([words.view(torch.float32), torch.randn(4096, 32)])
    if name.startswith(("mx", "nv")) and rounding != "nearest" and isinstance(rounding, str):
        x = x[-4096:]
    assert same_bits(hu.quantize(x.cuda(), name, rounding).cpu(), hu.quantize(x, name, rounding))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_components_multiply_and_add_as_on_the_cpu(dtype, seed):
    x, y = (hu.MCTensor.encode(torch.randn(48, 48, dtype=torch.float64), components=2, dtype=dtype) for _ in range(2))
    bound = 64 * torch.finfo(dtype).eps ** 2
    for function in (torch.add, torch.mul, torch.matmul, lambda a, b: (a * b).sum(-1), lambda a, b: a.exp() / b.exp()):
        here, there = function(x.to("cuda"), y.to("cuda")).to("cpu"), function(x, y)
        if dtype == torch.float64:
            difference = sum(one - other for one, other in zip(here.components, there.components)).abs()
        else:
            difference = (here.decode(torch.float64) - there.decode(torch.float64)).abs()
        assert difference.max() <= bound * (1 + there.components[0].double().abs().max())


def test_emulated_models_run_on_cuda():
    model, ids = _model()
    model, ids = model.to("cuda"), ids.to("cuda")
    plain = float(_loss(model, ids).detach())
    with hu.emulate(model, "bf16"):
        emulated = float(_loss(model, ids).detach())
    assert emulated == pytest.approx(plain, rel=1e-2)
    assert emulated != plain


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile about autograd functions
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_scaled_models_have_the_gradients_of_eager_ones(fresh_compiler):
    model, ids = _model()
    model, ids = hu.scalify(model.to("cuda")), ids.to("cuda")
    _loss(model, ids).backward()
    eager = {name: one.grad.decode(torch.float32) for name, one in model.named_parameters()}
    model.zero_grad()
    torch.compile(_loss, fullgraph=True)(model, ids).backward()
    for name, one in model.named_parameters():
        assert (one.grad.decode(torch.float32) - eager[name]).norm() <= 0.1 * eager[name].norm() + 1e-4, name


def test_states_saved_on_cuda_go_on_on_the_cpu():
    model, ids = _model()
    model, ids = model.to("cuda", torch.bfloat16), ids.to("cuda")
    optimizer = _adamw(weight_update="split8")(model)
    _loss(model, ids).backward()
    optimizer.step()
    other = copy.deepcopy(model).cpu()
    resumed = _adamw(weight_update="split8")(other)
    resumed.load_state_dict(optimizer.state_dict())
    wide, again = optimizer.float32_state_dict(model), resumed.float32_state_dict(other)
    assert all(same_bits(wide[name].cpu(), again[name]) for name in wide)
