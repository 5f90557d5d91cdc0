"""How often `compare` says what, by simulation: `python -m benchmarks.bench_verdicts`."""

import argparse
import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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

COMPARISON = Path(__file__).resolve().parents[1] / "docs" / "results" / "compare.json"
FAMILY_SEEDS = (3, 5, 10)


@dataclass(frozen=True)
class Family:
    """Recipes that are compared: how their gaps to float32 scatter over seeds.

    Attributes:
        widths: The standard deviation of each one's gaps, as a share of float32's loss.
        long_tails: Whether draws are Student's t of three degrees of freedom.
        shared: The share of a gap's variance that comes from float32's run, which all gaps and the twin's have then.
        correlation: Between any two recipes' gaps, which the twin has no part in.
    """

    widths: Sequence[float]
    long_tails: bool = False
    shared: float = 0.0
    correlation: float = 0.0


_RISING = tuple(0.004 * 5 ** (k / 4) for k in range(5))
_TWO, _THREE = (0.02, 0.02, 0.0, 0.0, 0.0), (0.02, 0.02, 0.02, 0.0, 0.0)
FAMILIES = {
    "all scatter alike": Family((0.01,) * 5),
    "one scatters 5 times as much": Family((0.02, 0.004, 0.004, 0.004, 0.004)),
    "two scatter 5 times as much": Family((0.02, 0.02, 0.004, 0.004, 0.004)),
    "from 1 to 5": Family(_RISING),
    "one scatters, four do not": Family((0.02, 0.0, 0.0, 0.0, 0.0)),
    "two scatter, three do not": Family(_TWO),
    "all alike, as the twin does": Family((0.01,) * 5, shared=0.5),
    "all alike, long tails": Family((0.01,) * 5, long_tails=True),
    "from 1 to 5, long tails": Family(_RISING, long_tails=True),
    "all alike, correlation 0.9": Family((0.01,) * 5, correlation=0.9),
    "from 1 to 5, correlation 0.9": Family(_RISING, correlation=0.9),
    "two scatter, three do not, correlation 0.9": Family(_TWO, correlation=0.9),
    "two scatter, three do not, correlation 0.99": Family(_TWO, correlation=0.99),
    "three scatter, two do not, correlation 0.9": Family(_THREE, correlation=0.9),
    "three scatter, two do not, correlation 0.99": Family(_THREE, correlation=0.99),
    "three of ten scatter, correlation 0.9": Family((0.02,) * 3 + (0.0,) * 7, correlation=0.9),
    "three of ten scatter, correlation 0.99": Family((0.02,) * 3 + (0.0,) * 7, correlation=0.99),
}
FAMILIES_NOTE = (
    "Of five times as many comparisons: five recipes, ten where the row says so, that add nothing, and a twin that "
    "stays with float32 to the last digit unless the row says otherwise: the share of comparisons in which at least "
    'one is called worse or better. "Alone" is without the correction for several recipes. Gaps of one seed are drawn '
    "apart, or with the correlation that the row says; the last row has the deviations and the mean correlation of the "
    "gaps on `text` in docs/results/compare.json, {correlation:.2f}."
)
POWER_NOTE = (
    "Of as many: bf16's gap and every recipe's scatter on `text` as docs/results/compare.json has them, and their "
    "correlation, drawn anew: how often bf16 is called worse, and how often one of the others is called worse or "
    "better, whose gaps are set to 0. In the last row a sixth recipe scatters by 20% of the loss."
)


def _normal(draws: random.Random, width: float) -> float:
    return draws.gauss(0.0, width)


def _long_tails(draws: random.Random, width: float) -> float:
    chi = math.sqrt(sum(draws.gauss(0.0, 1.0) ** 2 for _ in range(3)) / 3)
    return draws.gauss(0.0, width) / chi / math.sqrt(3)


def said(gap: float, noise: float, seeds: int, kind: str, runs: int, draws: random.Random) -> Counter:
    """How many of ``runs`` comparisons end with each verdict."""
    from halfulp.trials.evidence import _row as judge

    long_tails, twin = KINDS[kind]
    draw: Callable[[random.Random, float], float] = _long_tails if long_tails else _normal
    width = noise / math.sqrt(2)
    found: Counter = Counter()
    for _ in range(runs):
        starts = [draw(draws, width) for _ in range(seeds)]
        twins = [twin * (draw(draws, width) - start) for start in starts]
        gaps = [gap + draw(draws, width) - start for start in starts]
        reference = 1 + statistics.fmean(starts)
        limit, allowed = (
            judge.compute_noise_threshold(gaps, twins, reference),
            judge.compute_gap_tolerance(twins, reference),
        )
        found[judge.choose_verdict(statistics.fmean(gaps), limit, allowed)] += 1
    return found


def told(family: Family, gaps: Sequence[float], seeds: int, draws: random.Random) -> tuple[list[bool], list[bool]]:
    """Which recipes of one comparison are called worse or better, each alone and corrected for their number."""
    from halfulp.trials.evidence import _row as judge

    draw: Callable[[random.Random, float], float] = _long_tails if family.long_tails else _normal
    common = math.sqrt(family.shared) * max(family.widths)
    starts = [draw(draws, common) if common else 0.0 for _ in range(seeds)]
    twins = [draw(draws, common) - start if common else 0.0 for start in starts]
    together = math.sqrt(family.correlation)
    moves = [draw(draws, together) if together else 0.0 for _ in range(seeds)]
    apart = math.sqrt(1 - family.shared - family.correlation)
    found = []
    for gap, width in zip(gaps, family.widths, strict=True):
        own = [width * (move + draw(draws, apart)) if width else 0.0 for move in moves]
        found.append([gap + one - start for one, start in zip(own, starts, strict=True)])
    means = [abs(math.fsum(one) / seeds) for one in found]
    limits = [
        (judge.bound_mean_gap_error(one, twins, 1.0), judge.compute_noise_threshold(one, twins, 1.0, found))
        for one in found
    ]
    alone = [mean > (limit[0] or 0.0) for mean, limit in zip(means, limits, strict=True)]
    return alone, [mean > (limit[1] or 0.0) for mean, limit in zip(means, limits, strict=True)]


def _on_text() -> tuple[Family, dict[str, float]]:
    """How gaps scatter on `text`, with their mean correlation, and what each recipe adds, in shares of the loss."""
    from halfulp.trials.evidence._row import get_judged_loss

    losses: dict[str, dict[int, float]] = {}
    for trial in json.loads(COMPARISON.read_text(encoding="utf-8"))["trials"]:
        settings = trial["settings"]
        if settings["task"]["name"] == "text":
            losses.setdefault(settings["recipe"]["name"], {})[settings["seed"]] = get_judged_loss(trial)
    reference = losses.pop("fp32")
    loss = statistics.fmean(reference.values())
    gaps = {
        recipe: [(own[seed] - reference[seed]) / loss for seed in sorted(reference)]
        for recipe, own in losses.items()
        if recipe != "fp32-twin"
    }
    correlations = [statistics.correlation(*pair) for pair in itertools.combinations(gaps.values(), 2)]
    family = Family([statistics.stdev(one) for one in gaps.values()], correlation=statistics.fmean(correlations))
    return family, {recipe: statistics.fmean(one) for recipe, one in gaps.items()}


def _families(runs: int, draws: random.Random) -> tuple[Table, float]:
    """False alarms of whole comparisons, and the largest share of them with the correction."""
    columns = {"gaps": ""} | {
        f"{seeds} seeds, {how}": ".1f" for seeds in FAMILY_SEEDS for how in ("alone", "corrected")
    }
    table = Table("Comparisons of several recipes that call one worse or better by chance, in percent", columns)
    text, _ = _on_text()
    table.note, most = FAMILIES_NOTE.format(correlation=text.correlation), 0.0
    for name, family in (FAMILIES | {"as on `text`": text}).items():
        cells = {}
        for seeds in FAMILY_SEEDS:
            every = [told(family, (0.0,) * len(family.widths), seeds, draws) for _ in range(runs)]
            alone, corrected = (100 * sum(any(one[how]) for one in every) / runs for how in (0, 1))
            cells |= {f"{seeds} seeds, alone": alone, f"{seeds} seeds, corrected": corrected}
            most = max(most, corrected)
        table.add(gaps=name, **cells)
    return table, most


def _power(runs: int, draws: random.Random) -> tuple[Table, float]:
    """How often bfloat16 by nearest is called worse on `text`, and that share at three seeds."""
    text, added = _on_text()
    gaps, place = [added["bf16"] if name == "bf16" else 0.0 for name in added], list(added).index("bf16")
    columns = {"seeds": "", "recipes": "", "bf16 worse, alone": ".1f", "bf16 worse, corrected": ".1f"}
    table = Table("bf16 on text, in percent of comparisons", columns | {"another, corrected": ".1f"}, note=POWER_NOTE)
    power = 0.0
    for seeds, wild in ((3, ()), (4, ()), (5, ()), (5, (0.2,))):
        family = replace(text, widths=(*text.widths, *wild))
        every = [told(family, (*gaps, *(0.0 for _ in wild)), seeds, draws) for _ in range(runs)]
        alone, corrected = (100 * sum(one[how][place] for one in every) / runs for how in (0, 1))
        others = 100 * sum(any(hit for k, hit in enumerate(one[1]) if k != place) for one in every) / runs
        cells = {"bf16 worse, alone": alone, "bf16 worse, corrected": corrected, "another, corrected": others}
        table.add(seeds=seeds, recipes=len(family.widths), **cells)
        power = power or corrected
    return table, power


def main() -> None:
    """Simulate, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=2000)
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
                loud = [100 * (found["worse"] + found["better"]) / arguments.runs for found in by_seeds]
                cells = {}
                for seeds, found, share_told in zip(SEEDS, by_seeds, loud, strict=True):
                    rest = (100 * found[word] / arguments.runs for word in ("no difference", "unclear"))
                    cells[f"{seeds} seeds"] = " · ".join(f"{share:.0f}" for share in (share_told, *rest))
                shares.add(losses=kind, gap=gap, noise=noise, **cells)
                if gap == 0:
                    alarms.extend(loud if kind != "recipe alone strays" else [])
                else:
                    falls.extend(before - after for before, after in itertools.pairwise(loud))
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
    many = 5 * arguments.runs
    families, most = _families(many, draws)
    power, worse = _power(many, draws)
    beyond = 100 * 3 * math.sqrt(0.05 * 0.95 / many)
    bars.add(
        what="largest share of comparisons of five or ten recipes with a false alarm",
        bar=f"5%, within the simulation's error of {beyond:.1f} points",
        found=f"{most:.1f}%",
        met=most <= 5 + beyond,
    )
    bars.add(
        what="bf16 on text called worse at three seeds, were its scatter what three seeds showed",
        bar="4 of 5 comparisons",
        found=f"{worse:.1f}%",
        met=worse > 80,
    )
    result.tables += [shares, families, power, bars]
    save(result)


if __name__ == "__main__":
    main()
