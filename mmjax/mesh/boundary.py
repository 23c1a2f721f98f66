"""Boundaries: the paired forward and backward layout transform of one edge between two stages.

Forward materialises an activation in the destination's layout. Backward carries the gradient back by the same kind of
routing with the roles exchanged, one replica, never a sum: replicas of a tp·cp group hold the same gradient, and adding
them would scale it. Where each rank of cp received its own list of tokens, the gradients of the lists lie side by side
on the way back.
Source: heterogeneous parallelism for MLLM training, §3.1 (non-colocated) and §3.2 (colocated).
"""

from __future__ import annotations

from typing import Any

import jax

from mmjax.mesh.config import ROUTES, TRANSPORTS
from mmjax.mesh.movers import mover_of
from mmjax.mesh.routing import WHOLE_ROWS, Placement, make_routing
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.transfer import LocalTransfer, MovedTransfer, Transfer
from mmjax.mesh.world import World


class Boundary:
    """The layout transform of one edge for one tensor shape.

    Called on a global array it is differentiable as a whole. Its halves ``forward`` and ``backward`` are transfers
    whose ``pack``, ``move`` and ``unpack`` a schedule can place apart.

    Attributes:
      forward: source layout to destination layout.
      backward: destination layout to source layout, for the gradient.
    """

    def __init__(
        self,
        name: str,
        source: Submesh,
        target: Submesh,
        aval: jax.ShapeDtypeStruct,
        world: World,
        transport: str = "auto",
        route: str = "leader",
        placements: tuple[Placement, Placement] = WHOLE_ROWS,
    ):
        """Plans the routes.

        Args:
          name: used in messages and program names.
          source, target: the stage submeshes; their rank sets may be equal, disjoint or overlap.
          aval: global shape ``[rows, ...]`` and dtype of the tensor; rows divide by the lcm of both dp.
          world: the devices.
          transport: ``device_put``, ``collective`` or ``auto``; see ``mover_of``.
          route: ``leader`` or ``sliced``: which ranks of a tp·cp group send and receive.
          placements: placement of the tensor at source and target; see ``Placement``.

        Raises:
          ValueError: for an unknown transport or route, or rows that do not divide.
        """
        for field, value, legal in (("transport", transport, TRANSPORTS), ("route", route, ROUTES)):
            if value not in legal:
                raise ValueError(f"{field}={value!r}: not a {field}; use one of {', '.join(legal)}")

        def transfer(direction: str, start: Submesh, end: Submesh, placements: tuple[Placement, Placement]) -> Transfer:
            routing = make_routing(
                route, name=f"{name} {direction}", source=start, target=end, aval=aval, placements=placements
            )
            if start.ranks == end.ranks:
                return LocalTransfer(routing)
            return MovedTransfer(routing, mover_of(transport, start, end)(routing, world))

        self.name = name
        self.forward = transfer("forward", source, target, placements)
        self.backward = transfer("backward", target, source, (placements[1], placements[0]))

        @jax.custom_vjp
        def apply(x: jax.Array) -> jax.Array:
            return self.forward(x)

        apply.defvjp(lambda x: (self.forward(x), ()), lambda _, g: (self.backward(g),))
        self._apply: Any = apply

    @property
    def of_op(self) -> Boundary:
        """This boundary: an op has one microbatch, or both ends have all of its microbatches (see ``SharedOut``)."""
        return self

    @property
    def kind(self) -> str:
        """``local`` (equal rank sets), ``async`` (senders do not wait) or ``rendezvous`` (both sides take part)."""
        return self.forward.kind

    def __call__(self, x: jax.Array) -> jax.Array:
        """The activation in the destination's layout, with the shape and dtype of ``x``.

        ``x`` is the global array in the source's layout, ``forward.source_aval``. Its ``jax.vjp`` brings the gradient
        back.
        """
        return self._apply(x)


def boundary_kind(source: Submesh, target: Submesh, transport: str = "auto") -> str:
    """The ``kind`` of a boundary between two submeshes, without planning it: "local", "async" or "rendezvous".

    It is "local" on the same ranks; otherwise "async" if the mover is "device_put", and "rendezvous" if "collective".

    Args:
      source, target: the devices of the sending and the receiving stage, such as ``Submesh.of(Layout(), (0,),
        devices)``.
      transport: "auto", "device_put" or "collective", as in ``World.transport``.
    """
    return "local" if source.ranks == target.ranks else mover_of(transport, source, target).kind
