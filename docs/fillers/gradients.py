"""Gradient exponents: policies, searches, trainings, exactness and cost."""

import json
import re
import statistics
import textwrap

from ._places import place
from ._tables import RESULTS, all_tables, benchmark_table, grid, measured, paragraph, text_and_note, whole_table

# Where a policy of gradient scaling comes from.
_POLICY_SOURCES = {
    "amax": "halfulp",
    "constant": "Micikevicius et al., arXiv 1710.03740",
    "measured": "Micikevicius et al.",
    "dynamic": "`torch.amp.GradScaler`, Micikevicius et al.",
    "rising-floor": "Mellempudi et al., arXiv 1905.12334",
    "underflow-bound": "Zhao et al., arXiv 1910.12385 and IJCAI-20",
    "element-wise": "Zhao et al., their code",
    "abs-range": "Zhao et al., their code",
}


@place
def gradient_policies() -> str:
    """How exponents follow from gradients, in the words of the classes."""
    from halfulp.gradients._policy import _POLICY_BY_NAME

    if _POLICY_BY_NAME.keys() ^ _POLICY_SOURCES.keys():
        raise ValueError(
            f"policies without a source or the other way: {sorted(_POLICY_BY_NAME.keys() ^ _POLICY_SOURCES)}"
        )
    rows = []
    for name, source in _POLICY_SOURCES.items():
        words = " ".join(_POLICY_BY_NAME[name].__doc__.partition("\n\n")[0].split())
        rule = re.sub(r" \([^()]*\)\.?$", "", words).removesuffix(".")
        scales = "each its own" if _POLICY_BY_NAME[name].per_site else "one for all"
        rows.append([f'`"{name}"`', f"`{_POLICY_BY_NAME[name].__name__}`", rule, scales, source])
    return grid(["policy", "class", "rule", "scales", "source"], rows)


@place
def gradient_layers() -> str:
    """What each layer's gradients needed, and what underflowed under one scale and under its own."""
    path = RESULTS / "gradients.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    one, own = found["one dynamic scale"], found["a scale per gradient"]
    rows = []
    for i, layer in enumerate(own["layers"]):
        low, high = ([row[i] for row in own[field]] for field in ("need", "limit"))
        row = [f"`{layer}`", f"{min(low)} to {max(low)}", f"{min(high)} to {max(high)}"]
        for run in (one, own):
            shares = [line[i] for line in run["underflow"]]
            row += [f"{run['exponents'][-1][i]}", f"{statistics.fmean(shares):.2%}", f"{max(shares):.2%}"]
        rows.append(row)
    runs = [f"{who}: {what}" for who in ("dynamic", "own") for what in ("exponent at the end", "underflow", "at most")]
    return grid(["layer", "least exponent", "overflow from", *runs], rows)


@place
def gradient_setting() -> str:
    """How many steps the runs skipped, and where they were looked at."""
    path = RESULTS / "gradients.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    one, own = found["one dynamic scale"], found["a scale per gradient"]
    words = (
        f"Task `two-heads`, one seed, gradients rounded to {found['format']}; every sixteenth step is run again in "
        f"float32 from the same weights and batch. Skipped steps: {one['skipped']} with one dynamic scale, "
        f"{own['skipped']} with a scale per gradient. torch {found['torch']}, {found['processor']}."
    )
    return textwrap.fill(words, 120)


@place
def two_families() -> str:
    """Underflow and the weights' gradients' error, by policy, of one family of gradients and of two."""
    shares = ("underflow, mean", "worst layer", "subnormal, worst layer", "weight error, mean", "worst")
    columns = ("format", "gradients", "policy", *shares, "skipped after step 20", "exponents")
    return benchmark_table("two_families", "One family", columns)


_SCALERS = ("GradScaler", "halfulp")


@place
def gradient_trainings() -> str:
    """Skips, zeros and losses of trainings with both scalers."""
    pairs = [f"{name}, {method}" for name in ("skipped", "after step 20", "zeros") for method in _SCALERS]
    losses = [f"loss, {method}" for method in ("float32", *_SCALERS)]
    return benchmark_table("gradient_trainings", "Trainings", ("training", "steps", *pairs, *losses))


@place
def gradient_trainings_note() -> str:
    """What the table of trainings says."""
    return text_and_note("gradient_trainings")


@place
def gradient_schedules() -> str:
    """What a search among random schedules of losses found."""
    columns = ("schedules", "skipped, halfulp", "skipped, GradScaler")
    zeros = ("zeros, halfulp", "zeros, GradScaler", "zeros, best constant")
    return benchmark_table("gradient_schedules", "Losses by turns", (*columns, *zeros, "most skips in a row", "bar"))


@place
def gradient_schedules_note() -> str:
    """What was searched, and what the table says."""
    return text_and_note("gradient_schedules")


@place
def gradient_cost() -> str:
    """What exponents cost in time."""
    return all_tables("gradient_overhead")


_INDUCTOR = ("Inductor", "Inductor, no vectors")


@place
def gradient_exactness() -> str:
    """On which architectures exponents change no bit."""
    columns = ("architecture", "sites", "eager", "compiled", *_INDUCTOR, "float16", "float16, edges")
    return benchmark_table("gradient_exactness", "Exactness", columns, lambda row: "bar" not in row)


@place
def gradient_exactness_short() -> str:
    """On how many they do not."""
    columns = ("architecture", "eager", "compiled", *_INDUCTOR, "float16", "bar", "met")
    return benchmark_table("gradient_exactness", "Exactness", columns, lambda row: "bar" in row)


@place
def gradient_exactness_note() -> str:
    """How that was run."""
    result = measured("gradient_exactness")
    return paragraph(result.text) if result else ""


@place
def gradient_programs() -> str:
    """How many random programs keep every bit."""
    return whole_table("gradient_programs", "Random programs")


@place
def gradient_programs_note() -> str:
    """What these programs are."""
    result = measured("gradient_programs")
    return paragraph(result.text) if result else ""


@place
def processes() -> str:
    """Two processes beside one on the whole batch."""
    return whole_table("processes", "Two processes")


@place
def processes_losses() -> str:
    """Losses of which one process's is not like the others'."""
    return whole_table("processes", "Steps applied")


@place
def processes_checkpoints() -> str:
    """Checkpoints that another number of processes reads."""
    return whole_table("processes", "Checkpoints")
