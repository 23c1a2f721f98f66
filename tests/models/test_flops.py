"""Counts against published sizes, the model's own leaves, hand counts and XLA's cost analysis."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.configurable import from_preset
from mmjax.mesh.layout import Layout
from mmjax.models import flops
from mmjax.models.dit.config import DiTConfig
from mmjax.models.families import module_of
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.mmdit.config import MMDiTConfig
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.whisper.config import WhisperConfig
from mmjax.reference import decoder as reference_decoder
from mmjax.reference import encoders as reference_encoders
from mmjax.reference import mmdit as reference_mmdit

LLAMA3_8B = from_preset(DecoderConfig, "llama3-8b")
VIT_H14 = from_preset(ViTConfig, "vit-h14", positions="learned2d", grid=16, merge=1)
CLIP_L14 = from_preset(ViTConfig, "clip-vit-l14", positions="learned2d", grid=16, merge=1)
VIT = ViTConfig(layers=2, width=128, heads=4, mlp=512, patch=4, channels=3, merge=2, positions="rope2d")
WHISPER = WhisperConfig(layers=2, width=128, heads=4, mlp=512, mels=40, merge=4)
MMDIT = MMDiTConfig(layers=2, width=32, heads=4, mlp=48, patch=2, channels=2, queries=5)
DIT = DiTConfig(layers=2, width=32, heads=4, mlp=48, patch=2, channels=2, merge=2, frequencies=3)
DECODER = DecoderConfig(layers=2, width=128, heads=4, kv_heads=2, head_dim=16, mlp=384, vocab=500)
HIDDEN = ProjectorConfig(hidden=96)
MODEL = multimodal({"vision": VIT}, DECODER, projectors={"vision": HIDDEN})


def leaf_sizes(model: MultimodalModel, pp: int = 1) -> dict[str, int]:
    """Parameters per module, counted over the logical leaves that the model's stages own, `pp` of them the LLM's."""
    sizes: dict[str, int] = dict.fromkeys(model.modules, 0)
    for stage in model.stages({**dict.fromkeys(model.encoders, Layout()), "llm": Layout(pp=pp)}):
        for part in stage.slices:
            for leaf in jax.tree.leaves(part.leaves()):
                sizes[leaf.module] += len(leaf.names) * math.prod(leaf.logical_shape) * (leaf.tie != "borrowed")
    return sizes


# --- parameters ------------------------------------------------------------------------------------------------------


def test_llama3_has_its_published_size() -> None:
    assert module_of(LLAMA3_8B).parameters() == 8_030_261_248
    assert module_of(from_preset(DecoderConfig, "llama3-70b")).parameters() == 70_553_706_496
    tied = dataclasses.replace(LLAMA3_8B, tied=True)
    assert module_of(LLAMA3_8B).parameters() - module_of(tied).parameters() == 128_256 * 4096


def test_vit_h14_is_the_published_one_without_class_token_and_classifier() -> None:
    published = 632_045_800  # 224 pixels, 1000 classes
    class_token, its_position, classifier = 1280, 1280, 1280 * 1000 + 1000
    assert module_of(VIT_H14).parameters() == published - class_token - its_position - classifier
    rotary = dataclasses.replace(VIT_H14, positions="rope2d")
    assert module_of(VIT_H14).parameters() - module_of(rotary).parameters() == 16 * 16 * 1280


@pytest.mark.parametrize(("grid", "published"), [(16, 303_179_776), (24, 303_507_456)])  # 224 and 336 pixels
def test_clip_l14_is_the_published_tower_without_class_token_and_first_norm(grid: int, published: int) -> None:
    class_token, its_position, norm_before_layers, patch_bias = 1024, 1024, 2 * 1024, 1024
    ours = module_of(dataclasses.replace(CLIP_L14, grid=grid)).parameters()
    assert ours == published - class_token - its_position - norm_before_layers + patch_bias


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("clip-vit-l14-336", 303_507_456 - 2 * 1024),  # without the norm behind the pooled class token
        ("siglip-so400m-14-384", 428_225_600 - 15_238_352),  # without the pooling head
        ("dinov2-large", 304_368_640 - 1024),  # without the token that masks patches in its training
        ("dinov2-giant", 1_136_479_232),  # without it too
        ("dinov2-with-registers-giant", 1_136_485_376),
        ("dinov3-vitl16", 303_128_576),
        ("dinov3-vith16plus", 840_591_360),
        ("qwen2-vl-7b", 631_183_360),  # without the merger, which is a projector
        ("qwen2.5-vl-7b", 631_975_680),
    ],
)
def test_whole_towers_have_their_published_size(preset: str, published: int) -> None:
    module = module_of(from_preset(ViTConfig, preset))
    assert module.parameters() == published
    assert leaf_sizes(multimodal({"vision": module}, DECODER))["vision"] == published


@pytest.mark.parametrize(
    ("preset", "norm", "published"), [("qwen2-vl-7b", "layer", 8_291_375_616), ("qwen2.5-vl-7b", "rms", 8_292_166_656)]
)
def test_whole_qwen2_vl_has_its_published_size(preset: str, norm: str, published: int) -> None:
    merger = ProjectorConfig(hidden=5120, activation="gelu_exact", norm=norm)
    model = multimodal(
        {"vision": from_preset(ViTConfig, preset)}, from_preset(DecoderConfig, preset), projectors={"vision": merger}
    )
    assert sum(flops.parameter_count(model).values()) == published


@pytest.mark.parametrize(
    ("preset", "levels", "published"),
    [
        ("qwen3-vl-4b", (5, 11, 17), 4_437_815_808),
        ("qwen3-vl-8b", (8, 16, 24), 8_767_123_696),
        ("qwen3-vl-30b-a3b", (8, 16, 24), 31_070_754_032),
    ],
)
def test_whole_qwen3_vl_has_its_published_size(preset: str, levels: tuple[int, ...], published: int) -> None:
    tower = from_preset(ViTConfig, preset)
    of_inner_layers: Any = {"inject": (1, 2, 3), "levels": levels}
    merger = ProjectorConfig(hidden=4 * tower.width, activation="gelu_exact", norm="layer", **of_inner_layers)
    model = multimodal({"vision": tower}, from_preset(DecoderConfig, preset), projectors={"vision": merger})
    assert sum(flops.parameter_count(model).values()) == published


def test_a_class_token_counts_in_layers_alone() -> None:
    tower = dataclasses.replace(VIT, class_token=True)
    layers = [module_of(dataclasses.replace(tower, layers=n)).forward_flops([10, 4]) for n in (1, 2)]
    without = [module_of(dataclasses.replace(VIT, layers=n)).forward_flops([11, 5]) for n in (1, 2)]
    assert layers[1] - layers[0] == without[1] - without[0]
    assert without[0] - layers[0] == 2 * 2 * VIT.patch_values * VIT.width


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["rope2d", "learned2d", "learned2d+axial"])
def test_counts_are_those_of_the_leaves(positions: str, tied: bool) -> None:
    own = {"qkv_bias": tied, "mlp_bias": tied, "qk_norm": not tied, "o_bias": not tied, "window": 3, "full_layers": 1}
    vit, llm = dataclasses.replace(VIT, positions=positions), dataclasses.replace(DECODER, tied=tied, **own)
    table = "learned" if positions == "learned2d" else "sinusoidal"
    encoders = {
        "vision": vit,
        "second": dataclasses.replace(VIT, merge=1, layers=1),
        "audio": dataclasses.replace(WHISPER, positions=table),
    }
    tower = dict(class_token=True, stem_norm=True, last_norm=False, layer_scale=True, patch_bias=False)
    encoders["tower"] = dataclasses.replace(vit, **tower)
    encoders["gated"] = dataclasses.replace(vit, norm="rms", gated=True, frames=2, window=4, full_at=(1,))
    own = {
        "second": ProjectorConfig(inject=(0, 1)),
        "tower": ProjectorConfig(kind="linear", inject=(1,), norm="rms"),
        "gated": ProjectorConfig(inject=(1,), norm="layer"),
    }
    model = multimodal(encoders, llm, projectors={"vision": HIDDEN, **own})
    assert flops.parameter_count(model) == leaf_sizes(model) == leaf_sizes(model, pp=2)


# --- FLOPs -----------------------------------------------------------------------------------------------------------


def test_known_forward_flops() -> None:
    # One token of Llama-3 8B: two per parameter of a product (no embedding, no norms), and one attention pair.
    products = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    assert module_of(LLAMA3_8B).forward_flops([1]) == 2 * products + 32 * 4 * 4096
    # Published for ViT-H/14 at 224 pixels: 167.295 G multiply-adds for 257 tokens; ours has 256, and no classifier.
    ours = module_of(VIT_H14).forward_flops([256]) / 2
    assert 167.295e9 * (255.5 / 257) < ours < 167.295e9 * (256.5 / 257)


def test_attention_is_causal_in_the_llm_and_full_in_an_image() -> None:
    heads_width = DECODER.heads * DECODER.head_dim
    by_token = module_of(DECODER).forward_flops([1] * 10)
    assert module_of(DECODER).forward_flops([10]) - by_token == 2 * 4 * heads_width * (55 - 10)
    by_patch = module_of(VIT).forward_flops([1] * 10)
    assert module_of(VIT).forward_flops([10]) - by_patch == 2 * 4 * VIT.width * (100 - 10)


@pytest.mark.parametrize(("window", "full_layers"), [(1, 0), (4, 0), (4, 1), (9, 0), (50, 1)])
def test_a_window_counts_the_pairs_that_it_leaves(window: int, full_layers: int) -> None:
    lengths = [1, 9, 14]
    c = dataclasses.replace(DECODER, window=window, full_layers=full_layers)
    windowed = sum(min(at + 1, window) for n in lengths for at in range(n))
    full = sum(at + 1 for n in lengths for at in range(n))
    less = (c.layers - full_layers) * 4 * c.heads * c.head_dim * (full - windowed)
    assert module_of(DECODER).forward_flops(lengths) - module_of(c).forward_flops(lengths) == less


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"chunk": 4}, 2 * (1 + 2 * 10 + 1 + 3 * 10 + 3)),
        ({"chunk": 4, "window": 2, "full_every": 2}, (1 + 2 * 7 + 1 + 3 * 7 + 3) + (1 + 45 + 105)),
        ({"mask": "full"}, 2 * (1 + 81 + 196)),
        ({"mask": "full", "chunk": 5, "full_layers": 1}, (1 + 25 + 16 + 2 * 25 + 16) + (1 + 81 + 196)),
    ],
)
def test_chunks_and_masks_count_the_pairs_that_they_leave(changes: dict[str, Any], seen: int) -> None:
    c = dataclasses.replace(DECODER, layers=2, **changes)
    plain, own = (module_of(one).forward_flops([1, 9, 14]) for one in (dataclasses.replace(DECODER, layers=2), c))
    assert plain - own == 4 * c.heads * c.head_dim * (2 * (1 + 45 + 105) - seen)


def test_pairs_of_a_mask_of_words_are_counted() -> None:
    """In layers with a window and in those without; a plain mask needs no counts."""
    c = dataclasses.replace(DECODER, layers=3, mask="gemma3", window=2, full_every=3)
    model = multimodal({"vision": VIT}, c)
    items = np.array([[0, 1, 1, 1, 0, 0, 0, 0]])
    inputs = {"segments": np.array([[1, 1, 1, 1, 1, 2, 2, 0]]), "items": items}
    inputs |= {"is": 1 + 2 * (items > 0).astype(np.uint32), "attends": 1 + 2 * (items > 0).astype(np.uint32)}
    pairs = flops.visible_pairs(model.nodes["llm"].module, inputs)
    local, full = 1 + 4 + 3 + 3 + 2 + 1 + 2, 1 + 4 + 4 + 4 + 5 + 1 + 2
    assert [*pairs.values()] == [local, full]
    lengths = {"llm": [5, 2]}
    counted, causal = (flops.forward_flops(model, lengths, own)["llm"] for own in ({"llm": pairs}, None))
    near, far = 1 + 2 * 4 + 1 + 2, 15 + 3
    assert counted - causal == 4 * c.heads * c.head_dim * (2 * (local - near) + full - far)
    assert flops.visible_pairs(MODEL.nodes["llm"].module, inputs) == {}
    trained = flops.training_flops(model, lengths, pairs={"llm": pairs, "vision": {}})
    assert trained["llm"] == 3 * counted


def test_windows_count_the_pairs_in_them() -> None:
    """Whole windows of 4 patches; an image that is smaller has all of its pairs."""
    c = dataclasses.replace(VIT, layers=3, window=2, full_at=(1,))
    whole = dataclasses.replace(VIT, layers=3)
    less = 2 * 4 * VIT.width * (64 * 60 + 8 * 4)
    assert module_of(whole).forward_flops([64, 3, 8]) - module_of(c).forward_flops([64, 3, 8]) == less


def leaf_avals(model: MultimodalModel) -> dict[str, jax.ShapeDtypeStruct]:
    parts = [part for stage in model.stages({"vision": Layout(), "llm": Layout()}) for part in stage.slices]
    leaves = [leaf for part in parts for leaf in jax.tree.leaves(part.leaves())]
    return {name: jax.ShapeDtypeStruct(leaf.logical_shape, np.float32) for leaf in leaves for name in leaf.names}


def product_flops(jaxpr: Any) -> int:
    """FLOPs of all products of a jaxpr and of those inside it."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        total += sum(product_flops(inner.jaxpr) for inner in eqn.params.values() if hasattr(inner, "jaxpr"))
    return total


def test_dense_forward_does_the_counted_products() -> None:
    """Exactly over the traced products, within 5 % over what XLA counts of the compiled program (with norms etc.)."""
    avals, length = leaf_avals(MODEL), 64
    llm = {name: aval for name, aval in avals.items() if name.startswith("llm/")}
    counted = flops.forward_flops(MODEL, {"vision": [length], "llm": [length]})
    unmasked = 4 * DECODER.layers * DECODER.heads * DECODER.head_dim * (length**2 - length * (length + 1) // 2)
    tokens, patches = jax.ShapeDtypeStruct((length,), np.int32), jax.ShapeDtypeStruct((length, 48), np.float32)
    vision = {name: aval for name, aval in avals.items() if name not in llm}
    programs = {
        counted["llm"] + unmasked: reference_decoder.decode.trace(llm, DECODER, tokens, ()),
        counted["vision"] + counted["vision_projector"]: reference_encoders.encode_patches.trace(
            vision, patches, name="vision", vit=VIT, rows=8, columns=8
        ),
    }
    for expected, traced in programs.items():
        assert product_flops(traced.jaxpr.jaxpr) == expected
        compiled = traced.lower().compile().cost_analysis()
        assert compiled is not None
        assert expected <= compiled["flops"] < 1.05 * expected


@pytest.mark.parametrize("q_rank", [0, 24])
def test_dense_latent_attention_does_the_counted_products(q_rank: int) -> None:
    """Pairs of tokens cost the widths of queries and of values; keys and values are products of a latent."""
    latent = dict(kv_rank=20, q_rank=q_rank, nope_head_dim=10, rope_head_dim=6, v_head_dim=12)
    c, length = dataclasses.replace(DECODER, kv_heads=4, head_dim=0, **latent), 64
    queries = 128 * 4 * 16 if not q_rank else 128 * 24 + 24 * 4 * 16
    layer = queries + 128 * (20 + 6) + 20 * 4 * (10 + 12) + 4 * 12 * 128 + 3 * 128 * 384
    pair = 2 * c.layers * 4 * (16 + 12)
    counted = module_of(c).forward_flops([length])
    assert counted == 2 * length * (c.layers * layer + 128 * 500) + pair * (length * (length + 1) // 2)
    avals = leaf_avals(multimodal({"vision": VIT}, c, projectors={"vision": HIDDEN}))
    llm = {name: aval for name, aval in avals.items() if name.startswith("llm/")}
    traced = reference_decoder.decode.trace(llm, c, jax.ShapeDtypeStruct((length,), np.int32), ())
    assert product_flops(traced.jaxpr.jaxpr) == counted + pair * (length**2 - length * (length + 1) // 2)


def test_delta_layers_count_by_token() -> None:
    """Products, taps of convolutions, and a read, a read and a write of each head's state; pairs of attention alone."""
    delta = dict(delta_heads=2, delta_value_heads=4, delta_key_dim=6, delta_value_dim=10, delta_taps=3)
    c = dataclasses.replace(DECODER, layers=3, attention_every=3, attention_gate=True, rope_share=0.5, **delta)
    keys, values = 2 * 6, 4 * 10
    layer = 128 * (2 * keys + 3 * values + 2 * 4) + 3 * (2 * keys + values) + 3 * 6 * values
    attention = 128 * c.head_width * (3 * c.heads + 2 * c.kv_heads)
    token = 2 * (2 * layer + attention + 3 * 3 * 128 * 384 + 128 * 500)
    pair = 4 * c.heads * c.head_width
    for lengths in ([40], [7, 13]):
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        assert module_of(c).forward_flops(lengths) == token * sum(lengths) + pair * pairs


def test_dense_gated_tower_with_windows_does_the_counted_products() -> None:
    about = dict(norm="rms", gated=True, frames=2, window=4, full_at=(1,), positions="axial", activation="silu")
    vit = dataclasses.replace(VIT, **about)
    model = multimodal({"vision": vit}, DECODER, projectors={"vision": dataclasses.replace(HIDDEN, norm="rms")})
    given = {name: aval for name, aval in leaf_avals(model).items() if not name.startswith("llm/")}
    about = dict(name="vision", vit=vit, rows=8, columns=8, projector=model.nodes["vision"].projector)
    traced = reference_encoders.encode_patches.trace(given, jax.ShapeDtypeStruct((64, 96), np.float32), **about)
    counted = flops.forward_flops(model, {"vision": [64], "llm": []})
    assert product_flops(traced.jaxpr.jaxpr) == counted["vision"] + counted["vision_projector"]


def test_dense_audio_encoder_does_the_counted_products() -> None:
    model = multimodal({"audio": WHISPER}, DECODER, projectors={"audio": HIDDEN})
    parts = [part for stage in model.stages({"audio": Layout(), "llm": Layout()}) for part in stage.slices]
    leaves = [leaf for part in parts if part.module != "llm" for leaf in jax.tree.leaves(part.leaves())]
    avals = {name: jax.ShapeDtypeStruct(leaf.logical_shape, np.float32) for leaf in leaves for name in leaf.names}
    counted = flops.forward_flops(model, {"audio": [32]})
    frames = jax.ShapeDtypeStruct((64, WHISPER.mels), np.float32)
    traced = reference_encoders.encode_frames.trace(avals, frames, name="audio", whisper=WHISPER)
    assert product_flops(traced.jaxpr.jaxpr) == counted["audio"] + counted["audio_projector"]


def test_dense_generator_does_the_counted_products() -> None:
    projectors = {"vision": HIDDEN, "painter": ProjectorConfig(hidden=20)}
    model = multimodal({"vision": VIT}, DECODER, {"painter": DIT}, projectors)
    layouts = {name: Layout() for name in ("vision", "llm", "painter")}
    parts = [part for stage in model.stages(layouts) for part in stage.slices if part.module.startswith("painter")]
    leaves = [leaf for part in parts for leaf in jax.tree.leaves(part.leaves())]
    avals = {name: jax.ShapeDtypeStruct(leaf.logical_shape, np.float32) for leaf in leaves for name in leaf.names}
    counts = {"painter": 0, "painter_projector": 0}
    for name, aval in avals.items():
        counts[name.split("/")[0]] += math.prod(aval.shape)
    assert counts == {name: flops.parameter_count(model)[name] for name in counts}
    counted = flops.forward_flops(model, {"painter": [24]})
    hidden, patches = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((6, DECODER.width), (24, 8)))
    traced = reference_decoder.velocity.trace(
        avals, hidden, patches, jax.ShapeDtypeStruct((), np.float32), name="painter", dit=DIT, rows=4, columns=6
    )
    # The shifts, scales and gates of a picture's patches are the same: the reference makes them once.
    made = 2 * 2 * DIT.frequencies * (6 * DIT.layers + 2) * DIT.width
    assert product_flops(traced.jaxpr.jaxpr) == counted["painter"] + counted["painter_projector"] - (24 - 1) * made


def test_dense_generator_with_two_streams_does_the_counted_products() -> None:
    """Of one picture; and of two by hand, whose shifts, scales and gates are computed once for each."""
    model = multimodal({}, DECODER, {"painter": MMDIT}, {"painter": ProjectorConfig(hidden=20)})
    parts = [part for stage in model.stages({"llm": Layout(), "painter": Layout()}) for part in stage.slices]
    leaves = [leaf for part in parts if part.module != "llm" for leaf in jax.tree.leaves(part.leaves())]
    avals = {name: jax.ShapeDtypeStruct(leaf.logical_shape, np.float32) for leaf in leaves for name in leaf.names}
    counted = flops.forward_flops(model, {"painter": [24]})
    hidden, patches = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((5, DECODER.width), (24, 8)))
    time = jax.ShapeDtypeStruct((), np.float32)
    traced = reference_mmdit.double_stream_velocity.trace(
        avals, hidden, patches, time, name="painter", dit=MMDIT, rows=4, columns=6, projector=ProjectorConfig(hidden=20)
    )
    assert product_flops(traced.jaxpr.jaxpr) == counted["painter"] + counted["painter_projector"]
    width, layers, lengths = MMDIT.width, MMDIT.layers, (24, 7)
    once = 256 * width + width * width + layers * 2 * 6 * width * width + 2 * width * width
    products = sum(layers * (length + 5) * (4 * width * width + 2 * width * MMDIT.mlp) for length in lengths)
    ends = sum(2 * length * 8 * width for length in lengths)
    attention = sum(2 * layers * (length + 5) ** 2 * width for length in lengths)
    assert flops.forward_flops(model, {"painter": lengths})["painter"] == 2 * (2 * once + products + ends + attention)


@pytest.mark.parametrize(
    ("frozen", "llm", "projector", "painter"),
    [
        ((), 3, 3, 3),
        (("painter",), 3, 3, 2),
        (("painter", "painter_projector"), 3, 2, 2),
        (("vision", "vision_projector", "llm"), 1, 3, 3),
        (("vision", "vision_projector", "llm", "painter_projector"), 1, 1, 3),
        (("llm", "painter", "painter_projector"), 2, 2, 2),
    ],
)
def test_a_generator_behind_what_trains_passes_gradients(
    frozen: tuple[str, ...], llm: int, projector: int, painter: int
) -> None:
    found = flops.training_factors(multimodal({"vision": VIT}, DECODER, {"painter": DIT}), frozen)
    assert [found[name] for name in ("llm", "painter_projector", "painter")] == [llm, projector, painter]


def test_what_enters_a_layer_again_counts_as_the_projectors() -> None:
    seen = {"vision": [16, 4], "llm": [9]}
    one, other = (flops.forward_flops(m, seen) for m in (MODEL, MODEL.with_inject("vision", 0, 1)))
    tokens, products = (16 + 4) // 4, 2 * 2 * 128 * 96
    assert other == one | {"vision_projector": one["vision_projector"] + 2 * tokens * products}


lengths = st.lists(st.integers(1, 40), max_size=6)


@given(images=st.lists(st.integers(1, 10), max_size=6), first=lengths, second=lengths)
def test_flops_add_up_over_segments_and_ignore_padding(images: list[int], first: list[int], second: list[int]) -> None:
    patches = [4 * count for count in images]
    whole = flops.forward_flops(MODEL, {"vision": patches, "llm": first + second})
    parts = [{"vision": patches, "llm": first}, {"llm": second}]
    assert whole == {name: sum(flops.forward_flops(MODEL, part)[name] for part in parts) for name in whole}
    rows = np.zeros((2, 300), np.int32)
    for row, segments in zip(rows, (first, second), strict=True):
        ids = np.repeat(np.arange(len(segments)) + 1, segments)
        row[: len(ids)] = ids
    assert flops.segment_lengths(rows) == (*first, *second)


def test_frozen_modules_cost_less() -> None:
    def factors(*frozen: str) -> list[int]:
        return list(flops.training_factors(MODEL, frozen).values())

    assert list(flops.training_factors(MODEL, ())) == ["vision", "vision_projector", "llm"]
    assert factors() == [3, 3, 3]
    assert factors("vision") == [1, 3, 3]
    assert factors("vision", "llm") == [1, 3, 2]
    assert factors("vision_projector", "llm") == [3, 2, 2]
    assert factors("vision", "vision_projector") == [1, 1, 3]
    assert factors("vision", "vision_projector", "llm") == [1, 1, 1]
    two = flops.training_factors(multimodal({"a": VIT, "b": VIT}, DECODER), ("a", "a_projector", "llm"))
    assert two == {"a": 1, "a_projector": 1, "b": 3, "b_projector": 3, "llm": 2}
    seen = {"vision": [16, 4], "llm": [9]}
    forward = flops.forward_flops(MODEL, seen)
    cost = flops.training_flops(MODEL, seen, frozen=("vision", "llm"))
    assert cost == {
        "vision": forward["vision"],
        "vision_projector": 3 * forward["vision_projector"],
        "llm": 2 * forward["llm"],
    }
    assert flops.training_flops(MODEL, {"llm": [9]}) == {"vision": 0, "vision_projector": 0, "llm": 3 * forward["llm"]}


def test_refusals() -> None:
    with pytest.raises(ValueError, match="'audio'"):
        flops.forward_flops(MODEL, {"audio": [3]})
    with pytest.raises(ValueError, match=r"Decoder\.vocab: 0"):
        module_of(dataclasses.replace(DECODER, vocab=0)).parameters()
