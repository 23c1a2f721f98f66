"""Grouped products side by side: mmjax's kernels, XLA's ``ragged_dot``, and one dense product.

Products, input gradients and weight gradients are measured apart. Rows are divided among experts evenly, or so that the
fullest has one and a half times as many as the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.bench.gpu.job import Job, failure
from mmjax.bench.gpu.timing import apart, seconds
from mmjax.models.experts import grouped_kernels
from mmjax.models.experts.dispatch import Rows

KERNELS = frozenset({"kernels", "kernels by index"})
"""The ways whose values are checked."""
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
    """Notes as ``cases`` the figures of each way by case, pass and name, and checks the values of mmjax's kernels."""
    by_case: dict[str, dict[str, Any]] = {}
    for case in job.while_time(SMALL if job.small else CASES, lambda case: case.name):
        by_case[case.name] = {}
        for name, figures in _measure(case):
            by_case[case.name][name] = figures
            job.note(cases=by_case)
            for way in KERNELS & figures.keys():
                job.check(f"{case.name}: {name}, {way}", figures[way].get("gap", 1.0) <= LIMIT)


def _measure(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each pass with the figures of each way by name."""
    x, w, dy = (_numbers(shape, seed) for seed, shape in enumerate(_shapes(case)))
    operands, exact = (x, w, dy, jnp.asarray(case.sizes)), _exact(case, x, w, dy)
    for name, ways in passes().items():
        exact_of = dict.fromkeys(ways, exact[name]) | {"dense": None}  # which computes something else
        yield name, {way: _timed(run, operands, case, exact_of[way]) for way, run in ways.items()}


def _exact(case: Case, x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, np.ndarray]:
    """The results of the passes by name, in fp32 on the host."""
    rows_x, weights, rows_dy = (np.asarray(a).astype(np.float32) for a in (x, w, dy))
    ends = np.cumsum(case.sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, case.sizes, strict=True)]
    return {
        "y": np.concatenate([rows_x[rows] @ weights[expert] for expert, rows in enumerate(groups)]),
        "dx": np.concatenate([rows_dy[rows] @ weights[expert].T for expert, rows in enumerate(groups)]),
        "dw": np.stack([rows_x[rows].T @ rows_dy[rows] for rows in groups]),
    }


def _shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    inputs, outputs = case.inputs, case.outputs
    return (case.rows, inputs), (case.experts, inputs, outputs), (case.rows, outputs)


def _timed(run: Pass, operands: tuple[jax.Array, ...], case: Case, exact: np.ndarray | None) -> dict[str, Any]:
    """Seconds, TFLOP/s, temporary bytes, and ``gap``, the relative difference from ``exact``."""
    try:
        compiled = jax.jit(run).lower(*operands).compile()
        took = seconds(partial(compiled, *operands))
        result: dict[str, Any] = {"seconds": took, "tflops": case.flops / took / 1e12}
        memory = compiled.memory_analysis()
        result["temporary_bytes"] = 0 if memory is None else memory.temp_size_in_bytes
        return result | ({} if exact is None else {"gap": apart(compiled(*operands), exact)})
    except Exception as error:  # too large for the memory, say: that is a result too
        return failure(error)


def passes() -> Mapping[str, Mapping[str, Pass]]:
    """The passes "y", "dx" and "dw" in each way, by pass and name."""
    return {
        "y": {
            "kernels": lambda x, w, dy, n: grouped_kernels.products(Rows(x), [w], n)[0],
            "kernels by index": lambda x, w, dy, n: grouped_kernels.products(_by_index(x), [w], n)[0],
            "ragged_dot": lambda x, w, dy, n: lax.ragged_dot(x, w, n),
            "dense": lambda x, w, dy, n: x @ w[0],
        },
        "dx": {
            "kernels": lambda x, w, dy, n: grouped_kernels.input_gradient([Rows(dy)], [w], n),
            "ragged_dot": lambda x, w, dy, n: lax.ragged_dot(dy, jnp.swapaxes(w, 1, 2), n),
            "dense": lambda x, w, dy, n: dy @ w[0].T,
        },
        "dw": {
            "kernels": lambda x, w, dy, n: grouped_kernels.weight_gradients([(Rows(x), [Rows(dy)], n)])[0],
            "kernels by index": lambda x, w, dy, n: grouped_kernels.weight_gradients([(_by_index(x), [Rows(dy)], n)])[
                0
            ],
            "dense": lambda x, w, dy, n: jnp.matmul(x.T, dy, preferred_element_type=jnp.float32),
        },
    }


def _by_index(x: jax.Array) -> Rows:
    """All rows in their order, by an index, as kernels read features where tokens are."""
    return Rows(x, jnp.arange(x.shape[0], dtype=jnp.int32))


def _numbers(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Normal numbers in bf16; weights are divided by the root of their inputs."""
    scale = shape[-2] ** -0.5 if len(shape) == 3 else 1.0
    return jax.jit(lambda: scale * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16))()
