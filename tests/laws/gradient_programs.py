"""Random float32 programs: models that read a few tensors and parameters again and again, by many functions."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfulp import AdaptiveGradScaler
from halfulp.kernels import same_bits

from ..gradients.exponents import clear, gradients, scramble

SIZE = 6
# Powers of two are exact within float32's range only: results of other sizes are brought back between these.
LEAST, MOST = 0.25, 4.0


def written(x, y):
    out = x * 1.5
    out.add_(y)
    out[1:3] = y[2:4] * x[1:3]
    return out


def written_through_a_view(x, y):
    out = x.clone(memory_format=torch.contiguous_format)
    out.view(-1)[::2].mul_(y.reshape(-1)[::2])
    return out


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        gate = y.sigmoid()
        return gradient * gate, gradient * x * gate * (1 - gate)


def gated_twice(x, y):
    return x * torch.sigmoid(y) + torch.outer(x[..., 0], y[..., 0])


def checkpointed(x, y):
    learns = x.requires_grad or y.requires_grad
    return checkpoint(gated_twice, x, y, use_reentrant=True) if learns else gated_twice(x, y)


# By name: the kinds of what is read and made ("v" a vector, "m" a matrix, "n" a number, "a" a vector or a matrix).
FUNCTIONS = {
    "sin": ("a>a", torch.sin),
    "gelu": ("a>a", F.gelu),
    "square": ("a>a", torch.square),
    "softmax": ("a>a", lambda x: x.softmax(-1)),
    "log_softmax": ("a>a", lambda x: x.log_softmax(-1)),
    "cumsum": ("a>a", lambda x: x.cumsum(-1)),
    "flip": ("a>a", lambda x: x.flip(0)),
    "mT": ("m>m", lambda x: x.mT),
    "normalize": ("a>a", lambda x: F.normalize(x, dim=-1)),
    "layer_norm": ("a>a", lambda x: F.layer_norm(x, x.shape[-1:])),
    "rms_norm": ("a>a", lambda x: F.rms_norm(x, x.shape[-1:])),
    "swish": ("a>a", lambda x: x * x.sigmoid()),
    "halves": ("a>a", lambda x: torch.cat([x[..., SIZE // 2 :], x[..., : SIZE // 2] * 2], -1)),
    "centred": ("a>a", lambda x: x - x.mean(-1, keepdim=True)),
    "gathered": ("a>a", lambda x: x[torch.tensor([0, 2, 2, 5, 1, 0])]),
    "row": ("m>v", lambda x: x[2]),
    "add": ("aa>a", torch.add),
    "sub": ("aa>a", torch.sub),
    "mul": ("aa>a", torch.mul),
    "div": ("aa>a", lambda x, y: x / (1 + y.square())),
    "maximum": ("aa>a", torch.maximum),
    "lerp": ("aa>a", lambda x, y: torch.lerp(x, y, 0.3)),
    "where": ("aa>a", lambda x, y: torch.where(x > y, x, y * 2)),
    "addcmul": ("aaa>a", torch.addcmul),
    "hypot": ("aa>a", lambda x, y: torch.hypot(x, y + 2)),
    "glu": ("aa>a", lambda x, y: F.glu(torch.cat([x, y], -1))),
    "stack": ("aa>a", lambda x, y: torch.stack([x, y, x]).amax(0)),
    "cosine_similarity": ("aa>a", lambda x, y: x * F.cosine_similarity(x, y, -1, 1e-3)[..., None]),
    "cosine_embedding_loss": ("mm>n", lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(SIZE))),
    "triplet_margin_loss": ("mmm>n", F.triplet_margin_loss),
    "gaussian_nll_loss": ("aa>a", lambda x, y: F.gaussian_nll_loss(x, y, x.square() + 1, reduction="none")),
    "mse_loss": ("aa>n", F.mse_loss),
    "mean": ("a>n", torch.mean),
    "norm": ("a>n", torch.linalg.vector_norm),
    "scaled": ("na>a", torch.mul),
    "shifted": ("na>a", torch.add),
    "written": ("aa>a", written),
    "written through a view": ("aa>a", written_through_a_view),
    "custom Function": ("aa>a", Swish.apply),
    "checkpoint": ("mm>m", lambda x, y: checkpoint(gated_twice, x, y, use_reentrant=False)),
    "reentrant checkpoint": ("mm>m", checkpointed),
    "outer": ("vv>m", torch.outer),
    "outer of views": ("vv>m", lambda x, y: x[:, None] @ y[None]),
    "dot": ("vv>n", torch.dot),
    "inner": ("mm>m", torch.inner),
    "matmul": ("mm>m", torch.matmul),
    "matmul of the transposed": ("mm>m", lambda x, y: x @ y.mT),
    "mv": ("mv>v", torch.mv),
    "vm": ("vm>v", torch.matmul),
    "linear of a vector": ("vm>v", F.linear),
    "linear": ("mmv>m", F.linear),
    "addmm": ("mmm>m", torch.addmm),
    "addmv": ("vmv>v", torch.addmv),
    "addr": ("mvv>m", torch.addr),
    "baddbmm": ("mmm>m", lambda x, y, z: torch.baddbmm(x[None], y[None], z[None])[0]),
    "einsum": ("mm>m", lambda x, y: torch.einsum("ij,kj->ik", x, y)),
    "einsum of three": ("mmv>m", lambda x, y, z: torch.einsum("ij,jk,k->ik", x, y, z)),
    "multi_dot": ("mmm>m", lambda x, y, z: torch.linalg.multi_dot([x, y, z])),
    "matrix_power": ("m>m", lambda x: torch.matrix_power(x / 2, 3)),
    "kron": ("vv>m", lambda x, y: torch.kron(x, y).view(SIZE, SIZE)),
    "tensordot": ("mm>m", lambda x, y: torch.tensordot(x, y, dims=([1], [0]))),
    "cdist": ("mm>m", lambda x, y: torch.cdist(x, y + 3)),
    "attention": ("mmm>m", lambda x, y, z: F.scaled_dot_product_attention(x[None], y[None], z[None])[0]),
    "conv1d": ("mm>m", lambda x, y: F.conv1d(x[None], y[:, :, None].repeat(1, 1, 3) / 3, padding=1)[0]),
}
MODULES = {
    "Linear": lambda: nn.Linear(SIZE, SIZE),
    "Sequential": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)),
    "LayerNorm": lambda: nn.LayerNorm(SIZE),
    "LSTM": lambda: nn.LSTM(SIZE, SIZE),
    "GRU": lambda: nn.GRU(SIZE, SIZE),
    "GRUCell": lambda: nn.GRUCell(SIZE, SIZE),
    "Bilinear": lambda: nn.Bilinear(SIZE, SIZE, SIZE),
    "MultiheadAttention": lambda: nn.MultiheadAttention(SIZE, 2),
}
# What every program has before its first step: two inputs, and parameters.
GIVEN = "vmvvmm"


def call(module, x, y):
    if isinstance(module, nn.MultiheadAttention):
        return module(x, y, y, need_weights=False)[0]
    if isinstance(module, (nn.LSTM, nn.GRU)):
        return module(x)[0]
    return module(x, y) if isinstance(module, (nn.GRUCell, nn.Bilinear)) else module(x)


class Program(nn.Module):
    """A random program; the same number makes the same one.

    Attributes:
        steps: What is done: the name of a function or of a module, and which of the tensors so far it reads.
        results: Which of the tensors are returned.
        twice: Whether the loss calls it again with what it returned.
    """

    def __init__(self, number):
        super().__init__()
        chooser = random.Random(number)
        torch.manual_seed(number)
        self.vectors = nn.ParameterList([torch.randn(SIZE) for _ in range(2)])
        self.matrices = nn.ParameterList([torch.randn(SIZE, SIZE) / 2 for _ in range(2)])
        self.layers = nn.ModuleDict({name: MODULES[name]() for name in sorted(chooser.sample(sorted(MODULES), 3))})
        # Leaves that want gradients, results of functions, or neither.
        self.inputs = [torch.randn(SIZE), torch.randn(SIZE, SIZE)]
        self._makes = chooser.choice(["constants", "leaves", "results"])
        for x in self.inputs:
            x.requires_grad_(self._makes != "constants")
        self.steps, kinds, learns = [], GIVEN, [x.requires_grad for x in self.inputs] + [True] * 4
        for _ in range(chooser.randint(3, 14)):
            kind, reads_learning = self._draw(chooser, kinds, learns)
            kinds += kind
            learns.append(reads_learning)
        if not any(learns[len(GIVEN) :]):
            self.steps.append(("add", (2, 3)))
            learns.append(True)
        made = [i for i in range(len(GIVEN), len(learns)) if learns[i]]
        self.results = sorted(chooser.sample(made, min(len(made), chooser.randint(1, 3))))
        self.twice = chooser.random() < 0.2
        self._sizes = [1.0] * len(self.steps)
        with torch.no_grad():
            self._run(*self.inputs, measure=True)

    def _draw(self, chooser, kinds, learns):
        """Add a step; return the kind of what it makes, and whether that needs gradients."""
        module = chooser.random() < 0.15
        name = chooser.choice(sorted(self.layers if module else FUNCTIONS))
        read, made = ("mm>m" if module else FUNCTIONS[name][0]).split(">")
        if "n" in read and "n" not in kinds:
            name, read, made = "dot", "vv", "n"
        shape = chooser.choice("vm")
        read, made = read.replace("a", shape), made.replace("a", shape)
        places = []
        for kind in read:
            # Mostly one of the latest, so that programs are deep.
            those = [i for i, one in enumerate(kinds) if one == kind]
            places.append(chooser.choice(those[-3:] if chooser.random() < 0.6 else those))
        if len(set(read)) == 1 and chooser.random() < 0.3:
            places = places[:1] * len(places)
        self.steps.append((name, tuple(places)))
        return made, module or any(learns[place] for place in places)

    def forward(self, x, y):
        made = self._run(x, y)
        return [made[place] for place in self.results]

    def _run(self, x, y, measure=False):
        made = [x, y, *self.vectors, *self.matrices]
        for i, (name, places) in enumerate(self.steps):
            given = [made[place] for place in places]
            out = call(self.layers[name], *given) if name in self.layers else FUNCTIONS[name][1](*given)
            if measure:
                size = out.abs().amax().item()
                self._sizes[i] = 1.0 if LEAST <= size <= MOST or not size else size
            made.append(out if self._sizes[i] == 1 else out / self._sizes[i])
        return made

    def loss(self):
        """The loss of the program's results, each of which it reads twice."""
        inputs = [x * 1 for x in self.inputs] if self._makes == "results" else self.inputs
        results = self(*inputs)
        if self.twice:
            x, y = inputs
            first = results[0].sum() / SIZE
            results = [*results, *self(x + first, y * first)]
        return sum((i + 1) * x.square().mean() + x.reshape(-1)[0] for i, x in enumerate(results))

    def gradients(self):
        """The gradients of parameters and inputs after a backward pass, by name."""
        found = {name: gradient for (_, name), gradient in gradients(self).items()}
        found |= {f"input {i}": x.grad.clone() for i, x in enumerate(self.inputs) if x.grad is not None}
        clear(self)
        for x in self.inputs:
            x.grad = None
        return found

    def __str__(self):
        lines = [f"t{len(GIVEN) + i} = {name}({places})" for i, (name, places) in enumerate(self.steps)]
        return "\n".join([*lines, f"return {self.results}, {self._makes}{', twice' * self.twice}"])


def differs(number, measured=2, unmeasured=4):
    """What a scaler's exponents change in a program's gradients, and the program; nothing where all bits are equal.

    ``measured`` iterations run in regions, as do the first ``unmeasured`` ones, after which the graph is known.
    """
    program = Program(number)
    program.loss().backward()
    wanted = program.gradients()
    scaler = AdaptiveGradScaler(program)
    backward = scaler._controller.backward
    random.seed(number)
    for iteration in range(measured + unmeasured):
        backward.end_iteration()
        backward.is_measuring = iteration < measured
        scaler.scale(program.loss()).backward()
        found = {key: gradient * (1 / scaler.get_scale()) for key, gradient in program.gradients().items()}
        wrong = [key for key in wanted if key not in found or not same_bits(found[key], wanted[key])]
        if wrong or found.keys() != wanted.keys():
            return f"program {number}, iteration {iteration}: {', '.join(wrong)}\n{program}"
        scramble(scaler)
    return ""
