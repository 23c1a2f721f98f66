"""Answers of a finished run, on held-out samples and on a folder, against the dense reference."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from trial_runs import ONE_DEVICE, STEPS, leaves

from mmjax.assembly.buckets import build_packer
from mmjax.assembly.model import build_model
from mmjax.checkpoint import Checkpointer
from mmjax.config import load_run_config
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tasks.digits.source import load_digits
from mmjax.data.tasks.digits.task import Digits
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import Sample
from mmjax.eval import evaluator as evaluation
from mmjax.eval.__main__ import main
from mmjax.eval.folder import for_folder
from mmjax.eval.report import evaluate
from mmjax.eval.samples import as_evaluated, exchanged, held_out
from mmjax.eval.scores import describe, figures, score
from mmjax.models.graph import MultimodalModel
from mmjax.reference import greedy, loss_sum
from mmjax.train.metrics import read_metrics

pytestmark = pytest.mark.long

BABBLED = STEPS + 1


@pytest.fixture(scope="module")
def babbling_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with noise in its newest parameters: it answers in digits, and each question differently."""
    run, rng = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("babbling") / "run")), np.random.default_rng(0)
    named = leaves(run, STEPS)
    for name, leaf in named.items():
        if name.startswith("params/"):
            named[name] = leaf + rng.normal(0, 0.7, leaf.shape).astype(np.float32)
    head = np.zeros_like(named["params/llm/head"])
    spoken = [*b"0123456789", 258]  # and the end of an answer
    head[:, spoken] = 2 * named["params/llm/head"][:, spoken]
    named["params/llm/head"] = head
    with Checkpointer(run / "checkpoints") as checkpointer:
        checkpointer.save(BABBLED, {name: jax.device_put(leaf) for name, leaf in named.items()})
    return run


def reference_loss(run_dir: Path, samples: list[Sample]) -> float:
    """The loss of the text under the newest parameters, computed by the reference's forward."""
    named, model = newest(run_dir)
    total = sum(float(loss_sum(named, model, sample)) for sample in samples)
    return total / sum(float(sample.loss_weights[1:].sum()) for sample in samples)


def newest(run_dir: Path) -> tuple[dict[str, np.ndarray], MultimodalModel]:
    config = load_run_config(run_dir)
    step = Checkpointer(run_dir / "checkpoints").steps()[-1]
    tokenizer = make_tokenizer(config.data.settings.tokenizer, tuple(config.model.encoders))
    named = {n.removeprefix("params/"): x for n, x in leaves(run_dir, step).items() if n.startswith("params/")}
    return named, build_model(config, tokenizer)


def reference_answers(run_dir: Path, samples: list[Sample]) -> list[str]:
    """One sample after another through the plain forward, free-running, with the newest parameters."""
    (named, model), tokenizer = newest(run_dir), make_tokenizer("", ("vision",))
    most = 1 + max(len(sample.answer) for sample in samples)
    return [tokenizer.decode(greedy(named, model, s, max_new=most, eos=tokenizer.eos)) for s in samples]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of one to three digits and a question about each."""
    folder, lines = tmp_path_factory.mktemp("folder"), []
    pixels, labels = load_digits()
    for number, first in enumerate((1500, 1501, 1510, 1520, 1530)):
        chosen = range(first, first + 1 + number % 3)
        row = np.concatenate([pixels[i] for i in chosen], axis=1)
        Image.fromarray((row * 255).astype(np.uint8)).save(folder / f"{number}.png")
        answer = "".join(str(labels[i]) for i in chosen)
        line = {"images": [f"{number}.png"], "question": "read the first image", "answer": answer}
        lines.append(json.dumps(line))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


# ---- scores


def sample(answer: str) -> Sample:
    return Sample(
        tokens=np.zeros(1, np.int32),
        loss_weights=np.zeros(1, np.float32),
        media={},
        question="",
        answer=answer,
        prompt=1,
    )


def test_score() -> None:
    samples = [sample("123"), sample("4"), sample("56"), sample("7")]
    found = score(samples, ["123", "", "65", "77"])
    assert found.answers == ("123", "", "65", "77")
    assert found.exact_match == 1 / 4
    assert found.character_accuracy == (3 + 0 + 0 + 1) / 7
    assert score([], []).character_accuracy == 0 and found.kinds == {}


def test_an_answer_that_is_a_picture_alone_counts_neither_as_right_nor_as_wrong() -> None:
    noise = {"painter": (np.zeros((2, 2, 1), np.float32),)}
    samples = [sample("1"), dataclasses.replace(sample(""), noise=noise), dataclasses.replace(sample("2"), noise=noise)]
    assert score(samples, ["1", "", "3"]).exact_match == score(samples[::2], ["1", "3"]).exact_match == 0.5
    assert score(samples[1:2], [""]).exact_match == 0 and score([sample("")], [""]).exact_match == 1


def test_scores_by_kind_and_by_whose_media_are_exchanged() -> None:
    samples = [dataclasses.replace(sample("1"), kind=kind) for kind in ("read", "hear", "read", "both")]
    plain, deaf = score(samples, ["1", "1", "2", "1"]), score(samples, ["1", "0", "1", "0"])
    assert plain.kinds == {"both": 1.0, "hear": 1.0, "read": 0.5}
    assert figures(plain, {"audio": deaf}) == {
        "exact_match": 0.75,
        "character_accuracy": 0.75,
        "kinds": {"both": 1.0, "hear": 1.0, "read": 0.5},
        "swapped_audio_character_accuracy": 0.5,
        "swapped_audio_kinds": {"both": 0.0, "hear": 0.0, "read": 1.0},
    }
    assert describe(plain, {"audio": deaf}) == (
        "exact match 75.0% (both 100.0%, hear 100.0%, read 50.0%), characters right 75.0%, "
        "with audio's media exchanged characters right 50.0% (both 0.0%, hear 0.0%, read 100.0%)"
    )
    # Where the task is digits, scores are of digits.
    alone = score(samples[:1], ["1"], loss=math.log(3), task=Digits(DigitsConfig()))
    assert figures(alone, {}) == {
        "exact_match": 1.0, "loss": math.log(3), "perplexity": pytest.approx(3), "digit_accuracy": 1.0
    }  # fmt: skip
    assert describe(alone, {}) == "exact match 100.0%, digits right 100.0%, loss 1.099, perplexity 3"
    assert math.isfinite(score(samples, ["1"] * 4, loss=1e9).perplexity or math.inf)


def test_drawings_are_scored_where_the_task_reads_them() -> None:
    pixels, digits = load_digits()
    drawn = {"painter": (2 * np.concatenate([pixels[0], pixels[1]], axis=1)[:, :, None] - 1,)}
    asked = dataclasses.replace(sample("1"), labels={"painter": (f"{digits[0]}{(digits[1] + 1) % 10}",)})
    found = score([asked], ["1"], [drawn], task=Digits(DigitsConfig()))
    assert found.drawing_accuracy == figures(found, {})["drawing_accuracy"] == 0.5
    assert describe(found, {}).endswith("digits right 100.0%, digits recognised in drawings 50.0%")
    assert score([asked], ["1"], [drawn]).drawing_accuracy is None


# ---- held-out samples


def test_held_out_samples(babbling_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--run_dir={babbling_run}", "--json", f"--out={tmp_path}"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    config = load_run_config(babbling_run)
    samples = held_out(config, 6)
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [(row["question"], row["answer"]) for row in rows] == [(s.question, s.answer) for s in samples]
    predicted = [row["predicted"] for row in rows]
    assert predicted == reference_answers(babbling_run, samples)
    assert len(set(predicted)) > 2, predicted
    loss = reference_loss(babbling_run, samples)
    (swapped,) = exchanged(config, make_tokenizer("", ("vision",)), samples).values()
    assert json.loads(line) == {
        "step": BABBLED,
        "samples": 6,
        "exact_match": score(samples, predicted).exact_match,
        "loss": pytest.approx(loss, rel=1e-5),
        "perplexity": pytest.approx(math.exp(loss), rel=1e-4),
        "digit_accuracy": score(samples, predicted).character_accuracy,
        "swapped_vision_digit_accuracy": score(swapped, reference_answers(babbling_run, swapped)).character_accuracy,
    }
    with Image.open(tmp_path / "predictions.png") as picture:
        assert min(picture.size) > 200


def test_finds_what_training_found(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--run_dir={tiny_run}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"samples": 6, **read_metrics(tiny_run / "eval.jsonl")[-1]}


def test_text(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--run_dir={tiny_run}", "--samples=3"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"{tiny_run} after step {STEPS}: 3 held-out samples"
    names = ["exact_match", "loss", "perplexity", "digit_accuracy", "swapped_vision_digit_accuracy"]
    assert [line.split()[0] for line in lines] == names
    shares = [line.split()[1] for line in lines if "loss" not in line and "perplexity" not in line]
    assert all(share.endswith("%") and 0 <= float(share[:-1]) <= 100 for share in shares)


def test_other_layouts_give_the_same_answers(babbling_run: Path, tmp_path: Path) -> None:
    (tmp_path / "one.gin").write_text(ONE_DEVICE + "vision/ViT.width = 64\n")  # only its layouts count
    config = load_run_config(babbling_run, [tmp_path / "one.gin"])
    assert (config.devices, config.model["vision"].settings.width) == (1, 16)
    pipelined = load_run_config(
        babbling_run, [], ["llm/Layout.pp=2", "vision/Layout.dp=4", "vision/Layout.rank_offset=4"]
    )
    assert pipelined.devices == 8
    # The LLM's widest rows are more than a cell of training has samples, for which the encoder's rows are meant.
    packed = ["llm/Packing.buckets=((4, 30), (10, 36))", "vision/Packing.buckets=((8, 8),)"]
    wide = load_run_config(babbling_run, [], packed)
    found = [evaluate(c, babbling_run, count=6, style="silent").evaluation.answers for c in (config, pipelined, wide)]
    assert found == [tuple(reference_answers(babbling_run, held_out(config, 6)))] * 3


def test_what_was_made_for_training_under_another_layout_does_not_matter(tiny_run: Path) -> None:
    """Buckets are of a microbatch: one that holds the only cell is added; and no order is looked for."""
    given, reorder = "vision/Packing.buckets=((4, 16),)", "Data.reorder=best"
    config = load_run_config(tiny_run, [], ["vision/Layout.dp=1", given, reorder])
    room = as_evaluated(config)
    assert room.model.packing == config.model.packing and room.model.layouts == config.model.layouts
    assert build_packer(room, make_tokenizer("", ("vision",))).encoders["vision"].buckets == ((4, 16),)
    kept = load_run_config(tiny_run, [], [given])
    assert as_evaluated(kept) == kept == as_evaluated(load_run_config(tiny_run, [], [given, reorder]))


def test_only_parameters_are_read(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    load = evaluation.load_parameters

    def watched(parts: object, run_dir: Path) -> object:
        step, states = load(parts, run_dir)  # type: ignore[arg-type]
        seen.extend(kind for state in states.values() for kind in state if state[kind])
        return step, states

    monkeypatch.setattr(evaluation, "load_parameters", watched)
    (tmp_path / "one.gin").write_text(ONE_DEVICE)
    found = evaluate(load_run_config(tiny_run, [tmp_path / "one.gin"]), tiny_run, count=2, style="silent")
    assert seen == ["master"] * 2 and len(found.samples) == 2


def test_a_torn_newest_checkpoint_is_passed_over(tiny_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / f"{STEPS:08d}" / "state")
    (tmp_path / "one.gin").write_text(ONE_DEVICE)
    config = load_run_config(run, [tmp_path / "one.gin"])
    assert evaluate(config, run, count=2, style="silent").step == STEPS - 2


# ---- a folder


def test_a_folder(babbling_run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--run_dir={babbling_run}", f"--data={folder}", "--json", f"--out={tmp_path}"]) == 0
    samples = held_out(for_folder(load_run_config(babbling_run), str(folder)), 5)
    predicted = [json.loads(line)["predicted"] for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert predicted == reference_answers(babbling_run, samples)
    assert len(set(predicted)) > 2, predicted
    found, loss = score(samples, predicted), reference_loss(babbling_run, samples)
    assert json.loads(capsys.readouterr().out) == {
        "step": BABBLED,
        "samples": 5,
        "exact_match": found.exact_match,
        "loss": pytest.approx(loss, rel=1e-5),
        "perplexity": pytest.approx(math.exp(loss), rel=1e-4),
        "character_accuracy": found.character_accuracy,
    }


def test_scores_of_a_folder(tiny_run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is rigged to expect the model's own answers, except for one."""
    predicted = evaluate(load_run_config(tiny_run), tiny_run, str(folder), style="silent").evaluation.answers
    assert all(predicted)
    rigged = Path(shutil.copytree(folder, tmp_path / "rigged"))
    lines = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    for line, answer in zip(lines, [*predicted[:4], predicted[4] + "?"], strict=True):
        line["answer"] = answer
    (rigged / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([f"--run_dir={tiny_run}", f"--data={rigged}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    count = sum(map(len, predicted))
    assert (found["exact_match"], found["character_accuracy"]) == (4 / 5, count / (count + 1))


def test_shapes_for_a_folder(tiny_run: Path, folder: Path, tmp_path: Path) -> None:
    config = load_run_config(tiny_run)
    # The run's own rows and buckets hold two images of two digits; three digits do not fit into them.
    wide = for_folder(config, str(folder))
    assert (wide.train.global_batch, wide.train.microbatches, wide.model["vision"].packing.buckets) == (2, 1, ())
    lines = (folder / "data.jsonl").read_text().splitlines()
    small = Path(shutil.copytree(folder, tmp_path / "small"))
    (small / "data.jsonl").write_text("\n".join(lines[:2]))
    same = for_folder(config, str(small))
    assert (same.train, same.data.settings.sequence_length) == (config.train, config.data.settings.sequence_length)
    # Two cells of two rows, each with up to two images of 2 x 4 patches.
    assert same.model["vision"].packing.buckets == ((8, 8),)


def test_an_image_far_larger_than_any_in_training(tiny_run: Path, tmp_path: Path) -> None:
    """Nothing is refused because of its size, and no pixel is left out."""
    Image.new("RGB", (120, 72), "white").save(tmp_path / "large.png")
    line = {"images": ["large.png"], "question": "read the first image", "answer": "11"}
    (tmp_path / "data.jsonl").write_text(json.dumps(line))
    (tmp_path / "one.gin").write_text(ONE_DEVICE)
    config = load_run_config(tiny_run, [tmp_path / "one.gin"])
    found = evaluate(config, tiny_run, str(tmp_path), style="silent")
    (media,) = found.samples[0].media["vision"]
    assert media.shape == (72, 120, 1) and media.min() == 1
    assert found.evaluation.answers == tuple(reference_answers(tiny_run, list(found.samples)))


# ---- refused


def test_refused(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "fresh").mkdir()
    shutil.copy(tiny_run / "config.gin", tmp_path / "fresh" / "config.gin")
    run = f"--run_dir={tiny_run}"
    cases = {
        (): "--run_dir is missing: the directory of a training run; write --run_dir=RUN_DIR",
        (
            f"--run_dir={tmp_path / 'fres'}",
        ): f"--run_dir='{tmp_path}/fres' is no directory: name the directory of a run, such as '{tmp_path}/fresh'",
        (f"--run_dir={tmp_path / 'empty'}",): f"--run_dir='{tmp_path}/empty' holds no config.gin: name the directory",
        (f"--run_dir={tmp_path / 'fresh'}",): f"--run_dir='{tmp_path}/fresh' has no checkpoint yet: train with "
        f"--gin_file={tmp_path}/fresh/config.gin",
        (run, f"--data={tmp_path / 'empty'}"): f"--data='{tmp_path}/empty' has no data.jsonl: write one line per "
        f'sample into {tmp_path}/empty/data.jsonl, such as {{"images": ["a.png"], "question": ',
        (run, f"--data={tmp_path / 'none'}"): f"--data='{tmp_path}/none' is no directory: name one with images and a",
        (run, "--samples=-1"): "--samples=-1: must be 0 or more, such as 180",
        (run, "--gin.llm/Layout.tp=3"): "llm/Layout.tp=3: must divide llm/Decoder.heads (2); use 2",
        (run, "--gin.llm/Decoder.mlp=32"): f"{tiny_run}/checkpoints/{STEPS:08d} does not fit: different:",
    }
    for flags, message in cases.items():
        with pytest.raises(SystemExit) as end:
            main(flags)
        error = capsys.readouterr().err
        assert (end.value.code, error.count("\n")) == (2, 1) and error.startswith(f"error: {message}"), error


def test_images_beyond_learned_positions_are_refused(tiny_run: Path, tmp_path: Path) -> None:
    Image.new("L", (80, 8)).save(tmp_path / "long.png")
    (tmp_path / "data.jsonl").write_text(json.dumps({"images": ["long.png"], "question": "read", "answer": "1"}))
    config = load_run_config(tiny_run)
    vit = dataclasses.replace(config.model["vision"].settings, positions="learned2d", grid=16)
    config = dataclasses.replace(
        config, model=config.model.replace(vision=dataclasses.replace(config.model["vision"], settings=vit))
    )
    with pytest.raises(ValueError, match=r"^vision/ViT.grid=16: an image may be 20 patches long, beyond the learned"):
        evaluate(config, tiny_run, str(tmp_path), style="silent")
