"""Encoders and their projectors: one medium at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.models.callbacks import CalledAt
from mmjax.models.graph import MultimodalModel
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.temporal.config import TemporalConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.whisper.config import WhisperConfig
from mmjax.reference.arithmetic import (
    Arrays,
    Leaves,
    Turn,
    activate,
    affine,
    attend,
    dense_leaves,
    feed_forward,
    matmul,
    module_of,
    norm,
    project,
    turn_2d,
    turn_axial,
    turn_xy,
)
from mmjax.reference.callbacks import NO_CALLS, Calls
from mmjax.reference.positions import axis_weights, centres, cut_frames, patch_positions, windows_of
from mmjax.reference.user_encoder import row_of, run_encoder

DEFAULT_PROJECTOR = ProjectorConfig()


def _encoder_layer(
    leaves: Arrays,
    prefix: str,
    encoder: ViTConfig | WhisperConfig | TemporalConfig,
    x_TD: jax.Array,
    turn: Turn,
    windows: Sequence[np.ndarray],
    read_TT: jax.Array | None,
) -> jax.Array:
    def ended(branch: str, y_TD: jax.Array) -> jax.Array:
        if encoder.post_norms:
            y_TD = norm(leaves, f"{prefix}/{branch}_post_norm", y_TD, encoder.norm_eps)
        return y_TD * leaves.get(f"{prefix}/{branch}_scale", 1.0)

    normed = norm(leaves, f"{prefix}/attn_norm", x_TD, encoder.norm_eps)
    x_TD = x_TD + ended("attn", attend(leaves, f"{prefix}/attn", encoder, normed, turn, windows, read_TT))
    normed = norm(leaves, f"{prefix}/mlp_norm", x_TD, encoder.norm_eps)
    return x_TD + ended("mlp", feed_forward(leaves, f"{prefix}/mlp", encoder.activation, normed))


def encoder_layers(
    leaves: Arrays,
    name: str,
    encoder: ViTConfig | WhisperConfig | TemporalConfig,
    x_TD: jax.Array,
    turn: Turn = lambda y_THK: y_THK,
    windows: Callable[[int], Sequence[np.ndarray]] = lambda layer: (),
    read_TT: jax.Array | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Runs an encoder's layers and its last norm, if it has one.

    Args:
      leaves: dense leaves of the encoder, by names such as "vision/layers/000/attn/q", as `dense_leaves` gives them.
      name: the encoder's name, with which its leaves begin, such as "vision".
      encoder: its settings.
      x_TD: the input of the first layer.
      turn: a function that rotates queries and keys [T, H, K], such as `turn_2d` gives; by default they stay as they
        are.
      windows: a function from a layer's number to the windows of its attention: indices of the patches of each window,
        which attend only to one another; () for none.
      read_TT: without windows, true where a token (the row) reads another; by default all read all.

    Returns:
      The features [T, D], and the outputs [T, D] of all layers, before the last norm.
    """
    outputs = []
    for layer in range(encoder.layers):
        x_TD = _encoder_layer(leaves, f"{name}/layers/{layer:03d}", encoder, x_TD, turn, windows(layer), read_TT)
        outputs.append(x_TD)
    if f"{name}/norm/scale" not in leaves:
        return x_TD, outputs
    return norm(leaves, f"{name}/norm", x_TD, encoder.norm_eps), outputs


def _tokens(
    leaves: Arrays,
    name: str,
    x_TD: jax.Array,
    merge: int,
    calls: Calls,
    outputs: Sequence[jax.Array],
    projector: ProjectorConfig,
) -> tuple[jax.Array, list[jax.Array]]:
    """Modality tokens, and `outputs` with the features of each token's patches side by side."""
    tokens = project(leaves, f"{name}_projector", x_TD, merge, projector)
    # The features lack the row's first places, which hold no patch.
    row = {key: value[len(value) - x_TD.shape[0] :] for key, value in calls.row.items()}
    return replace(calls, row=row)("projected", tokens), [
        output.reshape(output.shape[0] // merge, -1) for output in outputs
    ]


@functools.partial(jax.jit, static_argnames=("name", "vit", "rows", "columns", "levels", "projector"))
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
    projector: ProjectorConfig = DEFAULT_PROJECTOR,
) -> tuple[jax.Array, list[jax.Array]]:
    """Modality tokens [n, D] of one image, and the outputs of layers `levels`, with the features of each token's
    patches side by side: [n, merge² * width]. Sizes are not checked.

    Args:
      leaves: dense leaves of the encoder and its projector, by names such as "vision/patch/kernel", as `dense_leaves`
        gives them.
      patches_TX: patches [T, frames * patch² * channels] in the order of `patch_positions`.
      calls: the encoder's callbacks.
      name: the encoder's name, such as "vision".
      vit: its settings.
      rows, columns: the image's numbers of patches.
      levels: numbers of layers, from 0, whose outputs are returned too.
      projector: settings of the projector.
    """
    positions_T2 = patch_positions(rows, columns, vit.merge)
    x_TD = affine(leaves, f"{name}/patch", patches_TX)
    if vit.has_table:
        x_TD = x_TD + table_of(leaves[f"{name}/position"], vit, rows, columns)[positions_T2[:, 0], positions_T2[:, 1]]
    places_T2 = centres(positions_T2) if vit.rotates == "axial_centres" else positions_T2
    if vit.special:
        x_TD = jnp.concatenate([_special_tokens(leaves, name, vit), x_TD])
        positions_T2, places_T2 = (
            np.concatenate([np.zeros((vit.special, 2), x.dtype), x]) for x in (positions_T2, places_T2)
        )
    if vit.stem_norm:
        x_TD = norm(leaves, f"{name}/stem_norm", x_TD, vit.norm_eps)
    turns = {"rope2d": turn_2d, "axial": turn_axial, "axial_centres": turn_axial, "rope_xy": turn_xy}
    turn = turns[vit.rotates](places_T2, vit.rope_theta) if vit.rotates else lambda y_THK: y_THK
    all_windows = windows_of(positions_T2, vit.window) if vit.window else ()

    def windows(layer: int) -> Sequence[np.ndarray]:
        return () if layer in vit.full_at else all_windows

    x_TD, outputs = encoder_layers(leaves, name, vit, _called(calls, "before", x_TD, vit), turn, windows)
    if vit.output != "plain":
        x_TD = _put_out(leaves, name, vit, x_TD)
    x_TD, first = _called(calls, "after", x_TD, vit), vit.special
    levels_TD = [outputs[level][first:] for level in levels]
    return _tokens(leaves, name, x_TD[first:], vit.merge**2, calls, levels_TD, projector)


def _special_tokens(leaves: Arrays, name: str, vit: ViTConfig) -> jax.Array:
    """The class token, with its position from the table's first row, and registers."""
    tokens = [leaves[f"{name}/registers"]] if vit.registers else []
    if vit.class_token:
        token_D = leaves[f"{name}/class_token"]
        tokens.insert(0, (token_D + leaves[f"{name}/position"][0] if vit.has_table else token_D)[None])
    return jnp.concatenate(tokens)


def _put_out(leaves: Arrays, name: str, vit: ViTConfig, x_TD: jax.Array) -> jax.Array:
    """The features times the root of the width, and if `vit` says so minus a bias and times a scale: constants."""
    x_TD = x_TD * vit.width**0.5
    if vit.output == "scaled":
        return x_TD
    bias_D, scale_D = (jax.lax.stop_gradient(leaves[f"{name}/standard/{part}"]) for part in ("bias", "scale"))
    return (x_TD - bias_D) * scale_D


def _called(calls: Calls, place: CalledAt, x_TD: jax.Array, vit: ViTConfig) -> jax.Array:
    """Calls a callback with the features as a row has them: special tokens are padded to complete LLM tokens."""
    first, pad = vit.special, -vit.special % vit.merge**2 if place in calls.callbacks.by_place else 0
    padded = jnp.concatenate([x_TD[:first], jnp.zeros_like(x_TD[:1]).repeat(pad, 0), x_TD[first:]])
    called = calls(place, padded)
    return jnp.concatenate([called[:first], called[first + pad :]])


def table_of(position_ND: jax.Array, vit: ViTConfig, rows: int, columns: int) -> Float[Array, "rows columns D"]:
    """The learned positions [rows, columns, D] of an image's patches: a corner of the table, or the table resized, or
    sums of a table of columns and one of rows.

    The table is resized if `vit.interpolate` is not "none".

    `position_ND` is the leaf "vision/position", the table row by row. It has the class token's row first, if there is
    one, which is left out; `rows` and `columns` are the image's numbers of patches.
    """
    if vit.has_axis_tables:
        by_column, by_row = jnp.split(position_ND[int(vit.class_token) :], 2)
        return by_row[:rows, None] + by_column[None, :columns]
    table_GGD = position_ND[int(vit.class_token) :].reshape(vit.grid, vit.grid, -1)
    if vit.interpolate == "none":
        return table_GGD[:rows, :columns]
    by_row, by_column = (
        jnp.asarray(axis_weights(vit.interpolate, side, vit.grid), position_ND.dtype) for side in (rows, columns)
    )
    along = matmul(by_row, table_GGD.reshape(vit.grid, -1)).reshape(rows, vit.grid, -1)
    return matmul(by_column, along.transpose(1, 0, 2).reshape(vit.grid, -1)).reshape(columns, rows, -1).swapaxes(0, 1)


def encode_image(
    leaves: Leaves,
    name: str,
    vit: ViTConfig,
    image_HWC: Float[np.ndarray, "h w C"],
    calls: Calls = NO_CALLS,
    levels: tuple[int, ...] = (),
    projector: ProjectorConfig = DEFAULT_PROJECTOR,
) -> tuple[jax.Array, list[jax.Array]]:
    """Encodes one image: ViT, then projector.

    Args:
      leaves: logical leaves by name, such as "vision/patch/kernel", of the encoder and its projector; others are not
        read.
      name: the encoder's name, such as "vision".
      vit: its settings.
      image_HWC: the image, or a temporal patch [h, w, frames * C].
      calls: the encoder's callbacks.
      levels: numbers of layers, from 0, whose outputs are returned too.
      projector: settings of the projector.

    Returns:
      Modality tokens `[n, D]`, n = patches / merge², D the LLM's width; and for each of `levels` the layer's output,
        with the features of each token's patches side by side: `[n, merge² * width]`.

    Raises:
      ValueError: a side of the image is not a multiple of patch * merge, or the image has more patch rows or columns
        than the learned position table.
    """
    rows, columns = image_HWC.shape[0] // vit.patch, image_HWC.shape[1] // vit.patch
    if vit.has_table and vit.interpolate == "none" and max(rows, columns) > vit.grid:
        raise ValueError(f"ViT.grid: {vit.grid} is less than the image's {rows}x{columns} patches; enlarge the grid")
    params = dense_leaves({key: leaf for key, leaf in leaves.items() if module_of(key) in (name, f"{name}_projector")})
    patches = cut_frames(image_HWC, vit.frames, vit.channels, patch=vit.patch, merge=vit.merge)
    patches = jnp.asarray(patches, params[f"{name}/patch/kernel"].dtype)
    return encode_patches(
        params,
        patches,
        calls,
        name=name,
        vit=vit,
        rows=rows,
        columns=columns,
        levels=levels,
        projector=projector,
    )


def convolve(leaves: Arrays, prefix: str, x_FX: jax.Array, stride: int, activation: str = "gelu") -> jax.Array:
    """Three taps around every `stride`-th frame, zeros beyond both ends, then the activation: [ceil(F / stride),
    width].

    `x_FX` are F frames of X channels; `activation` is a key of `ACTIVATIONS`.

    `prefix` is such as "audio/conv1". The leaf ``{prefix}/kernel`` is [3 * X, width], its rows (tap, channel);
    ``{prefix}/bias`` is [width].
    """
    kernel = leaves[f"{prefix}/kernel"].reshape(3, x_FX.shape[1], -1)
    zero = jnp.zeros_like(x_FX[:1])
    padded = jnp.concatenate([zero, x_FX, zero])
    taps = [matmul(padded[tap : tap + x_FX.shape[0] : stride], kernel[tap]) for tap in range(3)]
    return activate(activation, taps[0] + taps[1] + taps[2] + leaves[f"{prefix}/bias"])


def sinusoids(length: int, width: int) -> Float[np.ndarray, "T D"]:
    """Positions of Radford et al. 2022, [length, width]: sines, then cosines.

    Their frequencies are 10000^(-i / (width/2 - 1)); `width` is even and above 2.
    """
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2 - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


@functools.partial(jax.jit, static_argnames=("name", "whisper", "levels", "projector"))
def encode_frames(
    leaves: Arrays,
    frames_FM: jax.Array,
    calls: Calls = NO_CALLS,
    *,
    name: str,
    whisper: WhisperConfig,
    levels: tuple[int, ...] = (),
    projector: ProjectorConfig = DEFAULT_PROJECTOR,
) -> tuple[jax.Array, list[jax.Array]]:
    """Modality tokens [n, D] of one recording, and the outputs of layers `levels`, with the features of each token's
    places side by side: [n, merge * width].

    Sizes are not checked.

    Args:
      leaves: dense leaves of the encoder and its projector, by names such as "audio/conv1/kernel", as `dense_leaves`
        gives them.
      frames_FM: log-mel frames [F, M]; n = F / (2 * merge).
      calls: the encoder's callbacks.
      name: the encoder's name, such as "audio".
      whisper: its settings.
      levels: numbers of layers, from 0, whose outputs are returned too.
      projector: settings of the projector.
    """
    gelu = "gelu_exact" if whisper.activation == "gelu_exact" else "gelu"
    h_FD = convolve(leaves, f"{name}/conv1", frames_FM, 1, gelu)
    x_TD = convolve(leaves, f"{name}/conv2", h_FD, 2, gelu)
    if whisper.positions == "learned":
        x_TD = x_TD + leaves[f"{name}/position"][: x_TD.shape[0]]
    else:
        x_TD = x_TD + jnp.asarray(sinusoids(*x_TD.shape), x_TD.dtype)
    x_TD, outputs = encoder_layers(leaves, name, whisper, calls("before", x_TD))
    levels_TD = [outputs[level] for level in levels]
    return _tokens(leaves, name, calls("after", x_TD), whisper.merge, calls, levels_TD, projector)


def encode_recording(
    leaves: Leaves,
    name: str,
    whisper: WhisperConfig,
    frames_FM: Float[np.ndarray, "F M"],
    calls: Calls = NO_CALLS,
    levels: tuple[int, ...] = (),
    projector: ProjectorConfig = DEFAULT_PROJECTOR,
) -> tuple[jax.Array, list[jax.Array]]:
    """Encodes one recording: convolutions, layers, projector.

    Args:
      leaves: logical leaves by name, such as "audio/conv1/kernel", of the encoder and its projector; others are not
        read.
      name: the encoder's name, such as "audio".
      whisper: its settings.
      frames_FM: log-mel frames.
      calls: the encoder's callbacks.
      levels: numbers of layers, from 0, whose outputs are returned too.
      projector: settings of the projector.

    Returns:
      Modality tokens `[n, D]`, n = frames / (2 * merge), D the LLM's width; and for each of `levels` the layer's
        output, with the features of each token's places side by side: `[n, merge * width]`.

    Raises:
      ValueError: the number of frames is not a multiple of 2 * merge, or too large for the learned positions.
    """
    frames = len(frames_FM)
    if frames % (2 * whisper.merge):
        raise ValueError(f"recording: {frames} frames are no multiple of {2 * whisper.merge}; pad it with silence")
    if whisper.positions == "learned" and frames // 2 > whisper.length:
        raise ValueError(f"Whisper.length: {whisper.length} is less than the recording's {frames // 2}; enlarge it")
    params = dense_leaves({key: leaf for key, leaf in leaves.items() if module_of(key) in (name, f"{name}_projector")})
    frames = jnp.asarray(frames_FM, params[f"{name}/conv1/bias"].dtype)
    return encode_frames(params, frames, calls, name=name, whisper=whisper, levels=levels, projector=projector)


def encode(
    leaves: Leaves, name: str, model: MultimodalModel, medium: np.ndarray, levels: tuple[int, ...] = ()
) -> tuple[jax.Array, list[jax.Array]]:
    """Encodes one medium: an image [h, w, C] or the frames [F, M] of a recording.

    An encoder that is neither a ViT nor a Whisper runs by its own code.

    Args:
      leaves: logical leaves by name, such as "vision/patch/kernel", of the encoder and its projector; others are not
        read.
      name: the encoder's name in the model, such as "vision".
      model: the model, as ``build_model(recipe, tokenizer)`` gives it.
      medium: the image or the frames.
      levels: numbers of layers, from 0, whose outputs are returned too.

    Returns:
      Modality tokens [n, D], D the width of the module that reads them; and for each of `levels` the layer's output,
        with the features of each token's patches side by side.

    Raises:
      ValueError: the medium's size does not fit the encoder.
    """
    node = model.nodes[name]
    c, row = node.config, row_of(node, medium) if node.callbacks.by_place else {}
    calls = Calls(row={key: value[0] for key, value in row.items()}, callbacks=node.callbacks, module=name)
    if isinstance(c, ViTConfig):
        return encode_image(leaves, name, c, medium, calls, levels, node.projector or DEFAULT_PROJECTOR)
    if isinstance(c, WhisperConfig):
        return encode_recording(leaves, name, c, medium, calls, levels, node.projector or DEFAULT_PROJECTOR)
    return run_encoder(leaves, name, model, medium, levels)[:2]
