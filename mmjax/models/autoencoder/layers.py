"""Encoder and decoder of a variational autoencoder of pictures (Kingma and Welling 2014; Rombach et al. 2022, §3.1).

Residual blocks at several sizes of pictures, and attention over all pixels of the smallest. The encoder makes mean and
logarithm of the variance of each number of a latent, the decoder a picture of a latent.

A causal kernel has three frames, of which the last one is the picture's; frames before it are zeros. So a single
picture meets the kernel's last frame alone, and no convolution over frames (Wan 2025, §4.1).

Shapes: B pictures, H rows, W columns, C channels, Z latent channels; h and w are sides of a latent.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from mmjax.models.autoencoder.config import RESAMPLED, AutoencoderConfig
from mmjax.models.convolutions import Moments, Padding, convolve, group_moments, group_norm

EPS = 1e-6
"""Added to variances of GroupNorms."""
LOG_VARIANCES = (-30.0, 20.0)
"""The least and the largest logarithm of a variance."""
_AT_ONCE = 1 << 24
"""Pairs of pixels of which attention has all scores at once; above, it goes over queries row by row."""
_HIDDEN = -1e30
"""The score of a pixel that is not seen."""
Resampled = Literal["", "smaller", "larger"]
"""Whether a convolution halves the sides of a picture, or follows their doubling."""


class Gaussian(NamedTuple):
    """A normal distribution of latents ``[B, h, w, Z]``.

    Attributes:
      mean: its mean.
      log_variance: the logarithm of its variance.
    """

    mean: Float[Array, "B h w Z"]
    log_variance: Float[Array, "B h w Z"]

    def sample(self, noise: Float[ArrayLike, "B h w Z"]) -> Float[Array, "B h w Z"]:
        """Mean + deviation · noise."""
        return self.mean + jnp.exp(0.5 * self.log_variance) * noise


class Norm(NamedTuple):
    """A norm that is followed by SiLU or by attention.

    Attributes:
      p: its parameters.
      groups: groups of a GroupNorm; 0 for an RMSNorm.
      silu: whether SiLU follows.
    """

    p: Any
    groups: int
    silu: bool = True


class Passes(Protocol):
    """The way in which layers go over pictures: whole, or tile by tile."""

    def convolve(self, x: Any, p: Any, norm: Norm | None = None, resampled: Resampled = "") -> Any:
        """A convolution of pictures ``[B, H, W, C]``, behind a norm and SiLU where one is there.

        A side of 3 has zeros around the picture, or for "smaller" below and behind it; "larger" doubles sides by
        repeating pixels before.
        """
        ...

    def attend(self, x: Any, p: Any, norm: Norm) -> Any:
        """The result of attention, behind its norm, without the residual; for pictures of the smallest size."""
        ...


def encode(c: AutoencoderConfig, p: Any, x: Any, passes: Passes) -> Gaussian:
    """The distribution of the latents of pictures ``[B, H, W, C]`` in -1 to 1, whose sides ``c.factor`` divides."""
    h = _encoder(c, p["encoder"], x, passes)
    h = passes.convolve(h, p["moments"]) if c.moments_convolution else h
    return Gaussian(h[..., : c.latent_channels], h[..., c.latent_channels :].clip(*LOG_VARIANCES))


def decode(c: AutoencoderConfig, p: Any, z: Any, passes: Passes) -> Any:
    """Pictures ``[B, H, W, C]`` of latents ``[B, h, w, Z]`` as ``encode`` gives them, not as generators see them."""
    z = passes.convolve(z, p["latent"]) if c.latent_convolution else z
    p = p["decoder"]
    h = _middle(c, p["middle"], passes.convolve(z, p["conv_in"]), passes)
    for at, level in enumerate(c.decoder_levels):
        h = _level(c, p[f"level{at}"], h, level.blocks, passes, "larger")
    x = passes.convolve(h, p["conv_out"], _norm(c, p["norm"]))
    return x.clip(-1, 1) if c.causal else x


def _encoder(c: AutoencoderConfig, p: Any, x: Any, passes: Passes) -> Any:
    h = passes.convolve(x, p["conv_in"])
    for at, level in enumerate(c.encoder_levels):
        h = _level(c, p[f"level{at}"], h, level.blocks, passes, "smaller")
    return passes.convolve(_middle(c, p["middle"], h, passes), p["conv_out"], _norm(c, p["norm"]))


def _level(c: AutoencoderConfig, p: Any, h: Any, blocks: int, passes: Passes, resampled: Resampled) -> Any:
    for at in range(blocks):
        h = _block(c, p[f"block{at}"], h, passes)
    return passes.convolve(h, p["resample"], resampled=resampled) if "resample" in p else h


def _middle(c: AutoencoderConfig, p: Any, h: Any, passes: Passes) -> Any:
    h = _block(c, p["block0"], h, passes)
    if c.attention:
        h = h + passes.attend(h, p["attn"], _norm(c, p["attn"]["norm"], silu=False))
    return _block(c, p["block1"], h, passes)


def _block(c: AutoencoderConfig, p: Any, x: Any, passes: Passes) -> Any:
    h = passes.convolve(x, p["conv1"], _norm(c, p["norm1"]))
    h = passes.convolve(h, p["conv2"], _norm(c, p["norm2"]))
    return h + (passes.convolve(x, p["shortcut"]) if "shortcut" in p else x)


def _norm(c: AutoencoderConfig, p: Any, *, silu: bool = True) -> Norm:
    return Norm(p, c.groups, silu)


# ---- whole pictures --------------------------------------------------------------------------------------------------


class Whole:
    """Passes over whole pictures, on devices; differentiable and traceable."""

    def convolve(self, x: Array, p: Any, norm: Norm | None = None, resampled: Resampled = "") -> Array:
        """See ``Passes``."""
        x = normed(x, norm, moments_of(x, norm)) if norm else x
        x = doubled(x) if resampled == "larger" else x
        return convolved(x, p, around(p, resampled), resampled)

    def attend(self, x: Array, p: Any, norm: Norm) -> Array:
        """See ``Passes``."""
        return attention(normed(x, norm, moments_of(x, norm)), p)


WHOLE = Whole()


def moments_of(x_BHWC: Array, norm: Norm) -> Moments | None:
    """The statistics that a norm needs of whole pictures; ``None`` for an RMSNorm."""
    return group_moments(x_BHWC, norm.groups) if norm.groups else None


def normed(x_BHWC: Array, norm: Norm, moments: Moments | None) -> Array:
    """The norm, and SiLU where it follows, with the statistics of whole pictures."""
    y_BHWC = group_norm(x_BHWC, norm.p, moments, EPS) if moments else _rms(x_BHWC, norm.p)
    return jax.nn.silu(y_BHWC) if norm.silu else y_BHWC


def _rms(x_BHWC: Array, p: Any) -> Array:
    return (unscaled_rms(x_BHWC) * p["scale"]).astype(x_BHWC.dtype)


def unscaled_rms(x_BHWC: Array) -> Array:
    """RMSNorm over a pixel's channels without a scale, fp32, with the length bounded below as
    ``torch.nn.functional.normalize`` does.
    """
    x32 = x_BHWC.astype(jnp.float32)
    squares = jnp.sum(x32 * x32, axis=-1, keepdims=True)
    return x32 * lax.rsqrt(jnp.maximum(squares, 1e-24)) * x_BHWC.shape[-1] ** 0.5


def doubled(x_BHWC: Array) -> Array:
    """Pictures of twice the sides, each pixel repeated."""
    return jnp.repeat(jnp.repeat(x_BHWC, RESAMPLED, axis=1), RESAMPLED, axis=2)


def around(p: Any, resampled: Resampled) -> Padding:
    """The zeros around whole pictures for the convolution ``p``."""
    before = 0 if resampled == "smaller" else p["kernel"].shape[-4] // 2
    side = (before, p["kernel"].shape[-4] // 2)
    return (side, side)


def convolved(x_BHWC: Array, p: Any, padding: Padding, resampled: Resampled = "") -> Array:
    """The convolution ``p``; of a causal kernel its last frame."""
    kernel = p["kernel"]
    flat = {"kernel": kernel if kernel.ndim == 4 else kernel[-1], "bias": p["bias"]}
    return convolve(x_BHWC, flat, padding, stride=RESAMPLED if resampled == "smaller" else 1)


def attention(h_BHWC: Array, p: Any) -> Array:
    """Attention of one head over all pixels of each picture, and its product "o"."""
    q, k, v = (h_BHWC @ p[name]["kernel"] + p[name]["bias"] for name in "qkv")
    return attended(q, k, v) @ p["o"]["kernel"] + p["o"]["bias"]


def attended(q_BHWC: Array, k_BHWC: Array, v_BHWC: Array, inside_BHW: Array | None = None) -> Array:
    """Attention of one head of all pixels of each picture to those ``inside``, by default all; scores in fp32."""
    k_BTC, v_BTC = (x.reshape(len(x), -1, x.shape[-1]) for x in (k_BHWC, v_BHWC))
    by_rows = (k_BTC.shape[1]) ** 2 > _AT_ONCE
    hidden_B1T = None if inside_BHW is None else ~inside_BHW.reshape(len(inside_BHW), 1, -1)

    def attend(q_BNC: Array) -> Array:
        scores_BNT = jnp.einsum("bnc,btc->bnt", q_BNC, k_BTC, preferred_element_type=jnp.float32)
        scores_BNT = scores_BNT * q_BNC.shape[-1] ** -0.5
        weights_BNT = jax.nn.softmax(scores_BNT if hidden_B1T is None else jnp.where(hidden_B1T, _HIDDEN, scores_BNT))
        return jnp.einsum("bnt,btc->bnc", weights_BNT.astype(v_BTC.dtype), v_BTC)

    if by_rows:
        return lax.map(jax.checkpoint(attend), q_BHWC.swapaxes(0, 1)).swapaxes(0, 1)
    return attend(q_BHWC.reshape(k_BTC.shape)).reshape(q_BHWC.shape)


def to_generator(c: AutoencoderConfig, latents: Any) -> Any:
    """Latents ``[..., Z]`` as a generator sees them."""
    if c.means:
        return (latents - jnp.asarray(c.means, latents.dtype)) / jnp.asarray(c.deviations, latents.dtype)
    return (latents - c.shift) * c.scale


def from_generator(c: AutoencoderConfig, latents: Any) -> Any:
    """Latents for ``decode`` of a generator's ``[..., Z]``; the inverse of ``to_generator``."""
    if c.means:
        return latents * jnp.asarray(c.deviations, latents.dtype) + jnp.asarray(c.means, latents.dtype)
    return latents / c.scale + c.shift


encode_whole = partial(encode, passes=WHOLE)
"""``encode`` of whole pictures, for ``jit`` and gradients: (settings, parameters, pictures)."""
decode_whole = partial(decode, passes=WHOLE)
"""``decode`` of whole pictures: (settings, parameters, latents)."""
