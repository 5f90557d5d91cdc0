"""What quantizers and blocks do: thresholds of the findings on records made by hand."""

import pytest
import torch

from .records import BRAIN, SINGLE, severity, tensor


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "FakeQuantize"}, "error"),
        ({"asked_format": "e4m3fn"}, None),
        ({"dtype": torch.float8_e4m3fn}, "error"),
        ({"kind": "ReLU"}, None),
        ({"kind": "FakeQuantize", "amax": 0.1}, None),
        ({"kind": "FakeQuantize", "input_amax": 0.0}, None),
        ({"kind": "FakeQuantize", "input_amax": None}, None),
        ({"kind": "FakeQuantize", "elements": 0}, None),
    ],
)
def test_quantized_to_zero(fields, expected):
    record = tensor(**{"amax": 0.0, "histogram": {}, "input_amax": 3.0, "dtype": SINGLE, **fields})
    assert severity("quantized-to-zero", record) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"block_hidden": 500}, "error"),
        ({"block_hidden": 250}, "warning"),
        ({"block_hidden": 249}, None),
        ({"block_hidden": 60, "histogram": {0: 63}}, None),
        ({"block_hidden": None}, None),
    ],
)
def test_block_hidden(fields, expected):
    record = tensor("weight", **{"asked_format": "mxfp4", "histogram": {0: 1000}, **fields})
    assert severity("block-hidden", record) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"largest": 400}, "error"),
        ({"largest": 60}, "warning"),
        ({"largest": 8}, None),
        ({"largest": 14, "elements": 32}, None),
        ({"largest": 400, "dtype": BRAIN}, None),
        ({"largest": 0, "elements": 0}, None),
        # A user's own format, which is known to nobody by its name.
        ({"dtype": SINGLE, "asked_format": "mine", "sampled": 1000}, None),
        ({"dtype": SINGLE, "asked_format": "mine", "sampled": 1000, "asked_overflow": 400}, "error"),
    ],
)
def test_payload_saturated(fields, expected):
    assert severity("payload-saturated", tensor(**{"dtype": torch.float8_e4m3fn, **fields})) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"quantization_error": 0.6}, "warning"),
        ({"quantization_error": 0.57}, None),
        ({"quantization_error": None}, None),
        ({"quantization_error": 0.0, "rms": 0.0}, None),
        ({"quantization_error": 0.6, "asked_format": None}, None),
        ({"quantization_error": float("nan")}, None),
    ],
)
def test_gradient_below_noise(fields, expected):
    given = {"asked_format": "nvfp4", **fields}
    assert severity("gradient-below-noise", tensor("activation gradient", **given)) == expected
    assert severity("gradient-below-noise", tensor("activation", **given)) is None
