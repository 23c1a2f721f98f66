"""Steps of the papers' models that draw, by module: their configurations in `configs/`, in the planner's simulator.

MLLM-9B, 15B and 72B are DistTrain's (Zhang et al., SIGCOMM '25, §7), the models with a ViT of 1.3B parameters and
Qwen3-30B-A3B are BigMac's, with all modules trained. Seconds of a microbatch follow from FLOPs of traced layers at half
of a datasheet's peak, and a step is simulated in the schedule and layouts of its configuration. Rows are those of the
configuration's samples, declared here, so that no data are read.

DistTrain's Figure 3 shows forward times of one stage of its 70B LLM (pp 10, tp 8), of the encoder and of the generator
for numbers and sizes of pictures. The text of the paper has no numbers of it, and none of Figure 5, which has numbers
of tokens and pictures of LAION-400M and no times. What it says is that the LLM's time is constant and the others' are
not: that is beside these figures. All figures are simulated or computed, and none was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from mmjax.assembly.model import build_model
from mmjax.bench.rows import Row
from mmjax.config import load_config
from mmjax.data.loader import tokenizer_of
from mmjax.models.config import LLM
from mmjax.plan.configured import configured, estimate_of
from mmjax.plan.work import module_work
from mmjax.planner.accelerators import accelerator
from mmjax.planner.clock import Efficiency
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import proportional
from mmjax.planner.work import Work
from mmjax.recipe import Recipe
from studies.distrain import DEVICE, ENCODER, GENERATOR, MODELS, TP, Case, Published

CONFIGS = Path(__file__).parents[1] / "configs"
FIGURE_3 = ((1, 512), (4, 512), (8, 512), (1, 1024), (2, 1024))
"""Pictures of a sequence of 8,192 tokens and their sides in pixels; more do not fit."""
FIGURE_3_STAGES = 10
NOTHING = Published(devices=(0, 0, 0), throughput=(1.0, 1.0), mfu=(1.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of a paper.

    Attributes:
      name: name in the paper.
      config: its configuration, a name in `configs/`.
      kind: its devices, by a name of `ACCELERATORS`.
      rows: rows of a sample and positions of a row, by module.
      longest: positions of the longest medium, by module whose ranks of cp have whole media.
    """

    name: str
    config: str
    kind: str
    rows: Mapping[str, tuple[float, int]]
    longest: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def recipe(self) -> Recipe:
        """Its configuration."""
        return load_config([CONFIGS / f"{self.config}.gin"])

    @cached_property
    def work(self) -> Work:
        """The planner's work of it, without bytes."""
        recipe = self.recipe
        model = build_model(recipe, tokenizer_of(recipe.data.settings, recipe.model.media))
        modules = {
            name: replace(
                module_work(recipe, model, name, self.rows[name][1]),
                rows=self.rows[name][0],
                longest=self.longest.get(name, 0),
            )
            for name in model.nodes
        }
        return Work(modules=modules, global_batch=recipe.train.global_batch)

    @cached_property
    def estimate(self) -> Estimate:
        """A step in the configuration's own layouts."""
        rows = proportional(self.work)(configured(self.recipe))
        return estimate_of(self.recipe, self.work, rows, accelerator(self.kind))

    @cached_property
    def modules(self) -> dict[str, ModuleSeconds]:
        """Times of its modules."""
        seconds_by_module, busy = dict[str, tuple[float, float, float]](), dict[str, float]()
        for node in self.estimate.graph.stages:
            seconds = self.estimate.pass_seconds(node.module, self.estimate.parts[node.name])
            forward, backward, slowest = seconds_by_module.get(node.module, (0.0, 0.0, 0.0))
            slowest = max(slowest, seconds.forward + seconds.backward)
            seconds_by_module[node.module] = forward + seconds.forward, backward + seconds.backward, slowest
            busy[node.module] = busy.get(node.module, 0.0) + len(node.ranks_of(0)) * (
                seconds.forward + seconds.backward
            )
        total = sum(busy.values())
        return {
            name: ModuleSeconds(forward=forward, backward=backward, slowest=slowest, share=busy[name] / total)
            for name, (forward, backward, slowest) in seconds_by_module.items()
        }


@dataclass(frozen=True, kw_only=True)
class ModuleSeconds:
    """Times of a microbatch in a module, and its share of the busy time of all devices.

    Attributes:
      forward, backward: seconds in all of its stages together.
      slowest: seconds of forward and backward in its slowest stage.
      share: from 0 to 1.
    """

    forward: float
    backward: float
    slowest: float
    share: float


_PATCHES, _TEXT, _QUERIES = 1024, 1128, 77
_SMALL = {ENCODER: (1.0, _PATCHES), LLM: (1.0, _TEXT), "painter": (1.0, _QUERIES + 64 * 64)}
_LARGE = {**_SMALL, "painter": (1.0, _QUERIES + 128 * 128)}
_DRAWN = {ENCODER: (1.0, 1536), LLM: (1 / 12, 8192), "painter": (1.0, 1280)}
PAPERS = (
    Model(name="MLLM-9B", config="mllm_9b", kind="a800", rows=_SMALL),
    Model(name="MLLM-15B", config="mllm_15b", kind="a800", rows=_SMALL),
    Model(name="MLLM-72B", config="mllm_72b", kind="a800", rows=_LARGE),
    Model(
        name="MLLM-Understanding",
        config="bigmac_understanding",
        kind="h800",
        rows={ENCODER: (1.0, 4 * 1936), LLM: (1 / 4, 8192)},
        longest={ENCODER: 1936},
    ),
    Model(
        name="MLLM-Generation",
        config="bigmac_generation_mmdit",
        kind="h800",
        rows=_DRAWN,
        longest={ENCODER: 1444},
    ),
)


def forward_seconds() -> Iterator[tuple[int, int, dict[str, float]]]:
    """Pictures, side and forward seconds by module of a sequence, as Figure 3 has them.

    The LLM's are of one stage of ten with tp 8; the ranks of a tp group share the pictures of the other modules.
    """
    rate = DEVICE.flops * Efficiency().compute
    for pictures, side in FIGURE_3:
        model = replace(MODELS[2], side=side)
        case = Case(model=model, trained="all", batch=1, devices=1, published=NOTHING, pictures=pictures)
        shared = {name: flops / TP / rate for name, flops in case.forward.items()}
        yield pictures, side, {**shared, LLM: shared[LLM] / FIGURE_3_STAGES}


def rows() -> Iterator[Row]:
    """The rows of the study."""
    for pictures, side, seconds in forward_seconds():
        for name, value in seconds.items():
            yield _row(f"forward, {pictures} of {side} x {side}", name, value * 1e3, "ms")
    for model in PAPERS:
        for name, module in model.modules.items():
            yield _row(model.name, f"{name}, forward of a microbatch", module.forward * 1e3, "ms")
            yield _row(model.name, f"{name}, backward of a microbatch", module.backward * 1e3, "ms")
            yield _row(model.name, f"{name}, share of the busy time", module.share * 100, "%")
        yield _row(model.name, "step, simulated", model.estimate.seconds, "s")
        yield _row(model.name, "idle, simulated", model.estimate.bubble * 100, "%")


def _row(case: str, text: str, value: float, unit: str) -> Row:
    return Row(bench="drawing", case=f"{case}: {text}", value=value, unit=unit)


def tables() -> dict[str, str]:
    """The tables of ``docs/planner.md`` in Markdown, by name."""
    return {"forward": _forward_table(), "steps": _steps_table(PAPERS)}


def _forward_table() -> str:
    lines = ["| pictures | encoder, ms | LLM stage of ten, ms | generator, ms | encoder, generator over LLM stage |"]
    lines += ["|" + "---|" * 5]
    for pictures, side, seconds in forward_seconds():
        values = [f"{seconds[name] * 1e3:.1f}" for name in (ENCODER, LLM, GENERATOR)]
        ratios = ", ".join(f"{seconds[name] / seconds[LLM]:.2f}" for name in (ENCODER, GENERATOR))
        lines.append(f"| {pictures} of {side} x {side} | {' | '.join(values)} | {ratios} |")
    return "\n".join(lines)


def _steps_table(models: tuple[Model, ...]) -> str:
    lines = [
        "| model, devices | module: layout | forward, ms | backward, ms | slowest stage, ms | share | step, s, idle |"
    ]
    lines += ["|" + "---|" * 7]
    for model in models:
        candidate = model.estimate.candidate
        step = f"{model.estimate.seconds:.3g}, {model.estimate.bubble:.0%}"
        title = f"{model.name}, {candidate.devices} {model.kind.upper()}s"
        for name, module in model.modules.items():
            cells = [title, f"{name}: {candidate.layouts[name].describe()}"]
            cells += [f"{seconds * 1e3:.0f}" for seconds in (module.forward, module.backward, module.slowest)]
            lines.append(f"| {' | '.join([*cells, f'{module.share:.0%}', step])} |")
            title = step = ""
    return "\n".join(lines)
