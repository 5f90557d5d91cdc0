"""hu.audit finds what was planted into pairs of checkpoints, and nothing else."""

import copy
import json
import math

import pytest
import torch
from safetensors.torch import save_file

import halfulp as hu

SIZES = {f"layers.{k}.{part}.weight": (16, 24) for k in range(4) for part in ("attention", "mlp")}


def pair(dtype):
    before = {name: torch.randn(size).to(dtype) for name, size in SIZES.items()}
    before |= {f"layers.{k}.norm.weight": torch.rand(48).add(1).to(dtype) for k in range(4)}
    after = {name: (value.double() * (1 + 0.05 * torch.randn(value.shape))).to(dtype) for name, value in before.items()}
    return before, after


def codes(found):
    return {(one.code, name) for one in found.findings for name in one.where if one.severity != "note"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["safetensors", "pt", "dicts"])
def test_planted_faults_are_found_and_nothing_else(tmp_path, dtype, kind):
    before, after = pair(dtype)
    assert not codes(hu.audit(before, after))
    after["layers.1.mlp.weight"] = before["layers.1.mlp.weight"].clone()
    after["layers.2.norm.weight"] = after["layers.2.norm.weight"].to(torch.float8_e5m2)
    after["layers.3.attention.weight"][3, 5] = math.nan
    after["layers.0.norm.weight"][7] = math.inf
    if kind == "dicts":
        a, b = before, after
    else:
        a, b = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
        for path, content in ((a, before), (b, after)):
            save_file(content, path) if kind == "safetensors" else torch.save(content, path)
    found = hu.audit(a, b)
    assert codes(found) == {
        ("weight-frozen", "layers.1.mlp.weight"),
        ("dtype-changed-on-resume", "layers.2.norm.weight"),
        ("first-nonfinite", "layers.3.attention.weight"),
        ("first-nonfinite", "layers.0.norm.weight"),
    }
    assert not found.passed
    assert found.tensors["layers.1.mlp.weight"].status == "unchanged"
    json.dumps(found.to_dict(), allow_nan=False)


def run(dtype, lr, kind="torch", named=True, steps=8, **given):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)).to(dtype)
    if kind == "torch":
        parameters = model.named_parameters() if named else model.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), **given)
    else:
        optimizer = hu.optim.AdamW(model.named_parameters(), lr=lr, betas=(0.9, 0.98), weight_update=kind, **given)
    saved = []
    for _ in range(2):
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.step()
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved.append(copy.deepcopy(content))
    return saved, before, dict(model.named_parameters())


@pytest.mark.parametrize("named", [True, False])
def test_lost_updates_are_those_that_left_the_weights_as_they_were(named):
    saved, before, after = run(torch.bfloat16, 1e-4, named=named, weight_decay=0.0)
    found = hu.audit(*saved)
    for name, state in found.states.items():
        measured = float((before[name] == after[name]).float().mean())
        assert state.update is not None
        # torch computes the update in bfloat16, which moves some elements over the border.
        assert state.update.lost_share == pytest.approx(measured, abs=0.06 + 1 / before[name].numel())
        assert state.steps == (8, 16)
    assert ("updates-lost", "1.weight") in codes(found)
    assert found.steps_between == 8


def test_a_weight_whose_states_have_no_name_is_not_taken_for_one_that_is_not_trained(tmp_path):
    saved, *_ = run(torch.bfloat16, 1e-5, named=False)
    folders = tmp_path / "checkpoint-8", tmp_path / "checkpoint-16"
    for folder, content in zip(folders, saved, strict=True):
        folder.mkdir()
        save_file(dict(content["model"]), folder / "model.safetensors")
        torch.save(content["optimizer"], folder / "optimizer.pt")
    found = hu.audit(*folders)
    assert "1.weight" not in found.states
    assert ("weight-frozen", "1.weight") in codes(found)
    assert any("have no names and no order" in said for said in found.unseen)


def test_healthy_runs_have_no_findings_above_a_note():
    for dtype, kind in ((torch.float32, "torch"), (torch.bfloat16, "kahan"), (torch.bfloat16, "stochastic")):
        saved, *_ = run(dtype, 1e-3, kind, **({} if kind == "torch" else {"state_dtype": torch.float32}))
        found = hu.audit(*saved)
        assert found.passed, str(found)


def test_parts_of_tensors_are_refused():
    model = hu.multicomponent(torch.nn.Linear(8, 8), 2, torch.bfloat16)
    for given in (dict(model.state_dict()), dict(model.named_parameters())):
        with pytest.raises(NotImplementedError, match="audit decoded values"):
            hu.audit(given, {**given})
    values = {name: parameter.decode() for name, parameter in model.named_parameters()}
    assert hu.audit(values, {name: value.clone() for name, value in values.items()}).tensors.keys() == {
        "weight",
        "bias",
    }


def test_live_weights_given_twice_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    before = model.state_dict()
    kept = copy.deepcopy(before)
    with torch.no_grad():
        model[0].weight.add_(1)
    said = r"the same memory \('0.weight', .*: a state_dict refers to the weights .* take copy.deepcopy"
    for a, b in ((before, model.state_dict()), ({"model": before}, model.state_dict())):
        with pytest.raises(ValueError, match=said):
            hu.audit(a, b)
    assert hu.audit(kept, model.state_dict()).tensors["0.weight"].status == "changed"
    # A frozen part may be one tensor in both, and is named.
    frozen = {**kept, "0.weight": model[0].weight}
    said = "'0.bias', '1.weight', '1.bias', '1.running_mean', '1.running_var' and 1 more are the same memory in A and B"
    assert hu.audit(kept, frozen).unseen == (f"{said}, where no change can be seen",)


def test_empty_scalar_integer_complex_and_strided_tensors():
    before = {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.0),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "waves": torch.randn(4, dtype=torch.complex64),
        "strided": torch.randn(6, 4).t(),
    }
    after = {name: value + 1 if value.dtype != torch.bool else value for name, value in before.items()}
    found = hu.audit(before, after)
    assert found.passed
    assert {name: row.unchanged for name, row in found.tensors.items()} == {
        "empty": 0,
        "scalar": 0,
        "count": 0,
        "mask": 2,
        "waves": 4,  # the imaginary parts
        "strided": 0,
    }


def test_bad_input_is_refused_in_words(tmp_path):
    a, _ = pair(torch.float32)
    torch.save(a, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="the same checkpoint"):
        hu.audit(tmp_path / "a.pt", str(tmp_path / "a.pt"))
    with pytest.raises(ValueError, match=r"different models: only A has 'layers.0.*only B has 'other'"):
        hu.audit(tmp_path / "a.pt", {"other": torch.ones(3)})
    with pytest.raises(ValueError, match=r"other shapes \(w: \(3,\) in A, \(4,\) in B\)"):
        hu.audit({"w": torch.ones(3)}, {"w": torch.ones(4)})
    with pytest.raises(TypeError, match="give a path or a state_dict"):
        hu.audit([1], {"w": torch.ones(4)})
    for given in (-1, math.nan, "much"):
        with pytest.raises(ValueError, match="from 0 on"):
            hu.audit(a, a | {}, lr=given)


def coded(kind, weight):
    """States of 8 bits as they are saved, and the options of their group."""
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    if kind == "halfulp":
        optimizer = hu.optim.AdamW([("weight", torch.nn.Parameter(weight))], lr=1e-3, state_dtype="8bit")
        optimizer.param_groups[0]["params"][0].grad = torch.randn_like(weight)
        optimizer.step()
        return optimizer.state_dict()
    codes = torch.randint(0, 255, weight.shape, dtype=torch.uint8)
    scales, table = torch.rand(4), torch.rand(256)
    if kind == "bitsandbytes":
        names = ("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2")
    else:
        names = (
            "exp_avg_codes",
            "exp_avg_sq_codes",
            "exp_avg_qmap",
            "exp_avg_sq_qmap",
            "exp_avg_scale",
            "exp_avg_sq_scale",
        )
    state = dict(zip(names, (codes, codes, table, table, scales, scales))) | {"step": 2}
    return {"state": {0: state}, "param_groups": [{**options, "params": [0], "param_names": ["weight"]}]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["halfulp", "bitsandbytes", "named"])
def test_states_of_8_bits_are_said_not_to_be_computed_again(kind, dtype, seed):
    weight = torch.randn(64, 64).to(dtype)
    a, b = ({"model": {"weight": weight.clone() + k / 8}, "optimizer": coded(kind, weight.clone())} for k in range(2))
    found = hu.audit(a, b)
    compensated = found.states["weight"].compensated
    said = [one for one in found.unseen if "were not computed again" in one]
    assert len(said) == (not compensated)
    assert compensated or "that are no codes of 8 bits" in said[0]
    assert "'weight'" in "".join(said) or compensated
    assert not [one for one in found.findings if one.code in ("state-mismatch", "updates-lost")]


@pytest.mark.parametrize("names", [("square_avg",), ("exp_avg", "exp_avg_sq")])  # another rule; no step
def test_updates_that_cannot_be_computed_again_are_said(names):
    groups = [{"lr": 1e-3, "betas": (0.9, 0.99), "params": [0], "param_names": ["w"]}]
    state = {name: torch.rand(64) for name in names}
    given = {"optimizer": {"state": {0: state}, "param_groups": groups}}
    a, b = ({"model": {"w": torch.rand(64)}, **given} for _ in range(2))
    assert "the last updates of 'w' were not computed again" in " ".join(hu.audit(a, b).unseen)
    groups[0]["lr"] = 0.0
    assert "a learning rate above 0 (give lr=)" in " ".join(hu.audit(a, b).unseen)


@pytest.mark.parametrize("moment", [0.0, math.nan])
@pytest.mark.parametrize("size", [64, (1 << 16) + 64])  # in one part, and in a second part alone
def test_a_part_without_known_nonzero_updates_counts_nothing(moment, size):
    state = {"momentum_buffer": torch.full((size,), moment)}
    state["momentum_buffer"][: size - 64] = 1.0
    given = {"optimizer": {"state": {0: state}, "param_groups": [{"lr": 0.5, "params": [0], "param_names": ["w"]}]}}
    a, b = ({"model": {"w": torch.ones(size)}, **given} for _ in range(2))
    update = hu.audit(a, b).states["w"].update
    assert (update.seen, update.cancelled, update.realised_share) == (size - 64, 0, 1.0 if size > 64 else None)


def test_a_tied_weight_is_one_tensor(tmp_path):
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(64, 16), "head": torch.nn.Linear(16, 64, bias=False)})
    model["head"].weight = model["embed"].weight
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for step in range(3):
        model["head"](model["embed"](torch.arange(64))).float().square().mean().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{step}.pt")
    found = hu.audit(tmp_path / "0.pt", tmp_path / "2.pt")
    assert {"embed.weight"} == set(found.states) == set(found.tensors)
    assert ("updates-lost", "embed.weight") in codes(found)
    assert "'head.weight' are tied to tensors of other names" in found.unseen[0]
    assert found.states_complete
    with hu.observe(model, optimizer, interval=1) as seen:
        optimizer.step()
    assert seen.record.parameters["embed.weight"].kind == "Embedding"


@pytest.mark.parametrize(
    ("options", "line"), [({}, "hu.optim.AdamW("), ({"weight_update": "nearest"}, 'group["weight_update"] = "kahan"')]
)
def test_the_code_that_mends_a_frozen_weight_is_for_the_optimizer_that_stepped_it(options, line):
    def content(step: int) -> dict:
        state = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4), "step": step}
        group = {"params": [0], "param_names": ["w"], "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, **options}
        weights = {"w": torch.ones(4, dtype=torch.bfloat16)}
        return {"model": weights, "optimizer": {"state": {0: state}, "param_groups": [group]}}

    (found,) = hu.audit(content(1), content(5)).findings
    assert found.code == "weight-frozen"
    assert line in found.write


def test_states_of_another_shape_and_low_bits_that_stand_still_are_found():
    def content(step: int, low: int, moment: int = 4) -> dict:
        state = {"exp_avg": torch.ones(moment), "exp_avg_sq": torch.ones(moment), "step": step}
        state["low_bits"] = torch.full((4,), low, dtype=torch.uint8)
        group = {"params": [0], "param_names": ["w"], "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}
        return {"model": {"w": torch.ones(4)}, "optimizer": {"state": {0: state}, "param_groups": [group]}}

    def find_codes(after: dict) -> list[str]:
        return [finding.code for finding in hu.audit(content(1, 3), after).findings]

    assert find_codes(content(5, 3)) == ["weight-frozen"]
    assert find_codes(content(5, 4)) == []
    assert "state-mismatch" in find_codes(content(5, 4, moment=3))
