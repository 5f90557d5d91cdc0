"""AdaptiveGradScaler in an Accelerator of accelerate, before or after `prepare`.

    from halfulp.integrations.accelerate import use_scaler

    scaler = use_scaler(accelerator, model)

accelerate 1.15 gives each prepared optimizer a reference to the scaler of its time, and unscales before clipping under
`mixed_precision="fp16"` alone. Here all prepared optimizers get the scaler, and clipping unscales under any precision.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..gradients import AdaptiveGradScaler

_ENGINES_THAT_SCALE_LOSSES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def use_scaler(accelerator: Accelerator, model: torch.nn.Module, **options: Any) -> AdaptiveGradScaler:
    """Make an AdaptiveGradScaler of a model the scaler of an accelerator, and return it.

    `accelerator.backward`, `accumulate`, `clip_grad_norm_`, `clip_grad_value_`, `optimizer_step_was_skipped`,
    `save_state` and `load_state` work with it.

    Args:
        accelerator: whose optimizers may be prepared already, or are prepared later.
        model: that is trained, prepared or not.
        **options: of AdaptiveGradScaler.

    Raises:
        NotImplementedError: DeepSpeed or Megatron-LM, which scale losses in their own engines, or FSDP1.
        ValueError: a model that accelerate compiles (`dynamo_backend`): its backend is not the scaler's.

    >>> import accelerate
    >>> accelerator, model = accelerate.Accelerator(cpu=True), torch.nn.Linear(4, 2)
    >>> scaler = use_scaler(accelerator, model)
    >>> model, opt = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> accelerator.backward(model(torch.ones(1, 4)).sum())
    >>> opt.step()
    >>> scaler.last_step.applied
    True
    """
    if accelerator.distributed_type in _ENGINES_THAT_SCALE_LOSSES:
        raise NotImplementedError(
            f"{accelerator.distributed_type.value} scales losses in its own engine, which takes no other scaler: "
            "configure its loss scale, or train without it"
        )
    if accelerator.distributed_type is DistributedType.FSDP and not accelerator.is_fsdp2:
        raise NotImplementedError("FSDP1 flattens parameters, whose gradients have one scale: take fsdp_version=2")
    plugin = accelerator.state.dynamo_plugin
    if plugin is not None and str(getattr(plugin.backend, "value", plugin.backend)).lower() != "no":
        raise ValueError(
            "accelerate compiles the model by a backend that does not know the scaler: leave dynamo_backend out, and "
            'compile by torch.compile(model, backend=scaler.backend("inductor"))'
        )
    scaler = AdaptiveGradScaler(model, **options)
    accelerator.scaler = scaler
    for prepared in accelerator._optimizers:
        # It patches the optimizer's step for its scaler where it is made, and where it is unpickled.
        prepared.__setstate__({"scaler": scaler})

    def unscale_gradients(optimizer: Any = None) -> None:
        chosen = accelerator._optimizers if optimizer is None else optimizer
        for prepared in chosen if isinstance(chosen, list | tuple) else [chosen]:
            while hasattr(prepared, "optimizer"):
                prepared = prepared.optimizer
            scaler.unscale_(prepared)

    accelerator.unscale_gradients = unscale_gradients
    return scaler
