"""How `bench runtime` measures: on programs of known length, and the whole of it on one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from mmjax.benches import one_core, runtime
from mmjax.benches.rows import Row
from mmjax.mesh.spmd import Program
from mmjax.pipeline.graph import EdgeNode, StageGraph, StageNode
from mmjax.pipeline.ops import Op, step_ops
from mmjax.pipeline.walker import Walker

SLEEP = 0.02


def slow(x: jax.Array) -> jax.Array:
    """A program that takes `SLEEP` and then returns its argument, and gives the processor away meanwhile."""

    def wait(x: np.ndarray) -> np.ndarray:
        time.sleep(SLEEP)
        return x

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.fixture(scope="module")
def program() -> Program:
    aval = jax.ShapeDtypeStruct((4,), np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return Program("slow", slow, [aval], aval)


class Ops(Walker):
    """Runs one program for every F, B and unpack, copies at every move, and burns processor time at every pack."""

    def __init__(self, program: Program):
        self.program, self.travelling, self.out = program, {}, jax.device_put(np.zeros(4, np.float32), jax.devices()[0])
        self.handlers = dict.fromkeys(("F", "B", "prepare", "unpack"), self.call)
        self.handlers |= {"pack": self.pack, "move": self.move}

    def call(self, op: Op) -> None:
        self.out = self.program(self.out)

    def pack(self, op: Op) -> None:
        self.travelling[op.edge, op.microbatch, op.backward] = self.out
        start = time.thread_time()
        while time.thread_time() < start + SLEEP:
            pass

    def move(self, op: Op) -> None:
        key = (op.edge, op.microbatch, op.backward)
        self.travelling[key] = jax.device_put(self.travelling[key], jax.devices()[1])


@pytest.fixture
def ops() -> list[Op]:
    """A prepare and an F for both stages; a pack, a move and an unpack between them."""
    nodes = tuple(
        StageNode(name=f"llm.{i}", module="llm", index=i, ranks=(i,), backward=False, trainable=False) for i in (0, 1)
    )
    edge = EdgeNode(name="edge", src="llm.0", dst="llm.1", transport="async", gradient=False)
    return list(step_ops(StageGraph(stages=nodes, edges=(edge,)), 1))


def test_alone_every_program_is_waited_for_and_counted_by_kind(program, ops):
    walker = Ops(program)
    walker.walk(ops)
    seconds = runtime.alone_seconds(lambda: walker.walk(ops))
    assert set(seconds) == {"prepare", "F", "move", "unpack"}, "what runs no program is no op's compute"
    expected = {"prepare": 2 * SLEEP, "F": 2 * SLEEP, "unpack": SLEEP}
    for kind, least in expected.items():
        assert least <= seconds[kind]
    # The program before the move is waited for outside the move's own time.
    assert seconds["move"] < SLEEP


def test_host_time_is_of_the_thread_that_dispatches(program, ops):
    walker = Ops(program)
    walker.walk(ops)

    def step() -> None:
        walker.walk(ops)
        jax.block_until_ready(walker.out)

    seconds = runtime.host_seconds(step)
    assert set(seconds) <= set(runtime.HOST_PARTS)
    assert SLEEP <= seconds["walker and waiting"] < 3 * SLEEP, "the pack's own work; not what programs wait for"
    assert 0 < seconds["device_put of moves"] < SLEEP
    assert seconds["device_put of inputs"] == 0


def test_everything_is_put_back(program, ops):
    before = (Program.__call__, Walker.walk, jax.device_put, jax.make_array_from_single_device_arrays)

    def fail() -> None:
        raise RuntimeError("stop")

    for measure in (runtime.alone_seconds, runtime.host_seconds):
        with pytest.raises(RuntimeError, match="stop"):
            measure(fail)
    assert before == (Program.__call__, Walker.walk, jax.device_put, jax.make_array_from_single_device_arrays)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not bind processes to cores")
def test_another_process_runs_on_one_core_and_its_rows_come_back(monkeypatch, capfd):
    """The process of `again_on_one_core` says which cores it has."""
    code = (
        "import json, os, sys\n"
        "row = dict(bench=sys.argv[-3], case='', value=len(os.sched_getaffinity(0)), unit='', target=None, ok=True)\n"
        "print(json.dumps(row)); sys.exit(int(os.environ.get('STATUS', '1')))"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(one_core.subprocess, "Popen", lambda c, **k: popen([c[0], "-c", code, *c[3:]], **k))
    cores = os.sched_getaffinity(0)
    assert list(one_core.again_on_one_core("runtime", 3)) == [Row(bench="runtime", case="", value=1, unit="")]
    assert os.sched_getaffinity(0) == cores
    assert "core" in capfd.readouterr().err
    monkeypatch.setenv("STATUS", "2")
    with pytest.raises(SystemExit) as end:
        list(one_core.again_on_one_core("runtime", 3))
    assert end.value.code == 2


@pytest.mark.slow
def test_the_runtime_keeps_its_targets_from_any_directory(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "NPROC"))}
    environment["PYTHONPATH"] = str(Path(runtime.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "mmjax.bench", "runtime", "--json", "--rounds=5"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, done.stdout + done.stderr
    for case in runtime.CONFIGURATIONS:
        assert rows[f"{case}: step / compute of its ops"]["ok"]
        assert rows[f"{case}: share of boundary ops"]["value"] > 0
        parts = [rows[f"{case}: host time per op, {part}"]["value"] for part in runtime.HOST_PARTS]
        assert all(part > 0 for part in parts)
        whole = rows[f"{case}: host time per op"]["value"]
        assert sum(parts) == pytest.approx(whole, rel=0.3), "medians of parts and of their sum"
    assert "core" in done.stderr
    assert list(tmp_path.iterdir()) == []
