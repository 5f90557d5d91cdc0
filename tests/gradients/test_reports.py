"""What the scaler tells: the table of sites and the last step."""

import dataclasses
import json
import math

import pytest
import torch

import halfulp as hu
from halfulp.gradients import LastStep

from .exponents import batch, clear, mean_square, mlp, sites


def trained(scaler, model, steps, overflows=()):
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    x, told = batch(), []
    for step in range(steps):
        clear(model)
        scaler.scale(mean_square(model(x))).backward()
        if step in overflows:
            model[2].weight.grad[0, 0] = math.inf
        measured = scaler._controller.backward.is_measuring
        scaler.step(opt)
        scaler.update()
        told.append((measured, scaler.last_step, scaler.sites().to_dict()["sites"]))
    return told


def test_the_table_before_anything_was_measured(seed):
    scaler = hu.AdaptiveGradScaler(mlp(), init_scale=2.0**9)
    (row,) = scaler.sites().rows
    assert (row.site, row.exponent, row.zero, row.subnormal, row.format, row.overflows) == (
        *("global", 9, None, None),
        *(None, 0),
    )
    assert set(row.amax.values()) == {None}
    assert "global" in str(scaler.sites())


def test_the_table_holds_what_is_known(seed):
    model = mlp()
    scaler = hu.AdaptiveGradScaler(model, format="fp16", interval=1)
    trained(scaler, model, 4)
    table = scaler.sites()
    assert [row.site for row in table.rows] == ["global", "0", "2", "4"]
    assert {row.site: row.exponent for row in table.rows} == sites(scaler)
    assert table["2"] is table.rows[2]
    with pytest.raises(ValueError, match=r"no site 'x'; the sites are global, 0, 2, 4"):
        table["x"]
    text = str(table).splitlines()
    assert len(text) == 6
    header, line = text[0], text[4]
    assert [word in header for word in ("site", "exponent", "amax", "zero", "subnormal", "format")] == [True] * 6
    assert line.split()[0] == "2"
    assert line.split()[1] == str(sites(scaler)["2"])
    assert "fp16" in line
    data = table.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["sites"] == [dataclasses.asdict(row) for row in table.rows]


def test_zeros_and_subnormals_are_counted(seed):
    """Against a count of the very gradient that arrives."""
    model, x, seen = mlp(2), batch(64), []
    scaler = hu.AdaptiveGradScaler(model, format="fp16", interval=1, init_scale=1.0, policy="constant")
    model[2].weight.register_hook(lambda gradient: seen.append(hu.quantize(gradient, hu.formats.fp16, overflow="inf")))
    model[2].bias.requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(mean_square(model(x)) * 2.0**-14).backward()
    scaler.step(opt)
    reading = scaler._controller._measurements
    (weight,) = [one.reading for one in reading if one.kind == "weight" and one.site.key == "2"]
    zero = (seen[0] == 0).double().mean().item()
    below = ((seen[0] != 0) & (seen[0].abs() < 2.0**-14)).double().mean().item()
    assert weight.element_count == 64
    assert weight.zero_share == pytest.approx(zero)
    assert weight.subnormal_share == pytest.approx(below)
    assert below > 0.5
    scaler.update()


def test_the_last_step_says_what_happened(seed):
    model = mlp()
    scaler = hu.AdaptiveGradScaler(model, interval=8)
    assert scaler.last_step is None
    trained(scaler, model, 1)
    assert scaler.last_step == LastStep(applied=True)
    assert str(scaler.last_step) == "applied"
    before = sites(scaler)["global"]
    trained(scaler, model, 1, overflows={0})
    step = scaler.last_step
    assert not step.applied
    # No site made it: the test did, after the backward pass.
    assert step.overflow_sources == (("global", before),)
    assert str(step).startswith("skipped: gradients overflowed at global at 2^")
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.applied = True


def test_a_merged_site_follows_the_global_one(seed):
    model = mlp()
    scaler = hu.AdaptiveGradScaler(model, format="fp16", interval=1)
    trained(scaler, model, 2)
    with pytest.raises(ValueError, match=r"no site.*x.* to merge; the sites are global, 0, 2, 4"):
        scaler.merge_into_global_site("x")
    with pytest.raises(ValueError, match=r"no site.*global.* to merge"):
        scaler.merge_into_global_site("global")
    scaler.merge_into_global_site("2", reason="not exact")
    assert scaler.sites()["2"].merged == "not exact"
    assert scaler.sites()["2"].exponent == scaler.sites()["global"].exponent
    trained(scaler, model, 3)
    assert scaler.sites()["2"].exponent == scaler.sites()["global"].exponent
    assert str(scaler.sites()).splitlines()[4].split()[:2] == ["2", "global"]
    scaler._controller.sites.merge_into_global_site(iter(["4"]), "an iterator")
    assert scaler.sites()["4"].merged == "an iterator"
