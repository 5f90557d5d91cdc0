"""What an audit's numbers are taken for: each code on rows made by hand, and silence on healthy ones."""

import dataclasses

import pytest
import torch

from halfulp.observation._record import RealisedChanges
from halfulp.observation.auditing._audit import Audit, ParameterStateAudit
from halfulp.observation.auditing._tensors import TensorAudit, TensorStatistics
from halfulp.observation.findings import collect_findings

BF16, F32 = torch.bfloat16, torch.float32
NAMES = [f"layers.{k}.weight" for k in range(3)]


def row(name=NAMES[0], dtype=BF16, status="changed", unchanged=200, role="parameter", a=None, b=None, **given):
    a, b = a or TensorStatistics(dtype), b or TensorStatistics(dtype)
    unchanged = 1000 if status == "unchanged" else unchanged
    numbers = {"median": 1.0, "largest": 2.0, **given}
    return TensorAudit(name, (10, 100), 1000, role, a, b, unchanged, status=status, **numbers)


def state(name=NAMES[0], dtype=BF16, **given):
    options = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
    dtypes = {"exp_avg": (dtype, dtype), "exp_avg_sq": (dtype, dtype)}
    return ParameterStateAudit(name, **{"options": options, "steps": (10, 20), "dtypes": dtypes, **given})


def audit(*rows, states=(), **given):
    return Audit({one.name: one for one in rows}, {one.name: one for one in states}, **given)


def codes(measured):
    return [(finding.code, finding.severity) for finding in collect_findings("audit", measured)]


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_healthy_pair_has_no_findings(dtype):
    kept = RealisedChanges(1000, 10, 1000, 999)
    rows = [row(name, dtype) for name in NAMES]
    states = [state(name, dtype, update=kept) for name in NAMES]
    assert codes(audit(*rows, states=states)) == []
    assert codes(audit(*rows)) == []


def test_a_stepped_weight_that_stands_still_is_frozen():
    kept = audit(row(status="unchanged"), states=[state(compensated=True)])
    assert codes(kept) == [("weight-frozen", "error")], "low bits that stand still are no reason"
    found = collect_findings("audit", audit(row(status="unchanged"), row(NAMES[1]), states=[state(), state(NAMES[1])]))
    assert [(one.code, one.where, one.severity) for one in found] == [("weight-frozen", (NAMES[0],), "error")]
    assert "10 steps in bf16 at lr 0.0001" in found[0].summary


@pytest.mark.parametrize(
    "given",
    [{"steps": (10, 10)}, {"compensated": True, "compensation_moved": True}, {"options": {"lr": 0.0}}],
)
def test_a_weight_that_had_no_reason_to_move_is_not_frozen(given):
    assert codes(audit(row(status="unchanged"), states=[state(**given)])) == []


def test_without_an_optimizer_a_frozen_weight_is_judged_by_its_digits_and_its_siblings():
    assert codes(audit(row(status="unchanged"))) == [("weight-frozen", "warning")]
    wide = row(status="unchanged", dtype=F32)
    assert codes(audit(wide)) == [("weight-frozen", "note")]
    assert codes(audit(wide, row(NAMES[1], dtype=F32))) == [("weight-frozen", "warning")]
    assert codes(audit(wide, states=[state(NAMES[1])])) == [("weight-frozen", "note")]
    counter = dataclasses.replace(wide, role="buffer", a=TensorStatistics(torch.int64), b=TensorStatistics(torch.int64))
    assert codes(audit(counter)) == []


def test_lost_updates_say_which_cure_keeps_them():
    lost = RealisedChanges(1000, 990, 1000, 100)
    found = collect_findings("audit", audit(row(), states=[state(update=lost)]))
    assert [one.code for one in found] == ["updates-lost"]
    assert "99% of updates lost in bf16 at lr 0.0001" in found[0].summary
    assert "kahan" in found[0].cure


def test_dtypes_that_changed():
    narrower = row(status="dtype-changed", a=TensorStatistics(F32), b=TensorStatistics(BF16))
    assert codes(audit(narrower)) == [("dtype-changed-on-resume", "error")]
    wider = row(status="dtype-changed", a=TensorStatistics(BF16), b=TensorStatistics(F32))
    assert codes(audit(wider)) == [("dtype-changed-on-resume", "warning")]
    moments = {"exp_avg": (F32, BF16)}
    assert ("dtype-changed-on-resume", "error") in codes(audit(row(), states=[state(dtypes=moments)]))


def test_nonfinite_tensors_name_the_last_clean_checkpoint():
    broken = [row(name, b=TensorStatistics(BF16, nan=k)) for k, name in enumerate(NAMES)]
    (found,) = collect_findings("audit", audit(*broken))
    assert (found.code, found.where) == ("first-nonfinite", tuple(NAMES[1:]))
    assert "A is the last clean" in found.summary
    assert found.evidence["nan"] == 3
    already = row(a=TensorStatistics(BF16, nan=1), b=TensorStatistics(BF16, nan=1))
    assert codes(audit(already)) == [("first-nonfinite", "error")]
    mask = row(
        "mask",
        status="unchanged",
        role="unknown",
        a=TensorStatistics(F32, infinite=9),
        b=TensorStatistics(F32, infinite=9),
    )
    assert codes(audit(mask)) == [("first-nonfinite", "note")]


def test_an_older_checkpoint_given_second_is_said():
    assert codes(audit(row(), states=[state(steps=(20, 10))])) == [("state-mismatch", "warning")]
    assert codes(audit(row(), states=[state(shapes_match=False)])) == [("state-mismatch", "error")]


def test_an_audit_is_plain_data_and_words():
    import json

    whole = audit(*(row(name, status="unchanged") for name in NAMES), row("head.weight"), unseen=("x was not seen",))
    whole = dataclasses.replace(whole, findings=collect_findings("audit", whole))
    assert not whole.passed
    (group, healthy) = whole.list_layer_groups()
    assert (group.pattern, group.severity) == ("layers.{0-2}.weight", "warning")
    assert healthy.severity is None
    plain = json.loads(json.dumps(whole.to_dict(), allow_nan=False))
    assert {"findings", "tensors", "groups", "states"} <= plain.keys()
    assert plain["findings"][0]["where"] == NAMES
    assert {"name", "dtypes", "status", "share_unchanged", "largest_change_ulps", "median_change_ulps"} <= plain[
        "tensors"
    ][0].keys()
    assert "layers.{0-2}.weight" in str(whole)
    assert "x was not seen" in str(whole)
