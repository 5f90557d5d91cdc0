"""Trainings with several losses or optimizers: a detector, adversaries, an actor with a critic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._training import Loss, Training


def layers(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with something between them."""
    made: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        made += [nn.Linear(inputs, outputs), between()]
    return nn.Sequential(*made[:-1])


@cache
def pages() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images (n, 576) of digits on a page and (n, 5) their digits and boxes, to train on and to judge by."""
    from halfulp.trials.tasks._digits import TwoHeads

    data = TwoHeads().load()
    return tuple((images.flatten(1), targets) for images, targets in (data.train, data.validation))


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images (n, 64) of digits between 0 and 1, to train on and to judge by."""
    from halfulp.trials.tasks._digits import load_digits

    data = load_digits()
    return data.train[0], data.validation[0]


class Detector(nn.Module):
    """A page to its digit's box in pixels (n, 4), and to the logits of the classes of 6x6 cells (n, 11, 6, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = layers(576, 128, 128)
        self.boxes, self.classes = layers(128, 64, 4), layers(128, 128, 11 * 36)
        nn.init.constant_(self.boxes[-1].bias, 12.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).relu()
        return 4.0 * self.boxes(x), self.classes(x).unflatten(1, (11, 6, 6))


class LossesAtOnce(Training):
    """The sum of two losses: of squares over the batch in pixels, and of a mean over all cells times .001."""

    title, judged, steps = "two losses at once", "box error in cells + cross-entropy of cells", 1000

    def build(self, data: Path) -> None:
        self.models = [Detector()]
        self.optimizers = [torch.optim.AdamW(self.models[0].parameters(), lr=2e-3, eps=1e-12)]

    def losses(self, step: int) -> Iterator[tuple[int, Loss]]:
        images, targets = (x[rows] for rows in [self.rows(32, len(pages()[0][0]))] for x in pages()[0])

        def loss(models: Sequence[nn.Module]) -> Tensor:
            return self.combined(step, *self.both(models[0](images), targets))

        yield 0, loss

    def both(self, found: tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of the boxes and that of the classes."""
        from halfulp.trials.tasks._digits import label_cells

        wanted = label_cells(targets)[:, 2::4, 2::4]
        boxes, classes = (x.float() for x in found)
        return (boxes - targets[:, 1:]).square().sum(), 0.001 * F.cross_entropy(classes, wanted)

    def combined(self, step: int, boxes: Tensor, classes: Tensor) -> Tensor:
        """Both."""
        return boxes + classes

    def judge(self, models: Sequence[nn.Module]) -> Tensor:
        images, targets = pages()[1]
        found = models[0](images)
        return (found[0] - targets[:, 1:]).abs().mean() / 4 + 1000 * self.both(found, targets)[1]


class LossesByTurns(LossesAtOnce):
    """The same, boxes in odd iterations and classes in even ones."""

    title = "two losses by turns"

    def combined(self, step: int, boxes: Tensor, classes: Tensor) -> Tensor:
        """One of both."""
        return boxes if step % 2 else classes


class Adversaries(Training):
    """A generator of digits and its discriminator, each with its optimizer and an `update` after its step."""

    title, judged = "GAN", "energy distance of made digits from real ones"
    steps, update_each = 600, True

    def build(self, data: Path) -> None:
        maker = nn.Sequential(layers(16, 96, 96, 64), nn.Sigmoid())
        critic = layers(64, 96, 96, 1, between=nn.LeakyReLU)
        self.models = [maker, critic]
        self.optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.0, 0.999)) for m in self.models]

    def losses(self, step: int) -> Iterator[tuple[int, Loss]]:
        real, noise = digits()[0][self.rows(64, len(digits()[0]))], torch.randn(64, 16, generator=self.draw)

        def critic_loss(models: Sequence[nn.Module]) -> Tensor:
            maker, critic = models
            made = maker(noise).detach()
            return F.softplus(-critic(real).float()).mean() + F.softplus(critic(made).float()).mean()

        yield 1, critic_loss
        yield 0, lambda models: F.softplus(-models[1](models[0](noise)).float()).mean()

    def judge(self, models: Sequence[nn.Module]) -> Tensor:
        real = digits()[1]
        made = models[0](torch.randn(len(real), 16, generator=torch.Generator().manual_seed(0)))
        return 2 * torch.cdist(real, made).mean() - torch.cdist(made, made).mean() - torch.cdist(real, real).mean()


class Poles:
    """Carts that balance poles, many at once: the equations and limits of Barto, Sutton and Anderson (1983)."""

    def __init__(self, count: int, draw: torch.Generator) -> None:
        self.draw, self.state = draw, torch.empty(count, 4)
        self.age = torch.zeros(count)
        self._renew(torch.ones(count, dtype=torch.bool))

    def _renew(self, ended: Tensor) -> None:
        fresh = 0.1 * torch.rand(self.state.shape, generator=self.draw) - 0.05
        self.state = torch.where(ended[:, None], fresh, self.state)
        self.age = torch.where(ended, 0.0, self.age)

    def step(self, actions: Tensor) -> Tensor:
        """Push to the left (0) or to the right (1) for a fiftieth of a second; which episodes ended."""
        x, v, angle, turn = self.state.unbind(1)
        push = 20.0 * actions - 10.0
        sine, cosine = angle.sin(), angle.cos()
        common = (push + 0.05 * turn.square() * sine) / 1.1
        bend = (9.8 * sine - cosine * common) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        pull = common - 0.05 * bend * cosine / 1.1
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * bend], 1)
        self.age = self.age + 1
        ended = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2095) | (self.age >= 500)
        self._renew(ended)
        return ended


class ActorCritic(Training):
    """Advantage actor-critic on poles: two optimizers, one `update` after both steps."""

    title, judged, steps = "actor-critic", "1 - steps before the pole falls / 200", 400
    CARTS, TIME, DISCOUNT = 16, 16, 0.99

    def build(self, data: Path) -> None:
        self.models = [layers(4, 64, 64, 2, between=nn.Tanh), layers(4, 64, 64, 1, between=nn.Tanh)]
        rates = (3e-3, 1e-2)
        self.optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m, lr in zip(self.models, rates)]
        self.poles = Poles(self.CARTS, self.draw)

    def act(self, actor: nn.Module, poles: Poles) -> tuple[Tensor, Tensor]:
        """One step: actions, and which episodes ended."""
        chances = actor(poles.state).float().softmax(1)
        actions = torch.multinomial(chances, 1, generator=poles.draw)[:, 0]
        return actions, poles.step(actions)

    @torch.no_grad()
    def played(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States (n, 4), actions (n), discounted returns (n) and advantages (n) of a while."""
        actor, critic = self.models
        states, actions, ends = [], [], []
        for _ in range(self.TIME):
            states.append(self.poles.state)
            done, ended = self.act(actor, self.poles)
            actions.append(done)
            ends.append(ended)
        returns, value = [], critic(self.poles.state).float()[:, 0]
        for ended in reversed(ends):
            value = 1.0 + self.DISCOUNT * torch.where(ended, 0.0, value)
            returns.append(value)
        every, goals = torch.cat(states), torch.cat(returns[::-1])
        return every, torch.cat(actions), goals, goals - critic(every).float()[:, 0]

    def losses(self, step: int) -> Iterator[tuple[int, Loss]]:
        states, actions, goals, advantages = self.played()

        def actor_loss(models: Sequence[nn.Module]) -> Tensor:
            logs = models[0](states).float().log_softmax(1)
            entropy = -(logs.exp() * logs).sum(1).mean()
            return -(advantages * logs.gather(1, actions[:, None])[:, 0]).mean() - 0.01 * entropy

        yield 0, actor_loss
        yield 1, lambda models: (models[1](states).float()[:, 0] - goals).square().mean()

    @torch.no_grad()
    def judge(self, models: Sequence[nn.Module]) -> Tensor:
        poles = Poles(64, torch.Generator().manual_seed(0))
        standing, count = torch.ones(64), torch.zeros(64)
        for _ in range(200):
            count += standing
            _, ended = self.act(models[0], poles)
            standing = torch.where(ended, 0.0, standing)
        return 1 - count.mean() / 200
