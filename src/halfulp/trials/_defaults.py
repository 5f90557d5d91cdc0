"""Names of the recipes and tasks that comparisons know; plain strings, which the command line's help shows."""

# The recipe that every gap is measured against, and the same from a start that differs by 1e-7.
REFERENCE, TWIN = "fp32", "fp32-twin"

DEFAULT_TASKS: tuple[str, ...] = ("digits", "text")
DEFAULT_RECIPES: tuple[str, ...] = (
    REFERENCE,
    TWIN,
    "bf16",
    "bf16-stochastic",
    "bf16-kahan",
    "bf16-split",
    "bf16-split8",
)
