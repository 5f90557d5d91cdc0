"""Draws which scales each layer's gradients need, over a training: `python docs/gradient_plots.py`.

Figures go to docs/img/, the numbers behind them to docs/results/gradients.json.
"""

import argparse
import copy
import json
import math
import platform
import time

import plots
import torch
from torch import nn

import halfulp as hu
from halfulp.trials.tasks import get

NUMBERS = plots.HERE / "results" / "gradients.json"
FORMAT = hu.formats.fp16
# A site is measured, and counted here, every so many steps.
INTERVAL = 16
# Of a layer's true gradient elements that are not zero, the share that may be stored as zero.
SHARE = 1e-3
START = 16
POLICIES = {"one dynamic scale": "dynamic", "a scale per gradient": "amax"}


def train(policy: str, seed: int = 0) -> dict:
    """Two heads under a policy: the exponents, what each layer's true gradients needed, and what underflowed."""
    subject = get("two-heads")
    data = subject.load()
    model = subject.model(data, seed)
    scaler = hu.AdaptiveGradScaler(model, policy=policy, format=FORMAT, interval=INTERVAL, init_scale=2.0**START)
    rule = getattr(hu.optim, subject.rule)
    optimizer = rule(model.named_parameters(), report_interval=0, **subject.hyper)
    found: dict = {"layers": layers_of(model), "steps": [], "need": [], "limit": [], "underflow": [], "skipped": 0}
    lines: list[dict] = []
    for step, (inputs, targets) in enumerate(subject.batches(data, seed, subject.steps)):
        for group in optimizer.param_groups:
            group["lr"] = subject.hyper["lr"] * subject.lr_factor(step, subject.steps)
        sampled = step % INTERVAL == 0
        plain = copy.deepcopy(model) if sampled else None
        stored = gradients_of(model) if sampled else {}
        optimizer.zero_grad()
        scaler.scale(subject.loss(model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        lines.append({"iteration": step + 1, **scaler.sites().to_dict()})
        found["skipped"] += not scaler.last_step.applied
        if sampled and scaler.last_step.applied:
            count(found, step, plain, stored, subject.loss, inputs, targets)
    found["exponents"] = [in_force(lines, step, found["layers"]) for step in found["steps"]]
    return found


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """To be filled by the next backward pass: the gradient of each layer's result, for the layers that multiply."""
    found: dict[str, torch.Tensor] = {}

    def watch(name: str, layer: nn.Module) -> None:
        def keep(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
            handle.remove()
            out.register_hook(lambda gradient: found.__setitem__(name, gradient.detach().clone()))

        handle = layer.register_forward_hook(keep)

    for name in layers_of(model):
        watch(name, model.get_submodule(name))
    return found


def layers_of(model: nn.Module) -> list[str]:
    """The layers that multiply, each of which is a site."""
    return [name.rpartition(".")[0] for name, parameter in model.named_parameters() if parameter.dim() > 1]


def count(found: dict, step: int, plain: nn.Module, stored: dict, loss, inputs, targets) -> None:
    """Run a step again in float32, and compare every layer's gradient with what was stored."""
    true = gradients_of(plain)
    plain.zero_grad()
    loss(plain(inputs), targets).backward()
    need, limit, underflow = {}, {}, {}
    for name, gradient in true.items():
        given = gradient != 0
        kept = hu.quantize(stored[name], FORMAT, overflow="inf")
        underflow[name] = float(((kept == 0) & given).sum() / given.sum())
        need[name] = needed(gradient[given].abs())
        weight = plain.get_submodule(name).weight.grad
        limit[name] = overflows(max(float(gradient.abs().max()), float(weight.abs().max())))
    for field, values in (("need", need), ("limit", limit), ("underflow", underflow)):
        found[field].append([values[name] for name in found["layers"]])
    found["steps"].append(step)


def needed(sizes: torch.Tensor) -> int:
    """The least exponent under which at most the share of these magnitudes is rounded to zero."""
    lost = int(SHARE * len(sizes))
    smallest = float(sizes.kthvalue(lost + 1).values)
    # Half of the smallest number, a tie, goes to zero.
    fraction, exponent = math.frexp(smallest / (FORMAT.smallest_subnormal / 2))
    return -exponent + (2 if fraction == 0.5 else 1)


def overflows(largest: float) -> int:
    """The least exponent under which a magnitude is rounded to infinity."""
    bound = 2.0**FORMAT.emax * (2 - FORMAT.eps / 2)
    return math.ceil(math.log2(bound / largest))


def in_force(lines: list[dict], step: int, layers: list[str]) -> list[int]:
    """The exponents of a step: a line holds those from its iteration on."""
    before = [line["sites"] for line in lines if line["iteration"] <= step]
    rows = {row["site"]: row["exponent"] for row in before[-1]} if before else {}
    return [rows.get(layer, rows.get("global", START)) for layer in layers]


def draw_map(found: dict, figure) -> None:
    """Of each layer the exponents that serve it, over training, and those that it had."""
    names = list(POLICIES)
    one, own = (found[name] for name in names)
    layers = own["layers"]
    panels = list(figure.subplots(2, math.ceil(len(layers) / 2), sharex=True, sharey=True).flat)
    for i, (axes, layer) in enumerate(zip(panels, layers)):
        need, limit = [row[i] for row in own["need"]], [row[i] - 1 for row in own["limit"]]
        serves = [low <= high for low, high in zip(need, limit)]
        axes.fill_between(own["steps"], need, limit, where=serves, color="#9cc9a3", lw=0, label="serves the layer")
        axes.plot(one["steps"], [row[i] for row in one["exponents"]], color="#c0392b", lw=1.2, label=names[0])
        axes.plot(own["steps"], [row[i] for row in own["exponents"]], color="#1f6fb4", lw=1.2, label=names[1])
        axes.set_title(layer, fontsize=8)
    for axes in panels[len(layers) :]:
        axes.axis("off")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("exponent of the scale", fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)


def draw_underflow(found: dict, figure) -> None:
    """The share of each layer's gradient that underflowed, over training."""
    from matplotlib.colors import LogNorm

    grids = figure.subplots(1, len(POLICIES), sharey=True)
    norm = LogNorm(1e-5, 1)
    for axes, name in zip(grids, POLICIES):
        shares = torch.tensor(found[name]["underflow"]).T.clamp(min=norm.vmin)
        image = axes.pcolormesh(found[name]["steps"], range(len(shares)), shares, norm=norm, cmap="magma_r", zorder=2)
        axes.set(title=name, xlabel="step")
        axes.set_yticks(range(len(shares)), found[name]["layers"])
    grids[0].invert_yaxis()
    figure.colorbar(image, ax=grids, label="share that underflows", extend="min")


FIGURES = {"gradient-map": (draw_map, (9.4, 4.4)), "gradient-underflow": (draw_underflow, (8.4, 3.2))}


def main() -> None:
    """Train, write the numbers, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redraw", action="store_true", help="from the numbers of the last run")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()
    if chosen.redraw:
        found = json.loads(NUMBERS.read_text())
    else:
        found = {name: train(policy) for name, policy in POLICIES.items()}
        found |= {"torch": torch.__version__, "processor": platform.machine(), "format": FORMAT.name, "share": SHARE}
        NUMBERS.write_text(json.dumps(found) + "\n")
    for name, (paint, size) in FIGURES.items():
        plots.draw(name, found, paint, size)
    print(f"{time.process_time() - start:.1f} s")


if __name__ == "__main__":
    main()
