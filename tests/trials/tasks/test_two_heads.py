"""Two heads whose losses lie far apart: pages and boxes agree, and one scale serves one head."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from halfulp import recipes
from halfulp.gradients import AdaptiveGradScaler
from halfulp.trials import tasks
from halfulp.trials.running import _trial
from halfulp.trials.running._plan import Trial
from halfulp.trials.tasks._digits import (
    CELL_PIXELS,
    CLASS_COUNT_WITH_BACKGROUND,
    PAGE_CELLS,
    TwoHeads,
    compute_image_log_probabilities,
    label_cells,
    load_digits,
    place_digits_on_pages,
)


@pytest.fixture(scope="module")
def data():
    return TwoHeads().load()


def test_ink_lies_in_the_box(data) -> None:
    pages, targets = data.validation
    assert pages.shape == (4 * 360, 1, PAGE_CELLS, PAGE_CELLS)
    assert pages.min() >= 0
    assert pages.max() <= 1
    edges = torch.arange(PAGE_CELLS) * CELL_PIXELS
    for page, (_, across, down, width, height) in zip(pages[:200, 0], targets[:200].tolist()):
        columns = (edges + CELL_PIXELS > across - width / 2) & (edges < across + width / 2)
        rows = (edges + CELL_PIXELS > down - height / 2) & (edges < down + height / 2)
        # Interpolation reaches half a pixel of the digit, width / 16, beyond the box.
        reach = 1 + max(width, height) // (16 * CELL_PIXELS)
        columns, rows = (F.max_pool1d(x[None].float(), 2 * reach + 1, 1, reach)[0] > 0 for x in (columns, rows))
        assert page[~rows].abs().sum() == page[:, ~columns].abs().sum() == 0
        assert page.sum() > 1


def test_boxes_are_on_the_page(data) -> None:
    for _, targets in (data.train, data.validation):
        _, across, down, width, height = targets.unbind(1)
        for middle, size in ((across, width), (down, height)):
            assert ((middle - size / 2 >= -0.5) & (middle + size / 2 <= PAGE_CELLS * CELL_PIXELS + 0.5)).all()
            assert size.min() >= 8 * CELL_PIXELS
            assert size.max() <= 16 * CELL_PIXELS


def test_pages_by_hand(data) -> None:
    """Bilinear interpolation of the digit, nothing around it."""
    digits = load_digits().validation[0].view(-1, 8, 8)
    generator = torch.Generator().manual_seed(0)
    pages, targets = place_digits_on_pages(digits.flatten(1), load_digits().validation[1], generator)
    for i in range(0, len(pages), 131):
        digit, (_, across, down, width, height) = digits[i % len(digits)].tolist(), targets[i].tolist()
        for row in range(PAGE_CELLS):
            for column in range(PAGE_CELLS):
                x = (((column + 0.5) * CELL_PIXELS - across) / width + 0.5) * 8 - 0.5
                y = (((row + 0.5) * CELL_PIXELS - down) / height + 0.5) * 8 - 0.5
                ink = 0.0
                for v in (math.floor(y), math.floor(y) + 1):
                    for u in (math.floor(x), math.floor(x) + 1):
                        if 0 <= u < 8 and 0 <= v < 8:
                            ink += (1 - abs(x - u)) * (1 - abs(y - v)) * digit[v][u]
                assert pages[i, 0, row, column].item() == pytest.approx(ink, abs=1e-4)


def test_losses_by_hand(data, seed: int) -> None:
    task = TwoHeads()
    targets = data.validation[1][:3]
    boxes, classes = 50 * torch.rand(3, 4), torch.randn(3, CLASS_COUNT_WITH_BACKGROUND, PAGE_CELLS, PAGE_CELLS)
    squares, distances, cross, image = 0.0, 0.0, 0.0, 0.0
    for n, (digit, across, down, width, height) in enumerate(targets.tolist()):
        errors = [boxes[n, k].item() - side for k, side in enumerate((across, down, width, height))]
        squares += sum(error**2 for error in errors)
        distances += sum(map(abs, errors)) / 12 / CELL_PIXELS
        chances = classes[n].double().softmax(0)
        for row in range(PAGE_CELLS):
            for column in range(PAGE_CELLS):
                x, y = (column + 0.5) * CELL_PIXELS, (row + 0.5) * CELL_PIXELS
                inside = abs(x - across) < width / 2 and abs(y - down) < height / 2
                cross -= math.log(chances[1 + digit if inside else 0, row, column]) / (3 * PAGE_CELLS * PAGE_CELLS)
        image -= math.log(chances[1 + digit].sum() / chances[1:].sum()) / 3
    assert task.loss((boxes, classes), targets).item() == pytest.approx(squares + 0.001 * cross, rel=1e-5)
    assert task.compute_judged_loss((boxes, classes), targets).item() == pytest.approx(image + distances, rel=1e-5)


def test_hits() -> None:
    targets = torch.tensor([[3, 48, 48, 40, 40], [4, 48, 48, 40, 40]])
    classes = torch.zeros(2, CLASS_COUNT_WITH_BACKGROUND, PAGE_CELLS, PAGE_CELLS)
    classes[:, 0] = 30
    classes[:, 4, 5, 5] = 29
    assert task_hits(classes, targets) == [True, False]
    assert (label_cells(targets) > 0).sum() == 2 * 100
    torch.testing.assert_close(compute_image_log_probabilities(classes).exp().sum(1), torch.ones(2))


def task_hits(classes: torch.Tensor, targets: torch.Tensor) -> list[bool]:
    return TwoHeads().is_hit((torch.zeros(2, 4), classes), targets).tolist()


def test_gradients_at_the_outputs_lie_2_to_the_14_apart_and_more(data, seed: int) -> None:
    task = TwoHeads()
    inputs, targets = next(task.batches(data, seed, 1))
    found = [x.detach().requires_grad_() for x in task.model(data, seed)(inputs)]
    task.loss(tuple(found), targets).backward()
    boxes, classes = (x.grad.abs().max().item() for x in found)
    assert boxes > 2**14 * classes


def test_one_scale_serves_one_head(data, seed: int) -> None:
    """At the largest scale at which the box's gradients fit float16, weights of the class head get none; with exponents
    of their own all do."""
    task = TwoHeads()
    inputs, targets = next(task.batches(data, seed, 1))
    shares = {}
    for policy, scale, steps in (("constant", 2.0, 2), ("amax", 2.0**16, 24)):
        model = task.model(data, seed)
        scaler = AdaptiveGradScaler(model, format="e5m2", policy=policy, init_scale=scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(task.loss(model(inputs), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.last_step.applied
        gradients = [p.grad for name, p in model.named_parameters() if name.startswith("classes") and p.dim() == 4]
        shares[policy] = sum(int((g != 0).sum()) for g in gradients) / sum(g.numel() for g in gradients)
    assert shares["constant"] < 0.05
    assert shares["amax"] > 0.8


@pytest.mark.parametrize("recipe", ["fp32", "fp16-adaptive", "e8m5"])
def test_a_short_trial(data, recipe: str) -> None:
    few = dataclasses.replace(data, validation=tuple(part[::8] for part in data.validation))
    result = _trial.run_trial(Trial(tasks.get("two-heads"), recipes.get(recipe), 0, 3), few)
    assert result["targets"] == 180
    assert result["diverged_at"] is None
    assert 0 <= result["float32"]["validation"]["accuracy"] <= 1
    # Chance is log 10 for the class, and the box is a few cells off.
    assert 2 < result["float32"]["validation"]["loss"] < 20
