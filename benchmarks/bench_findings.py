"""What comes first for a fault in a random layer, and what healthy runs show: `python -m benchmarks.bench_findings`."""

import argparse
import random
import time
import warnings

from ._results import Result, Table, save

TEXT = """A 12-layer GPT is trained with one fault in a layer that is drawn, of a code that is drawn among those that \
a layer can have, under `hu.observe`. "First" counts runs whose first finding has that code, names something in that \
layer, and has the cure of that fault. Healthy are trainings of eight models in float32, in bfloat16 autocast, and in \
float16 autocast with a loss scale: they must show nothing above a note."""
PLANTED = 100


def planted(code: str, layer: int, seed: int) -> dict:
    """Train with one fault, and return what came first."""
    import torch

    from ._finding_gpt import GPT, Training
    from ._finding_plants import PLANTS

    torch.manual_seed(seed)
    plant, training, begin = PLANTS[code], Training(GPT(), layer), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plant.put(training, random.Random(seed))
        found = training.findings()
    first = found[0] if found else None
    place = f"blocks.{layer}"
    where = any(f".{place}." in f".{name}." for name in (first.where if first else ()))
    good = first is not None and first.code == code and where and plant.cure in first.cure
    words = f"{first.code}: {first}" if first else "nothing"
    return {
        "code": code,
        "layer": layer,
        "seed": seed,
        "good": good,
        "first": words,
        "seconds": time.perf_counter() - begin,
    }


def healthy(name: str, precision: str, seed: int) -> dict:
    """Train without a fault, and return what was found above a note."""
    import torch

    from ._finding_healthy import findings

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = findings(name, precision)
    loud = [f"{finding.code}: {finding}" for finding in found if finding.severity != "note"]
    return {"model": name, "precision": precision, "found": loud, "notes": len(found) - len(loud)}


def draws(count: int, seed: int) -> list[tuple[str, int, int]]:
    """Codes, layers and seeds of planted runs."""
    from ._finding_gpt import LAYERS
    from ._finding_plants import PLANTS

    drawn = random.Random(seed)
    return [(drawn.choice(sorted(PLANTS)), drawn.randrange(LAYERS), drawn.randrange(2**31)) for _ in range(count)]


def tables(rows: list[dict], quiet: list[dict]) -> list[Table]:
    """Counts by code, what went wrong, and the healthy runs."""
    by_code = Table(
        "Faults in one layer of a 12-layer GPT", {"code": "", "planted": "", "first, with layer and cure": ""}
    )
    for code in sorted({row["code"] for row in rows}):
        of = [row["good"] for row in rows if row["code"] == code]
        by_code.add(code=code, planted=len(of), **{"first, with layer and cure": sum(of)})
    good = sum(row["good"] for row in rows)
    by_code.note = f"{good} of {len(rows)} are first, in the right layer and with the right cure."
    wrong = Table("Faults that were not first", {"code": "", "layer": "", "first": ""})
    for row in rows:
        if not row["good"]:
            wrong.add(code=row["code"], layer=row["layer"], first=row["first"][:200])
    still = Table("Healthy runs", {"model": "", "precision": "", "above a note": "", "notes": ""})
    for row in quiet:
        found = "; ".join(row["found"])[:200] or "nothing"
        still.add(model=row["model"], precision=row["precision"], **{"above a note": found, "notes": row["notes"]})
    loud = sum(bool(row["found"]) for row in quiet)
    still.note = f"{loud} of {len(quiet)} healthy runs show something above a note."
    return [by_code, *([wrong] if wrong.rows else []), still]


def main() -> None:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planted", type=int, default=PLANTED)
    parser.add_argument("--codes", nargs="*", help="only these, one run each; nothing is kept")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import torch

    from ._finding_healthy import runs

    torch.set_num_threads(1)
    drawn = draws(arguments.planted, arguments.seed)
    if arguments.codes is not None:
        drawn = [(code, 7, arguments.seed) for code in arguments.codes]
    rows = []
    for code, layer, seed in drawn:
        rows.append(planted(code, layer, seed))
        print("first" if rows[-1]["good"] else "WRONG", code, layer, f"{rows[-1]['seconds']:.1f} s", flush=True)
        if not rows[-1]["good"]:
            print("   ", rows[-1]["first"], flush=True)
    quiet = [healthy(name, precision, arguments.seed) for name, precision in runs()]
    for row in quiet:
        print("quiet" if not row["found"] else "LOUD", row["model"], row["precision"], *row["found"], flush=True)
    if arguments.codes is not None:
        return
    result = Result(
        "findings", "Findings of planted faults and of healthy runs", TEXT, "python -m benchmarks.bench_findings"
    )
    result.tables += tables(rows, quiet)
    save(result)


if __name__ == "__main__":
    main()
