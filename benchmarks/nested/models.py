"""The two models of BigMac's evaluation as formulas: FLOPs, bytes and parameters of a layer for a row of tokens.

"BigMac: Breaking the Pareto Frontier of Compute and Memory in Multimodal LLM Training", §4.1, has
Qwen3-30B-A3B and a ViT of 1.3B parameters for understanding, and an MMDiT of 20B as in Qwen-Image besides for
generation; rows of 8K tokens; everything trained. The paper gives no shape of the ViT, no lengths in rows,
and no recomputation. These are chosen here and marked so.

* Qwen3-30B-A3B (its config.json): 48 layers of width 2048, 32 heads of 128 on 4 of keys and values, 128 experts of
  width 768 of which 8 are active, a vocabulary of 151,936 that is not tied. 30.5B parameters, 3.3B active.
* MMDiT (Qwen-Image's transformer/config.json): 60 layers of width 3072 with two streams, 20.4B parameters. A third of
  them modulates by time, once a picture; no FLOPs are counted for it.
* ViT, chosen: 40 layers of width 1664 with MLPs of four times that, 1.33B parameters; four patches make a token.
* Recompute, chosen: ViT and MMDiT save a layer's input alone and run its forward again. The LLM saves the inputs of
  products; norms and activation functions are computed again, which is counted as free. The head's loss is computed in
  pieces, and saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

SEQUENCE = 8192
"""Tokens of an LLM row."""
MERGE = 4
"""Patches that make a token of the LLM."""
SEED = 3
BF16 = 2


@dataclass(frozen=True)
class Row:
    """The pictures of one row of the LLM.

    Attributes:
      read: patches of each picture that the encoder reads.
      drawn: tokens of each picture that the generator draws, with the tokens of its condition.
    """

    read: tuple[int, ...]
    drawn: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A module of equal layers. Numbers are of one layer; numbers of a token add up over a row's tokens.

    Attributes:
      name: the module's name.
      layers: number of layers.
      lengths: the lengths of the pieces of a row; attention is within a piece.
      token: FLOPs of a token's products in forward.
      pair: FLOPs of attention for each pair of positions of a piece.
      saved: bytes of a token that are saved from F to B.
      deferred: bytes of a token that are saved from B to W where a backward is split.
      working: further bytes of a token during an op.
      parameters: parameters, experts excluded.
      experts: parameters of all experts.
      first, last: parameters before the first layer and behind the last.
      all_to_all: bytes of a token that go to experts and come back, in forward and in backward each.
      recompute: whether the backward runs the forward again.
      sharded: whether parameters are sharded over a node, and gathered by every op that uses them.
      head: the time of the parts behind the last layer, in layers.
    """

    name: str
    layers: int
    lengths: Callable[[Row], Sequence[int]]
    token: float
    pair: float
    saved: float
    deferred: float
    working: float
    parameters: float
    experts: float = 0.0
    first: float = 0.0
    last: float = 0.0
    all_to_all: float = 0.0
    recompute: bool = False
    sharded: bool = False
    head: int = 0

    @property
    def all_parameters(self) -> float:
        """Parameters of the whole module."""
        return self.layers * (self.parameters + self.experts) + self.first + self.last

    def tokens(self, row: Row) -> int:
        """Tokens that the module computes for a row."""
        return sum(self.lengths(row))

    def flops(self, row: Row) -> float:
        """FLOPs of one layer's forward of a row."""
        return sum(n * self.token + n * n * self.pair for n in self.lengths(row))


def _qwen3_30b_a3b() -> Stack:
    width, heads, kv_heads, head, experts, active, expert, vocabulary = 2048, 32, 4, 128, 128, 8, 768, 151936
    queries, keys = heads * head, kv_heads * head
    attention = 2 * width * queries + 2 * width * keys
    router, one_expert = width * experts, 3 * width * expert
    # Inputs of products for a token: both residual streams (norms are recomputed), q, k, v, the attended values, the
    # experts' copies, and the outputs of their two projections (the activation function is recomputed).
    saved = 2 * width + queries + 2 * keys + queries + active * (width + 2 * expert)
    # Inputs and output gradients of the products: of q, k, v and out, of the router, and of each active expert's three.
    products = (width + queries + 2 * keys) + (queries + width) + (width + experts)
    deferred = products + active * (width + 2 * expert + expert + width)
    token = 2 * (attention + router + active * one_expert)
    embedding = vocabulary * width
    return Stack(
        name="llm",
        layers=48,
        lengths=lambda _: (SEQUENCE,),
        token=token,
        pair=4 * queries / 2,  # causal: half of all pairs
        saved=BF16 * saved,
        deferred=BF16 * deferred,
        working=BF16 * (saved + active * (2 * width + expert)),
        parameters=attention + router,
        experts=experts * one_expert,
        first=embedding,
        last=embedding,
        all_to_all=BF16 * 2 * active * width,
        head=2,  # 2 · 151,936 · 2048 FLOPs a token; a layer takes 1.9 times less with its all-to-all
    )


def _transformer(
    name: str,
    layers: int,
    width: int,
    lengths: Callable[[Row], Sequence[int]],
    *,
    parameters: float,
    sharded: bool = False,
) -> Stack:
    """Layers of attention and an MLP of four times the width: 12 · width² active parameters for a token."""
    return Stack(
        name=name,
        layers=layers,
        lengths=lengths,
        token=2 * 12 * width**2,
        pair=4 * width,
        saved=BF16 * width,
        deferred=BF16 * 16 * width,  # inputs: 1 + 1 + 1 + 4 widths, output gradients: 3 + 1 + 4 + 1
        working=34 * width,  # Korthikanti et al. 2022, §4.1, as `mmjax.planner.analytic` has it
        recompute=True,
        parameters=parameters,
        sharded=sharded,
    )


VIT = _transformer("vision", 40, 1664, lambda row: row.read, parameters=12 * 1664**2)
LLM = _qwen3_30b_a3b()
MMDIT = _transformer(
    "generator",
    60,
    3072,
    lambda row: row.drawn,
    parameters=(2 * 12 + 2 * 6) * 3072**2,  # two streams, and the modulation of each
    sharded=True,
)


# ---- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model on its data.

    Attributes:
      name: "understanding" or "generation".
      generator: whether the MMDiT draws.
      text: median of the tokens of a pair's text.
    """

    name: str
    generator: bool
    text: int

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The modules, sources first."""
        return (VIT, LLM, MMDIT) if self.generator else (VIT, LLM)

    def rows(self, count: int) -> tuple[Row, ...]:
        """The first `count` rows of whole pairs."""
        return _rows(self, count)

    def draw(self, random: np.random.Generator) -> Row:
        """Draws the next row."""
        read, drawn, left = [], [], SEQUENCE
        while True:
            patches, text, picture = self._pair(random)
            tokens = patches // MERGE + text
            if tokens > left:
                return Row(read=tuple(read), drawn=tuple(drawn))
            left -= tokens
            read += [patches] if patches else []
            drawn += [picture + tokens] if picture else []

    def _pair(self, random: np.random.Generator) -> tuple[int, int, int]:
        """Draws patches of the input picture, tokens of text, and tokens of the output picture alone."""
        patches = MERGE * round(_lognormal(random, 1024, sigma=1.0, least=64, most=16384) / MERGE)
        text = round(_lognormal(random, self.text, sigma=1.0, least=8, most=2048))
        if not self.generator:
            return patches, text, 0
        kind = random.integers(3)  # 0 reads no picture, 2 has no text
        picture = round(_lognormal(random, 1024, sigma=0.5, least=256, most=4096))
        return patches if kind else 0, text if kind < 2 else 0, picture


@cache
def _rows(workload: Workload, count: int) -> tuple[Row, ...]:
    random = np.random.default_rng(SEED)
    return tuple(workload.draw(random) for _ in range(count))


def _lognormal(random: np.random.Generator, median: float, *, sigma: float, least: float, most: float) -> float:
    return float(np.clip(random.lognormal(np.log(median), sigma), least, most))


UNDERSTANDING = Workload(name="understanding", generator=False, text=64)
GENERATION = Workload(name="generation", generator=True, text=256)
WORKLOADS = (UNDERSTANDING, GENERATION)
"""MLLM-Understanding and MLLM-Generation.

Pairs of a picture of 1,024 patches (median; lognormal, σ = 1, 64 to 16,384) and a text (σ = 1, 8 to 2,048 tokens) fill
rows; texts to draw from are longer. For generation three kinds of pairs are equally frequent: text to image, text and
image to image, image to image. A drawn picture has 1,024 tokens (σ = 0.5, 256 to 4,096), which is 512 by 512 pixels.
"""
