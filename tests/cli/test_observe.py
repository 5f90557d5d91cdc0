"""halfulp observe: scripts of users, run as they are; how they end; what is written of them."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halfulp.observation.scripts._watch import CHILD_PROCESS_REMEDY

LOOP = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
for step in range(12):
    loss = nn.functional.mse_loss(model(torch.randn(8, 16).bfloat16()).float(), torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step == 5:
        {ending}
"""

# A server's filters are those of tests.
ALONE = "import warnings; warnings.resetwarnings()\n"


@pytest.fixture
def observe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a script's text under `halfulp observe` in this process: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def call(text: str, *arguments: str, options: tuple[str, ...] = ("--interval", "3")) -> tuple[int, str, str]:
        from halfulp.cli import main

        Path("secret-script.py").write_text(text)
        with pytest.raises(SystemExit) as caught:
            main(["observe", *options, "secret-script.py", *arguments])
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


def written(folder: str = "halfulp-observe") -> dict:
    return json.loads(Path(folder, "observe.json").read_text())


def test_a_plain_loop_is_observed_and_what_is_written_names_nobody(observe):
    init, backward = torch.optim.Optimizer.__init__, torch.autograd.backward
    code, out, err = observe(LOOP.format(ending="pass"), "--token", "hunter2")
    assert (code, err) == (0, "")
    assert "updates-lost" in out
    content = written()
    assert content["steps"] == 11
    assert content["ended"] == "finished"
    found = {finding["code"] for finding in content["findings"]}
    assert {"updates-lost", "weight-frozen"} <= found
    where = {name for finding in content["findings"] for name in finding["where"]}
    assert "1.weight" in where, "names are those of the model, with nothing before them"
    history = content["record"]["history"]
    assert [step["step"] for step in history if step["sampled"]] == [0, 3, 6, 9]
    assert history[3]["loss"] > 0, "the loss of a sampled step is seen where backward begins"
    assert history[-2]["scheduled"] == 1, "the scheduler is found"
    kept = "".join(path.read_text() for path in Path("halfulp-observe").iterdir())
    assert "<html" in kept
    for secret in ("hunter2", "secret-script", str(Path.cwd())):
        assert secret not in kept
    assert (torch.optim.Optimizer.__init__, torch.autograd.backward) == (init, backward)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_the_bits_of_a_training_are_those_without_observing(observe, in_bare_process):
    text = LOOP.format(ending="pass") + "torch.save(model.state_dict(), sys.argv[1])\n"
    observe(text, "seen.pt", options=("--interval", "1"))
    in_bare_process(text, "alone.pt")
    seen, alone = torch.load("seen.pt"), torch.load("alone.pt")
    assert all(torch.equal(seen[name], alone[name]) for name in alone)


def test_the_script_finds_what_python_would_give_it(observe, tmp_path):
    Path("beside.py").write_text("value = 3\n")
    text = """
import sys, os, beside
assert __name__ == "__main__" and os.path.basename(__file__) == "secret-script.py", (__name__, __file__)
assert sys.modules["__main__"].__dict__ is globals()
print(beside.value, sys.argv[1:], sys.path[0])
"""
    before = list(sys.path), sys.argv
    code, out, err = observe(text, "--interval", "x", "-v")
    assert out.splitlines()[0] == f"3 ['--interval', 'x', '-v'] {tmp_path}"
    assert (list(sys.path), sys.argv) == before
    assert code == 2
    assert "the script never stepped a torch optimizer" in err
    sys.modules.pop("beside")


def test_json_is_one_object_and_the_script_prints_elsewhere(observe):
    code, out, err = observe("print('noise')" + LOOP.format(ending="pass"), options=("--json",))
    assert code == 0
    assert json.loads(out)["steps"] == 11
    assert err.startswith("noise")


def test_a_crash_shows_its_traceback_first_and_then_what_was_seen(observe):
    code, out, err = observe(LOOP.format(ending="raise RuntimeError('boom')"))
    assert code == 1
    lines = err.splitlines()
    assert lines[0].startswith("Traceback")
    assert any("secret-script.py" in line for line in lines)
    assert "RuntimeError: boom" in lines
    assert lines[-1] == "halfulp: the script crashed after 5 observed steps; what was observed until then:"
    assert "updates-lost" in out
    content = written()
    assert content["steps"] == 5
    assert content["ended"] == "crashed"
    assert "crashed after 5 observed steps" in content["record"]["unseen"][0]


def test_a_syntax_error_and_a_crash_before_the_first_step(observe):
    code, _, err = observe("def f(:\n")
    assert code == 1
    assert "SyntaxError" in err
    assert "crashed before a torch optimizer had stepped twice: nothing was observed" in err
    assert not Path("halfulp-observe", "observe.json").exists()


@pytest.mark.parametrize(
    ("ending", "expected"),
    [("sys.exit()", 0), ("sys.exit(7)", 7), ("sys.exit('no more data')", 1), ("raise SystemExit(0)", 0)],
)
def test_exit_codes_are_the_scripts_own(observe, ending, expected):
    code, out, err = observe(LOOP.format(ending=ending))
    assert code == expected
    assert "updates-lost" in out
    assert ("no more data" in err) == ("no more data" in ending)
    assert written()["steps"] == 5


def test_an_interrupt_leaves_a_report(observe):
    code, out, err = observe(LOOP.format(ending="raise KeyboardInterrupt"))
    assert code == 2
    assert "was interrupted after 5 observed steps" in err
    assert "updates-lost" in out
    assert written()["ended"] == "interrupted"


def test_one_step_alone_is_too_few(observe):
    code, _, err = observe(LOOP.format(ending="pass").replace("range(12)", "range(1)"))
    assert code == 2
    assert "never stepped a torch optimizer twice" in err
    assert "a training is observed from its second step on; where a script trains in processes" in err


KILL = "os.kill(os.getpid(), signal.SIGTERM)"
TERMINATIONS = {
    "swallowed": f"""
        try:
            {KILL}
        except BaseException:
            pass
        """,
    "held up": f"""
        import threading
        threading.Thread(target=threading.Event().wait).start()
        try:
            {KILL}
        finally:
            threading.Event().wait(60)
        """,
    "twice": f"""
        text = __import__("halfulp.observation.observing._observation", fromlist=["x"]).RunSummary
        text.__str__, said = lambda report: [said(report), {KILL}][0], text.__str__
        {KILL}
        """,
}


LATE = f"""
from halfulp.observation.observing._observation import RunSummary
said = RunSummary.__str__
RunSummary.__str__ = lambda report: [said(report), {KILL}][0]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("how", [*TERMINATIONS, "in the report"])
def test_nothing_of_the_script_holds_a_termination_up_and_a_second_one_leaves_the_report(
    tmp_path, monkeypatch, forking, how
):
    text = "import os, signal" + LOOP.format(ending=TERMINATIONS.get(how, "pass"))
    (tmp_path / "train.py").write_text(text + (LATE if how == "in the report" else ""))
    monkeypatch.chdir(tmp_path)
    started = forking(f"{ALONE}from halfulp.cli import main; main()", "observe", "--interval", "3", "train.py")
    code, errors = started.code(), started.errors.read_text()
    assert code == (0 if how == "in the report" else 128 + signal.SIGTERM), errors
    content = json.loads((tmp_path / "halfulp-observe" / "observe.json").read_text())
    expected = (11, "finished") if how == "in the report" else (5, "terminated")
    assert (content["steps"], content["ended"]) == expected
    assert (tmp_path / "halfulp-observe" / "observe.html").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_termination_leaves_a_report(tmp_path, monkeypatch, forking):
    ending = """
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM, "a forked child is ended by the signal itself"
        """
    text = "import os, signal" + LOOP.format(ending=ending + "os.kill(os.getpid(), signal.SIGTERM)")
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    started = forking(f"{ALONE}from halfulp.cli import main; main()", "observe", "--interval", "3", "train.py")
    code, errors = started.code(), started.errors.read_text()
    assert code == 128 + signal.SIGTERM, errors
    assert "updates-lost" in started.output.read_text()
    content = json.loads((tmp_path / "halfulp-observe" / "observe.json").read_text())
    assert (tmp_path / "halfulp-observe" / "observe.html").exists()
    assert (content["steps"], content["ended"]) == (5, "terminated")
    assert "was terminated after 5 observed steps" in errors


def test_a_missing_script_and_a_folder_that_cannot_be_written(observe, tmp_path, capsys):
    from halfulp.cli import main

    with pytest.raises(SystemExit) as caught:
        main(["observe", "nothing.py"])
    assert caught.value.code == 2
    assert "there is no file 'nothing.py'" in capsys.readouterr().err
    Path("file").write_text("")
    code, out, err = observe("raise AssertionError('this must not run')", options=("--out", "file/inside"))
    assert code == 2
    assert "cannot write file/inside" in err
    assert "must not run" not in out + err


def test_a_full_disk_is_said_after_the_report(observe, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("halfulp.pages._page.os.replace", full)
    code, out, err = observe(LOOP.format(ending="pass"))
    assert code == 2
    assert "updates-lost" in out
    assert "No space left on device" in err


def test_a_script_that_closes_standard_output_leaves_the_page(observe, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # puts it back
    code, _, err = observe(LOOP.format(ending="sys.stdout = open('output', 'w'); sys.stdout.close()"))
    assert code == 2, err
    assert written()["findings"]
    assert Path("halfulp-observe", "observe.html").exists()


def test_two_models_and_an_optimizer_that_comes_later(observe):
    text = """
import torch
from torch import nn

class Maker(nn.Linear): ...
class Judge(nn.Linear): ...
maker, judge = Maker(4, 4), Judge(4, 1)
optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (maker, judge)]
def train(steps):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
            judge(maker(torch.randn(8, 4))).square().mean().backward()
            optimizer.step()
train(5)
optimizers.append(torch.optim.SGD(judge.parameters(), lr=0.1))
train(3)
"""
    code, out, _ = observe(text, options=("--interval", "2"))
    assert code == 0
    content = written()
    assert content["steps"] == 7
    assert {parameter["name"].partition(".")[0] for parameter in content["record"]["parameters"]} == {"Maker", "Judge"}
    assert "SGD made its first step when others had made two" in content["record"]["unseen"][0]
    assert "not observed: SGD made its first step" in out


def test_parameters_without_a_module_are_named_as_unseen(observe):
    text = """
import torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    weight.grad = torch.ones(4)
    optimizer.step()
"""
    code, _, err = observe(text)
    assert code == 2
    assert "no module holds" in err


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model(observe):
    text = LOOP.format(ending="pass").replace("for step", "plain = model\nmodel = torch.compile(plain)\nfor step", 1)
    code, _, err = observe(text.replace("torch.compile(plain)", "torch.compile(plain, backend='aot_eager')"))
    assert (code, err) == (0, "")
    content = written()
    assert content["steps"] == 11
    assert "1.weight" in {parameter["name"] for parameter in content["record"]["parameters"]}
    assert any("compiled" in sentence for sentence in content["record"]["unseen"])


def run(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# As torchrun starts `-m halfulp.cli observe`.
ON_RANKS = """
import os, runpy, sys, warnings
warnings.resetwarnings()
os.environ |= {"RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1], "WORLD_SIZE": "2"}
sys.argv = ["-m", "observe", "--interval", "2", "script.py", sys.argv[2]]
runpy.run_module("halfulp.cli", run_name="__main__")
"""


def test_of_two_processes_the_first_alone_reports(tmp_path, monkeypatch, in_two_processes):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    text = """
import os, sys
import torch
from torch import nn
import torch.distributed as dist
ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], **ranks)
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 16).bfloat16()).float().square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
    (tmp_path / "script.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    in_two_processes(ON_RANKS)
    printed = [(tmp_path / f"output{rank}").read_text() for rank in range(2)]
    assert [text.count("5 steps") for text in printed] == [1, 0]
    content = json.loads((tmp_path / "halfulp-observe" / "observe.json").read_text())
    assert next(parameter["name"] for parameter in content["record"]["parameters"]) == "0.weight"


TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).to(torch.bfloat16)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (32, 16))]
options = TrainingArguments("out", max_steps=6, per_device_train_batch_size=4, use_cpu=True, report_to=[],
                            learning_rate=1e-4, save_strategy="no", disable_tqdm=True)
Trainer(model=model, args=options, train_dataset=data).train()
"""
LIGHTNING = """
import torch
import lightning
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)).bfloat16()
    def training_step(self, batch, at):
        return self.net(batch[0].bfloat16()).float().square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 16)), batch_size=4)
lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                  enable_progress_bar=False).fit(Net(), data)
"""


@pytest.mark.parametrize(
    ("text", "needs", "frozen"),
    [
        (TRAINER, ("transformers", "accelerate"), "model.layers.0.input_layernorm.weight"),
        (LIGHTNING, ("lightning",), "net.1.weight"),
    ],
    ids=["transformers", "lightning"],
)
def test_trainers(tmp_path, text, needs, frozen):
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; benchmarks.bench_observe_trainers runs this beside the peers")
    (tmp_path / "script.py").write_text(text)
    done = run(tmp_path, "-m", "halfulp.cli", "observe", "--interval", "2", "script.py")
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "halfulp-observe" / "observe.json").read_text())
    assert content["steps"] == 5
    [finding] = [one for one in content["findings"] if one["code"] == "weight-frozen" and frozen in one["where"]]
    assert finding["severity"] == "error"


SPAWNS = """
import torch
import torch.multiprocessing as mp
import halfulp as hu

def work(rank):
    model = torch.nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {watching}
        for _ in range(2):
            model(torch.ones(2, 4).bfloat16()).sum().backward()
            optimizer.step()
    {after}

if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
"""


def test_a_script_of_mp_spawn_is_told_what_to_write_instead_which_works(tmp_path, monkeypatch, forking):
    """The script is written as its own refusal says."""
    watching, after = (said.strip("`") for said in re.findall("`[^`]*`", CHILD_PROCESS_REMEDY))
    (tmp_path / "script.py").write_text(SPAWNS.format(watching=watching, after=after))
    monkeypatch.chdir(tmp_path)
    # A spawned process takes over the options of this one, whose warnings are errors, and the folder it began in.
    command = f"{ALONE}import sys; sys.warnoptions.clear()\nfrom halfulp.cli import main; main()"
    ended = forking(command, "observe", str(tmp_path / "script.py"))
    code, errors = ended.code(), ended.errors.read_text()
    assert code == 2, errors
    assert CHILD_PROCESS_REMEDY in errors
    assert "<h1>" in (tmp_path / "observe.html").read_text()
