"""``python -m mmjax.train_autoencoder``: its loss, devices, resumption and folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.flatten_util
import numpy as np
import pytest
from PIL import Image

from mmjax.latents.pictures import Folder
from mmjax.models.autoencoder.config import AutoencoderConfig
from mmjax.models.autoencoder.model import DP, Autoencoder
from mmjax.train_autoencoder.__main__ import main
from mmjax.train_autoencoder.batches import Batches
from mmjax.train_autoencoder.checkpoints import last_checkpoint
from mmjax.train_autoencoder.running import METRICS, Run
from mmjax.train_autoencoder.settings import Training
from mmjax.train_autoencoder.step import Steps, loss

SMALL = AutoencoderConfig.of("tiny", widths=(4, 8), groups=2)
TRAINING = Training(autoencoder=SMALL, size=(8, 12), batch=4, steps=6, every=3, learning_rate=1e-2, flip=True)
COUNT = 7


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smooth pictures, which an autoencoder can learn."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        colours = Image.fromarray(rng.integers(0, 256, (2, 2, 3), np.uint8))
        colours.resize((12, 8), Image.Resampling.BILINEAR).save(folder / f"{number}.png")
    return folder


def run(pictures: Path, out: Path, training: Training = TRAINING, devices: int = 1) -> tuple[np.ndarray, list[dict]]:
    """The parameters behind the last step in one vector, and the lines of metrics."""
    folder = Run(training=training, records=Folder(str(pictures)), out=out, devices=devices, log_every=1).train()
    params = Autoencoder.read(str(folder)).params
    lines = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return np.asarray(jax.flatten_util.ravel_pytree(params)[0]), lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def trained(pictures: Path, folder: Path) -> tuple[np.ndarray, list[dict]]:
    return run(pictures, folder)


@pytest.mark.long
@pytest.mark.parametrize("error", ["l1", "l2"])
def test_the_loss_is_that_of_the_formula(error: str, pictures: Path) -> None:
    training = replace(TRAINING, error=error, divergence=0.1)
    autoencoder = Autoencoder.new(SMALL, 1)
    batch = Batches(training, Folder(str(pictures))).batch(0)
    value, parts = jax.jit(lambda params: loss(training, params, batch))(autoencoder.params)
    latents = autoencoder.encode(batch.pictures)
    sample = latents.mean + np.exp(latents.log_variance / 2) * batch.noise
    differences = autoencoder.decode(sample) - batch.pictures
    errors = np.mean(np.abs(differences) ** (1 if error == "l1" else 2))
    variance = np.exp(latents.log_variance)
    apart = 0.5 * np.sum(latents.mean**2 + variance - 1 - latents.log_variance) / batch.pictures.size
    np.testing.assert_allclose([parts["error"], parts["divergence"]], [errors, apart], rtol=1e-5)
    np.testing.assert_allclose(value, errors + 0.1 * apart, rtol=1e-5)


@pytest.mark.long
def test_it_learns(trained: tuple[np.ndarray, list[dict]], pictures: Path, tmp_path: Path) -> None:
    _, lines = run(pictures, tmp_path, replace(TRAINING, steps=60, every=60))
    assert lines[:6] == trained[1]
    errors = [line["error"] for line in lines]
    assert np.mean(errors[-5:]) < 0.6 * errors[0]


@pytest.mark.long
def test_devices_share_a_batch(pictures: Path) -> None:
    """Of the optimizer's moments, whose first step is in proportion to gradients; Adam's quotient is not."""
    batch, moments = Batches(TRAINING, Folder(str(pictures))).batch(0), []
    for number in (1, 4):
        steps = Steps(TRAINING, jax.sharding.Mesh(np.array(jax.local_devices()[:number]), (DP,)))
        state, metrics = steps.step(steps.begin(Autoencoder.new(SMALL).params), batch)
        assert len(metrics["loss"].sharding.device_set) == number
        moments.append(np.asarray(jax.flatten_util.ravel_pytree((state.optimizer, metrics))[0]))
    np.testing.assert_allclose(moments[1], moments[0], rtol=0, atol=1e-6 * np.abs(moments[0]).max())
    assert np.abs(moments[0]).max() < 10


@pytest.mark.long
def test_a_run_that_goes_on_equals_one_that_did_not_stop(
    trained: tuple[np.ndarray, list[dict]], pictures: Path, tmp_path: Path
) -> None:
    run(pictures, tmp_path, replace(TRAINING, steps=3))
    with open(tmp_path / METRICS, "a") as file:  # of a step behind the checkpoint, in a run that was killed
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "lo')
    (tmp_path / "step-00000006.partial").mkdir()
    params, lines = run(pictures, tmp_path)
    assert np.array_equal(params, trained[0])
    assert lines == trained[1]
    assert run(pictures, tmp_path)[1] == lines  # a finished run does nothing


@pytest.mark.long
def test_a_checkpoint_is_a_folder_whose_latents_have_deviation_1(
    trained: tuple[np.ndarray, list[dict]], pictures: Path, folder: Path
) -> None:
    del trained
    autoencoder = Autoencoder.read(str(folder / "last"))
    assert (folder / "last").resolve() == last_checkpoint(folder)[0].resolve()  # pyright: ignore
    batch = Batches(TRAINING, Folder(str(pictures))).batch(TRAINING.steps - 1)
    latents = autoencoder.encode(batch.pictures)
    sample = latents.mean + np.exp(latents.log_variance / 2) * batch.noise
    c = autoencoder.config
    seen = (sample - c.shift) * c.scale
    np.testing.assert_allclose([seen.mean(), seen.std()], [0, 1], atol=1e-5)


@pytest.mark.long
def test_causal_kernels_are_trained(pictures: Path, tmp_path: Path) -> None:
    c = AutoencoderConfig.of(
        "qwen-image", widths=(4, 8), layers=1, latent_channels=2, over_time=(True,), means=(0.0,) * 2,
        deviations=(1.0,) * 2,
    )  # fmt: skip
    run(pictures, tmp_path, replace(TRAINING, autoencoder=c, steps=2))
    trained = Autoencoder.read(str(tmp_path / "last"))
    assert trained.config.means != c.means
    begun = Autoencoder.new(c).leaves()
    changed = {name for name, leaf in trained.leaves().items() if not np.array_equal(leaf, begun[name])}
    assert {name for name in begun if "/time/" in name}.isdisjoint(changed)
    assert "autoencoder/encoder/conv_in/kernel" in changed


def test_batches_are_a_function_of_seed_and_step(pictures: Path) -> None:
    training = replace(TRAINING, batch=COUNT, flip=False)
    batches = Batches(training, Folder(str(pictures)))
    first, again = batches.batch(0), Batches(training, Folder(str(pictures))).batch(0)
    assert np.array_equal(first.pictures, again.pictures)
    assert np.array_equal(first.noise, again.noise)
    second = batches.batch(1)
    assert not np.array_equal(first.pictures, second.pictures)
    sums = [np.sort(batch.pictures.sum(axis=(1, 2, 3))) for batch in (first, second)]
    np.testing.assert_array_equal(sums[0], sums[1])  # each epoch has each picture once
    other = Batches(replace(training, seed=1), Folder(str(pictures))).batch(0)
    assert not np.array_equal(first.noise, other.noise)
    flipped = Batches(replace(training, flip=True), Folder(str(pictures))).batch(0).pictures
    mirrored = [np.array_equal(a, b[:, ::-1]) for a, b in zip(flipped, first.pictures, strict=True)]
    assert 0 < sum(mirrored) < COUNT


@pytest.mark.long
def test_pictures_that_are_held_out(pictures: Path, tmp_path: Path) -> None:
    training = replace(TRAINING, held_out=2, batch=5, flip=False, steps=1)
    batches = Batches(training, Folder(str(pictures)))
    trained = {picture.tobytes() for step in range(3) for picture in batches.batch(step).pictures}
    apart = batches.apart(0, 5)
    assert len(trained) == COUNT - 2
    assert {picture.tobytes() for picture in apart}.isdisjoint(trained)
    _, lines = run(pictures, tmp_path, training)
    autoencoder = Autoencoder.read(str(tmp_path / "last"))
    decoded = autoencoder.decode(autoencoder.encode(apart[:2]).mean)
    np.testing.assert_allclose(lines[-1]["held_out_error"], np.abs(decoded - apart[:2]).mean(), rtol=1e-4)


def command(pictures: Path, out: Path, *more: str) -> list[str]:
    words = ["--widths=4,8", "--groups=2", "--size=8,12", "--batch=4", "--steps=1"]
    return [f"--pictures={pictures}", f"--out={out}", *words, *more]


@pytest.mark.long
def test_the_command_trains_and_goes_on_from_a_folder(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(pictures, tmp_path / "new")) == 0
    path = capsys.readouterr().out.strip()
    assert Autoencoder.read(path).config.widths == (4, 8)
    words = [f"--pictures={pictures}", f"--out={tmp_path / 'more'}", f"--vae={path}", "--size=8,12", "--batch=4"]
    assert main([*words, "--steps=1", "--learning_rate=1e-9"]) == 0
    more, begun = (Autoencoder.read(folder).leaves() for folder in (capsys.readouterr().out.strip(), path))
    for name, leaf in begun.items():
        np.testing.assert_allclose(more[name], leaf, atol=1e-7)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size=9,12"], "multiples of 2"),
        (["--error=mse"], "--error='mse'"),
        (["--learning_rate=fast"], "must be a number such as 1e-4"),
        (["--widths=4,9"], "Autoencoder.groups=2"),
        (["--preset=sd"], "legal: 'tiny'"),
        (["--held_out=7"], "leave at least one to train on"),
        (["--vae=x"], "--vae decides it"),
        (["--warmup=1"], "must be below --steps"),
        (["--pictures=/nowhere"], "is no folder"),
    ],
)
def test_wrong_flags_are_one_line(
    flags: list[str], message: str, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(command(pictures, tmp_path, *flags))
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.long
def test_other_settings_in_the_same_folder_are_refused(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(command(pictures, tmp_path))
    for flags, name in ((["--seed=1"], "--seed=1"), (["--schedule=cosine", "--steps=2"], "--steps=2")):
        with pytest.raises(SystemExit):
            main(command(pictures, tmp_path, *flags))
        assert name in capsys.readouterr().err
    assert main(command(pictures, tmp_path, "--steps=2")) == 0


@pytest.mark.long
def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "torn.png").write_bytes(b"no picture")
    with pytest.raises(SystemExit):
        main(command(tmp_path, tmp_path / "out"))
    assert "torn.png: no JPEG" in capsys.readouterr().err
