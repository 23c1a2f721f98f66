"""Cards of samples: which of their pictures they show, and with what verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mmjax.data.types import Sample
from mmjax.viz import answers
from mmjax.viz.predictions import Prediction


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[Prediction]:
    """The cards that are drawn."""
    drawn: list[Prediction] = []
    monkeypatch.setattr(answers, "draw_predictions", lambda items, *_, **__: drawn.extend(items))
    return drawn


def sample(answer: str, target: float, labels: Mapping[str, Any] | None = None) -> Sample:
    """One with an image of zeros, and a picture to be made of one value."""
    picture = np.full((2, 2, 3), target, np.float32)
    return Sample(
        tokens=np.zeros(1, np.int32),
        loss_weights=np.zeros(1, np.float32),
        media={"vision": (np.zeros((2, 2, 3), np.float32),), "painter": (picture,)},
        question="draw",
        answer=answer,
        prompt=1,
        noise={"painter": (np.zeros_like(picture),)},
        labels=labels or {},
    )


def test_what_was_to_be_made_stands_before_what_is_drawn(cards: list[Prediction]) -> None:
    drawn = {"painter": (np.full((2, 2, 3), 1.0, np.float32),)}
    answers.draw_answers([sample("", 0.0), sample("7", -1.0, {"painter": ("7",)})], ["", "7"], drawings=[drawn, drawn])
    wordless, digit = cards
    assert [float(image.mean()) for image in wordless.images if image is not None] == [0.0, 0.5, 1.0]
    assert wordless.predicted is None and not wordless.judged and wordless.answer == "(a picture)"
    assert [float(image.mean()) for image in digit.images if image is not None] == [0.0, 1.0], "its label says it"
    assert digit.judged and digit.ok


def test_targets_of_training_samples_are_shown(cards: list[Prediction]) -> None:
    answers.draw_answers([sample("", 1.0)], None)
    assert [float(image.mean()) for image in cards[0].images if image is not None] == [0.0, 1.0]
