"""Lines of code that cure what is found, to copy into a script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..optim import OPTIMIZERS
from ._words import number

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
    >>> print(optimizer_code("NAdam", {"lr": 0.01}, KAHAN).splitlines()[1])
    optimizer = hu.optim.wrap(torch.optim.NAdam, model.parameters(), lr=0.01, weight_update="kahan")
    >>> print(optimizer_code(None, {}, KAHAN).splitlines()[1])
    optimizer = hu.optim.AdamW(model.parameters(), lr=lr, weight_update="kahan")  # or SGD, Adam, Lion, as it was
    """
    import torch

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


def of_model(code: str, name: str) -> str:
    """Return lines of `optimizer_code` for a model that the script calls by another name.

    >>> print(of_model(optimizer_code("SGD", {"lr": 0.1}, KAHAN), "netG").splitlines()[1])
    optimizer = hu.optim.SGD(netG.parameters(), lr=0.1, weight_update="kahan")
    """
    return code.replace("model.parameters()", f"{name}.parameters()")


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
