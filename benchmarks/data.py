"""The cost of a step's data for the consumer: batches made in its process, by its workers, and by a server.

A step is one sample of JPEG images at full resolution: ten of 1024x1024, about 126 MB of patches, and a grid of other
numbers and sizes. The consumer stands for a trainer whose accelerators are busy: between two batches it sleeps longer
than a batch takes to be made, so that it waits only for delays of preparing, receiving and checking a batch. The server
runs on this host too.

Source: Zhang et al., "DistTrain", §2.3 and §7.3, figure 17.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from mmjax.assembly.assembly import planned_batch_spec
from mmjax.bench.rows import Row, at_least, at_most
from mmjax.config import load_config
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.batches import Batches, open_batches
from mmjax.data.loader import StepMaker
from mmjax.data.service.addresses import TOKEN

BENCH = "data"
_FILES = 16


@dataclass(frozen=True)
class Shape:
    """The images of a sample.

    Attributes:
      images: their number.
      edge: pixels of each side.
    """

    images: int
    edge: int

    def __str__(self) -> str:
        return f"{self.images} images of {self.edge}x{self.edge}"


SHAPE = Shape(10, 1024)
GRID = (Shape(8, 512), Shape(16, 512), Shape(8, 1024), Shape(16, 1024))
"""Numbers and sizes as on the axis of figure 17, whose own are not in the paper's text."""


def bench_data(rounds: int) -> Iterator[Row]:
    """Yields rows of the cost of preparing, and of the consumer's wait by each kind of preparation."""
    with _dataset(SHAPE) as (folder, gin_file):
        spec = planned_batch_spec(load_config([gin_file]))
        maker = spec.maker()
        yield from _costs(folder, maker, rounds)
        value = 1e3 * _waits(spec, maker, rounds, workers=0)
        yield Row(bench=BENCH, case="consumer waits: in its process", value=value, unit="ms/step")
        value = 1e3 * _waits(spec, maker, rounds, workers=2)
        yield Row(bench=BENCH, case="consumer waits: two workers", value=value, unit="ms/step")
        with _server(gin_file) as address:
            value = 1e3 * _waits(spec, maker, rounds, servers=address)
        yield Row(bench=BENCH, case="consumer waits: server", value=value, unit="ms/step", target=at_most(5.0))
        yield from _gain(spec, maker, rounds)
    for shape in GRID:
        yield from _away_and_here(shape, rounds)


def _away_and_here(shape: Shape, rounds: int) -> Iterator[Row]:
    """Yields the consumer's wait for samples of a shape, made in its process and by a server."""
    with _dataset(shape) as (_, gin_file):
        spec = planned_batch_spec(load_config([gin_file]))
        maker = spec.maker()
        value = 1e3 * _waits(spec, maker, rounds, workers=0)
        yield Row(bench=BENCH, case=f"{shape}, in its process", value=value, unit="ms/step")
        with _server(gin_file) as address:
            value = 1e3 * _waits(spec, maker, rounds, servers=address)
        yield Row(bench=BENCH, case=f"{shape}, server", value=value, unit="ms/step", target=at_most(5.0))


@contextmanager
def _dataset(shape: Shape) -> Iterator[tuple[Path, Path]]:
    """A temporary folder of samples of a shape, and the configuration that reads them."""
    with tempfile.TemporaryDirectory(prefix="mmjax-bench-") as temporary:
        folder = Path(temporary)
        write_samples(folder, shape)
        gin_file = folder / "bench.gin"
        gin_file.write_text(_config(folder, shape))
        yield folder, gin_file


def _config(folder: Path, shape: Shape) -> str:
    merge, patch = 4, 16
    return f"""
Train.global_batch = 1
Train.microbatches = 1
Train.eval_samples = 0
Data.task = 'folder'
Data.folder = {str(folder)!r}
Data.cache = {str(folder / "cache")!r}
Data.max_pixels = {shape.edge**2}
Data.sequence_length = {shape.images * (shape.edge // (merge * patch)) ** 2 + 100}
vision/ViT.patch = {patch}
vision/ViT.merge = {merge}
vision/ViT.channels = 3
"""


def write_samples(folder: Path, shape: Shape = SHAPE) -> None:
    """JPEG images with structure at every scale, as photographs have it, and samples of some of them."""
    random, edge = np.random.default_rng(0), shape.edge
    for number in range(_FILES):
        layers = [random.normal(size=(edge >> k, edge >> k, 3)) * 2.0**k for k in range(0, 9, 2)]
        summed = sum(np.kron(layer, np.ones((2 ** (2 * i), 2 ** (2 * i), 1))) for i, layer in enumerate(layers))
        pixels = np.clip(128 + summed * (40 / np.std(summed)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=85)
    names = [f"{number}.jpg" for number in range(_FILES)]
    rows = [
        {"images": (names[k:] + names[:k])[: shape.images], "question": "what?", "answer": "that"}
        for k in range(_FILES)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _costs(folder: Path, maker: StepMaker, rounds: int) -> Iterator[Row]:
    """Yields processor time of whole batches, and of Pillow's decoding of their images, taken in turn."""
    files = sorted(folder.glob("*.jpg"))[: SHAPE.images]
    decoding, batches = [], []
    for step in range(rounds):
        begin = time.process_time()
        for file in files:
            with Image.open(file) as image:
                np.asarray(image.convert("RGB"))
        decoded = time.process_time()
        maker(step)
        decoding.append(decoded - begin)
        batches.append(time.process_time() - decoded)
    yield Row(bench=BENCH, case="Pillow alone", value=SHAPE.images / statistics.median(decoding), unit="images/s/core")
    yield Row(bench=BENCH, case="whole batches", value=SHAPE.images / statistics.median(batches), unit="images/s/core")
    ratio = statistics.median(pillow / batch for pillow, batch in zip(decoding, batches, strict=True))
    yield Row(bench=BENCH, case="whole batches over Pillow alone", value=ratio, unit="ratio")


def _open(spec: BatchSpec, maker: StepMaker, steps: int, **changes: object) -> Batches:
    spec = replace(spec, data=spec.data.with_settings(**changes))
    return open_batches(spec, maker, steps=steps, start_step=0, report=lambda line: print(line, file=sys.stderr))


def _waits(spec: BatchSpec, maker: StepMaker, rounds: int, **changes: object) -> float:
    """Median seconds that a consumer waits for a batch, if it works on each twice as long as one takes to arrive."""
    first = 2 + rounds  # batches without a pause; the first two include the start and do not count
    waits, pause = [], 0.0
    with _open(spec, maker, first + rounds + 1, **changes) as batches:
        for step in range(first + rounds + 1):
            begin = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - begin)
            del batch
            if step >= first - 1:
                pause = pause or 2.0 * statistics.mean(waits[2:first])
                time.sleep(pause)
    return statistics.median(waits[first + 1 :])


def _gain(spec: BatchSpec, maker: StepMaker, rounds: int) -> Iterator[Row]:
    """Yields steps a second with one worker and with two, in turn, so that other load on the host slows both."""
    pairs = [[_rate(spec, maker, rounds, workers) for workers in (1, 2)] for _ in range(3)]
    for words, rates in zip(("one worker", "two workers"), zip(*pairs, strict=True), strict=True):
        yield Row(bench=BENCH, case=f"steps: {words}, idle trainer", value=statistics.median(rates), unit="1/s")
    value = statistics.median(with_two / with_one for with_one, with_two in pairs)
    case = "steps: two workers over one, idle trainer"
    yield Row(bench=BENCH, case=case, value=value, unit="ratio", target=at_least(1.6))


def _rate(spec: BatchSpec, maker: StepMaker, rounds: int, workers: int) -> float:
    """Steps a second of an idle consumer, after every worker has begun."""
    first = 2 * workers + 2
    with _open(spec, maker, first + 2 * rounds, workers=workers, prefetch=1) as batches:
        for _ in range(first):
            next(batches)
        begin = time.perf_counter()
        for _ in range(2 * rounds):
            next(batches)
        return 2 * rounds / (time.perf_counter() - begin)


@contextmanager
def _server(gin_file: Path) -> Iterator[str]:
    """A server of two workers in a process of its own; yields its address."""
    command = [sys.executable, "-m", "mmjax.serve", f"--gin_file={gin_file}", "--port=0", "--workers=2"]
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            output = ""
            for line in process.stdout:
                output += line
                if match := re.match(r"serving on (\S+)", line):
                    yield match[1]
                    return
            raise RuntimeError(f"the server has ended: {output}")
        finally:
            process.terminate()
