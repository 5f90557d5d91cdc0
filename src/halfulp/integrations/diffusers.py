"""The methods of diffusers' EMAModel over `hu.optim.EMA`, whose averages move in 16 bits, too.

    from halfulp.integrations.diffusers import EMAModel

    ema = EMAModel(unet, decay=0.9999, model_cls=UNet2DConditionModel, model_config=unet.config)

An EMAModel of diffusers 0.42 keeps the averages of bfloat16 weights in bfloat16, rounded to nearest, where an update of
(1 - decay) (w - a) is lost as soon as it is under half an ulp: at decay .9999 nearly always.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import torch

from ..optim import EMA

_DECAY_OPTIONS = ("decay", "min_decay", "update_after_step", "use_ema_warmup", "inv_gamma", "power")
ParametersOrModule = Iterable[torch.nn.Parameter] | torch.nn.Module


class EMAModel:
    """Averages of a model's weights with the methods and decays of diffusers' EMAModel.

    Args:
        model: whose weights are averaged; diffusers' class takes its parameters.
        decay, min_decay, update_after_step, use_ema_warmup, inv_gamma, power: as diffusers' EMAModel.
        model_cls, model_config: the class and configuration, for `save_pretrained`.
        optimizer: of hu.optim, whose float32 weights are averaged; see `hu.optim.EMA`.
        **options: of `hu.optim.EMA`, such as `weight_update` and `dtype`.

    Raises:
        TypeError: no module.
        ValueError: a decay outside [0, 1].

    >>> model = torch.nn.Linear(2, 2).bfloat16()
    >>> ema = EMAModel(model, decay=0.99)
    >>> ema.step(model.parameters())
    >>> ema.store(model.parameters()); ema.copy_to(model.parameters()); ema.restore(model.parameters())
    """

    def __init__(
        self,
        model: torch.nn.Module,
        decay: float = 0.9999,
        min_decay: float = 0.0,
        update_after_step: int = 0,
        use_ema_warmup: bool = False,
        inv_gamma: float = 1.0,
        power: float = 2 / 3,
        *,
        model_cls: Any = None,
        model_config: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError("EMAModel of halfulp takes the model, whose names its averages are saved under")
        for name, value in (("decay", decay), ("min_decay", min_decay)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value}: give a number from 0 to 1")
        self.decay: float = decay
        self.min_decay: float = min_decay
        self.update_after_step: int = update_after_step
        self.use_ema_warmup: bool = use_ema_warmup
        self.inv_gamma: float = inv_gamma
        self.power: float = power
        self.model: torch.nn.Module = model
        self.model_cls: Any = model_cls
        self.model_config: Any = model_config
        self.ema: EMA = EMA(model, self.get_decay, optimizer=optimizer, **options)
        self._applied: contextlib.AbstractContextManager | None = None
        self._is_stored = False

    @property
    def optimization_step(self) -> int:
        """The number of updates so far."""
        return self.ema.updates

    def get_decay(self, optimization_step: int) -> float:
        """Return the decay of an update, from 1 on, as diffusers' EMAModel does."""
        step = max(0, optimization_step - self.update_after_step - 1)
        if step <= 0:
            return 0.0
        value = 1 - (1 + step / self.inv_gamma) ** -self.power if self.use_ema_warmup else (1 + step) / (10 + step)
        return max(min(value, self.decay), self.min_decay)

    def step(self, parameters: ParametersOrModule) -> None:
        """Move the averages towards the model's weights."""
        self._check_own_parameters(parameters)
        self.ema.update()

    def store(self, parameters: ParametersOrModule) -> None:
        """Let `restore` undo the next `copy_to`, which saves the weights that it replaces."""
        self._check_own_parameters(parameters)
        self._is_stored = True

    def copy_to(self, parameters: ParametersOrModule) -> None:
        """Write the averages into the model's weights: until `restore` after `store`, else for good.

        Other parameters than the model's get the averages as float32, rounded to their dtypes.
        """
        given, own = _list_parameters(parameters), list(self.model.parameters())
        if len(given) != len(own) or any(a.shape != b.shape for a, b in zip(given, own)):
            raise ValueError(f"copy_to got {len(given)} parameters, the model has {len(own)}: give those of its class")
        if self._is_stored and all(a is b for a, b in zip(given, own)):
            if self._applied is None:
                self._applied = self.ema.apply()
                self._applied.__enter__()
            return
        averages = self.ema.float32_state_dict()
        with torch.no_grad():
            for (name, _), target in zip(self.model.named_parameters(), given, strict=True):
                target.copy_(averages[name])

    def restore(self, parameters: ParametersOrModule) -> None:
        """Put the stored weights back, as they were.

        Raises:
            RuntimeError: nothing was stored.
        """
        self._check_own_parameters(parameters)
        if not self._is_stored:
            raise RuntimeError("no weights are stored: call store() before copy_to() and restore()")
        self._is_stored, applied, self._applied = False, self._applied, None
        if applied is not None:
            applied.__exit__(None, None, None)

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Save a model of `model_cls` with the averages as its weights, and the decays in its configuration.

        Raises:
            ValueError: without `model_cls` or `model_config`.
        """
        if self.model_cls is None or self.model_config is None:
            raise ValueError("save_pretrained needs EMAModel(model_cls=..., model_config=...)")
        model = self.model_cls.from_config(self.model_config)
        decays = {name: getattr(self, name) for name in _DECAY_OPTIONS}
        model.register_to_config(**decays, optimization_step=self.optimization_step)
        self.copy_to(model.parameters())
        model.save_pretrained(path)

    def to(self, *_: Any, **__: Any) -> None:
        """Do nothing: the averages lie beside the weights, in the dtype that `dtype=` has chosen."""

    def state_dict(self) -> dict[str, Any]:
        """Return the decays and the averages as plain data."""
        return {**{name: getattr(self, name) for name in _DECAY_OPTIONS}, "ema": self.ema.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: other averages, or a state of diffusers' own EMAModel; nothing is changed.
        """
        if "ema" not in state_dict:
            raise ValueError(
                "this is no state of halfulp's EMAModel: of diffusers' own, load the averages into the model before "
                "the EMA is made"
            )
        self.ema.load_state_dict(state_dict["ema"])
        for name in _DECAY_OPTIONS:
            setattr(self, name, state_dict.get(name, getattr(self, name)))

    def _check_own_parameters(self, parameters: ParametersOrModule) -> None:
        if [*map(id, _list_parameters(parameters))] != [*map(id, self.model.parameters())]:
            raise ValueError("these are not the parameters of the model that EMAModel was made of")


def _list_parameters(given: ParametersOrModule) -> list[torch.nn.Parameter]:
    return list(given.parameters() if isinstance(given, torch.nn.Module) else given)
