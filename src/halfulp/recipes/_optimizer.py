"""The optimizer and the scaler that go with a converted model's recipe."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import optim
from .._names import describe_unknown_name, read_registered_descriptions
from ..mctensor._convert_model import plain_state_dict
from ..optim import Optimizer
from ..optim._algorithms import MuonSelector
from ..optim._checkpoint import convert_numpy_numbers, copy_as_float32
from ..optim._lost_updates import LostUpdateReport, summarize_lost_updates
from ..optim.parameters._local_tensors import list_payloads
from ..optim.parameters._narrow_groups import walk_group_parameters
from ..rounding import Nearest, Stochastic, quantize
from ._convert import is_converted, read_recipe_of_model
from ._plan import assign_weight_updates
from ._recipe import Recipe

if TYPE_CHECKING:
    from ..gradients import AdaptiveGradScaler

LossFunction = Callable[..., Tensor]


def optimizer(
    model: nn.Module,
    rule: str = "AdamW",
    *,
    seed: int = 0,
    report_interval: int = 50,
    use_muon: MuonSelector = None,
    **hyper: Any,
) -> RecipeOptimizer:
    """Return the optimizer that goes with a converted model: its weight updates and states are the recipe's.

    The first optimizer of a converted model takes over the low bits of the float32 start, wherever the weight update
    has room for them; parameters that stay float32 are stepped in float32.

    Args:
        model: converted by `halfulp.convert`, or a wrapper round one (DistributedDataParallel, a compiled model, a
            LightningModule).
        rule: the name of an optimizer of `halfulp.optim`, or of your own (`halfulp.optim.register_optimizer`). Muon
            steps the matrices, and AdamW the rest, by options of its own (``adamw_lr=``).
        seed: governs the recipe's stochastic rounding.
        report_interval: how often the lost-update meter samples, in steps.
        use_muon: which parameters are Muon's; see `halfulp.optim.Muon.split_groups`.
        **hyper: the rule's own hyper-parameters, ``lr=`` and so on.

    Returns:
        The optimizer. Of a recipe with a ``gradient_format`` it steps only while the model has a scaler, as `scaler`
        makes it. Where the recipe rounds states or gradients by hooks, copies and pickles of it are refused.

    Raises:
        ValueError: a model that is not converted, an unknown rule, a rule that the recipe does not go with, an option
            that the recipe chooses, or a parameter that no glob of the recipe's weight update matches.

    >>> import halfulp as hu
    >>> model = hu.convert(nn.Linear(3, 2), "bf16-kahan")
    >>> type(hu.recipes.optimizer(model, "AdamW", lr=1e-3)).__name__
    'AdamW'
    """
    if rule not in optim.OPTIMIZERS:
        raise ValueError(describe_unknown_name("rule", rule, optim.OPTIMIZERS))
    recipe = read_recipe_of_model(model)
    if recipe.is_stepped_by_torch:
        if rule not in _TORCH_OPTIMIZERS:
            raise ValueError(
                f"recipe {recipe.name!r} steps by torch.optim: {describe_unknown_name('rule', rule, _TORCH_OPTIMIZERS)}"
            )
        return _TORCH_OPTIMIZERS[rule](model.parameters(), **hyper)
    for name in ("weight_update", "state_dtype", "format"):
        if name in hyper and getattr(recipe, name) is not None:
            raise ValueError(
                f"{name}={hyper[name]!r} beside recipe {recipe.name!r}, which chooses it: leave it out, or convert the "
                f"model by recipe.replace({name}=...)"
            )
    kind = optim.OPTIMIZERS[rule]
    choices: dict[str, Any] = {"format": recipe.format}
    is_float32 = recipe.is_narrow and all(parameter.dtype == torch.float32 for parameter in model.parameters())
    if isinstance(recipe.weight_update, str) and not is_float32:
        choices["weight_update"] = _make_weight_update(recipe.weight_update)
    options = {key: value for key, value in choices.items() if value is not None}
    groups: Any = list(model.named_parameters())
    if isinstance(recipe.weight_update, tuple):
        groups = split_groups_by_update(recipe, model, groups)
    groups = kind.split_groups(groups, **({} if use_muon is None else {"use_muon": use_muon}))
    split = [group for group in groups if isinstance(group, dict)] or [{}]
    stored = [choose_optimizer_state_dtype(recipe, kind, hyper, group) for group in split]
    if all(dtype == stored[0] for dtype in stored):
        options |= {} if stored[0] is None else {"state_dtype": stored[0]}
    else:  # groups of several rules
        for group, dtype in zip(split, stored, strict=True):
            group |= {} if dtype is None else {"state_dtype": dtype}
    made = kind(groups, seed=seed, report_interval=report_interval, **options, **hyper)
    if recipe.format and recipe.state_dtype == recipe.format:
        round_states_after_steps(made, recipe.format, seed)
    if recipe.gradient_format:

        def refuse_unrounded_gradients(*_: object) -> None:
            if not _has_scaler_around_converted_model(model):
                options = ", ".join(f"{key}={value!r}" for key, value in _make_scaler_options(recipe).items())
                raise RuntimeError(
                    f"recipe {recipe.name!r} rounds gradients, and these were not rounded: make scaler = "
                    f"halfulp.AdaptiveGradScaler(model, {options}) and train by scaler.scale(loss).backward(), "
                    "scaler.step(optimizer), scaler.update()"
                )

        made.register_step_pre_hook(refuse_unrounded_gradients)
    if made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks:
        made._copy_refusal_message = (
            f"an optimizer of recipe {recipe.name!r} rounds its states or checks gradients by hooks, which copies and "
            "pickles of optimizers lose: make another one by halfulp.recipes.optimizer, and load this one's state_dict"
        )
    return made


def _has_scaler_around_converted_model(model: nn.Module) -> bool:
    """Return whether a converted model, or what wraps it, has the forward of a scaler, itself wrapped or not."""
    # A compiled module's own forward is torch's.
    replaced = [one for one in model.modules() if "forward" in vars(one) and "_orig_mod" not in one._modules]
    return any(is_converted(inner) for one in replaced for inner in one.modules())


def scaler(recipe: Recipe, model: nn.Module) -> AdaptiveGradScaler | None:
    """Return the scaler that rounds a model's gradients and scales them as the recipe says; None where it does not.

    Train with it in place of ``loss.backward()`` and ``optimizer.step()``: see `halfulp.AdaptiveGradScaler`. A policy
    starts at a scale of 2^16, as torch's scaler does.

    >>> import halfulp as hu
    >>> recipe = hu.recipes.get("fp16-adaptive")
    >>> model = hu.convert(nn.Linear(4, 2), recipe)
    >>> sgd = optimizer(model, "SGD", lr=0.1)
    >>> scaled = scaler(recipe, model)
    >>> scaled.scale(model(torch.ones(3, 4)).square().mean()).backward()
    >>> scaled.step(sgd); scaled.update()
    """
    if recipe.gradient_format is None:
        return None
    from ..gradients import AdaptiveGradScaler

    return AdaptiveGradScaler(model, **_make_scaler_options(recipe))


def run_backward_and_step(loss: Tensor, optimizer: torch.optim.Optimizer, scaler: AdaptiveGradScaler | None) -> None:
    """Backpropagate a loss and step, by a scaler where there is one."""
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


@contextlib.contextmanager
def emulate_recipe(recipe: Recipe, model: nn.Module) -> Iterator[Callable[[LossFunction], LossFunction]]:
    """Emulate a recipe's arithmetic on a model, if it has any; yield a function that puts a loss under the same."""
    if recipe.emulate is None:
        yield lambda loss: loss
        return
    from ..emulation import emulate

    with emulate(model, recipe.emulate) as emulation:

        def compute_rounded_loss(loss: LossFunction, *given: Any) -> Tensor:
            with emulation.region():
                return loss(*given)

        yield lambda loss: functools.partial(compute_rounded_loss, loss)


def _make_scaler_options(recipe: Recipe) -> dict[str, Any]:
    options = {"format": recipe.gradient_format, "rounding": recipe.gradient_rounding}
    if isinstance(recipe.gradient_scale, str):
        return {"policy": recipe.gradient_scale, **options}
    # Without a scale too, what is not finite must not reach a weight.
    return {"policy": "constant", "init_scale": recipe.gradient_scale or 1.0, **options}


def split_groups_by_update(
    recipe: Recipe, model: nn.Module, named: Iterable[tuple[str, Tensor]]
) -> list[dict[str, Any]]:
    """Return one group per weight update that a recipe gives some parameters of a model."""
    updates = assign_weight_updates(recipe, model)
    groups: dict[str | None, list[tuple[str, Tensor]]] = {}
    for name, parameter in named:
        is_wide = recipe.is_narrow and parameter.dtype == torch.float32
        groups.setdefault(None if is_wide else updates[name], []).append((name, parameter))
    return [
        {"params": members} if update is None else {"params": members, "weight_update": _make_weight_update(update)}
        for update, members in groups.items()
    ]


def choose_optimizer_state_dtype(
    recipe: Recipe, kind: type[Optimizer], hyper: dict[str, Any], group: Mapping[str, Any] = MappingProxyType({})
) -> object:
    """Return the optimizer's ``state_dtype`` for a group; values of a format live in float32 states.

    States that the rule uses to the last digits, a running maximum and the state that it is taken of stay as the
    optimizer keeps them unless they may be stored so.
    """
    if recipe.state_dtype is None:
        return None
    # The states of an optimizer of one number, as a matrix, with these options.
    own = {name: value for name, value in group.items() if name not in ("params", "weight_update")}
    one = nn.Parameter(torch.zeros(1, 1, device="cpu", dtype=torch.float32))
    single = kind([{**own, "params": [one]}], **hyper)
    held = single.rule(single.param_groups[0]).states
    chosen: Any = recipe.state_dtype
    if chosen == "bfloat16x2":
        return {state.name: chosen for state in held if state.degree == 2} or None
    if chosen not in ("8bit", "4bit", "fp8", *read_registered_descriptions("state store")):
        chosen = torch.float32 if chosen == recipe.format else getattr(torch, chosen)
    left = set() if chosen == torch.float32 else {state.name for state in held if state.exact}
    if chosen not in (torch.float32, torch.float16):
        left |= {name for state in held if state.maximum_of for name in (state.name, state.maximum_of)}
    return {state.name: chosen for state in held if state.name not in left} if left else chosen


def _make_weight_update(update: str) -> object:
    """Return the optimizer's ``weight_update``."""
    return {"kahan-literal": optim.Kahan(literal=True), "components-3": optim.Components(3)}.get(update, update)


class TorchOptimizer(torch.optim.Optimizer):
    """The methods of ``halfulp.optim``'s optimizers for one of torch.optim: it counts bytes, and no lost updates."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    def report(self) -> LostUpdateReport:
        """Return a report without rows, as torch.optim meters nothing."""
        return summarize_lost_updates(())

    def bytes_per_parameter(self) -> float:
        """Return bytes of weights, states and gradients per parameter element, as held now."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        states = [value for state in self.state.values() for value in state.values() if isinstance(value, Tensor)]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        held: int = sum(part.nbytes for x in (*parameters, *states, *gradients) for part in list_payloads(x))
        return float(held / max(1, sum(parameter.numel() for parameter in parameters)))

    def train(self, mode: bool = True) -> None:
        """Do nothing: the parameters are the weights to train and to evaluate, as of most of halfulp.optim."""

    def eval(self) -> None:
        """Do nothing, as `train`."""

    def state_dict(self) -> dict[str, Any]:
        """Return torch.optim's state dict, which `torch.load` with weights_only takes from a file."""
        saved: dict[str, Any] = super().state_dict()
        for group in saved["param_groups"]:
            convert_numpy_numbers(group)
        return saved

    def float32_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's state_dict with every sum of components, and every other floating tensor, as float32."""
        plain = plain_state_dict(model.state_dict(), torch.float32)
        return {name: copy_as_float32(name, value) for name, value in plain.items()}


class SGD(TorchOptimizer, torch.optim.SGD):
    """torch.optim.SGD with the methods of halfulp's optimizers: it counts bytes, and no lost updates."""


class Adam(TorchOptimizer, torch.optim.Adam):
    """torch.optim.Adam with the methods of halfulp's optimizers: it counts bytes, and no lost updates."""


class AdamW(TorchOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with the methods of halfulp's optimizers: it counts bytes, and no lost updates."""


# `optimizer` returns one of these.
RecipeOptimizer = Optimizer | TorchOptimizer
_TORCH_OPTIMIZERS = {kind.__name__: kind for kind in (SGD, Adam, AdamW)}


def round_states_after_steps(optimizer: Optimizer, format: str, seed: int) -> None:
    """Round the float32 states to ``format`` after every step: to nearest, second moments stochastically.

    A second moment changes by less than half an ulp per step, so that nearest rounding would freeze it. States that
    the rule uses to the last digits, factors and master weights stay float32. Random bits are those of the parameter's
    place and its number of steps, also after a state dict was loaded.
    """

    def round_states(*_: object) -> None:
        for position, (group, _place, parameter) in enumerate(walk_group_parameters(optimizer)):
            state, rule = optimizer.state.get(parameter, {}), optimizer.rule(group)
            slots = {slot.name: slot for slot in rule.states}
            left = {"master", *(slot.name for slot in rule.states if slot.exact)}
            left.update(rule.factors(tuple(parameter.shape)) if rule.factors else ())
            for name, value in state.items():
                if name in left or not torch.is_tensor(value) or value.dtype != torch.float32:
                    continue
                second = name in slots and slots[name].degree == 2
                rounding = Stochastic(seed=seed + position) if second else Nearest()
                quantize(value, format, rounding, out=value, counter=state["step"] if second else 0)

    optimizer.register_step_post_hook(round_states)
