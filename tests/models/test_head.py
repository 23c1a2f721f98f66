"""Losses by chunks of tokens: values and gradients of dense logits in fp64, and no array of all tokens' logits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from spmd_runs import AXES, on_tp, submesh

from mmjax.jax_compat import vjp_residuals
from mmjax.models.handles import Handle
from mmjax.models.head import MIN_CHUNK_BYTES, MIN_CHUNK_TOKENS, chunk_tokens, token_losses
from mmjax.models.taps import Summed

B, D = 3, 6
Z = 0.3
"""Weight of the second loss."""
Given = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def drawn(tokens: int, vocab: int, tp: int, seed: int) -> Given:
    """Hidden states, a head ``[D, V]`` with columns that pad it, targets, and weights of which some are 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, tokens, D)) * 2
    head = rng.normal(size=(D, -(-vocab // tp) * tp))
    targets, weights = rng.integers(0, vocab, (B, tokens)), rng.normal(size=(B, tokens)) * rng.integers(0, 2, tokens)
    return x.astype(np.float32), head.astype(np.float32), targets.astype(np.int32), weights.astype(np.float32)


def dense(x: Any, head: Any, targets: Any, weights: Any, vocab: int, z: float) -> tuple[Any, Any, Any]:
    """The weighted loss and its gradients, by formula in fp64."""
    x, head, weights = (np.asarray(a, np.float64) for a in (x, head, weights))
    logits = x @ head[:, :vocab]
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    softmax, chosen = np.exp(logits - log_sum[..., None]), np.eye(vocab)[targets]
    loss = (weights * (log_sum - (logits * chosen).sum(-1) + z * log_sum**2)).sum()
    slope = weights[..., None] * (softmax * (1 + 2 * z * log_sum[..., None]) - chosen)
    of_head = np.zeros_like(head)
    of_head[:, :vocab] = np.einsum("btd,btv->dv", x, slope)
    return loss, slope @ head[:, :vocab].T, of_head


def program(tp: int, vocab: int, tied: bool, z: float, chunk: int) -> Any:
    """``(x, head, targets, weights) -> loss and its gradients`` over ``tp`` ranks."""

    def body(x: Any, head: Any, targets: Any, weights: Any) -> Any:
        found = token_losses(x, head, targets, AXES, vocab, tied=tied, chunk=chunk)
        return jnp.sum(weights * (found.cross_entropy + (z * found.log_sum**2 if z else 0)))

    specs = (P(), P("tp", None) if tied else P(None, "tp"), P(), P())
    return jax.jit(jax.value_and_grad(lambda *args: on_tp(tp, body, *args, specs=specs), argnums=(0, 1)))


program_of = cache(program)


def check(given: Given, vocab: int, tp: int, tied: bool, z: float, chunk: int, dtype: Any = np.float32) -> None:
    x, head, targets, weights = given
    x, head = jnp.asarray(x, dtype), jnp.asarray(head, dtype)
    want = dense(np.asarray(x, np.float64), np.asarray(head, np.float64), targets, weights, vocab, z)
    loss, (of_x, of_head) = program_of(tp, vocab, tied, z, chunk)(x, head.T if tied else head, targets, weights)
    assert (of_x.dtype, of_head.dtype) == (dtype, dtype)
    got = loss, of_x, of_head.T if tied else of_head
    off = 1e-5 if dtype == np.float32 else 0.02
    for name, one, other in zip(("loss", "x", "head"), got, want, strict=True):
        one = np.asarray(one, np.float64)
        size = np.abs(weights).sum() + abs(other) if name == "loss" else np.linalg.norm(other)
        assert np.linalg.norm(one - other) <= off * max(size, 1e-3), name
    assert not np.asarray(got[1], np.float32)[weights == 0].any(), "a token without weight has no gradient"
    assert not np.asarray(got[2], np.float32)[:, vocab:].any(), "what pads the vocabulary has none"


# ---- values and gradients --------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), case=st.sampled_from([(1, False, 0.0, 4), (4, True, Z, 4)]))
def test_losses_and_gradients_are_those_of_dense_logits(seed: int, case: tuple[int, bool, float, int]) -> None:
    """15 tokens in chunks of four; a vocabulary of 13, which four ranks pad."""
    tp, tied, z, chunk = case
    check(drawn(5, 13, tp, seed), 13, tp, tied, z, chunk)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(2, 17),
    tp=st.sampled_from([1, 2, 4]),
    tied=st.booleans(),
    z=st.sampled_from([0.0, Z]),
    chunk=st.integers(0, 30),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([np.float32, jnp.bfloat16]),
)
def test_any_sizes(tokens: int, vocab: int, tp: int, tied: bool, z: float, chunk: int, seed: int, dtype: Any) -> None:
    check(drawn(tokens, vocab, tp, seed), vocab, tp, tied, z, chunk, dtype)


@pytest.mark.parametrize(("tp", "tied", "chunk"), [(1, False, 4), (4, True, 0)])
def test_a_soft_cap_of_logits(tp: int, tied: bool, chunk: int) -> None:
    """Beside logits in fp64 of which the largest are several caps; and with logits that are kept."""
    (x, head, targets, weights), cap = drawn(5, 13, tp, 0), 2.0
    logits = x.astype(np.float64) @ head[:, :13]
    capped = cap * np.tanh(logits / cap)
    log_sum = np.log(np.exp(capped).sum(-1))
    chosen, softmax = np.eye(13)[targets], np.exp(capped - log_sum[..., None])
    want = (weights * (log_sum - (capped * chosen).sum(-1))).sum()
    slope = weights[..., None] * (softmax - chosen) / np.cosh(logits / cap) ** 2
    d_head = np.zeros(head.shape)
    d_head[:, :13] = np.einsum("btd,btv->dv", x, slope)

    def body(x: Any, head: Any, targets: Any, weights: Any) -> Any:
        losses = token_losses(x, head, targets, AXES, 13, tied=tied, chunk=chunk, soft_cap=cap)
        return jnp.sum(weights * losses.cross_entropy)

    specs = (P(), P("tp", None) if tied else P(None, "tp"), P(), P())
    run = jax.jit(jax.value_and_grad(lambda *args: on_tp(tp, body, *args, specs=specs), argnums=(0, 1)))
    loss, (of_x, of_head) = run(x, head.T if tied else head, targets, weights)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(of_x, slope @ head[:, :13].T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_head.T if tied else of_head, d_head, rtol=1e-4, atol=1e-5)


def test_a_head_that_is_stored_in_another_form_is_opened_again() -> None:
    x, head, targets, weights = drawn(5, 13, 1, 0)

    def loss(x: Any, half: Any) -> Any:
        own = Handle(stored=half, open=lambda half: 2 * half)
        given = x, own, targets
        found = on_tp(1, lambda x, head, t: token_losses(x, head, t, AXES, 13, chunk=4).cross_entropy, *given)
        return jnp.sum(weights * found)

    _, (of_x, of_half) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, head / 2)
    _, want_x, want = dense(x, head, targets, weights, 13, 0.0)
    np.testing.assert_allclose(of_x, want_x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_half, 2 * want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [4, 100])
def test_a_head_adds_its_gradient_to_its_sum(chunk: int, tied: bool) -> None:
    """On two ranks of tp, in chunks and at once: the sum before, and the gradient."""
    x, head, targets, weights = drawn(5, 13, 2, 3)
    before = np.random.default_rng(4).normal(size=head.shape).astype(np.float32)
    split = P("tp", None) if tied else P(None, "tp")

    def loss(x: Any, head: Any, total: Any) -> Any:
        def body(x: Any, head: Any, total: Any, targets: Any, weights: Any) -> Any:
            summed = Summed(weight=head, total=total)
            losses = token_losses(x, summed, targets, AXES, 13, tied=tied, chunk=chunk)
            return jnp.sum(weights * losses.cross_entropy)

        return on_tp(2, body, x, head, total, targets, weights, specs=(P(), split, split, P(), P()))

    _, want_x, want = dense(x, head, targets, weights, 13, 0.0)
    given = (head.T, before.T) if tied else (head, before)
    _, (of_x, total) = jax.jit(jax.value_and_grad(loss, argnums=(0, 2)))(x, *given)
    np.testing.assert_allclose(of_x, want_x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(total.T if tied else total, before + want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_that_are_kept_are_those_that_backward_computes_again(tied: bool) -> None:
    """To bf16's rounding, which XLA leaves out on CPUs where nothing is kept; in fp32 none are kept."""
    x, head, targets, weights = drawn(5, 13, 1, 6)

    def gradients(dtype: Any, keep_logits: bool) -> Any:
        def loss(x: Any, head: Any) -> Any:
            losses = token_losses(x, head, jnp.asarray(targets), AXES, 13, tied=tied, keep_logits=keep_logits)
            return jnp.sum(weights * losses.cross_entropy)

        arrays = jnp.asarray(x, dtype), jnp.asarray(head.T if tied else head, dtype)
        by_rank = jax.value_and_grad(lambda *args: on_tp(1, loss, *args, specs=(P(), P())), argnums=(0, 1))
        return jax.jit(by_rank)(*arrays), str(jax.make_jaxpr(by_rank)(*arrays)).count("dot_general")

    (kept, products), (computed, products_again) = gradients(jnp.bfloat16, True), gradients(jnp.bfloat16, False)
    for got, wanted in zip(jax.tree.leaves(kept), jax.tree.leaves(computed), strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, wanted)), rtol=0.02, atol=0.05)
    assert products_again == products + 1
    assert gradients(np.float32, True)[1] == gradients(np.float32, False)[1]


# ---- memory ----------------------------------------------------------------------------------------------------------

CHUNK, VOCAB = 128, 512


def avals(tokens: int, dtype: Any, tied: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    shapes = ((1, tokens, D), (VOCAB, D) if tied else (D, VOCAB), (1, tokens), (1, tokens))
    kinds = (dtype, dtype, np.int32, np.float32)
    return tuple(jax.ShapeDtypeStruct(shape, kind) for shape, kind in zip(shapes, kinds, strict=True))


def sizes(text: str) -> Iterator[int]:
    """Numbers in each array of a compiled program."""
    for shape in re.findall(r"\b(?:f32|bf16|s32|pred)\[([\d,]+)\]", text):
        yield math.prod(int(size) for size in shape.split(","))


@pytest.mark.parametrize(("tied", "dtype"), [(False, np.float32), (True, jnp.bfloat16)])
def test_no_array_of_a_step_has_all_logits(tied: bool, dtype: Any) -> None:
    """Temporaries of 16 chunks are those of four, but for numbers of the tokens; with one chunk logits are whole."""
    found = []
    for tokens in (4 * CHUNK, 16 * CHUNK):
        compiled = program(1, VOCAB, tied, Z, CHUNK).lower(*avals(tokens, dtype, tied)).compile()
        assert max(sizes(compiled.as_text())) <= max(CHUNK * VOCAB, tokens * D)
        found.append(compiled.memory_analysis().temp_size_in_bytes)
    assert found[1] - found[0] <= 12 * CHUNK * (4 * D + 8) * 4
    assert max(sizes(str(jax.make_jaxpr(program(1, VOCAB, tied, Z, CHUNK))(*avals(16 * CHUNK, dtype, tied))))) < (
        2 * CHUNK * VOCAB
    )


def test_forward_keeps_two_numbers_a_token() -> None:
    """Beside the arguments: the logarithm of this rank's part of the denominator, and, for a second loss, of all."""
    tokens = 4 * CHUNK
    kept: list[Any] = []

    def body(x: Any, head: Any, targets: Any) -> Any:
        losses = lambda x, head: token_losses(x, head, targets, AXES, VOCAB, chunk=CHUNK)  # noqa: E731
        out, back = jax.vjp(lambda *args: (lambda one: one.cross_entropy + Z * one.log_sum**2)(losses(*args)), x, head)
        kept[:] = [a for a in vjp_residuals(back)[0] if not any(a is given for given in (x, head, targets))]
        return out

    run = jax.shard_map(body, mesh=submesh().mesh, in_specs=(P(), P(None, "tp"), P()), out_specs=P())
    jax.eval_shape(run, *avals(tokens, np.float32, False)[:3])
    assert sorted(a.shape for a in kept if a.shape) == [(1, tokens), (4, CHUNK)]


def test_chunks_are_as_large_as_the_vocabulary_allows() -> None:
    assert chunk_tokens(64) * 64 * 4 == MIN_CHUNK_BYTES, "a small vocabulary: as many tokens as fit"
    assert chunk_tokens(128_256) == chunk_tokens(10**7) == MIN_CHUNK_TOKENS
