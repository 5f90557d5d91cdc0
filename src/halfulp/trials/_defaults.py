"""Plain strings that comparisons share: default recipes and tasks, verdicts and their tones."""

# The recipe that every gap is measured against, and the same from a start that differs by 1e-7.
REFERENCE_RECIPE, TWIN_RECIPE = "fp32", "fp32-twin"

DEFAULT_TASKS: tuple[str, ...] = ("digits", "text")
DEFAULT_RECIPES: tuple[str, ...] = (
    REFERENCE_RECIPE,
    TWIN_RECIPE,
    "bf16",
    "bf16-stochastic",
    "bf16-kahan",
    "bf16-split",
    "bf16-split8",
)

# Verdicts on a recipe that keeps float32's loss, and on one that does not.
PASSING_VERDICTS: tuple[str, ...] = ("no difference", "better")
FAILING_VERDICTS: tuple[str, ...] = ("worse", "diverged")
# How tables and pages colour a verdict; others are neutral.
TONE_BY_VERDICT: dict[str, str] = {
    **dict.fromkeys(PASSING_VERDICTS, "good"),
    **dict.fromkeys(FAILING_VERDICTS, "bad"),
    **dict.fromkeys(("unclear", "no verdict"), "open"),
}
