"""What `compare` trains when nothing is asked for; plain names, which the command line's help shows."""

DEFAULT_TASKS: tuple[str, ...] = ("digits", "text")
DEFAULT_RECIPES: tuple[str, ...] = (
    "fp32",
    "fp32-twin",
    "bf16",
    "bf16-stochastic",
    "bf16-kahan",
    "bf16-split",
    "bf16-split8",
)
