"""Workloads as the planner estimates them, in the layouts of their configurations; no data but their sizes are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from mmjax.assembly.assembly import plan
from mmjax.assembly.epochs import with_steps
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.models.config import LLM
from mmjax.pipeline.peak import fullest
from mmjax.plan.choice import choose_plan
from mmjax.plan.configured import estimate_of
from mmjax.plan.planned import exact_rows
from mmjax.plan.work import read_work
from mmjax.planner.accelerators import Accelerator, accelerator
from mmjax.planner.estimate import Estimate
from mmjax.planner.work import Work
from mmjax.recipe import Recipe
from studies.distrain import DEVICE
from studies.workloads.cases import WORKLOADS, Quantity, Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """A workload, estimated.

    Attributes:
      workload: the workload.
      by_config: predictions by configuration, among them that of its base.
      works: what the modules of models compute, by name of the model, read once for all of its layouts; added to.
    """

    workload: Workload
    by_config: dict[str, Prediction]
    works: dict[str, Work]

    @cached_property
    def recipe(self) -> Recipe:
        """The configuration, with the steps of its data."""
        recipe = load_config([self.workload.file])
        return with_steps(recipe, open_source(recipe, split="train"))

    @property
    def chip(self) -> Accelerator:
        """The devices; DistTrain's have the links of its text."""
        return DEVICE if self.workload.paper == "DistTrain" else accelerator(self.workload.chip)

    @cached_property
    def work(self) -> Work:
        """The work of its modules. Rows count as full of samples where they are padded here and not in the paper."""
        name = self.workload.model
        if name not in self.works:
            models = [
                prediction.recipe.model for prediction in self.by_config.values() if prediction.workload.model == name
            ]
            tps = {module: tuple(sorted({model.layouts[module].tp for model in models})) for module in models[0]}
            self.works[name] = read_work(self.recipe, tps=tps)
        work = replace(self.works[name], global_batch=self.recipe.train.global_batch)
        if not self.workload.fills:
            return work
        return replace(work, modules={name: replace(module, real=None) for name, module in work.modules.items()})

    @cached_property
    def estimate(self) -> Estimate:
        """The step and the bytes."""
        source = open_source(self.recipe, split="train")
        return estimate_of(self.recipe, self.work, exact_rows(self.recipe, source), self.chip)

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.recipe.train.global_batch / self.estimate.seconds

    @property
    def fits(self) -> bool:
        """Whether the fullest device has enough memory; a run takes a part of it (`usable`)."""
        return self.estimate.most <= self.chip.usable

    @cached_property
    def dry_run(self) -> float:
        """Bytes of the fullest device by a dry run, whose programs are traced as they are run."""
        parts = plan(self.recipe)
        return fullest(parts.placed, parts.schedule, parts.shapes.values()).bytes

    @cached_property
    def planned(self) -> Estimate:
        """The best plan on as many devices, of the configuration's samples; a search, which takes long."""
        kinds = {self.workload.chip: self.estimate.candidate.devices}
        return choose_plan(self.recipe, open_source(self.recipe, split="train"), kinds).best

    @property
    def value(self) -> float | None:
        """The prediction of the paper's figure; None where it prints no number."""
        estimate, over = self.estimate, self.by_config.get(self.workload.base)
        match self.workload.published.quantity:
            case Quantity.STEP:
                return estimate.seconds
            case Quantity.PASSES:
                return estimate.seconds - max(map(estimate.once_seconds, estimate.work.modules))
            case Quantity.MFU:
                return estimate.mfu
            case Quantity.STAGE:
                stages = [node.name for node in estimate.graph.stages if node.module == LLM]
                return 1e3 * median(map(estimate.stage_seconds, stages))
            case Quantity.THROUGHPUT:
                return self.throughput / estimate.candidate.devices
            case Quantity.GAIN if over:
                return self.throughput / over.throughput
            case Quantity.BEHIND if over:
                return over.throughput / self.throughput
        return None

    @property
    def ratio(self) -> float | None:
        """Predicted over published, to the nearest end of a range; None where no number is printed."""
        return None if self.value is None else self.workload.published.ratio(self.value)


def predictions(workloads: Sequence[Workload]) -> list[Prediction]:
    """Predictions of workloads, and of no others unless they are the base of one; each is made when it is first read.

    workloads: such as `chosen("bigmac")`.
    """
    by_config: dict[str, Prediction] = {}
    works: dict[str, Work] = {}
    wanted = {workload.config for workload in workloads} | {workload.base for workload in workloads}
    for workload in WORKLOADS:
        if workload.config in wanted:
            by_config[workload.config] = Prediction(workload=workload, by_config=by_config, works=works)
    return [by_config[workload.config] for workload in workloads]
