"""Folders of safetensors for drawn runs, as Hugging Face's tools write them: small language models, random numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
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
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
SAMPLES = {
    "model.layers.1.self_attn.k_proj.weight": ("params/llm/layers/001/attn/k", True),
    EMBED: ("params/llm/embed", False),
}
"""Tensors of a folder, each with its leaf in a checkpoint, and whether it is stored transposed."""


def write_folder(folder: Path, *, tied: bool = False) -> None:
    """Makes the folder and writes ``config.json`` and ``model.safetensors`` of a model with ``SETTINGS``, in bf16.

    With ``tied`` its head is the embedding table, and both are in the file, as in some that are published.
    """
    settings = replace(SETTINGS, tied=tied)
    module, generator = Llama(settings), np.random.default_rng(0)
    runs = tuple(run for run, _ in layer_runs(module, range(settings.layers)))
    leaves = jax.tree.leaves(ModuleSlice("llm", runs, module.parts(first=True, last=True)).leaves())
    shapes = {name.removeprefix("llm/"): leaf.logical_shape for leaf in leaves for name in leaf.names}

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        return {name: generator.normal(size=shapes[name], scale=0.2).astype(np.float32) for name in names}

    hf_config = to_hf_config(settings)
    entries = expand(rows(settings, hf_config["model_type"]), settings.layers)
    write(hf_config, entries, read, folder, dtype="bfloat16")
    if tied:
        from safetensors.numpy import load_file, save_file

        path = folder / "model.safetensors"
        tensors = load_file(path)
        save_file({**tensors, HEAD: tensors[EMBED]}, path, metadata={"format": "pt"})
