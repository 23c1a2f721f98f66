"""Every layout, schedule and placement against the dense reference: losses, gradients, updates and moments, in fp32.

The cases of one group differ in what costs no new stage program (transport, schedule, optimizer), or in the layout
alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import parity
import pytest
from parity import Case, Expected, Run

from mmjax.mesh.layout import Layout
from mmjax.models import head
from mmjax.parity.compare import recovered_gradients
from mmjax.pipeline import zero

FAN_IN = Case(vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=2, pp=2))
COLOCATED = Case(vision=Layout(dp=8), llm=Layout(tp=2, dp=4))
TIED = replace(FAN_IN, model="tied", clip_norm=0.7)
SHARED_STAGE = Case(vision=Layout(tp=2), llm=Layout(tp=2, pp=2))
CHUNKED = Case(
    model="chunked and tied",
    vision=Layout(pp=2, chunks=2, rank_offset=2),
    llm=Layout(pp=2, chunks=2),
    microbatches=4,
    samples=25,
)
SINGLE = Case(vision=Layout(dp=2), llm=Layout(pp=2), lowering="single", microbatches=3, samples=17, clip_norm=0.7)
MARKED = replace(FAN_IN, model="marked", clip_norm=0.7)
# A generator behind the LLM, whose dp is neither's.
DRAWING = Case(
    model="drawing",
    vision=Layout(tp=2, rank_offset=4),
    llm=Layout(tp=2, pp=2),
    painter=Layout(dp=2, rank_offset=6),
    clip_norm=0.7,
)
STREAMS = replace(DRAWING, model="drawing, streams")
UNET = replace(DRAWING, model="drawing, unet")
ADAPTED = replace(FAN_IN, model="adapted", frozen=("vision", "llm"), clip_norm=0.3)
DRAWING_CHUNKED = Case(
    model="drawing, chunked",
    vision=Layout(dp=2, rank_offset=4),
    llm=Layout(pp=2, chunks=2),
    painter=Layout(pp=2, chunks=2, rank_offset=2),
    microbatches=4,
    samples=25,
)
MASKED = Case(model="masked", vision=Layout(rank_offset=4), llm=Layout(tp=2, pp=2), clip_norm=0.7)

FAST = {
    "drawing, unet, tp, zb-h1": replace(
        UNET, painter=Layout(tp=2, sp=False, rank_offset=6), schedule="zb-h1", remat="full", microbatches=3
    ),
    "one device": Case(),
    "fan-in": FAN_IN,
    "fan-in, collective": replace(FAN_IN, transport="collective"),
    "fan-in, 1 microbatch": replace(FAN_IN, microbatches=1, samples=7),
    "fan-in, 4 microbatches": replace(FAN_IN, microbatches=4, samples=25),
    "fan-in, gpipe": replace(FAN_IN, microbatches=4, samples=25, schedule="gpipe"),
    "fan-in, clipped and decayed": replace(FAN_IN, clip_norm=0.7, weight_decay=0.1),
    "fan-in, no images in a microbatch": replace(FAN_IN, text_only=7),
    "fan-in, vision frozen": replace(FAN_IN, frozen=("vision",)),
    "fan-in, llm frozen": replace(FAN_IN, frozen=("llm",)),
    "fan-in, projector alone": replace(FAN_IN, frozen=("vision", "llm")),
    "fan-out": Case(vision=Layout(tp=2, rank_offset=4), llm=Layout(dp=4)),
    "colocated": COLOCATED,
    "vision on the first stage": SHARED_STAGE,
    "tied on two stages": TIED,
    "colocated, 2 and 4 optimizer instances": Case(
        vision=Layout(dp=8, optimizer_instances=2), llm=Layout(tp=2, dp=4, optimizer_instances=4), clip_norm=0.7
    ),
    "fine-tuning layout, 2 optimizer instances, program per op": Case(
        vision=Layout(dp=8, optimizer_instances=2), llm=Layout(tp=2, dp=4), lowering="ops", clip_norm=0.7
    ),
    "callbacks": MARKED,
    "levels, three stages, zb-h1": Case(
        model="levels", vision=Layout(pp=3, rank_offset=2), llm=Layout(pp=2), schedule="zb-h1", remat="dots"
    ),
    "families": replace(FAN_IN, model="families", clip_norm=0.7),
    "a mask of words": MASKED,
    "adapters, zb-h1": replace(ADAPTED, schedule="zb-h1", remat="dots", microbatches=3),
    "adapters, one program": replace(COLOCATED, model="adapted", frozen=("llm",), weight_decay=0.1),
    "unrolled, zb-h1": replace(TIED, schedule="zb-h1", remat="dots", unroll=True, microbatches=3),
}

SHORT = ("tied on two stages",)
"""Of the fast cases, those of `make test`."""

SLOW = {
    "fan-in, no images on half of the ranks": replace(FAN_IN, microbatches=1, samples=7, text_only=4),
    "fan-in, no images at all": replace(FAN_IN, text_only=13),
    "fan-in, loosely clipped": replace(FAN_IN, clip_norm=1e3),
    "fan-in, no empty row": replace(FAN_IN, samples=16),
    "fan-out, vision two stages": Case(vision=Layout(tp=2, pp=2, rank_offset=4), llm=Layout(dp=4)),
    "fan-out, collective": Case(vision=Layout(tp=2, rank_offset=4), llm=Layout(dp=4), transport="collective"),
    "equal dp, wider llm": Case(vision=Layout(dp=2, rank_offset=4), llm=Layout(dp=2, tp=2)),
    "equal dp, wider vision": Case(vision=Layout(dp=2, tp=2), llm=Layout(dp=2, rank_offset=4)),
    "fan-in, sliced": replace(FAN_IN, route="sliced"),
    "fan-out, sliced": Case(vision=Layout(tp=2, rank_offset=4), llm=Layout(dp=2, tp=2), route="sliced"),
    "dp 2 to 3, sliced, collective": Case(
        vision=Layout(dp=2, rank_offset=6), llm=Layout(dp=3, tp=2), route="sliced", transport="collective"
    ),
    "colocated, 4 microbatches": replace(COLOCATED, microbatches=4, samples=25),
    "colocated, 1 microbatch": replace(COLOCATED, microbatches=1, samples=7),
    "colocated, program per op": replace(COLOCATED, lowering="ops"),
    "colocated, clipped and decayed": replace(COLOCATED, clip_norm=0.7, weight_decay=0.1),
    "colocated, vision frozen": replace(COLOCATED, frozen=("vision",)),
    "colocated, projector alone": replace(COLOCATED, frozen=("vision", "llm")),
    "colocated, vision and projector frozen": replace(COLOCATED, frozen=("vision", "vision_projector")),
    "colocated fan-out": Case(vision=Layout(dp=2, tp=2), llm=Layout(dp=4)),
    "colocated fan-out, program per op": Case(vision=Layout(dp=2, tp=2), llm=Layout(dp=4), lowering="ops"),
    "one device, program per op": Case(lowering="ops"),
    "fan-in, 2 optimizer instances": replace(FAN_IN, vision=Layout(dp=4, optimizer_instances=2, rank_offset=4)),
    "dp 8 to dp 2, 4 optimizer instances": Case(
        model="four heads", vision=Layout(dp=8, optimizer_instances=4), llm=Layout(dp=2, tp=4), lowering="ops"
    ),
    "dp 4 to dp 2, 2 optimizer instances": Case(
        model="four heads", vision=Layout(dp=4, tp=2, optimizer_instances=2), llm=Layout(dp=2, tp=4), lowering="ops"
    ),
    "tied, 2 optimizer instances": replace(
        TIED, vision=Layout(dp=8, optimizer_instances=2), llm=Layout(dp=4, pp=2, optimizer_instances=2)
    ),
    "vision on the first stage, frozen": replace(SHARED_STAGE, frozen=("vision", "vision_projector")),
    "vision on the first stage, dp": Case(vision=Layout(dp=4), llm=Layout(dp=2, tp=2, pp=2), schedule="gpipe"),
    "vision on both stages": Case(vision=Layout(dp=8), llm=Layout(dp=2, tp=2, pp=2), microbatches=4, samples=25),
    "vision on both stages, gpipe": Case(vision=Layout(dp=2, tp=2), llm=Layout(dp=2, pp=2), schedule="gpipe"),
    "vision on both stages, collective": Case(
        vision=Layout(dp=2, tp=2), llm=Layout(dp=2, pp=2), transport="collective"
    ),
    "vision stages on the llm's": Case(vision=Layout(tp=2, pp=2), llm=Layout(tp=2, pp=2), microbatches=4, samples=25),
    "three llm stages": Case(
        model="deep", vision=Layout(dp=2, rank_offset=6), llm=Layout(tp=2, pp=3), microbatches=4, samples=25
    ),
    "three llm stages of one layer, collective": Case(
        vision=Layout(pp=2, rank_offset=3), llm=Layout(pp=3), microbatches=4, samples=25, transport="collective"
    ),
    "everything but the llm frozen": replace(FAN_IN, frozen=("vision", "vision_projector")),
    "projector frozen": replace(FAN_IN, frozen=("vision_projector",)),
    "everything frozen": replace(FAN_IN, frozen=("vision", "vision_projector", "llm")),
    "tied": replace(TIED, llm=Layout(tp=2, dp=2)),
    "tied, dp": replace(TIED, vision=Layout(dp=2, tp=2, rank_offset=4), llm=Layout(dp=2, pp=2), weight_decay=0.1),
    "tied, dp and tp": replace(TIED, vision=Layout(dp=4), llm=Layout(dp=2, tp=2, pp=2), microbatches=4, samples=25),
    "tied, three stages": replace(TIED, vision=Layout(dp=2, rank_offset=6), llm=Layout(tp=2, pp=3), microbatches=1),
    "tied, four stages": replace(
        TIED, model="deep and tied", vision=Layout(dp=4, rank_offset=4), llm=Layout(pp=4), microbatches=4, samples=25
    ),
    "tied, collective": replace(TIED, transport="collective"),
    "tied, dp, collective": replace(TIED, vision=Layout(dp=8), llm=Layout(dp=2, tp=2, pp=2), transport="collective"),
    "tied, gpipe": replace(TIED, schedule="gpipe", microbatches=4, samples=25),
    "tied, llm frozen": replace(TIED, frozen=("llm",)),
    "tied, llm alone": replace(TIED, frozen=("vision", "vision_projector")),
    "tied, remat full": replace(TIED, remat="full"),
    "tied, one program": Case(model="tied", vision=Layout(dp=4), llm=Layout(tp=2, dp=2), weight_decay=0.1),
    "learned positions": Case(model="learned", vision=Layout(dp=2, tp=2, rank_offset=4), llm=Layout(tp=2)),
    "learned positions, one program": Case(model="learned", vision=Layout(dp=4), llm=Layout(tp=2, dp=2)),
    "two encoders": Case(model="two", vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=2, pp=2)),
    "two encoders, colocated": Case(model="two", vision=Layout(dp=4), llm=Layout(tp=2, dp=2), clip_norm=0.7),
    "buckets": replace(FAN_IN, buckets=((1, 32), (3, 32)), microbatches=4, samples=25, text_only=7),
    "buckets, one program": Case(
        vision=Layout(dp=4), llm=Layout(tp=2, dp=2), buckets=((1, 32), (3, 32)), one_bucket=True, text_only=7
    ),
    "chunks": CHUNKED,
    "chunks, interleaved": replace(CHUNKED, schedule="interleaved"),
    "chunks, interleaved, vision on the same submeshes": replace(
        CHUNKED, vision=Layout(pp=2, chunks=2), schedule="interleaved"
    ),
    "three by two chunks, interleaved": replace(
        CHUNKED, vision=Layout(dp=2, rank_offset=3), llm=Layout(pp=3, chunks=2), microbatches=3, schedule="interleaved"
    ),
    "two by three chunks, interleaved, dp and tp": replace(
        CHUNKED, vision=Layout(dp=4), llm=Layout(dp=2, tp=2, pp=2, chunks=3), schedule="interleaved", clip_norm=0.7
    ),
    "zb-h1": replace(FAN_IN, schedule="zb-h1", microbatches=4, samples=25, clip_norm=0.7, weight_decay=0.1),
    "zb-h1, 1 microbatch": replace(FAN_IN, schedule="zb-h1", microbatches=1, samples=7),
    "zb-h1, tied": replace(TIED, schedule="zb-h1", microbatches=3),
    "zb-h1, tied on one stage": Case(
        model="tied", vision=Layout(pp=2, rank_offset=2), llm=Layout(tp=2), schedule="zb-h1"
    ),
    "zb-h1, three stages, remat": replace(
        TIED, vision=Layout(dp=2, rank_offset=6), llm=Layout(tp=2, pp=3), schedule="zb-h1", microbatches=5, remat="full"
    ),
    "zb-h1, dp and tp, remat dots": replace(
        TIED, vision=Layout(dp=8), llm=Layout(dp=2, tp=2, pp=2), schedule="zb-h1", remat="dots"
    ),
    "zb-h1, vision frozen": replace(FAN_IN, frozen=("vision",), schedule="zb-h1"),
    "zb-h1, llm frozen": replace(FAN_IN, frozen=("llm",), schedule="zb-h1"),
    "zb-h1, learned positions": Case(
        model="learned", vision=Layout(dp=2, tp=2, rank_offset=4), llm=Layout(tp=2), schedule="zb-h1"
    ),
    "chunks, zb-h1": replace(CHUNKED, schedule="zb-h1"),
    "zb-h1, buckets": replace(FAN_IN, buckets=((1, 32), (3, 32)), microbatches=4, samples=25, schedule="zb-h1"),
    "chunks, 1 microbatch": replace(CHUNKED, microbatches=1, samples=7),
    "chunks, 5 microbatches, gpipe": replace(CHUNKED, microbatches=5, samples=25, schedule="gpipe"),
    "chunks, collective": replace(CHUNKED, microbatches=3, transport="collective"),
    "chunks, vision on the same submeshes": replace(CHUNKED, vision=Layout(pp=2, chunks=2)),
    "chunks, vision on one of the submeshes": replace(CHUNKED, vision=Layout(), microbatches=3, samples=17),
    "chunks, vision frozen": replace(CHUNKED, frozen=("vision",), clip_norm=0.7),
    "chunks, llm frozen": replace(CHUNKED, frozen=("llm",), remat="full"),
    "chunks, dp and tp": replace(
        CHUNKED,
        model="chunked",
        vision=Layout(dp=4),
        llm=Layout(dp=2, tp=2, pp=2, chunks=3),
        microbatches=2,
        clip_norm=0.7,
        weight_decay=0.1,
    ),
    "three by two chunks, colocated": replace(CHUNKED, vision=Layout(dp=3), llm=Layout(pp=3, chunks=2)),
    "four by three chunks": replace(
        CHUNKED, model="twelve", vision=Layout(dp=2, rank_offset=4), llm=Layout(pp=4, chunks=3), microbatches=5
    ),
    "uneven, tied, interleaved": replace(
        CHUNKED,
        vision=Layout(pp=2, rank_offset=2, layers=(1, 3)),
        llm=Layout(pp=2, chunks=2, layers=(1, 1, 3, 1)),
        schedule="interleaved",
        clip_norm=0.7,
    ),
    "uneven, three stages, zb-h1": replace(
        FAN_IN,
        model="deep",
        vision=Layout(dp=2, rank_offset=6),
        llm=Layout(tp=2, pp=3, layers=(1, 3, 1)),
        schedule="zb-h1",
        weight_decay=0.1,
    ),
    "uneven, single": replace(SINGLE, model="deep", llm=Layout(pp=2, layers=(1, 4))),
    "levels": replace(FAN_IN, model="levels", clip_norm=0.7),
    "levels, one program": replace(COLOCATED, model="levels", remat="full"),
    "levels, single": replace(SINGLE, model="levels", vision=Layout(pp=2, layers=(1, 2))),
    "families, tied, colocated": replace(COLOCATED, model="families, tied", remat="full"),
    "families, zb-h1": replace(FAN_IN, model="families", schedule="zb-h1", remat="dots", microbatches=3),
    "families, tied, unrolled": replace(FAN_IN, model="families, tied", unroll=True, remat="dots"),
    "families, single": replace(SINGLE, model="families"),
    "a mask of words, uneven, zb-h1": replace(
        MASKED, llm=Layout(tp=2, pp=3, layers=(1, 2, 1)), vision=Layout(rank_offset=6), schedule="zb-h1", remat="dots"
    ),
    "a mask of words, one program": replace(COLOCATED, model="masked", remat="full"),
    "a mask of words, single, unrolled": replace(SINGLE, model="masked", unroll=True),
    "a mask of prefixes": replace(DRAWING, model="masked, prefix"),
    "levels, unrolled, vision frozen": replace(FAN_IN, model="levels", unroll=True, frozen=("vision",)),
    "unrolled": replace(FAN_IN, unroll=True, clip_norm=0.7, weight_decay=0.1),
    "unrolled, injected": replace(FAN_IN, model="injected", unroll=True, remat="full"),
    "unrolled, one program": replace(COLOCATED, unroll=True),
    "unrolled, single": replace(SINGLE, unroll=True, model="deep", llm=Layout(pp=2, layers=(2, 3))),
    "unrolled, chunks, interleaved": replace(CHUNKED, schedule="interleaved", unroll=True),
    "unrolled, drawing": replace(DRAWING, unroll=True),
    "adapters": ADAPTED,
    "adapters, one device": Case(model="adapted"),
    "adapters, base trained": replace(ADAPTED, frozen=()),
    "adapters, base trained, zb-h1": replace(ADAPTED, model="adapted, tied", frozen=(), schedule="zb-h1"),
    "adapters, base of the llm alone trained, zb-h1": replace(ADAPTED, frozen=("vision",), schedule="zb-h1"),
    "adapters frozen": replace(ADAPTED, frozen=("vision_lora", "llm_lora")),
    "adapters of the llm alone": replace(ADAPTED, frozen=("vision", "vision_lora", "vision_projector", "llm")),
    "adapters of vision alone, zb-h1": replace(
        ADAPTED, frozen=("vision", "vision_projector", "llm", "llm_lora"), schedule="zb-h1"
    ),
    "adapters, remat full": replace(ADAPTED, remat="full", llm=Layout(tp=2, dp=2)),
    "adapters, unrolled, zb-h1": replace(ADAPTED, unroll=True, schedule="zb-h1", remat="full", microbatches=3),
    "adapters, unrolled, one program": replace(COLOCATED, model="adapted", unroll=True),
    "adapters, single": replace(SINGLE, model="adapted", frozen=("vision", "llm")),
    "adapters, single, unrolled": replace(SINGLE, model="adapted, tied", unroll=True, remat="dots"),
    "adapters, chunks, interleaved": replace(
        CHUNKED, model="adapted, chunked", frozen=("vision", "llm"), schedule="interleaved", clip_norm=0.7
    ),
    "adapters, chunks, zb-h1": replace(CHUNKED, model="adapted, chunked", schedule="zb-h1"),
    "adapters, dp and tp, instances": replace(
        ADAPTED, vision=Layout(dp=4, tp=2, optimizer_instances=2), llm=Layout(dp=2, tp=2, pp=2), weight_decay=0.1
    ),
    "adapters, families, zb-h1": replace(ADAPTED, model="adapted, families", schedule="zb-h1", remat="dots"),
    "adapters of a generator": replace(DRAWING, model="adapted, drawing", frozen=("painter",)),
    "adapters of a generator, zb-h1": replace(DRAWING, model="adapted, drawing", schedule="zb-h1"),
    "remat dots": replace(FAN_IN, remat="dots"),
    "remat full": replace(FAN_IN, remat="full"),
    "remat full, one program": replace(COLOCATED, remat="full"),
    "single": SINGLE,
    "single, 1 microbatch, frozen": replace(SINGLE, microbatches=1, samples=7, frozen=("vision", "vision_projector")),
    "single, gpipe, 5 microbatches": replace(SINGLE, schedule="gpipe", microbatches=5, samples=25, clip_norm=0.0),
    "single, tp, vision on the first stage": replace(SINGLE, vision=Layout(tp=2), llm=Layout(tp=2, pp=2), model="tied"),
    "single, vision stages on the llm's, dp": replace(SINGLE, vision=Layout(dp=2, pp=2), llm=Layout(dp=2, pp=2)),
    "single, dp and tp, sliced": replace(
        SINGLE, vision=Layout(dp=8), llm=Layout(dp=2, tp=2, pp=2), model="tied", route="sliced"
    ),
    "single, four stages": replace(SINGLE, vision=Layout(dp=2, tp=2), llm=Layout(pp=4), model="deep and tied"),
    "single, four stages of tp, llm frozen": replace(
        SINGLE,
        vision=Layout(dp=4, tp=2),
        llm=Layout(tp=2, pp=4),
        model="deep",
        frozen=("llm",),
        microbatches=5,
        samples=25,
    ),
    "single, chunks": replace(CHUNKED, vision=Layout(dp=2), lowering="single"),
    "single, vision's stages below one llm": replace(SINGLE, vision=Layout(pp=2), llm=Layout(dp=2)),
    "single, no pipeline, gpipe": replace(SINGLE, vision=Layout(dp=2), llm=Layout(tp=2), schedule="gpipe"),
    "single, two encoders": replace(SINGLE, vision=Layout(dp=2), model="two", text_only=7),
    "single, remat full": replace(SINGLE, remat="full", weight_decay=0.1),
    "callbacks, zb-h1": replace(MARKED, schedule="zb-h1", microbatches=4, samples=25),
    "callbacks, vision two stages": replace(MARKED, vision=Layout(pp=2, rank_offset=4), llm=Layout(dp=2, pp=2)),
    "callbacks, colocated, remat": replace(COLOCATED, model="marked", remat="full"),
    "callbacks, single": replace(SINGLE, model="marked"),
    "callbacks, unrolled, zb-h1": replace(MARKED, vision=Layout(tp=2), schedule="zb-h1", remat="dots", unroll=True),
    "drawing": DRAWING,
    "drawing, gpipe": replace(DRAWING, schedule="gpipe", microbatches=4, samples=25),
    "drawing, one device": replace(DRAWING, vision=Layout(), llm=Layout(), painter=Layout()),
    "drawing, no pictures in a microbatch": replace(DRAWING, text_only=7),
    "drawing, nothing to draw": replace(DRAWING, text_only=13),
    "drawing, eager": replace(DRAWING, schedule="eager-1f1b", microbatches=4, samples=25),
    "drawing, encoders first": replace(DRAWING, schedule="encoders-first", microbatches=4, samples=25),
    "drawing, collective": replace(DRAWING, transport="collective"),
    "drawing, sliced": replace(DRAWING, route="sliced", painter=Layout(tp=2, rank_offset=6), weight_decay=0.1),
    "drawing, llm frozen": replace(DRAWING, frozen=("llm",)),
    "drawing, painter frozen": replace(DRAWING, frozen=("painter", "painter_projector")),
    "drawing, painter alone": replace(DRAWING, frozen=("vision", "vision_projector", "llm", "painter_projector")),
    "drawing, painter's projector alone": replace(DRAWING, frozen=("vision", "vision_projector", "llm", "painter")),
    "drawing, llm alone": replace(
        DRAWING, frozen=("vision", "vision_projector", "painter", "painter_projector"), remat="full"
    ),
    "drawing, zb-h1": replace(DRAWING, schedule="zb-h1", microbatches=4, samples=25),
    "drawing, zb-h1, remat": replace(DRAWING, schedule="zb-h1", remat="full", painter=Layout(pp=2, rank_offset=6)),
    "drawing, two stages": replace(DRAWING, painter=Layout(pp=2, rank_offset=6), microbatches=4, samples=25),
    "drawing, fan-out to dp 4": replace(
        DRAWING, vision=Layout(tp=2), llm=Layout(tp=2, pp=2), painter=Layout(dp=4, rank_offset=4)
    ),
    "drawing, fan-in from dp 4": replace(
        DRAWING, vision=Layout(dp=4), llm=Layout(dp=4), painter=Layout(tp=2, rank_offset=4)
    ),
    "drawing, dp 2 to 3": replace(
        DRAWING,
        vision=Layout(rank_offset=7),
        llm=Layout(tp=2, dp=2),
        painter=Layout(dp=3, rank_offset=4),
        transport="collective",
    ),
    "drawing on the llm's ranks": replace(DRAWING, vision=Layout(dp=2, rank_offset=4), painter=Layout(dp=4)),
    "drawing on the llm's last stage": replace(DRAWING, painter=Layout(dp=2, rank_offset=2)),
    "drawing on the encoder's ranks": replace(DRAWING, painter=Layout(dp=2, rank_offset=4), microbatches=3),
    "drawing, stages on the llm's": replace(DRAWING, painter=Layout(pp=2, dp=2), microbatches=3),
    "drawing, all together": replace(DRAWING, vision=Layout(dp=4), llm=Layout(tp=2, dp=2), painter=Layout(dp=4)),
    "drawing, all together, program per op": replace(
        DRAWING, vision=Layout(dp=4), llm=Layout(tp=2, dp=2), painter=Layout(dp=4), lowering="ops"
    ),
    "drawing, three phases": replace(
        DRAWING, vision=Layout(dp=4), painter=Layout(dp=2, rank_offset=4), schedule="three-phase", microbatches=4
    ),
    "drawing, single": replace(SINGLE, model="drawing", painter=Layout(pp=2)),
    "drawing on all lanes, single": replace(SINGLE, model="drawing, tied", painter=Layout(dp=2)),
    "drawing, tied and weighted": replace(DRAWING, model="drawing, tied"),
    "drawing, 2 optimizer instances": replace(
        DRAWING,
        vision=Layout(rank_offset=2),
        llm=Layout(tp=2),
        painter=Layout(dp=4, rank_offset=4, optimizer_instances=2),
    ),
    "drawing twice": replace(DRAWING, model="drawing twice"),
    "drawing, buckets": replace(
        DRAWING, buckets=((2, 16), (3, 32), (4, 32)), microbatches=4, samples=25, clip_norm=0.0
    ),
    "drawing by a ddpm, conditions dropped": replace(
        DRAWING, model="drawing by a ddpm", painter=Layout(pp=2, rank_offset=6), microbatches=3, samples=21
    ),
    "drawing by a ddpm, one program": replace(
        DRAWING, model="drawing by a ddpm", vision=Layout(dp=4), llm=Layout(tp=2, dp=2), painter=Layout(dp=4)
    ),
    "drawing, queries": replace(DRAWING, model="drawing, queries"),
    "drawing, queries, two stages, zb-h1": replace(
        DRAWING,
        model="drawing, queries",
        painter=Layout(tp=2, sp=False, pp=2),
        schedule="zb-h1",
        remat="full",
        microbatches=4,
        samples=25,
    ),
    "drawing, queries, cp": replace(DRAWING, model="drawing, queries", painter=Layout(cp=2, rank_offset=6)),
    "drawing, queries, cp, dp": replace(DRAWING, model="drawing, queries", painter=Layout(cp=2, dp=2), microbatches=3),
    "drawing, queries, three phases": replace(
        DRAWING, model="drawing, queries", schedule="three-phase", painter=Layout(dp=4), vision=Layout(dp=4)
    ),
    "drawing, streams": STREAMS,
    "drawing, streams, two stages, zb-h1": replace(
        STREAMS, painter=Layout(tp=2, sp=False, pp=2), schedule="zb-h1", remat="full", microbatches=4, samples=25
    ),
    "drawing, references": replace(STREAMS, model="drawing, references"),
    "drawing, references, two stages, zb-h1": replace(
        STREAMS,
        model="drawing, references",
        **{"painter": Layout(tp=2, pp=2), "schedule": "zb-h1", "microbatches": 4, "samples": 25},
    ),
    "drawing, streams, sp": replace(STREAMS, painter=Layout(tp=2, rank_offset=6)),
    "drawing, streams, shards": replace(STREAMS, painter=Layout(dp=2, shard="parameters", rank_offset=6)),
    "drawing, streams, cp": replace(STREAMS, painter=Layout(cp=2, rank_offset=6)),
    "drawing, streams, cp, two stages, zb-h1": replace(
        STREAMS, painter=Layout(cp=2, pp=2), schedule="zb-h1", remat="full", microbatches=4, samples=25
    ),
    "drawing, streams, cp and tp, ring": replace(STREAMS, painter=Layout(cp=2, tp=2, sp=False, cp_way="ring")),
    "drawing, streams, three phases": replace(
        STREAMS, schedule="three-phase", painter=Layout(dp=4), vision=Layout(dp=4)
    ),
    "drawing, streams, chunks": replace(DRAWING_CHUNKED, model="drawing, streams, chunked"),
    "drawing, streams, single": replace(STREAMS, frozen=("llm",), painter=Layout(), vision=Layout(), llm=Layout()),
    "drawing, unet": UNET,
    "drawing, unet, three phases": replace(
        UNET, schedule="three-phase", painter=Layout(dp=4), vision=Layout(dp=4), microbatches=4
    ),
    "drawing, unet, llm frozen": replace(UNET, frozen=("llm", "vision", "vision_projector")),
    "drawing, unet frozen": replace(UNET, frozen=("painter",), remat="dots"),
    "drawing, unet, all together": replace(UNET, vision=Layout(dp=4), llm=Layout(tp=2, dp=2), painter=Layout(dp=4)),
    "drawing, unet, sharded, zb-h1": replace(
        UNET, painter=Layout(dp=2, shard="parameters", rank_offset=6), schedule="zb-h1", microbatches=3
    ),
    "drawing, chunks": DRAWING_CHUNKED,
    "drawing, interleaved": replace(DRAWING_CHUNKED, schedule="interleaved"),
}

# Ranks of tp share the tokens between products wherever tp is above 1; here they do not, or exchange them in rings.
RINGS = Layout(tp=2, overlap=True)
SHARING = {
    "overlap, zb-h1": replace(
        TIED,
        vision=replace(RINGS, dp=2, rank_offset=4),
        llm=replace(RINGS, pp=2),
        schedule="zb-h1",
        remat="dots",
        microbatches=3,
    ),
    "tp above kv_heads": Case(
        model="families", vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=4), schedule="zb-h1", remat="dots"
    ),
    "cp and tp": Case(vision=Layout(cp=2, tp=2, rank_offset=4), llm=Layout(cp=2, tp=2)),
}
SHARING_SLOW = {
    "tokens not shared": replace(FAN_IN, llm=Layout(tp=2, pp=2, sp=False)),
    "tokens not shared, zb-h1": replace(TIED, llm=Layout(tp=2, pp=2, sp=False), schedule="zb-h1", remat="full"),
    "tokens shared by the llm alone": Case(vision=Layout(tp=2, sp=False, rank_offset=4), llm=Layout(tp=2, pp=2)),
    "tokens shared by vision alone": Case(vision=Layout(tp=2, pp=2, rank_offset=4), llm=Layout(tp=2, sp=False)),
    "overlap": Case(vision=replace(RINGS, dp=2, rank_offset=4), llm=replace(RINGS, pp=2)),
    "overlap, one program": replace(COLOCATED, vision=replace(RINGS, dp=4), llm=replace(RINGS, dp=4), remat="full"),
    "overlap, tp 4": Case(
        model="four heads", vision=Layout(tp=4, overlap=True, rank_offset=4), llm=Layout(tp=4, overlap=True)
    ),
    "tp 4, zb-h1": Case(
        model="four heads", vision=Layout(tp=4, rank_offset=4), llm=Layout(tp=4), schedule="zb-h1", remat="dots"
    ),
    "overlap, unrolled, zb-h1": replace(FAN_IN, llm=replace(RINGS, pp=2), unroll=True, schedule="zb-h1"),
    "tp above kv_heads, tokens not shared": Case(
        model="families", vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=4, sp=False), schedule="zb-h1"
    ),
    "tp above kv_heads, overlap, adapters": Case(
        model="adapted", vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=4, overlap=True), schedule="zb-h1"
    ),
    "tp above kv_heads, adapters, llm frozen, one program": Case(
        model="adapted", vision=Layout(dp=4), llm=Layout(tp=4), frozen=("llm",)
    ),
    "overlap, adapters, zb-h1": replace(ADAPTED, llm=replace(RINGS, pp=2), schedule="zb-h1", remat="dots"),
    "overlap, adapters, base trained": replace(ADAPTED, llm=replace(RINGS, pp=2), frozen=()),
    "overlap, drawing": replace(DRAWING, llm=replace(RINGS, pp=2), painter=replace(RINGS, rank_offset=6)),
    "drawing, painter's tokens shared, two stages": replace(
        DRAWING,
        vision=Layout(rank_offset=2),
        llm=Layout(tp=2),
        painter=Layout(tp=2, pp=2, rank_offset=4),
        microbatches=3,
    ),
    "cp and tp, overlap, two stages": replace(TIED, vision=Layout(dp=4), llm=replace(RINGS, cp=2, pp=2), remat="dots"),
    "chunks, tokens shared": replace(
        CHUNKED, vision=Layout(tp=2, pp=2, chunks=2, rank_offset=4), llm=Layout(tp=2, pp=2, chunks=2)
    ),
    "nested, tokens shared": Case(
        vision=Layout(lanes=2, tp=2), llm=Layout(tp=2, pp=2), schedule="nested", microbatches=4, samples=25
    ),
}
FAST |= SHARING
SLOW |= SHARING_SLOW


def assert_equal_to_reference(got: Run, want: Expected, case: Case) -> None:
    """Losses, norms, gradients, updates and moments of every step; frozen modules stay as they are, bit for bit."""
    configs = parity.optimizers(case)
    trained = {module for module, config in configs.items() if not config.frozen}
    start = parity.of_kind(got.leaves[0], "params")
    for name, leaf in parity.of_kind(want.leaves[0], "params").items():
        np.testing.assert_array_equal(start[name], leaf, err_msg=f"initial {name}")
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    for norms, expected in zip(got.norms, want.norms, strict=True):
        assert norms == (pytest.approx(expected, rel=1e-5, abs=1e-30) if trained else {})
    if trained:
        gradients = recovered_gradients(got, configs, case.clip_norm)
        for step, (found, wanted) in enumerate(zip(gradients, want.gradients, strict=True)):
            parity.assert_close(found, wanted, 1e-5, f"step {step}: gradient")
    if case.clip_norm:  # the case clips, or does not, as its name says
        whole = [np.sqrt(sum(n**2 for n in norms.values())) for norms in want.norms]
        assert all((norm > case.clip_norm) == (case.clip_norm < 1) for norm in whole)
    for step in range(parity.STEPS):
        before, after = got.leaves[step], got.leaves[step + 1]
        assert after.keys() == want.leaves[step + 1].keys()
        for kind in ("adam_m", "adam_v"):
            parity.assert_close(
                parity.of_kind(after, kind), parity.of_kind(want.leaves[step + 1], kind), 1e-4, f"step {step}: {kind}"
            )
        updates, wanted = (
            parity.difference(parity.of_kind(b, "params"), parity.of_kind(a, "params"))
            for a, b in ((before, after), (want.leaves[step], want.leaves[step + 1]))
        )
        parity.assert_close(updates, wanted, 1e-4, f"step {step}: update")
        for name, update in updates.items():
            if parity.module_of(name) not in trained:
                assert not update.any(), f"{name} is frozen"


CASES = [
    *(pytest.param(case, id=name, marks=() if name in SHORT else pytest.mark.long) for name, case in FAST.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_dense_reference(case: Case) -> None:
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        FAN_IN,
        COLOCATED,
        Case(vision=Layout(dp=2, rank_offset=4), llm=Layout(dp=3)),
        replace(TIED, vision=Layout(dp=2, rank_offset=6), llm=Layout(dp=3, pp=2)),
    ],
)
def test_padded_masters_train_like_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "SMALL", 1)  # else only leaves larger than these models' are padded
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        replace(TIED, schedule="zb-h1", remat="dots", clip_norm=0.69),
        pytest.param(replace(COLOCATED, clip_norm=0.69), marks=pytest.mark.slow),
    ],
)
def test_losses_by_chunks_of_tokens_train_like_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other case has this `clip_norm`, so none shares programs with these."""
    monkeypatch.setattr(head, "chunk_tokens", lambda vocabulary: 40)  # else all of these tokens fit in one
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)


@pytest.mark.long
def test_the_samples_are_what_packing_has_to_cope_with() -> None:
    session = parity.Session(FAN_IN)
    samples = [s for step in parity.step_samples(FAN_IN.samples) for s in step]
    assert {len(s.media["vision"]) for s in samples} == {0, 1, 2, 3}
    assert len({image.shape for s in samples for image in s.media["vision"]}) == 3
    parts = [part.inputs for batch in session.batches for part in batch.microbatches]
    assert any((part["llm"]["segments"] == 0).all(axis=1).any() for part in parts), "no empty LLM row"
    assert any(part["vision"]["segments"].max() > 1 for part in parts), "no encoder row with several images"
    assert any((part["llm"]["tokens"][:, 0] == parity.PLACEHOLDERS["vision"]).any() for part in parts)
    assert any((part["llm"]["weights"][part["llm"]["vision_index"] >= 0] > 0).any() for part in parts)
    buckets = [
        {part.bucket["vision"] for batch in parity.Session(SLOW[name]).batches for part in batch.microbatches}
        for name in ("buckets", "buckets, one program")
    ]
    assert buckets == [{0, 1}, {1}]
