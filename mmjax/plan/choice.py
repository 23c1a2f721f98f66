"""The best layouts of a recipe on some devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mmjax.assembly.epochs import with_steps
from mmjax.assembly.samples import open_source
from mmjax.configurable import ConfigError, setting_name
from mmjax.data.source import Source
from mmjax.plan import planned
from mmjax.plan.work import read_work
from mmjax.planner.accelerators import Accelerator, accelerator
from mmjax.planner.candidates import MODES
from mmjax.planner.choose import PlanChoice, choose_on
from mmjax.planner.choose_coupled import choose_coupled
from mmjax.planner.clock import AnalyticClock
from mmjax.planner.cluster_files import NODE
from mmjax.planner.fleet import DeviceKind, Fleet
from mmjax.planner.measured import MeasuredClock
from mmjax.planner.node_processes import waiting_free
from mmjax.planner.problem import NEEDED
from mmjax.planner.profile_file import Profile
from mmjax.planner.work import Work
from mmjax.recipe import Recipe
from mmjax.recipe.device_defaults import open_remat, remat_text


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe under the best layouts; ``str`` gives the table of ``mmjax.plan``.

    Attributes:
      recipe: the recipe with the best layouts, microbatches, schedule and offloads.
      choice: all estimates.
    """

    recipe: Recipe
    choice: PlanChoice

    def __str__(self) -> str:
        return "\n".join(planned.table(self.choice))


def plan_recipe(recipe: Recipe, kinds: Mapping[str, int]) -> PlannedRecipe:
    """Plans a recipe, with times that follow from a datasheet.

    The result has the `recipe` with the best layouts, and the `choice` with all estimates.

    Args:
      recipe: a checked recipe, as `load_config(["run.gin"])` gives it.
      kinds: the number of devices of each kind, such as {"h100": 64}, by names in `ACCELERATORS`; 0, for one kind, for
        as many as the recipe's layouts need.

    Raises:
      ConfigError: a kind is unknown, or a setting does not fit the data.
      DoesNotFit: no layout fits the devices' memory.
    """
    source = open_source(recipe, split="train")
    recipe = with_steps(recipe, source)
    choice = choose_plan(recipe, source, kinds)
    return PlannedRecipe(planned.planned(recipe, choice.best.candidate), choice)


def choose_plan(
    recipe: Recipe,
    source: Source,
    kinds: Mapping[str, int],
    *,
    strategy: Sequence[str] = MODES,
    profile: Profile | None = None,
    processes: str = NODE,
    fullest: float = 1.0,
    shards: str = NEEDED,
    say: Callable[[str], None] = lambda line: None,
) -> PlanChoice:
    """Estimates the layouts of a recipe on some devices; the best is the `best` of the result, an `Estimate`.

    Args:
      recipe: a checked recipe with a known number of steps, as `with_steps(load_config(["run.gin"]), source)` gives it.
      source: its training samples, as `open_source(recipe, split="train")` opens them.
      kinds: the number of devices of each kind, such as {"h100": 64}, by names in `ACCELERATORS`; 0, for one kind, for
        as many as the recipe's layouts need.
      strategy: ways to place modules, of "homogeneous", "colocated", "non-colocated" and "nested"; () for loosely
        coupled modules.
      profile: measured times in place of a datasheet's, as `read_profile(path)` gives them; of no effect with several
        kinds.
      processes: "node" or "device", which has a process; on several kinds of device it is the node.
      fullest: rows of the fullest rank of expert parallelism over their mean, 1 or more.
      shards: when shards of sums and parameters are tried: "needed", if the best without offloads, or "any"; not with
        loosely coupled modules.
      say: called with a line about the plan's `remat` where the recipe leaves it to the devices, such as `print`.

    Raises:
      ConfigError: a kind is unknown, or a setting does not fit the data.
      DoesNotFit: no layout fits the devices' memory.
    """
    for name, node in recipe.model.nodes.items():
        if field := node.settings.uncut_setting:
            fix = "its layers cannot be cut anywhere, as plans do; set layouts by hand"
            value = getattr(node.settings, field)
            raise ConfigError(f"{setting_name(name, node.settings, field)}={value}: {fix}")
    profile = profile if len(kinds) == 1 else None
    work = read_work(recipe, source, options=_options(recipe, profile), fullest=fullest)
    choice = _choose(recipe, source, work, kinds, strategy, profile, processes, shards)
    if names := open_remat(recipe):
        best = choice.best.candidate.remat
        say(f"the plan has {remat_text(planned.with_remats(recipe, best), names)}, chosen with the layouts")
    return choice


REMATS = ("dots", "full")
"""Values of `remat` to choose from, the fastest first. 'none' saves no product beyond those of 'dots', and keeps more:
by compiled programs it is no faster, so no plan has it."""


def _options(recipe: Recipe, profile: Profile | None) -> dict[str, tuple[str, ...]]:
    """Values of `remat` to try, by module that leaves it to the devices: `REMATS`, or the value of the profile."""
    return {name: (profile.model[name].get("remat", "none"),) if profile else REMATS for name in open_remat(recipe)}


def _choose(
    recipe: Recipe,
    source: Source,
    work: Work,
    kinds: Mapping[str, int],
    strategy: Sequence[str],
    profile: Profile | None,
    processes: str,
    shards: str,
) -> PlanChoice:
    """`choose_plan` without a line about `remat`."""
    transport = recipe.world.transport
    rows_of = planned.rows_by_candidate(recipe, source)
    if len(kinds) == 1:
        ((name, devices),) = kinds.items()
        work, clock = _clock(work, accelerator(name), profile)
        clock = replace(clock, process=waiting_free(transport, processes, clock.node, clock.platform))
        fleet = {"": DeviceKind(clock=clock, devices=devices or recipe.devices, memory=clock.memory)}
    else:
        accelerators = {name: accelerator(name) for name in kinds}
        fleet = {
            name: DeviceKind(
                clock=AnalyticClock(work=work, accelerator=chip, process=waiting_free(transport, NODE, chip.node)),
                devices=kinds[name],
                memory=chip.usable,
            )
            for name, chip in accelerators.items()
        }
    if strategy:
        return choose_on(work, Fleet(kinds=fleet), rows_of=rows_of, modes=strategy, shards=shards)
    return choose_coupled(work, Fleet(kinds=fleet), rows_of=rows_of)


def _clock(work: Work, kind: Accelerator, profile: Profile | None) -> tuple[Work, AnalyticClock | MeasuredClock]:
    """The clock of a profile, or else of an accelerator, and the work with the tp degrees that the clock has."""
    if profile is None:
        return work, AnalyticClock(work=work, accelerator=kind)
    return work.limited(profile.tps), MeasuredClock(profile=profile)
