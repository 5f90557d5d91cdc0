"""The handle: models, functions, parameters, copies, and taking it back."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import register_pytree_node

from halfulp.emulation import Emulation, emulate
from halfulp.kernels import same_bits
from halfulp.rounding import quantize


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def holds(x, format):
    return same_bits(x, quantize(x, format))


def test_parameters_and_buffers_are_rounded_on_entry(seed):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_var.fill_(0.3)
    wanted = {name: quantize(value, "e8m1") for name, value in model.named_parameters()}
    emulate(model, "e8m1")
    for name, value in model.named_parameters():
        assert torch.equal(value, wanted[name])
    assert model[1].running_var[0].item() == 0.25


def test_an_expanded_buffer_is_rounded():
    model = nn.Linear(4, 4)
    model.register_buffer("factor", torch.tensor([[0.3], [0.7]]).expand(2, 4))
    emulate(model, "e8m1")
    assert torch.equal(model.factor, torch.tensor([[0.25], [0.75]]).expand(2, 4))


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "float16": torch.tensor([0.3], dtype=torch.float16),
        "sparse": torch.tensor([0.3, 0.0]).to_sparse(),
        "lazy": nn.parameter.UninitializedParameter(),
        "lazy buffer": nn.parameter.UninitializedBuffer(),
    }.items(),
)
def test_what_cannot_be_rounded_is_refused_before_anything_is(name, value):
    model = nn.Sequential(nn.Linear(4, 4), nn.Module())
    (model[1].register_parameter if name == "lazy" else model[1].register_buffer)("last", value)
    before = model[0].weight.detach().clone()
    with pytest.raises((NotImplementedError, ValueError), match=r"1\.last"):
        emulate(model, "e8m1")
    assert torch.equal(model[0].weight, before)
    assert "forward" not in vars(model)


def test_parameters_without_a_shape_are_kept_if_so_asked():
    model = nn.LazyLinear(3, bias=False)
    emulate(model, "e8m1", parameters="keep")
    assert holds(model(torch.full((2, 4), 1.3)), "e8m1")
    assert not holds(model.weight, "e8m1")


def test_parameters_that_leave_the_format_are_an_error(seed):
    model = network()
    emulate(model, "e8m3")
    model(torch.randn(30, 4)).sum().backward()  # so many that a hidden unit is alive in one of them
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    with pytest.raises(ValueError, match=r"'0\.weight' .*e8m3.*format="):
        model(torch.randn(2, 4))


def test_nan_parameters_are_of_every_format():
    model = nn.Linear(2, 2)
    emulate(model, "e8m3")
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    assert model(torch.ones(1, 2)).isnan().all()


def test_float32_weights_can_be_kept(seed):
    model = network()
    before = model[0].weight.detach().clone()
    emulate(model, "e8m3", parameters="keep")
    out = model(torch.randn(2, 4))
    assert holds(out, "e8m3")
    assert torch.equal(model[0].weight, before)


def test_arguments_are_rounded_wherever_they_are(seed):
    class Model(nn.Module):
        def forward(self, x, pair, *, named, number, flag=None):
            self.seen = [x, *pair, named["y"]]
            return x * number

    model = Model()
    emulate(model, "e8m1")
    x = torch.randn(5, requires_grad=True)
    inside = torch.randn(5)
    kept = inside.clone()
    out = model(x, (inside, torch.arange(3)), named={"y": torch.randn(5)}, number=0.5)
    out.backward(torch.randn(5))
    assert all(holds(t, "e8m1") for t in model.seen if t.is_floating_point())
    assert holds(x.grad, "e8m1")
    assert torch.equal(inside, kept)


class Cache:
    """What a model writes into, as a cache of keys and values, whose class torch takes apart as transformers' are."""

    def __init__(self, keys):
        self.keys = keys


register_pytree_node(Cache, lambda cache: (list(cache.keys), None), lambda keys, _: Cache(list(keys)))


def test_an_object_that_the_model_writes_into_is_the_callers():
    class Model(nn.Linear):
        def forward(self, x, cache):
            cache.keys.append(super().forward(x))
            return cache.keys[-1]

    model, cache = Model(4, 4), Cache([])
    emulate(model, "bf16")
    model(torch.randn(2, 4), cache)
    model(torch.randn(2, 4), cache=cache)
    assert len(cache.keys) == 2


def test_removal():
    model = network()
    forward = model.forward
    with emulate(model, "bf16") as handle:
        assert model.forward is handle
    assert model.forward == forward
    assert "forward" not in vars(model)
    handle.remove()
    first = emulate(model, "bf16")
    first.remove()
    second = emulate(model, "e8m3")
    first.remove()
    assert model.forward is second


def test_a_forward_of_ones_own_is_kept():
    model = nn.Linear(2, 2)
    model.forward = lambda x: x * 1.3
    handle = emulate(model, "e8m1")
    assert model(torch.ones(1)).item() == 1.5
    handle.remove()
    assert model(torch.ones(1)).item() == pytest.approx(1.3)


def test_no_name_changes(seed):
    model = network()
    before = list(model.state_dict()), list(dict(model.named_modules())), repr(model)
    emulate(model, "e8m3")
    assert (list(model.state_dict()), list(dict(model.named_modules())), repr(model)) == before
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.is_leaf


def test_the_signature_is_the_models():
    class Model(nn.Module):
        def forward(self, input_ids, labels=None):
            return input_ids

    model = Model()
    handle = emulate(model, "bf16")
    assert list(inspect.signature(model.forward).parameters) == ["input_ids", "labels"]
    assert "Model, bf16" in repr(handle)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_emulated_and_independent(seed, twin_of):
    model = network()
    emulate(model, "e8m3")
    x = torch.randn(6, 4)
    model(x).sum().backward()
    twin = twin_of(model)
    assert isinstance(twin.forward, Emulation)
    assert twin.forward.target is twin
    assert torch.equal(twin(x), model(x))
    model.zero_grad()
    twin.zero_grad()
    for m in (model, twin):
        m(x).sum().backward()
    assert torch.equal(model[0].weight.grad, twin[0].weight.grad)
    twin.forward.remove()
    assert isinstance(model.forward, Emulation)
    twin.load_state_dict(model.state_dict())
    assert not holds(twin(x), "e8m3")


def test_module_hooks_run(seed):
    model = network()
    calls = []
    model.register_forward_hook(lambda module, args, out: calls.append(out))
    model[0].register_forward_pre_hook(lambda module, args: calls.append(args[0]))
    model[1].register_full_backward_hook(lambda module, gi, go: calls.append(gi[0]))
    emulate(model, "e8m3")
    model(torch.randn(3, 4)).sum().backward()
    assert len(calls) == 3
    assert all(holds(value, "e8m3") for value in calls)


def test_no_grad_and_inference_mode(seed):
    model = network()
    emulate(model, "e8m3")
    x = torch.randn(3, 4)
    want = model(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = model(x)
        assert torch.equal(out, want)
        assert not out.requires_grad


def test_double_use_in_one_loss(seed):
    """Contributions of both calls are rounded, and so is their sum."""
    model = nn.Linear(4, 2, bias=False)
    emulate(model, "e8m1")
    a, b = (quantize(torch.randn(3, 4), "e8m1") for _ in range(2))
    (model(a).sum() + model(b).sum()).backward()
    ones = torch.ones(3, 2)
    first, second = (quantize(ones.T @ t, "e8m1") for t in (a, b))
    assert torch.equal(model.weight.grad, quantize(first + second, "e8m1"))


def test_an_error_inside_leaves_nothing(seed):
    class Model(nn.Module):
        def forward(self, x, fail):
            y = x + 0.3
            if fail:
                raise KeyError("inside")
            return y

    model = Model()
    emulate(model, "e8m1")
    with pytest.raises(KeyError):
        model(torch.ones(1), True)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert (torch.ones(1) + 0.3).item() == pytest.approx(1.3)
    assert model(torch.ones(1), False).item() == 1.5


def test_an_error_in_the_backward_pass_leaves_nothing(seed):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("inside")

    x = torch.randn(3, requires_grad=True)
    out = emulate(lambda x: torch.exp(Fails.apply(x)), "e8m1")(x).sum()
    with pytest.raises(KeyError):
        out.backward()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert (torch.ones(1) + 0.3).item() == pytest.approx(1.3)


def test_functions_and_the_loss_region(seed):
    logits, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    logits = quantize(logits, "e8m3")
    model = nn.Identity()
    handle = emulate(model, "e8m3")
    got = []
    for loss in (emulate(F.cross_entropy, "e8m3"), None):
        x = logits.clone().requires_grad_()
        if loss is None:
            with handle.region():
                value = F.cross_entropy(x, target)
        else:
            value = loss(x, target)
        value.backward()
        assert holds(value, "e8m3")
        assert holds(x.grad, "e8m3")
        got.append((value, x.grad))
    assert torch.equal(got[0][0], got[1][0])
    assert torch.equal(got[0][1], got[1][1])


def test_modules_as_losses(seed):
    loss = nn.MSELoss()
    emulate(loss, "e8m1")
    assert loss(torch.tensor([1.3]), torch.tensor([0.0])).item() == 2.0


def test_float64_models(seed):
    model = network().double()
    emulate(model, "bf16")
    out = model(torch.randn(3, 4, dtype=torch.float64))
    out.sum().backward()
    assert out.dtype == torch.float64
    assert holds(out, "bf16")
    assert holds(model[0].weight.grad, "bf16")


def test_frozen_parameters(seed):
    model = network()
    model[0].requires_grad_(False)
    emulate(model, "e8m3")
    model(torch.randn(3, 4)).sum().backward()
    assert model[0].weight.grad is None
    assert holds(model[2].weight.grad, "e8m3")


def test_refusals():
    with pytest.raises(TypeError, match="float32 or float64"):
        emulate(network().bfloat16(), "e8m3")
    with pytest.raises(TypeError, match="module or a function"):
        emulate(3, "e8m3")
    with pytest.raises(TypeError, match="module or a function"):
        emulate(nn.Linear, "e8m3")
    with pytest.raises(ValueError, match="'round' or 'keep'"):
        emulate(network(), "e8m3", parameters="maybe")
    with pytest.raises(ValueError, match="bf61"):
        emulate(network(), "bf61")
    model = network()
    emulate(model[0], "bf16")
    with pytest.raises(ValueError, match="'0' is emulated already"):
        emulate(model, "bf16")
    model[0].forward.remove()
    emulate(model, "bf16")
    with pytest.raises(ValueError, match="the model is emulated already"):
        emulate(model, "bf16")
    emulate(model[0], "e8m3")
    with pytest.raises(RuntimeError, match="e8m3 inside an emulation of bf16"):
        model(torch.ones(1, 4))


def test_script_modules_are_refused(recwarn):
    with pytest.raises(TypeError, match="ScriptModule"):
        emulate(torch.jit.script(nn.Linear(2, 2)), "bf16")


def _through_data(parameter, value):
    parameter.data.sub_(value)


def _to_memory(parameter, value):
    parameter.detach().numpy()[...] -= value.numpy()


@pytest.mark.parametrize("write", [torch.Tensor.sub_, _through_data, _to_memory])
def test_a_parameter_that_leaves_the_format_is_refused_however_it_was_written(write, seed):
    model = nn.Linear(4, 3)
    emulate(model, "e8m3")
    x = torch.randn(2, 4)
    model(x)
    with torch.no_grad():
        write(model.bias, torch.full((3,), 2.0**-20))
    with pytest.raises(ValueError, match=r"'bias' was given numbers that e8m3 does not have: update it"):
        model(x)
