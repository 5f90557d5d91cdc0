"""Twenty-eight faults, what is found first, and what the cure mends: `python -m benchmarks.bench_plants`."""

import argparse
import random
import time
import warnings

from ._results import Result, Table, save

TEXT = """A residual network of six blocks is trained in float32 with one fault in a block that is drawn, under \
`hu.observe`. "First" counts plants whose first finding has the code of the fault, names the layer that it was put \
into, and has its cure. The same training without the fault is healthy, and shows nothing above a note. Then the cure \
is applied and the training repeated: it must not be found any more, and what the fault harms is measured, without \
halfulp's findings, in all three: 0 is no harm."""
BAR = 24


def run(name: str, state: str, layer: int, seed: int) -> dict:
    """Train one state of a plant, and return what was found, the worst first, and what was measured."""
    import torch

    from . import _plants, _plants_ranges

    assert _plants_ranges
    plant, begin = _plants.PLANTS[name], time.perf_counter()
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setup = plant.make(state, layer)
        found = setup.findings()
        measured = setup.measure()
    place = f"blocks.{layer}.{plant.place}"
    return {
        "found": found,
        "measured": measured,
        "first": bool(found) and found[0].code == plant.code and _is_there(found[0].where, place),
        "has_cure": bool(found) and plant.cure in found[0].cure,
        "again": any(one.code == plant.code for one in found),
        "seconds": time.perf_counter() - begin,
    }


def _is_there(where: tuple[str, ...], place: str) -> bool:
    """Whether names are of a place or within it, and of no other."""
    return bool(where) and all(f"{name.removeprefix('average.')}.".startswith(f"{place}.") for name in where)


def three(name: str, layer: int, seed: int) -> dict:
    """The three states of a plant as a row."""
    from ._plants import PLANTS

    healthy, faulty, cured = (run(name, state, layer, seed) for state in ("healthy", "faulty", "cured"))
    plant, first = PLANTS[name], faulty["found"][0] if faulty["found"] else None
    return {
        "fault": name,
        "code": plant.code,
        "layer": layer,
        "first": faulty["first"] and faulty["has_cure"],
        "said": f"{first.code}: {first}" if first else "nothing",
        "silent": not healthy["found"],
        "loud": "; ".join(f"{one.code}: {one}" for one in healthy["found"]),
        "cure": plant.mended,
        "gone": not cured["again"],
        "measured": plant.measured,
        "healthy": healthy["measured"],
        "faulty": faulty["measured"],
        "cured": cured["measured"],
        "mended": cured["measured"] < faulty["measured"] / 2,
        "seconds": sum(one["seconds"] for one in (healthy, faulty, cured)),
    }


def names() -> list[str]:
    """All plants."""
    from . import _plants, _plants_ranges

    assert _plants_ranges
    return list(_plants.PLANTS)


def tables(rows: list[dict]) -> list[Table]:
    """The plants, and the bars."""
    columns = {"fault": "", "code": "", "layer": "", "first": "", "healthy is silent": "", "cure": "", "gone": ""}
    each = Table("Twenty-eight faults", {**columns, "measured": "", "healthy": ".3g", "faulty": ".3g", "cured": ".3g"})
    for row in rows:
        each.add(**{**{key: row[key] for key in each.columns if key in row}, "healthy is silent": row["silent"]})
    wrong = Table("Where something else came first", {"fault": "", "layer": "", "first": ""})
    for row in rows:
        if not row["first"]:
            wrong.add(fault=row["fault"], layer=row["layer"], first=row["said"][:200])
    bars = Table("Bars", {"what": "", "bar": "", "found": "", "met": ""})
    for key, what, bar in (
        ("first", "the fault's code first, with its layer and cure", BAR),
        ("silent", "healthy runs with nothing above a note", len(rows)),
        ("gone", "cured runs without the finding", len(rows)),
        ("mended", "cures that take away more than half of the harm", len(rows)),
    ):
        count = sum(row[key] for row in rows)
        bars.add(what=what, bar=f"{bar} of {len(rows)}", found=f"{count} of {len(rows)}", met=count >= bar)
    return [each, *([wrong] if wrong.rows else []), bars]


def main() -> None:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="plants whose name holds one of these words; nothing is kept")
    arguments = parser.parse_args()
    import torch

    from ._plant_net import BLOCKS

    torch.set_num_threads(1)
    draws, rows = random.Random(arguments.seed), []
    for name in names():
        layer, seed = draws.randrange(BLOCKS), draws.randrange(2**31)
        if arguments.only is not None and not any(word in name for word in arguments.only):
            continue
        row = three(name, layer, seed)
        rows.append(row)
        good = row["first"] and row["silent"] and row["gone"] and row["mended"]
        numbers = " ".join(f"{row[state]:.3g}" for state in ("healthy", "faulty", "cured"))
        print("good " if good else "WRONG", name, row["layer"], numbers, f"{row['seconds']:.1f} s", flush=True)
        if not good:
            print("   ", row["said"][:200], "|", row["loud"][:200], "gone", row["gone"], flush=True)
    if arguments.only is not None:
        return
    result = Result("plants", "Planted faults and their cures", TEXT, "python -m benchmarks.bench_plants")
    result.tables += tables(rows)
    save(result)


if __name__ == "__main__":
    main()
