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
from mmjax.models.config import LLM
from mmjax.models.graph import MultimodalModel
from mmjax.models.nodes import Edge, Node
from mmjax.models.parameters import join_logical
from mmjax.models.stage_model import StageModel
from mmjax.reference.arithmetic import Leaves
from mmjax.reference.callbacks import one_device
from mmjax.reference.positions import cut_patches, patch_positions


def encode_alone(
    leaves: Leaves, name: str, model: MultimodalModel, medium: np.ndarray, levels: tuple[int, ...] = ()
) -> tuple[jax.Array, list[jax.Array], dict[str, jax.Array]]:
    """The encoder's stage with its projector, over a row that holds one medium and nothing else.

    Returns:
      Its modality tokens, the outputs of some of its layers, and the sums of its losses by name.

    Raises:
      ValueError: the encoder reads host inputs that are not made of a medium.
    """
    stage, run = _program(name, model.nodes[name], model.nodes[LLM], tuple(sorted({*levels})))
    given = row_of(model.nodes[name], medium)
    if unknown := set(stage.inputs) - set(given):
        raise ValueError(f"{name}: its first stage reads {sorted(unknown)}; the data side makes {sorted(given)}")
    named: Any = leaves  # of numpy too, which a traceable function takes as well
    params = {}
    for part in stage.slices:
        flat, tree = jax.tree.flatten(part.leaves())
        params[part.module] = jax.tree.unflatten(tree, join_logical(flat, named))
    found, losses = run(params, {key: given[key] for key in stage.inputs})
    width, each, rising = model.token_width(name), model.nodes[name].module.merged_width, sorted({*levels})
    starts = (width + each * rising.index(level) for level in levels)
    spec = model.nodes[name].module.medium
    assert spec
    first = -(-spec.special // spec.patches_per_token)  # these tokens hold no patch
    return found[0, first:, :width], [found[0, first:, start : start + each] for start in starts], losses


def patches_of(node: Node, medium: np.ndarray) -> int:
    """Number of patches of a medium."""
    spec = node.module.medium
    assert spec
    return int(row_of(node, medium)["segments"].sum()) - spec.special


@functools.lru_cache(maxsize=16)
def _program(name: str, node: Node, llm: Node, levels: tuple[int, ...]) -> tuple[StageModel, Callable[..., Any]]:
    edge = Edge(name, LLM, f"{name}_index", tuple(range(len(levels))), levels)
    model = MultimodalModel({name: node, LLM: llm}, (edge,))
    stage = model.stages({name: Layout(), LLM: Layout()})[0]
    submesh, whole = one_device(), PartitionSpec()

    def forward(params: Any, inputs: Mapping[str, jax.Array]) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        features, axes = stage.forward(params, inputs, {}, submesh.axes, 1), submesh.axes
        losses = stage.loss(params, inputs, features, axes) if stage.loss else {}
        return stage.give(params, inputs, features, axes) if stage.give else features, losses

    return stage, jax.jit(jax.shard_map(forward, mesh=submesh.mesh, in_specs=(whole, whole), out_specs=whole))


def row_of(node: Node, medium: np.ndarray) -> dict[str, np.ndarray]:
    """Host inputs of one row that holds this medium; places without a patch come first, up to a whole LLM token."""
    spec = node.module.medium
    assert spec
    if spec.axes == 1:
        patches = medium.reshape(len(medium) // spec.patch, -1)
        positions = np.arange(len(patches), dtype=np.int32)[:, None]
    else:
        patches = cut_patches(medium, spec.patch, spec.merge)
        rows, columns = (side // spec.patch for side in medium.shape[:2])
        positions = patch_positions(rows, columns, spec.merge)
    whole = -(-spec.special // spec.patches_per_token) * spec.patches_per_token
    first = np.arange(whole) < spec.special
    segments = np.concatenate([first, np.ones(len(patches), bool)]).astype(np.int32)
    patches = np.concatenate([np.zeros((whole, patches.shape[1])), patches]).astype(np.float32)
    numbers = np.where(first, -1 - np.arange(whole), 0).astype(np.int32)
    positions = np.concatenate([np.stack([numbers] * spec.axes, axis=1), positions])
    return {"patches": patches[None], "segments": segments[None], "positions": positions[None]}
