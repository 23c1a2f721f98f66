"""The key/value cache: keys and values of earlier tokens of rows, for the attention of new tokens.

Modules do not know of the cache: their layers call ``Context.attend`` as in training, which reads and extends it. A
token's place in the cache is its order in its row, so only the host knows a row's length. Layers that keep a state in
place of keys and values store it themselves; it has no places, and a step replaces it.

Shapes: B rows, S places of a row, T new tokens, G key/value heads, K width of keys, V of values (local to
this rank); L layers of a stack, where layers are stacked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax.attention.tokens import Tokens

Pair = tuple[Float[Array, "*L B S G K"], Float[Array, "*L B S G V"]]
"""Keys and values of one call of attention, of a layer or of a stack of layers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """A layer's state behind the last token, of a stack of layers where layers are stacked.

    Attributes:
      arrays: arrays ``[*L, B, N, H, V]``, of which tp splits the heads H.
    """

    arrays: tuple[Float[Array, "*L B N H V"], ...]


Entry = Pair | State
"""What a call in a layer leaves."""
Layers = Mapping[str, Sequence[Entry]]
"""Entries by the name of a stack of layers, or of a layer that is not stacked: one for each call."""


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
        self.tokens, self.new = tokens, dict[str, Sequence[Entry]]()
        self._cached, self._all_tokens = cached_layers or {}, tokens
        if cached_inputs is not None:
            self._all_tokens = _concatenated(cached_inputs, tokens)
        self._open: tuple[Iterator[Entry], list[Entry]] | None = None

    def cached(self, name: str) -> Sequence[Entry]:
        """The cached keys and values, or states, of the layers of this name, one for each call; () at the beginning of
        rows.
        """
        return self._cached.get(name, ())

    @contextlib.contextmanager
    def layer(self, cached: Sequence[Entry]) -> Iterator[list[Entry]]:
        """A context in which one layer is traced; it yields a list that has the layer's new entries afterwards: pairs
        of keys and values, or states.

        ``cached`` are the layer's cached entries, one for each of its calls; () at the beginning of rows.
        """
        new: list[Entry] = []
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
        cached, new = self._layer()
        new.append((k_BTGK, v_BTGV))
        if self._is_beginning:
            return k_BTGK, v_BTGV, self.tokens
        pair: Any = next(cached)
        k_BSGK, v_BSGV = pair
        return jnp.concatenate([k_BSGK, k_BTGK], 1), jnp.concatenate([v_BSGV, v_BTGV], 1), self._all_tokens

    def of_layer(self, name: str) -> tuple[Array, Array, Tokens]:
        """Keys, values and tokens that new tokens attend to in the last of the layers of this name, which have run.

        They are those of the layer's only call of attention; see ``extended``.
        """
        new: Any = self.new[name][0]
        k_BTGK, v_BTGV = (x[-1] if x.ndim == len("LBTGK") else x for x in new)
        if self._is_beginning:
            return k_BTGK, v_BTGV, self.tokens
        cached: Any = self.cached(name)[0]
        k_BSGK, v_BSGV = (x[-1] if x.ndim == len("LBSGK") else x for x in cached)
        return jnp.concatenate([k_BSGK, k_BTGK], 1), jnp.concatenate([v_BSGV, v_BTGV], 1), self._all_tokens

    def state(self) -> tuple[Array, ...] | None:
        """The arrays of the layer's cached ``State``; ``None`` at the beginning of rows. To be called inside ``layer``,
        before ``store``.

        Raises:
          ValueError: no layer is being traced.
        """
        cached, _ = self._layer()
        if self._is_beginning:
            return None
        state: Any = next(cached)
        return state.arrays

    def store(self, state: State) -> None:
        """Stores the layer's state behind the new tokens, inside ``layer``; rows without new tokens keep theirs.

        Raises:
          ValueError: no layer is being traced.
        """
        self._layer()[1].append(state)

    def _layer(self) -> tuple[Iterator[Entry], list[Entry]]:
        if self._open is None:
            raise ValueError("attention outside of layers has no cache: call Context.attend in the module's layers")
        return self._open

    @property
    def _is_beginning(self) -> bool:
        return self._all_tokens is self.tokens


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
