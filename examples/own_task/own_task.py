"""A task of one's own, in a file of one's own: how many squares of a colour are in an image?

cd examples/own_task
python -m mmjax.train --gin_file=own_task.gin --allow_code
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import mmjax
from mmjax.configurable import configurable

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}
SIDE = 32  # pixels of an image, with places for 16 squares


@configurable("Squares")
@dataclass(frozen=True, kw_only=True)
class SquaresConfig:
    """Settings. most: the most squares of an image, up to 16."""

    most: int = 5


def within_one(sample: mmjax.Sample, answer: str) -> float:
    """Whether an answer is wrong by one at most."""
    return float(answer.isdigit() and abs(int(answer) - int(sample.answer)) <= 1)


class Squares(mmjax.Task):
    """An image of coloured squares, and a question about their number."""

    Config = SquaresConfig
    scores: ClassVar = {"within_one": within_one}

    def open(self, context: mmjax.TaskContext) -> mmjax.Examples:
        blank, most = np.zeros((SIDE, SIDE, 3), np.float32), str(self.config.most)
        largest = mmjax.Example(images=[blank], turns=[("how many green", most)])
        return mmjax.Examples(context, self.example, largest=[largest])

    def example(self, rng: np.random.Generator) -> mmjax.Example:
        image = np.zeros((SIDE, SIDE, 3), np.float32)
        colours = rng.choice(list(COLOURS), rng.integers(1, self.config.most, endpoint=True))
        for colour, place in zip(colours, rng.permutation(16), strict=False):
            row, column = 8 * (place // 4), 8 * (place % 4)
            image[row : row + 6, column : column + 6] = COLOURS[colour]
        asked = rng.choice(list(COLOURS))
        return mmjax.Example(images=[image], turns=[(f"how many {asked}", str(np.sum(colours == asked)))])
