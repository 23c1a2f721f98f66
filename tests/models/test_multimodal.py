"""The module graph and how it is cut into stages."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout
from mmjax.models.config import ModelConfig
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.stage_model import StageModel
from mmjax.models.vit.config import ViTConfig

VIT = ViTConfig(layers=3, width=16, heads=2, mlp=24, patch=2, merge=2)
LLM = DecoderConfig(layers=5, width=24, heads=4, kv_heads=2, mlp=40, vocab=37)
TWO = multimodal({"vision": VIT, "depth": replace(VIT, layers=1)}, LLM, projectors={"depth": ProjectorConfig(hidden=8)})


def stages(llm: Layout, vision: Layout | None = None) -> dict[str, StageModel]:
    layouts = {"vision": vision or Layout(), "depth": Layout(), "llm": llm}
    return {stage.name: stage for stage in TWO.stages(layouts)}


def test_modules_are_the_encoders_their_projectors_and_the_llm() -> None:
    assert TWO.modules == ("vision", "vision_projector", "depth", "depth_projector", "llm")


def test_every_encoder_ends_in_the_first_llm_stage() -> None:
    got = stages(Layout(pp=3), Layout(pp=2))
    assert {name: stage.sources for name, stage in got.items()} == {
        "vision.0": (),
        "vision.1": ("vision.0",),
        "depth.0": (),
        "llm.0": ("vision.1", "depth.0"),
        "llm.1": ("llm.0",),
        "llm.2": ("llm.1",),
    }
    assert [name for name, stage in got.items() if stage.losses] == ["llm.2"]


def test_chunks_are_stages_like_any_other() -> None:
    """As many stages on twice as many submeshes are the same stages."""
    model = TWO.with_settings("vision", layers=4)
    chunked, deep = (
        model.stages({"vision": vision, "depth": Layout(), "llm": llm})
        for vision, llm in ((Layout(pp=2, chunks=2), Layout(pp=2, chunks=2)), (Layout(pp=4), Layout(pp=4)))
    )
    for one, other in zip(chunked, deep, strict=True):
        assert (one.name, one.index, one.sources, one.inputs) == (other.name, other.index, other.sources, other.inputs)
        assert [part.leaves() for part in one.slices] == [part.leaves() for part in other.slices]
        assert (one.predict is None) == (other.predict is None)
    with pytest.raises(
        ConfigError, match=r"^llm/Layout\.chunks=3: .* = 6 stages need a layer each and there are 5; use 2"
    ):
        stages(Layout(pp=2, chunks=3))


def test_stages_read_the_host_inputs_that_they_need() -> None:
    got = {name: set(stage.inputs) for name, stage in stages(Layout(pp=3), Layout(pp=2)).items()}
    always = {"segments", "positions"}
    assert got["vision.0"] == got["depth.0"] == always | {"patches"}
    assert got["vision.1"] == always
    assert got["llm.0"] == always | {"tokens", "vision_index", "depth_index"}
    assert got["llm.1"] == always
    assert got["llm.2"] == always | {"targets", "weights"}
    assert set(stages(Layout())["llm.0"].inputs) == got["llm.0"] | got["llm.2"]


def injecting(vision: tuple[int, ...], depth: tuple[int, ...] = ()) -> MultimodalModel:
    return TWO.with_inject("vision", *vision).with_inject("depth", *depth)


def test_an_encoder_enters_the_stages_of_its_chosen_layers() -> None:
    layouts = {"vision": Layout(pp=2), "depth": Layout(), "llm": Layout(pp=3, tp=2)}
    got = {stage.name: stage for stage in injecting((0, 3), (4,)).stages(layouts)}
    assert {name: got[name].sources for name in got if name.startswith("llm")} == {
        "llm.0": ("vision.1", "depth.0"),
        "llm.1": ("llm.0", "vision.1"),
        "llm.2": ("llm.1", "depth.0"),
    }
    reads = {name: {i for i in got[name].inputs if i.endswith("_index")} for name in ("llm.0", "llm.1", "llm.2")}
    assert reads == {"llm.0": {"vision_index", "depth_index"}, "llm.1": {"vision_index"}, "llm.2": {"depth_index"}}


def leaf_names(model: MultimodalModel, llm: Layout) -> dict[str, tuple[int, ...]]:
    layouts = {"vision": Layout(), "depth": Layout(), "llm": llm}
    slices = [part for stage in model.stages(layouts) for part in stage.slices]
    leaves = [leaf for part in slices for leaf in jax.tree.leaves(part.leaves())]
    names = [name for leaf in leaves for name in leaf.names]
    assert len(names) == len(set(names))
    return {name: leaf.logical_shape for leaf in leaves for name in leaf.names}


@pytest.mark.long
def test_what_enters_a_layer_is_the_projectors_under_any_layout() -> None:
    model = injecting((0, 3), (3,))
    one, other = leaf_names(model, Layout()), leaf_names(model, Layout(pp=3))
    assert one == other
    added = {name: shape for name, shape in one.items() if name not in leaf_names(TWO, Layout())}
    sizes = {"vision_projector/inject000": 24, "vision_projector/inject003": 24, "depth_projector/inject003": 8}
    shapes = {
        "up": lambda h: (24, h),
        "up_bias": lambda h: (h,),
        "down": lambda h: (h, 24),
        "down_bias": lambda h: (24,),
    }
    assert added == {f"{name}/{leaf}": of(h) for name, h in sizes.items() for leaf, of in shapes.items()}


def test_layers_and_single_parts_are_shared_out() -> None:
    held = {}
    for name, stage in stages(Layout(pp=3, tp=2), Layout(pp=2)).items():
        leaves = [leaf for part in stage.slices for leaf in jax.tree.leaves(part.leaves())]
        held[name] = {f"{leaf.module}/{leaf.path}": leaf for leaf in leaves}
    assert [held[f"llm.{i}"]["llm/layers/attn/q"].layers for i in range(3)] == [(0, 1), (2, 3), (4,)]
    assert [held[f"vision.{i}"]["vision/layers/attn/q"].layers for i in range(2)] == [(0, 1), (2,)]
    where = {
        "llm/embed": ["llm.0"],
        "llm/head": ["llm.2"],
        "llm/norm": ["llm.2"],
        "vision/patch/kernel": ["vision.0"],
        "vision/norm/scale": ["vision.1"],
        "vision_projector/up": ["vision.1"],
        "depth_projector/up": ["depth.0"],
    }
    assert {leaf: [name for name, leaves in held.items() if leaf in leaves] for leaf in where} == where
    assert held["vision.1"]["vision_projector/up"].shape == (4 * 16, 24)  # merge² · width to the LLM's width
    assert held["depth.0"]["depth_projector/up"].shape == (4 * 16, 8)
    assert held["depth.0"]["depth_projector/down"].shape == (8, 24)
    assert held["llm.0"]["llm/embed"].shape == (38, 24) and held["llm.2"]["llm/head"].shape == (24, 38)  # tp=2


def test_layouts_that_a_model_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"llm/Layout\.pp=6: a stage needs a layer and there are 5; use 5 or less"):
        stages(Layout(pp=6))
    with pytest.raises(ConfigError, match=r"vision/Layout\.pp=4"):
        stages(Layout(), Layout(pp=4))
    fix = r"sums to 6 and there are 5; use \(3, 2\), or \(\) for as equal as possible"
    with pytest.raises(ConfigError, match=rf"^llm/Layout\.layers=\(2, 4\): {fix}$"):
        stages(Layout(pp=2, layers=(2, 4)))


def test_given_layers_are_the_stages_own() -> None:
    even, uneven = leaf_names(TWO, Layout(pp=2)), leaf_names(TWO, Layout(pp=2, layers=(1, 4)))
    assert even == uneven
    got = {name: stage.slices[0].runs[0].layers for name, stage in stages(Layout(pp=2, layers=(1, 4))).items()}
    assert (got["llm.0"], got["llm.1"]) == (range(1), range(1, 5))
    layouts = {"vision": Layout(), "depth": Layout(), "llm": Layout(pp=3, layers=(1, 1, 3))}
    sources = {stage.name: stage.sources for stage in injecting((1, 2), (4,)).stages(layouts)}
    assert sources["llm.1"] == ("llm.0", "vision.0") and sources["llm.2"] == ("llm.1", "vision.0", "depth.0")


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_tied_table_is_the_first_stages_and_the_last_one_borrows_it(pp: int) -> None:
    tied = TWO.with_settings("llm", tied=True)
    held = {}
    for stage in tied.stages({"vision": Layout(), "depth": Layout(), "llm": Layout(pp=pp, tp=2)}):
        leaves = [leaf for part in stage.slices for leaf in jax.tree.leaves(part.leaves())]
        held |= {(stage.name, leaf.path): leaf for leaf in leaves if leaf.module == "llm"}
    tables = {stage: leaf for (stage, path), leaf in held.items() if path == "embed"}
    if pp == 1:
        assert {stage: leaf.tie for stage, leaf in tables.items()} == {"llm.0": ""}
    else:
        assert {stage: leaf.tie for stage, leaf in tables.items()} == {"llm.0": "lent", f"llm.{pp - 1}": "borrowed"}
    assert {leaf.shape for leaf in tables.values()} == {(38, 24)}
    assert {leaf.tie for (_, path), leaf in held.items() if path != "embed"} == {""}
    assert not any(path == "head" for _, path in held)


@pytest.mark.parametrize(("name", "kind"), [("vision", "resnet"), ("llm", "vit"), ("my eye", "vit")])
def test_encoders_that_do_not_exist_or_cannot_be_scopes_are_refused(name: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"Model\.encoders"):
        ModelConfig(encoders={name: kind})


def test_an_open_vocabulary_is_the_tokenizers() -> None:
    open_model = TWO.with_settings("llm", vocab=0)
    assert open_model.with_vocab(261).llm.vocab == 261
    assert TWO.with_vocab(261) == TWO
