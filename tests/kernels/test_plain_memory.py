"""What has no plain memory is converted or refused wherever a kernel reads or writes."""

import ast
import contextlib
import itertools
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import halfulp as hu
from halfulp.emulation import region
from halfulp.kernels import address, get_plain_address_or_zero, has_strided_values, overlaps_itself, to_plain_memory

SOURCE = Path(hu.__file__).parent
VALUES = [1.0, -2.0, 0.5]


class Marked(torch.Tensor):
    """A tensor with memory of its own, marked as something."""


def _fake():
    with FakeTensorMode():
        return torch.tensor(VALUES)


def _negative():
    imaginary = -torch.tensor(VALUES)
    return torch.complex(torch.zeros(3), imaginary).conj().imag


def _contiguous_negative():
    return torch._neg_view(-torch.tensor(VALUES))


def _freed():
    x = torch.tensor(VALUES)
    x.untyped_storage().resize_(0)
    return x


# name: (makes one, the values that it stands for or None where it is to be refused)
KINDS = {
    "plain": (lambda: torch.tensor(VALUES), VALUES),
    "parameter": (lambda: torch.nn.Parameter(torch.tensor(VALUES)), VALUES),
    "strided": (lambda: torch.tensor([VALUES, VALUES]).t()[:, 1], VALUES),
    "expanded": (lambda: torch.tensor([0.5]).expand(3), [0.5] * 3),
    "negative bit": (_negative, VALUES),
    "negative bit, contiguous": (_contiguous_negative, VALUES),
    "ZeroTensor": (lambda: torch._efficientzerotensor(3), [0.0] * 3),
    "marked": (lambda: torch.tensor(VALUES).as_subclass(Marked), VALUES),
    "ScaledTensor": (lambda: hu.ScaledTensor.encode(torch.tensor(VALUES)), VALUES),
    "MCTensor": (lambda: hu.MCTensor.encode(torch.tensor(VALUES), 2, torch.bfloat16), VALUES),
    "wrapper subclass": (lambda: TwoTensor(torch.tensor(VALUES), torch.tensor(VALUES)), None),
    "FakeTensor": (_fake, None),
    "sparse": (lambda: torch.tensor(VALUES).to_sparse(), None),
    "mkldnn": (lambda: torch.tensor(VALUES).to_mkldnn(), None),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), None),
    "freed": (_freed, None),
}
OURS = ("ScaledTensor", "MCTensor")
TRACED = ("FakeTensor", "wrapper subclass")  # torch runs operators on what they stand for


@pytest.mark.parametrize("count", [0, 1, 2])
def test_numbers_without_an_address_are_none_unless_there_are_none(count):
    assert has_strided_values(torch.zeros(count))
    assert has_strided_values(torch.zeros(2, count))
    assert has_strided_values(torch._efficientzerotensor(count)) == (count == 0)
    freed = torch.zeros(count)
    freed.untyped_storage().resize_(0)
    assert has_strided_values(freed) == (count == 0)


def _encoded(x):
    return hu.MCTensor.encode(x).decode(torch.float32)


def _summed(x):
    return hu.MCTensor.from_components([x, torch.zeros(3)]).decode(torch.float32)


def _scaled(x):
    return hu.ScaledTensor.encode(x).decode(torch.float32)


def _payload(x):
    return hu.ScaledTensor(x, 1.0).decode(torch.float32)


def _emulated(x):
    w = torch.ones(3, requires_grad=True)
    with region("e8m10"):
        y = w * 1.0
    y.backward(x)
    return w.grad


def _gradient(x, **options):
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = hu.optim.SGD([p], lr=1.0, **options)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    p.grad_dtype = None
    p.grad = x
    optimizer.step()
    return -p.detach().float()


def _first_gradient(x):
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad_dtype = None
    p.grad = x
    hu.optim.SGD([p], lr=1.0).step()
    return -p.detach()


def _parameter(x):
    p = torch.nn.Parameter(x.detach())
    optimizer = hu.optim.SGD([p], lr=0.25)
    p.grad = torch.ones(3, dtype=p.dtype)
    optimizer.step()
    return (p.decode() if hasattr(p, "decode") else p).detach().float() + 0.25


def _wrapped(x):
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    p.grad_dtype = None
    p.grad = x
    hu.optim.wrap(torch.optim.SGD, [p], lr=1.0).step()
    return -p.detach().float()


# place: (what is done with a tensor, kinds that it refuses beside those without values, kinds of which torch keeps it)
PLACES = {
    "MCTensor.encode": (_encoded, (), TRACED),
    "MCTensor.from_components": (_summed, OURS, TRACED),
    "ScaledTensor.encode": (_scaled, (), (*TRACED, "nested")),
    "ScaledTensor": (_payload, OURS, TRACED),
    "quantize": (lambda x: hu.quantize(x, "e8m10"), (), (*TRACED, *OURS)),
    "quantize in blocks": (lambda x: hu.quantize(x, "mxfp8_e4m3"), (), (*TRACED, *OURS)),
    "exact_sum": (lambda x: hu.exact_sum(x.reshape(3, 1), 1), OURS, (*TRACED, "nested", "sparse", "mkldnn")),
    "emulated gradient": (_emulated, (*OURS, "marked"), (*TRACED, "sparse", "mkldnn", "nested", "freed")),
    "gradient": (_gradient, (), ("mkldnn", "nested")),
    "gradient of a narrow parameter": (lambda x: _gradient(x, param_dtype=torch.bfloat16), (), ("mkldnn", "nested")),
    "first gradient": (_first_gradient, (), ("mkldnn", "nested")),
    "gradient under wrap": (_wrapped, (), ("mkldnn", "nested")),
    "parameter": (_parameter, ("expanded", "ZeroTensor", "negative bit, contiguous"), ("mkldnn", "nested")),
}

READ_BY_TORCH = (
    "ScaledTensor.encode",
    "ScaledTensor",
    "emulated gradient",
    "gradient under wrap",
    "exact_sum",
    "quantize in blocks",
)


# Torch itself reads freed memory, and its own optimizers take sparse gradients.
LEFT_OUT = {(place, "freed") for place in READ_BY_TORCH} | {("gradient under wrap", "sparse")}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:halfulp.quantize")
@pytest.mark.parametrize(("place", "kind"), [row for row in itertools.product(PLACES, KINDS) if row not in LEFT_OUT])
def test_every_kind_is_converted_or_refused_everywhere(place, kind):
    act, refuses, left_to_torch = PLACES[place]
    make, values = KINDS[kind]
    x = make()
    if values is None or kind in refuses:
        allowed = Exception if kind in left_to_torch else (TypeError, ValueError, NotImplementedError)
        found = []
        with contextlib.suppress(allowed):
            found.append(act(x))
        assert not found or (kind in left_to_torch and not has_strided_values(found[0])), "numbers out of what has none"
        return
    result = act(x)
    result = result.decode() if hasattr(result, "decode") else result
    assert result.detach().float().tolist() == values


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_plain_memory_holds_the_values_or_is_refused(kind):
    make, values = KINDS[kind]
    if values is None or kind in OURS:
        with pytest.raises(TypeError, match="what"):
            to_plain_memory(make(), "what")
        return
    found = to_plain_memory(make().detach(), "what")
    assert found.tolist() == values
    assert address(found)
    assert not found.is_neg()


def test_an_address_is_of_memory_that_holds_the_values():
    for kind in ("negative bit", "ZeroTensor", "wrapper subclass", "FakeTensor", "freed"):
        with pytest.raises(TypeError):
            address(KINDS[kind][0]())
    assert address(torch.empty(0)) == 0


def test_conjugate_bits_are_resolved():
    x = torch.complex(torch.tensor([1.0]), torch.tensor([2.0])).conj()
    assert torch.view_as_real(to_plain_memory(x)).tolist() == [[1.0, -2.0]]


def test_inside_a_transform_of_torch_func_kernels_refuse():
    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.vmap(lambda x: to_plain_memory(x))(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("x", "overlaps"),
    [
        (torch.zeros(1).expand(4), True),
        (torch.zeros(4).as_strided((2, 2), (1, 1)), True),
        (torch.zeros(3, 4).t(), False),
        (torch.zeros(2, 3, 4)[:, 1], False),
        (torch.zeros(2, 1, 3).expand(2, 1, 3), False),
        (torch.zeros(0, 3).expand(5, 0, 3), False),
        (torch.zeros(()), False),
    ],
)
def test_overlapping_elements_are_seen(x, overlaps):
    assert overlaps_itself(x) is overlaps


# Where a pointer is taken without `address`: hot loops that have looked at the tensor, and comparisons of pointers.
LOOKED_AT = {
    "optim/parameters/_outside_writes.py": {"carry_payload_version"},
    "subclass/models/_parameter_holders.py": {"refuse_overlapping_memory", "has_common_memory"},
    "kernels/_plain_memory.py": {"address", "has_strided_values", "get_plain_address_or_zero"},
    "rounding/_quantize.py": {"_quantize_plain_memory"},
    "arithmetic/_pointwise.py": {"run_on_like_operands", "run_on_broadcast_operands", "_is_written_before_read"},
    "observation/auditing/_run.py": {"_locate_memory"},
    "optim/_gradient_release.py": {"_find_storage_peers"},
    "optim/parameters/_narrowing.py": {"narrow_parameter", "pop_kept_float32_values"},
    "optim/parameters/_parameter_plan.py": {"is_plan_valid"},
    "optim/step/_run.py": {"_write_step_pointers"},
    "testing/_rules.py": {"_find_memory"},
    "gradients/_scaler.py": {"_read_version"},
    "optim/step/_batch.py": {"is_valid_for", "_has_same_state_tensors", "renew_plan"},
}


def test_pointers_are_taken_in_few_places():
    for path in (path for path in sorted(SOURCE.rglob("*.py")) if "data_ptr" in path.read_text()):
        allowed = LOOKED_AT.get(str(path.relative_to(SOURCE)), set())
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name in allowed:
                continue
            for node in ast.walk(function):
                taken = isinstance(node, ast.Attribute) and node.attr in ("data_ptr", "const_data_ptr")
                assert not taken, f"{path}: {function.name} takes a pointer: use halfulp.kernels.address"


def test_only_plain_memory_has_an_address():
    x = torch.ones(4, 6)
    plain = (x, torch.nn.Parameter(x), x[1:], x.bfloat16(), torch.ones(()), torch.inference_mode()(torch.ones)(3))
    assert all(get_plain_address_or_zero(one) == one.data_ptr() for one in plain)
    scaled = hu.scalify(torch.nn.Linear(4, 4)).weight
    others = [x.t(), x[:, 1:], x.to_sparse(), torch._neg_view(x), torch._efficientzerotensor(3), x.to("meta")]
    others += [scaled, torch.empty(0), torch.ones(3, dtype=torch.complex64).conj().imag]
    assert [get_plain_address_or_zero(one) for one in others] == [0] * len(others)

    def check(one: torch.Tensor) -> torch.Tensor:
        assert get_plain_address_or_zero(one) == 0
        return one.sum()

    torch.vmap(check)(x)
    torch.func.grad(check)(x)
