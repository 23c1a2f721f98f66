"""Packs samples into the static arrays of one step: cells, encoder rows, buckets, index maps.

A plan is made from the samples' metadata, then the wanted rows are filled in. Cells hold equally many consecutive
samples, in LLM rows of their own, and the encoder rows of exactly these samples' media: packing never crosses a cell.
Nothing here knows what an encoder encodes: an encoder is a name and an `EncoderSpec`.

Legend: B LLM rows of a microbatch, S sequence length, R encoder rows of a microbatch, T patches per encoder row,
E numbers in a patch, A axes of a medium.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import prod
from typing import Any

import numpy as np
from jaxtyping import Int

from mmjax.configurable import ConfigError
from mmjax.data.filling import Filling, shown
from mmjax.data.first_fit import holds, rows_needed, spread
from mmjax.data.patches import unpatchify
from mmjax.data.plan import EncoderPlan, MicrobatchPlan, StepPlan, TextPlan, cell_range, patches_of
from mmjax.data.process_rows import ProcessRows
from mmjax.data.sample import meta_of
from mmjax.data.send_lists import alone, send_list, with_lists
from mmjax.data.split import WHOLE, Pointers, Split, put_in_order, restored
from mmjax.data.types import EncoderSpec, Microbatch, Sample, SampleMeta, StepBatch


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Packs the samples of a step.

    Attributes:
      encoders: specs by name, their buckets set (see `fill_buckets`).
      sequence_length: tokens of an LLM row.
      microbatches: microbatches of a step.
      cells: cells of a microbatch, the least common multiple of all modules' dp.
      pad: the token that fills up LLM rows.
      one_bucket: whether all microbatches of a step share the cheapest bucket that holds each of them.
      text: the (rows per cell, tokens per row) shapes that samples are packed into, as `text_buckets` gives them; ()
        gives each sample a row of its own.
      pairs: compute of a pair of positions of one segment over that of a position, by module; rows are balanced by it.
      axes: numbers of a position in the LLM's rows: 1, a token's place in its sample, or 3 (see `mrope`).
      splits: how rows are split over ranks of context parallelism, by module (see `split_over`).
      mask: the rules of which of the LLM's tokens see which (see `attention.language`); all but the plain ones need
        words of each token.
      lists: whether tokens go to other modules by lists of what each rank reads, where these are shorter than all
        tokens (see `send_lists`).
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

    def __post_init__(self) -> None:
        for name, spec in self.encoders.items():
            if not spec.buckets:
                raise ConfigError(f"{name}/Packing.buckets=() is not filled in: call fill_buckets first")

    def split_over(self, splits: Mapping[str, Split], *, lists: bool = False) -> Packer:
        """The packer whose rows are split so, and as wide as that wants; see `lists`."""
        split = replace(self, splits=dict(splits), lists=lists)
        encoders = {
            name: replace(spec, buckets=split.rounded(name, spec.buckets)) for name, spec in self.encoders.items()
        }
        return replace(split, encoders=encoders, text=split.rounded("llm", self.text))

    def rounded(self, module: str, buckets: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Shapes of cells of a module, as wide as its ranks can share them, duplicates removed."""
        split = self.splits.get(module, WHOLE)
        return tuple(dict.fromkeys((rows, split.rounded(width)) for rows, width in buckets))

    def plan(self, step: int, metas: Sequence[SampleMeta]) -> StepPlan:
        """The plan of `step`: microbatch m holds samples m*n … (m+1)*n-1; missing samples leave rows empty.

        Raises ConfigError when a sample has no room.
        """
        per, cuts = self._cuts(metas)
        chosen = zip(cuts, self.buckets(metas), strict=True)
        parts = [self.plan_microbatch(own, per, buckets) for own, buckets in chosen]
        counts = {"samples": len(metas), "media": sum(len(own) for meta in metas for own in meta.grids.values())}
        counts["llm_tokens"] = sum(meta.tokens for meta in metas)
        counts["llm_tokens_padded"] = sum(part.llm.rows_per_cell * part.cells * part.llm.width for part in parts)
        for name, spec in self.encoders.items():
            counts[f"{name}_patches"] = sum(patches_of(meta, name) for meta in metas)
            shapes = [spec.buckets[part.bucket[name]] for part in parts]
            # A class token is computed with and no padding, as are the patches behind it.
            special = spec.special * sum(len(meta.grids.get(name, ())) for meta in metas)
            positions = sum(rows * self.cells * width for rows, width in shapes)
            counts[f"{name}_patches_padded"] = positions - special
        denominators = {"llm": float(sum(meta.weight for meta in metas))}
        each = {name: spec.patch_values if spec.drawn else 1 for name, spec in self.encoders.items()}
        denominators |= {name: float(counts[f"{name}_patches"] * values) for name, values in each.items()}
        return StepPlan(step=step, microbatches=tuple(parts), denominators=denominators, counts=counts)

    def buckets(self, metas: Sequence[SampleMeta]) -> list[dict[str, int]]:
        """For each microbatch of a step, its buckets by module.

        Buckets are not nested: a dearer one may have fewer or narrower rows. So where the microbatches of a step share
        a bucket, each bucket is tried for all of them.

        Raises ConfigError when a sample has no room.
        """
        per, cuts = self._cuts(metas)
        cells = [self._cells(own, per) for own in cuts]
        if self.one_bucket:
            cells = [[cell for own in cells for cell in own]]
        chosen = [{name: self._choose(name, own) for name in self.bucket_counts} for own in cells]
        return chosen * len(cuts) if self.one_bucket else chosen

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
          buckets: buckets to use, by module; a module that is not named takes the cheapest that holds every cell.
          apart: whether each sample has an LLM row of its own, in the `widest` bucket.

        Raises:
          ConfigError: a sample has no room.
        """
        cells, per_cell, given = self._cells(metas, rows), self._per_cell(len(metas), rows), buckets or {}
        text = self._plan_apart(len(metas), per_cell) if apart or not self.text else self._plan_text(cells, given)
        encoders = {}
        for name in self.encoders:
            bucket = self._choose(name, cells, given.get(name))
            encoders[name] = EncoderPlan(bucket=bucket, places=self._spread(name, cells, bucket))
        text = replace(text, axes=self.axes)
        about: Any = {"samples_per_cell": per_cell, "cells": self.cells, "llm": text, "encoders": encoders}
        about["apart"] = apart
        return MicrobatchPlan(metas=tuple(metas), **about)

    def _cuts(self, metas: Sequence[SampleMeta]) -> tuple[int, list[Sequence[SampleMeta]]]:
        """The most samples of a microbatch, and the step's samples by microbatch."""
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
        return [metas[own.start : own.stop] for own in (cell_range(c, per_cell, len(metas)) for c in range(self.cells))]

    def buckets_of(self, module: str) -> tuple[tuple[int, int], ...]:
        """The (rows per cell, positions per row) shapes of a module."""
        return self.text if module == "llm" else self.encoders[module].buckets

    @property
    def bucket_counts(self) -> dict[str, int]:
        """How many buckets each encoder has; and the LLM, where its rows are packed."""
        counts = {name: len(spec.buckets) for name, spec in self.encoders.items()}
        return {**counts, "llm": len(self.text)} if self.text else counts

    @cached_property
    def inputs(self) -> Mapping[str, frozenset[str]]:
        """The names of a microbatch's arrays, by module; lists are there in some buckets alone."""
        empty = self.fill(self.plan_microbatch((), 1), {}, ProcessRows(cells={}))
        listed = {one.source: {send_list(one.module)} for one in self.listed}
        return {module: frozenset(arrays.keys() | listed.get(module, set())) for module, arrays in empty.inputs.items()}

    @property
    def widest(self) -> int:
        """The LLM's bucket with the longest rows, and of these with the most."""
        return max(range(len(self.text)), key=lambda i: self.text[i][::-1])

    def _plan_apart(self, count: int, per_cell: int) -> TextPlan:
        places = tuple((row, 0) for row in range(count))
        if not self.text:
            width = self.splits.get("llm", WHOLE).rounded(self.sequence_length)
            return TextPlan(rows_per_cell=per_cell, width=width, places=places)
        rows, width = self.text[self.widest]
        if per_cell > rows:
            raise ValueError(f"{per_cell} samples apart in a cell of {rows} rows")
        places = tuple((sample // per_cell * rows + sample % per_cell, 0) for sample in range(count))
        return TextPlan(rows_per_cell=rows, width=width, places=places, bucket=self.widest)

    def _plan_text(self, cells: Sequence[Sequence[SampleMeta]], given: Mapping[str, int]) -> TextPlan:
        bucket = self._choose("llm", cells, given.get("llm"))
        rows, width = self.text[bucket]
        found = self._spread("llm", cells, bucket)
        places = tuple((cell * rows + row, start) for cell, own in enumerate(found) for row, start in own)
        return TextPlan(rows_per_cell=rows, width=width, places=places, bucket=bucket)

    def _choose(self, module: str, cells: Sequence[Sequence[SampleMeta]], bucket: int | None = None) -> int:
        """The cheapest of a module's buckets that holds the segments of every cell; or `bucket`, if it does.

        Raises ConfigError where none, or `bucket`, has room.
        """
        shapes, sizes = self.buckets_of(module), _segments(module, cells)
        for tried in range(len(shapes)) if bucket is None else (bucket,):
            if all(holds(shapes[tried], cell) for cell in sizes):
                return tried
        raise ConfigError(f"{module}/Packing.buckets={shapes} cannot hold {self._wanted(module, sizes)}")

    def _wanted(self, module: str, sizes: Sequence[Sequence[int]]) -> str:
        """Words for a message: the segments that have no room in any bucket, and what to do."""
        largest = max((n for cell in sizes for n in cell), default=0)
        if module == "llm":
            most = max(map(len, sizes))
            return f"{most} samples of up to {largest} tokens in a cell: add a larger (rows, tokens) pair"
        spec = self.encoders[module]
        width = spec.buckets[-1][1]
        one = f"an image of {largest} patches" if spec.medium == "image" else f"a recording of {largest} patches"
        several = (
            f"{max(rows_needed(cell, width) for cell in sizes)} rows of {width} patches" if largest <= width else one
        )
        return f"{several} in a cell: add a larger (rows, patches) pair"

    def _spread(
        self, module: str, cells: Sequence[Sequence[SampleMeta]], bucket: int
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The place of each segment in the rows of a bucket that holds them, by cell."""
        (rows, width), pairs = self.buckets_of(module)[bucket], self.pairs.get(module, 0.0)
        return tuple(tuple(spread(cell, rows, width, pairs)) for cell in _segments(module, cells))

    def fill(self, plan: MicrobatchPlan, samples: Mapping[int, Sample], own: ProcessRows | None = None) -> Microbatch:
        """The microbatch of a plan, in the rows of `own` (all by default).

        `samples` is by place in the plan, and has at least the samples and media that `MicrobatchPlan.needed` names.
        """
        inputs = {module: self._filling.rows(module, plan, samples, own) for module in ("llm", *self.encoders)}
        # What is to be answered is read one token after another, by ranks that have whole rows.
        stay = frozenset({"llm"}) if plan.apart else frozenset[str]()
        inputs = put_in_order(inputs, self.splits, self._pointers, self.cells, own, stay)
        # It is read by programs for whole rows, since the tokens that follow have no place in a list.
        inputs = inputs if plan.apart else with_lists(inputs, self.splits, self.listed, self.cells, own)
        arrays = {m: {name: array.simplified() for name, array in named.items()} for m, named in inputs.items()}
        return Microbatch(inputs=arrays, bucket=plan.bucket)

    def context_work(self, plan: MicrobatchPlan) -> dict[str, Int[np.ndarray, "C K"]]:
        """Keys that the tokens of each rank see, by cell, of each module whose rows are split over ranks of cp."""
        nothing, found = ProcessRows(cells={}), {}
        for name, split in self.splits.items():
            if split.ranks == 1:
                continue
            rows = self._filling.rows(name, plan, {}, nothing)
            work = split.work(rows)
            found[name] = work.reshape(self.cells, -1, split.ranks).sum(axis=1)
        return found

    @property
    def _pointers(self) -> tuple[Pointers, ...]:
        """The inputs that hold places in other modules' rows."""
        encoders = shown(self.encoders)
        read = (
            Pointers(module="llm", name=f"{name}_index", source=name, together=self.encoders[name].patches_per_token)
            for name in encoders
        )
        drawn = (Pointers(module=name, name="index", source="llm") for name in self.encoders if name not in encoders)
        return (*read, *drawn)

    @property
    def listed(self) -> tuple[Pointers, ...]:
        """The inputs whose tokens go by lists, in buckets where these are shorter than all tokens."""
        return alone(self._pointers) if self.lists else ()

    def step(self, step: int, samples: Sequence[Sample]) -> StepBatch:
        """The batch of `step` in all rows, from whole samples; see `plan`."""
        plan, left = self.plan(step, [self._meta(sample) for sample in samples]), iter(samples)
        cut = [dict(enumerate(islice(left, len(part.metas)))) for part in plan.microbatches]
        return plan.batch([self.fill(part, own) for part, own in zip(plan.microbatches, cut, strict=True)])

    def microbatch(self, samples: Sequence[Sample], rows: int, *, apart: bool = False) -> Microbatch:
        """A microbatch in all rows, from whole samples; see `plan_microbatch`."""
        plan = self.plan_microbatch([self._meta(sample) for sample in samples], rows, apart=apart)
        return self.fill(plan, dict(enumerate(samples)))

    def media(self, name: str, plan: MicrobatchPlan, patches_RTE: np.ndarray) -> dict[int, tuple[np.ndarray, ...]]:
        """The media by sample, put together from the patches of all rows of encoder or generator `name`."""
        spec, part, found = self.encoders[name], plan.encoders[name], dict[int, list[np.ndarray]]()
        rows = spec.buckets[part.bucket][0]
        if (split := self.splits.get(name, WHOLE)).permutes:
            known = self._filling.rows(name, plan, {}, ProcessRows(cells={}))
            patches_RTE = restored(patches_RTE, split.order(known))
        for cell, places in enumerate(part.places):
            for (sample, _, grid), (row, start) in zip(plan.media(name, cell), places, strict=True):
                start += spec.prefix
                patches_NE = patches_RTE[cell * rows + row, start : start + prod(grid)]
                found.setdefault(sample, []).append(unpatchify(patches_NE, grid, spec))
        return {sample: tuple(own) for sample, own in found.items()}

    def _meta(self, sample: Sample) -> SampleMeta:
        self._require_known(sample.media)
        return meta_of(sample, self.encoders)

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
    """Positions that each of a module's segments takes, by cell."""
    return [[n for meta in cell for n in meta.segments(module)] for cell in cells]
