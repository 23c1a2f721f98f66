"""What the kernels of libraries have in common: what they are asked, and the runs of tokens that they work on.

Shapes: B rows, T tokens, H query heads, G key/value heads, K head width, N the most runs of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mmjax import jax_compat
from mmjax.attention.mask import Mask
from mmjax.attention.settings import Library
from mmjax.attention.tokens import Tokens


@dataclass(frozen=True)
class Asked:
    """One call of attention, as far as it is known when a program is traced.

    Attributes:
      platform, device_kind: of the devices that the program is for, such as "gpu" and "NVIDIA H100 80GB HBM3".
      mask: which tokens see which.
      dtype: of queries.
      queries, keys: their numbers in a row.
      heads, groups, width: heads of queries, heads of keys, width of one.
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
    by_index: bool

    @classmethod
    def of(
        cls,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        tokens: Tokens,
        mask: Mask,
        keys: Tokens | None = None,
    ) -> Asked:
        """The call with these arguments, for the devices of the trace."""
        platform, kind = jax_compat.traced_devices()
        T, H, K = q_BTHK.shape[1:]
        S, G = k_BSGK.shape[1:3]
        by_index = (keys is None or keys is tokens) and "order" not in tokens.inputs
        return cls(platform, kind, mask, str(q_BTHK.dtype), T, S, H, G, K, by_index)

    def named(self, *words: str) -> bool:
        """Whether one of the words is in the device's name, such as "H100"."""
        return not {*words}.isdisjoint(self.device_kind.replace("-", " ").split())

    @property
    def window(self) -> int:
        """The window, 0 where it hides nothing of a row."""
        return self.mask.window if self.mask.window < self.queries else 0


def refusal(asked: Asked, library: Library, *words: str) -> str:
    """Why a library's kernel does not compute this; "" where it does.

    Args:
      asked: the call.
      library: what the library takes.
      words: a device of the library has one of them in its name.
    """
    if asked.platform != "gpu" or not asked.named(*words):
        return f"{library.name} runs on {library.devices} and this is {asked.device_kind}"
    if asked.dtype not in library.dtypes:
        return f"{library.name} takes {' and '.join(library.dtypes)} and queries are {asked.dtype}"
    if not asked.by_index:
        return f"{library.name} reads a token's place from its index, and rows are cut or permuted"
    return library.refusal(asked.width, asked.mask.grid_window, asked.mask.kind)


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
