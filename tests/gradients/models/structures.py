"""Networks chosen for how their tensors are joined: shared, written in place, recomputed, routed by hand, complex."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from .cases import CLASSES, WIDTH, Case, architecture, classes, mlp, target

ROWS = 8


def rows(width: int = WIDTH) -> torch.Tensor:
    return torch.randn(ROWS, width)


def labelled(model):
    return Case(model, (rows(),), classes(ROWS))


@architecture("perceptron")
def multilayer_perceptron():
    return labelled(mlp(WIDTH, 24, 24, CLASSES, act=nn.ReLU))


@architecture("perceptron")
def deep_perceptron():
    layers = [layer for _ in range(10) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0))]
    return labelled(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)))


class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, WIDTH) / 4)
        self.hidden, self.visible = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return torch.sigmoid(x @ self.weight.t() + self.hidden) @ self.weight + self.visible


@architecture("shared")
def tied_autoencoder():
    return Case(TiedAutoencoder(), (rows(),), target(ROWS, WIDTH))


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = mlp(WIDTH, 24, 8)

    def forward(self, left, right):
        return F.cosine_similarity(self.tower(left), self.tower(right))


@architecture("shared")
def siamese():
    return Case(Siamese(), (rows(), rows()), target(ROWS))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


class Crossed(torch.autograd.Function):
    """Two tensors and a number in, two tensors and a whole number out."""

    @staticmethod
    def forward(ctx, x, y, factor):
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        count = (x > y).sum()
        ctx.mark_non_differentiable(count)
        return x * y, x + factor * y, count

    @staticmethod
    def backward(ctx, product, total, _):
        x, y = ctx.saved_tensors
        return product * y + total, product * x + ctx.factor * total, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


@architecture("custom function")
def straight_through():
    binary = Applied(StraightThrough)
    return labelled(nn.Sequential(nn.Linear(WIDTH, 24), binary, nn.Linear(24, 24), binary, nn.Linear(24, CLASSES)))


@architecture("custom function")
def swish_function():
    return labelled(nn.Sequential(nn.Linear(WIDTH, 24), Applied(Swish), nn.Linear(24, CLASSES)))


class CrossedLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(24, CLASSES)

    def forward(self, x):
        product, total, count = Crossed.apply(self.left(x), self.right(x), 0.7)
        return self.last(torch.cat([product, total], 1) * (1 + count / x.numel()))


@architecture("custom function")
def several_outputs_function():
    return labelled(CrossedLayers())


class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.label, self.domain = mlp(WIDTH, 24, 12), nn.Linear(12, CLASSES), mlp(12, 12, 2)

    def forward(self, x):
        shared = self.trunk(x)
        return self.label(shared), self.domain(Reversed.apply(shared, 0.3))


@architecture("custom function")
def gradient_reversal():
    label, domain = classes(ROWS), classes(ROWS, count=2)
    return Case(Adversarial(), (rows(),), lambda output: label(output[0]) + domain(output[1]))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.checkpointed = reentrant, True
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList([mlp(WIDTH, 24, WIDTH) for _ in range(3)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=self.reentrant) if self.checkpointed else block(x))
        return self.last(x)


@architecture("checkpoint")
def checkpoint_non_reentrant():
    return labelled(Checkpointed(reentrant=False))


@architecture("checkpoint")
def checkpoint_reentrant():
    return labelled(Checkpointed(reentrant=True))


class InPlace(nn.Module):
    """Activations and sums that overwrite their input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.act, self.last = nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = self.act(self.layers[0](x))
        y = self.layers[1](h)
        y += h
        y.mul_(0.5).relu_()
        z = self.layers[2](y)
        z.add_(y, alpha=0.3).tanh_()
        return self.last(z)


@architecture("in place")
def in_place_sums():
    return labelled(InPlace())


class Slices(nn.Module):
    """Results written into the parts of one buffer."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 6)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x):
        out = x.new_zeros(len(x), 16)
        out[:, :10] = self.left(x)
        out[:, 10:] = self.right(x)
        out[:, 4:12] *= 0.5
        return self.last(out.tanh())


@architecture("in place")
def in_place_slices():
    return labelled(Slices())


class Columns(nn.Module):
    """One column after another, each from those before it."""

    def __init__(self, count=4):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.columns = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(count)])

    def forward(self, x):
        h = self.first(x)
        for number, column in enumerate(self.columns):
            h[:, number] = column(h.clone()).squeeze(1).tanh()
        h.masked_fill_(x > 1, 0)
        h.index_copy_(1, torch.tensor([5, 4], device=h.device), h[:, 4:6].clone())
        return self.last(h)


@architecture("in place")
def in_place_columns():
    return labelled(Columns())


@architecture("parametrized")
def weight_normalised():
    layers = [weight_norm(nn.Linear(*size)) for size in ((WIDTH, 24), (24, 24), (24, CLASSES))]
    return labelled(nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2]))


class GraphConvolution(nn.Module):
    """Messages along edges, added at their ends (Kipf and Welling), once by index_add and once by scatter_add."""

    def __init__(self):
        super().__init__()
        self.own, self.other, self.last = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, CLASSES)

    def forward(self, x, source, sink):
        degree = x.new_ones(len(x)).index_add(0, sink, x.new_ones(len(sink)))
        own, sent = self.own(x), self.other(x)[source] / degree[sink, None].sqrt()
        h = F.silu(own.index_add(0, sink, sent.to(own.dtype)))
        places = sink[:, None].expand(-1, h.shape[1])
        return self.last(torch.zeros_like(h).scatter_add(0, places, h[source]) / degree[:, None] + h)


@architecture("graph")
def graph_convolution():
    edges = torch.randint(ROWS, (2, 24))
    return Case(GraphConvolution(), (rows(), *edges), classes(ROWS))


class DeepSets(nn.Module):
    def __init__(self):
        super().__init__()
        self.each, self.whole = mlp(3, 16, 12), mlp(24, 16, CLASSES)

    def forward(self, sets):
        h = self.each(sets)
        return self.whole(torch.cat([h.sum(1), h.amax(1)], 1))


@architecture("set")
def deep_sets():
    return Case(DeepSets(), (torch.randn(ROWS, 7, 3),), classes(ROWS))


class Highway(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        gate = self.gate(x).sigmoid()
        return gate * self.value(x).tanh() + (1 - gate) * x


@architecture("gated")
def highway():
    return labelled(nn.Sequential(Highway(), Highway(), Highway(), nn.Linear(WIDTH, CLASSES)))


class Flow(nn.Module):
    """Euler steps through one field of velocities."""

    def __init__(self):
        super().__init__()
        self.field, self.last = mlp(WIDTH + 1, 24, WIDTH, act=nn.Tanh), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, steps=5):
        for step in range(steps):
            time = x.new_full((len(x), 1), step / steps)
            x = x + self.field(torch.cat([x, time], 1)) / steps
        return self.last(x)


@architecture("shared")
def neural_ode():
    return labelled(Flow())


class Paired(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.pair = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 6), nn.Bilinear(8, 6, CLASSES)

    def forward(self, x):
        return self.pair(self.left(x).tanh(), self.right(x).tanh())


@architecture("bilinear")
def bilinear():
    return labelled(Paired())


class Fourier(nn.Module):
    """A filter on the lowest frequencies beside a pointwise layer (Li et al.)."""

    def __init__(self, modes=5):
        super().__init__()
        self.filter, self.local = nn.Parameter(torch.randn(modes, 4, 4, 2) / 4), nn.Conv1d(4, 4, 1)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        kept = torch.einsum("bim,mio->bom", spectrum[..., : len(self.filter)], torch.view_as_complex(self.filter))
        return F.gelu(torch.fft.irfft(kept, n=x.shape[-1]) + self.local(x))


@architecture("spectral")
def fourier():
    model = nn.Sequential(nn.Conv1d(1, 4, 1), Fourier(), Fourier(), nn.Conv1d(4, 1, 1))
    return Case(model, (torch.randn(ROWS, 1, 16),), target(ROWS, 1, 16))


class Complex(nn.Module):
    """Complex layers between real ones."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 24), nn.Linear(12, CLASSES)
        self.middle = nn.Linear(12, 12, dtype=torch.complex64)
        self.bend = nn.Parameter(torch.randn(12))

    def forward(self, x):
        z = torch.view_as_complex(self.first(x).unflatten(1, (12, 2)))
        z = self.middle(z)
        size = z.abs()
        return self.last(size * torch.cos(z.angle() + self.bend) + torch.complex(size, size).real)


@architecture("complex")
def complex_layers():
    return labelled(Complex())


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(WIDTH, 24, CLASSES)

    def forward(self, inputs, labels):
        logits = self.body(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@architecture("outputs")
def loss_inside():
    batch = {"inputs": rows(), "labels": torch.randint(CLASSES, (ROWS,))}
    return Case(WithLoss(), batch, lambda output: output["loss"])


@dataclass
class Output:
    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)]), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        first = self.layers[0](x).tanh()
        second = self.layers[1](first).tanh()
        return Output(self.last(second), (first, second))


@architecture("outputs")
def dataclass_outputs():
    label = classes(ROWS)
    return Case(
        Several(), (rows(),), lambda o: label(o.logits) + 0.1 * o.states[0].square().mean() + o.states[1].mean()
    )


class Hypernetwork(nn.Module):
    """A network that makes another one's weights."""

    def __init__(self):
        super().__init__()
        self.context, self.maker = nn.Parameter(torch.randn(6)), mlp(6, 16, (WIDTH + 1) * 12)
        self.last = nn.Linear(12, CLASSES)

    def forward(self, x):
        made = self.maker(self.context).view(12, WIDTH + 1)
        return self.last(F.silu(F.linear(x, made[:, :-1], made[:, -1])))


@architecture("generated weights")
def hypernetwork():
    return labelled(Hypernetwork())
