"""Whether every kernel still gives the bits that are on record: `python -m benchmarks.bench_bits`.

`--new` records combinations that are not on record yet. `--write` records all anew, which a commit does that means to
change bits, and says so. The record is tests/vectors/bits.json; tests/test_bits.py looks at a sample of it.
"""

import argparse
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tests.laws.optim import cases

import halfulp as hu
from halfulp.rounding import random_words

from ._results import Result, Table, save

RECORD = Path(__file__).resolve().parents[1] / "tests" / "vectors" / "bits.json"
TEXT = """A digest of the results of every combination that the library accepts, of inputs that hold every pair of \
special values, random bit patterns and ordinary numbers: optimizer steps (rule, weight update, store, state codec), \
roundings (format, mode, dtype), block formats, exact sums, MCTensor's arithmetic, the random stream. A digest that \
differs from the one on record is a change of bits that no commit has declared. NaNs count as equal."""
WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MODES = ("nearest", "toward_zero", "up", "down", "stochastic")
STEPS = 3

Case = Callable[[], list[torch.Tensor]]


def digest(tensors: list[torch.Tensor]) -> str:
    """Sixteen hexadecimal digits of some tensors' bits, shapes and dtypes."""
    found = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().contiguous()
        if plain.is_floating_point():
            plain = torch.where(plain.isnan(), torch.full_like(plain, torch.nan), plain)
        found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        found.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def steps() -> Iterator[tuple[str, Case]]:
    """Three steps of every (rule, weight update, store, state codec)."""
    weights, gradients = cases.special_pairs(0)

    def run(rule: str, update: str, store: str, codec: str) -> list[torch.Tensor]:
        parameter = torch.nn.Parameter(cases.fit(weights, store))
        optimizer = cases.build(rule, update, [parameter], store, state_dtype=cases.CODECS[codec])
        for step in range(STEPS):
            parameter.grad = gradients.roll(step, 0).to(parameter.dtype)
            optimizer.step()
        return list(cases.snapshot(optimizer).values())

    for (rule, update, store), codec in itertools.product(cases.combinations(), cases.CODECS):
        if cases.rule_of(rule).states or codec == "default":  # without states there is no codec to speak of
            yield f"{rule} {update} {store} {codec}", lambda given=(rule, update, store, codec): run(*given)


def inputs(dtype: torch.dtype) -> torch.Tensor:
    """Special values, random bit patterns and ordinary numbers in a dtype."""
    rows = torch.cat(cases.special_pairs(1))
    return rows.double().mul(1 + 2.0**-40).to(dtype) if dtype == torch.float64 else rows.to(dtype)


def roundings() -> Iterator[tuple[str, Case]]:
    """Every format and block format under every rounding, from every dtype that holds it."""
    names = [(name, hu.formats.get(name)) for name in hu.formats.names()]
    names += [(name, hu.formats.get_block(name)) for name in hu.formats.block_names()]

    def run(form: object, mode: object, dtype: torch.dtype) -> list[torch.Tensor]:
        try:
            return [hu.quantize(inputs(dtype), form, mode, counter=3)]
        except ValueError:
            return []  # the dtype cannot hold the format's numbers

    for (name, form), mode, dtype in itertools.product(names, MODES, WIDE):
        how = hu.Stochastic(seed=5) if mode == "stochastic" else mode
        yield f"{name} {mode} {dtype}", lambda given=(form, how, dtype): run(*given)


def exact_sums() -> Iterator[tuple[str, Case]]:
    """Sums and dot products of rows, columns and everything."""
    for dtype, dim in itertools.product(WIDE, (0, 1, None)):
        x = torch.randn(65, 130, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        x = torch.ldexp(x, torch.arange(130) % 41 - 20).to(dtype)
        yield f"sum {dtype} {dim}", lambda x=x, dim=dim: [hu.exact_sum(x, dim)]
        yield f"dot {dtype} {dim}", lambda x=x, dim=dim: [hu.exact_dot(x, x.flip(0), dim)]


OPERATORS: dict[str, Callable] = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "/": torch.div,
    "sum": lambda a, b: a.sum(1),
    "square": lambda a, b: a.square(),
    "sqrt": lambda a, b: a.abs().sqrt(),
    "multiply by number": lambda a, b: a * 3.5,
}


def expansions() -> Iterator[tuple[str, Case]]:
    """MCTensor's arithmetic by dtype and number of components."""

    def operands(dtype: torch.dtype, components: int) -> list[hu.MCTensor]:
        generator = torch.Generator().manual_seed(4)
        halves = (torch.randn(2, 33, 65, generator=generator, dtype=torch.float64) for _ in range(2))
        encode = hu.MCTensor.encode
        return [
            encode(high, components=components, dtype=dtype)
            + encode(low * 2.0**-12, components=components, dtype=dtype)
            for high, low in halves
        ]

    def run(operator: Callable, dtype: torch.dtype, components: int) -> list[torch.Tensor]:
        result = operator(*operands(dtype, components))
        return [*result.components, *([] if result.scale is None else [result.scale])]

    for (name, operator), dtype, components in itertools.product(OPERATORS.items(), WIDE, (1, 2, 3)):
        yield f"{name} {dtype} {components}", lambda given=(operator, dtype, components): run(*given)


def streams() -> Iterator[tuple[str, Case]]:
    """The random words of some keys."""
    for key in (0, 1, 2**63, 0x123456789ABCDEF):
        yield f"words {key:x}", lambda key=key: [random_words(key, torch.arange(4096))]


FAMILIES: dict[str, Callable[[], Iterator[tuple[str, Case]]]] = {
    "optimizer steps": steps,
    "roundings": roundings,
    "exact sums": exact_sums,
    "MCTensor": expansions,
    "random stream": streams,
}


def differing(family: str, record: dict[str, str], every: int = 1) -> tuple[list[str], dict[str, str]]:
    """The cases of a family whose digest is not the one on record, of each `every`-th, and all their digests."""
    found = {name: digest(run()) for name, run in itertools.islice(FAMILIES[family](), 0, None, every)}
    return [name for name, value in found.items() if record.get(name) != value], found


def record_new(record: dict[str, dict[str, str]]) -> int:
    """Put the digests of combinations that a record lacks into it, and return how many."""
    count = 0
    for family, cases_of in FAMILIES.items():
        held = record.setdefault(family, {})
        new = {name: digest(run()) for name, run in cases_of() if name not in held}
        held |= new
        count += len(new)
    return count


def main() -> None:
    """Compares, or records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record the bits of today")
    parser.add_argument("--new", action="store_true", help="record the combinations that are not on record")
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if given.new:
        print(f"{record_new(record)} new combinations")
        RECORD.write_text(json.dumps(record, indent=0) + "\n")
        return
    result = Result("bits", "The same bits as on record", TEXT, "python -m benchmarks.bench_bits")
    table = Table(
        "Bits on record", {"family": "", "combinations": ",", "differ": ",", "first": "", "bar": "", "met": ""}
    )
    new = {}
    for family in FAMILIES:
        different, new[family] = differing(family, record.get(family, {}))
        gone = sorted(set(record.get(family, {})) - set(new[family]))
        wrong = different + gone
        table.add(
            family=family, combinations=len(new[family]), differ=len(wrong), first=wrong[0] if wrong else "", bar="0",
            met=not wrong,
        )  # fmt: skip
    if given.write:
        RECORD.write_text(json.dumps(new, indent=0) + "\n")
    result.tables = [table]
    save(result)


if __name__ == "__main__":
    main()
