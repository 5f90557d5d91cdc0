"""Scaled training from starts of any magnitude and under any scale: `python -m benchmarks.bench_scaled_starts`."""

import argparse
import functools
import statistics

from ._results import Result, Table, save

TEXT = """A network of 64-128-10 for scikit-learn's digits, SGD with momentum .9 and learning rate .02, 900 steps of \
32, from a random start. Magnitudes: weights and biases of the start times 2^k, so that every method starts from other \
values, and float32 is what to compare with; its twin, whose start differs by 1e-7, shows what a difference must \
exceed to mean anything. Scales: the same values under scales 2^k times the measured ones. No method has a loss scale \
or a constant of its own. Losses are those of the decoded weights in float32, on the images held out."""
EXPONENTS = (-8, -4, 0, 4, 10)
STEPS = 900
# Gaps below this share of the loss, or below the twin's, are the same result.
BAR = 0.003
METHODS = {
    "float32": ("float32", None, None, None),
    "float32, twin": ("float32", None, None, None),
    "float16": ("float16", None, "nearest", None),
    "scaled float16, Kahan": ("scaled", None, "kahan", "float16"),
    "scaled float16, stochastic": ("scaled", None, "stochastic", "float16"),
    "scaled float16, Kahan, fp8 products": ("scaled", "fp8", "kahan", "float16"),
    "float32, fp8 products": ("scaled float32", "fp8", None, None),
}


def start(seed: int, power: int, nudge: float = 0.0):
    """A network whose parameters are 2^power times those of the seed, each off by a nudge."""
    import torch

    from halfulp.trials.tasks._digits import make_digits_network

    torch.manual_seed(seed)
    model = make_digits_network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0**power * (1 + nudge * torch.randn_like(parameter)))
    return model


def trained(method: str, model, task, data, seed: int, shift: int = 0):
    """The optimizer after training in one method's formats, and the model; None where a loss is not finite."""
    import torch

    import halfulp as hu

    kind, matmul, update, state = METHODS[method]
    if kind.startswith("scaled"):
        storage = torch.float32 if kind == "scaled float32" else torch.float16
        hu.scalify(model, storage, matmul)
        for parameter in model.parameters():
            parameter.data = hu.ScaledTensor.encode(parameter.detach().decode(), storage, parameter.scale * 2.0**shift)
    else:
        model.to(getattr(torch, kind))
    options = {"weight_update": update} if update else {}
    options |= {"state_dtype": getattr(torch, state)} if state else {}
    optimizer = hu.optim.SGD(model.named_parameters(), lr=0.02, momentum=0.9, seed=seed, **options)
    for inputs, targets in task.batches(data, seed, STEPS):
        loss = task.loss(model(inputs.to(next(model.parameters()).dtype)), targets)
        loss.backward()
        if not bool(loss.detach().isfinite()):
            return None
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.float32_state_dict(model)


@functools.cache
def scores(method: str, seed: int, power: int = 0, shift: int = 0) -> tuple[float, float]:
    """The validation loss and the share of images that are right; infinity and 0 after a divergence."""
    from halfulp.trials.running._trial import evaluate_model
    from halfulp.trials.tasks._digits import Digits

    task = Digits()
    data = task.load()
    found = trained(method, start(seed, power, 1e-7 if "twin" in method else 0.0), task, data, seed, shift)
    if found is None:
        return float("inf"), 0.0
    model = start(seed, 0)
    model.load_state_dict(found)
    measured = evaluate_model(task, model, task.loss, data.validation)
    return float("inf") if measured["loss"] is None else measured["loss"], measured["accuracy"]


def table(title: str, rows, seeds: int) -> Table:
    """One row per method and exponent: its losses beside float32's from the same starts."""
    columns = {"start": "", "method": "", "loss": ".5g", "float32": ".5g", "gap": "+.2%", "largest |gap|": ".2%"}
    note = f"Means over {seeds} seeds. The bar is {BAR:.1%}, or float32's own gap to its twin."
    made = Table(
        title,
        columns | {"images right": ".2%", "bar": "", "met": ""},
        note=note,
    )
    for label, method, power, shift in rows:
        found, twins, wanted = (
            [scores(name, seed, power, moved) for seed in range(seeds)]
            for name, moved in ((method, shift), ("float32, twin", 0), ("float32", 0))
        )
        loss, twin, reference = (statistics.fmean(x for x, _ in runs) for runs in (found, twins, wanted))
        gap, limit = loss / reference - 1, max(BAR, abs(twin / reference - 1))
        gaps = [abs(x - y) / y for (x, _), (y, _) in zip(found, wanted)]
        cells = {"largest |gap|": max(gaps), "images right": statistics.fmean(x for _, x in found)}
        made.add(start=label, method=method, loss=loss, float32=reference, gap=gap, **cells)
        if method.startswith("scaled"):
            made.rows[-1] |= {"bar": f"|gap| <= {limit:.1%}", "met": abs(gap) <= limit}
        print(label, method, loss, reference, flush=True)
    return made


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    others = [method for method in METHODS if method != "float32"]
    scaled = [method for method in METHODS if method.startswith("scaled")]
    magnitudes = [(f"x 2^{power}", method, power, 0) for power in EXPONENTS for method in others]
    shifts = [(f"scale x 2^{shift}", method, 0, shift) for shift in EXPONENTS if shift for method in scaled]
    result = Result("scaled_starts", "Scaled training from any start", TEXT, "python -m benchmarks.bench_scaled_starts")
    result.tables.append(table("Starts of other magnitudes", magnitudes, chosen.seeds))
    result.tables.append(table("The same start under other scales", shifts, chosen.seeds))
    save(result)


if __name__ == "__main__":
    main()
