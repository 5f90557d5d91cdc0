"""On which architectures gradient exponents are exact: `python -m benchmarks.bench_gradient_exactness`."""

import argparse
import random
import warnings

from ._results import Result, Table, save

TEXT = """Every architecture of tests/gradients/architectures.py, tiny, with random weights. Eager and compiled: \
gradients of all parameters in float32 under random exponents from -12 to 24, another draw for each of three trials, \
against plain backward (compiled: by torch's aot_eager backend, with and without exponents); a gradient counts where \
every bit is equal. float16: under autocast, against torch.amp.GradScaler at 2^8, with one scale for all (policy \
"constant"), and with edges at equal exponents, where sums over the uses of a parameter, and of outputs, are made in \
float32 and not in float16, so that some differ in last bits. A dash is where torch itself cannot run the model so."""
TRIALS = 3


def names() -> list[str]:
    """Ours, then transformers'."""
    from tests.gradients.architectures import ARCHITECTURES, HF

    return [*ARCHITECTURES, *(name if name.startswith("hf-") else f"hf-{name}" for name in HF)]


def case(name: str, seed: int):
    """A model, its batch and its loss, always the same for a seed."""
    import torch
    from tests.gradients.architectures import build

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


def exact(name: str, seed: int, backend: str | None) -> tuple[int, int, int]:
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
        return made, torch.compile(made.model, backend=chosen), scaler

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


def main() -> None:
    """One line per architecture."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = Table(
        "Exactness by architecture",
        dict.fromkeys(("architecture", "sites", "eager", "compiled", "float16", "float16, edges"), ""),
    )
    counts = {"eager": 0, "compiled": 0, "float16": 0, "float16, edges": 0}
    for name in names():
        equal, total, sites = exact(name, seed, None)
        same, edges = half(name, seed, "constant"), half(name, seed, "amax")
        try:
            compiled, compiled_total, _ = exact(name, seed, "aot_eager")
            words = f"{compiled} of {compiled_total}"
        except Exception as error:
            compiled, compiled_total, words = 0, 1, f"{type(error).__name__}"
        counts["eager"] += equal == total
        counts["compiled"] += compiled == compiled_total
        counts["float16"] += same is True
        counts["float16, edges"] += edges is True
        table.add(
            architecture=name,
            sites=sites,
            eager=f"{equal} of {total}",
            compiled=words,
            float16="–" if same is None else same,
            **{"float16, edges": "–" if edges is None else edges},
        )
        print(table.rows[-1], flush=True)
    count = len(table.rows)
    for field, bar in (("eager", 30), ("compiled", 10)):
        table.add(
            architecture=f"all bits equal, {field}",
            **{field: f"{counts[field]} of {count}"},
            bar=f">= {bar}",
            met=counts[field] >= bar,
        )
    ran = sum(row.get("float16") in (True, False) for row in table.rows)
    table.add(
        architecture="equal to GradScaler",
        float16=f"{counts['float16']} of {ran}",
        bar="all",
        met=counts["float16"] == ran,
    )
    table.columns |= {"bar": "", "met": ""}
    result = Result(
        "gradient_exactness", "Exactness of gradient exponents", TEXT, "python -m benchmarks.bench_gradient_exactness"
    )
    result.tables.append(table)
    save(result)


if __name__ == "__main__":
    main()
