"""Sharding of arrays over the devices of a stage: which mesh axes split which dimensions.

All specs of host inputs, activations, losses, parameters, gradients and residuals come from here. Model code receives
only the axes, by role (``Axes``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

TP_DIMENSIONS = frozenset({"heads", "mlp", "vocab"})
"""Dimensions of parameters that tp splits."""
EXPERTS, EXPERT_MLP = "experts", "expert_mlp"
"""Dimensions of experts' parameters, see ``Axes.experts`` and ``Axes.expert_mlp``."""


@dataclass(frozen=True)
class Axes:
    """Mesh axes by role, as tuples so that a role can be split over several axes without touching a model.

    Attributes:
      dp: axes over which rows are split.
      instance: axes of dp across which masters and moments are repeated; they are sharded over the other axes of dp
        and over ``positions``.
      cp: axes over which a sequence is split.
      tp: axes over which heads, hidden units and the vocabulary are split.
      copies: axes over which nothing is split: all copies compute the same.
      positions: axes over which the tokens of rows are split: those of cp, or () if ranks of cp hold whole rows.
      sp: axes over which tokens are split further wherever a layer's features are normed, added or sent on (sequence
        parallelism): those of tp, or () if all ranks of tp have the same tokens.
      ep: axes of dp and cp whose ranks have different experts, for each other's tokens (expert parallelism), or ().
      ep_way: how these ranks exchange tokens, see ``Layout.ep_way``.
      has_whole_experts: whether each rank of tp has whole experts of its own, and not a part of each.
      overlap: whether the exchange of sequence parallelism overlaps with the products that read its result.
      cp_way: how attention exchanges queries and keys among ranks of cp, see ``Layout.cp_way``.
    """

    dp: tuple[str, ...] = ("dp",)
    instance: tuple[str, ...] = ()
    cp: tuple[str, ...] = ("cp",)
    tp: tuple[str, ...] = ("tp",)
    copies: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    sp: tuple[str, ...] = ()
    ep: tuple[str, ...] = ()
    ep_way: str = "ring"
    has_whole_experts: bool = False
    overlap: bool = False
    cp_way: str = "gather"

    @property
    def whole_rows(self) -> Axes:
        """The same axes for whole rows on all ranks of cp and tp: ``positions`` and ``sp`` are ()."""
        return replace(self, positions=(), sp=())

    @property
    def unshared(self) -> Axes:
        """The same axes without sequence parallelism: ``sp`` is ()."""
        return replace(self, sp=())

    @property
    def stream(self) -> tuple[str, ...]:
        """Axes that split the features of a row's tokens between a layer's products: ``positions`` and then ``sp``."""
        return self.positions + self.sp

    @property
    def all(self) -> tuple[str, ...]:
        """The names of all mesh axes, outermost first: of ``copies``, ``dp``, ``cp`` and ``tp``."""
        return self.copies + self.dp + self.cp + self.tp

    @property
    def experts(self) -> tuple[str, ...]:
        """Axes over which experts are split: those of ``ep``, and of tp where its ranks have whole experts."""
        return self.ep + (self.tp if self.has_whole_experts else ())

    @property
    def exchange(self) -> tuple[str, ...]:
        """The axes of ``ep`` whose ranks have different tokens; ranks of the others have the same, as those of tp."""
        return tuple(axis for axis in self.ep if axis in (*self.dp, *self.positions))

    @property
    def expert_mlp(self) -> tuple[str, ...]:
        """Axes over which an expert's hidden units are split: those of tp, or () where its ranks have whole experts."""
        return () if self.has_whole_experts else self.tp

    @property
    def shard(self) -> tuple[str, ...]:
        """Axes of one optimizer instance, over which masters and moments are sharded (ZeRO-1).

        They are those of ``dp`` and ``positions`` without ``instance``.
        """
        return tuple(axis for axis in (*self.dp, *self.positions) if axis not in self.instance)


@dataclass(frozen=True)
class Spread:
    """Sharding of arrays over a submesh.

    Attributes:
      axes: the submesh's axes.
      rows: axes that split the rows of host inputs and activations.
      positions: axes that split the tokens of a row inside a module; between modules rows are whole.
      stream: axes that split the features of these tokens between the products of layers.
    """

    axes: Axes
    rows: tuple[str, ...]
    positions: tuple[str, ...]
    stream: tuple[str, ...]

    @classmethod
    def of(cls, axes: Axes) -> Spread:
        """Rows over ``axes.dp``, their tokens over ``axes.positions``, and tokens' features over ``axes.stream``."""
        return cls(axes, rows=axes.dp, positions=axes.positions, stream=axes.stream)

    @property
    def data(self) -> tuple[str, ...]:
        """Axes over which ranks have features of different tokens: ``rows`` and ``stream``."""
        return (*self.rows, *self.stream)

    @property
    def same_tokens(self) -> tuple[str, ...]:
        """Axes over which ranks have features of the same tokens: all without ``data``."""
        return tuple(axis for axis in self.axes.all if axis not in self.data)

    @property
    def same_rows(self) -> tuple[str, ...]:
        """Axes over which ranks have tokens of the same rows: all without ``rows``."""
        return tuple(axis for axis in self.axes.all if axis not in self.rows)

    @property
    def same_inputs(self) -> tuple[str, ...]:
        """Axes over which ranks have the same host inputs: all without ``rows`` and ``positions``."""
        return tuple(axis for axis in self.same_rows if axis not in self.positions)

    # ---- computed arrays ---------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> PartitionSpec:
        """Spec of host inputs ``[rows, positions, ...]`` and of tokens ``[cells, listed, ...]`` from another module.

        It shards the first dimension over the axes ``rows``, and the second over ``positions``, if there are any.
        """
        return PartitionSpec(self.rows, self.positions) if self.positions else PartitionSpec(self.rows)

    @property
    def whole_rows(self) -> PartitionSpec:
        """Spec of arrays that are equal on ranks of cp and tp, with the first dimension over the axes ``rows``.

        These are activations ``[rows, positions, ...]`` between modules and their gradients, losses ``[dp, losses]``
        and predictions ``[rows, ...]``.
        """
        return PartitionSpec(self.rows)

    def activation(self, *, inside: bool) -> PartitionSpec:
        """Spec of a stage's activations ``[rows, positions, ...]`` and their gradients.

        The first dimension is sharded over the axes ``rows``, and ``inside`` the second over ``stream``. ``inside``
        means that they go to a stage of the same module.
        """
        return PartitionSpec(self.rows, self.stream) if inside and self.stream else self.whole_rows

    @property
    def replicated(self) -> PartitionSpec:
        """Spec of arrays that are whole on every rank: ``PartitionSpec()``."""
        return PartitionSpec()

    @property
    def per_rank(self) -> PartitionSpec:
        """Spec of arrays with one block per rank, stacked along the first dimension in the order of ranks."""
        return PartitionSpec(self.axes.all)

    def residual(self, varying: Collection[str]) -> tuple[tuple[str, ...], PartitionSpec]:
        """The axes and the spec ``(axes,)`` of an array that stacks ranks' blocks of a value.

        ``varying`` are the mesh axes over which the value varies; on ranks of other axes the blocks are equal. The
        axes are in the mesh's order.
        """
        axes = tuple(axis for axis in self.axes.all if axis in varying)
        return axes, PartitionSpec(axes)

    def cache(self, dimensions: int, varying: Collection[str]) -> PartitionSpec:
        """Spec of a cache array.

        These are segments ``[rows, S]``, and keys or values ``[rows, S, heads, K]`` or ``[layers, rows, S, heads, K]``.

        Args:
          dimensions: number of dimensions of the array: 2, 4 or 5.
          varying: mesh axes over which the local values vary; heads that are equal on all ranks of tp are whole.
        """
        stacked = dimensions == len("LBSGK")
        heads = (None, self.axes.tp) if any(axis in varying for axis in self.axes.tp) else ()
        return PartitionSpec(*([None] * stacked), self.rows, *heads)

    # ---- parameters --------------------------------------------------------------------------------------------------

    def parameter(self, dimensions: Sequence[str], *, stacked: bool) -> PartitionSpec:
        """Spec of a parameter: tp splits the dimensions in ``TP_DIMENSIONS``, and ``Axes.experts`` and
        ``Axes.expert_mlp`` those of experts.

        Args:
          dimensions: names of the dimensions of one layer's parameter, such as ("embed", "heads").
          stacked: whether a first dimension stacks layers; it is whole.
        """
        axes = dict.fromkeys(TP_DIMENSIONS, self.axes.tp)
        axes |= {EXPERTS: self.axes.experts, EXPERT_MLP: self.axes.expert_mlp}
        dims = [axes.get(dimension) or None for dimension in dimensions]
        return PartitionSpec(*([None] * stacked), *dims)

    def gradient_sums(self, parameter: PartitionSpec) -> PartitionSpec:
        """Spec of the gradient sums of a parameter with this spec: ``[blocks, *parameter]``.

        There is one block for each rank with different tokens.
        """
        return PartitionSpec(self.gradient_axes(parameter), *parameter)

    def gradient_axes(self, parameter: PartitionSpec) -> tuple[str, ...]:
        """Mesh axes over which a step's single reduction sums the gradients of a parameter with this spec."""
        return tuple(axis for axis in self.data if axis not in split_axes(parameter))


def split_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that split an array of this spec."""
    return frozenset(axis for part in spec for axis in ((part,) if isinstance(part, str) else part or ()))
