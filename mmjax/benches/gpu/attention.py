"""The attention of the models beside cuDNN's fused one, forward and backward: values, times and memory.

``ours`` is the attention that every layer calls. ``xla`` and ``cudnn`` are ``jax.nn.dot_product_attention``. A case is
one shape and one mask: a causal row, or packed segments, which cuDNN's public interface takes as a mask of all pairs.
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

from mmjax.attention.blockwise import attention
from mmjax.attention.mask import Mask
from mmjax.attention.tokens import Tokens
from mmjax.benches.gpu.job import Job
from mmjax.benches.gpu.parity import matmul_precision
from mmjax.benches.gpu.timing import apart, seconds

LIMIT = 2e-2
"""Limit on relative differences of bf16 outputs and gradients from those of fp32."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes of queries, keys and values ``[rows, length, heads, width]``, and the segments of a row."""

    rows: int
    length: int
    heads: int
    width: int
    kind: str = "causal"
    segments: int = 1

    @property
    def name(self) -> str:
        """The case in words, such as "causal 4x1024, 32 heads of 128, 3 segments"."""
        shape = f"{self.kind} {self.rows}x{self.length}, {self.heads} heads of {self.width}"
        return shape + (f", {self.segments} segments" if self.segments > 1 else "")

    @property
    def flops(self) -> float:
        """FLOPs of the two products of a forward, over the pairs that the mask allows."""
        each = self.length / self.segments
        pairs = self.segments * (each * (each + 1) / 2 if self.kind == "causal" else each * each)
        return 4.0 * self.rows * self.heads * self.width * pairs


CASES = (
    Case(rows=4, length=2048, heads=32, width=128),
    Case(rows=8, length=576, heads=16, width=64, kind="full"),
    Case(rows=4, length=2048, heads=32, width=128, segments=3),
    Case(rows=8, length=1024, heads=32, width=128),
    Case(rows=2, length=4096, heads=32, width=128),
    Case(rows=4, length=2048, heads=64, width=64),
    Case(rows=1, length=8192, heads=32, width=128),
)
"""Shapes of Vicuna-7B and CLIP-L, and longer rows."""
SMALL = (
    Case(rows=2, length=48, heads=2, width=16, segments=3),
    Case(rows=1, length=32, heads=2, width=8, kind="full"),
)

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention of queries, keys and values, with segments ``[rows, length]``."""


def run(job: Job) -> None:
    """Measures one case after another; an implementation that is not available is noted with its error."""
    found: dict[str, Any] = {}
    spent = 0.0
    for case in SMALL if job.small else CASES:
        begun = time.perf_counter()
        if not job.has_time(case.name, 1.5 * spent):
            break
        found[case.name] = own = _measure(case)
        job.note(cases=found)
        for name, result in own.items():
            if name == "ours" and "error" not in result:
                job.check(f"{case.name}: {name}", max(result["forward_gap"], result["backward_gap"]) <= LIMIT)
        spent = time.perf_counter() - begun


def _measure(case: Case) -> dict[str, Any]:
    q, k, v, cotangent = (_numbers(case, seed) for seed in range(4))
    segments = _segments(case)
    exact = None
    if case.length <= 2048:  # in fp32 longer ones would take too much memory
        with matmul_precision("highest"):
            whole = [x.astype(jnp.float32) for x in (q, k, v, cotangent)]
            exact = jax.device_get(jax.jit(partial(_both, partial(_ours, kind=case.kind)))(*whole, segments))
    results: dict[str, Any] = {}
    for name, attend in implementations(case).items():
        try:
            results[name], both = _timed(attend, (q, k, v, cotangent, segments), case)
            if exact is not None:
                out, gradients = jax.device_get(both(q, k, v, cotangent, segments))
                gaps = {"forward_gap": apart(out, exact[0]), "backward_gap": apart(gradients, exact[1])}
                results[name] |= gaps
            elif name == "ours":
                results[name] |= {"forward_gap": 0.0, "backward_gap": 0.0}
        except Exception as error:  # not on this platform, or not for these shapes: that is a result too
            results[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300]}
    return results


def implementations(case: Case) -> Mapping[str, Attend]:
    """Implementations by name."""
    return {
        "ours": partial(_ours, kind=case.kind),
        "xla": partial(_of_jax, case=case, implementation="xla"),
        "cudnn": partial(_of_jax, case=case, implementation="cudnn"),
    }


def _ours(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, kind: Any) -> jax.Array:
    return attention(q, k, v, Tokens.of({"segments": segments}), Mask(kind))


def _of_jax(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, case: Case, implementation: Any
) -> jax.Array:
    mask = None if case.segments == 1 else segments[:, None, :, None] == segments[:, None, None, :]
    given: Any = {"is_causal": case.kind == "causal", "mask": mask, "implementation": implementation}
    return jax.nn.dot_product_attention(q, k, v, **given)


def _timed(attend: Attend, arrays: tuple[jax.Array, ...], case: Case) -> tuple[dict[str, Any], Any]:
    """Figures, and the compiled forward and backward."""
    q, k, v, _, segments = arrays
    forward = jax.jit(attend).lower(q, k, v, segments).compile()
    both = jax.jit(partial(_both, attend)).lower(*arrays).compile()
    ahead, whole = seconds(lambda: forward(q, k, v, segments)), seconds(lambda: both(*arrays))
    figures = {
        "forward_seconds": ahead,
        "both_seconds": whole,
        "forward_tflops": case.flops / ahead / 1e12,
        "both_tflops": 3 * case.flops / whole / 1e12,
        "temporary_bytes": both.memory_analysis().temp_size_in_bytes,  # pyright: ignore[reportOptionalMemberAccess]
    }
    return figures, both


def _both(attend: Attend, q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array, segments: jax.Array) -> Any:
    """The output, and the gradients of queries, keys and values."""
    out, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments), q, k, v)
    return out, back(cotangent.astype(out.dtype))


def _numbers(case: Case, seed: int) -> jax.Array:
    shape = (case.rows, case.length, case.heads, case.width)
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def _segments(case: Case) -> jax.Array:
    each = np.arange(case.length) * case.segments // case.length + 1
    return jnp.asarray(np.broadcast_to(each, (case.rows, case.length)).astype(np.int32))
