"""Writes pictures with captions from an npm package of emoji, split by concept, and prompts for those held out.

npm pack emoji-datasource-google@16.0.0
python from_npm.py --package=emoji-datasource-google-16.0.0.tgz
python -m mmjax.train_autoencoder --pictures=data/train --out=vae --size=32,32 --widths=16,32,64 --layers=1 \
    --latent_channels=4 --steps=1200 --batch=24 --learning_rate=2e-3 --schedule=cosine --warmup=50 --flip=True
python -m mmjax.latents --vae=vae/last --pictures=data/train --out=latents --size=32,32 --batch=32
python -m mmjax.train --gin_file=emoji.gin --run_dir=run
python -m mmjax.generate --run_dir=run --messages=data/prompts.jsonl --out=made-0 --seed=0    # and seeds 1 and 2
python judge.py --made made-0 made-1 made-2

The pictures are Google's Noto emoji (Apache 2.0), names and categories those of the package (MIT). A concept and its
skin tones are on the same side of the split: no held-out picture differs from a training picture by colour alone.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

FOLDER = "package/img/google/64/"
UNUSED = "Component"  # pictures of skin tones and hair alone
TONES = {
    "1F3FB": "light", "1F3FC": "medium-light", "1F3FD": "medium", "1F3FE": "medium-dark", "1F3FF": "dark",
}  # fmt: skip
"""Names of skin tones by their code points."""
HELD_OUT = 10  # every tenth concept, in an order drawn from a seed


class Emoji(NamedTuple):
    """A picture of the package.

    Attributes:
      concept: its number among the concepts; all skin tones of a concept have one.
      file: its name.
      category: its category, such as "Animals & Nature".
      caption: its caption, such as "animals & nature: tiger face".
    """

    concept: int
    file: str
    category: str
    caption: str


def emoji_of(entries: list[Mapping[str, Any]]) -> Iterator[Emoji]:
    """All pictures of the package, in its order."""
    for concept, entry in enumerate(entries):
        category, name = entry["category"], entry["name"].lower()
        if category == UNUSED:
            continue
        yield Emoji(concept, entry["image"], category, f"{category.lower()}: {name}")
        for tones, variation in entry.get("skin_variations", {}).items():
            tone = " and ".join(TONES[tone] for tone in tones.split("-"))
            yield Emoji(concept, variation["image"], category, f"{category.lower()}: {name}, {tone} skin")


def held_out_concepts(emoji: list[Emoji]) -> set[int]:
    """The numbers of the concepts that are held out."""
    concepts = sorted({each.concept for each in emoji})
    shuffled = np.random.default_rng(0).permutation(concepts)
    return set(shuffled[: len(concepts) // HELD_OUT].tolist())


def write(package: Path, out: Path) -> None:
    """Writes the folders ``train`` and ``test`` of pictures with ``captions.jsonl``, and ``prompts.jsonl``."""
    with tarfile.open(package) as archive:
        files = {member.name: member for member in archive if member.name.startswith((FOLDER, "package/emoji.json"))}

        def read(name: str) -> bytes:
            opened = archive.extractfile(files[name])
            assert opened
            return opened.read()

        emoji = [each for each in emoji_of(json.loads(read("package/emoji.json"))) if FOLDER + each.file in files]
        held_out, captions = held_out_concepts(emoji), dict[str, list[dict[str, str]]]()
        for each in emoji:
            side = "test" if each.concept in held_out else "train"
            (out / side).mkdir(parents=True, exist_ok=True)
            picture = Image.open(io.BytesIO(read(FOLDER + each.file))).convert("RGBA")
            on_white = Image.new("RGBA", picture.size, "white")
            on_white.alpha_composite(picture)
            on_white.convert("RGB").save(out / side / each.file)
            record = {"file_name": each.file, "text": each.caption, "category": each.category}
            captions.setdefault(side, []).append(record)
    for side, records in captions.items():
        _write_lines(out / side / "captions.jsonl", records)
        print(f"{out / side}: {len(records)} pictures")
    prompts = [[{"role": "user", "content": record["text"]}, _ASKED] for record in captions["test"]]
    _write_lines(out / "prompts.jsonl", [{"messages": messages} for messages in prompts])


_ASKED = {"role": "assistant", "content": [{"type": "image", "generate": True}]}


def _write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="the file that npm pack has written")
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder of the pictures")
    arguments = parser.parse_args()
    write(arguments.package, arguments.out)


if __name__ == "__main__":
    main()
