"""Lists of the tokens that each rank reads: every pointer reads through its list what it read before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.attention.mask import Mask
from mmjax.data.packing import Packer
from mmjax.data.process_rows import PartialArray, ProcessRows
from mmjax.data.sample import meta_of
from mmjax.data.send_lists import list_length, list_shapes, with_lists, with_one_reader
from mmjax.data.split import Pointers, Split
from mmjax.data.types import Microbatch
from mmjax.models.dit.config import DiTConfig
from mmjax.models.families import module_of
from mmjax.models.graph import multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.parity.samples import Maker, buckets

POINTERS = (Pointers(module="llm", name="vision_index", source="vision", together=4),)


def held(array: np.ndarray, cells: int) -> PartialArray:
    return PartialArray(range(cells), array.shape, cells, array)


@st.composite
def pointing(draw) -> tuple[dict[str, dict[str, PartialArray]], int, int]:
    """Inputs of some cells, of which places of the LLM point at random tokens; and the cells and ranks."""
    cells, ranks, rows, part, blended, tokens = (draw(st.integers(1, n)) for n in (3, 4, 2, 4, 3, 40))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shape = (cells * rows, ranks * part, *([blended] if draw(st.booleans()) else []))
    index = rng.integers(-2, tokens, shape).astype(np.int32)
    segments = np.ones((cells, 4 * tokens), np.int32)
    return {"vision": {"segments": held(segments, cells)}, "llm": {"vision_index": held(index, cells)}}, cells, ranks


@settings(max_examples=200, deadline=None)
@given(pointing())
def test_every_place_reads_the_same_token_through_its_rank_s_list(drawn: Any) -> None:
    inputs, cells, ranks = drawn
    splits = {"llm": Split(ranks=ranks)}
    before, after = inputs["llm"]["vision_index"], with_lists(inputs, splits, POINTERS, cells, None)
    tokens = inputs["vision"]["segments"].shape[1] // 4
    places = before.local_rows.size // cells // ranks
    if places >= tokens:
        assert after == inputs
        return
    lists, index = np.asarray(after["vision"]["send_llm"]), np.asarray(after["llm"]["vision_index"])
    assert lists.shape == (cells, ranks * places) and lists.dtype == index.dtype == np.int32
    old = before.local_rows.reshape(cells, -1, ranks, before.shape[1] // ranks, *before.shape[2:])
    for cell, row, rank, *place in np.ndindex(old.shape):
        new = index.reshape(old.shape)[cell, row, rank, *place]
        was = old[cell, row, rank, *place]
        assert new == was if was < 0 else lists[cell, rank * places + new] == was
    for places_of in lists.reshape(cells, ranks, places).reshape(-1, places):
        real = places_of[places_of >= 0]
        assert len(np.unique(real)) == len(real) and (places_of[len(real) :] == -1).all()  # each token once


def test_no_list_is_as_long_as_all_tokens() -> None:
    """Nor is there one for tokens that two modules read, since both take one tensor."""
    inputs = {
        "vision": {"segments": np.zeros((2, 4 * 10))},
        "llm": {"vision_index": np.zeros((4, 12)), "segments": np.zeros((4, 12))},
        "painter": {"index": np.zeros((2, 3)), "segments": np.zeros((2, 12))},
        "printer": {"index": np.zeros((2, 3)), "segments": np.zeros((2, 12))},
    }
    assert [list_length(*POINTERS, inputs, Split(ranks=n), 2) for n in (1, 2, 3, 4)] == [0, 0, 8, 6]
    drawn = [Pointers(module=name, name="index", source="llm") for name in ("painter", "printer")]
    assert with_one_reader([*POINTERS, *drawn]) == POINTERS and with_one_reader(drawn[:1]) == (drawn[0],)
    shapes = list_shapes([*POINTERS, drawn[0]], inputs, {"llm": Split(ranks=3)}, 2)
    assert shapes == {"vision": ("send_llm", (2, 24)), "llm": ("send_painter", (2, 3))}


# ---- packers ---------------------------------------------------------------------------------------------------------

CELLS, SAMPLES = 2, 8
DECODER = DecoderConfig(layers=1, width=24, heads=4, kv_heads=2, head_dim=8, mlp=40, vocab=37)
MODEL = multimodal(
    {"vision": ViTConfig(layers=1, width=16, heads=2, mlp=24, patch=2, channels=1, merge=2, grid=6)},
    DECODER,
    {"painter": DiTConfig(layers=1, width=16, heads=2, mlp=24, patch=2, channels=2, merge=2, frequencies=3)},
)
MAKER = Maker.of(MODEL)


def packer(mask: str = "causal", *, lists: bool = True) -> Packer:
    encoders = {
        name: replace(spec, buckets=buckets(spec, SAMPLES // CELLS, several=False), longest=0)
        for name, spec in MAKER.encoders.items()
    }
    splits = {
        "llm": Split(ranks=2, method="lpt", masks=module_of(replace(DECODER, mask=mask)).masks),
        "vision": Split(ranks=2, unit=4, method="striped", masks=((1, Mask("full")),)),
        "painter": Split(ranks=2, unit=4, method="zigzag", masks=((1, Mask("full")),)),
    }
    unsplit = Packer(encoders=encoders, sequence_length=20, microbatches=1, cells=CELLS, pad=0, mask=mask)
    return unsplit.split_over(splits, lists=lists)


def samples() -> list[Any]:
    return [MAKER.sample(np.random.default_rng(kind), kind) for kind in range(SAMPLES)]


def test_a_packer_lists_tokens_of_encoders_and_of_the_llm() -> None:
    listed, plain = packer(), packer(lists=False)
    (part,), (unlisted,) = (of_packer.step(0, samples()).microbatches for of_packer in (listed, plain))
    for source, module, name in (("vision", "llm", "vision_index"), ("llm", "painter", "index")):
        lists, (new, old) = part.inputs[source][f"send_{module}"], (p.inputs[module][name] for p in (part, unlisted))
        places = lists.reshape(CELLS, 2, -1)
        assert (old >= 0).any() and lists.shape[1] // 2 < part.inputs[source]["segments"].size // CELLS
        for row, place in np.argwhere(old >= 0):
            rank = place * 2 // old.shape[1]
            assert places[row * CELLS // len(old), rank, new[row, place]] == old[row, place]
    assert listed.inputs["vision"] - plain.inputs["vision"] == {"send_llm"}
    assert listed.inputs["llm"] - plain.inputs["llm"] == {"send_painter"}


def test_what_is_to_be_answered_has_no_lists() -> None:
    part = packer().microbatch(samples()[:4], 4, apart=True)
    assert not any(name.startswith("send_") for arrays in part.inputs.values() for name in arrays)


OWN = (
    {"vision": {"send_llm": (0,)}},  # the encoder alone, whose lists are made of text that it does not see
    {"vision": {"send_llm": (1,)}, "llm": {"vision_index": (0,)}},
    {"llm": {"send_painter": (1,)}},
    {"llm": {"vision_index": (1,), "tokens": (1,)}, "painter": {"index": (0,)}},
    {"painter": {"index": (1,), "patches": (1,)}},
)


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("mask", ["causal", "paligemma"])
def test_processes_make_the_same_lists_from_the_rows_that_they_need(own: dict[str, Any], mask: str) -> None:
    """Also where the order of the LLM's tokens follows from words, which are read in the text too."""
    all_samples, read = samples(), packer(mask)
    plan = read.plan_microbatch([meta_of(sample, read.encoders) for sample in all_samples], SAMPLES)
    rows = ProcessRows(cells=own)
    needed = {number: all_samples[number] for number in plan.needed(rows)}
    assert len(needed) < len(all_samples) or len({cell for m in own.values() for c in m.values() for cell in c}) > 1
    all_rows, part = read.fill(plan, dict(enumerate(all_samples))), read.fill(plan, needed, rows)
    for module, inputs in own.items():
        for name, cells in inputs.items():
            assert_same_rows(part, all_rows, module, name, cells)


def assert_same_rows(part: Microbatch, all_rows: Microbatch, module: str, name: str, cells: tuple[int, ...]) -> None:
    array, expected = (microbatch.inputs[module][name] for microbatch in (part, all_rows))
    per = len(expected) // CELLS
    for cell in cells:
        rows = slice(cell * per, (cell + 1) * per)
        np.testing.assert_array_equal(array[rows], expected[rows], err_msg=f"{module} {name}")
