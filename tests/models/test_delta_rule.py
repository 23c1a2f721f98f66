"""The gated delta rule: against a recurrence in fp64, over packed rows, over ranks, and in proportion to tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mmjax.jaxprs import inner_jaxprs
from mmjax.models.delta.convolution import short_convolution
from mmjax.models.delta.rule import TokenHeads, delta_rule, starts_of

Arrays = tuple[np.ndarray, ...]
NAMES = ("q", "k", "v", "log_decay", "strength")


def drawn(B: int, T: int, G: int, R: int, K: int, V: int, seed: int = 0) -> tuple[Arrays, np.ndarray, np.ndarray]:
    """Heads, segments of samples of different lengths with padding behind them, and a gradient of the output.

    Keys are alike, so that what is written later depends on what was written before, and some decays are strong.
    """
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(B, T, heads, width)) for heads, width in ((G, K), (G, K), (G * R, V)))
    log_decay = -np.exp(2 * rng.normal(size=(B, T, G * R)) - 2)
    strength = 1 / (1 + np.exp(-3 * rng.normal(size=(B, T, G * R))))
    segments = np.zeros((B, T), np.int32)
    for row in segments:
        start, number = 0, 0
        while start < T - 2:
            length = int(rng.integers(1, max(2, T // 3)))
            row[start : min(start + length, T - 2)] = number = number + 1
            start += length
    d_out = rng.normal(size=v.shape) * (segments > 0)[..., None, None]
    heads = tuple(x.astype(np.float32) for x in (q, k + 1, v, log_decay, strength))
    return heads, segments, d_out.astype(np.float32)


def recurrence(heads: Arrays, segments_T: np.ndarray, d_out: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """One row, token after token, in fp64; and gradients by hand, of the transposed recurrence."""
    q, k, v, log_decay, strength = (x.astype(np.float64) for x in heads)
    R = v.shape[1] // k.shape[1]
    lengths = [np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k)]
    q_unit, k_unit = (np.repeat(x / n, R, axis=1) for x, n in zip((q, k), lengths, strict=True))
    q_unit = q_unit * q.shape[-1] ** -0.5
    state, out, states = np.zeros((v.shape[1], k.shape[2], v.shape[2])), np.zeros_like(v), []
    for t in range(len(v)):
        begins = t == 0 or segments_T[t] != segments_T[t - 1]
        before = state * np.where(begins, 0, np.exp(log_decay[t]))[:, None, None]
        states.append((state, before))
        error = v[t] - np.einsum("hkv,hk->hv", before, k_unit[t])
        state = before + np.einsum("hk,hv,h->hkv", k_unit[t], error, strength[t]) if segments_T[t] else state
        out[t] = np.einsum("hkv,hk->hv", state, q_unit[t]) if segments_T[t] else 0
        states[-1] += (state, error)
    d_q, d_k, d_v, d_decay, d_strength = (np.zeros_like(x) for x in (q_unit, k_unit, v, log_decay, strength))
    d_state = np.zeros_like(state)
    for t in reversed(range(len(v))):
        if not segments_T[t]:
            continue
        earlier, before, after, error = states[t]
        d_q[t] = np.einsum("hkv,hv->hk", after, d_out[t])
        d_state = d_state + np.einsum("hk,hv->hkv", q_unit[t], d_out[t])
        d_error = strength[t][:, None] * np.einsum("hkv,hk->hv", d_state, k_unit[t])
        d_strength[t] = np.einsum("hkv,hk,hv->h", d_state, k_unit[t], error)
        d_v[t] = d_error
        d_k[t] = np.einsum("hkv,hv,h->hk", d_state, error, strength[t]) - np.einsum("hkv,hv->hk", before, d_error)
        d_state = d_state - np.einsum("hk,hv->hkv", k_unit[t], d_error)
        begins = t == 0 or segments_T[t] != segments_T[t - 1]
        decay = np.where(begins, 0, np.exp(log_decay[t]))
        d_decay[t] = decay * np.sum(d_state * earlier, axis=(1, 2))
        d_state = d_state * decay[:, None, None]

    def of_length(x: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
        d = d.reshape(*x.shape[:2], R, -1).sum(2)
        return d / n - x * (x * d).sum(-1, keepdims=True) / n**3

    d_q = of_length(q, lengths[0], d_q * q.shape[-1] ** -0.5)
    return out, [d_q, of_length(k, lengths[1], d_k), d_v, d_decay, d_strength]


def computed(
    heads: Arrays, segments: np.ndarray, d_out: np.ndarray, ranks: int = 1
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The output and the gradients of ours, with tokens over ranks."""
    mesh, tokens = Mesh(np.array(jax.devices()[:ranks]), ("cp",)), P(None, "cp")

    def rule(heads: TokenHeads, segments: Any, starts: Any) -> Any:
        return delta_rule(heads, segments, starts, axes=("cp",) if ranks > 1 else ())[0]

    starts = starts_of(jnp.asarray(segments), jnp.zeros((len(segments), 1), jnp.int32))

    @jax.jit
    def both(heads: TokenHeads, d_out: Any) -> Any:
        mapped = jax.shard_map(rule, mesh=mesh, in_specs=(tokens, tokens, tokens), out_specs=tokens)
        out, backward = jax.vjp(lambda heads: mapped(heads, segments, starts), heads)
        return out, backward(d_out)[0]

    out, gradients = both(TokenHeads(*map(jnp.asarray, heads)), d_out)
    return np.asarray(out), [np.asarray(d) for d in gradients]


def apart(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / (np.abs(want).max() or 1.0))


def require_recurrence(heads: Arrays, segments: np.ndarray, d_out: np.ndarray, ranks: int = 1) -> None:
    out, gradients = computed(heads, segments, d_out, ranks)
    rows = [recurrence(tuple(x[b] for x in heads), segments[b], d_out[b]) for b in range(len(segments))]
    assert apart(out, np.stack([row for row, _ in rows])) < 1e-5
    for name, got, *wants in zip(NAMES, gradients, *(by_head for _, by_head in rows), strict=True):
        assert apart(got, np.stack(wants)) < 1e-5, name


@pytest.mark.parametrize(
    "sizes", [(2, 75, 2, 2, 8, 6), (1, 3, 1, 1, 4, 4), pytest.param((1, 2200, 1, 3, 5, 7), marks=pytest.mark.long)]
)
def test_values_and_gradients_are_those_of_the_recurrence(sizes: tuple[int, ...]) -> None:
    """With one token behind whole chunks, several blocks, and samples that begin inside of chunks."""
    require_recurrence(*drawn(*sizes))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4, 8))])
def test_ranks_have_the_states_of_those_before(ranks: int) -> None:
    """A sample may lie on all ranks, and a rank may have padding alone."""
    heads, segments, d_out = drawn(2, 24 * ranks, 1, 2, 6, 5)
    segments[0] = 1
    segments[1, 12 * ranks :] = 0
    require_recurrence(heads, segments, d_out * (segments > 0)[..., None, None], ranks)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_other_samples_change_no_bit(ranks: int) -> None:
    heads, segments, d_out = drawn(1, 144, 1, 2, 6, 5)
    others, _, others_d_out = drawn(1, 144, 1, 2, 6, 5, seed=1)
    is_kept = segments == 3
    assert 1 < is_kept.sum() < 60

    def changed(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.where(is_kept.reshape(1, -1, *[1] * (x.ndim - 2)), x, y)

    out, gradients = computed(heads, segments, d_out, ranks)
    mixed = tuple(map(changed, heads, others))
    out_2, gradients_2 = computed(mixed, segments, changed(d_out, others_d_out), ranks)
    for one, two in zip((out, *gradients), (out_2, *gradients_2), strict=True):
        np.testing.assert_array_equal(one[is_kept], two[is_kept])
        assert (one[~is_kept] != two[~is_kept]).any()


@pytest.mark.long
@pytest.mark.parametrize("number", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_packed_sample_is_what_it_is_alone(number: int) -> None:
    heads, segments, d_out = drawn(1, 144, 1, 2, 6, 5)
    (place,) = np.nonzero(segments[0] == number)
    alone = tuple(x[:, place] for x in heads)
    out, gradients = computed(heads, segments, d_out)
    out_2, gradients_2 = computed(alone, np.ones((1, len(place)), np.int32), d_out[:, place])
    for one, two in zip((out, *gradients), (out_2, *gradients_2), strict=True):
        assert apart(one[:, place], two) < 1e-5


@pytest.mark.long
def test_a_state_goes_on() -> None:
    """In parts of a row, and with a row that has ended: as tokens are generated."""
    heads, _, d_out = drawn(2, 20, 2, 1, 4, 4)
    segments = np.ones((2, 20), np.int32)
    segments[1, 9:] = 0
    want, _ = computed(heads, segments, d_out)
    mesh = Mesh(np.array(jax.devices()[:1]), ("cp",))

    @partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P())
    def in_parts(heads: TokenHeads, segments: Any) -> Any:
        state, outs = None, list[Any]()
        for part in (slice(0, 13), slice(13, 14), slice(14, 20)):
            before = jnp.zeros((2, 1), jnp.int32) if state is None else segments[:, part][:, :1]
            starts = starts_of(segments[:, part], before)
            out, state = delta_rule(TokenHeads(*(x[:, part] for x in heads)), segments[:, part], starts, state=state)
            outs.append(out)
        return jnp.concatenate(outs, axis=1)

    assert apart(np.asarray(jax.jit(in_parts)(TokenHeads(*map(jnp.asarray, heads)), segments)), want) < 1e-6


@pytest.mark.long
def test_work_and_memory_are_in_proportion_to_tokens() -> None:
    """Of forward and backward, from 8k to 64k tokens: products with the turns of loops, and bytes of the program."""
    flops, memory = zip(*(sizes_of_gradient(tokens) for tokens in (8192, 16384, 65536)), strict=True)
    assert (flops[1], flops[2]) == (2 * flops[0], 8 * flops[0])
    assert memory[1] < 2.05 * memory[0] and memory[2] < 8.2 * memory[0]
    # A state is kept for each block of 1,024 tokens, so that bytes are those of tokens above all.
    assert memory[2] < 65536 * 5000


def sizes_of_gradient(tokens: int) -> tuple[int, int]:
    """FLOPs of products and temporary bytes of the rule with its gradient: two value heads of 16 x 16."""
    shapes = [(1, tokens, 1, 16), (1, tokens, 1, 16), (1, tokens, 2, 16), (1, tokens, 2), (1, tokens, 2)]
    arrays: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    heads = TokenHeads(*arrays)
    segments = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    mesh = Mesh(np.array(jax.devices()[:1]), ("cp",))

    def rule(heads: TokenHeads, segments: Any) -> Any:
        return delta_rule(heads, segments, starts_of(segments, jnp.zeros_like(segments[:, :1])))[0]

    def loss(heads: TokenHeads, segments: Any) -> Any:
        return jnp.sum(jax.shard_map(rule, mesh=mesh, in_specs=P(), out_specs=P())(heads, segments))

    gradient = jax.jit(jax.grad(loss))
    memory = gradient.lower(heads, segments).compile().memory_analysis()
    assert memory is not None
    return products(jax.make_jaxpr(gradient)(heads, segments).jaxpr), memory.temp_size_in_bytes


def products(jaxpr: Any) -> int:
    """FLOPs of all products, with the turns of loops."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            width = np.prod([equation.invars[0].aval.shape[dimension] for dimension in contracted], initial=1)
            total += 2 * int(width * np.prod(equation.outvars[0].aval.shape))
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += turns * sum(products(inner) for inner in inner_jaxprs(equation))
    return total


@pytest.mark.long
def test_a_convolution_reads_no_other_sample() -> None:
    """Values and gradients of a packed row are those of its samples alone, and of shifts by hand."""
    rng = np.random.default_rng(0)
    x, filters, d_y = (rng.normal(size=size).astype(np.float32) for size in ((1, 20, 3), (3, 4), (1, 20, 3)))
    segments = np.array([[1] * 2 + [2] * 9 + [3] * 6 + [0] * 3])
    mesh = Mesh(np.array(jax.devices()[:1]), ("cp",))

    @jax.jit
    def ours(x: Any, filters: Any, d_y: Any, segments: Any) -> Any:
        padded = jnp.pad(segments, ((0, 0), (3, 0)))
        mapped = jax.shard_map(
            lambda x, filters: short_convolution(jnp.pad(x, ((0, 0), (3, 0), (0, 0))), filters, padded),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
        )
        y, backward = jax.vjp(mapped, x, filters)
        return y, *backward(d_y)

    def alone(x: Any, filters: Any) -> Any:
        padded = jnp.pad(x, ((3, 0), (0, 0)))
        return jax.nn.silu(sum(padded[tap : tap + len(x)] * filters[:, tap] for tap in range(4)))

    got = ours(x, filters, d_y, segments)
    d_filters = 0
    for number in (1, 2, 3):
        place = segments[0] == number
        y, backward = jax.vjp(alone, x[0, place], filters)
        d_x, d = backward(d_y[0, place])
        d_filters += d
        np.testing.assert_allclose(got[0][0, place], y, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1][0, place], d_x, rtol=1e-5, atol=1e-6)
    place = segments[0] == 0
    _, backward = jax.vjp(alone, x[0, place], filters)
    np.testing.assert_allclose(got[2], d_filters + backward(d_y[0, place])[1], rtol=1e-5, atol=1e-5)
