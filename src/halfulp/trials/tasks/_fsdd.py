"""Task fsdd: which digit was spoken, by convolutions and a recurrent layer."""

import io
import wave
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._files import TaskWithDataFiles, decode_file_content, read_parquet
from ._task import Batch, Data, compute_task_warm_cosine_factor
from ._text import LSTM

SAMPLE_RATE_HZ, WINDOW_SAMPLES, HOP_SAMPLES, FRAME_COUNT, MEL_BAND_COUNT = 8000, 256, 80, 64, 32


class SpokenDigits(TaskWithDataFiles):
    """Recordings of six people, 0.64 seconds each, as spectra on the scale of hearing; needs ``data``.

    It stands where "Revisiting BFloat16 Training" (arXiv 2010.06192) has DeepSpeech2 on LibriSpeech: convolutions over
    the spectrogram, then a recurrent layer.
    """

    name: ClassVar[str] = "fsdd"
    title: ClassVar[str] = "convolutional-recurrent network on spoken digits"
    rule: ClassVar[str] = "AdamW"
    hyper: ClassVar[dict[str, Any]] = {"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
    steps: ClassVar[int] = 500
    batch: ClassVar[int] = 32
    target: ClassVar[str] = "recording"
    lr_factor = compute_task_warm_cosine_factor
    folder: ClassVar[str] = "fsdd"
    files: ClassVar[tuple[str, ...]] = ("train.parquet", "test.parquet")
    how: ClassVar[str] = (
        "They are the recordings of the Free Spoken Digit Dataset, "
        "https://github.com/Jakobovski/free-spoken-digit-dataset "
        "(test: numbers 0 to 4 of each speaker and digit), as Parquet with columns audio.bytes (WAV) and label"
    )

    def load(self) -> Data:
        """Load logarithms of spectra, normalized by the training part."""
        (train, labels), (validation, others) = (
            _read_spectra_and_labels(f"{self.data}/{name}.parquet") for name in ("train", "test")
        )
        mean, deviation = train.mean(), train.std()
        note = f"Free Spoken Digits: {len(train):,} recordings to train on, {len(validation):,} to validate"
        parts = ((part - mean) / deviation for part in (train, validation))
        return Data(train=(next(parts), labels), validation=(next(parts), others), note=note)

    def model(self, data: Data, seed: int) -> nn.Module:
        """Build two convolutions of 16 and 32 channels and a recurrent layer of 64."""
        torch.manual_seed(seed)
        return SpokenDigitNetwork()


class SpokenDigitNetwork(nn.Module):
    """A convolutional-recurrent network from spectra (batch, 1, FRAME_COUNT, MEL_BAND_COUNT) to logits (batch, 10)."""

    def __init__(self, channels: int = 16, width: int = 64):
        super().__init__()
        twice = 2 * channels
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(1, channels, 3, 2, 1), nn.GroupNorm(4, channels), nn.ReLU()),
            *(nn.Conv2d(channels, twice, 3, 2, 1), nn.GroupNorm(4, twice), nn.ReLU()),
        )
        self.recurrent = LSTM(twice * MEL_BAND_COUNT // 4, width)
        self.head = nn.Linear(width, 10)

    def forward(self, spectra: Tensor) -> Tensor:
        """Return the logits of log spectra."""
        found = self.convolutions(spectra).transpose(1, 2).flatten(2)
        return self.head(self.recurrent(found).mean(1))


def _read_spectra_and_labels(path: str) -> Batch:
    """Read the spectra (n, 1, FRAME_COUNT, MEL_BAND_COUNT) and labels of a file."""
    recordings, labels = read_parquet(path, ["audio", "label"])
    samples = [
        decode_file_content(f"row {row} of {path}", _decode_wav, recording) for row, recording in enumerate(recordings)
    ]
    return _compute_log_spectra(torch.stack(samples)), torch.tensor(labels, dtype=torch.int64, device="cpu")


def _decode_wav(recording: dict[str, bytes]) -> Tensor:
    """Return the first samples of a WAV file of 16 bits in [-1, 1], with zeros behind."""
    with wave.open(io.BytesIO(recording["bytes"])) as file:
        if (file.getframerate(), file.getsampwidth(), file.getnchannels()) != (SAMPLE_RATE_HZ, 2, 1):
            raise ValueError(f"{SAMPLE_RATE_HZ} samples of 16 bits a second on one channel are read")
        heard = torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16)
    whole = torch.zeros(FRAME_COUNT * HOP_SAMPLES, dtype=torch.float32, device="cpu")
    whole[: len(heard)] = heard[: len(whole)] / 2**15
    return whole


def _compute_log_spectra(samples: Tensor) -> Tensor:
    """Return logarithms of energies (n, 1, FRAME_COUNT, MEL_BAND_COUNT) of samples (n, FRAME_COUNT * HOP_SAMPLES)."""
    window = torch.hann_window(WINDOW_SAMPLES, dtype=torch.float32, device="cpu")
    found = torch.stft(samples, WINDOW_SAMPLES, HOP_SAMPLES, window=window, return_complex=True)
    energies = found.abs().square()[:, :, :FRAME_COUNT].transpose(1, 2)
    return (energies @ _make_mel_filters() + 1e-6).log().unsqueeze(1)


def _make_mel_filters() -> Tensor:
    """Return triangular filters on O'Shaughnessy's mel scale, 2595 log10(1 + f / 700): (frequencies, bands)."""
    top = 2595 * torch.log10(torch.tensor(1 + SAMPLE_RATE_HZ / 2 / 700, dtype=torch.float64, device="cpu"))
    mels = torch.linspace(0, 1, MEL_BAND_COUNT + 2, dtype=torch.float64, device="cpu") * top
    edges = 700 * (10 ** (mels / 2595) - 1)
    bins = torch.linspace(0, SAMPLE_RATE_HZ / 2, 1 + WINDOW_SAMPLES // 2, dtype=torch.float64, device="cpu")[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0).float()
