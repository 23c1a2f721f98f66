"""Encoders of latents in folders of ``diffusers``: of an autoencoder's tensors those of its encoder. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.models.autoencoder import weights as autoencoder
from mmjax.models.autoencoder.config import AutoencoderConfig
from mmjax.models.latent_encoder.config import LatentEncoderConfig, fields_from
from mmjax.weights.table import Row, View

_HALVES = ("encoder/", "moments/")


def settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``LatentEncoderConfig`` by name, from the ``config.json`` of an autoencoder.

    Raises:
      ConfigError: mmjax cannot compute it.
    """
    return fields_from(autoencoder.settings(hf_config))


def rows(config: LatentEncoderConfig, model_type: str) -> tuple[Row, ...]:
    """The weights table; of kernels of several frames a leaf is the last one. ``model_type`` is not read."""
    del model_type
    c = config.autoencoder
    of_encoder = [row for row in autoencoder.rows(c) if row.leaf.startswith(_HALVES)]
    sizes = _kernel_sizes(c) if c.causal else {}
    return tuple(replace(_last_frame(row, sizes), leaf=f"layers/{{}}/{row.leaf}") for row in of_encoder)


def unused(config: LatentEncoderConfig) -> tuple[str, ...]:
    """Regular expressions for the ends of keys that need no leaf: those of the decoder, and of kernels over frames."""
    del config
    return (r"decoder\..*", r"post_quant_conv\..*", r"time_conv\..*")


def to_hf_config(config: LatentEncoderConfig, *, model_type: str = "") -> dict[str, Any]:
    """Raises ConfigError: an encoder without its decoder has no folder of its own."""
    del config, model_type
    raise ConfigError("it is the encoder of an autoencoder alone; its own folder has it, unchanged")


def _last_frame(row: Row, sizes: Mapping[str, tuple[int, int, int]]) -> Row:
    """A row whose leaf is the last frame of a kernel of three frames; rows of other leaves do not change."""
    if row.leaf not in sizes:
        return row
    side, inputs, outputs = sizes[row.leaf]
    theirs = outputs, inputs, 1, side, side
    return replace(row, view=View(order=(2, 3, 4, 1, 0), theirs=theirs, rows=(side - 1, side), axis=2))


def _kernel_sizes(c: AutoencoderConfig) -> dict[str, tuple[int, int, int]]:
    """Side, channels in and channels out of each kernel of several frames, by leaf."""
    pair, last = 2 * c.latent_channels, c.widths[-1]
    sizes = {"encoder/conv_in/kernel": (3, c.channels, c.widths[0]), "encoder/conv_out/kernel": (3, last, pair)}
    sizes["moments/kernel"] = (1, pair, pair)
    blocks = {f"middle/block{number}": (last, last) for number in range(2)}
    for number, level in enumerate(c.encoder_levels):
        for block in range(level.blocks):
            blocks[f"level{number}/block{block}"] = (level.outputs if block else level.inputs, level.outputs)
    for name, (inputs, outputs) in blocks.items():
        sizes[f"encoder/{name}/conv1/kernel"] = (3, inputs, outputs)
        sizes[f"encoder/{name}/conv2/kernel"] = (3, outputs, outputs)
        sizes[f"encoder/{name}/shortcut/kernel"] = (1, inputs, outputs)
    return sizes
