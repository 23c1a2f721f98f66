"""A folder of safetensors for drawn runs, as Hugging Face's tools write one: a small language model, random numbers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import jax
import numpy as np

from mmjax.bench.soak.models import FOLDER_LAYERS
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.module import Llama
from mmjax.models.llama.weights import rows, to_hf_config
from mmjax.models.module import layer_runs
from mmjax.models.parameters import ModuleSlice
from mmjax.weights.table import expand
from mmjax.weights.write import write

SETTINGS = DecoderConfig(
    layers=FOLDER_LAYERS, width=16, heads=4, kv_heads=2, mlp=24, vocab=300, qkv_bias=True, norm_eps=1e-6
)
"""The model of the folder, of Qwen2's family."""
SAMPLE = "model.layers.1.self_attn.k_proj.weight", "params/llm/layers/001/attn/k"
"""A tensor of the folder, which is stored transposed, and its leaf in a checkpoint."""


def write_folder(folder: Path) -> None:
    """Makes the folder and writes ``config.json`` and ``model.safetensors`` of a model with ``SETTINGS``, in bf16."""
    module, generator = Llama(SETTINGS), np.random.default_rng(0)
    runs = tuple(run for run, _ in layer_runs(module, range(SETTINGS.layers)))
    leaves = jax.tree.leaves(ModuleSlice("llm", runs, module.parts(first=True, last=True)).leaves())
    shapes = {name.removeprefix("llm/"): leaf.logical_shape for leaf in leaves for name in leaf.names}

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        return {name: generator.normal(size=shapes[name], scale=0.2).astype(np.float32) for name in names}

    write(to_hf_config(SETTINGS), expand(rows(SETTINGS), SETTINGS.layers), read, folder, dtype="bfloat16")
