"""Networks of sequences: attention, experts, recurrences, convolutions and scans over time."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .cases import CLASSES, VOCABULARY, WIDTH, Case, architecture, classes, mlp, target

ROWS, LENGTH = 3, 12


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS, length))


def vectors() -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH)


def predicted(model):
    """A case that names every token's successor."""
    return Case(model, (tokens(),), classes(ROWS, LENGTH, count=VOCABULARY))


class Attention(nn.Module):
    """Attention to itself or to a memory, spelled out or by torch's fused function."""

    def __init__(self, causal=False, fused=False, heads=4):
        super().__init__()
        self.causal, self.fused, self.heads = causal, fused, heads
        self.query, self.value, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # softmax takes no notice of a bias here

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        pairs = ((self.query, x), (self.key, memory), (self.value, memory))
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, y in pairs)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            if self.causal:
                later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, float("-inf"))
            out = scores.softmax(-1) @ v
        return self.last(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A pre-norm layer, with attention to a memory where it is given one."""

    def __init__(self, causal=False, fused=False, cross=False, feed=None):
        super().__init__()
        self.attend = Attention(causal, fused)
        self.cross = Attention(fused=fused) if cross else None
        self.feed = feed or mlp(WIDTH, 2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2 + cross)])

    def forward(self, x, memory=None):
        x = x + self.attend(self.norms[0](x))
        if self.cross:
            x = x + self.cross(self.norms[2](x), memory)
        return x + self.feed(self.norms[1](x))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class GPT(nn.Module):
    def __init__(self, *layers, tied=False):
        super().__init__()
        self.embed, self.layers, self.norm = Embedded(), nn.ModuleList(layers), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.words.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@architecture("decoder")
def gpt():
    return predicted(GPT(Layer(causal=True), Layer(causal=True)))


@architecture("decoder")
def gpt_fused_tied():
    return predicted(GPT(Layer(causal=True, fused=True), Layer(causal=True, fused=True), tied=True))


@architecture("shared")
def albert():
    layer = Layer()
    return predicted(GPT(layer, layer, layer))


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.sink = Embedded(), Embedded()
        self.encoder = nn.ModuleList([Layer(), Layer()])
        self.decoder = nn.ModuleList([Layer(causal=True, cross=True) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source, sink):
        memory, x = self.source(source), self.sink(sink)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


@architecture("encoder-decoder")
def encoder_decoder():
    return Case(EncoderDecoder(), (tokens(), tokens(7)), classes(ROWS, 7, count=VOCABULARY))


@architecture("encoder-decoder")
def torch_transformer():
    model = nn.Transformer(WIDTH, 4, 1, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
    return Case(model, (vectors(), vectors()[:, :7]), target(ROWS, 7, WIDTH))


@architecture("encoder")
def torch_transformer_encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
    return Case(nn.TransformerEncoder(layer, 2), (vectors(),), target(ROWS, LENGTH, WIDTH))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.norm = nn.MultiheadAttention(WIDTH, 4, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x):
        out, weights = self.attend(x, x, x, average_attn_weights=False)
        return self.norm(x + out), weights


@architecture("encoder")
def multihead_attention():
    near = target(ROWS, LENGTH, WIDTH)
    return Case(Attending(), (vectors(),), lambda o: near(o[0]) + o[1].square().mean())


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        self.layers, self.norm = nn.Sequential(Layer(), Layer(fused=True)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


@architecture("encoder")
def vit():
    return Case(ViT(), (torch.randn(ROWS, 3, 16, 16),), classes(ROWS))


class Perceiver(nn.Module):
    """A few latent vectors read a long input, again and again with the same weights."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.read, self.think, self.head = Attention(), Layer(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        latents = self.latents.expand(len(x), -1, -1)
        for _ in range(2):
            latents = self.think(latents + self.read(latents, x))
        return self.head(latents.mean(1))


@architecture("cross attention")
def perceiver():
    return Case(Perceiver(), (vectors(),), classes(ROWS))


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.last = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.into(x).unflatten(-1, (3, 4, -1)).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = torch.einsum("blhi,blhj->bhij", k, v)
        total = torch.einsum("blhi,bhi->blh", q, k.sum(1))
        return x + self.last((torch.einsum("blhi,bhij->blhj", q, memory) / total[..., None]).flatten(2))


@architecture("linear attention")
def linear_attention():
    model = nn.Sequential(LinearAttention(), nn.LayerNorm(WIDTH), LinearAttention())
    return Case(model, (vectors(),), target(ROWS, LENGTH, WIDTH))


class Experts(nn.Module):
    """The best two of four experts for each token, and how evenly they are used (Shazeer et al.; Fedus et al.)."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([mlp(WIDTH, WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        shares = self.route(x).softmax(-1)
        weights, chosen = shares.topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + (weights * (chosen == number)).sum(-1, keepdim=True) * expert(x)
        used = F.one_hot(chosen, 4).float().mean((0, 1, 2))
        return out, 4 * (used * shares.mean((0, 1))).sum()


class Noting(Experts):
    """Experts that keep their auxiliary loss until it is taken, so that they fit where one tensor is expected."""

    aux = None

    def forward(self, x):
        out, self.aux = super().forward(x)
        return out

    def take(self):
        aux, self.aux = self.aux, None
        return aux


class MoE(nn.Module):
    """Token mixing through experts that return their auxiliary loss, or keep it."""

    def __init__(self, keep):
        super().__init__()
        self.embed, self.head = Embedded(), nn.Linear(WIDTH, VOCABULARY)
        if keep:
            self.layers = nn.ModuleList([Layer(causal=True, feed=Noting()) for _ in range(2)])
        else:
            self.layers = nn.ModuleList([Experts(), Experts()])
        self.keep = keep

    def forward(self, ids):
        x, aux = self.embed(ids), []
        for layer in self.layers:
            if self.keep:
                x = layer(x)
                aux.append(layer.feed.take())
            else:
                out, loss = layer(x)
                x = x + out
                aux.append(loss)
        return self.head(x), torch.stack(aux).sum()


def balanced(keep):
    ids = torch.randint(VOCABULARY, (8, LENGTH))
    near = classes(8, LENGTH, count=VOCABULARY)
    return Case(MoE(keep), (ids,), lambda output: near(output[0]) + 0.01 * output[1])


@architecture("experts")
def moe_returned_auxiliary():
    return balanced(keep=False)


@architecture("experts")
def moe_stored_auxiliary():
    return balanced(keep=True)


class Switch(nn.Module):
    """One expert for each token; tokens are gathered for it and its results added back (Fedus et al.)."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList([mlp(WIDTH, WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        shares = self.route(x).softmax(-1)
        best, chosen = shares.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            made = best[rows, None] * expert(x[rows])
            out = out.index_add(0, rows, made.to(out.dtype))
        return x + out


@architecture("experts")
def switch():
    return Case(nn.Sequential(Switch(), nn.LayerNorm(WIDTH), Switch()), (torch.randn(96, WIDTH),), target(96, WIDTH))


class Recurrent(nn.Module):
    def __init__(self, cell, out):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(VOCABULARY, WIDTH), cell, nn.Linear(out, VOCABULARY)

    def forward(self, ids):
        return self.head(self.cell(self.embed(ids))[0])


@architecture("recurrent")
def lstm():
    return predicted(Recurrent(nn.LSTM(WIDTH, 12, 2, bidirectional=True, batch_first=True), 24))


@architecture("recurrent")
def gru():
    return predicted(Recurrent(nn.GRU(WIDTH, 12, 2, batch_first=True), 12))


@architecture("recurrent")
def rnn():
    return predicted(Recurrent(nn.RNN(WIDTH, 12, batch_first=True), 12))


class Steps(nn.Module):
    """A cell called once per step, its past cut off every few steps."""

    def __init__(self, cell, cut=None):
        super().__init__()
        self.cell, self.cut = cell, cut

    def forward(self, x):
        state, out = None, []
        for step, now in enumerate(x.unbind(1)):
            if self.cut and step % self.cut == 0 and step:
                state = state.detach()
            state = self.cell(now, state)
            out.append(state[0] if isinstance(state, tuple) else state)
        return (torch.stack(out, 1),)


@architecture("recurrent")
def lstm_cell():
    model = Recurrent(Steps(nn.LSTMCell(WIDTH, 12)), 12)
    return Case(model, (tokens(5),), classes(ROWS, 5, count=VOCABULARY))


@architecture("recurrent")
def truncated():
    return predicted(Recurrent(Steps(nn.GRUCell(WIDTH, 12), cut=4), 12))


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 1, 1)
        self.gated = nn.ModuleList([nn.Conv1d(8, 16, 2, dilation=2**level) for level in range(3)])
        self.onward, self.skip = (nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(n)]) for n in (2, 3))

    def forward(self, x):
        x, total = self.first(x), 0
        for level, layer in enumerate(self.gated):
            value, gate = layer(F.pad(x, (2**level, 0))).chunk(2, 1)
            held = value.tanh() * gate.sigmoid()
            total = total + self.skip[level](held)
            if level < 2:
                x = x + self.onward[level](held)
        return self.last(F.silu(total))


@architecture("dilated")
def wavenet():
    return Case(WaveNet(), (torch.randn(ROWS, 1, 24),), target(ROWS, 1, 24))


class Scan(nn.Module):
    """h[t] = a[t] h[t-1] + b[t], by cumulative products and sums or step by step."""

    def __init__(self, loop):
        super().__init__()
        self.loop, self.decay, self.into = loop, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a, b = 0.5 + 0.5 * self.decay(x).sigmoid(), self.into(x)
        if not self.loop:
            product = a.cumprod(1)
            return x + product * (b / product).cumsum(1)
        state, out = torch.zeros_like(b[:, 0]), []
        for step in range(x.shape[1]):
            state = torch.addcmul(b[:, step], a[:, step], state)
            out.append(state)
        return x + torch.stack(out, 1)


@architecture("state space")
def state_space():
    model = nn.Sequential(Scan(loop=False), nn.LayerNorm(WIDTH), Scan(loop=True))
    return Case(model, (vectors(),), target(ROWS, LENGTH, WIDTH))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")
        self.head = mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, ids, offsets, weights):
        total = F.embedding_bag(ids, self.bags.weight, offsets, mode="sum", per_sample_weights=weights)
        return self.head(self.bags(ids, offsets) + total)


@architecture("embedding")
def embedding_bag():
    ids = torch.randint(VOCABULARY, (11,))
    return Case(Bags(), (ids, torch.tensor([0, 3, 7]), torch.rand(11)), classes(3))
