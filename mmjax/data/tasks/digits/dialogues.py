"""Dialogues about handwritten digits, with images of uneven sizes and formats: samples for every layout of data."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from mmjax.data.sources.record import IMAGE
from mmjax.data.sources.writers import Dialogue
from mmjax.data.tasks.digits.source import ORDINALS, load_digits, split_range

_HOW_MANY = (0.15, 0.55, 0.2, 0.1)
"""Shares of dialogues about 0, 1, 2 and 3 images."""
_SUFFIXES = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}


def digit_dialogues(samples: int, seed: int) -> list[Dialogue]:
    """`samples` dialogues that read rows of digits, or ask for a sum if they have no image.

    A `Dialogue` has `turns`, such as (("<image>\\nread it", "407"),), and `images`, a (suffix, bytes) pair for each,
    such as ("png", …). A pure function of its arguments.
    """
    return [_dialogue(np.random.default_rng([seed, number])) for number in range(samples)]


def _dialogue(rng: np.random.Generator) -> Dialogue:
    count = int(rng.choice(len(_HOW_MANY), p=_HOW_MANY))
    if not count:
        first, second = (int(n) for n in rng.integers(0, 10, 2))
        return Dialogue(turns=((f"what is {first} + {second}?", str(first + second)),))
    rows = [_row(rng) for _ in range(count)]
    together = count > 1 and bool(rng.integers(2))
    turns = []
    for number, (label, _) in enumerate(rows):
        # All images in the first question, or each in a separate one.
        marks = IMAGE * count if together and not number else "" if together else IMAGE
        question = f"read the {ORDINALS[number]} image" if together else "read it"
        turns.append((f"{marks}\n{question}" if marks else question, label))
    return Dialogue(turns=tuple(turns), images=tuple(image for _, image in rows))


def _row(rng: np.random.Generator) -> tuple[str, tuple[str, bytes]]:
    """The digits of a random row as text, and its image: format and bytes."""
    pixels, labels = load_digits()
    chosen = rng.integers(*split_range("train"), size=int(rng.integers(1, 5)))
    strip = pixels[chosen].transpose(1, 0, 2).reshape(pixels.shape[1], -1)
    scale, stretch = rng.uniform(1.0, 3.0), rng.uniform(0.8, 1.25)
    size = max(1, round(strip.shape[1] * scale * stretch)), max(1, round(strip.shape[0] * scale))
    image = Image.fromarray((strip * 255).astype(np.uint8)).resize(size, Image.Resampling.BILINEAR).convert("RGB")
    suffix = ("png", "jpg", "webp")[int(rng.integers(3))]
    file = io.BytesIO()
    image.save(file, _SUFFIXES[suffix], **({} if suffix == "png" else {"quality": 90}))
    return "".join(str(labels[i]) for i in chosen), (suffix, file.getvalue())
