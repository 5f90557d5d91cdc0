"""The paper's experiment in small: forward and backward in 12 bits are harmless, nearest weight updates are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfulp import optim
from halfulp.emulation import emulate

datasets = pytest.importorskip("sklearn.datasets")
EPOCHS, BATCH, TRAINED = 25, 32, 1437  # enough of the paper's 40 to tell them apart


def accuracy(weight_update, seed):
    """Percent of the held-out digits after training in e8m3 throughout; arXiv 2010.06192, section 5."""
    bunch = datasets.load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.data / 16, dtype=torch.float32)[order]
    labels = torch.tensor(bunch.target)[order]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_update=weight_update, format="e8m3")
    emulation = emulate(model, "e8m3")
    for _ in range(EPOCHS):
        for chosen in torch.randperm(TRAINED)[: TRAINED // BATCH * BATCH].split(BATCH):
            scores = model(images[chosen])
            with emulation.region():
                loss = F.cross_entropy(scores, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return 100 * (model(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean().item()


@pytest.mark.filterwarnings("ignore:.*cancel")
def test_nearest_updates_fail_in_12_bits(seed):
    assert accuracy("nearest", seed) < 90


@pytest.mark.parametrize("weight_update", ["stochastic", "kahan"])
def test_stochastic_and_kahan_hold(seed, weight_update):
    assert accuracy(weight_update, seed) >= 93.5
