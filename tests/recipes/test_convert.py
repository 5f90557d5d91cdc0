"""Moving a model to a recipe's formats, the optimizer that goes with it, and the way back."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from halfulp import optim, recipes
from halfulp.gradients import AdaptiveGradScaler
from halfulp.recipes import Recipe
from halfulp.recipes._optimizer import scaler

from .steps import HYPER, converted, model, resnet, step


def firm(start: nn.Module) -> dict[str, torch.Tensor]:
    """Where gradients are not next to 0: Adam divides a smaller one by its own size, rounding and all."""
    twin = copy.deepcopy(start)
    twin(torch.arange(7)).square().mean().backward()
    return {name: p.grad.abs() > 1e-2 * p.grad.abs().max() for name, p in twin.named_parameters()}


@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
def test_fp32_is_torch_optim(rule: str, seed: int) -> None:
    theirs = model()
    chosen = firm(theirs)
    ours, optimizer = converted(recipes.get("fp32"), copy.deepcopy(theirs), rule, **HYPER[rule])
    peer = getattr(torch.optim, rule)(theirs.parameters(), **HYPER[rule])
    for _ in range(5):
        step(ours, optimizer)
        step(theirs, peer)
    for mine, other, where in zip(ours.parameters(), theirs.parameters(), chosen.values()):
        torch.testing.assert_close(mine[where], other[where], rtol=1e-5, atol=1e-6)


def test_the_low_bits_of_the_start_are_kept(seed: int) -> None:
    start = model()
    ours, optimizer = converted(recipes.get("bf16-split"), copy.deepcopy(start), "AdamW", lr=1e-3)
    decoded = optimizer.float32_state_dict(ours)
    for name, parameter in start.named_parameters():
        assert torch.equal(decoded[name], parameter)


def test_the_twin_differs_a_little(seed: int) -> None:
    start = model()
    ours, _ = converted(recipes.get("fp32-twin"), copy.deepcopy(start), "SGD", seed=seed, lr=0.1)
    for mine, other in zip(ours.parameters(), start.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)
    assert any(not torch.equal(mine, other) for mine, other in zip(ours.parameters(), start.parameters()))


def test_buffers_stay_as_they_are(seed: int) -> None:
    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("shift", torch.ones(2))
            self.register_buffer("count", torch.zeros(2, dtype=torch.long))

    ours, _ = converted(recipes.get("bf16"), Shifted(), "SGD", lr=0.1)
    assert ours.shift.dtype == torch.float32
    assert ours.count.dtype == torch.long


def test_globs_match_names_and_classes() -> None:
    mix = {"2.bias": "split", "*Embedding*": "kahan", "*Norm": "master", "*": "stochastic"}
    recipe = Recipe(name="x", param_dtype="bfloat16", weight_update=mix)
    assigned = recipes.assign_weight_updates(recipe, model())
    assert assigned["0.weight"] == "kahan"
    assert assigned["1.bias"] == "master"
    assert (assigned["2.weight"], assigned["2.bias"]) == ("stochastic", "split")


def test_a_parameter_without_a_match() -> None:
    recipe = Recipe(name="x", param_dtype="bfloat16", weight_update={"*Norm": "kahan"})
    with pytest.raises(ValueError, match=r"'0\.weight' of an Embedding matches none"):
        converted(recipe, model(), "SGD", lr=0.1)


def test_only_float32_models() -> None:
    with pytest.raises(TypeError, match=r"model\.float"):
        converted(recipes.get("bf16"), model().bfloat16(), "SGD", lr=0.1)


def test_unknown_rule() -> None:
    with pytest.raises(ValueError, match="did you mean 'AdamW'"):
        converted(recipes.get("bf16"), model(), "AdmaW", lr=0.1)


def test_no_scaler_without_a_gradient_format(seed: int) -> None:
    assert scaler(recipes.get("fp32"), model()) is None
    assert scaler(recipes.get("bf16-kahan"), model()) is None


@pytest.mark.parametrize(
    ("name", "policy", "scale"),
    [("fp16-none", "constant", 1.0), ("e5m2-dynamic", "dynamic", 2.0**16), ("fp16-constant-128", "constant", 128.0)],
)
def test_the_scaler_is_the_recipes(name: str, policy: str, scale: float) -> None:
    made = scaler(recipes.get(name), model())
    assert made.get_scale() == scale
    assert made._controller.policy.name == policy
    assert made._controller.backward.format.name == recipes.get(name).gradient_format


@pytest.mark.parametrize("name", ["fp16-none", "fp16-adaptive"])
def test_gradients_are_rounded_as_the_product_reads_them(name: str, seed: int) -> None:
    """One linear layer: its weight's gradient is the product of a rounded gradient, rounded again."""
    ours, optimizer = converted(recipes.get(name), nn.Linear(3, 2, bias=False), "SGD", lr=1.0)
    x, wanted = torch.randn(5, 3), torch.randn(5, 2) * 2**-6
    scaled = scaler(recipes.get(name), ours)
    scaled.scale((ours(x) * wanted).sum()).backward()
    rounded = (wanted * scaled.get_scale()).half().float()
    exact = (rounded.T @ x).half().float() / scaled.get_scale()
    before = ours.weight.detach().clone()
    scaled.step(optimizer)
    assert scaled.last_step.applied
    torch.testing.assert_close(before - ours.weight.detach(), exact, rtol=2**-9, atol=1e-6)


def test_a_step_without_the_scaler_is_refused(seed: int) -> None:
    recipe = recipes.get("fp16-constant-1024")
    ours, optimizer = converted(recipe, model(), "SGD", lr=0.1)
    before = copy.deepcopy(list(ours.parameters()))
    with pytest.raises(RuntimeError, match=r"policy='constant', init_scale=1024.0, format='fp16'"):
        step(ours, optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, ours.parameters()))


@pytest.mark.parametrize("name", ["fp16-none", "fp16-dynamic"])
def test_an_overflow_reaches_no_weight(name: str, seed: int) -> None:
    ours, optimizer = converted(recipes.get(name), model(), "AdamW", lr=0.1)
    scaled = scaler(recipes.get(name), ours)
    before = copy.deepcopy(list(ours.parameters()))
    scaled.scale(1e9 * ours(torch.arange(7)).square().sum()).backward()
    scaled.step(optimizer)
    assert not scaled.last_step.applied
    assert all(torch.equal(old, new) for old, new in zip(before, ours.parameters()))


# Every norm of torch that holds weights or statistics, with the shape that it takes.
NORMS = {
    "BatchNorm1d": (nn.BatchNorm1d(6), (8, 6)),
    "BatchNorm2d": (nn.BatchNorm2d(6), (4, 6, 3, 3)),
    "BatchNorm2d, no affine": (nn.BatchNorm2d(6, affine=False), (4, 6, 3, 3)),
    "BatchNorm2d, no statistics": (nn.BatchNorm2d(6, track_running_stats=False), (4, 6, 3, 3)),
    "BatchNorm2d, neither": (nn.BatchNorm2d(6, affine=False, track_running_stats=False), (4, 6, 3, 3)),
    "BatchNorm2d, cumulative": (nn.BatchNorm2d(6, momentum=None), (4, 6, 3, 3)),
    "BatchNorm3d": (nn.BatchNorm3d(6), (4, 6, 2, 3, 2)),
    "InstanceNorm2d": (nn.InstanceNorm2d(6), (4, 6, 3, 3)),
    "InstanceNorm2d, all": (nn.InstanceNorm2d(6, affine=True, track_running_stats=True), (4, 6, 3, 3)),
    "GroupNorm": (nn.GroupNorm(2, 6), (4, 6, 3, 3)),
    "LayerNorm": (nn.LayerNorm(6), (8, 6)),
    "RMSNorm": (nn.RMSNorm(6), (8, 6)),
    "LocalResponseNorm": (nn.LocalResponseNorm(2), (4, 6, 3, 3)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_norms_compute_in_float32(name: str, training: bool, dtype: torch.dtype, seed: int) -> None:
    """Outputs, statistics and every gradient: those of the float32 module on the same narrow input, rounded once."""
    norm, shape = copy.deepcopy(NORMS[name])
    for tensor in (*norm.parameters(), *(b for b in norm.buffers() if b.is_floating_point())):
        nn.init.uniform_(tensor, 0.5, 2)
    plain = copy.deepcopy(norm).train(training)
    holder = nn.Sequential(nn.Identity(), norm).train(training)
    recipes.convert(holder, Recipe(name="x", param_dtype=dtype))
    x = (3 * torch.randn(shape) + 1).to(dtype).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    y, wanted = holder(x), plain(twin.float()).to(dtype)
    gradient = torch.randn(shape).to(dtype)
    y.backward(gradient.float())
    wanted.backward(gradient)
    near = {"rtol": float(torch.finfo(dtype).eps), "atol": 1e-3 * float(torch.finfo(dtype).eps)}
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, wanted.float(), **near)
    torch.testing.assert_close(x.grad, twin.grad, rtol=near["rtol"], atol=near["rtol"] / 8)
    for mine, other in zip(holder.parameters(), plain.parameters(), strict=True):
        assert mine.dtype == mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-4)
    for mine, other in zip(holder.buffers(), plain.buffers(), strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_what_a_module_is_given_is_cast_where_it_meets_weights(seed: int) -> None:
    seen = {}

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("table", torch.randn(4))

        def forward(self, x, *, extra, times, nested):
            seen.update(times=times.dtype, extra=extra.dtype, nested=nested["a"][0].dtype)
            return {"out": [self.lin(x + self.table)], "index": times.long()}

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.inner = nn.Parameter(torch.randn(4, 4)), Inner()

        def forward(self, x, *, extra, nested):
            seen.update(held=x.dtype, held_nested=nested["a"][0].dtype)
            return (x @ self.weight) @ extra

    inner, x = Inner(), torch.randn(2, 4)
    recipes.convert(inner, "bf16")
    out = inner(x, extra=torch.randn(4, 4), times=torch.tensor(999.0), nested={"a": (x,)})
    assert seen == {"times": torch.float32, "extra": torch.float32, "nested": torch.float32}
    assert out["out"][0].dtype == torch.float32
    assert out["index"] == 999
    holder = recipes.convert(Holder(), "bf16")
    holder(x, extra=torch.randn(4, 4), nested={"a": (x, 3)})
    assert seen["held"] == seen["held_nested"] == torch.bfloat16


def test_a_module_around_layers_passes_on_what_meets_no_weight(seed: int) -> None:
    class Denoiser(nn.Module):
        def __init__(self, multiplies: bool) -> None:
            super().__init__()
            self.pos, self.lin, self.multiplies = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4), multiplies

        def forward(self, x, t):
            self.seen = t
            out = self.lin(x + self.pos[0]) + t[:, None] * 1e-3
            return nn.functional.linear(x, self.pos) if self.multiplies else out

    x, t = torch.randn(2, 4), torch.tensor([999.0, 1001.0])
    start = Denoiser(False)
    ours = recipes.convert(copy.deepcopy(start), "bf16")
    got = ours(x, t)
    assert ours.seen.dtype == torch.float32
    assert torch.equal(ours.seen, t)
    torch.testing.assert_close(got, start(x, t), rtol=0.02, atol=0.02)
    with pytest.raises(RuntimeError, match="same dtype"):
        recipes.convert(Denoiser(True), "bf16")(x, t)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.MultiheadAttention(4, 2), [torch.randn(3, 2, 4)] * 3),
        (nn.TransformerEncoderLayer(4, 2, 8), [torch.randn(3, 2, 4)]),
        (nn.LSTM(4, 3, 2), [torch.randn(5, 2, 4), (torch.zeros(2, 2, 3), torch.zeros(2, 2, 3))]),
        (nn.LSTM(4, 3), [nn.utils.rnn.pack_sequence([torch.randn(4, 4), torch.randn(2, 4)])]),
        (nn.Bilinear(4, 4, 2), [torch.randn(3, 4), torch.randn(3, 4)]),
        (nn.EmbeddingBag(5, 4, mode="sum"), [torch.tensor([[0, 1], [2, 3]]), None, torch.randn(2, 2)]),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), [torch.randn(3, 4)]),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2)), [torch.randn(3, 4)]),
        (nn.ConvTranspose2d(2, 3, 3), [torch.randn(1, 2, 4, 4)]),
        (nn.LayerNorm(4), [torch.randn(3, 4)]),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_modules_take_float32_inputs(module: nn.Module, inputs: list, seed: int) -> None:
    module = copy.deepcopy(module).eval()
    wanted = module(*inputs)
    got = recipes.convert(module, "bf16")(*inputs)
    flat = [torch.utils._pytree.tree_leaves(tuple(y) if isinstance(y, tuple) else y) for y in (got, wanted)]
    for mine, other in zip(*flat, strict=True):
        if isinstance(mine, torch.Tensor) and mine.is_floating_point():
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05)


def test_revert_after_training_has_the_weights_as_trained(seed: int) -> None:
    ours, optimizer = converted("bf16-split", resnet(), "SGD", lr=0.1)
    ours(torch.randn(4, 1, 6, 6)).square().mean().backward()
    optimizer.step()
    weights, shown = optimizer.float32_state_dict(ours), copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=r"SGD holds parameter .*revert"):
        recipes.revert(ours)
    del optimizer
    recipes.revert(ours)
    assert all(torch.equal(value, shown[name].to(value.dtype)) for name, value in ours.state_dict().items())
    ours.load_state_dict(weights)
    assert all(torch.equal(value, weights[name]) for name, value in ours.state_dict().items())
    assert torch.isfinite(ours(torch.randn(4, 1, 6, 6))).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_write_before_the_optimizer_is_what_counts(dtype: torch.dtype, seed: int) -> None:
    """Low bits that are held belong to the weights as they were."""
    ours, file = nn.Linear(4, 3), nn.Linear(4, 3)
    recipes.convert(ours, Recipe(name="x", param_dtype=dtype, weight_update="kahan"))
    ours.load_state_dict(file.state_dict())
    decoded = recipes.optimizer(ours, "SGD", lr=0.1).float32_state_dict(ours)
    for name, value in file.state_dict().items():
        assert torch.equal(decoded[name], value.to(dtype).float())


def test_any_optimizer_takes_the_low_bits_once(seed: int) -> None:
    start = nn.Linear(4, 3)
    ours = recipes.convert(copy.deepcopy(start), "bf16")
    first = optim.AdamW(ours.named_parameters(), weight_update="split", lr=0.1)
    assert all(torch.equal(v, start.state_dict()[n]) for n, v in first.float32_state_dict(ours).items())
    second = optim.AdamW(ours.named_parameters(), weight_update="split", lr=0.1)
    assert all(torch.equal(v, ours.state_dict()[n].float()) for n, v in second.float32_state_dict(ours).items())
    wrapped = optim.wrap(torch.optim.RMSprop, recipes.convert(nn.Linear(4, 3), "bf16").parameters(), lr=0.1)
    wrapped.param_groups[0]["params"][0].grad = torch.ones(3, 4, dtype=torch.bfloat16)
    wrapped.step()


def test_param_dtype_leaves_the_norms_of_a_converted_model(seed: int) -> None:
    ours = recipes.convert(resnet(), "bf16")
    optimizer = optim.AdamW(ours.named_parameters(), param_dtype=torch.bfloat16)
    ours(torch.randn(4, 1, 6, 6)).sum().backward()
    optimizer.step()
    assert ours[0][1].weight.dtype == torch.float32


def test_float32_globs_choose_modules(seed: int) -> None:
    base = recipes.get("bf16-kahan")
    ours = recipes.convert(resnet(), base.replace(float32=("1", "Linear")))
    dtypes = {name: parameter.dtype for name, parameter in ours.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        name for name in dtypes if name.startswith(("1.", "4."))
    }
    # BatchNorm outside of any island is narrow with its statistics, as torch's kernel wants it.
    assert ours[0][1].running_mean.dtype == torch.bfloat16
    ours(torch.randn(4, 1, 6, 6)).sum().backward()
    with pytest.raises(ValueError, match="'Linaer' in float32, which is the name of no module"):
        recipes.convert(resnet(), base.replace(float32=("Linaer",)))
    with pytest.raises(ValueError, match="list of globs"):
        base.replace(float32="Linear")


class PreNorm(nn.Module):
    """A wrapper called by what it wraps: not a norm itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(x))


def test_wrappers_are_not_norms_and_subclasses_are(seed: int) -> None:
    class Scaled(nn.LayerNorm):
        pass

    ours = recipes.convert(nn.Sequential(PreNorm(), Scaled(4)), "bf16")
    assert ours[0].inner.weight.dtype == torch.bfloat16
    assert ours[0].norm.weight.dtype == ours[1].weight.dtype == torch.float32
    ours(torch.randn(2, 4)).sum().backward()


def test_tied_and_frozen_parameters_stay_so(seed: int) -> None:
    ours = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    ours[2].weight = ours[0].weight
    ours[1].requires_grad_(False)
    recipes.convert(ours, "bf16-kahan")
    assert ours[2].weight is ours[0].weight
    assert [p.requires_grad for p in ours.parameters()] == [True, False, False]
    assert [p.requires_grad for p in recipes.revert(ours).parameters()] == [True, False, False]


def test_copies_and_pickles_of_a_converted_model_run_by_themselves(seed: int) -> None:
    ours, x = recipes.convert(resnet(), "bf16").eval(), torch.randn(4, 1, 6, 6)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), ours(x))
        recipes.revert(other)
        assert other(x).dtype == torch.float32
        assert ours[0][0].weight.dtype == torch.bfloat16


def test_refusals_leave_the_model_as_it_was(seed: int) -> None:
    def unchanged(match: str, model: nn.Module, recipe: Recipe | str = "bf16", error: type = ValueError) -> None:
        before = {name: (value.dtype, value.clone()) for name, value in model.state_dict().items()}
        with pytest.raises(error, match=match):
            recipes.convert(model, recipe)
        for name, value in model.state_dict().items():
            assert value.dtype == before[name][0]
            assert torch.equal(value, before[name][1])
        assert not any(module._forward_pre_hooks for module in model.modules())

    unchanged("did you mean 'bf16-kahan'", nn.Linear(2, 2), "bf16-kahn")
    held = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(held.parameters(), lr=0.1)
    unchanged("SGD holds parameter 'weight'.*after halfulp.convert", held)
    del optimizer
    large = nn.Linear(2, 2)
    with torch.no_grad():
        large.bias[0] = 65520
    unchanged("'bias' has values beyond float16's largest, 65504: take a wider recipe", large, "fp16")
    with torch.no_grad():
        large.bias[0] = torch.finfo(torch.float32).min  # as of a mask
    unchanged("'bias' has values beyond bfloat16", large, "bf16-kahan")
    unchanged("OptimizedModule.*convert before", torch.compile(nn.Linear(2, 2), backend="eager"))
    with pytest.raises(TypeError, match=r"give a torch\.nn\.Module"):
        recipes.convert(torch.ones(2), "bf16")
    twice = recipes.convert(nn.Linear(2, 2), "bf16")
    with pytest.raises(ValueError, match="converted already, by recipe 'bf16'"):
        recipes.convert(nn.Sequential(twice), "bf16")
    with pytest.raises(ValueError, match="not converted"):
        recipes.revert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"is not converted: call halfulp\.convert"):
        recipes.optimizer(nn.Linear(2, 2), "SGD", lr=0.1)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["bf16", "fp64", "fp16-mc2", "scaled-fp16", "nvfp4"])
@pytest.mark.parametrize("record", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(2, 4))])
def test_a_layer_of_torchscript_is_refused_before_anything_is_changed(record: Any, recipe: str) -> None:
    """It takes no hooks, and a graph as recorded sees neither another kind of parameter nor rounded operands."""
    mixed = nn.Sequential(nn.Linear(4, 4), record(nn.Linear(4, 4)))
    before = {name: value.clone() for name, value in mixed.state_dict().items()}
    with pytest.raises(ValueError, match=r"parameter '1.weight' is of .*convert the model before torch.jit.script"):
        recipes.convert(mixed, recipe)
    assert list(mixed.state_dict()) == list(before)
    assert all(value.equal(before[name]) for name, value in mixed.state_dict().items())
    assert not any(module._forward_pre_hooks for module in mixed.modules())


def test_a_model_that_has_a_scaler_is_converted_and_reverted(seed: int) -> None:
    ours = model()
    held = AdaptiveGradScaler(ours)
    recipes.convert(ours, "bf16-kahan")
    held.scale(ours(torch.arange(7)).float().square().mean()).backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters())
    assert torch.bfloat16 in {p.dtype for p in ours.parameters()}
    assert {p.dtype for p in recipes.revert(ours).parameters()} == {torch.float32}


def test_a_wrapper_finds_the_recipe_inside(seed: int) -> None:
    whole = nn.ModuleDict({"trunk": recipes.convert(nn.Linear(4, 4), "bf16-kahan"), "head": nn.Linear(4, 2)})
    optimizer = recipes.optimizer(whole, "AdamW", lr=0.1)
    whole["head"](whole["trunk"](torch.randn(3, 4))).sum().backward()
    optimizer.step()
    del optimizer
    recipes.convert(whole["head"], "bf16-split")
    with pytest.raises(ValueError, match="several recipes"):
        recipes.optimizer(whole, "AdamW", lr=0.1)


@pytest.mark.parametrize("changes", [False, True])
def test_a_write_before_the_optimizer_is_made_drops_low_bits(changes: bool, seed: int) -> None:
    """DistributedDataParallel writes its first process's parameters to all, when it is made before the optimizer."""
    model = nn.Linear(8, 16)
    recipes.convert(model, "bf16-split")
    with torch.no_grad():
        model.weight.copy_(model.weight.clone() + int(changes))
    kept = recipes.optimizer(model, "AdamW").float32_state_dict(model)["weight"]
    assert torch.equal(kept, model.weight.float())


@pytest.mark.parametrize(
    ("value", "is_refused"),
    [(65504.0, False), (65519.99, False), (65520.0, True), (-65520.0, True), (3e38, True), (float("inf"), False)],
)
def test_a_weight_that_float16_would_make_infinite_is_refused(value: float, is_refused: bool) -> None:
    """From halfway to the next number on, which there is none of; what is infinite already stays so."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    nn.init.constant_(layers[0].weight, value)
    if is_refused:
        with pytest.raises(ValueError, match=r"parameter '0\.weight' has values beyond float16's largest, 65504"):
            recipes.convert(copy.deepcopy(layers), "fp16-kahan")
    else:
        converted = recipes.convert(copy.deepcopy(layers), "fp16-kahan")
        assert converted[0].weight.dtype == torch.float16
        assert converted[0].weight[0, 0].item() == torch.tensor(value).half().item()
    recipes.convert(copy.deepcopy(layers), "bf16-kahan")
    kept = recipes.get("fp16-kahan").replace(float32=("0", "*Norm*"))
    assert recipes.convert(layers, kept)[0].weight[0, 0].item() == torch.tensor(value).item()
