"""Train a LightningModule in bfloat16 by a precision plugin; the module is written as for float32."""

import lightning
import torch
from torch import nn

import halfulp as hu
from halfulp.integrations.lightning import Precision, Recipe


class Classifier(lightning.LightningModule):
    """Two layers with a batch norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """The loss, in float32."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs).float(), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The recipe's own."""
        return hu.recipes.optimizer(self, "AdamW", lr=3e-3)


torch.manual_seed(0)
inputs = torch.randn(512, 32)
labels = inputs[:, :4].argmax(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=64, shuffle=True)

module = Classifier()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(
    max_epochs=8, accelerator="cpu", plugins=[Recipe("bf16-split8")], callbacks=[Precision()], **quiet
)
trainer.fit(module, loader)

module.eval()
accuracy = (module.net(inputs).argmax(1) == labels).float().mean().item()
print(f"accuracy {accuracy:.2f}")
print(hu.contract(module, trainer.optimizers[0]))
assert accuracy > 0.8
