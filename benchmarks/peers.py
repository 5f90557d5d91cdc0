"""An environment of its own for the peers: `python -m benchmarks.peers` builds benchmarks/.peers."""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "benchmarks" / ".peers"
PYTHON = HOME / "bin" / "python"


@dataclass(frozen=True)
class Peer:
    """One package to compare with: what pip calls it (or where its source lies), what Python imports, and why."""

    package: str
    module: str
    why: str


PEERS = (
    Peer("torchao==0.18.0", "torchao", "AdamW with stochastic rounding; MX and NVFP4 casts"),
    Peer("torch-optimi==0.3.3", "optimi", "AdamW with Kahan summation"),
    Peer("qtorch==0.3.0", "qtorch", "QPyTorch: quantization to any exponent and mantissa"),
    Peer("microxcaling", "mx", "Microsoft's MX emulation (not on the package index when last tried)"),
    Peer("heavyball==3.2.1", "heavyball", "stochastic rounding and 8-bit corrections"),
    Peer("torch-dd==0.1.1", "torch_dd", "two float64 in one tensor (asks for Python 3.12, runs on 3.11)"),
    Peer("https://github.com/ydtydr/MCTensor", "MCTensor", "the published multi-component tensors"),
    Peer("pychop==0.6.2", "pychop", "quantization to any exponent and mantissa"),
    Peer("accelerate==1.15.0", "accelerate", "a trainer that halfulp observe runs unmodified, and HF's Trainer by it"),
    Peer("lightning==2.6.6", "lightning", "a trainer that halfulp observe runs unmodified"),
)
TOOLS = ("setuptools", "ninja")
EXTRAS = ".[cli,test]"


def pip(*arguments: str) -> subprocess.CompletedProcess:
    """Runs the environment's own pip and keeps what it said."""
    command = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)


def refuse_gpu_build() -> None:
    """Raises SystemExit when pip would fetch a CUDA build of torch.

    The comparison is on the CPU, and a CUDA build is gigabytes; a dry run shows what pip has in mind.
    """
    report = HOME / "torch.json"
    plan = pip("--dry-run", "--report", str(report), "-c", "constraints.txt", "torch==2.13.0")
    if plan.returncode != 0:
        raise SystemExit(f"pip cannot resolve torch==2.13.0:\n{plan.stderr.strip()}")
    names = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    heavy = sorted(name for name in names if name.startswith(("nvidia", "cuda")))
    if heavy:
        raise SystemExit(
            f"torch==2.13.0 would bring {len(heavy)} CUDA packages (such as {heavy[0]}). Make a CPU build "
            "of torch 2.13.0 visible to pip (for instance by --find-links or PIP_EXTRA_INDEX_URL) and try again."
        )


def installed(peer: Peer) -> subprocess.CompletedProcess:
    """By pip; a second time without its demands on Python, where those keep it out."""
    result = pip("-c", "constraints.txt", "torch==2.13.0", peer.package)
    if result.returncode != 0 and "Requires-Python" in result.stderr + result.stdout:
        return pip("--no-deps", "--ignore-requires-python", peer.package)
    return result


def cloned(peer: Peer) -> subprocess.CompletedProcess:
    """A repository that pip cannot install: its src folder is put on the path."""
    place = HOME / "src" / peer.module
    command = ["git", "clone", "-q", "--depth", "1", peer.package, str(place)]
    result = subprocess.run(command, text=True, capture_output=True, check=False)
    if result.returncode == 0 or place.exists():
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        folder = subprocess.run([str(PYTHON), "-c", code], text=True, capture_output=True, check=True).stdout.strip()
        (Path(folder) / f"{peer.module}.pth").write_text(f"{place / 'src'}\n")
    return result


def build() -> None:
    """Makes the environment: torch and halfulp, which must install, then every peer that will."""
    if not PYTHON.exists():
        venv.create(HOME, with_pip=True, clear=True)
    refuse_gpu_build()
    base = pip("-c", "constraints.txt", "torch==2.13.0", *TOOLS, "-e", EXTRAS)
    if base.returncode != 0:
        raise SystemExit(f"the base of the environment did not install:\n{base.stderr.strip()}")
    failed = {}
    for peer in PEERS:
        result = cloned(peer) if "://" in peer.package else installed(peer)
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
            failed[peer.module] = lines[-1] if lines else "did not install"
    (HOME / "failed.json").write_text(json.dumps(failed, indent=1))


def missing(module: str) -> str | None:
    """Why a peer cannot be used in this process, or None when it can be imported."""
    try:
        __import__(module)
    except Exception as error:  # a peer may fail at import in any way it likes
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return None


def version(package: str) -> str:
    """The installed version of a distribution, or 'absent'."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def status() -> dict[str, str]:
    """Package name -> its version, or 'absent' with the reason."""
    seen = {}
    for peer in PEERS:
        name = peer.module if "://" in peer.package else peer.package.split("==")[0]
        why = missing(peer.module)
        found = version(name) if "://" not in peer.package else peer.package
        seen[name] = found if why is None else f"absent ({why})"
    return seen


def main() -> None:
    """Builds the environment, or with --status says what it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--status", action="store_true", help="only say which peers can be imported here")
    if parser.parse_args().status:
        print(json.dumps(status(), indent=1))
        return
    build()
    shown = subprocess.run([str(PYTHON), "-m", "benchmarks.peers", "--status"], cwd=ROOT, check=False)
    sys.exit(shown.returncode)


if __name__ == "__main__":
    main()
