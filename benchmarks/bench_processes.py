"""Two processes beside one on the whole batch: `python -m benchmarks.bench_processes`.

For AdaptiveGradScaler, scaled and multi-component models, and torch's own beside: every wrapper of torch.distributed,
losses of which one process's is not like the others', and checkpoints that another number of processes reads.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

from ._harness import ROOT
from ._process_cases import CASES, KINDS, LOSSES, STEPS, SUBGROUP
from ._results import Result, Table, save, show

SEEDS = (51803, 240917, 863442)
SECONDS = 3000
# Roundings that one step may differ by: float32 gradients of these layers, summed over all rows or over halves of them,
# differ by up to 1.6 in 40 draws, and weights of two float32 show all of that.
ONE_STEP = 2


def run(what: str, world: int, folder: str, seeds: list[int], kinds: list[str]) -> dict[str, list[dict]]:
    """What rank 0 found by kind and seed; a process that fails or takes too long is an error with its last words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks._process_cases", what]
    given = [str(world), folder, ",".join(map(str, seeds)), *kinds]
    ranks = [subprocess.Popen([*command, str(rank), *given], **options) for rank in range(world)]
    try:
        said = [process.communicate(timeout=SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"{what}: " + " | ".join(text[1].strip()[-300:] for text in said))
    print(f"{what} in {world} processes: done", flush=True)
    return json.loads(said[0][0].strip().splitlines()[-1])


def findings(seeds: list[int], kinds: list[str]) -> dict[str, list[dict]]:
    """All that is found, by kind and seed."""
    with tempfile.TemporaryDirectory() as folder:
        found = run("matrix", 2, folder, seeds, kinds)
        run("saved", 2, folder, seeds, kinds)
        more = [
            run(what, world, folder, seeds, kinds) for what, world in (("subgroup", 3), ("loaded", 3), ("loaded", 1))
        ]
    for part in more:
        for kind, runs in part.items():
            for one, other in zip(found[kind], runs, strict=True):
                for name, entries in other.items():
                    one.setdefault(name, {}).update(entries)
    return found


def table(title: str, first: str, rows: list[str], part: str, found: dict, cell: Callable, note: str) -> Table:
    """Rows beside kinds."""
    made = Table(title, {first: "", **dict.fromkeys(found, "")}, note=note)
    for name in rows:
        entries = {kind: [one[part].get(name) for one in runs] for kind, runs in found.items()}
        cells = {kind: cell(of_kind) for kind, of_kind in entries.items() if of_kind[0] is not None}
        met = all(ok for _, ok in cells.values())
        made.add(**{first: name}, **{kind: text for kind, (text, _) in cells.items()}, met=met)
    return made


def compared(entries: list[dict]) -> tuple[str, bool]:
    """The worst of several seeds: a difference, or a refusal."""
    refused = next((entry for entry in entries if "refused" in entry), None)
    if refused:
        at_wrapping = refused["refused"] == "wrapping" and "refused" in entries[0]
        return ("refused" if at_wrapping else "fails: " + refused["words"][:60]), at_wrapping
    worst = max(entry["error"] for entry in entries)
    apart = any(entry["drift"] for entry in entries)
    text = "same bits" if all(entry["same"] for entry in entries) else f"{worst:.2f}"
    return (text + ", DRIFT" if apart else text), worst <= STEPS and not apart


def judged(entries: list[dict]) -> tuple[str, bool]:
    """Whether processes ended alike, and how many steps were applied at least."""
    apart = any(entry["drift"] for entry in entries)
    text = f"{min(entry['applied'] for entry in entries)} of {entries[0]['steps']}"
    text += "" if all(entry["finite"] for entry in entries) else ", not finite"
    return (text + ", DRIFT" if apart else text), not apart


def read(entries: list[dict]) -> tuple[str, bool]:
    """Whether a checkpoint was read bit for bit, and the difference one step later."""
    same, worst = all(entry["same"] for entry in entries), max(entry["next"] for entry in entries)
    ok = same and worst <= ONE_STEP and not any(entry["drift"] for entry in entries)
    return ("same bits" if same else "OTHER BITS") + f", then {worst:.2f}", ok


def refusals(found: dict) -> Table:
    """The words, each once."""
    made = Table("Refused as it is wrapped", {"what": "", "said": ""})
    said: dict[str, list[str]] = {}
    for kind, runs in found.items():
        for name, entry in runs[0]["cases"].items():
            if "refused" in entry:
                said.setdefault(entry["words"], []).append(f"{name} of {kind}")
    for words, who in said.items():
        made.add(what="; ".join(who), said=words)
    return made


def tables(found: dict[str, list[dict]]) -> list[Table]:
    """By kind: what each seed found."""
    losses = list(dict.fromkeys(f"{wrap}: {name}" for wrap in ("DDP", "FSDP2") for name in LOSSES))
    checkpoints = [f"{wrap}, on {world}" for wrap in ("DDP", "FSDP2") for world in (3, 1)]
    return [
        table(
            "Two processes with half of each batch, beside one process with all of it",
            "wrapper",
            [*CASES, SUBGROUP],
            "cases",
            found,
            compared,
            f"The largest difference of a weight after {STEPS} steps of SGD with momentum, in roundings: eps of "
            "weights x the largest weight + eps of gradients x the largest change. Sums of gradients have another "
            f"order, so that float32 differs too; at most {STEPS}, one for each step. Everywhere both processes ended "
            "with the same bits.",
        ),
        table(
            "Steps applied where one process's loss is not like the other's",
            "losses",
            losses,
            "losses",
            found,
            judged,
            "Both processes ended with the same bits, and none waited for the other. Only scalers skip steps.",
        ),
        table(
            "Checkpoints of two processes, read by three and by one",
            "wrapper",
            checkpoints,
            "checkpoints",
            found,
            read,
            "Weights, momentum and the scaler's state by torch.distributed.checkpoint, bit for bit, and the difference "
            "after one more step from what the two processes that saved it got, in the units above: at most "
            f"{ONE_STEP}, as gradients differ by up to 1.6 (plain float32: 1.5) where rows are summed in another "
            "order. Each process has exponents of its own; those of one are in the checkpoint.",
        ),
        refusals(found),
    ]


def main() -> None:
    """All kinds on three seeds, or those whose names hold a word; the tables, and the JSON where all ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only kinds whose names hold one of these")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if not options.words or any(word in kind for word in options.words)]
    found = findings(options.seeds, kinds)
    result = Result(
        "processes",
        "Several processes",
        "Two and three processes of torch.distributed (gloo, CPU), three layers, batches of 2 x 8 rows: "
        f"{len(options.seeds)} seeds, of which the worst stands in the tables.",
        "python -m benchmarks.bench_processes",
        tables=tables(found),
    )
    (show if options.words else save)(result)


if __name__ == "__main__":
    main()
