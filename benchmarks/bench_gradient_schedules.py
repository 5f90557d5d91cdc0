"""A search for losses that exponents do not follow: `python -m benchmarks.bench_gradient_schedules`.

What was found is kept, seed by seed, and an interrupted search goes on from there, as long as the scaler is the same.
"""

import argparse
import dataclasses
import hashlib
import json
import statistics
import tempfile
from pathlib import Path

from ._results import FOLDER, Result, Table, save

TEXT = """Random training loops (benchmarks/_loss_schedules.py): one to four tasks in rounds of 1 to 16 iterations, in \
blocks or at random, some of them seldom, whose losses are up to 2^60 apart, drift, vary and spike by 2^8 to 2^20; on \
a trunk with heads, on the same layers, on a recurrent cell whose sequence grows, on 32 experts, one for each loss; \
with unscale_, with clipping, with accumulation, with two optimizers and with update() after each of them. Every \
gradient that a product reads or makes is rounded to the format. Weights stand still, so that the schedule says all. \
GradScaler is one scale from 2^16 that halves, and doubles after 2,000 steps: its scale and the constant ones are read \
from tables of what every loss gives at every scale, and in every {every}th schedule torch's own is run besides, which \
must skip and lose the same. The best constant scale is chosen with hindsight, for each schedule: the largest that \
skips no more than GradScaler and 2% of the steps. No scaler can choose it, and nothing is left free above it."""
COUNT, EVERY = 500, 20
KEPT = Path(tempfile.gettempdir()) / "halfulp-gradient-schedules.jsonl"
SOURCES = (FOLDER.parents[1] / "src" / "halfulp" / "gradients", FOLDER.parent / "_loss_schedules.py")


def version() -> str:
    """What the outcome of a seed depends on."""
    paths = [path for one in SOURCES for path in sorted(one.glob("*.py") if one.is_dir() else [one])]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def searched(seeds: range, kept: Path) -> dict[int, dict]:
    """Every seed's outcomes, as plain data; those that are kept already are not computed again."""
    from ._loss_schedules import OneScale, Outcome, torchs, tried

    now, known = version(), {}
    for line in kept.read_text().splitlines() if kept.exists() else ():
        row = json.loads(line)
        if row["version"] == now:
            known[row["seed"]] = row
    for seed in (seed for seed in seeds if seed not in known):
        found = tried(seed)
        schedule = found.schedule
        row = {"version": now, "seed": seed, "format": schedule.format, "kind": schedule.kind, "loop": schedule.loop}
        row |= {name: dataclasses.asdict(getattr(found, name)) for name in ("ours", "torch", "best")}
        if seed % EVERY == 0 and torchs(schedule, OneScale(schedule)) != Outcome(**row["torch"]):
            raise RuntimeError(f"schedule {schedule}: the table of GradScaler is not what it does")
        known[seed] = row | {"broken": found.broken}
        with kept.open("a") as file:
            file.write(json.dumps(known[seed]) + "\n")
        if found.broken:
            print(schedule, "; ".join(found.broken), flush=True)
    return {seed: known[seed] for seed in seeds}


def row_of(name: str, some: list[dict]) -> dict:
    """A line of the table, of some schedules."""
    within = sum(not one["broken"] for one in some)
    mean = {
        f"{what}, {whose}": statistics.mean(one[key][field] for one in some)
        for whose, key in (("halfulp", "ours"), ("GradScaler", "torch"), ("best constant", "best"))
        for what, field in (("skipped", "skipped"), ("zeros", "zeros"))
    }
    mean.pop("skipped, best constant")
    row = {"schedules": name, "": len(some), **mean, "most skips in a row": max(one["ours"]["row"] for one in some)}
    return {**row, "bar": f"each within: {within} of {len(some)}", "met": within == len(some)}


def main() -> None:
    """The search; schedules that break a bar are printed by their seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many schedules")
    parser.add_argument("--keep", type=Path, default=KEPT, help="a file from which a second call goes on")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    given = parser.parse_args()
    import torch

    from ._loss_schedules import FORMATS, KINDS, LOOPS, MORE_SKIPS, MORE_ZEROS, ROW

    torch.set_num_threads(1)
    found = list(searched(range(given.first, given.first + given.count), given.keep).values())
    columns = {"schedules": "", "": ""}
    columns |= dict.fromkeys(("skipped, halfulp", "skipped, GradScaler"), ".2%")
    columns |= dict.fromkeys(("zeros, halfulp", "zeros, GradScaler", "zeros, best constant"), ".2%")
    table = Table("Losses by turns", {**columns, "most skips in a row": "", "bar": "", "met": ""})
    for field, names in (("format", FORMATS), ("kind", KINDS), ("loop", LOOPS)):
        for name in names:
            some = [one for one in found if one[field] == name]
            if some:
                table.add(**row_of(name, some))
    table.add(**row_of("all", found))
    broken = ", ".join(str(one["seed"]) for one in found if one["broken"]) or "none"
    table.note = (
        f"Seeds {given.first} to {given.first + given.count - 1}. The bar, for each schedule: at most {ROW} skips in a "
        f"row of iterations whose gradients fit at scale 1, of all or of one task; skipped steps at most GradScaler's "
        f"share plus {MORE_SKIPS:.0%}; zeros among the elements that are not zero in float32 at most the best constant "
        f"scale's share plus {MORE_ZEROS:.1%}. Zeros are those of applied steps from the 64th iteration on. Outside of "
        f"a bar: seeds {broken}."
    )
    command = "python -m benchmarks.bench_gradient_schedules"
    text = TEXT.format(every=EVERY)
    save(Result("gradient_schedules", "Gradient exponents under losses by turns", text, command, tables=[table]))


if __name__ == "__main__":
    main()
