"""Encoders of another encoder's tokens: all media of a sample together.

Legend: N tokens of all media of a sample, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.temporal.config import TemporalConfig
from mmjax.reference.arithmetic import Arrays, Leaves, dense_leaves, module_of, project, rotate
from mmjax.reference.encoders import DEFAULT_PROJECTOR, encoder_layers


def encode_clip(
    leaves: Leaves,
    name: str,
    temporal: TemporalConfig,
    tokens: Sequence[jax.Array],
    levels: tuple[int, ...] = (),
    projector: ProjectorConfig = DEFAULT_PROJECTOR,
) -> tuple[jax.Array, list[jax.Array]]:
    """Encodes the tokens of all media of a sample: a token reads those of its own medium and of media before it.

    Args:
      leaves: logical leaves by name, such as "temporal/layers/000/attn/q", of the encoder and its projector; others are
        not read.
      name: the encoder's name, such as "temporal".
      temporal: its settings.
      tokens: the tokens [n, D] of each medium in turn, at least one medium; D is the encoder's width.
      levels: numbers of layers, from 0, whose outputs are returned too.
      projector: settings of the projector.

    Returns:
      Projected tokens [N, width], one for each token of the media in turn, and the output [N, D] of each of `levels`.
    """
    params = dense_leaves({key: leaf for key, leaf in leaves.items() if module_of(key) in (name, f"{name}_projector")})
    counts = tuple(len(features) for features in tokens)
    run = functools.partial(_encode, name=name, temporal=temporal, counts=counts, levels=levels, projector=projector)
    return run(params, jnp.concatenate(tokens))


@functools.partial(jax.jit, static_argnames=("name", "temporal", "counts", "levels", "projector"))
def _encode(
    leaves: Arrays,
    x_ND: jax.Array,
    *,
    name: str,
    temporal: TemporalConfig,
    counts: tuple[int, ...],
    levels: tuple[int, ...],
    projector: ProjectorConfig,
) -> tuple[jax.Array, list[jax.Array]]:
    medium_N = np.array([medium for medium, count in enumerate(counts) for _ in range(count)])
    read_NN = jnp.asarray(medium_N[None, :] <= medium_N[:, None])

    def turn(y_NHK: jax.Array) -> jax.Array:
        return rotate(y_NHK, medium_N, temporal.rope_theta)

    x_ND, outputs = encoder_layers(leaves, name, temporal, x_ND, turn, read_TT=read_NN)
    return project(leaves, f"{name}_projector", x_ND, 1, projector), [outputs[level] for level in levels]
