"""Law 4: the compiled step and its reference give the same bits, for every rule, weight update, store and codec."""

import itertools

import pytest
import torch

import halfulp as hu
from halfulp.kernels import digest
from halfulp.optim.step._kernel import bindings, source

from ..laws import (
    CODECS,
    MIXED,
    MIXED_PAIR,
    RULES,
    STORE_NAMES,
    UPDATES,
    allowed,
    build,
    covering,
    differing,
    fit,
    snapshot,
    special_pairs,
)


def _run(engine, seed, rule, update, store, codec, gradient, steps=3, **more):
    """Everything after some steps on special values, with other gradients each step."""
    parameter = torch.nn.Parameter(fit(special_pairs(seed)[0], store))
    parameter.grad_dtype = None
    optimizer = build(rule, update, [parameter], store, state_dtype=codec, seed=seed, **more)
    with hu.kernels.engine(engine):
        for step in range(steps):
            parameter.grad = special_pairs(seed + step + 1)[1].to(gradient)
            optimizer.step()
    return snapshot(optimizer), optimizer


@pytest.mark.parametrize(("rule", "update", "store", "codec", "gradient"), covering())
def test_compiled_equals_reference(seed, rule, update, store, codec, gradient):
    case = (seed, rule, update, store, CODECS[codec], gradient)
    assert differing(_run("numba", *case)[0], _run("reference", *case)[0]) == []


@pytest.mark.parametrize(
    ("rule", "codec"), [("adamw", MIXED), ("adamw", MIXED_PAIR), ("adam-amsgrad", {"max_exp_avg_sq": "8bit"})]
)
def test_compiled_equals_reference_with_one_codec_per_state(seed, rule, codec):
    case = (seed, rule, "split8", "bf16", codec, torch.float32)
    assert differing(_run("numba", *case)[0], _run("reference", *case)[0]) == []


@pytest.mark.parametrize(("update", "codec"), [("nearest", "8bit"), ("kahan", None), ("stochastic", torch.float32)])
def test_metered_steps_count_alike_and_write_the_same(seed, update, codec):
    case = (seed, "adamw", update, "bf16", codec, torch.bfloat16)
    (compiled, a), (reference, b) = _run("numba", *case, report_interval=1), _run("reference", *case, report_interval=1)
    assert differing(compiled, reference) == []
    assert differing(compiled, _run("numba", *case)[0]) == [], "metering changed the step"
    for mine, other in zip(a.report().rows, b.report().rows, strict=True):
        assert (mine.updates, mine.cancelled, mine.samples) == (other.updates, other.cancelled, other.samples)
        assert mine.realised == pytest.approx(other.realised, rel=1e-9)


def test_kernels_that_differ_in_any_piece_have_different_keys():
    """Two kinds share a cache entry only where they are the same code over the same pieces."""
    known = {}
    rows = [(r, u, s) for r, u, s in itertools.product(RULES, UPDATES, STORE_NAMES) if allowed(r, u, s)]
    for (rule, update, store), codec in itertools.product(rows, ("default", "bf16-nearest", "8bit", "bf16x2")):
        parameter = torch.nn.Parameter(fit(torch.zeros(2, 32), store))
        optimizer = build(rule, update, [parameter], store, state_dtype=CODECS[codec])
        kind = optimizer._step_spec(optimizer.param_groups[0], parameter, None, "")
        bound = bindings(kind)
        namespace = {}
        exec(compile(source(kind), "step", "exec"), namespace)
        pieces = (source(kind), tuple((name, str(value)) for name, value in sorted(bound.items())))
        assert known.setdefault(digest(namespace["step"], bound), pieces) == pieces
