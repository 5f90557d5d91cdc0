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
import types
from typing import TYPE_CHECKING, Any

import torch

from .. import optim
from ..gradients import AdaptiveGradScaler
from ..optim._optimizer import unwrap_optimizer
from ..recipes import Recipe as _Recipe
from ..recipes import contract, convert, get
from ..recipes._contract import Contract
from ..recipes._convert import read_recipe_of_model

_LIGHTNING_PACKAGE_NAME = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
if TYPE_CHECKING:
    import lightning.pytorch as _lightning_package
    import lightning.pytorch.plugins.precision as _precision_plugins
else:
    _lightning_package = importlib.import_module(_LIGHTNING_PACKAGE_NAME)
    _precision_plugins = importlib.import_module(f"{_LIGHTNING_PACKAGE_NAME}.plugins.precision")


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
        self.recipe: _Recipe = get(recipe) if isinstance(recipe, str) else recipe
        self.options: dict[str, Any] = options
        self.precision: Any = self.recipe.name
        if self.recipe.gradient_format is not None:
            raise ValueError(
                f"recipe {self.recipe.name!r} scales gradients: use AdaptiveMixed(...) for a scaler under autocast, or "
                "a recipe of bfloat16"
            )

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert the module in place; one that this recipe has converted, as in a run before, stays as it is."""
        try:
            known = read_recipe_of_model(module)
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
        # Until there is a module, the scaler has only a state to be saved.
        unmade: Any = types.SimpleNamespace(state_dict=dict)
        super().__init__("16-mixed", device, scaler=unmade)
        self.scaler: Any
        self.options = options

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Make the scaler of the module, once; its parameters stay as they are."""
        is_made = isinstance(self.scaler, AdaptiveGradScaler) and [one() for one in self.scaler._models] == [module]
        if not is_made:
            self.scaler = AdaptiveGradScaler(module, **self.options)
        return module


class Precision(_lightning_package.Callback):
    """Saves the precision contract of module and optimizers in checkpoints, checks it on resume; logs lost updates.

    Schedule-free optimizers show their averages while the module is validated, tested and predicts. Averages of the
    weights are Lightning's own `EMAWeightAveraging`'s, which copies the module in float32, before `Recipe` converts it.

    `lost_updates` are logged at the end of each training epoch.

    Raises:
        ValueError: when a training resumes: its checkpoint was saved in another precision.
    """

    def __init__(self) -> None:
        self._saved_contract: dict[str, Any] | None = None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the contract until the optimizers are there."""
        self._saved_contract = checkpoint.get("precision_contract")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the contract."""
        checkpoint["precision_contract"] = contract(pl_module, self._list_optimizers(trainer)).to_dict()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the contract that the checkpoint held."""
        saved, self._saved_contract = self._saved_contract, None
        if saved is not None:
            Contract.from_dict(saved).check(pl_module, self._list_optimizers(trainer))
        self.on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the share of lost updates."""
        for one in self._list_optimizers(trainer):
            lost = one.report().cancelled if isinstance(one, optim.Optimizer) else None
            if lost is not None:
                pl_module.log("lost_updates", float(lost), rank_zero_only=True)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Show the averages of schedule-free optimizers in the module."""
        self._switch_schedule_free_mode(trainer, False)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Put the trained weights back."""
        self._switch_schedule_free_mode(trainer, True)

    on_test_start: Any = on_validation_start
    on_test_end: Any = on_validation_end
    on_predict_start: Any = on_validation_start
    on_predict_end: Any = on_validation_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put the trained weights back."""
        self._switch_schedule_free_mode(trainer, True)

    def _switch_schedule_free_mode(self, trainer: Any, is_training: bool) -> None:
        for one in self._list_optimizers(trainer):
            if isinstance(one, optim.Optimizer):
                one.train(is_training)

    def _list_optimizers(self, trainer: Any) -> list[torch.optim.Optimizer]:
        return [unwrap_optimizer(one) for one in trainer.optimizers]
