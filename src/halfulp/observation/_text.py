"""Numbers, dtypes and lines of code as findings, tables and pages write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from .. import formats
from .._torch_versions import find_dtype
from ..optim import OPTIMIZERS

# The words for what rounding takes of updates, the same in tables, pages and docs. In code and JSON they are the lost
# and the realised share of a `Realised`.
LOST = "share of updates lost"
KEPT = "movement kept"
LOST_AND_KEPT = (
    "Share of updates lost: wanted updates that rounding undid, so that the element stayed as it was. Movement kept: "
    "how much of the wanted movement took place all the same; the large updates are most of it, and stochastic "
    "rounding keeps it on average whatever single updates it undoes."
)


def percent(share: float) -> str:
    """Return a share as a percentage that is 0% or 100% only where it is exact.

    >>> percent(1.0), percent(0.99996), percent(0.5), percent(0.0002), percent(0.0)
    ('100%', '>99.9%', '50%', '<0.1%', '0%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{100 * share:.3g}%"


def times(share: float) -> str:
    """Return a share of something as words before it, from the whole on as a multiple.

    >>> f"{times(0.021)} the run's time", f"{times(5.216)} the run's time"
    ("2.1% of the run's time", "5.2 times the run's time")
    """
    return f"{percent(share)} of" if share < 1 else f"{share:.1f} times"


def plural(number: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "step"), plural(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def bytes_in_words(count: float) -> str:
    """Return a number of bytes in decimal units.

    >>> bytes_in_words(512), bytes_in_words(3 * 10**9)
    ('512 B', '3 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def at_lr(options: Mapping[str, Any]) -> str:
    """Return " at lr ..." for the options of a param group, nothing where it has no learning rate.

    >>> at_lr({"lr": 3e-5}), at_lr({})
    (' at lr 3e-05', '')
    """
    lr = number(options, "lr")
    return "" if lr is None else f" at lr {lr:.3g}"


def number(options: Mapping[str, Any], name: str) -> float | None:
    """Return a number among the options of a param group, None where there is none.

    >>> number({"lr": torch.tensor(0.5)}, "lr"), number({"lr": None}, "lr")
    (0.5, None)
    """
    value = options.get(name)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, int | float) else None


def confidence_of(count: int, half: int = 64) -> float:
    """Return how sure a number of elements or steps makes a finding: 0 without any, 1/2 at `half`, towards 1.

    >>> confidence_of(0), confidence_of(64), confidence_of(10**6)
    (0.0, 0.5, 1.0)
    """
    return 1 - 0.5 ** (count / half)


# Bits of float32's significand, the implicit one included, from which a lost change is no practical loss: what rounds
# away there is below 2^-24 of its number, and ten thousand such steps change it by a thousandth. A bias before a batch
# normalization, whose gradient is rounding noise around 0, loses such updates in health.
WIDE = 24


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the short name of a dtype: that of its format where it has one.

    >>> dtype_name(torch.bfloat16), dtype_name(torch.int8), dtype_name(None)
    ('bf16', 'int8', 'unknown dtype')
    """
    try:
        return formats.get(dtype).name if dtype is not None else "unknown dtype"
    except ValueError:
        return str(dtype).removeprefix("torch.")


def precision(dtype: torch.dtype | None) -> int | None:
    """Return the bits of a dtype's significand with the implicit one, None where it is no floating-point format.

    >>> precision(torch.bfloat16), precision(torch.float32), precision(torch.int8), precision(torch.complex64)
    (8, 24, None, 24)
    """
    try:
        if dtype is None:
            return None
        return formats.get(dtype.to_real() if dtype.is_complex else dtype).precision
    except ValueError:
        return None


def holds_numbers(dtype: torch.dtype) -> bool:
    """Return whether an element of a dtype is one signed floating-point number, as a weight is.

    Scales without sign and zero are none, and neither are packed pairs.

    >>> holds_numbers(torch.float8_e4m3fn), holds_numbers(torch.int8)
    (True, False)
    """
    if not dtype.is_floating_point or dtype == find_dtype("float4_e2m1fn_x2"):
        return False
    try:
        return formats.get(dtype).signed
    except ValueError:
        return False


def is_narrow(dtype: torch.dtype | None) -> bool:
    """Return whether it is a floating-point dtype with fewer digits than float32."""
    bits = precision(dtype)
    return bits is not None and bits < WIDE


def is_wide(dtype: torch.dtype) -> bool:
    """Return whether it is a floating-point dtype with float32's digits or more."""
    bits = precision(dtype)
    return bits is not None and bits >= WIDE


def loses_state_decay(rate: float, dtype: torch.dtype | None) -> bool:
    """Return whether a state of a dtype, rounded to nearest, loses every decay by a share of itself.

    That is where rate * v is under half the spacing below every number v of p bits, 2^-(p + 1) v at least.

    >>> loses_state_decay(1 - 0.999, torch.bfloat16), loses_state_decay(1 - 0.99, torch.bfloat16)
    (True, False)
    """
    bits = precision(dtype)
    return bits is not None and 0 < rate < 2.0 ** -(bits + 1)


IMPORT = "import halfulp as hu"
KAHAN = 'weight_update="kahan"'
# What torch's constructors take by themselves is left out.
_USUAL = {"betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "amsgrad": False}
# What stands before the parameters, and the argument that is new.
_CONSTRUCTED = re.compile(
    r"^(optimizer = hu\.optim\.\w+\((?:[\w.]+, )?)\w+\.parameters\(\),.*(, \w+=[^,()=]+\))", re.MULTILINE
)
_DECAYS = ("AdamW", "Lion")


def optimizer_code(name: str | None, options: Mapping[str, Any], extra: str) -> str:
    """Return the lines that make an optimizer anew as one of hu.optim's.

    Args:
        name: of the optimizer's class; None where it is not known.
        options: of its param group; those that are not the constructor's own are written.
        extra: arguments to add.

    >>> print(optimizer_code("AdamW", {"lr": 3e-6, "weight_decay": 0.1, "betas": (0.9, 0.999)}, KAHAN))
    import halfulp as hu
    optimizer = hu.optim.AdamW(model.parameters(), lr=3e-06, weight_decay=0.1, weight_update="kahan")
    >>> print(optimizer_code("ASGD", {"lr": 0.01}, KAHAN).splitlines()[1])
    optimizer = hu.optim.wrap(torch.optim.ASGD, model.parameters(), lr=0.01, weight_update="kahan")
    >>> print(optimizer_code(None, {}, KAHAN).splitlines()[1])
    optimizer = hu.optim.AdamW(model.parameters(), lr=lr, weight_update="kahan")  # or SGD, Adam, Lion, as it was
    """
    given = ["model.parameters()"]
    lr = number(options, "lr")
    given.append("lr=lr" if lr is None else f"lr={lr:.6g}")
    if isinstance(options.get("betas"), list | tuple) and tuple(options["betas"]) != _USUAL["betas"]:
        given.append(f"betas=({', '.join(f'{one:g}' for one in options['betas'])})")
    for key in ("eps", "momentum", "dampening"):
        value = number(options, key)
        if value is not None and value != _USUAL[key]:
            given.append(f"{key}={value:.6g}")
    decay = number(options, "weight_decay")
    if decay or (decay is not None and name in _DECAYS):
        given.append(f"weight_decay={decay:.6g}")
    given += [f"{key}=True" for key in ("nesterov", "amsgrad") if options.get(key)]
    given += [extra] if extra else []
    arguments = ", ".join(given)
    if name is None:
        return f"{IMPORT}\noptimizer = hu.optim.AdamW({arguments})  # or SGD, Adam, Lion, as it was"
    if name in OPTIMIZERS:
        return f"{IMPORT}\noptimizer = hu.optim.{name}({arguments})"
    own = f"torch.optim.{name}" if hasattr(torch.optim, name) else name
    return f"{IMPORT}\noptimizer = hu.optim.wrap({own}, {arguments})"


def for_groups(code: str) -> str:
    """Return lines of `optimizer_code` for what has several options: made of the param groups that are there.

    >>> print(for_groups(optimizer_code("AdamW", {"lr": 0.1, "weight_decay": 0}, KAHAN)))
    import halfulp as hu
    # behind the line that makes the optimizer: its groups keep their options
    optimizer = hu.optim.AdamW(optimizer.param_groups, weight_update="kahan")
    """
    found = _CONSTRUCTED.search(code)
    if found is None:
        return code
    where = "# behind the line that makes the optimizer: its groups keep their options"
    return f"{IMPORT}\n{where}\n{found[1]}optimizer.param_groups{found[2]}"
