"""Compiled training beside eager: `python -m benchmarks.bench_compiled [--only 'gpt2/*/step'] [--backend aot_eager]`.

Rows that a run does not choose stay as the file has them. The file is written after every row, and with `--keep` a
run goes on where another was stopped.
"""

import argparse
import copy
import dataclasses
import fnmatch
import gc
import time

from ._results import Result, Table, save

TITLE = "Compiled training"
TEXT = """Models of a few thousand parameters, trained for 12 steps on batches of changing size, eagerly and under \
torch.compile: the model alone ("model"), or one function of forward, backward and step ("step"). Apart: the largest \
difference of a loss from eager's, relative to it; eager and compiled rounding differ where a scale is chosen by \
looking at values, which graphs cannot, and where sums run in another order. Beside it the same model in plain \
float32, compiled, from its own eager run. Again: the most that any frame was compiled again after the first step. \
Rows are measured one by one: the commit below is that of the latest."""
STEPS = 12
ROWS = (8, 6, 7, 8, 5, 9)
TIME, WORDS, CLASSES = 12, 19, 5
# What the losses of a technique may differ by: one rounding of its storage, as steps add them up.
BARS = {
    "float32": 1e-4,
    "fp16": 1e-2,
    "e4m3": 0.1,
    "fp8 products": 5e-2,
    "two components": 1e-4,
    "scaler": 1e-4,
}
MOST = 2


# models -----------------------------------------------------------------------------------------------------


def mlp():
    """Layers, a norm and a GELU."""
    from torch import nn

    return Judged(nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, CLASSES)))


def cnn():
    """Convolutions, batch norms and pooling."""
    from torch import nn

    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3)]
    return Judged(nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES)))


def gpt2():
    """Hugging Face's GPT-2, which computes the loss itself."""
    import transformers

    sizes = {"vocab_size": WORDS, "n_positions": TIME, "n_embd": 16, "n_layer": 2, "n_head": 2}
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def llama():
    """Hugging Face's Llama, which computes the loss itself."""
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TIME}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


def lstm():
    """An embedding, two recurrent layers and a head."""
    import torch
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.layers = nn.Embedding(WORDS, 12), nn.LSTM(12, 16, num_layers=2, batch_first=True)
            self.head = nn.Linear(16, WORDS)

        def forward(self, ids):
            return self.head(self.layers(self.words(ids))[0][:, :-1])

    def loss(logits, ids):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Judged(Recurrent(), loss)


def moe():
    """Four experts, of which a gate takes two for each row."""
    import torch
    from torch import nn

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate, self.head = nn.Linear(10, 16), nn.Linear(16, 4), nn.Linear(16, CLASSES)
            self.up, self.down = (nn.Parameter(torch.randn(4, *size) / 4) for size in ((16, 24), (24, 16)))

        def forward(self, x):
            x = self.first(x)
            score, chosen = self.gate(x).softmax(1).topk(2, dim=1)
            weights = torch.zeros(x.shape[0], 4, dtype=score.dtype).scatter(1, chosen, 1.0)
            weights = weights * self.gate(x).softmax(1)
            made = torch.bmm(torch.bmm(x.expand(4, *x.shape), self.up).relu(), self.down)
            return self.head(x + (made * weights.T.unsqueeze(2)).sum(0))

    return Judged(Experts())


def Judged(net, loss=None):
    """A model that gives its loss beside its output."""
    import torch

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net
            self.judge = loss or torch.nn.functional.cross_entropy

        def forward(self, x, labels):
            out = self.net(x)
            return {"loss": self.judge(out, labels), "logits": out}

    return WithLoss()


MODELS = {"mlp": mlp, "cnn": cnn, "gpt2": gpt2, "llama": llama, "lstm": lstm, "moe": moe}


def batches(name: str) -> list[dict]:
    """What the model is called with, at every step."""
    import torch

    torch.manual_seed(1)
    found = []
    for step in range(STEPS):
        rows = ROWS[step % len(ROWS)]
        if name in ("mlp", "moe", "cnn"):
            shape = (rows, 3, 8, 8) if name == "cnn" else (rows, 10)
            found.append({"x": torch.randn(shape), "labels": torch.randint(CLASSES, (rows,))})
        else:
            ids = torch.randint(WORDS, (rows, TIME))
            found.append({"x" if name == "lstm" else "input_ids": ids, "labels": ids})
    return found


# techniques -------------------------------------------------------------------------------------------------


def technique(name: str, model):
    """The model made so, its optimizer, and its scaler."""
    import torch

    import halfulp as hu

    match name:
        case "fp16":
            hu.scalify(model, torch.float16)
        case "e4m3":
            hu.scalify(model, torch.float8_e4m3fn)
        case "fp8 products":
            hu.scalify(model, torch.float16, matmul="fp8")
        case "two components":
            hu.multicomponent(model, 2)
    scaler = None
    if name.startswith("scaler"):
        scaler = hu.AdaptiveGradScaler(model)
    if name == "two components":
        return torch.optim.SGD(model.parameters(), lr=0.05), None
    return hu.optim.AdamW(model.named_parameters(), lr=2e-3), scaler


TECHNIQUES = ("float32", "fp16", "e4m3", "fp8 products", "two components", "scaler")
PARTS = ("step", "model")


# a row ------------------------------------------------------------------------------------------------------


def stepper(run, optimizer, scaler):
    """One function of forward, backward and step."""
    from halfulp.recipes._optimizer import run_backward_and_step

    def step(batch):
        loss = run(**batch)["loss"]
        run_backward_and_step(loss, optimizer, scaler)
        return loss

    return step


def curve(name: str, how: str, part: str | None, backend: str) -> list[float]:
    """The losses of a training, compiled where a part is given."""
    import torch
    from torch._dynamo.utils import clear_compilation_metrics

    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer, scaler = technique(how, model)
    compiler = backend if scaler is None else scaler.backend(backend)
    run = torch.compile(model, backend=compiler) if part == "model" else model
    step = stepper(run, optimizer, scaler)
    if part == "step":
        step = torch.compile(step, backend=compiler)
    losses = []
    for batch in batches(name):
        losses.append(float(step(copy.copy(batch))))
        if len(losses) == 1:
            # What the first step compiles, for one module after another, is compiled for the first time.
            clear_compilation_metrics()
    return losses


def recompilations() -> int:
    """The most that any frame was compiled again after the first step."""
    from collections import Counter

    from torch._dynamo.utils import get_compilation_metrics

    again = Counter(
        (one.co_filename, one.co_firstlineno, one.co_name) for one in get_compilation_metrics() if one.recompile_reason
    )
    return max(again.values(), default=0)


def row(name: str, how: str, part: str, backend: str) -> dict:
    """Eager and compiled, compared."""
    import torch
    from torch._dynamo.utils import counters

    expected = curve(name, how, None, backend)
    torch._dynamo.reset()
    counters.clear()
    begin = time.perf_counter()
    try:
        found = curve(name, how, part, backend)
    except Exception as error:
        told = " ".join(str(error).split())
        # The words of the library, behind dynamo's.
        is_own = "would not be rounded" in told
        return {"refused": told.partition("raised: ")[2][:90] or told[:90], "met": None if is_own else False}
    seconds = time.perf_counter() - begin
    apart = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    again = recompilations()
    torch._dynamo.reset()
    gc.collect()
    cells = {"first": expected[0], "last": expected[-1], "compiled": found[-1], "apart": apart, "again": again}
    return {**cells, "seconds": seconds, "bar": f"{BARS[how]:g}, {MOST}", "met": apart <= BARS[how] and again <= MOST}


COLUMNS = {
    **{"model": "", "technique": "", "compiled part": "", "backend": "", "first": ".3f", "last": ".4f"},
    **{"compiled": ".4f", "apart": ".1e", "again": "", "seconds": ".0f", "bar": "", "refused": ""},
}


KEY = ("model", "technique", "compiled part", "backend")


def main() -> None:
    """All rows, or those that a pattern names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of model/technique/part")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--fresh", action="store_true", help="forget the rows that the file has")
    parser.add_argument("--keep", action="store_true", help="keep the rows that the file has, and go on")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    result = Result("compiled", TITLE, TEXT, "python -m benchmarks.bench_compiled")
    known = {} if given.fresh else result.earlier_rows(*KEY)
    order = {key: i for i, key in enumerate((m, t, p) for m in MODELS for t in TECHNIQUES for p in PARTS)}
    for key in order:
        name = (*key, given.backend)
        is_chosen = any(fnmatch.fnmatch("/".join(key), pattern) for pattern in given.only)
        if not is_chosen or (given.keep and name in known):
            continue
        known[name] = dict(zip(KEY, name)) | row(*key, given.backend)
        print(known[name], flush=True)
        rows = [known[found] for found in sorted(known, key=lambda found: (order[found[:3]], found[3]))]
        result.tables = [Table("Compiled beside eager", COLUMNS, rows)]
        save(dataclasses.replace(result))


if __name__ == "__main__":
    main()
