"""The dense reference: what every layout, schedule and placement is compared with.

One device, one sample and one medium at a time, plain Python loops over layers: no packing, padding, bucket, `scan`,
`shard_map` or stacked parameter. Parameters are the flat dict of logical leaves (`llm/layers/000/attn/q`, ...).
Nothing here calls the code it judges: forward, loss, clipping and AdamW are written again from their equations, and a
`MultimodalModel` serves as the description of a module graph only. Widths that configs leave open (head dims, the
projector's hidden width) are read off the leaves.

Arithmetic is fp32 with the highest matmul precision. Leaves that are float64 under JAX's x64 mode stay float64,
which is how the reference's own gradients are checked against finite differences.

Letters in shapes: N tokens of a sample, T patches of an image or a recording, D width, H heads, G key/value heads,
K head dim, F mlp width or frames of a recording, V vocabulary, P patch side, C channels, M mel bins.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from mmjax.data.types import Sample
    from mmjax.models.audio import WhisperConfig
    from mmjax.models.decoder import DecoderConfig
    from mmjax.models.encoders import Encoder
    from mmjax.models.multimodal import MultimodalModel
    from mmjax.models.vit import ViTConfig
    from mmjax.optimizer import OptimizerConfig

Arrays = Mapping[str, jax.Array]
Leaves = Mapping[str, jax.Array | np.ndarray]
ROPE2D_THETA = 100.0
LAYER_NORM_EPS = 1e-6


# --- shared pieces ------------------------------------------------------------------------------------------------


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _dense_leaves(leaves: Leaves) -> Arrays:
    """Copies leaves to the default device, whatever they were sharded over; those being differentiated stay."""

    def convert(value: jax.Array | np.ndarray) -> jax.Array:
        if isinstance(value, Tracer):
            return value
        keep = jax.config.read("jax_enable_x64") and value.dtype == np.float64
        return jnp.asarray(np.asarray(value), dtype=jnp.float64 if keep else jnp.float32)

    return {name: convert(value) for name, value in leaves.items()}


def _module_of(leaf: str) -> str:
    return leaf.split("/", 1)[0]


def _rotate(x_NHK: jax.Array, positions_N: np.ndarray, theta: float) -> jax.Array:
    """Rotary embedding in the half-split convention (Su et al. 2021): pairs are (x[i], x[i + K/2])."""
    half = x_NHK.shape[-1] // 2
    # float64 on the host: the tables are then exact to the last fp32 bit at any position.
    angles = positions_N[:, None].astype(np.float64) * theta ** (-np.arange(half) / half)
    cos = jnp.asarray(np.cos(angles)[:, None, :], x_NHK.dtype)
    sin = jnp.asarray(np.sin(angles)[:, None, :], x_NHK.dtype)
    first, second = x_NHK[..., :half], x_NHK[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(q_NHK: jax.Array, k_NGK: jax.Array, v_NGK: jax.Array, *, causal: bool) -> jax.Array:
    """Softmax attention with scale K^-0.5; query head h reads key/value head h // (H / G). Returns [N, H*K]."""
    length, heads, head_dim = q_NHK.shape
    group = heads // k_NGK.shape[1]
    outputs = []
    for kv_head in range(k_NGK.shape[1]):
        q = q_NHK[:, kv_head * group : (kv_head + 1) * group].transpose(1, 0, 2)
        scores = _matmul(q, k_NGK[:, kv_head].T) * head_dim**-0.5
        if causal:
            scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -jnp.inf)
        outputs.append(_matmul(jax.nn.softmax(scores, axis=-1), v_NGK[:, kv_head]))
    return jnp.concatenate(outputs).transpose(1, 0, 2).reshape(length, heads * head_dim)


# --- encoder and projector ----------------------------------------------------------------------------------------


def patch_positions(rows: int, columns: int, merge: int) -> Int[np.ndarray, "T 2"]:
    """(row, column) of every patch in encoder order: merge x merge blocks row-major, row-major inside a block."""
    return np.array(
        [
            (block_row + row, block_column + column)
            for block_row in range(0, rows, merge)
            for block_column in range(0, columns, merge)
            for row in range(merge)
            for column in range(merge)
        ],
        np.int32,
    ).reshape(-1, 2)


def cut_patches(image_HWC: Float[np.ndarray, "h w C"], patch: int, merge: int) -> Float[np.ndarray, "T P*P*C"]:
    """Patches of an image in `patch_positions` order, each flattened as (row, column, channel).

    Raises ValueError when a side is no multiple of patch * merge.
    """
    height, width, channels = image_HWC.shape
    if height % (patch * merge) or width % (patch * merge):
        raise ValueError(f"image: size {height}x{width} is no multiple of {patch * merge}; resize or pad the image")
    positions = patch_positions(height // patch, width // patch, merge)
    squares = [image_HWC[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch] for r, c in positions]
    return np.stack(squares).reshape(len(positions), patch * patch * channels)


def _layer_norm(leaves: Arrays, prefix: str, x_TD: jax.Array) -> jax.Array:
    centred = x_TD - x_TD.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt(variance + LAYER_NORM_EPS) * leaves[f"{prefix}/scale"] + leaves[f"{prefix}/bias"]


def _activate(name: str, x: jax.Array) -> jax.Array:
    return {"gelu": jax.nn.gelu, "quick_gelu": lambda y: y * jax.nn.sigmoid(1.702 * y)}[name](x)


def _encoder_layer(
    leaves: Arrays, prefix: str, encoder: ViTConfig | WhisperConfig, x_TD: jax.Array, turn: Callable[..., jax.Array]
) -> jax.Array:
    def heads(name: str, y_TD: jax.Array) -> jax.Array:
        projected = _matmul(y_TD, leaves[f"{prefix}/attn/{name}"]) + leaves[f"{prefix}/attn/{name}_bias"]
        return projected.reshape(projected.shape[0], encoder.heads, -1)

    normed = _layer_norm(leaves, f"{prefix}/attn_norm", x_TD)
    mixed = _attention(turn(heads("q", normed)), turn(heads("k", normed)), heads("v", normed), causal=False)
    x_TD = x_TD + _matmul(mixed, leaves[f"{prefix}/attn/o"]) + leaves[f"{prefix}/attn/o_bias"]
    normed = _layer_norm(leaves, f"{prefix}/mlp_norm", x_TD)
    hidden = _matmul(normed, leaves[f"{prefix}/mlp/up"]) + leaves[f"{prefix}/mlp/up_bias"]
    return (
        x_TD
        + _matmul(_activate(encoder.activation, hidden), leaves[f"{prefix}/mlp/down"])
        + (leaves[f"{prefix}/mlp/down_bias"])
    )


def _encoder_layers(
    leaves: Arrays,
    name: str,
    encoder: ViTConfig | WhisperConfig,
    x_TD: jax.Array,
    turn: Callable[..., jax.Array] = lambda y_THK: y_THK,
) -> jax.Array:
    """All layers and the last norm; `turn` rotates queries and keys."""
    for layer in range(encoder.layers):
        x_TD = _encoder_layer(leaves, f"{name}/layers/{layer:03d}", encoder, x_TD, turn)
    return _layer_norm(leaves, f"{name}/norm", x_TD)


def _project(leaves: Arrays, projector: str, x_TD: jax.Array, joined: int) -> jax.Array:
    """Runs of `joined` features side by side, through two layers."""
    merged = x_TD.reshape(x_TD.shape[0] // joined, -1)
    up = _matmul(merged, leaves[f"{projector}/up"]) + leaves[f"{projector}/up_bias"]
    return _matmul(_activate("gelu", up), leaves[f"{projector}/down"]) + leaves[f"{projector}/down_bias"]


@functools.partial(jax.jit, static_argnames=("name", "vit", "rows", "columns"))
def _encode_patches(
    leaves: Arrays, patches_TX: jax.Array, *, name: str, vit: ViTConfig, rows: int, columns: int
) -> jax.Array:
    positions_T2 = patch_positions(rows, columns, vit.merge)
    x_TD = _matmul(patches_TX, leaves[f"{name}/patch/kernel"]) + leaves[f"{name}/patch/bias"]
    if vit.positions == "learned2d":
        x_TD = x_TD + leaves[f"{name}/position"][positions_T2[:, 0] * vit.grid + positions_T2[:, 1]]

    def turn(y_THK: jax.Array) -> jax.Array:
        if vit.positions != "rope2d":
            return y_THK
        by_row, by_column = jnp.split(y_THK, 2, axis=-1)
        turned = [_rotate(y, positions_T2[:, axis], ROPE2D_THETA) for axis, y in enumerate((by_row, by_column))]
        return jnp.concatenate(turned, axis=-1)

    return _project(leaves, f"{name}_projector", _encoder_layers(leaves, name, vit, x_TD, turn), vit.merge**2)


def encode_image(
    leaves: Leaves, name: str, vit: ViTConfig, image_HWC: Float[np.ndarray, "h w C"]
) -> Float[Array, "n D"]:
    """Modality tokens of one image: ViT, then projector; n = patches / merge², D the LLM's width.

    Raises ValueError when a side of the image is no multiple of patch * merge, or when the image has more patch rows or
    columns than the learned position table.
    """
    rows, columns = image_HWC.shape[0] // vit.patch, image_HWC.shape[1] // vit.patch
    if vit.positions == "learned2d" and max(rows, columns) > vit.grid:
        raise ValueError(f"ViT.grid: {vit.grid} is less than the image's {rows}x{columns} patches; enlarge the grid")
    own = _dense_leaves({key: leaf for key, leaf in leaves.items() if _module_of(key) in (name, f"{name}_projector")})
    patches = jnp.asarray(cut_patches(image_HWC, vit.patch, vit.merge), own[f"{name}/patch/bias"].dtype)
    return _encode_patches(own, patches, name=name, vit=vit, rows=rows, columns=columns)


def _convolve(leaves: Arrays, prefix: str, x_FX: jax.Array, stride: int) -> jax.Array:
    """Three taps around every `stride`-th frame, zeros beyond both ends; the kernel's rows are (tap, channel)."""
    kernel = leaves[f"{prefix}/kernel"].reshape(3, x_FX.shape[1], -1)
    zero = jnp.zeros_like(x_FX[:1])
    padded = jnp.concatenate([zero, x_FX, zero])
    taps = [_matmul(padded[tap : tap + x_FX.shape[0] : stride], kernel[tap]) for tap in range(3)]
    return _activate("gelu", taps[0] + taps[1] + taps[2] + leaves[f"{prefix}/bias"])


def sinusoids(length: int, width: int) -> Float[np.ndarray, "T D"]:
    """Positions of Radford et al. 2022: sines, then cosines, of frequencies 10000^(-i / (D/2 - 1))."""
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2 - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


@functools.partial(jax.jit, static_argnames=("name", "whisper"))
def _encode_frames(leaves: Arrays, frames_FM: jax.Array, *, name: str, whisper: WhisperConfig) -> jax.Array:
    h_FD = _convolve(leaves, f"{name}/conv1", frames_FM, 1)
    x_TD = _convolve(leaves, f"{name}/conv2", h_FD, 2)
    if whisper.positions == "learned":
        x_TD = x_TD + leaves[f"{name}/position"][: x_TD.shape[0]]
    else:
        x_TD = x_TD + jnp.asarray(sinusoids(*x_TD.shape), x_TD.dtype)
    return _project(leaves, f"{name}_projector", _encoder_layers(leaves, name, whisper, x_TD), whisper.merge)


def encode_recording(
    leaves: Leaves, name: str, whisper: WhisperConfig, frames_FM: Float[np.ndarray, "F M"]
) -> Float[Array, "n D"]:
    """Modality tokens of one recording: convolutions, layers, projector; n = frames / (2 * merge), D the LLM's width.

    Raises ValueError when the number of frames is no multiple of 2 * merge, or too large for the learned positions.
    """
    frames = len(frames_FM)
    if frames % (2 * whisper.merge):
        raise ValueError(f"recording: {frames} frames are no multiple of {2 * whisper.merge}; pad it with silence")
    if whisper.positions == "learned" and frames // 2 > whisper.length:
        raise ValueError(f"Whisper.length: {whisper.length} is less than the recording's {frames // 2}; enlarge it")
    own = _dense_leaves({key: leaf for key, leaf in leaves.items() if _module_of(key) in (name, f"{name}_projector")})
    return _encode_frames(own, jnp.asarray(frames_FM, own[f"{name}/conv1/bias"].dtype), name=name, whisper=whisper)


def _encode(leaves: Leaves, name: str, encoder: Encoder, medium: np.ndarray) -> jax.Array:
    return {"vit": encode_image, "whisper": encode_recording}[encoder.kind](leaves, name, encoder.config, medium)


# --- LLM ----------------------------------------------------------------------------------------------------------


def _rms_norm(scale: jax.Array, x_ND: jax.Array, eps: float) -> jax.Array:
    return x_ND / jnp.sqrt(jnp.square(x_ND).mean(axis=-1, keepdims=True) + eps) * scale


def _decoder_layer(leaves: Arrays, prefix: str, decoder: DecoderConfig, x_ND: jax.Array) -> jax.Array:
    length = x_ND.shape[0]
    positions = np.arange(length)
    normed = _rms_norm(leaves[f"{prefix}/attn_norm"], x_ND, decoder.norm_eps)
    q = _matmul(normed, leaves[f"{prefix}/attn/q"]).reshape(length, decoder.heads, -1)
    k = _matmul(normed, leaves[f"{prefix}/attn/k"]).reshape(length, decoder.kv_heads, -1)
    v = _matmul(normed, leaves[f"{prefix}/attn/v"]).reshape(length, decoder.kv_heads, -1)
    q, k = _rotate(q, positions, decoder.rope_theta), _rotate(k, positions, decoder.rope_theta)
    x_ND = x_ND + _matmul(_attention(q, k, v, causal=True), leaves[f"{prefix}/attn/o"])
    normed = _rms_norm(leaves[f"{prefix}/mlp_norm"], x_ND, decoder.norm_eps)
    hidden = jax.nn.silu(_matmul(normed, leaves[f"{prefix}/mlp/gate"])) * _matmul(normed, leaves[f"{prefix}/mlp/up"])
    return x_ND + _matmul(hidden, leaves[f"{prefix}/mlp/down"])


Placed = Sequence[tuple[jax.Array | np.ndarray, jax.Array]]
"""Positions in a sample, and the features that go there."""


def _decode(
    leaves: Arrays,
    decoder: DecoderConfig,
    tokens_N: jax.Array,
    modality: Placed,
    injected: Mapping[int, Placed] | None = None,
) -> jax.Array:
    x_ND = leaves["llm/embed"][tokens_N]
    for positions_M, features_MD in modality:
        x_ND = x_ND.at[positions_M].set(features_MD)
    for layer in range(decoder.layers):
        for positions_M, features_MD in (injected or {}).get(layer, ()):
            x_ND = x_ND.at[positions_M].add(features_MD)
        x_ND = _decoder_layer(leaves, f"llm/layers/{layer:03d}", decoder, x_ND)
    x_ND = _rms_norm(leaves["llm/norm"], x_ND, decoder.norm_eps)
    return _matmul(x_ND, leaves["llm/embed"].T if decoder.tied else leaves["llm/head"])


_decode_jit = jax.jit(_decode, static_argnames=("decoder",))


@functools.partial(jax.jit, static_argnames=("decoder",))
def _decode_loss(
    leaves: Arrays,
    decoder: DecoderConfig,
    tokens_N: jax.Array,
    modality: Placed,
    injected: Mapping[int, Placed],
    targets_N: jax.Array,
    weights_N: jax.Array,
) -> jax.Array:
    logits_NV = _decode(leaves, decoder, tokens_N, modality, injected)
    log_probabilities = jax.nn.log_softmax(logits_NV, axis=-1)
    chosen_N = jnp.take_along_axis(log_probabilities, targets_N[:, None], axis=-1)[:, 0]
    return -jnp.sum(weights_N * chosen_N)


# --- samples ------------------------------------------------------------------------------------------------------


def _modality_tokens(
    leaves: Leaves, model: MultimodalModel, sample: Sample
) -> tuple[list[tuple[np.ndarray, jax.Array]], dict[int, list[tuple[np.ndarray, jax.Array]]]]:
    """Per encoder with media: the sample's placeholder positions, and the modality tokens that go there, in order.

    Then the same by LLM layer, of what is added to the layer's input.
    """
    unknown = set(sample.media) - set(model.encoders)
    if unknown:
        raise ValueError(f"Sample.media: {sorted(unknown)} are no encoders of the model; add them to Model.encoders")
    pieces, injected = [], {}
    for name, encoder in model.encoders.items():
        positions = np.flatnonzero(sample.placeholders(name)).astype(np.int32)
        features = [_encode(leaves, name, encoder, medium) for medium in sample.media.get(name, ())]
        count = sum(feature.shape[0] for feature in features)
        if count != len(positions):
            raise ValueError(
                f"Sample.tokens: {len(positions)} placeholders of {name!r} for {count} modality tokens; "
                "expand the placeholder of each medium to one per merged token"
            )
        if features:
            pieces.append((positions, jnp.concatenate(features)))
            for layer in encoder.projector.inject:
                prefix = f"{name}_projector/inject{layer:03d}"
                own = _dense_leaves({key: leaf for key, leaf in leaves.items() if key.startswith(prefix)})
                injected.setdefault(layer, []).append((positions, _project(own, prefix, pieces[-1][1], 1)))
    return pieces, injected


def _lookup_ids(model: MultimodalModel, tokens_N: np.ndarray, used_N: np.ndarray) -> np.ndarray:
    """Token ids for a lookup; unused ones become 0, so that a placeholder may lie outside the vocabulary."""
    wrong = tokens_N[used_N & ((tokens_N < 0) | (tokens_N >= model.llm.vocab))]
    if wrong.size:
        raise ValueError(f"Decoder.vocab: {model.llm.vocab} does not hold token {wrong[0]}; enlarge the vocabulary")
    return np.where(used_N, tokens_N, 0).astype(np.int32)


def _embedded_ids(model: MultimodalModel, sample: Sample) -> np.ndarray:
    replaced = np.zeros(len(sample.tokens), bool)
    for name in model.encoders:
        replaced |= sample.placeholders(name)
    return _lookup_ids(model, sample.tokens, ~replaced)


def _llm_leaves(leaves: Leaves) -> Arrays:
    return _dense_leaves({name: leaf for name, leaf in leaves.items() if _module_of(name) == "llm"})


def sample_logits(leaves: Leaves, model: MultimodalModel, sample: Sample) -> Float[Array, "N V"]:
    """Logits of every position of one sample; logits[t] predict tokens[t + 1].

    Raises ValueError when placeholders and media do not match or a token is outside the vocabulary.
    """
    placed = _modality_tokens(leaves, model, sample)
    return _decode_jit(_llm_leaves(leaves), model.llm, _embedded_ids(model, sample), *placed)


def loss_sum(leaves: Leaves, model: MultimodalModel, sample: Sample) -> Float[Array, ""]:
    """Sum over t >= 1 of loss_weights[t] * cross-entropy of tokens[t] given tokens[:t]; not divided by anything.

    Nothing predicts tokens[0], so loss_weights[0] counts neither here nor in a denominator. Raises ValueError as
    `sample_logits` does.
    """
    weights = np.append(sample.loss_weights[1:], np.float32(0))
    targets = _lookup_ids(model, np.append(sample.tokens[1:], 0), weights != 0)
    placed = _modality_tokens(leaves, model, sample)
    return _decode_loss(_llm_leaves(leaves), model.llm, _embedded_ids(model, sample), *placed, targets, weights)


def denominator(samples: Sequence[Sample]) -> float:
    """Sum of the loss weights of a step."""
    return float(sum(sample.loss_weights[1:].sum(dtype=np.float64) for sample in samples))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossAndGradients:
    """Loss of a step and the gradient of every leaf of a module that is not frozen."""

    loss: float
    gradients: dict[str, np.ndarray]


def step_loss_and_gradients(
    leaves: Leaves, model: MultimodalModel, samples: Sequence[Sample], *, frozen: Collection[str] = ()
) -> LossAndGradients:
    """Loss of a step (weighted cross-entropies over the sum of the weights) and its gradients, unclipped.

    Samples are differentiated one by one and summed in float64; gradients come back in the leaves' dtype, frozen
    modules are left out. Raises ValueError when the weights sum to 0, and as `sample_logits` does.
    """
    whole = denominator(samples)
    if whole == 0:
        raise ValueError("Sample.loss_weights: they sum to 0 over the step; give at least one token a weight")
    leaves = _dense_leaves(leaves)
    trained = {name: leaf for name, leaf in leaves.items() if _module_of(name) not in frozen}
    differentiate = jax.value_and_grad(lambda part, sample: loss_sum({**leaves, **part}, model, sample))
    loss, total = 0.0, {name: np.zeros(leaf.shape, np.float64) for name, leaf in trained.items()}
    for sample in samples:
        value, gradients = differentiate(trained, sample)
        loss += float(value)
        for name, gradient in gradients.items():
            total[name] += np.asarray(gradient, np.float64)
    mean = {name: (value / whole).astype(trained[name].dtype) for name, value in total.items()}
    return LossAndGradients(loss=loss / whole, gradients=mean)


def greedy(leaves: Leaves, model: MultimodalModel, sample: Sample, *, max_new: int, eos: int) -> list[int]:
    """Greedy, free-running continuation of tokens[:sample.prompt]: at most `max_new` ids, without `eos`.

    The whole sequence is computed again for every token. A placeholder id that the model itself emits is embedded
    like any other token. Raises ValueError as `sample_logits` does.
    """
    prompt = dataclasses.replace(sample, tokens=sample.tokens[: sample.prompt])
    llm, placed, ids = _llm_leaves(leaves), _modality_tokens(leaves, model, prompt), _embedded_ids(model, prompt)
    new: list[int] = []
    while len(new) < max_new:
        tokens = np.append(ids, new).astype(np.int32)
        best = int(np.argmax(_decode_jit(llm, model.llm, tokens, *placed)[-1]))
        if best == eos:
            break
        new.append(best)
    return new


# --- training -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Leaves with AdamW's moments (of leaves that have been updated) and the number of updates made, skips excluded."""

    leaves: dict[str, np.ndarray]
    first: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    second: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    updates: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What `train_steps` saw, per step (gradient norms before clipping), and the state it ended in."""

    losses: list[float]
    gradient_norms: list[float]
    module_gradient_norms: list[dict[str, float]]
    state: TrainState


def global_norm(gradients: Leaves, module: str | None = None) -> float:
    """Euclidean norm over all elements of the gradients, or of one module's."""
    chosen = [leaf for name, leaf in gradients.items() if module in (None, _module_of(name))]
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(leaf, np.float64)))) for leaf in chosen))


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (from 0) of a run of `total_steps`.

    `warmup` steps rise linearly ((step + 1) / (warmup + 1) of `learning_rate`); step `warmup` has all of it, and the
    schedule keeps it or leads to `final_learning_rate` at `total_steps`.
    """
    peak, final = optimizer.learning_rate, optimizer.final_learning_rate
    if step < optimizer.warmup:
        return peak * (step + 1) / (optimizer.warmup + 1)
    progress = min(1.0, (step - optimizer.warmup) / max(1, total_steps - optimizer.warmup))
    if optimizer.schedule == "constant":
        return peak
    if optimizer.schedule == "linear":
        return peak + (final - peak) * progress
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def adamw_step(
    state: TrainState,
    gradients: Mapping[str, np.ndarray],
    optimizers: Mapping[str, OptimizerConfig],
    rates: Mapping[str, float],
    *,
    clip_norm: float,
) -> TrainState:
    """One AdamW update (Loshchilov and Hutter 2019), each module with its own optimizer and learning rate.

    Gradients are scaled by min(1, clip_norm / norm) with the norm over all modules (clip_norm 0: no clipping). Decay
    is decoupled, times the learning rate, and spares leaves with one dimension. A step whose gradients are not finite
    changes nothing. Leaves without a gradient (frozen modules) stay as they are.
    """
    norm = global_norm(gradients)
    if not math.isfinite(norm):
        return state
    scale = min(1.0, clip_norm / norm) if clip_norm and norm else 1.0
    count = state.updates + 1
    leaves, first, second = dict(state.leaves), dict(state.first), dict(state.second)
    for name, gradient in gradients.items():
        optimizer, rate = optimizers[_module_of(name)], rates[_module_of(name)]
        g, p, zero = gradient * scale, leaves[name], np.zeros_like(gradient)
        m = first[name] = optimizer.b1 * first.get(name, zero) + (1 - optimizer.b1) * g
        v = second[name] = optimizer.b2 * second.get(name, zero) + (1 - optimizer.b2) * g * g
        update = (m / (1 - optimizer.b1**count)) / (np.sqrt(v / (1 - optimizer.b2**count)) + optimizer.eps)
        if p.ndim > 1:
            update = update + optimizer.weight_decay * p
        leaves[name] = p - rate * update
    return TrainState(leaves=leaves, first=first, second=second, updates=count)


def train_steps(
    leaves: Leaves,
    model: MultimodalModel,
    optimizers: Mapping[str, OptimizerConfig],
    steps: Sequence[Sequence[Sample]],
    *,
    clip_norm: float,
    total_steps: int | None = None,
) -> Training:
    """Trains on the samples of each step in turn.

    Args:
      leaves: logical leaves to start from; they are not modified.
      optimizers: one per module ("vision", "vision_projector", "llm"); frozen modules are neither differentiated,
        nor counted in the norm, nor decayed.
      steps: the samples of every step.
      clip_norm: bound of the global gradient norm; 0 for none.
      total_steps: length of the run that the learning rate schedules see, by default the steps given.

    Raises:
      ValueError: a module has no optimizer, or as `step_loss_and_gradients` does.
    """
    state = TrainState(leaves={name: np.asarray(leaf) for name, leaf in _dense_leaves(leaves).items()})
    modules = sorted({_module_of(name) for name in state.leaves})
    if missing := [module for module in modules if module not in optimizers]:
        raise ValueError(f"optimizers: none for {missing}; give every module an Optimizer")
    frozen = [module for module in modules if optimizers[module].frozen]
    losses, norms, module_norms = [], [], []
    for step, samples in enumerate(steps):
        result = step_loss_and_gradients(state.leaves, model, samples, frozen=frozen)
        rates = {m: learning_rate(optimizers[m], step, total_steps or len(steps)) for m in modules}
        state = adamw_step(state, result.gradients, optimizers, rates, clip_norm=clip_norm)
        losses.append(result.loss)
        norms.append(global_norm(result.gradients))
        module_norms.append({m: global_norm(result.gradients, m) for m in modules if m not in frozen})
    return Training(losses=losses, gradient_norms=norms, module_gradient_norms=module_norms, state=state)
