"""The layers of networks on text."""

import torch

from halfulp.trials.tasks._sst2 import SentenceClassifier
from halfulp.trials.tasks._text import LSTM


def test_the_recurrent_layer_computes_what_torchs_does(seed: int) -> None:
    ours, theirs, x = LSTM(3, 5), torch.nn.LSTM(3, 5, batch_first=True), torch.randn(2, 7, 3)
    pairs = [
        (theirs.weight_ih_l0, ours.of_input.weight),
        (theirs.bias_ih_l0, ours.of_input.bias),
        (theirs.weight_hh_l0, ours.of_state.weight),
        (theirs.bias_hh_l0, torch.zeros(20)),
    ]
    with torch.no_grad():
        for parameter, value in pairs:
            into, forget, out, candidate = value.chunk(4)
            parameter.copy_(torch.cat([into, forget, candidate, out]))
    torch.testing.assert_close(ours(x), theirs(x)[0])


def test_a_sentence_is_classified_by_its_words_and_not_by_its_padding(seed: int) -> None:
    model, ids = SentenceClassifier(9, width=8, time=6, outputs=2), torch.tensor([[1, 5, 7, 0, 0, 0]])
    logits = model(ids)
    assert not torch.equal(model(torch.tensor([[1, 5, 8, 0, 0, 0]])), logits)
    with torch.no_grad():
        model.tokens.weight[0] += torch.randn(8)
    assert torch.equal(model(ids), logits)
