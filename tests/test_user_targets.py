"""Pictures to be made out of a user's own data: folders, edits and tars are trained on, go on, and are evaluated."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from trial_runs import REPOSITORY

from mmjax.assembly.batches import batch_maker
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.data.types import Sample
from mmjax.eval.report import evaluate
from mmjax.recipe import Recipe
from mmjax.reference import step_loss_and_gradients
from mmjax.train import __main__ as train
from mmjax.train.metrics import read_metrics
from mmjax.train.trainer import Trainer

CONFIG = REPOSITORY / "configs" / "caption_to_picture.gin"
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 230)}
COUNT = 60
TINY = (
    *("llm/Decoder.layers=2", "llm/Decoder.width=32", "llm/Decoder.heads=2", "llm/Decoder.kv_heads=2"),
    *("llm/Decoder.mlp=64", "painter/DiT.layers=1", "painter/DiT.width=32", "painter/DiT.heads=2"),
    *("painter/DiT.mlp=64", "llm/Layout.tp=1", "llm/Layout.pp=1", "painter/Layout.dp=1"),
    *("painter/Layout.rank_offset=0", "Data.workers=0", "Data.sequence_length=96", "Train.dtype=float32"),
    *("Train.global_batch=8", "Train.microbatches=2", "Optimizer.warmup=3", "Optimizer.learning_rate=0.01"),
    *("Optimizer.schedule='constant'", "Train.steps=24", "Checkpoint.every=12", "Train.eval_samples=3"),
)
"""The configuration of captions made small, on one device."""
SEEING = (
    *("Model.encoders={'vision': 'vit'}", "vision/ViT.layers=1", "vision/ViT.width=32", "vision/ViT.heads=2"),
    *("vision/ViT.mlp=64", "vision/ViT.channels=3", "mine/Source.draw=False"),
)
"""With an encoder for the pictures that are edited."""


def picture(number: int, colour: str) -> Image.Image:
    """A box of a colour on white; sides differ."""
    side = 9 + number % 6
    pixels = np.full((side + 3, side, 3), 255, np.uint8)
    pixels[3:-3, 2:-2] = COLOURS[colour]
    return Image.fromarray(pixels)


def name_of(number: int) -> str:
    return tuple(COLOURS)[number % 3]


def captions(folder: Path) -> tuple[str, ...]:
    """A folder of pictures, each beside its caption."""
    for number in range(COUNT):
        picture(number, name_of(number)).save(folder / f"{number:03}.png")
        (folder / f"{number:03}.txt").write_text(f"a {name_of(number)} box\n")
    return (f"mine/Source.path='{folder}'",)


def edits(folder: Path) -> tuple[str, ...]:
    """Messages: a picture and an instruction, and the picture that is to be made of both."""
    for number in range(COUNT):
        for colour in COLOURS:
            picture(number, colour).save(folder / f"{number}_{colour}.png")
    with open(folder / "edits.jsonl", "w") as file:
        for number in range(COUNT):
            source, target = name_of(number), name_of(number // 3)
            asked = [
                {"type": "image", "image": f"{number}_{source}.png"},
                {"type": "text", "text": f"make it {target}"},
            ]
            made = [{"type": "image", "image": f"{number}_{target}.png", "generate": True}]
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": made}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return (*SEEING, "mine/Source.kind='llava'", f"mine/Source.path='{folder}/edits.jsonl'")


def tars(folder: Path) -> tuple[str, ...]:
    """Two shards of WebDataset with captions."""
    captions(folder)
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, COUNT, 2):
                for suffix in ("png", "txt"):
                    tar.add(folder / f"{number:03}.{suffix}", f"{number:03}.{suffix}")
    return ("mine/Source.kind='webdataset'", f"mine/Source.path='{folder}/*.tar'")


LAYOUTS = {"folder": captions, "edits": edits, "tars": tars}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bindings of each kind of data, written once."""

    @cache
    def bindings(kind: str) -> tuple[str, ...]:
        folder = tmp_path_factory.mktemp(kind)
        return (*LAYOUTS[kind](folder), f"Data.cache='{folder}/cache'")

    return bindings


def load(bindings: Sequence[str], *more: str) -> Recipe:
    return load_config([CONFIG], [*TINY, "mine/Source.drawn_size=(8, 8)", *bindings, *more])


def step_beside_the_reference(recipe: Recipe) -> tuple[list[Sample], float, dict[str, np.ndarray], Any]:
    """The first eight samples, the loss and leaves of a step over them, and what the dense reference says of it."""
    with Trainer(recipe, None, style="silent") as trainer:
        source = open_source(trainer.recipe, split="train")
        batch = batch_maker(trainer.recipe, trainer.parts, source)[1](0)
        samples = [source.sample(index) for index in range(8)]
        before = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items() if name.startswith("params/")}
        leaves = {name.removeprefix("params/"): leaf for name, leaf in before.items()}
        wanted = step_loss_and_gradients(leaves, trainer.parts.placed.model, samples)
        loss, _ = trainer.executor.step(trainer.parts.runs.signed(batch.microbatches), batch.divisors).fetch()
        after = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}
    return samples, loss, after, wanted


@pytest.mark.long
@pytest.mark.parametrize("kind", ["folder", "edits"])
def test_a_step_equals_the_dense_reference(kind: str, folders: Any) -> None:
    """The loss and the gradients of every leaf, of the user's own samples packed into rows, beside one by one."""
    sizes = ("mine/Source.drawn_size=(0, 0)", "mine/Source.drawn_pixels=400")
    recipe = load(folders(kind), *sizes, "Train.clip_norm=0.0", "Train.eval_samples=0")
    samples, loss, after, wanted = step_beside_the_reference(recipe)
    assert len({sample.media["painter"][0].shape for sample in samples}) > 1
    assert loss == pytest.approx(wanted.loss, rel=1e-5) and wanted.losses["painter/loss"] > 1
    beta = 1 - recipe.model.optimizers["painter"].b1
    assert {name.partition("/")[0] for name in wanted.gradients} >= {"llm", "painter", "painter_projector"}
    for name, gradient in wanted.gradients.items():
        actual, largest = after[f"adam_m/{name}"] / beta, np.abs(gradient).max()
        np.testing.assert_allclose(actual, gradient, atol=1e-4 * largest + 1e-8, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYOUTS)
def test_it_is_trained_goes_on_and_is_evaluated(kind: str, folders: Any, tmp_path: Path) -> None:
    recipe = load(folders(kind))
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    with Trainer(recipe, whole, style="silent") as trainer:
        result = trainer.train()
    rows = read_metrics(whole / "metrics.jsonl")
    losses = [row["painter/loss"] for row in rows]
    assert np.mean(losses[-6:]) < 0.75 * np.mean(losses[:2]), "the painter learns"
    trained = ("painter/grad_norm", "painter_projector/grad_norm")
    assert all(row[name] > 0 for row in rows for name in trained) and result.evaluation is not None
    (scored,) = read_metrics(whole / "eval.jsonl")
    assert "failure" not in scored and "drawing_accuracy" not in scored
    drawn = result.evaluation.drawings
    assert [[medium.shape for medium in of["painter"]] for of in drawn] == [[(8, 8, 3)]] * 3
    assert result.evaluation.answers == ("",) * 3
    with Image.open(whole / "predictions.png") as shown:
        assert min(shown.size) > 100
    with Trainer(recipe, begun, style="silent") as trainer:
        trainer.train(13)
    with Trainer(recipe, begun, style="silent") as trainer:
        assert trainer.resumed and trainer.step == 13
        trainer.train()
    again = [row["painter/loss"] for row in read_metrics(begun / "metrics.jsonl")]
    np.testing.assert_allclose(again, losses, rtol=1e-6)
    report = evaluate(recipe, whole)
    for one, other in zip(report.evaluation.drawings, drawn, strict=True):
        np.testing.assert_allclose(one["painter"][0], other["painter"][0], atol=1e-4)


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no target": (
        ("mine/Source.draw=False", "Model.encoders={'vision': 'vit'}", "vision/ViT.channels=3"),
        "Model.generators={'painter': 'dit'}: the data have no picture for 'painter' to draw, so it would learn "
        "nothing; leave it out, or set painter/Optimizer.frozen to True, or Source.draw to True for captions, or name",
    ),
    "everything is frozen": (
        tuple(f"{part}/Optimizer.frozen=True" for part in ("llm", "painter", "painter_projector")),
        "llm/Optimizer.frozen=True: every module is frozen; set it to False for one of them",
    ),
    "sizes that are no multiples": (
        ("mine/Source.drawn_size=(9, 8)",),
        "mine/Source.drawn_size=(9, 8): 'painter' makes sides of multiples of 4 pixels; set it to such, as (8, 8)",
    ),
    "channels that pictures do not have": (
        ("painter/DiT.channels=4",),
        "'painter' makes 4 channels, and a picture has 1 or 3: set painter/DiT.channels",
    ),
    "a folder without pictures": (
        ("mine/Source.path='configs/*.gin'",),
        "mine/Source.path='configs/*.gin': no file is",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_data_are_refused_in_one_line(
    case: str, folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bindings, line = REFUSED[case]
    flags = [*TINY, "mine/Source.drawn_size=(8, 8)", *folders("folder"), *bindings]
    with pytest.raises(SystemExit) as ended:
        train.main(
            [f"--gin_file={CONFIG}", f"--run_dir={tmp_path}/run", "--dry_run", *(f"--gin.{one}" for one in flags)]
        )
    error = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and len([text for text in error if line in text]) == 1, error
