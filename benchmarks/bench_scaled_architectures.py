"""Scaled tensors in unmodified Hugging Face architectures: `python -m benchmarks.bench_scaled_architectures`."""

import argparse
import copy
import json
import math
import statistics
import time
import warnings
from pathlib import Path

from ._architectures import ARCHITECTURES, build
from ._results import Result, Table, save

TEXT = """Tiny random configurations of transformers' classes, unmodified; one forward and one backward pass of the \
model's own loss. The errors are the norm of the difference of all gradients to plain float32's over their norm; in \
brackets those of the plain model in float64, which is float32's own error, and in float16. `bit-equal` is the share \
of parameters whose gradient has the same bits with a float32 payload, `fallbacks` what ran without a rule. The bar \
with a float32 payload is 1e-6, or twice float32's own error where that is larger; with a float16 payload 1e-2 and no \
fallback. Where activations have kinks (ReLU) or experts are chosen, 16 bits take single ones across, which in so \
small a model is a large share."""
FLOAT32_BAR, FLOAT16_BAR = 1e-6, 1e-2


def gradients(model, batch):
    """The loss and the gradients of every parameter that has one, as float64."""
    import torch

    import halfulp as hu

    torch.manual_seed(0)  # of what a model draws as it runs: the noise of a mixture's gate
    output = model(**batch)
    loss = output.loss if getattr(output, "loss", None) is not None else output.last_hidden_state.square().mean()
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.decode(torch.float64) if isinstance(grad, hu.ScaledTensor) else grad.double()
    return loss.item(), found


def error(ours, wanted):
    """The norm of the difference of all gradients over their norm."""
    difference = sum((ours[name] - grad).square().sum().item() for name, grad in wanted.items())
    return math.sqrt(difference / sum(grad.square().sum().item() for grad in wanted.values()))


def measure(name: str, seed: int = 0) -> dict:
    """One architecture: errors and fallbacks with float32 and float16 payloads."""
    import torch

    import halfulp as hu

    torch.manual_seed(seed)
    kind, model, batch = build(name)
    loss, wanted = gradients(copy.deepcopy(model), batch)
    row = {"architecture": name, "kind": kind}
    for label, dtype in (("noise", torch.float64), ("plain float16", torch.float16)):
        other = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        try:
            row[label] = error(gradients(copy.deepcopy(model).to(dtype), other)[1], wanted)
        except RuntimeError:  # an operator or a class that does not know this dtype
            row[label] = None
    for label, dtype in (("float32", torch.float32), ("float16", torch.float16)):
        scaled = hu.scalify(copy.deepcopy(model), dtype)
        found_loss, found = gradients(scaled, batch)
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        row[label] = error(found, wanted)
        row[f"loss {label}"] = abs(found_loss - loss) / max(abs(loss), 1e-30)
        row["fallbacks"] = hu.fallbacks(scaled)
        if dtype == torch.float32:
            row["bit-equal"] = sum(torch.equal(found[k], wanted[k]) for k in wanted) / len(wanted)
            row["worst"] = max(wanted, key=lambda k: (found[k] - wanted[k]).norm().item())
    return row


def over_seeds(name: str, seeds: int) -> dict:
    """One architecture from several starts: the largest errors in float32, the median ones in float16."""
    runs = [measure(name, seed) for seed in range(seeds)]
    row = max(runs, key=lambda run: run["float32"])
    for label, combine in (("noise", max), ("plain float16", statistics.median), ("float16", statistics.median)):
        values = [run[label] for run in runs]
        row[label] = None if None in values else combine(values)
    row["bit-equal"] = min(run["bit-equal"] for run in runs)
    row["fallbacks"] = {name: count for run in runs for name, count in run["fallbacks"].items()}
    return row


def main() -> None:
    """Measures all or some, prints a table and writes it."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for the raw rows, beside the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = arguments.names or list(ARCHITECTURES)
    rows, failed = [], []
    for name in names:
        start = time.process_time()
        try:
            row = over_seeds(name, arguments.seeds)
        except Exception as problem:
            failed.append(
                (name, f"{type(problem).__name__}: {str(problem).splitlines()[0][:300] if str(problem) else ''}")
            )
            print(f"{name:30} FAILED {failed[-1][1]}", flush=True)
            continue
        rows.append(row)
        errors = f"{row['float32']:.1e} ({row['noise'] or 0:.0e}) {row['bit-equal']:5.0%} {row['float16']:.1e}"
        print(f"{name:30} {errors} {time.process_time() - start:5.1f} s {row['fallbacks'] or ''}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"rows": rows, "failed": failed}, indent=1))
    if arguments.names:
        return
    save(result(rows, failed, arguments.seeds))


def result(rows: list[dict], failed: list[tuple[str, str]], seeds: int) -> Result:
    """The rows as a table with bars."""
    columns = {
        "architecture": "",
        "kind": "",
        "float32 payload": "",
        "bit-equal": "",
        "float16 payload": "",
        "fallbacks": "",
    }
    table = Table("gradients of scaled models against plain float32", columns)
    for row in rows:
        most = max(FLOAT32_BAR, 2 * (row["noise"] or 0.0))
        met = row["float32"] <= most and row["float16"] <= FLOAT16_BAR and not row["fallbacks"]
        noise, plain = ("" if x is None else f" ({x:.0e})" for x in (row["noise"], row["plain float16"]))
        cells = {"float32 payload": f"{row['float32']:.1e}{noise}", "float16 payload": f"{row['float16']:.1e}{plain}"}
        counts = ", ".join(f"{name} {count}" for name, count in row["fallbacks"].items())
        bits = {"bit-equal": f"{row['bit-equal']:.0%}", "fallbacks": counts}
        bar = f"{most:.0e} and 1e-2, no fallback"
        table.add(architecture=row["architecture"], kind=row["kind"], **cells, **bits, bar=bar, met=met)
    for name, why in failed:
        table.add(architecture=name, kind=ARCHITECTURES[name][0], fallbacks=why, bar="runs", met=False)
    met = sum(row["met"] for row in table.rows)
    equal = sum(row["bit-equal"] == 1 for row in rows)
    table.note = (
        f"{seeds} starts each: the largest error in float32, the median in float16. {met} of {len(table.rows)} meet "
        f"the bar; {equal} are bit-equal"
    )
    command = "python -m benchmarks.bench_scaled_architectures"
    return Result("scaled_architectures", "Scaled Hugging Face models", TEXT, command, tables=[table])


if __name__ == "__main__":
    main()
