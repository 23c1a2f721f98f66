"""What the kernels of libraries have in common: what they are asked, and the runs of tokens that they work on.

Shapes: B rows, T tokens that ask, S tokens that are asked, H query heads, G key/value heads, K head width, N the most
runs of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mmjax import jax_compat
from mmjax.attention.by_hand import ByHand, Known
from mmjax.attention.mask import Columns, Mask
from mmjax.attention.settings import LIBRARIES
from mmjax.attention.tokens import Tokens, filled, picked


@dataclass(frozen=True)
class Asked:
    """One call of attention, as far as it is known when a program is traced.

    Attributes:
      platform, device_kind: of the devices that the program is for, such as "gpu" and "NVIDIA H100 80GB HBM3".
      mask: which tokens see which.
      dtype: of queries.
      queries, keys: their numbers in a row.
      heads, groups, width: heads of queries, heads of keys, width of one.
      cp_way: how keys of other ranks are brought, a key of ``exchange.WAYS``; "" where rows are whole.
      by_index: whether a token's place in its row is its index, and keys are the queries' own.
    """

    platform: str
    device_kind: str
    mask: Mask
    dtype: str
    queries: int
    keys: int
    heads: int
    groups: int
    width: int
    cp_way: str = ""
    by_index: bool = True

    @classmethod
    def of(
        cls,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        tokens: Tokens,
        mask: Mask,
        keys: Tokens | None = None,
        cp_way: str = "",
    ) -> Asked:
        """The call with these arguments, for the devices of the trace; with ``cp_way`` those of one rank."""
        platform, kind = jax_compat.traced_devices()
        T, H, K = q_BTHK.shape[1:]
        S, G = k_BSGK.shape[1:3]
        by_index = not cp_way and (keys is None or keys is tokens) and "order" not in tokens.inputs
        return cls(platform, kind, mask, str(q_BTHK.dtype), T, S, H, G, K, cp_way, by_index)

    def named(self, *words: str) -> bool:
        """Whether one of the words is in the device's name, such as "H100"."""
        return not {*words}.isdisjoint(self.device_kind.replace("-", " ").split())

    @property
    def window(self) -> int:
        """The window, 0 where it hides nothing of a row."""
        return self.mask.window if self.cp_way or self.mask.window < self.queries else 0


@dataclass(frozen=True)
class Kernel(ByHand):
    """A library's way to compute attention.

    Attributes:
      by_index: whether tokens stand in the order of their rows, and queries and keys are of the same tokens.
      LIBRARY: its key in ``settings.LIBRARIES``.
      DEVICES: a device that it runs on has one of these words in its name.
    """

    by_index: bool = True
    LIBRARY: ClassVar[str]
    DEVICES: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, asked: Asked) -> Self:
        """The way of a call without ``refusal``."""
        return cls(replace(asked.mask, window=asked.window), asked.by_index)

    @classmethod
    def refusal(cls, asked: Asked) -> str:
        """Why the library does not compute a call; "" where it does."""
        library = LIBRARIES[cls.LIBRARY]
        if asked.platform != "gpu" or not asked.named(*cls.DEVICES):
            return f"{library.name} runs on {library.devices} and this is {asked.device_kind}"
        if asked.dtype not in library.dtypes:
            return f"{library.name} takes {' and '.join(library.dtypes)} and queries are {asked.dtype}"
        if not asked.by_index and not asked.cp_way:
            return f"{library.name} reads a token's place from its index, and rows are cut or permuted"
        return library.refusal(asked.width, asked.mask.grid_window, asked.mask.kind, asked.cp_way)

    @classmethod
    def found(cls, mask: Mask, asking: Known, asked: Known, *, by_index: bool) -> Known:
        """Arrays that ``forward`` and ``backward`` read of ``asking``, made once for all layers with a mask.

        Args:
          mask: which tokens see which.
          asking, asked: what is known of queries and of keys.
          by_index: see ``Kernel``.
        """
        del mask, asking, asked, by_index
        return {}


def starts(segments_BT: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a run begins at each token: tokens of one segment side by side, padding too."""
    before_BT = jnp.concatenate([jnp.full_like(segments_BT[:, :1], -1), segments_BT[:, :-1]], axis=1)
    return segments_BT != before_BT


def runs(segments_BT: Int[Array, "B T"], most: int) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """First token and length of each run, in all rows one after another; (B·T, 0) where there are no more.

    Args:
      segments_BT: see ``Tokens``.
      most: the size N of the results; further runs are left out.
    """
    total = segments_BT.size
    (first_N,) = jnp.nonzero(starts(segments_BT).reshape(-1), size=most, fill_value=total)
    ends_N = jnp.concatenate([first_N[1:], jnp.full_like(first_N[:1], total)])
    return first_N.astype(jnp.int32), (ends_N - first_N).astype(jnp.int32)


def intervals(segments_BT: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """First token of each token's run, and the one behind its last, by their indices in the row."""
    T = segments_BT.shape[1]
    index_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), segments_BT.shape)
    starts_BT = starts(segments_BT)
    first_BT = lax.cummax(jnp.where(starts_BT, index_BT, 0), axis=1)
    next_BT = jnp.concatenate([jnp.where(starts_BT, index_BT, T)[:, 1:], jnp.full_like(index_BT[:, :1], T)], axis=1)
    return first_BT, lax.cummin(next_BT, axis=1, reverse=True)


# ---- tokens in another order than that of their rows -----------------------------------------------------------------


@dataclass(frozen=True)
class Sequence:
    """Keys that are put where their tokens stand in their rows, and back.

    Attributes:
      places_BS: for each place, the index of the key that stands there; ``None`` where keys stand at their places.
      back_BS: for each key, its place.
    """

    places_BS: Int[Array, "B S"] | None = None
    back_BS: Int[Array, "B S"] | None = None

    @classmethod
    def of(cls, asked: Known, *, by_index: bool = False) -> Sequence:
        """By the order of tokens, which are the places of a row; where a mask reads none, segment by segment."""
        if by_index:
            return cls()
        if "order" not in asked:
            places_BS = jnp.argsort(asked["segments"], axis=1, stable=True).astype(jnp.int32)
            return cls(places_BS, _reversed(places_BS))
        return cls(_reversed(asked["order"]), asked["order"])

    def put(self, x_BS: Array) -> Array:
        """What is known of keys, in the order of their rows."""
        return x_BS if self.places_BS is None else picked(x_BS, self.places_BS)

    def back(self, x_BS: Array) -> Array:
        """The reverse of ``put``."""
        return x_BS if self.back_BS is None else picked(x_BS, self.back_BS)


def _reversed(order_BS: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """The reverse of an order, without sorting."""

    def of_row(order_S: Array) -> Array:
        index_S = lax.broadcasted_iota(jnp.int32, order_S.shape, 0)
        return jnp.zeros_like(index_S).at[order_S].set(index_S, unique_indices=True, mode="promise_in_bounds")

    return jax.vmap(of_row)(order_BS)


def seen_runs(
    mask: Mask, asking: Known, asked: Known, block: int = 128
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, ""]]:
    """The first key that each query sees and the one behind its last; and whether it sees all keys between these.

    It looks at all pairs, some queries at a time, and keeps two numbers a query. Padding gets the first key.

    Args:
      mask: which tokens see which.
      asking, asked: what is known of queries and of keys.
      block: queries at a time.
    """
    own, others = (mask.columns(Tokens.of(one)) for one in (asking, asked))
    index_S = jnp.arange(others.segments.shape[1], dtype=jnp.int32)
    T, block = own.segments.shape[1], min(block, own.segments.shape[1])

    def of_block(columns: Columns) -> tuple[Array, Array, Array]:
        allowed_BtS = mask.allowed(columns, others) & (columns.segments > 0)[..., None]
        first_Bt = jnp.where(allowed_BtS, index_S, len(index_S)).min(axis=-1)
        last_Bt = jnp.where(allowed_BtS, index_S + 1, 0).max(axis=-1)
        is_run_Bt = allowed_BtS.sum(axis=-1, dtype=jnp.int32) == last_Bt - first_Bt
        real_Bt = columns.segments > 0
        return jnp.where(real_Bt, first_Bt, 0), jnp.where(real_Bt, last_Bt, 1), is_run_Bt | ~real_Bt

    def cut(x_BT: Array) -> Array:
        x_BT = filled(x_BT, block)
        return jnp.moveaxis(x_BT.reshape(len(x_BT), -1, block, *x_BT.shape[2:]), 1, 0)

    found = lax.map(of_block, jax.tree.map(cut, own))
    first_BT, last_BT, is_run_BT = (jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :T] for x in found)
    return first_BT, last_BT, is_run_BT.all()
