"""All 2^32 float32 inputs: `python -m benchmarks.bench_exhaustive` against torch's casts, eager and compiled.

With `--words` every format and rounding against integer arithmetic, and casts of ml_dtypes and NumPy where they exist.
What a former run has finished stands in results/exhaustive.json and is not run again without `--again`.
"""

import argparse
import time
from collections.abc import Callable, Iterator

from ._harness import set_threads
from ._results import Result, Table, load, machine, save, show
from ._word_oracle import MODES, positive_blocks, round_block

WORDS = 1 << 32
CHUNK = 1 << 22
CASTS = {
    "bf16": ("bfloat16", None),
    "fp16": ("float16", None),
    "e5m2": ("float8_e5m2", None),
    "e4m3fn": ("float8_e4m3fn", "saturate"),
}
COLUMNS = {"subject": "", "mode": "", "inputs": ",", "mismatches": ",", "first": "", "bar": "", "met": ""}
TEXT = """`hu.quantize(x, format)` to nearest for every float32 bit pattern against torch's cast to the same dtype and \
back, bit for bit (a NaN equals a NaN; the sign of zero counts), eager and under `torch.compile(fullgraph=True)` with \
default options; torch's e4m3fn cast saturates, so `overflow="saturate"` is asked for there. As a control, the last \
rows put a bare pair of casts through the same compiler: what it leaves out is what a user's own emulation would lose. \
Then the split weight (bf16 and 16 bits): every float32 word is encoded and decoded again."""


def chunks(limit: int) -> Iterator:
    """Every float32 bit pattern once, CHUNK at a time."""
    import torch

    for start in range(0, min(limit, WORDS), CHUNK):
        words = torch.arange(start, start + CHUNK, dtype=torch.int64)
        yield words.to(torch.int32).view(torch.float32)  # int64 to int32 keeps the low 32 bits


def differing(found, wanted):
    """Where two float32 tensors differ, a NaN being equal to any NaN."""
    import torch

    same = found.view(torch.int32) == wanted.view(torch.int32)
    return ~(same | (found.isnan() & wanted.isnan()))


class Count:
    """How many inputs gave different bits so far, and the first of them."""

    def __init__(self, call: Callable) -> None:
        self.call, self.inputs, self.mismatches, self.first = call, 0, 0, ""

    def see(self, x, wanted) -> None:
        """Compares one chunk."""
        import torch

        found = self.call(x)
        self.inputs += x.numel()
        if torch.equal(found.view(torch.int32), wanted.view(torch.int32)):
            return
        apart = differing(found, wanted)
        here = int(apart.sum())
        if here and not self.first:
            self.first = f"0x{int(x.view(torch.int32)[apart][0]) & 0xFFFFFFFF:08X}"
        self.mismatches += here

    def row(self, subject: str, mode: str, judged: bool = True) -> dict:
        """One line of the table."""
        cells = {"subject": subject, "mode": mode, "inputs": self.inputs, "mismatches": self.mismatches}
        verdict = {"bar": "0", "met": self.mismatches == 0} if judged else {}
        return {**cells, "first": self.first, **verdict}


def casts_table(limit: int) -> Table:
    """quantize against casts, and the control."""
    import torch

    import halfulp as hu

    table = Table("quantize to nearest, every float32 input", COLUMNS)
    for name, (dtype, overflow) in CASTS.items():
        kind = getattr(torch, dtype)

        def ours(x, name=name, overflow=overflow):
            return hu.quantize(x, name, overflow=overflow)

        def cast(x, kind=kind):
            return x.to(kind).float()

        torch._dynamo.reset()
        counts = [Count(ours), *(Count(torch.compile(call, fullgraph=True)) for call in (ours, cast))]
        for x in chunks(limit):
            wanted = cast(x)
            for count in counts:
                count.see(x, wanted)
        table.add(**counts[0].row(f"hu.quantize to {name}", "eager"))
        table.add(**counts[1].row(f"hu.quantize to {name}", "compiled"))
        table.add(**counts[2].row(f"control: x.to({dtype}).float()", "compiled", judged=False))
        print(f"{name} done", flush=True)
    return table


def narrowed(x, steps: int):
    """A float32 tensor as a split parameter, stepped with a zero update, and decoded again."""
    import torch

    import halfulp as hu

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(x.clone())
    optimizer = hu.optim.SGD(model.parameters(), lr=0.0, weight_update="split", param_dtype=torch.bfloat16)
    model.weight.grad = torch.zeros_like(model.weight)
    for _ in range(steps):
        optimizer.step()
    return optimizer.float32_state_dict(model)["weight"]


def split_table(limit: int) -> Table:
    """float32 in 2 + 2 bytes and back."""
    table = Table("split: every float32 word through bf16 and 16 bits", COLUMNS)
    still, stepped = (Count(lambda x, steps=steps: narrowed(x, steps)) for steps in (0, 1))
    for x in chunks(limit):
        still.see(x, x)
        stepped.see(x, x)
    table.add(**still.row("narrow, decode", "reference"))
    table.add(**stepped.row("narrow, one fused step of size zero, decode", "kernel"))
    return table


WORDS_TITLE = "quantize, every float32 word, every rounding"
WORDS_COLUMNS = {
    "format": "",
    "inputs": ",",
    **dict.fromkeys(MODES, ",d"),
    "ml_dtypes or NumPy": "",
    "first": "",
    "CPU minutes": ".1f",
    "commit": "",
    "bar": "",
    "met": "",
}
WORDS_NOTE = """Words that differ from integer arithmetic by the format's definition, per rounding, with the format's \
own overflow policy; then, to nearest, from the casts that ml_dtypes or NumPy have."""
# Formats whose casts have another overflow policy than the format here, or another meaning.
CAST_POLICY = {"e4m3fn": "nan", "e5m2fnuz": "nan", "e4m3fnuz": "nan"}
NO_CAST = ("e8m0",)  # ml_dtypes rounds its ties otherwise


def cast_of(name: str) -> Callable | None:
    """A format's cast to nearest and back, of float32 arrays of NumPy; None where nobody has one."""
    import ml_dtypes
    import numpy as np

    names = {"fp16": "float16", "bf16": "bfloat16", "e3m2fn": "float6_e3m2fn", "e2m3fn": "float6_e2m3fn"}
    name = names.get(name, "float4_e2m1fn" if name == "e2m1fn" else f"float8_{name}")
    kind = getattr(ml_dtypes, name, None) or getattr(np, name, None)
    return None if kind is None else lambda x: x.astype(kind).astype(np.float32)


def words_row(name: str, limit: int) -> dict:
    """Every word of one format."""
    import numpy as np
    import torch

    import halfulp as hu

    known, cast = hu.formats.get(name), None if name in NO_CAST else cast_of(name)
    wrong, inputs, first, start = dict.fromkeys([*MODES, "cast"], 0), 0, "", time.process_time()

    def count(what: str, words, found, wanted) -> None:
        nonlocal first
        if np.array_equal(found.view(np.uint32), wanted.view(np.uint32)):
            return
        apart = (found.view(np.uint32) != wanted.view(np.uint32)) & ~(np.isnan(found) & np.isnan(wanted))
        wrong[what] += int(apart.sum())
        first = first or (f"{what} of 0x{words[apart][0]:08X}" if apart.any() else "")

    for magnitudes in positive_blocks(limit // 2):
        for sign in (1, -1):
            words = magnitudes | np.uint32((sign < 0) << 31)
            x = words.view(np.float32)
            wanted = round_block(magnitudes, known, sign)
            inputs += len(words)
            for mode in MODES:
                count(mode, words, hu.quantize(torch.from_numpy(x), known, mode).numpy(), wanted[mode])
            if cast is not None:
                policy = CAST_POLICY.get(name)
                found = (
                    hu.quantize(torch.from_numpy(x), known, overflow=policy).numpy() if policy else wanted["nearest"]
                )
                with np.errstate(all="ignore"):
                    count("cast", words, found, cast(x))
    return {
        "format": name,
        "inputs": inputs,
        **{mode: wrong[mode] for mode in MODES},
        "ml_dtypes or NumPy": "none" if cast is None else f"{wrong['cast']:,}",
        "first": first,
        "CPU minutes": (time.process_time() - start) / 60,
        "commit": machine()["commit"],
        "bar": "0",
        "met": not any(wrong.values()),
    }


def words_table(result: Result, names: list[str], limit: int, again: bool) -> None:
    """Run every format that has no finished row, and keep each as soon as it is finished."""
    tables = [table for table in result.tables if table.title == WORDS_TITLE]
    kept = tables[0].rows if tables else []
    table = Table(WORDS_TITLE, WORDS_COLUMNS, note=WORDS_NOTE)
    result.tables = [*(one for one in result.tables if one.title != WORDS_TITLE), table]
    table.rows = [row for row in kept if not (again and row["format"] in names)]
    for name in names:
        if limit == WORDS and any(row["format"] == name for row in table.rows):
            print(f"{name}: run before; --again runs it anew", flush=True)
            continue
        row = words_row(name, limit)
        whole = row["CPU minutes"] * WORDS / row["inputs"]
        print(f"{name}: {row['CPU minutes']:.2f} CPU minutes, {whole:.1f} for all words", flush=True)
        table.rows = [*(other for other in table.rows if other["format"] != name), row]
        if limit == WORDS:
            save(result)
    if limit < WORDS:
        show(result)


def main() -> None:
    """Everything; --limit makes a short run that is not saved."""
    import halfulp as hu

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=WORDS, help="inputs, for a trial")
    parser.add_argument("--words", action="store_true", help="every format and rounding against integer arithmetic")
    parser.add_argument("--formats", default=",".join(hu.formats.names()), help="with --words: which")
    parser.add_argument("--again", action="store_true", help="with --words: formats that were run before too")
    chosen = parser.parse_args()
    set_threads(1)
    result = Result("exhaustive", "All 2^32 float32 inputs", TEXT, "python -m benchmarks.bench_exhaustive [--words]")
    kept = load(result.path()) if result.path().exists() else result
    if chosen.words:
        if chosen.limit == WORDS:
            result.tables, result.machine = kept.tables, kept.machine
        words_table(result, chosen.formats.split(","), chosen.limit, chosen.again)
        return
    words = [table for table in kept.tables if table.title == WORDS_TITLE]
    for make in (casts_table, split_table):
        result.tables = [*(table for table in result.tables if table not in words), make(chosen.limit), *words]
        if chosen.limit == WORDS:
            save(result)
    if chosen.limit < WORDS:
        show(result)


if __name__ == "__main__":
    main()
