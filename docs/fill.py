"""Fills the measured tables of README.md and docs/*.md from the files that hold the numbers: `python docs/fill.py`.

A place to fill is what stands between `<!-- fill NAME -->` and `<!-- end -->`, where NAME is a function below. What
has not been measured yet stays empty. The rows of comparisons in docs/results are computed again from their trials.
With --check nothing is written, and the exit code is 1 where a file differs.
"""

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PLACE = re.compile(r"(<!-- fill ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
sys.path.insert(0, str(ROOT))


def grid(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns of figures are right-aligned."""
    figures = [all(re.match(r"[(<+−-]*\d|–?$|emulated", row[i]) for row in rows) for i in range(len(headers))]
    align = " | ".join("---:" if right else "---" for right in figures)
    lines = [f"| {' | '.join(headers)} |", f"| {align} |", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


# From the library ------------------------------------------------------------------------------------------------


def formats() -> str:
    """The catalogue."""
    from halfulp.formats import rows

    lines = []
    for row in rows():
        special = [word for word, has in (("inf", row["infinities"]), ("NaN", row["nan"])) if has]
        numbers = [f"{row[field]:.4g}" for field in ("max", "smallest_normal", "smallest_subnormal", "eps")]
        name = f"`{row['name']}`"
        lines.append([name, str(row["bits"]), *numbers, str(row["binades"]), ", ".join(special) or "none"])
    headers = ["format", "bits", "max", "smallest normal", "smallest", "eps", "binades", "specials"]
    return grid([*headers], lines)


def block_formats() -> str:
    """The block formats."""
    from halfulp.formats import block_rows

    fields = ("element", "scale", "block", "scale_rounding", "bits_per_value")
    lines = [[f"`{row['name']}`", *(f"{row[field]}" for field in fields)] for row in block_rows()]
    return grid(["format", "element", "scale", "block", "scale rounded", "bits a value"], lines)


def tasks() -> str:
    """What can be trained."""
    from halfulp.trials.tasks import kind_of, names

    lines = []
    for kind in map(kind_of, names()):
        hyper = ", ".join(f"{key} {value}" for key, value in kind.hyper.items())
        reads = "`--data`" if "data" in kind.__dataclass_fields__ else "embedded"
        loss = kind.judged_by.replace("_", " ").replace("train ", "training ")
        lines.append(
            [f"`{kind.name}`", kind.title, f"{kind.rule}, {hyper}", f"{kind.steps:,}", str(kind.batch), loss, reads]
        )
    return grid(["task", "what it is", "optimizer", "steps", "batch", "judged by", "data"], lines)


def recipes() -> str:
    """The named recipes."""
    from halfulp.recipes import get, names

    return grid(["recipe", "what it is"], [[f"`{name}`", get(name).description] for name in names()])


# What `halfulp.scaled` does with a family of operators: the payload of the result, and its scale.
_SCALED_RULES = {
    "pass-through": ("op(p)", "s"),
    "bilinear": ("product: p₁ p₂; sum of K products: (Σ p₁ p₂) / c", "s₁ s₂; s₁ s₂ c with c = p2(√K)"),
    "attention": ("torch's fused kernel of p_q s_q s_k, p_k, p_v", "s_v; gradients s_g s_v s_k/c, s_g s_v s_q/c, s_g"),
    "alignment": ("op(p₁ s₁/s, p₂ s₂/s)", "s = max(s₁, s₂); constants have no say"),
    "reduction": ("sum of n, norm: op(p) / c; mean, deviation: op(p)", "s c with c = p2(√n); s; products: measured"),
    "gated": ("f(p s) / s", "s; max(s, 1) where f(0) is not 0; gradients s_g"),
    "unit output": ("f(p s)", "1; min(s, 1) where f(x) is about x near 0; more where the largest result needs it"),
    "power law": ("pⁿ, √p, √(2 p) for an odd power of two", "sⁿ, √s, √(s/2); measured for other exponents"),
    "norm": ("(p − mean) / √(var + eps/s²)", "1; gradients s_g/s, of weights s_g c"),
    "loss": ("by loss", "s or measured; gradients of a mean over n: about s_g/n"),
    "recurrent": ("torch's fused layer on values", "measured"),
    "indexing": ("op(p₁ s₁/s, p₂ s₂/s)", "s = max(s₁, s₂); constants have no say"),
    "pooling": ("op(p)", "s"),
    "order": ("to whole numbers: op(p s) / scale; histograms: on values", "max(s, 1); measured"),
    "random": ("on values, by torch's generator", "measured; draws of 0 and 1: 1; dropout's gradient: s_g"),
    "linear algebra": ("on values", "measured"),
    "special": ("on values", "measured"),
    "complex": ("on values", "none: plain complex tensors"),
    "comparison": ("on values", "none: plain truth values and indices"),
    "creation": ("the constant over its power of two", "the power of two next to it; 2⁻¹²⁶ for zeros"),
    "writing": ("p s/s′", "s′ = s where all memory is written; else the scale that stands there"),
    "rescaling": ("p / 2ᵏ, rounded by a cast", "s 2ᵏ, 2ᵏ next to the payload's rms"),
    "foreach": ("the operator's own rule on each tensor", "by tensor"),
    "collectives": ("p s/s′, then the collective", "s′ = the largest of the ranks', times p2(√ranks) for sums"),
}


def _scaled_families() -> dict[str, list[str]]:
    """The library's own registered operators by family, in the order of the rules above."""
    from halfulp.scaled._registry import FAMILIES

    found: dict[str, list[str]] = {}
    for operator, family in FAMILIES.items():
        namespace, name = operator._schema.name.split("::")
        if namespace in ("aten", "c10d", "_c10d_functional", "halfulp"):
            name = name.removeprefix("_foreach_").removesuffix("_") if family == "foreach" else name
            found.setdefault(family, []).append(name)
    if found.keys() ^ _SCALED_RULES.keys():
        raise ValueError(f"families with operators or words alone: {sorted(found.keys() ^ _SCALED_RULES.keys())}")
    return {family: found[family] for family in _SCALED_RULES}


def scaled_rules() -> str:
    """What each family does to payload and scale."""
    lines = [[name, *_SCALED_RULES[name], str(len(found))] for name, found in _scaled_families().items()]
    return grid(["family", "payload of the result", "its scale", "overloads"], lines)


def scaled_operators() -> str:
    """The names of each family's operators."""
    paragraphs = []
    for family, found in _scaled_families().items():
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(found))
        paragraphs.append(textwrap.fill(f"**{family}**: {names}", 120, break_on_hyphens=False, break_long_words=False))
    return "\n\n".join(paragraphs)


def scaled_recipes() -> str:
    """The recipes with scaled payloads."""
    from halfulp.recipes import get, names

    found = [get(name) for name in names() if get(name).payload]
    fields = ("payload", "matmul", "weight_update", "state_dtype")
    rows = [[f"`{r.name}`", *(getattr(r, field) or "–" for field in fields), r.description] for r in found]
    return grid(["recipe", "payload", "products", "weight update", "moments", "what it is"], rows)


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


def gradient_policies() -> str:
    """How exponents follow from gradients, in the words of the classes."""
    from halfulp.gradients.policies._policy import _BY_NAME

    if _BY_NAME.keys() ^ _POLICY_SOURCES.keys():
        raise ValueError(f"policies without a source or the other way: {sorted(_BY_NAME.keys() ^ _POLICY_SOURCES)}")
    rows = []
    for name, source in _POLICY_SOURCES.items():
        words = " ".join(_BY_NAME[name].__doc__.partition("\n\n")[0].split())
        rule = re.sub(r" \([^()]*\)\.?$", "", words).removesuffix(".")
        scales = "each its own" if _BY_NAME[name].per_site else "one for all"
        rows.append([f'`"{name}"`', f"`{_BY_NAME[name].__name__}`", rule, scales, source])
    return grid(["policy", "class", "rule", "scales", "source"], rows)


# From docs/results/gradients.json --------------------------------------------------------------------------------


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


# From docs/results/plots.json ------------------------------------------------------------------------------------


def _plots(name: str) -> dict | None:
    path = RESULTS / "plots.json"
    return json.loads(path.read_text()).get(name) if path.exists() else None


def theorem1() -> str:
    """Distances by learning rate."""
    found = _plots("theorem1")
    if found is None:
        return ""
    columns = [*found["distances"], "floor of theorem 1"]
    values = [*found["distances"].values(), found["floor"]]
    rows = [[f"{rate:g}", *(f"{v[i]:.3g}" for v in values)] for i, rate in enumerate(found["rates"])]
    return grid(["learning rate x L", *columns], rows)


def drift() -> str:
    """What is kept of a constant update, with its deviation."""
    found = _plots("drift")
    if found is None:
        return ""
    shown = [e for e in (-8, -11, -14, -16, -18, -21) if e in found["exponents"]]
    rows = []
    for name, kept in found["kept"].items():
        places = [found["exponents"].index(e) for e in shown]
        rows.append([name, *(f"{kept['mean'][i]:.3f} ({kept['deviation'][i]:.3f})" for i in places)])
    return grid(["weight update", *(f"2^{e}" for e in shown)], rows)


def moment() -> str:
    """The second moment's error at the end, in a sentence."""
    found = _plots("moment")
    if found is None:
        return ""
    last = found["steps"][-1] - found["drop after"]
    ends = "; ".join(f"{name}: {values[-1]:.3f}" for name, values in found["ratios"].items())
    return f"Stored sqrt(v) over the exact one, {last:,} steps after the gradients shrank tenfold. {ends}."


def bytes_table() -> str:
    """Bytes per parameter of AdamW."""
    found = _plots("memory")
    if found is None:
        return ""
    words = {"float32": "float32", "bfloat16": "bfloat16", "8bit": "8-bit"}
    rows = [
        [
            f"`{row['update']}`" if row["update"] != "float32" else "float32 parameters",
            words[row["state"]],
            *(f"{row[part]:g}" for part in ("weight", "companion", "states", "gradient")),
            f"{row['total']:.3f}".rstrip("0").rstrip("."),
        ]
        for row in sorted(found["rows"], key=lambda row: row["total"])
    ]
    return grid(["weight update", "states are", "weight", "companion", "states", "gradient", "total"], rows)


# From docs/results/compare.json ----------------------------------------------------------------------------------


def _lines(file: str, task: str) -> list[dict[str, str]]:
    """A comparison's table of a task, none where it was not run."""
    path = RESULTS / file
    if not path.exists():
        return []
    from halfulp.trials import Evidence
    from halfulp.trials.evidence._table import cells

    evidence = Evidence.from_json(path.read_text(encoding="utf-8"))
    return [cells(evidence, row) for row in evidence.rows(task)] if task in evidence.tasks() else []


def _comparison(task: str, columns: Sequence[str]) -> str:
    lines = _lines("compare.json", task)
    return _chosen(lines, columns) if lines else ""


def _chosen(lines: list[dict[str, str]], columns: Sequence[str]) -> str:
    names = [name for name in lines[0] if name in columns or name.endswith(" loss")]
    return grid(names, [[line[name] for name in names] for line in lines])


_SHORT = ("recipe", "gap to fp32", "verdict", "cancelled", "bytes/param", "step time")
_LONG = (*_SHORT, "accuracy", "own arithmetic", "realised")


def compare_text_short() -> str:
    """The character-level GPT, the columns that decide."""
    return _comparison("text", _SHORT)


def compare_text() -> str:
    """The character-level GPT."""
    return _comparison("text", _LONG)


def compare_digits() -> str:
    """The digits classifier."""
    return _comparison("digits", _LONG)


def compare_scaled() -> str:
    """The GPT of Scalify's kind, the paper's gaps beside ours."""
    lines = _lines("scaled.json", "gpt-scaled")
    return _chosen(lines, (*_SHORT, "gap in the paper")) if lines else ""


def compare_scaled_digits() -> str:
    """The same recipes on the classifier of digits."""
    lines = _lines("scaled.json", "digits")
    return _chosen(lines, _SHORT) if lines else ""


def _scaled_gradients(file: str, task: str) -> str:
    lines = _lines(file, task)
    shown = ("recipe", "gap to fp32", "verdict", "accuracy", "skipped", "underflow")
    return _chosen(lines, (next(name for name in lines[0] if name.endswith(" loss")), *shown)) if lines else ""


def compare_two_heads() -> str:
    """Gradients in float16 and eight bits, two losses far apart, under every policy."""
    return _scaled_gradients("two-heads.json", "two-heads")


def compare_e5m2_text() -> str:
    """Eight-bit gradients of a character-level GPT."""
    return _scaled_gradients("e5m2.json", "text")


def compare_e5m2_images() -> str:
    """Eight-bit gradients of a residual network."""
    return _scaled_gradients("e5m2.json", "cifar10-resnet")


def scaled_starts() -> str:
    """Training from other magnitudes and under other scales."""
    return _every_table("scaled_starts")


def _notes(task: str) -> str:
    path = RESULTS / "compare.json"
    if not path.exists():
        return ""
    from halfulp.trials import Evidence
    from halfulp.trials.evidence._table import notes

    evidence = Evidence.from_json(path.read_text(encoding="utf-8"))
    return notes(evidence, task)[0]


def compare_text_notes() -> str:
    """How long the character-level GPT trained, and on what."""
    return _notes("text")


def compare_digits_notes() -> str:
    """How long the digits classifier trained, and on what."""
    return _notes("digits")


def compare_setting() -> str:
    """How the comparison was run."""
    path = RESULTS / "compare.json"
    if not path.exists():
        return ""
    data = json.loads(path.read_text(encoding="utf-8"))
    versions = data["trials"][0]["settings"]["versions"]
    said = ", ".join(f"{name} {value}" for name, value in versions.items())
    minutes, workers = data["run"]["seconds"] / 60, data["run"]["workers"]
    spent = f"{minutes:.1f} minutes by {workers} workers of one thread"
    return f"`halfulp compare`: {spent}, on the CPU ({said}; docs/results/compare.json)."


# From benchmarks/results/*.json ----------------------------------------------------------------------------------


def _benchmark(name: str, title: str, columns: Sequence[str], keep: Callable[[dict], bool] = lambda row: True) -> str:
    """Some columns of the table of a benchmark whose title starts as given."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.exists():
        return ""
    from benchmarks._results import load

    table = next((table for table in load(path).tables if table.title.startswith(title)), None)
    if table is None:
        return ""
    shown = [column for column in columns if column in table.columns]
    rows = [[table.text(row, column).replace("|", "\\|") for column in shown] for row in table.rows if keep(row)]
    return grid([column.replace("|", "\\|") for column in shown], rows)


def _every_row(name: str, title: str) -> str:
    """The whole table of a benchmark whose title starts as given, and its note."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.exists():
        return ""
    from benchmarks._results import load

    table = next(table for table in load(path).tables if table.title.startswith(title))
    note = textwrap.fill(table.note, 120, break_on_hyphens=False)
    return "\n\n".join([_benchmark(name, title, list(table.columns)), note])


def _speed(threads: int) -> str:
    title = f"AdamW step, 20.8M parameters, {threads} thread"
    return _benchmark("adamw", title, ("optimizer", "x torch", "range"))


def mctensor_speed() -> str:
    """MCTensor's operations beside torch's and the rivals'."""
    return _benchmark("mctensor", "MCTensor: time", ("operation", "x torch", "MCTensor", "torch-dd"))


def mctensor_bounds() -> str:
    """The stated bounds of MCTensor's arithmetic, beside the worst errors found."""
    columns = ("operation", "2 components", "3 and 4 components", "worst of 2", "worst of more")
    return _benchmark("mctensor_operators", "Error bounds", columns)


def mctensor_products() -> str:
    """The same of matrix products."""
    return _benchmark("mctensor_operators", "Error bounds of products", ("operation", "bound", "worst"))


def _rows(name: str, title: str) -> list[dict]:
    """The rows of a benchmark's table whose title starts as given."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.exists():
        return []
    from benchmarks._results import load

    return next((table.rows for table in load(path).tables if table.title.startswith(title)), [])


def mctensor_digits() -> str:
    """Functions and operators against their bounds."""
    return "\n\n".join(filter(None, (_mctensor_values(), _mctensor_operators(), _mctensor_beyond())))


def _mctensor_values() -> str:
    """Functions over their whole domains, by kind of components."""
    rows = _rows("mctensor_values", "functions")
    found = []
    for kind in dict.fromkeys(row["components"] for row in rows):
        here = [row for row in rows if row["components"] == kind]
        worst = max(row["largest error in bounds"] for row in here)
        values, wrong = (sum(row[name] for row in here) for name in ("values", "wrong"))
        found.append([kind.replace("torch.", ""), str(len(here)), f"{values:,}", f"{worst:.2f}", str(wrong)])
    return _said_before(
        "Functions over their whole domains, against mpmath or rational arithmetic "
        "(`python -m benchmarks.bench_mctensor_values`): random arguments, multiples of pi/2, near integers, "
        "subnormal numbers, gaps, the ends of the range.",
        grid(["components", "functions", "values", "largest error in bounds", "wrong"], found),
    )


def _said_before(text: str, *parts: str) -> str:
    """A paragraph and what follows it."""
    return "\n\n".join([textwrap.fill(text, 120, break_on_hyphens=False), *filter(None, parts)])


def _mctensor_operators() -> str:
    """op_db's operators: how many situations are what, by format and gradients."""
    rows = _rows("mctensor_operators", "Operators by format")
    kinds = ("within", "plain", "counted", "refused", "fails", "cut", "outside", "NaN", "differs")
    found = []
    for pair in dict.fromkeys((row["format"], row["gradients"]) for row in rows):
        here = [row for row in rows if (row["format"], row["gradients"]) == pair]
        found.append([*pair, *(f"{sum(row[kind] for row in here):,}" for kind in kinds)])
    return _said_before(
        "The floating operators of torch's `op_db`, with operands that have digits in all components, with plain ones "
        "beside them, with a constant, with a gap between components and with one far element, against four float64 "
        "components (`python -m benchmarks.bench_mctensor_operators`; what each word means stands in "
        "[Benchmarks](benchmarks.md)). What is counted is an operator in one of these five cases.",
        grid(["format", "gradients", *kinds], found),
        _how_many_operators(),
    )


def _how_many_operators() -> str:
    path = ROOT / "benchmarks" / "results" / "mctensor_operators.json"
    text = json.loads(path.read_text(encoding="utf-8"))["text"] if path.exists() else ""
    said = re.search(r"\d+ operators with floating operands.*?(?=, on \d)", text)
    return textwrap.fill(f"These are {said[0]}.", 120) if said else ""


def _mctensor_beyond() -> str:
    """What is beyond the bound, and why."""
    grouped: dict[tuple[str, str], dict[str, dict]] = {}
    for row in _rows("mctensor_operators", "Beyond"):
        here = grouped.setdefault((row["operator"], row["why"]), {"format": {}, "case": {}, "gradients": {}})
        for column, seen in here.items():
            seen[row[column]] = None
    found = [
        [operator, *(", ".join(here[name]) for name in ("format", "case", "gradients")), why]
        for (operator, why), here in sorted(grouped.items())
    ]
    return _said_before(
        "What is beyond the bound there:", grid(["operator", "formats", "cases", "gradients", "why"], found)
    )


def _every_table(name: str) -> str:
    """All tables of a benchmark, each under its title."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.exists():
        return ""
    from benchmarks._results import load

    tables = [table for table in load(path).tables if table.rows]
    return "\n\n".join(f"{table.title}:\n\n" + _benchmark(name, table.title, list(table.columns)) for table in tables)


def mctensor_experiments() -> str:
    """The paper's experiments."""
    return _every_table("mctensor_experiments")


def scaled_coverage() -> str:
    """How many of torch's operators are right on scaled tensors."""
    return _benchmark("op_coverage", "op_db", ("what", "entries", "of", "share", "bar"))


def scaled_exceptions() -> str:
    """Which are wrong or refused."""
    return _benchmark("op_coverage", "Wrong or refused", ("entry", "why"))


def scaled_architectures() -> str:
    """The gradients of Hugging Face models."""
    columns = ("architecture", "kind", "float32 payload", "bit-equal", "float16 payload", "fallbacks")
    return _benchmark("scaled_architectures", "gradients", columns)


def scaled_architectures_note() -> str:
    """What the table of architectures says, and how many meet their bar."""
    path = ROOT / "benchmarks" / "results" / "scaled_architectures.json"
    if not path.exists():
        return ""
    from benchmarks._results import load

    result = load(path)
    return textwrap.fill(f"{result.text} {result.tables[0].note}.", 120, break_on_hyphens=False)


def scaled_cost() -> str:
    """What scaled tensors cost in time and memory."""
    return _every_table("scaled")


def two_families() -> str:
    """Underflow and the weights' gradients' error, by policy, of one family of gradients and of two."""
    shares = ("underflow, mean", "worst layer", "subnormal, worst layer", "weight error, mean", "worst")
    columns = ("format", "gradients", "policy", *shares, "skipped after step 20", "exponents")
    return _benchmark("two_families", "One family", columns)


def gradient_trainings() -> str:
    """Skips, zeros and losses of trainings with both scalers."""
    pairs = [f"{name}, {method}" for name in ("skipped", "after step 20", "zeros") for method in _SCALERS]
    losses = [f"loss, {method}" for method in ("float32", *_SCALERS)]
    return _benchmark("gradient_trainings", "Trainings", ("training", "steps", *pairs, *losses))


_SCALERS = ("GradScaler", "halfulp")


def gradient_trainings_note() -> str:
    """What the table of trainings says."""
    return _wrapped("gradient_trainings")


def gradient_schedules() -> str:
    """What a search among random schedules of losses found."""
    columns = ("schedules", "skipped, halfulp", "skipped, GradScaler")
    zeros = ("zeros, halfulp", "zeros, GradScaler", "zeros, best constant")
    return _benchmark("gradient_schedules", "Losses by turns", (*columns, *zeros, "most skips in a row", "bar"))


def gradient_schedules_note() -> str:
    """What was searched, and what the table says."""
    return _wrapped("gradient_schedules")


def bound_simulated() -> str:
    """How often the underflow bound held."""
    columns = ("format", "gradients of", "number", "share within", "at the limit of overflow", "largest share")
    return _benchmark("underflow_bound", "The underflow bound", columns)


def _wrapped(name: str) -> str:
    """A benchmark's text and the note of its table."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.exists():
        return ""
    from benchmarks._results import load

    result = load(path)
    return textwrap.fill(f"{result.text} {result.tables[0].note}", 120, break_on_hyphens=False)


def gradient_cost() -> str:
    """What exponents cost in time."""
    return _every_table("gradient_overhead")


_INDUCTOR = ("Inductor", "Inductor, no vectors")


def gradient_exactness() -> str:
    """On which architectures exponents change no bit."""
    columns = ("architecture", "sites", "eager", "compiled", *_INDUCTOR, "float16", "float16, edges")
    return _benchmark("gradient_exactness", "Exactness", columns, lambda row: "bar" not in row)


def gradient_exactness_short() -> str:
    """On how many they do not."""
    columns = ("architecture", "eager", "compiled", *_INDUCTOR, "float16", "bar", "met")
    return _benchmark("gradient_exactness", "Exactness", columns, lambda row: "bar" in row)


def gradient_exactness_note() -> str:
    """How that was run."""
    path = ROOT / "benchmarks" / "results" / "gradient_exactness.json"
    if not path.exists():
        return ""
    from benchmarks._results import load

    return textwrap.fill(load(path).text, 120, break_on_hyphens=False)


def compiled_formats() -> str:
    """What format= rounds otherwise in a compiled graph."""
    path = ROOT / "benchmarks" / "results" / "compiled_formats.json"
    if not path.exists():
        return ""
    from benchmarks._results import load

    result = load(path)
    table = result.tables[0]
    alike = [row for row in table.rows if row.get("parameters", -1) == row.get("same bits")]
    said = f"In {len(alike)} of {len(table.rows)} every gradient has the same bits. The others:"
    columns = ("architecture", "parameters", "same bits", "most", "reason", "bar", "met")
    others = _benchmark("compiled_formats", table.title, columns, lambda row: row not in alike)
    return "\n\n".join([textwrap.fill(f"{result.text} {said}", 120, break_on_hyphens=False), others])


def processes() -> str:
    """Two processes beside one on the whole batch."""
    return _every_row("processes", "Two processes")


def processes_losses() -> str:
    """Losses of which one process's is not like the others'."""
    return _every_row("processes", "Steps applied")


def processes_checkpoints() -> str:
    """Checkpoints that another number of processes reads."""
    return _every_row("processes", "Checkpoints")


def mammals() -> str:
    """The embedding of WordNet's mammals."""
    path = ROOT / "benchmarks" / "results" / "mammals.json"
    if not path.exists():
        return ""
    from benchmarks._results import load

    table = load(path).tables[0]
    return _benchmark("mammals", table.title, list(table.columns))


def speed_one_thread() -> str:
    """AdamW's step on one thread."""
    return _speed(1)


def speed_short() -> str:
    """The rows of AdamW's step that decide, on one thread."""
    shown = ("torch fused", "halfulp stochastic", "halfulp kahan", "halfulp split", "torchao", "heavyball", "optimi")
    left_out = ("halfulp kahan-stochastic", "optimi kahan, foreach", "halfulp stochastic, 8-bit states")

    def kept(row: dict) -> bool:
        return row["optimizer"].startswith(shown) and row["optimizer"] not in left_out

    title = "AdamW step, 20.8M parameters, 1 thread"
    return _benchmark("adamw", title, ("optimizer", "x torch"), kept)


def quantize_speed() -> str:
    """quantize beside a copy."""
    columns = ("format", "rounding", "dtype", "x copy", "range", "what", "bar")
    return _benchmark("quantize", "", columns)


def decay() -> str:
    """What is left of the weights after weight decay."""
    return _benchmark("claims", "Weight decay", ("weight update", "states", "sum(w sign w0) / sum|w0|"))


def compatibility() -> str:
    """Which versions take one step of every system."""
    return _every_table("compatibility")


def verdicts() -> str:
    """How often compare says what, by gap, noise and seeds."""
    columns = ("gap", "noise", *(f"{seeds} seeds" for seeds in (3, 5, 10, 20, 40)))
    keep = lambda row: row["losses"] == "normal" and row["noise"] >= 0.005  # noqa: E731
    return _benchmark("verdicts", "Verdicts", columns, keep)


def verdicts_note() -> str:
    """How often compare is wrong where a recipe strays and the twin does not."""
    from benchmarks._results import load

    path = ROOT / "benchmarks" / "results" / "verdicts.json"
    if not path.exists():
        return ""
    rows = [row for row in load(path).tables[0].rows if row["gap"] == 0]
    alarms = {
        alone: max(
            int(row[column].split(" ")[0])
            for row in rows
            if (row["losses"] == "recipe alone strays") == alone
            for column in row
            if column.endswith(" seeds")
        )
        for alone in (False, True)
    }
    return (
        f"Losses with long tails give much the same: false alarms come to {alarms[False]} in 100. Where a "
        f"recipe's losses stray from seed to seed and the twin's hardly do, there are up to {alarms[True]}: then "
        "there is only the 95% interval of the mean alone, which is wrong in 5 of 100."
    )


def verify_plants() -> str:
    """What verify says of right models and of planted faults."""
    columns = ("what", "recipe", "passed", "found", "refused", "of")
    return _benchmark("verify", "Models and plants", columns)


def verify_plants_note() -> str:
    """How many models that were."""
    from benchmarks._results import load

    path = ROOT / "benchmarks" / "results" / "verify.json"
    return load(path).tables[0].note if path.exists() else ""


def small_updates() -> str:
    """How much of small updates each weight update keeps."""
    columns = ("weight update", "bytes", *(f"2^-{k}" for k in ("9", "15", "21", "23.25", "24", "25", "26.6")))
    return _benchmark("small_updates", "Share of the displacement kept", columns)


def state_displacement() -> str:
    """What 8-bit states keep of the displacement."""
    return _benchmark("states", "Displacement", ("elements", "size", "halfulp 8-bit", "torchao 8-bit"))


def state_errors() -> str:
    """What 8-bit states do to one update."""
    shown = ("1e-30", "1e-5", "1e0", "1e30")

    def kept(row: dict) -> bool:
        return row["eps"] == "1e-08" and (row["what"].endswith(shown) or not row["what"].startswith("one"))

    return _benchmark("claims", "AdamW with 8-bit states", ("what", "8-bit", "float32 states"), kept)


def accuracy_digits() -> str:
    """The few-bit formats, every operator rounded."""
    columns = ("recipe", "bits", "accuracy", "spread", "train loss")
    return _benchmark("accuracy", "scikit-learn digits", columns)


def peers_decay() -> str:
    """Weight decay in the peers."""
    return _benchmark("peers", "Weight decay", ("optimizer", "sum(w sign w0) / sum|w0|"))


def peers_moment() -> str:
    """The second moment in the peers."""
    return _benchmark("peers", "sqrt(v)", ("optimizer", "ratio"))


def peers_compile() -> str:
    """Kahan summation under torch.compile."""
    return _benchmark("peers", "torch.compile", ("optimizer", "eager", "compiled"))


def peers_special() -> str:
    """NaN under stochastic rounding."""
    return _benchmark("peers", "NaN and infinity", ("input", "halfulp", "torchao", "heavyball", "QPyTorch"))


def peers_nearest() -> str:
    """Nearest rounding in QPyTorch."""
    return _benchmark("peers", "Nearest rounding", ("what", "QPyTorch", "torch", "halfulp"))


PLACES: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        formats,
        block_formats,
        tasks,
        recipes,
        scaled_rules,
        scaled_operators,
        scaled_recipes,
        gradient_policies,
        gradient_layers,
        gradient_setting,
        two_families,
        gradient_trainings,
        gradient_trainings_note,
        gradient_schedules,
        gradient_schedules_note,
        bound_simulated,
        gradient_cost,
        gradient_exactness,
        gradient_exactness_short,
        gradient_exactness_note,
        compiled_formats,
        compare_two_heads,
        compare_e5m2_text,
        compare_e5m2_images,
        theorem1,
        drift,
        moment,
        bytes_table,
        mctensor_speed,
        mctensor_bounds,
        mctensor_products,
        mctensor_digits,
        mctensor_experiments,
        mammals,
        processes,
        processes_losses,
        processes_checkpoints,
        scaled_coverage,
        scaled_exceptions,
        scaled_architectures,
        scaled_architectures_note,
        scaled_cost,
        compare_scaled,
        compare_scaled_digits,
        scaled_starts,
        compare_text_short,
        compare_text,
        compare_text_notes,
        compare_digits,
        compare_digits_notes,
        compare_setting,
        speed_one_thread,
        speed_short,
        quantize_speed,
        decay,
        peers_decay,
        peers_moment,
        peers_compile,
        peers_special,
        peers_nearest,
        state_errors,
        state_displacement,
        small_updates,
        verdicts,
        verdicts_note,
        verify_plants,
        verify_plants_note,
        compatibility,
        accuracy_digits,
    )
}


def filled(page: str) -> str:
    """A page with every place filled.

    Raises:
        ValueError: a place whose name means nothing.
    """

    def fill(match: re.Match) -> str:
        name = match[2]
        if name not in PLACES:
            raise ValueError(f"nothing fills {name!r}; there are {', '.join(PLACES)}")
        content = PLACES[name]()
        return f"{match[1]}{content}\n{match[4]}" if content else f"{match[1]}{match[4]}"

    return PLACE.sub(fill, page)


def recomputed(comparison: str) -> str:
    """The JSON of a comparison with the rows that follow from its trials today."""
    from halfulp.trials import Evidence

    return Evidence.from_json(comparison).to_json()


def comparisons() -> list[Path]:
    """The files that `halfulp compare` wrote."""
    return [path for path in sorted(RESULTS.glob("*.json")) if "trials" in json.loads(path.read_text(encoding="utf-8"))]


def pages() -> list[Path]:
    """The pages that people write."""
    return [ROOT / "README.md", *sorted(path for path in HERE.glob("*.md") if path.name != "benchmarks.md")]


def main() -> None:
    """Bring every file up to date, or say which differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for path in [*comparisons(), *pages()]:
        text = path.read_text(encoding="utf-8")
        new = recomputed(text) if path.suffix == ".json" else filled(text)
        if new != text:
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        sys.exit(f"not in step with the numbers: {', '.join(stale)}; run python docs/fill.py")


if __name__ == "__main__":
    main()
