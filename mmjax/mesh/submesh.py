"""Submeshes: the devices of one pipeline stage of one module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.routes import RowSharding
from mmjax.mesh.spread import Axes, Spread

if TYPE_CHECKING:
    from mmjax.mesh.layout import Layout


_ROLES = (("instance", "dp", "ep"), ("cp", "ep_cp"), ("ep", "ep_cp"))
"""Names of the mesh axes of dp, cp and ep."""


@dataclass(frozen=True)
class Submesh:
    """One stage's devices.

    Attributes:
      ranks: world ranks in (copy, dp, cp, tp) order.
      layout: the module's layout.
      mesh: the JAX mesh over those ranks.
      axes: names of its axes by role.
    """

    ranks: tuple[int, ...]
    layout: Layout
    mesh: Mesh
    axes: Axes

    @classmethod
    def of(cls, layout: Layout, ranks: tuple[int, ...], devices: Sequence[Any]) -> Submesh:
        """The submesh of one stage of a module with ``layout``.

        ``devices`` belong to ``ranks``, one by one, and both are in (copy, dp, cp, tp) order. Optimizer instances cut
        dp into two mesh axes, the instance outermost, so that a group is made of neighbours. Expert parallelism cuts
        dp and cp again, its ranks innermost.
        """
        instances, (ep_of_dp, ep_of_cp) = layout.optimizer_instances, layout.ep_degrees
        sizes = {"instance": instances, "dp": layout.dp // instances // ep_of_dp, "ep": ep_of_dp}
        sizes |= {"cp": layout.cp // ep_of_cp, "ep_cp": ep_of_cp, "tp": layout.tp}
        kept = [name for name, size in sizes.items() if size > 1 or name in ("dp", "cp", "tp")]
        dp, cp, ep = (tuple(name for name in names if name in kept) for names in _ROLES)
        axes = Axes(dp=dp, cp=cp, ep=ep, ep_way=layout.ep_way, instance=tuple({"instance"} & {*kept}))
        axes = replace(axes, has_whole_experts=layout.expert_tp == 1 and layout.tp > 1)
        shape = tuple(sizes[name] for name in kept)
        if layout.cp > 1:
            axes = replace(axes, positions=axes.cp, cp_way=layout.cp_way)
        if layout.shares_tokens:
            axes = replace(axes, sp=axes.tp, overlap=layout.overlap)
        if layout.copies > 1:  # an axis only if there are copies: other programs do not change
            axes, shape = replace(axes, copies=("copy",)), (layout.copies, *shape)
        return cls(ranks, layout, Mesh(np.array(devices).reshape(shape), axes.all), axes)

    @cached_property
    def spread(self) -> Spread:
        """Specs of arrays over these devices, by the kind of array."""
        return Spread.of(self.axes)

    @property
    def row_sharding(self) -> RowSharding:
        """Sharding of whole rows over these ranks: dp intervals of one part."""
        return RowSharding(self.ranks, self.layout.dp, self.layout.copies)

    @property
    def list_sharding(self) -> RowSharding:
        """Sharding of tokens of other modules that were listed for each rank of cp: dp intervals of cp parts."""
        return RowSharding(self.ranks, self.layout.dp, self.layout.copies, self.layout.cp)

    @property
    def token_sharding(self) -> RowSharding:
        """Sharding of features inside a module: dp intervals, times the ranks that share the tokens of a row."""
        parts = math.prod(self.mesh.shape[axis] for axis in self.spread.stream)
        return RowSharding(self.ranks, self.layout.dp * parts, self.layout.copies)

    @cached_property
    def local(self) -> bool:
        """Whether this process owns a device of the submesh."""
        return jax_compat.process_index() in self.processes

    @cached_property
    def processes(self) -> frozenset[int]:
        """Indices of the processes that own devices of the submesh."""
        return frozenset(device.process_index for device in self.mesh.devices.flat)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The sharding of ``spec`` on this submesh."""
        return NamedSharding(self.mesh, spec)
