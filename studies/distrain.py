"""DistTrain's ablation in the model of Eq. 1 and 2: a monolithic layout, devices by FLOPs, and the best plan.

Zhang et al., "DistTrain" (SIGCOMM '25), §7: MLLM-9B, 15B and 72B are LLMs of Llama 3's family (Table 2) with ViT-Huge
and Stable Diffusion 2.1, trained in full (§7.1, §7.2) and in four frozen settings (§7.3) with trained projectors. What
is compared:

* Megatron-LM's layout: tp 8 for the LLM on 1, 2 or 10 stages, one stage each for encoder and generator with the LLM's
  dp, where each device of a tp group has a replica for other pictures (§2.1, §7.1).
* DistMM*: devices to modules in proportion to their FLOPs, the layout within them as good as can be (§7, §7.2).
* The best plan on as many devices as there are, and on as many as DistTrain is published to use.

Times are analytic: FLOPs at half of the A800's datasheet peak, and tp traffic over links of 150 GB/s each way, which is
what §7 says of its nodes. Nothing here was measured, and no constant is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mmjax.bench.rows import Row
from mmjax.configurable import from_preset
from mmjax.models.config import LLM
from mmjax.models.families import module_of
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.planner.accelerators import A800
from mmjax.planner.analytic import PARAM_BYTES, module_costs
from mmjax.planner.cost import Degrees, Plan
from mmjax.planner.problem import ModuleCosts, Problem
from mmjax.planner.search import best_plan
from mmjax.planner.space import Grids, spaces
from mmjax.schedule.partition import backward_factor
from studies.stable_diffusion import picture_encoder, unet

ENCODER, GENERATOR = "vision", "generator"
MODULES = (ENCODER, LLM, GENERATOR)
DEVICE = replace(A800, link=150e9, network=12.5e9)
TOKENS, VOCAB, TP = 8192, 128256, 8
PATCH = 16
"""Side of a patch, which is one token of the LLM (§2.3)."""
VIT = from_preset(ViTConfig, "vit-h14", patch=PATCH)
PICTURES = 10
"""Pictures of a typical sample (§2.3). With 1024 by 1024 pixels each, a sequence of 8,192 tokens holds only two."""
NEARLY = 0.95
"""Share of the best throughput for which the fewest devices are looked for."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of Table 2 with ViT-Huge and Stable Diffusion 2.1.

    Attributes:
      name: name in Table 2.
      llm: the LLM.
      side: pixels along a picture's side.
      stages: pp of the LLM in Megatron-LM's layout.
    """

    name: str
    llm: DecoderConfig
    side: int
    stages: int


def _model(name: str, layers: int, width: int, mlp: int, heads: int, kv_heads: int, side: int, stages: int) -> Model:
    llm = DecoderConfig(layers=layers, width=width, mlp=mlp, heads=heads, kv_heads=kv_heads, vocab=VOCAB)
    return Model(name=name, llm=llm, side=side, stages=stages)


MODELS = (
    _model("MLLM-9B", 32, 4096, 11008, 32, 32, 512, 1),
    _model("MLLM-15B", 40, 5120, 13824, 40, 40, 512, 2),
    _model("MLLM-72B", 80, 8192, 28672, 64, 8, 1024, 10),
)
SETTINGS = {
    "all": MODULES,
    "projectors alone": (),
    "encoder": (ENCODER,),
    "LLM": (LLM,),
    "generator": (GENERATOR,),
}
"""Modules that are trained, by setting; projectors always are."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Values that the text of §7 gives for a case; its plots show more, but without numbers.

    Attributes:
      devices: devices of DistTrain, Megatron-LM and DistMM*; 0 where not given.
      throughput: range (from, to) of DistTrain's throughput over Megatron-LM's.
      mfu: range (from, to) of DistTrain's MFU over Megatron-LM's.
    """

    devices: tuple[int, int, int]
    throughput: tuple[float, float]
    mfu: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One way to train, predicted.

    Attributes:
      seconds: seconds of a step.
      devices: number of devices in use.
      flops: FLOPs of a sample in all modules, forward and backward.
      batch: samples of a step.
    """

    seconds: float
    devices: int
    flops: float
    batch: int

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the peak of the devices in use, counted as in a run's metrics: samples without padding."""
        return self.throughput * self.flops / (self.devices * DEVICE.flops)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model in one experiment.

    Attributes:
      model: the model.
      trained: a key of `SETTINGS`.
      batch: samples of a step.
      devices: number of devices that there are.
      published: the published values.
      pictures: pictures of a sample; all are encoded and all are generated.
    """

    model: Model
    trained: str
    batch: int
    devices: int
    published: Published
    pictures: int = PICTURES

    @property
    def name(self) -> str:
        """The name in rows and tables."""
        return f"{self.model.name}, {self.devices} devices, {self.trained}"

    @property
    def that_fit(self) -> Case:
        """The same case with as many pictures as 8,192 tokens hold."""
        return replace(self, pictures=TOKENS // (self.model.side // PATCH) ** 2)

    @cached_property
    def forward(self) -> dict[str, float]:
        """FLOPs of a sample's forward by module; the generator's include making latents."""
        drawing = unet(self.model.side).flops + picture_encoder(self.model.side).flops
        return {
            ENCODER: module_of(VIT).forward_flops([(self.model.side // PATCH) ** 2] * self.pictures),
            LLM: module_of(self.model.llm).forward_flops([TOKENS]),
            GENERATOR: self.pictures * drawing,
        }

    @cached_property
    def backward(self) -> dict[str, float]:
        """Backward as a multiple of the forward, by module. Before LLM and generator there are trained projectors."""
        trained, drawing = SETTINGS[self.trained], unet(self.model.side).flops
        factors = {name: backward_factor(trained=name in trained, trained_before=name != ENCODER) for name in MODULES}
        factors[GENERATOR] *= drawing / (drawing + picture_encoder(self.model.side).flops)
        return factors

    @property
    def flops(self) -> dict[str, float]:
        """FLOPs of a sample, forward and backward, by module."""
        return {name: flops * (1 + self.backward[name]) for name, flops in self.forward.items()}

    @cached_property
    def problem(self) -> Problem:
        """The planning problem of the case."""
        modules = {ENCODER: self._layered(ENCODER), LLM: self._layered(LLM), GENERATOR: self._generator()}
        return Problem(
            devices=self.devices, global_batch=self.batch, microbatch=1, memory=DEVICE.memory, modules=modules
        )

    def _layered(self, name: str) -> ModuleCosts:
        llm, patches = self.model.llm, (self.model.side // PATCH) ** 2 * self.pictures
        parameters, config, tokens = (
            (module_of(llm).parameters(), llm, TOKENS) if name == LLM else (module_of(VIT).parameters(), VIT, patches)
        )
        return module_costs(
            DEVICE, flops=self.forward[name], parameters=parameters, layers=config.layers, tokens=tokens,
            width=config.width, backward=self.backward[name], trained=name in SETTINGS[self.trained],
        )  # fmt: skip

    def _generator(self) -> ModuleCosts:
        """Costs of the generator on one device: its levels differ, so neither tp nor pp would cut it evenly."""
        drawing = unet(self.model.side)
        costs = module_costs(
            DEVICE, flops=self.forward[GENERATOR], parameters=drawing.parameters, layers=1, tokens=0, width=0,
            backward=self.backward[GENERATOR], trained=GENERATOR in SETTINGS[self.trained], tp=(1,),
        )  # fmt: skip
        weights = costs.param_bytes + PARAM_BYTES * picture_encoder(self.model.side).parameters
        return replace(costs, param_bytes=weights, activation_bytes=self.pictures * drawing.kept_bytes)

    def step(self, degrees: Mapping[str, Degrees]) -> Step:
        """A layout's step by Eq. 1 and 2; if the LLM's dp does not divide the batch, the last is not full."""
        plan = Plan(problem=self.problem, modules=degrees)
        after_first = math.ceil(self.batch / degrees[LLM].dp) - 1
        seconds = plan.warm_up + after_first * plan.stage_seconds(plan.bottleneck)
        return Step(seconds=seconds, devices=plan.devices, flops=sum(self.flops.values()), batch=self.batch)

    @property
    def monolithic(self) -> Plan:
        """Megatron-LM's layout on the devices that it is published with."""
        dp = self.published.devices[1] // (TP * (self.model.stages + 2))
        replicas = Degrees(tp=1, dp=TP * dp, pp=1)
        layouts = {ENCODER: replicas, LLM: Degrees(tp=TP, dp=dp, pp=self.model.stages), GENERATOR: replicas}
        return Plan(problem=self.problem, modules=layouts)

    @cached_property
    def megatron(self) -> Step:
        """The monolithic layout's step."""
        return self.step(self.monolithic.modules)

    @cached_property
    def distmm(self) -> Step:
        """DistMM*'s step: the best layout when each module has devices in proportion to its FLOPs, rounded down."""
        total = sum(self.flops.values())
        shares = {name: max(1, int(self.devices * flops / total)) for name, flops in self.flops.items()}
        return self.step(best_within(self.problem, shares))

    @cached_property
    def best(self) -> Step:
        """The best plan's step."""
        return self.step(best_plan(self.problem).modules)

    @cached_property
    def best_on_published(self) -> Step:
        """The step of the best plan on as many devices as DistTrain is published with."""
        return self.step(best_plan(replace(self.problem, devices=self.published.devices[0])).modules)

    @cached_property
    def nearly(self) -> int:
        """The fewest devices with `NEARLY` the throughput of the best plan; more devices are never slower."""
        enough, most = self.best.devices, self.best.seconds / NEARLY
        least = sum(min(costs.seconds) for costs in self.problem.modules.values())
        for step in (64, 8, 1):  # a plan needs some devices to fit into memory, so from above
            while enough - step >= least and self._seconds_on(enough - step) <= most:
                enough -= step
        return enough

    def _seconds_on(self, devices: int) -> float:
        problem = replace(self.problem, devices=devices)
        return best_plan(problem).objective if any(spaces(problem)) else math.inf


def best_within(problem: Problem, devices: Mapping[str, int]) -> dict[str, Degrees]:
    """The layouts with the shortest step when each module has at most so many devices.

    Raises:
      ValueError: some module does not fit.
    """
    best, chosen = math.inf, {}
    grids = Grids(problem)
    for llm_dp in problem.llm_degrees:
        options = {name: _options(grids, name, llm_dp, most) for name, most in devices.items()}
        if not all(options.values()):
            continue
        # At each pace: the least work of each module whose stages take at most that.
        paces_P = np.unique([pace for each in options.values() for pace, *_ in each])
        work_P = np.zeros(len(paces_P))
        for each in options.values():
            stage, least = (
                np.array([option[0] for option in each]),
                np.minimum.accumulate([option[1] for option in each]),
            )
            index_P = np.searchsorted(stage, paces_P, side="right")
            work_P += np.where(index_P > 0, least[index_P - 1], np.inf)
        step_P = work_P + (problem.microbatches(llm_dp) - 1) * paces_P
        at = int(step_P.argmin())
        if step_P[at] < best:
            best = float(step_P[at])
            fast = {name: [option for option in each if option[0] <= paces_P[at]] for name, each in options.items()}
            chosen = {
                name: min(each, key=lambda option: (option[1], option[2].devices))[2] for name, each in fast.items()
            }
    if not chosen:
        raise ValueError(f"no layout of {', '.join(devices)} fits on {', '.join(map(str, devices.values()))} devices")
    return chosen


def _options(grids: Grids, name: str, llm_dp: int, most: int) -> list[tuple[float, float, Degrees]]:
    """(stage seconds, seconds through all stages, layout) of a module on at most so many devices, by stage seconds."""
    rows, depths = grids.rows(name, llm_dp), grids.problem.modules[name].depths
    options = []
    for tp, dp, work, least in zip(rows.tp, rows.dp, rows.work, rows.least, strict=True) if rows else ():
        for pp in depths:
            if least <= pp <= most // (tp * dp):
                options.append((float(work / pp), float(work), Degrees(tp=int(tp), dp=int(dp), pp=pp)))
    return sorted(options, key=lambda option: option[:2])


def _cases() -> Iterator[Case]:
    small, large = (1.7, 2.2), (1.3, 1.3)
    small_mfu, large_mfu = (1.7, 2.8), (1.2, 1.2)
    # §7.1: devices of DistTrain and Megatron-LM, and ranges by size of model.
    for model, devices, throughput, mfu in (
        (MODELS[0], (1056, 1296, 0), small, small_mfu),
        (MODELS[1], (1216, 1280, 0), small, small_mfu),
        (MODELS[2], (1176, 1152, 0), large, large_mfu),
    ):
        published = Published(devices=devices, throughput=throughput, mfu=mfu)
        yield Case(model=model, trained="all", batch=1920, devices=1296, published=published)
    # §7.2 and §7.3: one range for all models, that of §7.2 over both baselines.
    ablation = zip(MODELS, (128, 64, 40), ((96, 96, 88), (80, 96, 76), (82, 96, 90)), strict=True)
    for model, batch, devices in list(ablation):
        for trained in SETTINGS:
            all_trained = trained == "all"
            published = Published(
                devices=devices if all_trained else (*devices[:2], 0),
                throughput=(1.4, 2.7) if all_trained else (1.2, 2.9),
                mfu=(1.3, 2.7) if all_trained else (1.4, 2.9),
            )
            yield Case(model=model, trained=trained, batch=batch, devices=96, published=published)


CASES = tuple(_cases())


def rows() -> Iterator[Row]:
    """Devices, step and MFU of the four ways to train, and the best plan's gain over each, beside published figures."""
    for case in CASES:
        ways = {"best": case.best, "Megatron-LM": case.megatron, "DistMM*": case.distmm}
        for (name, step), published in zip(ways.items(), case.published.devices, strict=True):
            yield _row(case, f"{name}, devices", step.devices, "devices")
            if published:
                yield _row(case, f"{name}, devices published", published, "devices")
            yield _row(case, f"{name}, step, analytic", step.seconds, "s")
            yield _row(case, f"{name}, throughput, analytic", step.throughput, "samples/s")
            yield _row(case, f"{name}, MFU, analytic", step.mfu * 100, "%")
        yield _row(case, f"devices for {NEARLY:.0%} of the best", case.nearly, "devices")
        for name, step, rivals in (
            ("best", case.best, ("Megatron-LM", "DistMM*")),
            ("best on published devices", case.best_on_published, ("Megatron-LM",)),
        ):
            for rival in rivals:
                yield _row(case, f"{name} / {rival}, throughput", step.throughput / ways[rival].throughput, "ratio")
                yield _row(case, f"{name} / {rival}, MFU", step.mfu / ways[rival].mfu, "ratio")
        fit = case.that_fit
        value = fit.best.throughput / fit.megatron.throughput
        yield _row(case, f"best / Megatron-LM, throughput, {fit.pictures} pictures", value, "ratio")
        for quantity, (low, high) in (("throughput", case.published.throughput), ("MFU", case.published.mfu)):
            yield _row(case, f"DistTrain / Megatron-LM, {quantity}, published from", low, "ratio")
            yield _row(case, f"DistTrain / Megatron-LM, {quantity}, published to", high, "ratio")


def _row(case: Case, quantity: str, value: float, unit: str) -> Row:
    return Row(bench="distrain", case=f"{case.name}: {quantity}", value=value, unit=unit)


def error(predicted: float, published: tuple[float, float]) -> float:
    """Relative error to the nearest end of a range; 0 within it."""
    nearest = min(max(predicted, published[0]), published[1])
    return predicted / nearest - 1


def tables() -> dict[str, str]:
    """The table of ``docs/planner.md`` in Markdown, by name."""
    lines = [
        "| model, devices there are, what is trained | devices: best | for 95 % | published | throughput over "
        "Megatron-LM: best | pictures that fit | published devices | published | error | MFU, published devices | "
        "published | error | throughput over DistMM* |",
        "|" + "---|" * 13,
    ]
    for case in CASES:
        megatron, same = case.megatron, case.best_on_published
        throughput, mfu = same.throughput / megatron.throughput, same.mfu / megatron.mfu
        fit = case.that_fit
        cells = [case.name, str(case.best.devices), str(case.nearly), str(case.published.devices[0])]
        cells += [f"{case.best.throughput / megatron.throughput:.2f}"]
        cells += [f"{fit.best.throughput / fit.megatron.throughput:.2f}"]
        for value, published in ((throughput, case.published.throughput), (mfu, case.published.mfu)):
            low, high = published
            shown = f"{low:g}" if low == high else f"{low:g}–{high:g}"
            cells += [f"{value:.2f}", shown, f"{error(value, published):+.0%}"]
        cells.append(f"{case.best.throughput / case.distmm.throughput:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return {"ablation": "\n".join(lines)}
