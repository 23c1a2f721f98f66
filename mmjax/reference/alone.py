"""An encoder that the reference does not know, such as a user's own: its own code, over one medium on one device.

So a comparison sees what layouts, packing, boundaries and schedules do to it, and not an error in its own arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.models.config import LLM
from mmjax.models.graph import Edge, MultimodalModel, Node, StageModel
from mmjax.models.parameters import join_logical
from mmjax.reference.arithmetic import Leaves
from mmjax.reference.positions import cut_patches, patch_positions


def encode_alone(leaves: Leaves, name: str, model: MultimodalModel, medium: np.ndarray) -> jax.Array:
    """Modality tokens of one medium: the encoder's stage with its projector, over a row that holds nothing else.

    Raises:
      ValueError: the encoder reads host inputs that are not made of a medium.
    """
    stage, run = _program(name, model.nodes[name], model.nodes[LLM])
    given = _row(model.nodes[name], medium)
    if unknown := set(stage.inputs) - set(given):
        raise ValueError(f"{name}: its first stage reads {sorted(unknown)}; the data side makes {sorted(given)}")
    named: Any = leaves  # of numpy too, which a traceable function takes as well
    params = {}
    for part in stage.slices:
        flat, tree = jax.tree.flatten(part.leaves())
        params[part.module] = jax.tree.unflatten(tree, join_logical(flat, named))
    return run(params, {key: given[key] for key in stage.inputs})[0]


@functools.lru_cache(maxsize=16)
def _program(name: str, node: Node, llm: Node) -> tuple[StageModel, Callable[..., jax.Array]]:
    model = MultimodalModel({name: node, LLM: llm}, (Edge(name, LLM, f"{name}_index"),))
    stage = model.stages({name: Layout(), LLM: Layout()})[0]
    config: Any = jax.config  # whose options have no types
    device = config.jax_default_device or jax.devices()[0]
    submesh, whole = Submesh.of(Layout(), (0,), [device]), PartitionSpec()

    def forward(params: Any, inputs: Mapping[str, jax.Array]) -> jax.Array:
        return stage.forward(params, inputs, {}, submesh.axes, 1)

    return stage, jax.jit(jax.shard_map(forward, mesh=submesh.mesh, in_specs=(whole, whole), out_specs=whole))


def _row(node: Node, medium: np.ndarray) -> dict[str, np.ndarray]:
    """Host inputs of one row that holds this medium."""
    spec = node.module.medium
    assert spec
    if spec.axes == 1:
        patches = medium.reshape(len(medium) // spec.patch, -1)
        positions = np.arange(len(patches), dtype=np.int32)[:, None]
    else:
        patches = cut_patches(medium, spec.patch, spec.merge)
        rows, columns = (side // spec.patch for side in medium.shape[:2])
        positions = patch_positions(rows, columns, spec.merge)
    ones = np.ones((1, len(patches)), np.int32)
    return {"patches": patches[None].astype(np.float32), "segments": ones, "positions": positions[None]}
