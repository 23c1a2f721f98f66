"""How arrays lie on the devices of a stage: which mesh axes split which of their dimensions.

All specs of host inputs, activations, losses, parameters, gradients and residuals come from here. Model code knows the
axes by role alone (``Axes``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

TP_DIMENSIONS = frozenset({"heads", "mlp", "vocab"})
"""Dimensions of parameters that tp splits."""


@dataclass(frozen=True)
class Axes:
    """Mesh axes by role, as tuples so that a role can be split over several axes without touching a model.

    Attributes:
      dp: axes over which rows are split.
      instance: axes of dp across which masters and moments are repeated; over the others with tokens of their own they
        are sharded.
      cp: axes over which a sequence is split.
      tp: axes over which heads, hidden units and the vocabulary are split.
      copies: axes over which nothing is split: the ranks of each copy compute the same.
      positions: axes over which the tokens of rows lie: those of cp where a sequence is split, () where ranks of cp
        hold whole rows.
      sp: axes over which these are split further wherever a layer's features are normed, added or sent on (sequence
        parallelism): those of tp, or () where all ranks of tp have them.
      overlap: whether what they exchange for this goes beside the products that it is for.
      cp_way: how attention brings queries and keys of different ranks together, a key of
        ``attention.exchange.EXCHANGES``.
    """

    dp: tuple[str, ...] = ("dp",)
    instance: tuple[str, ...] = ()
    cp: tuple[str, ...] = ("cp",)
    tp: tuple[str, ...] = ("tp",)
    copies: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    sp: tuple[str, ...] = ()
    overlap: bool = False
    cp_way: str = "gather"

    @property
    def whole_rows(self) -> Axes:
        """The same axes where all ranks of cp and tp hold whole rows, and those of cp compute the same."""
        return replace(self, positions=(), sp=())

    @property
    def unshared(self) -> Axes:
        """The same axes where ranks of tp do not share tokens."""
        return replace(self, sp=())

    @property
    def stream(self) -> tuple[str, ...]:
        """Axes over which the features of a row's tokens lie between a layer's products, in the order of tokens."""
        return self.positions + self.sp

    @property
    def all(self) -> tuple[str, ...]:
        """Every axis, outermost first."""
        return self.copies + self.dp + self.cp + self.tp

    @property
    def shard(self) -> tuple[str, ...]:
        """Axes of one optimizer instance, over which masters and moments are sharded (ZeRO-1)."""
        return tuple(axis for axis in (*self.dp, *self.positions) if axis not in self.instance)


@dataclass(frozen=True)
class Spread:
    """How arrays lie over a submesh.

    Attributes:
      axes: the submesh's axes.
      rows: axes that split the rows of host inputs and activations.
      positions: axes that split the tokens of a row, inside of a module; what modules give each other are whole rows.
      stream: axes that split the features of these tokens, between the products of layers.
    """

    axes: Axes
    rows: tuple[str, ...]
    positions: tuple[str, ...]
    stream: tuple[str, ...]

    @classmethod
    def of(cls, axes: Axes) -> Spread:
        """Rows over dp; their tokens as ``Axes.positions`` says, and their features as ``Axes.stream``."""
        return cls(axes, rows=axes.dp, positions=axes.positions, stream=axes.stream)

    @property
    def data(self) -> tuple[str, ...]:
        """Axes over which ranks have features of different tokens."""
        return (*self.rows, *self.stream)

    @property
    def replica(self) -> tuple[str, ...]:
        """Axes over which ranks have features of the same tokens."""
        return tuple(axis for axis in self.axes.all if axis not in self.data)

    @property
    def together(self) -> tuple[str, ...]:
        """Axes over which ranks have tokens of the same rows."""
        return tuple(axis for axis in self.axes.all if axis not in self.rows)

    @property
    def alike(self) -> tuple[str, ...]:
        """Axes over which ranks have the same host inputs."""
        return tuple(axis for axis in self.together if axis not in self.positions)

    # ---- what is computed --------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> PartitionSpec:
        """Host inputs ``[rows, positions, ...]``; tokens ``[cells, listed, ...]`` that each rank reads of another
        module."""
        return PartitionSpec(self.rows, self.positions) if self.positions else PartitionSpec(self.rows)

    @property
    def whole_rows(self) -> PartitionSpec:
        """Arrays that ranks of cp and tp have alike: activations ``[rows, positions, ...]`` between modules and their
        gradients, losses ``[dp, losses]``, predictions ``[rows, ...]``."""
        return PartitionSpec(self.rows)

    def activation(self, *, inside: bool) -> PartitionSpec:
        """Activations ``[rows, positions, ...]`` that a stage gives, to one of its module or of others, and their
        gradients."""
        return PartitionSpec(self.rows, self.stream) if inside and self.stream else self.whole_rows

    @property
    def whole(self) -> PartitionSpec:
        """Arrays that every rank has whole."""
        return PartitionSpec()

    @property
    def each(self) -> PartitionSpec:
        """Blocks of all ranks, one after another in the first dimension."""
        return PartitionSpec(self.axes.all)

    def residual(self, varying: Collection[str]) -> tuple[tuple[str, ...], PartitionSpec]:
        """The axes over which blocks of a value are stacked that varies over some axes, and the spec of the stack."""
        axes = tuple(axis for axis in self.axes.all if axis in varying)
        return axes, PartitionSpec(axes)

    def cache(self, dimensions: int, varying: Collection[str]) -> PartitionSpec:
        """Segments ``[rows, S]``, or keys or values ``[rows, S, heads, K]`` or ``[layers, rows, S, heads, K]``.

        ``varying`` are the axes over which the local values vary; heads that are equal on all ranks of tp are whole.
        """
        stacked = dimensions == len("LBSGK")
        heads = (None, self.axes.tp) if any(axis in varying for axis in self.axes.tp) else ()
        return PartitionSpec(*([None] * stacked), self.rows, *heads)

    # ---- parameters --------------------------------------------------------------------------------------------------

    def parameter(self, dimensions: Sequence[str], *, stacked: bool) -> PartitionSpec:
        """A parameter whose dimensions have these names; the stacking dimension is whole."""
        dims = [self.axes.tp if dimension in TP_DIMENSIONS else None for dimension in dimensions]
        return PartitionSpec(*([None] * stacked), *dims)

    def sums(self, parameter: PartitionSpec) -> PartitionSpec:
        """Gradient sums of a parameter, a block for each rank that has tokens of its own."""
        return PartitionSpec(self.summed(parameter), *parameter)

    def summed(self, parameter: PartitionSpec) -> tuple[str, ...]:
        """The axes over which a step's one reduction sums the gradients of a parameter."""
        split = {axis for part in parameter for axis in ((part,) if isinstance(part, str) else part or ())}
        return tuple(axis for axis in self.data if axis not in split)
