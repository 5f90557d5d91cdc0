"""How much of small updates each weight update keeps: `python -m benchmarks.bench_small_updates`."""

import argparse

from ._results import Result, Table, save

TEXT = """A constant update u = w 2^-k at every step (SGD with lr 1), 1,000 steps from 4,096 bfloat16 weights drawn \
from [1, 2): the mean displacement over the elements, divided by float64's. 1 is all of it. "feedback" needs a first \
moment, so it runs under a momentum of 0.9, and float64 likewise. Extra bytes are per parameter, beside the bfloat16 \
weight."""
EXPONENTS = (9, 12, 15, 18, 21, 23, 23.25, 24, 25, 26.6, 28, 30)
STEPS, ELEMENTS = 1000, 4096


def updates() -> dict[str, tuple[object, int]]:
    """Row name -> weight update and its extra bytes."""
    import halfulp as hu

    return {
        "float32": (None, 2),
        "nearest": ("nearest", 0),
        "stochastic": ("stochastic", 0),
        "feedback": ("feedback", 0),
        "split8": ("split8", 1),
        "split": ("split", 2),
        "split-stochastic": ("split-stochastic", 2),
        "kahan": ("kahan", 2),
        "kahan-stochastic": ("kahan-stochastic", 2),
        "components(2)": (hu.Components(2), 2),
        "components(2, residual='stochastic')": (hu.Components(2, residual="stochastic"), 2),
        "components(3)": (hu.Components(3), 4),
        "components(3, residual='stochastic')": (hu.Components(3, residual="stochastic"), 4),
        "master": ("master", 4),
    }


def kept(update: object, exponent: float, seed: int) -> tuple[float, float]:
    """The share of float64's displacement that is kept, over the elements: its mean and its standard deviation."""
    import torch

    import halfulp as hu

    generator = torch.Generator().manual_seed(seed)
    start = (torch.rand(ELEMENTS, generator=generator) + 1).bfloat16()
    weight = torch.nn.Parameter(start.float() if update is None else start.clone())
    weight.grad_dtype = None
    momentum = 0.9 if update == "feedback" else 0.0
    optimizer = hu.optim.SGD(
        [("weight", weight)],
        lr=1.0,
        momentum=momentum,
        weight_update=update,
        state_dtype=torch.float32,
        seed=seed,
        report_interval=0,
    )
    u = start.float() * 2.0**-exponent * (1 - momentum)
    weight.grad = -u
    wanted, buffer = torch.zeros(ELEMENTS, dtype=torch.float64), torch.zeros(ELEMENTS, dtype=torch.float64)
    for _ in range(STEPS):
        optimizer.step()
        buffer = momentum * buffer + u.double()
        wanted += buffer
    holder = torch.nn.ParameterDict({"weight": weight})
    shares = (optimizer.float32_state_dict(holder)["weight"].double() - start.double()) / wanted
    return float(shares.mean()), float(shares.std())


def table(noise: bool) -> Table:
    """All weight updates over all sizes."""
    columns = {"weight update": "", "bytes": ""} | {f"2^-{k:g}": ".3f" for k in EXPONENTS}
    title = "Deviation over the elements of the share kept" if noise else "Share of the displacement kept"
    return Table(title, columns, note="2^-23.25 is 1e-7, 2^-26.6 is 1e-8.")


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    result = Result("small_updates", "Small updates", TEXT, "python -m benchmarks.bench_small_updates")
    means, deviations = table(noise=False), table(noise=True)
    for name, (update, size) in updates().items():
        found = {f"2^-{k:g}": kept(update, k, seed) for k in EXPONENTS}
        means.add(**{"weight update": name, "bytes": size}, **{k: mean for k, (mean, _) in found.items()})
        deviations.add(**{"weight update": name, "bytes": size}, **{k: spread for k, (_, spread) in found.items()})
    result.tables += [means, deviations]
    save(result)


if __name__ == "__main__":
    main()
