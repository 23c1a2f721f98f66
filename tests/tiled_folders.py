"""Runs that start from tiny folders whose images have tiles, and sequences of their oracles as samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trial_runs import write_tiny

from mmjax.config import load_config
from mmjax.data.types import Sample, Tiled
from mmjax.models.pretrained import find_pretrained
from mmjax.recipe import Recipe
from mmjax.weights.folder import read_config
from mmjax.weights.table import expand, match

IMAGE, SEQUENCES, COVERED = 263, 5, 16
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one device": ("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0"),
    "tp, pp and split backward": (
        *("llm/Layout.tp=2", "llm/Layout.pp=2", "Train.schedule='zb-h1'"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.pp=2", "vision/Layout.rank_offset=4"),
    ),
    "cp": ("llm/Layout.tp=1", "llm/Layout.cp=6", "vision/Layout.rank_offset=6"),
    "dp, unrolled": (
        *("llm/Layout.tp=1", "llm/Layout.dp=3", "Train.unroll=True"),
        *("vision/Layout.dp=3", "vision/Layout.rank_offset=3"),
    ),
}


@dataclass(frozen=True)
class TiledFolder:
    """A folder of ``oracles``, and the settings of a run beside it.

    ``values`` are its ``values.npz``, with the tokens, pixels, sizes and grids of sequences by their number.
    """

    path: Path
    settings: tuple[str, ...]

    def configured(self, folder: Path, *settings: str) -> Recipe:
        """A run that starts from the folder."""
        path = write_tiny(folder)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(
            "".join(line for line in lines if not line.startswith(("vision/ViT", "llm/Decoder", "Packing")))
        )
        return load_config([path], [f"Model.weights={str(self.path)!r}", *self.settings, *settings])

    def images(self, values: Mapping[str, np.ndarray], number: int) -> tuple[Tiled, ...]:
        """How a sequence's images are cut."""
        sizes, grids = values[f"sizes_{number}"].tolist(), values[f"grids_{number}"].tolist()
        return tuple(Tiled(size=tuple(size), grid=tuple(grid)) for size, grid in zip(sizes, grids, strict=True))

    def sample(self, values: Mapping[str, np.ndarray], number: int, placeholder: int) -> Sample:
        """A sequence; a token counts unless it is an image's. The tower sees the pixels that whole patches cover."""
        tokens = values[f"tokens_{number}"].astype(np.int32)
        is_image = tokens == IMAGE
        pixels = values[f"pixels_{number}"].astype(np.float32)
        media = np.ascontiguousarray(pixels.reshape(-1, *pixels.shape[2:])[:, :COVERED, :COVERED])
        about: Any = {"question": "", "answer": "", "prompt": 0, "media_tokens": {"vision": placeholder}}
        return Sample(
            tokens=np.where(is_image, placeholder, tokens).astype(np.int32),
            loss_weights=(~is_image).astype(np.float32),
            media={"vision": tuple(media)},
            tiled={"vision": self.images(values, number)},
            **about,
        )

    def samples(self, values: Mapping[str, np.ndarray], placeholder: int) -> list[Sample]:
        """All sequences."""
        return [self.sample(values, number, placeholder) for number in range(SEQUENCES)]

    def leaves_of(
        self, recipe: Recipe, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Any]:
        """Torch's gradients by the names of our leaves, through the tables."""
        found = {}
        for module in {name.partition("/")[0] for name in shapes}:
            part: Any = recipe.model.parts[module]
            table = find_pretrained(part.family, read_config(str(self.path))).rows(part.settings)
            matches = match(expand(table, getattr(part.settings, "layers", 0)), tensors)
            assert not matches.missing
            for leaf, (key, view) in matches.places.items():
                shape = shapes[f"{module}/{leaf}"]
                found[f"{module}/{leaf}"] = view.read(tensors[key], shape, tuple(slice(0, n) for n in shape))
        return found
