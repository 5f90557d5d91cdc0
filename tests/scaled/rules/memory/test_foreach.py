"""Operators on lists of tensors: as one by one."""

import pytest
import torch

from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor
from halfulp.scaled._registry import FAMILY_OF
from halfulp.subclass import strict


def lists(dtype):
    plain = [[torch.rand(2, 3) + 0.5 for _ in range(2)] for _ in range(3)]
    scaled = [[ScaledTensor.encode(x, dtype) for x in tensors] for tensors in plain]
    return [[x.decode() for x in tensors] for tensors in scaled], scaled


CASES = {
    "add": lambda a, b, c: torch._foreach_add(a, b, alpha=0.3),
    "add number": lambda a, b, c: torch._foreach_add(a, 0.5),
    "add numbers": lambda a, b, c: torch._foreach_add(a, [0.5, 2.0]),
    "add tensor": lambda a, b, c: torch._foreach_add(a, torch.tensor(0.5)),
    "sub": lambda a, b, c: torch._foreach_sub(a, b),
    "mul": lambda a, b, c: torch._foreach_mul(a, b),
    "mul number": lambda a, b, c: torch._foreach_mul(a, 0.9),
    "mul tensor": lambda a, b, c: torch._foreach_mul(a, torch.tensor(0.9)),
    "div": lambda a, b, c: torch._foreach_div(a, b),
    "div numbers": lambda a, b, c: torch._foreach_div(a, [0.9, 1.1]),
    "addcmul": lambda a, b, c: torch._foreach_addcmul(a, b, c, value=0.1),
    "addcmul numbers": lambda a, b, c: torch._foreach_addcmul(a, b, c, [0.1, 0.2]),
    "addcdiv": lambda a, b, c: torch._foreach_addcdiv(a, b, c, value=-0.1),
    "addcdiv tensor": lambda a, b, c: torch._foreach_addcdiv(a, b, c, torch.tensor([0.1, 0.2])),
    "lerp": lambda a, b, c: torch._foreach_lerp(a, b, 0.3),
    "lerp list": lambda a, b, c: torch._foreach_lerp(a, b, c),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(a),
    "pow": lambda a, b, c: torch._foreach_pow(a, 2.0),
    "pow of number": lambda a, b, c: torch._foreach_pow(2.0, a),
    "neg": lambda a, b, c: torch._foreach_neg(a),
    "maximum": lambda a, b, c: torch._foreach_maximum(a, b),
    "clamp_min": lambda a, b, c: torch._foreach_clamp_min(a, 0.8),
    "norm": lambda a, b, c: torch._foreach_norm(a),
    "norm inf": lambda a, b, c: torch._foreach_norm(a, float("inf")),
    "max": lambda a, b, c: torch._foreach_max(a),
    "sign": lambda a, b, c: torch._foreach_sign(a),
}
IN_PLACE = {
    "add_": lambda a, b, c: torch._foreach_add_(a, b, alpha=-0.1),
    "mul_": lambda a, b, c: torch._foreach_mul_(a, 0.9),
    "addcmul_": lambda a, b, c: torch._foreach_addcmul_(a, b, c, 0.1),
    "addcdiv_": lambda a, b, c: torch._foreach_addcdiv_(a, b, c, [0.1, 0.2]),
    "lerp_": lambda a, b, c: torch._foreach_lerp_(a, b, 0.1),
    "sqrt_": lambda a, b, c: torch._foreach_sqrt_(a),
    "div_": lambda a, b, c: torch._foreach_div_(a, b),
    "zero_": lambda a, b, c: torch._foreach_zero_(a),
    "copy_": lambda a, b, c: torch._foreach_copy_(a, b),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", [*CASES, *IN_PLACE])
def test_as_on_plain_tensors(case, dtype, seed):
    plain, scaled = lists(dtype)
    function = CASES.get(case) or IN_PLACE[case]
    with strict():
        found = function(*scaled)
    expected = function(*plain)
    if case in IN_PLACE:
        found, expected = scaled[0], plain[0]
    assert all(isinstance(x, ScaledTensor) for x in found)
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x.decode(), y, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-7)


FOREACH = {str(x): x for x in FAMILY_OF if x._schema.name.startswith("aten::_foreach_")}
COUNT = 3
GIVEN = {
    "List[Tensor]": lambda: [torch.rand(3, 3) * 0.8 + 0.1 for _ in range(COUNT)],
    "List[number]": lambda: [0.3, 0.7, 0.6],
    "Tensor": lambda: torch.tensor(0.3),
    "scalars": lambda: [0.3, 0.7, 0.6],
    "number": lambda: 0.7,
    "dtype": lambda: torch.float64,
    "memory_format": lambda: torch.contiguous_format,
    "bool": lambda: True,
}


@pytest.mark.parametrize("name", FOREACH)
def test_every_argument_of_every_operator_on_lists_arrives(name, seed):
    """With no argument at its default, by position and by name, on values that every function takes."""
    operator = FOREACH[name]
    places = operator._schema.arguments
    plain = {place.name: GIVEN[place.name if place.name in GIVEN else str(place.type)]() for place in places}
    if operator._overloadname == "Tensor" and "scalars" in plain:
        plain["scalars"] = torch.tensor(plain["scalars"])
    scaled = {
        place: [ScaledTensor.encode(y, torch.float32) for y in x] if str(kind.type) == "List[Tensor]" else x
        for (place, x), kind in zip(plain.items(), places)
    }
    kept = {place.name for place in places if place.kwarg_only}
    results = []
    for given in (plain, scaled):
        positional = [x for place, x in given.items() if place not in kept]
        found = operator(*positional, **{place: given[place] for place in kept})
        results.append(given["self"] if found is None else found)
    for wanted, found in zip(*results, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.allclose(found.decode(found.dtype), wanted, rtol=1e-6, atol=1e-7)


def test_clipping_gradients(seed):
    p = [torch.nn.Parameter(ScaledTensor.encode(torch.randn(3), torch.float16)) for _ in range(2)]
    for x in p:
        x.grad = ScaledTensor.encode(torch.randn(3), torch.float16)
    total = torch.cat([x.grad.decode() for x in p]).norm()
    with strict():
        assert torch.nn.utils.clip_grad_norm_(p, 1e-3).item() == pytest.approx(total.item(), rel=1e-2)
    assert torch.cat([x.grad.decode() for x in p]).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_fused_optimizers_are_refused_with_the_remedy():
    p = torch.nn.Parameter(ScaledTensor.encode(torch.ones(3)))
    p.grad = ScaledTensor.encode(torch.ones(3))
    with pytest.raises(NotImplementedError, match=r"fused=False"):
        torch.optim.Adam([p], fused=True).step()


def test_unscaling_gradients_finds_what_is_not_finite(seed):
    g = [ScaledTensor.encode(torch.randn(3), torch.float32) for _ in range(2)]
    before, found = [x.decode() for x in g], torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(g, found, torch.tensor(0.25))
    assert found.item() == 0.0
    assert all(same_bits(x.decode(), y * 0.25) for x, y in zip(g, before))
    g[1][0] = float("inf")
    torch._amp_foreach_non_finite_check_and_unscale_(g, found, torch.tensor(1.0))
    assert found.item() == 1.0
