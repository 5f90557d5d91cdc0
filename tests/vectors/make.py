"""Write rounding.json: inputs and expected bits that any implementation of these roundings can be run against.

    python tests/vectors/make.py

Everything expected is made by the exact reference on rationals, not by a kernel; only the random streams are written
from `random_words`, whose definition is in its docstring. Bits are hexadecimal words; any NaN stands for every NaN.
"""

import json
import random
import struct
from fractions import Fraction
from pathlib import Path

import torch

from halfulp.formats import Format, get, names, round_exact
from halfulp.rounding import mix64, random_words

VERSION = 2
MODES = {"nearest": "nearest", "toward_zero": "zero", "up": "up", "down": "down"}
SEED, COUNTER = 20240229, 3


def word64(value: float) -> str:
    return struct.pack(">d", value).hex()


def numbers(format: Format, draw: random.Random) -> list[float]:
    """float64 numbers: of the format, halfway, a little off, tiny, huge, special."""
    found = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.5, format.max, -format.max, 1e-300, 1e300]
    tiny, top = format.smallest_subnormal, 2.0 ** (format.emax - format.mantissa_bits)
    found += [
        tiny,
        tiny / 2,
        -tiny / 2,
        tiny * 1.5,
        tiny / 4,
        format.smallest_normal,
        format.smallest_normal - tiny / 2,
    ]
    if format.emax < 1023:
        found += [format.max + top / 2, format.max + top / 4, -format.max - top, format.max + top * 0.75]
    for _ in range(24):
        exponent = draw.randint(max(format.emin - format.mantissa_bits - 2, -1070), min(format.emax + 1, 1022))
        significand = 1 + draw.getrandbits(format.mantissa_bits + 2) / 2.0 ** (format.mantissa_bits + 2)
        found.append(draw.choice([-1, 1]) * significand * 2.0**exponent)
        found.append(draw.uniform(-2, 2) * 2.0**exponent)
    return found


def fraction_bits(format: Format) -> int:
    """How many random bits are compared with a fraction."""
    return 29 - format.mantissa_bits if format.mantissa_bits <= 6 else 31


def rounding_vectors() -> list[dict]:
    draw = random.Random(VERSION)
    written = []
    for name in names():
        if name == "fp64":
            continue
        format = get(name)
        inputs, cases = numbers(format, draw), []
        for mode, exact in MODES.items():
            for policy in ("inf", "nan", "saturate"):
                if policy == "inf" and not format.infinities:
                    continue
                outputs = [word64(round_exact(x, format, exact, overflow=policy)) for x in inputs]
                cases.append({"rounding": mode, "overflow": policy, "outputs": outputs})
        words = random_words(mix64(SEED, COUNTER), torch.arange(len(inputs))).tolist()
        count = fraction_bits(format)
        draws = [Fraction((2 << count) - 1 - 2 * (word >> 32 - count), 2 << count) for word in words]
        outputs = [word64(round_exact(x, format, "stochastic", u)) for x, u in zip(inputs, draws)]
        stochastic = {"rounding": "stochastic", "seed": SEED, "counter": COUNTER, "overflow": format.overflow}
        cases.append({**stochastic, "outputs": outputs})
        written.append({"format": name, "inputs": [word64(x) for x in inputs], "cases": cases})
    return written


def stream_vectors() -> list[dict]:
    streams = []
    for seed, counter, start in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (2**64 - 1, 7, 2**32 - 4), (SEED, 2**40, 2**40)]:
        key = mix64(seed, counter)
        words = random_words(key, torch.arange(start, start + 8)).tolist()
        row = {"seed": str(seed), "counter": str(counter), "key": f"{key:016x}", "first_index": str(start)}
        streams.append({**row, "words": [f"{word:08x}" for word in words]})
    return streams


def main() -> None:
    content = {"version": VERSION, "rounding": rounding_vectors(), "streams": stream_vectors()}
    path = Path(__file__).with_name("rounding.json")
    path.write_text(json.dumps(content, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
