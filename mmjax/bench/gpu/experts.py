"""Grouped products side by side: mmjax's kernels, its blocks of rows, XLA's ``ragged_dot``, and one dense product.

Products, input gradients and weight gradients are measured apart. Rows are divided among experts evenly, or so that the
fullest has one and a half times as many as the mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.bench.gpu.job import Job
from mmjax.bench.gpu.parity import matmul_precision
from mmjax.bench.gpu.timing import apart, seconds
from mmjax.models.experts import grouped_blocks, grouped_kernels

LIMIT = 1e-2
"""Limit on relative differences of bf16 results from those of fp32."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows and experts.

    Attributes:
      rows: number of rows, tokens times experts of a token.
      experts: number of experts.
      inputs, outputs: width of rows and of results.
      fullest: rows of the fullest expert over the mean.
    """

    rows: int
    experts: int
    inputs: int
    outputs: int
    fullest: float = 1.0

    @property
    def name(self) -> str:
        """The case in words, such as "32768x2048 by 128 of 2048x768, fullest 1.5"."""
        shape = f"{self.rows}x{self.inputs} by {self.experts} of {self.inputs}x{self.outputs}"
        return shape + (f", fullest {self.fullest:g}" if self.fullest > 1 else "")

    @property
    def flops(self) -> float:
        """FLOPs of a product; both gradients have as many."""
        return 2.0 * self.rows * self.inputs * self.outputs

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each expert, int32: evenly spaced from the fullest to the emptiest, in random order."""
        shares = np.linspace(2 - self.fullest, self.fullest, self.experts)
        ends = np.round(np.cumsum(shares) * self.rows / self.experts).astype(np.int32)
        return np.random.default_rng(0).permutation(np.diff(ends, prepend=0))


CASES = (
    Case(rows=32768, experts=128, inputs=2048, outputs=768),
    Case(rows=32768, experts=128, inputs=2048, outputs=768, fullest=1.5),
    Case(rows=65536, experts=16, inputs=2048, outputs=768, fullest=1.5),
    Case(rows=32768, experts=16, inputs=768, outputs=2048, fullest=1.5),
    Case(rows=8192, experts=8, inputs=4096, outputs=14336, fullest=1.5),
)
"""Qwen3-30B-A3B on one device and with ep 8, and Mixtral 8x7B."""
SMALL = (Case(rows=100, experts=4, inputs=48, outputs=24, fullest=1.5),)

Pass = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""A pass of rows ``[M, D]``, weights ``[E, D, F]``, gradients of results ``[M, F]`` and numbers of rows ``[E]``."""


def run(job: Job) -> None:
    """Notes as ``cases`` the figures of each way by case, pass and name, and checks the values of mmjax's ways."""
    by_case: dict[str, Any] = {}
    last_seconds = 0.0
    for case in SMALL if job.small else CASES:
        start = time.perf_counter()
        if not job.has_time(case.name, 1.5 * last_seconds):
            break
        by_case[case.name] = results = _measure(case)
        job.note(cases=by_case)
        for name in ("kernels", "blocks"):
            gaps = [of_pass[name].get("gap", 1.0) for of_pass in results.values()]
            job.check(f"{case.name}: {name}", max(gaps) <= LIMIT)
        last_seconds = time.perf_counter() - start


def _measure(case: Case) -> dict[str, dict[str, Any]]:
    x, w, dy = (_numbers(shape, seed) for seed, shape in enumerate(_shapes(case)))
    sizes = jnp.asarray(case.sizes)
    results: dict[str, dict[str, Any]] = {}
    for name, ways in passes().items():
        with matmul_precision("highest"):
            fp32 = [a.astype(jnp.float32) for a in (x, w, dy)]
            exact = jax.device_get(jax.jit(ways["blocks"])(*fp32, sizes))
        results[name] = {way: _timed(run, (x, w, dy, sizes), exact, case) for way, run in ways.items()}
    return results


def _shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    inputs, outputs = case.inputs, case.outputs
    return (case.rows, inputs), (case.experts, inputs, outputs), (case.rows, outputs)


def _timed(run: Pass, operands: tuple[jax.Array, ...], exact: Any, case: Case) -> dict[str, Any]:
    """Seconds, TFLOP/s, temporary bytes, and ``gap``, the relative difference from the same in fp32."""
    try:
        compiled = jax.jit(run).lower(*operands).compile()
        took = seconds(partial(compiled, *operands))
        result: dict[str, Any] = {"seconds": took, "tflops": case.flops / took / 1e12}
        memory = compiled.memory_analysis()
        result["temporary_bytes"] = 0 if memory is None else memory.temp_size_in_bytes
        out = compiled(*operands)
        return result | ({"gap": apart(out, exact)} if out.shape == exact.shape else {})
    except Exception as error:  # too large for the memory, say: that is a result too
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300]}


def passes() -> Mapping[str, Mapping[str, Pass]]:
    """The passes "y", "dx" and "dw" in each way, by pass and name."""
    return {
        "y": {
            "kernels": lambda x, w, dy, n: grouped_kernels.products(x, [w], n)[0],
            "blocks": lambda x, w, dy, n: grouped_blocks.products(x, [w], n)[0],
            "ragged_dot": lambda x, w, dy, n: lax.ragged_dot(x, w, n),
            "dense": lambda x, w, dy, n: x @ w[0],
        },
        "dx": {
            "kernels": lambda x, w, dy, n: grouped_kernels.input_gradient([dy], [w], n),
            "blocks": lambda x, w, dy, n: grouped_blocks.input_gradient([dy], [w], n),
            "ragged_dot": lambda x, w, dy, n: lax.ragged_dot(dy, jnp.swapaxes(w, 1, 2), n),
            "dense": lambda x, w, dy, n: dy @ w[0].T,
        },
        "dw": {
            "kernels": lambda x, w, dy, n: grouped_kernels.weight_gradients(x, [dy], n)[0],
            "blocks": lambda x, w, dy, n: grouped_blocks.weight_gradients(x, [dy], n)[0],
            "dense": lambda x, w, dy, n: jnp.matmul(x.T, dy, preferred_element_type=jnp.float32),
        },
    }


def _numbers(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Normal numbers in bf16; weights are divided by the root of their inputs."""
    scale = shape[-2] ** -0.5 if len(shape) == 3 else 1.0
    return jax.jit(lambda: scale * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16))()
