"""Latents that a frozen encoder makes in the step: equal to those made ahead, and to one device, under layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_user_targets import CONFIG, TINY, captions, edits, step_beside_the_reference
from trial_runs import REPOSITORY

from mmjax.assembly.batches import batch_maker
from mmjax.assembly.latents import Decoders
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.generate import __main__ as generate
from mmjax.latents import __main__ as latents
from mmjax.parity import check
from mmjax.recipe import Recipe
from mmjax.recipe.targets import require_targets
from mmjax.train import __main__ as train
from mmjax.train.metrics import read_metrics
from mmjax.train.trainer import Trainer

pytestmark = pytest.mark.timeout(1500)
VAE = REPOSITORY / "tests" / "oracles" / "autoencoder" / "kl"
ENCODER = ("Model.encoders={'vae': 'latent-encoder'}", f"vae/Weights.path='{VAE}'")
OTHERS = (
    *("Data.sources={'mine': 1.0}", "mine/Source.kind='pictures'", "mine/Source.template='chatml'"),
    *("mine/Source.held_out=6", "mine/Source.draw=True", "Train.eval_samples=0", "Train.clip_norm=0.0"),
    *(line for line in TINY if not line.startswith(("painter/DiT", "Train.eval"))),
)
"""The tiny configuration without a generator."""
DIT = (
    *("Model.generators={'painter': 'dit'}", "painter/DiT.layers=2", "painter/DiT.width=32", "painter/DiT.heads=2"),
    *("painter/DiT.mlp=64", "painter/DiT.channels=4", "painter/DiT.patch=2", "painter/DiT.merge=1"),
)
QUERIED = (*DIT, "painter/DiT.queries=4", "painter/DiT.patch=1")
UNET = (
    *("Model.generators={'painter': 'unet'}", "painter/UNet.width=12", "painter/UNet.queries=2"),
    *("painter/UNet.widths=(8, 16)", "painter/UNet.heads_by_level=(1, 0)", "painter/UNet.mid_heads=2"),
    *("painter/UNet.groups=4", "painter/UNet.norm_eps=1e-2", "painter/UNet.canvases=((4, 4), (8, 8))"),
    *("painter/UNet.process='ddpm'", "painter/UNet.prediction='v'", "painter/UNet.sampler='ddim'"),
    *("vae/LatentEncoder.canvases=((4, 4), (8, 8))", "painter/Layout.sp=False"),
)
STREAMS = (
    *("Model.generators={'painter': 'mmdit'}", "painter/MMDiT.layers=2", "painter/MMDiT.width=32"),
    *("painter/MMDiT.heads=4", "painter/MMDiT.mlp=24", "painter/MMDiT.patch=2", "painter/MMDiT.queries=2"),
    *("painter/MMDiT.channels=4", "painter/Projector.kind='linear'", "painter/Projector.norm='rms'"),
)
EDITING = (*STREAMS, "painter/MMDiT.references=1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bindings of a folder of captions, or of edits, written once, and of latents of its pictures made ahead."""

    @cache
    def bindings(kind: str = "captions", *, ahead: bool = False) -> tuple[str, ...]:
        if ahead:
            source = bindings(kind)
            out = tmp_path_factory.mktemp("latents")
            folder = Path(next(line for line in source if "Source.path" in line).split("'")[1])
            folder = folder if folder.is_dir() else folder.parent
            made = [f"--vae={VAE}", f"--pictures={folder}", f"--out={out}", "--size=16,24", "--dtype=float32"]
            assert latents.main(made) == 0
            return (*source, f"painter/Latents.path='{out}'")
        folder = tmp_path_factory.mktemp(kind)
        source = captions(folder) if kind == "captions" else edits(folder)
        return (*source, f"Data.cache='{folder}/cache'", "mine/Source.drawn_size=(16, 24)")

    return bindings


def load(data: Sequence[str], painter: Sequence[str] = DIT, *more: str, encoder: Sequence[str] = ENCODER) -> Recipe:
    encoders = ["Model.encoders={}"] if not any("Model.encoders" in line for line in (*data, *encoder)) else []
    return load_config([], [*OTHERS, *data, *encoder, *encoders, *painter, *more])


def layouts(**degrees: str) -> tuple[str, ...]:
    """Layouts written "tp,pp,dp@first rank"."""
    lines = list[str]()
    for module, text in degrees.items():
        numbers, _, first = text.partition("@")
        fields = dict(zip(("tp", "pp", "dp", "rank_offset"), (*numbers.split(","), first), strict=True))
        lines += [f"{module}/Layout.{field}={value}" for field, value in fields.items()]
    return tuple(lines)


def first_step(recipe: Recipe) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of a step, and the leaves after it."""
    with Trainer(recipe, None, style="silent") as trainer:
        source = open_source(trainer.recipe, split="train")
        batch = batch_maker(trainer.recipe, trainer.parts, source)[1](0)
        loss, _ = trainer.executor.step(trainer.parts.runs.signed(batch.microbatches), batch.divisors).fetch()
        return loss, {name: np.asarray(leaf) for name, leaf in trainer.leaves().items() if "/vae/" not in name}


AHEAD = {
    "dit, its encoder on other ranks": ("captions", QUERIED, layouts(llm="1,1,1@0", vae="1,1,2@2", painter="1,1,1@4")),
    "unet together": ("captions", UNET, layouts(llm="1,1,2@0", vae="1,1,2@0", painter="1,1,2@0")),
    "edits": ("edits", EDITING, layouts(llm="1,1,1@0", vae="1,1,1@1", painter="1,2,1@2")),
}


@pytest.mark.long
@pytest.mark.parametrize("case", AHEAD)
def test_a_step_equals_that_with_latents_made_ahead(case: str, folders: Any) -> None:
    kind, painter, of_layouts = AHEAD[case]
    seen = "{'vision': 'vit', 'vae': 'latent-encoder'}" if kind == "edits" else "{'vae': 'latent-encoder'}"
    encoder = (*ENCODER, f"Model.encoders={seen}")
    data = folders(kind)
    if kind == "edits":
        data = tuple(line for line in data if "Model.encoders" not in line)
    loss, leaves = first_step(load(data, painter, *of_layouts, encoder=encoder))
    ahead = tuple(line for line in folders(kind, ahead=True) if "drawn_size" not in line)
    without = tuple(line for line in (*painter, *of_layouts) if not line.startswith("vae/"))
    expected, wanted = first_step(load(ahead, without, encoder=()))
    assert loss == pytest.approx(expected, rel=1e-6) and leaves.keys() == wanted.keys()
    for name, leaf in wanted.items():
        if name.startswith("params/"):  # a first update magnifies rounding of small gradients
            assert np.linalg.norm(leaves[name] - leaf) <= 1e-4 * np.linalg.norm(leaf), name
        else:
            np.testing.assert_allclose(leaves[name], leaf, atol=1e-5 * np.abs(leaf).max() + 1e-9, err_msg=name)


SIZES = ("mine/Source.drawn_size=(0, 0)", "mine/Source.drawn_pixels=400")


@pytest.mark.long
@pytest.mark.parametrize("painter", [DIT, UNET], ids=["dit", "unet"])
def test_a_step_over_several_sizes_equals_the_dense_reference(painter: Sequence[str], folders: Any) -> None:
    recipe = load(folders(), painter, *SIZES)
    samples, loss, after, wanted = step_beside_the_reference(recipe)
    assert len({sample.media["vae"][0].shape for sample in samples}) > 1
    assert loss == pytest.approx(wanted.loss, rel=1e-5) and wanted.losses["painter/loss"] > 0.1
    beta = 1 - recipe.model.optimizers["painter"].b1
    for name, gradient in wanted.gradients.items():
        if not name.startswith("vae/"):
            actual, largest = after[f"adam_m/{name}"] / beta, np.abs(gradient).max()
            np.testing.assert_allclose(actual, gradient, atol=1e-4 * largest + 1e-8, err_msg=name)
    assert not any(name.startswith("adam") and "/vae/" in name for name in after)


CHECKED = {
    "dit, zb-h1": (*DIT, *layouts(llm="1,2,1@0", vae="1,1,2@2", painter="1,2,1@4"), "Train.schedule='zb-h1'"),
    "dit with queries, three phases": (
        *QUERIED,
        *layouts(llm="1,1,2@0", vae="1,1,2@0", painter="1,1,2@0"),
        "Train.schedule='three-phase'",
    ),
    "dit, nested": (
        *(*DIT, *layouts(llm="1,2,1@0", vae="1,1,1@0", painter="1,1,1@0"), "Train.schedule='nested'"),
        *("Train.microbatches=4", "vae/Layout.lanes=2", "painter/Layout.lanes=2"),
    ),
    "dit on the encoder's ranks, tp and cp": (
        *(*DIT, *layouts(llm="2,1,1@0", vae="1,1,4@2", painter="2,1,1@2"), "painter/Layout.cp=2"),
    ),
    "unet, tp": (*UNET, *layouts(llm="1,2,1@0", vae="1,1,2@2", painter="2,1,2@4")),
    "streams with references, stages": (
        *(*STREAMS, "painter/MMDiT.references=2", *layouts(llm="1,1,2@0", vae="1,1,1@2", painter="1,2,1@3")),
    ),
    "streams with references, cp, frozen llm": (
        *(*EDITING, "llm/Optimizer.frozen=True", *layouts(llm="1,1,1@0", vae="1,1,1@1", painter="1,1,1@2")),
        "painter/Layout.cp=2",
    ),
    "dit, one program, shards": (
        *(*DIT, *layouts(llm="1,1,2@0", vae="1,1,2@0", painter="1,1,2@0"), "Train.lowering='single'"),
        *("vae/Layout.shard='parameters'", "painter/Layout.shard='parameters'"),
    ),
    "dit behind chunks, uneven dp": (
        *(*DIT, *layouts(llm="1,2,1@0", vae="1,1,3@2", painter="1,1,2@5"), "llm/Layout.chunks=2"),
        *("llm/Decoder.layers=4", "Train.schedule='interleaved'", "Train.microbatches=4"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CHECKED)
def test_layouts_train_as_one_device_does(case: str, folders: Any) -> None:
    report = check(load(folders(), CHECKED[case]), steps=2, style="silent")
    assert report
    assert report.ok, report.numbers()


@pytest.mark.long
def test_pictures_come_out(folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TINY, *folders(), *ENCODER, *QUERIED, "painter/DiT.layers=1"]
    run = tmp_path / "run"
    argv = [f"--gin_file={CONFIG}", f"--run_dir={run}", *(f"--gin.{flag}" for flag in flags)]
    assert train.main(argv) == 0
    rows = read_metrics(run / "metrics.jsonl")
    assert np.mean([row["painter/loss"] for row in rows[-6:]]) < 0.8 * np.mean([r["painter/loss"] for r in rows[:2]])
    with Image.open(run / "drawings.png") as grid:
        assert min(grid.size) > 16
    (evaluation,) = map(json.loads, (run / "eval.jsonl").read_text().splitlines()[-1:])
    assert evaluation["painter_losses"]["0.9"] < evaluation["painter_losses"]["0.1"] < 4
    capsys.readouterr()
    messages = tmp_path / "prompt.json"
    messages.write_text(json.dumps([{"role": "user", "content": "a red box"}]))
    made = [f"--run_dir={run}", f"--messages={messages}", f"--out={tmp_path}/made", "--seed=3"]
    assert generate.main([*made, "--generate_size=16x24"]) == 0
    with Image.open(tmp_path / "made" / "1-1.png") as picture:
        assert picture.size == (24, 16) and np.asarray(picture).std() > 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        generate.main([*made[:2], f"--out={tmp_path}/large", "--generate_size=64x64"])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "vae/LatentEncoder.canvases=((8, 8),): hold no picture of 64 x 64 pixels; add a larger canvas" in error


def test_samples_have_pictures_and_noise_of_latents(folders: Any) -> None:
    source = open_source(load(folders()), split="test")
    (picture,), (noise,) = (source.sample(0).media[name] for name in ("vae", "painter"))
    assert picture.shape == (16, 24, 3) and np.abs(picture).max() == pytest.approx(1, abs=0.1)
    assert noise.shape == (4, 6, 4) and 0.7 < noise.std() < 1.3
    sample = source.sample(0, media=["painter"])
    assert sample.media.keys() == {"painter"}
    np.testing.assert_array_equal(sample.media["painter"][0], noise)
    (shown,), _ = Decoders.of(load(folders())).shown([source.sample(0)], ())
    assert shown.media.keys() == {"painter"}
    np.testing.assert_array_equal(shown.media["painter"][0], picture)


def test_an_edit_has_its_source_behind_it(folders: Any) -> None:
    data = tuple(line for line in folders("edits") if "Model.encoders" not in line)
    encoder = (*ENCODER, "Model.encoders={'vision': 'vit', 'vae': 'latent-encoder'}")
    source = open_source(load(data, EDITING, encoder=encoder), split="test")
    pairs = [sample.media["vae"] for sample in map(source.sample, range(6))]
    assert {picture.shape for pair in pairs for picture in pair} == {(16, 24, 3)} and {*map(len, pairs)} == {2}
    assert any(not np.array_equal(target, reference) for target, reference in pairs)
    sample = source.sample(0)
    assert [[picture.shape for picture in of] for of in sample.references["painter"]] == [[(4, 6, 4)]]


REFUSED = {
    "trained": (
        ("vae/Optimizer.frozen=False",),
        "vae/Optimizer.frozen=False: 'vae' encodes what 'painter' learns to make",
    ),
    "latents made ahead too": (
        ("painter/Latents.path='made'",),
        "painter/Latents.path='made': 'vae' encodes in the step",
    ),
    "another decoder": (
        ("painter/Latents.autoencoder='other'",),
        "painter/Latents.autoencoder='other': 'vae' encodes by",
    ),
    "tp": (
        ("vae/Layout.tp=2",),
        "vae/Layout.tp=2: a picture is encoded by one rank as a whole; set it to 1, and vae/La",
    ),
    "cp": (("vae/Layout.cp=2",), "vae/Layout.cp=2: "),
    "stages": (("vae/Layout.pp=2",), "vae/Layout.pp=2: "),
    "other channels": (
        ("painter/DiT.channels=3",),
        "painter/DiT.channels=3: 'vae' makes latents of 4 channels; set it to 4",
    ),
    "to the language model": (
        ("Model.edges=('llm -> painter', 'vae -> llm')",),
        "Model.edges=['llm -> painter', 'vae -> llm']: 'vae' encodes what one generator makes, and feeds ['llm']; name",
    ),
    "two of one generator": (
        (
            "Model.encoders={'vae': 'latent-encoder', 'vae2': 'latent-encoder'}",
            "Model.edges=('llm -> painter', 'vae -> painter', 'vae2 -> painter')",
        ),
        "Model.edges=['llm -> painter', 'vae -> painter', 'vae2 -> painter']: 'vae' and 'vae2' would encode the same",
    ),
    "adapters": (("vae/Lora.rank=2",), "vae/Lora.rank=2: "),
    "a task": (
        ("Data.sources={}", "Data.task='digits'"),
        "Data.task='digits': 'vae' encodes pictures of records; name s",
    ),
    "another folder": (("vae/Weights.path='nowhere'",), "vae/Weights.path='nowhere': "),
    "canvases": (
        ("vae/LatentEncoder.canvases=((8, 8), (4, 9))",),
        "vae/LatentEncoder.canvases=((8, 8), (4, 9)): must hold",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str, folders: Any) -> None:
    more, line = REFUSED[case]
    data = folders() if case != "a task" else ()
    others = [each for each in OTHERS if case != "a task" or "mine/" not in each]
    with pytest.raises(ConfigError) as caught:
        load_config([], [*others, *data, *ENCODER, *DIT, *more])
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value), str(caught.value)


def test_a_picture_without_a_canvas_and_an_encoder_without_a_folder_are_refused(folders: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"vae/LatentEncoder.canvases=\(\(2, 2\),\): hold no picture of 16 x 24 pixels"
    ):
        open_source(load(folders(), DIT, "vae/LatentEncoder.canvases=((2, 2),)"), split="train")
    recipe = load(folders(), DIT, "vae/Weights.path=''", "vae/LatentEncoder.preset='sd-2.1'")
    with pytest.raises(
        ConfigError, match=r"vae/Weights.path='': 'vae' would encode by random numbers; name the folder"
    ):
        require_targets(recipe)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_learn_what_one_does(folders: Any, tmp_path: Path) -> None:
    """Each opens the pictures that its own devices need, the second one those of the encoder alone."""
    more = (*layouts(llm="1,1,2@0", vae="1,1,2@2", painter="1,1,2@0"), "Train.steps=3", "Optimizer.warmup=0")
    flags = [f"--gin.{flag}" for flag in (*OTHERS, *folders(), *ENCODER, *DIT, *more, "World.platform='cpu'")]
    command = ["-m", "mmjax.train", *flags]
    for name, launch in {"one": [], "two": ["-m", "mmjax.launch", "-n", "2", "--devices_per_process=2"]}.items():
        argv = [sys.executable, *launch, *command, f"--run_dir={tmp_path / name}"]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=REPOSITORY, timeout=800, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    losses = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("one", "two")]
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-6)
