"""Images: what is planned from the header is what is made, and what is made is the picture."""

from __future__ import annotations

import io
import zlib
from dataclasses import replace

import numpy as np
import pytest
from data_sources import VISION, encoded, pixels
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, features

from mmjax.configurable import ConfigError
from mmjax.data.sources import resizing
from mmjax.data.sources.config import MOST_PIXELS, SourceConfig
from mmjax.data.sources.images import Pictures
from mmjax.data.sources.record import Media
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
    (medium,) = pictures().media(data)
    wanted = image.copy()
    wanted.getexif()[0x0112] = orientation
    upright = np.asarray(ImageOps.exif_transpose(wanted), np.float32) / 255
    assert pictures().sizes(data) == [medium.shape[:2]] == [upright.shape[:2]]
    assert np.abs(medium - upright).max() < 0.05


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
    maker = pictures(resize="anyres", size=(16, 24)) if anyres else pictures(max_patches=budget)
    data = encoded(np.zeros((height, width, 3), np.uint8))
    media, sizes = maker.media(data), maker.sizes(data)
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
    maker, data = pictures(**RULES[rule]), encoded(pixels(height, width))
    media, measure = maker.media(data, alone=alone), maker.measure(data, alone=alone)
    assert [medium.shape for medium in media] == [(*size, 3) for size in measure.media]
    assert measure.original == (height, width) and all(
        side % VISION.block == 0 for size in measure.media for side in size
    )
    ((rows, columns), *tiles) = measure.media
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
    (medium,) = pictures(max_patches=96).media(encoded(image))
    small = Image.fromarray(image).resize((48, 32), Image.Resampling.BICUBIC)
    assert np.abs(medium - np.asarray(small, np.float32) / 255).max() < 0.01


def test_large_jpegs_are_decoded_small_and_look_the_same():
    image = smooth(800, 1200)
    media = [pictures(max_patches=96).media(encoded(image, suffix, quality=95))[0] for suffix in ("JPEG", "PNG")]
    assert media[0].shape == media[1].shape and np.abs(media[0] - media[1]).max() < 0.03


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
    maker = pictures(spec, resize="fixed", size=(32, 32))
    (medium,) = maker.media(encoded(image))
    assert maker.sizes(encoded(image)) == [(30, 30)]
    assert np.array_equal(medium, np.float32(image[:30, :30]) / 255)
    tiled = pictures(spec, resize="anyres", size=(32, 32), grids=((1, 2),))
    assert [medium.shape[:2] for medium in tiled.media(encoded(image))] == tiled.sizes(encoded(image)) == [(30, 30)] * 3


def test_tiles_are_the_image_cut_up():
    image = smooth(64, 128)
    overview, *tiles = pictures(resize="anyres", size=(32, 32), grids=((1, 2), (2, 4), (2, 2))).media(encoded(image))
    assert overview.shape == (32, 32, 3) and len(tiles) == 8  # two rows of four keep every pixel
    rows = [np.concatenate(tiles[:4], 1), np.concatenate(tiles[4:], 1)]
    assert np.array_equal(np.concatenate(rows, 0), np.float32(image) / 255)
    # An image that does not fill its grid is in the middle of it.
    left, right = pictures(resize="anyres", size=(32, 32), grids=((1, 2),)).media(encoded(smooth(32, 32) // 2 + 99))[1:]
    assert not left[:, :16].any() and left[:, 16:].min() > 0.3 and right[:, :16].min() > 0.3 and not right[:, 16:].any()


def test_normalised_like_clip():
    config = replace(PLAIN, **SourceConfig.presets["clip"])  # type: ignore[arg-type]
    image = pixels(8, 8)
    (medium,) = Pictures("own", config, VISION).media(encoded(image))
    wanted = (image / 255 - np.array([0.48145466, 0.4578275, 0.40821073])) / np.array(
        [0.26862954, 0.26130258, 0.27577711]
    )
    assert np.abs(medium - wanted).max() < 1e-5


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


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


def exif_of(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def orientation_chunks(orientation: int) -> dict[str, bytes]:
    """Chunks of a PNG that say how it is turned."""
    exif = exif_of(orientation)
    profile = f"\nexif\n{len(exif):8}\n{exif.hex()}\n".encode()
    xmp = f'<rdf:Description tiff:Orientation="{orientation}"/>'.encode()
    key, packed = b"Raw profile type exif\0", b"\0" + zlib.compress(profile)
    return {
        "exif": chunk(b"eXIf", exif.removeprefix(b"Exif\0\0")),
        "raw profile": chunk(b"tEXt", key + profile),
        "packed profile": chunk(b"zTXt", key + packed),
        "xmp": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
        "packed xmp": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp)),
    }


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("kind", list(orientation_chunks(1)))
def test_a_png_is_upright_wherever_it_says_so(kind, behind, tmp_path):
    """As Pillow's exif_transpose has it; the header alone is decoded to know its size, and the end of the file."""
    image, maker = smooth(40, 64), pictures()
    plain = encoded(image, compress_level=0)
    for orientation in (3, 6):
        at = -12 if behind else 33  # before IEND, or behind IHDR
        data = plain[:at] + orientation_chunks(orientation)[kind] + plain[at:]
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert turned is not None and (turned.size == (40, 64)) == (orientation == 6)
        (medium,) = maker.media(data)
        assert np.array_equal(medium, np.asarray(turned, np.float32) / 255)
        assert maker.measure(data).original == medium.shape[:2]
        assert maker.measure(data[:200], tail=data[-9000:]).original == medium.shape[:2]
    long = encoded(pixels(150, 160), compress_level=0)  # more than is read of its start
    (tmp_path / "long.png").write_bytes(long[:at] + orientation_chunks(8)[kind] + long[at:])
    media = Media(name="long", path=str(tmp_path / "long.png"))
    assert maker.measure_file(media, alone=True).original == (160, 150)


def test_damaged_orientations_turn_nothing():
    plain, image = encoded(smooth(8, 16)), smooth(8, 16)
    exif = orientation_chunks(6)["exif"]
    texts = [
        exif[:-1] + b"\0",
        chunk(b"eXIf", b"II*\0\xff\xff\xff\xff"),
        chunk(b"tEXt", b"Raw profile type exif\0\n\n\nzz"),
    ]
    for text in texts:
        (medium,) = pictures().media(plain[:-12] + text + plain[-12:])
        assert np.array_equal(medium, np.float32(image) / 255)


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_tiff_is_upright(orientation, compression):
    image = smooth(24, 40)
    options = {"compression": compression} if compression else {}
    data = encoded(image, "TIFF", tiffinfo={0x0112: orientation}, **options)
    (medium,) = pictures().media(data)
    turned = np.rot90(image, {1: 0, 3: 2, 6: 3}[orientation])
    assert np.array_equal(medium, np.float32(turned) / 255)
    assert pictures().measure(data).original == turned.shape[:2] == medium.shape[:2]


@pytest.mark.skipif(not features.check("avif"), reason="Pillow was built without AVIF")
def test_avif():
    image = smooth(24, 40)
    data = encoded(image, "AVIF", quality=100, subsampling="4:4:4", exif=exif_of(6))
    (medium,) = pictures().media(data)
    assert medium.shape == (40, 24, 3) and pictures().sizes(data) == [(40, 24)]
    assert np.abs(medium - np.float32(np.rot90(image, 3)) / 255).max() < 0.03


@pytest.mark.parametrize("suffix", ["PNG", "TIFF"])
def test_grey_of_sixteen_bits_is_no_white(suffix):
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    (medium,) = pictures().media(encoded(grey, suffix))
    assert np.array_equal(medium, np.repeat((grey >> 8).astype(np.float32)[..., None], 3, 2) / 255)
    (channel,) = pictures(replace(VISION, channels=1)).media(encoded(grey, suffix))
    assert np.array_equal(channel, (grey >> 8).astype(np.float32)[..., None] / 255)


def test_grey_of_other_depths():
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    big, inverted = Image.fromarray(grey.astype(">u2")), encoded(grey, "TIFF", tiffinfo={262: 0})
    (medium,) = pictures(replace(VISION, channels=1)).media(encoded(big, "TIFF"))
    assert np.array_equal(medium, (grey >> 8).astype(np.float32)[..., None] / 255)
    if Image.open(io.BytesIO(inverted)).tag_v2[262] == 0:  # type: ignore[attr-defined]
        (medium,) = pictures(replace(VISION, channels=1)).media(inverted)
        assert np.array_equal(medium, (255 - (grey >> 8)).astype(np.float32)[..., None] / 255)
    for kind, described in ((np.int32, "whole"), (np.float32, "floating-point")):
        with pytest.raises(Unusable, match=f"grey in {described} numbers of 32 bits has no white"):
            pictures().media(encoded(grey.astype(kind), "TIFF"))


THIN = {
    "crop": {"resize": "fixed", "fit": "crop", "size": (336, 336), "edge": 336},
    "square": {"resize": "fixed", "fit": "square", "size": (336, 336), "edge": 336},
    "stretch": {"resize": "fixed", "fit": "stretch", "size": (336, 336)},
    "pad": {"resize": "fixed", "fit": "pad", "size": (336, 336)},
    "anyres": {"resize": "anyres", "size": (336, 336), "mean": (0.5,) * 3, "std": (0.5,) * 3},
    "naflex": {"resize": "naflex", "max_patches": 256},
    "smart": {"resize": "smart", "min_pixels": 3136, "max_pixels": 1003520},
    "budget": {"resize": "budget"},
}


@pytest.mark.long
@pytest.mark.parametrize("rule", list(THIN))
def test_thin_images_take_little(rule, monkeypatch):
    """Under every rule: no picture on the way is large, whichever side is long, or the image is left out by name."""
    maker, resize, most = pictures(**THIN[rule]), Image.Image.resize, [0]

    def watched(image, size, *args):
        most.append(max(size[0] * size[1], size[0] * image.height, image.width * size[1]))
        return resize(image, size, *args)

    monkeypatch.setattr(Image.Image, "resize", watched)
    for size in ((2, 2000), (2000, 2), (1, 100_000), (400_000, 1)):
        with Image.new("L", size, 77) as image:
            data = encoded(image)
        try:
            medium = maker.media(data)[0]
            assert len({*medium[medium.shape[0] // 2, medium.shape[1] // 2]}) == 1 and max(most) <= resizing.MOST
        except Unusable as reason:
            expected = (
                "one side is more than 200" if rule == "smart" else "too thin for Source.resize='fixed': resizing"
            )
            assert expected in str(reason) and (
                rule == "smart" or (rule == "crop" and max(size) >= 100_000) or max(size) > 2e5
            )
            with pytest.raises(Unusable):
                maker.measure(data)


@pytest.mark.parametrize("square", [None, (9, 99, 200)])
def test_parts_of_resized_images_are_those_of_the_whole(square, monkeypatch):
    """In bands too, to the rounding between the two sides."""
    for height, width in ((7, 90), (90, 7), (40, 40), (41, 30)):
        for size in ((30, 50), (300, 8), (8, 300), (64, 64)):
            for colours, near in ((pixels(height, width), 0), (smooth(height, width) // 2 + 60, 2)):
                image = Image.fromarray(colours)
                part = (size[0] // 4, size[1] // 8, size[0] // 2, size[1] // 2)
                around = Image.new("RGB", (max(image.size), max(image.size)), square) if square else image
                if square:
                    around.paste(image, ((around.width - width) // 2, (around.height - height) // 2))
                resized = np.asarray(around.resize((size[1], size[0]), Image.Resampling.BICUBIC), int)
                wanted = resized[part[0] : part[0] + part[2], part[1] : part[1] + part[3]]
                with monkeypatch.context() as small:
                    if near:
                        small.setattr(resizing, "MOST", 1)
                        small.setattr(resizing, "_AT_ONCE", 99)
                    resized_part = resizing.resize_part(image, size, Image.Resampling.BICUBIC, part, square=square)
                assert np.abs(np.asarray(resized_part, int) - wanted).max() <= near
