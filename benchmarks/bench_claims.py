"""Long runs that show what each weight update keeps: `python -m benchmarks.bench_claims`."""

import argparse
import functools
from collections.abc import Callable

from . import _claims
from ._harness import set_threads
from ._results import Result, Table, save

UPDATES = (
    "nearest",
    "stochastic",
    "kahan",
    "kahan-stochastic",
    "split",
    "split8",
    "feedback",
    "master",
    "components2",
    "components3",
)
TEXT = """What a weight update and a stored state keep over thousands of steps, on bfloat16 parameters. Each line \
has its bar and its figure; nearest rounding is the control. A figure without a bar is there to be compared."""


def update(name: str):
    """A weight update's name, or the object that has none."""
    import halfulp as hu

    return hu.Components(int(name[-1])) if name.startswith("components") else name


def adamw(name: str | None = None, state=None) -> Callable:
    """A maker of halfulp's AdamW."""

    def make(params, **settings):
        import halfulp as hu

        chosen = {} if name is None else {"weight_update": update(name)}
        return hu.optim.AdamW(params, state_dtype=state, **chosen, **settings)

    return make


def sgd(name: str) -> Callable:
    """A maker of halfulp's SGD."""

    def make(params, **settings):
        import halfulp as hu

        return hu.optim.SGD(params, weight_update=update(name), **settings)

    return make


def decay_table() -> Table:
    """Weight decay in every weight update."""
    import torch

    table = Table(
        "Weight decay: 2,000 AdamW steps at lr 1e-3, wd 0.1, zero gradient, 131,072 bf16 weights",
        {"weight update": "", "states": "", "sum(w sign w0) / sum|w0|": ".4f", "bar": "", "met": ""},
    )
    for name in UPDATES:
        for states, kind in ((torch.bfloat16, "bf16"), ("8bit", "8-bit")):
            if kind == "8-bit" and name not in ("stochastic", "split8"):
                continue
            value = _claims.decay(adamw(name, states))
            row = {"weight update": name, "states": kind, "sum(w sign w0) / sum|w0|": value}
            if name != "nearest":
                row |= {"bar": "0.8187 +/- 0.001", "met": abs(value - 0.8187) <= 0.001}
            table.add(**row)
    return table


def moment_table() -> Table:
    """The second moment over a drop of the gradients."""
    import torch

    marks = (1000, 3000)
    columns = {"beta2": "", "stored as": "", "figure": "", "before": ".4f"}
    columns |= {"+1,000": ".4f", "+3,000": ".4f", "+6,000": ".4f", "bar": "", "met": ""}
    table = Table(
        "Stored second moment over the exact one: 3,000 steps of gradients, then 6,000 of a tenth of them",
        columns,
        note="Over 65,536 elements, against a second moment in float64. Stochastic rounding keeps v right on average; "
        "the mean of its square roots lies lower by an eighth of v's relative variance, which is what is seen.",
    )
    for beta2 in (0.9, 0.99, 0.999, 0.9999):
        for state, kind in ((torch.bfloat16, "bf16, stochastic"), ("8bit", "8 bits")):
            pairs = _claims.second_moment(adamw("stochastic", state), beta2, 3000, 6000, marks, 1 << 16)
            for figure, ratios in zip(("sum of sqrt(v)", "sqrt of sum of v"), zip(*pairs)):
                row = dict(zip(table.columns, (beta2, kind, figure, *ratios)))
                if kind.startswith("bf16"):
                    row |= {"bar": "1 +/- 0.001", "met": max(abs(ratio - 1) for ratio in ratios) <= 0.001}
                table.add(**row)
    return table


def drift_table() -> Table:
    """A constant small update."""
    limits = {"kahan": 0.01, "kahan-stochastic": 0.01, "split8": 0.05}
    table = Table(
        "A constant update u, 2,000 SGD steps: the share of the way that weight and companion went",
        {"|u|/|w|": "", "weight update": "", "mean": ".4f", "deviation": ".3f", "bar": "", "met": ""},
        note="Deviation: over 65,536 elements. The bar is for 2^-21. Feedback has momentum 0.9, the others none.",
    )
    for exponent in (-11, -16, -18, -21):
        for name in UPDATES:
            momentum = 0.9 if name == "feedback" else 0.0  # it lives in the first moment
            mean, deviation = _claims.drift(sgd(name), exponent, momentum)
            row = {"|u|/|w|": f"2^{exponent}", "weight update": name, "mean": mean, "deviation": deviation}
            if exponent == -21 and name in limits:
                row |= {"bar": f"1 +/- {limits[name]}", "met": abs(mean - 1) <= limits[name]}
            table.add(**row)
    return table


def state_table() -> Table:
    """8-bit states: one update against float64, and one loud element."""
    make = adamw(None, "8bit")
    columns = {"what": "", "eps": "", "8-bit": ".4g", "float32 states": ".2g", "bar": "", "met": ""}
    table = Table(
        "AdamW with 8-bit states on float32 weights",
        columns,
        note="Relative error of the 30th update against float64 AdamW, at AdamW's own eps (which far smaller gradients "
        "drown in) and at 1e-6 of the gradients, where float32 arithmetic itself ends at both ends of the range; the "
        "errors are unbiased, and add up over the 1 / (1 - beta2) steps that a second moment remembers; then "
        "the largest update of an ordinary element, in learning rates, where one in 32 has gradients 200 times "
        "as large.",
    )
    for exponent in (-30, -20, -10, -7, -6, -5, -3, 0, 3, 10, 20, 30):
        for eps in (1e-8, 10.0 ** (exponent - 6)):
            found, full = (_claims.update_error(each, 10.0**exponent, eps) for each in (make, adamw()))
            row = {"what": f"one update's error, |g| ~ 1e{exponent}", "eps": f"{eps:.0e}", "8-bit": found}
            row["float32 states"] = full
            if eps == 1e-8:
                row |= {"bar": "<= 0.02", "met": found <= 0.02}
            table.add(**row)
    for exponent in (-7, -5, -3, 0, 3):
        found, full = (_claims.one_update_error(each, 10.0**exponent) for each in (make, adamw()))
        row = {"what": f"one update from stored exact states, |g| ~ 1e{exponent}", "eps": "1e-08", "8-bit": found}
        table.add(**row, bar="<= 0.02", met=found <= 0.02, **{"float32 states": full})
    for steps in (2, 300, 2000):
        found, full = (_claims.update_error(each, 1e-3, 1e-8, steps) for each in (make, adamw()))
        what = f"the same at step {steps:,}, |g| ~ 1e-3"
        table.add(**{"what": what, "eps": "1e-08", "8-bit": found, "float32 states": full})
    loud, plain = _claims.neighbours(make), _claims.neighbours(adamw())
    row = {"what": "largest update beside an element 200 times as large", "eps": "1e-08", "8-bit": loud}
    table.add(**row, bar="<= 10", met=loud <= 10, **{"float32 states": plain})
    return table


TABLES = {"decay": decay_table, "moment": moment_table, "drift": drift_table, "state": state_table}


def main() -> None:
    """Everything, or the named tables on the screen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", choices=[[], *TABLES], help="tables to show; nothing is saved")
    chosen = parser.parse_args()
    set_threads(1)
    result = functools.partial(
        Result, "claims", "What survives thousands of steps", TEXT, "python -m benchmarks.bench_claims"
    )
    if chosen.only:
        from ._results import show

        show(result(tables=[TABLES[name]() for name in chosen.only]))
    else:
        save(result(tables=[make() for make in TABLES.values()]))


if __name__ == "__main__":
    main()
