"""Law: every update rule is written in + - * and four calls, and agrees with float64 by another formulation."""

import ast
import inspect
import math
import textwrap

import pytest
import torch

from halfulp.optim.rules._adam import update_moments

from .cases import RULES, WITH_ORACLE, build, rule_of

ALL = [rule_of(name) for name in RULES]
CALLS = {"sqrt", "divide", "maximum", "sign_of"}
FUNCTIONS = [f for rule in ALL for f in (rule.update, rule.error_feedback) if f is not None]
FUNCTIONS += [reduction.of for rule in ALL for reduction in rule.reductions]
FUNCTIONS += [update_moments]  # which several call


@pytest.mark.parametrize("function", dict.fromkeys(FUNCTIONS), ids=lambda f: f.__name__)
def test_a_rule_is_plus_minus_times_and_four_calls_on_names(function):
    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    statements = [s for s in body.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    for node in (node for statement in statements for node in ast.walk(statement)):
        assert not isinstance(node, ast.Constant), f"a literal: {node.value!r}"
        if isinstance(node, ast.BinOp):
            assert isinstance(node.op, ast.Add | ast.Sub | ast.Mult), ast.dump(node)
        elif isinstance(node, ast.UnaryOp):
            assert isinstance(node.op, ast.USub), ast.dump(node)
        elif isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name), ast.dump(node)
            assert node.func.id in CALLS or function.__globals__[node.func.id] in FUNCTIONS, ast.dump(node)
            assert not node.keywords, ast.dump(node)
        else:
            allowed = ast.Assign | ast.Return | ast.Tuple | ast.Name | ast.expr_context | ast.operator | ast.unaryop
            assert isinstance(node, allowed), ast.dump(node)


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_a_rule_takes_its_states_and_constants_by_name(rule):
    arguments = list(inspect.signature(rule.update).parameters)
    first = ["w", "g"] if rule.prepare is None else ["w", "g", "prepared"]
    assert arguments[: len(first)] == first
    assert len(arguments) == len(first) + len(rule.states) + len(rule.constants)
    assert arguments[len(first) + len(rule.states) :] == list(rule.constants)
    assert set(rule.homogeneous or ()) <= set(rule.constants)
    for reduction in rule.reductions:
        taken = list(inspect.signature(reduction.of).parameters)
        assert taken == arguments[: len(taken)], "those of update, as many as it needs"
    if rule.error_feedback is not None:
        assert len(inspect.signature(rule.error_feedback).parameters) == 1 + len(rule.states) + len(rule.constants)


def _left_out(total, terms, share):
    """A sum, NaN where less than a share of its terms is left of it: how float32 rounds decides there."""
    return total.masked_fill(total.abs() < share * terms, math.nan)


def _adam(w, grads, o, decoupled):
    m = v = top = torch.zeros_like(w)
    b1, b2 = o.get("betas", (0.9, 0.999))
    for t, g in enumerate(grads, 1):
        g = -g if o.get("maximize") else g
        if not decoupled:
            decay = o.get("weight_decay", 0) * w
            g = _left_out(g + decay, g.abs() + decay.abs(), 2**-13)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        top = torch.maximum(top, v)
        used = top if o.get("amsgrad") else v
        step = m / (1 - b1**t) / ((used / (1 - b2**t)).sqrt() + o.get("eps", 1e-8))
        w = w - o["lr"] * ((o.get("weight_decay", 0.01) * w if decoupled else 0) + step)
    return w


def _sgd(w, grads, o):
    buffer = None
    for g in grads:
        g = (-g if o.get("maximize") else g) + o.get("weight_decay", 0) * w
        if o.get("momentum"):
            buffer = g.clone() if buffer is None else o["momentum"] * buffer + (1 - o.get("dampening", 0)) * g
            g = g + o["momentum"] * buffer if o.get("nesterov") else buffer
        w = w - o["lr"] * g
    return w


def _lion(w, grads, o):
    m = size = torch.zeros_like(w)
    b1, b2 = o.get("betas", (0.9, 0.99))
    for g in grads:
        mixed = _left_out(b1 * m + (1 - b1) * g, b1 * size + (1 - b1) * g.abs(), 2**-19)
        w, m = w - o["lr"] * (mixed / mixed.abs() + o.get("weight_decay", 0) * w), b2 * m + (1 - b2) * g
        size = b2 * size + (1 - b2) * g.abs()
    return w


def _yogi(w, grads, o):
    m, v = torch.zeros_like(w), torch.full_like(w, 1e-6)
    for g in grads:
        m = 0.9 * m + (1 - 0.9) * g
        v = v - (1 - 0.999) * _left_out(v - g * g, v + g * g, 2**-19).sign() * g * g
        w = (1 - o["lr"] * o.get("weight_decay", 0)) * w - o["lr"] * m / (v.sqrt() + 1e-3)
    return w


def _adan(w, grads, o):
    m = d = n = torch.zeros_like(w)
    b1, b2, b3 = o["betas"]
    for t, g in enumerate(grads, 1):
        change = g - grads[max(t - 2, 0)]
        m, d = b1 * m + (1 - b1) * g, b2 * d + (1 - b2) * change
        n = b3 * n + (1 - b3) * (g + b2 * change) ** 2
        step = (m / (1 - b1**t) + b2 * d / (1 - b2**t)) / ((n / (1 - b3**t)).sqrt() + 1e-8)
        w = (w - o["lr"] * step) / (1 + o["lr"] * o.get("weight_decay", 0))
    return w


def _adagrad(w, grads, o):
    total = torch.full_like(w, o.get("initial_accumulator_value", 0))
    for g in grads:
        decay = o.get("weight_decay", 0) * w
        g = _left_out(g + decay, g.abs() + decay.abs(), 2**-13)
        total = total + g * g
        w = w - o["lr"] * g / (total.sqrt() + 1e-10)
    return w


def _rmsprop(w, grads, o):
    v = mean = buffer = torch.zeros_like(w)
    for g in grads:
        decay = o.get("weight_decay", 0) * w
        g = _left_out((-g if o.get("maximize") else g) + decay, g.abs() + decay.abs(), 2**-13)
        v, mean = 0.99 * v + 0.01 * g * g, 0.99 * mean + 0.01 * g
        size = (_left_out(v - mean**2, v, 2**-10) if o.get("centered") else v).sqrt() + o.get("eps", 1e-8)
        buffer = o.get("momentum", 0) * buffer + g / size
        w = w - o["lr"] * buffer
    return w


def _nadam(w, grads, o):
    m = v = torch.zeros_like(w)
    product = 1
    for t, g in enumerate(grads, 1):
        decay = o.get("weight_decay", 0) * w
        g = _left_out(g + decay, g.abs() + decay.abs(), 2**-13)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        mu, later = (0.9 * (1 - 0.5 * 0.96 ** (0.004 * step)) for step in (t, t + 1))
        product = product * mu
        ahead = (1 - mu) / (1 - product) * g + later / (1 - product * later) * m
        w = w - o["lr"] * ahead / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return w


def _radam(w, grads, o):
    m = v = torch.zeros_like(w)
    longest = 2 / (1 - 0.999) - 1
    for t, g in enumerate(grads, 1):
        w = w - o["lr"] * o.get("weight_decay", 0) * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        length = longest - 2 * t * 0.999**t / (1 - 0.999**t)
        step = m / (1 - 0.9**t)
        if length > 5:
            share = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            step = step * math.sqrt(share * (1 - 0.999**t)) / (v.sqrt() + 1e-8)
        w = w - o["lr"] * step
    return w


def _ademamix(w, grads, o):
    m = v = slow = torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        share = min(1, t / 15)
        # Half-lives, less one, grow linearly; the paper's formula says the same.
        lives = (math.log(0.5) / math.log(b) - 1 for b in (0.9, 0.9999))
        beta3 = 0.5 ** (1 / (sum(s * life for s, life in zip((1 - share, share), lives)) + 1))
        m, v, slow = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, beta3 * slow + (1 - beta3) * g
        step = (m / (1 - 0.9**t) + 2 * share * slow) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        w = w - o["lr"] * (step + o.get("weight_decay", 0) * w)
    return w


def _lamb(w, grads, o):
    m = v = torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        step = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + o.get("weight_decay", 0) * w
        adapts = o.get("weight_decay") and w.norm() > 0
        w = w - o["lr"] * (w.norm() / step.norm() if adapts else 1) * step
    return w


def _adafactor(w, grads, o):
    v = torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        g = -g if o.get("maximize") else g
        rate = max(1e-3, w.square().mean().sqrt()) * min(o["lr"], t**-0.5)
        v = v + t**-0.8 * (g * g - v)
        step = g / v.clamp(min=2.0**-46).sqrt()
        w = (1 - o["lr"] * o.get("weight_decay", 0)) * w - rate / max(1, step.square().mean().sqrt()) * step
    return w


def _schedule_free(w, grads, o):
    """The paper's three sequences: z steps, x is their mean, y lies between them."""
    adam, share = "r" in o, 0.9
    x = z = y = w
    v, total = torch.zeros_like(w), 0
    for t, g in enumerate(grads, 1):
        lr = o["lr"] * min(1, t / o["warmup_steps"]) if o.get("warmup_steps") else o["lr"]
        weight = t ** o.get("r", 0) * lr**2
        total = total + weight
        v = 0.999 * v + 0.001 * g * g
        direction = g / ((v / (1 - 0.999**t)).sqrt() + 1e-8) if adam else g
        z = z - lr * (direction + o.get("weight_decay", 0) * y)
        x = x + weight / total * (z - x)
        y = (1 - share) * z + share * x
    return y


def _prodigy(w, grads, o):
    m = v = s = torch.zeros_like(w)
    start, d, numerator, keep = w, o["d0"], 0, 0.999**0.5
    for g in grads:
        rate = d * o["lr"]
        numerator = keep * numerator + d / o["d0"] * rate * (g * (start - w)).sum()
        m, v = 0.9 * m + 0.1 * d * g, 0.999 * v + 0.001 * (d * g) ** 2
        s = keep * s + d / o["d0"] * rate * g
        d = max(d, (numerator / s.abs().sum()).item())
        w = w - rate * (m / (v.sqrt() + d * 1e-8) + o.get("weight_decay", 0) * w)
    return w


ORACLES = {
    **{"SGD": _sgd, "Lion": _lion, "Yogi": _yogi, "Adan": _adan, "Adagrad": _adagrad, "RMSprop": _rmsprop},
    **{"NAdam": _nadam, "RAdam": _radam, "AdEMAMix": _ademamix, "LAMB": _lamb, "Adafactor": _adafactor},
    **{"SGDScheduleFree": _schedule_free, "AdamWScheduleFree": _schedule_free, "Prodigy": _prodigy},
}
ADAMS = ("Adam", "AdamW")
# Powers of ten whose squares, times what a step takes of them, float32 holds.
LARGEST = {"adagrad": 18.5, "rmsprop": 19, "rmsprop-centered": 19, "adafactor": 18.5}


@pytest.mark.parametrize("rule", WITH_ORACLE)
def test_every_rule_against_float64(seed, rule):
    kind, options = RULES[rule]
    start = torch.randn(400)
    grads = [torch.randn(400) * 10 ** torch.empty(400).uniform_(-3, 3) for _ in range(20)]
    parameter = torch.nn.Parameter(start.clone())
    optimizer = build(rule, "exact", [parameter], "fp32")
    for gradient in grads:
        parameter.grad = gradient
        optimizer.step()
    wide = [gradient.double() for gradient in grads]
    if kind.__name__ in ADAMS:
        expected = _adam(start.double(), wide, options, decoupled="adamw" in rule)
    else:
        expected = ORACLES[kind.__name__](start.double(), wide, options)
    decided = ~expected.isnan()
    assert decided.sum() > 390
    start, expected = start[decided], expected[decided]
    moved = (expected - start).abs().max()
    error = (parameter.detach().double()[decided] - expected).abs()
    # Twenty float32 steps, each of about ten roundings of terms as large as the weight or the largest gradient.
    scale = expected.abs() + start.abs() + moved
    assert (error <= 200 * 2**-24 * scale).all()
    assert not math.isclose(float(moved), 0)


@pytest.mark.parametrize(("low", "high"), [(-10, -6), (15, 20)], ids=["of the size of eps", "whose squares overflow"])
@pytest.mark.parametrize("rule", WITH_ORACLE)
def test_a_step_matches_its_definition_for_gradients(seed, rule, low, high):
    """From weights of zero and by gradients of one sign, so that no sum cancels and a missing eps or term shows."""
    kind, options = RULES[rule]
    options = {**options, "weight_decay": 0.0, "lr": 2.0**-7}
    high = min(high, LARGEST.get(rule, high))
    size = 10 ** torch.empty(200).uniform_(low, high) * (torch.randint(0, 2, (200,)) * 2 - 1)
    grads = [size * torch.empty(200).uniform_(0.5, 2) for _ in range(5)]
    parameter = torch.nn.Parameter(torch.zeros(200))
    optimizer = build(rule, "exact", [parameter], "fp32", **{k: options[k] for k in ("weight_decay", "lr")})
    for gradient in grads:
        parameter.grad = gradient
        optimizer.step()
    start, wide = torch.zeros(200, dtype=torch.float64), [gradient.double() for gradient in grads]
    adam = kind.__name__ in ADAMS
    oracle = (lambda *a: _adam(*a, decoupled="adamw" in rule)) if adam else ORACLES[kind.__name__]
    torch.testing.assert_close(parameter.detach().double(), oracle(start, wide, options), rtol=3e-6, atol=0)
