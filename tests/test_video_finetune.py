"""A tiny Qwen3-VL is fine-tuned on mp4 files: it learns in which order their frames are, and resumes exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trial_runs import REPOSITORY
from video_files import write_video

from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.export.folders import export_folders
from mmjax.generate.__main__ import main as generate
from mmjax.train.__main__ import main as train
from mmjax.train.metrics import read_metrics
from mmjax.train.trainer import Trainer

pytest.importorskip("av")

ORACLES, SIDE, FRAMES, HELD_OUT = Path(__file__).parent / "oracles", 24, 6, 24
CONFIGS = [REPOSITORY / "configs" / name for name in ("finetune_qwen3_vl.gin", "finetune/tower.gin")]
SETTINGS = (
    *(
        "Train.global_batch=16",
        "Train.microbatches=2",
        "Train.dtype=float32",
        "Train.log_every=1",
        "Train.eval_every=0",
    ),
    *("llm/Decoder.remat='none'", "Data.sequence_length=160", f"mine/Source.held_out={HELD_OUT}"),
    *("Optimizer.schedule='constant'", "Optimizer.warmup=0", "Optimizer.learning_rate=0.003"),
    *("llm/Layout.tp=1", "llm/Layout.dp=1", "vision/Layout.dp=1", f"Train.eval_samples={HELD_OUT}"),
)


def write_model(place: Path) -> Path:
    """A tiny random model with tokenizer, template and rules for images and videos."""
    for part in ("processors/qwen3_vl", "video/folder", "generated/qwen3_vl", "video/answers"):
        shutil.copytree(ORACLES / part, place, dirs_exist_ok=True)
    return place


def write_videos(folder: Path, count: int, *, shuffled: bool) -> Path:
    """mp4 files of a bar that goes to the right or to the left, and what it does; or their frames in any order.

    Both kinds have the same frames, so that only their order tells them apart.
    """
    folder.mkdir()
    rows = []
    for number in range(count):
        rng = np.random.default_rng(number)
        right = bool(number % 4 in (0, 3))
        places = np.sort(rng.choice(np.arange(0, SIDE - 3, 2), FRAMES, replace=False))
        places = places if right else places[::-1]
        places = rng.permutation(places) if shuffled else places
        frames = [np.full((SIDE, SIDE, 3), 30, np.uint8) for _ in places]
        for frame, place in zip(frames, places, strict=True):
            frame[:, place : place + 3] = 220
        write_video(folder / f"{number}.mp4", frames, 2.0)
        asked = [{"type": "video", "video": f"{number}.mp4"}, {"type": "text", "text": "Where?"}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "right" if right else "left"}]
        rows.append({"messages": turns})
    path = folder / "videos.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(model: Path, data: Path, run_dir: Path, steps: int, *more: str) -> list[float]:
    """The losses of a run, by step."""
    bindings = (f"Model.weights={str(model)!r}", f"mine/Source.path={str(data)!r}", *SETTINGS, f"Train.steps={steps}")
    bindings += (f"Data.cache={str(data.parent / 'cache')!r}", *more)
    flags = [*(f"--gin_file={file}" for file in CONFIGS), *(f"--gin.{binding}" for binding in bindings)]
    assert train([*flags, f"--run_dir={run_dir}"]) == 0
    return [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl")]


def evaluated(run_dir: Path) -> dict[str, Any]:
    return [*read_metrics(run_dir / "eval.jsonl")][-1]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_order_of_frames_is_learned(tmp_path: Path) -> None:
    """With shuffled frames, the answers to other videos are guesses."""
    model, losses, held_out = write_model(tmp_path / "model"), {}, {}
    for shuffled in (False, True):
        data = write_videos(tmp_path / f"videos{shuffled}", 120 + HELD_OUT, shuffled=shuffled)
        about = ("Data.workers=1", "Checkpoint.every=0")
        losses[shuffled] = run(model, data, tmp_path / f"run{shuffled}", 100, *about)
        held_out[shuffled] = evaluated(tmp_path / f"run{shuffled}")
    assert np.mean(losses[False][-5:]) < 0.05 * losses[False][0]
    assert held_out[False]["exact_match"] > 0.8 and held_out[True]["exact_match"] < 0.75
    assert held_out[False]["loss"] < 0.5 * held_out[True]["loss"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit, whether videos are decoded in a worker or not; its export answers about a video as the run does."""
    model, data = write_model(tmp_path / "model"), write_videos(tmp_path / "videos", 60, shuffled=False)
    whole = run(model, data, tmp_path / "whole", 6, "Data.workers=0", "Checkpoint.every=3")
    first = run(model, data, tmp_path / "parts", 3, "Data.workers=1", "Checkpoint.every=3")
    resumed = run(model, data, tmp_path / "parts", 6, "Data.workers=1", "Checkpoint.every=3")
    assert len(whole) == 6 and first == whole[:3] and resumed == whole
    export_folders(tmp_path / "parts", tmp_path / "out")
    asked = [{"type": "video", "video": "0.mp4"}, {"type": "text", "text": "Where?"}]
    messages = data.parent / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": asked}]))
    capsys.readouterr()
    for start in (f"--run_dir={tmp_path / 'parts'}", f"--weights={tmp_path / 'out'}"):
        assert generate([start, f"--messages={messages}", "--json", "--max_tokens=4"]) == 0
    of_run, of_export = map(json.loads, capsys.readouterr().out.splitlines())
    assert of_run["tokens"] == of_export["tokens"] and len(of_run["tokens"]) > 0
    np.testing.assert_allclose(of_run["logprobs"], of_export["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_frames_fill_rows_whose_shapes_were_known_before(tmp_path: Path) -> None:
    """64 frames are 32 segments of a row that the plan has from metadata, before any frame is decoded."""
    model, folder = write_model(tmp_path / "model"), tmp_path / "videos"
    folder.mkdir()
    rows = []
    for number in range(20):
        frames = [np.full((SIDE, SIDE, 3), 3 * at + number, np.uint8) for at in range(70)]
        write_video(folder / f"{number}.mp4", frames, 8.0)
        rows.append({"video": f"{number}.mp4", "question": "Which?", "answer": str(number)})
    path = folder / "videos.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bindings = [f"Model.weights={str(model)!r}", f"mine/Source.path={str(path)!r}", *SETTINGS, "Train.steps=1"]
    bindings += ["mine/Source.held_out=4", "mine/Source.frames=64", "mine/Source.video_pixels=(4096, 16384)"]
    bindings += [f"Data.cache={str(tmp_path / 'cache')!r}", "Train.global_batch=2", "Data.sequence_length=1024"]
    recipe = load_config(CONFIGS, bindings)
    with Trainer(recipe, tmp_path / "run", style="silent") as trainer:
        packer, sample = trainer.parts.packer, open_source(recipe, split="train").sample(0)
        assert len(sample.media["vision"]) == 32 and not sample.broken
        batch, buckets = packer.microbatch([sample], 1), packer.encoders["vision"].buckets
        shape = batch.inputs["vision"]["patches"].shape
        assert shape[:2] in {*buckets} and batch.inputs["vision"]["segments"].max() >= 32 // shape[0]
        trainer.train()
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert np.isfinite(row["loss"])
