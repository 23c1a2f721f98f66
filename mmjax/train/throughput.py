"""Rates of a step: tokens, media, model FLOPs, padding and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from mmjax.attention.mask import Mask
from mmjax.data.process_rows import PartialArray
from mmjax.data.types import StepBatch
from mmjax.mesh.world import World
from mmjax.models.flops import segment_lengths, training_flops, visible_pairs
from mmjax.models.graph import MultimodalModel
from mmjax.models.module import Module

# Dense bf16 peak of one device in TFLOP/s, from the vendors' data sheets, by a part of JAX's device kind.
PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "H800": 989.0,
    "L20": 119.5,
    "A40": 149.7,
}


class Throughput:
    """Measures steps of one run."""

    def __init__(self, model: MultimodalModel, world: World, frozen: Collection[str], peak_tflops: float):
        """Looks up the devices' peak; ``peak_tflops`` above 0 overrides it.

        ``frozen`` are names of parts that are not trained, such as "vision_projector".
        """
        self.model, self.world, self.frozen = model, world, frozen
        kind = world.devices[0].device_kind
        self.peak = peak_tflops or next((peak for name, peak in PEAK_TFLOPS.items() if name in kind), None)

    def flops(self, batch: StepBatch) -> int:
        """Model FLOPs of a step on all devices together; real tokens count, padding does not.

        For a mask of words the pairs in the rows of this process are counted. In all other rows the same share of the
        causal pairs is assumed.
        """
        lengths: dict[str, list[int]] = {name: [] for name in self.model.nodes}
        pairs: dict[str, Counter[Mask]] = {name: Counter() for name in self.model.nodes}
        for microbatch in batch.microbatches:
            for name, inputs in microbatch.inputs.items():
                medium = self.model.nodes[name].module.medium
                special = medium.special if medium else 0
                lengths[name] += [length - special for length in segment_lengths(inputs["segments"])]
                pairs[name].update(_pairs(self.model.nodes[name].module, inputs))
        return sum(training_flops(self.model, lengths, self.frozen, pairs).values())

    def measure(self, batch: StepBatch, seconds: float) -> dict[str, Any]:
        """Columns of ``metrics.jsonl`` for a step that took ``seconds``.

        They are tokens_per_s, media_per_s, tflops_per_device, mfu, padding and peak_memory_bytes; ``mfu`` and
        ``peak_memory_bytes`` are ``None`` where the devices' peak or memory is unknown.
        """
        counts = batch.counts
        tflops = self.flops(batch) / seconds / self.world.size / 1e12
        nodes = self.model.nodes.items()
        names = [f"{name}_patches" if node.module.medium else f"{name}_tokens" for name, node in nodes]
        real = sum(counts[name] for name in names)
        padded = sum(counts[f"{name}_padded"] for name in names)
        return {
            "tokens_per_s": counts["llm_tokens"] / seconds,
            "media_per_s": counts["media"] / seconds,
            "tflops_per_device": tflops,
            "mfu": tflops / self.peak if self.peak else None,
            "padding": 1 - real / padded,
            "peak_memory_bytes": self._peak_memory(),
        }

    def _peak_memory(self) -> int | None:
        local = [
            self.world.devices[rank] for rank in sorted(self.world.local_ranks)
        ]  # those of other processes cannot be read
        stats = [device.memory_stats() or {} for device in local]
        peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
        return max(peaks) if peaks else None


def _pairs(module: Module, inputs: Mapping[str, Any]) -> dict[Mask, int]:
    """``visible_pairs`` of a microbatch; this process may hold only some of its rows, or none."""
    words = inputs.get("is")
    if not isinstance(words, PartialArray):
        return dict(visible_pairs(module, inputs))
    rows = [row for row in range(len(inputs["segments"])) if words.row(row) is not None]
    if not rows:
        return {}
    names = {"segments", "order", *module.remembers} & inputs.keys()
    local_inputs = {name: np.stack([inputs[name][row : row + 1][0] for row in rows]) for name in names}
    local_pairs, all_rows = (
        _causal(segment_lengths(segments)) for segments in (local_inputs["segments"], inputs["segments"])
    )
    return {
        mask: round(pairs * all_rows / max(local_pairs, 1))
        for mask, pairs in visible_pairs(module, local_inputs).items()
    }


def _causal(lengths: Iterable[int]) -> int:
    return sum(n * (n + 1) // 2 for n in lengths)
