"""Shrinking: configurations stay legal, what layouts have to get right stays, and what is small already too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAN_IN, streams, tiny

from mmjax.config import load_config
from mmjax.mesh.layout import split_layers
from mmjax.parity.shrink import SMALL, Shrunk, shrink
from mmjax.recipe import Recipe
from mmjax.recipe.validate import validate

LARGE = (
    "Model.encoders={'vision': 'vit', 'audio': 'vit'}",
    "vision/ViT.preset=clip-vit-l14",
    "audio/ViT.preset=vit-h14",
    "llm/Decoder.preset=llama3-70b",
    "llm/Layout.tp=8",
    "llm/Layout.pp=3",
    "vision/Layout.tp=2",
    "vision/Layout.dp=3",
    "vision/Layout.rank_offset=24",
    "audio/Layout.tp=4",
    "audio/Layout.pp=5",
    "audio/Layout.rank_offset=30",
    "Train.microbatches=4",
    "Train.global_batch=512",
    "llm/Optimizer.frozen=True",
    "llm/Decoder.remat=full",
    "Train.dtype=bfloat16",
)


def shrunk(recipe: Recipe, vocab: int = 260) -> Shrunk:
    return shrink(recipe, 3, vocab)


def test_a_small_model_stays_as_it_is() -> None:
    config = tiny(**FAN_IN)
    small = shrunk(config)
    assert small.recipe.model.config == config.model.config and small.recipe.model.layouts == config.model.layouts
    for name, node in config.model.nodes.items():
        assert small.recipe.model[name].settings == node.settings
        projector = small.recipe.model[name].projector
        assert (projector and projector.settings) == (node.projector and node.projector.settings)
    assert small.changes == ("Train: global_batch 48 → 14", "Data: sequence_length 128 → 20")


def test_what_is_shrunk_is_said() -> None:
    lines = dict(line.split(": ") for line in shrunk(load_config([], LARGE)).changes)
    assert lines["llm/Decoder"].startswith("layers 80 → 5, width 8192 → 48, head_dim open → 8, mlp 28672 → 40")
    assert "vocab 128256 → 64" in lines["llm/Decoder"] and "width 1024 → 32" in lines["vision/ViT"]
    assert lines["Train"] == "global_batch 512 → 20"


@pytest.mark.parametrize("lowering", ["auto", "single"])
def test_several_buckets_stay_several(lowering: str) -> None:
    """However a step is lowered."""
    buckets = {"vision/Packing.buckets": ((4, 64), (16, 64)), "llm/Packing.buckets": ((4, 128), (16, 128))}
    small = shrunk(tiny(**buckets, **{"vision/Layout.rank_offset": 0, "Train.lowering": lowering})).recipe
    assert [len(small.model[name].packing.given) for name in ("vision", "llm")] == [2, 2]


def kept(recipe: Recipe) -> dict[str, Any]:
    """The properties of a configuration that shrinking must keep, because a layout has to get them right."""
    found = {}
    for name, c in ((name, node.settings) for name, node in recipe.model.nodes.items()):
        layout = recipe.model[name].layout
        counts = [len(run) for run in split_layers(c.layers, layout.pp)]
        found[name] = {
            "layout": layout,
            "uneven": [count - min(counts) for count in counts],
            "remat": c.remat,
            "heads a rank": c.heads % layout.tp == 0 and c.heads // layout.tp >= 1,
            "mlp": c.mlp % layout.tp == 0,
        }
    for name in recipe.model.encoders:
        c = recipe.model[name].settings
        found[name] |= {"merge": c.merge, "positions": c.positions, "activation": c.activation, "channels": c.channels}
    llm = recipe.model["llm"].settings
    found["llm"] |= {"group": llm.heads // llm.kv_heads, "tied": llm.tied, "theta": llm.rope_theta}
    train = recipe.train
    found["run"] = [train.microbatches, train.schedule, train.clip_norm, train.seed, recipe.world.transport]
    found["frozen"] = [name for name, optimizer in recipe.model.optimizers.items() if optimizer.frozen]
    rates = [optimizer.learning_rate for optimizer in recipe.model.optimizers.values()]
    found["rates"] = [sorted(set(rates)).index(rate) for rate in rates]
    return found


def test_an_audio_encoder_becomes_small_too() -> None:
    names = ("Model.encoders={'vision': 'vit', 'audio': 'whisper'}", "audio/Whisper.preset=whisper-large-v3")
    rest = ("audio/Layout.tp=4", "audio/Layout.pp=3", "audio/Layout.rank_offset=1", "vision/Layout.rank_offset=13")
    config = load_config([], (*names, *rest, "audio/Whisper.positions=learned"))
    small = shrunk(config).recipe
    validate(small)
    audio = small.model["audio"].settings
    assert (audio.layers, audio.heads, audio.width, audio.mlp, audio.mels, audio.length) == (5, 4, 32, 40, 16, 64)
    assert (audio.merge, audio.positions, audio.window, audio.hop) == (4, "learned", 400, 160)
    ((rows, width),) = small.model["audio"].packing.given
    assert rows > 0 and width % audio.merge == 0
    # Padded recordings stay whole LLM tokens.
    config = load_config([], (*names, *rest, "audio/Whisper.pad=True", "audio/Whisper.merge=5"))
    assert shrunk(config).recipe.model["audio"].settings.length == 65


def test_a_generator_becomes_small_too() -> None:
    names = ("Model.generators={'painter': 'dit'}", "painter/DiT.preset=dit-xl2", "painter/DiT.loss_weight=0.5")
    rest = (
        "painter/Layout.tp=4",
        "painter/Layout.pp=3",
        "painter/Layout.rank_offset=1",
        "painter/Projector.hidden=512",
    )
    config = load_config([], (*names, *rest, "vision/Layout.rank_offset=13"))
    small = shrunk(config).recipe
    validate(small)
    painter = small.model["painter"].settings
    assert (painter.layers, painter.heads, painter.width, painter.mlp) == (4, 4, 32, 40)
    assert (painter.patch, painter.merge, painter.channels, painter.loss_weight) == (2, 2, 4, 0.5)
    assert small.model.projectors["painter"].settings.hidden == 40 and small.model.layouts == config.model.layouts
    ((rows, width),) = small.model["painter"].packing.given
    assert rows > 0 and width % painter.merge**2 == 0


@pytest.mark.parametrize(("tp", "heads", "mid"), [(1, (1, 2), 2), (4, (1, 4), 4)])
def test_a_unet_becomes_two_levels_of_one_block(tp: int, heads: tuple[int, ...], mid: int) -> None:
    names = (
        "Model.generators={'painter': 'unet'}",
        "painter/UNet.preset=sd-2.1",
        "painter/UNet.heads_by_level=(5, 8, 8, 0)",
    )
    layout = (f"painter/Layout.tp={tp}", "painter/Layout.sp=False", "painter/Layout.rank_offset=1")
    small = shrunk(load_config([], (*names, *layout, f"vision/Layout.rank_offset={1 + tp}"))).recipe
    validate(small)
    painter = small.model["painter"].settings
    assert (painter.widths, painter.heads_by_level, painter.mid_heads) == ((8, 16), heads, mid)
    assert (painter.width, painter.queries, painter.blocks, painter.canvases) == (64, 2, 1, ((8, 8),))
    assert small.model["painter"].packing.given[-1][1] == 2 + 64


def test_places_of_a_condition_stay_multiples_of_the_ranks_that_share_them() -> None:
    layout = streams("1,1,1", "1,1,1", "2,1,1", **{"painter/MMDiT.queries": 16, "painter/Layout.cp": 2})
    assert shrunk(tiny(**layout), 262).recipe.model["painter"].settings.queries == 4
    assert shrunk(tiny(**layout | {"painter/Layout.sp": False}), 262).recipe.model["painter"].settings.queries == 2


@pytest.mark.parametrize(("full_layers", "small"), [(0, 0), (1, 1), (11, 2), (22, 4), (23, 5)])
def test_windows_stay_shorter_than_samples_and_in_some_layers(full_layers: int, small: int) -> None:
    own = ("llm/Decoder.preset=mistral-7b", "llm/Decoder.layers=23", "llm/Decoder.qk_norm=True", "llm/Layout.pp=3")
    config = load_config([], (*own, f"llm/Decoder.full_layers={full_layers}", "vision/Layout.rank_offset=3"))
    found = shrunk(config).recipe
    validate(found)
    llm = found.model["llm"].settings
    assert (llm.layers, llm.window, llm.full_layers, llm.qk_norm) == (5, 8, small, True)
    assert llm.window < found.data.settings.sequence_length and shrunk(found).recipe == found


def test_chunks_and_every_so_manieth_layer_stay() -> None:
    own = ("llm/Decoder.layers=24", "llm/Decoder.chunk=64", "llm/Decoder.full_every=6", "llm/Decoder.mask='gemma3'")
    llm = shrunk(load_config([], own)).recipe.model["llm"].settings
    assert (llm.chunk, llm.mask, llm.full_every) == (8, "gemma3", llm.layers) and len(llm.runs) == 2


@pytest.mark.parametrize(("stages", "full_at"), [(1, (1,)), (2, (1, 2, 3)), (8, (1, 3, 5, 7))])
def test_windows_of_images_stay_smaller_than_images_and_in_some_layers(stages: int, full_at: tuple[int, ...]) -> None:
    """And M-RoPE keeps its three sections, some of them larger than others."""
    own = ("vision/ViT.preset=qwen2.5-vl-7b", f"vision/Layout.pp={stages}", "llm/Decoder.preset=qwen2.5-vl-7b")
    found = shrunk(load_config([], (*own, "llm/Layout.tp=4", "vision/Layout.rank_offset=4"))).recipe
    validate(found)
    vit, llm = found.model["vision"].settings, found.model["llm"].settings
    assert (vit.window, vit.norm, vit.gated, vit.frames, vit.positions) == (4, "rms", True, 2, "axial")
    assert vit.full_at == full_at and max(full_at) < vit.layers
    assert (llm.head_width, llm.rope_sections) == (8, (1, 1, 2)) and shrunk(found).recipe == found


@pytest.mark.parametrize("stages", [1, 3])
def test_features_enter_the_same_stages(stages: int) -> None:
    changes = {"llm/Layout.pp": stages, "llm/Decoder.layers": 23, "vision/Layout.rank_offset": stages}
    config = tiny(**changes, **{"vision/Projector.inject": (0, 1, 9, 22), "vision/Projector.hidden": 512})
    small = shrunk(config).recipe
    validate(small)

    def entered(c: Recipe) -> set[int]:
        runs = split_layers(c.model.llm.settings.layers, stages)
        return {
            stage for stage, run in enumerate(runs) for at in c.model.projectors["vision"].settings.inject if at in run
        }

    assert entered(small) == entered(config) and len(small.model.projectors["vision"].settings.inject) >= stages


def test_levels_stay_in_their_stages_beside_their_injections() -> None:
    changes = {"llm/Layout.pp": 2, "llm/Decoder.layers": 20, "vision/ViT.layers": 20, "vision/Layout.pp": 2}
    both = {"vision/Projector.inject": (0, 12, 19), "vision/Projector.levels": (3, 11, 19)}
    config = tiny(**changes, **both, **{"vision/Layout.rank_offset": 2})
    small = shrunk(config).recipe
    validate(small)
    depth, own = small.model["vision"].settings.layers, small.model.projectors["vision"].settings
    assert len(own.levels) == len(own.inject) >= 2 and max(own.levels) < depth < 20
    half = depth // 2
    assert own.levels[0] < half <= own.levels[-1]
    assert shrunk(small).recipe == small


@pytest.mark.parametrize(
    ("layers", "small"),
    [
        ((3, 20), (2, 3)),
        ((1, 22), (1, 2)),
        ((12, 11), (3, 2)),
        ((8, 7, 8), (2, 1, 2)),
        ((1, 1, 21), (1, 1, 2)),
        ((23,), (2,)),
        ((1, 3), (1, 3)),  # small already
    ],
)
def test_given_layers_stay_uneven(layers: tuple[int, ...], small: tuple[int, ...]) -> None:
    changes = {"llm/Layout.pp": len(layers), "llm/Decoder.layers": sum(layers), "llm/Layout.layers": layers}
    inject = {"vision/Projector.inject": (0, sum(layers) - 1), "vision/Layout.rank_offset": len(layers)}
    config = tiny(**changes, **inject)
    found = shrunk(config).recipe
    validate(found)
    assert (found.model.llm.layout.layers, found.model["llm"].settings.layers) == (small, sum(small))
    assert found.model.layouts == {
        **config.model.layouts,
        "llm": dataclasses.replace(config.model["llm"].layout, layers=small),
    }
    assert found.model.projectors["vision"].settings.inject == (
        0,
        sum(small) - 1,
    )  # the first stage's first, the last one's last
    assert shrunk(found).recipe == found


def assert_small(recipe: Recipe) -> None:
    for c in (node.settings for node in recipe.model.nodes.values()):
        assert c.width <= max(SMALL["width"], 8 * c.heads) and c.mlp <= SMALL["hidden"]
    assert recipe.model["llm"].settings.vocab <= SMALL["vocab"] and recipe.data.settings.sequence_length == 20
    assert recipe.train.global_batch <= 200 and recipe.train.dtype == "float32"


def test_a_large_model_becomes_small_and_stays_legal() -> None:
    config = load_config([], LARGE)
    small = shrunk(config).recipe
    validate(small)
    assert_small(small)
    assert kept(small) == kept(config)
    assert (
        small.model["llm"].settings.layers,
        small.model["llm"].settings.heads,
        small.model["llm"].settings.kv_heads,
        small.model["llm"].settings.head_width,
    ) == (5, 64, 8, 8)
    assert small.model["audio"].settings.layers == 7  # 32 in five stages: two have one more
    assert (small.world.platform, small.world.devices, small.train.steps) == ("cpu", 0, 3)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    tp=st.sampled_from((1, 2, 3, 4, 8)),
    encoder_tp=st.sampled_from((1, 2, 3, 4)),
    pp=st.integers(1, 6),
    layers=st.integers(6, 40),
    group=st.sampled_from((1, 2, 7)),
    kv=st.integers(1, 3),
    width=st.sampled_from((48, 96, 1008)),
    vocab=st.sampled_from((37, 128256, 128257)),
    hidden=st.sampled_from((0, 24, 4032)),
    positions=st.sampled_from(("rope2d", "axial", "learned2d")),
)
def test_any_model(
    tp: int,
    encoder_tp: int,
    pp: int,
    layers: int,
    group: int,
    kv: int,
    width: int,
    vocab: int,
    hidden: int,
    positions: str,
) -> None:
    config = tiny(
        **{
            "llm/Layout.tp": tp,
            "llm/Layout.pp": pp,
            "vision/Layout.tp": encoder_tp,
            "vision/Layout.rank_offset": tp * pp,
            "llm/Decoder.layers": layers,
            "llm/Decoder.kv_heads": kv * tp,
            "llm/Decoder.heads": group * kv * tp,
            "llm/Decoder.width": width,
            "llm/Decoder.mlp": 4032,
            "llm/Decoder.vocab": vocab,
            "vision/Projector.hidden": hidden,
            "vision/ViT.heads": encoder_tp * 2,
            "vision/ViT.width": encoder_tp * 96,
            "vision/ViT.mlp": 4032,
            "vision/ViT.positions": positions,
        }
    )
    small = shrunk(config).recipe
    validate(small)
    assert_small(small)
    assert kept(small) == kept(config)
    assert (small.model["llm"].settings.vocab % tp == 0) == (vocab % tp == 0)
    assert small.model["llm"].settings.layers <= max(4, 2 * pp) + pp
    assert shrunk(small).recipe == dataclasses.replace(small, train=small.train)  # nothing is left to shrink


def test_updates_can_be_compared() -> None:
    rates = {"vision": 1e-6, "vision_projector": 1e-4, "llm": 1e-5}
    changes = {f"{name}/Optimizer.learning_rate": rate for name, rate in rates.items()}
    config = tiny(**changes, **{"Optimizer.warmup": 5, "Optimizer.b1": 0.99, "Optimizer.schedule": "cosine"})
    made = shrunk(config).recipe.model.optimizers
    assert [made[name].learning_rate for name in ("vision", "llm", "vision_projector")] == [2e-3, 4e-3, 8e-3]
    for optimizer in made.values():
        assert optimizer.final_learning_rate >= 1e-3 and optimizer.eps >= 1e-4
        assert optimizer.warmup == 0 and optimizer.b1 <= 0.5 and optimizer.schedule == "cosine"


@pytest.mark.parametrize(("pp", "chunks"), [*((pp, 1) for pp in range(1, 7)), (2, 2), (2, 3), (3, 2), (4, 3)])
def test_every_stage_keeps_a_layer(pp: int, chunks: int) -> None:
    changes = {"llm/Layout.pp": pp, "llm/Layout.chunks": chunks, "llm/Decoder.layers": 23}
    small = shrunk(tiny(**changes, **{"vision/Layout.rank_offset": pp})).recipe
    assert min(len(run) for run in split_layers(small.model["llm"].settings.layers, pp * chunks)) >= 1


def test_what_hangs_on_a_folder_or_on_a_single_layer_is_left_out() -> None:
    """The template of a tokenizer's folder, and rates of layers that the small model has not."""
    rates = "llm/Optimizer.rates={'layers/050/*': 0.5, 'layers/*/attn/*': 0.25}"
    sources = ("Data.sources={'a': 1.0}", "a/Source.path='a.json'", "a/Source.template='chatml'")
    config = load_config([], [*LARGE, rates, *sources])
    folder = {name: dataclasses.replace(own, template="folder") for name, own in config.data.sources.items()}
    small = shrunk(dataclasses.replace(config, sources=folder)).recipe
    validate(small)
    assert small.data.sources["a"].template == "plain"
    assert dict(small.model.optimizers["llm"].rates) == {"layers/*/attn/*": 0.25}
    kept = shrunk(config).recipe
    assert kept.data.sources["a"].template == "chatml" and small.model["llm"].settings.layers < 50
