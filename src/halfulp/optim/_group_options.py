"""The options of an optimizer's param groups: checked, and read as a command line or a YAML file spells them."""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import torch

from .._messages import find_user_stack_level, name_type
from .._names import describe_unknown_name
from ..formats import Format
from .states._state import State, StateChoice, read_state_choice
from .weight_updates._weight_update import WeightUpdate, find_weight_update


def parse_dtype(given: Any) -> Any:
    """Return the dtype that a word names; return anything else, such as "8bit", unchanged.

    >>> parse_dtype("torch.bfloat16"), parse_dtype("fp16"), parse_dtype("8bit")
    (torch.bfloat16, torch.float16, '8bit')
    """
    if not isinstance(given, str):
        return given
    word = given.strip().lower().removeprefix("torch.")
    found = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(word, word), None)
    return found if found in (torch.bfloat16, torch.float16, torch.float32) else given


def read_default_arguments(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the default values of a function's arguments, or of a class's and those that it inherits from."""
    makers = [make]
    if isinstance(make, type):  # an __init__ that is made in C has no defaults
        makers = [init for kind in reversed(make.__mro__) if inspect.isfunction(init := vars(kind).get("__init__"))]
    found: dict[str, Any] = {}
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        found |= {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    return found


def parse_options(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as values, where some may be words for them.

    >>> parse_options({"lr": "1e-3", "betas": "0.9,0.95", "param_dtype": "bf16"}, {"lr": 0.1, "betas": (0.9, 0.999)})
    {'lr': 0.001, 'betas': (0.9, 0.95), 'param_dtype': torch.bfloat16}
    """
    return {name: _parse_option(name, value, defaults.get(name)) for name, value in given.items()}


def _parse_option(name: str, given: Any, default: Any) -> Any:
    if name == "state_dtype" and isinstance(given, Mapping):
        return {slot: parse_dtype(choice) for slot, choice in given.items()}
    if isinstance(given, list | tuple) and isinstance(default, tuple | list):
        return tuple(_parse_option(name, one, 0.0) for one in given)
    if not isinstance(given, str):
        return given
    word = given.strip()
    if word == "None":
        return None
    if name in ("param_dtype", "state_dtype", "dtype"):
        found = parse_dtype(word)
        if name == "param_dtype" and isinstance(found, str):
            raise ValueError(
                describe_unknown_name("param_dtype", word, ["bf16", "bfloat16", "fp16", "float16", "None"])
            )
        return found
    if name in ("weight_update", "format", "name"):
        return word
    if isinstance(default, tuple | list):
        return tuple(_parse_option(name, one, 0.0) for one in word.strip("()[] ").split(",") if one.strip())
    value = {"true": True, "false": False, "inf": math.inf, "-inf": -math.inf}.get(word.lower(), given)
    with contextlib.suppress(SyntaxError, ValueError):
        value = ast.literal_eval(word)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name}={given!r}: write True or False")
    elif isinstance(default, int | float) and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{name}={word!r} is no number: write it as 0.001 or 1e-3")
    return value if default is None or isinstance(default, int | float) else given


# What optimizers are made from, as in torch.optim.
OptimizerParams = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]
# What groups hold beside options: torch's own, ours, and what schedulers write.
_NON_OPTION_KEYS = frozenset(("params", "param_names", "identities", "random_stream", "last_lr", "name"))


def check_ranks_agree(optimizer: torch.optim.Optimizer, process_group: Any, device: torch.device) -> None:
    """Check that all processes of a group train in the same way; all of them must call this."""
    # Versions and options, in words.
    mine = {"halfulp": get_halfulp_version(), "torch": torch.__version__, "the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name in _NON_OPTION_KEYS or name == "report_interval" or name not in optimizer.defaults:  # a user's own
                continue
            if name == "weight_update" or isinstance(value, bool | int | float | str | tuple | torch.dtype | State):
                mine[f"{name} of group {number}"] = str(getattr(value, "name", value))
    ranks: list[dict[str, str]] = [{} for _ in range(process_group.size())]
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        torch.distributed.all_gather_object(ranks, mine, group=process_group)
    first, *others = zip(torch.distributed.get_process_group_ranks(process_group), ranks)
    for rank, there in others:
        for name in {**first[1], **there}:
            ours, theirs = (one.get(name, "absent") for one in (first[1], there))
            if ours != theirs:
                raise ValueError(
                    f"rank {rank} trains in another way than rank {first[0]}: {name} is {theirs} there, and {ours} on "
                    f"rank {first[0]}. Start all ranks by the same script in the same environment"
                )


def get_halfulp_version() -> str:
    """Return halfulp's version, without an import of the package that imports this one."""
    version: str = sys.modules["halfulp"].__version__
    return version


class WeightUpdateOptions(TypedDict, total=False):
    """The options of Optimizer for updates that are computed elsewhere."""

    weight_update: WeightUpdate | str | None
    param_dtype: torch.dtype | str | None
    format: Format | str | None
    seed: int
    report_interval: int


class OptimizerOptions(WeightUpdateOptions, total=False):
    """The options of Optimizer, which every optimizer takes beside its own."""

    state_dtype: StateChoice
    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


def refuse_non_iterable_params(params: object) -> None:
    """Raise TypeError for `params` that is not iterable, such as a model."""
    if not isinstance(params, Iterable):
        remedy = "model.parameters() or model.named_parameters()" if isinstance(params, torch.nn.Module) else "a list"
        raise TypeError(
            f"an optimizer takes parameters, named ones or param groups, got {name_type(params)}: give {remedy}"
        )


def check_group_options(group: dict, options: Iterable[str] = ()) -> None:
    """Check a new group's options; keys that resemble no option are the user's own, and stay."""
    options = list(options)
    for key in group:
        if key in options or key in _NON_OPTION_KEYS or not isinstance(key, str):
            continue
        for near in difflib.get_close_matches(key, options, 1, 0.8):
            if not key.endswith(f"_{near}") and not key.startswith(f"{near}_"):  # max_momentum is another thing
                raise ValueError(
                    f"a param group has the unknown key {key!r}: did you mean {near!r}? A key of your own needs a name "
                    "less like an option's"
                )
    if group["weight_update"] is not None:
        group["weight_update"] = find_weight_update(group["weight_update"])
    if group["param_dtype"] not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"param_dtype={group['param_dtype']!r}: allowed are torch.bfloat16, torch.float16 and None")
    if group["param_dtype"] is not None and group["format"] is not None:
        raise ValueError("param_dtype= narrows parameters and format= keeps them in float32: give one of them")
    given = group["state_dtype"]
    for choice in given.values() if isinstance(given, dict) else (given,):
        if choice is not None and not isinstance(choice, State):
            read_state_choice(choice, torch.float32)
    for name in ("seed", "report_interval"):
        value = group[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise ValueError(f"{name}={value!r}: a whole number from 0 on is needed")


def check_real_number(name: str, value: object) -> None:
    """Check that a hyper-parameter is one real number, or a tensor that holds one."""
    if type(value) is float:  # nearly always; the general question costs a microsecond
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.Tensor):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}: give a number")
    if not isinstance(value, torch.Tensor):
        return
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} is a tensor of {value.dtype}: give a real number")
    if value.numel() != 1 or value.is_meta or value.requires_grad:
        raise ValueError(
            f"{name} is a tensor of shape {tuple(value.shape)} on {value.device}, requires_grad={value.requires_grad}: "
            f"give one number, in memory and without a gradient, such as {name}.detach()"
        )


NON_NEGATIVE_OPTIONS = ("lr", "eps", "weight_decay", "momentum")


def check_hyperparameters(group: dict, not_negative: Iterable[str]) -> None:
    """Check that hyper-parameters are finite and, but for dampening, not negative; a class's own ones may be None."""
    for name in not_negative:
        if name in group and (name in NON_NEGATIVE_OPTIONS or group[name] is not None):
            check_real_number(name, group[name])
            value = float(group[name])
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} is not allowed: give a finite number that is not negative")
    if "dampening" in group:
        check_real_number("dampening", group["dampening"])
        if not math.isfinite(float(group["dampening"])):
            raise ValueError(f"dampening={group['dampening']} is not allowed: give a finite number")


def check_betas(group: dict, count: int | None) -> None:
    """Check the option `betas`, if there is one: `count` numbers, or any if that is None."""
    if "betas" not in group:
        return
    given = group["betas"]
    betas = given if isinstance(given, tuple | list) else ()
    for beta in betas:
        check_real_number("beta", beta)
    counted = len(betas) == count if count is not None else bool(betas)
    if not counted or not all(0 <= float(beta) < 1 for beta in betas):
        wanted = {None: "numbers", 1: "one number", 2: "two numbers", 3: "three numbers"}
        raise ValueError(f"betas={given!r} are not allowed: give {wanted.get(count, f'{count} numbers')} in [0, 1)")


def refuse_unsupported_torch_switches(name: str, given: Mapping[str, Any]) -> None:
    """Refuse or ignore torch.optim's switches that choose another implementation, of an optimizer or of one group.

    Trainers set `foreach` and `fused`, which choose among equals, unasked: no reason to stop.
    """
    if given.get("differentiable"):
        raise NotImplementedError(
            f"{name}(differentiable=True): the step writes in place and is not differentiable: use torch.optim for that"
        )
    if given.get("capturable"):
        raise NotImplementedError(f"{name}(capturable=True): the step runs outside CUDA graphs: leave capturable out")
    ignored = ["foreach=True"] if given.get("foreach") else []
    ignored += ["fused=False"] if given.get("fused") is False else []
    if ignored:
        warnings.warn(
            f"{name}({', '.join(ignored)}) is ignored: one fused kernel steps all tensors",
            stacklevel=find_user_stack_level(),
        )


def make_init_arguments(given: dict[str, Any], **counts: Any) -> dict[str, Any]:
    """Return the arguments of Optimizer's `__init__` from `locals()` in a subclass's and what its groups count."""
    left_out = ("self", "params", "options", "__class__")
    defaults = {name: value for name, value in given.items() if name not in left_out}
    return {"params": given["params"], "defaults": {**defaults, **counts}, **given["options"]}
