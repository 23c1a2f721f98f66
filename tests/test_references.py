"""Pictures made from other pictures: a generator with two streams sees those before it in its row."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_user_targets import CONFIG, TINY, edits, step_beside_the_reference

from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.latents import LatentStore, key_of
from mmjax.generate import __main__ as generate
from mmjax.latents import __main__ as latents
from mmjax.models.autoencoder.model import Autoencoder
from mmjax.recipe import Recipe
from mmjax.train import __main__ as train
from mmjax.train.metrics import read_metrics

VAE = Path(__file__).parent / "oracles" / "autoencoder" / "kl"
STREAMS = (
    *("Model.generators={'painter': 'mmdit'}", "painter/MMDiT.layers=1", "painter/MMDiT.width=32"),
    *("painter/MMDiT.heads=2", "painter/MMDiT.mlp=64", "painter/MMDiT.channels=3", "painter/MMDiT.queries=3"),
    *("painter/Projector.kind='linear'", "painter/Projector.norm='rms'"),
    *(line for line in TINY if "DiT" not in line),
)
OF_LATENTS = ("painter/MMDiT.channels=4", "painter/MMDiT.patch=1", "painter/MMDiT.references=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Edits, and the latents of their pictures of both kinds."""

    @cache
    def bindings() -> tuple[tuple[str, ...], str]:
        path = tmp_path_factory.mktemp("edits")
        source = (*edits(path), f"Data.cache='{path}/cache'")
        out = tmp_path_factory.mktemp("latents")
        assert latents.main([f"--vae={VAE}", f"--pictures={path}", f"--out={out}", "--size=16,24"]) == 0
        return source, str(out)

    return bindings


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of captions without the settings of its generator."""
    path = tmp_path_factory.getbasetemp() / "references.gin"
    lines = CONFIG.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "DiT" not in line))
    return path


def load(config: Path, bindings: tuple[str, ...], *more: str) -> Recipe:
    return load_config([config], [*STREAMS, *bindings, *more])


SIZES = ("mine/Source.drawn_size=(0, 0)", "mine/Source.drawn_pixels=100")


def test_a_row_has_the_pictures_before_it(config: Path, folder: Any) -> None:
    """Of the sizes of pictures to be made, or of their own; the order of the text decides which ones."""
    recipe = load(config, folder()[0], *SIZES, "painter/MMDiT.references=1", "mine/Source.held_out=0")
    source = open_source(recipe, split="test")
    sample, meta = source.sample(1), source.meta(1)
    ((picture,),), (target,) = sample.references["painter"], sample.media["painter"]
    assert picture.shape == target.shape and np.abs(picture - target).max() > 0.5  # another colour
    assert meta.lengths("painter") == (2 * picture.shape[0] * picture.shape[1] // 4,)
    other = load(config, folder()[0], *SIZES, "painter/MMDiT.references=1", "mine/Source.reference_size=(4, 6)")
    assert open_source(other, split="test").sample(0).references["painter"][0][0].shape == (4, 6, 3)
    assert "painter" not in open_source(load(config, folder()[0], *SIZES), split="test").sample(0).references


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pixels", pytest.param("latents", marks=pytest.mark.long)])
def test_a_step_equals_the_dense_reference(kind: str, config: Path, folder: Any) -> None:
    """Loss and gradients of edits, some of whose instructions are dropped, in rows of several sizes."""
    (source, made), sizes = folder(), SIZES
    of_kind = (*sizes, "painter/MMDiT.references=2")
    if kind == "latents":
        of_kind = (*OF_LATENTS, f"painter/Latents.path='{made}'", "mine/Source.drawn_size=(0, 0)")
    recipe = load(
        config, source, *of_kind, "painter/MMDiT.drop_condition=0.4", "Train.clip_norm=0.0", "Train.eval_samples=0"
    )
    samples, loss, after, wanted = step_beside_the_reference(recipe)
    assert all(sample.references["painter"] for sample in samples)
    assert len({sample.dropped["painter"] for sample in samples}) == 2
    assert loss == pytest.approx(wanted.loss, rel=1e-5) and wanted.losses["painter/loss"] > 0.5
    beta = 1 - recipe.model.optimizers["painter"].b1
    for name, gradient in wanted.gradients.items():
        actual, largest = after[f"adam_m/{name}"] / beta, np.abs(gradient).max()
        np.testing.assert_allclose(actual, gradient, atol=1e-4 * largest + 1e-8, err_msg=name)


def test_latents_are_the_means_of_the_pictures(config: Path, folder: Any) -> None:
    source, made = folder()
    recipe = load(config, source, *OF_LATENTS, f"painter/Latents.path='{made}'", "mine/Source.held_out=0")
    opened = open_source(recipe, split="test")
    sample = opened.sample(0)
    line = json.loads(Path(recipe.data.sources["mine"].path).read_text().splitlines()[0])
    name = next(part["image"] for part in line["messages"][0]["content"] if part["type"] == "image")
    data = (Path(recipe.data.sources["mine"].path).parent / name).read_bytes()
    wanted = LatentStore.open(made).latent(key_of(data), None)
    np.testing.assert_array_equal(sample.references["painter"][0][0], wanted)


def test_refused_in_one_line(config: Path, folder: Any) -> None:
    with pytest.raises(ConfigError, match=r"painter/MMDiT.references=4: must be 0 to 3, such as 1"):
        load(config, folder()[0], "painter/MMDiT.references=4")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["pixels", "latents"])
def test_pictures_are_made_of_a_picture(
    kind: str, config: Path, folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training, drawings of held-out edits, and ``mmjax.generate`` from a picture, which decides what is made."""
    source, made = folder()
    of_kind = ("mine/Source.drawn_size=(8, 8)", "painter/MMDiT.references=1")
    if kind == "latents":
        autoencoder = f"painter/Latents.autoencoder='{VAE}'"
        of_kind = (*OF_LATENTS, f"painter/Latents.path='{made}'", autoencoder, "mine/Source.drawn_size=(0, 0)")
    run, lines = tmp_path / "run", [*STREAMS, *source, *of_kind, "Train.steps=12"]
    argv = [f"--gin_file={config}", f"--run_dir={run}", *(f"--gin.{line}" for line in lines)]
    assert train.main(argv) == 0
    losses = [row["painter/loss"] for row in read_metrics(run / "metrics.jsonl")]
    assert np.isfinite(losses).all() and (run / "drawings.png").is_file()
    pictures = []
    for colour in ((220, 30, 30), (30, 60, 230)):
        Image.fromarray(np.full((20, 30, 3), colour, np.uint8)).save(seen := tmp_path / "seen.png")
        asked = [{"role": "user", "content": [{"type": "image", "image": str(seen)}, {"type": "text", "text": "red"}]}]
        messages = tmp_path / "prompt.json"
        messages.write_text(json.dumps(asked))
        out = tmp_path / f"made{len(pictures)}"
        size = "16x24" if kind == "latents" else "8x8"
        flags = [f"--run_dir={run}", f"--messages={messages}", f"--out={out}", "--seed=3"]
        assert generate.main([*flags, f"--generate_size={size}", "--guidance=2.0", "--steps=3"]) == 0
        (path,) = out.glob("*.png")
        with Image.open(path) as picture:
            pictures.append(np.asarray(picture).astype(int))
    capsys.readouterr()
    assert np.abs(pictures[0] - pictures[1]).max() > 0


def test_a_source_pictures_latents_are_encoded() -> None:
    """As they are made ahead."""
    vae, pixels = Autoencoder.read(str(VAE)), np.random.default_rng(0).uniform(-1, 1, (1, 8, 12, 3)).astype(np.float32)
    scale = vae.config.scale
    np.testing.assert_allclose(vae.latents(pixels), vae.encode(pixels).mean * scale, rtol=1e-6)
