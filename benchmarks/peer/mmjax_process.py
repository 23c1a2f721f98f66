"""mmjax's process of the benchmark ``peer``: the steps that ``python -m mmjax.train`` runs."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.peer.protocol import Settings, serve
from mmjax.bench.gpu.trace import most, on_device, traced_events
from mmjax.config import load_config
from mmjax.data.types import Sample
from mmjax.recipe import Recipe
from mmjax.train.trainer import Trainer

PRODUCTS = ("dot", "ynn", "convolution", "custom-call", "onednn", "cublas", "gemm")
"""Beginnings of the names of products in a trace."""


def start(settings: Settings) -> tuple[Callable[[], float], Callable[[], Mapping[str, float]]]:
    """See ``serve``."""
    values = dict(np.load(settings.dialogues))
    trainer = Trainer(recipe(settings, values), style="silent")
    executor, batches = trainer.executor, _batches(trainer, values)
    executor.compile()

    def step() -> float:
        microbatch, learned = next(batches)
        result = executor.step([microbatch], {"llm": learned, "vision": 1.0})
        jax.block_until_ready(executor.states)
        return result.fetch()[0]

    def ops() -> Mapping[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            return by_kind(traced_events(step, Path(folder) / "trace"))

    return step, ops


def recipe(settings: Settings, values: Mapping[str, np.ndarray]) -> Recipe:
    """The run: the folder's modules on one device, the tower frozen, a step of one microbatch of whole rows."""
    _, dialogues, length = values["tokens"].shape
    optimizer = ("learning_rate", "weight_decay", "b1", "b2", "eps")
    patches = 1 + int(np.sum(values["tokens"][0, 0] == values["tokens"].max()))  # and the class's
    return load_config(
        [],
        [
            f"Model.weights={settings.folder!r}",
            *(f"Optimizer.{name}={getattr(settings, name)!r}" for name in optimizer),
            *("Digits.images=(1, 1)", "Digits.digits=(1, 1)"),  # only the dialogues above are read
            *("Optimizer.schedule='constant'", "Optimizer.warmup=0", "vision/Optimizer.frozen=True"),
            *(f"Train.dtype={settings.dtype!r}", f"Train.clip_norm={settings.clip_norm!r}", "Train.eval_samples=0"),
            *(f"Train.global_batch={dialogues}", "Train.microbatches=1", f"Data.sequence_length={length}"),
            *(f"llm/Packing.buckets=(({dialogues}, {length}),)", f"vision/Packing.buckets=(({dialogues}, {patches}),)"),
        ],
    )


def _batches(trainer: Trainer, values: Mapping[str, np.ndarray]) -> Iterator[tuple[Any, float]]:
    """The microbatch of each step, and the number of its learned tokens."""
    packer, placeholder = trainer.parts.packer, trainer.parts.tokenizer.media_token("vision")
    image, learned = values["tokens"].max(), values["learned"]
    while True:
        for rows in values["tokens"]:
            tokens = np.where(rows == image, placeholder, rows).astype(np.int32)
            samples = [_sample(*row, learned, placeholder) for row in zip(tokens, values["images"], strict=True)]
            (microbatch,) = trainer.parts.runs.signed([packer.microbatch(samples, len(rows))])
            yield microbatch, float(len(rows) * learned.sum())


def _sample(tokens: np.ndarray, image: np.ndarray, learned: np.ndarray, placeholder: int) -> Sample:
    return Sample(
        tokens=tokens,
        loss_weights=learned.astype(np.float32),
        media={"vision": (image,)},
        media_tokens={"vision": placeholder},
        question="",
        answer="",
        prompt=0,
    )


def by_kind(events: Iterable[Mapping[str, Any]]) -> Mapping[str, float]:
    """Seconds of a trace's events by kind, largest first: "products", "copy", and fusions such as "add_select"."""
    seconds = defaultdict[str, float](float)
    for event in on_device(list(events)):
        name = str(event.get("args", {}).get("hlo_op") or event["name"])
        kind = re.sub(r"(_fusion)?(\.\w+)*$", "", name)
        seconds["products" if kind.startswith(PRODUCTS) else kind] += event.get("dur", 0.0) / 1e6
    return most(seconds)


if __name__ == "__main__":
    serve(start)
