"""The two models of BigMac's evaluation as configurations, and rows of data for them.

"BigMac: Breaking the Pareto Frontier of Compute and Memory in Multimodal LLM Training", §4.1, has
Qwen3-30B-A3B and a ViT of 1.3B parameters for understanding, and an MMDiT of 20B as in Qwen-Image besides for
generation; rows of 8K tokens; everything trained. The paper gives no shape of the ViT, no lengths in rows,
and no recomputation. `configs/bigmac_understanding.gin` and `bigmac_generation.gin` choose these; FLOPs, parameters and
bytes are those of their modules, as `mmjax.plan` reads them.

* ViT: 40 layers of width 1664 with MLPs of four times that, 1.33B parameters; four patches make a token.
* Generator: a DiT of 20.2B parameters, 64 layers of width 5120. mmjax has no MMDiT, which has a stream for each of
  picture and text and so about a third of its parameters in a token's products: a token costs three times as much here.
  Its condition is not in its rows but in the LLM's: a drawn picture has a token there for four of its patches.
* Recompute: ViT and DiT run their forwards again (`remat = 'full'`). The LLM keeps its products (`'dots'`) unless there
  is a generator, beside which they find no room. Layers are unrolled, as on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mmjax.assembly.model import build_model
from mmjax.config import load_config
from mmjax.data.loader import tokenizer_of
from mmjax.models import flops
from mmjax.models.config import LLM
from mmjax.models.graph import MultimodalModel
from mmjax.plan.work import read_work
from mmjax.planner.work import ModuleWork, Work
from mmjax.recipe import Recipe

CONFIGS = Path(__file__).parents[2] / "configs"
VISION, PAINTER = "vision", "painter"
SEQUENCE = 8192
"""Tokens of an LLM row."""
MERGE = 4
"""Patches that make a token of the LLM, and patches that a token draws."""
TP = 4
"""Ranks that share a generator's weights on a lane."""
TPS = {VISION: (1,), LLM: (1,), PAINTER: (1, TP)}
SEED = 3


@dataclass(frozen=True)
class Row:
    """The pictures of one row of the LLM.

    Attributes:
      read: patches of each picture that the encoder reads.
      drawn: patches of each picture that the generator draws.
    """

    read: tuple[int, ...]
    drawn: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model on its data.

    Attributes:
      name: "understanding" or "generation".
      generator: whether a generator draws.
      text: median of the tokens of a pair's text.
      remat: the LLM's `remat`.
    """

    name: str
    generator: bool
    text: int
    remat: str

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules, sources first."""
        return (VISION, LLM, PAINTER) if self.generator else (VISION, LLM)

    @property
    def work(self) -> Work:
        """The work of the modules, as a plan has it."""
        return _work(self)

    def lengths(self, module: str, row: Row) -> Sequence[int]:
        """Lengths of the pieces of a row in a module; attention is within a piece."""
        return {VISION: row.read, LLM: (SEQUENCE,), PAINTER: row.drawn}[module]

    def rows_of(self, module: str, row: Row) -> float:
        """Tokens of a row in a module, counted in the rows for which `work` has its FLOPs and bytes."""
        return sum(self.lengths(module, row)) / self.work.modules[module].width

    def module_work(self, module: str, row: Row) -> ModuleWork:
        """The work of a module with the FLOPs of a row, whose pieces do not see each other.

        They are those of the row over `rows_of(module, row)`: of a row of the module's width.
        """
        work, rows = self.work.modules[module], self.rows_of(module, row)
        if not rows:  # a row without such pictures
            return work
        factor = _flops(self.name, module, self.lengths(module, row)) / (rows * work.forward.of(work.whole))
        return work.with_flops(factor)

    def rows(self, count: int) -> tuple[Row, ...]:
        """The first `count` rows of whole pairs."""
        return _rows(self, count)

    def draw(self, random: np.random.Generator) -> Row:
        """Draws the next row."""
        read, drawn, left = [], [], SEQUENCE
        while True:
            patches, text, picture = self._pair(random)
            tokens = patches // MERGE + text + picture // MERGE
            if tokens > left:
                return Row(read=tuple(read), drawn=tuple(drawn))
            left -= tokens
            read += [patches] if patches else []
            drawn += [picture] if picture else []

    def _pair(self, random: np.random.Generator) -> tuple[int, int, int]:
        """Draws patches of the input picture, tokens of text, and patches of the output picture."""
        patches = MERGE * round(_lognormal(random, 1024, sigma=1.0, least=64, most=16384) / MERGE)
        text = round(_lognormal(random, self.text, sigma=1.0, least=8, most=2048))
        if not self.generator:
            return patches, text, 0
        kind = random.integers(3)  # 0 reads no picture, 2 has no text
        picture = MERGE * round(_lognormal(random, 1024, sigma=0.5, least=256, most=4096) / MERGE)
        return patches if kind else 0, text if kind < 2 else 0, picture


@cache
def _recipe(name: str) -> Recipe:
    return load_config([CONFIGS / f"bigmac_{name}.gin"], ["Train.unroll=True"])


@cache
def _work(workload: Workload) -> Work:
    recipe = _recipe(workload.name)
    remat = {module: (workload.remat if module == LLM else "full",) for module in recipe.model}
    return read_work(recipe, options=remat, tps={module: TPS[module] for module in recipe.model})


@cache
def _model(name: str) -> MultimodalModel:
    recipe = _recipe(name)
    return build_model(recipe, tokenizer_of(recipe.data.settings, recipe.model.media))


@cache
def _flops(name: str, module: str, lengths: tuple[int, ...]) -> float:
    """Forward FLOPs of a module and its projector for pieces of these lengths."""
    model = _model(name)
    counted = flops.forward_flops(model, {module: lengths})
    return sum(counted[part] for part in model.parts_of(module))


@cache
def _rows(workload: Workload, count: int) -> tuple[Row, ...]:
    random = np.random.default_rng(SEED)
    return tuple(workload.draw(random) for _ in range(count))


def _lognormal(random: np.random.Generator, median: float, *, sigma: float, least: float, most: float) -> float:
    return float(np.clip(random.lognormal(np.log(median), sigma), least, most))


UNDERSTANDING = Workload(name="understanding", generator=False, text=64, remat="dots")
GENERATION = Workload(name="generation", generator=True, text=256, remat="full")
WORKLOADS = (UNDERSTANDING, GENERATION)
"""MLLM-Understanding and MLLM-Generation.

Pairs of a picture of 1,024 patches (median; lognormal, σ = 1, 64 to 16,384) and a text (σ = 1, 8 to 2,048 tokens) fill
rows; texts to draw from are longer. For generation three kinds of pairs are equally frequent: text to image, text and
image to image, image to image. A drawn picture has 1,024 patches (σ = 0.5, 256 to 4,096), which is 512 by 512 pixels.
"""
