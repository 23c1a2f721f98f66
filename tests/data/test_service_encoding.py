"""Batches as bytes: any batch comes back as it was, and bytes that were changed never do."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_servers import LIES, SPECS, encode, make_spec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from test_loader import assert_equal

from mmjax.data import tree
from mmjax.data.batch_shape import ALIGNMENT, BadBatchError, BatchShape
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.config import DataConfig
from mmjax.data.loader import make_packer, make_source
from mmjax.data.packing import Packer
from mmjax.data.process_rows import PartialArray, ProcessRows
from mmjax.data.service.encoding import _checksum, block_size, decode
from mmjax.data.service.identity import difference, digest, identity
from mmjax.data.service.protocol import REQUEST_LIMIT, Request, read_shard, write_shard
from mmjax.data.sources.config import SourceConfig
from mmjax.data.spec import DataSpec
from mmjax.data.split import Split
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import EncoderSpec, Microbatch, StepBatch

NAMES = st.text(max_size=8)
ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.int32, np.uint8, np.bool_, np.float64, np.int64, ">f4", np.float16]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


@st.composite
def held_rows(draw: st.DrawFn) -> PartialArray:
    """Rows of some cells, of none and of all too."""
    count, rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
    cells = sorted(draw(st.sets(st.integers(0, count - 1))))
    local_rows = draw(hnp.arrays(np.float32, (len(cells) * rows, width)))
    return PartialArray(cells, (count * rows, width), count, local_rows)


INPUTS: st.SearchStrategy[Any] = ARRAYS | held_rows()
MICROBATCHES = st.builds(
    Microbatch,
    inputs=st.dictionaries(NAMES, st.dictionaries(NAMES, INPUTS, max_size=3), max_size=3),
    bucket=st.dictionaries(NAMES, st.integers(0, 9), max_size=2),
)
BATCHES = st.builds(
    StepBatch,
    step=st.integers(0, 2**40),
    microbatches=st.lists(MICROBATCHES, max_size=3).map(tuple),
    denominators=st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=2),
    counts=st.dictionaries(NAMES, st.integers(0, 2**60), max_size=3),
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(BATCHES)
@settings(max_examples=60, deadline=None)
def test_a_batch_comes_back_bit_for_bit(batch: StepBatch) -> None:
    header, block = encode(batch)
    decoded = decode(header, block)
    assert (decoded.step, decoded.denominators, decoded.counts) == (batch.step, batch.denominators, batch.counts)
    assert len(decoded.microbatches) == len(batch.microbatches)
    for received, expected in zip(decoded.microbatches, batch.microbatches, strict=True):
        assert received.bucket == expected.bucket and received.inputs.keys() == expected.inputs.keys()
        for module, arrays in expected.inputs.items():
            assert received.inputs[module].keys() == arrays.keys()
            for name, array in arrays.items():
                back = received.inputs[module][name]
                assert type(back) is type(array)
                if isinstance(array, PartialArray):
                    assert isinstance(back, PartialArray)
                    assert (back.shape, back.cells, back.count) == (array.shape, array.cells, array.count)
                    back, array = back.local_rows, array.local_rows
                assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
                assert not array.size or np.shares_memory(back, block)
                assert (back.ctypes.data - block.ctypes.data) % ALIGNMENT == 0


@given(BATCHES, st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_byte_is_noticed(batch: StepBatch, data: st.DataObject) -> None:
    header, block = encode(batch)
    message = header + block.tobytes()
    at, by = data.draw(st.integers(0, len(message) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(message)
    changed[at] ^= by
    try:
        decoded = decode(bytes(changed[: len(header)]), np.frombuffer(bytes(changed[len(header) :]), np.uint8))
    except BadBatchError:
        return
    assert encode(decoded)[0] == header  # a number written in another way, such as 1e5 for 1E5


def test_arrays_that_are_not_contiguous() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6).T[::2]
    batch = StepBatch(step=0, microbatches=(Microbatch(inputs={"m": {"a": array}}, bucket={}),), denominators={})
    assert np.array_equal(decode(*encode(batch)).microbatches[0].inputs["m"]["a"], array)


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["text"]), np.array([1j])])
def test_what_is_no_number_is_not_sent(array: np.ndarray) -> None:
    batch = StepBatch(step=0, microbatches=(Microbatch(inputs={"m": {"a": array}}, bucket={}),), denominators={})
    with pytest.raises(TypeError, match="is not sent"):
        encode(batch)


@given(PLAIN)
@settings(max_examples=60, deadline=None)
def test_plain_values_come_back(value: object) -> None:
    assert tree.read(json.loads(json.dumps(tree.write(value)))) == value


@pytest.mark.parametrize(
    "value",
    [
        {"Popen": {}}, {"tuple": 1}, {"dict": [1]}, {"array": ["<f4", [1], 0]}, {"a": 1, "b": 2}, [1], {},
        {"StepBatch": {"stepp": 1}}, {"EncoderSpec": {"__class__": 1}}, {"StepBatch": []}, {"rows": []},
    ],
    ids=str,
)  # fmt: skip
def test_nothing_else_is_read(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        tree.read(value)


@pytest.mark.parametrize(
    "parts",
    [
        [[0], [4, 3], 2], [[0], [4, 3], 3, []], [[0], [4, 3], 0, []], [[2], [4, 3], 2, []], [[0, 1], [4, 3], 2, []],
        [[0], [4, 4], 2, []], [[-1], [4, 3], 2, []], [[True], [4, 3], 2, []], [["0"], [4, 3], 2, []], [0, [4], 2, []],
        [[0], 4, 2, []], [[0], [], 2, []], [[0], [4, 3], "2", []], [[1, 0], [2, 3], 2, []], [[0, 0], [2, 3], 2, []],
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_are_none(parts: list[object]) -> None:
    rows = np.zeros((2, 3), np.float32)
    assert tree.read({"rows": [[1], [4, 3], 2, []]}, lambda _: rows).local_rows is rows
    with pytest.raises(ValueError, match=r"."):
        tree.read({"rows": parts}, lambda _: rows)


@pytest.mark.parametrize(
    "header", [b"", b"{", b"[]", b"null", b'{"size": "1"}', b'{"size": -1}', b'{"size": true}', b'{"size": 11}']
)
def test_a_header_that_is_none(header: bytes) -> None:
    with pytest.raises(BadBatchError):
        block_size(header, 10)
    with pytest.raises(BadBatchError):
        decode(header, np.zeros(64, np.uint8))


def _places(value: Any) -> list[Any]:
    """All parts of a JSON value that can be put in another's place: (container, key)."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


STRANGE = (None, True, -1, 0, 1 << 80, int("9" * 400), 0.5, "x" * 500, [], [[]], {}, {"tuple": []}, {"dict": {}},
           {"array": ["<i4", [0, 10**300], 0]}, {"array": ["V8", [1], 0]}, {"array": ["<i4", [9] * 5000, 0]},
           {"Microbatch": {"inputs": 1, "bucket": 1}}, {"Packer": {"encoders": 1}})  # fmt: skip


def test_any_header_that_is_changed_is_a_bad_batch() -> None:
    """With a right checksum, in every place: whatever a server sends, only BadBatchError comes of it, in few words."""
    shape, header, block = _foreseen()
    places = len(_places(json.loads(header)["batch"]))
    for place, strange in product(range(places), STRANGE):
        parsed = json.loads(header)
        container, key = _places(parsed["batch"])[place]
        container[key] = strange
        parsed["crc32"] = _checksum(parsed["batch"], block)
        try:
            shape.check(decode(json.dumps(parsed).encode(), block), 0)
        except BadBatchError as error:
            assert len(str(error)) < 1000


@cache
def _foreseen() -> tuple[BatchShape, bytes, Any]:
    spec = make_spec()
    return BatchShape(spec.packer, spec.global_batch), *encode(spec.maker()(0))


def test_a_deep_header_is_no_stack_overflow() -> None:
    deep = b'{"size":0,"batch":' + b'{"tuple":[' * 100_000 + b"]}" * 100_000 + b"}"
    with pytest.raises(BadBatchError):
        decode(deep, np.zeros(0, np.uint8))


REQUEST = {"identity": "a", "seed": 1, "step": 2, "shard": None}


def test_requests_come_back() -> None:
    request = Request(identity="a", seed=1, step=2)
    assert Request.from_bytes(request.to_bytes()) == request
    assert json.loads(request.to_bytes()) == REQUEST


PACKER = Packer(encoders=SPECS, sequence_length=112, microbatches=2, cells=4096, pad=0)
SHARDS = {
    m: st.dictionaries(st.sampled_from(sorted(names)), st.sets(st.integers(0, 63)))
    for m, names in PACKER.inputs.items()
}


@given(st.fixed_dictionaries({}, optional=SHARDS))
@settings(max_examples=40, deadline=None)
def test_shards_come_back(cells: dict[str, dict[str, set[int]]]) -> None:
    rows = ProcessRows(cells={m: {name: tuple(sorted(c)) for name, c in inputs.items()} for m, inputs in cells.items()})
    request = Request(identity="a", seed=1, step=2, shard=write_shard(rows))
    assert Request.from_bytes(request.to_bytes()) == request
    assert read_shard(request.shard, PACKER) == rows


def test_rows_by_turns_come_back() -> None:
    turns = [ProcessRows(cells={"vision": {"patches": (cell,)}, "llm": {"tokens": (0, 1)}}) for cell in (0, 1)]
    rows = ProcessRows.in_turns(turns)
    assert rows.cells == {"vision": {"patches": (0, 1)}, "llm": {"tokens": (0, 1)}}
    assert read_shard(write_shard(rows), PACKER) == rows
    with pytest.raises(ValueError, match="is not null or cells"):
        read_shard(write_shard(ProcessRows.in_turns(turns * PACKER.microbatches)), PACKER)


def test_a_shard_is_short_however_many_cells_it_has() -> None:
    rows = ProcessRows(cells={"llm": {"tokens": tuple(range(2048, 4096))}})
    assert write_shard(rows) == {"llm": {"tokens": [[2048, 4096]]}}


@pytest.mark.parametrize(
    "changes",
    [{"step": -1}, {"step": 2**40}, {"step": True}, {"step": 1.0}, {"step": "1"}, {"seed": None}, {"identity": 3},
     {"more": 1}, {"seed": True}, {"identity": "x" * REQUEST_LIMIT}],
    ids=lambda changes: str(changes)[:40],
)  # fmt: skip
def test_no_other_request_is_read(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Request.from_bytes(json.dumps(REQUEST | changes).encode())


NO_RUNS = (1, [1], [[1]], [[0, 0]], [[1, 0]], [[-1, 1]], [[0, 2], [1, 3]], [[0.0, 1]], [[0, True]], [[0, 4097]])
NO_SHARDS = (1, [], {"llm": 1}, {"llm": {"x": []}}, {"x": {}}, *({"llm": {"tokens": runs}} for runs in NO_RUNS))


@pytest.mark.parametrize("shard", NO_SHARDS, ids=str)
def test_no_other_shard_is_read(shard: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_shard(shard, PACKER)


LARGE = {"many inputs": {"llm": {f"x{n}": [[0, 4096]] for n in range(3500)}}} | {
    "many modules": {f"x{n}": {"tokens": [[0, 4096]]} for n in range(2000)},
    "a long run": {"llm": {"tokens": [[0, 1 << 20]]}},
    "many runs": {"llm": {"tokens": [[n, n + 1] for n in range(5000)]}},
}


@pytest.mark.parametrize("case", LARGE)
def test_a_request_takes_no_more_memory_than_its_bytes_do(case: str) -> None:
    data = Request(identity="a", seed=1, step=2, shard=LARGE[case]).to_bytes()
    assert len(data) <= REQUEST_LIMIT and PACKER.inputs
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"shard: |cells ") as caught:
            read_shard(Request.from_bytes(data).shard, PACKER)
        assert tracemalloc.get_traced_memory()[1] < 40 * REQUEST_LIMIT
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 200


@given(st.binary(max_size=60))
@example(b"[" * 5000)
@settings(deadline=None)
def test_other_bytes_are_no_request(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Request.from_bytes(data)


@pytest.fixture(scope="module")
def spec() -> BatchSpec:
    return make_spec()


def test_a_spec_reaches_another_process_whole(spec: BatchSpec) -> None:
    back = BatchSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert back == spec
    assert_equal([back.maker()(5)], [spec.maker()(5)])


def test_a_real_batch_has_the_shape_that_was_foreseen(spec: BatchSpec) -> None:
    maker, shape = spec.maker(), BatchShape(spec.packer, spec.global_batch)
    for step in range(6):
        batch = maker(step)
        shape.check(batch, step)
        header, block = encode(batch)
        assert block.nbytes <= shape.most_bytes
        assert_equal([decode(header, block)], [batch])


SHAPES = st.tuples(st.integers(1, 9), st.sampled_from([4, 16, 36, 64, 72, 120]))
BUCKETS = st.lists(SHAPES, min_size=1, max_size=4, unique=True).map(tuple)


@pytest.mark.long
@given(
    vision=BUCKETS,
    drawn=BUCKETS,
    text=st.just(()) | BUCKETS,
    rows=st.integers(1, 9),
    cells=st.integers(1, 3),
    ranks=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
@example(vision=((4, 64), (1, 72)), drawn=((4, 64),), text=((4, 36), (2, 64)), rows=4, cells=1, ranks=0)
@example(vision=((1, 64), (9, 120)), drawn=((4, 64),), text=((4, 120), (1, 4)), rows=4, cells=1, ranks=2)
def test_the_largest_batch_is_foreseen_whatever_the_buckets_are(
    vision: Any, drawn: Any, text: Any, rows: int, cells: int, ranks: int
) -> None:
    """Buckets may come in any order: the last one is not the one of most bytes. Where there are lists for some ranks of
    cp, their lengths depend on two modules' buckets, and all of them together are foreseen."""
    encoders = {
        "vision": EncoderSpec(patch=4, merge=2, buckets=vision),
        "draw": EncoderSpec(patch=4, merge=2, buckets=drawn, drawn=True),
    }
    packer = Packer(encoders=encoders, sequence_length=112, microbatches=2, cells=cells, pad=0, text=text)
    packer = packer.split_over({"llm": Split(ranks=max(1, ranks))}, lists=ranks > 0)
    shape, sizes = BatchShape(packer, 2 * rows), []
    for at in itertools.product(*map(range, packer.bucket_counts.values())):
        bucket = dict(zip(packer.bucket_counts, at, strict=True))
        part = packer.fill(packer.plan_microbatch((), rows, bucket), {})
        totals = packer.plan(0, ())
        numbers: Any = {"denominators": dict(totals.denominators), "counts": dict(totals.counts)}
        batch = StepBatch(step=0, microbatches=(part, part), **numbers)
        header, block = encode(batch)
        sizes.append(block_size(header, shape.most_bytes))
        shape.check(decode(header, block), 0)
    assert max(sizes) == shape.most_bytes or ranks


def test_a_batch_of_own_rows_has_the_shape_that_was_foreseen(spec: BatchSpec) -> None:
    for cells in ((), (0,), (1,), (0, 1)):
        rows = ProcessRows(cells={"llm": {"tokens": cells, "weights": (0, 1)}, "vision": {"patches": cells}})
        maker, shape = spec.maker(process_rows=rows), BatchShape(spec.packer, spec.global_batch, rows)
        for step in range(4):
            header, block = encode(maker(step))
            shape.check(decode(header, block), step)
            assert block.nbytes <= shape.most_bytes
            if cells != (0, 1):
                with pytest.raises(BadBatchError, match=r"llm/\w+ is int32 .*, not int32 .*\(rows of cells"):
                    shape.check(spec.maker()(step), step)


def test_the_identity_is_what_decides_over_batches(spec: BatchSpec) -> None:
    def of(spec: BatchSpec) -> dict[str, object]:
        return identity(spec, spec.maker().source)

    ours = of(spec)
    assert digest(ours) == digest(of(make_spec(workers=5, prefetch=7, fallback="local", patience=1.0)))
    for changed, field in (
        (make_spec(seed=4), "Train.seed is 3 here and 4 there"),
        (make_spec(digits=(1, 2)), "Digits.digits is (1, 4) here and (1, 2) there"),
        (make_spec(sum=0.5), "Digits.sum is 0.0 here and 0.5 there"),
    ):
        theirs = of(changed)
        assert digest(theirs) != digest(ours)
        assert field in difference(ours, theirs)


def test_other_content_of_the_same_sizes_is_another_identity(spec: BatchSpec) -> None:
    class Brighter:
        """The same samples, one pixel of one image apart."""

        def __init__(self, source: Any):
            self.meta, self._source = source.meta, source

        def sample(self, index: int) -> Any:
            sample = self._source.sample(index)
            images = [image.copy() for image in sample.media["vision"]]
            images[-1][-1, -1] += 1
            return replace(sample, media={"vision": tuple(images)})

    source: Any = spec.maker().source
    ours, theirs = identity(spec, source), identity(spec, Brighter(source))  # type: ignore[arg-type]
    assert difference(ours, theirs).startswith("the first sample (its content) is ")


def test_every_setting_is_in_the_identity_or_is_about_where_batches_are_made(spec: BatchSpec) -> None:
    import dataclasses

    local = {f.name for f in dataclasses.fields(DataConfig) if f.metadata.get("local")}
    server = {"servers", "fallback", "patience", "token_file", "tls_ca"}
    assert local == {"workers", "prefetch", "cache", "require_same", "max_broken"} | server
    described = " ".join(identity(spec, spec.maker().source))
    missing = [f.name for f in dataclasses.fields(DataConfig) if f"Data.{f.name}" not in described]
    assert set(missing) == local | {"folder"}  # whose samples are
    assert all(f"Digits.{f.name}" in described for f in dataclasses.fields(DigitsConfig))


def test_datasets_of_a_users_own_are_served_too(tmp_path: Path) -> None:
    """Trainer and server compare a dataset by name and settings. Its place may differ between hosts."""
    (tmp_path / "own.json").write_text(
        json.dumps([{"question": f"what is {n}?", "answer": f"it is {n}"} for n in range(30)])
    )
    source = SourceConfig(path=str(tmp_path / "own.json"), held_out=3)
    settings = {"sources": {"own": 1.0}, "cache": str(tmp_path / "cache")}
    config = DataConfig(sequence_length=112, **settings)  # type: ignore[arg-type]
    samples = make_source(DataSpec(config, sources={"own": source}), SPECS, seed=3, split="train")
    tokenizer = make_tokenizer("", tuple(SPECS))
    packer = make_packer(config, SPECS, samples, tokenizer, global_batch=8, microbatches=2, cells=2)
    spec = BatchSpec(data=DataSpec(config, sources={"own": source}), packer=packer, seed=3, global_batch=8)
    received = BatchSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert received == spec
    for step in (0, 5):
        batch, again = spec.maker(samples)(step), received.maker()(step)
        for first, second in zip(batch.microbatches, again.microbatches, strict=True):
            np.testing.assert_array_equal(first.inputs["llm"]["tokens"], second.inputs["llm"]["tokens"])
    moved = replace(spec, data=replace(spec.data, sources={"own": replace(source, media="elsewhere")}))
    fewer_held_out = replace(spec, data=replace(spec.data, sources={"own": replace(source, held_out=2)}))
    ours = identity(spec, samples)
    assert identity(moved, samples) == ours
    assert difference(ours, identity(fewer_held_out, samples)) == "own/Source.held_out is 3 here and 2 there"


def test_there_are_many_lies() -> None:
    assert len(set(LIES)) == len(LIES) >= 18
