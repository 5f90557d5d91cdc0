"""How often `compare` says what, by simulation: `python -m benchmarks.bench_verdicts`."""

import argparse
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable

from ._results import Result, Table, save

TEXT = """Losses drawn at random and judged by compare's own functions: float32's loss is 1, "gap" is what the recipe \
truly adds, "noise" is the standard deviation over seeds of the gap between two runs that differ by their start alone, \
and the twin strays by it too. Each cell: "worse" or "better" · "no difference" · "unclear", in percent of {runs:,} \
comparisons. In rows of gap 0 the first number is the share of false alarms. "Long tails" are Student's t of three \
degrees of freedom; "recipe alone strays" has a twin that strays by a tenth of the noise."""
SEEDS = (3, 5, 10, 20, 40)
GAPS = (0.0, 0.005, 0.02, 0.05)
NOISES = (0.001, 0.005, 0.02)
KINDS = {"normal": (False, 1.0), "long tails": (True, 1.0), "recipe alone strays": (False, 0.1)}


def _normal(draws: random.Random, width: float) -> float:
    return draws.gauss(0.0, width)


def _long_tails(draws: random.Random, width: float) -> float:
    chi = math.sqrt(sum(draws.gauss(0.0, 1.0) ** 2 for _ in range(3)) / 3)
    return draws.gauss(0.0, width) / chi / math.sqrt(3)


def said(gap: float, noise: float, seeds: int, kind: str, runs: int, draws: random.Random) -> Counter:
    """How many of ``runs`` comparisons end with each verdict."""
    from halfulp.trials.evidence import _statistics as judge

    long_tails, twin = KINDS[kind]
    draw: Callable[[random.Random, float], float] = _long_tails if long_tails else _normal
    width = noise / math.sqrt(2)
    found: Counter = Counter()
    for _ in range(runs):
        starts = [draw(draws, width) for _ in range(seeds)]
        twins = [twin * (draw(draws, width) - start) for start in starts]
        gaps = [gap + draw(draws, width) - start for start in starts]
        reference = 1 + statistics.fmean(starts)
        limit, allowed = judge.noise(gaps, twins, reference), judge.tolerance(twins, reference)
        found[judge.verdict(statistics.fmean(gaps), limit, allowed)] += 1
    return found


def main() -> None:
    """Simulate, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=4000)
    arguments = parser.parse_args()
    draws = random.Random(arguments.seed)
    text = TEXT.format(runs=arguments.runs)
    result = Result("verdicts", "Verdicts by simulation", text, "python -m benchmarks.bench_verdicts")
    columns = {"losses": "", "gap": ".1%", "noise": ".1%"} | {f"{seeds} seeds": "" for seeds in SEEDS}
    shares = Table("Verdicts by gap, noise and seeds", columns)
    bars = Table("Bars", {"what": "", "bar": "", "found": "", "met": ""})
    falls, alarms = [0.0], [0.0]
    for kind in KINDS:
        for gap in GAPS:
            for noise in NOISES:
                by_seeds = [said(gap, noise, seeds, kind, arguments.runs, draws) for seeds in SEEDS]
                told = [100 * (found["worse"] + found["better"]) / arguments.runs for found in by_seeds]
                cells = {}
                for seeds, found, loud in zip(SEEDS, by_seeds, told, strict=True):
                    rest = (100 * found[word] / arguments.runs for word in ("no difference", "unclear"))
                    cells[f"{seeds} seeds"] = " · ".join(f"{share:.0f}" for share in (loud, *rest))
                shares.add(losses=kind, gap=gap, noise=noise, **cells)
                if gap == 0:
                    alarms.extend(told if kind != "recipe alone strays" else [])
                else:
                    falls.extend(before - after for before, after in itertools.pairwise(told))
    error = 100 * 3 * math.sqrt(2 * 0.25 / arguments.runs)
    bars.add(
        what="largest fall of the share of worse from fewer seeds to more, same gap and noise",
        bar=f"none beyond the simulation's error of {error:.1f} points",
        found=f"{max(falls):.1f} points",
        met=max(falls) <= error,
    )
    bars.add(
        what="largest share of false alarms where the twin strays as recipes do",
        bar="under 5%",
        found=f"{max(alarms):.1f}%",
        met=max(alarms) < 5,
    )
    result.tables += [shares, bars]
    save(result)


if __name__ == "__main__":
    main()
