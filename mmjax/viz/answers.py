"""Pictures of samples with the answers of a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mmjax.assembly.latents import Drawings
from mmjax.data.sample import is_wordless
from mmjax.data.types import Sample
from mmjax.viz.predictions import Prediction, as_image, draw_predictions

_PICTURE = "(a picture)"


def draw_answers(
    samples: Sequence[Sample],
    answers: Sequence[str] | None,
    path: str | Path | None = None,
    *,
    title: str = "",
    drawings: Sequence[Drawings] = (),
) -> Figure:
    """Draws samples on cards: media, question, answer and prediction. Writes the picture to `path` where one is given.

    Images are shown as they were before normalisation. Without `answers` no sample is marked right or wrong.

    Args:
      samples: the samples, as `Source.sample` gives them; at most 24 of them are drawn.
      answers: the model's answer to each sample, right if it equals the sample's; `None` where there is no model.
      path: the picture, if one is to be written; its suffix chooses the format (.png, .svg, .pdf).
      title: a line above; "" for none.
      drawings: for each sample, the model's drawings by generator, {"image": (media [h, w, C] in [-1, 1], …)}, which
        come after its media and the pictures that were to be made; () for none.

    Raises:
      ValueError: there is no sample, or there are more or fewer answers or drawings than samples.
    """
    predictions = answers if answers is not None else [None] * len(samples)
    items = [
        Prediction(
            images=(*_shown(sample), *map(_as_drawing, (*_targets(sample), *itertools.chain(*drawn.values())))),
            question=sample.question,
            answer=_PICTURE if is_wordless(sample) else sample.answer,
            predicted=None if is_wordless(sample) else answer,
            ok=answer == sample.answer,
            broken=": ".join(sample.broken[1:3]),
        )
        for sample, answer, drawn in zip(samples, predictions, drawings or [{}] * len(samples), strict=True)
    ]
    return draw_predictions(items, path, title=title)


def _targets(sample: Sample) -> list[np.ndarray]:
    """The pictures to be made that have no label."""
    return [medium for name in sample.noise if not sample.labels.get(name) for medium in sample.media.get(name, ())]


def _as_drawing(medium: np.ndarray) -> np.ndarray:
    return as_image(medium if medium.ndim == 2 else (medium + 1) / 2)


def _shown(sample: Sample) -> list[np.ndarray | None]:
    """The sample's media as images, without the ones to be drawn; `None` for a blank one, which could not be read."""
    media = [medium for name, inputs in sample.media.items() if name not in sample.noise for medium in inputs]
    blank = [bool(sample.broken) and not medium.any() for medium in media]
    return [
        None if is_blank else as_image(medium, *sample.normalised)
        for medium, is_blank in zip(media, blank, strict=True)
    ]
