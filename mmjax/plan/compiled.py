"""The best plans, compiled for GPUs that are not here: whether they fit by the compiler, and their steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.compile.executables import Compiler, Report
from mmjax.compile.programs import Programs
from mmjax.compile.report import memory_line, misfit, step_figures
from mmjax.compile.step import Step
from mmjax.compile.targets import Target
from mmjax.data.source import Source
from mmjax.plan.planned import planned
from mmjax.planner.choose import PlanChoice
from mmjax.planner.estimate import Estimate
from mmjax.recipe import Recipe

PLANS = 3
"""The number of plans that are compiled, the best ones."""


@dataclass(frozen=True, kw_only=True)
class CompiledPlan:
    """A plan and the step of its programs.

    Attributes:
      estimate: the plan.
      programs: its programs.
      step: their step.
    """

    estimate: Estimate
    programs: Programs
    step: Step

    def as_json(self) -> dict[str, Any]:
        """The layouts in words, the planned seconds and bytes, and `step_figures`."""
        return {
            "plan": self.estimate.candidate.describe(),
            "planned_seconds": self.estimate.seconds,
            "planned_bytes": self.estimate.most,
            **step_figures(self.programs, self.step),
        }


def compile_plans(
    recipe: Recipe,
    source: Source,
    choice: PlanChoice,
    target: Target,
    *,
    cache: Path | None = None,
    report: Report | None = None,
    fullest: float = 1.0,
) -> list[CompiledPlan]:
    """The plan and the best others, `PLANS` together, with compiled programs; the plan first.

    Args:
      recipe: the configuration that was planned for.
      source: its training samples, as `open_source(recipe, split="train")` opens them.
      choice: the result of `choose_plan`.
      target: the devices to compile for.
      cache: the folder where compiled programs are kept; None keeps them in memory alone.
      report: see `Compiler.all`.
      fullest: rows of the fullest rank of expert parallelism over their mean, 1 or more.

    Raises:
      ConfigError: JAX has no CUDA compiler here.
    """
    compiler, result = Compiler(target, cache), list[CompiledPlan]()
    runners_up = [estimate for estimate in choice.estimates if estimate is not choice.best]
    for estimate in [choice.best, *runners_up][:PLANS]:
        programs = Programs(
            planned(recipe, estimate.candidate), target, source=source, compiler=compiler, fullest=fullest
        )
        programs.distinct(report)
        result.append(CompiledPlan(estimate=estimate, programs=programs, step=Step(programs, source)))
    return result


def lines(plans: Sequence[CompiledPlan]) -> Iterator[str]:
    """Yields lines about compiled plans: the step beside the planned one, the fullest device, or why none fits."""
    for number, plan in enumerate(plans, 1):
        figures: Mapping[str, Any] = plan.as_json()
        yield f"compiled for {plan.programs.target.name}, plan {number} of {len(plans)}: {figures['plan']}"
        yield (
            f"    a step takes {figures['predicted_seconds'] * 1e3:.4g} ms, by programs and a roofline, MFU "
            f"{figures['mfu']:.1%}; planned were {plan.estimate.seconds * 1e3:.4g} ms and "
            f"{plan.estimate.most / 2**30:.3g} GiB"
        )
        fullest = plan.step.fullest
        yield f"    {memory_line(fullest) if fullest.fits else misfit(fullest)}"
