"""Configurations so small that a check shrinks nothing but their batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mmjax.config import load_config
from mmjax.mesh.layout import Layout
from mmjax.recipe import Recipe

# Heads, hidden units and widths divide by 1, 2 and 4; the vocabulary by none, so that tp pads it. With four layers
# three stages are uneven.
TINY = """
Train.global_batch = 48
Train.microbatches = 2
Train.clip_norm = 0.0
Data.sequence_length = 128
vision/Packing.buckets = ()
llm/Packing.buckets = ()
vision/ViT.layers = 2
vision/ViT.width = 16
vision/ViT.heads = 4
vision/ViT.mlp = 24
vision/ViT.patch = 2
vision/Projector.hidden = 20
llm/Decoder.layers = 4
llm/Decoder.width = 24
llm/Decoder.heads = 8
llm/Decoder.kv_heads = 4
llm/Decoder.head_dim = 4
llm/Decoder.mlp = 40
llm/Decoder.vocab = 261
"""
# The encoder on ranks 2-3 fans in to the LLM on ranks 0-1.
FAN_IN = {"llm/Layout.tp": 2, "vision/Layout.dp": 2, "vision/Layout.rank_offset": 2, "llm/Decoder.layers": 1}


def bindings(**changes: Any) -> list[str]:
    """The tiny configuration as bindings; changes by name ("llm/Decoder.tied")."""
    lines: dict[str, str] = {}
    for line in TINY.strip().splitlines():
        name, _, value = line.partition(" = ")
        lines[name] = value
    return [f"{name}={value}" for name, value in (lines | {k: repr(v) for k, v in changes.items()}).items()]


def tiny(**changes: Any) -> Recipe:
    """The tiny configuration."""
    return load_config([], bindings(**changes))


def layout_bindings(vision: Layout, llm: Layout) -> dict[str, int]:
    """Bindings of both layouts."""
    names = ("dp", "pp", "tp", "rank_offset", "optimizer_instances")
    both = {"vision": vision, "llm": llm}
    return {f"{m}/Layout.{f}": getattr(o, f) for m, o in both.items() for f in names}


Changes = dict[str, Any]


def layouts(offset: int, vision: Changes, **llm: Any) -> Changes:
    """Layouts of both modules; the encoder's ranks begin at ``offset``."""
    changes = {f"llm/Layout.{name}": value for name, value in llm.items()}
    return changes | {f"vision/Layout.{name}": value for name, value in (vision | {"rank_offset": offset}).items()}


NESTED: Changes = {"Train.schedule": "nested", "Train.microbatches": 4, "vision/Layout.lanes": 2}
SPLIT: Changes = {"Train.schedule": "zb-h1", "Train.clip_norm": 0.5}
ADAPTERS: Changes = {"llm/Lora.rank": 2, "llm/Lora.targets": ("attn/*", "mlp/*"), "llm/Optimizer.frozen": True}
TWO_STAGES: Changes = layouts(4, {"pp": 2, "tp": 2}, pp=2, tp=2)


def cases(matrix: Mapping[str, Changes], fast: str = "") -> pytest.MarkDecorator:
    """``changes`` of each case of a matrix, by its name; all but ``fast`` are long tests."""
    marks = {name: [] if name == fast else [pytest.mark.long] for name in matrix}
    return pytest.mark.parametrize(
        "changes", [pytest.param(matrix[name], id=name, marks=marks[name]) for name in matrix]
    )


# What an audio encoder adds. Its widths divide by 1, 2 and 4, too.
EARS: dict[str, Any] = {
    "Model.encoders": {"vision": "vit", "audio": "whisper"},
    "audio/Whisper.layers": 2,
    "audio/Whisper.width": 16,
    "audio/Whisper.heads": 4,
    "audio/Whisper.mlp": 24,
    "audio/Whisper.mels": 5,
    "audio/Whisper.merge": 2,
    "audio/Projector.hidden": 12,
    "audio/Packing.buckets": (),
}

# What a generator adds, likewise.
HAND: dict[str, Any] = {
    "Model.generators": {"painter": "dit"},
    "llm/Decoder.vocab": 263,  # the tokenizer has one placeholder more
    "painter/Packing.buckets": (),
    "painter/DiT.layers": 2,
    "painter/DiT.width": 16,
    "painter/DiT.heads": 4,
    "painter/DiT.mlp": 24,
    "painter/DiT.patch": 2,
    "painter/DiT.frequencies": 3,
    "painter/DiT.loss_weight": 0.5,
    "painter/Projector.hidden": 12,
}

# An encoder that reads the image encoder; the LLM reads it instead. Its widths divide by 1, 2 and 4, and differ.
CLIP: dict[str, Any] = {
    "Model.encoders": {"vision": "vit", "temporal": "temporal"},
    "Model.edges": ("vision -> temporal", "temporal -> llm"),
    "temporal/Packing.buckets": (),
    "temporal/Temporal.layers": 2,
    "temporal/Temporal.width": 16,
    "temporal/Temporal.heads": 4,
    "temporal/Temporal.mlp": 24,
    "temporal/Projector.hidden": 12,
}

# A generator that also reads the image encoder.
REDRAW: dict[str, Any] = HAND | {
    "Model.edges": ("vision -> llm", "llm -> painter", "vision -> painter"),
    "llm/Decoder.vocab": 262,
}


# A generator with streams of condition and picture; two ranks of tp share the condition's places.
STREAMS: dict[str, Any] = {
    "Model.generators": {"painter": "mmdit"},
    "llm/Decoder.vocab": 262,
    "painter/Packing.buckets": (),
    "painter/MMDiT.layers": 2,
    "painter/MMDiT.width": 32,
    "painter/MMDiT.heads": 4,
    "painter/MMDiT.mlp": 24,
    "painter/MMDiT.patch": 2,
    "painter/MMDiT.queries": 2,
    "painter/MMDiT.loss_weight": 0.5,
    "painter/Projector.kind": "linear",
    "painter/Projector.norm": "rms",
}


# A UNet of two levels, whose pictures lie on two canvases; tp divides its groups and heads, and not those of one head.
UNET: dict[str, Any] = {
    "Model.generators": {"painter": "unet"},
    "llm/Decoder.vocab": 262,
    "painter/Packing.buckets": (),
    "painter/Layout.sp": False,
    "painter/UNet.width": 12,
    "painter/UNet.queries": 2,
    "painter/UNet.channels": 1,
    "painter/UNet.widths": (8, 16),
    "painter/UNet.heads_by_level": (1, 0),
    "painter/UNet.mid_heads": 2,
    "painter/UNet.groups": 4,
    "painter/UNet.canvases": ((4, 4),),
    "painter/UNet.loss_weight": 0.5,
    "painter/Projector.hidden": 12,
}

# A second generator, a diffusion transformer beside the one named painter.
PRINTER: dict[str, Any] = {
    "llm/Decoder.vocab": 263,
    **{name.replace("painter/", "printer/"): value for name, value in HAND.items() if name.startswith("painter/")},
}


def unet(llm: str, vision: str, painter: str, **changes: Any) -> dict[str, Any]:
    """An image encoder, an LLM, and a UNet; layouts as in ``three``."""
    return UNET | _layouts(llm=llm, vision=vision, painter=painter) | changes


def both(llm: str, vision: str, painter: str, printer: str, first: Changes = UNET, /, **changes: Any) -> dict[str, Any]:
    """The same with a second generator, a diffusion transformer; ``first`` are settings of the first one."""
    ((_, kind),) = first["Model.generators"].items()
    generators = {"Model.generators": {"painter": kind, "printer": "dit"}}
    return first | PRINTER | generators | _layouts(llm=llm, vision=vision, painter=painter, printer=printer) | changes


def streams(llm: str, vision: str, painter: str, **changes: Any) -> dict[str, Any]:
    """An image encoder, an LLM, and a generator with two streams; layouts as in ``three``."""
    return STREAMS | _layouts(llm=llm, vision=vision, painter=painter) | changes


def three(llm: str, vision: str, audio: str, **changes: Any) -> dict[str, Any]:
    """Image and audio encoders and an LLM in layouts written "tp,pp,dp" or "tp,pp,dp@first rank".

    Without a first rank a module lies behind those before it, the LLM first of all.
    """
    return EARS | _layouts(llm=llm, vision=vision, audio=audio) | changes


def four(llm: str, vision: str, audio: str, painter: str, **changes: Any) -> dict[str, Any]:
    """The same with a generator."""
    return EARS | HAND | _layouts(llm=llm, vision=vision, audio=audio, painter=painter) | changes


def clip(llm: str, vision: str, temporal: str, **changes: Any) -> dict[str, Any]:
    """An image encoder, an encoder that reads it, and an LLM that reads that one; layouts as in ``three``."""
    return CLIP | _layouts(llm=llm, vision=vision, temporal=temporal) | changes


def redraw(llm: str, vision: str, painter: str, **changes: Any) -> dict[str, Any]:
    """An image encoder, an LLM, and a generator that reads both; layouts as in ``three``."""
    return REDRAW | _layouts(llm=llm, vision=vision, painter=painter) | changes


# A decoder that speaks in codes.
TALKER: dict[str, Any] = {
    "Model.generators": {"talker": "llama"},
    "talker/Decoder.layers": 2,
    "talker/Decoder.width": 16,
    "talker/Decoder.heads": 4,
    "talker/Decoder.kv_heads": 2,
    "talker/Decoder.mlp": 24,
    "talker/Decoder.vocab": 11,
    "talker/Projector.hidden": 20,
    "talker/Packing.buckets": (),
}


def speaking(llm: str, vision: str, talker: str, **changes: Any) -> dict[str, Any]:
    """What an LLM, an image encoder and a talker add; layouts are written "tp,pp,dp"."""
    return TALKER | _layouts(llm=llm, vision=vision, talker=talker) | changes


def _layouts(**modules: str) -> dict[str, Any]:
    found, end = {}, 0
    for name, text in modules.items():
        degrees, _, offset = text.partition("@")
        tp, pp, dp = map(int, degrees.split(","))
        own = Layout(tp=tp, pp=pp, dp=dp, rank_offset=int(offset or end))
        end = max(end, own.rank_offset + own.size)
        found |= {f"{name}/Layout.{field}": getattr(own, field) for field in ("tp", "pp", "dp", "rank_offset")}
    return found
