"""Generators of latents: latents made ahead are drawn and trained on, and pictures come out of what is drawn."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_user_targets import CONFIG, COUNT, TINY, captions, step_beside_the_reference

from mmjax.assembly.latents import Decoders
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.latents import LatentStore, key_of
from mmjax.generate import __main__ as generate
from mmjax.latents import __main__ as latents
from mmjax.models.autoencoder.layers import from_generator
from mmjax.models.autoencoder.model import Autoencoder
from mmjax.recipe import Recipe
from mmjax.train import __main__ as train
from mmjax.train.metrics import read_metrics

VAE = Path(__file__).parent / "oracles" / "autoencoder" / "kl"
OF_LATENTS = ("painter/DiT.channels=4", "painter/DiT.patch=1", "painter/DiT.merge=1", "painter/DiT.queries=3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Pictures with captions, and their latents."""

    @cache
    def bindings() -> tuple[str, ...]:
        folder = tmp_path_factory.mktemp("pictures")
        source = captions(folder)
        out = tmp_path_factory.mktemp("latents")
        assert latents.main([f"--vae={VAE}", f"--pictures={folder}", f"--out={out}", "--size=16,24"]) == 0
        return (*source, f"Data.cache='{out}/cache'", f"painter/Latents.path='{out}'")

    return bindings


def load(bindings: tuple[str, ...], *more: str) -> Recipe:
    return load_config([CONFIG], [*TINY, *OF_LATENTS, "mine/Source.drawn_size=(0, 0)", *bindings, *more])


def latent_of(recipe: Recipe, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of a picture's latent, by the autoencoder's own numbers."""
    store = LatentStore.open(recipe.model["painter"].latents.path)
    folder = Path(recipe.data.sources["mine"].path)
    key = key_of((folder / f"{number:03}.png").read_bytes())
    scale = Autoencoder.read(str(VAE)).config.scale
    return store.latent(key, None), np.exp(0.5 * store.stored(key, "log_variance")) * scale


def test_samples_are_drawn_of_latents(folders: Any) -> None:
    """A held-out sample is a latent of its picture, always the same; in training each epoch draws another."""
    recipe = load(folders(), "mine/Source.held_out=0")
    source = open_source(recipe, split="test")
    for number in range(4):
        (drawn,) = source.sample(number).media["painter"]
        mean, deviation = latent_of(recipe, number)
        assert drawn.shape == mean.shape and 0.3 < np.std((drawn - mean) / deviation) < 2
        np.testing.assert_array_equal(drawn, source.sample(number).media["painter"][0])
    trained = open_source(recipe, split="train")
    first, second = (
        {sample.question: sample.media["painter"][0] for sample in map(trained.sample, epoch)}
        for epoch in (range(COUNT), range(COUNT, 2 * COUNT))
    )
    assert any(np.abs(first[caption] - second[caption]).max() > 1e-3 for caption in first.keys() & second.keys())


@pytest.mark.long
def test_a_step_equals_the_dense_reference(folders: Any) -> None:
    recipe = load(folders(), "Train.clip_norm=0.0", "Train.eval_samples=0")
    _, loss, _, wanted = step_beside_the_reference(recipe)
    assert loss == pytest.approx(wanted.loss, rel=1e-5) and wanted.losses["painter/loss"] > 1


@pytest.mark.long
def test_pictures_come_out(folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TINY, *OF_LATENTS, *folders(), f"painter/Latents.autoencoder='{VAE}'", "mine/Source.drawn_size=(0, 0)"]
    run = tmp_path / "run"
    argv = [f"--gin_file={CONFIG}", f"--run_dir={run}", *(f"--gin.{flag}" for flag in flags)]
    assert train.main(argv) == 0
    losses = [row["painter/loss"] for row in read_metrics(run / "metrics.jsonl")]
    assert np.mean(losses[-6:]) < 0.8 * np.mean(losses[:2])
    with Image.open(run / "drawings.png") as grid:
        assert min(grid.size) > 16
    capsys.readouterr()
    asked = [{"role": "user", "content": "a red box"}]
    messages = tmp_path / "prompt.json"
    messages.write_text(json.dumps(asked))
    made = [f"--run_dir={run}", f"--messages={messages}", f"--out={tmp_path}/made", "--seed=3", "--json"]
    assert generate.main([*made, "--generate_size=16x24"]) == 0
    (path,) = sorted((tmp_path / "made").glob("*.png"))
    with Image.open(path) as picture:
        assert picture.size == (24, 16) and np.asarray(picture).std() > 0


def test_pictures_are_those_of_the_autoencoder(folders: Any) -> None:
    recipe = load(folders(), f"painter/Latents.autoencoder='{VAE}'", "mine/Source.held_out=0")
    sample, vae = open_source(recipe, split="test").sample(0), Autoencoder.read(str(VAE))
    (shown,), (drawn,) = Decoders.of(recipe).shown([sample], [{"painter": sample.media["painter"]}])
    wanted = vae.decode(np.asarray(from_generator(vae.config, sample.media["painter"][0]))[None])[0]
    np.testing.assert_allclose(shown.media["painter"][0], wanted, atol=1e-6)
    np.testing.assert_allclose(drawn["painter"][0], wanted, atol=1e-6)
    unknown = Decoders.of(load(folders()))
    assert "painter" not in unknown.shown([sample], [])[0][0].media
    with pytest.raises(ConfigError, match=r"painter/Latents.autoencoder='': 'painter' makes latents; name the folder"):
        unknown.require_known()


def test_a_picture_without_a_latent_is_named_until_it_has_one(folders: Any, tmp_path: Path) -> None:
    captions(tmp_path)
    out = tmp_path / "latents"
    few = tmp_path / "few"
    few.mkdir()
    for number in range(3):
        (few / f"{number}.png").write_bytes((tmp_path / f"{number:03}.png").read_bytes())
    flags = [f"--vae={VAE}", f"--out={out}", "--size=16,24"]
    assert latents.main([*flags, f"--pictures={few}"]) == 0
    bindings = (f"mine/Source.path='{tmp_path}'", f"Data.cache='{tmp_path}/cache'", f"painter/Latents.path='{out}'")
    recipe = load(bindings, "mine/Source.held_out=0")
    counted = len(open_source(recipe, split="test"))  # pyright: ignore[reportArgumentType]
    assert 3 <= counted < COUNT
    assert latents.main([*flags, f"--pictures={tmp_path}"]) == 0
    assert len(open_source(recipe, split="test")) == COUNT  # pyright: ignore[reportArgumentType]


def test_refused_in_one_line(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"painter/Latents.path=.*: 'painter' makes 3 channels; set its channels to 4"
    ):
        open_source(load(folders(), "painter/DiT.channels=3"), split="train")
    with pytest.raises(
        ConfigError, match=r"painter/Latents: Latents.path='nowhere': it has no latents; make some with"
    ):
        open_source(load((*folders()[:-1], "painter/Latents.path='nowhere'")), split="train")
    with pytest.raises(ConfigError, match=r"its latent is 4 x 6, and 'painter' makes sides that are multiples of 4"):
        open_source(load(folders(), "painter/DiT.patch=4", "mine/Source.strict=True"), split="train")
