"""Rates that a device reaches, for a roofline. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that a device reaches.

    Attributes:
      products: FLOPs per second of products of bf16.
      products32: of fp32, in TF32.
      grouped: of grouped products of experts.
      forward, backward: of fused attention.
      memory: bytes per second.
      link: bytes per second that a device sends in a collective, or to another device of its node.
      network: bytes per second that a device sends to another node.
      latency: seconds that a collective takes at least.
      node: devices of a node.
    """

    products: float = 600e12
    products32: float = 250e12
    grouped: float = 400e12
    forward: float = 500e12
    backward: float = 400e12
    memory: float = 2.9e12
    link: float = 360e9
    network: float = 40e9
    latency: float = 8e-6
    node: int = 8


H100 = Rates()
"""Assumed: 61 % of the datasheet's peak in products, half and less in attention and in grouped products, 87 % of its
bandwidth, 80 % of NVLink's and of the network's."""
