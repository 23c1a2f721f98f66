"""The key/value cache: keys and values of earlier tokens of rows, for the attention of new tokens.

Modules do not know of the cache: their layers call ``Context.attend`` as in training, which reads and extends it. A
token's place in the cache is its order in its row, so only the host knows a row's length.

Shapes: B rows, S places of a row, T new tokens, G key/value heads, K width of keys, V of values (local to
this rank); L layers of a stack, where layers are stacked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax.attention.tokens import Tokens

Pair = tuple[Float[Array, "*L B S G K"], Float[Array, "*L B S G V"]]
"""Keys and values of one call of attention, of a layer or of a stack of layers."""
Layers = Mapping[str, Sequence[Pair]]
"""Pairs by the name of a stack of layers, or of a layer that is not stacked: one for each attention call."""


class Cache:
    """The cache of a stage while its program is traced.

    Attributes:
      tokens: the new tokens.
      new: keys and values of the new tokens, once their layers have run.
    """

    def __init__(
        self, tokens: Tokens, cached_inputs: Mapping[str, Array] | None = None, cached_layers: Layers | None = None
    ):
        """Starts with the keys and values of ``cached_layers``, or empty at the beginning of rows.

        ``cached_inputs`` are the host inputs of the cached tokens by name, ``[B, S]`` or ``[B, S, A]``, with "segments"
        among them; empty places have segment 0.
        """
        self.tokens, self.new = tokens, dict[str, Sequence[Pair]]()
        self._cached, self._all_tokens = cached_layers or {}, tokens
        if cached_inputs is not None:
            self._all_tokens = _concatenated(cached_inputs, tokens)
        self._open: tuple[Iterator[Pair], list[Pair]] | None = None

    def cached(self, name: str) -> Sequence[Pair]:
        """The cached keys and values of the layers of this name, a pair for each attention call; () at the beginning of
        rows.
        """
        return self._cached.get(name, ())

    @contextlib.contextmanager
    def layer(self, cached: Sequence[Pair]) -> Iterator[list[Pair]]:
        """A context in which one layer is traced; it yields a list that has the layer's new pairs of keys and values
        afterwards.

        ``cached`` are the layer's cached pairs, one for each of its attention calls; () at the beginning of rows.
        """
        new: list[Pair] = []
        self._open = iter(cached), new
        try:
            yield new
        finally:
            self._open = None

    def extended(self, k_BTGK: Array, v_BTGV: Array) -> tuple[Array, Array, Tokens]:
        """Keys, values and tokens that new tokens attend to: the layer's cached ones, followed by the new ones.

        ``k_BTGK`` and ``v_BTGV`` are of the new tokens. The results are ``[B, S + T, G, K]``, or ``[B, T, G, K]`` at
        the beginning of rows. To be called inside ``layer``, once for each attention call; it appends the new pair to
        the list of ``layer``.

        Raises:
          ValueError: no layer is being traced.
        """
        if self._open is None:
            raise ValueError("attention outside of layers has no cache: call Context.attend in the module's layers")
        cached, new = self._open
        new.append((k_BTGK, v_BTGV))
        if self._all_tokens is self.tokens:
            return k_BTGK, v_BTGV, self.tokens
        k_BSGK, v_BSGV = next(cached)
        return jnp.concatenate([k_BSGK, k_BTGK], 1), jnp.concatenate([v_BSGV, v_BTGV], 1), self._all_tokens


def _concatenated(cached_inputs: Mapping[str, Array], tokens: Tokens) -> Tokens:
    """The cached tokens, followed by the new ones."""
    order_BS = lax.broadcasted_iota(jnp.int32, cached_inputs["segments"].shape, 1)
    inputs = {name: jnp.concatenate([cached, tokens.inputs[name]], 1) for name, cached in cached_inputs.items()}
    return Tokens.of({**inputs, "order": jnp.concatenate([order_BS, tokens.orders_BT], 1)})


def updated(cached: Array, new: Array, order_BT: Int[Array, "B T"]) -> Array:
    """A copy of cached keys, values or host inputs, with those of new tokens written at their places.

    Args:
      cached: an array of S places a row: ``[B, S]``, ``[B, S, A]``, ``[B, S, G, K]``, or of L layers ``[L, B, S, G,
        K]``.
      new: the same of new tokens, with T in place of S.
      order_BT: the places of the new tokens, from 0; a token whose place is S or more is dropped.
    """
    layers = (slice(None),) * (cached.ndim == len("LBSGK"))
    rows_B1 = lax.broadcasted_iota(jnp.int32, (len(order_BT), 1), 0)
    return cached.at[(*layers, rows_B1, order_BT)].set(new, mode="drop")
