"""Runs an encoder that the reference does not know, such as a user's own, with its own code on one medium and device.

So a comparison finds errors of layouts, packing, boundaries and schedules, but none in the encoder's arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mmjax.mesh.layout import Layout
from mmjax.models.graph import MultimodalModel
from mmjax.models.nodes import Edge, Node
from mmjax.models.parameters import join_logical
from mmjax.models.stage_model import StageModel
from mmjax.reference.arithmetic import Leaves
from mmjax.reference.callbacks import one_device
from mmjax.reference.positions import cut_frames, patch_positions


def run_encoder(
    leaves: Leaves, name: str, model: MultimodalModel, medium: np.ndarray, levels: tuple[int, ...] = ()
) -> tuple[jax.Array, list[jax.Array], dict[str, jax.Array]]:
    """Runs the encoder's stage with its projector on a row that holds one medium alone.

    `leaves` are logical leaves by name, such as "vision/patch/kernel", with those of the encoder `name` and its
    projector. `model` is as `build_model(recipe, tokenizer)` gives it; `medium` is an image [h, w, C] or frames [F, M],
    and `levels` are numbers of layers from 0.

    Returns:
      Modality tokens [n, D]; for each of `levels` the layer's output, with the features of each token's patches side by
        side; and the sums of its losses, by name without the module.

    Raises:
      ValueError: the encoder reads host inputs that `row_of` does not make.
    """
    stage, run = _program(name, tuple(model.nodes.items()), model.edges)
    row = row_of(model.nodes[name], medium)
    if unknown := set(stage.inputs) - set(row):
        raise ValueError(f"{name}: its first stage reads {sorted(unknown)}; the data side makes {sorted(row)}")
    named: Any = leaves  # may be NumPy arrays, which a traceable function takes too
    params = {}
    for part in stage.slices:
        flat, tree = jax.tree.flatten(part.leaves())
        params[part.module] = jax.tree.unflatten(tree, join_logical(flat, named))
    features, losses = run(params, {key: row[key] for key in stage.inputs})
    width, level_width, rising = model.token_width(name), model.nodes[name].module.merged_width, model.levels(name)
    starts = (width + level_width * rising.index(level) for level in levels)
    spec = model.nodes[name].module.medium
    assert spec
    first = -(-spec.special // spec.patches_per_token)  # the tokens before hold no patch
    level_outputs = [features[0, first:, start : start + level_width] for start in starts]
    return features[0, first:, :width], level_outputs, losses


def patches_of(node: Node, medium: np.ndarray) -> int:
    """Number of patches of a medium, an image [h, w, C] or frames [F, M], without special places.

    ``node`` is the encoder's, such as ``model.nodes["vision"]``.
    """
    spec = node.module.medium
    assert spec
    return int(row_of(node, medium)["segments"].sum()) - spec.special


@functools.lru_cache(maxsize=16)
def _program(
    name: str, nodes: tuple[tuple[str, Node], ...], edges: tuple[Edge, ...]
) -> tuple[StageModel, Callable[..., Any]]:
    model = MultimodalModel(dict(nodes), edges)
    stage = next(stage for stage in model.stages(dict.fromkeys(model.nodes, Layout())) if stage.module == name)
    submesh, replicated = one_device(), PartitionSpec()

    def forward(params: Any, inputs: Mapping[str, jax.Array]) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        axes = submesh.axes
        features, _ = stage.forward(params, inputs, {}, axes, 1)
        losses = stage.loss(params, inputs, features, axes) if stage.losses else {}
        return stage.give(params, inputs, features, axes), losses

    return stage, jax.jit(
        jax.shard_map(forward, mesh=submesh.mesh, in_specs=(replicated, replicated), out_specs=replicated)
    )


def row_of(node: Node, medium: np.ndarray) -> dict[str, np.ndarray]:
    """Host inputs of a row that holds this medium alone; special places fill complete LLM tokens before its patches.

    They are "patches" [1, T, X], "segments" [1, T] (1, and 0 for padding among the special places) and "positions" [1,
    T, axes], which are negative at special places. ``node`` is the encoder's, such as ``model.nodes["vision"]``;
    ``medium`` is an image [h, w, C] or frames [F, M].
    """
    spec = node.module.medium
    assert spec
    if spec.axes == 1:
        patches = medium.reshape(len(medium) // spec.patch, -1)
        positions = np.arange(len(patches), dtype=np.int32)[:, None]
    else:
        patches = cut_frames(medium, spec.frames, spec.channels, patch=spec.patch, merge=spec.merge)
        rows, columns = (side // spec.patch for side in medium.shape[:2])
        positions = patch_positions(rows, columns, spec.merge)
    special = -(-spec.special // spec.patches_per_token) * spec.patches_per_token
    first = np.arange(special) < spec.special
    segments = np.concatenate([first, np.ones(len(patches), bool)]).astype(np.int32)
    patches = np.concatenate([np.zeros((special, patches.shape[1])), patches]).astype(np.float32)
    numbers = np.where(first, -1 - np.arange(special), 0).astype(np.int32)
    positions = np.concatenate([np.stack([numbers] * spec.axes, axis=1), positions])
    return {"patches": patches[None], "segments": segments[None], "positions": positions[None]}
