"""What sinks get while a run goes on: numbers that another count gives, bounded in number, of rank 0 alone."""

import json
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import halfulp as hu

ROW_COLUMNS = (
    *("step", "loss", "lr", "loss_scale", "skipped", "smallest_exponent", "largest_exponent", "nonfinite_tensors"),
    *("updates_lost", "movement_kept", "gradient_underflow"),
)


def small(dtype=torch.bfloat16):
    layers = {"up": nn.Linear(6, 8), "relu": nn.ReLU(), "head": nn.Linear(8, 3)}
    model = nn.Sequential(OrderedDict(layers)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=2e-3)


def train(model, optimizer, steps, before=None, after=None):
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        model(torch.randn(4, 6).to(dtype)).float().square().mean().backward()
        if before:
            before()
        optimizer.step()
        if after:
            after()
        optimizer.zero_grad()


def test_shares_are_those_of_the_step_by_another_count(seed):
    model, optimizer = small()
    with torch.no_grad():
        model.head.weight[0] *= 2.0**-12  # small enough that no draw leaves it without an update
    rows, counts = [], []
    start = {}

    def before():
        start.update({name: (p.detach().double(), p.grad.double()) for name, p in model.named_parameters()})

    def after():
        found = {}
        for name, p in model.named_parameters():
            weight, slope = (x.numpy() for x in start[name])
            now, wanted = p.detach().double().numpy(), -2e-3 * slope
            seen = wanted != 0
            ratio = np.sum(wanted * (now - weight)) / np.sum(wanted**2) if seen.any() else None
            found[name] = int(seen.sum()), int((seen & (now == weight)).sum()), ratio
        counts.append(found)

    with hu.observe(model, optimizer, interval=2, sinks=[rows.append]):
        train(model, optimizer, 6, before, after)
    assert [row["step"] for row in rows] == [0, 2, 4]
    for row, found in zip(rows, counts[::2]):
        seen, lost = (sum(one[k] for one in found.values()) for k in (0, 1))
        assert row["updates_lost"] == pytest.approx(lost / seen)
        kept = sum(many * ratio for many, _, ratio in found.values() if many)
        assert row["movement_kept"] == pytest.approx(kept / seen, rel=1e-6)
    assert 0 < rows[0]["updates_lost"] < 1


def test_gradients_at_the_smallest_number_tell_how_many_became_zero(seed):
    model = nn.Linear(64, 8, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gradient = torch.ones(8, 64, dtype=torch.float16)
    gradient[:3] = 2.0**-24
    rows = []
    with hu.observe(model, optimizer, interval=1, sinks=[rows.append]):
        for of_small in (True, False):
            model.weight.grad = gradient.clone() if of_small else torch.ones_like(gradient)
            optimizer.step()
    vanished = 0.5 * 3 * 64
    assert rows[0]["gradient_underflow"] == pytest.approx(vanished / (8 * 64 + vanished))
    assert rows[1]["gradient_underflow"] == 0.0


def test_a_row_says_what_the_run_did(seed):
    model, optimizer = small(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    rows = []
    with hu.observe(model, optimizer, interval=1, scaler=scaler, sinks=[rows.append]) as seen:
        while len(rows) < 3:
            loss = model(torch.randn(4, 6)).square().mean()
            seen.log_loss(loss)
            scaler.scale(100 * loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    record = seen.record
    assert list(rows[0]) == list(ROW_COLUMNS)
    assert [row["loss"] for row in rows] == [step.loss for step in record.history]
    assert [row["lr"] for row in rows] == [2e-3] * 3
    assert [row["loss_scale"] for row in rows] == [step.loss_scale for step in record.history]
    assert sum(row["skipped"] for row in rows) == record.skipped > 0
    assert [row["nonfinite_tensors"] > 0 for row in rows] == [row["skipped"] > 0 for row in rows]


def test_tensors_with_nan_are_counted_in_their_step(seed):
    model, optimizer = small(torch.float32)
    rows = []
    with hu.observe(model, optimizer, interval=1, sinks=[rows.append]):
        train(model, optimizer, 1)
        with torch.no_grad():
            model.head.bias[0] = float("nan")
        train(model, optimizer, 1)
    assert rows[0]["nonfinite_tensors"] == 0
    assert rows[1]["nonfinite_tensors"] > 0


def test_exponents_of_an_adaptive_scaler(seed):
    model, optimizer = small(torch.float32)
    scaler = hu.AdaptiveGradScaler(model, format="fp16", interval=1)
    rows = []
    with hu.observe(model, optimizer, interval=1, scaler=scaler, sinks=[rows.append]) as seen:
        for _ in range(3):
            scaler.scale(model(torch.randn(4, 6)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    known = [step.exponents for step in seen.record.history]
    assert [(row["smallest_exponent"], row["largest_exponent"]) for row in rows] == known


def test_files_hold_the_rows_that_a_function_got_and_a_second_run_goes_behind(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = []
    for _ in range(2):
        model, optimizer = small()
        with hu.observe(model, optimizer, interval=1, sinks=["seen.jsonl", rows.append]):
            train(model, optimizer, 2)
    assert [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()] == rows


def test_one_that_raises_is_left_alone_and_named_and_the_bits_stay(seed):
    def trained(sinks):
        torch.manual_seed(1)
        model, optimizer = small()
        with hu.observe(model, optimizer, interval=1, sinks=sinks) as seen:
            train(model, optimizer, 4)
        return model.state_dict(), seen

    calls, rows = [], []

    def broken(row):
        calls.append(row["step"])
        if row["step"] == 1:
            raise ConnectionError("/home/somebody/secret")

    with pytest.warns(RuntimeWarning, match="the function gets no more rows.*secret; the training goes on") as said:
        watched, seen = trained([broken, rows.append])
    assert len(said) == 1
    assert calls == [0, 1]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    sentence = "rows of the steps: the function gets no more rows: it raised ConnectionError at step 1"
    assert seen.record.unseen == [sentence]
    assert sentence in json.dumps(seen.to_dict())
    assert "secret" not in json.dumps(seen.to_dict())
    plain, _ = trained([])
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_other_ranks_write_nothing_and_check_no_disk(seed, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    rows = []
    model, optimizer = small()
    with hu.observe(model, optimizer, interval=1, sinks=[tmp_path / "gone" / "seen.jsonl", rows.append]) as seen:
        train(model, optimizer, 2)
    assert rows == []
    assert seen.record.unseen == []


def test_requests_that_cannot_be_met_are_refused(tmp_path):
    model, optimizer = small()
    for given, message in (("seen.jsonl", "put it into a list"), (print, "put it into a list"), ([3], "a sink is a")):
        with pytest.raises(TypeError, match=message):
            hu.observe(model, optimizer, sinks=given)
    with pytest.raises(ValueError, match=r"seen\.txt"):
        hu.observe(model, optimizer, sinks=[tmp_path / "seen.txt"])
    with pytest.raises(ValueError, match="cannot write"):
        hu.observe(model, optimizer, sinks=[tmp_path / "gone" / "seen.jsonl"])


def test_without_sinks_nothing_is_made(seed, monkeypatch):
    monkeypatch.setattr("halfulp.observation.observing._recorder.RowWriter", None)
    model, optimizer = small()
    with hu.observe(model, optimizer, interval=1) as seen:
        train(model, optimizer, 1)
    assert seen.record.unseen == []


KILLED = """
import os, signal, sys
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for run in range(2):
    for step in range(3):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.mkdir("elsewhere")
os.chdir("elsewhere")
for step in range(2):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_script_leaves_the_lines_of_its_first_training(tmp_path, forked, monkeypatch):
    (tmp_path / "secret_script.py").write_text(KILLED)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "observe.jsonl").write_text("of a run before\n")
    call = "from halfulp.cli import main; main()"
    monkeypatch.chdir(tmp_path)
    code, _ = forked(call, "observe", "--interval", "2", "--out", "out", "secret_script.py")
    assert code < 0
    text = (tmp_path / "out" / "observe.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows] == [0]
    assert "secret" not in text
