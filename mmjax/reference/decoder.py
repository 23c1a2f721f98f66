"""The LLM on one sample, and the generators behind it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.unet.config import UNetConfig
from mmjax.reference.arithmetic import (
    Arrays,
    Leaves,
    Tables,
    Turn,
    activate,
    affine,
    attend,
    dense_leaves,
    feed_forward,
    matmul,
    module_of,
    normalised,
    project,
    turn_2d,
)
from mmjax.reference.attention import KeysByKind, Masks, attention_output, scaled_norm
from mmjax.reference.callbacks import NO_CALLS, Calls
from mmjax.reference.delta import delta_output
from mmjax.reference.experts import RouterSums, gated_mlp, has_experts, mixture
from mmjax.reference.mmdit import double_stream_velocity
from mmjax.reference.positions import cut_patches, patch_positions
from mmjax.reference.process import flow_times, noised, share_of
from mmjax.reference.unet import unet_velocity

if TYPE_CHECKING:
    from mmjax.models.dit.config import DiTConfig
    from mmjax.models.llama.config import DecoderConfig

DEFAULT_PROJECTOR = ProjectorConfig()
NONE_FURTHER: Mapping[str, jax.Array] = {}


def _decoder_layer(
    leaves: Arrays,
    layer: int,
    decoder: DecoderConfig,
    x_ND: jax.Array,
    tables: Tables | None,
    masks: Masks | None,
    earlier: KeysByKind,
    input_NP: jax.Array | None,
) -> tuple[jax.Array, RouterSums]:
    prefix = f"llm/layers/{layer:03d}"
    normed = _pre_normed(leaves, f"{prefix}/attn_norm", decoder, x_ND)
    if decoder.has_delta(layer):
        mixed = delta_output(leaves, f"{prefix}/delta", decoder, normed)
        y_ND = matmul(mixed, leaves[f"{prefix}/delta/o"])
    else:
        y_ND = attention_output(leaves, layer, decoder, normed, tables, masks, earlier)
    x_ND = x_ND + _post_normed(leaves, f"{prefix}/attn_post_norm", decoder, y_ND)
    normed = _pre_normed(leaves, f"{prefix}/mlp_norm", decoder, x_ND)
    if has_experts(decoder, layer):
        y_ND, sums = _experts(leaves, prefix, decoder, x_ND, normed)
    else:
        y_ND, sums = gated_mlp(leaves, f"{prefix}/mlp", normed, decoder.activation), RouterSums()
    x_ND = x_ND + _post_normed(leaves, f"{prefix}/mlp_post_norm", decoder, y_ND)
    if input_NP is not None:
        gate_NP = activate(decoder.activation, matmul(x_ND, leaves[f"{prefix}/per_layer/gate"]))
        y_ND = matmul(gate_NP * input_NP, leaves[f"{prefix}/per_layer/out"])
        x_ND = x_ND + scaled_norm(leaves, f"{prefix}/per_layer_norm", decoder, y_ND)
    if decoder.layer_scalar:
        x_ND = x_ND * jax.lax.stop_gradient(leaves[f"{prefix}/layer_scalar"])
    return x_ND, sums


def _experts(
    leaves: Arrays, prefix: str, decoder: DecoderConfig, x_ND: jax.Array, normed: jax.Array
) -> tuple[jax.Array, RouterSums]:
    """The experts of a layer, with `Decoder.mlp_beside_experts` beside its mlp; `normed` is the input of an mlp."""
    if not decoder.mlp_beside_experts:
        return mixture(leaves, prefix, decoder, normed, x_ND)
    y_ND, sums = mixture(leaves, prefix, decoder, scaled_norm(leaves, f"{prefix}/experts_norm", decoder, x_ND), x_ND)
    y_ND = scaled_norm(leaves, f"{prefix}/experts_post_norm", decoder, y_ND)
    of_mlp = gated_mlp(leaves, f"{prefix}/mlp", normed, decoder.activation)
    return y_ND + scaled_norm(leaves, f"{prefix}/mlp_branch_norm", decoder, of_mlp), sums


def _pre_normed(leaves: Arrays, name: str, decoder: DecoderConfig, x_ND: jax.Array) -> jax.Array:
    return scaled_norm(leaves, name, decoder, x_ND) if decoder.pre_norms else x_ND


def _post_normed(leaves: Arrays, name: str, decoder: DecoderConfig, y_ND: jax.Array) -> jax.Array:
    return scaled_norm(leaves, name, decoder, y_ND) if decoder.post_norms else y_ND


Loads = Mapping[str, jax.Array]
"""The number of tokens that chose each expert, by leaf of the router's bias."""
Placed = Sequence[tuple[jax.Array | np.ndarray, jax.Array]]
"""Indices of tokens in a sample, and their features."""


def _hidden(
    leaves: Arrays,
    decoder: DecoderConfig,
    tokens_N: jax.Array,
    modality: Placed,
    injected: Mapping[int, Placed] | None,
    calls: Calls,
    tables: Tables | None,
    masks: Masks | None,
    added_ND: jax.Array | float = 0.0,
) -> tuple[jax.Array, RouterSums]:
    """Hidden states after the final norm, and the sums of routers; without `tables` a token's position is its index.

    `added_ND` is added to the embeddings.
    """
    x_ND = leaves["llm/embed"][tokens_N] * (decoder.width**0.5 if decoder.scaled_embed else 1.0) + added_ND
    for positions_M, features_MD in modality:
        x_ND = x_ND.at[positions_M].set(features_MD)
    x_ND, sums = calls("before", x_ND), RouterSums()
    earlier: KeysByKind = {}
    read_N = tokens_N
    for positions_M, _ in modality:
        read_N = read_N.at[positions_M].set(decoder.per_layer_media)
    inputs = _layer_inputs(leaves, decoder, read_N, x_ND) if decoder.per_layer_width else [None] * decoder.layers
    for layer in range(decoder.layers):
        for positions_M, features_MD in (injected or {}).get(layer, ()):
            x_ND = x_ND.at[positions_M].add(features_MD)
        x_ND, layer_sums = _decoder_layer(leaves, layer, decoder, x_ND, tables, masks, earlier, inputs[layer])
        sums += layer_sums
    return calls("after", scaled_norm(leaves, "llm/norm", decoder, x_ND)), sums


def _layer_inputs(
    leaves: Arrays, decoder: DecoderConfig, tokens_N: jax.Array, x_ND: jax.Array
) -> list[Float[Array, "N P"]]:
    """The inputs of layers beside the features: rows of a table, and a normed product of the first layer's input."""
    width, inputs, table = decoder.per_layer_width, list[jax.Array](), leaves["llm/per_layer/embed"]
    rows_NX = jnp.where((tokens_N >= 0)[:, None], table[tokens_N], 0.0)
    is_media_N = tokens_N == decoder.per_layer_media
    rows_NX = jnp.where(is_media_N[:, None], jax.lax.stop_gradient(rows_NX), rows_NX)
    for layer in range(decoder.layers):
        columns = slice(layer * width, (layer + 1) * width)
        rows_NP = rows_NX[:, columns] * width**0.5
        product_NP = matmul(x_ND, leaves["llm/per_layer/project"][:, columns]) / decoder.width**0.5
        inputs.append((rows_NP + scaled_norm(leaves, "llm/per_layer/norm", decoder, product_NP)) / 2**0.5)
    return inputs


def _logits(leaves: Arrays, decoder: DecoderConfig, x_ND: jax.Array) -> jax.Array:
    logits_NV = matmul(x_ND, leaves["llm/embed"].T if decoder.tied else leaves["llm/head"])
    cap = decoder.logit_cap
    return cap * jnp.tanh(logits_NV / cap) if cap else logits_NV


@functools.partial(jax.jit, static_argnames=("decoder",))
def decode(
    leaves: Arrays,
    decoder: DecoderConfig,
    tokens_N: jax.Array,
    modality: Placed,
    injected: Mapping[int, Placed] | None = None,
    calls: Calls = NO_CALLS,
    tables: Tables | None = None,
    masks: Masks | None = None,
) -> Float[Array, "N V"]:
    """Logits [N, V] of a sample; logits[t] predict token t + 1.

    Args:
      leaves: dense leaves of the LLM, by names such as "llm/embed", as `dense_leaves` gives them.
      decoder: the LLM's settings.
      tokens_N: token ids, all inside the vocabulary; the embeddings of modality tokens are replaced.
      modality: pairs (indices [M] in the sample, features [M, D]) of modality tokens, one for each encoder; () for text
        alone.
      injected: by layer of the LLM, from 0, such pairs, whose features are added to the layer's input.
      calls: the LLM's callbacks.
      tables: rotation tables (cosines, sines) [N, K / 2], as `rotary_tables` gives them; by default a token's position
        is its index.
      masks: two masks [N, N] of layers with a window or chunks and of layers without, true where a token (the row)
        reads another, as `masks.masks_of` gives them; `None` is the causal mask, with the window of the settings.
    """
    x_ND, _ = _hidden(leaves, decoder, tokens_N, modality, injected, calls, tables, masks)
    return _logits(leaves, decoder, x_ND)


@functools.partial(jax.jit, static_argnames=("decoder",))
def decode_loss(
    leaves: Arrays,
    decoder: DecoderConfig,
    tokens_N: jax.Array,
    modality: Placed,
    injected: Mapping[int, Placed],
    targets_N: jax.Array,
    weights_N: jax.Array,
    calls: Calls = NO_CALLS,
    tables: Tables | None = None,
    masks: Masks | None = None,
) -> tuple[dict[str, Float[Array, ""]], Loads, Float[Array, "N D"]]:
    """The sums of weighted losses by name, the loads of experts by leaf, and the hidden states [N, D] for generators.

    The losses are "loss", the cross-entropy, with `Decoder.z_loss` "z_loss", the squared logarithm of the softmax's
    denominator, and those of routers, see `experts.RouterSums`; they are not yet times their weights.

    Args:
      leaves: dense leaves of the LLM, by names such as "llm/embed", as `dense_leaves` gives them.
      decoder: the LLM's settings.
      tokens_N: token ids, all inside the vocabulary; the embeddings of modality tokens are replaced.
      modality: pairs (indices [M] in the sample, features [M, D]) of modality tokens, one for each encoder; () for text
        alone.
      injected: by layer of the LLM, from 0, such pairs, whose features are added to the layer's input; {} for none.
      targets_N: the id of the token after each token, inside the vocabulary.
      weights_N: weights of the targets; 0 for no loss.
      calls: the LLM's callbacks.
      tables: rotation tables (cosines, sines) [N, K / 2], as `rotary_tables` gives them; by default a token's position
        is its index.
      masks: two masks [N, N], as `masks.masks_of` gives them; `None` is the causal mask, with the window of the
        settings.
    """
    x_ND, sums = _hidden(leaves, decoder, tokens_N, modality, injected, calls, tables, masks)
    losses = _losses(decoder, _logits(leaves, decoder, x_ND), targets_N, weights_N)
    return losses | sums.losses, sums.loads, x_ND


def _losses(
    decoder: DecoderConfig, logits_NV: jax.Array, targets_N: jax.Array, weights_N: jax.Array
) -> dict[str, Float[Array, ""]]:
    """The sums of weighted losses by name, see `decode_loss`."""
    log_probabilities = jax.nn.log_softmax(logits_NV, axis=-1)
    chosen_N = jnp.take_along_axis(log_probabilities, targets_N[:, None], axis=-1)[:, 0]
    losses = {"loss": -jnp.sum(weights_N * chosen_N)}
    if decoder.z_loss:
        losses["z_loss"] = jnp.sum(weights_N * jax.nn.logsumexp(logits_NV, axis=-1) ** 2)
    return losses


# --- generator of codes -------------------------------------------------------------------------------------------


def speak_losses(
    leaves: Leaves,
    name: str,
    decoder: DecoderConfig,
    hidden_ND: jax.Array,
    codes_N: np.ndarray,
    projector: ProjectorConfig = DEFAULT_PROJECTOR,
) -> tuple[dict[str, Float[Array, ""]], Loads]:
    """The sums of the losses of a sequence of codes, by name, each predicted from those before, and loads of experts.

    The losses are those of `decode_loss`.

    Args:
      leaves: logical leaves by name, such as "talker/embed", of the generator and its projector; others are not read.
      name: the generator's name, such as "talker".
      decoder: its settings.
      hidden_ND: the LLM's hidden state for each code, as `decode_loss` gives them for tokens.
      codes_N: the codes, ids in the generator's vocabulary; 0 is put in front of the first.
      projector: settings of its projector.
    """
    params = dense_leaves({key: leaf for key, leaf in leaves.items() if module_of(key) in (name, f"{name}_projector")})
    return _speak(params, jnp.asarray(codes_N, jnp.int32), hidden_ND, name=name, decoder=decoder, projector=projector)


@functools.partial(jax.jit, static_argnames=("name", "decoder", "projector"))
def _speak(
    leaves: Arrays,
    codes_N: jax.Array,
    hidden_ND: jax.Array,
    *,
    name: str,
    decoder: DecoderConfig,
    projector: ProjectorConfig,
) -> tuple[dict[str, Float[Array, ""]], Loads]:
    of_decoder = {f"llm{key.removeprefix(name)}": leaf for key, leaf in leaves.items() if module_of(key) == name}
    added_ND = project(leaves, f"{name}_projector", hidden_ND, 1, projector)
    before_N = jnp.concatenate([jnp.zeros(1, codes_N.dtype), codes_N[:-1]])
    x_ND, sums = _hidden(of_decoder, decoder, before_N, (), None, NO_CALLS, None, None, added_ND)
    losses = _losses(decoder, _logits(of_decoder, decoder, x_ND), codes_N, jnp.ones(len(codes_N), x_ND.dtype))
    return losses | sums.losses, {f"{name}{leaf.removeprefix('llm')}": load for leaf, load in sums.loads.items()}


# --- generator ----------------------------------------------------------------------------------------------------


def _generator_layer(
    leaves: Arrays, prefix: str, dit: DiTConfig, x_TD: jax.Array, features_Q: jax.Array, turn: Turn
) -> jax.Array:
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = jnp.split(
        affine(leaves, f"{prefix}/modulation", features_Q), 6
    )
    normed = normalised(x_TD) * (1 + scale) + shift
    x_TD = x_TD + (1 + gate) * attend(leaves, f"{prefix}/attn", dit, normed, turn)
    normed = normalised(x_TD) * (1 + mlp_scale) + mlp_shift
    return x_TD + (1 + mlp_gate) * feed_forward(leaves, f"{prefix}/mlp", dit.activation, normed)


@functools.partial(jax.jit, static_argnames=("name", "dit", "rows", "columns", "projector"))
def velocity(
    leaves: Arrays,
    hidden_ND: jax.Array,
    patches_TX: jax.Array,
    time: jax.Array,
    *,
    name: str,
    dit: DiTConfig,
    rows: int,
    columns: int,
    projector: ProjectorConfig = DEFAULT_PROJECTOR,
    further: Mapping[str, jax.Array] = NONE_FURTHER,
) -> Float[Array, "T X"]:
    """The velocity that a diffusion transformer predicts for the patches of one noisy picture at `time`.

    Args:
      leaves: dense leaves of the generator and its projector, by names such as "painter/patch/kernel", as
        `dense_leaves` gives them.
      hidden_ND: the LLM's hidden states [N, D] of the picture's placeholders, N = rows · columns / merge², or queries.
      patches_TX: noisy patches [rows · columns, patch² · channels] in the order of `patch_positions`.
      time: share of noise, a scalar from 0 to 1.
      name: the generator's name, such as "painter".
      dit: its settings.
      rows, columns: numbers of the picture's patches.
      projector: settings of its projectors.
      further: the features [N, E] of further modules at the picture's tokens, by name of the module. The projector
        "vision" of those of "vision" is beside that of the hidden states.
    """
    positions_T2 = patch_positions(rows, columns, dit.merge)
    condition_ND = project(leaves, f"{name}_projector", hidden_ND, 1, projector)
    for source, x_NE in further.items():
        condition_ND = condition_ND + project(leaves, f"{name}_projector/{source}", x_NE, 1, projector)
    angles = jnp.pi * time * jnp.arange(1, dit.frequencies + 1)
    features_Q = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)]).astype(patches_TX.dtype)
    x_TD = affine(leaves, f"{name}/patch", patches_TX)
    if dit.queries:  # tokens before the patches, at places -1, -2, … of both axes
        before_N2 = np.repeat(-1 - np.arange(len(condition_ND))[:, None], 2, axis=1)
        x_TD, positions_T2 = jnp.concatenate([condition_ND, x_TD]), np.concatenate([before_N2, positions_T2])
    else:
        x_TD = x_TD + condition_ND.reshape(len(positions_T2), -1)
    for layer in range(dit.layers):
        prefix = f"{name}/layers/{layer:03d}"
        x_TD = _generator_layer(leaves, prefix, dit, x_TD, features_Q, turn_2d(positions_T2))
    x_TD = x_TD[dit.queries :]
    shift, scale = jnp.split(affine(leaves, f"{name}/last_modulation", features_Q), 2)
    return affine(leaves, f"{name}/velocity", normalised(x_TD) * (1 + scale) + shift)


def draw_loss(
    leaves: Leaves,
    name: str,
    dit: DiTConfig | UNetConfig,
    hidden_ND: jax.Array,
    picture_HWC: Float[np.ndarray, "h w C"],
    noise_HWC: Float[np.ndarray, "h w C"],
    time: float,
    projector: ProjectorConfig = DEFAULT_PROJECTOR,
    further: Mapping[str, jax.Array] = NONE_FURTHER,
    references: Sequence[Float[np.ndarray, "h w C"]] = (),
) -> Float[Array, ""]:
    """Weighted sum of squared errors of the prediction, such as of the velocity noise - picture.

    The model's input is a mixture of the two (see `noised`), such as (1 - time) picture + time noise.

    Args:
      leaves: logical leaves by name, such as "painter/patch/kernel", of the generator and its projector; others are not
        read.
      name: the generator's name, such as "painter".
      dit: its settings.
      hidden_ND: the LLM's hidden states of the picture's placeholders, one for merge² patches.
      picture_HWC, noise_HWC: the picture, and noise of its shape.
      time: the time of the generator's process, such as the share of noise, from 0 to 1.
      projector: settings of the projectors.
      further: the features [N, E] of further modules at the picture's tokens, by name of the module, such as "vision".
      references: pictures that this one is made from, of a generator with two streams.

    Raises:
      ValueError: a side of the picture is not a multiple of patch * merge.
    """
    params = dense_leaves({key: leaf for key, leaf in leaves.items() if module_of(key) in (name, f"{name}_projector")})
    dtype = next(iter(params.values())).dtype
    noisy_HWC, target_HWC, weight = noised(dit, picture_HWC, noise_HWC, time)
    patches, targets = (jnp.asarray(cut_patches(x, dit.patch, dit.merge), dtype) for x in (noisy_HWC, target_HWC))
    predict = _velocity_of(params, name, dit, picture_HWC, projector, references)
    predicted = predict(hidden_ND, patches, jnp.asarray(share_of(dit, time), dtype), further=further)
    return weight * jnp.sum(jnp.square(predicted - targets))


def integrate(
    leaves: Leaves,
    name: str,
    dit: DiTConfig | UNetConfig,
    hidden_ND: jax.Array,
    noise_HWC: Float[np.ndarray, "h w C"],
    projector: ProjectorConfig = DEFAULT_PROJECTOR,
    further: Mapping[str, jax.Array] = NONE_FURTHER,
    references: Sequence[Float[np.ndarray, "h w C"]] = (),
) -> Float[np.ndarray, "T X"]:
    """Makes a picture's patches from noise by Euler's method: dx/dt is a flow's velocity, from t = 1 to 0.

    It takes `dit.steps` steps, guided by `dit.guidance`.

    The patches [T, patch² · channels] are in the order of `patch_positions`.

    Args:
      leaves: logical leaves by name, such as "painter/patch/kernel", of the generator and its projector; others are not
        read.
      name: the generator's name, such as "painter".
      dit: its settings.
      hidden_ND: the LLM's hidden states of the picture's placeholders, one for merge² patches.
      noise_HWC: noise of the picture's shape.
      projector: settings of the projectors.
      further: the features [N, E] of further modules at the picture's tokens, by name of the module, such as "vision".
      references: pictures that this one is made from, of a generator with two streams.

    Raises:
      ValueError: a side of the picture is not a multiple of patch * merge, or the generator is not drawn so.
    """
    if dit.sampler != "euler" or dit.guidance_rescale:
        raise ValueError(f"{name}/DiT.sampler={dit.sampler!r}: the reference draws by Euler's method, not rescaled")
    params = dense_leaves({key: leaf for key, leaf in leaves.items() if module_of(key) in (name, f"{name}_projector")})
    patches = jnp.asarray(cut_patches(noise_HWC, dit.patch, dit.merge), next(iter(params.values())).dtype)
    predict = _velocity_of(params, name, dit, noise_HWC, projector, references)
    for time, following in itertools.pairwise(flow_times(dit, len(patches))):
        at = jnp.asarray(time, patches.dtype)
        velocity_TX = predict(hidden_ND, patches, at, further=further)
        if dit.guidance != 1:
            plain_TX = predict(jnp.zeros_like(hidden_ND), patches, at, further=further)
            velocity_TX = (1 - dit.guidance) * plain_TX + dit.guidance * velocity_TX
        patches = patches - velocity_TX * (time - following)
    return np.asarray(patches)


def _velocity_of(
    leaves: Arrays,
    name: str,
    dit: DiTConfig | UNetConfig,
    picture_HWC: np.ndarray,
    projector: ProjectorConfig,
    references: Sequence[np.ndarray],
) -> Callable[..., jax.Array]:
    """`velocity` for pictures of this size, as a function of hidden states, patches, time and ``further``.

    It is `double_stream_velocity` for a generator with two streams.
    """
    rows, columns = (side // dit.patch for side in picture_HWC.shape[:2])
    if isinstance(dit, UNetConfig):
        return functools.partial(
            unet_velocity, leaves, name=name, c=dit, rows=rows, columns=columns, projector=projector
        )
    settings = {"name": name, "dit": dit, "rows": rows, "columns": columns, "projector": projector}
    if f"{name}/layers/000/condition_attn/q" not in leaves:
        return functools.partial(velocity, leaves, **settings)
    behind = tuple(jnp.asarray(cut_patches(picture, dit.patch, dit.merge)) for picture in references)
    sides = tuple((picture.shape[0] // dit.patch, picture.shape[1] // dit.patch) for picture in references)
    return functools.partial(double_stream_velocity, leaves, behind=behind, sides=sides, **settings)
