"""Runs the small experiments of the pages and draws them: `python docs/plots.py [name ...]`.

Figures go to docs/img/, the numbers behind them to docs/results/plots.json, from where docs/fill.py takes what the
pages quote.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import halfulp as hu

HERE = Path(__file__).resolve().parent
NUMBERS = HERE / "results" / "plots.json"
COLOURS = {
    "nearest": "#c0392b",
    "stochastic": "#d98200",
    "kahan, nearest residual": "#8e6bbf",
    "kahan": "#1f6fb4",
    "split8": "#0f8a7e",
    "split": "#2d7d2d",
    "feedback": "#b0529c",
    "feedback, nearest moment": "#e3a5d6",
    "master": "#555555",
}


def theorem1(steps: int = 20_000, replicas: int = 16) -> dict:
    """SGD on least squares that has an exact solution, in bfloat16 values: the final distance by learning rate."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 10, generator=generator)
    inputs /= inputs.square().sum(1).max().sqrt()  # every term is 1-smooth: L = 1
    solution = 10 + 90 * torch.rand(10, generator=generator)
    rates = [0.5, 0.3, 0.15, 0.08, 0.04, 0.02]
    distances = {}
    for name, options in {
        "float32": {},
        "nearest": {"format": "bf16", "weight_update": "nearest"},
        "stochastic": {"format": "bf16", "weight_update": "stochastic"},
        "kahan": {"format": "bf16", "weight_update": "kahan"},
    }.items():
        weights = [torch.nn.Parameter(torch.zeros(replicas, 10)) for _ in rates]
        groups = [{"params": [weight], "lr": rate} for weight, rate in zip(weights, rates)]
        optimizer = hu.optim.SGD(groups, lr=0.1, report_interval=0, **options)
        total = torch.zeros(len(rates))
        draws = torch.Generator().manual_seed(1)
        for step in range(steps):
            x = inputs[torch.randint(len(inputs), (replicas,), generator=draws)]
            stacked = torch.stack([weight.detach() for weight in weights])
            gradients = ((stacked - solution) * x).sum(-1, keepdim=True) * x
            for weight, gradient in zip(weights, gradients):
                weight.grad = gradient
            optimizer.step()
            if step >= steps * 9 // 10:
                total += (stacked - solution).norm(dim=-1).mean(1)
        distances[name] = (total / (steps - steps * 9 // 10)).tolist()
    smallest, eps = float(solution.min()), 2.0**-9
    floor = [min(eps * (1 - rate) / (rate + eps) * smallest, float(solution.norm())) for rate in rates]
    shown = float((solution.bfloat16().float() - solution).norm())
    return {"rates": rates, "distances": distances, "floor": floor, "nearest bfloat16 to w*": shown, "steps": steps}


def draw_theorem1(found: dict, figure) -> None:
    """Distance against the learning rate."""
    axes = figure.subplots()
    for name, values in found["distances"].items():
        colour = "#111111" if name == "float32" else COLOURS[name]
        axes.plot(found["rates"], [max(v, 1e-6) for v in values], "o-", color=colour, label=name, markersize=4)
    axes.plot(found["rates"], found["floor"], "--", color="#c0392b", alpha=0.6, label="floor of theorem 1")
    axes.axhline(
        found["nearest bfloat16 to w*"], color="#999999", lw=1, ls=":", label="w* rounded to bfloat16, nothing else"
    )
    axes.set(xscale="log", yscale="log", xlabel="learning rate x L", ylabel="|w - w*| at the end")
    axes.set_xticks(found["rates"], [f"{rate:g}" for rate in found["rates"]])
    axes.minorticks_off()
    _legend_beside(axes)


def _legend_beside(axes) -> None:
    """The legend to the right of the axes, where no curve runs."""
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))


def drift(steps: int = 2000, elements: int = 4096) -> dict:
    """A constant small update, as a share of the weight: how much of the way each weight update went."""
    exponents = list(range(-8, -23, -1))
    found: dict[str, dict[str, list[float]]] = {}
    for name in COLOURS:
        update, _, variant = name.partition(", ")
        update = hu.Kahan(residual=hu.Nearest()) if variant == "nearest residual" else update
        momentum = 0.9 if update == "feedback" else 0.0  # feedback lives in the first moment
        rounding = "nearest" if variant == "nearest moment" else "stochastic"
        options = {"momentum": momentum, "state_dtype": hu.optim.State(torch.bfloat16, rounding=rounding)}
        model = torch.nn.ParameterList()
        for _ in exponents:
            start = 0.01 + 0.02 * torch.rand(elements, generator=torch.Generator().manual_seed(3))
            model.append(torch.nn.Parameter(start.bfloat16()))
        optimizer = hu.optim.SGD(
            model.named_parameters(), lr=1.0 - momentum, weight_update=update, report_interval=0, **options
        )
        before = [weight.detach().double() for weight in model]
        for weight, exponent in zip(model, exponents):
            weight.grad = -(weight.detach() * 2.0**exponent)
        for _ in range(steps):
            optimizer.step()
        whole = steps - momentum / (1 - momentum) * (1 - momentum**steps)
        means, deviations = [], []
        for first, weight, decoded in zip(before, model, optimizer.float32_state_dict(model).values()):
            kept = (decoded.double() - first) / (whole * -weight.grad.double())
            means.append(float(kept.mean()))
            deviations.append(float(kept.std()))
        found[name] = {"mean": means, "deviation": deviations}
    return {"exponents": exponents, "steps": steps, "kept": found}


def draw_drift(found: dict, figure) -> None:
    """Mean and spread of what was kept, by the size of the update."""
    left, right = figure.subplots(1, 2)
    for name, kept in found["kept"].items():
        style = {"marker": "o", "markersize": 3, "color": COLOURS[name], "ls": "--" if name == "split" else "-"}
        over = {"zorder": 3 if name == "split" else 2}  # split and master go the same way
        left.plot(found["exponents"], kept["mean"], label=name, **style, **over)
        spread = [value if value > 1e-6 else math.nan for value in kept["deviation"]]
        right.plot(found["exponents"], spread, **style, **over)
    left.set(ylabel=f"share of {found['steps']:,} updates kept", ylim=(-0.1, 1.6))
    right.set(ylabel="its standard deviation over elements", yscale="log")
    for axes in (left, right):
        axes.set(xlabel="log2 of |u| / |w|")
        axes.invert_xaxis()
    left.legend(fontsize=7, frameon=False, ncols=2, loc="upper left")


def moment(before: int = 2000, after: int = 6000, elements: int = 4096) -> dict:
    """The stored second moment after gradients have shrunk tenfold, over the exact one."""
    choices = {
        "bfloat16, nearest": hu.optim.State(torch.bfloat16, rounding="nearest"),
        "bfloat16, stochastic": hu.optim.State(torch.bfloat16),
        "8 bits": hu.optim.State("8bit"),
        "float32": hu.optim.State(torch.float32),
    }
    marks, ratios = list(range(250, before + after + 1, 250)), {}
    for name, state in choices.items():
        weight = torch.nn.Parameter(torch.ones(elements, dtype=torch.bfloat16))
        optimizer = hu.optim.AdamW([weight], lr=1e-6, betas=(0.9, 0.999), state_dtype=state, report_interval=0)
        exact = torch.zeros(elements, dtype=torch.float64)
        generator = torch.Generator().manual_seed(2)
        ratios[name] = []
        for step in range(1, before + after + 1):
            gradient = torch.randn(elements, generator=generator) * (1.0 if step <= before else 0.1)
            weight.grad = gradient.bfloat16()
            exact.mul_(0.999).add_(weight.grad.double().square(), alpha=0.001)
            optimizer.step()
            if step in marks:
                held = optimizer.state[weight]
                stored = held["exp_avg_sq"].double()
                if "exp_avg_sq_scale" in held:
                    each = elements // held["exp_avg_sq_scale"].numel()
                    stored = (stored * held["exp_avg_sq_scale"].double().repeat_interleave(each) / 255).square()
                ratios[name].append(float((stored.sum() / exact.sum()).sqrt()))
    return {"steps": marks, "drop after": before, "ratios": ratios}


def draw_moment(found: dict, figure) -> None:
    """Stored over exact against steps."""
    axes = figure.subplots()
    colours = dict(zip(found["ratios"], ("#c0392b", "#1f6fb4", "#0f8a7e", "#111111")))
    for name, values in found["ratios"].items():
        axes.plot(
            found["steps"], values, color=colours[name], label=name, lw=1.6, ls="--" if name == "float32" else "-"
        )
    axes.axvline(found["drop after"], color="#999999", lw=1, ls=":")
    axes.set(xlabel="step", ylabel="stored sqrt(v) / exact sqrt(v)", yscale="log")
    axes.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axes.legend(fontsize=8, frameon=False)


def errors(elements: int = 1 << 16) -> dict:
    """The relative error of rounding normal numbers, by their standard deviation."""
    names = ["fp16", "bf16", "e5m2", "e4m3fn", "mxfp8_e4m3", "mxfp4", "nvfp4"]
    numbers = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    exponents = list(range(-30, 25))
    found = {}
    for name in names:
        found[name] = []
        for exponent in exponents:
            x = numbers * 2.0**exponent
            # float64 sums: squares of the smallest numbers are subnormal in float32
            wrong = (hu.quantize(x, name, overflow=None).double() - x.double()).norm() / x.double().norm()
            found[name].append(float(wrong) if math.isfinite(wrong) else None)
    return {"log2 of the deviation": exponents, "errors": found}


def draw_errors(found: dict, figure) -> None:
    """Error against scale."""
    axes = figure.subplots()
    for name, values in found["errors"].items():
        shown = [math.nan if value is None else value for value in values]
        style = "--" if name.startswith(("mx", "nv")) else "-"
        axes.plot(found["log2 of the deviation"], shown, style, label=name, lw=1.5)
    axes.set(yscale="log", xlabel="log2 of the numbers' standard deviation", ylabel="relative error (rms)")
    axes.set_ylim(1e-4, 2)
    _legend_beside(axes)


def memory() -> dict:
    """Bytes per parameter of AdamW on one matrix, gradient included, as the optimizers count them."""
    choices = [("float32", None)] + [
        (update, state)
        for update in ("nearest", "stochastic", "feedback", "kahan", "split8", "split", "master")
        for state in ("bfloat16", "8bit")
    ]
    choices.append(("split", "float32"))
    rows = []
    for update, state in choices:
        dtype = torch.float32 if update == "float32" else torch.bfloat16
        weight = torch.nn.Parameter(torch.ones(1024, 1024, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        narrow = {} if update == "float32" else {"weight_update": update, "state_dtype": hu.optim.State(state)}
        optimizer = hu.optim.AdamW([weight], lr=1e-3, **narrow)
        optimizer.step()
        held = optimizer.state[weight]
        states = [value for name, value in held.items() if name.startswith("exp_avg")]
        companions = [v for n, v in held.items() if isinstance(v, torch.Tensor) and not n.startswith("exp_avg")]

        def each(tensors: list[torch.Tensor], count: int = weight.numel()) -> float:
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / count

        rows.append(
            {
                "update": update,
                "state": state or "float32",
                "weight": dtype.itemsize,
                "companion": each(companions),
                "states": each(states),
                "gradient": weight.grad.element_size(),
                "total": optimizer.bytes_per_parameter(),
            }
        )
    return {"rows": rows}


def many_tensors() -> dict:
    """A step by the number of tensors, as benchmarks/bench_many_tensors.py has measured it."""
    result = json.loads((HERE.parent / "benchmarks" / "results" / "many_tensors.json").read_text())
    return {"rows": result["tables"][0]["rows"], "measured on": result["machine"]["processor"]}


def draw_many_tensors(found: dict, figure) -> None:
    """Seconds of the first and of later steps, and microseconds per tensor."""
    whole, each = figure.subplots(1, 2)
    colours = {"halfulp stochastic": "#d98200", "halfulp split8": "#0f8a7e"}
    for name in dict.fromkeys(row["optimizer"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["optimizer"] == name]
        counts = [row["tensors"] for row in rows]
        colour = colours.get(name, "#555555")
        for when, style, mark in (("first", "--", "o"), ("later", "-", "s")):
            own = "" if name in colours else ":" if name.endswith("loop") else style
            line = {"color": colour, "marker": mark, "ms": 3, "ls": own or style, "label": f"{name}, {when}"}
            whole.loglog(counts, [row[f"{when} s"] for row in rows], **line)
            each.loglog(counts, [row[f"{when} us each"] for row in rows], **line)
    whole.set(xlabel="tensors", ylabel="seconds of a step")
    each.set(xlabel="tensors", ylabel="microseconds per tensor")
    _legend_beside(each)


FIGURES: dict[str, tuple[Callable[[], dict], Callable | None, tuple[float, float]]] = {
    "theorem1": (theorem1, draw_theorem1, (7.6, 3.6)),
    "drift": (drift, draw_drift, (9.0, 3.8)),
    "moment": (moment, draw_moment, (6.0, 3.4)),
    "errors": (errors, draw_errors, (7.4, 3.6)),
    "memory": (memory, None, (0, 0)),
    "many-tensors": (many_tensors, draw_many_tensors, (9.0, 3.6)),
}


def draw(name: str, found: dict, paint: Callable, size: tuple[float, float]) -> None:
    """Write docs/img/<name>.svg, the same bytes for the same numbers."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "path", "font.size": 9}
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    paint(found, figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, lw=0.5)
    (HERE / "img").mkdir(exist_ok=True)
    figure.savefig(HERE / "img" / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white")


def main() -> None:
    """All figures, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--redraw", action="store_true", help="from the numbers of the last run")
    chosen = parser.parse_args()
    names = chosen.names or list(FIGURES)
    unknown = sorted(set(names) - set(FIGURES))
    if unknown:
        parser.error(f"no figure {', '.join(unknown)}: there are {', '.join(FIGURES)}")
    torch.set_num_threads(1)
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for name in names:
        start = time.process_time()
        found = numbers[name] if chosen.redraw else FIGURES[name][0]()
        numbers[name] = found | {"torch": torch.__version__, "processor": platform.machine()}
        _, paint, size = FIGURES[name]
        if paint is not None:
            draw(name, found, paint, size)
        print(f"{name}: {time.process_time() - start:.1f} s")
    NUMBERS.parent.mkdir(exist_ok=True)
    NUMBERS.write_text(json.dumps({name: numbers[name] for name in FIGURES if name in numbers}, indent=1) + "\n")


if __name__ == "__main__":
    main()
