"""Boundaries: the paired forward and backward layout transform of one edge between two stages.

Forward materialises an activation in the destination's layout; backward brings the gradient home along the same routes,
one replica, never a sum: replicas of a tp·cp group hold the same gradient, and adding them would scale it.
Source: heterogeneous parallelism for MLLM training, §3.1 (non-colocated) and §3.2 (colocated).
"""

from __future__ import annotations

from typing import Any

import jax

from mmjax.mesh.routes import leader_routes
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.transport import CollectiveTransfer, LeaderTransfer, LocalTransfer, PeerTransfer, Transfer
from mmjax.mesh.world import TRANSPORTS, World


class Boundary:
    """The layout transform of one edge for one tensor shape.

    Called on an array it is differentiable as a whole; its halves ``forward`` and ``backward`` are transfers whose
    ``pack``, ``move`` and ``unpack`` a schedule can place apart.

    Attributes:
      forward: source layout to destination layout.
      backward: the same routes, reversed, for the gradient.
    """

    def __init__(
        self,
        name: str,
        source: Submesh,
        target: Submesh,
        aval: jax.ShapeDtypeStruct,
        world: World,
        transport: str = "auto",
    ):
        """Plans the routes.

        Args:
          name: for messages and program names.
          source, target: the stage submeshes; their rank sets may be equal, disjoint or overlap.
          aval: shape ``[rows, ...]`` and dtype of the tensor; rows divide by the lcm of both dp.
          world: the devices.
          transport: ``device_put``, ``collective`` or ``auto`` (direct copies where this process owns every device).

        Raises:
          ValueError: for an unknown transport or rows that do not divide.
        """
        if transport not in TRANSPORTS:
            raise ValueError(f"transport={transport!r}: not a transport; use one of {', '.join(TRANSPORTS)}")
        routes = leader_routes(source.placement, target.placement)
        back = tuple(route.reversed() for route in routes)
        self.name = name
        self.forward = _transfer(f"{name} forward", source, target, aval, routes, world, transport)
        self.backward = _transfer(f"{name} backward", target, source, aval, back, world, transport)

        @jax.custom_vjp
        def apply(x: jax.Array) -> jax.Array:
            return self.forward(x)

        apply.defvjp(lambda x: (self.forward(x), None), lambda _, g: (self.backward(g),))
        self._apply: Any = apply

    @property
    def kind(self) -> str:
        """``local``, ``async`` or ``rendezvous``."""
        return self.forward.kind

    def __call__(self, x: jax.Array) -> jax.Array:
        """The activation in the destination's layout; ``jax.vjp`` of this is the way back."""
        return self._apply(x)


def boundary_kind(source: Submesh, target: Submesh, transport: str = "auto") -> str:
    """The ``kind`` that a boundary between two submeshes will have, without planning it."""
    if source.ranks == target.ranks:
        return "local"
    return "rendezvous" if _collective(transport) else "async"


def _collective(transport: str) -> bool:
    return transport == "collective" or (transport == "auto" and jax.process_count() > 1)


def _transfer(
    name: str, source: Submesh, target: Submesh, aval: jax.ShapeDtypeStruct, routes: Any, world: World, transport: str
) -> Transfer:
    if source.ranks == target.ranks:
        return LocalTransfer(name, source, target, aval, routes)
    if _collective(transport):
        return CollectiveTransfer(name, source, target, aval, routes, world)
    same_degrees = source.layout.dp == target.layout.dp and source.placement.width == target.placement.width
    if same_degrees:
        return PeerTransfer(name, source, target, aval)
    return LeaderTransfer(name, source, target, aval, routes, world)
