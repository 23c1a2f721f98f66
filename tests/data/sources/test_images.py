"""Images: what is planned from the header is what is made, and what is made is the picture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from data_sources import VISION, encoded, pixels
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from mmjax.configurable import ConfigError
from mmjax.data.sources.config import MOST_PIXELS, SourceConfig
from mmjax.data.sources.images import Pictures
from mmjax.data.sources.storage import Unusable
from mmjax.data.types import EncoderSpec

PLAIN = SourceConfig(max_patches=0)


def pictures(spec=VISION, **changes) -> Pictures:
    return Pictures("own", replace(PLAIN, **changes), spec)


def smooth(height: int, width: int) -> np.ndarray:
    """A picture without edges, so that resizing in another way changes little."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return np.stack([255 * y, 255 * x, 127 * (y + x)], -1).astype(np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "WEBP"])
def test_images_are_upright(orientation, suffix):
    image = Image.fromarray(smooth(24, 40))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, suffix, exif=exif.tobytes(), **({} if suffix == "PNG" else {"quality": 98}))
    (made,) = pictures().media(data)
    wanted = image.copy()
    wanted.getexif()[0x0112] = orientation
    upright = np.asarray(ImageOps.exif_transpose(wanted), np.float32) / 255
    assert pictures().sizes(data) == [made.shape[:2]] == [upright.shape[:2]]
    assert np.abs(made - upright).max() < 0.05


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16"])
def test_any_mode_becomes_the_encoders_channels(mode):
    image = Image.fromarray(smooth(16, 16)).convert(mode if mode != "I;16" else "L").convert(mode)
    data = encoded(image, "JPEG" if mode == "CMYK" else "PNG")
    assert pictures().media(data)[0].shape == (16, 16, 3)
    gray = pictures(replace(VISION, channels=1)).media(data)[0]
    assert gray.shape == (16, 16, 1) and 0 <= gray.min() <= gray.max() <= 1


@given(height=st.integers(1, 300), width=st.integers(1, 300), budget=st.integers(4, 200), anyres=st.booleans())
@settings(max_examples=60, deadline=None)
def test_plans_are_kept_and_within_the_budget(height, width, budget, anyres):
    made = pictures(resize="anyres", size=(16, 24)) if anyres else pictures(max_patches=budget)
    data = encoded(np.zeros((height, width, 3), np.uint8))
    media, sizes = made.media(data), made.sizes(data)
    assert [medium.shape for medium in media] == [(*size, 3) for size in sizes]
    assert all(side % VISION.block == 0 for size in sizes for side in size)
    assert anyres or VISION.patches(*sizes[0]) <= budget


RULES = {
    "smart": {"resize": "smart", "min_pixels": 256, "max_pixels": 4096},
    "naflex": {"resize": "naflex", "max_patches": 40},
    "square": {"resize": "fixed", "fit": "square", "size": (16, 24)},
    "edge": {"resize": "fixed", "fit": "crop", "size": (16, 24), "edge": 18},
    "alone": {"resize": "anyres", "size": (16, 24), "alone": True},
}


@given(rule=st.sampled_from(sorted(RULES)), height=st.integers(1, 90), width=st.integers(1, 90), alone=st.booleans())
@settings(max_examples=60, deadline=None)
def test_plans_of_folders_rules_are_kept(rule, height, width, alone):
    made, data = pictures(**RULES[rule]), encoded(pixels(height, width))
    media, found = made.media(data, alone=alone), made.measure(data, alone=alone)
    assert [medium.shape for medium in media] == [(*size, 3) for size in found.media]
    assert found.original == (height, width) and all(side % VISION.block == 0 for size in found.media for side in size)
    ((rows, columns), *tiles) = found.media
    assert bool(tiles) == (rule == "alone" and alone)
    if rule == "smart":
        assert rows * columns >= 256 and (rows * columns <= 4096 or min(rows, columns) == VISION.block)
    if rule == "naflex":
        assert VISION.patches(rows, columns) <= 40


def test_an_image_that_is_too_long_is_left_out():
    with pytest.raises(Unusable, match="201x1 pixels: one side is more than 200 times the other"):
        pictures(**RULES["smart"]).sizes(encoded(pixels(1, 201)))


def test_a_budget_keeps_the_aspect_and_uses_most_of_itself():
    (size,) = pictures(max_patches=96).sizes(encoded(pixels(400, 600)))
    assert size == (32, 48)  # 8 x 12 patches: exactly two to three
    image = smooth(400, 600)
    (made,) = pictures(max_patches=96).media(encoded(image))
    small = Image.fromarray(image).resize((48, 32), Image.Resampling.BICUBIC)
    assert np.abs(made - np.asarray(small, np.float32) / 255).max() < 0.01


def test_large_jpegs_are_decoded_small_and_look_the_same():
    image = smooth(800, 1200)
    made = [pictures(max_patches=96).media(encoded(image, suffix, quality=95))[0] for suffix in ("JPEG", "PNG")]
    assert made[0].shape == made[1].shape and np.abs(made[0] - made[1]).max() < 0.03


def test_fixed_resolution():
    data = encoded(np.full((20, 40, 3), 255, np.uint8))
    padded, cropped, stretched = (
        pictures(resize="fixed", size=(32, 32), fit=fit, mean=(0.5,) * 3, std=(0.5,) * 3).media(data)[0]
        for fit in ("pad", "crop", "stretch")
    )
    assert (padded[8:24] == 1).all() and not padded[:8].any() and not padded[24:].any()
    assert (cropped == 1).all() and (stretched == 1).all() and cropped.shape == stretched.shape == (32, 32, 3)
    # What is cropped is the middle.
    half = np.zeros((20, 40, 3), np.uint8)
    half[:, :10] = half[:, 30:] = 255
    assert pictures(resize="fixed", size=(32, 32), fit="crop").media(encoded(half))[0][:, 4:28].max() < 0.1


def test_what_no_patch_covers_is_cut_off():
    """SigLIP has 27 patches of 14 pixels in 384: a convolution's stride leaves the last six out."""
    spec = EncoderSpec(patch=6, channels=3)
    image = smooth(32, 32)
    own = pictures(spec, resize="fixed", size=(32, 32))
    (found,) = own.media(encoded(image))
    assert own.sizes(encoded(image)) == [(30, 30)]
    assert np.array_equal(found, np.float32(image[:30, :30]) / 255)
    tiled = pictures(spec, resize="anyres", size=(32, 32), grids=((1, 2),))
    assert [one.shape[:2] for one in tiled.media(encoded(image))] == tiled.sizes(encoded(image)) == [(30, 30)] * 3


def test_tiles_are_the_image_cut_up():
    image = smooth(64, 128)
    whole, *tiles = pictures(resize="anyres", size=(32, 32), grids=((1, 2), (2, 4), (2, 2))).media(encoded(image))
    assert whole.shape == (32, 32, 3) and len(tiles) == 8  # two rows of four keep every pixel
    rows = [np.concatenate(tiles[:4], 1), np.concatenate(tiles[4:], 1)]
    assert np.array_equal(np.concatenate(rows, 0), np.float32(image) / 255)
    # An image that does not fill its grid is in the middle of it.
    left, right = pictures(resize="anyres", size=(32, 32), grids=((1, 2),)).media(encoded(smooth(32, 32) // 2 + 99))[1:]
    assert not left[:, :16].any() and left[:, 16:].min() > 0.3 and right[:, :16].min() > 0.3 and not right[:, 16:].any()


def test_normalised_like_clip():
    config = replace(PLAIN, **SourceConfig.presets["clip"])  # type: ignore[arg-type]
    image = pixels(8, 8)
    (made,) = Pictures("own", config, VISION).media(encoded(image))
    wanted = (image / 255 - np.array([0.48145466, 0.4578275, 0.40821073])) / np.array(
        [0.26862954, 0.26130258, 0.27577711]
    )
    assert np.abs(made - wanted).max() < 1e-5


def test_bombs_are_not_decoded():
    small = pictures(pixel_limit=100)
    with pytest.raises(Unusable, match=r"11x10 pixels; Source\.pixel_limit is 100"):
        small.media(encoded(pixels(10, 11)))
    with pytest.raises(Unusable, match="11x10 pixels"):
        small.sizes(encoded(pixels(10, 11)))
    with pytest.raises(ConfigError, match="pixel_limit"):
        SourceConfig(pixel_limit=MOST_PIXELS + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": (0.5,), "std": (0.5,)}, r"own/Source\.mean=\(0\.5,\): the encoder takes 3 channels"),
        ({"resize": "fixed", "size": (30, 32)}, r"own/Source\.size=\(30, 32\): .* such as \(32, 32\)"),
        ({"max_patches": 3}, r"own/Source\.max_patches=3: must be 4 or more"),
    ],
)
def test_settings_that_do_not_fit_the_encoder(changes, message):
    with pytest.raises(ConfigError, match=message):
        pictures(**changes)
