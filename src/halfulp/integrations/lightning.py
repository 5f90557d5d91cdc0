"""Precision plugins and a callback for Lightning, as `lightning` or `pytorch_lightning`.

    from halfulp.integrations.lightning import AdaptiveMixed, Precision, Recipe

    Trainer(plugins=[Recipe("bf16-split8")], callbacks=[Precision()])
    Trainer(plugins=[AdaptiveMixed()])

A plugin gets the module before the strategy wraps it and before `configure_optimizers`, so that an optimizer of
hu.optim made there takes over the low bits of the float32 start.
"""

from __future__ import annotations

import importlib
import importlib.util
import weakref
from typing import Any

import torch

from .. import optim
from ..gradients import AdaptiveGradScaler
from ..optim._optimizer import find_inner_optimizer
from ..recipes import Recipe as _Recipe
from ..recipes import contract, convert, get
from ..recipes._contract import Contract
from ..recipes._convert import find_recipe

_PACKAGE_NAME = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
_lightning_package: Any = importlib.import_module(_PACKAGE_NAME)
_precision_plugins: Any = importlib.import_module(f"{_PACKAGE_NAME}.plugins.precision")


# The scalers that plugins have made, by module; a scaler holds its module, which lived for ever otherwise.
_scalers_by_module: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[AdaptiveGradScaler]] = (
    weakref.WeakKeyDictionary()
)


class Recipe(_precision_plugins.Precision):
    """Converts the module by a recipe (`hu.convert`) when the training begins; the user's module stays as written.

    Norms, losses and whatever else the recipe says stay in float32. Make the optimizer in `configure_optimizers`:
    `hu.recipes.optimizer(self, "AdamW", lr=...)` has the recipe's weight update, or any of hu.optim.

    Args:
        recipe: a recipe or its name.
        **options: of `hu.convert`.

    Raises:
        ValueError: an unknown recipe, or one that rounds gradients: that takes a scaler, see AdaptiveMixed.

    >>> Recipe("bf16-split8").convert_module(torch.nn.Linear(2, 2)).weight.dtype
    torch.bfloat16
    """

    def __init__(self, recipe: str | _Recipe, **options: Any) -> None:
        self.recipe = get(recipe) if isinstance(recipe, str) else recipe
        self.options = options
        self.precision = self.recipe.name
        if self.recipe.gradient_format is not None:
            raise ValueError(
                f"recipe {self.recipe.name!r} scales gradients: use AdaptiveMixed(...) for a scaler under autocast, or "
                "a recipe of bfloat16"
            )

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert the module in place; one that this recipe has converted, as in a run before, stays as it is."""
        try:
            known = find_recipe(module)
        except ValueError:
            known = None
        return module if known == self.recipe else convert(module, self.recipe, **self.options)


class AdaptiveMixed(_precision_plugins.MixedPrecision):
    """Lightning's 16-mixed precision with an AdaptiveGradScaler in place of torch's scaler.

    Accumulation, clipping and checkpoints go on as they are; a resumed training has the exponents of an uninterrupted
    one. `training_step` computes the loss by `self(batch)`, that is by `forward`, whose gradients get the exponents.

    Args:
        device: the type of the device, for autocast.
        **options: of AdaptiveGradScaler.

    >>> plugin = AdaptiveMixed("cpu", policy="amax")
    >>> module = plugin.convert_module(torch.nn.Linear(2, 2))
    >>> type(plugin.scaler).__name__
    'AdaptiveGradScaler'
    """

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        super().__init__("16-mixed", device, scaler=_PlaceholderScaler())
        self.scaler: Any
        self.options = options

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Make the scaler of the module, once; its parameters stay as they are."""
        held = _scalers_by_module.get(module, lambda: None)()
        if held is not None and held is not self.scaler:
            held.detach()  # of a plugin before
        if held is None or held is not self.scaler:
            self.scaler = AdaptiveGradScaler(module, **self.options)
            _scalers_by_module[module] = weakref.ref(self.scaler)
        return module


class _PlaceholderScaler:
    """A stand-in for the scaler until there is a module."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class Precision(_lightning_package.Callback):
    """Saves the precision contract of module and optimizers in checkpoints, checks it on resume; logs lost updates.

    Args:
        ema_decay: with a number, averages the weights (`hu.optim.EMA`, `callback.ema`): they are what is validated and
            tested, and their state is in the checkpoint.
        lost_updates: log `lost_updates` at the end of each training epoch.

    Raises:
        ValueError: when a training resumes: its checkpoint was saved in another precision.
    """

    def __init__(self, ema_decay: float | None = None, *, lost_updates: bool = True) -> None:
        self.ema_decay, self.lost_updates = ema_decay, lost_updates
        self.ema: optim.EMA | None = None
        self._checkpoint_entries: dict[str, Any] = {}
        self._average_context: Any = None
        self._seen_step = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the averages of the module as it is trained."""
        if self.ema_decay is not None:
            own = [find_inner_optimizer(one) for one in trainer.optimizers]
            keeps = next((one for one in own if isinstance(one, optim.Optimizer)), None)
            self.ema = optim.EMA(pl_module, self.ema_decay, optimizer=keeps)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check and load what the checkpoint held."""
        if "contract" in self._checkpoint_entries:
            Contract.from_dict(self._checkpoint_entries["contract"]).check(pl_module, self._list_optimizers(trainer))
        if self.ema is not None and "ema" in self._checkpoint_entries:
            self.ema.load_state_dict(self._checkpoint_entries["ema"])
        self._checkpoint_entries, self._seen_step = {}, trainer.global_step
        self._switch_optimizers(trainer, "train")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Update the averages after each step."""
        if self.ema is not None and trainer.global_step != self._seen_step:
            self.ema.update()
        self._seen_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the share of lost updates."""
        for one in self._list_optimizers(trainer):
            lost = one.report().cancelled if isinstance(one, optim.Optimizer) else None
            if self.lost_updates and lost is not None:
                pl_module.log("lost_updates", float(lost), rank_zero_only=True)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Show the averages in the module, also those of schedule-free optimizers."""
        self._switch_optimizers(trainer, "eval")
        if self.ema is not None and self._average_context is None:
            self._average_context = self.ema.apply()
            self._average_context.__enter__()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Put the trained weights back."""
        if self._average_context is not None:
            self._average_context, swap = None, self._average_context
            swap.__exit__(None, None, None)
        self._switch_optimizers(trainer, "train")

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put the trained weights back."""
        self.on_validation_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, for the checkpoint."""
        return {} if self.ema is None else {"ema": self.ema.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the averages until there is an EMA to load them."""
        self._checkpoint_entries |= state_dict

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the contract."""
        checkpoint["precision_contract"] = contract(pl_module, self._list_optimizers(trainer)).to_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the contract until the optimizers are there."""
        if "precision_contract" in checkpoint:
            self._checkpoint_entries["contract"] = checkpoint["precision_contract"]

    def _switch_optimizers(self, trainer: Any, mode: str) -> None:
        for one in self._list_optimizers(trainer):
            if isinstance(one, optim.Optimizer):
                getattr(one, mode)()

    def _list_optimizers(self, trainer: Any) -> list[torch.optim.Optimizer]:
        return [find_inner_optimizer(one) for one in trainer.optimizers]
