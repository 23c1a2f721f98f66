"""Bytes of a device by kind for each `Layout.shard`: as a dry run counts them, and the most live arrays of a step.

Both modules of the digits in bf16 over the eight devices, a program per op. Arrays that live on the first device are
counted after each op of a step. XLA's temporaries are those of the LLM's compiled forward and backward.

Then parameters that lanes pull, against those that all lanes gather together (``benchmarks.pull``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.pull import bench_pull
from benchmarks.steps import ALWAYS, Stepper
from mmjax import jax_compat
from mmjax.bench.rows import Row, at_most
from mmjax.config import load_config
from mmjax.config.shipped import CONFIGS
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import memory_by_stage, most_loaded
from mmjax.recipe import Recipe
from mmjax.schedule.ops import Op

KINDS = ("parameters", "optimizer", "gradients", "residuals")
WAYS = (("states", "layer"), ("gradients", "layer"), ("parameters", "step"), ("parameters", "layer"))
"""Values of `Layout.shard` and `Layout.gather`."""
WIDE = ("llm/Decoder.width=256", "llm/Decoder.mlp=1024", "llm/Decoder.layers=4", "vision/ViT.width=128")
"""Modules whose weights are most of a device's bytes."""
LAYOUT = (
    *("llm/Layout.pp=1", "llm/Layout.tp=1", "llm/Layout.dp=8", "vision/Layout.dp=8", "vision/Layout.rank_offset=0"),
    *("Train.lowering='ops'", "Train.dtype='bfloat16'", "Train.microbatches=2", "Train.global_batch=32"),
)


def recipe_with(shard: str, gather: str) -> Recipe:
    """The digits with both modules sharded in a way."""
    modules = ("llm", "vision")
    sharded = [f"{name}/Layout.{field}='{value}'" for name in modules for field, value in _fields(shard, gather)]
    return load_config([CONFIGS / "digits_vlm.gin"], [*ALWAYS, *WIDE, *LAYOUT, *sharded, "Data.workers=0"])


def _fields(shard: str, gather: str) -> list[tuple[str, str]]:
    return [("shard", shard), *([("gather", gather)] if shard == "parameters" else [])]


def live_bytes(device: Any) -> int:
    """Bytes of all arrays on a device."""
    live, seen = 0, set[int]()
    for array in jax.live_arrays():
        if device in array.sharding.device_set:
            shard = jax_compat.shards_by_device(array)[device]
            pointer = shard.unsafe_buffer_pointer()  # views of one buffer count once
            live += 0 if pointer in seen else shard.nbytes
            seen.add(pointer)
    return live


def most_live_bytes(executor: Executor, step: Callable[[], None]) -> int:
    """The most bytes of arrays on the first device after any op of a step."""
    device, most = executor.placed.world.devices[0], 0
    dispatch = executor.walker.dispatch

    def dispatch_and_count(op: Op) -> None:
        nonlocal most
        dispatch(op)
        most = max(most, live_bytes(device))

    executor.walker.dispatch = dispatch_and_count
    try:
        step()
    finally:
        del executor.walker.dispatch
    return most


def bench_sharding(rounds: int) -> Iterator[Row]:
    """Yields bytes of the first device for each way to shard, of which the last one's live arrays have a target; then
    steps of lanes that pull parameters or gather them together.
    """
    yield from _bytes()
    yield from bench_pull(rounds)


def _bytes() -> Iterator[Row]:
    whole = 0
    for shard, gather in WAYS:
        gc.collect()  # the arrays of the way before
        stepper = Stepper(recipe_with(shard, gather))
        parts, executor = stepper.parts, stepper.executor
        assert isinstance(executor, Executor), "a program per op"
        case = f"{shard}, gathered once a {gather}" if shard == "parameters" else shard
        _, memory = most_loaded(parts.placed, memory_by_stage(parts.placed, parts.schedule, parts.shapes.values()))
        for kind in KINDS:
            yield Row(bench="sharding", case=f"{case}: {kind}", value=getattr(memory, kind) / 1e6, unit="MB")
        programs = executor.stage_programs["llm.0", max(parts.shapes)].programs
        temporaries = max(program.compiled_temporary_bytes() for program in programs)
        yield Row(bench="sharding", case=f"{case}: temporaries, compiled", value=temporaries / 1e6, unit="MB")
        live = most_live_bytes(executor, stepper)
        whole = whole or live
        target = at_most(0.5 * whole / 1e6) if (shard, gather) == WAYS[-1] else None
        yield Row(bench="sharding", case=f"{case}: most live arrays", value=live / 1e6, unit="MB", target=target)
        del stepper, parts, executor, programs
