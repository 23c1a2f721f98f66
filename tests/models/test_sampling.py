"""The choice of the next token: greedy, and by chance among the likeliest, with the vocabulary split over tp."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from spmd_runs import AXES, on_tp

from mmjax.models.sampling import SamplingParams, next_token

VOCAB, PADDED = 13, 16


def logits(rows: int, seed: int = 0) -> np.ndarray:
    """Padded to what four ranks share."""
    found = np.full((rows, PADDED), -1e30, np.float32)
    found[:, :VOCAB] = np.random.default_rng(seed).normal(size=(rows, VOCAB)) * 1.5
    return found


def choice(
    rows: int, *, temperature: float = 0.0, top_p: float = 1.0, seed: Any = 0, number: Any = 0
) -> SamplingParams:
    every: Any = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))  # noqa: E731
    return SamplingParams(
        last=every(0, jnp.int32),
        temperature=every(temperature, jnp.float32),
        top_p=every(top_p, jnp.float32),
        seed=every(seed, jnp.uint32),
        number=every(number, jnp.int32),
    )


@cache
def program(tp: int) -> Any:
    """``next_token`` over so many ranks."""
    specs, out = (P(None, "tp"), P()), (P(), P())
    return jax.jit(lambda z, how: on_tp(tp, lambda z, c: next_token(z, c, AXES), z, how, specs=specs, out=out))


def chosen(given: np.ndarray, how: SamplingParams, tp: int = 1) -> tuple[np.ndarray, np.ndarray]:
    found = program(tp)(jnp.asarray(given), how)
    return np.asarray(found[0]), np.asarray(found[1])


def log_softmax(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) - wide.max(1, keepdims=True)


@pytest.mark.parametrize("tp", [1, 4])
def test_no_temperature_takes_the_likeliest(tp: int) -> None:
    given = logits(5)
    tokens, logprobs = chosen(given, choice(5), tp)
    np.testing.assert_array_equal(tokens, given.argmax(1))
    np.testing.assert_allclose(logprobs, log_softmax(given[:, :VOCAB]).max(1), rtol=1e-5)


@pytest.mark.long
def test_chance_depends_on_seed_and_place_alone() -> None:
    """Not on the cut of the vocabulary, nor on the rows beside."""
    given, seeds, numbers = logits(6), [3, 3, 4, 5, 6, 7], [0, 1, 0, 0, 2, 3]
    about = dict(temperature=1.5, top_p=0.9)
    whole, logprobs = chosen(given, choice(6, seed=seeds, number=numbers, **about))
    again, same = chosen(given, choice(6, seed=seeds, number=numbers, **about), tp=4)
    np.testing.assert_array_equal(again, whole)
    np.testing.assert_allclose(same, logprobs, rtol=1e-5)
    for row in range(6):
        alone, _ = chosen(given[row : row + 1], choice(1, seed=seeds[row], number=numbers[row], **about))
        assert alone[0] == whole[row]
    np.testing.assert_allclose(logprobs, log_softmax(given[:, :VOCAB])[np.arange(6), whole], rtol=1e-5)
    assert len({*chosen(np.repeat(given[:1], 40, 0), choice(40, seed=range(40), temperature=1.5))[0]}) > 3
    assert len({*chosen(np.repeat(given[:1], 40, 0), choice(40, number=range(40), temperature=1.5))[0]}) > 3


def test_tokens_come_as_often_as_they_are_likely() -> None:
    """Among those of the smallest set that makes up ``top_p``, in proportion to their tempered probabilities."""
    rows, one = 4000, logits(1, seed=1)
    for temperature, top_p in ((0.7, 1.0), (1.3, 0.8)):
        likely = np.exp(log_softmax(one[:, :VOCAB] / temperature))[0]
        order = np.argsort(-likely)
        count = int(np.searchsorted(np.cumsum(likely[order]), top_p)) + 1
        kept = order[:count] if top_p < 1 else order
        want = np.zeros(VOCAB)
        want[kept] = likely[kept] / likely[kept].sum()
        how = choice(rows, seed=range(rows), temperature=temperature, top_p=top_p)
        tokens, _ = chosen(np.repeat(one, rows, 0), how)
        found = np.bincount(tokens, minlength=VOCAB) / rows
        assert len(kept) > 1 and not found[want == 0].any()
        np.testing.assert_allclose(found, want, atol=4 * np.sqrt(0.25 / rows))


def test_a_row_of_chance_beside_a_greedy_one() -> None:
    given = logits(2)
    how = choice(2, temperature=1.0, seed=1)._replace(temperature=jnp.asarray([0.0, 1.0], jnp.float32))
    tokens, _ = chosen(given, how)
    assert tokens[0] == given[0].argmax()
    assert tokens[1] == chosen(given[1:], choice(1, temperature=1.0, seed=1))[0][0]


def test_equal_logits_are_kept_together() -> None:
    """No order of equal tokens decides which of them may come."""
    given = np.zeros((200, PADDED), np.float32)
    given[:, VOCAB:] = -1e30
    tokens, _ = chosen(given, choice(200, seed=range(200), temperature=1.0, top_p=0.1))
    assert {*tokens.tolist()} == {*range(VOCAB)}
