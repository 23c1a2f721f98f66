"""How `bench runtime` measures: on a machine whose times are known, and the whole of it on one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import one_core, runtime
from mmjax.bench.rows import Row
from mmjax.mesh.spmd import Program
from mmjax.pipeline.walker import Walker
from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode
from mmjax.schedule.ops import Op, step_ops

HOST, DEVICE, COPY, WORK = 1.0, 100.0, 10.0, 1000.0
"""Seconds that a program's call takes, the program itself, a copy (of the host too), and a pack's own work."""


class Machine:
    """A machine on which only what it is told takes time: a host that dispatches and one device that runs in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.host = self.device = 0.0
        monkeypatch.setattr(runtime.time, "thread_time", lambda: self.host)
        monkeypatch.setattr(jax, "block_until_ready", self.wait)
        monkeypatch.setattr(jax, "device_put", self.put)
        monkeypatch.setattr(Program, "__call__", lambda program, *args: self.run(DEVICE))

    def work(self, seconds: float) -> None:
        self.now, self.host = self.now + seconds, self.host + seconds

    def run(self, seconds: float) -> Result:
        self.work(HOST)
        self.device = max(self.device, self.now) + seconds
        return Result(self.device)

    def put(self, x: Result) -> Result:
        self.work(COPY)
        return self.run(COPY)

    def wait(self, results: Any) -> Any:
        for result in jax.tree.leaves(results):
            self.now = max(self.now, result.ready)
        return results


@dataclass(frozen=True)
class Result:
    """Something that is there at a time."""

    ready: float


class Ops(Walker):
    """Runs a program for every prepare, F and unpack; a pack is work without one, a move copies and runs one."""

    def __init__(self, machine: Machine):
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        aval = jax.ShapeDtypeStruct((), np.float32, sharding=one)
        self.program, self.machine, self.in_transit = Program("some", lambda x: x, [aval], aval), machine, {}
        self.out = Result(0.0)
        self.handlers = dict.fromkeys(("F", "prepare", "unpack"), self.call)
        self.handlers |= {"pack": self.pack, "move": self.move}
        nodes = tuple(
            StageNode(name=f"llm.{i}", module="llm", index=i, ranks=(i,), backward=False, trainable=False)
            for i in (0, 1)
        )
        edge = EdgeNode(name="edge", src="llm.0", dst="llm.1", kind="async", gradient=False)
        self.ops = list(step_ops(StageGraph(stages=nodes, edges=(edge,)), 1))

    def call(self, op: Op) -> None:
        self.out = self.program(self.out)

    def pack(self, op: Op) -> None:
        self.machine.work(WORK)
        self.in_transit[op.edge, op.microbatch, op.backward] = self.machine.run(DEVICE)

    def move(self, op: Op) -> None:
        key = (op.edge, op.microbatch, op.backward)
        self.in_transit[key] = self.program(jax.device_put(self.in_transit[key]))

    def step(self) -> None:
        self.out = jax.device_put(self.out)  # an input, which nobody waits for
        self.walk(self.ops)
        jax.block_until_ready(self.out)


def test_alone_a_program_starts_when_its_arguments_are_ready_and_is_waited_for(monkeypatch):
    machine = Machine(monkeypatch)
    walker = Ops(machine)
    kinds = [op.kind for op in walker.ops]
    assert sorted(kinds) == ["F", "F", "move", "pack", "prepare", "prepare", "unpack"]
    alone = HOST + DEVICE
    move = COPY + HOST + COPY + alone
    expected = {"prepare": 2 * alone, "F": 2 * alone, "unpack": alone, "move": move}
    # What runs no program, as this pack, is no op's compute.
    assert runtime.alone_seconds(walker.step, lambda: machine.now) == expected


def test_alone_may_be_counted_in_processor_time(monkeypatch):
    machine = Machine(monkeypatch)
    seconds = runtime.alone_seconds(Ops(machine).step, lambda: machine.host)
    assert seconds == {"prepare": 2 * HOST, "F": 2 * HOST, "unpack": HOST, "move": COPY + HOST + HOST}


def test_host_time_is_of_the_thread_that_dispatches_and_counts_once(monkeypatch):
    walker = Ops(Machine(monkeypatch))
    assert runtime.host_seconds(walker.step) == {
        "program calls": 6 * HOST,
        "copies of inputs": COPY + HOST,
        "copies of moves": COPY + HOST,
        "waiting": 0.0,
        "frees": 0.0,
        "own": WORK + HOST,
    }


def test_the_clock_and_frees_are_taken_apart(monkeypatch):
    """On a machine whose clock takes a second, and where the last reference to a program's argument takes ten."""
    machine = Machine(monkeypatch)

    class Argument:
        def __del__(self) -> None:
            machine.work(10.0)

    def thread_time() -> float:
        machine.work(0.5)
        machine.work(0.5)
        return machine.host

    monkeypatch.setattr(runtime.time, "thread_time", thread_time)
    walker = Ops(machine)
    program = walker.program
    monkeypatch.setattr(Program, "__call__", lambda program, *args: machine.work(HOST))

    def step() -> None:
        for _ in range(3):
            program(Argument())
        machine.work(WORK)

    seconds = runtime.host_seconds(step)
    assert seconds[runtime.CALLS] == pytest.approx(3 * HOST)
    assert seconds[runtime.FREES] == pytest.approx(30.0)
    assert seconds[runtime.OWN] == pytest.approx(WORK, rel=1e-4)


def test_everything_is_put_back():
    before = (Program.__call__, Walker.walk, jax.device_put, jax.make_array_from_single_device_arrays)

    def fail() -> None:
        raise RuntimeError("stop")

    for measure in (runtime.alone_seconds, runtime.host_seconds):
        with pytest.raises(RuntimeError, match="stop"):
            measure(fail)
    assert before == (Program.__call__, Walker.walk, jax.device_put, jax.make_array_from_single_device_arrays)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not bind processes to cores")
def test_another_process_runs_on_one_core_and_its_rows_come_back(monkeypatch, capfd):
    """The process of `run_on_one_core` says which cores it has."""
    code = (
        "import json, os, sys\n"
        "cores = len(os.sched_getaffinity(0))\n"
        "row = dict(bench=sys.argv[-3], case='', value=cores, unit='', target=None, ok=True, bound=None)\n"
        "print(json.dumps(row)); sys.exit(int(os.environ.get('STATUS', '1')))"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(one_core.subprocess, "Popen", lambda c, **k: popen([c[0], "-c", code, *c[3:]], **k))
    cores = os.sched_getaffinity(0)
    assert list(one_core.run_on_one_core("runtime", 3)) == [Row(bench="runtime", case="", value=1, unit="")]
    assert os.sched_getaffinity(0) == cores
    assert "core" in capfd.readouterr().err
    monkeypatch.setenv("STATUS", "2")
    with pytest.raises(SystemExit) as end:
        list(one_core.run_on_one_core("runtime", 3))
    assert end.value.code == 2


@pytest.mark.slow
def test_the_runtime_is_measured_from_any_directory(tmp_path):
    """Checks the rows and the bytes, which do not depend on how busy the machine is."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "NPROC"))}
    environment["PYTHONPATH"] = str(Path(runtime.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "mmjax.bench", "runtime", "--json", "--rounds=3"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == int(not all(row["ok"] for row in rows.values())), done.stdout + done.stderr
    for case in runtime.CONFIGURATIONS:
        assert rows[f"{case}: step / compute of its ops"]["target"] == runtime.MOST_OVERHEAD
        held = [row["value"] for name, row in rows.items() if name.startswith(f"{case}: residuals of ")]
        assert held == [0] * 6
        assert rows[f"{case}: share of boundary ops"]["value"] > 0
        parts = [rows[f"{case}: host time per op, {part}"]["value"] for part in runtime.HOST_PARTS]
        assert all(part > 0 for part in parts)
        assert rows[f"{case}: host time per op, own"]["target"] == runtime.MOST_HOST
        whole = rows[f"{case}: host time per op"]["value"]
        assert sum(parts) == pytest.approx(whole, rel=0.3), "medians of parts and of their sum"
    assert "core" in done.stderr
    assert list(tmp_path.iterdir()) == []
