"""Writes a small dataset of dialogues about handwritten digits in every layout that `Source.kind` reads.

    python -m mmjax.data.sample_data --out=data/digits        # or: make sample-data

Images of uneven sizes and formats, dialogues about none, one or several of them. The same samples are written as
`llava/data.json` with images, `webdataset/*.tar`, `data.array_record` and `data.parquet`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mmjax.configurable import ConfigError, require
from mmjax.data.digits import ORDINALS, load_digits, split_range
from mmjax.data.sources.record import IMAGE
from mmjax.data.sources.writers import (
    Dialogue,
    write_array_record,
    write_llava,
    write_parquet,
    write_webdataset,
)
from mmjax.flags import Flag, one_line_errors, parse_flags, run_plain

USAGE = "python -m mmjax.data.sample_data"
FLAGS = (
    Flag(name="out", doc="folder that is written to; made if missing.", default="data/digits"),
    Flag(name="samples", doc="how many dialogues.", default=400),
    Flag(name="seed", doc="of the dialogues.", default=0),
)
_HOW_MANY = (0.15, 0.55, 0.2, 0.1)
"""Shares of dialogues about 0, 1, 2 and 3 images."""
_SUFFIXES = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}


def digit_dialogues(samples: int, seed: int) -> list[Dialogue]:
    """Dialogues that read rows of digits, or ask for a sum if they have no image. A pure function of its arguments."""
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
        # All images in the first question, or each in its own.
        marks = IMAGE * count if together and not number else "" if together else IMAGE
        asked = f"read the {ORDINALS[number]} image" if together else "read it"
        turns.append((f"{marks}\n{asked}" if marks else asked, label))
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


def write_all(folder: Path, dialogues: Sequence[Dialogue], per_shard: int = 100) -> dict[str, Path]:
    """Writes every layout into `folder`; returns the value for `Source.path`, by `Source.kind`."""
    return {
        "llava": write_llava(folder / "llava", dialogues),
        "webdataset": write_webdataset(folder / "webdataset", dialogues, per_shard),
        "array_record": write_array_record(folder / "data.array_record", dialogues),
        "parquet": write_parquet(folder / "data.parquet", dialogues),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the data; returns the exit status."""
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, USAGE).values
        out, samples, seed = str(flags["out"]), int(flags["samples"]), int(flags["seed"])
        require(samples > 0, "--samples", samples, "must be above 0, such as 400")
        require(seed >= 0, "--seed", seed, "must be 0 or more, such as 0")
        try:
            paths = write_all(Path(out), digit_dialogues(samples, seed))
        except OSError as error:
            cause = error.strerror or type(error).__name__
            raise ConfigError(f"--out={out!r}: cannot be written ({cause}); name another, such as 'digits'") from None
        for kind, path in paths.items():
            print(f"{kind:<13} {path}")
    return 0


if __name__ == "__main__":
    run_plain(main)
