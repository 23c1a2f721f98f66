"""Attention of queries to keys on other ranks, where the tokens of a row lie on several: context parallelism.

Each way keeps its own part of queries, keys and values for backward, the output, and one number a token and head; what
came from other ranks is brought again. Gradients of keys and values are summed in fp32 on the way home.

* *gather*: every rank gets all keys and values, some heads at a time, so that the next come while these are used.
* *need*: every rank gets the blocks of keys and values that its queries may see (see ``needed``).
* *ring*: keys and values go from rank to rank (Liu et al. 2023, "Ring Attention with Blockwise Transformers", §3).
* *all-to-all*: every rank gets all tokens of some heads (Jacobs et al. 2023, "DeepSpeed Ulysses", §3).

Shapes: B rows, T tokens of a rank, S = T · (ranks) tokens of a row, H query heads, G key/value heads, K head width (all
local to this rank's part of tp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.attention import blockwise
from mmjax.attention.by_hand import ByHand, Known, attend, known
from mmjax.attention.mask import Mask
from mmjax.attention.needed import Need, most_by_distance, needed_blocks
from mmjax.attention.tokens import Tokens

MOST_CHUNKS = 4
"""Parts that the heads of *gather* are cut into, at most: the first is waited for, the others come meanwhile."""


@dataclass(frozen=True)
class Company:
    """The ranks that have parts of the same rows.

    Attributes:
      axes: the mesh axes that number them.
      size: how many they are.
    """

    axes: tuple[str, ...]
    size: int

    @classmethod
    def over(cls, axes: tuple[str, ...]) -> Company:
        """The ranks along some axes, inside ``shard_map``."""
        return cls(axes, lax.axis_size(axes))

    @property
    def me(self) -> Array:
        """This rank's number."""
        return lax.axis_index(self.axes)

    def gathered(self, tree: Any) -> Any:
        """All ranks' parts of rows, in the order of the ranks."""
        return lax.all_gather(tree, self.axes, axis=1, tiled=True)

    def scattered(self, tree: Any) -> Any:
        """This rank's part of the sum of whole rows over all ranks."""
        return lax.psum_scatter(tree, self.axes, scatter_dimension=1, tiled=True)

    def onward(self, tree: Any) -> Any:
        """What the rank behind this one holds, in a ring: in round k a rank has what rank + k began with."""
        routes = [(rank, (rank - 1) % self.size) for rank in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, routes), tree)

    def by_heads(self, x_BTHK: Array) -> Array:
        """Whole rows of this rank's share of the heads, from this rank's tokens of all heads."""
        return lax.all_to_all(x_BTHK, self.axes, split_axis=2, concat_axis=1, tiled=True)

    def by_tokens(self, x_BSHK: Array) -> Array:
        """The reverse of ``by_heads``."""
        return lax.all_to_all(x_BSHK, self.axes, split_axis=1, concat_axis=2, tiled=True)

    def part(self, known: Known, rank: Array) -> Known:
        """What is known of the tokens of one rank, from what is known of all."""
        length = next(iter(known.values())).shape[1] // self.size
        return {name: lax.dynamic_slice_in_dim(x, rank * length, length, 1) for name, x in known.items()}


def gathered_tokens(tokens: Tokens, mask: Mask, axes: tuple[str, ...], way: str) -> Tokens:
    """What a mask, and a way of ``WAYS``, read of all tokens of the rows, equal on all ranks with a part of them."""
    own = with_order(tokens, mask)
    gathered = {name: jax_compat.all_gather_invariant(x, axes, 1) for name, x in own.items()}
    return Tokens.of(gathered | WAYS[way].plan(mask, Company.over(axes), gathered))


def with_order(tokens: Tokens, mask: Mask) -> Known:
    """What a mask reads of tokens, the order too where it is not given: it depends on the rank."""
    return known(tokens, mask) | ({"order": tokens.orders_BT} if "order" in mask.reads else {})


def attention_among(
    axes: tuple[str, ...],
    way: str,
    kernel: ByHand,
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    tokens: Tokens,
    keys: Tokens,
    found: Known | None = None,
) -> Float[Array, "B T H K"]:
    """Grouped-query attention among the tokens of one segment, whichever ranks they are on.

    Args:
      axes: the mesh axes over which the tokens of rows lie.
      way: a key of ``WAYS``.
      kernel: what computes the attention of queries and keys that are on one rank.
      q_BTHK, k_BTGK, v_BTGK: of this rank's tokens.
      tokens: what is known of them; with an order, if the mask is causal.
      keys: what is known of all tokens of the rows (see ``gathered_tokens``).
      found: what the kernel has found out about the queries (see ``Way.found``).

    Raises:
      ValueError: the way does not fit the number of heads.
    """
    asking, asked = with_order(tokens, kernel.mask) | (found or {}), known(keys, kernel.mask)
    asked |= {name: keys.inputs[name] for name in WAYS[way].PLAN}
    q, k, v, _ = jax_compat.alike(q_BTHK, k_BTGK, v_BTGK, lax.axis_index(axes))
    return attend(WAYS[way](kernel.mask, kernel, Company.over(axes)), q, k, v, asking, asked)


@dataclass(frozen=True)
class _Among(ByHand):
    """A way to bring queries and keys together.

    Attributes:
      kernel: what computes attention once they are.
      company: the ranks.
      PLAN: names of what it makes of what is known of all tokens, once for all layers with the same mask.
    """

    kernel: ByHand
    company: Company
    PLAN: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def plan(cls, mask: Mask, company: Company, asked: Known) -> Known:
        """The arrays of ``PLAN``."""
        del mask, company, asked
        return {}

    @classmethod
    def queries(cls, asking: Known, asked: Known) -> Known:
        """What is known of the queries whose attention a rank computes, from that of its own tokens and of all."""
        del asked
        return asking


# ---- all keys on every rank ------------------------------------------------------------------------------------------


class _Gather(_Among):
    chunks: ClassVar[int] = MOST_CHUNKS

    def forward(self, q: Array, k: Array, v: Array, asking: Known, asked: Known) -> tuple[Array, Any]:
        carrier, asked = self._carrier(asked)
        outs, lses = [], []
        for own_q, own_k, own_v in zip(*self._parts(q, k, v), strict=True):
            own_k, own_v = carrier.gathered((own_k, own_v))
            out, lse = self.kernel.forward(own_q, own_k, own_v, asking, asked)
            outs.append(out)
            lses.append(lse)
        return jnp.concatenate(outs, axis=2), tuple(lses)

    def backward(
        self, q: Array, k: Array, v: Array, asking: Known, asked: Known, out: Array, lse: Any, d_out: Array
    ) -> tuple[Array, Array, Array]:
        carrier, asked = self._carrier(asked)
        found = []
        for own_q, own_k, own_v, own_lse, own_out, d_own in zip(
            *self._parts(q, k, v), lse, *self._parts(out, d_out, groups=k.shape[2]), strict=True
        ):
            own_k, own_v = carrier.gathered((own_k, own_v))
            dq, dk, dv = self.kernel.backward(own_q, own_k, own_v, asking, asked, own_out, own_lse, d_own)
            found.append((dq, *carrier.scattered((dk.astype(jnp.float32), dv.astype(jnp.float32)))))
        dq, dk, dv = (jnp.concatenate(parts, axis=2) for parts in zip(*found, strict=True))
        return dq, dk, dv

    def _carrier(self, asked: Known) -> tuple[Company | Need, Known]:
        """What brings keys and values and takes their gradients home, and what is known of the keys."""
        return self.company, asked

    def _parts(self, *arrays: Array, groups: int = 0) -> list[list[Array]]:
        """Heads in a few parts: key/value heads, and the query heads that read them."""
        groups = groups or arrays[1].shape[2]
        count = next(n for n in range(min(self.chunks, groups), 0, -1) if groups % n == 0)
        return [jnp.split(x, count, axis=2) for x in arrays]


class _Need(_Gather):
    """All heads at once: what travels in a branch hides behind nothing, and each branch waits for its number."""

    PLAN = ("needed", "most")
    chunks = 1

    @classmethod
    def plan(cls, mask: Mask, company: Company, asked: Known) -> Known:
        needed_BRRN = needed_blocks(mask, mask.columns(Tokens.of(asked)), company.size)
        return {"needed": needed_BRRN, "most": most_by_distance(needed_BRRN)}

    def _carrier(self, asked: Known) -> tuple[Company | Need, Known]:
        need = Need(self.company.axes, asked["needed"], asked["most"])
        return need, {name: x for name, x in asked.items() if name not in self.PLAN}


# ---- keys that travel ------------------------------------------------------------------------------------------------


class _Ring(_Among):
    def forward(self, q: Array, k: Array, v: Array, asking: Known, asked: Known) -> tuple[Array, Any]:
        held = k, v
        out, lse = blockwise.forward(self.mask, q, *held, asking, self._round(asked, 0))
        sums = out.astype(jnp.float32)
        for number in range(1, self.company.size):
            held = self.company.onward(held)
            more, more_lse = blockwise.forward(self.mask, q, *held, asking, self._round(asked, number))
            both = jnp.logaddexp(lse, more_lse)
            weights = [jnp.swapaxes(jnp.exp(one - both), 1, 2)[..., None] for one in (lse, more_lse)]
            sums, lse = sums * weights[0] + more.astype(jnp.float32) * weights[1], both
        return sums.astype(q.dtype), lse

    def backward(
        self, q: Array, k: Array, v: Array, asking: Known, asked: Known, out: Array, lse: Any, d_out: Array
    ) -> tuple[Array, Array, Array]:
        held = k, v
        dq, *of_held = blockwise.backward(self.mask, q, *held, asking, self._round(asked, 0), out, lse, d_out)
        for number in range(1, self.company.size):
            held, of_held = self.company.onward((held, of_held))
            more, dk, dv = blockwise.backward(self.mask, q, *held, asking, self._round(asked, number), out, lse, d_out)
            dq, of_held = dq + more, [of_held[0] + dk, of_held[1] + dv]
        dk, dv = self.company.onward(of_held)  # the last step home
        return dq, dk, dv

    def _round(self, asked: Known, number: int) -> Known:
        """What is known of the keys that this rank holds in a round."""
        return self.company.part(asked, (self.company.me + number) % self.company.size)


# ---- all tokens of some heads ----------------------------------------------------------------------------------------


class _AllToAll(_Among):
    @classmethod
    def queries(cls, asking: Known, asked: Known) -> Known:
        return asked | {name: x for name, x in asking.items() if name not in asked}

    def forward(self, q: Array, k: Array, v: Array, asking: Known, asked: Known) -> tuple[Array, Any]:
        q, k, v = self._by_heads(q, k, v)
        out, lse = self.kernel.forward(q, k, v, self.queries(asking, asked), asked)
        return self.company.by_tokens(out), lse

    def backward(
        self, q: Array, k: Array, v: Array, asking: Known, asked: Known, out: Array, lse: Any, d_out: Array
    ) -> tuple[Array, Array, Array]:
        heads, times = k.shape[2], self._times(q, k)
        q, k, v = self._by_heads(q, k, v)
        out, d_out = self.company.by_heads(out), self.company.by_heads(d_out)
        found = self.kernel.backward(q, k, v, self.queries(asking, asked), asked, out, lse, d_out)
        dq, dk, dv = (self.company.by_tokens(d.astype(jnp.float32)) for d in found)
        add = lambda d: d.reshape(*d.shape[:2], heads, times, d.shape[3]).sum(axis=3)  # noqa: E731
        return dq, add(dk), add(dv)

    def _by_heads(self, q: Array, k: Array, v: Array) -> list[Array]:
        times = self._times(q, k)
        return [self.company.by_heads(x) for x in (q, jnp.repeat(k, times, axis=2), jnp.repeat(v, times, axis=2))]

    def _times(self, q: Array, k: Array) -> int:
        """How often key/value heads are repeated, so that every rank has those that its query heads read.

        Raises:
          ValueError: the query heads do not divide by the ranks.
        """
        heads, groups, ranks = q.shape[2], k.shape[2], self.company.size
        if heads % ranks:
            fix = "use 'gather' or 'ring'"
            raise ValueError(f"Layout.cp_way='all-to-all': {heads} heads of a rank do not divide by cp={ranks}; {fix}")
        return next(n for n in range(1, heads // groups + 1) if groups * n % ranks == 0 and heads % (groups * n) == 0)


WAYS: Mapping[str, type[_Among]] = {"gather": _Gather, "need": _Need, "ring": _Ring, "all-to-all": _AllToAll}
"""Ways by name."""
