"""The observation as users meet it: what it sees, what it says it cannot see, bad input, runs that end badly."""

import json
import math
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfulp as hu

SOURCE = Path(hu.__file__).parent


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, steps: int, x=None) -> None:
    for _ in range(steps):
        model(torch.randn(4, 6) if x is None else x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def hooks_on(model: nn.Module, *optimizers: torch.optim.Optimizer) -> int:
    count = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    for parameter in model.parameters():
        count += len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
    for optimizer in optimizers:
        count += len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return count


def test_roles_steps_and_hooks():
    model, optimizer = small()
    with hu.observe(model, optimizer, interval=3) as seen:
        train(model, optimizer, 2)
        assert hooks_on(model, optimizer) == 2  # between sampled steps the optimizer's alone
        train(model, optimizer, 5)
    assert hooks_on(model, optimizer) == 0
    record = seen.record
    assert record.sampled_steps == [0, 3, 6]
    assert [step.step for step in record.history] == list(range(7))
    roles = {role for role, _ in record.tensors}
    assert roles == {
        *("activation", "weight", "activation gradient", "weight gradient", "update", "first moment", "second moment"),
    }
    assert record.tensors["activation", "1"].steps == 3
    assert record.tensors["activation", "1"].elements == 3 * 32
    assert record.unseen == []
    assert record.parameters["0.weight"].gradients == 3
    assert record.parameters["0.weight"].moved == 1.0
    assert "7 steps" in str(seen)
    assert seen.overhead > 0
    data = json.loads(json.dumps(seen.to_dict(), allow_nan=False))
    assert data["findings"] == []
    assert {parameter["name"] for parameter in data["record"]["parameters"]} == set(record.parameters)


def test_observation_goes_on_after_a_stop():
    model, optimizer = small()
    seen = hu.observe(model, optimizer, interval=10).start()
    train(model, optimizer, 3)
    with pytest.raises(RuntimeError, match=r"stop\(\)"):
        seen.start()
    seen.stop().stop()
    train(model, optimizer, 5)
    seen.start()
    train(model, optimizer, 2)
    seen.stop()
    assert len(seen) == 5
    assert seen.record.sampled_steps == [0, 3]


def test_extremes_of_activations_and_gradients_are_exact():
    model, optimizer = small()
    kept = {}

    def keep(module, inputs, output):
        kept["activation"] = output.detach().clone()
        output.register_hook(lambda gradient: kept.update(gradient=gradient.clone()))

    model[0].register_forward_hook(keep)
    with hu.observe(model, optimizer, interval=1) as seen:
        train(model, optimizer, 1)
    for role, x in (("activation", kept["activation"]), ("activation gradient", kept["gradient"])):
        found = seen.record.tensors[role, "0"]
        assert found.amax == float(x.abs().max())
        assert found.elements == x.numel()


def test_a_run_that_breaks_keeps_its_record_and_loses_its_hooks():
    model, optimizer = small()
    with pytest.raises(KeyError), hu.observe(model, optimizer, interval=1) as seen:  # noqa: PT012
        train(model, optimizer, 2)
        raise KeyError("broken")
    assert hooks_on(model, optimizer) == 0
    assert seen.record.sampled_steps == [0, 1]


def test_a_run_that_never_steps_says_so():
    model, optimizer = small()
    with hu.observe(model, optimizer) as seen:
        model(torch.randn(4, 6)).sum().backward()
    assert "no optimizer step was seen" in " ".join(seen.record.unseen)
    assert "no optimizer step was seen" in str(seen)


def test_nan_from_the_first_step():
    model, optimizer = small()
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    with hu.observe(model, optimizer, interval=1) as seen:
        train(model, optimizer, 2)
    found = [finding for finding in seen.findings if finding.code == "first-nonfinite"]
    assert found
    assert seen.record.tensors["activation", "2"].first_nonfinite[0] == 0
    json.dumps(seen.to_dict(), allow_nan=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_each_activation_once(reentrant):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model = Part()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observe(model, optimizer, interval=1, check=True) as seen:
        train(model, optimizer, 1, torch.randn(4, 6, requires_grad=True))
    assert seen.record.tensors["activation", "block.0"].elements == 24
    assert seen.record.tensors["activation gradient", "block.0"].elements == 24
    again = {one.name: (one.differing, one.dtypes) for one in seen.record.recomputed}
    assert again.get("block.0") == (None if reentrant else (0, ("float32", "float32")))


def test_a_recomputation_in_another_dtype_is_noted():
    class Narrow(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x.bfloat16() if self.calls == 1 else x + 0.001

    model = nn.Sequential(Narrow(), nn.Linear(6, 6))

    def forward(x):
        return model[0](x).float().square()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observe(model, optimizer, interval=1, check=True) as seen:
        options = {"use_reentrant": False, "determinism_check": "none", "preserve_rng_state": False}
        model[1](checkpoint(forward, torch.randn(4, 6, requires_grad=True), **options)).sum().backward()
        optimizer.step()
    found = {one.name: one for one in seen.record.recomputed}["0"]
    assert found.name == "0"
    assert found.dtypes == ("bfloat16", "float32")
    assert found.differing > 0.5


def test_outputs_in_dicts_and_tuples_and_losses_are_seen():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            y = self.layer(x)
            return {"loss": y.square().mean(), "hidden": [y * 2, (y * 3, None)], "step": 3}

    model = Nested()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(3):
            model(torch.ones(2, 6))["loss"].backward()
            optimizer.step()
    assert seen.record.tensors["activation", ""].elements == 3 * (1 + 6 + 6)
    losses = [step.loss for step in seen.record.history]
    assert losses[0] > losses[1] > 0
    assert seen.record.loss_dtype == torch.float32
    assert seen.record.loss_gap > 0


def test_a_told_loss_enters_the_history():
    model, optimizer = small()
    with hu.observe(model, optimizer, interval=1) as seen:
        for value in (torch.tensor(3.0, dtype=torch.bfloat16), 2.0):
            model(torch.randn(4, 6)).sum().backward()
            seen.log_loss(value)
            optimizer.step()
    assert [step.loss for step in seen.record.history] == [3.0, 2.0]
    assert seen.record.loss_dtype == torch.bfloat16


def test_shared_frozen_and_foreign_parameters():
    model, _ = small()
    model[2].bias.requires_grad_(False)
    extra = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*(p for p in model.parameters() if p.requires_grad), extra], lr=0.1)
    with hu.observe(model, optimizer, interval=1) as seen:
        (model(torch.randn(4, 6)) * extra).sum().backward()
        optimizer.step()
    records = seen.record.parameters
    assert not records["2.bias"].requires_grad
    assert records["optimizer.0.3"].gradients == 1
    assert records["0.weight"].optimizer == "SGD"
    assert records["2.bias"].optimizer is None


def test_several_optimizers_count_steps_by_the_first_that_steps():
    model, _ = small()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.1)
    with hu.observe(model, [first, second], interval=2) as seen:
        for _ in range(4):
            model(torch.randn(4, 6)).sum().backward()
            first.step()
            second.step()
    assert len(seen) == 4
    assert seen.record.parameters["2.weight"].update.seen > 0
    assert seen.record.parameters["0.weight"].update.seen > 0


def test_a_closure_is_watched_between_gradients_and_step():
    model, optimizer = small()
    x = torch.randn(4, 6)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(3):
            assert optimizer.step(closure) > 0
    update = seen.record.parameters["0.weight"].update
    assert update.realised_share == pytest.approx(1, abs=1e-3)
    assert update.seen > 100
    assert seen.record.parameters["0.weight"].gradients == 3


def closure_towards_one(model, optimizer):
    """Return a closure for `optimizer`: backward passes of one batch whose targets are all 1."""
    x = torch.randn(64, 8).bfloat16()

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - 1).float().square().mean()
        loss.backward()
        return loss

    return closure


def test_a_step_that_calls_its_closure_several_times_is_sampled_at_the_first(seed):
    torch.manual_seed(seed % 2**31)
    model = nn.Linear(8, 4).bfloat16()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_eval=3)
    closure = closure_towards_one(model, optimizer)
    with hu.observe(model, optimizer, interval=1) as seen:
        for _ in range(3):
            optimizer.step(closure)
    weight = seen.record.parameters["weight"]
    assert weight.gradients == 3
    assert weight.update.lost_share < 0.3
    assert not any(finding.code == "updates-lost" for finding in seen.findings)


def test_no_cure_wraps_an_optimizer_that_wrap_refuses(seed):
    """At a rate that moves no weight the finding is right, and a float32 weight is all that helps under LBFGS."""
    torch.manual_seed(seed % 2**31)
    for kind, options in ((torch.optim.LBFGS, {"max_eval": 2}), (torch.optim.ASGD, {})):
        model = nn.Linear(8, 8).bfloat16()
        optimizer = kind(model.parameters(), lr=1e-8, **options)
        closure = closure_towards_one(model, optimizer)
        with hu.observe(model, optimizer, interval=1) as seen:
            for _ in range(3):
                optimizer.step(closure)
        lost = [finding for finding in seen.findings if finding.code in ("updates-lost", "weight-frozen")]
        assert lost
        for finding in lost:
            assert ("hu.optim.wrap(" in finding.write) == (kind is torch.optim.ASGD)
            assert ("takes no LBFGS" in finding.cure) == (kind is torch.optim.LBFGS)


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_scalers_are_found_and_their_skips_counted():
    model, optimizer = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with hu.observe(model, optimizer, interval=1, scheduler=scheduler) as seen:
        for step in range(20):  # skips before the first step, at which the scaler is found, are not counted
            scaler.scale(model(torch.randn(4, 6) * (1e3 if step else 1e-30)).square().sum() * 1e-3).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
    record = seen.record
    skipped = 20 - len(seen)
    assert 0 < record.skipped <= skipped + 1
    assert record.history[-1].loss_scale == scaler.get_scale()
    assert sum(step.scheduled for step in record.history) in (19, 20)


def test_an_adaptive_scalers_sites_are_kept():
    model, optimizer = small()
    scaler = hu.AdaptiveGradScaler(model)
    with hu.observe(model, optimizer, interval=1, scaler=scaler) as seen:
        scaler.scale(model(torch.randn(4, 6)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert {"site", "exponent", "overflows"} <= set(seen.record.sites[0])
    low, high = seen.record.history[0].exponents
    assert low <= high


def test_expectations():
    model, optimizer = small()
    model[2].bfloat16()
    expect = {"0": torch.float32, "2*": "fp32", "nothing.*": "bf16", "*.bias": "bf16"}
    with hu.observe(model, optimizer, interval=1, expect=expect) as seen:
        pass
    found = {one.pattern: one for one in seen.record.expectations}
    assert found["0"].matched == ["0"]
    assert not found["0"].other
    assert found["2*"].other == {"2.weight": "bf16", "2.bias": "bf16"}
    assert found["nothing.*"].matched == []
    assert found["*.bias"].other == {"0.bias": "fp32"}
    with pytest.raises(TypeError, match="expect="):
        hu.observe(model, optimizer, expect=["bf16"])


def test_compiled_models_show_gradients_and_say_what_is_not_seen(fresh_compiler):
    model, optimizer = small()
    compiled = torch.compile(model, backend="aot_eager")
    with hu.observe(compiled, optimizer, interval=1, check=True) as seen:
        train(compiled, optimizer, 2)
    assert any("is compiled" in sentence for sentence in seen.record.unseen)
    assert seen.record.parameters["0.weight"].update.seen > 0
    assert ("weight gradient", "0.weight") in seen.record.tensors
    (pair,) = seen.record.compiled
    assert pair.differing == 0


@pytest.mark.parametrize("how", ["before", "after", "in place"])
def test_hooks_leave_compilation_as_it_is(fresh_compiler, how):
    from torch._dynamo.utils import counters

    model, optimizer = small()
    compiled = model
    if how == "in place":
        model.compile(backend="aot_eager")
    else:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if how == "after":
        train(compiled, optimizer, 1)
    with hu.observe(model, optimizer, interval=2) as seen:
        train(compiled, optimizer, 5)
    # A model that is first compiled under the hooks of a sampled step has another graph without them.
    assert counters["stats"]["unique_graphs"] <= (2 if how == "before" else 1)
    assert not counters["graph_break"]
    said = " ".join(seen.record.unseen)
    assert "compiled" in said
    assert seen.record.parameters["0.weight"].update.seen > 0


def test_emulated_models_round_nothing_of_the_watching():
    results = []
    for watch in (False, True):
        model, optimizer = small()
        hu.emulate(model, "e5m7", parameters="keep")
        seen = hu.observe(model, optimizer, interval=1)
        if watch:
            seen.start()
        train(model, optimizer, 2, torch.ones(4, 6))
        seen.stop()
        assert seen.record.unseen == []
        results.append(model.state_dict())
    assert all(hu.kernels.same_bits(results[0][key], results[1][key]) for key in results[0])


def test_history_is_thinned_and_loses_no_skips():
    from halfulp.observation._record import StepRecord
    from halfulp.observation.observing._observation import MOST_HISTORY_STEPS, thin_history

    steps: list[StepRecord] = []
    for k in range(3 * MOST_HISTORY_STEPS):
        steps.append(StepRecord(k, False, 0.1, skipped=k % 2, scheduled=1))
        steps = thin_history(steps) if len(steps) > MOST_HISTORY_STEPS else steps
    assert len(steps) <= MOST_HISTORY_STEPS
    assert sum(step.skipped for step in steps) == 3 * MOST_HISTORY_STEPS // 2
    assert sum(step.scheduled for step in steps) == 3 * MOST_HISTORY_STEPS
    assert steps[-1].step == 3 * MOST_HISTORY_STEPS - 1


def test_bad_input():
    model, optimizer = small()
    with pytest.raises(TypeError, match=r"torch.nn.Module"):
        hu.observe(lambda x: x, optimizer)
    with pytest.raises(ValueError, match="interval"):
        hu.observe(model, optimizer, interval=0)
    with pytest.raises(ValueError, match="no parameters"):
        hu.observe(nn.ReLU())
    duck = types.SimpleNamespace(param_groups=[], step=lambda: None)
    with pytest.raises(TypeError, match="whose step has hooks"):
        hu.observe(model, duck)
    with pytest.raises(TypeError, match="torch optimizers"):
        hu.observe(model, 3)
    with pytest.raises(TypeError, match="scaler="):
        hu.observe(model, optimizer, scaler=3)
    with pytest.raises(TypeError, match="average="):
        hu.observe(model, optimizer, average=3)
    with pytest.raises(ValueError, match="average="):
        hu.observe(model, optimizer, average=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="unknown format"):
        hu.observe(model, optimizer, expect={"*": "fp15"})


def test_a_sampled_step_walks_through_few_files():
    model, optimizer = small()
    files: set[str] = set()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    with hu.observe(model, optimizer, interval=1):
        train(model, optimizer, 2)
        before = sys.getprofile()
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            train(model, optimizer, 1)
        finally:
            sys.setprofile(before)
            threading.setprofile(None)
    own = {str(Path(file).relative_to(SOURCE)) for file in files if Path(file).is_relative_to(SOURCE)}
    assert len(own) <= 12, sorted(own)
