"""The planner's estimate of a configuration in its own layouts, without a search."""

from __future__ import annotations

from mmjax.planner.accelerators import Accelerator
from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import AnalyticClock
from mmjax.planner.cluster_files import NODE
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import RowShapes
from mmjax.planner.node_processes import waiting_free
from mmjax.planner.work import Work
from mmjax.recipe import Recipe


def configured(recipe: Recipe) -> Candidate:
    """The layouts and the schedule of a configuration, as a plan has them; its mode is "configured".

    recipe: the run's configuration, as `load_config(["run.gin"])` gives it.
    """
    train = recipe.train
    return Candidate(
        mode="configured",
        layouts={name: recipe.model.layouts[name] for name in recipe.model.nodes},
        microbatches=train.microbatches,
        schedule=train.schedule,
        inner=train.inner,
        window=train.window,
        offloads=recipe.model.offloads,
    )


def estimate_of(recipe: Recipe, work: Work, rows: RowShapes, kind: Accelerator) -> Estimate:
    """A step of a configuration in its own layouts, with a process for each node, and the bytes of its devices.

    Args:
      recipe: the run's configuration, in which no `remat` is "auto".
      work: what its modules compute, as `read_work(recipe)` gives it.
      rows: rows of a microbatch by module, as `exact_rows(recipe, source)` gives them.
      kind: the devices, such as `accelerator("h100")`.
    """
    process = waiting_free(recipe.world.transport, NODE, kind.node)
    clock = AnalyticClock(work=work, accelerator=kind, process=process)
    return Estimate(work=work, clock=clock, candidate=configured(recipe), rows=rows)
