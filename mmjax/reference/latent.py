"""Multi-head latent attention on one sample (DeepSeek-V2, §2.1, equations 9 to 19, whose symbols stand in comments).

Letters in shapes: N tokens of a sample, D width, H heads, P width of a head's part without position, R width of its
rotated part, V width of a head's values, L width of a latent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.reference.arithmetic import Arrays, Tables, matmul, rms_norm

if TYPE_CHECKING:
    from mmjax.models.llama.config import DecoderConfig

_EPS = 1e-6


def latent_heads(
    leaves: Arrays, prefix: str, decoder: DecoderConfig, x_ND: Float[Array, "N D"], tables: Tables, magnitude: float
) -> tuple[Float[Array, "N H P+R"], Float[Array, "N H P+R"], Float[Array, "N H V"]]:
    """Queries, keys and values of all tokens, for softmax attention with the scale (P + R)^-0.5.

    Args:
      leaves: arrays by name, as `dense_leaves` gives them.
      prefix: the prefix of the layer's attention, such as "llm/layers/000/attn".
      decoder: the settings.
      x_ND: the normalised features.
      tables: rotation tables (cosines, sines) [N, R / 2].
      magnitude: a factor of rotated queries and keys.
    """
    length, heads, part = len(x_ND), decoder.heads, decoder.nope_head_dim

    def leaf(name: str) -> jax.Array:
        return leaves[f"{prefix}/{name}"]

    if decoder.q_rank:  # c^Q, and W^UQ with W^QR head by head
        latent_NL = rms_norm(leaf("q_down_norm"), matmul(x_ND, leaf("q_down")), _EPS)
        q_NHK = matmul(latent_NL, leaf("q_up")).reshape(length, heads, -1)
    else:
        q_NHK = matmul(x_ND, leaf("q")).reshape(length, heads, -1)
    down = matmul(x_ND, leaf("kv_down"))  # W^DKV, then W^KR
    latent_NL = rms_norm(leaf("kv_down_norm"), down[:, : decoder.kv_rank], _EPS)  # c^KV
    up = matmul(latent_NL, leaf("kv_up")).reshape(length, heads, -1)  # W^UK, then W^UV, head by head
    shared_NR = magnitude * _rotate_neighbours(down[:, decoder.kv_rank :], tables)  # k^R
    keys, queries = [], []
    for head in range(heads):
        keys.append(jnp.concatenate([up[:, head, :part], shared_NR], axis=1))
        rotated_NR = magnitude * _rotate_neighbours(q_NHK[:, head, part:], tables)
        queries.append(jnp.concatenate([q_NHK[:, head, :part], rotated_NR], axis=1))
    q_NHK, k_NHK = (jnp.stack(each, axis=1) for each in (queries, keys))
    return q_NHK * _softmax_factor(decoder), k_NHK, up[:, :, part:]


def _rotate_neighbours(x_NR: jax.Array, tables: Tables) -> jax.Array:
    """Rotates each pair of neighbours (2 i, 2 i + 1), as a complex number, by the angle of column i of the tables."""
    cos, sin = (jnp.asarray(table, x_NR.dtype) for table in tables)
    pairs = x_NR.reshape(len(x_NR), -1, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    return jnp.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1).reshape(x_NR.shape)


def latent_magnitude(decoder: DecoderConfig) -> float:
    """The factor of rotated queries and keys under YaRN, as DeepSeek's release has it."""
    return _stretched(decoder, decoder.rope_mscale) / _stretched(decoder, decoder.rope_mscale_all)


def _softmax_factor(decoder: DecoderConfig) -> float:
    return _stretched(decoder, decoder.rope_mscale_all) ** 2 if decoder.rope_scaling == "yarn" else 1.0


def _stretched(decoder: DecoderConfig, mscale: float) -> float:
    return 0.1 * mscale * float(np.log(decoder.rope_factor)) + 1
