"""A training step of real shapes on one device: CLIP-L/14 at 336 pixels, a projector, layers of Vicuna-7B; bf16.

As in LLaVA-1.5's second stage the encoder is frozen. A microbatch is four samples of an image and its text in two
packed rows of 2,048 tokens; a step has two. Weights are random: they change no time.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from mmjax.assembly.assembly import assemble
from mmjax.assembly.model import encoder_specs
from mmjax.assembly.parts import Assembly
from mmjax.bench.gpu.job import Job
from mmjax.bench.gpu.trace import draw_profile, kernels_of, most, traced_events
from mmjax.config import config_of_values
from mmjax.data.loader import tokenizer_of
from mmjax.data.packing import Packer
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import Sample, StepBatch, WorstCase
from mmjax.mesh.spmd import Program
from mmjax.mesh.world import World
from mmjax.models.flops import parameter_count
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import memory_by_stage, most_loaded
from mmjax.pipeline.watch import watched
from mmjax.recipe import Recipe
from mmjax.schedule.ops import Op
from mmjax.train.throughput import Throughput

STEPS = 6
"""Number of timed steps; the median counts."""
FEW = 4
"""Layers of the LLM in measurements that need few."""
SHARE = 0.93
"""Share of the device's memory that the estimate of a step may fill."""
FROZEN = frozenset({"vision"})


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a step.

    Attributes:
      values: values of the configuration by key, such as {"llm/Decoder.width": 32}.
      texts: by microbatch, the tokens of each sample beside its image's.
      row: (rows of a microbatch, tokens of an LLM row).
      image: pixels along an image's side.
    """

    values: dict[str, Any]
    texts: tuple[tuple[int, ...], ...]
    row: tuple[int, int]
    image: int


REAL = Shape(
    values={
        "vision/ViT.preset": "clip-vit-l14",
        "vision/ViT.layers": 23,
        "vision/ViT.merge": 1,
        "llm/Decoder.preset": "vicuna-7b",
        "Train.dtype": "bfloat16",
    },
    texts=((824, 64, 524, 324), (700, 190, 440, 410)),
    row=(2, 2048),
    image=336,
)
"""Texts are as long as LLaVA's dialogues: from a caption to several turns."""
SMALL = Shape(
    values={
        "vision/ViT.width": 32,
        "vision/ViT.patch": 4,
        "vision/ViT.channels": 3,
        "vision/ViT.merge": 1,
        "llm/Decoder.width": 32,
        "llm/Decoder.mlp": 64,
        "Train.dtype": "bfloat16",
    },
    texts=((28, 4, 18, 10), (20, 8, 16, 12)),
    row=(2, 64),
    image=16,
)
ALWAYS: dict[str, Any] = {
    "vision/Optimizer.frozen": True,
    "vision/ViT.remat": "none",
    "Optimizer.learning_rate": 2e-5,
    "Train.clip_norm": 1.0,
    "Train.steps": 1000,
    "World.devices": 1,
    "Data.workers": 0,
    "llm/Decoder.remat": "dots",
    "Train.unroll": True,
}


def run(job: Job) -> None:
    """Measures steps with few LLM layers in one program, unrolled, with the results of products kept."""
    _measure(job, _few(job))


def run_stacked(job: Job) -> None:
    """Measures steps with few layers in a stack, with full recomputation, beside those of ``run``."""
    _measure(job, _few(job), **{"Train.unroll": False, "llm/Decoder.remat": "full"})


def run_profile(job: Job) -> None:
    """Measures the steps of ``run``, and traces the kernels of one.

    The section turns command buffers off: a trace of a command buffer does not say what a kernel is of.
    """
    parts, batch = _measure(job, _few(job))
    _profile(job, parts, batch)


def run_ops(job: Job) -> None:
    """Measures steps of a program per op: whole steps, the host's time an op, and every op alone."""
    _time_ops(job, job_config(job, _few(job), **{"Train.lowering": "ops"}))


def _few(job: Job) -> int:
    return 2 if job.small else FEW


def run_full(job: Job) -> None:
    """Measures steps with as many LLM layers as fit into the device's memory by the estimate of a dry run, or fewer.

    Notes all figures.
    """
    stats = jax.devices()[0].memory_stats() or {}
    limit = int(stats.get("bytes_limit", 2**30))
    bytes_of = bytes_by_layers(job)
    layers = layers_within(SHARE * limit, bytes_of)
    job.note(memory_limit_bytes=limit, layers_that_fit=layers, estimate_by_layers=bytes_of)
    layers = min(layers, 3) if job.small else layers
    while not _fits(job, layers):
        layers = layers * 3 // 4
        gc.collect()


def _fits(job: Job, layers: int) -> bool:
    """Measures a step with this number of layers, or notes that they did not fit; returns whether they did."""
    try:
        _measure(job, layers)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or layers < 2:
            raise
        job.note(too_many_layers=[*job.values.get("too_many_layers", ()), layers])
        return False
    return True


# ---- the run ---------------------------------------------------------------------------------------------------------


def job_config(job: Job, layers: int, **settings: Any) -> Recipe:
    """The configuration with ``layers`` LLM layers, and other settings by key, ``**{"Train.lowering": "ops"}``."""
    shape = SMALL if job.small else REAL
    rows, per = sum(map(len, shape.texts)), len(shape.texts)
    values: dict[str, Any] = {
        **ALWAYS,
        **shape.values,
        "llm/Decoder.layers": layers,
        "Train.global_batch": rows,
        "Train.microbatches": per,
        "Data.sequence_length": shape.row[1],
        "llm/Packing.buckets": (shape.row,),
        **settings,
    }
    return config_of_values(values)


def make_packer(job: Job, recipe: Recipe, tokenizer: Tokenizer) -> Packer:
    """A packer in which every image is a row of its own, and a microbatch's samples fill the LLM's rows."""
    shape, (name, spec) = SMALL if job.small else REAL, next(iter(encoder_specs(recipe).items()))
    patches = spec.patches(shape.image, shape.image)
    bucket, each = (len(shape.texts[0]), patches), {name: patches}
    return Packer(
        encoders={name: replace(spec, buckets=(bucket,))},
        sequence_length=shape.row[1],
        microbatches=len(shape.texts),
        cells=1,
        pad=tokenizer.pad,
        one_bucket=True,
        text=(shape.row,),
        worst=WorstCase(tokens=shape.row[1], media={name: 1}, patches=each, least=each),
    )


def make_batch(job: Job, recipe: Recipe, packer: Packer, tokenizer: Tokenizer) -> StepBatch:
    """A batch of random images and tokens: an image is in the middle of its text, whose later half is learned."""
    shape, rng = SMALL if job.small else REAL, np.random.default_rng(0)
    lengths = [length for texts in shape.texts for length in texts]
    return packer.step(0, [_sample(packer, tokenizer, rng, side=shape.image, text=length) for length in lengths])


def _sample(packer: Packer, tokenizer: Tokenizer, rng: np.random.Generator, *, side: int, text: int) -> Sample:
    """A sample of an image ``[side, side]`` and ``text`` tokens."""
    name, spec = next(iter(packer.encoders.items()))
    mark, image = tokenizer.media_token(name), spec.tokens(side, side)
    words, before = rng.integers(0, 250, text).astype(np.int32), text // 4
    tokens = np.concatenate([words[:before], np.full(image, mark, np.int32), words[before:]])
    weights = (np.arange(len(tokens)) >= len(tokens) - text // 2).astype(np.float32)
    media = {name: (rng.standard_normal((side, side, spec.channels)).astype(np.float32),)}
    return Sample(
        tokens=tokens,
        loss_weights=weights,
        media=media,
        question="",
        answer="",
        prompt=len(tokens),
        media_tokens={name: mark},
    )


def placed(job: Job, recipe: Recipe, world: World | None = None) -> tuple[Assembly, StepBatch]:
    """The traced run, in ``world`` or on the devices here, and its one batch."""
    tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
    packer = make_packer(job, recipe, tokenizer)
    return assemble(recipe, packer, world), make_batch(job, recipe, packer, tokenizer)


def estimated_bytes(parts: Assembly) -> dict[str, int]:
    """Bytes of the fullest device as a dry run estimates them: "parameters", "optimizer", …, and their "total"."""
    by_stage = memory_by_stage(parts.placed, parts.schedule, parts.shapes.values())
    fullest = most_loaded(parts.placed, by_stage)[1]
    kinds = ("parameters", "optimizer", "gradients", "activations", "temporaries", "total")
    return {kind: getattr(fullest, kind) for kind in kinds}


def bytes_by_layers(job: Job) -> dict[int, int]:
    """Estimated bytes of the fullest device in a step, by number of LLM layers: two and three."""
    runs = {layers: placed(job, job_config(job, layers), World.planned(1))[0] for layers in (2, 3)}
    return {layers: estimated_bytes(parts)["total"] for layers, parts in runs.items()}


def layers_within(room: float, bytes_of: Mapping[int, int]) -> int:
    """Number of layers that fit into ``room`` bytes, from 1 to Vicuna-7B's 32.

    ``bytes_of`` has the bytes for two numbers of layers, the smaller first; every layer takes the same.
    """
    (few, bytes_of_few), (many, bytes_of_many) = bytes_of.items()
    bytes_per_layer = (bytes_of_many - bytes_of_few) / (many - few)
    return max(1, min(32, few + int((room - bytes_of_few) // bytes_per_layer)))


# ---- measurements ----------------------------------------------------------------------------------------------------


def _measure(job: Job, layers: int, **settings: Any) -> tuple[Assembly, StepBatch]:
    """Times whole steps of the one program, with other settings of the run; returns the run and its batch."""
    start = time.perf_counter()
    config = job_config(job, layers, **settings)
    parts, batch = placed(job, config)
    assembled = time.perf_counter()
    executor = parts.executor
    estimate = estimated_bytes(parts)
    parameters = parameter_count(parts.placed.model)
    job.note(layers=layers, parameters=parameters, estimated_bytes=estimate, counts=batch.counts)
    executor.initialise(0)
    step, initialised = stepper(parts, batch), time.perf_counter()
    loss, _ = step()[0].fetch()  # compiles the program of this batch, and of no other
    job.note(
        assemble_seconds=assembled - start,
        first_step_seconds=time.perf_counter() - initialised,
        compiled_bytes=_planned(_program(parts)),
    )
    times, hosts = zip(*(_timed(step) for _ in range(2 if job.small else STEPS)), strict=True)
    each = float(np.median(times))
    rates = Throughput(parts.placed.model, parts.world, FROZEN, 0.0).measure(batch, each)
    job.note(step_seconds=each, all_step_seconds=list(times), host_seconds=float(np.median(hosts)), **rates)
    peak = rates["peak_memory_bytes"]
    job.note(first_loss=loss, peak_over_estimate=peak / estimate["total"] if peak else None)
    job.check("loss is about that of chance", abs(loss - np.log(parts.placed.model.llm.vocab)) < 1.5)
    return parts, batch


def stepper(parts: Assembly, batch: StepBatch) -> Callable[[], tuple[Any, float]]:
    """A function that runs one step of ``batch`` and waits for it; each call goes on from the state before.

    It returns the step's result, and the seconds until the executor's call returned, before the wait.
    """
    microbatches, executor = parts.runs.signed(batch.microbatches), parts.executor

    def step() -> tuple[Any, float]:
        start = time.perf_counter()
        result = executor.step(microbatches, batch.divisors)
        called = time.perf_counter() - start
        jax.block_until_ready((executor.states, result.losses, result.totals))
        return result, called

    return step


def _timed(step: Callable[[], tuple[Any, float]]) -> tuple[float, float]:
    start = time.perf_counter()
    _, called = step()
    return time.perf_counter() - start, called


def _program(parts: Assembly) -> Program:
    """The one program that was compiled: the batch's step."""
    (program,) = (program for program in parts.executor.programs() if program.is_compiled)
    return program


def _planned(program: Program) -> dict[str, int]:
    """Bytes that the compiler has planned for a program, by kind."""
    analysis = program.compiled.memory_analysis()
    kinds = {"arguments": "argument", "results": "output", "shared": "alias", "temporaries": "temp"}
    sizes = {name: int(getattr(analysis, f"{kind}_size_in_bytes")) for name, kind in kinds.items()}
    return sizes | {"total": sizes["arguments"] + sizes["results"] - sizes["shared"] + sizes["temporaries"]}


def _time_ops(job: Job, recipe: Recipe) -> None:
    """Notes seconds of steps and of the host, and of every op of a step, each waited for; by op and by module."""
    parts, batch = placed(job, recipe)
    executor = parts.executor
    assert isinstance(executor, Executor)
    executor.initialise(0)
    step, start = stepper(parts, batch), time.perf_counter()
    step()
    job.note(ops_first_step_seconds=time.perf_counter() - start)
    times, hosts = zip(*(_timed(step) for _ in range(2 if job.small else STEPS)), strict=True)
    ops = len(parts.schedule.ops)
    host_seconds = float(np.median(hosts))
    job.note(ops=ops, ops_step_seconds=float(np.median(times)), ops_host_seconds=host_seconds)
    job.note(host_microseconds_per_op=1e6 * host_seconds / ops)
    with op_seconds(executor) as timed_ops:
        step()
    by_op, by_module = defaultdict[str, float](float), defaultdict[str, float](float)
    for op, seconds in timed_ops:
        by_op[f"{op.kind} {op.edge or op.stage}"] += seconds
        by_module[op.edge or op.stage.partition(".")[0]] += seconds
    job.note(seconds_by_op=most(by_op), seconds_by_module=most(by_module))


@contextmanager
def op_seconds(executor: Executor) -> Iterator[list[tuple[Op, float]]]:
    """A context in which every op is waited for; yields a list that gets each op with its seconds, in order."""
    timed_ops: list[tuple[Op, float]] = []

    @contextmanager
    def around(op: Op) -> Iterator[None]:
        start = time.perf_counter()
        yield
        jax.block_until_ready(jax.live_arrays())
        timed_ops.append((op, time.perf_counter() - start))

    with watched(executor.walker, around, in_order=True):
        yield timed_ops


def _profile(job: Job, parts: Assembly, batch: StepBatch) -> None:
    """Notes kernels of one step of the one program, by name and by line of source."""
    step = stepper(parts, batch)
    events = traced_events(step, job.folder / "trace")
    kernels = kernels_of(events, _program(parts).compiled.as_text())
    job.note(kernels=kernels)
    if kernels["seconds"]:
        title = f"one step, {job.values['layers']} layers: kernels by line of source"
        draw_profile(kernels, job.folder / "vlm_profile.png", title)
