"""Two families of gradients that no single scale serves: `python -m benchmarks.bench_two_families`."""

import argparse
import copy
import statistics

from ._results import Result, Table, save

TEXT = """Twelve linear layers of width 32 with ReLUs on 16 sequences of 4,096 numbers, a mean over groups of four \
after every second layer, so that gradients shrink from top to bottom by 2^12 and more; and, beside it, the same \
with a second head on the first layer, whose loss is a sum over all positions ("hot head"). Forward and weights are \
float32; every gradient that a product reads or makes is rounded to the format, an overflow becomes infinity. 40 steps \
of SGD, four seeds; in the last step each gradient is compared with float32's on the same weights and batch. \
Underflow: of the elements that are not zero in float32, the share that is stored as zero; subnormal: the share of \
what is stored."""
LAYERS, WIDTH, BATCH, TIME, CLASSES = 12, 32, 16, 4096, 10
STEPS, SEEDS, SETTLED = 40, 4, 20
HOT = 8.0


def policies() -> dict:
    """What is compared: name -> policy and the scale at which it starts."""
    from halfulp.gradients import Amax, Constant, Dynamic, UnderflowBound

    return {
        "none": (Constant(), 1.0),
        "dynamic (GradScaler)": (Dynamic(), 2.0**16),
        "underflow bound (Zhao et al.)": (UnderflowBound(), 1.0),
        "amax": (Amax(), 2.0**16),
    }


def model(seed: int, hot: bool):
    """The chain, its second head, and the reading of a batch."""
    import torch
    from torch import nn

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
            self.head, self.hot = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

        def forward(self, x):
            aside = None
            for i, layer in enumerate(self.layers):
                x = layer(x).relu()
                aside = self.hot(x) if i == 0 and hot else aside
                if i % 2:
                    x = x.unflatten(1, (-1, 4)).mean(2)
            return self.head(x.mean(1)), aside

    torch.manual_seed(seed)
    made = Chain()
    for layer in made.layers:
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return made


def loss_of(outputs, targets):
    """Cross-entropy, and the sum of squares of the hot head."""
    import torch

    logits, aside = outputs
    loss = torch.nn.functional.cross_entropy(logits, targets)
    return loss if aside is None else loss + HOT * (aside - 1).square().sum(1).mean()


def batch(generator):
    """Sequences with a different drift for each class."""
    import torch

    targets = torch.randint(CLASSES, (BATCH,), generator=generator)
    inputs = torch.randn(BATCH, TIME, WIDTH, generator=generator)
    return inputs + 0.3 * torch.nn.functional.one_hot(targets, WIDTH)[:, None], targets


def gradients(chain, scaler, inputs, targets):
    """The gradient of every layer's result as stored, and of every weight, unscaled."""
    stored = {}

    def keep(name):
        def hook(module, args, out):
            out.register_hook(lambda gradient: stored.__setitem__(name, gradient.detach().clone()))

        return hook

    handles = [layer.register_forward_hook(keep(f"layer {i + 1}")) for i, layer in enumerate(chain.layers)]
    chain.zero_grad()
    loss = loss_of(chain(inputs), targets)
    (loss if scaler is None else scaler.scale(loss)).backward()
    for handle in handles:
        handle.remove()
    return stored


def measured(chain, scaler, format, inputs, targets) -> dict:
    """Underflow and subnormals by layer, and the error of the weights' gradients, against float32."""
    from halfulp.rounding import quantize

    plain = copy.deepcopy(chain)
    truth = gradients(plain, None, inputs, targets)
    stored = gradients(chain, scaler, inputs, targets)
    under, below, errors = [], [], []
    for name, true in truth.items():
        kept = quantize(stored[name], format)
        given = true != 0
        under.append(float(((kept == 0) & given).sum() / given.sum().clamp(min=1)))
        below.append(
            float(((kept.abs() < format.smallest_normal) & (kept != 0)).sum() / (kept != 0).sum().clamp(min=1))
        )
    scale = scaler.get_scale()
    for layer, reference in zip(chain.layers, plain.layers):
        found, wanted = layer.weight.grad / scale, reference.weight.grad
        errors.append(float((found - wanted).norm() / wanted.norm()) if bool(found.isfinite().all()) else float("inf"))
    return {"underflow": under, "subnormal": below, "error": errors}


def trial(format, policy, start: float, hot: bool, seed: int) -> dict:
    """One training, and what its last step's gradients look like."""
    import torch

    import halfulp as hu

    chain = model(seed, hot)
    scaler = hu.AdaptiveGradScaler(chain, policy=policy, format=format, init_scale=start, interval=4)
    optimizer = torch.optim.SGD(chain.parameters(), lr=1e-6 if hot else 1e-3)
    generator = torch.Generator().manual_seed(seed)
    late = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(generator)
        scaler.scale(loss_of(chain(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        late += step >= SETTLED and not scaler.last_step.applied
    found = measured(chain, scaler, hu.formats.get(format), *batch(generator))
    exponents = [row.exponent for row in scaler.sites().rows]
    return {**found, "skipped": late, "exponents": (min(exponents), max(exponents))}


def rows(format: str, hot: bool, seeds: int) -> list[dict]:
    """One line per policy."""
    lines = []
    for name, (policy, start) in policies().items():
        trials = [trial(format, policy, start, hot, seed) for seed in range(seeds)]

        def mean(field: str, of) -> float:
            return statistics.fmean(of(one[field]) for one in trials)  # noqa: B023

        line = {
            "format": format,
            "gradients": "with a hot head" if hot else "one family",
            "policy": name,
            "underflow, mean": mean("underflow", statistics.fmean),
            "worst layer": mean("underflow", max),
            "subnormal, worst layer": mean("subnormal", max),
            "weight error, mean": mean("error", statistics.fmean),
            "worst": mean("error", max),
            "skipped after step 20": statistics.fmean(one["skipped"] for one in trials),
            "exponents": "{} to {}".format(
                min(one["exponents"][0] for one in trials), max(one["exponents"][1] for one in trials)
            ),
        }
        print(line, flush=True)
        lines.append(line)
    return lines


def judged(line: dict) -> dict:
    """A line with its bars, where the policy is the library's own and two families meet."""
    if line["policy"] != "amax" or line["gradients"] == "one family":
        return line
    limits = {"worst layer": 0.01, "subnormal, worst layer": 0.05, "skipped after step 20": 0}
    if line["format"] == "fp16":
        limits |= {"underflow, mean": 1e-4, "worst layer": 1e-3}
    words = ", ".join(f"{name} <= {limit:g}" for name, limit in limits.items())
    return {**line, "bar": words, "met": all(line[name] <= limit for name, limit in limits.items())}


def main() -> None:
    """All formats and policies, with bars on the library's own."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    shares = dict.fromkeys(("underflow, mean", "worst layer", "subnormal, worst layer"), ".4%")
    errors = dict.fromkeys(("weight error, mean", "worst"), ".2g")
    columns = {"format": "", "gradients": "", "policy": "", **shares, **errors, "skipped after step 20": ".2g"}
    table = Table("One family and two", {**columns, "exponents": "", "bar": "", "met": ""})
    for format in ("fp16", "e5m2"):
        for hot in (False, True):
            for line in rows(format, hot, chosen.seeds):
                table.add(**judged(line))
    table.note = f"Means over {chosen.seeds} seeds; exponents: from the lowest to the highest of all sites and seeds."
    result = Result("two_families", "Two families of gradients", TEXT, "python -m benchmarks.bench_two_families")
    result.tables.append(table)
    save(result)


if __name__ == "__main__":
    main()
