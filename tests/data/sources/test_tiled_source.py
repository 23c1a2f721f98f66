"""Images of a source that come to the LLM as pictures of tiles: how many tokens each has, and where they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data_sources import TOKENIZER, encoded, opened, pixels

from mmjax.data.packing import Packer
from mmjax.data.sample import disagreement
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.mixture import Mixture
from mmjax.data.types import EncoderSpec, Tiled

SPEC = EncoderSpec(patch=4, channels=3, newline=True, most_tiles=3, buckets=((4, 160),))
GRIDS = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (3, 3))
IMAGES = (((50, 83),), (), ((20, 31), (44, 9)), ((39, 12),), ((60, 58),))
TOKENS = (61, 0, 34, 76, 58)
"""Of these images in the golden of transformers, see ``tests/oracles/make_onevision.py``."""


@pytest.fixture
def source(tmp_path: Path) -> Mixture:
    rows = []
    for number, sizes in enumerate(IMAGES):
        names = [f"{number}_{at}.png" for at in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            (tmp_path / name).write_bytes(encoded(pixels(*size, number)))
        rows.append({"images": names, "question": "<image>" * len(sizes) + "what?", "answer": str(number)})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = SourceConfig(
        path=str(tmp_path / "data.jsonl"), resize="anyres", size=(17, 17), grids=GRIDS, alone=True, max_patches=0
    )
    return opened(tmp_path, config, split="test", encoders={"vision": SPEC})


def test_tokens_are_those_of_transformers(source: Mixture) -> None:
    """An image has tiles where it is its dialogue's only one; metadata agree with what is opened."""
    for number, (sizes, count) in enumerate(zip(IMAGES, TOKENS, strict=True)):
        sample, meta = source.sample(number), source.meta(number)
        assert int(sample.placeholders("vision").sum()) == count
        assert disagreement(sample, meta, ["vision"], {"vision": SPEC}) == ""
        tiled = sample.tiled["vision"]
        assert tuple(image.size for image in tiled) == sizes
        assert all((image.grid == (0, 0)) == (len(sizes) > 1) for image in tiled)
        assert len(sample.media.get("vision", ())) == sum(1 + image.grid[0] * image.grid[1] for image in tiled)
    assert source.sample(0).tiled["vision"] == (Tiled(size=(50, 83), grid=(2, 3)),)


def test_they_are_packed(source: Mixture) -> None:
    packer = Packer(encoders={"vision": SPEC}, sequence_length=128, microbatches=1, cells=1, pad=TOKENIZER.pad)
    rows = packer.microbatch([source.sample(number) for number in range(len(IMAGES))], 5).inputs["llm"]
    np.testing.assert_allclose(rows["vision_shares"].sum(axis=(1, 2)), TOKENS, rtol=1e-6)


def test_an_image_that_breaks_keeps_its_tokens(source: Mixture, tmp_path: Path) -> None:
    path = tmp_path / "0_0.png"
    path.write_bytes(path.read_bytes()[:60])
    sample = source.sample(0)
    assert sample.broken and not sample.loss_weights.any() and not sample.media["vision"][0].any()
    assert disagreement(sample, source.meta(0), ["vision"], {"vision": SPEC}) == ""
    (tmp_path / "data.jsonl").write_text("")
    blank = source.sample(2)
    assert blank.broken and int(blank.placeholders("vision").sum()) == TOKENS[2]
