"""A record made by hand of tensors whose counts `quantize` gives, and a headless Chromium to look at pages with."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import halfulp as hu
from halfulp.observation import Finding
from halfulp.observation._finding import group_causes_as_dicts
from halfulp.observation._record import (
    DtypeExpectation,
    ParameterRecord,
    RealisedChanges,
    Record,
    StepRecord,
    TensorRecord,
    record_to_plain_data,
)
from halfulp.observation.auditing._audit import Audit, ParameterStateAudit
from halfulp.observation.auditing._tensors import TensorAudit, TensorStatistics
from halfulp.observation.page import render_audit_page, render_forecast_page, render_observation_page

EVIL = 'layers.0.<b>"evil"</b>&.weight'


def _tensor(role: Any, name: str, values: torch.Tensor, order: int) -> TensorRecord:
    nonzero = values[values != 0].abs()
    histogram: dict[int, int] = {}
    for exponent in (torch.frexp(nonzero)[1] - 1).tolist():
        histogram[exponent] = histogram.get(exponent, 0) + 1
    return TensorRecord(
        role,
        name,
        "Linear",
        torch.float32,
        order,
        [0],
        values.numel(),
        amax=float(nonzero.max()) if len(nonzero) else 0.0,
        sampled=values.numel(),
        histogram=histogram,
    )


def make_record(layers: int = 30) -> Record:
    draw = torch.Generator().manual_seed(3)
    record = Record(sampled_steps=[0, 50], unseen=["activations of layers.9: compiled before"])
    for layer in range(layers):
        name = EVIL if layer == 0 else f"layers.{layer}.weight"
        for role, spread in (("activation", 2.0), ("weight gradient", 9.0)):
            values = torch.exp2(torch.randn(256, generator=draw) * spread - layer).float()
            values[:7] = 0
            full = name if role != "activation" else name.removesuffix(".weight")
            record.tensors[role, full] = _tensor(role, full, values, layer)
        parameter = ParameterRecord(name, "Linear", torch.bfloat16, (16, 16), 256, True, optimizer="AdamW")
        parameter.options = {"lr": 1e-4}
        parameter.update = RealisedChanges(1000, 10 * layer, 1.0, 1 - layer / 40)
        parameter.state_dtypes = {"exp_avg": torch.bfloat16}
        record.parameters[name] = parameter
    record.parameters["frozen"] = ParameterRecord("frozen", "Linear", torch.float32, (), 1, False)
    zeros = torch.zeros(5)
    record.tensors["activation", "all.zeros"] = _tensor("activation", "all.zeros", zeros, layers)
    record.expectations = [
        DtypeExpectation("layers.*", "float32", ["layers.3.weight"], {"layers.3.weight": "bfloat16"})
    ]
    record.history = [
        StepRecord(step, step % 50 == 0, 1e-4, 2.0 ** (16 - step // 40), int(step % 40 == 0), 1, 3 / (step + 1))
        for step in range(100)
    ]
    record.history[7].loss = float("nan")
    return record


@pytest.fixture(scope="session")
def data() -> dict[str, Any]:
    """The record as plain data, with one finding of each severity, read back from JSON."""
    kinds = (("updates-lost", "error"), ("overflow-near", "warning"), ("never-stepped", "note"))
    where, evidence = (EVIL, "layers.1.weight"), {"lost": 0.5, "n": [1, 2]}
    findings = [Finding(code, where, severity, 0.9, evidence, "<i>cure</i>", "said") for code, severity in kinds]
    found = {"findings": [one.to_dict() for one in findings], "causes": group_causes_as_dicts(findings)}
    found |= {"steps": 100, "interval": 50, "overhead": 0.013}
    found["record"] = record_to_plain_data(make_record())
    return json.loads(json.dumps(found, allow_nan=False))


def make_audit() -> Audit:
    """Two checkpoints of a run whose norm did not move and whose head became NaN and changed its dtype."""
    bf16, fp32 = TensorStatistics(torch.bfloat16), TensorStatistics(torch.float32)
    broken = TensorStatistics(torch.float32, nan=3)
    rows = [
        TensorAudit(EVIL, (4, 4), 16, "parameter", bf16, bf16, 4, 1.5, 9.0, "changed"),
        TensorAudit("norm.weight", (4,), 4, "parameter", bf16, bf16, 4, 0.0, 0.0, "unchanged"),
        TensorAudit("head", (2,), 2, "unknown", bf16, broken, 0, math.nan, math.nan, "nonfinite"),
        TensorAudit("none", (0,), 0, "buffer", fp32, fp32, 0, math.nan, math.nan, "changed"),
    ]
    lost = RealisedChanges(100, 90, 100, 10)
    pairs = {"exp_avg": (torch.bfloat16, torch.float32), "step": (None, torch.float32)}
    state = ParameterStateAudit(
        "norm.weight",
        {"lr": 1e-4, "betas": [0.9, 0.99]},
        (10, 70),
        pairs,
        update=lost,
    )
    found = [Finding("weight-frozen", ("norm.weight",), "error", 1.0, {"steps": 60}, "<i>cure</i>", "did not move")]
    tensors = {row.name: row for row in rows}
    states = {"norm.weight": state, "head": ParameterStateAudit("head", {}, (None, None), {})}
    return Audit(tensors, states, ("step 3 is <b>lost</b>",), found)


@pytest.fixture(scope="session")
def pages(data: dict[str, Any]) -> dict[str, str]:
    """The page of each instrument."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    ahead = hu.forecast(model, optimizer, "cosine", steps=1000, warmup=10)
    return {
        "observe": render_observation_page(data),
        "audit": render_audit_page(make_audit().to_dict()),
        "forecast": render_forecast_page(ahead.to_dict()),
    }


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Debian's Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'halfulp[browser]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs a chromium on the path")
    with playwright.sync_playwright() as play:
        found = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


class Shown:
    """A page in the browser with what it said and asked for.

    Attributes:
        tab: playwright's page.
        said: errors and whatever the page wrote to the console.
        asked: addresses that were requested, the page's own left out.
    """

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(path.as_uri())
        self.asked.remove(path.as_uri())


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Shown]]:
    """Open a page's text at a width in a colour scheme; at the end it must have been quiet and asked for nothing."""
    opened: list[Shown] = []

    def open_page(text: str, width: int = 1280, scheme: str = "light") -> Shown:
        path = tmp_path / f"page{len(opened)}.html"
        path.write_text(text, encoding="utf-8")
        opened.append(Shown(browser, path, width, scheme))
        return opened[-1]

    yield open_page
    for one in opened:
        one.tab.close()
        assert one.said == []
        assert one.asked == []
