"""configs/llava_json.gin on the data of `make sample-data`: equal in every layout, trained on, whatever is broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trial_runs import REPOSITORY

from mmjax import sample_data
from mmjax.assembly import assembly, samples
from mmjax.assembly.buckets import build_packer
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.loader import StepMaker
from mmjax.data.service.identity import difference, identity
from mmjax.data.tokenizer import make_tokenizer
from mmjax.eval.folder import for_folder
from mmjax.eval.samples import held_out
from mmjax.recipe import Recipe
from mmjax.train import __main__ as train

FILE = REPOSITORY / "configs" / "llava_json.gin"
SAMPLES = 48
KINDS = ("llava", "webdataset", "array_record", "parquet")
SMALL = (
    *("Train.global_batch=8", "Train.microbatches=2", "Train.eval_samples=4", "Train.eval_every=0"),
    *("Data.workers=0", "Checkpoint.every=2", "Checkpoint.keep=9", "digits/Source.held_out=8", "Train.dtype=float32"),
    "Optimizer.schedule='constant'",  # no matter how many steps there are
    *("vision/ViT.layers=1", "vision/ViT.width=16", "vision/ViT.mlp=16", "Optimizer.warmup=1"),
    *("llm/Decoder.layers=2", "llm/Decoder.width=16", "llm/Decoder.mlp=16"),
)
ONE_DEVICE = ("llm/Layout.tp=1", "llm/Layout.pp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0")
PATHS = {
    "llava": "llava/data.json",
    "webdataset": "webdataset/{00000..00000}.tar",
    "array_record": "data.array_record",
    "parquet": "data.parquet",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    assert sample_data.main([f"--out={tmp_path / 'digits'}", f"--samples={SAMPLES}"]) == 0
    return tmp_path


def bindings(data: Path, kind: str = "llava") -> list[str]:
    source = [f"digits/Source.kind='{kind}'", f"digits/Source.path='{data / 'digits' / PATHS[kind]}'"]
    return [*source, f"Data.cache='{data / 'cache'}'"]


def config_of(data: Path, kind: str, *more: str) -> Recipe:
    return load_config([FILE], [*bindings(data, kind), *SMALL, *more])


@pytest.mark.long
def test_a_folder_is_read_as_the_run_reads_its_source(data: Path) -> None:
    """Template, system prompt, size and normalisation are the run's, and so is whatever the model is given."""
    own = ("template='vicuna'", "system='Be brief.'", "resize='fixed'", "size=(16, 32)", "mean=(0.3,)", "std=(0.4,)")
    own += ("max_patches=120",)
    more = [f"digits/Source.{binding}" for binding in own]
    config = config_of(data, "llava", *more, "digits/Source.held_out=0")
    records = json.loads((data / "digits" / PATHS["llava"]).read_text())[:5]
    folder = Path(shutil.copytree(data / "digits" / "llava", data / "folder"))
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    read, seen = for_folder(config, str(folder)), 0
    for mine, theirs in zip(held_out(read, 99), held_out(config, 5), strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist() and mine.prompt == theirs.prompt
        assert np.array_equal(mine.loss_weights, theirs.loss_weights) and mine.answer == theirs.answer
        assert mine.media.keys() == theirs.media.keys()
        for one, other in zip(mine.media.get("vision", ()), theirs.media.get("vision", ()), strict=True):
            seen += 1
            assert np.array_equal(one, other) and one.shape == (16, 32, 1) and one.min() < 0

    assert seen >= 3

    def two(*more: str) -> Recipe:
        other = (f"other/Source.path='{data / 'digits' / PATHS['llava']}'", *(f"other/Source.{b}" for b in own))
        return config_of(data, "llava", *(f"digits/Source.{b}" for b in own), *other, *more)

    shares = "Data.sources={'digits': 0.5, 'other': 0.5}"
    assert for_folder(two(shares), str(folder)).data.sources == read.data.sources
    asked = two(shares, "other/Source.mean=(0.1,)", "other/Source.template='plain'")
    fix = "differ in mean, template; name the one whose samples are like those of --data"
    with pytest.raises(ConfigError, match=f"^--source is missing: the run's sources digits, other {fix}"):
        for_folder(asked, str(folder))
    assert for_folder(asked, str(folder), "digits").data.sources == read.data.sources
    assert for_folder(asked, str(folder), "other").data.sources["folder"].mean == (0.1,)
    with pytest.raises(ConfigError, match=r"^--source='x': is none of the run's sources; use one of digits, other"):
        for_folder(asked, str(folder), "x")


def test_the_same_batches_in_every_layout(data: Path) -> None:
    made = {}
    for kind in KINDS:
        config = config_of(data, kind)
        packer = build_packer(config, make_tokenizer("", ("vision",)))
        maker = StepMaker(source=open_source(config, split="train"), packer=packer, global_batch=8)
        made[kind] = [maker(step) for step in (0, 1, 9)]
    for kind in KINDS:
        for batch, wanted in zip(made[kind], made["llava"], strict=True):
            assert (batch.counts, batch.denominators) == (wanted.counts, wanted.denominators)
            for part, other in zip(batch.microbatches, wanted.microbatches, strict=True):
                for module, arrays in other.inputs.items():
                    for name, array in arrays.items():
                        np.testing.assert_array_equal(part.inputs[module][name], array)


def test_processes_and_servers_have_to_find_the_same_samples(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(data, "llava")
    source = open_source(config, split="train")
    monkeypatch.setattr(samples, "gather_texts", lambda own: [own, own])
    samples.require_same_data(config, source)
    spec = assembly.planned_batch_spec(config)
    again = BatchSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec and identity(again, again.maker().source) == identity(spec, source)
    # Another copy of the data is as good; other settings, or a record less, are not.
    (data / "copy").mkdir()
    shutil.copytree(data / "digits", data / "copy" / "digits")
    copied = config_of(data, "llava", f"digits/Source.path='{data / 'copy' / 'digits' / PATHS['llava']}'")
    other = assembly.planned_batch_spec(copied)
    assert other != spec and identity(other, other.maker().source) == identity(spec, source)
    other = assembly.planned_batch_spec(config_of(data, "llava", "digits/Source.template='chatml'"))
    told = difference(identity(spec, source), identity(other, other.maker().source))
    assert told.startswith("digits/Source.template is 'vicuna' here and 'chatml' there")
    next((data / "copy" / "digits" / "llava" / "images").iterdir()).unlink()
    lacking = open_source(copied, split="train")
    monkeypatch.setattr(samples, "gather_texts", lambda own: ["another", own])
    with pytest.raises(ConfigError, match=r"Data\.sources=.*: process 1 finds other samples than process 0"):
        samples.require_same_data(copied, lacking)


def break_some(data: Path) -> None:
    """Three images: one that is missing, one whose header says nothing, one that only decoding finds truncated."""
    folder = data / "digits" / "llava"
    rows = json.loads((folder / "data.json").read_text())
    # None of the records that are held out, which are every sixth.
    names = [row["image"] for number, row in enumerate(rows) if isinstance(row.get("image"), str) and number % 6]
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes(b"no image")
    (folder / names[2]).write_bytes((folder / names[2]).read_bytes()[: (folder / names[2]).stat().st_size * 2 // 3])


def flags(data: Path, run: str, *more: str) -> list[str]:
    return [f"--gin_file={FILE}", f"--run_dir={data / run}", *(f"--gin.{b}" for b in (*bindings(data), *SMALL, *more))]


def skipped(data: Path, run: str) -> dict[str, str]:
    rows = [json.loads(line) for line in (data / run / "skipped.jsonl").read_text().splitlines()]
    assert {row["source"] for row in rows} == {"digits"} and len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row["reason"] for row in rows}


def losses(data: Path, run: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (data / run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_trains_whatever_is_broken_and_says_so(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    break_some(data)
    # Six steps are more than an epoch of 38, so every sample is met.
    assert train.main(flags(data, "run", *ONE_DEVICE, "Train.steps=6", "Train.eval_samples=0")) == 0
    said = capfd.readouterr().out
    reasons = skipped(data, "run")
    assert f"3 samples of the data cannot be used: see {data / 'run'}/skipped.jsonl" in said and len(reasons) == 3
    assert sum("does not exist" in reason for reason in reasons.values()) == 1
    assert sum("no JPEG" in reason for reason in reasons.values()) == 1
    found = losses(data, "run")
    assert len(found) == 6 and found[-1] < 0.9 * found[0]


def test_held_out_samples_that_are_broken_are_not_asked(data: Path) -> None:
    config = config_of(data, "llava")
    whole = held_out(config, 8)
    assert len(whole) == 8
    folder = data / "digits" / "llava" / "images"
    held = {f"{n * SAMPLES // 8:06}" for n in range(8)}
    for path in folder.iterdir():
        if path.name[:6] in held:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    kept = held_out(config, 8)
    assert [s.question for s in kept] == [s.question for s in whole if not s.media] and 0 < len(kept) < 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_processes_and_workers_and_a_pause_change_nothing(data: Path, monkeypatch) -> None:
    """The file's own layout: processes that hear, see and speak; the second run stops and goes on as one process."""
    break_some(data)
    for name in ("JAX_NUM_CPU_DEVICES", "NPROC"):
        monkeypatch.delenv(name, raising=False)

    def run(name: str, *more: str, processes: int = 1) -> None:
        launch = ["-m", "mmjax.launch", "-n", str(processes)] if processes > 1 else []
        command = [sys.executable, *launch, "-m", "mmjax.train", *flags(data, name, *more)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr

    run("one", "Train.steps=8")
    assert (data / "one" / "predictions.png").stat().st_size
    run("two", "Train.steps=8", "Data.workers=1", processes=2)
    run("three", "Train.steps=4", "Data.workers=2", processes=4)
    run("three", "Train.steps=8", "Data.workers=1")
    wanted = losses(data, "one")
    assert len(wanted) == 8 and wanted[-1] < 0.9 * wanted[0]
    np.testing.assert_allclose(losses(data, "two"), wanted, rtol=1e-5)
    np.testing.assert_allclose(losses(data, "three")[4:], wanted[4:], rtol=1e-5)
    assert skipped(data, "one") == skipped(data, "two") == skipped(data, "three")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_only_a_server_finds_broken_is_named_too(data: Path) -> None:
    """The trainer opens the first sample alone; the server decodes the others."""
    break_some(data)
    few = ("Train.steps=6", "Train.eval_samples=0")
    given = [flag for flag in flags(data, "served", *ONE_DEVICE, *few) if not flag.startswith("--run_dir")]
    serve = [sys.executable, "-m", "mmjax.serve", *given, "--port=0", "--workers=1"]
    with subprocess.Popen(serve, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            address = next(line.split()[-1] for line in server.stdout if line.startswith("serving on "))
            assert train.main(flags(data, "served", *ONE_DEVICE, *few, f"Data.servers={address}")) == 0
        finally:
            server.terminate()
    rows = [json.loads(line) for line in (data / "served" / "metrics.jsonl").read_text().splitlines()]
    assert {row["data_origin"] for row in rows} == {address}
    reasons = skipped(data, "served")
    assert len(reasons) == 3 and sum("truncated" in reason for reason in reasons.values()) == 1
