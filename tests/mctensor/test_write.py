"""In-place operators: seen by every view, exact where a scale changes, or refused with the operand as it was."""

import pytest
import torch

from halfulp.kernels import same_bits
from halfulp.mctensor import MCTensor
from halfulp.mctensor._write import can_write_directly


def _same(a, b):
    return len(a.components) == len(b.components) and all(map(same_bits, a.components, b.components))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
def test_a_view_and_its_base_share_every_write(dtype, seed):
    x = MCTensor.encode(torch.randn(4, 6, dtype=torch.float64), 2, dtype)
    wanted = x.decode()
    part, column, flat = x[1:3, ::2], x.T[2], x.view(-1)
    bound = {torch.float16: 2.0**-15, torch.bfloat16: 2.0**-12, torch.float32: 2.0**-42, torch.float64: 2.0**-50}[dtype]
    part.mul_(3.0)
    wanted[1:3, ::2] *= 3.0
    column.add_(MCTensor.encode("0.1", 2, dtype))
    wanted[:, 2] += 0.1
    flat[5:9] = -7
    wanted.view(-1)[5:9] = -7
    x += x
    wanted += wanted.clone()
    assert (x.decode() - wanted).abs().max() <= bound * wanted.abs().max()
    assert torch.equal(flat.decode(), x.decode().view(-1))
    assert torch.equal(column.decode(), x.decode()[:, 2])


def test_overlapping_operands_are_read_before_they_are_written(seed):
    for dtype in (torch.float32, torch.float64):
        x = MCTensor.encode(torch.randn(300, dtype=torch.float64), 2, dtype)
        wanted = x.clone()[1:] + x.clone()[:-1]
        x[1:].add_(x[:-1])
        assert _same(x[1:], wanted)
        y = MCTensor.encode(torch.randn(5, 5, dtype=torch.float64), 2, dtype)
        wanted = y + y.T
        assert _same(y.add_(y.T), wanted)
        z = MCTensor.encode(torch.randn(9, dtype=torch.float64), 2, dtype)
        wanted = z + z.components[1].flip(0)
        assert _same(z.add_(z.components[1].flip(0)), wanted)


def test_a_larger_value_rescales_the_memory_and_every_view_of_it():
    x = MCTensor.encode([1e-6, 2e-6, 3e-6, 1.0], 2, torch.float16)
    view = x[2:]
    before = x.decode()[0].item()
    view.mul_(1e5)
    assert x.scale is view.scale
    assert torch.allclose(x.decode()[2:], torch.tensor([0.3, 1e5], dtype=torch.float64), rtol=2.0**-10)
    assert abs(x.decode()[0].item() - before) <= float(x.scale) * 2.0**-24


def test_smaller_values_get_their_digits_back():
    x = MCTensor.encode([1.0, 2.0], 2, torch.float16)
    x.mul_(1e-9)
    assert torch.allclose(x.decode(), torch.tensor([1e-9, 2e-9], dtype=torch.float64), rtol=2.0**-19, atol=0)
    grown = torch.zeros_like(x)
    grown[0] = 1e-10
    assert abs(grown.decode()[0].item() - 1e-10) <= 2.0**-50


def test_float16_without_a_scale_refuses_what_does_not_fit():
    x = MCTensor.encode([6e4, 1.0], 2, torch.float16, scale="none")
    before = x.clone()
    for write in (
        lambda: x.mul_(10),
        lambda: x.add_(x),
        lambda: x.fill_(1e9),
        lambda: x.copy_(torch.tensor([1e5, 0.0])),
    ):
        with pytest.raises(ValueError, match="scale"):
            write()
        assert _same(x, before)


def test_values_out_of_range_are_not_written():
    x = MCTensor.encode([1.0, 2.0], 2, torch.float32)
    before = x.clone()
    large = torch.tensor([1e300, 0.0], dtype=torch.float64)
    for write in (lambda: x.copy_(large), lambda: x.__setitem__(0, 1e300), lambda: x.__setitem__(0, large[0])):
        with pytest.raises(ValueError, match="range"):
            write()
        assert _same(x, before)
    x.div_(0.0)
    assert x.tolist() == [float("inf")] * 2


def test_a_result_of_another_shape_is_not_written():
    x = MCTensor.encode([1.0, 2.0])
    with pytest.raises(RuntimeError, match="shape"):
        x.add_(torch.ones(3, 2))
    with pytest.raises(RuntimeError):
        x.expand(3, 2).add_(1.0)
    assert x.tolist() == [1.0, 2.0]


def test_plain_tensors_take_rounded_values():
    x = MCTensor.encode(["0.1", "0.2"], 2, torch.float32)
    plain = torch.zeros(2)
    plain.copy_(x)
    assert torch.equal(plain, x.components[0])
    plain.add_(x)
    assert torch.equal(plain, (x + x.components[0]).decode(torch.float32))
    plain[0] = x[1]
    assert plain[0] == x.components[0][1]
    count = torch.zeros(2, dtype=torch.int64)
    count.copy_(MCTensor.encode([2.7, -2.7]))
    assert count.tolist() == [2, -2]


def test_data_is_replaced_as_a_whole():
    x = torch.nn.Parameter(MCTensor.encode([1.0, 2.0]))
    x.data = x.data * MCTensor.encode("0.1")
    assert x.to_strings() == ["0.10000000000000", "0.20000000000000"]
    with pytest.raises(TypeError, match="copy_"):
        x.data = torch.ones(2)


def test_out_and_in_place_forms_are_derived():
    x = MCTensor.encode([0.1, 4.0])
    target = torch.zeros_like(x)
    torch.exp(x, out=target)
    assert _same(target, x.exp())
    assert _same(x.clone().sqrt_(), x.sqrt())
    assert _same(x.clone().lerp_(target, 0.25), torch.lerp(x, target, 0.25))
    values, at = torch.zeros_like(x), torch.zeros(2, dtype=torch.int64)
    torch.sort(x, descending=True, out=(values, at))
    assert at.tolist() == [1, 0]
    squeezed = x.clone().unsqueeze_(0).squeeze_(0)
    assert _same(squeezed, x)


def test_lists_of_tensors():
    xs = [MCTensor.encode([0.1, 0.2]), MCTensor.encode([0.3])]
    torch._foreach_add_(xs, 1.0)
    torch._foreach_mul_(xs, [2.0, 3.0])
    torch._foreach_addcdiv_(xs, xs, xs, [1.0, 2.0])
    sums = torch._foreach_norm(xs)
    assert abs(xs[0].decode()[0].item() - 3.2) < 1e-9
    assert abs(xs[1].decode()[0].item() - 5.9) < 1e-7
    assert all(isinstance(x, MCTensor) for x in sums)


@pytest.mark.parametrize(
    "put",
    [
        lambda x, mask: x.add_(mask),
        lambda x, mask: x.addcmul_(mask, torch.ones(3, 3)),
        lambda x, mask: x.masked_fill_(mask != 0, -1e9),
        lambda x, mask: x.copy_(torch.where(mask != 0, -1e9, x)),
        lambda x, mask: x.__setitem__(mask != 0, -1e9),
        lambda x, mask: x.masked_scatter_(mask != 0, torch.tensor([-1e9])),
    ],
)
def test_a_constant_that_stands_for_infinity_takes_no_digits_of_the_others(put, seed):
    x, mask = MCTensor.encode(torch.randn(3, 3), 2, torch.float16), torch.zeros(3, 3)
    mask[0, 1] = -1e9
    before, kept = x.decode(), mask == 0
    put(x, mask)
    assert (x.decode() - before)[kept].abs().max() <= 2.0**-20
    assert x.decode()[0, 1] < -100


def test_large_elements_of_ones_own_stay_beside_a_constant():
    x, mask = MCTensor.encode([2.0**25, 1.0, 3.0], 2, torch.float16), torch.tensor([0.0, -1e9, 0.0])
    x.add_(mask)
    assert x.decode()[0] == 2.0**25


@pytest.mark.parametrize(
    ("value", "factor"),
    [([1.0, 1e-3], torch.tensor(1e9)), ([1.0, 1e-3], torch.tensor([1e9, 1e9])), ([2.0**20, 1, 3], [2.0**10, 1, 1e9])],
)
def test_a_product_with_large_numbers_has_no_outliers(value, factor):
    x = MCTensor.encode(value, 2, torch.float16)
    wanted = x.decode() * torch.as_tensor(factor)
    x.mul_(torch.as_tensor(factor))
    assert torch.allclose(x.decode(), wanted, rtol=2.0**-19)


def test_a_large_product_stays_beside_a_constant_elsewhere():
    x, c = MCTensor.encode([1.0, 1.0, 3.0], 2, torch.float16), MCTensor.encode([2.0**20, 1.0, 1.0], 2, torch.float16)
    x.addcmul_(c, torch.tensor([2.0**10, 0.0, -1e9]))
    assert x.decode()[0] == pytest.approx(2.0**30, rel=2.0**-19)


def test_what_may_be_written_while_it_is_read(seed):
    """The tensor itself, and what is not larger and lies in other memory."""
    x, other = (MCTensor.encode(torch.randn(4, 6, dtype=torch.float64), 2) for _ in range(2))
    assert can_write_directly(x, [])
    assert can_write_directly(x, [x._parts, x._parts])
    for small in (other, other[0], other[:, :1], other[0, 0], MCTensor.encode(2.0)):
        assert can_write_directly(x, [x._parts, small._parts])
    for overlapping in (x.T.contiguous().T * 1, x.mT.mT, x[:1], x.detach()):
        memory, others = ({part.untyped_storage()._cdata for part in one._parts} for one in (x, overlapping))
        assert can_write_directly(x, [overlapping._parts]) is memory.isdisjoint(others)
    for large in (other[None], other.expand(2, 4, 6)):
        assert can_write_directly(x, [large._parts]) is (large.shape[0] == 1 and large.dim() < 3)
    assert not can_write_directly(x[:, :1], [other._parts])


@pytest.mark.parametrize("name", ["add", "addcmul", "div"])
def test_what_lies_below_the_scales_range_is_not_0_in_a_sum(name):
    """A sum, by which may be divided, stays above 0; a quotient may become 0."""
    x = MCTensor.encode([1.0, 2.0**-20 if name == "div" else 0.0], 2, torch.float16, scale=2.0**-4)
    other = MCTensor.encode([1.0, 2.0**20] if name == "div" else [2.0**-20, 2.0**-33], 2, torch.float16)
    getattr(x, f"{name}_")(*[other] * (2 if name == "addcmul" else 1))
    assert float(x.scale) == 2.0**-4
    assert bool(x.decode()[1] == 0) is (name == "div")
