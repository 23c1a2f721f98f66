"""The trainer's side: batches do not depend on who serves them, and what is wrong with one is said and survived."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_servers import LIES, SPECS, BentServer, make_spec
from PIL import Image
from test_loader import assert_equal

from mmjax.configurable import ConfigError
from mmjax.data.batch_shape import BatchShape
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.batches import open_batches
from mmjax.data.config import DataConfig
from mmjax.data.loader import StepMaker, make_packer, make_source
from mmjax.data.process_rows import PartialArray, ProcessRows
from mmjax.data.service.client import Server, ServerLies, Wanted
from mmjax.data.service.identity import digest, identity
from mmjax.data.service.loader import ServedLoader
from mmjax.data.service.server import require_free
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.mixture import Mixture
from mmjax.data.spec import DataSpec
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import NoBatchError, StepBatch

STEPS = 8


@pytest.fixture(scope="module")
def spec() -> BatchSpec:
    return make_spec()


@pytest.fixture(scope="module")
def maker(spec: BatchSpec) -> StepMaker:
    return spec.maker()


@pytest.fixture(scope="module")
def reference(maker: StepMaker) -> list[StepBatch]:
    return [maker(step) for step in range(STEPS)]


@pytest.fixture
def serve(spec: BatchSpec) -> Iterator[Callable[..., BentServer]]:
    """Starts bent servers, which end with the test."""
    running: list[BentServer] = []

    def start(lie: str = "", **how: Any) -> BentServer:
        running.append(BentServer(spec, lie, **how))
        return running[-1]

    yield start
    for server in running:
        server.shutdown()


class Opened:
    """A loader of STEPS steps from servers, and what it reports."""

    def __init__(self, maker: StepMaker, servers: Sequence[str] | str, start: int = 0, **changes: Any):
        self.said: list[str] = []
        addresses = servers if isinstance(servers, str) else tuple(servers)
        spec = make_spec(servers=addresses, **changes)
        stream = open_batches(spec, maker, steps=STEPS, start_step=start, report=self.said.append)
        assert isinstance(stream, ServedLoader)
        self.stream = stream

    def collect(self) -> tuple[list[StepBatch], list[str]]:
        """All batches, and who made each."""
        with self.stream:
            batches, origins = [], []
            for batch in self.stream:
                batches.append(batch)
                origins.append(self.stream.origin)
        return batches, origins


def test_batches_from_a_server_are_the_local_ones(serve, maker, reference):
    server = serve()
    batches, origins = Opened(maker, [server.address]).collect()
    assert_equal(batches, reference)
    assert set(origins) == {server.address} and sorted(server.asked) == list(range(STEPS))
    assert all(a.ctypes.data % 64 == 0 for m in batches[0].microbatches for i in m.inputs.values() for a in i.values())
    assert_equal(Opened(maker, server.address, start=5).collect()[0], reference[5:])


def test_a_server_names_what_it_finds_broken(tmp_path):
    """Each answer names all that is broken in it, whoever was told of it before."""
    rows = [{"image": f"{n}.png", "question": "what?", "answer": "that"} for n in range(12)]
    for n in range(12):
        Image.fromarray(np.random.default_rng(n).integers(0, 255, (16, 16), np.uint8)).save(tmp_path / f"{n}.png")
    (tmp_path / "data.json").write_text(json.dumps(rows))
    sources: dict[str, Any] = {"own": SourceConfig(path=str(tmp_path / "data.json"), media=str(tmp_path))}
    config = DataConfig(sequence_length=112, sources={"own": 1.0}, cache=str(tmp_path / "cache"))
    source = make_source(DataSpec(config, sources=sources), SPECS, seed=3, split="train")
    for n in (3, 7):  # their headers were whole when they were indexed, and still are
        intact = (tmp_path / f"{n}.png").read_bytes()
        (tmp_path / f"{n}.png").write_bytes(intact[: len(intact) // 2])
    assert isinstance(source, Mixture)
    packer = make_packer(
        config, SPECS, source, make_tokenizer("", tuple(SPECS)), global_batch=8, microbatches=2, cells=2
    )
    spec = BatchSpec(data=DataSpec(config, sources=sources), packer=packer, seed=3, global_batch=8)
    with BentServer(spec) as server:
        served = replace(spec, data=spec.data.with_settings(servers=(server.address,)))
        with open_batches(served, spec.maker(source), steps=4, start_step=0, report=print) as batches:
            received = list(batches)
    for step, batch in enumerate(received):
        met = [source.record(8 * step + n)[1] for n in range(8)]
        names = [name for _, name, *_ in batch.broken]
        assert sorted(names) == sorted(source.sources[0].index.names[n] for n in met if n in (3, 7))
        assert all(broken[0] == "own" and "truncated" in broken[2] for broken in batch.broken)
    assert sum(len(batch.broken) for batch in received) >= 4


def test_a_process_asks_for_its_own_rows_alone(serve, spec, reference):
    rows = ProcessRows(cells={"llm": {"tokens": (1,), "targets": (0, 1)}, "vision": {"patches": (0,), "positions": ()}})
    maker, server = spec.maker(process_rows=rows), serve()
    batches, _ = Opened(maker, [server.address]).collect()
    assert server.shards == [rows] * STEPS
    assert_equal(batches, [maker(step) for step in range(STEPS)])
    for batch, expected in zip(batches, reference, strict=True):
        for microbatch, all_rows in zip(batch.microbatches, expected.microbatches, strict=True):
            tokens, patches = microbatch.inputs["llm"]["tokens"], microbatch.inputs["vision"]["patches"]
            assert isinstance(tokens, PartialArray) and isinstance(patches, PartialArray)
            assert (tokens.cells, patches.cells) == ((1,), (0,))
            wanted = all_rows.inputs["llm"]["tokens"]
            assert np.array_equal(tokens[len(wanted) // 2 :], wanted[len(wanted) // 2 :])
            assert np.array_equal(microbatch.inputs["llm"]["targets"], all_rows.inputs["llm"]["targets"])
    # Here too, where no server answers.
    server.shutdown()
    alone = Opened(maker, [server.address], start=6, fallback="local", patience=0.1)
    assert_equal(alone.collect()[0], batches[6:])


def test_two_servers_share_the_work(serve, maker, reference):
    servers = [serve(delay=0.1), serve(delay=0.1)]
    batches, origins = Opened(maker, [server.address for server in servers]).collect()
    assert_equal(batches, reference)
    assert all(origins.count(server.address) >= 2 for server in servers)


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_found_out(lie, serve, spec, maker):
    described = identity(spec, maker.source)
    shape = BatchShape(spec.packer, spec.global_batch)
    wanted = Wanted(described=described, digest=digest(described), seed=spec.seed, shape=shape)
    server = Server(serve(lie).address, wanted)
    server.probe()
    with pytest.raises(ServerLies, match=r"^step 4: ") as caught:
        server.fetch(4)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_a_server_whose_messages_are_too_large_serves_nobody(serve, maker):
    opened = Opened(maker, [serve("one message").address], patience=0.5)
    with opened.stream as stream, pytest.raises(NoBatchError, match="sends messages of more than 26214400 bytes"):
        next(stream)


def test_after_a_lie_another_server_is_asked(serve, maker, reference):
    liar, honest = serve("shapes", from_step=2), serve(delay=0.05)
    opened = Opened(maker, [liar.address, honest.address])
    batches, _ = opened.collect()
    assert_equal(batches, reference)
    messages = [line for line in opened.said if "is dropped" in line]
    assert (
        len(messages) == 1
        and f"{liar.address} is dropped: step" in messages[0]
        and "llm/tokens is int32" in messages[0]
    )


def test_when_all_have_lied_the_run_ends(serve, maker, reference):
    liar = serve("another checksum", from_step=3)
    opened = Opened(maker, [liar.address])
    with opened.stream as stream:
        got = []
        with pytest.raises(NoBatchError, match=f"{liar.address} sent a wrong batch .*checksum.*fallback='local'"):
            for batch in stream:
                got.append(batch)
    assert len(got) <= 3
    assert_equal(got, reference[: len(got)])


def test_a_slow_server_delays_nothing_for_long(serve, maker, reference):
    slow, fast = serve(delay=30.0), serve()
    begin = time.monotonic()
    batches, origins = Opened(maker, [slow.address, fast.address]).collect()
    assert_equal(batches, reference)
    assert set(origins) == {fast.address} and time.monotonic() - begin < 20
    assert len(slow.asked) <= 5  # of the steps that were asked for before it was known to be slow


def test_servers_join_and_leave(serve, maker, reference, tmp_path):
    first, second = serve(), serve()
    listed = tmp_path / "servers.txt"
    listed.write_text(f"# of this test\n{first.address}\n")
    opened = Opened(maker, str(listed), prefetch=1)
    with opened.stream as stream:
        got = [next(stream) for _ in range(2)]
        assert stream.origin == first.address
        listed.write_text(f"{second.address}  # instead\n")
        end = time.monotonic() + 20
        while f"data server {first.address} has left" not in opened.said and time.monotonic() < end:
            time.sleep(0.05)
        got += list(stream)
        assert stream.origin == second.address
    assert_equal(got, reference)
    assert max(first.asked) < 5


def test_a_list_that_breaks_changes_nothing(serve, maker, reference, tmp_path):
    server = serve()
    listed = tmp_path / "servers.txt"
    listed.write_text(server.address)
    opened = Opened(maker, str(listed), prefetch=1)
    with opened.stream as stream:
        got = [next(stream)]
        listed.write_text("nonsense")
        end = time.monotonic() + 20
        while not opened.said and time.monotonic() < end:
            time.sleep(0.05)
        got += list(stream)
    assert_equal(got, reference)
    assert f"{listed}:1='nonsense': write grpc+tls://host:8815" in opened.said[0]


@pytest.mark.long
def test_without_servers_batches_are_made_here_on_request_until_one_is_there(serve, maker, reference):
    server = serve()
    address, port = server.address, server.port
    server.shutdown()
    opened = Opened(maker, [address], fallback="local", patience=0.5, prefetch=1)
    with opened.stream as stream:
        got = [next(stream) for _ in range(2)]
        assert stream.origin == "local"
        assert any("no data server is there" in line and "prepared here" in line for line in opened.said)
        serve(port=port)
        end = time.monotonic() + 20
        while "a data server is there: batches come from it again" not in opened.said and time.monotonic() < end:
            time.sleep(0.05)
        got += list(stream)
        assert stream.origin == address
    assert_equal(got, reference)


def test_without_servers_the_run_ends(serve, maker):
    server = serve()
    server.shutdown()
    begin = time.monotonic()
    with Opened(maker, [server.address], patience=0.5).stream as stream:
        with pytest.raises(NoBatchError, match=f"no data server is there: {server.address} .*Data.fallback='local'"):
            next(stream)
        assert time.monotonic() - begin < 15


def test_another_configuration_is_named(serve, maker):
    another = make_spec(seed=4)
    server = serve()
    server.described = identity(another, another.maker().source)
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"serves another configuration: Train\.seed is 3 here and 4 there"):
        Opened(maker, [server.address], patience=100.0, fallback="local")
    assert time.monotonic() - begin < 15


def test_something_else_on_the_port_is_named(serve, maker):
    class Other(BentServer):
        def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
            return iter([b"hello"])

    server = Other(make_spec())
    try:
        with pytest.raises(ConfigError, match=r"is it python -m mmjax\.serve\?"):
            Opened(maker, [server.address])
    finally:
        server.shutdown()


def test_a_batch_that_nobody_can_make_ends_the_run(serve, maker, reference):
    from pyarrow import flight

    from mmjax.data.service import protocol

    def cannot(step: int) -> StepBatch:
        if step == 2:
            raise flight.FlightServerError("step 2: ValueError: no such sample", protocol.NO_BATCH)
        return maker(step)

    servers = [serve(maker=cannot), serve(maker=cannot)]
    with Opened(maker, [server.address for server in servers]).stream as stream:
        assert_equal([next(stream), next(stream)], reference[:2])
        with pytest.raises(NoBatchError, match="says: step 2: ValueError: no such sample"):
            next(stream)
    assert all(server.asked.count(2) == 1 for server in servers)


def test_who_has_not_answered_the_first_probe_yet_is_asked_too(serve, maker, reference, monkeypatch):
    from pyarrow import flight

    from mmjax.data.service import protocol

    def cannot(step: int) -> StepBatch:
        raise flight.FlightServerError(f"step {step}: ValueError: no such sample", protocol.NO_BATCH)

    quick, slow = serve(maker=cannot), serve(maker=cannot)
    answer = slow.do_action

    def later(context: Any, action: Any) -> Any:
        end = time.monotonic() + 20
        while not quick.asked and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2)
        return answer(context, action)

    monkeypatch.setattr(slow, "do_action", later)
    refused = pytest.raises(NoBatchError, match=r"no such sample.*; .*no such sample")
    with Opened(maker, [quick.address, slow.address]).stream as stream, refused:
        next(stream)
    assert quick.asked.count(0) == slow.asked.count(0) == 1


def test_close_and_interrupt_end_what_waits(serve, maker):
    import threading

    opened = Opened(maker, [serve(delay=60.0).address])
    ended: list[object] = []
    thread = threading.Thread(target=lambda: ended.append(list(opened.stream)))
    thread.start()
    time.sleep(0.3)
    begin = time.monotonic()
    opened.stream.interrupt()
    thread.join(10)
    opened.stream.close()
    opened.stream.close()
    assert ended == [[]] and time.monotonic() - begin < 8


def test_a_port_that_is_taken_or_a_host_that_is_not_here_is_an_error_before_anything_starts(serve):
    require_free("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        require_free("127.0.0.1", serve().port)
    with pytest.raises(OSError, match=r"."):
        require_free("203.0.113.1", 0)


def test_a_token_file_that_others_read_is_refused(maker, tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("0123456789abcdef0123")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"Data\.token_file=.*others may read it; chmod 600") as caught:
        Opened(maker, ["grpc://127.0.0.1:1"], token_file=str(file))
    assert "0123456789abcdef" not in str(caught.value)
