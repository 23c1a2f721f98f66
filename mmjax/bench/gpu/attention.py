"""The attention backends side by side, forward and backward: values, times and memory.

``dense``, ``blockwise``, ``cudnn`` and ``tokamax`` are values of the setting ``attention``; ``xla`` is
``jax.nn.dot_product_attention``. A case is one shape and one mask: whole rows, packed segments, a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.attention.backends import Backend
from mmjax.attention.mask import Mask
from mmjax.attention.settings import AUTO, BACKENDS
from mmjax.attention.tokens import Tokens
from mmjax.bench.gpu.job import Job, failure
from mmjax.bench.gpu.parity import matmul_precision
from mmjax.bench.gpu.timing import apart, seconds

LIMIT = 2e-2
"""Limit on relative differences of bf16 outputs and gradients from those of fp32."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape and a mask.

    Attributes:
      rows: rows.
      length: tokens of a row.
      heads: heads of the queries ``[rows, length, heads, width]``.
      width: width of a head.
      kind: "causal" or "full".
      segments: number of segments in a row, of equal length.
      groups: heads of keys and values; 0 stands for ``heads``.
      window: tokens that a query attends to at most; 0 is no limit.
    """

    rows: int
    length: int
    heads: int
    width: int
    kind: str = "causal"
    segments: int = 1
    groups: int = 0
    window: int = 0

    @property
    def mask(self) -> Mask:
        """The ``Mask`` between tokens of one segment: causal or full, with the window."""
        return Mask("causal" if self.kind == "causal" else "full", self.window)

    @property
    def name(self) -> str:
        """The case in words, such as "causal 4x1024, 32 heads of 128, 3 segments"."""
        shape = f"{self.kind} {self.rows}x{self.length}, {self.heads} heads of {self.width}"
        shape += f", {self.groups} of keys" if self.groups else ""
        shape += f", window of {self.window}" if self.window else ""
        return shape + (f", {self.segments} segments" if self.segments > 1 else "")

    @property
    def flops(self) -> float:
        """FLOPs of the two products of a forward, over the pairs that the mask allows."""
        segment_length = self.length / self.segments
        window = min(self.window or segment_length, segment_length)
        pairs = self.segments * (
            window * (window + 1) / 2 + (segment_length - window) * window
            if self.kind == "causal"
            else segment_length * segment_length
        )
        return 4.0 * self.rows * self.heads * self.width * pairs


CASES = (
    Case(rows=4, length=2048, heads=32, width=128),
    Case(rows=4, length=2048, heads=32, width=128, segments=3),
    Case(rows=8, length=576, heads=16, width=64, kind="full"),
    Case(rows=1, length=8192, heads=8, groups=1, width=128),
    Case(rows=1, length=8192, heads=8, groups=1, width=128, segments=5),
    Case(rows=2, length=577 * 3, heads=16, width=64, kind="full", segments=3),
    Case(rows=1, length=8192, heads=32, groups=8, width=128, window=1024),
    Case(rows=4, length=2048, heads=32, width=128, segments=64),
    Case(rows=8, length=1024, heads=32, width=128),
    Case(rows=2, length=4096, heads=32, width=128),
    Case(rows=1, length=8192, heads=32, width=128),
)
"""Shapes of Vicuna-7B, CLIP-L and Llama 3 70B at tp 8, packed and whole, and longer rows."""
SMALL = (
    Case(rows=2, length=48, heads=2, width=16, segments=3),
    Case(rows=1, length=32, heads=2, groups=1, width=8, kind="full"),
    Case(rows=1, length=32, heads=2, width=8, window=5),
)

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention of queries, keys and values, with segments ``[rows, length]``."""


def run(job: Job) -> None:
    """Notes as ``cases`` the figures of each backend by case and name, and checks the backends' values.

    A backend that is not available has its "error" instead.
    """
    by_case: dict[str, Any] = {}
    for case in job.while_time(SMALL if job.small else CASES, lambda case: case.name):
        by_case[case.name] = results = _measure(case)
        job.note(cases=by_case)
        for name, result in results.items():
            if name in BACKENDS and "error" not in result:
                job.check(f"{case.name}: {name}", max(result["forward_gap"], result["backward_gap"]) <= LIMIT)


def _measure(case: Case) -> dict[str, Any]:
    q, k, v, cotangent = (_numbers(case, seed) for seed in range(4))
    segments = _segments(case)
    # In fp32 scores of longer rows would take too much memory.
    oracle = _backend("dense" if case.length <= 2048 else "blockwise", case)
    with matmul_precision("highest"):
        arrays = [x.astype(jnp.float32) for x in (q, k, v, cotangent)]
        exact = jax.device_get(jax.jit(partial(_forward_and_backward, oracle))(*arrays, segments))
    results: dict[str, Any] = {}
    for name, attend in implementations(case).items():
        try:
            results[name], both = _timed(attend, (q, k, v, cotangent, segments), case)
            out, gradients = jax.device_get(both(q, k, v, cotangent, segments))
            results[name] |= {"forward_gap": apart(out, exact[0]), "backward_gap": apart(gradients, exact[1])}
        except Exception as error:  # not on this platform, or not for these shapes: that is a result too
            results[name] = failure(error)
    return results


def implementations(case: Case) -> Mapping[str, Attend]:
    """The attention functions that are compared for a case, by name: those of mmjax, and "xla" without a window."""
    backends = {name: _backend(name, case) for name in BACKENDS if name != AUTO}
    return backends if case.window else backends | {"xla": partial(_of_jax, case=case)}


def _backend(name: str, case: Case) -> Attend:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return Backend(name, max_runs=case.segments).attend(q, k, v, Tokens.of({"segments": segments}), case.mask)

    return attend


def _of_jax(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, case: Case) -> jax.Array:
    mask = None if case.segments == 1 else segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, is_causal=case.kind == "causal", mask=mask, implementation="xla")


def _timed(attend: Attend, arrays: tuple[jax.Array, ...], case: Case) -> tuple[dict[str, Any], Any]:
    """Figures of one backend for a case; and its compiled forward and backward."""
    q, k, v, _, segments = arrays
    forward = jax.jit(attend).lower(q, k, v, segments).compile()
    both = jax.jit(partial(_forward_and_backward, attend)).lower(*arrays).compile()
    forward_seconds, both_seconds = seconds(lambda: forward(q, k, v, segments)), seconds(lambda: both(*arrays))
    figures = {
        "forward_seconds": forward_seconds,
        "both_seconds": both_seconds,
        "forward_tflops": case.flops / forward_seconds / 1e12,
        "both_tflops": 3 * case.flops / both_seconds / 1e12,
        "temporary_bytes": both.memory_analysis().temp_size_in_bytes,  # pyright: ignore[reportOptionalMemberAccess]
    }
    return figures, both


def _forward_and_backward(
    attend: Attend, q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array, segments: jax.Array
) -> Any:
    """The output, and the gradients of queries, keys and values."""
    out, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments), q, k, v)
    return out, back(cotangent.astype(out.dtype))


def _numbers(case: Case, seed: int) -> jax.Array:
    heads = case.groups or case.heads if seed in (1, 2) else case.heads
    shape = (case.rows, case.length, heads, case.width)
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def _segments(case: Case) -> jax.Array:
    row = np.arange(case.length) * case.segments // case.length + 1
    return jnp.asarray(np.broadcast_to(row, (case.rows, case.length)).astype(np.int32))
