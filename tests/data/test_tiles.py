"""Places of images in tiles: against pictures that are put together as arrays, and in packed rows."""

from __future__ import annotations

from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.data.packing import Packer
from mmjax.data.tiles import NEWLINE, arrange, token_count
from mmjax.data.types import EncoderSpec, Sample, Tiled
from mmjax.reference.tiles import in_rows

SIZES = ((50, 83), (39, 12), (60, 60), (300, 9))
GRIDS = ((1, 1), (2, 3), (3, 3), (1, 6))


@pytest.mark.long
@pytest.mark.parametrize(("tile", "most"), [((4, 4), 0), ((3, 5), 2)])
def test_places_are_those_of_the_picture(tile: tuple[int, int], most: int) -> None:
    spec, rng, resized = EncoderSpec(patch=7, newline=True, most_tiles=most), np.random.default_rng(0), 0
    for size, grid in ((size, grid) for size in SIZES for grid in GRIDS):
        tiled, media = Tiled(size=size, grid=grid), [tile] * (1 + prod(grid))
        tokens = rng.normal(size=(len(media), prod(tile), 2)).astype(np.float32)
        newline = np.asarray([7.0, -7.0], np.float32)
        try:
            places = arrange(spec, media, [tiled])
        except ValueError as error:
            assert "is too long to be resized" in str(error) and most
            continue
        wanted = np.asarray(in_rows(list(jnp.asarray(tokens)), tile, grid, size, jnp.asarray(newline), most))
        flat = np.concatenate([tokens.reshape(-1, 2), newline[None]])  # the last row stands for the newline
        got = (flat[np.where(places.index == NEWLINE, -1, places.index)] * places.shares[..., None]).sum(axis=1)
        np.testing.assert_allclose(got, wanted, atol=2e-6)
        pixels = [tuple(side * 7 for side in tile)] * len(media)
        assert token_count(spec, pixels, tiled) == len(wanted)
        resized += bool((places.shares[:, 1:] > 0).any())
    assert bool(resized) == bool(most)


def test_images_follow_each_other_and_whole_ones_end_with_a_newline() -> None:
    spec = EncoderSpec(patch=1, merge=2, newline=True)
    images = [Tiled(size=(3, 3)), Tiled(size=(1, 4), grid=(1, 2)), Tiled(size=(9, 9))]
    index = arrange(spec, [(2, 4)] * 5, images).index[:, 0].tolist()
    assert index == [0, 1, NEWLINE, 2, 3, 4, 5, 6, 7, NEWLINE, 8, 9, NEWLINE]


@pytest.mark.parametrize(("media", "grid"), [(1, (1, 2)), (4, (1, 2)), (2, (0, 0))])
def test_other_media_than_tiles_are_an_error(media: int, grid: tuple[int, int]) -> None:
    spec = EncoderSpec(patch=1, newline=True)
    with pytest.raises(ValueError, match="media"):
        arrange(spec, [(2, 2)] * media, [Tiled(size=(5, 5), grid=grid)])


def packed(spec: EncoderSpec, *, cells: int) -> tuple[list[Sample], dict[str, np.ndarray]]:
    """Three samples of no image, one in tiles, and two; the place of each pixel in an encoder's row is its token's."""
    fields: Any = {"question": "", "answer": "", "prompt": 0, "media_tokens": {"vision": 9}}
    samples = []
    for images in ((), (Tiled(size=(2, 5), grid=(1, 3)),), (Tiled(size=(1, 1)), Tiled(size=(1, 1)))):
        media = sum(1 + prod(tiled.grid) for tiled in images)
        count = len(arrange(spec, [(2, 2)] * media, images).index)
        tokens = np.asarray([1, *[9] * count, 2], np.int32)
        pixels = tuple(np.full((2, 2, 1), len(samples), np.float32) for _ in range(media))
        weights = np.ones(len(tokens), np.float32)
        values: Any = {"tokens": tokens, "loss_weights": weights, "media": {"vision": pixels}, **fields}
        samples.append(Sample(**values, tiled={"vision": images}))
    packer = Packer(encoders={"vision": spec}, sequence_length=24, microbatches=1, cells=cells, pad=0)
    microbatch = packer.microbatch(samples, 4)
    return samples, {**microbatch.inputs["llm"], "patches": microbatch.inputs["vision"]["patches"]}


@pytest.mark.parametrize("cells", [1, 2])
def test_rows_read_their_own_tokens(cells: int) -> None:
    """Each place of a row reads tokens of the row's own sample, within the row's cell."""
    spec = EncoderSpec(patch=1, newline=True, buckets=((3, 10),))
    samples, rows = packed(spec, cells=cells)
    index, patches = rows["vision_index"], rows["patches"].reshape(cells, -1)
    assert index.shape == rows["tokens"].shape and "vision_shares" not in rows
    for row, sample in enumerate(samples):
        places = index[row][rows["tokens"][row] == 9]
        assert (places == NEWLINE).sum() == {0: 0, 1: 2, 2: 2}[row] and not (index[row] >= 0)[
            rows["tokens"][row] != 9
        ].any()
        assert (patches[row * cells // 4][places[places >= 0]] == row).all() and len(places) == len(sample.tokens) - 2


def test_rows_of_resized_pictures_have_four_tokens_and_their_shares() -> None:
    _, rows = packed(EncoderSpec(patch=1, newline=True, most_tiles=1, buckets=((3, 10),)), cells=1)
    index, shares = rows["vision_index"], rows["vision_shares"]
    assert index.shape == shares.shape == (*rows["tokens"].shape, 4) and shares.dtype == np.float32
    is_image = rows["tokens"] == 9
    np.testing.assert_allclose(shares.sum(axis=-1), is_image, atol=1e-6)
    assert (index[~is_image] == -1).all() and ((shares[1] > 0) & (shares[1] < 1)).any()
