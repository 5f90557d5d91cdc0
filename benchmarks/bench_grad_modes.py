"""Whether scaled operators give one set of numbers in every mode of autograd: `python -m benchmarks.bench_grad_modes`.

Every float32 entry of torch.testing's op_db that is neither sparse nor jiterator, on all of its sample inputs as scaled
tensors: with gradients, under torch.no_grad and under torch.inference_mode, where torch hands whole composite operators
to a tensor subclass that it takes apart elsewhere. Results must have the same bits, or the same refusal.
"""

import argparse
import random
import time
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor

from ._results import Result, Table, save, show
from .bench_op_coverage import UNINITIALISED, name_of, operators

# Payload and logical dtype.
KINDS = ((torch.float16, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16))
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
EXPONENTS = (-12, 12)
# What differs, and why; anything else is a defect.
_BY_ADDRESS = "LAPACK's least squares differ in the last bits with the address of what they work on, plain ones too"
KNOWN = {"linalg.lstsq": _BY_ADDRESS, "linalg.lstsq.grad_oriented": _BY_ADDRESS}


@dataclass
class Entry:
    """What one operator of op_db did on its samples."""

    name: str
    samples: int = 0
    refused: int = 0
    problem: str = ""


def examined(op, seed: int = 0, most: int | None = None, kinds=KINDS) -> Entry:
    """One entry on its samples, or on so many of them, in every kind; the seed decides samples and scales."""
    entry, chance = Entry(name_of(op)), random.Random(f"{seed} {name_of(op)}")
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=False)))
        if most is not None and len(samples) > most:
            samples = chance.sample(samples, most)
        for number, sample in samples:
            given = (sample.input, *sample.args), sample.kwargs
            if not any(_floating(x) for x in tree_leaves(given)):
                continue
            for storage, logical in kinds:
                entry.samples += 1
                entry.problem = entry.problem or _differs(op, given, storage, logical, seed + number, chance.random())
    return entry


def _differs(op, given, storage: torch.dtype, logical: torch.dtype, seed: int, scales: float) -> str:
    """How the modes differ on one sample, or nothing."""

    def outcome(most: int, is_scaled: bool = True) -> object:
        return _outcome(op, given, storage, logical, seed, scales, most, is_scaled)

    expected, most = outcome(0), 0
    for asked in (1, 100) if op.supports_autograd else ():  # torch has no gradients to some arguments
        found = outcome(asked)
        if not isinstance(found, Exception):
            expected, most = found, asked
    for mode, enter in MODES.items():
        with enter():
            found = outcome(0)
        why = _compared(name_of(op), expected, found)
        if not why:
            continue
        with enter():
            plain = outcome(0, is_scaled=False)
        if not _compared(
            name_of(op), outcome(most, is_scaled=False), plain
        ):  # where plain tensors differ, so may these
            return f"{mode}, {storage} payload of {logical}: {why}"
    return ""


def _outcome(
    op, given, storage: torch.dtype, logical: torch.dtype, seed: int, scales: float, most: int, is_scaled: bool
) -> object:
    """The results, where so many arguments want gradients at most, or the error; of plain arguments for comparison."""
    chance, seen = random.Random(scales), {}

    def convert(x):
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            return x
        if not x.is_floating_point():
            return x.clone()
        if id(x) not in seen:
            exponent = chance.randint(*EXPONENTS)
            payload = (x.detach() * 2.0**-exponent).to(storage)
            payload = torch.where(payload.isinf(), x.detach().to(storage), payload)
            made = ScaledTensor(payload, 2.0**exponent, logical)
            seen[id(x)] = (made if is_scaled else made.decode(torch.float32)).requires_grad_(len(seen) < most)
        return seen[id(x)]

    arguments, options = tree_map(convert, given)
    torch.manual_seed(seed)
    try:
        return op(*arguments, **options)
    except Exception as error:
        return error


def _compared(name: str, expected, found) -> str:
    if isinstance(expected, Exception) or isinstance(found, Exception):
        same = isinstance(expected, Exception) and isinstance(found, Exception)
        said = expected if not isinstance(found, Exception) else found
        return "" if same else f"one is refused: {type(said).__name__}: {str(said)[:120]}"
    left, right = tree_leaves(expected), tree_leaves(found)
    if len(left) != len(right):
        return f"{len(right)} results for {len(left)}"
    for number, (x, y) in enumerate(zip(left, right)):
        if type(x) is not type(y):
            return f"result {number} is {type(y).__name__}, with gradients {type(x).__name__}"
        if isinstance(x, Tensor) and (why := _tensors_differ(name, x.detach(), y.detach())):
            return f"result {number}: {why}"
        if not isinstance(x, Tensor) and x != y and x == x:
            return f"result {number} is {y}, with gradients {x}"
    return ""


def _tensors_differ(name: str, x: Tensor, y: Tensor) -> str:
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{y.dtype}{list(y.shape)}, with gradients {x.dtype}{list(x.shape)}"
    if name.split(".")[0] in UNINITIALISED:
        return ""
    if isinstance(x, ScaledTensor):
        if x.payload.dtype != y.payload.dtype:
            return f"a payload of {y.payload.dtype}, with gradients {x.payload.dtype}"
        x, y = x.decode(torch.float64), y.decode(torch.float64)
    if x.layout != torch.strided:
        x, y = x.to_dense(), y.to_dense()
    if same_bits(x.resolve_conj().contiguous(), y.resolve_conj().contiguous()):
        return ""
    off = (x.to(torch.complex128) - y.to(torch.complex128)).abs().nan_to_num(nan=torch.inf).max().item()
    return f"off by {off:.2g}, the largest being {x.to(torch.complex128).abs().nan_to_num().max().item():.2g}"


def _floating(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def table(entries: list[Entry]) -> list[Table]:
    """The count of equal entries, and those that differ."""
    summary = Table("Modes of autograd over op_db", {"entries": "", "samples": "", "equal": "", "bar": "", "met": ""})
    equal = sum(not entry.problem or entry.name in KNOWN for entry in entries)
    samples = sum(entry.samples for entry in entries)
    summary.add(entries=len(entries), samples=samples, equal=equal, bar="all", met=equal == len(entries))
    wrong = Table("Entries that differ", {"entry": "", "what": "", "why": ""})
    for entry in entries:
        if entry.problem:
            wrong.add(entry=entry.name, what=entry.problem, why=KNOWN.get(entry.name, "unknown"))
    return [summary, wrong]


def main() -> None:
    """All entries, or those whose names hold a word; the table, and the JSON where all ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only entries whose names hold one of these")
    parser.add_argument("--most", type=int, help="samples per entry; all by default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    entries = []
    for op in operators():
        if options.words and not any(word in name_of(op) for word in options.words):
            continue
        start = time.perf_counter()
        entries.append(examined(op, options.seed, options.most))
        if entries[-1].problem or time.perf_counter() - start > 10:
            print(f"{entries[-1]} {time.perf_counter() - start:.1f} s", flush=True)
    result = Result(
        "grad_modes",
        "Scaled operators in every mode of autograd",
        "Every float32 entry of torch's op_db that has a floating input and is neither sparse nor jiterator, on all of "
        "its sample inputs as scaled tensors (float16, float32 and bfloat16 payloads of float32, float16 and bfloat16) "
        "under random powers of two: results with gradients, under no_grad and under inference_mode, bit for bit.",
        "python -m benchmarks.bench_grad_modes",
        tables=table([entry for entry in entries if entry.samples]),
    )
    if options.words or options.most:
        show(result)
    else:
        save(result)


if __name__ == "__main__":
    main()
