"""Two bfloat16 as one state: 16 bits, exactly cut, and a second moment that follows where one bfloat16 stalls."""

import copy
from fractions import Fraction

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.states._codec import DoubleBF16

from ...laws.optim.cases import SPECIAL


def held(values: torch.Tensor) -> list[torch.Tensor]:
    tensors = [
        torch.empty(shape, dtype=dtype) for shape, dtype in DoubleBF16().describe_tensors("v", values.shape).values()
    ]
    DoubleBF16().encode(tensors, values, None)
    return tensors


def test_within_half_an_ulp_of_the_residual(seed):
    values = torch.randn(4096) * 2 ** torch.empty(4096).uniform_(-100, 100)
    first, residual = held(values)
    assert torch.equal(first, values.bfloat16())
    for value, a, b in zip(*(x.double().tolist() for x in (values, first, residual))):
        error = abs(Fraction(value) - Fraction(a) - Fraction(b))
        assert error <= abs(Fraction(value) - Fraction(a)) * Fraction(2) ** -8
    assert torch.equal(DoubleBF16().decode([first, residual]).double(), first.double() + residual.double())


def test_special_values():
    values = torch.tensor(SPECIAL)
    first, residual = held(values)
    assert same_bits(first, values.bfloat16())
    assert residual.isfinite().all()
    assert (residual[~first.isfinite()] == 0).all()


def test_the_second_moment_follows_float32_where_one_bfloat16_stalls(seed):
    """To nearest at 0.999, one bfloat16 never moves by less than half an ulp: Collage's example."""
    kinds = {"fp32": torch.float32, "pair": hu.Components(2), "one": hu.optim.State(torch.bfloat16, "nearest")}
    optimizers = {}
    for name, kind in kinds.items():
        parameter = torch.nn.Parameter(torch.zeros(2048))
        optimizers[name] = (parameter, hu.optim.AdamW([parameter], lr=1e-6, state_dtype={"exp_avg_sq": kind}))
    for step in range(1200):
        gradient = torch.randn(2048) * (1.0 if step < 600 else 0.5)
        for parameter, optimizer in optimizers.values():
            parameter.grad = gradient
            optimizer.step()
    values = {}
    for name, (parameter, optimizer) in optimizers.items():
        state = optimizer.state[parameter]
        values[name] = state["exp_avg_sq"].double() + (state["exp_avg_sq_residual"].double() if name == "pair" else 0)
    worst = {name: float((values[name] / values["fp32"] - 1).abs().max()) for name in ("pair", "one")}
    assert worst["pair"] < 0.01
    assert worst["one"] > 0.1


def test_four_bytes_per_element_and_named_beside_its_first():
    parameter = torch.nn.Parameter(torch.zeros(64, 8).bfloat16())
    collage = {"weight_update": hu.Components(2), "state_dtype": {"exp_avg_sq": "bfloat16x2"}}
    optimizer = hu.optim.AdamW([parameter], **collage)
    assert optimizer.bytes_per_parameter() == 2 + 2 + 2 + 4 + 2
    assert set(optimizer.state[parameter]) == {"step", "residual", "exp_avg", "exp_avg_sq", "exp_avg_sq_residual"}


@pytest.mark.parametrize("target", [torch.float32, "8bit"])
def test_a_pair_loads_into_no_other_dtype_and_comes_from_one(target, seed):
    parameter = torch.nn.Parameter(torch.randn(64, 32).bfloat16())
    optimizer = hu.optim.AdamW([parameter], state_dtype="bfloat16x2")
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    twin = hu.optim.AdamW([copy.deepcopy(parameter)], state_dtype=target)
    with pytest.raises(ValueError, match="give it the state_dtype of the optimizer that saved the file"):
        twin.load_state_dict(optimizer.state_dict())
    plain = hu.optim.AdamW([parameter], state_dtype=torch.float32)
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    state, wanted = optimizer.state[parameter], plain.state[parameter]["exp_avg_sq"]
    found = state["exp_avg_sq"].float() + state["exp_avg_sq_residual"].float()
    torch.testing.assert_close(found, wanted, rtol=2**-14, atol=0)
