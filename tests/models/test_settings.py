"""Settings of modules: what all families state of themselves, and checks that a family adds to them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

import mmjax as mm
from mmjax.configurable import ConfigError, configurable, registry
from mmjax.mesh.layout import Layout
from mmjax.models import families
from mmjax.models.families import FAMILIES, family_of, family_of_tokens
from mmjax.models.settings import ModuleSettings
from mmjax.recipe import validate


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_states_its_medium_and_the_sizes_that_tp_divides(kind: str) -> None:
    family, settings = FAMILIES[kind], FAMILIES[kind].config()
    assert issubclass(family.config, ModuleSettings) and (family.medium is None) == ("llm" in family.roles)
    names = {field.name for field in fields(settings)}
    assert names.issuperset(settings.divided_by_tp)
    assert names.issuperset(("attention", "remat")) or not settings.heads  # an encoder of latents, which is frozen
    sizes = settings.sizes("m")
    divided = [name for name in settings.divided_by_tp if getattr(settings, name)]  # others are of layers it has not
    assert len(sizes.by_tp) >= len(divided) and set(sizes.replicable) <= set(sizes.by_tp)
    assert (sizes.layers, sizes.heads) == (settings.layers, settings.heads)
    assert settings.kv_heads or not settings.heads


def test_the_family_that_reads_tokens_is_in_the_registry() -> None:
    assert family_of_tokens() == "temporal"


def recipe(llm: Any = None, projector: mm.ProjectorConfig | None = None) -> mm.Recipe:
    vision = mm.encoder("vision", mm.ViTConfig(), projector)
    return mm.Recipe(model=mm.ModelSpec.of(vision, mm.language_model(llm or mm.DecoderConfig())))


def test_sizes_of_a_node_are_its_own_and_those_of_projectors_on_its_ranks() -> None:
    model = recipe(projector=mm.ProjectorConfig(hidden=80, inject=(0,))).model
    assert [model.sizes(name).by_tp["vision/Projector.hidden"] for name in model] == [80, 80]
    model = recipe(projector=mm.ProjectorConfig()).model
    assert model.sizes("vision").by_tp["llm/Decoder.width"] == 64
    assert model.sizes("llm") == model["llm"].settings.sizes("llm")
    model = recipe(projector=mm.ProjectorConfig(kind="linear", inject=(0,))).model
    assert [model.sizes(name) for name in model] == [model[name].settings.sizes(name) for name in model]


def test_a_family_refuses_layouts_and_runs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(mm.DecoderConfig):
        def check(self, name: str, layout: Layout) -> None:
            super().check(name, layout)
            raise ConfigError(f"{name}/Layout.cp={layout.cp}: mine")

        def check_run(self, name: str, dtype: str, platform: str) -> None:
            raise ConfigError(f"{name}: mine in {dtype} on {platform!r}")

    monkeypatch.setattr("mmjax.configurable._REGISTRY", {**registry(), "Narrow": Narrow})
    family = replace(FAMILIES["llama"], config=Narrow)
    monkeypatch.setattr(families, "FAMILIES", {**FAMILIES, "narrow": family})
    monkeypatch.setattr("mmjax.recipe.specs.families_for", lambda role: (*families.FAMILIES,))
    with pytest.raises(ConfigError, match=r"^llm/Layout\.cp=1: mine$"):
        validate(recipe(Narrow()))
    monkeypatch.delattr(Narrow, "check")
    with pytest.raises(ConfigError, match=r"^llm: mine in float32 on ''$"):
        validate(recipe(Narrow()))


def test_settings_of_a_module_of_ones_own_inherit_from_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmjax.configurable._REGISTRY", {**registry()})

    @configurable("Loose")
    @dataclass(frozen=True, kw_only=True)
    class LooseConfig:
        layers: int = 1

    monkeypatch.setattr(families, "import_named", lambda field, kind: SimpleNamespace(Config=LooseConfig))
    with pytest.raises(ConfigError, match=r"^Model\.llm='a:Loose': .*; let LooseConfig inherit from mmjax\.EqualHeads"):
        family_of("Model.llm", "a:Loose", "llm")
