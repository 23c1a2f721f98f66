"""Layouts, the world's devices, submeshes and the boundaries between them. Knows no model."""

from mmjax.mesh.boundary import Boundary
from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Axes, Submesh
from mmjax.mesh.world import World, WorldConfig

__all__ = ["Axes", "Boundary", "Layout", "Submesh", "World", "WorldConfig"]
