"""Callbacks in the reference: the user's own functions, called with a row that holds one sample or medium alone.

So a comparison finds errors of layouts, packing, boundaries and schedules, but none of the functions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mmjax.attention.mask import MaskKind
from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.models.callbacks import NO_CALLBACKS, Callbacks, CalledAt
from mmjax.models.context import Context


def one_device() -> Submesh:
    """JAX's default device as a submesh, with a layout of one device."""
    config: Any = jax.config  # its options have no types
    return Submesh.of(Layout(), (0,), [config.jax_default_device or jax.devices()[0]])


@partial(jax.tree_util.register_dataclass, data_fields=["row"], meta_fields=["callbacks", "module", "mask"])
@dataclass(frozen=True, kw_only=True)
class Calls:
    """The callbacks of one module and the host inputs that they read; a pytree whose leaves are the inputs.

    Attributes:
      row: host inputs of a row that holds one sample or medium alone, without the dimension of rows.
      callbacks: the module's callbacks.
      module: the module's name.
      mask: the module's mask.
    """

    row: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callbacks = NO_CALLBACKS
    module: str = ""
    mask: MaskKind = "full"

    def __call__(self, place: CalledAt, x_TD: jax.Array) -> jax.Array:
        """Calls the callback at a place with the features of one sample or medium; without one it returns them."""
        if place not in self.callbacks.by_place:
            return x_TD
        submesh, replicated = one_device(), PartitionSpec()

        def call(row: Mapping[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
            return self.callbacks.apply(place, self.module, Context.of(submesh.axes, row, self.mask), x_BTD)

        rows = {name: value[None] for name, value in self.row.items()}
        mapped = jax.shard_map(call, mesh=submesh.mesh, in_specs=(replicated, replicated), out_specs=replicated)
        return mapped(rows, x_TD[None])[0]


NO_CALLS = Calls()
