"""Merges low-rank adapters into the weights: W + (alpha / rank) A B."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mmjax.reference.arithmetic import Leaves, dense_leaves, matmul, module_of

if TYPE_CHECKING:
    from mmjax.models.graph import MultimodalModel


def merged(leaves: Leaves, model: MultimodalModel) -> tuple[Leaves, MultimodalModel]:
    """The pair (leaves, model) of an equivalent model without adapters; differentiable in the leaves.

    `leaves` are logical leaves by name, such as "llm/layers/000/attn/q"; with adapters the result's are fp32. `model`
    is as `build_model(recipe, tokenizer)` gives it.

    The leaves of modules such as "llm_lora" are left out. Without adapters, both arguments are returned as they are.
    """
    adapted = {f"{name}_lora": name for name, node in model.nodes.items() if node.lora.rank}
    if not adapted:
        return leaves, model
    dense = dense_leaves(leaves)
    result = {key: leaf for key, leaf in dense.items() if module_of(key) not in adapted}
    for key, a in dense.items():
        if module_of(key) in adapted and key.endswith("/a"):
            module, name = module_of(key), adapted[module_of(key)]
            lora, weight = model.nodes[name].lora, key.removeprefix(module).removesuffix("/a")
            product = matmul(a, dense[f"{module}{weight}/b"])
            result[f"{name}{weight}"] = dense[f"{name}{weight}"] + lora.alpha / lora.rank * product
    plain = {name: dataclasses.replace(node, lora=type(node.lora)()) for name, node in model.nodes.items()}
    return result, dataclasses.replace(model, nodes=plain)
