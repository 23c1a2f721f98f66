"""Keys of records and turns that set loss weights, keys that are refused, and keys that are not read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mmjax.data.sources.storage import Unusable

WEIGHTS = ("loss", "train", "weight", "loss_scale")
"""Keys of the loss weight of an answer: true, false, or a factor of its loss."""
MASKS = ("mask", "masked", "loss_mask", "ignore", "ignore_loss", "train_detail", "training_detail")
"""Keys that exclude something from learning in ways that mmjax does not read."""
TURN = ("from", "role", "value", "content", *WEIGHTS, *MASKS)
"""Keys of a turn that mmjax reads; others are for a folder's template."""
_TEXTS = ("conversations", "messages", "question", "answer", "caption", "text", "instruction", "system", "tools")
MEDIA = ("image", "images", "audio", "audios", "video", "videos", "target", "targets", "file_name")
RECORD = (*_TEXTS, *MEDIA, "generator", "id", "label", "functions", *WEIGHTS, *MASKS)
"""Keys of a record that mmjax reads."""


def weight_of(value: Mapping[str, Any], weight: float = 1.0) -> float:
    """The loss weight that a turn's keys, or a record's, give to answers: the product of all keys of `WEIGHTS`.

    These are "loss", "train", "weight" and "loss_scale": {"weight": 0.5, "train": True} gives 0.5. Null counts as
    missing.

    Args:
      value: the turn or the record.
      weight: the weight of an answer without such keys.

    Raises:
      Unusable: a weight is no number of 0 or more, or a key of `MASKS`, such as "loss_mask", is set.
    """
    for key in MASKS:
        if value.get(key):
            raise Unusable(f"{key}={shown(value[key])} says that something is not learned; write weight: 0 for it")
    weights = [_weight(key, value[key]) for key in WEIGHTS if value.get(key) is not None]
    return math.prod(weights) if weights else weight


def _weight(key: str, value: object) -> float:
    if not isinstance(value, (bool, int, float)) or not 0 <= value < math.inf:
        raise Unusable(f"{key}={shown(value)} must be true, false or a number of 0 or more")
    return float(value)


def require_plain(value: Mapping[str, Any]) -> None:
    """Raises Unusable for a record with keys that mmjax cannot train on: functions, or label=false.

    value: the record as it is in the JSON; the keys are "functions" and "label". Empty ones pass.
    """
    if value.get("label") is False:
        raise Unusable("label=false says that its answer is a bad one")
    if value.get("functions"):
        raise Unusable("it has functions: write them as tools")


def unread(value: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a record, as it is in the JSON, that are not read; empty values do not count.

    ("score",) for {"id": "7", "conversations": […], "score": 3}.
    """
    return named(key for key in value if key not in RECORD and value[key] not in (None, "", [], {}))


def named(keys: Iterable[object]) -> tuple[str, ...]:
    """Keys as texts for messages, each once, in order; of a text only the first 40 characters stay."""
    return tuple(dict.fromkeys(str(key)[:40] for key in keys))


def shown(value: object) -> str:
    """A value's `repr` for messages, its first 60 characters and "…" if it is longer."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
