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
from mmjax.assembly.batches import signed
from mmjax.assembly.model import encoder_specs
from mmjax.assembly.parts import Assembly
from mmjax.bench.gpu.job import Job
from mmjax.bench.gpu.trace import draw_profile, kernels_of, most, traced_events
from mmjax.config import config_of_values
from mmjax.data.loader import tokenizer_of
from mmjax.data.packing import Packer
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import Sample, StepBatch
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
        "llm/Decoder.remat": "full",
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
        "llm/Decoder.remat": "full",
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
    "Train.unroll": False,
    "World.devices": 1,
    "Data.workers": 0,
}


def run_few(job: Job) -> None:
    """Measures steps with few LLM layers: the one program, its profile, then a program per op; notes all figures."""
    parts, batch = _measure(job, layers=2 if job.small else FEW)
    _profile(job, parts, batch)
    config, world = job_config(job, 2 if job.small else FEW, lowering="ops"), parts.world
    parts.executor.states = {}
    del parts
    gc.collect()
    _time_ops(job, config, world)


def run_unrolled(job: Job) -> None:
    """Measures steps with few layers that are not stacked (``Train.unroll``), beside the stack of ``run_few``."""
    _measure(job, layers=2 if job.small else FEW, unroll=True)


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


def job_config(job: Job, layers: int, **train: Any) -> Recipe:
    """The configuration with ``layers`` LLM layers, and other fields of ``Train``, such as ``lowering="ops"``."""
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
        **{f"Train.{name}": value for name, value in train.items()},
    }
    return config_of_values(values)


def make_packer(job: Job, recipe: Recipe, tokenizer: Tokenizer) -> Packer:
    """A packer in which every image is a row of its own, and a microbatch's samples fill the LLM's rows."""
    shape, (name, spec) = SMALL if job.small else REAL, next(iter(encoder_specs(recipe).items()))
    bucket = (len(shape.texts[0]), spec.patches(shape.image, shape.image))
    return Packer(
        encoders={name: replace(spec, buckets=(bucket,))},
        sequence_length=shape.row[1],
        microbatches=len(shape.texts),
        cells=1,
        pad=tokenizer.pad,
        one_bucket=True,
        text=(shape.row,),
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


def _measure(job: Job, layers: int, **train: Any) -> tuple[Assembly, StepBatch]:
    """Times whole steps of the one program, with the settings ``train`` of the run; returns the run and its batch."""
    start = time.perf_counter()
    config = job_config(job, layers, **train)
    parts, batch = placed(job, config)
    assembled = time.perf_counter()
    executor = parts.executor
    estimate = estimated_bytes(parts)
    parameters = parameter_count(parts.placed.model)
    job.note(layers=layers, parameters=parameters, estimated_bytes=estimate, counts=batch.counts)
    executor.compile()
    compiled = time.perf_counter()
    job.note(assemble_seconds=assembled - start, compile_seconds=compiled - assembled, compiled_bytes=_planned(parts))
    executor.initialise(0)
    step = stepper(executor, batch)
    loss, _ = step()[0].fetch()
    times, hosts = zip(*(_timed(step) for _ in range(2 if job.small else STEPS)), strict=True)
    each = float(np.median(times))
    rates = Throughput(parts.placed.model, parts.world, FROZEN, 0.0).measure(batch, each)
    job.note(step_seconds=each, all_step_seconds=list(times), host_seconds=float(np.median(hosts)), **rates)
    peak = rates["peak_memory_bytes"]
    job.note(first_loss=loss, peak_over_estimate=peak / estimate["total"] if peak else None)
    job.check("loss is about that of chance", abs(loss - np.log(parts.placed.model.llm.vocab)) < 1.5)
    return parts, batch


def stepper(executor: Any, batch: StepBatch) -> Callable[[], tuple[Any, float]]:
    """A function that runs one step of ``batch`` and waits for it; each call goes on from the state before.

    It returns the step's result, and the seconds until the executor's call returned, before the wait.
    """
    microbatches = [signed(part) for part in batch.microbatches]

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


def _planned(parts: Assembly) -> dict[str, int]:
    """Bytes that the compiler has planned for the step's one program, by kind."""
    (program,) = parts.executor.programs()
    analysis = program.compiled.memory_analysis()
    kinds = {"arguments": "argument", "results": "output", "shared": "alias", "temporaries": "temp"}
    sizes = {name: int(getattr(analysis, f"{kind}_size_in_bytes")) for name, kind in kinds.items()}
    return sizes | {"total": sizes["arguments"] + sizes["results"] - sizes["shared"] + sizes["temporaries"]}


def _time_ops(job: Job, recipe: Recipe, world: World) -> None:
    """Notes seconds of every op of a step, each waited for; by op and stage, and by module."""
    parts, batch = placed(job, recipe, world)
    executor = parts.executor
    assert isinstance(executor, Executor)
    start = time.perf_counter()
    executor.compile()
    job.note(ops_compile_seconds=time.perf_counter() - start)
    executor.initialise(0)
    step = stepper(executor, batch)
    step()
    job.note(ops_step_seconds=float(np.median([_timed(step)[0] for _ in range(2 if job.small else STEPS)])))
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
    step = stepper(parts.executor, batch)
    events = traced_events(step, job.folder / "trace")
    (program,) = parts.executor.programs()
    kernels = kernels_of(events, program.compiled.as_text())
    job.note(kernels=kernels)
    if kernels["seconds"]:
        title = f"one step, {job.values['layers']} layers: kernels by line of source"
        draw_profile(kernels, job.folder / "vlm_profile.png", title)
