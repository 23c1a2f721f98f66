"""UNets in folders of ``diffusers``: settings and weights table of ``UNet2DConditionModel``. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.models.unet.config import GATED, KERNEL, UNetConfig
from mmjax.weights.table import SAME, TRANSPOSED, Row, View, third

CLASS = "UNet2DConditionModel"
_DOWN = {True: "CrossAttnDownBlock2D", False: "DownBlock2D"}
_UP = {True: "CrossAttnUpBlock2D", False: "UpBlock2D"}
_MIDDLE = "UNetMidBlock2DCrossAttn"
"""Classes of blocks, of levels with and without attention, and between the way down and the way up."""
_LAYER = "layers/{}/"
# Defaults of diffusers for keys that a config.json may leave out.
_DEFAULTS: Mapping[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "down_block_types": (_DOWN[True], _DOWN[True], _DOWN[True], _DOWN[False]),
    "mid_block_type": _MIDDLE,
    "up_block_types": (_UP[False], _UP[True], _UP[True], _UP[True]),
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "norm_eps": 1e-5,
    "cross_attention_dim": 1280,
    "transformer_layers_per_block": 1,
    "attention_head_dim": 8,
    "use_linear_projection": False,
    "upcast_attention": False,
}
_FIELDS = {
    "width": "cross_attention_dim",
    "channels": "in_channels",
    "blocks": "layers_per_block",
    "transformer_blocks": "transformer_layers_per_block",
    "groups": "norm_num_groups",
    "norm_eps": "norm_eps",
    "flip_sin_to_cos": "flip_sin_to_cos",
    "freq_shift": "freq_shift",
    "linear_projection": "use_linear_projection",
    "upcast_attention": "upcast_attention",
}
"""Keys of the fields that have the same values in both."""
_FIXED: Mapping[str, Any] = {
    "act_fn": "silu",
    "addition_embed_type": None,
    "attention_type": "default",
    "center_input_sample": False,
    "class_embed_type": None,
    "class_embeddings_concat": False,
    "conv_in_kernel": KERNEL,
    "conv_out_kernel": KERNEL,
    "cross_attention_norm": None,
    "downsample_padding": 1,
    "dropout": 0.0,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "mid_block_scale_factor": 1,
    "num_attention_heads": None,
    "num_class_embeds": None,
    "only_cross_attention": False,
    "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False,
    "resnet_time_scale_shift": "default",
    "time_cond_proj_dim": None,
    "time_embedding_act_fn": None,
    "time_embedding_dim": None,
    "time_embedding_type": "positional",
    "timestep_post_act": None,
}
"""Keys with the only value that is computed here, the default of diffusers."""


def settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``UNetConfig``, by name, from a config.json: {"widths": (320, 640), …}.

    What diffusers calls "attention_head_dim" is the number of heads.

    Raises:
      ConfigError: it is no ``UNet2DConditionModel``, or mmjax cannot compute it.
    """
    one_of("config.json: _class_name", str(hf_config.get("_class_name", "")), (CLASS,))
    for key, legal in _FIXED.items():
        value = hf_config.get(key, legal)
        require(value == legal, f"config.json: {key}", value, f"mmjax has UNets with {legal!r} alone")
    c = {**_DEFAULTS, **{key: hf_config[key] for key in _DEFAULTS if hf_config.get(key) is not None}}
    for key in ("layers_per_block", "transformer_layers_per_block", "cross_attention_dim", "norm_num_groups"):
        require(isinstance(c[key], int), f"config.json: {key}", c[key], "mmjax has one number for all levels")
    fix = f"mmjax has UNets with as many as in_channels ({c['in_channels']}) alone"
    require(c["out_channels"] == c["in_channels"], "config.json: out_channels", c["out_channels"], fix)
    one_of("config.json: mid_block_type", str(c["mid_block_type"]), (_MIDDLE,))
    widths = tuple(c["block_out_channels"])
    heads = c["attention_head_dim"]
    heads = (heads,) * len(widths) if isinstance(heads, int) else tuple(heads)
    has_attention = _levels_with_attention(c, len(widths))
    fix = f"must have a number for each of {len(widths)} levels"
    require(len(heads) == len(widths), "config.json: attention_head_dim", list(heads), fix)
    values = {name: c[key] for name, key in _FIELDS.items()}
    values |= {"norm_eps": float(c["norm_eps"]), "freq_shift": float(c["freq_shift"])}
    by_level = tuple(number * is_there for number, is_there in zip(heads, has_attention, strict=True))
    return values | {"widths": widths, "heads_by_level": by_level, "mid_heads": heads[-1]}


def _levels_with_attention(c: Mapping[str, Any], levels: int) -> list[bool]:
    """Whether each level has attention, from the types of its blocks, the same on the way down and on the way up."""
    down, up = c["down_block_types"], c["up_block_types"]
    for key, types, legal in (("down_block_types", down, _DOWN), ("up_block_types", up, _UP)):
        fix = f"must name one of {', '.join(legal.values())} for each of {levels} levels"
        known = len(types) == levels and all(kind in legal.values() for kind in types)
        require(known, f"config.json: {key}", list(types), fix)
    result = [kind == _DOWN[True] for kind in down]
    fix = "mmjax has attention at the same levels on both ways, in the reverse order here"
    same = [kind == _UP[True] for kind in reversed(up)] == result
    require(same, "config.json: up_block_types", list(up), fix)
    return result


def to_hf_config(config: UNetConfig, *, model_type: str = "") -> dict[str, Any]:
    """The config.json, as a dict, of a folder of the UNet; ``model_type`` is not read, since diffusers has none."""
    del model_type
    with_attention = [heads > 0 for heads in config.heads_by_level]
    hf_config = {"_class_name": CLASS, **_FIXED}
    hf_config |= {key: getattr(config, name) for name, key in _FIELDS.items()}
    return hf_config | {
        "out_channels": config.channels,
        "block_out_channels": list(config.widths),
        "attention_head_dim": [*(heads or config.mid_heads for heads in config.heads_by_level[:-1]), config.mid_heads],
        "down_block_types": [_DOWN[has] for has in with_attention],
        "mid_block_type": _MIDDLE,
        "up_block_types": [_UP[has] for has in reversed(with_attention)],
    }


def rows(config: UNetConfig, model_type: str) -> tuple[Row, ...]:
    """The weights table. ``model_type`` is not read.

    A ``Row`` has the ``leaf``, such as "layers/{}/conv_in/kernel", the ``keys`` of its tensor and its ``view`` of it.
    """
    del model_type
    return tuple(_rows(config))


def unused(config: UNetConfig) -> tuple[str, ...]:
    """Regular expressions for the ends of keys that need no leaf: none, ()."""
    del config
    return ()


_KERNEL = View(order=(2, 3, 1, 0))
"""A kernel ``[3, 3, C, F]`` as a view of ``[F, C, 3, 3]``."""


def _rows(c: UNetConfig) -> Iterator[Row]:
    yield from _weight("conv_in", "conv_in", _KERNEL)
    yield from _weight("time_up", "time_embedding.linear_1", TRANSPOSED)
    yield from _weight("time_down", "time_embedding.linear_2", TRANSPOSED)
    last = len(c.widths) - 1
    for level, inputs in enumerate(c.down_inputs):
        yield from _level(c, f"down_{level}", f"down_blocks.{level}", inputs, level)
        if level < last:
            yield from _weight(f"down_{level}/sample", f"down_blocks.{level}.downsamplers.0.conv", _KERNEL)
    width = c.widths[-1]
    for number in range(2):
        yield from _resnet(f"mid/resnet_{number}", f"mid_block.resnets.{number}", width, width)
    yield from _transformer(c, "mid/attention_0", "mid_block.attentions.0", width)
    for number, inputs in enumerate(c.up_inputs):
        yield from _level(c, f"up_{number}", f"up_blocks.{number}", inputs, last - number)
        if number < last:
            yield from _weight(f"up_{number}/sample", f"up_blocks.{number}.upsamplers.0.conv", _KERNEL)
    yield from _norm("norm_out", "conv_norm_out")
    yield from _weight("conv_out", "conv_out", _KERNEL)


def _weight(leaf: str, key: str, view: View, *others: View) -> Iterator[Row]:
    yield Row(f"{_LAYER}{leaf}/kernel", (f"{key}.weight",), view, other_views=others)
    yield Row(f"{_LAYER}{leaf}/bias", (f"{key}.bias",))


def _norm(leaf: str, key: str) -> Iterator[Row]:
    yield Row(f"{_LAYER}{leaf}/scale", (f"{key}.weight",))
    yield Row(f"{_LAYER}{leaf}/bias", (f"{key}.bias",))


def _level(c: UNetConfig, leaf: str, key: str, inputs: tuple[int, ...], level: int) -> Iterator[Row]:
    """The blocks of a level on one of the ways."""
    for number, channels in enumerate(inputs):
        yield from _resnet(f"{leaf}/resnet_{number}", f"{key}.resnets.{number}", channels, c.widths[level])
        if c.heads_by_level[level]:
            attention = f"{leaf}/attention_{number}", f"{key}.attentions.{number}"
            yield from _transformer(c, *attention, c.widths[level])


def _one_place(inputs: int, outputs: int) -> View:
    """A matrix ``[inputs, outputs]`` as a view of a kernel of one place."""
    return View(order=(1, 0, 2, 3), theirs=(outputs, inputs, 1, 1))


def _resnet(leaf: str, key: str, inputs: int, outputs: int) -> Iterator[Row]:
    for number in (1, 2):
        yield from _norm(f"{leaf}/norm{number}", f"{key}.norm{number}")
        yield from _weight(f"{leaf}/conv{number}", f"{key}.conv{number}", _KERNEL)
    yield from _weight(f"{leaf}/time", f"{key}.time_emb_proj", TRANSPOSED)
    if inputs != outputs:
        yield from _weight(f"{leaf}/shortcut", f"{key}.conv_shortcut", _one_place(inputs, outputs))


def _transformer(c: UNetConfig, leaf: str, key: str, width: int) -> Iterator[Row]:
    yield from _norm(f"{leaf}/norm", f"{key}.norm")
    views = (TRANSPOSED, _one_place(width, width))
    for name in ("proj_in", "proj_out"):
        yield from _weight(f"{leaf}/{name}", f"{key}.{name}", *(views if c.linear_projection else reversed(views)))
    for number in range(c.transformer_blocks):
        yield from _block(f"{leaf}/block_{number}", f"{key}.transformer_blocks.{number}", width)


def _block(leaf: str, key: str, width: int) -> Iterator[Row]:
    for number in (1, 2, 3):
        yield from _norm(f"{leaf}/norm{number}", f"{key}.norm{number}")
    for name, hf_name in (("self_attn", "attn1"), ("cross_attn", "attn2")):
        for product in ("q", "k", "v"):
            yield Row(f"{_LAYER}{leaf}/{name}/{product}", (f"{key}.{hf_name}.to_{product}.weight",), TRANSPOSED)
        yield Row(f"{_LAYER}{leaf}/{name}/o", (f"{key}.{hf_name}.to_out.0.weight",), TRANSPOSED)
        yield Row(f"{_LAYER}{leaf}/{name}/o_bias", (f"{key}.{hf_name}.to_out.0.bias",))
    for number, name in enumerate(("up", "gate")):  # the halves of one tensor
        hidden, product = GATED * width, f"{key}.ff.net.0.proj"
        yield Row(f"{_LAYER}{leaf}/mlp/{name}", (f"{product}.weight",), third(number, hidden))
        yield Row(f"{_LAYER}{leaf}/mlp/{name}_bias", (f"{product}.bias",), third(number, hidden, SAME))
    yield Row(f"{_LAYER}{leaf}/mlp/down", (f"{key}.ff.net.2.weight",), TRANSPOSED)
    yield Row(f"{_LAYER}{leaf}/mlp/down_bias", (f"{key}.ff.net.2.bias",))
