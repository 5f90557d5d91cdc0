"""A long short-term memory, operator by operator, so that every format and tensor reaches inside."""

import torch
from torch import Tensor, nn


class LSTM(nn.Module):
    """A recurrent layer from (batch, time, inputs) to (batch, time, width) (Hochreiter and Schmidhuber, 1997).

    It starts from a state of zeros. torch's own runs as one operator, which no emulation can look into.
    """

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.width = width
        self.of_input = nn.Linear(inputs, 4 * width)
        self.of_state = nn.Linear(width, 4 * width, bias=False)
        with torch.no_grad():  # the forget gate starts open
            self.of_input.bias[width : 2 * width] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the states of every step for x, (batch, time, inputs)."""
        gates, *rest = self.of_input(x).unbind(1)
        into, _, out = gates[:, : 3 * self.width].sigmoid().chunk(3, -1)
        memory = into * gates[:, 3 * self.width :].tanh()
        states = [out * memory.tanh()]
        for given in rest:
            gates = given + self.of_state(states[-1])
            into, forget, out = gates[:, : 3 * self.width].sigmoid().chunk(3, -1)
            memory = forget * memory + into * gates[:, 3 * self.width :].tanh()
            states.append(out * memory.tanh())
        return torch.stack(states, 1)


class CharacterLSTM(nn.Module):
    """A recurrent network from token ids (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int, width: int = 128):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width // 2)
        self.recurrent = LSTM(width // 2, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (batch, time)."""
        return self.head(self.recurrent(self.tokens(ids)))
