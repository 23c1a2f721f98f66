"""Bytes of a module that is traced alone are those of the module among all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trial_runs import write_tiny

from mmjax.assembly.buckets import build_packer
from mmjax.assembly.model import build_model
from mmjax.config import load_config
from mmjax.data.loader import tokenizer_of
from mmjax.mesh.layout import Layout
from mmjax.pipeline.memory import in_flight_bytes, shard_bytes, temporary_bytes
from mmjax.pipeline.place import PlacedModel
from mmjax.plan import traced
from mmjax.recipe.device_defaults import with_remat

DRAWS = ("Model.generators={'painter': 'dit'}", "Digits.draw=1.0", "painter/Layout.rank_offset=4")
GIVEN = {
    "a generator": (*DRAWS, "Data.sequence_length=64"),
    "a frozen encoder": (*DRAWS, "Data.sequence_length=64", "vision/Optimizer.frozen=True"),
    "experts": ("llm/Decoder.experts=4", "llm/Decoder.experts_per_token=2"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", GIVEN)
def test_a_module_that_is_traced_alone_has_the_same_bytes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_config((str(write_tiny(tmp_path)),), GIVEN[case])
    recipe = with_remat(recipe, list(recipe.model), "dots")
    tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
    model, packer = build_model(recipe, tokenizer), build_packer(recipe, tokenizer)
    layouts = {name: Layout(tp=2) for name in model.nodes}
    if case == "experts":
        layouts["llm"] = Layout(dp=2, ep=2)
    rows = traced._rows_of(packer, 4, model, {name: layout.tp for name, layout in layouts.items()})
    placed = traced._Placed.of(recipe, model, rows, layouts)
    made = list[str]()
    make = PlacedModel._stage_functions

    def note(self: PlacedModel, place: str, *arguments: Any, **settings: Any) -> Any:
        made.append(f"{place} {settings['split']} {settings['forward_alone']}")
        return make(self, place, *arguments, **settings)

    alone = {}
    for name in model.nodes:
        with monkeypatch.context() as patched:
            patched.setattr(PlacedModel, "_stage_functions", note)
            alone[name] = placed.traced(name)
    assert not any("True False" in text for text in made), "a split backward was traced that nothing has read"
    whole = [text for text in made if text.endswith("False False")]
    assert sorted(whole) == sorted(f"{name}.{at} False False" for name in model.nodes for at in range(3)), made
    every = placed.model.trace(rows).stages
    every_split = placed.model.trace(rows, placed.model.graph.with_split()).stages
    for name, figures in alone.items():
        plain, split = ([stages[f"{name}.{at}"] for at in range(3)] for stages in (every, every_split))
        assert figures.residuals == tuple(in_flight_bytes(stage) for stage in plain)
        assert figures.host_inputs == tuple(shard_bytes(stage.forward_avals[1]) for stage in plain)
        assert figures.needed == tuple(temporary_bytes(stage) for stage in plain)
        assert figures.split().needed == tuple(temporary_bytes(stage) for stage in split)
        assert figures.split().deferred == tuple(shard_bytes(stage.deferred_avals) for stage in split)
        assert max(figures.residuals) > 0 or case == "a frozen encoder"
