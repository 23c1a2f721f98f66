"""Configurations drawn at random: up to three modules on eight devices, and everything else that makes a run another.

Each is checked as ``python -m mmjax.check`` does it: through the configuration, with values. ``test_drawn`` does the
same with a cheaper model and graphs that no configuration has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import drawing
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tiny import EARS, tiny

from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout
from mmjax.models.vit.config import INTERPOLATIONS, LEARNED, POSITIONS
from mmjax.parity import check
from mmjax.pipeline.single.lane_layout import lane_layout
from mmjax.schedule.schedules import NESTING, OFFLOADING, SCHEDULES, WINDOWED

Changes = dict[str, Any]
LAYERS = {"llm": 4, "vision": 2, "audio": 2}
"""Of the tiny modules, whose widths divide by every tp."""
DP, TP = (1, 2, 3, 4, 6, 8), (1, 2, 4)
UNUSED = ("cp", "ep")
"""Degrees that are not supported yet."""


@st.composite
def configurations(draw: st.DrawFn) -> Changes:
    """Changes of the tiny configuration; all are legal."""
    modules = draw(st.sampled_from((("llm", "vision"), ("llm", "vision", "audio"), ("llm", "vision", "audio"))))
    layouts = draw(drawing.layouts({name: LAYERS[name] for name in modules}, dp=DP, tp=TP))
    layouts = {name: replace(own, layers=draw(layers_of(own, LAYERS[name]))) for name, own in layouts.items()}
    found = layout_changes(layouts) | draw(training(layouts)) | draw(models(modules))
    single = draw(st.booleans()) and has_lanes(layouts) and not any(v for k, v in found.items() if "Offload" in k)
    return found | {"Train.lowering": "single" if single else draw(st.sampled_from(("auto", "ops")))}


@st.composite
def layers_of(draw: st.DrawFn, layout: Layout, layers: int) -> tuple[int, ...]:
    """Layers by stage, or nothing."""
    if layout.stages == 1 or draw(st.booleans()):
        return ()
    ends = draw(st.sets(st.integers(1, layers - 1), min_size=layout.stages - 1, max_size=layout.stages - 1))
    return tuple(end - begin for begin, end in pairwise((0, *sorted(ends), layers)))


def layout_changes(layouts: Mapping[str, Layout]) -> Changes:
    """Bindings of layouts, and of the audio encoder where there is one."""
    names = [field.name for field in fields(Layout) if field.name not in UNUSED]
    found = {f"{m}/Layout.{name}": getattr(layout, name) for m, layout in layouts.items() for name in names}
    return (EARS if "audio" in layouts else {}) | found


def has_lanes(layouts: Mapping[str, Layout]) -> bool:
    """Whether one program can run it."""
    try:
        lane_layout(layouts)
    except ConfigError:
        return False
    return True


@st.composite
def training(draw: st.DrawFn, layouts: Mapping[str, Layout]) -> Changes:
    """Schedule, transport and optimizer, and what is frozen and offloaded."""
    flat = [name for name in SCHEDULES if name not in NESTING]  # no module has lanes
    schedule, count = draw(st.sampled_from(flat)), draw(st.integers(1, 6))
    found: Changes = {
        "Train.schedule": schedule,
        "Train.window": draw(st.integers(0, 3)) if schedule in WINDOWED else 0,
        "Train.microbatches": count,
        "Train.global_batch": 24 * count,
        "Train.clip_norm": draw(st.sampled_from((0.0, 0.5))),
        "Train.seed": draw(st.integers(0, 99)),
        "World.transport": draw(st.sampled_from(("auto", "collective"))),
        "World.route": draw(st.sampled_from(("leader", "sliced"))),
        "Optimizer.weight_decay": draw(st.sampled_from((0.0, 0.1))),
        "Offload.optimizer": draw(st.sampled_from((False, False, True))),
    }
    encoders = [name for name in layouts if name != "llm"]
    modules = ["llm", *encoders, *(f"{name}_projector" for name in encoders)]
    frozen = draw(st.sets(st.sampled_from(modules), max_size=len(modules) - 1))
    found |= {f"{name}/Optimizer.frozen": True for name in frozen}
    llm = set(layouts["llm"].ranks)
    for name in encoders:
        if schedule in OFFLOADING and (llm & set(layouts[name].ranks) or schedule not in WINDOWED):
            found[f"{name}/Offload.parameters"] = draw(st.booleans())
    return found


INTERLEAVED: Changes = {"llm/Decoder.rope_sections": (2, 1, 1), "llm/Decoder.rope_interleaved": True}


@st.composite
def models(draw: st.DrawFn, modules: tuple[str, ...]) -> Changes:
    """Buckets, positions, remat, a tied head, what families of LLMs differ in, and features into later layers."""
    found: Changes = {
        "vision/Packing.buckets": draw(st.sampled_from(((), ((4, 360), (48, 360))))),
        "vision/ViT.positions": draw(st.sampled_from(POSITIONS)),
        "llm/Decoder.remat": draw(st.sampled_from(("none", "dots", "full"))),
        "llm/Decoder.tied": draw(st.booleans()),
        "llm/Decoder.window": draw(st.sampled_from((0, 0, 5))),
    }
    biased = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")
    found |= {f"llm/Decoder.{name}": draw(st.sampled_from((False, False, True))) for name in biased}
    which = draw(st.sampled_from(("full_layers", "full_every")))
    found |= {f"llm/Decoder.{which}": draw(st.integers(0, 4))} if found["llm/Decoder.window"] else {}
    masks = (
        "causal",
        "causal",
        "gemma3",
        "cornstarch",
        "paligemma",
        "all sees text before; media sees media everywhere",
    )
    found |= {"llm/Decoder.mask": draw(st.sampled_from(masks))}
    if draw(st.booleans()):
        found |= draw(towers() | qwen_towers())
    sections = ({}, {"llm/Decoder.rope_sections": (1, 1, 2)}, INTERLEAVED)
    found |= {"llm/Decoder.head_dim": 8, **axes} if (axes := draw(st.sampled_from(sections))) else {}
    injected = ((), (), (0, 3), (1, 2))
    return found | {f"{m}/Projector.inject": draw(st.sampled_from(injected)) for m in modules if m != "llm"}


@st.composite
def towers(draw: st.DrawFn) -> Changes:
    """What real vision towers and their projectors have beyond the plain ones."""
    kind, positions = draw(st.sampled_from(("mlp", "linear"))), draw(st.sampled_from(LEARNED))
    return {
        "vision/ViT.positions": positions,
        "vision/ViT.registers": draw(st.sampled_from((0, 0, 3))),
        "vision/ViT.interpolate": "none" if "xy" in positions else draw(st.sampled_from(INTERPOLATIONS)),
        "vision/ViT.class_token": draw(st.sampled_from((True, True, False))),
        "vision/ViT.stem_norm": draw(st.booleans()),
        "vision/ViT.last_norm": draw(st.booleans()),
        "vision/ViT.patch_bias": draw(st.booleans()),
        "vision/ViT.layer_scale": draw(st.booleans()),
        "vision/ViT.activation": draw(st.sampled_from(("gelu", "gelu_exact", "quick_gelu"))),
        "vision/Projector.kind": kind,
        "vision/Projector.hidden": 20 if kind == "mlp" else 0,
        "vision/Projector.activation": draw(st.sampled_from(("gelu", "gelu_exact"))),
    }


@st.composite
def qwen_towers(draw: st.DrawFn) -> Changes:
    """What those of Qwen2-VL and Qwen2.5-VL have."""
    return {
        "vision/ViT.positions": "axial",
        "vision/ViT.rope_theta": 10000.0,
        "vision/ViT.frames": draw(st.sampled_from((1, 2))),
        "vision/ViT.norm": draw(st.sampled_from(("layer", "rms"))),
        "vision/ViT.gated": draw(st.booleans()),
        "vision/ViT.activation": draw(st.sampled_from(("quick_gelu", "silu"))),
        "vision/ViT.window": draw(st.sampled_from((0, 2, 4))),
        "vision/Projector.norm": draw(st.sampled_from(("layer", "rms"))),
    }


DRAWING = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.long
@settings(DRAWING, derandomize=True, max_examples=100)
@given(configurations())
def test_what_is_drawn_is_legal(changes: Changes) -> None:
    tiny(**changes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("start", range(4))
def test_drawn_configurations_train_as_one_device_does(start: int) -> None:
    @seed(start)
    @settings(DRAWING, max_examples=6)
    @given(configurations())
    def run(changes: Changes) -> None:
        report = check(tiny(**changes), style="silent")
        assert report and report.ok, report and report.numbers()

    run()
