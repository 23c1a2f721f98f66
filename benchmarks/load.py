"""Weights from a folder: a language model in bfloat16, read by two processes into fp32 shards of eight devices.

For comparison safetensors alone copies the same tensors in the same processes, half of them in each. The files are in
the system's cache, so no disk is measured. Memory is counted beyond that at the start, without mapped files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.one_core import checkout_environment
from mmjax.bench.rows import Row, at_least, at_most
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.weights import rows, to_hf_config
from mmjax.weights.table import Shape, expand
from mmjax.weights.write import write

PROCESSES, DEVICES = 2, 4
"""Processes, and devices of each."""
FILES = 5
_LAYER_BYTES = 2 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632)
_MEMORY = at_most(1.2)
_SPEED = at_least(0.1)


def model(gigabytes: int) -> DecoderConfig:
    """A model of about this size in bf16, with the layers of TinyLlama 1.1B."""
    layers = max(1, round(gigabytes * 1e9 / _LAYER_BYTES) - 3)
    return DecoderConfig(layers=layers, width=2048, heads=32, kv_heads=4, mlp=5632, vocab=32000)


def bench_load(rounds: int, gigabytes: int) -> Iterator[Row]:
    """Yields bytes a second, beside safetensors alone, and peak memory beside the size of a process's shards."""
    with tempfile.TemporaryDirectory() as home:
        folder, out = Path(home) / "model", Path(home) / "out"
        _make(model(gigabytes), folder, gigabytes)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        command = [sys.executable, "-m", "mmjax.launch", f"-n={PROCESSES}", f"--devices_per_process={DEVICES}"]
        command += ["-m", "benchmarks.load_part", str(folder), str(out), str(min(rounds, 3))]
        subprocess.run(command, check=True, env=checkout_environment(), stdout=subprocess.DEVNULL)
        parts = [json.loads(Path(f"{out}.{number}").read_text()) for number in range(PROCESSES)]
    speed = size / max(median(part["seconds"]) for part in parts) / 1e9
    safetensors_speed = size / max(median(part["alone"]) for part in parts) / 1e9
    peak_share = max(part["peak"] / part["bytes"] for part in parts)
    case = f"{size / 1e9:.1f} GB in bf16, {PROCESSES} processes"
    yield Row(bench="load", case=f"{case}: into fp32 shards", value=speed, unit="GB/s")
    yield Row(bench="load", case=f"{case}: safetensors alone", value=safetensors_speed, unit="GB/s")
    yield Row(bench="load", case=f"{case}: ours / alone", value=speed / safetensors_speed, unit="ratio", target=_SPEED)
    yield Row(bench="load", case=f"{case}: peak memory / own part", value=peak_share, unit="ratio", target=_MEMORY)


def _make(config: DecoderConfig, folder: Path, gigabytes: int) -> None:
    """Writes a folder of random numbers, since pages of zeros would cost nothing."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(config.width, max(config.mlp, config.vocab))).astype(np.float32)

    def leaf(shape: Shape) -> np.ndarray:
        if len(shape) == 1:
            return noise[0, : shape[0]]
        return noise[: shape[0], : shape[1]] if shape[0] <= config.width else noise.T[: shape[0], : shape[1]]

    shapes = leaf_shapes(config)

    def read(names: Collection[str]) -> Mapping[str, np.ndarray]:
        return {name: leaf(shapes[name]) for name in names}

    entries, limit = expand(rows(config), config.layers), round(gigabytes * 1e9 / FILES)
    write(to_hf_config(config), entries, read, folder, dtype="bfloat16", shard_bytes=limit)


def leaf_shapes(c: DecoderConfig) -> dict[str, Shape]:
    """Shapes of the model's leaves by name in the module."""
    d, kv = c.width, c.kv_heads * c.head_width
    layer: dict[str, Shape] = {
        **{"attn/q": (d, d), "attn/k": (d, kv), "attn/v": (d, kv), "attn/o": (d, d), "attn_norm": (d,)},
        **{"mlp/gate": (d, c.mlp), "mlp/up": (d, c.mlp), "mlp/down": (c.mlp, d), "mlp_norm": (d,)},
    }
    named = {f"layers/{i:03d}/{name}": shape for i in range(c.layers) for name, shape in layer.items()}
    return named | {"embed": (c.vocab, d), "norm": (d,), "head": (d, c.vocab)}
