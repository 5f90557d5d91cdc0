"""A search for losses that exponents do not follow: `python -m benchmarks.bench_gradient_schedules`."""

import argparse
import statistics

from ._results import Result, Table, save

TEXT = """Random training loops (benchmarks/_loss_schedules.py): one to four tasks in rounds of 1 to 16 iterations, in \
blocks or at random, some of them seldom, whose losses are up to 2^60 apart, drift, vary and spike by 2^8 to 2^20; on \
a trunk with heads, on the same layers, on a recurrent cell whose sequence grows, on 32 experts, one for each loss; \
with unscale_, with clipping, with accumulation, with two optimizers and with update() after each of them. Every \
gradient that a product reads or makes is rounded to the format. Weights stand still, so that the schedule says all. \
GradScaler is one scale from 2^16 that halves, and doubles after 2,000 steps; the best constant scale is the largest \
that skips no larger a share of the steps than halfulp did."""
COUNT = 500


def main() -> None:
    """The search; schedules that break a bar are printed by their seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    given = parser.parse_args()
    import torch

    from ._loss_schedules import FORMATS, KINDS, LOOPS, MORE_SKIPS, MORE_ZEROS, ROW, tried

    torch.set_num_threads(1)
    found = []
    for seed in range(given.first, given.first + given.count):
        found.append(tried(seed))
        if found[-1].broken:
            print(found[-1].schedule, "; ".join(found[-1].broken), flush=True)
    columns = {"schedules": "", "": ""}
    columns |= dict.fromkeys(
        ("skipped, halfulp", "skipped, GradScaler", "zeros, halfulp", "zeros, best constant"), ".2%"
    )
    table = Table("Losses by turns", {**columns, "most skips in a row": "", "bar": "", "met": ""})
    for field, names in (("format", FORMATS), ("kind", KINDS), ("loop", LOOPS)):
        for name in names:
            some = [one for one in found if getattr(one.schedule, field) == name]
            if some:
                broken = sum(bool(one.broken) for one in some)
                table.add(
                    **{"schedules": name, "": len(some)},
                    **{
                        "skipped, halfulp": statistics.mean(one.ours.skipped for one in some),
                        "skipped, GradScaler": statistics.mean(one.torch.skipped for one in some),
                        "zeros, halfulp": statistics.mean(one.ours.zeros for one in some),
                        "zeros, best constant": statistics.mean(one.best.zeros for one in some),
                        "most skips in a row": max(one.ours.row for one in some),
                        "bar": f"each within: {len(some) - broken} of {len(some)}",
                        "met": not broken,
                    },
                )
    broken = ", ".join(str(one.schedule.seed) for one in found if one.broken) or "none"
    table.note = (
        f"Seeds {given.first} to {given.first + given.count - 1}. The bar, for each schedule: at most {ROW} skips in a "
        f"row of iterations whose gradients fit at scale 1, of all or of one task; skipped steps at most GradScaler's "
        f"share plus {MORE_SKIPS:.0%}; zeros among the elements that are not zero in float32 at most the best constant "
        f"scale's share plus {MORE_ZEROS:.1%}. Zeros are those of applied steps from the 64th iteration on. Outside of "
        f"a bar: seeds {broken}."
    )
    command = "python -m benchmarks.bench_gradient_schedules"
    save(Result("gradient_schedules", "Gradient exponents under losses by turns", TEXT, command, tables=[table]))


if __name__ == "__main__":
    main()
