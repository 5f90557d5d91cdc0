"""What float32 payloads where autocast has float32 cost in memory and time: `python -m benchmarks.bench_wide`."""

import argparse
import contextlib
import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from ._harness import set_threads
from ._results import Result, Table, save
from .bench_scaled import loss, model_and_batch

TEXT = """`hu.scalify(model)`, which keeps float32 payloads where autocast computes in float32, beside \
`hu.scalify(model, wide="none")`, which does not. Memory: every tensor that the graph of the loss keeps for the \
backward pass of transformers' GPT-2 (4 layers, width 128, 2 x 128 tokens, no dropout, cross-entropy), each memory \
once, parameters left out. Gradients: all together, their distance from float64's from the same parameters. Time: \
forward and backward pass with the loss, one thread, eagerly, in CPU seconds, the two by turns."""
# Vocabularies weigh more in so small a model than in a large one.
VOCABULARIES = (96, 1000)
MOST = 40 / 62
SHAPES = ("gpt 128", "gpt 384", "mlp 1024", "GPT-2")


def gpt2(vocabulary: int) -> tuple:
    """transformers' class with random weights, and tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), torch.randint(0, vocabulary, (2, 128))


def run_gpt2(model: Any, ids: Any) -> Any:
    """The loss of the next token."""
    from torch.nn import functional

    return functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def kept_bytes(model: Any, loss: Any) -> int:
    """What the graph of a loss keeps for the backward pass, parameters left out."""
    import torch

    import halfulp as hu

    def memory(x: Any) -> Any:
        return (x.payload if isinstance(x, hu.ScaledTensor) else x).untyped_storage()

    own = {memory(p).data_ptr() for p in model.parameters()}
    kept, seen, ahead = {}, set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [before for before, _ in node.next_functions]
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved")]
        for one in (x for entry in saved for x in (entry if isinstance(entry, (list, tuple)) else (entry,))):
            if isinstance(one.data, torch.Tensor) and memory(one.data).data_ptr() not in own:
                kept[memory(one.data).data_ptr()] = memory(one.data)
    return sum(storage.nbytes() for storage in kept.values())


def gradients(model: Any, ids: Any) -> Any:
    """All of them in a row, in float64."""
    import torch

    run_gpt2(model, ids).backward()
    found = [p.grad for p in model.parameters()]
    return torch.cat([(g.decode(torch.float64) if hasattr(g, "decode") else g.double()).flatten() for g in found])


def _in_float64(model: Any) -> Any:
    import halfulp as hu

    return hu.scaled.unscalify(copy.deepcopy(model)).double()


def memory_table() -> Table:
    """GPT-2 in four ways."""
    import torch

    import halfulp as hu

    table = Table("Memory that autograd keeps", {"vocabulary": "", "model": "", "MiB": ".2f", "x float32": ".3f"})
    table.columns |= {"gradients": ".2e", "bar": "", "met": ""}
    ways = {
        "float32": (lambda model: model, contextlib.nullcontext),
        "bfloat16 autocast": (lambda model: model, lambda: torch.autocast("cpu", torch.bfloat16)),
        'scaled float16, wide="none"': (lambda model: hu.scalify(model, wide="none"), contextlib.nullcontext),
        "scaled float16": (hu.scalify, contextlib.nullcontext),
    }
    for vocabulary in VOCABULARIES:
        whole = None
        for name, (change, context) in ways.items():
            model, ids = gpt2(vocabulary)
            model = change(model)
            wanted = gradients(_in_float64(model), ids)
            with context():
                found = kept_bytes(model, run_gpt2(model, ids))
                error = ((gradients(model, ids) - wanted).norm() / wanted.norm()).item()
            whole = whole or found
            row = {"vocabulary": str(vocabulary), "model": name, "MiB": found / 2**20, "x float32": found / whole}
            row["gradients"] = error
            has_bar = name == "scaled float16"
            bar = {"bar": f"<= {MOST:.3f}", "met": found / whole <= MOST} if has_bar else {"bar": "", "met": None}
            table.add(**row, **bar)
    return table


def step(shape: str, dtype: str, wide: str) -> Callable[[], None]:
    """A call that makes all gradients."""
    import torch

    import halfulp as hu

    model, batch = gpt2(512) if shape == "GPT-2" else model_and_batch(shape)
    hu.scalify(model, getattr(torch, dtype), wide=wide)

    def call() -> None:
        model.zero_grad(set_to_none=True)
        (run_gpt2(model, batch) if shape == "GPT-2" else loss(model, *batch)).backward()

    return call


def ratios(shape: str, dtype: str, rounds: int) -> list[float]:
    """CPU seconds of the default over those of "none", each between two of the other."""
    calls = {wide: step(shape, dtype, wide) for wide in ("none", "autocast")}
    for call in calls.values():
        call()

    def seconds(wide: str) -> float:
        start = time.process_time()
        for _ in range(3):
            calls[wide]()
        return time.process_time() - start

    gc.collect()
    found, before = [], seconds("none")
    for _ in range(rounds):
        middle, after = seconds("autocast"), seconds("none")
        found.append(2 * middle / (before + after))
        before = after
    return sorted(found)


def time_table(rounds: int) -> Table:
    """Eager steps of four models in two storages."""
    table = Table("Time", {"model": "", "payload": "", 'x "none"': ".2f", "low": ".2f", "high": ".2f"})
    for shape in SHAPES:
        for dtype in ("float16", "bfloat16"):
            found = ratios(shape, dtype, rounds)
            spread = {"low": found[rounds // 4], "high": found[-1 - rounds // 4]}
            table.add(**{"model": shape, "payload": dtype, 'x "none"': statistics.median(found)}, **spread)
    table.note = "Median and quartiles of the rounds."
    return table


def main() -> None:
    """Both tables, or one beside the other as the file has it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=("memory", "time"))
    arguments = parser.parse_args()
    set_threads(1)
    warnings.simplefilter("ignore")
    result = Result("wide", "float32 payloads: what they cost", TEXT, "python -m benchmarks.bench_wide")
    tables = (result.earlier_tables() if arguments.only else []) or [None, None]
    if arguments.only != "time":
        tables[0] = memory_table()
    if arguments.only != "memory":
        tables[1] = time_table(arguments.rounds)
    result.tables = [table for table in tables if table is not None]
    save(result)


if __name__ == "__main__":
    main()
