"""`python -m mmjax.serve`: what it answers, whom it refuses, and training through servers that come and go."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_servers import BentServer
from pyarrow import flight
from trial_runs import REPOSITORY, STEPS, Command, assert_same_leaves, leaves, train_flags, write_tiny

from mmjax.assembly.assembly import planned_batch_spec
from mmjax.config import load_config
from mmjax.data.batch_shape import BatchShape
from mmjax.data.process_rows import ProcessRows
from mmjax.data.service import protocol
from mmjax.data.service.client import Server, ServerAway, ServerError, ServerRefuses, Wanted
from mmjax.data.service.identity import digest, identity
from mmjax.data.service.protocol import REQUEST_LIMIT, Request
from mmjax.flags import FOLLOWED
from mmjax.train.metrics import read_metrics

PATIENCE = 400
"""Seconds for what takes few on an idle machine."""
TOKEN = "a-token-of-these-tests"


@pytest.fixture
def started() -> Iterator[list[Command]]:
    """Commands that end with the test."""
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.stop()


def port_of(command: Command) -> int:
    """Where a server listens, once it does."""
    command.wait_for(lambda: "serving on" in command.text(), PATIENCE)
    found = re.search(r"serving on grpc(?:\+tls)?://127\.0\.0\.1:(\d+)\n", command.text())
    assert found, command.text()
    return int(found[1])


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wanted_of(gin_file: Path) -> Wanted:
    """The request that a trainer with this configuration sends to servers."""
    spec = planned_batch_spec(load_config([gin_file]))
    described = identity(spec, spec.maker().source)
    shape = BatchShape(spec.packer, spec.global_batch)
    return Wanted(described=described, digest=digest(described), seed=spec.seed, shape=shape)


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.microbatches, other.microbatches, strict=True)
    return all(np.array_equal(a.inputs[m][k], b.inputs[m][k]) for a, b in pairs for m in b.inputs for k in b.inputs[m])


@pytest.mark.long
def test_a_server_serves_its_configuration_alone_to_those_with_the_token(tmp_path, started):
    """One process for all of it: its start is what costs."""
    gin_file, secret = write_tiny(tmp_path), tmp_path / "token"
    secret.write_text(TOKEN + "\n")
    secret.chmod(0o600)
    flags = [f"--gin_file={gin_file}", "--port=0", "--workers=1", f"--token_file={secret}"]
    command = Command("serve", flags, tmp_path / "log")
    started.append(command)
    address, wanted = f"grpc://127.0.0.1:{port_of(command)}", wanted_of(gin_file)
    spec = planned_batch_spec(load_config([gin_file]))
    # Its own batches, without JAX.
    server = Server(address, wanted, TOKEN)
    server.probe()
    assert server.workers == 1
    assert same(server.fetch(7), spec.maker()(7))
    own = ProcessRows(cells={"vision": {"patches": (1,), "positions": (1,)}})
    part = Server(
        address, replace(wanted, process_rows=own, shape=BatchShape(spec.packer, spec.global_batch, own)), TOKEN
    )
    assert same(part.fetch(7), spec.maker(process_rows=own)(7))
    client = flight.FlightClient(address)
    call = flight.FlightCallOptions(timeout=20, headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    [answer] = client.do_action(flight.Action("health", b""), call)
    health = json.loads(answer.body.to_pybytes())
    assert (health["status"], health["jax"], health["served"], health["failed"]) == ("serving", False, 2, 0)
    # Neither it nor its workers have loaded JAX's library.
    assert len(command.members()) >= 2  # multiprocessing may have a tracker too
    assert not any("jaxlib" in Path(f"/proc/{member}/maps").read_text() for member in command.members())
    # Nobody without the token, whatever is asked for.
    for headers in ([], [(b"authorization", b"Bearer x")], [(b"authorization", TOKEN.encode())]):
        refused = flight.FlightCallOptions(timeout=20, headers=headers)
        for ask in (
            lambda call: list(client.do_action(flight.Action("health", b""), call)),
            lambda call: client.do_get(flight.Ticket(Request(identity="", seed=0, step=0).to_bytes()), call).read_all(),
            lambda call: list(client.list_flights(b"", call)),
            lambda call: list(client.list_actions(call)),
        ):
            with pytest.raises(flight.FlightUnauthenticatedError, match="the token is missing or wrong"):
                ask(refused)
    with pytest.raises(ServerRefuses, match=r"Data\.token_file or the environment's MMJAX_DATA_TOKEN"):
        Server(address, wanted).probe()
    # Nothing but requests for its batches.
    good = Request(identity=wanted.digest, seed=wanted.seed, step=1)
    for request, why in (
        (b"x" * (REQUEST_LIMIT + 1), f"{REQUEST_LIMIT + 1} bytes, where {REQUEST_LIMIT} are allowed"),
        (b"x" * (40 << 20), "bytes, where"),
        (b"{}", "no object of"),
        (replace(good, step=-1).to_bytes(), "step=-1 is not 0 or more"),
        (good.to_bytes().replace(b"null", b"[0]"), "is not null or cells by module and input"),
        (
            replace(good, shard={"llm": {"tokens": [[99, 100]]}}).to_bytes(),
            r"cells \[\[99, 100\]\] are not runs .* of 2",
        ),
        (replace(good, shard={"llm": {f"x{n}": [[0, 65536]] for n in range(3000)}}).to_bytes(), "llm has no input 'x"),
        (replace(good, seed=99).to_bytes(), "another configuration"),
        (replace(good, identity="other").to_bytes(), "another configuration"),
    ):
        with pytest.raises(flight.FlightServerError, match=why):
            client.do_get(flight.Ticket(request), call).read_all()
    for action in ("shutdown", "configuration" * 100):
        with pytest.raises(flight.FlightServerError, match="no action"):
            list(client.do_action(flight.Action(action, b""), call))
    with pytest.raises(flight.FlightServerError, match="no action"):
        list(client.do_action(flight.Action("health", b"x" * 1000), call))
    descriptor = flight.FlightDescriptor.for_path("etc", "passwd")
    with pytest.raises(NotImplementedError):
        client.get_flight_info(descriptor, call)
    with pytest.raises((NotImplementedError, flight.FlightError)):
        writer, _ = client.do_put(descriptor, protocol.SCHEMA, call)
        writer.close()
    assert same(server.fetch(8), spec.maker()(8))
    # A worker that dies is started again, and its step is made.
    [worker] = (m for m in command.members() if b"spawn_main" in Path(f"/proc/{m}/cmdline").read_bytes())
    os.kill(worker, signal.SIGKILL)
    assert same(server.fetch(9), spec.maker()(9))
    assert TOKEN not in command.text() and "Traceback" not in command.text()
    command.send(signal.SIGTERM)
    assert command.end() == 0
    command.assert_nothing_left()
    assert "ended; " in command.text()
    with pytest.raises(ServerAway):
        server.fetch(10)


def test_what_is_wrong_with_the_command_line_is_one_line(tmp_path):
    command = [sys.executable, "-m", "mmjax.serve", f"--gin_file={write_tiny(tmp_path)}", "--host=0.0.0.0"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    named = "--host='0.0.0.0': can be reached from elsewhere and needs a token; add --token_file"
    assert done.stderr.startswith(f"error: {named}") and done.stderr.count("\n") == 1


# ---- slow: training with real processes ------------------------------------------------------------------------------


def slow(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test of several whole runs."""
    return pytest.mark.slow(pytest.mark.timeout(3 * PATIENCE)(test))


class Cluster:
    """Servers, in a file that lists them, and a trainer that reads it."""

    def __init__(self, folder: Path, started: list[Command], stack: contextlib.ExitStack):
        # Evaluations between, and a step that takes its time, leave servers time to come and go.
        self.folder, self.started, self.list, self._stack = folder, started, folder / "servers.txt", stack
        self.gin_file = write_tiny(folder, Data_prefetch=1)
        self.addresses: list[str] = []
        self.run = folder / "run"

    def serve(self, port: int = 0, listed: bool = True) -> Command:
        flags = [f"--gin_file={self.gin_file}", f"--port={port}", "--workers=1"]
        command = Command("serve", flags, self.folder / f"serve{len(self.started)}.log")
        self.started.append(command)
        address = f"grpc://127.0.0.1:{port_of(command)}"
        if listed:
            self._list(address)
        return command

    def bend(self, lie: str = "", **how: Any) -> BentServer:
        """A server in this process that lies, or is slow."""
        server = BentServer(planned_batch_spec(load_config([self.gin_file])), lie, **how)
        self._stack.callback(server.shutdown)
        self._list(server.address)
        return server

    def _list(self, address: str) -> None:
        self.addresses.append(address)
        self.write(self.addresses)

    def write(self, addresses: Sequence[str]) -> None:
        new = self.list.with_suffix(".new")
        new.write_text("\n".join(addresses) + "\n")
        new.replace(self.list)

    def train(self, *flags: str) -> Command:
        own = [*train_flags(self.gin_file, self.run), f"--gin.Data.servers={self.list}", *flags]
        command = Command("train", own, self.folder / "train.log")
        self.started.append(command)
        return command

    def rows(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return read_metrics(path)
        return []

    def at_step(self, trainer: Command, step: int) -> None:
        trainer.wait_for(lambda: len(self.rows()) >= step, PATIENCE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and last leaves of a run whose batches are made in its own process."""
    from mmjax.train.__main__ import main

    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(train_flags(write_tiny(folder), folder / "run")) == 0
    return [row["loss"] for row in read_metrics(folder / "run" / "metrics.jsonl")], leaves(folder / "run", STEPS)


def assert_undisturbed(cluster: Cluster, trainer: Command, undisturbed: tuple[list[float], Any]) -> None:
    assert trainer.end(PATIENCE) == 0, trainer.text()
    assert [row["loss"] for row in cluster.rows()] == undisturbed[0], trainer.text()
    assert_same_leaves(leaves(cluster.run, STEPS), undisturbed[1])
    trainer.assert_nothing_left()


@pytest.fixture
def cluster(tmp_path: Path, started: list[Command]) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path, started, stack)


@slow
def test_servers_killed_restarted_and_added(cluster, undisturbed):
    first = cluster.serve()
    trainer = cluster.train("--gin.Data.patience=300")
    cluster.at_step(trainer, 2)
    first.send(signal.SIGKILL)
    first.end()
    second = cluster.serve()  # added to the list; the trainer waits for it
    cluster.at_step(trainer, 5)
    cluster.serve(port=int(cluster.addresses[0].rpartition(":")[2]), listed=False)  # the first one again
    second.send(signal.SIGTERM)
    assert_undisturbed(cluster, trainer, undisturbed)
    origins = [row["data_origin"] for row in cluster.rows()]
    assert set(origins) <= set(cluster.addresses) and origins[0] == cluster.addresses[0]
    assert cluster.addresses[1] in origins
    assert all(row["data_wait_s"] >= 0 for row in cluster.rows())
    first.assert_nothing_left()  # its workers went with it


@slow
def test_a_server_that_stops_answering_and_one_that_is_slow(cluster, undisturbed):
    frozen = cluster.serve()
    cluster.bend(delay=30.0)
    cluster.bend(delay=0.2)
    trainer = cluster.train()
    cluster.at_step(trainer, 2)
    members = frozen.members()
    for member in members:
        os.kill(member, signal.SIGSTOP)
    assert_undisturbed(cluster, trainer, undisturbed)
    for member in members:
        os.kill(member, signal.SIGCONT)


@slow
def test_lying_servers_are_dropped_and_change_nothing(cluster, undisturbed):
    for lie in ("shapes", "step", "truncated", "a flipped bit"):
        cluster.bend(lie)
    cluster.serve()
    trainer = cluster.train()
    assert_undisturbed(cluster, trainer, undisturbed)
    for address in cluster.addresses[:-1]:
        assert f"data server {address} is dropped: step " in trainer.text()
    assert {row["data_origin"] for row in cluster.rows()} == {cluster.addresses[-1]}


@slow
def test_a_lying_server_alone_ends_the_run_and_another_continues_it(cluster, undisturbed):
    cluster.bend("truncated", from_step=4)
    trainer = cluster.train("--gin.Data.patience=2")
    assert trainer.end(PATIENCE) == 1
    said = trainer.text()
    assert re.search(rf"error: no data server is there: {cluster.addresses[0]} sent a wrong batch \(step \d+: ", said)
    assert "Traceback" not in said and "truncated" in said and "the same command continues after step" in said
    cluster.bend()
    cluster.write(cluster.addresses[1:])
    assert_undisturbed(cluster, cluster.train(), undisturbed)


@slow
def test_without_any_server_batches_are_made_here_on_request(cluster, undisturbed):
    only = cluster.bend()
    trainer = cluster.train("--gin.Data.fallback=local", "--gin.Data.patience=1")
    cluster.at_step(trainer, 2)
    only.shutdown()
    assert_undisturbed(cluster, trainer, undisturbed)
    assert [row["data_origin"] for row in cluster.rows()][-1] == "local"
    assert "batches are prepared here until one is" in trainer.text()


@slow
def test_ctrl_c_while_no_server_answers(cluster, undisturbed):
    only = cluster.bend()
    trainer = cluster.train("--gin.Data.patience=600")
    cluster.at_step(trainer, 2)
    only.shutdown()
    trainer.wait_for(lambda: f"data server {cluster.addresses[0]}: " in trainer.text(), PATIENCE)
    time.sleep(1)
    begin = time.monotonic()
    trainer.send(signal.SIGINT)
    assert trainer.end(200) == 130, trainer.text()
    assert time.monotonic() - begin < 100 and "the same command continues after step" in trainer.text()
    cluster.bend(port=only.port)
    assert_undisturbed(cluster, cluster.train(), undisturbed)


@slow
def test_another_configuration_is_refused_before_anything_is_compiled(cluster):
    cluster.bend()
    trainer = cluster.train("--gin.Digits.digits=(1, 1)")
    assert trainer.end(300) == 2
    lines = trainer.text().splitlines()
    assert lines[-1].startswith("error: Data.servers=") and "compiling" not in trainer.text()
    assert "serves another configuration: Digits.digits is (1, 1) here and (1, 2) there; " in lines[-1]


@slow
@pytest.mark.skipif(not shutil.which("openssl"), reason="makes a certificate with openssl")
def test_tls_and_a_token(tmp_path, started, undisturbed):
    cert, key, secret = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "token"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert]
    subprocess.run([*make, *name], check=True, capture_output=True)
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    gin_file, port = write_tiny(tmp_path), free_port()
    open_to_all = ["--host=0.0.0.0", f"--tls_cert={cert}", f"--tls_key={key}", f"--token_file={secret}"]
    server = Command("serve", [f"--gin_file={gin_file}", f"--port={port}", *open_to_all], tmp_path / "log")
    started.append(server)
    server.wait_for(lambda: f"serving on grpc+tls://0.0.0.0:{port}" in server.text(), PATIENCE)
    wanted, address = wanted_of(gin_file), f"grpc+tls://localhost:{port}"
    Server(address, wanted, TOKEN, cert.read_bytes()).probe()
    for wrong in (Server(address, wanted, "", cert.read_bytes()), Server(address, wanted, TOKEN)):
        with pytest.raises(ServerError):
            wrong.probe()
    with pytest.raises(ServerError):
        Server(f"grpc://127.0.0.1:{port}", wanted, TOKEN).probe()
    flags = [f"--gin.Data.servers=('{address}',)", f"--gin.Data.token_file={secret}", f"--gin.Data.tls_ca={cert}"]
    trainer = Command("train", [*train_flags(gin_file, tmp_path / "run"), *flags], tmp_path / "train.log")
    started.append(trainer)
    assert trainer.end(PATIENCE) == 0, trainer.text()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["loss"] for row in rows] == undisturbed[0] and {row["data_origin"] for row in rows} == {address}
    assert all(TOKEN not in text for text in (server.text(), trainer.text(), (tmp_path / "run/config.gin").read_text()))


@slow
def test_each_of_two_processes_asks_for_its_own_rows(tmp_path, started, monkeypatch):
    for name in ("JAX_NUM_CPU_DEVICES", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    gin_file = write_tiny(tmp_path, Train_eval_samples=0)
    server = BentServer(planned_batch_spec(load_config([gin_file])))

    def launch(name: str, *flags: str) -> Command:
        command = ["-n", "2", "--max_restarts=0", "-m", "mmjax.train"]
        command += [*train_flags(gin_file, tmp_path / name), *flags]
        started.append(Command("launch", command, tmp_path / f"{name}.log"))
        return started[-1]

    def numbers(name: str) -> list[tuple[float, float]]:
        return [(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name / "metrics.jsonl")]

    try:
        local = launch("local")
        assert local.end(PATIENCE) == 0, local.text()
        served = launch("served", f"--gin.Data.servers={server.address}")
        assert served.end(PATIENCE) == 0, served.text()
        assert numbers("served") == numbers("local")
        assert_same_leaves(leaves(tmp_path / "served", STEPS), leaves(tmp_path / "local", STEPS))
        # Ranks 0 and 1, the LLM's, are one process's, and 2 and 3 the other's.
        shards = {json.dumps(protocol.write_shard(own)): own for own in server.shards}
        llm, vision = sorted(shards.values(), key=lambda own: "vision" in own.cells if own else -1)
        assert llm and vision and set(llm.cells) == {"llm"} and "patches" in vision.cells["vision"]
        # What ends one process ends the other.
        server.lie, server.from_step = "shapes", 6
        lied = launch("lied", f"--gin.Data.servers={server.address}", "--gin.Data.patience=1")
        assert lied.end(PATIENCE) in (1, FOLLOWED)  # of whichever process had ended first
        assert f"error: no data server is there: {server.address} sent a wrong batch (step " in lied.text()
        assert "Traceback" not in lied.text()
        lied.assert_nothing_left()
    finally:
        server.shutdown()
