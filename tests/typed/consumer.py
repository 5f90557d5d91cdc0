"""Every public name, used as a person uses it, with the types that must come out: read by mypy and pyright, and run.

A wrong public annotation fails `mypy` (strict here) or `basedpyright --project tests/typed`. What ends in `_read_only`
is read by the checkers and never run: it registers something for good, starts processes, or needs a group of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any, Literal, assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

import halfulp as hu
from halfulp.optim._storage import STORE_BY_DTYPE
from halfulp.scaled.rules import Family

Parts = tuple[Tensor, ...]


def formats() -> None:
    """Formats are data: found by name, by dtype or by parsing, and their numbers are exact."""
    assert_type(hu.formats.get("bf16"), hu.Format)
    assert_type(hu.formats.get(torch.bfloat16), hu.Format)
    assert_type(hu.formats.parse("e5m10"), hu.Format | None)
    assert_type(hu.formats.names(), list[str])
    assert_type(hu.formats.rows(), list[dict[str, Any]])
    assert_type(hu.formats.block_rows(), list[dict[str, Any]])
    assert_type(hu.formats.block_names(), list[str])
    assert_type(hu.formats.get_block("nvfp4"), hu.BlockFormat)
    mine = hu.formats.Format("mine", 4, 3, bias=11, nan="negative_zero", infinities=False)
    assert_type(mine.max_code, int)
    assert_type(mine.bias, int)
    assert_type(mine.torch_dtype, torch.dtype | None)
    assert_type(hu.formats.BlockFormat("block", mine, hu.formats.e8m0, 16).block, int)
    assert_type(hu.formats.all_values(hu.formats.e2m1fn), list[float])
    assert_type(hu.formats.decode(3, hu.formats.e2m1fn), float)
    assert_type(hu.formats.encode(Fraction(1, 2), hu.formats.e2m1fn), int)
    assert_type(hu.formats.round_exact(0.3, hu.formats.e2m1fn, "stochastic", Fraction(1, 2)), float)
    plain = (hu.formats.bf16, hu.formats.fp16, hu.formats.fp32, hu.formats.fp64, hu.formats.tf32)
    eights = (hu.formats.e4m3, hu.formats.e4m3fn, hu.formats.e4m3fnuz, hu.formats.e5m2, hu.formats.e5m2fnuz)
    others = (hu.formats.e3m4, hu.formats.e8m0, hu.formats.e8m1, hu.formats.e8m3, hu.formats.e8m5)
    small = (hu.formats.e2m1fn, hu.formats.e2m3fn, hu.formats.e3m2fn)
    every: Sequence[hu.Format] = (*plain, *eights, *others, *small)
    assert_type(every[0].bits, int)
    mx = (hu.formats.mxfp4, hu.formats.mxfp6_e2m3, hu.formats.mxfp6_e3m2, hu.formats.mxfp8_e4m3, hu.formats.mxfp8_e5m2)
    blocks: Sequence[hu.BlockFormat] = (*mx, hu.formats.nvfp4)
    assert_type(blocks[0].name, str)


def rounding() -> None:
    """Modes are values of one class, and everything that rounds a tensor returns one."""
    modes: list[hu.rounding.Rounding] = [hu.Nearest(), hu.TowardZero(), hu.Up(), hu.Down(), hu.Stochastic(seed=1)]
    same: list[hu.rounding.Rounding] = [
        hu.rounding.Nearest(),
        hu.rounding.TowardZero(),
        hu.rounding.Up(),
        hu.rounding.Down(),
        hu.rounding.Stochastic(),
    ]
    assert len(modes) == len(same)
    assert_type(hu.rounding.get_rounding("up"), hu.rounding.Rounding)
    assert_type(hu.rounding.rounding_names(), list[str])
    x = torch.randn(32)
    assert_type(hu.quantize(x, "e4m3fn"), Tensor)
    assert_type(hu.rounding.quantize(x, torch.bfloat16, hu.Stochastic(), overflow="saturate", out=x, counter=1), Tensor)
    assert_type(hu.quantize(x, hu.formats.mxfp4, "nearest", dim=0), Tensor)
    assert_type(hu.rounding.straight_through(x, "bf16", hu.formats.e5m2, backward_rounding="stochastic"), Tensor)
    layer: nn.Module = hu.rounding.StraightThrough("bf16", rounding=hu.Nearest())
    assert_type(layer(x), Any)
    assert_type(hu.rounding.fit(x, "e5m2"), hu.rounding.Fit)
    assert_type(hu.rounding.mix64(1, 2), int)
    assert_type(hu.rounding.mix64_all(1, np.arange(3, dtype=np.uint64)), npt.NDArray[np.uint64])
    assert_type(hu.rounding.random_words(hu.rounding.mix64(1), torch.arange(3)), Tensor)


def exact_sums() -> None:
    """Exact sums are tensors."""
    x = torch.randn(3, 4)
    assert_type(hu.exact_sum(x, dim=(0, 1)), Tensor)
    assert_type(hu.exact_dot(x, x, dim=-1, keepdim=True, dtype=torch.float64), Tensor)
    assert_type(hu.exact_round(hu.exact_partial(x), torch.float32), Tensor)
    again = (hu.arithmetic.exact_sum, hu.arithmetic.exact_dot, hu.arithmetic.exact_partial, hu.arithmetic.exact_round)
    assert again == (hu.exact_sum, hu.exact_dot, hu.exact_partial, hu.exact_round)


def arithmetic() -> None:
    """Expansions are tuples of tensors."""
    assert_type(hu.arithmetic.MAX_COMPONENTS, int)
    assert_type(hu.arithmetic.PRECISION_BY_DTYPE, dict[torch.dtype, int])
    parts: hu.arithmetic.Parts = hu.arithmetic.split(torch.randn(3, 3).double(), torch.float32, 2)
    assert_type(parts, Parts)
    assert_type(hu.arithmetic.merge(parts, torch.float64), Tensor)
    assert_type(hu.arithmetic.renormalize(parts, 2), Parts)
    assert_type(hu.arithmetic.compare(parts, parts), Tensor)
    assert_type(hu.arithmetic.names(), tuple[str, ...])
    assert_type(hu.arithmetic.pointwise("add", parts, parts, components=2, dtype=torch.float32), Parts)
    assert_type(hu.arithmetic.total(parts, None, 2), Parts)
    assert_type(hu.arithmetic.average(parts, (0, 1), 2, keepdim=True), Parts)
    assert_type(hu.arithmetic.product(parts, 0, 2), Parts)
    assert_type(hu.arithmetic.running_sum(parts, 0, 2), Parts)


def linear_algebra() -> None:
    """So are matrices, their products and their factors."""
    a = (torch.eye(3) * 2, torch.zeros(3, 3))
    assert_type(hu.arithmetic.cholesky(a, 2, torch.float32), Parts)
    assert_type(hu.arithmetic.det(a, 2, torch.float32), Parts)
    assert_type(hu.arithmetic.inverse(a, 2, torch.float32), Parts)
    assert_type(hu.arithmetic.qr(a, 2, torch.float32), tuple[Parts, Parts])
    assert_type(hu.arithmetic.solve(a, a, 2, torch.float32), Parts)
    assert_type(hu.arithmetic.matmul(a, a, 2, torch.float32), Parts)


def optimizers() -> None:
    """The optimizers are torch's, with our choices as classes or names."""
    weight_updates: list[hu.optim.WeightUpdate] = [
        hu.Kahan(residual="nearest"),
        hu.Split(16),
        hu.Components(2),
        hu.Master(),
        hu.optim.KahanStochastic(),
        hu.optim.Kahan(),
        hu.optim.Split(8),
        hu.optim.Components(3),
        hu.optim.Master(),
    ]
    for weight_update in weight_updates:
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        hu.optim.AdamW([parameter], lr=1e-3, weight_update=weight_update)
    feeding: list[hu.optim.WeightUpdate] = [hu.Feedback(), hu.optim.Feedback()]
    model = nn.Linear(4, 4).bfloat16()
    at_the_top: list[type[hu.optim.Optimizer]] = [hu.SGD, hu.Adam, hu.AdamW, hu.Lion]
    assert at_the_top
    base: list[hu.optim.Optimizer] = [
        hu.optim.AdamW(model.parameters(), state_dtype={"exp_avg": "8bit"}, weight_update=feeding[0]),
        hu.optim.Adam(model.named_parameters(), state_dtype=hu.optim.State("8bit", block=64)),
        hu.optim.SGD([{"params": list(model.parameters()), "lr": 0.1}], lr=torch.tensor(0.1), momentum=0.9),
        hu.optim.Lion(model.parameters(), betas=(0.9, 0.99), seed=3),
        hu.optim.Adagrad(model.parameters(), lr_decay=0.1, initial_accumulator_value=0.1),
        hu.optim.RMSprop(model.parameters(), momentum=0.9, centered=True, weight_update="kahan"),
        hu.optim.NAdam(model.parameters(), momentum_decay=1e-3, decoupled_weight_decay=True),
        hu.optim.RAdam(model.parameters(), weight_decay=0.1, param_dtype=torch.bfloat16),
        hu.optim.Adan(model.parameters(), betas=(0.98, 0.92, 0.99), no_prox=True),
        hu.optim.LAMB(model.parameters(), always_adapt=True, trust_clip=True),
        hu.optim.Adafactor(model.parameters(), eps=(None, 1e-3), d=2.0),
        hu.optim.Muon([model.weight], lr=0.02, adjust_lr_fn="match_rms_adamw"),
        hu.optim.Prodigy(model.parameters(), weight_decay=0.1, use_bias_correction=True),
        hu.optim.SGDScheduleFree(model.parameters(), lr=1.0, warmup_steps=100),
        hu.optim.AdamWScheduleFree(model.parameters(), lr=2.5e-3, weight_update="kahan"),
        hu.optim.AdEMAMix(model.parameters(), alpha=5.0, alpha_warmup=1000, beta3_warmup=1000),
    ]
    kept: torch.optim.Optimizer = base[0]
    assert_type(kept.state_dict(), dict[str, Any])
    assert_type(base[0].report(), hu.optim.LostUpdateReport)
    assert_type(hu.optim.report(kept), hu.optim.LostUpdateReport)
    assert_type(hu.optim.OPTIMIZERS, dict[str, type[hu.optim.Optimizer]])
    released = hu.optim.release_gradients(model, base[0])
    assert_type(released, hu.optim.GradientRelease)
    assert_type(hu.float32_gradients(nn.Linear(2, 2).bfloat16()), nn.Linear)
    assert_type(hu.float32_products(nn.Linear(2, 2).bfloat16()), nn.Linear)
    assert_type(hu.optim.float32_gradients(nn.Linear(2, 2).bfloat16(), enabled=False), nn.Linear)
    wrapped: torch.optim.Optimizer = hu.optim.wrap(torch.optim.Adagrad, model.parameters(), lr=0.1)
    assert wrapped.param_groups
    average = hu.optim.EMA(model, decay=lambda step: 0.9, optimizer=base[0])
    average.update()


def gradient_scaler() -> None:
    """The scaler stands where torch's does; policies are values of one class."""
    policies: list[hu.gradients.Policy] = [
        hu.gradients.Amax(headroom=1),
        hu.gradients.Constant(),
        hu.gradients.Dynamic(growth_interval=100),
        hu.gradients.Measured(),
        hu.gradients.RisingFloor(),
        hu.gradients.UnderflowBound(share=1e-3),
        hu.gradients.ElementWise(),
        hu.gradients.AbsRange(),
    ]
    model, same = nn.Linear(4, 1), hu.gradients.AdaptiveGradScaler
    assert same is hu.AdaptiveGradScaler
    scaler = hu.AdaptiveGradScaler(model, policy=policies[0], format="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss: Tensor = model(torch.ones(2, 4)).sum()
    torch.autograd.backward(assert_type(scaler.scale(loss), Tensor))
    scaler.step(optimizer)
    scaler.update()
    assert_type(scaler.last_step, hu.gradients.LastStep | None)
    assert_type(scaler.state_dict(), dict[str, Any])


def scaled_tensors() -> None:
    """A scaled tensor is a tensor; what changes a model returns its type."""
    x = hu.ScaledTensor.encode(torch.randn(4, 4), torch.float16)
    assert_type(x, hu.ScaledTensor)
    assert_type(hu.scaled.ScaledTensor(torch.ones(2), 2.0**-3).decode(torch.float64), Tensor)
    assert_type(x.payload, Tensor)
    assert_type(x.home, torch.dtype | None)
    assert_type(x.cast_(torch.bfloat16), hu.ScaledTensor)
    assert_type(x.with_scale(0.5), hu.ScaledTensor)
    assert_type(hu.rescale(x, side="gradient"), Tensor)
    assert_type(hu.scaled.rescale(x), Tensor)
    assert_type(hu.cast(x, forward=torch.float8_e4m3fn), Tensor)
    assert_type(hu.scaled.cast(x, backward=torch.float8_e5m2), Tensor)
    assert_type(hu.scaled.linear_fp8(torch.randn(16, 16), torch.randn(16, 16)), Tensor)
    assert_type(hu.scaled.eight_bit_engine("cpu"), Literal["scaled_mm", "emulated"])
    assert_type(hu.scaled.round_to_power(torch.tensor(3.0), "up"), Tensor)
    model = hu.scalify(nn.Linear(4, 4), torch.float16, rescale="norms")
    assert_type(model, nn.Linear)
    assert_type(hu.scaled.plain_state_dict(model.state_dict()), dict[str, Any])
    assert_type(hu.fallbacks(model), dict[str, int])
    assert_type(hu.scaled.unscalify(model), nn.Module)
    assert_type(hu.scaled.scalify(nn.ReLU()), nn.ReLU)
    plain: Callable[[Tensor], Tensor] = hu.scaled.scalify_function(torch.square)
    assert isinstance(plain(torch.ones(2)), Tensor)


def multicomponent_tensors() -> None:
    """So is a tensor of several components."""
    x = hu.MCTensor.encode(0.1, components=2, dtype=torch.float16)
    assert_type(x, hu.MCTensor)
    assert_type(hu.mctensor.MCTensor.encode(["0.1"], gradients="first"), hu.MCTensor)
    assert_type(x.decode(torch.float64), Tensor)
    assert_type(x.components, Parts)
    assert_type(x.to_strings(), str | list[Any])
    assert_type(hu.multicomponent(nn.Linear(2, 2), 2, torch.bfloat16), nn.Linear)
    model = hu.mctensor.multicomponent(nn.Linear(2, 2))
    assert_type(hu.mctensor.plain_state_dict(model.state_dict()), dict[str, Any])
    assert_type(hu.mctensor.single_component(model), nn.Module)


def hyperbolic() -> None:
    """Spaces, their optimizers and the ranking task."""
    spaces: list[hu.hyperbolic.Manifold] = [hu.hyperbolic.HalfSpace(), hu.hyperbolic.PoincareBall()]
    assert_type(hu.hyperbolic.manifold("half-space"), hu.hyperbolic.Manifold)
    points = torch.rand(6, 3).double() + 0.5
    optimizers: list[hu.hyperbolic.RiemannianOptimizer] = [
        hu.hyperbolic.RiemannianSGD([nn.Parameter(points)], lr=0.1, manifold=spaces[0]),
        hu.hyperbolic.RiemannianAdam([nn.Parameter(points)], lr=0.1),
    ]
    kept: torch.optim.Optimizer = optimizers[0]
    assert kept.param_groups
    edges = torch.tensor([[0, 1], [1, 2], [3, 4]])
    hu.hyperbolic.RankingSets(edges, 6, others=2, batch=2)
    sets = torch.tensor([[0, 1, 3], [1, 2, 5]])
    assert_type(hu.hyperbolic.ranking_loss(points, sets), Tensor)
    assert_type(hu.hyperbolic.ranking_loss_and_gradient(points, sets), tuple[Tensor, Tensor])
    assert_type(hu.hyperbolic.evaluate_reconstruction(points, edges), hu.hyperbolic.Reconstruction)


def kernels() -> None:
    """Which engine runs, and what a rule of one's own calls."""
    with hu.kernels.engine("reference"):
        assert_type(hu.kernels.count_fallbacks(), dict[str, int])
    assert_type(hu.kernels.same_bits(torch.zeros(2), torch.zeros(2)), bool)
    a = np.float32(2.0)
    assert_type(hu.kernels.sqrt(a), np.float32)
    assert_type(hu.kernels.divide(a, a), np.float32)
    assert_type(hu.kernels.maximum(a, hu.kernels.sign_of(a)), np.float32)
    assert_type(hu.kernels.select(a > a, a, hu.kernels.floor(a)), Any)
    refused: type[Exception] = hu.kernels.KernelMismatchError
    assert refused


def recipes() -> None:
    """A recipe is data, and what it converts keeps its type."""
    recipe = hu.Recipe(name="x", param_dtype="bfloat16", weight_update=(("*", "kahan"),), state_dtype="bfloat16")
    assert_type(recipe, hu.recipes.Recipe)
    assert_type(recipe.param_dtype, str | None)
    assert_type(recipe.weight_update, str | tuple[tuple[str, str], ...] | None)
    assert_type(recipe.float32, tuple[str, ...])
    assert_type(recipe.to_json(), str)
    assert_type(hu.Recipe.from_json(recipe.to_json()), hu.Recipe)
    assert_type(hu.Recipe(name="y", gradient_format="fp16", gradient_scale=1024).gradient_format, str | None)
    assert_type(hu.recipes.get("bf16-kahan"), hu.Recipe)
    assert_type(hu.recipes.names(), list[str])
    model = hu.convert(nn.Linear(4, 2), recipe)
    assert_type(model, nn.Linear)
    assert_type(hu.recipes.convert(nn.ReLU(), "bf16-kahan"), nn.ReLU)
    optimizer = hu.recipes.optimizer(model, "AdamW", lr=1e-3)
    torch_optimizer: torch.optim.Optimizer = optimizer
    assert torch_optimizer.param_groups
    assert_type(hu.recipes.scaler(recipe, model), hu.AdaptiveGradScaler | None)
    assert_type(hu.explain(nn.Linear(4, 2), "bf16-kahan"), hu.recipes.Explanation)
    assert_type(hu.recipes.explain(nn.Linear(4, 2), recipe), hu.recipes.Explanation)
    assert_type(hu.recipes.assign_weight_updates(recipe, nn.Linear(4, 2)), dict[str, str | None])
    assert_type(hu.revert(hu.convert(nn.Linear(4, 2), recipe)), nn.Linear)
    assert_type(hu.recipes.revert(hu.convert(nn.Linear(4, 2), recipe)), nn.Linear)


def forecast() -> None:
    """A forecast is data with findings; every kind of schedule is taken."""
    model = nn.LayerNorm(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = hu.forecast(model, optimizer, "cosine", steps=10, dtype=torch.bfloat16)
    assert_type(found.layers[0].freeze_step, int | None)
    assert_type([finding.code for finding in found.findings], list[str])
    assert_type(found.to_dict(), dict[str, Any])
    hu.forecast(model.state_dict(), 1e-3, lambda step: 1e-3 / (1 + step), steps=10)
    hu.forecast(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), steps=10)
    hu.forecast(model, 1e-3, [1e-3, 5e-4], optimizer="lion")


def emulation() -> None:
    """An emulated model is called as before, and is a context manager."""
    model = nn.Linear(2, 2)
    with hu.emulate(model, "e5m2", "stochastic", overflow="saturate") as emulation:
        assert_type(emulation(torch.ones(1, 2)), Any)
    emulation.remove()


def verification() -> None:
    """`verify` gives a table, and a rule is checked by its operator."""
    found = hu.verify(nn.Linear(4, 2), torch.ones(3, 4), "scaled-fp16", loss=lambda out: out.sum(), trials=1)
    assert_type(found, hu.recipes.Verification)
    assert hu.recipes.verify is hu.verify
    assert_type(found.wrong, list[str])
    hu.testing.check_rule(torch.ops.aten.neg.default, lambda: (torch.randn(3),), trials=1, exact=1e-6)
    refused: type[Exception] = hu.testing.RuleError
    check = hu.testing.assert_precision_ok(nn.Linear(4, 2), torch.ones(3, 4), "bf16-kahan", steps=2, tolerance=0.5)
    assert_type(check, hu.testing.PrecisionCheck)
    assert_type(check.findings, tuple[hu.Finding, ...])
    failed: type[AssertionError] = hu.testing.PrecisionError
    assert refused
    assert failed


def observation() -> None:
    """What a run, or a plan of one, shows: findings, each with its cure."""
    model = nn.Linear(4, 2)
    optimizer = hu.optim.SGD(model.parameters(), lr=0.1)
    rows: list[dict[str, Any]] = []
    with hu.observe(model, optimizer, interval=1, sinks=[rows.append]) as run:
        assert_type(run, hu.observation.Observation)
        torch.autograd.backward(model(torch.ones(3, 4)).sum())
        optimizer.step()
    assert hu.observe is hu.observation.observe
    assert_type(run.record, hu.observation.Record)
    assert_type(run.to_dict(), dict[str, Any])
    forecast = hu.forecast(model, 1e-3, "linear", steps=10)
    assert_type(forecast, hu.observation.Forecast)
    assert_type(hu.observation.forecast(model.state_dict(), 1e-3, [1e-3, 1e-4]), hu.observation.Forecast)
    assert_type(forecast.layers, tuple[hu.observation.LayerForecast, ...])
    assert_type(forecast.to_dict(), dict[str, Any])
    found = [*run.findings, *forecast.findings]
    assert_type(found, list[hu.Finding])
    made: hu.observation.Finding = hu.Finding("updates-lost", ("weight",), "warning", 0.5)
    assert_type(made.cure, str)


def checkpoints() -> None:
    """Two checkpoints are compared, and what a model was trained in is checked."""
    before = {"weight": torch.ones(4, dtype=torch.bfloat16)}
    after = {"weight": torch.full((4,), 2.0, dtype=torch.bfloat16)}
    audit = hu.audit(before, after)
    assert_type(audit, hu.observation.Audit)
    assert_type(hu.observation.audit(before, after), hu.observation.Audit)
    assert_type(audit.findings, list[hu.Finding])
    assert_type(audit.to_dict(), dict[str, Any])
    model = nn.Linear(4, 2)
    optimizer = hu.optim.SGD(model.parameters(), lr=0.1)
    terms = hu.contract(model, optimizer)
    assert_type(terms, hu.recipes.Contract)
    assert_type(hu.recipes.Contract.from_dict(terms.to_dict()), hu.recipes.Contract)
    assert hu.recipes.contract(model) != terms
    terms.check(model, optimizer)


def methods_of_papers() -> None:
    """Bit centering, points of quantization and allocations of a loss."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 4)
    halp = hu.optim.HALP(model.parameters(), lr=0.01, bits=8, mu=0.5)

    def closure() -> Tensor:
        halp.zero_grad()
        loss: Tensor = model(x).square().mean()
        torch.autograd.backward(loss)
        return loss

    halp.center(closure)
    halp.step(closure)
    assert_type(halp.state_dict(), dict[str, Any])
    optimizer = hu.optim.SGD(model.parameters(), lr=0.1)
    with hu.observation.allocate_loss(model, optimizer, lambda given: given(x).square().mean()) as seen:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert_type(seen, hu.observation.LossAllocation)
    assert_type(seen.allocated, float)
    assert_type(seen.to_dict(), dict[str, Any])
    quantized = hu.multipoint(model, 4, [x], budget=1.2)
    assert_type(quantized, hu.recipes.Multipoint)
    assert_type(quantized.bytes, int)
    assert_type(
        hu.recipes.multipoint(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)), 8, [x], keep=["1"]),
        hu.recipes.Multipoint,
    )
    layers = [layer for layer in model if isinstance(layer, hu.recipes.MultipointLayer)]
    assert_type(layers[0].weight, Tensor)


def tasks() -> None:
    """Tasks are found by name."""
    assert_type(hu.trials.tasks.names(), list[str])
    kind = hu.trials.tasks.find_task_class(hu.trials.tasks.names()[0])
    assert_type(kind, type[hu.trials.tasks.Task])
    assert_type(hu.trials.tasks.compute_warm_cosine_factor(1, 10), float)
    step = hu.trials.tasks.Step(lambda model, number: model(torch.ones(1, 2)).sum(), nn.Linear(2, 2), steps=3, lr=0.1)
    assert_type(step.load().note, str)
    assert_type(hu.trials.DEFAULT_RECIPES[0], str)
    assert_type(hu.trials.DEFAULT_TASKS[0], str)


def trials_read_only(out: str | os.PathLike[str]) -> None:
    """A comparison is evidence with rows."""
    evidence = hu.compare("spirals", ["fp32", hu.Recipe(name="x")], seeds=(1, 2), steps=10, out=out, overwrite=True)
    assert_type(evidence, hu.Evidence)
    assert_type(hu.trials.compare("spirals"), hu.trials.Evidence)
    tuned = hu.tune("spirals", 0.01, recipes=["bf16", hu.Recipe(name="mine")], out=out)
    assert_type(tuned, hu.trials.Tuned)
    assert_type(hu.trials.tune("spirals").recipe, hu.Recipe)
    candidates: tuple[hu.trials.Candidate, ...] = tuned.candidates
    assert_type(candidates[0].gap, float | None)
    rows: Sequence[hu.trials.Row] = evidence.rows()
    assert rows
    failed: type[Exception] = hu.trials.TrialError
    assert failed
    assert_type(hu.trials.tasks.get("spirals"), hu.trials.tasks.Task)


class _Task(hu.trials.tasks.Task):
    """A task of one's own."""

    name = "mine"

    def load(self) -> hu.trials.tasks.Data:
        """No data."""
        raise NotImplementedError

    def model(self, data: hu.trials.tasks.Data, seed: int) -> nn.Module:
        """A small one."""
        return nn.Linear(2, 2)


class _Optimizer(hu.optim.Optimizer):
    """An optimizer of one's own."""

    def rule(self, group: Mapping[str, Any]) -> hu.optim.UpdateRule:
        """Plain descent."""

        def update(w: Any, g: Any, lr: Any) -> tuple[Any]:
            return (-(lr * g),)

        def values(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
            return (float(group["lr"]),)

        momentum = hu.optim.StateSlot("momentum", 1, initial=lambda group: 0.0)
        assert_type(momentum.initial_value(group), float)

        def gradient(w: Any, g: Any) -> Any:
            return g

        norm = hu.optim.Reduction(gradient, squares=True)
        assert_type(norm.over_all, bool)
        return hu.optim.UpdateRule("descent", update, (), values, reductions=())


def registries_read_only(operator: OpOverload, packet: OpOverloadPacket) -> None:
    """What is registered comes back, so that each is a decorator where it takes a class or a function."""
    assert_type(hu.formats.register(hu.Format("mine", 4, 3)), hu.Format)
    assert_type(hu.formats.register(hu.formats.mxfp4), hu.BlockFormat)
    assert_type(hu.recipes.register(hu.Recipe(name="mine", description="mine")), hu.Recipe)
    assert_type(hu.trials.tasks.register(_Task), type[_Task])
    assert_type(hu.optim.register_optimizer(_Optimizer), type[_Optimizer])
    hu.observation.register_elementwise(torch.optim.Adagrad, decouples=False)
    kind = hu.observation.FindingKind
    assert_type(hu.observation.register_finding(kind), type[hu.observation.FindingKind])
    hu.optim.register_weight_update(hu.Kahan(literal=True))
    assert_type(hu.rounding.register_rounding(hu.Nearest), type[hu.Nearest])
    hu.optim.register_state_store(STORE_BY_DTYPE[torch.float32], "float32 once more")
    assert_type(hu.scaled.rules.register_family(Family("mine", "as it is", "as it is")), hu.scaled.rules.Family)

    @hu.mctensor.implements(operator)
    def of_components(x: hu.MCTensor) -> hu.MCTensor:
        return x

    @hu.scaled.implements(operator, family="mine")
    def of_payloads(x: hu.ScaledTensor) -> hu.ScaledTensor:
        return x

    assert_type(of_components(hu.MCTensor.encode(1.0)), hu.MCTensor)
    assert_type(of_payloads(hu.ScaledTensor.encode(torch.ones(1))), hu.ScaledTensor)
    operators = hu.scaled.rules.list_functional_overloads(packet)
    assert_type(operators, list[OpOverload])
    hu.scaled.rules.aligned(*operators, family="mine")
    hu.scaled.rules.data_movement(*operators)
    hu.scaled.rules.decoded(*operators)
    hu.scaled.rules.gated_activation(*operators, at_least_one=True)
    hu.scaled.rules.homogeneous(*operators, degree=2)
    hu.scaled.rules.measured_scale(*operators)
    hu.scaled.rules.unit_scale(*operators)


def distributed_read_only(bucket: Any, model: nn.parallel.DistributedDataParallel) -> None:
    """The hooks that DistributedDataParallel takes."""
    reduction = hu.gradients.reduce_in_bfloat16(model)
    assert_type(reduction, hu.gradients.NarrowAllReduceState)
    reduction.load_state_dict(reduction.state_dict())
    assert_type(reduction.bytes_sent, int)
    assert_type(hu.scaled.payload_hook(torch.float16, bucket), torch.futures.Future[Tensor])


def data_read_only(data: hu.trials.tasks.Data, batch: hu.trials.tasks.Batch) -> AbstractContextManager[None]:
    """What a task is given and gives."""
    assert_type(data.note, str)
    assert_type(data.train, hu.trials.tasks.Batch)
    assert_type(batch[0], Tensor)
    return hu.kernels.engine("llvm")
