"""The suite "papers": which recipes are trained on which tasks, and what each recipe's paper reports."""

import dataclasses
from collections.abc import Mapping

from ...recipes import Recipe

_BF16 = "arXiv 2010.06192"
_SCALES = "arXiv 1910.12385 and its repository"
_SCALIFY = "arXiv 2407.17353, table 3"
_MCTENSOR = "arXiv 2207.08867 and its notebooks"
_FLASH = "arXiv 2602.23349"
_TITAN = "torchtitan's NVFP4 notes, Llama 3 8B, 200M tokens"


@dataclasses.dataclass(frozen=True)
class Reported:
    """A paper's result for a recipe on its own applications, and the verdict that would match it here."""

    says: str
    source: str
    expects: str


_UPDATE_ONLY = Recipe(
    name="bf16-update",
    description="float32 arithmetic, weights held to bfloat16 by nearest rounding",
    format="bf16",
    weight_update="nearest",
)
_EIGHT_BIT_STATES = Recipe(
    name="bf16-split-8bit",
    description="exact float32 weights in 16 + 16 bits, 8-bit moments",
    param_dtype="bfloat16",
    weight_update="split",
    state_dtype="8bit",
)
_FEW = ("e8m5-kahan-stochastic", "e8m3-kahan-stochastic", "e8m1-kahan-stochastic")
_OPERANDS = ("mixed-precision", "fp8-training", "mxfp8", "nvfp4")
# On every task.
COMMON: tuple[str | Recipe, ...] = (
    *("fp32", "fp32-twin", "bf16", _UPDATE_ONLY, "bf16-stochastic", "bf16-kahan", "bf16-split", "bf16-split8"),
    *(_EIGHT_BIT_STATES, "fp16"),
    *_FEW,
    *("fp16-constant-1", "fp16-constant-128", "fp16-constant-16384", "fp16-dynamic", "fp16-adaptive"),
    *("e5m2-adaptive", *_OPERANDS),
    *("scaled-fp16", "scaled-fp8-state16"),
)
# Several components in every operator take ten to forty times as long: on the tasks of their paper alone.
COMPONENTS: tuple[str, ...] = ("fp16-mc2", "fp16-mc3")
WIDE: tuple[str, ...] = ("fp64", "fp64-mc2")
FEW_BITS: tuple[str, ...] = ("e8m5", "e8m3", "e8m1")

# What is left out of a task although it would run, and why.
LEFT_OUT: Mapping[str, tuple[tuple[str, ...], str]] = {
    "two-heads": (
        _FEW,
        "left out: this task is about gradients far apart, and the emulation would take most of its time",
    ),
}
SLOW = "left out: several components in every operator take ten to forty times as long, see the MCTensor tasks"

# Tasks, and what they are trained under beside the common recipes.
TASKS: Mapping[str, tuple[str, ...]] = {
    "digits-fpu": FEW_BITS,
    "digits": (),
    "digits-slow": (),
    "cifar10-resnet-half": (),
    "sst2": (),
    "ml100k": (),
    "fsdd": (),
    "tinyshakespeare": (),
    "tinyshakespeare-lstm": (),
    "two-heads": (),
    "mammals": WIDE,
    "cancer-mlp": (*COMPONENTS, *WIDE),
    "linear-regression": (*COMPONENTS, *WIDE),
}

# What "small" leaves out of these tasks unless it is named: all that it trains took about an hour of one core.
NOT_AT_SMALL: Mapping[str, tuple[str, ...]] = {
    "cifar10-resnet-half": ("fp16", *_FEW, "e5m2-adaptive", *_OPERANDS, "scaled-fp16", "scaled-fp8-state16"),
    "tinyshakespeare": (*_FEW, "e5m2-adaptive", *_OPERANDS),
    "tinyshakespeare-lstm": (*_FEW, "e5m2-adaptive", *_OPERANDS),
    "two-heads": ("e5m2-adaptive", *_OPERANDS, "scaled-fp8-state16"),
}
TOO_LONG = "left out at small, which is to take an hour of one core: name the recipe, or take --size full"

_NONE_CLOSE = "ResNet-18 on ImageNet: 71.48 adaptive, 71.24 without a scale, 71.39 constant or dynamic"
REPORTED: Mapping[str, Reported] = {
    "bf16": Reported(
        "up to 7% less validation accuracy than with stochastic rounding or Kahan; BERT loses 16% training accuracy",
        _BF16,
        "worse",
    ),
    "bf16-update": Reported("nearest rounding of the update alone is what hurts", _BF16, "worse"),
    "bf16-stochastic": Reported(
        "matches 32 bits in 5 of 7 applications, −0.1% to +0.2% over all 7", _BF16, "no difference"
    ),
    "bf16-kahan": Reported("closes the remaining gap on all 7 applications", _BF16, "no difference"),
    "bf16-split": Reported("with 32-bit weights the gap of 16-bit arithmetic closes", _BF16, "no difference"),
    "bf16-split8": Reported(
        "no measurable loss with 8 more bits and 8-bit moments, SGD, AdamW, Lion", _FLASH, "no difference"
    ),
    "fp16": Reported("float16 fails for its range", _BF16, "worse"),
    "fp16-constant-1": Reported(f"{_NONE_CLOSE}; SSD512 without a scale diverged", _SCALES, "worse"),
    "fp16-constant-128": Reported("SSD512, batch 8: 78.71 (float32 78.94); ResNet-18: 71.39", _SCALES, "no difference"),
    "fp16-constant-16384": Reported(
        "SSD300: constants from 8 to 8192 give 75.7 to 76.3, adaptive 76.35", _SCALES, "no difference"
    ),
    "fp16-dynamic": Reported("SSD512, batch 8: 75.04 (float32 78.94); ResNet-18: 71.39", _SCALES, "worse"),
    "fp16-adaptive": Reported("SSD512, batch 8: 79.27 (float32 78.94); ResNet-18: 71.48", _SCALES, "no difference"),
    "mixed-precision": Reported(
        "ResNet-50: 76.04 (float32 75.92); SSD: 77.1 with a scale, diverges without (float32 76.9)",
        "arXiv 1710.03740",
        "no difference",
    ),
    "fp8-training": Reported(
        "“slightly higher validation accuracy compared to full precision baseline”, from its abstract",
        "arXiv 1905.12334",
        "no difference",
    ),
    "mxfp8": Reported("loss 1.2671 against 1.2738 of bfloat16", _TITAN, "no difference"),
    "nvfp4": Reported("loss 1.2715 against 1.2738 of bfloat16", _TITAN, "no difference"),
    "scaled-fp16": Reported("training loss 2.92 ± 0.12 against 2.87 ± 0.12", _SCALIFY, "no difference"),
    "scaled-fp8-state16": Reported("training loss 2.93 ± 0.12 against 2.87 ± 0.12", _SCALIFY, "no difference"),
    "fp16-mc2": Reported(
        "MLP 0.1232869 against 0.1232752 of float32; regression 1.97e-6 against 8.3e-12", _MCTENSOR, "no difference"
    ),
    "fp16-mc3": Reported(
        "MLP 0.1232873 against 0.1232752 of float32; regression 1.97e-6 against 8.3e-12", _MCTENSOR, "no difference"
    ),
    "fp64-mc2": Reported(
        "mammals: mean average precision 0.9148 against 0.9106 of float64", _MCTENSOR, "no difference"
    ),
}
