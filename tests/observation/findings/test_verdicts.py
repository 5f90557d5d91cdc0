"""What a finding says is so: its names, the worst of what is joined, a cure that is not what is there already."""

import dataclasses
import itertools
import random
import re

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp import formats
from halfulp._qualified_names import make_name_pattern
from halfulp.observation._finding import Finding, describe_names, join_and_rank_findings
from halfulp.observation._record import AverageRecord, Record, StepRecord
from halfulp.observation.findings import FINDING_KINDS, collect_findings

from .records import found, parameter, realised, tensor


def spelled(words: str) -> set[str]:
    """The names that words in braces stand for."""
    names = set()
    for word in re.split(r", (?![^{]*})", words):
        choices = []
        for part in re.split(r"({[^}]*})", word):
            runs = part[1:-1].split(",") if part.startswith("{") else None
            ends = [] if runs is None else [(run.split("-")[0], run.split("-")[-1]) for run in runs]
            choices.append([str(n) for low, high in ends for n in range(int(low), int(high) + 1)] or [part])
        names |= {"".join(parts) for parts in itertools.product(*choices)}
    return names


def test_words_name_just_the_layers_that_are_meant(seed):
    assert describe_names(["layers.3.norm", "layers.7.norm"]) == "layers.{3,7}.norm"
    draws = random.Random(seed)
    for _ in range(200):
        layers = draws.sample(range(12), draws.randint(1, 12))
        inner = draws.sample(range(4), draws.randint(1, 3))
        names = [f"blocks.{k}.mlp.{j}.weight" for k in layers for j in inner] + [f"heads.{layers[0]}.bias"]
        assert spelled(describe_names(names)) == set(names)
        some = draws.sample(names[:-1], draws.randint(1, len(names) - 1))
        words = describe_names(some)
        counted = f"{make_name_pattern(some[0])} ({len(some)})"
        assert spelled(words) == set(some) or words == counted, "no name too many"


@pytest.mark.parametrize("code", sorted(code for code, kind in FINDING_KINDS.items() if kind.worst))
def test_what_is_joined_says_the_numbers_of_the_worst(code, seed):
    key, sign = FINDING_KINDS[code].worst.removeprefix("-"), -1 if FINDING_KINDS[code].worst.startswith("-") else 1
    draws = random.Random(seed)
    values = [draws.random() for _ in range(6)]
    each = [
        Finding(code, (f"layers.{k}.weight",), "error", draws.random(), {key: value}, "cure", str(value))
        for k, value in enumerate(values)
    ]
    (joined,) = join_and_rank_findings(each, FINDING_KINDS)
    worst = sign * max(sign * value for value in values)
    assert (joined.evidence[key], joined.summary) == (worst, str(worst))
    assert joined.confidence == max(one.confidence for one in each)


def test_codes_whose_evidence_differs_by_layer_say_which_number_is_the_worst():
    told = {"lost", "hidden", "saturated", "vanished", "noise", "margin", "ratio", "realised", "relative", "error"}
    for code, kind in FINDING_KINDS.items():
        record = MAKERS.get(code)
        evidence = {key for one in found(code, record(torch.float16)) for key in one.evidence} if record else set()
        assert kind.worst or not evidence & told, code


def test_norms_and_linear_layers_of_one_sequence_are_two_findings():
    record = Record(sampled_steps=list(range(8)))
    for name, kind, lost in (("0.weight", "LayerNorm", 1.0), ("1.weight", "Linear", 0.79)):
        record.parameters |= parameter(name, kind=kind, update=realised(0.3, lost=lost)).parameters
    norm, linear = collect_findings("observe", record)
    assert [(one.where, one.evidence["lost"]) for one in (norm, linear)] == [
        (("0.weight",), 1.0),
        (("1.weight",), pytest.approx(0.79, abs=1e-3)),
    ]
    assert len(join_and_rank_findings([norm, linear], FINDING_KINDS)) == 2, (
        "those of several trainings are joined once more"
    )


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def small(dtype: torch.dtype) -> float:
    return formats.get(dtype).smallest_normal


def find_loss(dtype: torch.dtype) -> Record:
    return Record(history=[StepRecord(k, True, 1e-3, loss=1.0) for k in range(8)], loss_dtype=dtype, loss_gap=3.0)


def read_averages(dtype: torch.dtype) -> Record:
    return Record(averages={"a": AverageRecord("a", dtype, realised(0.05))})


def underflowing(dtype: torch.dtype, role: str) -> Record:
    lowest = formats.get(dtype).smallest_subnormal
    binade = formats.get(dtype).emin - 12
    return tensor(role, dtype=dtype, amax=small(dtype), rms=2 * lowest, histogram={binade: 30000})


# Records of numbers in a dtype, by the codes whose cure names one.
MAKERS = {
    "updates-lost": lambda dtype: parameter(dtype=dtype, update=realised(0.1)),
    "weight-frozen": lambda dtype: parameter(dtype=dtype, update=realised(0.0), moved=0.0),
    "weight-decay-lost": lambda dtype: parameter(dtype=dtype, decay=realised(0.1)),
    "second-moment-stuck": lambda dtype: parameter(
        dtype=dtype, states={"exp_avg_sq": realised(0.1)}, state_dtypes={"exp_avg_sq": dtype}
    ),
    "average-stuck": read_averages,
    "accumulation-swamped": lambda dtype: parameter(dtype=dtype, gradient_dtype=dtype, accumulation=realised(0.3)),
    "eps-zero": lambda dtype: parameter(dtype=dtype, options={"lr": 1e-3, "eps": small(dtype) ** 2 or 5e-324}),
    "overflow-near": lambda dtype: tensor(dtype=dtype, amax=formats.get(dtype).max / 3),
    "activation-underflow": lambda dtype: underflowing(dtype, "activation"),
    "gradient-underflow": lambda dtype: underflowing(dtype, "activation gradient"),
    "first-nonfinite": lambda dtype: tensor(dtype=dtype, nonfinite=5, first_nonfinite=(0, 0), nonfinite_steps=8),
    "loss-cancels": find_loss,
}
SAID = {torch.float16: ["float16"], torch.bfloat16: ["bfloat16"], torch.float32: ["float32"], torch.float64: []}
# float64 has no wider one, and float32 is none to what overflows bfloat16; digits are another matter.
RANGES = ("overflow-near", "activation-underflow", "gradient-underflow", "first-nonfinite", "eps-zero")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", sorted(MAKERS))
def test_no_cure_is_what_is_there_already(code, dtype):
    record = MAKERS[code](dtype)
    narrower = list(itertools.chain(*(SAID[one] for one in DTYPES[: DTYPES.index(dtype) + 1])))
    if code in RANGES and dtype == torch.bfloat16:
        narrower.append("float32")
    each = found(code, record)
    if not each:
        # What rounds away in float32 is no practical loss.
        no_loss = ("updates-lost", "weight-decay-lost", "second-moment-stuck", "average-stuck")
        assert dtype == torch.float64 or code in ("eps-zero", *no_loss), "a record of the fault has it"
    for one in each:
        # eps-zero's advice for float16 names float16 as where it is.
        names = [word for word in narrower if re.search(rf"\b{word}\b", one.cure)]
        assert code == "eps-zero" or not names, one.cure
        assert one.cure


def test_each_cure_that_names_a_dtype_is_looked_at():
    named = {code for code, kind in FINDING_KINDS.items() if re.search(r"\b(bfloat16|float32)\b", kind.cure)}
    # These are about formats of 8 bits and fewer, a stream of 16, positions, a scaled float16 site.
    assert named - set(MAKERS) <= {
        "gradient-below-noise",
        "site-holds-scale",
        "residual-swamped",
        "positions-collide",
        "freeze-ahead",
    }


def test_forecasts_of_float32_are_not_told_to_take_float32():
    norm = nn.LayerNorm(64)
    ahead = hu.forecast(norm, 1e-9, "cosine", steps=100, weight_decay=0.1)
    assert ahead.findings
    assert not [one for one in ahead.findings if "float32" in one.cure], list(map(str, ahead.findings))


def test_without_an_optimizer_nothing_is_said_of_steps(seed):
    model = nn.Linear(4, 4)
    with hu.observe(model) as seen:
        for _ in range(3):
            model(torch.randn(3, 4)).square().sum().backward()
    assert seen.findings == []
    assert any("no optimizer was given" in sentence for sentence in seen.record.unseen)


def test_findings_are_equal_whatever_modules_they_are_joined_by():
    one = Finding("updates-lost", ("a",), "error", 1.0)
    assert one == dataclasses.replace(one, kind="Linear")
