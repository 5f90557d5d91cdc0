"""Numbers, dtypes and lines of code as findings, tables and pages write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import formats
from .._torch_versions import find_torch_dtype
from ..formats import Format
from ..optim import OPTIMIZERS

# The words for what rounding takes of updates, the same in tables, pages and docs. In code and JSON they are the lost
# and the realised share of a `RealisedChanges`.
LOST_UPDATES_TITLE = "share of updates lost"
KEPT_MOVEMENT_TITLE = "movement kept"
LOST_AND_KEPT_EXPLANATION = (
    "Share of updates lost: wanted updates that rounding undid, so that the element stayed as it was. Movement kept: "
    "how much of the wanted movement took place all the same; the large updates are most of it, and stochastic "
    "rounding keeps it on average whatever single updates it undoes."
)


def format_percent(share: float) -> str:
    """Return a share as a percentage that is 0% or 100% only where it is exact.

    >>> format_percent(1.0), format_percent(0.99996), format_percent(0.5), format_percent(0.0002), format_percent(0.0)
    ('100%', '>99.9%', '50%', '<0.1%', '0%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{100 * share:.3g}%"


def format_multiple(share: float) -> str:
    """Return a share of something as words before it, from the whole on as a multiple.

    >>> f"{format_multiple(0.021)} the run's time", f"{format_multiple(5.216)} the run's time"
    ("2.1% of the run's time", "5.2 times the run's time")
    """
    return f"{format_percent(share)} of" if share < 1 else f"{share:.1f} times"


def pluralize(number: int, noun: str) -> str:
    """Return a count with its noun.

    >>> pluralize(1, "step"), pluralize(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_lr(options: Mapping[str, Any]) -> str:
    """Return " at lr ..." for the options of a param group, nothing where it has no learning rate.

    >>> describe_lr({"lr": 3e-5}), describe_lr({})
    (' at lr 3e-05', '')
    """
    lr = read_option_number(options, "lr")
    return "" if lr is None else f" at lr {lr:.3g}"


def read_option_number(options: Mapping[str, Any], name: str) -> float | None:
    """Return a number among the options of a param group, None where there is none.

    >>> read_option_number({"lr": torch.tensor(0.5)}, "lr"), read_option_number({"lr": None}, "lr")
    (0.5, None)
    """
    value = options.get(name)
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return None
    return float(value) if isinstance(value, int | float | torch.Tensor) else None


def compute_confidence(count: int, half_count: int) -> float:
    """Return how sure a number of elements or steps makes a finding: 0 without any, 1/2 at `half_count`, towards 1.

    >>> compute_confidence(0, 64), compute_confidence(64, 64), compute_confidence(10**6, 64)
    (0.0, 0.5, 1.0)
    """
    return 1 - 0.5 ** (count / half_count)


# Bits of float32's significand, the implicit one included, from which a lost change is no practical loss: what rounds
# away there is below 2^-24 of its number, and ten thousand such steps change it by a thousandth. A bias before a batch
# normalization, whose gradient is rounding noise around 0, loses such updates in health.
FLOAT32_SIGNIFICAND_BITS = 24


def find_format(dtype: torch.dtype | str | None) -> Format | None:
    """Return the format of a dtype, given itself or by name; None of integers and others without a format."""
    try:
        return None if dtype is None else formats.get(dtype)
    except ValueError:
        return None


def name_dtype(dtype: torch.dtype | str | None, unknown: str = "unknown dtype") -> str:
    """Return the short name of a dtype, given itself or by torch's name: that of its format where it has one.

    >>> name_dtype(torch.bfloat16), name_dtype("bfloat16"), name_dtype(torch.int8), name_dtype(None)
    ('bf16', 'bf16', 'int8', 'unknown dtype')
    """
    if (found := find_format(dtype)) is not None:
        return found.name
    return unknown if dtype is None else str(dtype).removeprefix("torch.")


def get_significand_bits(dtype: torch.dtype | None) -> int | None:
    """Return the bits of a dtype's significand with the implicit one, None where it is no floating-point format.

    >>> get_significand_bits(torch.bfloat16), get_significand_bits(torch.int8), get_significand_bits(torch.complex64)
    (8, None, 24)
    """
    found = find_format(dtype.to_real() if dtype is not None and dtype.is_complex else dtype)
    return None if found is None else found.precision


def holds_signed_floats(dtype: torch.dtype) -> bool:
    """Return whether an element of a dtype is one signed floating-point number, as a weight is.

    Scales without sign and zero are none, and neither are packed pairs.

    >>> holds_signed_floats(torch.float8_e4m3fn), holds_signed_floats(torch.int8)
    (True, False)
    """
    if not dtype.is_floating_point or dtype == find_torch_dtype("float4_e2m1fn_x2"):
        return False
    found = find_format(dtype)
    return found is not None and found.signed


def is_narrow_dtype(dtype: torch.dtype | None) -> bool:
    """Return whether it is a floating-point dtype with fewer digits than float32."""
    return (get_significand_bits(dtype) or FLOAT32_SIGNIFICAND_BITS) < FLOAT32_SIGNIFICAND_BITS


def is_wide_dtype(dtype: torch.dtype | None) -> bool:
    """Return whether it is a floating-point dtype with float32's digits or more."""
    return (get_significand_bits(dtype) or 0) >= FLOAT32_SIGNIFICAND_BITS


IMPORT_LINE = "import halfulp as hu"
KAHAN_ARGUMENT = 'weight_update="kahan"'
_NEW_OPTIMIZER_COMMENT = "# behind the line that makes the optimizer: its groups keep their options"
_CHANGED_GROUPS_COMMENT = "# behind the line that makes the optimizer, before its first step"


def write_optimizer_code(name: str | None, argument: str, is_halfulp: bool = False) -> str:
    """Return the lines that make an optimizer anew as one of hu.optim's, with its groups and a further argument.

    Groups of halfulp's own optimizers have the argument already, and would keep it: there it is written into them.

    >>> print(write_optimizer_code("AdamW", KAHAN_ARGUMENT))
    import halfulp as hu
    # behind the line that makes the optimizer: its groups keep their options
    optimizer = hu.optim.AdamW(optimizer.param_groups, weight_update="kahan")
    >>> print(write_optimizer_code("ASGD", KAHAN_ARGUMENT).splitlines()[2])
    optimizer = hu.optim.wrap(torch.optim.ASGD, optimizer.param_groups, weight_update="kahan")
    >>> print(write_optimizer_code(None, KAHAN_ARGUMENT).splitlines()[2])
    optimizer = hu.optim.AdamW(optimizer.param_groups, weight_update="kahan")  # or SGD, Adam, Lion, as it was
    >>> print(write_optimizer_code("AdamW", KAHAN_ARGUMENT, is_halfulp=True))
    # behind the line that makes the optimizer, before its first step
    for group in optimizer.param_groups:
        group["weight_update"] = "kahan"
    """
    if is_halfulp:
        key, _, value = argument.partition("=")
        return f'{_CHANGED_GROUPS_COMMENT}\nfor group in optimizer.param_groups:\n    group["{key}"] = {value}'
    made = f"hu.optim.{name or 'AdamW'}("
    if name is not None and name not in OPTIMIZERS:
        made = f"hu.optim.wrap({f'torch.optim.{name}' if hasattr(torch.optim, name) else name}, "
    rest = "" if name else "  # or SGD, Adam, Lion, as it was"
    return f"{IMPORT_LINE}\n{_NEW_OPTIMIZER_COMMENT}\noptimizer = {made}optimizer.param_groups, {argument}){rest}"
