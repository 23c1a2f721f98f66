"""Encoders and their projectors: one medium at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mmjax.models.graph import MultimodalModel
from mmjax.models.vit.config import ViTConfig
from mmjax.models.whisper.config import WhisperConfig
from mmjax.reference.alone import encode_alone, row_of
from mmjax.reference.arithmetic import (
    Arrays,
    Leaves,
    Turn,
    activate,
    affine,
    attend,
    dense_leaves,
    feed_forward,
    layer_norm,
    matmul,
    module_of,
    project,
    turn_2d,
)
from mmjax.reference.callbacks import NO_CALLS, Calls
from mmjax.reference.positions import cut_patches, patch_positions


def _encoder_layer(
    leaves: Arrays, prefix: str, encoder: ViTConfig | WhisperConfig, x_TD: jax.Array, turn: Turn
) -> jax.Array:
    normed = layer_norm(leaves, f"{prefix}/attn_norm", x_TD)
    x_TD = x_TD + attend(leaves, f"{prefix}/attn", encoder, normed, turn)
    normed = layer_norm(leaves, f"{prefix}/mlp_norm", x_TD)
    return x_TD + feed_forward(leaves, f"{prefix}/mlp", encoder.activation, normed)


def encoder_layers(
    leaves: Arrays,
    name: str,
    encoder: ViTConfig | WhisperConfig,
    x_TD: jax.Array,
    turn: Turn = lambda y_THK: y_THK,
) -> tuple[jax.Array, list[jax.Array]]:
    """The last norm's output, and the outputs of all layers; `turn` rotates queries and keys."""
    outputs = []
    for layer in range(encoder.layers):
        x_TD = _encoder_layer(leaves, f"{name}/layers/{layer:03d}", encoder, x_TD, turn)
        outputs.append(x_TD)
    return layer_norm(leaves, f"{name}/norm", x_TD), outputs


def _tokens(
    leaves: Arrays, name: str, x_TD: jax.Array, merge: int, calls: Calls, outputs: Sequence[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    """Modality tokens, and for each of `outputs` the features of the patches that make a token, side by side."""
    tokens = calls("projected", project(leaves, f"{name}_projector", calls("after", x_TD), merge))
    return tokens, [output.reshape(output.shape[0] // merge, -1) for output in outputs]


@functools.partial(jax.jit, static_argnames=("name", "vit", "rows", "columns", "levels"))
def encode_patches(
    leaves: Arrays,
    patches_TX: jax.Array,
    calls: Calls = NO_CALLS,
    *,
    name: str,
    vit: ViTConfig,
    rows: int,
    columns: int,
    levels: tuple[int, ...] = (),
) -> tuple[jax.Array, list[jax.Array]]:
    positions_T2 = patch_positions(rows, columns, vit.merge)
    x_TD = affine(leaves, f"{name}/patch", patches_TX)
    if vit.positions == "learned2d":
        x_TD = x_TD + leaves[f"{name}/position"][positions_T2[:, 0] * vit.grid + positions_T2[:, 1]]
    turn = turn_2d(positions_T2) if vit.positions == "rope2d" else lambda y_THK: y_THK
    x_TD, outputs = encoder_layers(leaves, name, vit, calls("before", x_TD), turn)
    return _tokens(leaves, name, x_TD, vit.merge**2, calls, [outputs[level] for level in levels])


def encode_image(
    leaves: Leaves,
    name: str,
    vit: ViTConfig,
    image_HWC: Float[np.ndarray, "h w C"],
    calls: Calls = NO_CALLS,
    levels: tuple[int, ...] = (),
) -> tuple[jax.Array, list[jax.Array]]:
    """Modality tokens of one image: ViT, then projector; and outputs of some layers, a token's patches side by side.

    Tokens are `[n, D]`, n = patches / merge², D the LLM's width.

    Raises ValueError when a side of the image is no multiple of patch * merge, or when the image has more patch rows or
    columns than the learned position table.
    """
    rows, columns = image_HWC.shape[0] // vit.patch, image_HWC.shape[1] // vit.patch
    if vit.positions == "learned2d" and max(rows, columns) > vit.grid:
        raise ValueError(f"ViT.grid: {vit.grid} is less than the image's {rows}x{columns} patches; enlarge the grid")
    own = dense_leaves({key: leaf for key, leaf in leaves.items() if module_of(key) in (name, f"{name}_projector")})
    patches = jnp.asarray(cut_patches(image_HWC, vit.patch, vit.merge), own[f"{name}/patch/bias"].dtype)
    return encode_patches(own, patches, calls, name=name, vit=vit, rows=rows, columns=columns, levels=levels)


def convolve(leaves: Arrays, prefix: str, x_FX: jax.Array, stride: int) -> jax.Array:
    """Three taps around every `stride`-th frame, zeros beyond both ends; the kernel's rows are (tap, channel)."""
    kernel = leaves[f"{prefix}/kernel"].reshape(3, x_FX.shape[1], -1)
    zero = jnp.zeros_like(x_FX[:1])
    padded = jnp.concatenate([zero, x_FX, zero])
    taps = [matmul(padded[tap : tap + x_FX.shape[0] : stride], kernel[tap]) for tap in range(3)]
    return activate("gelu", taps[0] + taps[1] + taps[2] + leaves[f"{prefix}/bias"])


def sinusoids(length: int, width: int) -> Float[np.ndarray, "T D"]:
    """Positions of Radford et al. 2022: sines, then cosines, of frequencies 10000^(-i / (D/2 - 1))."""
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2 - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


@functools.partial(jax.jit, static_argnames=("name", "whisper", "levels"))
def encode_frames(
    leaves: Arrays,
    frames_FM: jax.Array,
    calls: Calls = NO_CALLS,
    *,
    name: str,
    whisper: WhisperConfig,
    levels: tuple[int, ...] = (),
) -> tuple[jax.Array, list[jax.Array]]:
    h_FD = convolve(leaves, f"{name}/conv1", frames_FM, 1)
    x_TD = convolve(leaves, f"{name}/conv2", h_FD, 2)
    if whisper.positions == "learned":
        x_TD = x_TD + leaves[f"{name}/position"][: x_TD.shape[0]]
    else:
        x_TD = x_TD + jnp.asarray(sinusoids(*x_TD.shape), x_TD.dtype)
    x_TD, outputs = encoder_layers(leaves, name, whisper, calls("before", x_TD))
    return _tokens(leaves, name, x_TD, whisper.merge, calls, [outputs[level] for level in levels])


def encode_recording(
    leaves: Leaves,
    name: str,
    whisper: WhisperConfig,
    frames_FM: Float[np.ndarray, "F M"],
    calls: Calls = NO_CALLS,
    levels: tuple[int, ...] = (),
) -> tuple[jax.Array, list[jax.Array]]:
    """Modality tokens of one recording: convolutions, layers, projector; and outputs of some layers, likewise.

    Tokens are `[n, D]`, n = frames / (2 * merge), D the LLM's width.

    Raises ValueError when the number of frames is no multiple of 2 * merge, or too large for the learned positions.
    """
    frames = len(frames_FM)
    if frames % (2 * whisper.merge):
        raise ValueError(f"recording: {frames} frames are no multiple of {2 * whisper.merge}; pad it with silence")
    if whisper.positions == "learned" and frames // 2 > whisper.length:
        raise ValueError(f"Whisper.length: {whisper.length} is less than the recording's {frames // 2}; enlarge it")
    own = dense_leaves({key: leaf for key, leaf in leaves.items() if module_of(key) in (name, f"{name}_projector")})
    frames = jnp.asarray(frames_FM, own[f"{name}/conv1/bias"].dtype)
    return encode_frames(own, frames, calls, name=name, whisper=whisper, levels=levels)


def encode(
    leaves: Leaves, name: str, model: MultimodalModel, medium: np.ndarray, levels: tuple[int, ...] = ()
) -> tuple[jax.Array, list[jax.Array]]:
    """Modality tokens of one medium, and the outputs of some of the encoder's layers."""
    node = model.nodes[name]
    c, row = node.config, row_of(node, medium) if node.callbacks.given else {}
    calls = Calls(row={key: value[0] for key, value in row.items()}, callbacks=node.callbacks, module=name)
    if isinstance(c, ViTConfig):
        return encode_image(leaves, name, c, medium, calls, levels)
    if isinstance(c, WhisperConfig):
        return encode_recording(leaves, name, c, medium, calls, levels)
    return encode_alone(leaves, name, model, medium, levels)[:2]
