"""Draws docs/img/observe-map.svg: `python docs/observe_picture.py`, with playwright and a chromium on the path.

A small transformer trains in bfloat16 under `hu.observe`; its page opens in Chromium without a window, and the map of
its activations' gradients is saved as the page's own button saves it, in the colours of light and dark at once.
"""

from __future__ import annotations

import pydoc_data.topics
import shutil
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from torch import nn

import halfulp as hu

TARGET = Path(__file__).resolve().parent / "img" / "observe-map.svg"
WIDTH, STEPS, CONTEXT = 1000, 100, 64


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with what attention and the feed-forward layer add."""
        query, key, value = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Three blocks between an embedding and a head."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of the next character."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def observed() -> hu.observation.Observation:
    """Train in bfloat16 and return what was seen."""
    torch.manual_seed(0)
    text = "".join(pydoc_data.topics.topics.values())[:200_000]
    codes = torch.tensor([min(max(ord(letter) - 32, 0), 95) for letter in text])
    model = Transformer().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    with hu.observe(model, optimizer, interval=20) as seen:
        for _ in range(STEPS):
            starts = torch.randint(0, len(codes) - CONTEXT - 1, (8,)).tolist()
            batch = torch.stack([codes[start : start + CONTEXT + 1] for start in starts])
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return seen


def drawn(page: Path, scheme: str) -> str:
    """The map as the page saves it in a colour scheme."""
    with sync_playwright() as play:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
        tab.goto(page.as_uri())
        tab.locator(".segments input[value='activation gradient']").check()
        tab.locator("[name=format]").select_option(label="if this were fp16")
        tab.locator("[name=order]").select_option("model")
        tab.mouse.move(0, 0)
        with tab.expect_download() as waiting:
            tab.locator("#map .save").click()
        text = waiting.value.path().read_text(encoding="utf-8")
        browser.close()
    return text


def main() -> None:
    """Train, draw in light and dark, and write one file that follows the reader."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "observe.html"
        observed().to_html(page)
        light, dark = (drawn(page, scheme) for scheme in ("light", "dark"))
    start, end = (dark.index("<style>") + len("<style>"), dark.index("</style>"))
    TARGET.write_text(
        light.replace("</style>", f"@media(prefers-color-scheme:dark){{{dark[start:end]}}}</style>", 1) + "\n",
        encoding="utf-8",
    )
    print(f"{TARGET}: {TARGET.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
