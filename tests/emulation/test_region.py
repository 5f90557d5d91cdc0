"""Blocks: what is rounded inside, and that nothing stays behind."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfulp.emulation import region
from halfulp.kernels import same_bits
from halfulp.rounding import quantize


def is_rounded(x, format="e8m1"):
    return same_bits(x, quantize(x, format))


def depth():
    return torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x + 0.3,
        lambda x: torch.cat([x, x * 3.3]),
        lambda x: x.softmax(-1),
        lambda x: x.clone().mul_(1.3),
        lambda x: torch.add(x, 1.7, out=torch.empty(6, 8)),
        lambda x: torch.var_mean(x, 1)[0],
        lambda x: x.sort().values,
        lambda x: torch.stack(torch.unbind(x)),
        lambda x: torch.tensor(0.3) * 1,
        lambda x: torch.tensor(0.3),
        lambda x: torch.rand(10),
        lambda x: torch.full((2,), 0.3),
        lambda x: x.to(torch.float64).mul(1.3),
        lambda x: torch.fft.fft(x).abs(),
        lambda x: F.dropout(x, 0.3),
        lambda x: torch.linalg.svd(x)[1],
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.rms_norm(x, (8,)),
        lambda x: nn.LSTM(8, 3)(x)[0],
        lambda x: nn.GRU(8, 3)(x)[0],
        lambda x: torch._foreach_add([x, x], 0.3)[1],
        lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(0.3)),
        lambda x: F.cross_entropy(x, torch.zeros(6, dtype=torch.long)),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    ],
)
def test_results_are_numbers_of_the_format(seed, f):
    x = torch.randn(6, 8)
    with region("e8m1"):
        y = f(x)
    assert is_rounded(y), y


def test_written_running_statistics(seed):
    norm = nn.BatchNorm1d(4)
    x = torch.randn(10, 4) * 4
    with region("e8m3"):
        norm(x)
    assert is_rounded(norm.running_mean, "e8m3")
    assert is_rounded(norm.running_var, "e8m3")
    assert not torch.equal(norm.running_var, torch.ones(4))


def test_complex_results(seed):
    with region("e8m1"):
        y = torch.polar(torch.ones(5), torch.randn(5)) * 1.3
    assert is_rounded(torch.view_as_real(y))


def test_complex_gradients(seed):
    x = torch.randn(5, dtype=torch.complex64, requires_grad=True)
    with region("e8m1"):
        y = (x * (1.3 + 0.7j)).abs()
    y.sum().backward()
    assert is_rounded(torch.view_as_real(x.grad))


def test_memory_of_the_caller_is_not_written():
    numbers = torch.tensor([0.3, 0.7]).numpy()
    x = torch.tensor([0.3, 0.7])
    with region("e8m1"):
        torch.as_tensor(numbers)
        torch.from_numpy(numbers)
        x.view(1, 2).t().contiguous()
        x.reshape(2, 1)
        x.detach()
        x.expand(3, 2)
        torch.unsafe_chunk(x, 2)
        torch.unsafe_split_with_sizes(x, [1, 1])
    assert numbers.tolist() == pytest.approx([0.3, 0.7])
    assert torch.equal(x, torch.tensor([0.3, 0.7]))


def test_transposed_and_strided_results_in_place(seed):
    x = torch.randn(6, 8)
    with region("e8m1"):
        y = x.t().add(0.3)
        z = torch.zeros(6, 8)
        z[:, ::2].add_(x[:, ::2])
    assert is_rounded(y)
    assert torch.equal(y, quantize(x.t() + 0.3, "e8m1"))
    assert torch.equal(z[:, ::2], quantize(x[:, ::2], "e8m1"))
    assert not z[:, 1::2].any()


def test_nothing_stays_behind():
    before = depth()
    fast = torch.backends.mha.get_fastpath_enabled()
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), region("bf16"):
            raise error
    assert depth() == before
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert (torch.ones(1) + 2**-12).item() == 1 + 2**-12


def test_the_same_settings_join_and_others_are_refused():
    with region("e8m1"):
        with region("e8m1"):
            assert (torch.ones(1) + 0.3).item() == 1.5
        assert (torch.ones(1) + 0.3).item() == 1.5
        with pytest.raises(RuntimeError, match=r"bf16 inside an emulation of e8m1"), region("bf16"):
            pass
        with pytest.raises(RuntimeError), region("e8m1", "stochastic"):
            pass
        assert (torch.ones(1) + 0.3).item() == 1.5


def test_backward_inside_and_outside_give_the_same(seed):
    w = torch.randn(5, 5)
    got = []
    for inside in (True, False):
        x = w.clone().requires_grad_()
        with region("e8m3"):
            y = (x**3 / (x * x + 1)).sum()
            if inside:
                y.backward()
        if not inside:
            y.backward()
        got.append(x.grad)
    assert torch.equal(*got)


def test_other_threads_are_left_alone():
    seen = []
    with region("e8m1"):
        thread = threading.Thread(target=lambda: seen.append((torch.ones(1) + 2**-12).item()))
        thread.start()
        thread.join()
    assert seen == [1 + 2**-12]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch, in forward mode
def test_transforms_are_refused():
    def f(x):
        with region("bf16"):
            return (x * x).sum()

    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(f)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="in forward mode"):
        f(torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)))


def test_autocast_is_refused_where_it_rounds_first():
    layer = nn.Linear(4, 4)
    with (
        pytest.raises(NotImplementedError, match=r"aten\._to_copy.*bfloat16"),
        region("e8m3"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        layer(torch.ones(1, 4))


def test_transformer_layers_in_evaluation_are_taken_apart(seed):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    with region("e8m3"):
        training = layer(x)
        with torch.no_grad():
            evaluation = layer.eval()(x)
    assert torch.equal(training, evaluation)


def test_meta_tensors_pass():
    with region("bf16"):
        assert (torch.ones(2, device="meta") * 2).is_meta


def _end_by_error(x, w):
    y = x @ w
    y * 2
    raise ZeroDivisionError


def _end_without_gradients(x, w):
    torch.set_grad_enabled(False)
    with torch.enable_grad():
        return x @ w * 2


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: x @ w * 2,
        lambda x, w: checkpoint(lambda x: x @ w, x, use_reentrant=False) * 2,
        lambda x, w: checkpoint(lambda x: x @ w, x, use_reentrant=True) * 2,
        _end_by_error,
        _end_without_gradients,
    ],
    ids=["plain", "checkpoint", "reentrant checkpoint", "error", "no gradients"],
)
def test_a_graph_goes_with_its_last_tensor(f, seed):
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(6, 8)
    with torch.enable_grad(), contextlib.suppress(ZeroDivisionError), region("bfloat16"):
        inner = x @ w
        kept = weakref.ref(inner)
        inner = f(inner, w)
    del inner
    gc.collect()
    assert kept() is None
