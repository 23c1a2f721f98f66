"""Generators of codes: a language model in the role of a generator, what it may read, and what is refused."""

from __future__ import annotations

import pytest
from trial_runs import REPOSITORY

import mmjax as mm
from mmjax.assembly.model import build_model, encoder_specs
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import tokenizer_of
from mmjax.models.families import families_for
from mmjax.models.graph import multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.module import Llama
from mmjax.models.llama.talker import CodeDecoder
from mmjax.recipe import validate
from mmjax.recipe.targets import require_targets

CONFIG = REPOSITORY / "configs/digits_speak.gin"


def load(*bindings: str) -> mm.Recipe:
    return load_config([CONFIG], list(bindings))


def test_a_language_model_has_two_roles() -> None:
    assert families_for("llm") == ("llama",) and families_for("generator") == (
        "llama",
        "dit",
        "sound-dit",
        "mmdit",
        "unet",
    )
    recipe = load()
    model = build_model(recipe, tokenizer_of(DataConfig(), recipe.model.media))
    assert type(model.nodes["llm"].module) is Llama and type(model.nodes["talker"].module) is CodeDecoder
    assert list(model.generators) == ["talker"] and list(model.encoders) == ["vision"]
    assert model.llm.vocab > 200 and model.nodes["talker"].config.vocab == 11
    assert recipe.model.media == ("vision",) and recipe.model.talkers == ("talker",)
    specs = encoder_specs(recipe)
    assert specs["talker"].codes == 11 and not specs["talker"].in_text and specs["vision"].in_text


def test_in_python() -> None:
    settings = DecoderConfig(layers=1, width=16, heads=2, kv_heads=2, mlp=24, vocab=11)
    node = mm.generator("talker", settings)
    assert node.speaks and node.kind == "llama" and not mm.language_model(settings).speaks
    model = multimodal({}, settings, {"talker": settings})
    assert type(model.nodes["talker"].module) is CodeDecoder and model.with_vocab(50).nodes["talker"].config.vocab == 11


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (["talker/Decoder.vocab=0"], "talker/Decoder.vocab=0: no tokenizer decides how many codes"),
        (["talker/Decoder.vocab=2"], "talker/Decoder.vocab=2: no tokenizer decides how many codes"),
        (["talker/Decoder.mask='prefix'"], "talker/Decoder.mask='prefix': "),
        (["talker/Decoder.rope_sections=(2, 3, 3)"], r"talker/Decoder.rope_sections=\(2, 3, 3\): codes have no rows"),
        (["talker/Weights.path='x'"], "talker/Weights.path='x': "),
        (
            ["Model.edges=('vision -> llm', 'llm -> talker', 'vision -> talker')"],
            "Model.edges='vision -> talker': 'talker' speaks and reads the LLM alone; leave the edge out",
        ),
        (["talker/Layout.tp=3"], "talker/Layout.tp=3: must divide"),
    ],
)
def test_refused(bindings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        validate(load(*bindings))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("bindings", "fix"),
    [
        (["Data.task='folder'", "Data.folder='x'"], "leave it out, or set talker/Optimizer.frozen to True"),
        (["Data.speaker='other'"], "Data.speaker to 'talker'"),
    ],
)
def test_data_without_codes_are_refused(bindings: list[str], fix: str) -> None:
    with pytest.raises(ConfigError, match="the data have no codes for 'talker' to speak, so it would learn noth") as no:
        require_targets(load(*bindings))
    assert str(no.value).endswith(fix) and "\n" not in str(no.value)
    require_targets(load())
    require_targets(load(*bindings, "talker/Optimizer.frozen=True", "talker_projector/Optimizer.frozen=True"))


def test_a_figure_of_codes_may_be_the_best() -> None:
    validate(load("Checkpoint.best='code_accuracy'"))
    with pytest.raises(ConfigError, match=r"^Checkpoint.best='drawing_accuracy'"):
        validate(load("Checkpoint.best='drawing_accuracy'"))
