"""Plain kernels that stand for those of libraries, which need a GPU, and keep to the same words.

What is not in a run is never written (NaN), and what backward needs lies run by run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mmjax import jax_compat
from mmjax.attention import row_runs, settings, tokamax_kernels
from mmjax.attention.settings import LIBRARIES
from mmjax.data import possible_runs

H100 = ("gpu", "NVIDIA H100 80GB HBM3")


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has plain kernels stand for libraries', on devices that stand for H100s."""
    monkeypatch.setattr(jax_compat, "device_kind", lambda device: H100)
    monkeypatch.setattr(jax_compat, "cudnn_forward", plain_forward)
    monkeypatch.setattr(jax_compat, "cudnn_backward", plain_backward)
    for name in LIBRARIES:
        monkeypatch.setitem(settings.LIBRARIES, name, replace(LIBRARIES[name], dtypes=("float32",), package=""))
    for module in (row_runs, possible_runs):
        monkeypatch.setattr(module, "MAX_PACKED_RUNS", 4)
    monkeypatch.setattr(tokamax_kernels, "forward_kernel", lambda: (interval_forward, None))
    monkeypatch.setattr(tokamax_kernels, "backward_kernel", lambda: (interval_backward, None))


def scores(q: Any, k: Any, found: Any, causal: bool, window: int) -> tuple[Any, Any, Any]:
    """Scores of the tokens of all rows, -inf where hidden; and each token's run and place in it."""
    B, T, H, K = q.shape
    index = jnp.arange(B * T)
    first, length = found or (jnp.arange(B) * T, jnp.full(B, T))
    inside = (index[:, None] >= first) & (index[:, None] < first + length)
    run = jnp.where(inside.any(1), inside.argmax(1), -1)
    before = index[:, None] - index
    seen = (run[:, None] == run) & (run[:, None] >= 0)
    seen &= (before >= 0) & (before < (window or B * T)) if causal else True
    keys = jnp.repeat(k.reshape(B * T, -1, K), H // k.shape[2], axis=1)
    dots = jnp.einsum("thk,shk->hts", q.reshape(B * T, H, K), keys) * K**-0.5
    return jnp.where(seen, dots, -jnp.inf), run, index - first[run]


def plain_forward(q: Any, k: Any, v: Any, found: Any = None, *, causal: bool, window: int = 0) -> Any:
    (B, T, H, K), scored = q.shape, scores(q, k, found, causal, window)
    lse_HT = jax.nn.logsumexp(scored[0], axis=-1)
    values = jnp.repeat(v.reshape(B * T, -1, K), H // v.shape[2], axis=1)
    out = jnp.einsum("hts,shk->thk", jnp.exp(scored[0] - lse_HT[..., None]), values)
    count = len(found[0]) if found else B
    stats = jnp.full((count, H, T), jnp.nan).at[scored[1], :, scored[2]].set(lse_HT.T)
    return jnp.where(scored[1][:, None, None] >= 0, out, jnp.nan).reshape(q.shape), stats


def plain_backward(
    q: Any, k: Any, v: Any, out: Any, stats: Any, d_out: Any, found: Any = None, *, causal: bool, window: int = 0
) -> Any:
    (B, T, H, K), (dots, run, place) = q.shape, scores(q, k, found, causal, window)
    flat = lambda x: jnp.repeat(x.reshape(B * T, -1, K), H // x.shape[2], axis=1)  # noqa: E731
    weights = jnp.where(dots > -jnp.inf, jnp.exp(dots - stats[run, :, place].T[..., None]), 0)
    d_weights = jnp.einsum("thk,shk->hts", flat(d_out), flat(v))
    common = jnp.sum(flat(out) * flat(d_out), axis=-1).T
    d_scores = weights * (d_weights - common[..., None]) * K**-0.5
    summed = lambda x, like: x.reshape(*like.shape[:3], -1, K).sum(3)  # noqa: E731
    dq = jnp.einsum("hts,shk->thk", d_scores, flat(k)).reshape(q.shape)
    dk = summed(jnp.einsum("hts,thk->shk", d_scores, flat(q)), k)
    return dq, dk, summed(jnp.einsum("hts,thk->shk", weights, flat(d_out)), v)


def interval_scores(q: Any, k: Any, first: Any, last: Any, is_causal: bool, logits_scale: float) -> Any:
    """Scores of a row's tokens, -inf outside of intervals, ends excluded."""
    (T, H, _), index = q.shape, jnp.arange(len(k))
    seen = index >= first[0, :, None]
    seen &= index < last[0, :, None] if last is not None else True
    seen &= index <= jnp.arange(T)[:, None] if is_causal else True
    assert T % 128 == 0 and len(k) % 128 == 0 and first.shape == (1, T)
    dots = jnp.einsum("thk,shk->hts", q, jnp.repeat(k, H // k.shape[1], axis=1)) * logits_scale
    return jnp.where(seen, dots, -jnp.inf)


def interval_forward(q: Any, k: Any, v: Any, bias: Any, mask: Any, first: Any, last: Any, **static: Any) -> Any:
    dots = interval_scores(q, k, first, last, static["is_causal"], static["logits_scale"])
    top = dots.max(axis=-1)
    exp = jnp.exp(dots - top[..., None])
    values = jnp.repeat(v, q.shape[1] // v.shape[1], axis=1)
    out = jnp.einsum("hts,shk->thk", exp / exp.sum(axis=-1, keepdims=True), values)
    assert bias is None and mask is None and static["normalize_output"] and static["return_residuals"]
    return out.astype(static["out_dtype"]), (top, exp.sum(axis=-1))


def interval_backward(
    q: Any, k: Any, v: Any, stats: Any, out: Any, d_out: Any, bias: Any, mask: Any, first: Any, last: Any, **static: Any
) -> Any:
    dots = interval_scores(q, k, first, last, static["is_causal"], static["logits_scale"])
    weights = jnp.exp(dots - stats[0][..., None]) / stats[1][..., None]
    repeat = lambda x: jnp.repeat(x, q.shape[1] // x.shape[1], axis=1)  # noqa: E731
    d_weights = jnp.einsum("thk,shk->hts", d_out, repeat(v)) - jnp.sum(out * d_out, axis=-1).T[..., None]
    d_scores = weights * d_weights * static["logits_scale"]
    summed = lambda x: x.reshape(*k.shape[:2], -1, k.shape[2]).sum(2)  # noqa: E731
    dk = summed(jnp.einsum("hts,thk->shk", d_scores, q))
    dq = jnp.einsum("hts,shk->thk", d_scores, repeat(k))
    return dq, dk, summed(jnp.einsum("hts,thk->shk", weights, d_out)), None
