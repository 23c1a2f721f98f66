"""The stream of batches: the same whatever the workers, exact on resume, free of JAX, gone with its parent."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax.configurable import ConfigError
from mmjax.data import worker
from mmjax.data.config import DataConfig
from mmjax.data.loader import StepLoader, StepMaker, make_packer, make_source
from mmjax.data.spec import DataSpec
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import EncoderSpec, NoBatchError, StepBatch

SPECS = {"vision": EncoderSpec(patch=4, merge=2, buckets=((2, 64), (4, 64)))}


def loader(*, workers: int = 0, start_step: int = 0, steps: int = 5, **changes: object) -> StepLoader:
    config = DataConfig(workers=workers, sequence_length=112)
    task = DigitsConfig(turns=2, **changes)  # type: ignore[arg-type]
    tokenizer, source = (
        make_tokenizer(config.tokenizer, tuple(SPECS)),
        make_source(DataSpec(config, task=task), SPECS, seed=3, split="train"),
    )
    packer = make_packer(config, SPECS, source, tokenizer, global_batch=8, microbatches=2, cells=2)
    maker = StepMaker(source=source, packer=packer, global_batch=8)
    return StepLoader(maker, steps=steps, start_step=start_step, workers=workers, prefetch=config.prefetch)


def collect(stream: StepLoader) -> list[StepBatch]:
    with stream:
        return list(stream)


def assert_equal(got: list[StepBatch], wanted: list[StepBatch]) -> None:
    assert [b.step for b in got] == [b.step for b in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert (a.denominators, a.counts) == (b.denominators, b.counts)
        for x, y in zip(a.microbatches, b.microbatches, strict=True):
            assert x.bucket == y.bucket
            assert {m: set(arrays) for m, arrays in x.inputs.items()} == {m: set(a) for m, a in y.inputs.items()}
            for module, arrays in x.inputs.items():
                for name, array in arrays.items():
                    assert array.dtype == y.inputs[module][name].dtype
                    assert np.array_equal(array, y.inputs[module][name])


@pytest.fixture(scope="module")
def reference() -> list[StepBatch]:
    return collect(loader())


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_do_not_depend_on_workers(workers, reference):
    assert_equal(collect(loader(workers=workers)), reference)


def test_resume_gives_the_same_batches(reference):
    assert_equal(collect(loader(start_step=3)), reference[3:])
    assert_equal(collect(loader(start_step=3, workers=2)), reference[3:])
    assert collect(loader(start_step=5)) == []


def test_steps_and_batches_differ(reference):
    tokens = [m.inputs["llm"]["tokens"].tobytes() for b in reference for m in b.microbatches]
    assert len(set(tokens)) == 10
    assert [b.step for b in reference] == [0, 1, 2, 3, 4]
    assert {b.counts["samples"] for b in reference} == {8}


def test_impossible_shapes_fail_before_the_first_step():
    with pytest.raises(ConfigError, match=r"Data\.sequence_length"):
        loader(digits=(6, 6), scale=(2.0, 2.0))


@dataclass(frozen=True)
class Probe:
    """Stands in for the batch maker: says what the process that runs it has imported, and who it is."""

    most_bytes = 1

    def __call__(self, step: int) -> dict[str, object]:
        jax = [
            name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib") and sys.modules[name] is not None
        ]
        return {"jax": tuple(jax), "pid": os.getpid(), "step": step}


def test_workers_never_import_jax():
    import jax

    assert jax is not None  # the parent has it
    with StepLoader(Probe(), steps=4, workers=2) as stream:  # type: ignore[arg-type]
        batches: list[dict[str, object]] = list(stream)  # type: ignore[arg-type]
    assert [s["jax"] for s in batches] == [()] * 4
    assert [s["step"] for s in batches] == [0, 1, 2, 3]
    assert len({s["pid"] for s in batches}) == 2 and os.getpid() not in {s["pid"] for s in batches}


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_close_ends_the_workers():
    with StepLoader(Probe(), steps=50, workers=1) as stream:  # type: ignore[arg-type]
        pid = next(stream)["pid"]  # type: ignore[index]
        assert alive(pid)
    assert not alive(pid)
    stream.close()
    assert list(stream) == []


@dataclass
class Mortal:
    """Makes numbers in place of batches; a worker is killed in step 3, as often as `deaths` says."""

    folder: str
    deaths: int
    most_bytes = 100

    def __call__(self, step: int) -> int:
        if step == 3 and len(list(Path(self.folder).iterdir())) < self.deaths:
            (Path(self.folder) / f"{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return int(step)


def mortal_loader(folder: Path, deaths: int, reports: list[str]) -> StepLoader:
    make: Any = Mortal(str(folder), deaths)
    return StepLoader(make, steps=6, start_step=1, workers=2, report=reports.append)


@pytest.mark.long
def test_a_killed_worker_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr("mmjax.data.loader.has_room", lambda _: False)  # numbers are no batches
    reports: list[str] = []
    with mortal_loader(tmp_path, 1, reports) as stream:
        assert list(stream) == [1, 2, 3, 4, 5]
    (line,) = reports
    assert line.startswith("a data worker was ended by SIGKILL: the workers are started again, and make the same")


@pytest.mark.long
def test_workers_that_are_killed_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr("mmjax.data.loader.has_room", lambda _: False)
    reports: list[str] = []
    with mortal_loader(tmp_path, 9, reports) as stream, pytest.raises(NoBatchError) as raised:
        list(stream)  # a worker makes the next batches ahead
    line = r"a data worker was ended by SIGKILL, 3 times before the batch of step [234] was there; if memory has run ou"
    assert re.match(line, str(raised.value)) and len(reports) >= 2


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from mmjax.data.loader import StepLoader
from test_loader import Probe
if __name__ == "__main__":
    stream = StepLoader(Probe(), steps=10**6, workers=2)
    print(*(next(stream)["pid"] for _ in range(2)), flush=True)
    time.sleep(60)
"""


def _outlive() -> None:
    time.sleep(60)


@pytest.mark.parametrize("name", [worker.GRAIN_PROCESS, worker.POOL_PROCESS])
def test_workers_are_deaf_to_what_their_parent_answers(name: str) -> None:
    """From birth, before any line of Python's could make them so; they are ended all the same where Python does it."""
    worker.become_main_of_workers()
    process = multiprocessing.get_context("spawn").Process(target=_outlive, name=f"{name}-0", daemon=True)
    process.start()
    assert process.pid
    for _ in range(20):
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.02)
    assert process.is_alive()
    process.terminate()  # as Python does with daemons at its exit
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks processes up in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_workers_die_with_their_parent(how, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(Path(__file__).parent)))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(set(workers)) == 2 and all(map(alive, workers))
        if how == signal.SIGINT:
            os.killpg(parent.pid, how)  # as a terminal does
        else:
            parent.send_signal(how)
        deadline = time.monotonic() + 30
        while any(map(alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, workers))
        parent.kill()
