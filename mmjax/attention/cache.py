"""Keys and values of the tokens that rows hold already, for the attention of those that follow.

A module does not know of it: its layers call ``Context.attend`` as in training, which reads and extends the cache. A
token's place in the cache is its order in its row, so a row's length is known to nobody but the host.

Shapes: B rows, S places of a row, T tokens that are new, G key/value heads, K head width (local to this rank); L layers
of a stack, where layers are stacked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax.attention.tokens import Tokens

Pair = tuple[Float[Array, "*L B S G K"], Float[Array, "*L B S G K"]]
"""Keys and values of one call of attention, of a layer or of a stack of layers."""
Layers = Mapping[str, Sequence[Pair]]
"""By stack of layers, or by layer where they are not stacked: a pair for each call that a layer makes, in order."""


class Cache:
    """The cache of a stage while its program is traced.

    Attributes:
      tokens: what is known of the new tokens.
      new: keys and values of the new tokens, once their layers have run.
    """

    def __init__(self, tokens: Tokens, known: Mapping[str, Array] | None = None, held: Layers | None = None):
        """``known`` are host inputs of the tokens ``held``, segment 0 where there is none; without any rows begin."""
        self.tokens, self.new = tokens, dict[str, Sequence[Pair]]()
        self._held, self._keys = held or {}, tokens
        if known is not None:
            self._keys = _joined(known, tokens)
        self._open: tuple[Iterator[Pair], list[Pair]] | None = None

    def held(self, name: str) -> Sequence[Pair]:
        """What layers of this name hold; nothing where the rows begin."""
        return self._held.get(name, ())

    @contextlib.contextmanager
    def layer(self, held: Sequence[Pair]) -> Iterator[list[Pair]]:
        """A context in which one layer is traced; its pairs of new keys and values are in the list afterwards."""
        new: list[Pair] = []
        self._open = iter(held), new
        try:
            yield new
        finally:
            self._open = None

    def extended(self, k_BTGK: Array, v_BTGK: Array) -> tuple[Array, Array, Tokens]:
        """Keys, values and tokens that new tokens attend to: those that the layer holds, and their own.

        Raises:
          ValueError: no layer is traced, so nothing is known of earlier tokens.
        """
        if self._open is None:
            raise ValueError("attention outside of layers has no cache: call Context.attend in the module's layers")
        held, new = self._open
        new.append((k_BTGK, v_BTGK))
        if self._keys is self.tokens:
            return k_BTGK, v_BTGK, self.tokens
        k_BSGK, v_BSGK = next(held)
        return jnp.concatenate([k_BSGK, k_BTGK], 1), jnp.concatenate([v_BSGK, v_BTGK], 1), self._keys


def _joined(known: Mapping[str, Array], tokens: Tokens) -> Tokens:
    """Cached tokens, and the new ones behind them."""
    order_BS = lax.broadcasted_iota(jnp.int32, known["segments"].shape, 1)
    joined = {name: jnp.concatenate([own, tokens.inputs[name]], 1) for name, own in known.items()}
    return Tokens.of({**joined, "order": jnp.concatenate([order_BS, tokens.orders_BT], 1)})


def written(held: Array, new: Array, order_BT: Int[Array, "B T"]) -> Array:
    """Keys, values or host inputs with those of new tokens at their places.

    Args:
      held: ``[B, S]``, ``[B, S, A]``, ``[B, S, G, K]`` or ``[L, B, S, G, K]``.
      new: the same of new tokens, T in place of S.
      order_BT: their places; one that is S or more is not written.
    """
    layers = (slice(None),) * (held.ndim == len("LBSGK"))
    rows_B1 = lax.broadcasted_iota(jnp.int32, (len(order_BT), 1), 0)
    return held.at[(*layers, rows_B1, order_BT)].set(new, mode="drop")
