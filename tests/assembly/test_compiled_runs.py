"""What attention is compiled for: chosen on the host, alike in all processes, and only where kernels differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import stand_in
from trial_runs import write_tiny

from mmjax import jax_compat
from mmjax.assembly import compiled_runs
from mmjax.assembly.assembly import assemble, place
from mmjax.assembly.packers import bucket_shapes
from mmjax.assembly.parts import PlacedRun
from mmjax.assembly.samples import open_source
from mmjax.attention.reach import DISTANCES
from mmjax.attention.row_runs import ANY_RUNS, MAX_PACKED_RUNS, MAX_RUNS, are_neighbours, includes, runs_of, widest_of
from mmjax.config import load_config
from mmjax.data.loader import StepMaker
from mmjax.data.packing import Packer
from mmjax.data.possible_runs import possible_runs
from mmjax.data.process_rows import ProcessRows
from mmjax.data.types import EncoderSpec, SampleMeta, WorstCase
from mmjax.eval.evaluator import Evaluator
from mmjax.pipeline.executor import Executor

CELLS = 2


# ---- the runs of rows ------------------------------------------------------------------------------------------------


def kind(segments_BT: np.ndarray, *, causal: bool) -> int:
    """What a rank needs for its rows: 0 for kernels of whole rows, 1 for those of packed ones, 2 for neither."""
    starts = np.diff(segments_BT, axis=1, prepend=-1) != 0
    later = starts[:, 1:] & (segments_BT[:, 1:] > 0) if causal else starts[:, 1:]
    return int(later.any()) + int(later.any() and starts.sum() > MAX_PACKED_RUNS * len(segments_BT))


@st.composite
def packed_rows(draw: st.DrawFn) -> np.ndarray:
    """Rows as they are packed: segments from 1 on, and padding behind them."""
    rows, width = CELLS * draw(st.integers(1, 3)), draw(st.integers(1, 60))
    segments = np.zeros((rows, width), np.int32)
    for row in segments:
        lengths = draw(st.lists(st.integers(1, draw(st.sampled_from([2, 20, 60]))), max_size=50))
        begun = 0
        for number, length in enumerate(lengths):
            row[begun : begun + length] = number + 1
            begun += length
    return segments


@settings(max_examples=300, deadline=None)
@given(segments=packed_rows(), causal=st.booleans())
def test_every_rank_has_rows_of_at_most_so_many_runs(segments: np.ndarray, causal: bool) -> None:
    runs = runs_of(segments, cells=CELLS, causal=causal)
    for shares in (1, CELLS):
        for rank in np.split(segments, shares):
            starts = np.diff(rank, axis=1, prepend=-1) != 0
            assert runs == 1 or starts.sum() <= runs * len(rank)
            assert kind(rank, causal=causal) <= (runs > 1) + (runs > MAX_PACKED_RUNS)
    assert (runs == 1) == (kind(segments, causal=causal) == 0)
    assert runs_of(segments, cells=1, causal=causal) <= runs
    assert (runs_of(segments, cells=1, causal=causal) > MAX_PACKED_RUNS) == (kind(segments, causal=causal) == 2)


@settings(max_examples=50, deadline=None)
@given(segments=packed_rows(), causal=st.booleans(), seed=st.integers(0, 99))
def test_the_order_of_tokens_does_not_count(segments: np.ndarray, causal: bool, seed: int) -> None:
    permuted = np.random.default_rng(seed).permuted(segments, axis=1)
    wanted = runs_of(segments, cells=CELLS, causal=causal)
    assert runs_of(permuted, cells=CELLS, causal=causal, in_row_order=False) == wanted


def test_a_segment_in_several_pieces_fits_no_kernel() -> None:
    assert runs_of(np.array([[1, 0, 1, 1]]), cells=1, causal=False) == ANY_RUNS
    assert runs_of(np.array([[0, 0, 1, 1]]), cells=1, causal=True) == 2


def test_tokens_of_a_medium_are_neighbours() -> None:
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    items = np.array([[1, 1, 0, 1, 2, 0], [0, 1, 1, 2, 2, 0]])
    assert are_neighbours(segments, items) and are_neighbours(segments, np.zeros_like(items))
    items[1, 4] = 1
    assert not are_neighbours(segments, items)


def test_larger_numbers_include_smaller_ones() -> None:
    assert includes(4, 1) and includes(4, 4) and not includes(4, 5) and not includes(4, ANY_RUNS)
    assert includes(ANY_RUNS, 99) and includes(ANY_RUNS, ANY_RUNS)
    assert widest_of([1, 3]) == 3 and widest_of([ANY_RUNS, 3]) == ANY_RUNS


# ---- the runs that may occur -----------------------------------------------------------------------------------------


@st.composite
def packed_steps(draw: st.DrawFn) -> tuple[Packer, list[SampleMeta]]:
    """A packer with bounds on its samples, and samples within them."""
    sizes = st.integers(*sorted((draw(st.integers(1, 4)), draw(st.integers(1, 8)))))
    media, cells = draw(st.integers(0, 6)), draw(st.sampled_from([1, 2]))
    metas = [
        SampleMeta(tokens=draw(st.integers(1, 12)), weight=1.0, grids={"eye": tuple((n, 1) for n in patches)})
        for patches in draw(st.lists(st.lists(sizes, max_size=media), min_size=1, max_size=12))
    ]
    patches = [n for meta in metas for n in meta.patches["eye"]] or [1]
    least = {"eye": min(patches)} if draw(st.booleans()) else {}
    worst = WorstCase(tokens=12, media={"eye": media}, patches={"eye": max(patches)}, least=least)
    per_cell = -(-len(metas) // cells)
    rows = draw(st.integers(max(1, media * per_cell) // 2 + 1, max(2, 2 * media * per_cell)))
    width = max(patches) * draw(st.sampled_from([1, 2]))
    packer = Packer(
        encoders={"eye": EncoderSpec(patch=1, buckets=((rows, width), (media * per_cell + 1, max(patches))))},
        sequence_length=12,
        microbatches=1,
        cells=cells,
        pad=0,
        text=draw(st.sampled_from([(), ((per_cell, 12),), ((per_cell, 24),)])),
        worst=draw(st.sampled_from([worst, None])),
    )
    return packer, metas


@settings(max_examples=200, deadline=None)
@given(step=packed_steps(), causal=st.booleans())
def test_all_rows_that_are_packed_have_been_possible(step: tuple[Packer, list[SampleMeta]], causal: bool) -> None:
    packer, metas = step
    part = packer.plan(0, metas).microbatches[0]
    filled = packer.fill(part, {}, ProcessRows(cells={}))
    for module, is_causal in (("llm", True), ("eye", causal)):
        bucket = packer.buckets_of(module)[filled.bucket[module]] if packer.buckets_of(module) else (1, 12)
        possible = possible_runs(packer, module, bucket, samples=part.samples_per_cell, causal=is_causal)
        runs = runs_of(filled.inputs[module]["segments"], cells=packer.cells, causal=is_causal)
        assert includes(possible[-1], runs), (module, possible, runs)
        assert list(possible) == sorted(possible, key=lambda number: number or 99) and len(possible) <= 3


@pytest.mark.parametrize(
    ("least", "buckets", "samples", "numbers"),
    [
        (9, ((4, 9),), 4, (1,)),  # media of one size fill a row each
        (9, ((4, 12),), 4, (2,)),  # with padding behind them
        (4, ((4, 9),), 4, (2,)),
        (0, ((4, 9),), 4, (1, 2)),  # of unknown sizes: most likely of one
        (0, ((2, 20),), 4, (3,)),
        (4, ((1, 20),), 40, (6,)),  # five and padding
        (1, ((1, 20),), 40, (16, 0)),
    ],
    ids=str,
)
def test_few_numbers_are_compiled(least: int, buckets: Any, samples: int, numbers: tuple[int, ...]) -> None:
    worst = WorstCase(tokens=9, media={"eye": 1}, patches={"eye": 9}, least={"eye": least} if least else {})
    encoders = {"eye": EncoderSpec(patch=1, buckets=buckets)}
    packer = Packer(encoders=encoders, sequence_length=9, microbatches=1, cells=1, pad=0, worst=worst)
    assert possible_runs(packer, "eye", buckets[0], samples=samples, causal=False) == numbers
    assert possible_runs(packer, "llm", (4, 9), samples=4, causal=True) == (1,)
    text = replace(packer, text=((4, 9),))
    assert possible_runs(text, "llm", (4, 9), samples=samples, causal=True) == {4: (2,), 40: (11,)}[samples]
    assert possible_runs(text, "llm", (4, 9), samples=1, causal=True) == (1,)


# ---- signatures ------------------------------------------------------------------------------------------------------


def placed(folder: Path, *bindings: str) -> tuple[PlacedRun, StepMaker]:
    recipe = load_config([write_tiny(folder)], bindings)
    parts, source = place(recipe), open_source(recipe, split="train")
    return parts, StepMaker(source=source, packer=parts.packer, global_batch=recipe.train.global_batch)


def test_without_such_kernels_signatures_are_those_of_buckets(tmp_path: Path) -> None:
    parts, make = placed(tmp_path)
    assert not parts.runs.modules
    assert parts.shapes.keys() == bucket_shapes(parts.packer, parts.samples).keys()
    microbatches = make(0).microbatches
    for part, (signature, inputs) in zip(microbatches, parts.runs.signed(microbatches), strict=True):
        assert signature == tuple(sorted(part.bucket.items())) and inputs == part.inputs
        assert all(MAX_RUNS not in shapes for shapes in parts.shapes[signature].values())


@pytest.mark.parametrize(
    "bindings", [["vision/ViT.attention='blockwise'"], ["vision/ViT.width=136", "vision/ViT.heads=1"]]
)
def test_modules_that_cudnn_refuses_have_no_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bindings: list[str]
) -> None:
    """A head of 136 is too wide."""
    stand_in(monkeypatch)
    parts, _ = placed(tmp_path, *bindings, "vision/Layout.tp=1")
    assert parts.runs.modules.keys() == {"llm"}


def test_all_processes_choose_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows they fill in: of segments they have all."""
    stand_in(monkeypatch)
    parts, make = placed(tmp_path)
    assert parts.runs.modules.keys() == {"llm", "vision"}
    whole = [signature for signature, _ in parts.runs.signed(make(0).microbatches)]
    assert set(whole) <= parts.shapes.keys()
    for rows in (ProcessRows(cells={}), ProcessRows(cells={"vision": {"patches": (1,)}, "llm": {"tokens": (0,)}})):
        partial = replace(make, process_rows=rows)(0)
        assert [signature for signature, _ in parts.runs.signed(partial.microbatches)] == whole


def test_microbatches_that_share_programs_share_the_widest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    parts, make = placed(tmp_path)
    runs = replace(parts.runs, modules={"vision": {index: (1, 3, ANY_RUNS) for index in range(9)}})
    one, other = make(0).microbatches[:2]
    inputs = {**other.inputs, "vision": {**other.inputs["vision"]}}
    segments = inputs["vision"]["segments"] = np.zeros_like(inputs["vision"]["segments"])
    empty = replace(other, inputs=inputs)
    signatures = [dict(signature)["vision.max_runs"] for signature, _ in runs.signed([one, empty])]
    assert signatures[0] > 1 and signatures[1] == 1
    segments[:] = np.arange(segments.shape[1]) + 1
    assert dict(runs.signed([empty])[0][0])["vision.max_runs"] == ANY_RUNS
    shared = replace(runs, shared=True).signed([one, empty])
    assert [dict(signature)["vision.max_runs"] for signature, _ in shared] == [ANY_RUNS] * 2


def test_rows_for_which_nothing_is_compiled_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    parts, make = placed(tmp_path)
    runs = replace(parts.runs, modules={"vision": {index: (1,) for index in range(9)}})
    with pytest.raises(ValueError, match=r"vision: rows have \d+ runs, and programs are compiled for at most 1; "):
        runs.signed(make(0).microbatches)


@pytest.mark.long
def test_a_program_for_each_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several may occur; other stages share theirs."""
    counts = {}
    for numbers in ((4,), (4, ANY_RUNS)):
        with monkeypatch.context() as patch:
            stand_in(patch)
            patch.setattr(
                compiled_runs,
                "possible_runs",
                lambda *args, numbers=numbers, **_: numbers if args[1] == "vision" else (1,),
            )
            executor = assemble(load_config([write_tiny(tmp_path)], ["Train.lowering='ops'"])).executor
        assert isinstance(executor, Executor)
        distinct = {id(program): program.name for program in executor.programs()}
        counts[len(numbers)] = {
            name: [*distinct.values()].count(name) for name in ("F vision.0", "B vision.0", "F llm.0")
        }
    assert counts[2]["F llm.0"] == counts[1]["F llm.0"]
    assert (
        counts[2]["F vision.0"] == 2 * counts[1]["F vision.0"]
        and counts[2]["B vision.0"] == 2 * counts[1]["B vision.0"]
    )


def test_tokens_that_are_not_neighbours_are_refused_where_kernels_need_them(tmp_path: Path) -> None:
    parts, make = placed(tmp_path, "llm/Decoder.mask='gemma3'")
    assert not parts.runs.neighbours
    runs, (part, *_) = replace(parts.runs, neighbours={"llm": "llm/Decoder.attention='tokamax'"}), make(0).microbatches
    assert runs.signed([part])
    part.inputs["llm"]["items"][:] = np.arange(part.inputs["llm"]["items"].shape[1]) % 2
    with pytest.raises(ValueError, match=r"llm/Decoder.attention='tokamax': tokens of an image, .* use 'auto' or 'bl"):
        runs.signed([part])


def test_evaluation_chooses_as_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts lie alone in their rows, and decoding is blockwise."""
    stand_in(monkeypatch)
    parts, make = placed(tmp_path, "llm/Packing.buckets=((8, 96),)", "Data.sequence_length=96")
    evaluator = Evaluator(parts)
    ((_, packed),) = evaluator.rounds([make.source.sample(index) for index in range(2)])
    assert parts.runs.modules.keys() == {"llm", "vision"}
    assert {signature for signature, _ in packed.batch} <= parts.shapes.keys()
    assert {"prefill llm.0", "decode llm.0"} <= {program.name for program in evaluator.predictor.programs()}


def test_devices_are_those_of_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On older ones packed rows are computed blockwise, and so have no number."""
    stand_in(monkeypatch)
    monkeypatch.setattr(jax_compat, "device_kind", lambda device: ("gpu", "NVIDIA A100-SXM4-80GB"))
    parts, _ = placed(tmp_path)
    assert parts.runs.modules == {"llm": {0: (1,)}}


def test_needed_blocks_travel_as_far_as_the_host_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes choose alike, one program of a step takes the farthest, and on CPUs the device chooses."""
    bindings = ("llm/Layout.cp=4", "llm/Layout.dp=1", "llm/Layout.tp=1", "llm/Layout.cp_way='need'")
    bindings += ("llm/Layout.cp_tokens='contiguous'", "vision/Layout.rank_offset=4")
    assert not placed(tmp_path, *bindings)[0].runs.transfers
    stand_in(monkeypatch)
    parts, make = placed(tmp_path, *bindings)
    assert parts.runs.transfers == {"llm": 4}
    one, other = make(0).microbatches[:2]
    rows, width = one.inputs["llm"]["segments"].shape
    quarters = np.repeat([[1, 2, 3, 4]], width // 4, axis=1) * np.ones((rows, 1), np.int32)  # a segment for each rank
    apart = replace(one, inputs={**one.inputs, "llm": {**one.inputs["llm"], "segments": quarters}})
    whole = replace(other, inputs={**other.inputs, "llm": {**other.inputs["llm"], "segments": quarters * 0 + 1}})
    signatures = [signature for signature, _ in parts.runs.signed([apart, whole])]
    assert [dict(signature)["llm.reach"] for signature in signatures] == [0, 3]
    assert set(signatures) <= parts.shapes.keys()
    compiled = {dict(signature)["llm.reach"]: shapes["llm"][DISTANCES] for signature, shapes in parts.shapes.items()}
    assert compiled == {0: (), 1: (1,), 2: (1, 2), 3: (1, 2, 3)}
    shared = replace(parts.runs, shared=True).signed([apart, whole])
    assert [dict(signature)["llm.reach"] for signature, _ in shared] == [3, 3]
    expected = [signature for signature, _ in parts.runs.signed(make(0).microbatches)]
    for cells in ({}, {"llm": {"tokens": (0,)}}):
        partial = replace(make, process_rows=ProcessRows(cells=cells))(0)
        assert [signature for signature, _ in parts.runs.signed(partial.microbatches)] == expected
