"""Law: every rule of MCTensors keeps its bound of digits, each element for itself.

`python -m benchmarks.bench_mctensor_values` tries thousands of arguments of each.
"""

import random

import mpmath
import pytest
import torch

from halfulp.arithmetic._functions import EXPANSION_FUNCTION_BY_NAME
from halfulp.kernels import engine, same_bits
from halfulp.mctensor import MCTensor
from halfulp.subclass import strict

from ..mctensor.function_values import CASES, KINDS, drawn, judged

# What is no function of a torch operator of its own: it brings values into their form, or compares them.
_NO_OPERATORS = {"renormalize", "compare"}


def test_every_function_of_the_arithmetic_is_a_case():
    assert set(EXPANSION_FUNCTION_BY_NAME) - _NO_OPERATORS <= set(CASES)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_value_is_within_its_bound(kind, seed):
    """By the reference, which needs no compiler; other tests compare the machine code with it bit by bit."""
    with mpmath.workprec(400), engine("reference"), strict():
        for name, case in CASES.items():
            operands = drawn(case, kind, 6)
            assert judged(name, operands, case.call(*operands))[1] == []


@pytest.mark.parametrize("name", ["exp", "tanh", "floor"])
def test_no_element_changes_another(name, seed):
    case = CASES[name]
    operands = drawn(case, (torch.float64, 2), 6)
    far = [torch.cat([x, MCTensor.encode(torch.full((1,), 2.0**1000, dtype=torch.float64))]) for x in operands]
    alone, beside = case.call(*operands), case.call(*far)
    assert all(same_bits(a, b[:-1]) for a, b in zip(alone.components, beside.components))


# Operators of several steps, with numbers of their own, or whose derivative has such.
NAMES = (
    *("addcmul", "deg2rad", "einsum", "linalg.multi_dot", "log10", "log2"),
    *("nn.functional.binary_cross_entropy_with_logits", "nn.functional.cosine_similarity", "nn.functional.group_norm"),
    *("nn.functional.hardsigmoid", "nn.functional.huber_loss", "nn.functional.kl_div", "nn.functional.layer_norm"),
    *("nn.functional.mse_loss", "nn.functional.poisson_nll_loss", "nn.functional.rms_norm", "pow", "var", "xlogy"),
    "linalg.vector_norm",
)
# In whose formulas torch has numbers of its own, as float64: within 2^-53 each (docs/mctensor.md).
NUMBERED = (
    *("deg2rad", "log10", "log2"),
    *("nn.functional.group_norm", "nn.functional.hardsigmoid"),
)
# In which torch's formula rounds numbers, or weights, to the components' dtype.
NARROW = ("special.xlog1py", "xlogy")


@pytest.fixture
def digits(benchmark_module):
    return benchmark_module("_operator_digits")


@pytest.mark.filterwarnings("ignore")
def test_a_choice_of_operators_keeps_its_digits(digits, seed):
    """Of some in each run; `python -m benchmarks.bench_mctensor_operators` tries all operators."""
    known = {digits.name_of(op): op for op in digits.operators()}
    wrong = []
    cases = ["plain operands", "constants", "gaps", "far element"]
    for name in (*random.sample(NAMES, 5), random.choice(NARROW)):
        kinds = ["3 x f32"] if name in NARROW else ["2 x f64"]
        found = digits.findings(known[name], 1, 0, kinds, cases)
        wrong += [(name, *key, x) for key, x in found if key[2] == "components" and x.verdict not in (None, "within")]
        long = {} if name in NUMBERED else digits.long_constants(known[name], 1, 0)
        wrong += [(name, number, where) for number, where in long.items()]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.filterwarnings("ignore")
def test_what_is_wrong_is_seen(digits, monkeypatch):
    """A rule that works on first components alone; a number with a float64's digits; a step in float64."""
    from halfulp.mctensor import MCTensor, _mctensor

    known = {digits.name_of(op): op for op in digits.operators()}
    exp2, log2, tanh = torch.ops.aten.exp2.default, torch.ops.aten.log2.default, torch.ops.aten.tanh.default
    monkeypatch.setitem(_mctensor.RULES, tanh, lambda x: MCTensor.encode(x.components[0].tanh(), 2))
    monkeypatch.setitem(_mctensor.RULES, exp2, lambda x: (x * 0.6931471805599453).exp())
    monkeypatch.setitem(_mctensor.RULES, log2, lambda x: MCTensor.encode(x.decode() / 3, len(x.components)))
    verdicts = {}
    for name in ("tanh", "log2"):
        ((_, first), *_) = digits.findings(known[name], 1, 0, ["2 x f64"], ["components"])
        verdicts[name] = first.verdict
    assert verdicts["tanh"] == "cut"
    assert verdicts["log2"] == "differs"
    assert 0.6931471805599453 in digits.long_constants(known["exp2"], 1, 0)
