"""AnyRes tiling as in LLaVA-NeXT, in a file of one's own: every image becomes a small view of the whole, and tiles.

    cd examples/anyres
    python -m mmjax.sample_data --out=data
    python -m mmjax.check --gin_file=anyres.gin --allow_code
    python -m mmjax.train --gin_file=anyres.gin --allow_code

Two parts. `Tiled`, a reader of one's own, cuts the images of a dialogue before anything else sees them: the encoder
gets views of one size, packed like any other images, and the text has a placeholder for each, a row of tiles on a line
of its own. `number_views`, a callback before the LLM's first layer, marks the tokens of each view with its number.

(`Source.resize = 'anyres'` cuts images so without a line of code, but without new lines and marks.)

Shapes: B rows, T tokens in a row, D width.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from PIL import Image, ImageOps

from mmjax import Entry, Media, Record, SourceConfig, Unusable, reads
from mmjax.data.sources.llava import LlavaReader

if TYPE_CHECKING:
    from jax import Array

    from mmjax import Context

MARK = "<image>"
TOKENS = 4
"""Tokens of a view: `Source.size` over patch * merge of the encoder, squared."""


# ---- the data: one image becomes several -----------------------------------------------------------------------------


class Tiled:
    """LLaVA's layout of data (`Source.path`), images cut into views of `Source.size` by one of `Source.grids`."""

    def __init__(self, config: SourceConfig):
        self.config, self._whole = config, LlavaReader(config)

    def files(self) -> Sequence[str]:
        return self._whole.files()

    def scan(self) -> Iterator[Entry]:
        return self._whole.scan()

    def read(self, place: tuple[int, ...]) -> Record:
        record = self._whole.read(place)
        cut = [self._views(image) for image in record.images]
        if sum(turn.text.count(MARK) for turn in record.dialogue) != len(cut):
            raise Unusable(f"{len(cut)} images: each needs its {MARK} in the text")
        marks = iter([text for text, _ in cut])
        turns = tuple(replace(turn, text=_filled(turn.text, marks)) for turn in record.dialogue)
        return replace(record, turns=turns, images=tuple(view for _, views in cut for view in views))

    def _views(self, image: Media) -> tuple[str, list[Media]]:
        """The text that stands for an image, and its views: the whole, then tiles row by row."""
        height, width = self.config.size
        with Image.open(io.BytesIO(image.read(self.config.byte_limit))) as opened:
            whole = opened.convert("RGB")
        rows, columns = best_grid((whole.height, whole.width), (height, width), self.config.grids)
        canvas = ImageOps.pad(whole, (columns * width, rows * height))  # keeps the aspect, the rest is black
        corners = [(column * width, row * height) for row in range(rows) for column in range(columns)]
        tiles = [canvas.crop((left, top, left + width, top + height)) for left, top in corners]
        views = enumerate([whole.resize((width, height)), *tiles])
        named = [Media(name=f"{image.name}, view {number}", data=_png(view)) for number, view in views]
        return "\n".join([MARK, *[MARK * columns] * rows]) + "\n", named


def best_grid(size: tuple[int, int], tile: tuple[int, int], grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Rows and columns of the grid that keeps most of an image's pixels and, of those, wastes least."""

    def kept(grid: tuple[int, int]) -> tuple[float, float]:
        whole = grid[0] * tile[0], grid[1] * tile[1]
        scale = min(whole[0] / size[0], whole[1] / size[1], 1.0)
        return scale * scale * size[0] * size[1], -whole[0] * whole[1]

    return max(grids, key=kept)


def _filled(text: str, marks: Iterator[str]) -> str:
    """The text with each placeholder replaced by the next of `marks`."""
    first, *others = text.split(MARK)
    return first + "".join(next(marks) + other for other in others)


def _png(view: Image.Image) -> bytes:
    file = io.BytesIO()
    view.save(file, "PNG")
    return file.getvalue()


# ---- the model: tokens know their view -------------------------------------------------------------------------------


@reads("vision_index", "positions")
def number_views(context: Context, x_BTD: Array) -> Array:
    """Adds to the tokens of images a sinusoidal code of their view's number in the dialogue, 0 for the first whole."""
    import jax.numpy as jnp  # here, since the processes that read data import this file and have no JAX
    from jax import lax

    seen_BT = context.inputs["vision_index"] >= 0  # the index itself is another under every layout
    upto_BT = jnp.cumsum(seen_BT, axis=1)
    # A row may hold several dialogues: what comes before a dialogue's first token is not its own.
    others_BT = lax.cummax(jnp.where(context.tokens.positions == 0, upto_BT - seen_BT, 0), axis=1)
    view_BT = (upto_BT - others_BT - 1) // TOKENS
    rates_F = 10.0 ** -jnp.linspace(0, 3, x_BTD.shape[-1] // 2)
    angles_BTF = view_BT[..., None] * rates_F
    code_BTD = jnp.concatenate([jnp.sin(angles_BTF), jnp.cos(angles_BTF)], axis=-1)
    return x_BTD + jnp.where(seen_BT[..., None], code_BTD, 0).astype(x_BTD.dtype)
