"""Optimizers of hu.optim by name in timm's factory and its train.py.

    import halfulp.integrations.timm; halfulp.integrations.timm.register()
    timm.optim.create_optimizer_v2(model, "huadamw", lr=1e-3, weight_update="kahan", param_dtype="bf16")

timm 1.0.31 cuts a name at its last "_" ("halfulp_adamw" is torch's AdamW there, in silence), so the names have none:
"hu" and the class's name. On the command line: `--opt huadamw --opt-kwargs weight_update=kahan --model-dtype bfloat16`.
"""

from __future__ import annotations

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry

from ..optim import OPTIMIZERS
from ..optim._group_options import read_default_arguments

OPTIMIZER_NAME_PREFIX = "hu"


def register() -> list[str]:
    """Register the optimizers of hu.optim, and those registered there, in timm's default registry; return the names.

    Muon is not among them: it takes matrices alone, which timm's groups do not tell apart.

    >>> "huadamw" in register()
    True
    """
    names = []
    for name, kind in OPTIMIZERS.items():
        if name == "Muon":
            continue
        options = read_default_arguments(kind)
        names.append(f"{OPTIMIZER_NAME_PREFIX}{name}".lower().replace("_", ""))
        default_registry.register(
            OptimInfo(
                name=names[-1],
                opt_class=kind,
                description=f"{name} of halfulp, for narrow parameters",
                has_eps="eps" in options,
                has_momentum="momentum" in options,
                has_betas="betas" in options,
                num_betas=len(options.get("betas", (0, 0))),
            )
        )
    return names
