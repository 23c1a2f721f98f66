"""The processes of a run: who they are, how they hear of one another; and boundaries between two real ones."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mmjax.configurable import ConfigError
from mmjax.flags import FOLLOWED, STUCK
from mmjax.launch import free_port
from mmjax.mesh import lifeline
from mmjax.mesh.lifeline import Lifeline
from mmjax.mesh.process_group import Processes, find_processes

REPOSITORY = Path(__file__).parents[2]

PROCESS = """
import itertools, math, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
me = int(sys.argv[1])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, me)
import numpy as np
from mmjax.mesh.boundary import Boundary
from mmjax.mesh.layout import Layout
from mmjax.mesh.world import World

world = World(jax.devices())
world.warm_up()
PAIRS = [  # ranks 0-3 are devices of process 0, 4-7 of process 1
    (Layout(dp=4), Layout(dp=2, tp=2, rank_offset=4)),
    (Layout(dp=2, tp=2), Layout(tp=3, rank_offset=4)),
    (Layout(dp=2), Layout(dp=3, rank_offset=4)),
    (Layout(dp=2, tp=2), Layout(dp=2, cp=2, rank_offset=4)),
    (Layout(dp=2), Layout(tp=2, rank_offset=2)),  # nothing to do for process 1
    (Layout(dp=2, rank_offset=2), Layout(tp=3, rank_offset=3)),  # the target in both, one rank on both sides
]

def here(submesh):
    return [device for device in submesh.mesh.devices.flat if device.process_index == me]


for one, other in PAIRS:
    for route, transport in itertools.product(("leader", "sliced"), ("collective", "device_put")):
        rows = math.lcm(one.dp, other.dp) * 5
        dense = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)
        aval = jax.ShapeDtypeStruct(dense.shape, dense.dtype)
        boundary = Boundary("a->b", world.submesh(one, 0), world.submesh(other, 0), aval, world, transport, route)
        assert boundary.kind == {"collective": "rendezvous", "device_put": "async"}[transport]
        for transfer in (boundary.forward, boundary.backward):
            if not (here(transfer.source) or here(transfer.target)):
                assert not transfer.mover.programs(), "compiled for nobody"
                continue
            packed = ()
            if here(transfer.source):
                there = transfer.source_aval.sharding
                packed = transfer.pack(jax.make_array_from_callback(dense.shape, there, lambda i: dense[i]))
            moved = transfer.move(packed)
            if here(transfer.target):
                arrived = {shard.device: shard.data for shard in transfer.unpack(moved).addressable_shards}
                assert arrived.keys() == set(here(transfer.target))
                for i, device in enumerate(transfer.target.mesh.devices.flat):
                    per = rows // transfer.target.layout.dp
                    start = i // transfer.target.layout.replica_size * per
                    if device in arrived:
                        np.testing.assert_array_equal(np.asarray(arrived[device]), dense[start : start + per])
print("every element right")
"""


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
URI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}
OWN = {"MMJAX_COORDINATOR": "a:1", "MMJAX_NUM_PROCESSES": "3", "MMJAX_PROCESS_ID": "0"}


def given(coordinator: str = "", count: str = "", index: str = "") -> dict[str, str]:
    return {"coordinator": coordinator, "num_processes": count, "process_id": index}


@pytest.mark.parametrize(
    ("flags", "environ", "found"),
    [
        ({}, {}, None),
        (given("h:9", "2", "1"), {}, Processes(coordinator="h:9", count=2, index=1)),
        ({}, OWN, Processes(coordinator="a:1", count=3, index=0)),
        (given(index="2"), OWN, Processes(coordinator="a:1", count=3, index=2)),
        (given("h:9", "1", "0"), {}, None),
        ({}, SLURM, Processes(coordinator="", count=4, index=3, launcher="slurm")),
        (given("h:9"), SLURM, Processes(coordinator="h:9", count=4, index=3, launcher="slurm")),
        ({}, SLURM | OWN, Processes(coordinator="a:1", count=3, index=0)),
        ({}, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({}, {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # sbatch without srun
        ({}, OPEN_MPI | URI, Processes(coordinator="", count=4, index=2, launcher="ompi")),
        (given("h:9"), OPEN_MPI, Processes(coordinator="h:9", count=4, index=2, launcher="ompi")),
    ],
)
def test_who_the_processes_are(flags, environ, found):
    assert find_processes(flags, environ) == found


@pytest.mark.parametrize(
    ("flags", "environ", "error"),
    [
        (given("h:9", "2"), {}, "--process_id is missing: give which of them this is, from 0, here or as MMJAX_PROC"),
        (given("h:9", index="1"), {}, "--num_processes is missing: give the number of processes, such as 2, here or"),
        (given(count="2", index="1"), {}, "--coordinator is missing: give host:port of process 0, such as localhost"),
        (given("h", "2", "1"), {}, "--coordinator='h': must be host:port of process 0, such as localhost:9876"),
        (given("h:9", "two", "1"), {}, "--num_processes='two': must be an integer, such as 2"),
        (given("h:9", "2", "2"), {}, "--process_id=2: must be 0 or more and below --num_processes=2"),
        (given("h:9", "0", "0"), {}, "--num_processes=0: must be 1 or more, such as 2"),
        ({}, OWN | {"MMJAX_PROCESS_ID": "3"}, "MMJAX_PROCESS_ID=3: must be 0 or more and below MMJAX_NUM_PROCESSES=3"),
        ({}, OPEN_MPI, "--coordinator is missing: give host:port of process 0"),  # Open MPI 5 names no address
    ],
)
def test_parts_that_do_not_fit(flags, environ, error):
    with pytest.raises(ConfigError) as raised:
        find_processes(flags, environ)
    assert str(raised.value).startswith(error) and "\n" not in str(raised.value)


class Board:
    """Keys and values of processes that are threads here."""

    def __init__(self) -> None:
        self.values: dict[str, queue.Queue[str]] = {}

    def _queue(self, key: str) -> queue.Queue[str]:
        return self.values.setdefault(key, queue.Queue())

    def set(self, key: str, value: str) -> None:
        self._queue(key).put(value)

    def get(self, key: str) -> str:
        value = self._queue(key).get(timeout=20)
        self._queue(key).put(value)
        return value


@contextlib.contextmanager
def opened_lines():
    """Three processes' lifelines, and what each hears before it ends."""
    board, news = Board(), [queue.Queue() for _ in range(3)]
    opened: dict[int, Lifeline] = {}

    def heard(index: int, said: str, status: int) -> None:
        news[index].put(said if status == FOLLOWED else f"{said} ({status})")

    def start(index: int) -> None:
        opened[index] = Lifeline.open(board, "127.0.0.1", 3, index, end=lambda said, status: heard(index, said, status))

    threads = [threading.Thread(target=start, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    try:
        yield [opened[index] for index in range(3)], news
    finally:
        for line in opened.values():
            line.close()


@pytest.fixture
def lines(monkeypatch):
    """`opened_lines` whose process 0 hardly waits for the others."""
    monkeypatch.setattr(lifeline, "PEER_EXIT", 0.1)
    with opened_lines() as opened:
        yield opened


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_the_others_hear_who_has_ended(lines, dead):
    connected, news = lines
    connected[dead].close()  # as the kernel does, whatever a process dies of
    for index in {0, 1, 2} - {dead}:
        assert news[index].get(timeout=10).startswith(f"process {dead} has ended, without a word")
    assert news[dead].empty()


def test_the_others_hear_why(lines):
    connected, news = lines
    connected[2].fail("disk\nfull")
    for index in (0, 1):
        assert news[index].get(timeout=10) == "process 2 has ended: disk full"


def test_the_others_hear_with_what_status_to_end(lines):
    connected, news = lines
    connected[1].fail("interrupted", 130)
    for index in (0, 2):
        assert news[index].get(timeout=10) == "process 1 has ended: interrupted (130)"


@pytest.mark.parametrize("silent", [0, 1])
def test_the_others_hear_who_is_silent(silent, monkeypatch):
    """A process that is stopped closes no connection. Who follows is told by process 0, or misses it itself."""
    monkeypatch.setattr(lifeline, "BEAT", 0.1)
    monkeypatch.setattr(lifeline, "PEER_EXIT", 30.0)
    with opened_lines() as (connected, news):
        connected[silent]._quiet.set()
        begin = time.monotonic()
        for index in (2, 1 - silent):
            news_there = news[index].get(timeout=20)
            assert news_there.startswith(f"process {silent} has not answered for 2 s: it is stopped, or its host")
            assert news_there.endswith(f"({STUCK})")
            if silent:  # else process 0, which lives here, would hear of it
                connected[index].close()
        assert time.monotonic() - begin < 20, "a silent process is not waited for"


def test_beats_keep_a_line_open(lines, monkeypatch):
    """A message may come after beats, and in the middle of one nothing is missed."""
    connected, news = lines
    for said in (b"h\nh\nh", b"\nh\nf1 3 process 1 is ", b"tired\n"):
        connected[1]._peers[0].sendall(said)
        time.sleep(0.05)
    assert news[0].get(timeout=10) == "process 1 is tired"


def test_process_0_waits_longer_than_the_others_clean_up():
    """JAX ends a process with a native abort where process 0, which has its coordination service, is gone."""
    assert lifeline.PEER_EXIT > lifeline._CLEAN_UP


def test_process_0_ends_last(lines, monkeypatch):
    connected, _ = lines
    monkeypatch.setattr(lifeline, "PEER_EXIT", 30.0)
    failing = threading.Thread(target=connected[0].fail, args=("full",))
    failing.start()
    connected[1].close()
    failing.join(0.1)
    assert failing.is_alive()
    connected[2].close()
    failing.join(10)
    assert not failing.is_alive()


def test_process_0_waits_for_who_has_failed(lines, monkeypatch):
    connected, news = lines
    monkeypatch.setattr(lifeline, "PEER_EXIT", 30.0)
    connected[1].fail("full")
    assert news[2].get(timeout=10) == "process 1 has ended: full" and news[0].empty()
    connected[2].close()
    connected[1].close()
    assert news[0].get(timeout=10) == "process 1 has ended: full"


def test_process_0_ends_last_when_it_is_interrupted_while_it_follows(lines, monkeypatch):
    connected, news = lines
    monkeypatch.setattr(lifeline, "PEER_EXIT", 30.0)
    connected[1].fail("interrupted", 130)
    assert news[2].get(timeout=10) == "process 1 has ended: interrupted (130)"
    interrupted = threading.Thread(target=connected[0].fail, args=("interrupted", 130))
    interrupted.start()
    connected[1].close()
    interrupted.join(0.1)
    assert interrupted.is_alive() and news[0].empty()
    connected[2].close()
    interrupted.join(10)
    assert not interrupted.is_alive()


def test_who_parts_is_not_missed(lines):
    connected, news = lines
    connected[1].announce_leave()
    connected[1].close()
    connected[2].fail("no reason")
    assert news[0].get(timeout=10) == "process 2 has ended: no reason"
    assert news[1].empty()


def test_strangers_at_the_door_delay_nobody(monkeypatch):
    """Whatever somebody else says, or how slowly, the processes meet; who has not the token is sent away."""
    monkeypatch.setattr(lifeline, "KNOCK", 1.0)
    board, opened = Board(), dict[int, Lifeline]()

    def start(index: int) -> None:
        opened[index] = Lifeline.open(board, "127.0.0.1", 3, index, end=lambda said, status: None)

    threads = [threading.Thread(target=start, args=(index,), daemon=True) for index in range(3)]
    threads[0].start()
    token, port, _ = board.get("lifeline").split()
    knock = lambda said: _said(int(port), said)  # noqa: E731
    sent_away = [
        knock(said)
        for said in (
            b"\xff\xfe\xfd 1\n", "tökén 1\n".encode(), f"{token} \u0661\n".encode(), b"x" * 100_000, b"\n", b" \n",
            *(f"{token}{number}\n".encode() for number in ("", " ", " 0", " 3", " -1", " 1 2", " one", " 9" * 400)),
        )
    ]  # fmt: skip
    silent = [knock(b"") for _ in range(100)]  # more than are listened to at a time
    dripping, drips = knock(b""), threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not drips.wait(0.05):
                dripping.sendall(b"a")

    threads.append(threading.Thread(target=drip, daemon=True))
    threads[-1].start()
    begin = time.monotonic()
    first = knock(f"{token} 1\n".encode())  # itself, and once more
    twice = knock(f"{token} 1\n".encode())
    twice.settimeout(10)
    assert not twice.recv(1)
    threads[2].start()
    for thread in (threads[0], threads[2]):
        thread.join(20)
    assert set(opened) == {0, 2} and time.monotonic() - begin < 8
    assert not threads[0].is_alive()
    for connection in (*sent_away, *silent, dripping):
        connection.settimeout(10)
        with contextlib.suppress(ConnectionError):
            assert not connection.recv(1)
    drips.set()
    for line in opened.values():
        line.close()
    for connection in (*sent_away, *silent, dripping, first, twice):
        connection.close()


def _said(port: int, said: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    with contextlib.suppress(ConnectionError):
        connection.sendall(said)
    return connection


def test_who_is_not_there_in_time_is_named(monkeypatch):
    monkeypatch.setattr(lifeline, "MEETING", 0.2)
    with pytest.raises(TimeoutError, match=r"process 1, 2 did not connect within 0 s"):
        Lifeline.open(Board(), "127.0.0.1", 3, 0)


@pytest.mark.parametrize("said", [b"f\xff\n", b"f1\n", b"fx 1 y\n", b"\xff\n", b"f" * 5000 + b"\n"], ids=len)
def test_news_that_are_none_are_an_end_without_a_word(lines, said):
    connected, news = lines
    connected[1]._peers[0].sendall(said)
    for index in (0, 2):
        assert news[index].get(timeout=10).startswith("process 1 has ended, without a word")


STOPPED = """
import os, time
from mmjax.mesh.process_group import find_processes
from mmjax.mesh.processes import join
join(find_processes({}))
print("met", os.getpid(), flush=True)
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named(stopped, tmp_path, monkeypatch):
    """In one line by every other, with a status that says so; the launcher ends the stopped one."""
    (tmp_path / "the_child.py").write_text(STOPPED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    command = [sys.executable, "-m", "mmjax.launch", "-n", "3", "-m", "the_child"]
    launcher = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stdout
    met = dict(launcher.stdout.readline().split(" met ") for _ in range(3))
    os.kill(int(met[f"[{stopped}]"]), signal.SIGSTOP)
    begin = time.monotonic()
    _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == STUCK and time.monotonic() - begin < 60, errors
    said = [line for line in errors.splitlines() if line.startswith("[") and "terminating" not in line]
    news = f"error: process {stopped} has not answered for 20 s: it is stopped, or its host has vanished"
    assert said and all(news in line for line in said), errors
    assert {line[:3] for line in said} == {f"[{other}]" for other in range(3) if other != stopped}, errors


LATE = """
import sys, time
from mmjax.mesh.config import WorldConfig
from mmjax.mesh.layout import Layout
from mmjax.mesh.process_group import find_processes
from mmjax.mesh.processes import join
from mmjax.mesh.world import World
processes = find_processes({})
join(processes)
time.sleep(40 * processes.index)
print(World.create(WorldConfig(), [Layout(dp=2)]).processes, "processes", flush=True)
"""


@pytest.mark.slow
def test_a_process_may_come_later_than_a_collective_waits(tmp_path, monkeypatch):
    """Gloo waits for 30 s."""
    (tmp_path / "the_child.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    command = [sys.executable, "-m", "mmjax.launch", "-n", "2", "--devices_per_process=1", "-m", "the_child"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 2 processes", "[1] 2 processes"]


@pytest.mark.long
def test_pieces_cross_between_processes():
    port, environment = free_port(), {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = ["timeout", "-k", "5", "240", sys.executable, "-c", PROCESS]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(port)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for i in range(2)
    ]
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0, output
        assert "every element right" in output
