"""Narrow optimizers and precision contracts inside the Trainer of transformers.

    from halfulp.integrations.transformers import PrecisionCallback, optimizer

    trainer = Trainer(
        model, args, ..., callbacks=[PrecisionCallback()],
        optimizer_cls_and_kwargs=optimizer(args, "AdamW", weight_update="kahan", param_dtype="bf16"),
    )

The Trainer hands the model to the optimizer that it makes, so that parameters come with their names, which key the
random bits, and in the Trainer's two groups of weight decay. This is the way under FSDP too, where `optimizers=`
raises.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .. import optim
from .._names import describe_unknown_name
from ..optim._group_options import read_default_arguments
from ..optim._optimizer import unwrap_optimizer
from ..optim.parameters._random_identity import strip_wrapper_prefixes
from ..pages import write_file_atomically
from ..recipes import contract
from ..recipes._contract import Contract

CONTRACT_FILE_NAME, WEIGHTS_FILE_NAME = "precision_contract.json", "float32_weights.safetensors"


def _make_optimizer(rule: str, decay: float, model: torch.nn.Module, /, **options: Any) -> torch.optim.Optimizer:
    """Make the optimizer of a model's trainable parameters, in the Trainer's two groups of weight decay."""
    if type(model).__name__ == "FullyShardedDataParallel":
        raise NotImplementedError(
            'FSDP1 flattens parameters, and names and decay groups go: fsdp_config["version"] = 2'
        )
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model requires a gradient: nothing is to be trained")
    # Which names decay depends on the model alone, and not on a Trainer.
    decaying = set(Trainer.get_decay_parameter_names(object.__new__(Trainer), model))
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": each} for each in (decay, 0.0)]
    for (name, parameter), plain in zip(trained, strip_wrapper_prefixes(name for name, _ in trained), strict=True):
        groups[name not in decaying]["params"].append((plain, parameter))
    groups = [group for group in groups if group["params"]]
    kind = optim.OPTIMIZERS[rule]
    chosen = {"use_muon": options.pop("use_muon")} if "use_muon" in options else {}
    return kind(kind.split_groups(groups, **chosen), **options)


def optimizer(
    args: TrainingArguments, rule: str = "AdamW", **options: Any
) -> tuple[Callable[[], Callable[..., torch.optim.Optimizer]], dict[str, Any]]:
    """Return the value of `Trainer(optimizer_cls_and_kwargs=...)`: a factory by its protocol, and the options.

    Args:
        args: the Trainer's: learning rate, weight decay, and for rules of Adam's kind betas and eps come from there;
            the options in `args.optim_args` ("weight_update=kahan,param_dtype=bf16"), too. Muon takes betas and eps
            for the parameters that AdamW steps, whose rate is `adamw_lr=`, or that of the args.
        rule: the name of an optimizer of hu.optim.
        **options: of the optimizer; they precede those in args. `param_dtype` narrows a float32 model in place.

    Raises:
        ValueError: an unknown name, or options in `args.optim_args` that are not "name=value,name=value"; and when the
            Trainer makes the optimizer, of a model without trainable parameters.
        NotImplementedError: the model is wrapped by FSDP1, which hands over flat parameters.

    >>> import halfulp as hu, transformers
    >>> args = transformers.TrainingArguments(output_dir="runs", learning_rate=1e-3, weight_decay=0.1, use_cpu=True)
    >>> make, options = optimizer(args, "AdamW", weight_update="kahan", param_dtype="bf16")
    >>> options["lr"], options["betas"]
    (0.001, (0.9, 0.999))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    >>> opt = make()(model, **options)
    >>> [(group["weight_decay"], group["param_names"]) for group in opt.param_groups]
    [(0.1, ['0.weight']), (0.0, ['0.bias', '1.weight', '1.bias'])]
    """
    if rule not in optim.OPTIMIZERS:
        raise ValueError(describe_unknown_name("optimizer", str(rule), optim.OPTIMIZERS))
    known = read_default_arguments(optim.OPTIMIZERS[rule])
    given: dict[str, Any] = {"lr": args.learning_rate}
    if "eps" in known and len(known.get("betas", ())) == 2:
        given |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    elif "adamw_betas" in known:
        given |= {"adamw_betas": (args.adam_beta1, args.adam_beta2), "adamw_eps": args.adam_epsilon}
    pairs = [entry.partition("=") for entry in (args.optim_args or "").split(",") if entry.strip()]
    if not all(name.strip() and equal for name, equal, _ in pairs):
        raise ValueError(f"optim_args={args.optim_args!r}: write name=value,name=value")
    given |= {"weight_decay": args.weight_decay, **{name.strip(): value.strip() for name, _, value in pairs}, **options}
    decay = given.pop("weight_decay")
    return lambda: partial(_make_optimizer, rule, decay), given


class PrecisionCallback(TrainerCallback):
    """Saves beside each checkpoint in what precision the run trains, checks it on resume, and logs lost updates.

    Beside `model.safetensors` stand then `precision_contract.json` (`hu.contract`: every parameter's dtype, weight
    update and states) and `float32_weights.safetensors`, the float32 weights that an optimizer of hu.optim keeps.
    Logged are `lost_updates`, the share of updates that rounding has cancelled so far, and `realised_updates`.

    The logs get the entries before the Trainer prints and saves them, and after other integrations (TensorBoard) have
    read them: `trainer.callback_handler.callbacks.insert(0, PrecisionCallback())` comes before these.

    Of sharded models no float32 weights are saved: torch.distributed.checkpoint saves the optimizer.

    Raises:
        ValueError: at the beginning of a resumed run: the checkpoint was saved in another precision.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Check the contract of the checkpoint that the run goes on from, where it lies in the output folder."""
        saved = os.path.join(_name_checkpoint_folder(args, state), CONTRACT_FILE_NAME)
        if state.global_step and os.path.exists(saved):
            with open(saved, encoding="utf-8") as file:
                Contract.from_dict(json.load(file)).check(more["model"], unwrap_optimizer(more["optimizer"]))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Write both files into the checkpoint's folder."""
        folder = _name_checkpoint_folder(args, state)
        if not (args.should_save and os.path.isdir(folder)):
            return
        model, stepped = more["model"], unwrap_optimizer(more["optimizer"])
        held = contract(model, stepped)
        write_file_atomically(os.path.join(folder, CONTRACT_FILE_NAME), json.dumps(held.to_dict(), indent=1))
        is_sharded = any(hasattr(parameter, "_local_tensor") for parameter in model.parameters())
        if isinstance(stepped, optim.Optimizer) and not is_sharded:
            weights = stepped.float32_state_dict(model).items()
            plain = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in weights}
            path = os.path.join(folder, WEIGHTS_FILE_NAME)
            save_file(plain, f"{path}.part", metadata={"format": "pt", **held.metadata()})
            os.replace(f"{path}.part", path)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **more: Any
    ) -> None:
        """Add the share of lost updates to the logs and to the history."""
        stepped = unwrap_optimizer(more.get("optimizer"))
        if logs is None or not isinstance(stepped, optim.Optimizer):
            return
        seen = stepped.report()
        for name, share in (("lost_updates", seen.cancelled), ("realised_updates", seen.realised)):
            if share is not None:
                logs[name] = round(share, 6)
                if state.log_history:
                    state.log_history[-1][name] = logs[name]


def _name_checkpoint_folder(args: TrainingArguments, state: TrainerState) -> str:
    return os.path.join(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
