"""Scripts that `halfulp observe` runs unmodified: `python -m benchmarks.bench_observe_trainers` in .peers."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ._results import Result, Table, save
from .peers import missing, version

TEXT = """Six scripts that train a small bfloat16 model by AdamW at 1e-4, whose norm weights rounding holds at 1. Each \
is run by `halfulp observe --interval 2 SCRIPT.py` as it would be run by Python; of two processes the first alone \
reports. Found: whether the findings say weight-frozen of the norm's weight, by the name that it has in the script's \
own model."""

MODEL = "torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)).bfloat16()"
LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 16).bfloat16()).float().square().mean().backward()
    optimizer.step()
"""
PLAIN = f"import torch\nmodel = {MODEL}\n{LOOP}"
COMPILED = f"import torch\nplain = {MODEL}\nmodel = torch.compile(plain, backend='aot_eager')\n{LOOP}"
PROCESSES = f"""
import torch
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel({MODEL})
{LOOP}
torch.distributed.destroy_process_group()
"""
ACCELERATE = f"""
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = {MODEL}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(6):
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(8, 16).bfloat16()).float().square().mean())
    optimizer.step()
"""
TRANSFORMERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).to(torch.bfloat16)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (32, 16))]
options = TrainingArguments("out", max_steps=6, per_device_train_batch_size=4, use_cpu=True, report_to=[],
                            learning_rate=1e-4, save_strategy="no", disable_tqdm=True)
Trainer(model=model, args=options, train_dataset=data).train()
"""
LIGHTNING = f"""
import torch
import lightning
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = {MODEL}
    def training_step(self, batch, at):
        return self.net(batch[0].bfloat16()).float().square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 16)), batch_size=4)
lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                  enable_progress_bar=False).fit(Net(), data)
"""
SCRIPTS = {
    "plain loop": (PLAIN, (), "1.weight"),
    "torch.compile": (COMPILED, (), "1.weight"),
    "torchrun, 2 gloo processes": (PROCESSES, (), "1.weight"),
    "accelerate": (ACCELERATE, ("accelerate",), "1.weight"),
    "HF Trainer": (TRANSFORMERS, ("transformers", "accelerate"), "model.layers.0.input_layernorm.weight"),
    "Lightning": (LIGHTNING, ("lightning",), "net.1.weight"),
}


def observed(name: str, text: str, frozen: str) -> dict:
    """Run a script in a folder of its own; what was seen of it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(text)
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"] if "torchrun" in name else []
        command = [sys.executable, "-m", *launch, "halfulp.cli", "observe", "--interval", "2", "script.py"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        written = Path(folder, "halfulp-observe", "observe.json")
        content = json.loads(written.read_text()) if written.exists() else {"steps": 0, "findings": [], "record": {}}
        page = written.with_suffix(".html").exists()
    found = any(one["code"] == "weight-frozen" and frozen in one["where"] for one in content["findings"])
    reports = done.stdout.count("halfulp-observe/observe.html shows it")
    return {
        "exit code": done.returncode,
        "steps": content["steps"],
        "reports": reports,
        "page": page,
        "found": found,
        "not observed": "; ".join(content["record"].get("unseen", ())),
        "met": done.returncode == 0
        and content["steps"] == 5
        and reports == 1
        and page
        and found,  # of 6, the first begins
    }


def main() -> None:
    """Run, print and keep."""
    result = Result(
        "observe_trainers",
        "Scripts observed unmodified",
        TEXT,
        "benchmarks/.peers/bin/python -m benchmarks.bench_observe_trainers",
    )
    columns = ("script", "with", "exit code", "steps", "reports", "page", "found", "not observed")
    table = Table("Scripts under halfulp observe", dict.fromkeys(columns, ""))
    for name, (text, needs, frozen) in SCRIPTS.items():
        absent = [package for package in needs if missing(package)]
        if absent:
            table.add(**{"script": name, "with": f"{', '.join(absent)} is not installed", "met": None})
            continue
        versions = ", ".join(f"{package} {version(package)}" for package in needs)
        table.add(**{"script": name, "with": versions, **observed(name, text, frozen)})
    result.tables.append(table)
    save(result)


if __name__ == "__main__":
    main()
