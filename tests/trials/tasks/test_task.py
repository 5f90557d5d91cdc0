"""The course of a training as a trial keeps it."""

import math
import statistics

import pytest

from halfulp.trials.tasks._task import _MOST_CURVE_POINTS, LossCurveRecorder


@pytest.mark.parametrize("steps", [1, 2, _MOST_CURVE_POINTS, 2 * _MOST_CURVE_POINTS - 1, 2 * _MOST_CURVE_POINTS, 1003])
def test_a_curve_has_the_means_of_windows_of_equal_length(steps: int) -> None:
    told: list[tuple[int, float]] = []
    course = LossCurveRecorder(steps, lambda *point: told.append(point))
    losses = [math.sin(step) for step in range(steps)]
    assert all(course.record_step_loss(loss) for loss in losses)
    window = max(1, steps // _MOST_CURVE_POINTS)
    ends = [*range(window, steps, window), steps]
    wanted = [[end, statistics.fmean(losses[start:end])] for start, end in zip([0, *ends], ends)]
    assert course.make_training_summary()["curve"] == wanted
    assert told == [tuple(point) for point in wanted]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_training_that_diverges_keeps_what_came_before(loss: float) -> None:
    course = LossCurveRecorder(9)
    assert [course.record_step_loss(one) for one in (2.0, 1.0, loss)] == [True, True, False]
    found = course.make_training_summary(math.nan, math.inf, 6.5)
    assert found == {
        "curve": [[1, 2.0], [2, 1.0]],
        "step_ms": 0.0,
        "bytes_per_parameter": 6.5,
        "cancelled": None,
        "realised": None,
        "diverged_at": 2,
    }


def test_a_step_takes_the_median_of_their_processor_times() -> None:
    course = LossCurveRecorder(3)
    course.seconds += [0.5, 0.001, 0.002]
    found = course.make_training_summary(0.25, 0.75)
    assert (found["step_ms"], found["cancelled"], found["realised"]) == (2.0, 0.25, 0.75)
