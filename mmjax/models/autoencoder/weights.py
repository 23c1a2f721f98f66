"""Autoencoders in folders of diffusers: settings and weights tables. Imports no JAX.

``AutoencoderKL`` and ``AutoencoderKLQwenImage`` have the same layers under other names. The latter has kernels of three
frames and convolutions over frames, which are leaves too, so that a folder is written as it was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.models.autoencoder.config import AutoencoderConfig, Level
from mmjax.weights.table import SAME, TRANSPOSED, Row, View, third

KL, QWEN_IMAGE = "AutoencoderKL", "AutoencoderKLQwenImage"
"""Values of "_class_name" in ``config.json``."""
_CONVOLUTION, _CAUSAL = View(order=(2, 3, 1, 0)), View(order=(2, 3, 4, 1, 0))
"""Kernels ``[sides, I, O]`` as views of torch's ``[O, I, sides]``."""
_KL_FIELDS: dict[str, Any] = {
    **{"in_channels": 3, "out_channels": 3, "block_out_channels": (64,), "layers_per_block": 1},
    **{"latent_channels": 4, "norm_num_groups": 32, "scaling_factor": 0.18215, "shift_factor": None},
    **{"use_quant_conv": True, "use_post_quant_conv": True, "mid_block_add_attention": True},
    **{"latents_mean": None, "latents_std": None, "act_fn": "silu"},
}
"""What diffusers takes where a config.json of ``AutoencoderKL`` has no value."""
_QWEN_FIELDS: dict[str, Any] = {"base_dim": 96, "z_dim": 16, "num_res_blocks": 2, "input_channels": 3}
"""The same of ``AutoencoderKLQwenImage``."""


def settings(config: Mapping[str, Any]) -> AutoencoderConfig:
    """The settings in a ``config.json``.

    Args:
      config: its content, such as {"_class_name": "AutoencoderKL", …}.

    Raises:
      ConfigError: it is no such autoencoder, or mmjax cannot compute it; one line that names the key.
    """
    one_of("config.json: _class_name", str(config.get("_class_name", "")), (KL, QWEN_IMAGE))
    return _of_kl(config) if config["_class_name"] == KL else _of_qwen_image(config)


def _of_kl(config: Mapping[str, Any]) -> AutoencoderConfig:
    c = _KL_FIELDS | {key: value for key, value in config.items() if value is not None}
    widths = tuple(c["block_out_channels"])
    for key, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        kinds = tuple(c.get(key, (kind,)))
        _require(kinds == (kind,) * len(widths), key, kinds, f"mmjax has {len(widths)} blocks of {kind!r} alone")
    _require(c["act_fn"] in ("silu", "swish"), "act_fn", c["act_fn"], "mmjax has 'silu' alone")
    _require(c["in_channels"] == c["out_channels"], "out_channels", c["out_channels"], "must be in_channels")
    for key in ("latents_mean", "latents_std"):
        _require(c[key] is None, key, c[key], "mmjax has scaling_factor and shift_factor alone for this class")
    return AutoencoderConfig(
        channels=c["in_channels"],
        latent_channels=c["latent_channels"],
        widths=widths,
        layers=c["layers_per_block"],
        groups=c["norm_num_groups"],
        attention=c["mid_block_add_attention"],
        moments_convolution=c["use_quant_conv"],
        latent_convolution=c["use_post_quant_conv"],
        shift=c["shift_factor"] or 0.0,
        scale=c["scaling_factor"],
    )


def _of_qwen_image(config: Mapping[str, Any]) -> AutoencoderConfig:
    c: dict[str, Any] = (
        {"dim_mult": (1, 2, 4, 4), "temperal_downsample": (False, True, True)} | _QWEN_FIELDS | dict(config)
    )
    published = AutoencoderConfig.of("qwen-image")
    _require(not c.get("attn_scales"), "attn_scales", c.get("attn_scales"), "mmjax has attention in the middle alone")
    return AutoencoderConfig(
        channels=c["input_channels"],
        latent_channels=c["z_dim"],
        widths=tuple(c["base_dim"] * multiple for multiple in c["dim_mult"]),
        layers=c["num_res_blocks"],
        groups=0,
        causal=True,
        over_time=tuple(c["temperal_downsample"]),
        scale=1.0,
        means=tuple(c.get("latents_mean", published.means)),
        deviations=tuple(c.get("latents_std", published.deviations)),
    )


def _require(condition: bool, key: str, value: object, fix: str) -> None:
    require(condition, f"config.json: {key}", value, fix)


def to_config(c: AutoencoderConfig) -> dict[str, Any]:
    """The ``config.json``, as a dict, of a folder with these settings."""
    if c.causal:
        base = c.widths[0]
        legal = all(width % base == 0 for width in c.widths)
        require(legal, "Autoencoder.widths", c.widths, f"must be multiples of the first to be written as {QWEN_IMAGE}")
        return {
            **{"_class_name": QWEN_IMAGE, "base_dim": base, "z_dim": c.latent_channels, "dropout": 0.0},
            **{"dim_mult": [width // base for width in c.widths], "num_res_blocks": c.layers, "attn_scales": []},
            **{"temperal_downsample": list(c.over_time), "input_channels": c.channels},
            **{"latents_mean": list(c.means), "latents_std": list(c.deviations)},
        }
    sizes = len(c.widths)
    return {
        **{"_class_name": KL, "in_channels": c.channels, "out_channels": c.channels, "act_fn": "silu"},
        **{"down_block_types": ["DownEncoderBlock2D"] * sizes, "up_block_types": ["UpDecoderBlock2D"] * sizes},
        **{"block_out_channels": list(c.widths), "layers_per_block": c.layers, "norm_num_groups": c.groups},
        **{"latent_channels": c.latent_channels, "mid_block_add_attention": c.attention},
        **{"use_quant_conv": c.moments_convolution, "use_post_quant_conv": c.latent_convolution},
        **{"scaling_factor": c.scale, "shift_factor": c.shift or None},
    }


def rows(c: AutoencoderConfig) -> tuple[Row, ...]:
    """The weights table: a ``Row`` for each leaf, such as "encoder/level0/block0/conv1/kernel", and its key."""
    return tuple(_rows(c))


def _rows(c: AutoencoderConfig) -> Iterator[Row]:
    for half, levels in (("encoder", c.encoder_levels), ("decoder", c.decoder_levels)):
        yield from _convolution(c, f"{half}/conv_in", f"{half}.conv_in")
        yield from _levels(c, half, levels)
        middle = f"{half}.mid_block"
        for at in (0, 1):
            width = c.widths[-1]
            yield from _block(c, f"{half}/middle/block{at}", f"{middle}.resnets.{at}", width, width)
        if c.attention:
            yield from _attention(c, f"{half}/middle/attn", f"{middle}.attentions.0")
        norm = "norm_out" if c.causal else "conv_norm_out"
        yield from _norm(c, f"{half}/norm", f"{half}.{norm}", levels[-1].outputs)
        yield from _convolution(c, f"{half}/conv_out", f"{half}.conv_out")
    for leaf, key, there in (
        ("moments", "quant_conv", c.moments_convolution),
        ("latent", "post_quant_conv", c.latent_convolution),
    ):
        yield from _convolution(c, leaf, key) if there else ()


def _levels(c: AutoencoderConfig, half: str, levels: tuple[Level, ...]) -> Iterator[Row]:
    number = 0  # Qwen-Image's encoder counts blocks and convolutions of all sizes in one list
    for at, level in enumerate(levels):
        leaf, flat = f"{half}/level{at}", c.causal and half == "encoder"
        key = f"encoder.down_blocks.{at}" if half == "encoder" else f"decoder.up_blocks.{at}"
        for block in range(level.blocks):
            inputs = level.outputs if block else level.inputs
            place = f"encoder.down_blocks.{number + block}" if flat else f"{key}.resnets.{block}"
            yield from _block(c, f"{leaf}/block{block}", place, inputs, level.outputs)
        sampler = "downsamplers" if half == "encoder" else "upsamplers"
        place = f"encoder.down_blocks.{number + level.blocks}" if flat else f"{key}.{sampler}.0"
        if level.resampled:
            last = f"{place}.resample.1" if c.causal else f"{place}.conv"
            yield from _pair(f"{leaf}/resample", last, _CONVOLUTION)
        if level.over_time:
            yield from _pair(f"{leaf}/time", f"{place}.time_conv", _CAUSAL)
        number += level.blocks + 1


def _block(c: AutoencoderConfig, leaf: str, key: str, inputs: int, outputs: int) -> Iterator[Row]:
    for number, width in ((1, inputs), (2, outputs)):
        yield from _norm(c, f"{leaf}/norm{number}", f"{key}.norm{number}", width)
        yield from _convolution(c, f"{leaf}/conv{number}", f"{key}.conv{number}")
    if inputs != outputs:
        yield from _convolution(c, f"{leaf}/shortcut", f"{key}.conv_shortcut")


_OLDER = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
"""Names in folders that diffusers wrote before 0.15, such as Stable Diffusion's on the Hub."""


def _attention(c: AutoencoderConfig, leaf: str, key: str) -> Iterator[Row]:
    width = c.widths[-1]
    if not c.causal:
        yield from _norm(c, f"{leaf}/norm", f"{key}.group_norm", width)
        for name, (new, old) in zip("qkvo", _OLDER.items(), strict=True):
            for parameter, their_name, view in (("kernel", "weight", TRANSPOSED), ("bias", "bias", SAME)):
                keys = tuple(f"{key}.{module}.{their_name}" for module in (new, old))
                yield Row(f"{leaf}/{name}/{parameter}", keys, view)
        return
    yield Row(f"{leaf}/norm/scale", (f"{key}.norm.gamma",), View(theirs=(width, 1, 1)))
    product = View(order=(1, 0, 2, 3), theirs=(width, width, 1, 1))
    for number, name in enumerate("qkv"):
        yield Row(f"{leaf}/{name}/kernel", (f"{key}.to_qkv.weight",), third(number, width, product))
        yield Row(f"{leaf}/{name}/bias", (f"{key}.to_qkv.bias",), third(number, width, SAME))
    yield from _pair(f"{leaf}/o", f"{key}.proj", product)


def _norm(c: AutoencoderConfig, leaf: str, key: str, width: int) -> Iterator[Row]:
    if c.causal:
        yield Row(f"{leaf}/scale", (f"{key}.gamma",), View(theirs=(width, 1, 1, 1)))
    else:
        yield Row(f"{leaf}/scale", (f"{key}.weight",))
        yield Row(f"{leaf}/bias", (f"{key}.bias",))


def _convolution(c: AutoencoderConfig, leaf: str, key: str) -> Iterator[Row]:
    yield from _pair(leaf, key, _CAUSAL if c.causal else _CONVOLUTION)


def _pair(leaf: str, key: str, view: View) -> Iterator[Row]:
    yield Row(f"{leaf}/kernel", (f"{key}.weight",), view)
    yield Row(f"{leaf}/bias", (f"{key}.bias",))
