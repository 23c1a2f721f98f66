"""The context of a stage's run: mesh axes, host inputs, and attention.

Modules know neither how rows are placed on devices nor which backend computes attention: the context binds both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.attention.backends import AUTO_BACKEND, Backend
from mmjax.attention.cache import Cache
from mmjax.attention.custom_vjp import TokenInfo
from mmjax.attention.exchange import gather_tokens
from mmjax.attention.mask import Mask, MaskKind
from mmjax.attention.tokens import Tokens
from mmjax.mesh.spread import Axes
from mmjax.models.recorded_work import record_attention

Inputs = Mapping[str, Array]
"""Host inputs of one microbatch for one module, local rows."""


class SharedKeys(NamedTuple):
    """Keys and values of a layer that later layers read.

    Attributes:
      k, v: of this rank's heads, with cached ones in front of those of new tokens.
      tokens: their tokens, with a cache; else ``None`` for the context's own.
    """

    k: Float[Array, "B S G K"]
    v: Float[Array, "B S G V"]
    tokens: Tokens | None = None


@dataclass(frozen=True)
class Context:
    """The surroundings of a stage's layers.

    Attributes:
      axes: mesh axes by role.
      inputs: the stage's host inputs, of the tokens whose features this rank has between a layer's products.
      tokens: the tokens that products and attention see, with their ``inputs``. They are the same as those of
        ``inputs`` without sequence parallelism (``Axes.sp``), and those of all tp ranks with it.
      mask: the attention mask.
      backend: the attention backend; with a cache attention is always blockwise.
      cache: keys and values of earlier tokens, while text is generated; else ``None``.
      row_tokens: the tokens of complete rows, in layers whose rows are split over ranks (see ``gather_tokens``).
      precomputed: the backend's arrays for the mask (see ``Backend.precompute``).
      stored: where ``attend`` puts its keys and values, in layers whose keys later layers read; else ``None``.
      shared: the keys and values that ``attend_shared`` reads, in such later layers.
    """

    axes: Axes
    inputs: Inputs
    tokens: Tokens
    mask: Mask
    backend: Backend = AUTO_BACKEND
    cache: Cache | None = None
    row_tokens: Tokens | None = None
    precomputed: TokenInfo | None = None
    stored: list[SharedKeys] | None = None
    shared: SharedKeys | None = None

    @classmethod
    def of(cls, axes: Axes, inputs: Inputs, kind: MaskKind, backend: Backend = AUTO_BACKEND) -> Context:
        """The context of a microbatch; its inputs include "segments", and optionally "positions" and "order".

        Args:
          axes: mesh axes by role.
          inputs: host inputs by name, ``[B, T]`` or ``[B, T, A]``, of this rank's rows, with the tokens of all tp
            ranks.
          kind: the kind of the mask.
          backend: the attention backend.
        """
        tokens = Tokens.of(inputs, axes.positions)
        return cls(axes, {name: _local_tokens(x, axes.sp) for name, x in inputs.items()}, tokens, Mask(kind), backend)

    def under(self, mask: Mask) -> Context:
        """A copy for layers with this mask.

        Tokens of complete rows are gathered, and the backend's arrays computed, once for all of these layers.
        """
        axes, cp_way = self.axes.positions, self.axes.cp_way
        row_tokens = gather_tokens(self.tokens, mask, axes, cp_way) if axes else None
        precomputed = self.backend.precompute(mask, self.tokens, row_tokens, cp_way) if self.cache is None else None
        return replace(self, mask=mask, row_tokens=row_tokens, precomputed=precomputed)

    def gather_rows(self, x_BT: Array) -> Array:
        """An array ``[B, S, ...]`` of the tokens of complete rows, such as a host input, from this rank's tokens ``[B,
        T, ...]``.
        """
        return jax_compat.all_gather_invariant(x_BT, self.axes.stream, 1) if self.axes.stream else x_BT

    def part_of(self, places: int) -> int:
        """This rank's number of a row's ``places``; ranks that split rows have equal parts."""
        return places // lax.axis_size(self.axes.positions) if self.axes.positions else places

    def largest(self, x_BT: Array) -> Array:
        """The largest value of each row ``[B]``, from this rank's part of it."""
        x_B = jnp.max(x_BT, axis=1)
        return lax.pmax(x_B, self.axes.positions) if self.axes.positions else x_B

    @property
    def unshared(self) -> Context:
        """A copy for computations that all tp ranks repeat for all of their tokens: without sequence parallelism."""
        return replace(self, axes=self.axes.unshared, inputs=self.tokens.inputs)

    def gather_sp(self, x_BTD: Array) -> Array:
        """Features of the tokens of all tp ranks, from this rank's: the all-gather of sequence parallelism. Else
        ``x_BTD`` itself.
        """
        return jax_compat.all_gather_invariant(x_BTD, self.axes.sp, 1) if self.axes.sp else x_BTD

    def split_sp(self, x_BTD: Array) -> Array:
        """This rank's tokens of sequence parallelism, from features that are equal on all tp ranks. Else ``x_BTD``
        itself.
        """
        return _local_tokens(x_BTD, self.axes.sp)

    def attend(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G V"],
        *,
        soft_cap: float = 0.0,
    ) -> Float[Array, "B T H V"]:
        """Attention of queries to keys and values, cached ones included, under the mask; inside ``shard_map``.

        Queries, keys and values are of ``tokens``, with this rank's heads; H is a multiple of G, and rotary embedding
        is applied already. A library's kernel takes no values of another width than keys. A ``soft_cap`` c above 0
        makes a score s into c · tanh(s / c).

        Raises:
          ConfigError: the backend is a kernel that does not support these arrays, the mask or the devices.
        """
        if self.stored is not None:
            self.stored.append(SharedKeys(k, v))
        record_attention(q, v, self.mask)
        if axes := self.axes.positions:
            cp_way = self.axes.cp_way
            keys = self.row_tokens or gather_tokens(self.tokens, self.mask, axes, cp_way)
            return self.backend.attend_across_ranks(
                q,
                k,
                v,
                self.tokens,
                self.mask,
                keys,
                axes=axes,
                cp_way=cp_way,
                precomputed=self.precomputed,
                soft_cap=soft_cap,
            )
        if self.cache is None:
            precomputed = self.precomputed
            return self.backend.attend(q, k, v, self.tokens, self.mask, precomputed=precomputed, soft_cap=soft_cap)
        k, v, keys = self.cache.extended(k, v)
        return Backend("blockwise").attend(q, k, v, self.tokens, self.mask, keys, soft_cap=soft_cap)

    def attend_shared(self, q: Float[Array, "B T H K"], *, soft_cap: float = 0.0) -> Float[Array, "B T H V"]:
        """``attend`` to the keys and values of an earlier layer, ``shared``.

        Raises:
          ValueError: no layer before in this stage has stored them.
        """
        if self.shared is None:
            raise ValueError("no layer of this stage has stored keys and values")
        k, v, keys = self.shared
        if self.cache is None:
            return self.attend(q, k, v, soft_cap=soft_cap)
        record_attention(q, v, self.mask)
        return Backend("blockwise").attend(q, k, v, self.tokens, self.mask, keys, soft_cap=soft_cap)


def _local_tokens(x_BT: Array, axes: tuple[str, ...]) -> Array:
    """This rank's tokens, from those of all ranks along ``axes``."""
    if not axes:
        return x_BT
    length = x_BT.shape[1] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x_BT, lax.axis_index(axes) * length, length, 1)
