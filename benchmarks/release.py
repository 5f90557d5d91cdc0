"""Builds wheel and source distribution and tries both away from the repository: `python -m benchmarks.release`.

hatchling builds in an environment of its own. Each distribution is installed into an empty folder, beside the packages
of this Python, and there has to take one step of every system (tests/compatibility/one_step.py), answer on the command
line, run the code of docs/quick-start.md, and hold what the repository holds. With --fresh each gets an environment of
nothing but what its metadata asks for (gigabytes of torch). Other versions: `python tests/compatibility/run.py`.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "quick-start.md"
FORBIDDEN = re.compile(r"(^|/)(__pycache__|build|dist|\.hypothesis|\.peers)/|\.pyc$|^site/")


def run(command: list[str], **options) -> str:
    """What a command prints; its own error where it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution; the wheel made of the latter must be the same, file by file."""
    tools = folder / "tools"
    run([sys.executable, "-m", "venv", tools])
    run([tools / "bin" / "pip", "install", "-q", "hatchling>=1.27"])
    made = folder / "dist"
    run([tools / "bin" / "hatchling", "build", "-d", made], cwd=ROOT)
    (wheel,), (archive,) = made.glob("*.whl"), made.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run([tools / "bin" / "hatchling", "build", "-t", "wheel", "-d", folder / "again"], cwd=unpacked)
    (again,) = (folder / "again").glob("*.whl")
    assert contents(again) == contents(wheel), "the source distribution makes another wheel"
    return wheel, archive


def contents(wheel: Path) -> dict[str, str]:
    """The files of a wheel, each with a hash of what it holds."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def check_wheel(wheel: Path) -> None:
    """The wheel has every file of src, the types, the licence, and the metadata of pyproject.toml."""
    found = contents(wheel)
    wanted = {
        str(path.relative_to(SOURCE)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (SOURCE / "halfulp").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    package = {name: digest for name, digest in found.items() if ".dist-info/" not in name}
    assert package == wanted, set(package) ^ set(wanted)
    assert "halfulp/py.typed" in package
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in found if name.endswith("/METADATA"))).decode()
        entry = archive.read(next(name for name in found if name.endswith("/entry_points.txt"))).decode()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nVersion: {project['version']}\n" in metadata
    assert {*re.findall(r"^Provides-Extra: (.*)$", metadata, re.M)} == {*project["optional-dependencies"]}
    assert any(name.endswith("/licenses/LICENSE") for name in found)
    assert "halfulp = halfulp.cli:main" in entry


def check_archive(archive: Path) -> None:
    """The source distribution has what builds, tests and documents it, and nothing that was generated beside them."""
    with tarfile.open(archive) as tar:
        names = [name.partition("/")[2] for name in tar.getnames()]
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt"):
        assert name in names, f"{name} is not in {archive.name}"
    assert not [name for name in names if FORBIDDEN.search(name)]


def try_installed(distribution: Path, folder: Path, fresh: bool) -> dict:
    """Install it, away from the repository, and run what a user runs first."""
    home = folder / "work"
    home.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HALFULP_CACHE_DIR": str(folder / "kernels"), "OMP_NUM_THREADS": "1"}
    python = sys.executable
    if fresh:
        run([python, "-m", "venv", folder / "venv"])
        python = str(folder / "venv" / "bin" / "python")
        run([python, "-m", "pip", "install", "-q", f"{distribution}[cli]"])
    else:
        run([python, "-m", "pip", "install", "-q", "--no-deps", "--target", folder / "site", distribution])
        environment["PYTHONPATH"] = str(folder / "site")
    own = {"cwd": home, "env": environment}
    where = run([python, "-c", "import halfulp; print(halfulp.__file__)"], **own).strip()
    assert str(folder) in where, f"the halfulp of {where} was tried"
    assert (Path(where).parent / "py.typed").exists()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    (home / "quick_start.py").write_text(code)
    printed = run([python, "-W", "error", "quick_start.py"], **own)
    assert "updates lost in bf16" in printed, printed
    assert "e4m3fn" in run([python, "-m", "halfulp.cli", "formats"], **own)
    steps = run([python, ROOT / "tests" / "compatibility" / "one_step.py"], **own)
    return json.loads(steps.splitlines()[-1])


def main() -> None:
    """Build, look into both, try both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="install what the metadata asks for, nothing else")
    parser.add_argument("--out", type=Path, help="keep both distributions in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, archive = build(folder)
        check_wheel(wheel)
        check_archive(archive)
        short = {}
        for distribution in (wheel, archive):
            found = try_installed(distribution, folder / distribution.name.replace(".", "-"), options.fresh)
            bad = {system: said for system, said in found["systems"].items() if said != "passed"}
            short |= {f"{distribution.name}: {system}": said for system, said in bad.items()}
            size = distribution.stat().st_size / 1e6
            passed = f"{len(found['systems']) - len(bad)} of {len(found['systems'])} systems"
            print(f"{distribution.name}: {size:.1f} MB, {passed}, torch {found['torch']}, Python {found['python']}")
        if short:
            sys.exit(f"fell short: {short}")
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            for distribution in (wheel, archive):
                (options.out / distribution.name).write_bytes(distribution.read_bytes())


if __name__ == "__main__":
    main()
