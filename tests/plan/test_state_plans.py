"""Plans with ep and with shards: their bytes are those of a dry run, their files load, and their values are right."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from plan.test_work import CONFIGS, assert_bytes_of_the_run, read

from mmjax.assembly.samples import open_source
from mmjax.check import main
from mmjax.config import load_config
from mmjax.plan.planned import gin_text, rows_by_candidate
from mmjax.plan.work import read_work
from mmjax.planner.accelerators import H100
from mmjax.planner.candidates import HOMOGENEOUS
from mmjax.planner.choose import PlanChoice, choose
from mmjax.planner.clock import AnalyticClock
from mmjax.recipe import Recipe

NAME = "digits_moe.gin"
HALF = ("Data.workers=0", "Train.dtype='bfloat16'")
WIDER = ("llm/Decoder.width=128", "llm/Decoder.expert_mlp=96", "llm/Decoder.mlp=256")
"""Layers whose weights take more memory than what does not scale with them."""
FOUR = ("llm/Layout.dp=4", "llm/Layout.pp=1")
TWO_BY_TWO = ("llm/Layout.dp=2", "llm/Layout.pp=1", "llm/Layout.tp=2")
BUFFER = "llm/Decoder.expert_buffer=1.5"
SMALL_BUFFER = ("llm/Layout.ep=4", "llm/Layout.ep_way='all-to-all'", BUFFER)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "bindings",
    [
        (),  # two stages, ep 2
        (*FOUR, "llm/Layout.ep=4"),
        (*FOUR, "llm/Layout.ep=4", "llm/Layout.ep_way='all-to-all'"),
        (*FOUR, *SMALL_BUFFER),
        (*FOUR, "llm/Layout.ep=2", "llm/Layout.shard='parameters'"),
        (*FOUR, "llm/Layout.ep=1", "llm/Layout.shard='parameters'"),
        (*FOUR, "llm/Layout.ep=4", "llm/Layout.shard='gradients'"),
        (*TWO_BY_TWO, "llm/Layout.ep=2"),
        (*TWO_BY_TWO, "llm/Layout.ep=2", "llm/Layout.ep_way='all-to-all'", BUFFER, "llm/Layout.expert_tp=1"),
    ],
    ids=[
        *("stages", "ring", "all-to-all", "buffer", "ep and parameters", "parameters", "ep and gradients", "tp"),
        "whole experts on ranks of tp",
    ],
)
def test_bytes_are_those_of_a_dry_run(bindings: tuple[str, ...]) -> None:
    """Bytes are traced with ep 2 alone, and without shards."""
    model = tuple(binding for binding in bindings if "Decoder" in binding)
    _, work = read(NAME, *HALF, *WIDER, *model)
    recipe = load_config((str(CONFIGS / NAME),), (*HALF, *WIDER, *bindings))
    # Temporaries of a ring are those of one turn, but are taken to grow with all of its rows.
    assert_bytes_of_the_run(recipe, work, within=0.12 if recipe.model["llm"].layout.ep_way == "ring" else 0.1)


@cache
def choices(memory: float) -> tuple[Recipe, PlanChoice]:
    """The homogeneous plans of the digits with experts on eight devices of so many bytes."""
    recipe = load_config(
        (str(CONFIGS / NAME),), ("Data.workers=0", "llm/Decoder.remat='dots'", "vision/ViT.remat='dots'")
    )
    source = open_source(recipe, split="train")
    work = read_work(recipe, source)
    clock, rows_of = AnalyticClock(work=work, accelerator=H100), rows_by_candidate(recipe, source)
    return recipe, choose(work, clock, 8, memory=memory, rows_of=rows_of, modes=[HOMOGENEOUS])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("memory", "field", "value"), [(5e6, "ep", 2), (1.7e6, "shard", "parameters")], ids=["ep", "parameters"]
)
def test_a_plan_trains_as_one_device_does(memory: float, field: str, value: object, tmp_path: Path) -> None:
    """`mmjax.check` takes the configuration and the plan's file, and compares with the dense reference."""
    recipe, choice = choices(memory)
    best = choice.best
    assert getattr(best.candidate.layouts["llm"], field) == value and best.most <= memory
    path = tmp_path / "plan.gin"
    path.write_text(gin_text(recipe, choice, best))
    assert f"llm/Layout.{field} = {value!r}" in path.read_text()
    loaded = load_config((str(CONFIGS / NAME), str(path)), ("Data.workers=0",))
    assert dict(loaded.model.layouts) == dict(best.candidate.layouts)
    assert main([f"--gin_file={CONFIGS / NAME}", f"--gin_file={path}", "--gin.Data.workers=0", "--json"]) == 0
