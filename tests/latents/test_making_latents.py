"""``python -m mmjax.latents``: latents made ahead, gone on with, checked and read."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from mmjax.configurable import ConfigError
from mmjax.data.latents import LOG_VARIANCE, MEAN, LatentStore, key_of, shards
from mmjax.data.sources.media import Media
from mmjax.data.sources.record import Record
from mmjax.latents.__main__ import main
from mmjax.latents.making import Made, Maker
from mmjax.latents.pictures import Broken, Folder, Resizing, pictures_of, pixels_of
from mmjax.models.autoencoder.model import Autoencoder

VAE = Path(__file__).parents[1] / "oracles" / "autoencoder" / "kl"
SIZE = (8, 12)
COUNT = 11


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures of several sizes, one of them twice, and one broken."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        draw_picture(rng, folder / ("inner" if number % 3 else "") / f"{number:02d}.png")
    (folder / "again.png").write_bytes((folder / "00.png").read_bytes())
    (folder / "torn.png").write_bytes((folder / "00.png").read_bytes()[:60])
    return folder


def draw_picture(rng: np.random.Generator, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    height, width = rng.integers(9, 40, 2)
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)


@pytest.fixture(scope="module")
def vae() -> Autoencoder:
    return Autoencoder.read(str(VAE))


def maker(vae: Autoencoder, folder: Path, **settings: object) -> Maker:
    resizing = Resizing(size=SIZE, block=4)
    return Maker(autoencoder=vae, resizing=resizing, folder=folder, **{"batch": 3, "shard": 3, **settings})  # pyright: ignore


def stored(folder: Path) -> dict[str, np.ndarray]:
    store = LatentStore(folder)
    return {f"{key}.{name}": store.stored(key, name) for key in store for name in (MEAN, LOG_VARIANCE)}


@pytest.mark.long
def test_latents_are_those_of_the_autoencoder(pictures: Path, vae: Autoencoder, tmp_path: Path) -> None:
    made = maker(vae, tmp_path, dtype="float32").make(Folder(str(pictures)))
    assert (made.made, made.there) == (COUNT, 1)
    assert [broken.name for broken in made.broken] == ["torn.png"]
    store = LatentStore(tmp_path)
    c = vae.config
    for path in sorted(pictures.rglob("[01]*.png")):
        data = path.read_bytes()
        expected = vae.encode(pixels_of(Resizing(size=SIZE, block=4).pictures(3), data)[None])
        key = key_of(data)
        assert store.size(key) == expected.mean.shape[1:3]
        np.testing.assert_allclose(store.stored(key, MEAN), expected.mean[0], rtol=1e-5, atol=1e-5)
        noise = np.random.default_rng(5).standard_normal(expected.mean[0].shape, np.float32)
        sample = expected.mean[0] + np.exp(0.5 * expected.log_variance[0]) * noise
        latent = store.latent(key, np.random.default_rng(5))
        np.testing.assert_allclose(latent, (sample - c.shift) * c.scale, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(store.latent(key, None), expected.mean[0] * c.scale, rtol=1e-4, atol=1e-5)
        assert latent.dtype == np.float32


def test_a_second_run_makes_nothing_and_new_pictures_alone_are_made(
    pictures: Path, vae: Autoencoder, tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for path in sorted(pictures.rglob("0*.png")):
        (folder / path.name).write_bytes(path.read_bytes())
    out = tmp_path / "out"
    maker(vae, out).make(Folder(str(folder)))
    before = {file: file.stat().st_mtime_ns for file in shards(out)}
    assert len(before) > 1
    again = maker(vae, out).make(Folder(str(folder)))
    assert again == Made(made=0, there=10)
    draw_picture(np.random.default_rng(9), folder / "new.png")
    (folder / "05.png").rename(folder / "renamed.png")
    assert maker(vae, out).make(Folder(str(folder))) == Made(made=1, there=10)
    assert {file: file.stat().st_mtime_ns for file in shards(out)[:-1]} == before


def test_pixels_cover_their_size_and_lie_on_white() -> None:
    """A picture keeps its aspect, its middle is cut out, and what shows through is white, whatever its colour."""
    picture = np.full((20, 60, 4), 255, np.uint8)
    picture[:, :20, :3] = 0  # cut off
    picture[:10, 20:, :] = (7, 7, 7, 0)
    picture[10:, 20:, :3] = (255, 0, 255)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png")
    pixels = pixels_of(Resizing(size=(20, 20), block=4, resample="nearest").pictures(3), file.getvalue())
    expected = np.ones((20, 20, 3), np.float32)
    expected[10:] = (1, -1, 1)
    np.testing.assert_array_equal(pixels, expected)
    kept = pixels_of(Resizing(pixels=300, block=4).pictures(1), file.getvalue())
    assert kept.shape == (8, 28, 1)
    assert kept.min() >= -1


class _Dying:
    """A folder whose reading ends in the middle."""

    def __init__(self, inner: Folder, after: int):
        self._inner, self._after = inner, after

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Sequence[Media] | Broken]:
        for number, record in enumerate(self._inner):
            if number == self._after:
                raise KeyboardInterrupt
            yield record


def test_an_interrupted_run_goes_on(
    pictures: Path, vae: Autoencoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmjax.latents.making._AHEAD", 1)
    maker(vae, tmp_path / "whole").make(Folder(str(pictures)))
    with pytest.raises(KeyboardInterrupt):
        maker(vae, tmp_path / "out").make(_Dying(Folder(str(pictures)), 8))
    there = len(LatentStore(tmp_path / "out"))
    assert 0 < there < COUNT
    (tmp_path / "out" / "000009.partial").write_bytes(b"torn")
    made = maker(vae, tmp_path / "out").make(Folder(str(pictures)))
    assert made.made == COUNT - there
    assert not list((tmp_path / "out").glob("*.partial"))
    ours, theirs = stored(tmp_path / "out"), stored(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_devices_share_pictures(pictures: Path, vae: Autoencoder, tmp_path: Path) -> None:
    maker(vae, tmp_path / "one", batch=4, dtype="float32").make(Folder(str(pictures)))
    spread = vae.spread(jax.local_devices()[:4])
    maker(spread, tmp_path / "four", batch=4, dtype="float32").make(Folder(str(pictures)))
    ours, theirs = stored(tmp_path / "four"), stored(tmp_path / "one")
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=1e-4, atol=1e-5)


def command(pictures: Path, out: Path, *more: str) -> list[str]:
    return [f"--vae={VAE}", f"--pictures={pictures}", f"--out={out}", f"--size={SIZE[0]},{SIZE[1]}", *more]


def test_check_finds_what_is_wrong(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(command(pictures, out, "--shard=4", "--batch=1")) == 0
    assert main(command(pictures, out, "--check")) == 0
    assert "0 faults" in capsys.readouterr().out
    (folder,) = out.iterdir()
    first, *others = shards(folder)
    first.unlink()
    assert main(command(pictures, out, "--check")) == 1
    assert "it has no latent" in capsys.readouterr().out
    assert main(command(pictures, out, "--batch=1")) == 0
    assert main(command(pictures, out, "--check")) == 0
    # Other values under the same keys.
    from safetensors.numpy import load_file, save_file

    for file in shards(folder):
        save_file({name: tensor + np.float16(0.5) for name, tensor in load_file(file).items()}, file)
    capsys.readouterr()
    assert main(command(pictures, out, "--check")) == 1
    assert "differs from the autoencoder's" in capsys.readouterr().out
    others[0].write_bytes(others[0].read_bytes()[:100])
    with pytest.raises(SystemExit):
        main(command(pictures, out, "--check"))
    assert "no safetensors file" in capsys.readouterr().err


@pytest.mark.long
def test_each_autoencoder_and_size_has_a_folder(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    main(command(pictures, out))
    assert len(LatentStore.open(str(out))) == COUNT
    main([*command(pictures, out)[:3], "--pixels=400"])
    assert len(list(out.iterdir())) == 2
    with pytest.raises(ConfigError, match="several autoencoders or sizes; name one of"):
        LatentStore.open(str(out))
    stores = [LatentStore(folder) for folder in out.iterdir()]
    assert sorted(len({store.size(key) for key in store}) > 1 for store in stores) == [False, True]
    with pytest.raises(ConfigError, match="make some with"):
        LatentStore.open(str(tmp_path))


def test_pictures_of_records(pictures: Path, vae: Autoencoder, tmp_path: Path) -> None:
    """Of JSONL, and of tars: a picture has the same key wherever its bytes are."""
    names = [path.relative_to(pictures) for path in sorted(pictures.rglob("[01]*.png"))]
    lines = [json.dumps({"image": str(name), "caption": "noise"}) for name in names]
    (pictures.parent / "data.jsonl").write_text("\n".join([*lines, "no JSON"]))
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        for number, name in enumerate(names):
            for suffix, data in (("png", (pictures / name).read_bytes()), ("txt", b"noise")):
                info = tarfile.TarInfo(f"{number:04d}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    common = command(pictures, tmp_path / "out")
    common = [flag for flag in common if not flag.startswith("--pictures")]
    assert main([*common, f"--data={pictures.parent / 'data.jsonl'}", f"--media={pictures}"]) == 0
    (folder,) = (tmp_path / "out").iterdir()
    assert len(LatentStore(folder)) == COUNT
    assert main([*common, "--kind=webdataset", f"--data={tmp_path / 'data.tar'}", "--check"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size=9,12"], "multiples of 4 (--block)"),
        (["--size=8"], "must be height and width"),
        (["--block=6"], "multiple of the autoencoder's factor, 4"),
        (["--size=0,8"], "multiples of 4"),
        (["--size=", "--pixels=15"], "must be 16 or more"),
        (["--pixels=400"], "decides the size"),
        (["--data=x.json"], "either --pictures=DIR or --data=FILE"),
        (["--dtype=int8"], "--dtype='int8'"),
        (["--tile=7"], "even number"),
        (["--pictures=/nowhere"], "is no folder"),
    ],
)
def test_wrong_flags_are_one_line(
    flags: list[str], message: str, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main([*command(pictures, tmp_path), *flags])
    assert error.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert sum(line.startswith("error:") for line in lines) == 1


def test_a_second_process_is_refused(pictures: Path, vae: Autoencoder, tmp_path: Path) -> None:
    import fcntl

    tmp_path.mkdir(exist_ok=True)
    with open(tmp_path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process"):
            maker(vae, tmp_path).make(Folder(str(pictures)))


@pytest.mark.long
def test_kill_9_in_the_middle(vae: Autoencoder, tmp_path: Path) -> None:
    """A process that is killed leaves whole files; the next run makes the rest, and all latents are right."""
    folder, out = tmp_path / "pictures", tmp_path / "out"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for number in range(400):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(folder / f"{number:03d}.png")
    words = [sys.executable, "-m", "mmjax.latents", *command(folder, out, "--shard=4", "--batch=2")]
    process = subprocess.Popen(words, env={**os.environ, "XLA_FLAGS": ""}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(out.glob("*/*.safetensors"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = len(LatentStore.open(str(out)))
    assert 0 < there < 400
    result = subprocess.run(words, env={**os.environ, "XLA_FLAGS": ""}, capture_output=True, text=True, check=True)
    assert f"{400 - there} latents made, {there} there before" in result.stdout
    assert main([*command(folder, out), "--check"]) == 0


def test_pictures_to_be_made_are_among_those_of_a_record() -> None:
    seen, moving, made = (Media(name=name, is_video=name == "moving") for name in ("seen", "moving", "made"))
    record = Record(turns=(("?", "!"),), images=(seen, moving), targets=(made,))
    assert pictures_of(record) == [seen, made]
