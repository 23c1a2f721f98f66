"""New tokens a second with a cache of keys and values, beside computing every row again for each token.

The model is that of the digits with one layer of its encoder, on one device; eight prompts in rows of 128 tokens are
continued by 64. With a cache and without it the same program runs over the prompts. Without a cache it runs
again for each token, with its encoder, over the prompt and all new tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.steps import ALWAYS, in_turn
from mmjax.assembly.assembly import place
from mmjax.assembly.samples import open_source
from mmjax.bench.rows import Row, at_least
from mmjax.config import load_config
from mmjax.config.shipped import CONFIGS
from mmjax.eval.evaluator import Evaluator
from mmjax.models.config import LLM

ROWS, NEW = 8, 64
CHANGES = (
    *("vision/ViT.layers=1", "Data.sequence_length=128", f"Train.global_batch={ROWS}", "Train.microbatches=1"),
    "World.compilation_cache=none",
)


class Continuing:
    """A model with prompts, ready to continue them."""

    def __init__(self) -> None:
        recipe = load_config([CONFIGS / "digits_vlm_one_device.gin"], [*ALWAYS, *CHANGES])
        parts, source = place(recipe), open_source(recipe, split="test")
        self._evaluator = Evaluator(parts)
        self._predictor = self._evaluator.predictor
        key, stages = jax.random.key(0), parts.placed.local_stages
        self._predictor.load({name: stage.state.initialise(key) for name, stage in stages.items()})
        ((_, self._round),) = self._evaluator.rounds([source.sample(index) for index in range(ROWS)])
        longest = max(int(start.max()) for start in self._round.starts)
        assert longest + NEW <= recipe.data.settings.sequence_length, (
            f"prompts of {longest} tokens leave no room for {NEW}"
        )
        self._predictor.compile()
        assert self.with_cache() == self.without_cache(), "a cache changes the new tokens"

    def with_cache(self) -> list[list[int]]:
        """The new tokens of every row."""
        generated = self._predictor.generate(self._round.batch, self._round.starts, NEW, ())
        return [row.tokens for row in generated[0]]

    def without_cache(self) -> list[list[int]]:
        """The new tokens of every row, computing the whole row again for each token."""
        ((signature, inputs),) = self._round.batch
        llm_inputs = {name: np.array(array) for name, array in inputs[LLM].items()}
        batch: Any = [(signature, {**inputs, LLM: llm_inputs})]
        ends, new_tokens = self._round.starts[0].copy(), [list[int]() for _ in self._round.starts[0]]
        for _ in range(NEW):
            (rows,) = self._predictor.generate(batch, [ends], 1, ())
            for row in np.flatnonzero(ends):
                new_tokens[row] += rows[row].tokens
                llm_inputs["tokens"][row, ends[row]] = rows[row].tokens[0]
                llm_inputs["segments"][row, ends[row]], llm_inputs["positions"][row, ends[row]] = 1, ends[row]
                ends[row] += 1
        return new_tokens


def bench_generate(rounds: int) -> Iterator[Row]:
    """Yields tokens a second with and without a cache, taken in turn, and their ratio."""
    continuing = Continuing()
    methods: Any = {"with a cache": continuing.with_cache, "every row again": continuing.without_cache}
    times = in_turn(methods, rounds)
    for method, seconds in times.items():
        rate = ROWS * NEW / statistics.median(seconds)
        yield Row(bench="generate", case=f"digits' model, one device: {method}", value=rate, unit="tokens/s")
    ratios = [slow / fast for fast, slow in zip(*times.values(), strict=True)]
    ratio, case = statistics.median(ratios), "digits' model, one device: with a cache / again"
    yield Row(bench="generate", case=case, value=ratio, unit="ratio", target=at_least(2.0))
