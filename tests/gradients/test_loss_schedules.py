"""Losses by turns: whatever the loop, exponents come back, skip little more than GradScaler and lose little."""

import pytest

pytest.importorskip("benchmarks._loss_schedules", reason="the benchmarks are not installed")

from benchmarks._loss_schedules import ROW, OneScale, Schedule, adaptive, falling, tried

# Random loops, by their seeds. Those of the second line broke a bar once: for ever skipped, or all zero.
SAMPLE = (1, 7, 9, 11, 15, 19)
FOUND = (2, 5, 13, 23)


@pytest.mark.parametrize("number", [*SAMPLE, *FOUND])
def test_a_random_loop_trains_as_under_the_scales_that_came_before(number):
    found = tried(number)
    assert not found.broken, f"{found.schedule}: {'; '.join(found.broken)}"


def by_turns(period, apart, loop="plain", kind="shared", format="fp16"):
    """Two tasks on the same layers, one of them once in so many iterations, 2^apart larger than the other."""
    losses = [((0, 0), 0), ((1, 0), apart)]
    return Schedule(0, format, kind, loop, tuple((losses[k % period == period - 1],) for k in range(256)))


@pytest.mark.parametrize(
    ("period", "apart", "loop"), [(2, 20, "plain"), (4, 20, "clip"), (8, 20, "plain"), (16, 24, "clip")]
)
def test_of_two_losses_by_turns_neither_is_skipped_for_ever(period, apart, loop):
    """The measured iterations once fell on the same batches, so that all steps of one loss were skipped."""
    schedule = by_turns(period, apart, loop)
    one = OneScale(schedule)
    found = adaptive(schedule, one)
    assert found.row <= ROW // 2
    assert found.skipped <= falling(schedule, one).skipped
    # The larger loss leaves the smaller one the end of the format.
    assert found.zeros <= 0.1
