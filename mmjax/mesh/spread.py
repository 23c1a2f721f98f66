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
      cp_way: how attention brings queries and keys of different ranks together, a key of ``attention.exchange.WAYS``.
    """

    dp: tuple[str, ...] = ("dp",)
    instance: tuple[str, ...] = ()
    cp: tuple[str, ...] = ("cp",)
    tp: tuple[str, ...] = ("tp",)
    copies: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    cp_way: str = "gather"

    @property
    def whole_rows(self) -> Axes:
        """The same axes where ranks of cp hold whole rows, and compute the same."""
        return replace(self, positions=())

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
    """

    axes: Axes
    rows: tuple[str, ...]
    positions: tuple[str, ...]

    @classmethod
    def of(cls, axes: Axes) -> Spread:
        """Rows over dp; their tokens as ``Axes.positions`` says; the same on every rank of tp."""
        return cls(axes, rows=axes.dp, positions=axes.positions)

    @property
    def data(self) -> tuple[str, ...]:
        """Axes over which ranks have different tokens."""
        return (*self.rows, *self.positions)

    @property
    def replica(self) -> tuple[str, ...]:
        """Axes over which ranks have the same tokens."""
        return tuple(axis for axis in self.axes.all if axis not in self.data)

    @property
    def together(self) -> tuple[str, ...]:
        """Axes over which ranks have tokens of the same rows."""
        return tuple(axis for axis in self.axes.all if axis not in self.rows)

    # ---- what is computed --------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> PartitionSpec:
        """Host inputs and activations ``[rows, positions, ...]`` inside of a module, and their gradients."""
        return PartitionSpec(self.rows, self.positions) if self.positions else PartitionSpec(self.rows)

    @property
    def whole_rows(self) -> PartitionSpec:
        """Arrays that ranks of cp have alike: activations ``[rows, positions, ...]`` between modules and their
        gradients, losses ``[dp, losses]``, predictions ``[rows, ...]``."""
        return PartitionSpec(self.rows)

    def activation(self, *, inside: bool) -> PartitionSpec:
        """Activations on an edge, inside of a module or between two."""
        return self.tokens if inside else self.whole_rows

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
        """Gradient sums of a parameter, a block for each rank that has rows of its own."""
        return PartitionSpec(self.data, *parameter)
