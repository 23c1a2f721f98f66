"""Variants of the programs of attention, where those of the device differ: runs in rows, distances of cp transfers.

A choice on the device makes the host wait. So the host chooses programs by the segments of a microbatch; every process
has those of all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from mmjax import jax_compat
from mmjax.attention.kernels import AttentionCall
from mmjax.attention.mask import Mask
from mmjax.attention.reach import DISTANCES, REACH, distances, reach_of, reaches
from mmjax.attention.row_runs import ANY_RUNS, MAX_RUNS, are_neighbours, includes, runs_of, widest_of
from mmjax.data.packing import Packer
from mmjax.data.possible_runs import possible_runs
from mmjax.data.process_rows import PartialArray
from mmjax.data.split import restored
from mmjax.data.together import MICROBATCHES, Together, joined
from mmjax.data.types import Microbatch
from mmjax.pipeline.place import InputShapes, PlacedModel, Stage
from mmjax.pipeline.walker import Signature

Buckets = Mapping[int, tuple[int, ...]]
"""Values of ``max_runs``, the narrowest first, by the index of a bucket; 0 for a module without buckets."""


@dataclass(frozen=True, kw_only=True)
class CompiledRuns:
    """The values of ``max_runs`` (see ``attention.row_runs``) and of ``reach`` for which programs are compiled.

    Attributes:
      modules: ``max_runs`` by module and bucket; modules whose kernels take any rows are left out.
      causal: whether a module's mask is causal, by module.
      cells: cells of a microbatch.
      shared: whether all microbatches of a step take the same programs.
      neighbours: modules whose kernels compute only where the tokens of each medium are neighbours, with the setting
        that names the kernels.
      transfers: modules that exchange needed blocks, with their ranks of cp; their programs are compiled for each of
        ``attention.reach.reaches``.
      together: the microbatches of the ops of encoders that take several, by name.
      microbatches: microbatches of a step.
    """

    modules: Mapping[str, Buckets]
    causal: Mapping[str, bool]
    cells: int
    shared: bool
    neighbours: Mapping[str, str] = field(default_factory=dict)
    transfers: Mapping[str, int] = field(default_factory=dict)
    together: Mapping[str, Together] = field(default_factory=dict)
    microbatches: int = 1

    @property
    def one_by_one(self) -> CompiledRuns:
        """The same for forward passes outside of a step, in which every op takes one microbatch."""
        together = {name: replace(several, microbatches=1) for name, several in self.together.items()}
        return replace(self, together=together)

    def shapes(self, shapes: Mapping[Signature, InputShapes]) -> dict[Signature, InputShapes]:
        """The shapes of each combination of buckets, for each combination of ``max_runs`` and reaches, by signature.

        A signature has a pair such as ("llm.max_runs", 4) for each module with several values, one such as
        ("llm.reach", 2) for each of ``transfers``, and one such as ("vision.microbatches", 4) for each of ``together``
        whose ops differ; where there is none, it is that of the buckets. Shapes of ``together`` are those of an op.
        """
        result: dict[Signature, InputShapes] = {}
        for signature, inputs in self._of_ops(shapes):
            numbers = {module: self._numbers(module, dict(signature)) for module in self.modules}
            for chosen in itertools.product(*numbers.values(), *map(reaches, self.transfers.values())):
                runs = dict(zip(numbers, chosen, strict=False))
                reach = dict(zip(self.transfers, chosen[len(numbers) :], strict=True))
                result[self._signature(dict(signature), runs, reach)] = {
                    module: {**arrays, **self._static(module, arrays, runs, reach)} for module, arrays in inputs.items()
                }
        return result

    def _of_ops(self, shapes: Mapping[Signature, InputShapes]) -> Iterator[tuple[Signature, InputShapes]]:
        """The shapes of ops of several microbatches in place of a microbatch's, for each number of these."""
        choices = [several.sizes(self.microbatches) for several in self.together.values()]
        for signature, inputs in shapes.items():
            for sizes in itertools.product(*choices):
                of_ops = dict(inputs)
                for (name, several), size in zip(self.together.items(), sizes, strict=True):
                    arrays = {key: self._op_shape(array, several, size) for key, array in inputs[name].items()}
                    # An op that is always of one microbatch is none that is shared out.
                    of_ops[name] = arrays | ({MICROBATCHES: size} if several.microbatches > 1 else {})
                yield self._sized(signature, dict(zip(self.together, sizes, strict=True))), of_ops

    def _op_shape(self, array: jax.ShapeDtypeStruct, several: Together, size: int) -> jax.ShapeDtypeStruct:
        rows = several.rows(array.shape[0] // self.cells, self.cells, size)
        return jax.ShapeDtypeStruct((self.cells * size * rows, *array.shape[1:]), array.dtype)

    def _sized(self, signature: Signature, sizes: Mapping[str, int]) -> Signature:
        """The signature with the numbers of microbatches of ops, by encoder, where a step has several."""
        several = {name: of.sizes(self.microbatches) for name, of in self.together.items()}
        named = [(f"{name}.{MICROBATCHES}", size) for name, size in sizes.items() if len(several[name]) > 1]
        return tuple(sorted((*signature, *named)))

    def _static(
        self, module: str, arrays: Mapping[str, Any], runs: Mapping[str, int], reach: Mapping[str, int]
    ) -> dict[str, Any]:
        """Static values for which the attention of a module is compiled, beside the shapes of its arrays."""
        static: dict[str, Any] = {MAX_RUNS: runs[module]} if module in runs else {}
        if module in reach:
            backwards = self.causal[module] and "order" not in arrays
            static[DISTANCES] = distances(reach[module], self.transfers[module], backwards=backwards)
        return static

    def signed(self, microbatches: Sequence[Microbatch]) -> list[tuple[Signature, InputShapes]]:
        """The signature and the inputs of each microbatch of a step: pairs for ``Executor.step``.

        The first microbatch of an op that takes several has the inputs of all of them, the others have none.

        Raises:
          ValueError: rows have more runs than any program is compiled for, or a medium's tokens are not neighbours and
            have to be.
        """
        for microbatch in microbatches:
            self._require_neighbours(microbatch)
        runs = [{module: self._runs(module, microbatch) for module in self.modules} for microbatch in microbatches]
        reach = [self._reach(microbatch) for microbatch in microbatches]
        if self.shared:
            together = {module: widest_of([numbers[module] for numbers in runs]) for module in self.modules}
            farthest = {module: max(of_part[module] for of_part in reach) for module in self.transfers}
            runs, reach = [together] * len(runs), [farthest] * len(reach)
        for name, several in self.together.items():
            for span in several.spans(len(microbatches)):
                if name in self.modules:
                    most = widest_of([runs[m][name] for m in span])
                    runs[span.start : span.stop] = [{**runs[m], name: most} for m in span]
                if name in self.transfers:
                    farthest_of_op = max(reach[m][name] for m in span)
                    reach[span.start : span.stop] = [{**reach[m], name: farthest_of_op} for m in span]
        signatures = [
            self._signature(part.bucket, self._narrowest(part.bucket, numbers), of_part)
            for part, numbers, of_part in zip(microbatches, runs, reach, strict=True)
        ]
        return self._joined(signatures, [part.inputs for part in microbatches])

    def _joined(
        self, signatures: Sequence[Signature], inputs: Sequence[InputShapes]
    ) -> list[tuple[Signature, InputShapes]]:
        """Microbatches with inputs of ops, of encoders that take several together."""
        result, sizes = [dict(of_microbatch) for of_microbatch in inputs], [dict[str, int]() for _ in inputs]
        for name, several in self.together.items():
            for span in several.spans(len(inputs)):
                result[span[0]][name] = joined([inputs[m][name] for m in span], self.cells, several)
                for m in span:
                    sizes[m][name] = len(span)
                for m in span[1:]:
                    del result[m][name]
        signed = zip(signatures, sizes, result, strict=True)
        return [(self._sized(signature, of_ops), arrays) for signature, of_ops, arrays in signed]

    def _reach(self, microbatch: Microbatch) -> dict[str, int]:
        """The least reach of each module's rows."""
        segments = {module: np.asarray(microbatch.inputs[module]["segments"]) for module in self.transfers}
        return {module: reach_of(segments[module], ranks) for module, ranks in self.transfers.items()}

    def _require_neighbours(self, microbatch: Microbatch) -> None:
        """Requires that tokens of each medium are neighbours in this process's rows, where a kernel relies on it."""
        for module, setting in self.neighbours.items():
            inputs = microbatch.inputs[module]
            items = inputs["items"]
            rows = items.rows if isinstance(items, PartialArray) else slice(None)
            arrays = [np.asarray(inputs["segments"])[rows], _local(items)]
            if "order" in inputs:
                arrays = [restored(array, _local(inputs["order"])) for array in arrays]
            if not are_neighbours(arrays[0], arrays[1]):
                fix = "tokens of an image, recording or drawing are not neighbours; use 'auto' or 'blockwise'"
                raise ValueError(f"{setting}: {fix}")

    def _numbers(self, module: str, buckets: Mapping[str, int]) -> tuple[int, ...]:
        return self.modules[module][buckets.get(module, 0)]

    def _signature(self, buckets: Mapping[str, int], runs: Mapping[str, int], reach: Mapping[str, int]) -> Signature:
        chosen = [(f"{m}.{MAX_RUNS}", number) for m, number in runs.items() if len(self._numbers(m, buckets)) > 1]
        chosen += [(f"{module}.{REACH}", number) for module, number in reach.items()]
        return tuple(sorted((*buckets.items(), *chosen)))

    def _runs(self, module: str, microbatch: Microbatch) -> int:
        """The least ``max_runs`` of a module's rows."""
        inputs = microbatch.inputs[module]
        segments = np.asarray(inputs["segments"])
        return runs_of(segments, cells=self.cells, causal=self.causal[module], in_row_order="order" not in inputs)

    def _narrowest(self, buckets: Mapping[str, int], runs: Mapping[str, int]) -> dict[str, int]:
        """The narrowest ``max_runs`` that includes each module's rows."""
        result = {}
        for module, number in runs.items():
            numbers = self._numbers(module, buckets)
            fitting = [candidate for candidate in numbers if includes(candidate, number)]
            if not fitting:
                raise ValueError(
                    f"{module}: rows have {number or 'more than 16'} runs, and programs are compiled for at most "
                    f"{numbers[-1]}; the source's worst_case has to bound every sample"
                )
            result[module] = fitting[0]
        return result


def _local(array: Any) -> np.ndarray:
    """The rows that this process has."""
    return array.local_rows if isinstance(array, PartialArray) else array


NO_RUNS = CompiledRuns(modules={}, causal={}, cells=1, shared=False)
"""For devices on which a choice costs nothing."""


def compiled_runs(placed: PlacedModel, packer: Packer, samples: int) -> CompiledRuns:
    """The values of ``max_runs`` for which a run's programs are compiled.

    Args:
      placed: the model on its devices.
      packer: packs its rows.
      samples: the most samples of a microbatch.

    Raises:
      ConfigError: a module's attention is set to a kernel that does not support its rows on these devices.
    """
    neighbours = {
        stage.model.module: setting for stage in placed.stages.values() if (setting := stage.model.needs_neighbours)
    }
    first_stages = {stage.model.module: stage for stage in reversed(placed.stages.values())}
    modules, causal, per_cell = {}, dict[str, bool](), -(-samples // packer.cells)
    transfers = dict[str, int]()
    for module, stage in first_stages.items():
        device = placed.world.devices[stage.submesh.ranks[0]]
        if jax_compat.device_kind(device)[0] != "gpu":
            continue
        causal[module] = placed.model.nodes[module].module.mask == "causal"
        layout = stage.submesh.layout
        if layout.cp > 1 and layout.cp_way == "need":
            transfers[module] = layout.cp
        if module in packer.together and packer.together[module].dp > packer.cells:
            continue  # a rank may have any part of a cell's rows, so no number of runs holds for it
        numbers = {}
        for index, bucket in enumerate(packer.buckets_of(module) or ((per_cell, packer.sequence_length),)):
            possible = possible_runs(packer, module, bucket, samples=per_cell, causal=causal[module])
            numbers[index] = _distinct(stage, _call(placed, stage, device, bucket[1]), possible)
        if any(of_bucket != (ANY_RUNS,) for of_bucket in numbers.values()):
            modules[module] = numbers
    return CompiledRuns(
        modules=modules,
        causal=causal,
        cells=packer.cells,
        shared=packer.one_bucket,
        neighbours=neighbours,
        transfers=transfers,
        together=packer.together,
        microbatches=packer.microbatches,
    )


def with_typical_runs(placed: PlacedModel, packer: Packer, inputs: InputShapes) -> InputShapes:
    """The shapes of a microbatch with the number of runs that its rows have mostly, for programs that are timed.

    Args:
      placed: the model on its devices.
      packer: packs the run's rows; the shapes need be none of its buckets.
      inputs: the shapes.
    """
    samples = -(-inputs["llm"]["segments"].shape[0] // packer.cells)
    result = dict(inputs)
    for module, module_inputs in inputs.items():
        rows, width = module_inputs["segments"].shape
        bucket, causal = (-(-rows // packer.cells), width), placed.model.nodes[module].module.mask == "causal"
        numbers = possible_runs(packer, module, bucket, samples=samples, causal=causal)
        result[module] = {**module_inputs, MAX_RUNS: numbers[0]}
    return result


def _call(placed: PlacedModel, stage: Stage, device: Any, width: int) -> AttentionCall:
    """An attention call of a stage, with the fields that ``StageModel.compiled_runs`` reads."""
    layout, (platform, device_kind) = stage.submesh.layout, jax_compat.device_kind(device)
    return AttentionCall(
        platform=platform,
        device_kind=device_kind,
        mask=Mask("causal"),
        dtype=placed.settings.dtype,
        queries=width,
        keys=width,
        heads=1,
        groups=1,
        width=128,
        cp_way=layout.cp_way if layout.cp > 1 else "",
        in_row_order=layout.cp == 1,
    )


def _distinct(stage: Stage, call: AttentionCall, numbers: Sequence[int]) -> tuple[int, ...]:
    """The numbers whose programs differ; ``ANY_RUNS`` stands for all whose programs take any rows."""
    programs = dict[tuple[int, ...], int]()
    for number in numbers:
        compiled = stage.model.compiled_runs(replace(call, max_runs=number))
        if set(compiled) <= {ANY_RUNS}:
            return (*programs.values(), ANY_RUNS)
        programs[compiled] = number
    return tuple(programs.values())
