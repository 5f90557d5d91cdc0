"""Which iterations are measured: a rule of numbers alone, without a fixed phase."""

import pytest

from halfulp.gradients._controller import is_measured

SPANS = 400


def measured(interval, restart, count):
    return [k for k in range(restart, restart + count) if is_measured(k, restart, interval)]


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 8, 16, 50])
@pytest.mark.parametrize("restart", [0, 1, 37, 10**9])
def test_one_iteration_of_every_span_is_measured(interval, restart):
    found = [k - restart for k in measured(interval, restart, 40 * interval)]
    assert found[0] == 0
    spans, start = [], 1
    while start < 40 * interval:
        length = start if start < interval else interval
        spans.append(range(start, start + length))
        start += length
    # The last one may end after what was counted.
    assert [sum(k in span for k in found) for span in spans[:-1]] == [1] * (len(spans) - 1)
    assert len(found) <= len(spans) + 1


@pytest.mark.parametrize("period", range(2, 17))
@pytest.mark.parametrize("interval", [4, 8, 16])
def test_every_phase_of_every_period_is_measured(period, interval):
    found = measured(interval, 0, SPANS * interval)
    shares = [sum(k % period == phase for k in found) * period / len(found) for phase in range(period)]
    assert min(shares) > 0.25
    assert max(shares) < 2.5
