"""Models that are no stars, with values: encoders that read encoders, and generators that read images.

Layouts are written "tp,pp,dp"; see ``test_layouts``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from test_layouts import Changes, assert_equal
from tiny import EARS, bindings, clip, redraw, tiny

from mmjax.assembly.model import build_model
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.derived import MEDIA_RULES
from mmjax.data.packing import Packer
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import EncoderSpec
from mmjax.mesh.layout import Layout
from mmjax.models.dit.config import DiTConfig
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.module import Llama
from mmjax.models.nodes import Edge, Node
from mmjax.models.parameters import join_logical
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.temporal.config import TemporalConfig
from mmjax.models.temporal.module import TemporalEncoder
from mmjax.models.vit.config import ViTConfig
from mmjax.models.vit.module import VisionTransformer
from mmjax.parity import check
from mmjax.parity.samples import LENGTH, BatchSizes, Maker, Samples, buckets, clip_buckets
from mmjax.reference.callbacks import one_device
from mmjax.reference.edges import image_before
from mmjax.reference.temporal import encode_clip

CLIPS = {
    "a clip of images": clip("2,2,1", "1,1,2", "2,1,1"),
    "a clip, pipelined": clip("1,2,1", "1,2,1", "1,2,1", **{"Train.microbatches": 4, "Train.schedule": "zb-h1"}),
    "a clip, split over cp": clip("1,1,2", "1,1,2", "1,1,1") | {"temporal/Layout.cp": 2},
    "a clip, colocated": clip("4,1,2", "1,1,8@0", "2,1,4@0"),
    "a clip, colocated in one program": clip("4,1,2", "1,1,8@0", "2,1,4@0", **{"Train.lowering": "single"}),
    "a clip, vision frozen": clip("2,2,1", "1,1,2", "1,1,2", **{"vision/Optimizer.frozen": True}),
    "a clip, adapted": clip(
        "1,2,1", "1,1,2", "2,1,1", **{"temporal/Lora.rank": 2, "temporal/Lora.targets": ("attn/q", "mlp/up")}
    ),
    "a clip, injected": clip(
        "1,2,1", "1,1,2", "1,2,1", **{"temporal/Projector.inject": (0, 3), "temporal/Projector.levels": (0, 1)}
    ),
    "a clip, in three phases": clip(
        "1,2,1", "1,1,2@0", "2,1,1@0", **{"Train.microbatches": 3, "Train.schedule": "three-phase"}
    ),
    "a clip, nested": clip("1,2,1", "1,1,1", "1,1,1")
    | {
        "Train.schedule": "nested",
        "Train.microbatches": 4,
        "vision/Layout.lanes": 2,
        "temporal/Layout.lanes": 2,
        "vision/Layout.rank_offset": 0,
        "temporal/Layout.rank_offset": 0,
    },
    "a clip beside recordings": EARS
    | clip("1,2,1", "1,1,1", "2,1,1")
    | {
        "Model.encoders": {"vision": "vit", "temporal": "temporal", "audio": "whisper"},
        "Model.edges": ("vision -> temporal", "temporal -> llm", "audio -> llm"),
        "audio/Layout.rank_offset": 6,
    },
}
REDRAWN = {
    "drawn from images": redraw("2,2,1", "1,1,2", "1,1,2"),
    "drawn from images, unequal dp": redraw("1,1,1", "1,1,4", "2,1,1"),
    "drawn from images, pipelined": redraw("1,2,1", "1,2,1", "1,2,1", **{"Train.microbatches": 4}),
    "drawn from images, colocated": redraw("2,1,4", "1,1,8@0", "4,1,2@0"),
    "drawn from images that the LLM does not see": redraw(
        "2,2,1", "1,1,2", "1,1,2", **{"Model.edges": ("llm -> painter", "vision -> painter")}
    ),
    "drawn from images, in several buckets": redraw(
        "1,1,1", "1,1,2", "1,1,2", **{"painter/Packing.buckets": ((4, 32), (8, 64)), "Train.microbatches": 3}
    ),
}
MATRIX: dict[str, Changes] = CLIPS | REDRAWN
LONG = ("a clip of images", "drawn from images")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=pytest.mark.long if name in LONG else pytest.mark.slow)
        for name, changes in MATRIX.items()
    ],
)
def test_models_with_edges_of_their_own_train_as_one_device_does(changes: Changes) -> None:
    assert_equal(changes)


def run_clips(model: MultimodalModel, leaves: dict[str, Any], arrays: dict[str, Any], tokens: jax.Array) -> np.ndarray:
    """What the only stage of the module "temporal" sends to others, on one device, from rows of tokens of "vision"."""
    stage = next(stage for stage in model.stages(dict.fromkeys(model.nodes, Layout())) if stage.module == "temporal")
    params = {}
    for part in stage.slices:
        flat, tree = jax.tree.flatten(part.leaves())
        params[part.module] = jax.tree.unflatten(tree, join_logical(flat, leaves))
    submesh, replicated = one_device(), PartitionSpec()

    def forward(params: Any, inputs: Any, tokens: jax.Array) -> jax.Array:
        features, _ = stage.forward(params, inputs, {"vision.0": tokens}, submesh.axes, 1)
        return stage.give(params, inputs, features, submesh.axes)

    mapped = jax.shard_map(forward, mesh=submesh.mesh, in_specs=(replicated,) * 3, out_specs=replicated)
    return np.asarray(jax.jit(mapped)(params, {name: arrays[name] for name in stage.inputs}, tokens))


@pytest.mark.long
def test_two_clips_of_a_row_are_encoded_as_each_alone() -> None:
    """By the module on packed rows, and by the reference clip by clip: with rotation, mask and order of images."""
    config = TemporalConfig(layers=2, width=8, heads=2, mlp=12, rope_theta=3.0)
    model = MultimodalModel(
        {
            "vision": Node(VisionTransformer(ViTConfig(patch=2, merge=1)), ProjectorConfig()),
            "temporal": Node(TemporalEncoder(config), ProjectorConfig(hidden=6)),
            "llm": Node(Llama(DecoderConfig(width=16, vocab=37))),
        },
        (Edge("vision", "temporal", "vision_index"), Edge("temporal", "llm", "temporal_index")),
    )
    rng, shapes = np.random.default_rng(0), dict[str, tuple[int, ...]]()
    for stage in model.stages(dict.fromkeys(model.nodes, Layout())):
        for leaf in (leaf for part in stage.slices for leaf in jax.tree.leaves(part.leaves())):
            shapes |= dict.fromkeys(leaf.names, leaf.logical_shape)
    leaves: dict[str, Any] = {name: rng.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    media = ((2, 1, 3), (1, 2))  # tokens of each image of each clip
    number_T = np.array([number for counts in media for number, count in enumerate(counts) for _ in range(count)] + [0])
    segment_T = np.array([1] * 6 + [2] * 3 + [0])
    place_T = np.array([9, 8, 3, 0, 1, 2, 4, 7, 6, -1])
    is_T, attends_T = MEDIA_RULES.words({"all": segment_T > 0}, np.where(segment_T > 0, number_T + 1, 0))
    row = {
        "segments": segment_T,
        "positions": number_T[:, None],
        "vision_index": place_T,
        "items": np.where(segment_T > 0, number_T + 1, 0),
        "is": is_T,
        "attends": attends_T,
    }
    tokens_TD = rng.normal(size=(10, 8)).astype(np.float32)
    arrays = {
        key: value.astype(np.uint32 if key in ("is", "attends") else np.int32)[None] for key, value in row.items()
    }
    actual = run_clips(model, leaves, arrays, jnp.asarray(tokens_TD)[None])[0]
    first = 0
    for counts in media:
        ends = np.cumsum([first, *counts])
        images = [jnp.asarray(tokens_TD[place_T[a:b]]) for a, b in pairwise(ends)]
        expected, _ = encode_clip(leaves, "temporal", config, images)
        np.testing.assert_allclose(actual[first : ends[-1]], expected, rtol=1e-4, atol=1e-4)
        first = int(ends[-1])


def test_drawings_lie_behind_images_before_them_and_beside_none() -> None:
    model = multimodal({"vision": ViTConfig(patch=2)}, DecoderConfig(vocab=37), {"painter": DiTConfig()})
    samples = Samples(maker=Maker.of(model), sizes=BatchSizes.of(2, 3), seed=0).steps(2)
    drawn = [sample for step in samples for sample in step if sample.noise]
    firsts = [int(sample.placeholders("painter").argmax()) for sample in drawn]
    seen = [image_before(model, sample, "vision", first) for sample, first in zip(drawn, firsts, strict=True)]
    assert {None, 0, 1} <= set(seen)
    unseen = [sample for sample, number in zip(drawn, seen, strict=True) if number is None]
    assert any(sample.media["vision"] for sample in unseen) and any(not sample.media["vision"] for sample in unseen)


def test_media_are_made_for_encoders_that_have_some() -> None:
    maker = Maker.of(build_model(tiny(**clip("1,1,1", "1,1,1", "1,1,1")), make_tokenizer("", ("vision",))))
    assert maker.encoders.keys() == {"vision"}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("cells", [1, 2, 4, 8])
def test_the_buckets_hold_all_clips(cells: int, several: bool) -> None:
    sizes, model = BatchSizes.of(cells, 3), multimodal({"vision": ViTConfig(patch=2)}, DecoderConfig(vocab=37))
    vision = EncoderSpec(patch=2, merge=2, text_index=None)
    specs = {
        "vision": replace(vision, buckets=buckets(vision, sizes.per_cell, several=several)),
        "temporal": EncoderSpec(
            patch=1, axes=1, reads=(("vision", ""),), buckets=clip_buckets(sizes.per_cell, several=several)
        ),
    }
    packer = Packer(encoders=specs, sequence_length=LENGTH, microbatches=3, cells=cells, pad=0)
    steps = Samples(maker=Maker.of(model), sizes=sizes, seed=0).steps(3)
    batches = [packer.step(step, samples) for step, samples in enumerate(steps)]
    assert {part.bucket["temporal"] for batch in batches for part in batch.microbatches} == set(range(1 + several))


def test_callbacks_of_an_encoder_that_reads_another_are_refused() -> None:
    changes = clip("1,1,1", "1,1,1", "1,1,1", **{"temporal/Callbacks.after": "math:sqrt"})
    line = "temporal/Callbacks.after='math:sqrt': check has no reference for callbacks of an encoder that reads"
    with pytest.raises(ConfigError, match=line):
        check(load_config([], bindings(**changes), allow_code=True), style="silent")
