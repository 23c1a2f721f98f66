"""Evaluation on the way: whatever training accepts can be evaluated, and what fails there does not end training."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image
from trial_runs import train_flags, write_tiny

from mmjax.assembly.buckets import build_packer
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.packing import Packer
from mmjax.data.sample import meta_of, prompt_only
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import SampleMeta
from mmjax.eval.evaluator import room_for
from mmjax.eval.rounds import Rounds
from mmjax.eval.samples import held_out
from mmjax.recipe import Recipe
from mmjax.train import scoring
from mmjax.train.__main__ import main
from mmjax.train.metrics import read_metrics

# A microbatch has four samples in two cells; ten rows of which hold one sample each if they are apart.
WIDE = ("llm/Packing.buckets=((4, 30), (10, 36))", "vision/Packing.buckets=((8, 8),)")


def packer_of(recipe: Recipe) -> Packer:
    return build_packer(recipe, make_tokenizer(recipe.data.settings.tokenizer, recipe.model.media))


@pytest.mark.parametrize("more", [WIDE, (), ("llm/Packing.buckets=((2, 72), (8, 36))", "Data.sequence_length=72")])
def test_what_holds_every_cell_of_training_holds_the_samples_of_a_round(tmp_path, more):
    """Each has a row of its own, which ends with its prompt, and the patches of its images."""
    config = load_config([write_tiny(tmp_path)], more)
    packer, samples = packer_of(config), [prompt_only(sample) for sample in held_out(config, 21)]
    rounds, seen = Rounds(packer, config.train.global_batch // config.train.microbatches), 0
    rounds.require_room([meta_of(sample, packer.encoders) for sample in samples])
    for own, packed in rounds(samples):
        assert len({*packed.places}) == len(own) <= rounds.size
        for sample, (part, row) in zip(own, packed.places, strict=True):
            inputs = packed.batch[part][1]
            llm, vision = inputs["llm"], inputs["vision"]
            length = len(sample.tokens)
            assert packed.starts[part][row] == length and llm["tokens"][row, :length].tolist() == sample.tokens.tolist()
            assert (llm["segments"][row] > 0).tolist() == [True] * length + [False] * (llm["tokens"].shape[1] - length)
            pixels = sum(float(image.sum()) for image in sample.media["vision"])
            tokens_CN = vision["patches"].reshape(2, -1, packer.encoders["vision"].patches_per_token * 16)
            index = llm["vision_index"][row]
            assert tokens_CN[2 * row // len(llm["tokens"]), index[index >= 0]].sum() == pytest.approx(pixels)
        seen += len(own)
    assert seen == 21 and sum(int((starts > 0).sum()) for starts in packed.starts) == len(own)


def test_rows_have_room_for_answers_of_any_weight():
    """A row holds the tokens of the longest answer, whatever they weigh in the loss."""
    metas = [SampleMeta(tokens=20, weight=0.5, learned=10, grids={}), SampleMeta(tokens=30, weight=8.0, grids={})]
    assert room_for(metas[:1], 99) == 30 and room_for(metas, 99) == 40 and room_for(metas, 35) == 35


@pytest.mark.parametrize("tiles", [False, True])
def test_media_of_an_answer_are_no_part_of_its_prompt(tmp_path, tiles):
    """Of a held-out record whose last answer has an image, the model is given the images before it alone."""
    for seed, name in enumerate("ab"):
        pixels = np.random.default_rng(seed).integers(1, 256, (16, 24), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    rows = [{"images": ["a.png", "b.png"], "question": f"{n} <image>?", "answer": "see <image> here"} for n in range(3)]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    about = ("resize='anyres'", "size=(8, 8)", "grids=((1, 2),)") if tiles else ("max_patches=0",)
    more = (
        "Data.sources={'own': 1.0}",
        f"Data.cache='{tmp_path / 'cache'}'",
        f"own/Source.path='{tmp_path / 'data.json'}'",
    )
    more += (*(f"own/Source.{one}" for one in about), "vision/Projector.newline=True" if tiles else "")
    more += ("Data.sequence_length=96",)
    config = load_config([write_tiny(tmp_path)], [one for one in more if one])
    packer, samples = packer_of(config), held_out(config, 3)
    prompts = [prompt_only(sample) for sample in samples]
    for sample, prompt in zip(samples, prompts, strict=True):
        assert len(sample.media["vision"]) == 2 * len(prompt.media["vision"]) == (6 if tiles else 2)
        assert prompt.tokens.tolist() == sample.tokens[: sample.prompt].tolist() and sample.answer == "see <image> here"
        assert 2 * prompt.placeholders("vision").sum() == sample.placeholders("vision").sum() > 0
        assert len(prompt.tiled.get("vision", ())) == int(tiles)
    rounds = Rounds(packer, config.train.global_batch // config.train.microbatches)
    assert sum(len(own) for own, _ in rounds(prompts)) == sum(len(own) for own, _ in rounds(samples)) == 3


def test_samples_without_room_are_refused_at_the_start(tmp_path):
    config = load_config([write_tiny(tmp_path)], WIDE)
    packer = packer_of(config)
    metas = [meta_of(sample, packer.encoders) for sample in held_out(config, 3)]
    longer = [*metas, dataclasses.replace(metas[0], tokens=37)]
    with pytest.raises(ConfigError, match=r"^Data.sequence_length=36 is too short for a sample of 37 tokens"):
        Rounds(packer, 4).require_room(longer)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_failed_evaluation_does_not_end_training(tiny_run, tmp_path, monkeypatch, capsys):
    """Two fail for the same reason, which is said once; steps are what they are without, and the last one is scored."""
    plain, calls = scoring.held_out, []

    def failing(config, count):
        calls.append(count)
        if len(calls) < 3:
            raise OSError(5, "the disk has gone")
        return plain(config, count)

    monkeypatch.setattr(scoring, "held_out", failing)
    run = tmp_path / "run"
    assert main(train_flags(write_tiny(tmp_path), run)) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "has failed" in line]
    reason = "OSError: [Errno 5] the disk has gone"
    assert said == [f"step 5: the evaluation has failed, training goes on: {reason}"]
    losses = [[row["loss"] for row in read_metrics(path / "metrics.jsonl")] for path in (run, tiny_run)]
    assert losses[0] == losses[1]
    rows = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    assert rows[:2] == [{"step": step, "failure": reason} for step in (5, 10)]
    assert rows[2:] == read_metrics(tiny_run / "eval.jsonl")[-1:]

    # The same command evaluates what is not evaluated yet; and says by its status that it could not.
    (run / "eval.jsonl").write_text("")
    calls.clear()
    assert main(train_flags(write_tiny(tmp_path), run)) == 1
    assert f"the last evaluation has failed: {reason}" in capsys.readouterr().out
    calls += [0, 0]
    assert main(train_flags(write_tiny(tmp_path), run)) == 0
    assert read_metrics(run / "eval.jsonl") == rows[2:]
    assert np.isfinite(losses[0]).all()
