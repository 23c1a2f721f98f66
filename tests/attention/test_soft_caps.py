"""Soft caps of scores and of logits beside sums over pairs of tokens in fp64: values and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mmjax.attention import blockwise
from mmjax.attention.backends import XLA_BACKENDS, Backend
from mmjax.attention.exchange import EXCHANGES, gather_tokens
from mmjax.attention.mask import Mask
from mmjax.attention.tokamax_kernels import Tokamax
from mmjax.attention.tokens import Tokens

CAP, WIDTH = 1.5, 8
SEGMENTS = np.array([[1] * 25 + [2] * 30 + [0] * 5, [1] * 60], np.int32)
MASKS = {"causal": Mask("causal"), "window": Mask("causal", 7)}


def drawn() -> list[np.ndarray]:
    """Queries, keys, values and the gradient of the output; scores are larger than the cap."""
    rng = np.random.default_rng(0)
    return [1.5 * rng.normal(size=(2, 60, heads, WIDTH)) for heads in (4, 2, 2, 4)]


def exact(mask: Mask) -> list[np.ndarray]:
    """The output, and the gradients of queries, keys and values, by formula."""
    q, k, v, d_out = drawn()
    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    at = np.arange(60)
    sees = (at[:, None] >= at) & (at[:, None] - at < (mask.window or 60))
    sees = (sees & (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS > 0)[:, :, None])[:, None]
    raw = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(WIDTH)
    assert np.abs(raw).max() > 2 * CAP
    weights = np.where(sees, np.exp(CAP * np.tanh(raw / CAP)), 0)
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    d_out = d_out * (SEGMENTS > 0)[..., None, None]
    d_weights = np.einsum("bthk,bshk->bhts", d_out, v)
    d_raw = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.cosh(raw / CAP) ** 2
    d_raw /= np.sqrt(WIDTH)
    dk, dv = np.einsum("bhts,bthk->bshk", d_raw, q), np.einsum("bhts,bthk->bshk", weights, d_out)
    dk, dv = (x.reshape(2, 60, 2, 2, WIDTH).sum(axis=3) for x in (dk, dv))
    return [np.einsum("bhts,bshk->bthk", weights, v), np.einsum("bhts,bshk->bthk", d_raw, k), dk, dv]


def both(attend: Any, segments: Any, q: Any, k: Any, v: Any, d_out: Any) -> Any:
    """The output, 0 at padding, and its gradients."""
    real = (segments > 0)[..., None, None]
    out, vjp = jax.vjp(lambda *qkv: jnp.where(real, attend(*qkv), 0), q, k, v)
    return out, *vjp(d_out)


def require_exact(got: Any, mask: Mask) -> None:
    for name, x, want in zip(("out", "dq", "dk", "dv"), got, exact(mask), strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("block", [512, 16])
@pytest.mark.parametrize("name", XLA_BACKENDS)
def test_whole_rows(name: str, block: int, mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "BLOCK", block)
    tokens = Tokens.of({"segments": jnp.asarray(SEGMENTS)})
    attend = partial(Backend(name).attend, tokens=tokens, mask=mask, soft_cap=CAP)
    require_exact(jax.jit(partial(both, attend))(SEGMENTS, *(x.astype(np.float32) for x in drawn())), mask)


@pytest.mark.long
@pytest.mark.parametrize("cp_way", EXCHANGES)
def test_tokens_on_two_ranks(cp_way: str) -> None:
    mesh, spec, mask = Mesh(np.array(jax.devices()[:2]), ("cp",)), PartitionSpec(None, "cp"), MASKS["causal"]

    def run(segments: Any, *arrays: Any) -> Any:
        tokens = Tokens.of({"segments": segments}, ("cp",))
        keys = gather_tokens(tokens, mask, ("cp",), cp_way)
        options = {"tokens": tokens, "mask": mask, "keys": keys, "axes": ("cp",), "cp_way": cp_way}
        return both(partial(Backend("blockwise").attend_across_ranks, **options, soft_cap=CAP), segments, *arrays)

    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))
    require_exact(mapped(SEGMENTS, *(x.astype(np.float32) for x in drawn())), mask)


def test_tokamax_is_told_the_cap() -> None:
    """Its kernels have caps of their own; without one they get none."""
    q = jnp.zeros((1, 4, 2, WIDTH))
    caps = [Tokamax(Mask("causal"), soft_cap=cap)._options(q)["logits_soft_cap"] for cap in (CAP, 0.0)]
    assert caps == [CAP, None]
