"""Trials shared among the ranks of torchrun: one process's results, and an end of all ranks when one fails or dies."""

import json
import os
import textwrap

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

# A task that a command knows by --extension; how its second rank goes wrong is in the environment.
TASK = """
import os
import torch
from halfulp.trials.tasks import Data, Task, register

@register
class Sign(Task):
    name, title, rule, steps, batch = "sign", "a sign", "SGD", 4, 2
    hyper = {"lr": 0.1}

    def load(self):
        part = torch.tensor([[-1.0], [-0.5], [0.5], [1.0]]), torch.tensor([0, 0, 1, 1])
        return Data(train=part, validation=part, note="four points")

    def model(self, data, seed):
        if os.environ.get("TRAP") == "raise" and os.environ.get("RANK") == "1" and seed == 1:
            raise ZeroDivisionError("a mistake in the task")
        torch.manual_seed(seed)
        return torch.nn.Linear(1, 2)
"""
# As torchrun starts ranks; one that dies does so before it has a worker, which would outlive it. Rank 0 is where they
# meet. `command` returns the exit code, what is printed, and what is said.
RANKS = """
import contextlib, io, json, multiprocessing, os, pathlib, signal, socket, sys, time, types, warnings
warnings.simplefilter("ignore")
rank, port = int(sys.argv[1]), pathlib.Path(sys.argv[2])
from halfulp.cli import main
from halfulp.trials.running import _pool, _ranks
forks = multiprocessing.get_context("fork")
_pool.multiprocessing = types.SimpleNamespace(get_context=lambda method: forks)
_ranks.MEET, _ranks.SILENT, _ranks._BEAT, _ranks._LOOK, _ranks._LEAVE = 60.0, 3.0, 0.1, 0.02, 2.0
os.environ["TRAP"] = TRAP

def start_rank():
    if rank == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            number = f"{free.getsockname()[1]} {os.getpid()}"
        port.with_suffix(".new").write_text(number)
        port.with_suffix(".new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    number, first = port.read_text().split()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": number}
    return int(first)

def command(*arguments, recipes="fp32,bf16", seeds=2):
    printed, said = io.StringIO(), io.StringIO()
    given = ["--extension", "sign_task.py", "compare", "--task", "sign", "--recipe", recipes, "--seeds", str(seeds)]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            main([*given, *arguments])
        except SystemExit as ending:
            code = ending.code
    print(code, said.getvalue(), flush=True)
    return code, printed.getvalue(), said.getvalue()
"""


@pytest.fixture
def on_ranks(tmp_path, monkeypatch, in_two_processes):
    """Runs a script after RANKS on two ranks, in a folder that has the task."""
    (tmp_path / "sign_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(script: str, trap: str = "") -> list[str]:
        in_two_processes(RANKS.replace("= TRAP", f"= {trap!r}") + textwrap.dedent(script))
        return [(tmp_path / f"output{rank}").read_text() for rank in range(2)]

    return run


def test_two_ranks_find_what_one_process_finds_and_take_over_what_it_has_finished(on_ranks, tmp_path):
    """Of four trials one process has kept two; the ranks train the others."""
    on_ranks("""
    if rank == 0:
        from halfulp._extensions import load
        from halfulp.trials import compare
        from halfulp.trials.running._plan import plan
        from halfulp.trials.running._store import Store
        load(["sign_task.py"])
        trials = plan("sign", ["fp32", "bf16"], 2, None, None)
        alone = compare("sign", ["fp32", "bf16"], seeds=2, workers=1)
        pathlib.Path("alone.json").write_text(alone.to_json())
        for trial, record in zip(trials[:2], alone.trials):
            Store("ranks").keep(trial, record["result"])
    start_rank()
    code, printed, said = command("--out", "ranks", "--resume")
    assert code == 0, said
    if rank:
        assert (printed, said) == ("", "")
    else:
        assert "2 trials in" in printed and "by 2 workers" in printed, printed
        assert said.count("kept") == 2 and "4/4" in said, said
    """)
    found = []
    for file in ("alone.json", "ranks/compare.json"):
        content = json.loads((tmp_path / file).read_text())
        for trial in content["trials"]:
            trial["result"].pop("step_ms")
        found.append(content["trials"])
    assert found[0] == found[1]
    assert len(os.listdir(tmp_path / "ranks" / "trials")) == 4


ENDS = {
    "a trial raises": (
        """
        start_rank()
        code, printed, said = command("--out", "out")
        assert (code, printed) == (2, ""), said
        if rank == 0:
            assert "rank 1: trial sign · bf16 · seed 1 failed: ZeroDivisionError: a mistake in the task" in said, said
            assert "more in out/error.log" in said and "--resume continues" in said, said
            assert "without a result are of rank 1 sign.bf16.seed1" in said, said
        """,
        ["sign.bf16.seed0.json", "sign.fp32.seed0.json", "sign.fp32.seed1.json"],
    ),
    "another recipe": (
        """
        start_rank()
        code, printed, said = command("--out", "out", recipes=("fp32,bf16", "fp32,bf16-kahan")[rank])
        assert (code, printed) == (2, ""), said
        if rank == 0:
            assert "rank 1: sign.bf16.seed0 is another one than on rank 0: start all ranks by one" in said, said
        """,
        None,
    ),
    "another version": (
        """
        if rank:
            import torch
            torch.__version__ = "1.0"
        start_rank()
        code, printed, said = command("--out", "out")
        assert (code, printed) == (2, ""), said
        if rank == 0:
            assert "rank 1: sign.fp32.seed0.versions.torch is another one than on rank 0: start all" in said, said
        """,
        None,
    ),
    "a folder that rank 0 refuses": (
        """
        pathlib.Path("out/trials").mkdir(parents=True, exist_ok=True)
        pathlib.Path("out/trials/other.json").write_text("")
        start_rank()
        code, printed, said = command("--out", "out")
        assert (code, printed) == (2, ""), said
        assert ("an interrupted comparison" in said) == (rank == 0), said
        """,
        ["other.json"],
    ),
    "rank 1 dies": (
        """
        if rank:
            _ranks.train_all = lambda *_, **__: os._exit(0)
        start_rank()
        code, printed, said = command("--out", "out")
        assert (code, printed) == (2, ""), said
        assert "rank 1 has not been heard of for 3 s; 2 of 4 trials are kept in out, --resume continues" in said, said
        assert "without a result are of rank 1 sign.bf16.seed0, sign.bf16.seed1" in said, said
        """,
        ["sign.fp32.seed0.json", "sign.fp32.seed1.json"],
    ),
    "rank 1 dies, and torchrun ends rank 0": (
        """
        first = start_rank()
        if rank:
            _ranks.train_all = lambda *_, **__: (time.sleep(0.2), os.kill(first, signal.SIGTERM), os._exit(0))
        code, printed, said = command("--out", "out")
        assert (code, printed) == (2, ""), said
        assert "ended by SIGTERM, as torchrun ends all ranks where one failed or died; " in said, said
        assert "without a result are" in said, said
        """,
        None,
    ),
    "rank 0 dies": (
        """
        if rank == 0:
            _ranks.train_all = lambda *_, **__: os._exit(0)
        start_rank()
        code, printed, said = command("--out", "out")
        assert (code, printed) == (2, ""), said
        assert "the store of torchrun does not answer any more" in said, said
        assert "this is rank 1; rank 0 keeps what has finished" in said, said
        """,
        None,
    ),
}


@pytest.mark.parametrize(("script", "kept"), ENDS.values(), ids=ENDS)
def test_whichever_rank_ends_early_all_end_with_a_sentence(on_ranks, tmp_path, script, kept):
    on_ranks(script, trap="raise" if "ZeroDivisionError" in script else "")
    if kept is not None:
        assert sorted(os.listdir(tmp_path / "out" / "trials")) == kept


def test_ranks_that_cannot_meet_are_told_how(monkeypatch):
    from halfulp.trials.running._ranks import join_ranks

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 .* variable RANK expected.*or unset WORLD_SIZE"), join_ranks():
        pass
    monkeypatch.setenv("WORLD_SIZE", "1")
    with join_ranks() as alone:
        assert alone is None
