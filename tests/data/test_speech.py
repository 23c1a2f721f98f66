"""Codes that speak answers: what is said, where each code reads the answer, and what rows of codes have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import StepMaker, make_packer, make_source
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.sample import disagreement, meta_of, prompt_only, swap_media
from mmjax.data.spec import DataSpec
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tasks.digits.dtmf import CODES, spoken
from mmjax.data.tasks.digits.source import DigitsSource
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import EncoderSpec, Sample

TALKER = EncoderSpec(patch=1, axes=1, drawn=True, codes=CODES)
SPECS = {"vision": EncoderSpec(patch=4, merge=2), "talker": TALKER}
TOKENIZER = ByteTokenizer(("vision",))
DATA = DataConfig(sequence_length=96)
CONFIG = DigitsConfig(images=(1, 2), digits=(1, 3), read=1.0, count=1.0, sum=1.0, turns=2)


def source(specs: dict[str, EncoderSpec] = SPECS) -> DigitsSource:
    return DigitsSource(DATA, specs, TOKENIZER, settings=CONFIG, seed=4, split="train")


@pytest.mark.parametrize(
    ("answer", "codes"),
    [
        ("1", [2, 6, 1]),
        ("0", [5, 7, 1]),
        ("39", [2, 8, 4, 8, 1]),
        ("48 5", [3, 6, 4, 7, 9, 3, 7, 1]),
        ("yes", [10, 10, 10, 1]),
        ("#*", [10, 10, 1]),
        ("", [1]),
    ],
)
def test_a_digit_is_the_row_and_the_column_of_its_key(answer: str, codes: list[int]) -> None:
    said = spoken(answer)
    assert said.dtype == np.int32 and said.tolist() == [[code] for code in codes] and said.max() < CODES


def test_the_last_answer_of_each_sample_is_spoken_and_has_no_place_in_the_text() -> None:
    silent = source({"vision": SPECS["vision"]})
    for index in range(20):
        sample, plan, mute = source().sample(index), source().plan(index), silent.sample(index)
        np.testing.assert_array_equal(sample.media["talker"][0], spoken(plan.turns[-1][1]))
        assert sample.answer == plan.turns[-1][1] and "talker" not in sample.media_tokens
        np.testing.assert_array_equal(sample.tokens, mute.tokens)
        meta = source().meta(index)
        assert meta.grids["talker"] == ((len(spoken(sample.answer)),),) and meta.tokens == len(sample.tokens)
        assert replace(meta_of(sample, SPECS), learned=0) == replace(meta, learned=0)
        assert not disagreement(sample, meta, list(SPECS), SPECS)
        shorter = replace(sample, media={**sample.media, "talker": (sample.media["talker"][0][1:],)})
        assert "talker patches" in disagreement(shorter, meta, list(SPECS), SPECS)
        unopened = source().sample(index, ["vision"])
        assert set(unopened.media) == {"vision"} and not disagreement(unopened, meta, ["vision"], SPECS)


def test_a_prompt_and_a_sample_with_exchanged_media_are_not_spoken() -> None:
    samples = [source().sample(index) for index in range(3)]
    assert all(not prompt_only(sample).media["talker"] for sample in samples)
    assert all("talker" not in sample.media for sample in swap_media(TOKENIZER, SPECS, samples, "vision"))


def test_no_sample_says_more_than_the_worst_case() -> None:
    worst = source().worst_case()
    assert worst.media["talker"] == 1 and worst.patches["talker"] == worst.sides["talker"] == 7  # three digits, and 1
    assert max(len(source().sample(index).media["talker"][0]) for index in range(50)) == 7


def test_too_few_codes_are_refused() -> None:
    few = {**SPECS, "talker": replace(TALKER, codes=10)}
    with pytest.raises(ConfigError, match=r"^talker/Decoder.vocab=10: answers are spoken in 11 codes; set it to 11"):
        make_source(DataSpec(DATA, task=CONFIG), few, seed=4, split="train")


def sample(prompt: int, tokens: int, codes: list[int]) -> Sample:
    return Sample(
        tokens=np.arange(tokens, dtype=np.int32),
        loss_weights=np.ones(tokens, np.float32),
        media={"talker": (np.asarray(codes, np.int32)[:, None],)} if codes else {},
        question="",
        answer="",
        prompt=prompt,
    )


def test_rows_of_codes_by_hand() -> None:
    """Two cells with rows of six codes; four rows of ten tokens. The second sample of the second cell says nothing."""
    spec = replace(TALKER, buckets=((1, 6),))
    packer = Packer(encoders={"talker": spec}, sequence_length=10, microbatches=1, cells=2, pad=0)
    samples = [sample(7, 9, [3, 7, 1]), sample(2, 10, [4, 1]), sample(5, 6, [10, 9, 8, 1]), sample(1, 8, [])]
    batch = packer.step(0, samples)
    (microbatch,) = batch.microbatches
    expected = {
        "segments": [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]],
        "tokens": [[0, 3, 7, 0, 4, 0], [0, 10, 9, 8, 0, 0]],
        "targets": [[3, 7, 1, 4, 1, 0], [10, 9, 8, 1, 0, 0]],
        "weights": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]],
        "positions": [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]],
        # Code j of n is at token j * m // n of the answer; the second sample's tokens begin at 10.
        "index": [[7, 7, 8, 12, 16, -1], [5, 5, 5, 5, -1, -1]],
    }
    inputs = microbatch.inputs["talker"]
    assert {name: array.tolist() for name, array in inputs.items()} == expected
    assert {name: str(array.dtype) for name, array in inputs.items() if name != "weights"} == dict.fromkeys(
        ("segments", "tokens", "targets", "positions", "index"), "int32"
    )
    assert inputs["weights"].dtype == np.float32
    assert batch.denominators["talker"] == batch.counts["talker_patches"] == 9
    with pytest.raises(ValueError, match="codes 1 to 11 for a generator of 11"):
        packer.step(0, [sample(7, 9, [11, 1])])


def test_a_process_fills_the_rows_that_it_reads() -> None:
    samples = make_source(DataSpec(DATA, task=CONFIG), SPECS, seed=4, split="train")
    packer = make_packer(DATA, SPECS, samples, TOKENIZER, cells=2, global_batch=8, microbatches=2)
    whole = StepMaker(source=samples, packer=packer, global_batch=8)(0)
    names = ("tokens", "targets", "weights", "positions", "segments", "index")
    rows = ProcessRows(cells={"talker": dict.fromkeys(names, (1,))})
    part = StepMaker(source=samples, packer=packer, global_batch=8, process_rows=rows)(0)
    for ours, theirs in zip(part.microbatches, whole.microbatches, strict=True):
        for name in names:
            complete = theirs.inputs["talker"][name]
            half = len(complete) // 2
            np.testing.assert_array_equal(ours.inputs["talker"][name][half : 2 * half], complete[half:])
            assert np.any(complete[half:] > 0)
