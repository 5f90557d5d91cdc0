"""docs/evidence.md: statements of the papers follow the numbers, and its report says what was found and left out."""

import pytest
from docs.fillers import _papers

from halfulp.trials import Evidence

OPEN, MIXED, CONFIRMED, REFUTED = _papers.OPEN, _papers.MIXED, _papers.CONFIRMED, _papers.REFUTED
RUN = {"size": "smoke", "left_out": {}, "seconds": 3.0, "workers": 2, "reused": 0}
RUN |= {"processor": "a processor", "cores": 2, "trained": 4}


@pytest.fixture
def evidence(make_record):
    def make(losses: dict[tuple[str, str], list[float | None]], **result) -> Evidence:
        records = [
            make_record(recipe, seed, loss, task=task, **result)
            for (task, recipe), of_seeds in losses.items()
            for seed, loss in enumerate(of_seeds)
        ]
        return Evidence(trials=tuple(records), run=dict(RUN))

    return make


FLOAT32 = {("digits", "fp32"): [1.0, 1.1, 0.9], ("digits", "fp32-twin"): [1.0, 1.1, 0.9]}


def verdict(found: Evidence, words: str) -> tuple[str, str]:
    one = next(one for one in _papers.judge_statements(found) if words in one.claim)
    return one.verdict, one.numbers


def test_statements_follow_the_numbers(evidence) -> None:
    lost = evidence(FLOAT32 | {("digits", "bf16"): [1.5, 1.6, 1.4], ("digits", "bf16-kahan"): [1.0, 1.1, 0.9]})
    assert verdict(lost, "nearest rounding everywhere loses")[0] == CONFIRMED
    assert verdict(lost, "Kahan summation stays")[0] == CONFIRMED
    assert "digits bf16 +0.5 ±" in verdict(lost, "nearest rounding everywhere loses")[1]
    kept = evidence(FLOAT32 | {("digits", "bf16"): [1.0, 1.1, 0.9], ("digits", "bf16-kahan"): [1.5, 1.6, 1.4]})
    assert verdict(kept, "nearest rounding everywhere loses")[0] == REFUTED
    assert verdict(kept, "Kahan summation stays")[0] == REFUTED
    components = FLOAT32 | {("digits", "fp16-mc2"): [1.5, 1.6, 1.4]}
    assert verdict(evidence(components), "components stay")[0] == REFUTED
    assert verdict(evidence(components | {("digits", "fp16-mc2"): [1.0, 1.1, 0.9]}), "components stay")[0] == CONFIRMED
    assert verdict(kept, "linear regression") == (OPEN, "no task of this run tells")


def test_what_the_seeds_leave_open_confirms_nothing(evidence) -> None:
    wide = [1.5, 1.0, 1.1]
    said, numbers = verdict(evidence(FLOAT32 | {("digits", "bf16-kahan"): wide}), "Kahan summation stays")
    assert said == OPEN
    assert numbers.startswith("0 of 0 that are decided; digits bf16-kahan +0.2 ± ")
    scales = {("digits", "fp16-adaptive"): wide, ("digits", "fp16-constant-1"): [1.0, 1.1, 0.9]}
    assert verdict(evidence(FLOAT32 | scales), "no worse than the best constant")[0] == OPEN


def test_rows_that_disagree_are_mixed(evidence) -> None:
    kept, lost, wide = [1.0, 1.1, 0.9], [1.5, 1.6, 1.4], [1.5, 1.0, 1.1]
    float32 = {(task, "fp32"): kept for task in ("digits", "text", "sst2")}
    for said, *losses in (
        (CONFIRMED, kept, kept, kept),
        (CONFIRMED, kept, kept, wide),
        (MIXED, kept, kept, lost),
        (MIXED, kept, lost, lost),
        (MIXED, kept, lost, wide),
        (REFUTED, lost, lost, lost),
        (REFUTED, lost, wide, wide),
        (OPEN, wide, wide, wide),
    ):
        rows = {(task, "bf16-kahan"): of_task for task, of_task in zip(("digits", "text", "sst2"), losses)}
        assert verdict(evidence(float32 | rows), "Kahan summation stays")[0] == said


def test_a_task_without_float32_is_no_task(evidence) -> None:
    found = evidence(FLOAT32 | {("text", "bf16-kahan"): [1.5, 1.6, 1.4], ("text", "fp16-adaptive"): [1.5, 1.6, 1.4]})
    assert found.tasks() == ["digits"]
    assert "text" not in _papers.write_report_sections(found).split("## digits")[1]


def test_adaptive_scales_beside_the_best_constant(evidence) -> None:
    task = {("two-heads", "fp32"): [1.0, 1.1, 0.9], ("two-heads", "fp16-adaptive"): [1.0, 1.1, 0.9]}
    constants = {
        ("two-heads", "fp16-constant-1"): [3.0, None, 3.0],
        ("two-heads", "fp16-constant-128"): [2.0, 2.1, 1.9],
    }
    better = evidence(task | constants)
    assert verdict(better, "no worse than the best constant")[0] == CONFIRMED
    found, numbers = verdict(better, "better than any constant")
    assert found == CONFIRMED
    assert "-1 ± " in numbers
    assert "beside fp16-constant-128" in numbers
    worse = evidence(task | {("two-heads", "fp16-constant-1"): [0.5, 0.6, 0.4]})
    assert verdict(worse, "no worse than the best constant")[0] == REFUTED


def test_the_best_of_all_constants_counts(evidence) -> None:
    found = evidence(
        {
            ("two-heads", "fp32"): [1.0, 1.1, 0.9],
            ("two-heads", "fp16-adaptive"): [1.0, 1.1, 0.9],
            ("two-heads", "fp16-constant-1"): [3.0, 3.1, 2.9],
            ("two-heads", "fp16-constant-16"): [0.5, 0.6, 0.4],
        }
    )
    said, numbers = verdict(found, "no worse than the best constant")
    assert said == REFUTED
    assert "beside fp16-constant-16" in numbers


def test_too_few_seeds_decide_nothing(evidence) -> None:
    found = evidence({key: losses[:2] for key, losses in FLOAT32.items()} | {("digits", "bf16"): [1.5, 1.6]})
    assert {one.verdict for one in _papers.judge_statements(found)} == {OPEN}
    assert "2 seeds are too few" in _papers.write_report_sections(found)


def test_a_divergence_is_a_row_that_says_where(evidence) -> None:
    found = evidence(FLOAT32 | {("digits", "fp16"): [1.0, None, None]})
    assert "| diverged (2 of 3) at step 3, 3 |" in _papers.write_report_sections(found)


def test_losses_near_zero_keep_their_digits_and_papers_are_named(evidence) -> None:
    tiny = [7.1e-12, 7.7e-12, 8.3e-12]
    found = evidence({("digits", "fp32"): tiny, ("digits", "bf16-kahan"): [2e-11, 2e-11, 2e-11]})
    said = _papers.write_report_sections(found)
    assert "| 7.7e-12 ± 6e-13 |" in said
    assert "closes the remaining gap on all 7 applications (arXiv 2010.06192)" in said
    assert "| 1.0000 ± 0.1000 |" in _papers.write_report_sections(evidence(FLOAT32))
