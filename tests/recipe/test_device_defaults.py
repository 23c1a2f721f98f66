"""What is left to the devices: the choice by estimates, what stays, and the same choice through plans of whole runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from trial_runs import write_tiny

from mmjax.assembly.assembly import assemble, place, plan
from mmjax.assembly.placing import planned_device, planned_world, target_of
from mmjax.config import load_config
from mmjax.config.operative import differences, operative_config
from mmjax.configurable import ConfigError
from mmjax.mesh import gpu
from mmjax.mesh.world import World
from mmjax.recipe import Recipe
from mmjax.recipe.device_defaults import (
    Estimate,
    TargetDevice,
    leaves_open,
    open_remat,
    resolve,
    with_earlier_defaults,
    with_remat,
)

SIZES = {"none": 8.0, "dots": 4.0, "full": 1.0}
"""Bytes of the residuals of the LLM, made up; those of the encoder are a quarter."""
GPU = TargetDevice("gpu", 100.0)


def recipe_of(*bindings: str) -> Recipe:
    return load_config([], list(bindings))


def chosen(recipe: Recipe) -> tuple[str, ...]:
    return tuple(node.settings.remat for node in recipe.model.nodes.values())


def estimate(recipe: Recipe) -> Estimate:
    """Residuals beside 10 bytes of everything else."""
    assert not leaves_open(recipe)
    vision, llm = (SIZES[remat] for remat in chosen(recipe))
    return Estimate(10 + vision / 4 + llm, {"vision": vision / 4, "llm": llm})


def never(recipe: Recipe) -> Estimate:
    raise AssertionError("nothing has to be estimated")


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_nothing_but_gpus_unrolls_or_recomputes(platform: str) -> None:
    resolved = resolve(recipe_of(), TargetDevice(platform), never)
    assert resolved.recipe.train.unroll is False and chosen(resolved.recipe) == ("none", "none")
    assert not resolved.lines


@pytest.mark.parametrize(
    ("memory", "remats"),
    [
        (27, ("none", "none")),  # 20 of 27 leave room
        (26, ("dots", "dots")),  # 15 of 26
        (16.2, ("dots", "dots")),  # 15 of 16.2 fit
        (16, ("dots", "full")),  # 15 are too many, 12 are not: the LLM keeps most
        (12.5, ("full", "full")),
        (5, ("full", "full")),  # which does not fit either
    ],
)
def test_the_cheapest_that_fits(memory: float, remats: tuple[str, ...]) -> None:
    resolved = resolve(recipe_of(), TargetDevice("gpu", memory * 1e9, origin="some GPU"), scaled)
    assert chosen(resolved.recipe) == remats and resolved.recipe.train.unroll is True
    unroll, line = resolved.lines
    assert unroll == "Train.unroll=True: on GPUs layers are unrolled"
    assert line.startswith(f"vision/ViT.remat={remats[0]!r}, llm/Decoder.remat={remats[1]!r}: an estimated ")
    assert f" of {memory:.3g} GB (some GPU)" in line
    assert ("'none' would take 20" in line) == (remats[0] != "none")


def scaled(recipe: Recipe) -> Estimate:
    found = estimate(recipe)
    return Estimate(found.bytes * 1e9, found.residuals)


def test_what_the_recipe_says_stays() -> None:
    said = recipe_of(
        "Train.unroll=False", "Train.overlap_grad_reduce=False", "llm/Decoder.remat=full", "vision/ViT.remat=none"
    )
    assert not leaves_open(said) and resolve(said, GPU, never).recipe == said
    half = recipe_of("Train.unroll=False", "llm/Decoder.remat=dots")
    assert open_remat(half) == ("vision",)
    resolved = resolve(half, TargetDevice("gpu", 14.1), estimate)
    assert chosen(resolved.recipe) == ("full", "dots") and resolved.recipe.train.unroll is False
    assert resolved.recipe.train.overlap_grad_reduce is True


@pytest.mark.parametrize("name", ["unroll", "overlap_grad_reduce"])
@pytest.mark.parametrize("value", ["auto", "'auto'", "True", "False"])
def test_values_of_two_settings(name: str, value: str) -> None:
    assert repr(getattr(recipe_of(f"Train.{name}={value}").train, name)).strip("'") == value.strip("'")


@pytest.mark.parametrize("name", ["unroll", "overlap_grad_reduce"])
@pytest.mark.parametrize("value", ["maybe", "1", "None"])
def test_other_values_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Train\.{name}='?(maybe|1|None)'?: must be "):
        recipe_of(f"Train.{name}={value}")


def test_an_earlier_choice_stays_and_is_no_difference() -> None:
    recipe = recipe_of()
    earlier = resolve(recipe, TargetDevice("gpu", 16.0), estimate).recipe
    again = with_earlier_defaults(recipe, earlier)
    assert again.recipe == earlier
    assert again.lines == ("Train.unroll=True, vision/ViT.remat='dots', llm/Decoder.remat='full': as the run so far",)
    on_cpu = resolve(recipe, TargetDevice("cpu"), never).recipe
    assert with_earlier_defaults(recipe, on_cpu).lines == ()
    assert with_earlier_defaults(recipe, None).recipe is recipe
    assert with_earlier_defaults(earlier, on_cpu).recipe == earlier, "what the recipe says is not left open"
    assert differences(operative_config(recipe), operative_config(earlier)) == {}
    assert differences(operative_config(on_cpu), operative_config(earlier)).keys() == {
        "Train.unroll", "Train.overlap_grad_reduce", "vision/ViT.remat", "llm/Decoder.remat"
    }  # fmt: skip


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Recipe:
    return load_config([write_tiny(tmp_path, Train_eval_samples=0)])


def on_gpus(recipe: Recipe, memory: float) -> Mapping[str, object]:
    """The programs' settings where the run's devices are GPUs with so many bytes."""
    recipe, world = planned_world(recipe)
    parts = assemble(recipe, world=world, device=TargetDevice("gpu", memory))
    assert parts.placed.model.unroll is parts.recipe.train.unroll is True and len(parts.choices) == 2
    remats = {name: node.config.remat for name, node in parts.placed.model.nodes.items()}
    assert tuple(remats.values()) == chosen(parts.recipe)
    return remats


@pytest.mark.long
@pytest.mark.parametrize(("memory", "remat"), [(1e9, "none"), pytest.param(1e3, "full", marks=pytest.mark.long)])
def test_a_run_on_gpus_computes_as_was_chosen(tiny: Recipe, memory: float, remat: str) -> None:
    assert on_gpus(tiny, memory) == {"vision": remat, "llm": remat}


def test_a_run_on_a_cpu_computes_as_before(tiny: Recipe) -> None:
    parts = plan(tiny)
    assert parts.recipe.train.unroll is parts.placed.model.unroll is False and parts.choices == ()
    assert chosen(parts.recipe) == ("none", "none")


@pytest.mark.long
def test_estimates_are_of_the_devices_kernels(tmp_path: Path) -> None:
    """The encoder's recomputation is to be chosen, and the LLM's attention runs on these GPUs alone."""
    bindings = ["World.platform=cuda", "Train.dtype=bfloat16", "llm/Decoder.attention=cudnn", "Train.unroll=False"]
    parts = plan(load_config([write_tiny(tmp_path, Train_eval_samples=0)], bindings))
    assert parts.world.platform == "gpu" and parts.world.devices[0].device_kind == gpu.H100
    assert chosen(parts.recipe) == ("none", "none")


def test_nothing_is_recomputed_where_nothing_is_trained(tiny: Recipe) -> None:
    recipe, world = planned_world(tiny)
    parts = place(recipe, world=world, trained=False, device=TargetDevice("gpu", 1e3))
    assert chosen(parts.recipe) == ("none", "none") and parts.recipe.train.unroll is True


def test_both_ways_to_compile_layers_give_the_same_costs(tmp_path: Path) -> None:
    """A data server on a CPU orders samples as a run on GPUs does."""
    costs = []
    for unroll in (False, True):
        parts = plan(load_config([write_tiny(tmp_path, Train_unroll=unroll, Train_eval_samples=0)]))
        costs.append(parts.placed.nominal_costs(next(iter(parts.shapes.values()))))
    assert costs[0] == costs[1]


def test_the_device_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    on_cuda = recipe_of("World.platform=cuda")
    assert planned_device(recipe_of("World.platform=cpu")).platform == "cpu"
    assert planned_device(on_cuda) == TargetDevice("gpu", 0.92 * 80e9, gpu.H100, "92 % of an H100's 80 GB")
    assert planned_device(on_cuda, 48e9) == TargetDevice("gpu", 0.92 * 48e9, gpu.H100, "92 % of 48 GB")
    assert target_of(World.planned(2)).platform == "cpu"


def test_the_device_of_a_world_is_what_jax_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "platform", "gpu")
    monkeypatch.setattr(World, "device_memory", 123)
    assert target_of(World.planned(1)) == TargetDevice("gpu", 123, "planned", "what JAX takes of the GPU")
    monkeypatch.setattr(World, "device_memory", 0)  # as of devices to compile for
    assert target_of(World.planned(1)).memory == gpu.memory_share() * gpu.H100_MEMORY


def test_with_remat_changes_the_named_modules_alone() -> None:
    assert chosen(with_remat(recipe_of(), ["llm"], "full")) == ("auto", "full")
