"""Gradient exponents where something goes wrong: `python -m benchmarks.bench_gradient_safety`."""

import contextlib
import math
from unittest import mock

import torch
from torch import nn

import halfulp as hu
from halfulp.gradients import _site as _powers

from ._ranks import CASES, HALF, MODELS, SEEDS, SMALL, in_two_processes, scalers, unscaled
from ._results import Result, Table, save

TEXT = f"""Small models with random weights; every figure is the worst of three seeds \
({", ".join(map(str, SEEDS))}). halfulp is AdaptiveGradScaler with its defaults where no policy is named, GradScaler, \
to which no bar applies, is torch.amp.GradScaler in the same training. Bit-equality is shown in float32; all else runs \
under torch.autocast to float16, or on float16 copies of the parameters where it says so."""
SPIKE, LASTING = 2.0**10, 24
MEASURED = {"measured": 16, "not measured": 19}  # iterations before a spike; every 16th is measured
GROWTH, FLOOD, PATIENCE = 2000, 400, 100
POLICIES = ("amax", "underflow-bound", "dynamic")
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


# two processes ----------------------------------------------------------------------------------------------------


def gradients_of(runs: list) -> Table:
    """Bit-equality, and the errors of float16 copies."""
    names = [f"error, {name}" for name in (*scalers(), "not scaled")]
    table = Table("Two processes", {**dict.fromkeys(("model", "DDP", "FSDP2"), ""), **dict.fromkeys(names, ".2g")})
    for model in MODELS:
        found = [rank[model] for ranks in runs for rank in ranks]
        worst = {kind: min(one[kind] for one in found) for kind in ("DDP", "FSDP2")}
        errors = [max(one["errors"][i] for one in found) for i in range(3)]
        met = all(equal == total for equal, total in worst.values()) and errors[0] <= min(1.25 * errors[1], errors[2])
        words = {kind: f"{equal} of {total}" for kind, (equal, total) in worst.items()}
        table.add(model=model, **words, **dict(zip(names, errors)), bar="all, error <= 1.25 x GradScaler's", met=met)
    table.note = f"DDP, FSDP2: gradients of parameters that are bit-equal to those without a scaler, in float32, under \
random exponents from -12 to 24, another draw in each process. Errors: the largest relative error of a gradient of \
{HALF}, against float32, for {SMALL:g} times the loss; that a ReLU may be shut in float16 and open in float32 is part \
of it."
    return table


def overflows_of(runs: list) -> Table:
    """The process that did not overflow does what the other one does."""
    fields = ("overflow in one process", "where", "scaler", "both skip", "both take the next", "same weights then")
    table = Table("One of two processes overflows", dict.fromkeys(fields, ""))
    for kind, where in CASES:
        for name in scalers():
            key = f"{kind} {where} {name}"
            pairs = [[rank[model]["overflow"][key] for rank in ranks] for ranks in runs for model in MODELS]
            counts = [sum(all(one[field] for one in pair) for pair in pairs) for field in ("skipped", "next")]
            counts.append(sum(one["end"] == other["end"] for one, other in pairs))
            words = (f"{count} of {len(pairs)}" for count in counts)
            judged = {"bar": "all", "met": min(counts) == len(pairs)} if name == "halfulp" else {}
            table.add(**dict(zip(fields, (kind, where, name, *words))), **judged)
    table.note = f"Of {len(SEEDS)} seeds and {len(MODELS)} models. A step was skipped where no bit of a weight changed."
    return table


# one process ------------------------------------------------------------------------------------------------------

# Where a spike is put, and how the keys of all sites begin that it reaches.
PLACES = {
    ("perceptron", "a weight"): ("6", ("6",)),
    ("perceptron", "the flow"): ("5", ("0", "2", "4")),
    ("GPT", "a weight"): ("blocks.0.down", ("blocks.0.down",)),
    ("GPT", "the flow"): ("blocks.0", ("tokens", "positions", "blocks.0")),
}


class Boosted(nn.Linear):
    """A layer with ``boost`` times the gradient of its weight: its input is so large there, and only there."""

    def forward(self, x):
        """x: (..., in_features)."""
        out = nn.functional.linear(x.detach() * self.boost + (x - x.detach()), self.weight)
        return out.detach() / self.boost + (out - out.detach()) + self.bias


def built(name: str):
    """A model and its batch."""
    from halfulp.trials.tasks._text import GPT

    if name == "GPT":
        return GPT(32, width=16, layers=2, heads=2, time=8), torch.randint(32, (4, 8))
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(16, 16), nn.Tanh()))), torch.randn(32, 16)


class Training:
    """One model in float16 and one batch, with gradients that can be made larger from one step to the next.

    In a weight: the gradient of one layer's weight, nothing else. In the flow: all that comes later in backward.
    """

    def __init__(self, name: str, seed: int, make, where: str = "the flow", lr: float = 0.0):
        torch.manual_seed(seed)
        self.model, self.batch = built(name)
        at, self.reached = PLACES[name, where]
        if where == "a weight":
            layer = self.model.get_submodule(at)
            self.model.set_submodule(at, Boosted(layer.in_features, layer.out_features))
        self.part = self.model.get_submodule(at)
        if where == "the flow":
            self.part.register_forward_hook(self._boost)
        self.scaler, self.applied, self.skipped = make(self.model), [], 0
        self.ours = isinstance(self.scaler, hu.AdaptiveGradScaler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.optimizer.register_step_post_hook(lambda *args: self.applied.append(args))

    def _boost(self, module, args, out) -> None:
        out.register_hook(lambda gradient: gradient * module.boost)

    def step(self, boost: float = 1.0) -> bool:
        """One iteration; whether it was skipped."""
        self.part.boost = boost
        self.applied.clear()
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = self.model(self.batch).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += not self.applied
        return not self.applied

    def settle(self, iterations: int) -> None:
        """Until exponents stay; GradScaler's scale is then the largest that does not overflow."""
        if self.ours:
            for _ in range(iterations):
                self.step()
            return
        self.scaler.set_growth_interval(1)
        while not self.step():
            pass
        self.scaler.set_growth_interval(GROWTH)

    def exponents(self) -> dict[str, float]:
        """As they are; GradScaler has one, of the scale 0 in the end."""
        if self.ours:
            return {row.site: row.exponent for row in self.scaler.sites().rows}
        scale = self.scaler.get_scale()
        return {"global": round(math.log2(scale)) if scale else -math.inf}

    def below(self, before: dict) -> dict[str, float]:
        """The sites whose exponent is less than before, and by how much."""
        return {site: before[site] - e for site, e in self.exponents().items() if e < before[site]}

    def back(self, before: dict) -> int:
        """After how many steps no exponent is less than before; PATIENCE where that never happens."""
        steps, lone = 0, nn.Parameter(torch.zeros(1))
        other = torch.optim.SGD([lone], lr=0.0)
        while self.below(before) and not (self.ours and steps == PATIENCE):
            steps += 1
            if self.ours:
                self.step()
                continue
            # GradScaler asks only whether gradients are finite: a cheap one will do.
            lone.grad = torch.zeros(1)
            self.scaler.step(other)
            self.scaler.update()
        return steps


def spiked(name: str, where: str, lasting: int, iterations: int, make) -> dict:
    """A spike in a settled training: the worst of all seeds."""
    skipped, first, last, back, others, stuck, culprits = [], [], [], [], set(), set(), set()
    for seed in SEEDS:
        run = Training(name, seed, make, where)
        run.settle(iterations)
        before, run.skipped = run.exponents(), 0
        run.step(SPIKE)
        culprits |= {site for site, _ in run.scaler.last_step.overflow_sources} if run.ours else set()
        first.append(run.below(before))
        for _ in range(lasting - 1):
            run.step(SPIKE)
        last.append(run.below(before))
        others |= {site for site in {**first[-1], **last[-1]} if run.ours and not site.startswith(run.reached)}
        back.append(run.back(before))
        skipped.append(run.skipped)
        stuck |= set(run.below(before))

    def words(found: list[dict]) -> str:
        amounts = [amount for one in found for amount in one.values()]
        if not amounts:
            return "none"
        ends = dict.fromkeys((min(amounts), max(amounts)))
        return f"{max(map(len, found))} of {len(before)} by {' to '.join(map(str, ends))}"

    return {
        "skipped": max(skipped),
        "culprits": ", ".join(sorted(culprits)),
        "lowered at once": words(first),
        "at its end": words(last) if lasting > 1 else "",
        "beyond its reach": ", ".join(sorted(others)),
        "back after": f"never: {', '.join(sorted(stuck))}" if stuck else str(max(back)),
    }


def spikes() -> Table:
    """In a weight and in the flow, for a step and for good."""
    fields = ("model", "spike in", "steps", "scaler", "first step")
    table = Table("A spike of 2^10", dict.fromkeys(fields, ""))
    for name, where in PLACES:
        for lasting in (1, LASTING):
            for scaler, make in scalers().items():
                for kind, iterations in MEASURED.items() if scaler == "halfulp" else [("", 0)]:
                    line = spiked(name, where, lasting, iterations, make)
                    table.columns |= dict.fromkeys(line, "")
                    judged = {"met": line["skipped"] <= 2 and not line["beyond its reach"]} if kind else {}
                    judged |= {"bar": "skipped <= 2, none beyond"} if kind else {}
                    table.add(**dict(zip(fields, (name, where, lasting, scaler, kind))), **line, **judged)
                    print(table.rows[-1], flush=True)
    table.note = (
        f"First step: whether its iteration is measured. Lowered: sites, of all, and by how many powers of two, \
after the spike's first step and after its last; beyond its reach: those whose gradients it does not change. Back \
after: steps from the spike's end until no exponent is less than before; never: not in {PATIENCE}. GradScaler has one \
scale for all, at the largest that does not overflow, and doubles it after {GROWTH:,} steps."
    )
    return table


def flooded(where: str, make) -> dict:
    """One infinite gradient after the other: the worst of all seeds."""
    lows, zeros, same, finite, after = [], [], [], [], []
    for seed in SEEDS:
        run, least = Training("perceptron", seed, make, lr=0.1), []
        weight, old = run.model[6].weight, [p.detach().clone() for p in run.model.parameters()]
        hook = weight.register_hook(lambda gradient: gradient * math.inf) if where == "a weight" else None
        for _ in range(FLOOD):
            run.step(1.0 if hook else math.inf)
            least.append(min(run.exponents().values()))
        lows.append(min(least))
        zeros.append(least.index(-math.inf) + 1 if -math.inf in least else 0)
        same.append(all(torch.equal(p, value) for p, value in zip(run.model.parameters(), old)))
        if hook:
            hook.remove()
        after.append(next((str(steps) for steps in range(1, 21) if not run.step()), "never"))
        finite.append(all(bool(p.isfinite().all()) for p in run.model.parameters()))
    return {
        "least scale": "0" if any(zeros) else f"2^{min(lows)}",
        "0 after": str(max(zeros)) if any(zeros) else "never",
        "no weight changed": all(same),
        "applied again": max(after),
        "weights finite then": all(finite),
    }


def floods() -> Table:
    """Under three policies, and GradScaler's."""
    makes = {f"halfulp, {name}": scalers(policy=name)["halfulp"] for name in POLICIES}
    table = Table(f"{FLOOD} steps in a row with infinite gradients", dict.fromkeys(("scaler", "infinite in"), ""))
    for name, make in {**makes, "GradScaler": scalers()["GradScaler"]}.items():
        for where in ("a weight", "the flow"):
            line = flooded(where, make)
            table.columns |= dict.fromkeys(line, "")
            met = line["0 after"] == "never" and line["no weight changed"] and line["weights finite then"]
            judged = {"bar": "never 0, no weight changed, finite", "met": met} if name in makes else {}
            table.add(**{"scaler": name, "infinite in": where}, **line, **judged)
            print(table.rows[-1], flush=True)
    table.note = (
        "The least scale is that of all sites. Applied again: the first step that is, when gradients are finite."
    )
    return table


@contextlib.contextmanager
def counted():
    """The names of calls that would wait for a device."""
    found, originals = [], {name: getattr(torch.Tensor, name) for name in READS}

    def counting(name: str):
        def read(self, *args, **kwargs):
            found.append(name)
            return originals[name](self, *args, **kwargs)

        return read

    for name in READS:
        setattr(torch.Tensor, name, counting(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


def reads_of(model: str, make, iterations: int, boost: float) -> int:
    """The most reads of a step after so many, of all seeds."""
    found = []
    for seed in SEEDS:
        run = Training(model, seed, make)
        for _ in range(iterations):
            run.step()
        # As on an accelerator, where what exponents follow stays in a tensor.
        with counted() as calls, mock.patch.object(_powers, "is_on_host", return_value=False):
            skipped = run.step(boost)
        if skipped is not (boost > 1):
            raise RuntimeError(f"a step of {model} was skipped that should not be, or the reverse")
        found.append(len(calls))
    return max(found)


def reads() -> Table:
    """Of a step, measured or not, applied or skipped."""
    kinds = {f"{end}, {kind}": (end, count) for end in ("applied", "skipped") for kind, count in MEASURED.items()}
    table = Table("Reads of the device in a step", dict.fromkeys(("model", "scaler", *kinds), ""))
    for model in ("perceptron", "GPT"):
        for name, make in {"none": unscaled, **scalers()}.items():
            cells = {
                kind: reads_of(model, make, count, 2.0**30 if end == "skipped" else 1.0)
                for kind, (end, count) in kinds.items()
                if end == "applied" or name != "none"
            }
            judged = {}
            if name == "halfulp":
                met = all(cells[f"applied, {kind}"] == 1 and cells[f"skipped, {kind}"] <= 3 for kind in MEASURED)
                judged = {"bar": "1 where applied, <= 3 where skipped", "met": met}
            table.add(model=model, scaler=name, **cells, **judged)
    table.note = f"A tensor's {', '.join(READS)}, which wait for the device."
    return table


def main() -> None:
    """All tables."""
    torch.set_num_threads(1)
    runs = in_two_processes()
    title, command = "Gradient exponents where something goes wrong", "python -m benchmarks.bench_gradient_safety"
    result = Result("gradient_safety", title, TEXT, command)
    result.tables = [gradients_of(runs), overflows_of(runs), spikes(), floods(), reads()]
    for table in result.tables:
        table.columns |= {"bar": "", "met": ""}
    save(result)


if __name__ == "__main__":
    main()
