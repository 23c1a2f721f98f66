"""The LLM's loss and its gradients by chunks of tokens, beside a program with the logits of all tokens at once.

Bytes are temporaries of fp32 programs with the sizes of a language model, compiled for one CPU device and not run.
Times are of a smaller head, both programs in turn in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mmjax.bench.rows import Row, at_most
from mmjax.mesh.layout import Layout
from mmjax.mesh.spread import Axes
from mmjax.mesh.world import World
from mmjax.models.head import token_losses

WIDTH, VOCABULARY = 2048, 32_000
TOKENS = (2_048, 8_192, 32_768)
TIMED = 4_096, 128, 8_192
"""Tokens, width and vocabulary of the timed programs."""
MIB = 2**20


def bench_head(rounds: int) -> Iterator[Row]:
    """Yields temporaries of compiled programs by number of tokens, then times."""
    temporaries = {}
    for by_chunks in (True, False):
        name = "by chunks" if by_chunks else "whole"
        for tokens in TOKENS:
            analysis = _program(*_avals(tokens, WIDTH, VOCABULARY), by_chunks=by_chunks).memory_analysis()
            temporaries[by_chunks, tokens] = analysis.temp_size_in_bytes
            yield _row(f"{tokens} tokens, {name}: temporaries, compiled", analysis.temp_size_in_bytes / MIB, "MiB")
    last = TOKENS[-1]
    yield _row(
        f"{last} tokens: temporaries, by chunks / whole",
        temporaries[True, last] / temporaries[False, last],
        "ratio",
        0.2,
    )
    slope = (temporaries[True, last] - temporaries[True, TOKENS[1]]) / (last - TOKENS[1])
    yield _row("each further token, by chunks / its logits", slope / (4 * VOCABULARY), "ratio", 0.2)
    yield _row("time, by chunks / whole", _times(rounds), "ratio", 1.25)


def _row(case: str, value: float, unit: str, most: float = 0.0) -> Row:
    return Row(bench="head", case=case, value=value, unit=unit, target=at_most(most) if most else None)


def _avals(tokens: int, width: int, vocabulary: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    shapes = {(1, tokens, width): jnp.float32, (width, vocabulary): jnp.float32, (1, tokens): jnp.int32}
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes.items())


def _program(x: Any, head: Any, targets: Any, *, by_chunks: bool) -> Any:
    """The compiled loss with its gradients, for arguments like these."""
    mesh, chunk = World(jax.devices()[:1]).submesh(Layout(), 0).mesh, 0 if by_chunks else math.prod(targets.shape)

    def loss(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.sum(token_losses(x, head, targets, Axes(), head.shape[1], chunk=chunk).cross_entropy)

    specs = PartitionSpec(), PartitionSpec(None, "tp"), PartitionSpec()
    run = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    return jax.jit(jax.value_and_grad(run, argnums=(0, 1))).lower(x, head, targets).compile()


def _times(rounds: int) -> float:
    """Median time of the program by chunks over the median time of the program of all tokens at once."""
    avals = _avals(*TIMED)
    key = jax.random.key(0)
    arguments = [
        jax.random.normal(key, a.shape) if a.dtype == jnp.float32 else jax.random.randint(key, a.shape, 0, TIMED[2])
        for a in avals
    ]
    programs = [_program(*avals, by_chunks=by_chunks) for by_chunks in (True, False)]
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for program, program_seconds in zip(programs, seconds, strict=True):
            start = perf_counter()
            jax.block_until_ready(program(*arguments))
            program_seconds.append(perf_counter() - start)
    by_chunks, of_all_tokens = (median(program_seconds[1:]) for program_seconds in seconds)
    return by_chunks / of_all_tokens
