"""The tests on a processor that has less than this one: `python -m benchmarks.bench_processors [test ...]`.

LLVM, ATen, oneDNN and MKL are told to leave out vector instructions that this processor has. What is promised on every
machine must hold under each setting.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile

from ._harness import ROOT
from ._results import Result, Table, save

NO_AVX512 = "-avx512f,-avx512bw,-avx512cd,-avx512dq,-avx512vl,-avx512vnni,-avx512bf16,-avx512vbmi,-avx512vbmi2"
SETTINGS = {
    "as it is": {},
    "no AVX-512": {
        "HALFULP_CPU_NAME": "x86-64-v3",
        "HALFULP_CPU_FEATURES": f"+avx2,+fma,+f16c,{NO_AVX512}",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "no AVX": {
        "HALFULP_CPU_NAME": "generic",
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}
# What holds the promises of bits: kernels, roundings, exact sums, expansions, products by bounds, the fused step; and
# what else takes samples.
TESTS = (
    "tests/kernels",
    "tests/rounding",
    "tests/arithmetic",
    "tests/laws/test_formats.py",
    "tests/laws/test_model_transforms.py",
    "tests/laws/optim/test_fused_steps.py",
    "tests/laws/optim/test_shards.py",
    "tests/mctensor/training/test_model_training.py",
    "tests/optim/test_rescaling.py",
    "tests/optim/checkpoint/test_flat_states.py",
    "tests/optim/checkpoint/test_writes_after_loading.py",
    "tests/optim/parameters/test_outside_writes.py",
    "tests/optim/parameters/test_put_back.py",
    "tests/optim/parameters/test_weights.py",
    "tests/optim/step/test_scales.py",
    "tests/optim/step/test_triton_launch.py",
    "tests/optim/weight_updates/test_split.py",
    "tests/optim/weight_updates/test_kahan.py",
)
TEXT = (
    "pytest on the tests that hold which bits are the same on every machine, with this processor's features cut down."
)


def run(tests: list[str], setting: dict[str, str]) -> tuple[dict[str, int], list[str]]:
    """How many tests passed, failed and were skipped, and the names of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        # Inductor's cache does not know ATEN_CPU_CAPABILITY: code for other vectors would be run, beyond its buffers.
        caches = {"HALFULP_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        environment = {**os.environ, **setting, **caches, "OMP_NUM_THREADS": "1"}
        environment.setdefault("HALFULP_TEST_SEED", "20261122")
        environment.setdefault("HALFULP_TEST_WHOLE", "1")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rf", "--tb=no", *tests]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if not counts:
        where = re.findall(r'^  File ".*/(tests/\S+\.py)", line \d+ in (test_\w+)', done.stderr, re.MULTILINE)
        return {"error": 1}, [f"ended with code {done.returncode} in {'::'.join(where[0]) if where else last}"]
    return counts, re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)


def main() -> None:
    """Run all settings; the exit code is 1 where a test fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=list(TESTS))
    given = parser.parse_args()
    table = Table("Cut-down processors", {"processor": "", "passed": "", "failed": "", "skipped": "", "which": ""})
    for name, setting in SETTINGS.items():
        counts, failed = run(given.tests, setting)
        lost = counts.get("failed", 0) + counts.get("error", 0)
        cells = {"passed": counts.get("passed", 0), "failed": lost, "skipped": counts.get("skipped", 0)}
        table.add(processor=name, **cells, which=", ".join(failed[:5]), bar="0 failed", met=not lost)
        print(name, counts, *failed, flush=True)
    table.note = "Tests: " + ", ".join(given.tests)
    save(Result("processors", "Processors", TEXT, "python -m benchmarks.bench_processors", tables=[table]))
    raise SystemExit(any(not row["met"] for row in table.rows))


if __name__ == "__main__":
    main()
