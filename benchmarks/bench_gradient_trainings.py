"""Gradient exponents beside GradScaler in eleven trainings: `python -m benchmarks.bench_gradient_trainings`."""

import argparse
import copy
import json
import math
import statistics
import time
import warnings
from pathlib import Path

from ._harness import set_threads
from ._results import FOLDER, Result, Table, machine, save

TEXT = """Eleven small trainings (benchmarks/_trainings) in float32, and in float16 by torch.autocast with float32 \
parameters, with torch.amp.GradScaler and with AdaptiveGradScaler, both with their defaults: the same starts, batches \
and hyper-parameters. Zeros: of the elements of parameters' gradients that are not zero in float32 on the same weights \
and batch, the share that is, over every 15th step that was applied; without those that the forward pass in float16 \
makes zero under any scale, such as behind a tanh that is 1 there. Convolutions are linear layers of patches, as \
torch's own take 85 times float32's time in float16 on a processor."""
METHODS = ("float32", "GradScaler", "halfulp")
SEEDS, EVERY, FIRST = 3, 15, 7
EXPONENTS = (-8, 0, 8, 16, 24, 32, 40)
EARLY = 20
COUNTS = ("steps", "skips", "lost", "held")
MORE_SKIPS, MORE_ZEROS = 0.02, 0.001
RUNS = FOLDER / "gradient_trainings_runs.json"


def scaler_of(method: str, models: list):
    """What scales."""
    import torch

    import halfulp as hu

    if method == "halfulp":
        return hu.AdaptiveGradScaler(models)
    return torch.amp.GradScaler("cpu", enabled=method == "GradScaler")


class Run:
    """One training with one scaler."""

    def __init__(self, kind, data: Path, method: str, seed: int) -> None:
        self.training, self.method = kind(data, seed), method
        # Float32 copies: what gradients should be, and what is judged in the end, without a scaler's hooks.
        self.plain = copy.deepcopy(self.training.models)
        self.scaler = scaler_of(method, self.training.models)
        self.applied: list[bool] = []
        self.lost = self.held = self.steps = self.skips = self.late = self.row = self.longest = 0
        for optimizer in self.training.optimizers:
            optimizer.register_step_post_hook(lambda *args: self.applied.append(True))

    def go(self) -> dict:
        """The whole training; what is told of it."""
        begun = time.process_time()
        for step in range(self.training.steps):
            self.iterate(step)
        self.follow()
        import torch

        with torch.no_grad():
            for model in self.plain:
                model.eval()
            loss = float(self.training.judge(self.plain))
        found = {"steps": self.steps, "skips": self.skips, "late": self.late, "longest": self.longest, "loss": loss}
        found |= {"lost": self.lost, "held": self.held, "seconds": round(time.process_time() - begun, 1)}
        if self.method == "halfulp":
            exponents = [row.exponent for row in self.scaler.sites()]
            found["exponents"] = [min(exponents), max(exponents)]
        elif self.method == "GradScaler":
            found["exponents"] = [self.scaler.get_scale()]
        return found

    def iterate(self, step: int) -> None:
        """One iteration: as many steps as it has optimizers' turns."""
        import torch

        with torch.autocast("cpu", torch.float16, enabled=self.method != "float32"):
            losses = self.training.losses(step)
            turn = next(losses, None)
        while turn is not None:
            self.optimize(step, *turn)
            if self.training.update_each:
                self.scaler.update()
            with torch.autocast("cpu", torch.float16, enabled=self.method != "float32"):
                turn = next(losses, None)
        if not self.training.update_each:
            self.scaler.update()

    def optimize(self, step: int, number: int, loss_of) -> None:
        """One optimizer's step."""
        import torch

        optimizer = self.training.optimizers[number]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=self.method != "float32"):
            loss = loss_of(self.training.models)
        self.scaler.scale(loss).backward()
        zeros = self.zeros(number, loss_of) if step % EVERY == FIRST and self.method != "float32" else None
        if self.training.clip is not None:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.training.models[number].parameters(), self.training.clip)
        self.applied.clear()
        self.scaler.step(optimizer)
        self.count(step, skipped=not self.applied, zeros=zeros)

    def count(self, step: int, skipped: bool, zeros: tuple[int, int] | None) -> None:
        """Add a step to the figures."""
        self.steps += 1
        self.skips += skipped
        self.late += skipped and step >= EARLY
        self.row = self.row + 1 if skipped else 0
        self.longest = max(self.longest, self.row)
        if zeros is not None and not skipped:
            self.lost, self.held = self.lost + zeros[0], self.held + zeros[1]

    def zeros(self, number: int, loss_of) -> tuple[int, int]:
        """How many elements of the gradients are zero and should not be, and how many should not be."""
        import torch

        self.follow()
        parameters = list(self.plain[number].parameters())
        wanted = torch.autograd.grad(loss_of(self.plain), parameters, allow_unused=True)
        possible = self.possible(loss_of, parameters)
        lost = held = 0
        for parameter, true, some in zip(self.training.models[number].parameters(), wanted, possible):
            if true is not None and some is not None and parameter.grad is not None:
                given = (true != 0) & some
                held += int(given.sum())
                lost += int((given & (parameter.grad == 0)).sum())
        return lost, held

    def possible(self, loss_of, parameters: list) -> list:
        """Which elements of each gradient are numbers other than zero in float16 under any of some scales."""
        import torch

        with torch.autocast("cpu", torch.float16):
            loss = loss_of(self.plain)
        found: list = [None for _ in parameters]
        for exponent in EXPONENTS:
            gradients = torch.autograd.grad(loss * 2.0**exponent, parameters, retain_graph=True, allow_unused=True)
            for place, gradient in enumerate(gradients):
                if gradient is not None:
                    here = (gradient != 0) & gradient.isfinite()
                    found[place] = here if found[place] is None else found[place] | here
        return found

    def follow(self) -> None:
        """Bring the float32 copies to the state of what is trained."""
        import torch

        with torch.no_grad():
            for plain, model in zip(self.plain, self.training.models):
                for mine, theirs in ((plain.parameters(), model.parameters()), (plain.buffers(), model.buffers())):
                    for copied, original in zip(mine, theirs):
                        copied.copy_(original)


def kept() -> dict[str, dict]:
    """The runs that were made."""
    return json.loads(RUNS.read_text())["runs"] if RUNS.exists() else {}


def keep(runs: dict[str, dict]) -> None:
    """For a later call."""
    RUNS.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")


def run_all(trainings: dict, methods: list[str], data: Path, seeds: int) -> None:
    """All runs that are not kept; what another call keeps meanwhile stays."""
    for seed in range(seeds):
        for title, kind in trainings.items():
            for method in methods:
                key = f"{title} | {method} | {seed}"
                if key in kept():
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch's, where a rate's schedule or a kernel is not its favourite
                    found = Run(kind, data, method, seed).go()
                keep({**kept(), key: found})
                print(key, found, flush=True)


def line(title: str, runs: dict[str, dict], seeds: int) -> dict:
    """A row of the table, its bar judged."""
    found = {method: [runs[f"{title} | {method} | {seed}"] for seed in range(seeds)] for method in METHODS}
    total = {method: {field: sum(run[field] for run in found[method]) for field in COUNTS} for method in METHODS}
    cells = {"training": title, "steps": total["halfulp"]["steps"]}
    for field, name in (("skips", "skipped"), ("late", f"after step {EARLY}"), ("longest", "most in a row")):
        for method in METHODS[1:]:
            every = [run[field] for run in found[method]]
            cells[f"{name}, {method}"] = max(every) if field == "longest" else sum(every)
    shares = {method: total[method]["lost"] / max(1, total[method]["held"]) for method in METHODS[1:]}
    cells |= {f"zeros, {method}": share for method, share in shares.items()}
    losses = {method: [run["loss"] for run in found[method]] for method in METHODS}
    for method in METHODS:
        spread = f" ± {statistics.stdev(losses[method]):.4f}" if seeds > 1 else ""
        cells[f"loss, {method}"] = f"{statistics.fmean(losses[method]):.4f}{spread}"
    spread = statistics.stdev(losses["float32"]) if seeds > 1 else math.inf
    skips = total["halfulp"]["skips"] <= total["GradScaler"]["skips"] + MORE_SKIPS * cells["steps"]
    zeros = shares["halfulp"] <= shares["GradScaler"] + MORE_ZEROS
    loss = statistics.fmean(losses["halfulp"]) <= statistics.fmean(losses["float32"]) + 2 * spread
    missed = [word for word, held in (("skipped", skips), ("zeros", zeros), ("loss", loss)) if not held]
    return {**cells, "bar": ", ".join(missed) + " missed" if missed else "all three", "met": not missed}


def table_of(trainings: dict, runs: dict[str, dict], seeds: int) -> Table:
    """All trainings whose runs are there."""
    columns = {"training": "", "steps": ""}
    for name in ("skipped", f"after step {EARLY}", "most in a row"):
        columns |= {f"{name}, {method}": "" for method in METHODS[1:]}
    columns |= {f"zeros, {method}": ".3%" for method in METHODS[1:]} | {f"loss, {method}": "" for method in METHODS}
    table = Table("Trainings in float16", {**columns, "bar": "", "met": ""})
    for title in trainings:
        if all(f"{title} | {method} | {seed}" in runs for method in METHODS for seed in range(seeds)):
            table.add(**line(title, runs, seeds))
    judged = "; ".join(f"{title}: {kind.judged}" for title, kind in trainings.items())
    table.note = f"""Steps and skipped ones: of all optimizers, seeds: {seeds}; the most skipped in a row: of \
any seed. Losses, in float32 on what was not trained on, by mean and standard deviation over the seeds. {judged}. The \
bar: skipped at most GradScaler's share plus {MORE_SKIPS:.0%}, zeros at most GradScaler's share plus \
{MORE_ZEROS:.1%}, and a loss of at most float32's plus two of its standard deviations."""
    return table


def main() -> None:
    """All trainings that are not kept, and the table of all."""
    from ._trainings import TRAININGS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder of tinyshakespeare/ etc.")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="+", default=list(TRAININGS), choices=list(TRAININGS), metavar="TRAINING")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="those to run now")
    parser.add_argument("--again", nargs="+", default=[], choices=METHODS, help="whose kept runs are made again")
    given = parser.parse_args()
    set_threads(1)
    trainings = {title: TRAININGS[title] for title in given.only}
    again = {(title, method) for title in given.only for method in given.again}
    keep({key: run for key, run in kept().items() if tuple(key.split(" | ")[:2]) not in again})
    run_all(trainings, given.methods, given.data, given.seeds)
    command = "python -m benchmarks.bench_gradient_trainings"
    table = table_of(TRAININGS, kept(), given.seeds)
    save(Result("gradient_trainings", "Gradient exponents in trainings", TEXT, command, tables=[table]))


if __name__ == "__main__":
    main()
