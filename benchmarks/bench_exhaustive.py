"""All 2^32 float32 inputs against torch's casts, eager and compiled: `python -m benchmarks.bench_exhaustive`."""

import argparse
from collections.abc import Callable, Iterator

from ._harness import set_threads
from ._results import Result, Table, save

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


def main() -> None:
    """Everything; --limit makes a short run that is not saved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=WORDS, help="inputs, for a trial")
    chosen = parser.parse_args()
    set_threads(1)
    tables: list[Table] = []
    for make in (casts_table, split_table):
        tables.append(make(chosen.limit))
        result = Result(
            "exhaustive", "All 2^32 float32 inputs", TEXT, "python -m benchmarks.bench_exhaustive", tables=tables
        )
        if chosen.limit == WORDS:
            save(result)
    if chosen.limit < WORDS:
        from ._results import show

        show(result)


if __name__ == "__main__":
    main()
