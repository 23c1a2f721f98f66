"""Cuts media into patches for encoders and generators, and puts them together again.

Legend: N patches of one medium, E numbers in a patch, A axes of a medium.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from mmjax.data.types import ENCODED, EncoderSpec, Sample

BEGIN, END, FIRST_CODE = 0, 1, 2
"""Codes before the first one of a sequence, and behind its last one; and the first that stands for something."""


def patchify(medium: np.ndarray, spec: EncoderSpec) -> tuple[np.ndarray, np.ndarray]:
    """Patches [N, E] float32 of a medium, and the place of each patch along every axis [N, A] int32.

    The patches of a block (merge patches along every axis) are consecutive. Blocks, patches inside a block and pixels
    inside a patch are row-major, channels last; E is `spec.patch_values`, such as 14 * 14 * 3. Places count patches
    from 0: (row, column) of an image. A patch of several frames has all pixels of the first one in front; an image is
    repeated for all of them. Raises ValueError if a side is no multiple of patch * merge, or if the axes or channels
    are not the encoder's.

    medium: an image [h, w, C], a temporal patch [h, w, frames * C] or a recording [F, M] for the encoder or generator
    of `spec`.
    """
    *size, channels = medium.shape
    if len(size) != spec.axes or channels not in (spec.channels, spec.frames * spec.channels):
        raise ValueError(f"{spec.medium} of shape {medium.shape}: {spec.axes} axes of {spec.channels} channels wanted")
    if any(side % spec.block for side in size):
        shown = "x".join(map(str, size))
        fix = f"pad it to multiples of patch * merge * multiple = {spec.block}"
        raise ValueError(f"{spec.medium} of {shown} {spec.unit}: {fix}")
    k, p, every = spec.merge, spec.patch, range(spec.axes)
    blocks = [side // (k * p) for side in size]
    # From (block, patch, pixel) of every axis to all blocks, then all patches, then all pixels.
    frames = channels // spec.channels
    cut = medium.reshape(*(n for block in blocks for n in (block, k, p)), frames, spec.channels)
    order = [3 * axis + level for level in range(3) for axis in every]
    order.insert(2 * spec.axes, 3 * spec.axes)  # frames come before pixels
    cut = cut.transpose(*order, 3 * spec.axes + 1).reshape(prod(blocks) * spec.patches_per_token, -1)
    patches_NE = np.ascontiguousarray(cut if frames == spec.frames else np.tile(cut, (1, spec.frames)), np.float32)
    return patches_NE, patch_places(spec.grid(*size), spec)


def unpatchify(patches_NE: np.ndarray, grid: Sequence[int], spec: EncoderSpec) -> np.ndarray:
    """The medium, channels last, that `patchify` cuts into these patches: [h, w, C] for an image, or [F, M].

    grid: number of patches along every axis, multiples of merge: (16, 16), or (50,) for a recording.
    """
    k, p, every = spec.merge, spec.patch, range(spec.axes)
    blocks = [side // k for side in grid]
    cut = patches_NE.reshape(*blocks, *[k] * spec.axes, *[p] * spec.axes, spec.channels)
    order = [spec.axes * level + axis for axis in every for level in range(3)]
    return cut.transpose(*order, 3 * spec.axes).reshape(*(side * p for side in grid), spec.channels)


def patch_places(grid: Sequence[int], spec: EncoderSpec) -> np.ndarray:
    """The place of each patch along every axis [N, A] int32, counted from 0: (row, column) of an image's patches.

    They are in the order of `patchify`: the merge x merge patches of a block are consecutive.

    grid: number of patches along every axis, multiples of merge: (16, 16), or (50,) for a recording.
    """
    k, every = spec.merge, range(spec.axes)
    places = np.indices(grid, np.int32).reshape(spec.axes, *(n for side in grid for n in (side // k, k)))
    order = [1 + 2 * axis + level for level in range(2) for axis in every]
    return np.ascontiguousarray(places.transpose(*order, 0).reshape(-1, spec.axes))


def canvas_places(grid: Sequence[int], canvas: Sequence[int]) -> np.ndarray:
    """The place of each patch of a picture on a canvas, int32 [N], both row by row.

    The picture is in the upper left corner: [0, 1, 4, 5] for a grid of (2, 2) on a canvas of (3, 4).
    """
    rows, columns = np.indices(tuple(grid), np.int32)
    return (rows * canvas[1] + columns).ravel()


def patch_shapes(spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
    """The shape for one patch of each input that is made from media, by name: {"patches": (E,)} for an encoder.

    E is `spec.patch_values`. A generator also has "targets" (E,), "times" () and "weights" (), of recordings (P,), one
    for each frame of a patch. One of codes has
    "tokens", "targets" and "weights" alone, all (), of which the first two are int32 (see `input_dtype`). One whose
    latents are encoded in the step has "latent_noise" (E,) and "latent_shares" (2,) too, see `patch_inputs`.
    """
    if spec.codes:
        return {"tokens": (), "targets": (), "weights": ()}
    values = (spec.patch_values,)
    latents: dict[str, tuple[int, ...]] = {"latent_noise": values, "latent_shares": (2,)}
    drawn: dict[str, tuple[int, ...]] = {
        "targets": values,
        "times": (),
        "weights": (spec.patch,) if spec.sounds else (),
    }
    drawn |= latents if spec.latents == ENCODED else {}
    return {"patches": values} | (drawn if spec.drawn else {})


def input_dtype(name: str, spec: EncoderSpec) -> type[np.generic]:
    """The dtype of an input: np.int32 for "tokens" and "targets" of a generator of codes, else np.float32.

    name: a key of `patch_shapes(spec)`, such as "patches".
    """
    return np.int32 if spec.codes and name != "weights" else np.float32


def code_inputs(codes_N1: np.ndarray, spec: EncoderSpec) -> dict[str, np.ndarray]:
    """The inputs of codes: "tokens" and "targets" int32 [N], and "weights" float32 [N], all 1.

    Each code is a target, predicted from those before it: tokens are the targets one place later, after a 0.

    codes_N1: int32 [N, 1], as `Sample.media` has them. Raises ValueError if a code is not among the `spec.codes`.
    """
    codes_N = codes_N1[:, 0]
    if len(codes_N) and not 0 <= codes_N.min() <= codes_N.max() < spec.codes:
        raise ValueError(f"codes {codes_N.min()} to {codes_N.max()} for a generator of {spec.codes}; use 0 to less")
    before_N = np.append(np.int32(BEGIN), codes_N[:-1])
    return {"tokens": before_N, "targets": codes_N, "weights": np.ones(len(codes_N), np.float32)}


def reference_patches(sample: Sample, name: str, number: int, spec: EncoderSpec) -> np.ndarray:
    """Patches [N, E] float32 of the pictures that medium `number` of generator `name` is made from, one behind another.

    They are 0 where latents are encoded in the step. spec: of `name`; it has `references`.
    """
    pictures = sample.references[name][number] if name in sample.references else ()
    none = np.zeros((0, spec.patch_values), np.float32)
    patches_NE = np.concatenate([none, *(patchify(picture, spec)[0] for picture in pictures)])
    return np.zeros_like(patches_NE) if spec.encoder else patches_NE


def picture_places(places: np.ndarray, spec: EncoderSpec) -> np.ndarray:
    """Places int32 [N, P**2], one for each pixel of a latent, in the order of its patches and of pixels in a patch.

    places: int [h, w] of the latent's pixels, such as places of a canvas below 2**24. spec: of the generator.
    """
    return patchify(places[..., None].astype(np.float32), replace(spec, channels=1))[0].astype(np.int32)


def patch_inputs(sample: Sample, name: str, number: int, spec: EncoderSpec) -> dict[str, np.ndarray]:
    """The inputs made of medium `number` (from 0) of encoder or generator `name`, by name: {"patches": [N, E]}.

    A generator has the "patches", "targets", "times" [N] and "weights" [N] of its noise process; those of a flow are
    (1 - t) x + t noise, noise - x, t and 1; of recordings "weights" [N, P] are 0 behind the end. If the sample has no
    noise for it, all are 0, also the weights. Where latents are encoded in the step, the medium is the noise with which
    they will be drawn, "latent_noise" [N, E]; "patches" and "targets" are those of a medium of zeros, to which the
    latent is to be added, times "latent_shares" [N, 2]. All are float32. One of codes has the inputs of `code_inputs`.

    spec: of `name`.
    """
    medium = sample.media[name][number]
    if spec.codes:
        return code_inputs(medium, spec)
    if not spec.drawn:
        return {"patches": patchify(medium, spec)[0]}
    weights = np.ones(spec.grid(*medium.shape[:-1]), np.float32).ravel()
    if spec.sounds:
        weights = _whole(np.ones((len(medium), 1), np.float32), spec).reshape(-1, spec.patch)
    patches_NE = patchify(_whole(medium, spec), spec)[0]
    if name not in sample.noise:
        return {key: np.zeros((len(patches_NE), *shape), np.float32) for key, shape in patch_shapes(spec).items()}
    noise_NE, time = patchify(_whole(sample.noise[name][number], spec), spec)[0], sample.times[name][number]
    process, x_NE, encoded = spec.process, patches_NE, dict[str, np.ndarray]()
    if spec.latents == ENCODED:
        x_NE, shares = np.zeros_like(patches_NE), np.array(process.medium_shares(time), np.float32)
        encoded = {"latent_noise": patches_NE, "latent_shares": np.tile(shares, (len(patches_NE), 1))}
    return {
        **encoded,
        "patches": process.mixture(x_NE, noise_NE, time),
        "targets": process.target(x_NE, noise_NE, time),
        "times": np.full(len(patches_NE), time, np.float32),
        "weights": process.weight(time) * weights,
    }


def _whole(medium: np.ndarray, spec: EncoderSpec) -> np.ndarray:
    """The medium; a recording to be made [F, M] with zeros behind its end, up to whole LLM tokens."""
    behind = spec.padded(len(medium)) - len(medium)
    return np.pad(medium, ((0, behind), (0, 0))) if behind else medium
