"""Seconds of the modules of Cornstarch's Table 1 for one sample, in two ways.

* `by_datasheet`: FLOPs of the shapes below on A40s (149.7 TFLOP/s in bfloat16), of which half is reached. A ratio of
  two steps does not depend on that share, nor on how many devices a stage has. Weights are no bound: 1,600 tokens and
  more do 1,600 FLOPs for each of their bytes, and an A40 is bound by 696 GB/s below 215.
* `by_tables`: medians of the published stage times (Tables 3, 10 and 11) times the numbers of stages in Table 9, over
  all rows of a module. An encoder's are those of both tp, 2 and 4: with 4 they are no shorter. Of an LLM behind both
  encoders nothing is published: its tokens are those behind either, with the text once, which is two thirds of the
  1.5k tokens of the shortest sample (§6.1). The head's share is that of its FLOPs.

The paper has layers, widths and sizes. Shapes are those of the public models of these sizes: Llama 3.2 1B, Llama 3.1
8B and Qwen2.5 32B for the LLMs, EVA ViT-g, EVA-CLIP-8B and EVA-CLIP-18B, and Whisper's, whose hidden units are four
times the width. An image is taken to be resized to 336 pixels, which are 576 tokens as in LLaVA, whose projector the
paper has too; 30 seconds are 1,500 tokens of Whisper. So samples have 1,600, 2,524 and 3,100 tokens ("1.5k~4k").

All modules are frozen, and computed again for their backward (figure 3b, and Tables 3 and 11, whose backwards are
about twice their forwards). Projectors are trained and take no time: 0.05 to 0.73 ms are published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from mmjax.models.config import LLM
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.whisper.config import WhisperConfig
from mmjax.planner.accelerators import A40
from mmjax.schedule.partition import backward_factor
from studies.cornstarch.frozen import MODELS, Case
from studies.cornstarch.tables import AUDIO, VISION
from studies.nvidia.model import by_layer

TEXT, PICTURE, RECORDING = 1024, 576, 1500
"""Tokens of a sample."""
EFFICIENCY = 0.5
TEXT_SHARE = 2 / 3
"""Share of text in the shortest sample of an image and text."""


def _llama(layers: int, width: int, heads: int, mlp: int) -> DecoderConfig:
    return DecoderConfig(layers=layers, width=width, heads=heads, kv_heads=8, mlp=mlp, vocab=128256)


def _eva(layers: int, width: int, mlp: int) -> ViTConfig:
    return ViTConfig(layers=layers, width=width, heads=16, mlp=mlp, patch=14, channels=3, merge=1)


def _whisper(layers: int, width: int) -> WhisperConfig:
    return WhisperConfig(layers=layers, width=width, heads=width // 64, mlp=4 * width, mels=128)


SHAPES: Mapping[str, Mapping[str, Any]] = {
    LLM: {"S": _llama(16, 2048, 32, 8192), "M": _llama(32, 4096, 32, 14336), "L": _llama(64, 5120, 40, 27648)},
    VISION: {"S": _eva(40, 1408, 6144), "M": _eva(32, 4096, 20480), "L": _eva(48, 5120, 25600)},
    AUDIO: {"S": _whisper(32, 1920), "M": _whisper(40, 3840), "L": _whisper(48, 5120)},
}
"""Table 1: by module and size."""
TOKENS = {LLM: TEXT + PICTURE + RECORDING, VISION: PICTURE, AUDIO: RECORDING}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A module of equal layers in seconds, on the devices of one stage.

    Attributes:
      name: "vision", "audio" or "llm".
      layers: number of layers.
      layer: seconds of one layer's forward.
      head: seconds of the forward of what is behind the last layer.
      backward: a backward as a multiple of its forward.
    """

    name: str
    layers: int
    layer: float
    head: float = 0.0
    backward: float = 0.0


Times = Callable[[str, str], Timed]
"""Gives a module, by its name and size."""


def by_datasheet(name: str, size: str) -> Timed:
    """A module by its FLOPs, on one A40."""
    layer, head = _flops(name, size)
    rate, shape = A40.flops * EFFICIENCY, SHAPES[name][size]
    factor = backward_factor(trained=False, trained_before=name == LLM, recompute=True)
    return Timed(name=name, layers=shape.layers, layer=layer / rate, head=head / rate, backward=factor)


def by_tables(name: str, size: str) -> Timed:
    """A module by the published times of stages."""
    layer, head = _flops(name, size)
    layers = SHAPES[name][size].layers
    if name == LLM:
        alone = {encoder: _median(lambda case: case.stages[0] * case.forward[1], size, encoder) for encoder in "VA"}
        seconds = alone["A"] + alone["V"] * (1 - TEXT_SHARE)
        backward = _median(lambda case: case.backward[1] / case.forward[1], size, "A")
    else:
        seconds = _median(lambda case: case.stages[1] * case.forward[0], "SML", name[0].upper(), size)
        backward = 0.0
    seconds /= 1e3  # published in milliseconds
    head = head / (layers * layer + head)
    return Timed(name=name, layers=layers, layer=seconds * (1 - head) / layers, head=seconds * head, backward=backward)


def _median(value: Callable[[Case], float], llms: str, encoder: str, sizes: str = "SML") -> float:
    """The median over the cuts of all models with one of these LLMs and an encoder of one of these sizes.

    encoder: "V" or "A".
    """
    names = {f"LLM-{llm} {encoder}LM-{size}" for llm in llms for size in sizes}
    return median(value(case) for model in MODELS if model.name in names for case in (model.aware, model.unaware))


@cache
def _flops(name: str, size: str) -> tuple[float, float]:
    """FLOPs of a forward in one layer, and outside of layers."""
    return by_layer(lambda module: module.forward_flops([TOKENS[name]]), SHAPES[name][size])
