"""Pictures of samples with the answers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mmjax.data.types import Sample
from mmjax.viz.predictions import Prediction, as_image, draw_predictions

Drawings = Mapping[str, tuple[np.ndarray, ...]]
"""Media [h, w, C] drawn for one sample, by generator; values in the range that is learned."""


def draw_answers(
    samples: Sequence[Sample],
    answers: Sequence[str] | None,
    path: str | Path | None = None,
    *,
    title: str = "",
    drawings: Sequence[Drawings] = (),
) -> Figure:
    """Draws samples, their media beside question, answer and prediction; also to `path` where one is given.

    Images have the colours that they had before they were normalised. Where `drawings` are given, the model's drawings
    for a sample come after its media. Without `answers` nothing is judged.
    """
    said = answers if answers is not None else [None] * len(samples)
    items = [
        Prediction(
            images=(*_shown(sample), *(as_image((one + 1) / 2) for own in drawn.values() for one in own)),
            question=sample.question,
            answer=sample.answer,
            predicted=answer,
            ok=answer == sample.answer,
            broken=": ".join(sample.broken[1:3]),
        )
        for sample, answer, drawn in zip(samples, said, drawings or [{}] * len(samples), strict=True)
    ]
    return draw_predictions(items, path, title=title)


def _shown(sample: Sample) -> list[np.ndarray | None]:
    """The media that the model sees or hears, as images; `None` for a blank one, which could not be read.

    Media that are to be drawn are left out.
    """
    media = [medium for name, own in sample.media.items() if name not in sample.noise for medium in own]
    blank = [bool(sample.broken) and not medium.any() for medium in media]
    return [None if no else as_image(own, *sample.normalised) for own, no in zip(media, blank, strict=True)]
