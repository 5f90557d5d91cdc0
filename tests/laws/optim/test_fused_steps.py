"""Law: the compiled step has the reference's bits, for every rule, weight update, store and codec."""

import dataclasses
import inspect
import itertools
import math
import types

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.kernels import KernelMismatchError, divide, floor, select
from halfulp.optim.step import _run as _run_module
from halfulp.optim.step._kernel import compile_step_kernel, make_step_table_function
from halfulp.optim.step._run import compile_and_check_kernel

from ... import samples
from .cases import (
    CODECS,
    MIXED,
    MIXED_PAIR,
    build,
    combinations,
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rule", "update", "store", "codec", "gradient"), covering())
def test_compiled_equals_reference(seed, rule, update, store, codec, gradient):
    case = (seed, rule, update, store, CODECS[codec], gradient)
    assert differing(_run("llvm", *case)[0], _run("reference", *case)[0]) == []


@pytest.mark.parametrize(
    ("rule", "codec"), [("adamw", MIXED), ("adamw", MIXED_PAIR), ("adam-amsgrad", MIXED), ("adam-amsgrad", MIXED_PAIR)]
)
def test_compiled_equals_reference_with_one_codec_per_state(seed, rule, codec):
    case = (seed, rule, "split8", "bf16", codec, torch.float32)
    assert differing(_run("llvm", *case)[0], _run("reference", *case)[0]) == []


@pytest.mark.parametrize(("update", "codec"), [("nearest", "8bit"), ("kahan", None), ("stochastic", torch.float32)])
def test_metered_steps_count_alike_and_write_the_same(seed, update, codec):
    case = (seed, "adamw", update, "bf16", codec, torch.bfloat16)
    (compiled, a), (reference, b) = _run("llvm", *case, report_interval=1), _run("reference", *case, report_interval=1)
    assert differing(compiled, reference) == []
    assert differing(compiled, _run("llvm", *case)[0]) == [], "metering changed the step"
    for mine, other in zip(a.report().rows, b.report().rows, strict=True):
        assert (mine.updates, mine.cancelled, mine.samples) == (other.updates, other.cancelled, other.samples)
        assert mine.realised == pytest.approx(other.realised, rel=1e-9)


def test_kernels_that_differ_in_any_piece_have_different_keys():
    """Two kinds share a cache entry only where they are the same instructions."""
    known = {}
    codecs = itertools.cycle(("default", "bf16-nearest", "8bit", "bf16x2"))
    for (rule, update, store), codec in zip(samples.covering(combinations(), 12), codecs):
        parameter = torch.nn.Parameter(fit(torch.zeros(2, 32), store))
        optimizer = build(rule, update, [parameter], store, state_dtype=CODECS[codec])
        made = make_step_table_function(optimizer._choose_step_spec(optimizer.param_groups[0], parameter, None, ""))
        trace = made.trace
        layout = made.column_count, made.constant_count, made.block_size
        own = trace.lines, trace.kinds, trace.stores, trace.sums, layout
        assert known.setdefault(made.make_cache_key(), own) == own


def _spec(seed, update="kahan", codec="8bit", **more):
    parameter = torch.nn.Parameter(fit(special_pairs(seed)[0], "bf16"))
    optimizer = build("adamw", update, [parameter], "bf16", state_dtype=CODECS[codec], seed=seed, **more)
    return optimizer._choose_step_spec(optimizer.param_groups[0], parameter, None, "")


def _with_constants(spec, names):
    own = dict(zip(spec.rule.constants, names, strict=True))
    inner, plain = tuple(own[name] for name in spec.rule.homogeneous), spec.rule.update
    update = types.FunctionType(plain.__code__, plain.__globals__, plain.__name__)
    arguments = inspect.signature(plain).parameters.values()
    update.__signature__ = inspect.Signature([one.replace(name=own.get(one.name, f"{one.name}_")) for one in arguments])
    return dataclasses.replace(spec, rule=dataclasses.replace(spec.rule, update=update, homogeneous=inner))


def test_constants_called_shrink_and_grow_change_no_bit(seed):
    spec = _spec(seed)
    renamed = ("shrink", "grow", "w", "g", "u", "huge", "i", "q0", "n0")
    compile_and_check_kernel(_with_constants(spec, renamed[: len(spec.rule.constants)]))


def _own_rule(spec, update):
    own = {"homogeneous": None, "error_feedback": None}
    return dataclasses.replace(spec, rule=dataclasses.replace(spec.rule, name="of-mine", update=update, **own))


def test_a_literal_in_a_rule_is_a_float32(seed):
    spec = _spec(seed, codec="bf16-nearest")
    compile_and_check_kernel(_own_rule(spec, lambda w, g, m, v, lr: (0.1 * g - 0.3 * m, g + lr * (m - 0.7 * v), v)))


def test_a_step_that_is_compiled_to_other_bits_is_named(seed, monkeypatch):
    spec = _own_rule(_spec(seed, codec="bf16-nearest"), lambda w, g, m, v, lr: (lr * g, m, v))
    other = _own_rule(spec, lambda w, g, m, v, lr: (lr * (g + g), m, v))
    monkeypatch.setattr(_run_module, "compile_step_kernel", lambda _: compile_step_kernel(other))
    with pytest.raises(KernelMismatchError, match="of_mine"):
        compile_and_check_kernel(spec)


OUTSIDE = {
    "a branch": (lambda g, m: g if g > m else m, r"has no branches: write select\(condition, a, b\)"),
    "and": (lambda g, m: select((g > m) and (m > g), g, m), "has no branches"),
    "max": (lambda g, m: max(g, m), "has no branches"),
    "a power": (lambda g, m: g**2, r"no powers: write x \* x"),
    "a remainder": (lambda g, m: g % m, "floor"),
    "math": (lambda g, m: math.sqrt(g), "must be real number"),
    "NumPy": (lambda g, m: np.exp(g), "does not support ufuncs"),
    "torch": (lambda g, m: torch.sin(g), "must be Tensor"),
    "a method": (lambda g, m: g.sum(), "no attribute 'sum'"),
    "an element": (lambda g, m: g[0], "not subscriptable"),
    "a mask as a number": (lambda g, m: g * (g > m), "operands are of one kind"),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_rule_that_the_language_has_no_words_for_is_refused_at_its_line(seed, what):
    function, says = OUTSIDE[what]
    line = function.__code__.co_firstlineno
    with pytest.raises(TypeError, match=rf"test_fused_steps.py, line {line}, .*{says}.*select, floor, sqrt, divide"):
        compile_and_check_kernel(
            _own_rule(_spec(seed, codec="bf16-nearest"), lambda w, g, m, v, lr: (lr * function(g, m), m, v))
        )


@pytest.mark.parametrize("made", [lambda g, m, v: g, lambda g, m, v: None, lambda g, m, v: (g, m)])
def test_a_rule_returns_the_update_and_its_states(seed, made):
    with pytest.raises(TypeError, match=r"'of-mine' returns .*: return a tuple of the update, 'exp_avg', 'exp_avg_sq'"):
        compile_and_check_kernel(_own_rule(_spec(seed, codec="bf16-nearest"), lambda w, g, m, v, lr: made(g, m, v)))


def test_a_rule_selects_and_rounds_down(seed):
    def update(w, g, m, v, lr):
        return lr * select((g > m) & ~(g > 3.0), floor(divide(g, lr)), g), m, v

    compile_and_check_kernel(_own_rule(_spec(seed, codec="bf16-nearest"), update))


# Names that the kernel binds, with other meanings in this module.
UNIT, HUGE, BLOCK, WEYL, S16 = (np.float32(value) for value in (3.0, 0.5, 7.0, 0.25, -2.0))


def higher(x):
    return x * UNIT


def weight_real(x):
    return x + higher(BLOCK * x)


def _own_names(w, g, m, v, lr, eps):
    m = m + lr * (higher(g) * HUGE - m)
    return -lr * weight_real(m) * WEYL, m, v + lr * (g * g * UNIT - v)


def _own_feedback(lost, m, v, lr, eps):
    return m - higher(lost) * S16


@pytest.mark.parametrize(("update", "codec"), [("kahan", "8bit"), ("feedback", "bf16-nearest")])
def test_names_of_a_rules_own_module_mean_what_they_mean_there(seed, update, codec):
    spec = _spec(seed, update, codec)
    own = {"homogeneous": None, "error_feedback": _own_feedback}
    rule = dataclasses.replace(spec.rule, name="own_names", update=_own_names, **own)
    spec = dataclasses.replace(spec, rule=rule)
    compile_and_check_kernel(spec)
