"""What `hu.verify` says of right models and of planted faults: `python -m benchmarks.bench_verify`."""

import argparse
import contextlib
import copy
import json
import random
import tempfile
import warnings
from pathlib import Path

from ._architectures import ARCHITECTURES, build
from ._results import Result, Table, save
from ._verify_plants import FAULTS, RIGHT, Places, nothing, places_of

TEXT = """Tiny random configurations of transformers' classes in training mode, as they are and with one plant each, \
under random scales (scaled-fp16) and random exponents (fp16-adaptive). Plants sit in a layer that is drawn among \
those that the loss depends on. A right model must pass. A fault must be named: "found" means that verify FAILED, \
"refused" that it said in a ValueError why nothing can be proved. "Known graphs" counts right models with a proved \
forward pass that was not watched, as its graph was known."""
# So many of the right plants, and of the faults, go into each architecture, by turns.
_RIGHT, _FAULTS = 2, 5
# What must be said of a right model, and of a fault.
_GOOD = {"right": ("passed",), "fault": ("found", "refused")}


def said(model, batch, recipe: str) -> dict:
    """What verify makes of it: "passed", "found" or "refused", and its words."""
    import halfulp as hu

    try:
        found = hu.verify(model, batch, recipe, trials=1)
    except ValueError as error:
        return {"said": "refused", "words": str(error)}
    known = None if found.replays is None else found.replays > 0
    return {"said": "passed" if found.passed else "found", "words": str(found), "known": known}


def _turn(plants: tuple, index: int, count: int) -> list:
    return [plants[(index * count + i) % len(plants)] for i in range(count)]


def rows_of(name: str, index: int, seed: int) -> list[dict]:
    """All that is said of one architecture."""
    import torch

    torch.manual_seed(seed)
    _, model, batch = build(name)
    places = places_of(copy.deepcopy(model), batch)
    draws = random.Random(f"{seed} {name}")
    rows = []
    for plant in (nothing, *_turn(RIGHT, index, _RIGHT), *_turn(FAULTS, index, _FAULTS)):
        for recipe in plant.recipes:
            planted = copy.deepcopy(model)
            with contextlib.ExitStack() as undo:
                warnings.simplefilter("ignore")
                plant(planted, Places(places, batch, draws, undo))
                found = said(planted, batch, recipe)
            kind = "fault" if plant in FAULTS else "right"
            good = found["said"] in _GOOD[kind]
            rows.append({"architecture": name, "kind": kind, "plant": plant.__name__, "recipe": recipe, "good": good})
            rows[-1] |= {"what": plant.__doc__, **found, "words": found["words"][:400]}
    return rows


def all_rows(names: list[str], seed: int, kept: Path) -> list[dict]:
    """The rows of all architectures; those that are kept from an earlier run are not made again."""
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {row["architecture"] for row in rows}
    for index, name in enumerate(sorted(ARCHITECTURES)):
        if name in names and name not in done:
            found = rows_of(name, index, seed)
            rows += found
            with kept.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
            bad = [f"{row['plant']} {row['recipe']}: {row['said']}" for row in found if not row["good"]]
            print(name, len(found), "; ".join(bad) or "all as it must be", flush=True)
    return [row for row in rows if row["architecture"] in names]


def tables(rows: list[dict]) -> list[Table]:
    """Counts by plant, and every row that is not as it must be."""
    columns = {"kind": "", "what": "", "recipe": "", "passed": "", "found": "", "refused": "", "as it must be": ""}
    counted = Table("Models and plants", {**columns, "of": "", "known graphs": ""})
    short = Table("What verify got wrong", {"architecture": "", "plant": "", "recipe": "", "words": ""})
    keys = dict.fromkeys((row["kind"], row["what"], row["recipe"]) for row in sorted(rows, key=lambda r: r["kind"]))
    for kind, what, recipe in sorted(keys, key=lambda key: key[0] == "fault"):
        of = [row for row in rows if (row["kind"], row["what"], row["recipe"]) == (kind, what, recipe)]
        cells = {word: sum(row["said"] == word for row in of) for word in ("passed", "found", "refused")}
        known = [row["known"] for row in of if kind == "right" and row.get("known") is not None]
        good = sum(row["good"] for row in of)
        cells |= {"as it must be": good, "of": len(of), "known graphs": sum(known) if known else None}
        counted.add(kind=kind, what=what.rstrip("."), recipe=recipe, **cells, met=good == len(of))
    for row in rows:
        if not row["good"]:
            short.add(**{name: row[name] for name in short.columns})
    every = [row["architecture"] for row in rows]
    counted.note = f"{len(set(every))} architectures, {len(rows)} proofs, {len(short.rows)} not as it must be."
    return [counted, short] if short.rows else [counted]


def main() -> None:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", nargs="*", default=sorted(ARCHITECTURES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a file for the rows, from which a second call goes on")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = all_rows(arguments.names, arguments.seed, arguments.keep or Path(folder) / "rows.jsonl")
    result = Result("verify", "verify on right and wrong models", TEXT, "python -m benchmarks.bench_verify")
    result.tables += tables(rows)
    save(result)


if __name__ == "__main__":
    main()
