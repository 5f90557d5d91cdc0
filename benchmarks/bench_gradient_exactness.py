"""On which architectures gradient exponents are exact: `python -m benchmarks.bench_gradient_exactness`."""

import argparse
import random
import warnings

from ._results import Result, Table, save

TEXT = """Every architecture of tests/gradients/models/architectures.py, tiny, with random weights. Eager and \
compiled: gradients of all parameters in float32 under random exponents from -12 to 24, another draw for each of \
three trials, against plain backward (compiled: by torch's aot_eager backend, with and without exponents; Inductor: \
by that, for the architectures that the script lists); a gradient counts where every bit is equal. "Not compiled" is \
where torch breaks the graph so that no site is left in it. Inductor cuts an expression by how much it reads, and \
with that decides what it computes with vectors and what one by one (exp, a sum), in other last bits; a factor is one \
read more. Where bits differ, the same without vectors (cpp.simdlen=1, with and without exponents) tells whether that \
is the cause. float16: under autocast, against torch.amp.GradScaler at 2^8, with one scale for all (policy \
"constant"), and with edges at equal exponents, where sums over the uses of a parameter, and of outputs, are made in \
float32 and not in float16, so that some differ in last bits. A dash is where torch itself cannot run the model so."""
TRIALS = 3
COLUMNS = (
    *("architecture", "sites", "eager", "compiled sites", "compiled", "Inductor", "Inductor, no vectors"),
    *("float16", "float16, edges", "bar", "met"),
)
PARTS = ("eager", "compiled", "Inductor", "float16")
# A few of each family: Inductor takes half a minute for one.
INDUCTOR = (
    *("gpt", "gpt-fused-tied", "vit", "multihead-attention", "linear-attention", "moe-returned-auxiliary", "lstm-cell"),
    *("multilayer-perceptron", "deep-perceptron", "tied-autoencoder", "siamese", "bilinear", "highway", "loss-inside"),
    *("straight-through", "swish-function", "checkpoint-non-reentrant", "in-place-columns", "complex-layers"),
    *("resnet", "unet", "conv3d", "mixer", "hf-llama", "hf-convnext", "hf-mixtral"),
)


def names() -> list[str]:
    """Ours, then transformers'."""
    from tests.gradients.models.architectures import ARCHITECTURES, HF

    return [*ARCHITECTURES, *(name if name.startswith("hf-") else f"hf-{name}" for name in HF)]


def case(name: str, seed: int):
    """A model, its batch and its loss, always the same for a seed."""
    import torch
    from tests.gradients.models.architectures import build

    torch.manual_seed(seed)
    return build(name, seed)


def gradients(made, model, scale, seed: int) -> dict:
    """The parameters' gradients of one step, by the loss that ``scale`` makes of the model's."""
    import torch

    torch.manual_seed(seed)
    made.model.zero_grad()
    batch = made.batch
    out = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
    scale(made.loss(out)).backward()
    return {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}


def exact(name: str, seed: int, backend: str | None = None, **options) -> tuple[int, int, int]:
    """Equal gradients in the worst trial, all gradients, and sites."""
    import torch

    import halfulp as hu

    def built(scaler_of=None):
        torch._dynamo.reset()
        made = case(name, seed)
        scaler = None if scaler_of is None else scaler_of(made.model)
        if backend is None:
            return made, made.model, scaler
        chosen = backend if scaler is None else scaler.backend(backend)
        return made, torch.compile(made.model, backend=chosen, options=options or None), scaler

    made, model, _ = built()
    wanted = gradients(made, model, lambda loss: loss, seed)
    draw, worst, sites = random.Random(seed), len(wanted), 0
    made, model, scaler = built(hu.AdaptiveGradScaler)
    state = {key: value.clone() for key, value in made.model.state_dict().items()}
    gradients(made, model, scaler.scale, seed)
    for _ in range(TRIALS):
        made.model.load_state_dict(state)
        keys = [row.site for row in scaler.sites().rows]
        sites = len(keys)
        scaler.set_exponents({key: draw.randint(-12, 24) for key in keys})
        found = gradients(made, model, scaler.scale, seed)
        equal = sum(torch.equal(found[key] / scaler.get_scale(), value) for key, value in wanted.items())
        worst = min(worst, equal)
    return worst, len(wanted), sites


def half(name: str, seed: int, policy: str) -> bool | None:
    """Whether float16 gradients under equal exponents are GradScaler's; None where torch cannot run it."""
    import torch

    import halfulp as hu

    found = []
    for kind in (torch.amp.GradScaler, hu.AdaptiveGradScaler):
        made = case(name, seed)
        adaptive = kind is hu.AdaptiveGradScaler
        scaler = kind(made.model, policy=policy, init_scale=256.0) if adaptive else kind("cpu", init_scale=256.0)
        try:
            with torch.autocast("cpu", torch.float16):
                found.append(gradients(made, made.model, scaler.scale, seed))
        except (RuntimeError, ValueError):
            if adaptive:
                raise
            return None
    plain, ours = found
    return plain.keys() == ours.keys() and all(
        torch.equal(plain[key].nan_to_num(), ours[key].nan_to_num()) for key in plain
    )


def compared(name: str, seed: int, backend: str, **options) -> tuple[str, int]:
    """How many gradients of a compiled model are equal, and its sites."""
    try:
        equal, total, sites = exact(name, seed, backend, **options)
    except Exception as error:
        return type(error).__name__, 0
    return (f"{equal} of {total}" if sites > 1 else "not compiled"), sites


def measured(part: str, name: str, seed: int) -> dict:
    """The cells of one architecture in one part of the table."""
    if part == "eager":
        equal, total, sites = exact(name, seed)
        return {"sites": sites, "eager": f"{equal} of {total}"}
    if part == "compiled":
        words, sites = compared(name, seed, "aot_eager")
        return {"compiled": words, "compiled sites": sites}
    if part == "Inductor":
        words, _ = compared(name, seed, "inductor")
        again = None if whole(words) else compared(name, seed, "inductor", **{"cpp.simdlen": 1})[0]
        return {"Inductor": words, "Inductor, no vectors": again}
    found = {"float16": half(name, seed, "constant"), "float16, edges": half(name, seed, "amax")}
    return {column: "–" if same is None else same for column, same in found.items()}


def whole(cell: str | bool | None) -> bool | None:
    """Whether all is equal; None where there was nothing to compare."""
    if not isinstance(cell, str):
        return cell
    equal, _, total = cell.partition(" of ")
    return None if cell in ("–", "not compiled") else equal == total


def add_bars(table: Table) -> None:
    """The rows that count the others."""
    rows = list(table.rows)
    bars = {"eager": 30, "compiled": 10, "Inductor": 10, "Inductor, no vectors": 0, "float16": 0}
    for column, least in bars.items():
        found = [same for row in rows if (same := whole(row.get(column))) is not None]
        table.add(
            architecture="equal to GradScaler" if column == "float16" else f"all bits equal, {column}",
            **{column: f"{sum(found)} of {len(found)}"},
            bar=f">= {least}" if least else "all",
            met=sum(found) >= (least or len(found)),
        )


def main() -> None:
    """One line per architecture."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="the others stay as the file has them")
    parser.add_argument("--inductor", nargs="*", default=INDUCTOR, metavar="NAME", help="what it compiles, or all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result = Result(
        "gradient_exactness", "Exactness of gradient exponents", TEXT, "python -m benchmarks.bench_gradient_exactness"
    )
    kept = {} if given.only == PARTS else result.earlier_rows("architecture")
    table = Table("Exactness by architecture", dict.fromkeys(COLUMNS, ""))
    for name in names():
        row = {**kept.get((name,), {}), "architecture": name}
        for part in given.only:
            if part != "Inductor" or name in given.inductor or "all" in given.inductor:
                row |= measured(part, name, given.seed)
        table.add(**row)
        print(row, flush=True)
    add_bars(table)
    result.tables.append(table)
    save(result)


if __name__ == "__main__":
    main()
