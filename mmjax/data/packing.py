"""Packs samples into the static arrays of one step: cells, encoder rows, buckets, index maps.

A plan is made from the samples' metadata; then the wanted rows are filled. All cells hold the same number of
consecutive samples. A cell has its own LLM rows, and encoder rows for the media of exactly its samples: packing never
crosses a cell. The packer does not know what an encoder encodes: an encoder is a name and an `EncoderSpec`.

Legend: B LLM rows of a microbatch, S sequence length, R encoder rows of a microbatch, T patches per encoder row,
E numbers in a patch, A axes of a medium.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np
from jaxtyping import Int

from mmjax.configurable import ConfigError
from mmjax.data.derived import completed, with_media
from mmjax.data.filling import Filling, media_places, shown
from mmjax.data.first_fit import holds, rows_needed, spread
from mmjax.data.patches import unpatchify
from mmjax.data.plan import EncoderPlan, MicrobatchPlan, StepPlan, TextPlan, cell_range, patches_of
from mmjax.data.process_rows import ProcessRows
from mmjax.data.sample import meta_of
from mmjax.data.send_lists import send_list, with_lists, with_one_reader
from mmjax.data.split import UNSPLIT, Pointers, Split, places_of, put_in_order, restored
from mmjax.data.together import Together
from mmjax.data.types import EncoderSpec, Microbatch, Sample, SampleMeta, StepBatch, WorstCase


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Packs the samples of a step.

    Attributes:
      encoders: specs by name, their buckets set (see `fill_buckets`).
      sequence_length: tokens of an LLM row.
      microbatches: microbatches of a step.
      cells: cells of a microbatch, the least common multiple of the dp of modules that take microbatches one by one.
      pad: the token that fills up LLM rows.
      one_bucket: whether all microbatches of a step share the cheapest bucket that holds each of them.
      text: the (rows per cell, tokens per row) shapes into which samples are packed, as `text_buckets` gives them; ()
        gives each sample a row of its own.
      pairs: compute of a pair of positions of one segment, relative to a position's, by module; it balances rows.
      axes: numbers of a position in the LLM's rows: 1, a token's place in its sample, or 3 (see `mrope`).
      splits: how rows are split over ranks of context parallelism, by module (see `split_over`).
      mask: rules for the pairs of LLM tokens that attend (see `attention.language`); all but the plain ones need words
        of each token.
      lists: whether modules receive other modules' tokens by send lists, where these are shorter than all tokens (see
        `send_lists`).
      together: encoders whose ops take several microbatches together, by name; these share a bucket.
      worst: bounds on every sample, those of encoders that read other encoders included; None if they are unknown.
    """

    encoders: Mapping[str, EncoderSpec]
    sequence_length: int
    microbatches: int
    cells: int
    pad: int
    one_bucket: bool = False
    text: tuple[tuple[int, int], ...] = ()
    pairs: Mapping[str, float] = field(default_factory=dict)
    axes: int = 1
    splits: Mapping[str, Split] = field(default_factory=dict)
    mask: str = "causal"
    lists: bool = False
    together: Mapping[str, Together] = field(default_factory=dict)
    worst: WorstCase | None = None

    def __post_init__(self) -> None:
        for name, spec in self.encoders.items():
            if not spec.buckets:
                raise ConfigError(f"{name}/Packing.buckets=() is not filled in: call fill_buckets first")

    def split_over(self, splits: Mapping[str, Split], *, lists: bool = False) -> Packer:
        """A copy of this packer with `splits` (by module) and `lists`, and with widths that can be split.

        Widths of buckets are rounded up (see `rounded`).
        """
        split = replace(self, splits=dict(splits), lists=lists)
        encoders = {
            name: replace(spec, buckets=split.rounded(name, spec.buckets)) for name, spec in self.encoders.items()
        }
        return replace(split, encoders=encoders, text=split.rounded("llm", self.text))

    def rounded(self, module: str, buckets: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """(rows per cell, positions per row) shapes of a module, their widths rounded up so that ranks can share them.

        Duplicates are removed. Widths of canvases stay. module: "llm", or the name of an encoder or generator.
        """
        if module in self.encoders and self.encoders[module].canvases:
            return tuple(buckets)
        token = self.encoders[module].patches_per_token if module in self.encoders else 1
        split = self.splits.get(module, Split(unit=token))
        return tuple(dict.fromkeys((rows, split.rounded(width)) for rows, width in buckets))

    def plan(self, step: int, metas: Sequence[SampleMeta]) -> StepPlan:
        """The plan of `step`: microbatch m holds samples m*n … (m+1)*n-1; missing samples leave rows empty.

        metas: metadata of all samples of the step; n is their number over `microbatches`, rounded up.

        Raises ConfigError when a sample has no room.
        """
        metas = self.completed(metas)
        per, cuts = self._cuts(metas)
        chosen = zip(cuts, self.buckets(metas), strict=True)
        parts = [self.plan_microbatch(of_microbatch, per, buckets) for of_microbatch, buckets in chosen]
        media = with_media(self.encoders)
        counts = {
            "samples": len(metas),
            "media": sum(len(grids) for meta in metas for name, grids in meta.grids.items() if name in media),
        }
        counts["llm_tokens"] = sum(meta.tokens for meta in metas)
        counts["llm_tokens_padded"] = sum(part.llm.rows_per_cell * part.cells * part.llm.width for part in parts)
        for name, spec in self.encoders.items():
            counts[f"{name}_patches"] = sum(patches_of(meta, name) for meta in metas)
            shapes = self._op_shapes(name, parts)
            # A class token is neither a patch nor padding.
            special = spec.special * sum(len(meta.grids.get(name, ())) for meta in metas)
            positions = sum(rows * self.cells * width for rows, width in shapes)
            counts[f"{name}_patches_padded"] = positions - special
        denominators = {"llm": float(sum(meta.weight for meta in metas))}
        per_patch = {name: spec.patch_values if spec.drawn else 1 for name, spec in self.encoders.items()}
        denominators |= {name: float(counts[f"{name}_patches"] * values) for name, values in per_patch.items()}
        for name, spec in ((name, spec) for name, spec in self.encoders.items() if spec.sounds):
            denominators[name] -= spec.channels * sum(meta.padding.get(name, 0) for meta in metas)
        return StepPlan(step=step, microbatches=tuple(parts), denominators=denominators, counts=counts)

    def _op_shapes(self, name: str, parts: Sequence[MicrobatchPlan]) -> list[tuple[int, int]]:
        """(rows of a cell, positions of a row) of a module in each microbatch, empty rows of its ops included."""
        shapes = [self.encoders[name].buckets[part.bucket[name]] for part in parts]
        if name not in self.together:
            return shapes
        together = self.together[name]
        return [
            (together.rows(shapes[m][0], self.cells, len(span)), shapes[m][1])
            for span in together.spans(len(parts))
            for m in span
        ]

    def buckets(self, metas: Sequence[SampleMeta]) -> list[dict[str, int]]:
        """For each microbatch of a step: the index of its bucket in `buckets_of(module)`, by module.

        metas: metadata of all samples of the step, see `plan`.

        Buckets are not nested: a costlier one may have fewer or narrower rows. So if the microbatches of a step, or of
        an encoder's op, share a bucket, each bucket is tried for all of them.

        Raises ConfigError when a sample has no room.
        """
        per, cuts = self._cuts(self.completed(metas))
        cells = [self._cells(of_microbatch, per) for of_microbatch in cuts]
        if self.one_bucket:
            cells = [[cell for of_microbatch in cells for cell in of_microbatch]]
        alone = [name for name in self.bucket_counts if self.one_bucket or name not in self.together]
        chosen = [{name: self._choose(name, of_step) for name in alone} for of_step in cells]
        if self.one_bucket:
            return chosen * len(cuts)
        for name, together in self.together.items():
            for span in together.spans(len(cells)):
                bucket = self._choose(name, [cell for m in span for cell in cells[m]])
                for m in span:
                    chosen[m][name] = bucket
        return chosen

    def plan_microbatch(
        self,
        metas: Sequence[SampleMeta],
        rows: int,
        buckets: Mapping[str, int] | None = None,
        *,
        apart: bool = False,
    ) -> MicrobatchPlan:
        """The plan of a microbatch with room for at least `rows` samples (rounded up to a multiple of `cells`).

        Args:
          metas: metadata of the samples.
          rows: see above.
          buckets: index of the bucket to use, by module; a module that is not named takes the cheapest that holds every
            cell.
          apart: whether each sample gets a separate LLM row, in the `widest` bucket.

        Raises:
          ConfigError: a sample has no room.
        """
        metas = self.completed(metas)
        cells, per_cell, buckets = self._cells(metas, rows), self._per_cell(len(metas), rows), buckets or {}
        text = self._plan_apart(len(metas), per_cell) if apart or not self.text else self._plan_text(cells, buckets)
        encoders = {}
        for name in self.encoders:
            bucket = self._choose(name, cells, buckets.get(name))
            encoders[name] = EncoderPlan(bucket=bucket, places=self._spread(name, cells, bucket))
        return MicrobatchPlan(
            metas=tuple(metas),
            samples_per_cell=per_cell,
            cells=self.cells,
            llm=replace(text, axes=self.axes),
            encoders=encoders,
            apart=apart,
            pointers=self._pointers,
        )

    def completed(self, metas: Sequence[SampleMeta]) -> list[SampleMeta]:
        """The metadata with the segments of encoders that read other encoders' tokens; see `derived.completed`."""
        derives = any(spec.follows for spec in self.encoders.values())
        return [completed(meta, self.encoders) for meta in metas] if derives else list(metas)

    def _cuts(self, metas: Sequence[SampleMeta]) -> tuple[int, list[Sequence[SampleMeta]]]:
        """The most samples of a microbatch, and the samples of each microbatch of a step."""
        per = -(-len(metas) // self.microbatches)
        return per, [metas[m * per : (m + 1) * per] for m in range(self.microbatches)]

    def _per_cell(self, samples: int, rows: int) -> int:
        return -(-max(rows, samples, 1) // self.cells)

    def _cells(self, metas: Sequence[SampleMeta], rows: int) -> list[Sequence[SampleMeta]]:
        """A microbatch's samples by cell. Raises ConfigError for one that is too long or has unknown media."""
        for meta in metas:
            self._require_known(meta.grids)
            if meta.tokens > self.sequence_length:
                raise ConfigError(
                    f"Data.sequence_length={self.sequence_length} is too short for a sample of {meta.tokens} tokens: "
                    f"set it to at least {meta.tokens}"
                )
        per_cell = self._per_cell(len(metas), rows)
        ranges = (cell_range(cell, per_cell, len(metas)) for cell in range(self.cells))
        return [metas[samples.start : samples.stop] for samples in ranges]

    def buckets_of(self, module: str) -> tuple[tuple[int, int], ...]:
        """The (rows per cell, positions per row) shapes of a module; () for "llm" if each sample has a separate row."""
        return self.text if module == "llm" else self.encoders[module].buckets

    @property
    def bucket_counts(self) -> dict[str, int]:
        """Number of buckets of each encoder and generator, and of "llm" where its rows are packed, by module."""
        counts = {name: len(spec.buckets) for name, spec in self.encoders.items()}
        return {**counts, "llm": len(self.text)} if self.text else counts

    @cached_property
    def inputs(self) -> Mapping[str, frozenset[str]]:
        """The names of a microbatch's arrays, by module; send lists are among them only in some buckets."""
        empty = self.fill(self.plan_microbatch((), 1), {}, ProcessRows(cells={}))
        listed = {pointer.source: {send_list(pointer.module)} for pointer in self.listed}
        return {module: frozenset(arrays.keys() | listed.get(module, set())) for module, arrays in empty.inputs.items()}

    @property
    def widest(self) -> int:
        """Index in `text` of the bucket with the longest rows; if there are several, of the one with the most rows.

        Raises ValueError if `text` is empty.
        """
        return max(range(len(self.text)), key=lambda i: self.text[i][::-1])

    def _plan_apart(self, count: int, per_cell: int) -> TextPlan:
        places = tuple((row, 0) for row in range(count))
        if not self.text:
            width = self.splits.get("llm", UNSPLIT).rounded(self.sequence_length)
            return TextPlan(rows_per_cell=per_cell, width=width, places=places)
        rows, width = self.text[self.widest]
        if per_cell > rows:
            raise ValueError(f"{per_cell} samples apart in a cell of {rows} rows")
        places = tuple((sample // per_cell * rows + sample % per_cell, 0) for sample in range(count))
        return TextPlan(rows_per_cell=rows, width=width, places=places, bucket=self.widest)

    def _plan_text(self, cells: Sequence[Sequence[SampleMeta]], buckets: Mapping[str, int]) -> TextPlan:
        bucket = self._choose("llm", cells, buckets.get("llm"))
        rows, width = self.text[bucket]
        by_cell = self._spread("llm", cells, bucket)
        places = tuple((cell * rows + row, start) for cell, in_cell in enumerate(by_cell) for row, start in in_cell)
        return TextPlan(rows_per_cell=rows, width=width, places=places, bucket=bucket)

    def _choose(self, module: str, cells: Sequence[Sequence[SampleMeta]], bucket: int | None = None) -> int:
        """The index of the cheapest bucket that holds a module's segments in every cell; or `bucket`, if it does.

        Raises ConfigError if none, or `bucket`, has room.
        """
        shapes, sizes = self.buckets_of(module), _segments(module, cells)
        for tried in range(len(shapes)) if bucket is None else (bucket,):
            if all(holds(shapes[tried], cell, alone=self._alone(module)) for cell in sizes):
                return tried
        raise ConfigError(f"{module}/Packing.buckets={shapes} cannot hold {self._wanted(module, sizes)}")

    def _wanted(self, module: str, sizes: Sequence[Sequence[int]]) -> str:
        """The end of an error message: the segments that have no room, and a fix."""
        largest = max((n for cell in sizes for n in cell), default=0)
        if module == "llm":
            most = max(map(len, sizes))
            return f"{most} samples of up to {largest} tokens in a cell: add a larger (rows, tokens) pair"
        spec = self.encoders[module]
        width = spec.buckets[-1][1]
        if largest > width:
            needed = f"{'an' if spec.medium == 'image' else 'a'} {spec.medium} of {largest} patches"
        else:
            rows = max(rows_needed(cell, width, alone=self._alone(module)) for cell in sizes)
            needed = f"{rows} rows of {width} patches"
        return f"{needed} in a cell: add a larger (rows, patches) pair"

    def _spread(
        self, module: str, cells: Sequence[Sequence[SampleMeta]], bucket: int
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The (row, offset) of each segment in the rows of a bucket that holds all, by cell."""
        (rows, width), pairs = self.buckets_of(module)[bucket], self.pairs.get(module, 0.0)
        alone = self._alone(module)
        return tuple(tuple(spread(cell, rows, width, pairs, alone=alone)) for cell in _segments(module, cells))

    def _alone(self, module: str) -> bool:
        """Whether each segment of a module has a row to itself."""
        return module in self.encoders and self.encoders[module].alone

    def fill(
        self, plan: MicrobatchPlan, samples: Mapping[int, Sample], process_rows: ProcessRows | None = None
    ) -> Microbatch:
        """The microbatch of a plan, in `process_rows` (all by default).

        An input of which all rows are filled is a NumPy array, any other a `PartialArray`.

        Args:
          plan: the plan.
          samples: by place in `plan.metas`, at least the samples and media of `plan.needed(process_rows)`.
          process_rows: the rows to fill; None for all.

        Raises:
          ValueError: a sample's placeholders and the tokens of its media differ in number.
        """
        inputs = {module: self._filling.rows(module, plan, samples, process_rows) for module in ("llm", *self.encoders)}
        # Generation reads prompts token by token, on ranks that have whole rows; so the LLM's tokens keep their order.
        fixed = frozenset({"llm"}) if plan.apart else frozenset[str]()
        cells, rows = self.cells, process_rows
        inputs = put_in_order(inputs, self.splits, self._pointers, cells=cells, process_rows=rows, fixed=fixed)
        if not plan.apart:  # generated tokens have no place in a send list
            inputs = with_lists(inputs, self.splits, self.listed, cells=cells, process_rows=rows)
        arrays = {m: {name: array.simplified() for name, array in named.items()} for m, named in inputs.items()}
        return Microbatch(inputs=arrays, bucket=plan.bucket)

    def context_work(self, plan: MicrobatchPlan) -> dict[str, Int[np.ndarray, "C K"]]:
        """Number of keys that the tokens of each rank see, by cell, for each module with context parallelism.

        By module: C cells, K ranks. A module whose rows are not split is absent.
        """
        no_rows, work = ProcessRows(cells={}), {}
        for name, split in self.splits.items():
            if split.ranks > 1:
                work_RK = split.work(self._filling.rows(name, plan, {}, no_rows))
                work[name] = work_RK.reshape(self.cells, -1, split.ranks).sum(axis=1)
        return work

    @property
    def _pointers(self) -> tuple[Pointers, ...]:
        """The inputs that point at tokens in other modules' rows."""
        into_llm = (self._pointer("llm", name, self.encoders[name].text_index or "") for name in shown(self.encoders))
        into_others = (
            self._pointer(name, source, index)
            for name, spec in self.encoders.items()
            for source, index in spec.reads or ((("llm", ""),) if spec.drawn else ())
        )
        return (*into_llm, *into_others)

    def _pointer(self, module: str, source: str, index: str) -> Pointers:
        """The input of a module that points at the tokens of another; ``index`` is its name, "" for the default."""
        together = self.encoders[source].patches_per_token if source in self.encoders else 1
        return Pointers(module=module, name=index or places_of(source), source=source, together=together)

    @property
    def listed(self) -> tuple[Pointers, ...]:
        """The pointers whose tokens go by send lists, in buckets where these are shorter than all tokens."""
        # The rows of an op of several microbatches go as they are: its ranks may have parts of cells.
        pointers = with_one_reader(self._pointers) if self.lists else ()
        return tuple(pointer for pointer in pointers if pointer.source not in self.together)

    def step(self, step: int, samples: Sequence[Sample]) -> StepBatch:
        """The batch of `step` in all rows, from all samples of the step with all their media; see `plan` for errors."""
        plan, remaining = self.plan(step, [self._meta(sample) for sample in samples]), iter(samples)
        return plan.batch(
            [self.fill(part, dict(enumerate(islice(remaining, len(part.metas))))) for part in plan.microbatches]
        )

    def microbatch(self, samples: Sequence[Sample], rows: int, *, apart: bool = False) -> Microbatch:
        """A microbatch in all rows, from samples with all media; see `plan_microbatch`."""
        plan = self.plan_microbatch([self._meta(sample) for sample in samples], rows, apart=apart)
        return self.fill(plan, dict(enumerate(samples)))

    def media(self, name: str, plan: MicrobatchPlan, patches_RTE: np.ndarray) -> dict[int, tuple[np.ndarray, ...]]:
        """The media of each sample, float arrays [*size, channels], by place in `plan.metas`, in order of appearance.

        Args:
          name: the encoder or generator.
          plan: the plan of the microbatch.
          patches_RTE: its patches in all rows, in the order of the ranks, as inputs of the microbatch have them.

        Returns:
          The media; a sample without media of `name` is absent.
        """
        spec, part, media = self.encoders[name], plan.encoders[name], dict[int, list[np.ndarray]]()
        rows = spec.buckets[part.bucket][0]
        if (split := self.splits.get(name, UNSPLIT)).permutes:
            lengths = self._filling.rows(name, plan, {}, ProcessRows(cells={}))
            patches_RTE = restored(patches_RTE, split.order(lengths))
        for cell, places in enumerate(part.places):
            for (sample, _, grid), (row, start) in zip(plan.media(name, cell), places, strict=True):
                where = media_places(spec, spec.buckets[part.bucket], grid, start)
                patches_NE = patches_RTE[cell * rows + row, where]
                media.setdefault(sample, []).append(unpatchify(patches_NE, grid, spec))
        return {sample: tuple(arrays) for sample, arrays in media.items()}

    def _meta(self, sample: Sample) -> SampleMeta:
        self._require_known(sample.media)
        return completed(meta_of(sample, self.encoders), self.encoders)

    def _require_known(self, names: Collection[str]) -> None:
        if strangers := sorted(set(names) - set(self.encoders)):
            raise ConfigError(f"Model.encoders={sorted(self.encoders)} lack {strangers[0]!r}, which a sample has")

    @cached_property
    def _filling(self) -> Filling:
        return Filling(
            encoders=self.encoders,
            splits=self.splits,
            pointers=self._pointers,
            mask=self.mask,
            pad=self.pad,
            cells=self.cells,
        )


def _segments(module: str, cells: Sequence[Sequence[SampleMeta]]) -> list[list[int]]:
    """Number of positions of each of a module's segments, by cell."""
    return [[n for meta in cell for n in meta.segments(module)] for cell in cells]
