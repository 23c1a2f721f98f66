"""A UNet behind the LLM, also beside a second generator: layouts compared with the dense reference.

Layouts are written "tp,pp,dp", "LLM | vision | painter | printer"; see ``test_layouts``.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_layouts import Changes, assert_equal
from tiny import STREAMS, UNET, both, cases, tiny, unet

from mmjax.configurable import ConfigError

NESTED: Changes = {"Train.schedule": "nested", "Train.microbatches": 4}
STEPPED: Changes = {
    "painter/UNet.process": "ddpm",
    "painter/UNet.prediction": "v",
    "painter/UNet.sampler": "ddim",
    "painter/UNet.min_snr": 5.0,
    "painter/UNet.drop_condition": 0.5,
}
# From other seeds two steps of this model on one device already miss by 1e-5 to 2e-5: a gradient magnifies rounding.
BESIDE: Changes = {"Train.seed": 5}
SEEN = ("vision -> llm", "llm -> painter", "llm -> printer", "vision -> printer")
LAYOUTS = {
    "unet on one device": unet("1,1,1", "1,1,1@0", "1,1,1@0"),
    "unet 1,2,1 | 1,1,1 | 2,1,2, zb-h1": unet("1,2,1", "1,1,1", "2,1,2", **{"Train.schedule": "zb-h1"}),
    "unet, nested": unet(
        "1,2,2", "1,1,1@0", "1,1,1@0", **NESTED | {"vision/Layout.lanes": 4, "painter/Layout.lanes": 4}
    ),
    "unet, nested, tp": unet(
        "1,2,2", "1,1,1@0", "2,1,1@0", **NESTED | {"vision/Layout.lanes": 4, "painter/Layout.lanes": 2}
    ),
    "unet, three phases": unet("2,1,2", "1,1,4@0", "1,1,4@0", **{"Train.schedule": "three-phase"}),
    "unet, three phases, odd microbatches": unet(
        "1,2,1", "1,1,2@0", "1,1,2@0", **{"Train.schedule": "three-phase", "Train.microbatches": 3}
    ),
    "unet, frozen": unet("1,2,1", "1,1,2", "2,1,1", **{"painter/Optimizer.frozen": True}),
    "unet, frozen llm": unet("1,2,1", "1,1,2", "1,1,2", **{"llm/Optimizer.frozen": True, "Train.clip_norm": 0.5}),
    "unet, shards, steps of noise": unet("1,1,2", "1,1,1", "1,1,3", **STEPPED | {"painter/Layout.shard": "parameters"}),
    "unet, adapted, two canvases": unet(
        "2,1,1",
        "1,1,1",
        "1,1,2",
        **{
            "painter/Lora.rank": 2,
            "painter/Lora.targets": ("*/cross_attn/?", "*/mlp/*"),
            "painter/Optimizer.frozen": True,
        }
        | {"painter/UNet.canvases": ((2, 4), (4, 4))},
    ),
    "unet and dit": both("1,2,1", "1,1,2", "2,1,1", "1,2,1", **BESIDE),
    "unet and dit that sees, together": both(
        "2,1,2", "1,1,4@0", "1,1,4@0", "2,1,2@0", **BESIDE | {"Model.edges": SEEN}
    ),
    "unet and dit that sees, nested": both(
        "1,2,2",
        "1,1,1@0",
        "1,1,1@0",
        "1,1,1@4",
        **NESTED | BESIDE | {"Model.edges": SEEN, "vision/Layout.lanes": 4, "painter/Layout.lanes": 4},
    ),
    "streams and dit": both("1,2,1", "1,1,2", "1,2,1", "1,1,2", STREAMS, **{"llm/Optimizer.frozen": True}),
    "streams and dit that sees, zb-h1": both(
        "1,2,1", "1,1,1", "1,1,2", "1,2,1", STREAMS, **{"Model.edges": SEEN, "Train.schedule": "zb-h1"}
    ),
}


@cases(LAYOUTS, "")
def test_unets(changes: Changes) -> None:
    assert_equal(changes)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image beside the condition of a UNet": (
        UNET | {"Model.edges": ("vision -> llm", "llm -> painter", "vision -> painter")},
        "Model.edges='vision -> painter': its condition (painter/UNet.queries=2) has no places for an image; leave it "
        "out, or use 'dit' with queries=0",
    ),
    "an image beside the condition of two streams": (
        STREAMS | {"Model.edges": ("vision -> llm", "llm -> painter", "vision -> painter")},
        "Model.edges='vision -> painter': its condition (painter/MMDiT.queries=2) has no places for an image; leave it "
        "out, or use 'dit' with queries=0",
    ),
    "stages of a UNet": (
        unet("1,1,1", "1,1,1", "1,2,1"),
        "painter/Layout.pp=2: a stage needs a layer and there are 1; use 1 or less",
    ),
    "chunks of a UNet": (
        unet("1,1,1", "1,1,1", "1,1,1", **{"painter/Layout.chunks": 2}),
        "painter/Layout.chunks=2: ",
    ),
    "parts of a UNet's rows": (
        unet("1,1,1", "1,1,1", "1,1,1", **{"painter/Layout.cp": 2}),
        "painter/Layout.cp=2: a row is a condition (painter/UNet.queries=2) and a picture, and is not cut; set it to 1",
    ),
    "tokens of a UNet on ranks of tp": (
        unet("1,1,1", "1,1,1", "2,1,1", **{"painter/Layout.sp": True}),
        "painter/Layout.sp=True: a row is a condition (painter/UNet.queries=2) and a picture, and is not cut; set it",
    ),
    "ranks that do not divide groups": (
        unet("1,1,1", "1,1,1", "3,1,1"),
        "painter/Layout.tp=3: ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_unet_cannot_do_is_refused_in_one_line(case: str) -> None:
    changes, line = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        tiny(**changes)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value), str(caught.value)
