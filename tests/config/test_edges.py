"""Edges of a model in gin and in Python: what is read, written and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mmjax
from mmjax.config import load_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.recipe import ModelSpec, Recipe

MODULES = ("Model.encoders={'vision': 'vit', 'temporal': 'temporal'}", "Model.generators={'painter': 'dit'}")
DRAWS = ("Digits.draw=1.0",)


def load(*edges: str, more: tuple[str, ...] = ()) -> Recipe:
    return load_config([], [*MODULES, *DRAWS, f"Model.edges={edges!r}", *more])


def edges_of(model: ModelSpec) -> set[tuple[str, str]]:
    return {(edge.source, edge.target) for edge in model.flows}


CHAIN = ("vision -> temporal", "temporal -> llm", "llm -> painter")


def test_copies_that_read_copies_have_their_dp() -> None:
    copied = (
        "llm/Layout.pp=2",
        "llm/Layout.dp=2",
        "vision/Layout.copies=2",
        "vision/Layout.tp=2",
        "Model.generators={}",
        "Digits.draw=0.0",
    )
    edges = "Model.edges=('vision -> temporal', 'temporal -> llm')"
    same = (*MODULES, *copied, edges, "temporal/Layout.copies=2")
    assert load_config([], [*same, "temporal/Layout.tp=2"]).model["temporal"].layout.copies == 2
    message = "^temporal/Layout.dp=2: it reads 'vision' on the same ranks, with copies=2 and dp=1; set it to 1 "
    with pytest.raises(ConfigError, match=message):
        load_config([], [*same, "temporal/Layout.dp=2"])
    with pytest.raises(ConfigError, match=r"^temporal/Layout.copies=1: it reads 'vision' on the same ranks"):
        load_config([], [*MODULES, *copied, edges, "temporal/Layout.dp=4"])


def test_without_edges_encoders_feed_the_llm_and_the_llm_its_generators() -> None:
    recipe = load_config([], ["Model.generators={'painter': 'dit'}", *DRAWS])
    assert recipe.model.edges == () and edges_of(recipe.model) == {("vision", "llm"), ("llm", "painter")}


def test_edges_of_gin_are_those_of_python() -> None:
    recipe = load(*CHAIN, "vision -> painter")
    spec = ModelSpec.of(*recipe.model.nodes.values(), edges=[*CHAIN, mmjax.edge("vision", "painter")])
    assert spec == recipe.model
    assert recipe.model.sources("painter") == ("llm", "vision")
    assert recipe.model.targets("vision") == ("temporal", "painter")
    assert recipe.model.media == ("vision", "painter")  # temporal tokens take the places of images


def test_edges_are_read_again_from_what_is_written(tmp_path: pytest.TempPathFactory) -> None:
    more = ("vision_to_painter/Edge.index='sights'",)
    recipe = load(*CHAIN, "vision->painter", more=more)
    path = tmp_path / "config.gin"  # type: ignore[operator]
    path.write_text(operative_config(recipe))
    assert load_config([path]) == recipe
    assert recipe.model.edges[-1].settings.index == "sights"


def test_a_star_with_settings_has_its_edges_written_out() -> None:
    recipe = load_config([], ["vision_to_llm/Edge.inject=(0,)"])
    assert [edge.text for edge in recipe.model.edges] == ["vision -> llm"]
    assert recipe.model.edges[0].settings.inject == (0,)


REFUSED = {
    "vision > llm": "is no edge; write 'source -> target', such as 'vision -> llm'",
    "visoin -> llm": "no module 'visoin'; did you mean 'vision'?",
    "llm -> vision": "encoders come before the LLM; let the LLM feed a generator",
    "painter -> llm": "the LLM comes before its generators; turn the edge round",
    "painter -> temporal": "encoders come before generators; turn the edge round",
    "llm -> painter": "is there twice; leave one out",
    "temporal -> vision": "name 'temporal' before 'vision' in Model.encoders",
    "vision -> vision": "leads back to its own module; leave it out",
    "vision -> llm": "'temporal' and 'llm' would read the same tokens of 'vision'; leave one edge out",
}


@pytest.mark.parametrize("edge", REFUSED)
def test_an_edge_that_cannot_be_is_refused_in_one_line(edge: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(*CHAIN, edge)
    assert str(error.value).startswith("Model.edges=") and REFUSED[edge] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (("vision -> llm", "llm -> painter"), "nothing reads 'temporal'; add 'temporal -> llm'"),
        (CHAIN[:2], "'painter' needs the LLM's hidden states; add 'llm -> painter'"),
        (("vision -> llm", "temporal -> llm", "llm -> painter"), "add an edge to 'temporal' in Model.edges"),
    ],
)
def test_a_module_that_is_not_connected_is_refused(edges: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(*edges)
    assert message in str(error.value)


def test_an_encoder_of_media_reads_no_tokens() -> None:
    edges = "Model.edges=('vision -> second', 'second -> llm')"
    with pytest.raises(ConfigError, match=r"second'\]='vit': it encodes images, and reads no vision; use 'temporal'"):
        load_config([], ["Model.encoders={'vision': 'vit', 'second': 'vit'}", edges])


def test_recordings_have_no_places_in_a_drawing() -> None:
    bindings = ["Model.encoders={'vision': 'vit', 'audio': 'whisper'}", MODULES[1], *DRAWS]
    edges = ("vision -> llm", "audio -> llm", "llm -> painter", "audio -> painter")
    with pytest.raises(ConfigError, match=r"'audio -> painter': 'audio' encodes no images"):
        load_config([], [*bindings, f"Model.edges={edges!r}"])


def test_layers_are_entered_in_the_llm_alone() -> None:
    with pytest.raises(
        ConfigError, match=r"^vision_to_temporal/Edge.inject=\(0,\): vision -> temporal enters no layer"
    ):
        load(*CHAIN, more=("vision_to_temporal/Edge.inject=(0,)",))
    with pytest.raises(
        ConfigError, match=r"^vision/Projector.newline=True: belongs to an encoder that feeds the llm al"
    ):
        load(*CHAIN, more=("vision/Projector.newline=True",))


def test_layers_of_an_edge_exist() -> None:
    with pytest.raises(ConfigError, match=r"^vision_to_llm/Edge.inject=\(9,\): llm has layers 0 to 2; use numbers of"):
        load_config([], ["vision_to_llm/Edge.inject=(9,)", "llm/Decoder.layers=3"])
    with pytest.raises(ConfigError, match=r"^vision_to_llm/Edge.levels=\(4,\): vision has layers 0 to 1; use "):
        load_config([], ["vision_to_llm/Edge.inject=(0,)", "vision_to_llm/Edge.levels=(4,)", "vision/ViT.layers=2"])


def test_settings_of_an_edge_that_is_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Edge has no scope 'vision_to_lm'; did you mean 'vision_to_llm'"):
        load_config([], ["vision_to_lm/Edge.inject=(0,)"])


def test_a_graph_is_built_with_these_edges() -> None:
    from mmjax.assembly.model import build_model
    from mmjax.data.tokenizer import make_tokenizer

    recipe = load(*CHAIN, "vision -> painter", more=("vision_to_painter/Edge.index='sights'",))
    model = build_model(recipe, make_tokenizer("", recipe.model.media))
    indices = {(edge.source, edge.target): edge.index for edge in model.edges}
    assert indices == {
        ("vision", "temporal"): "vision_index",
        ("temporal", "llm"): "temporal_index",
        ("llm", "painter"): "index",
        ("vision", "painter"): "sights",
    }
    assert set(model.encoders) == {"vision", "temporal"} and set(model.generators) == {"painter"}
    star = replace(recipe, model=replace(recipe.model, edges=()))
    assert star != recipe
