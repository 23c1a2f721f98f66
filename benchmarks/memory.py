"""Bytes of stages' devices as a plan has them, against compiled programs: digits layouts, and LLaVA-1.5's proportions.

A device's bytes are counted twice. The planner adds up formulas and interpolated trials (`Estimate.device_bytes`). The
other count has two parts: the arrays that live between programs, as a run counts them (`memory_by_stage`, each kind at
its own peak), and the temporaries of the stage's largest compiled program (`memory_analysis().temp_size_in_bytes`).

The analysis of one program does not give a stage's total. Its arguments hold the residuals of one microbatch while
several are in flight, it shares its parameters with every other program, and no program has the masters and moments.
But it is a check: its arguments and outputs take no more bytes than their shapes say (`Compared.uncounted`), and fewer
where it does not read some, such as the weights of a frozen encoder in the backward of its projector. The outputs of a
backward are sums, which are overwritten, and gradients to be sent, which are counted as such. So temporaries are the
only other bytes that live while a program runs.

Reduce and update are left out: they run when no microbatch is in flight. Nothing runs here: programs are compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from benchmarks.steps import ALWAYS
from mmjax.assembly.assembly import assemble
from mmjax.assembly.buckets import build_packer, with_buckets
from mmjax.assembly.packers import one_bucket
from mmjax.assembly.parts import Assembly
from mmjax.assembly.samples import open_source
from mmjax.bench.rows import Row, at_least, at_most
from mmjax.config import load_config
from mmjax.config.shipped import CONFIGS
from mmjax.data.loader import tokenizer_of
from mmjax.mesh.layout import Layout
from mmjax.mesh.spmd import Program
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import memory_by_stage, shard_bytes
from mmjax.plan.planned import planned
from mmjax.plan.work import padded_rows, read_work
from mmjax.planner.accelerators import H100
from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import AnalyticClock, Clock
from mmjax.planner.estimate import Estimate
from mmjax.planner.measured import MeasuredClock
from mmjax.planner.needs import DeviceBytes
from mmjax.planner.profile_file import Compiled, Device, Profile, model_of
from mmjax.planner.work import Work
from mmjax.profile.profiler import world_for
from mmjax.profile.trials import CUTS, Cut, attempts, compiled, points
from mmjax.recipe import Recipe

WITHIN = 0.10
DIGITS, LLAVA = "digits_vlm.gin", "llava15.gin"
REMAT = ("llm/Decoder.remat='full'", "vision/ViT.remat='full'")
HALF = ("Train.dtype='bfloat16'",)
SMALLER = (
    *("llm/Decoder.layers=4", "vision/ViT.layers=2", "Train.microbatches=24", "Train.schedule='1f1b'"),
    *("llm/Layout.pp=2", "llm/Layout.tp=2", "vision/Layout.dp=2", "vision/Layout.tp=2", "vision/Layout.rank_offset=4"),
)
"""LLaVA-1.5 with few layers, so that compiling is cheap, in layouts that have tp too."""


# ---- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Bytes of a stage's device.

    Attributes:
      predicted: the planner's prediction, with temporaries of compiled trials.
      traced: the planner's prediction, with temporaries of traces.
      counted: bytes that live between programs.
      temporaries: temporaries of the largest compiled program.
      uncounted: the largest share, over the stage's programs, of arguments and outputs in the compiler's analysis that
        shapes do not account for.
    """

    predicted: DeviceBytes
    traced: DeviceBytes
    counted: int
    temporaries: int
    uncounted: float

    @property
    def total(self) -> int:
        """Bytes in all, with compiled temporaries."""
        return self.counted + self.temporaries


def compiled_clock(
    recipe: Recipe, layouts: Iterable[Mapping[str, Layout]], shapes: int = 3, cuts: Sequence[Cut] = CUTS
) -> MeasuredClock:
    """A clock with temporaries and no times, from the trials of a profile, compiled and not run.

    Args:
      recipe: configuration of the model and its microbatches.
      layouts: layouts by module; each module has trials with each tp that it has there.
      shapes: number of a profile's shapes to try: all rows of a microbatch, one row, a quarter.
      cuts: the cuts of a profile to try.
    """
    wanted = {(name, layout.tp) for by_module in layouts for name, layout in by_module.items()}
    source = open_source(recipe, split="train")
    recipe = with_buckets(recipe, source)
    world, tokenizer = world_for(recipe), tokenizer_of(recipe.data.settings, recipe.model.media)
    packer = build_packer(recipe, tokenizer, one_bucket=one_bucket(recipe), source=source)
    shapes_tried = points(packer, recipe.train.global_batch // recipe.train.microbatches, quick=False)[:shapes]
    needs: list[Compiled] = []
    for tp in sorted({tp for _, tp in wanted}):
        all_trials = attempts(recipe, tokenizer, packer, world, tp, shapes_tried, cuts)
        wanted_trials = [trial for trial in all_trials if (trial.stage.model.module, tp) in wanted]
        compiled(wanted_trials, lambda *_: None)
        needs += [trial.compiled() for trial in wanted_trials]
    device = world.devices[0]
    return MeasuredClock(
        profile=Profile(
            device=Device(kind=device.device_kind, platform=device.platform, count=world.size, memory=0.0),
            jax=jax.__version__,
            dtype=recipe.train.dtype,
            model=model_of(recipe),
            data={},
            trials=(),
            compiled=tuple(needs),
            moves=(),
            copies=(),
            gathers={},
            reduces={},
            op=0.0,
            shared=1.0,
        )
    )


def compare(recipe: Recipe, work: Work, clock: Clock) -> dict[str, Compared]:
    """Predicted bytes and bytes of compiled programs, by stage of a configuration's layouts.

    The configuration has a program per op (`Train.lowering = 'ops'`), and one forward and one backward at a time.
    """
    parts = assemble(recipe)
    programs = stage_programs(parts)
    train, rows = recipe.train, padded_rows(recipe, parts.packer)
    candidate = Candidate(
        mode="configured",
        layouts=recipe.model.layouts,
        microbatches=train.microbatches,
        schedule=train.schedule,
        window=train.window,
    )
    clocks = (clock, AnalyticClock(work=work, accelerator=H100))
    predicted, traced = (
        Estimate(work=work, clock=each_clock, candidate=candidate, rows=rows).device_bytes for each_clock in clocks
    )
    return {
        name: Compared(
            predicted=predicted[name],
            traced=traced[name],
            counted=memory.total - memory.temporaries,
            temporaries=max(program.compiled_temporary_bytes() for program in programs[name]),
            uncounted=max(_uncounted(program) for program in programs[name]),
        )
        for name, memory in memory_by_stage(parts.placed, parts.schedule, parts.shapes.values()).items()
    }


def stage_programs(parts: Assembly) -> dict[str, list[Program]]:
    """Compiles the programs of a microbatch in its largest bucket, by stage."""
    assert isinstance(parts.executor, Executor), "a program per op"
    largest = max(parts.shapes)
    by_stage = {name: parts.executor.stage_programs[name, largest].programs for name in parts.placed.stages}
    compile_all([program for programs in by_stage.values() for program in programs])
    return by_stage


def _uncounted(program: Program) -> float:
    analysis = program.compiled.memory_analysis()
    analysed_bytes = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    return max(0.0, 1 - (shard_bytes(program.avals) + shard_bytes(program.outputs)) / analysed_bytes)


# ---- layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of the digits model: number of microbatches, and the layouts of both modules."""

    microbatches: int
    vision: Layout
    llm: Layout

    @property
    def layouts(self) -> dict[str, Layout]:
        """Layouts by module."""
        return {"vision": self.vision, "llm": self.llm}

    def describe(self) -> str:
        """The case in one line."""
        return f"vision {self.vision.describe()}; llm {self.llm.describe()}; {self.microbatches} microbatches"


CASES = (
    Case(microbatches=4, vision=Layout(), llm=Layout()),
    Case(microbatches=16, vision=Layout(), llm=Layout(pp=3)),
    Case(microbatches=8, vision=Layout(dp=8), llm=Layout(dp=8)),
    Case(microbatches=2, vision=Layout(dp=2, rank_offset=2), llm=Layout(dp=2)),
    Case(microbatches=4, vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=2, pp=2)),
    Case(microbatches=4, vision=Layout(tp=2, dp=2), llm=Layout(tp=2, dp=2, pp=2)),
    Case(microbatches=32, vision=Layout(pp=2, rank_offset=4), llm=Layout(tp=2, pp=2)),
    Case(microbatches=8, vision=Layout(tp=4, rank_offset=4), llm=Layout(tp=4)),
    Case(microbatches=4, vision=Layout(dp=4), llm=Layout(dp=1, tp=4)),
)
"""tp of 1, 2 and 4, dp of 1 to 8, pp of 1 to 3, microbatches of 2 to 32 samples."""


def digits(cases: Sequence[Case] = CASES, bindings: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Compared]]]:
    """Layouts of the digits model by name, compared by stage."""
    recipe = load_config([CONFIGS / DIGITS], [*ALWAYS, "Data.workers=0", *bindings])
    source = open_source(recipe, split="train")
    work, clock = read_work(recipe, source), compiled_clock(recipe, [case.layouts for case in cases])
    for case in cases:
        candidate = Candidate(mode="configured", layouts=case.layouts, microbatches=case.microbatches)
        run = planned(recipe, candidate)
        run = replace(run, train=replace(run.train, lowering="ops"))
        yield case.describe(), compare(run, work, clock)


def llava(bindings: Sequence[str] = ()) -> dict[str, Compared]:
    """LLaVA-1.5 with few layers, compared by stage."""
    recipe = load_config([CONFIGS / LLAVA], [*ALWAYS, *SMALLER, "Data.workers=0", *bindings])
    return compare(recipe, read_work(recipe), compiled_clock(recipe, [recipe.model.layouts]))


def bench_memory(rounds: int) -> Iterator[Row]:
    """Yields totals of stages, predicted with compiled and with traced temporaries, over compiled programs' totals."""
    del rounds  # nothing is timed
    worst: dict[str, list[float]] = {"planned from a profile": [], "planned from traces": []}
    for setting, bindings, cases in (
        ("fp32", (), CASES),
        ("fp32, recomputed", REMAT, CASES[4:6]),
        ("bf16", HALF, (CASES[0], CASES[4])),
    ):
        for name, stages in digits(cases, bindings):
            print(f"memory: {setting}, {name}", file=sys.stderr, flush=True)
            yield from _rows(f"digits {setting}, {name}", stages, worst)
    yield from _rows("LLaVA-1.5", llava(), worst)
    for how, ratios in worst.items():
        bounded = how == "planned from a profile"
        for which, value, target in (
            ("least", min(ratios), at_least(1 - WITHIN)),
            ("most", max(ratios), at_most(1 + WITHIN)),
        ):
            case = f"{how} / compiled, {which} of {len(ratios)} stages"
            yield Row(bench="memory", case=case, value=value, unit="ratio", target=target if bounded else None)


def _rows(where: str, stages: Mapping[str, Compared], worst: Mapping[str, list[float]]) -> Iterator[Row]:
    for stage, compared in stages.items():
        ratios = (compared.predicted.total / compared.total, compared.traced.total / compared.total)
        for all_ratios, ratio in zip(worst.values(), ratios, strict=True):
            all_ratios.append(ratio)
        for quantity, value, unit in (
            ("compiled", compared.total, "B"),
            ("planned from a profile / compiled", ratios[0], "ratio"),
            ("planned from traces / compiled", ratios[1], "ratio"),
        ):
            yield Row(bench="memory", case=f"{where}, {stage}: {quantity}", value=value, unit=unit)
