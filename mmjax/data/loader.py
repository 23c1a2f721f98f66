"""The stream of step batches: a Grain dataset over steps, made by worker processes that never import JAX.

A batch is a pure function of (seed, step): step s holds samples s*G … s*G+G-1 of the source for a global batch of G, in
an order that follows from their metadata. So the stream can start at any step, and does not depend on the number of
workers.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data import worker
from mmjax.data.batch_shape import BatchShape
from mmjax.data.buckets import fill_buckets, text_buckets
from mmjax.data.config import DataConfig
from mmjax.data.derived import completed_worst, in_text, with_media
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows, turn_of
from mmjax.data.reorder import StepOrder
from mmjax.data.sample import disagreement
from mmjax.data.shared import has_room, put_together, spread_out
from mmjax.data.source import Source
from mmjax.data.sources.observer import IndexObserver
from mmjax.data.spec import DataSpec
from mmjax.data.tasks.task import TaskContext
from mmjax.data.tokenizer import Tokenizer, make_tokenizer
from mmjax.data.types import EncoderSpec, NoBatchError, Sample, SampleMeta, StepBatch

_logger = logging.getLogger(__name__)


def tokenizer_of(data: DataConfig, encoders: Sequence[str]) -> Tokenizer:
    """The tokenizer of `data.tokenizer`, with a placeholder for each of `encoders`.

    encoders: names of encoders and generators, in the order of the model, such as ["vision"]. Raises ConfigError if the
    tokenizer cannot be read.
    """
    return make_tokenizer(data.tokenizer, encoders, data.image_encoder, data.new_tokens)


def make_source(
    data: DataSpec,
    encoders: Mapping[str, EncoderSpec],
    *,
    seed: int,
    split: str,
    observer: IndexObserver | None = None,
    skipped: str | os.PathLike[str] | None = None,
) -> Source:
    """The samples of a run, for `split` "train" or "test".

    Of the result `meta(0)` is the metadata of the first sample, `sample(0)` the sample itself, and `worst_case()`
    bounds all.

    Args:
      data: the run's data, `recipe.data`, such as `DataSpec(DataConfig(task="digits"))`.
      encoders: specs of the model's encoders and generators, by name: {"vision": EncoderSpec(…)}.
      seed: the run's seed.
      split: "train" or "test".
      observer: receives the progress of collecting metadata, where that is necessary; None shows nothing.
      skipped: path of a JSONL file for the names of records that cannot be read; None writes none.

    Raises:
      ConfigError: an encoder that `data` names is not in the model or is for other media, or the data cannot be read.
    """
    encoders = with_media(encoders)
    tokenizer = tokenizer_of(data.settings, tuple(in_text(encoders)))
    media = ({name: spec.medium for name, spec in encoders.items() if spec.drawn == drawn} for drawn in (False, True))
    data.check_modules(*media)
    context = TaskContext(
        data=data.settings,
        encoders=encoders,
        tokenizer=tokenizer,
        seed=seed,
        split=split,
        sources=data.sources,
        observer=observer,
        skipped=skipped,
        known=data.known,
    )
    return data.origin.open(context)


def make_packer(
    config: DataConfig,
    encoders: Mapping[str, EncoderSpec],
    source: Source,
    tokenizer: Tokenizer,
    *,
    global_batch: int,
    microbatches: int,
    cells: int,
    one_bucket: bool = False,
    text: Sequence[tuple[int, int]] = (),
    pairs: Mapping[str, float] | None = None,
    axes: int = 1,
    mask: str = "causal",
) -> Packer:
    """The packer of a run, its buckets filled in and checked against the source's worst case.

    Args:
      config: the data's configuration; only its `sequence_length` is read.
      encoders: specs of encoders and generators by name, {"vision": EncoderSpec(…)}, with their configured (rows per
        cell, patches per row) buckets, if any.
      source: gives the worst case, as `make_source` opens it.
      tokenizer: gives the token that fills up rows, as `tokenizer_of` reads it.
      global_batch: samples of a step.
      microbatches: microbatches of a step.
      cells: cells of a microbatch, the least common multiple of all modules' dp.
      one_bucket: whether all microbatches of a step share a bucket.
      text: the LLM's configured (rows per cell, tokens per row) buckets; () gives each sample a row of its own.
      pairs: by module, the compute of a pair of positions of one segment relative to a position's, such as
        {"llm": 0.001}; 0 for a module that is missing.
      axes: numbers of a position in the LLM's rows: 1, or 3 for M-RoPE.
      mask: rules for the pairs of LLM tokens that attend, such as "text sees all before; vision sees vision in item".

    Raises:
      ConfigError: the sequence length, a bucket or an encoder's positions do not suit the worst case.
    """
    rows, worst = -(-global_batch // microbatches), completed_worst(source.worst_case(), encoders)
    per_cell, length = -(-rows // cells), config.sequence_length
    costs = pairs or {}
    specs = fill_buckets(encoders, worst, rows_per_cell=per_cell, sequence_length=length, pairs=costs)
    llm_buckets = text_buckets(
        text, worst, samples_per_cell=per_cell, sequence_length=length, pairs=costs.get("llm", 0.0)
    )
    return Packer(
        encoders=specs,
        sequence_length=config.sequence_length,
        microbatches=microbatches,
        cells=cells,
        pad=tokenizer.pad,
        one_bucket=one_bucket,
        text=llm_buckets,
        pairs=costs,
        axes=axes,
        mask=mask,
        worst=worst,
    )


@dataclass(frozen=True, kw_only=True)
class StepMaker:
    """Makes the batch of a step from its number. Worker processes run it: it is picklable, and free of any device.

    Attributes:
      source: the samples.
      packer: packs them.
      global_batch: samples of a step.
      order: reorders the samples of a step; by default they stay as they come.
      process_rows: the rows to fill in, all by default; samples that none of them needs are not read.
    """

    source: Source
    packer: Packer
    global_batch: int
    order: StepOrder | None = None
    process_rows: ProcessRows | None = None

    def __call__(self, step: int) -> StepBatch:
        first = int(step) * self.global_batch
        metas = self.packer.completed([self.source.meta(first + i) for i in range(self.global_batch)])
        reordered = self.order(metas, self.packer) if self.order else None
        order = reordered.order if reordered else range(self.global_batch)
        plan = self.packer.plan(int(step), [metas[i] for i in order])
        filled, broken, left = [], list[tuple[str, ...]](), iter(order)
        for number, part in enumerate(plan.microbatches):
            rows = turn_of(self.process_rows, number)
            indices = [first + i for i in islice(left, len(part.metas))]
            needed, learned = part.needed(rows).items(), part.learned(rows)
            samples = {
                place: self._sample(indices[place], part.metas[place], media, learned=place in learned)
                for place, media in needed
            }
            filled.append(self.packer.fill(part, samples, rows))
            broken += [sample.broken for sample in samples.values() if sample.broken]
        figures = reordered.figures if reordered else {}
        return replace(plan.batch(filled), figures=figures, broken=tuple(broken))

    @property
    def most_bytes(self) -> int:
        """Bytes of the arrays of the largest batch."""
        return BatchShape(self.packer, self.global_batch, self.process_rows).most_bytes

    def _sample(self, index: int, meta: SampleMeta, media: Collection[str], *, learned: bool) -> Sample:
        """Reads a sample. Raises ConfigError if it differs from its metadata, with which other processes planned."""
        sample = self.source.sample(index, media, learned=learned)
        if wrong := disagreement(sample, meta, media, self.packer.encoders):
            raise ConfigError(f"sample {index} ({sample.question!r}) is not what its metadata say: {wrong}")
        return sample


MOST_STEPS = 2**40
"""An upper bound of step numbers."""


def steps_of(make: StepMaker, first: int = 0, stop: int = MOST_STEPS) -> Any:
    """The Grain `MapDataset` of the batches of steps first … stop-1: item i is the `StepBatch` of step first + i.

    A batch is made when it is indexed. make: the maker of batches, such as `planned_batch_spec(recipe).maker()`.
    """
    import grain  # slow to import, and batches can be made one by one without it

    return grain.MapDataset.range(first, stop).map(make)


_LOST = "Worker process was terminated unexpectedly"
"""Part of Grain's message for a worker that has ended without a Python exception."""
_MOST_LOST = 3
"""Number of times that workers end while the same batch is waited for, before the run ends."""


class StepLoader(Iterator[StepBatch]):
    """Batches of steps start_step … steps-1, in order. Close it, or use it in a `with` block.

    Arrays come from workers in shared memory, if there is room for all batches that may be ready. If a worker is
    killed, perhaps by the kernel for lack of memory, new workers are started and go on with the next batch.

    Args:
      make: makes the batches.
      steps: the number of the last step, plus 1.
      start_step: the number of the first step.
      workers: worker processes; 0 makes batches in this process, on demand.
      prefetch: steps that each worker prepares ahead.
      report: receives one-line messages.
    """

    origin = "local"

    def __init__(
        self,
        make: StepMaker,
        *,
        steps: int,
        start_step: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        report: Callable[[str], None] = _logger.warning,
    ):
        from absl import flags

        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain reads absl flags, which nothing parses outside absl.app
        self._make, self._workers, self._prefetch, self._report = make, workers, prefetch, report
        self._next, self._stop = start_step, steps
        self._iterator: Any = self._open()

    def _open(self) -> Any:
        """Starts the workers, and returns the iterator over the remaining batches."""
        import grain

        read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)
        dataset: Any = steps_of(self._make, self._next, self._stop).to_iter_dataset(read)
        if self._workers:
            options = grain.multiprocessing.MultiprocessingOptions(
                num_workers=self._workers, per_worker_buffer_size=self._prefetch
            )
            shared = has_room((self._workers * (self._prefetch + 2) + 4) * self._make.most_bytes)
            dataset = dataset.map(spread_out) if shared else dataset
            dataset = dataset.mp_prefetch(options, worker_init_fn=worker.prepare)
            dataset = dataset.map(put_together) if shared else dataset
            # Grain starts its processes at the first batch; this thread wants one at once, so they start during
            # compilation.
            dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=1)
            worker.become_main_of_workers()
        iterator = iter(dataset)
        if self._workers and self._next < self._stop:
            iterator.start_prefetch()
        return iterator

    def __next__(self) -> StepBatch:
        """The next batch. Raises NoBatchError if workers end again and again while they make it."""
        for lost in range(1, _MOST_LOST + 1):
            if self._next >= self._stop:
                raise StopIteration
            try:
                batch = next(self._iterator)
            except RuntimeError as error:
                if _LOST not in str(error):
                    raise
                self._restart(str(error), lost)
                continue
            self._next += 1
            return batch
        raise AssertionError("the last loss raises")

    def _restart(self, error: str, lost: int) -> None:
        """Starts workers anew after one has ended. Raises NoBatchError after `_MOST_LOST` times."""
        code = re.search(r"exit code (-?\d+)", error)
        why = _ending(int(code[1])) if code else "has ended"
        cure = "if memory has run out, lower Data.workers or Data.prefetch"
        if lost == _MOST_LOST:
            step = f"{lost} times before the batch of step {self._next + 1} was there"
            raise NoBatchError(f"a data worker {why}, {step}; {cure}") from None
        self._report(f"a data worker {why}: the workers are started again, and make the same batches; {cure}")
        self._iterator.close()
        self._iterator = self._open()

    def interrupt(self) -> None:
        """Does nothing: a `next` that waits ends with its batch."""

    def close(self) -> None:
        """Ends the worker processes. Harmless when repeated."""
        self._stop = self._next
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None  # else Grain closes it again, and complains, when the interpreter shuts down

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ending(code: int) -> str:
    """How a process ended, from its exit code."""
    if code >= 0:
        return f"has ended with status {code}"
    return f"was ended by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
