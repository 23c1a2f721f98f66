"""Data servers for tests: specs, and servers that bend what they send."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from mmjax.data.batch_shape import place_arrays
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.config import DataConfig
from mmjax.data.loader import StepMaker, make_packer, make_source
from mmjax.data.process_rows import PartialArray, ProcessRows
from mmjax.data.service import protocol
from mmjax.data.service.encoding import fill
from mmjax.data.service.identity import digest, identity
from mmjax.data.service.protocol import SCHEMA, Request
from mmjax.data.spec import DataSpec
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import EncoderSpec, StepBatch

SPECS = {"vision": EncoderSpec(patch=4, merge=2, buckets=((2, 64), (4, 64)))}


def make_spec(*, seed: int = 3, **changes: Any) -> BatchSpec:
    """A small data spec; `changes` of its DataConfig and of its DigitsConfig."""
    own = {field.name for field in fields(DigitsConfig)} & changes.keys()
    task = DigitsConfig(**{name: changes.pop(name) for name in own})
    config = DataConfig(sequence_length=112, **{"workers": 1, **changes})
    tokenizer = make_tokenizer(config.tokenizer, tuple(SPECS))
    source = make_source(DataSpec(config, task=task), SPECS, seed=seed, split="train")
    packer = make_packer(config, SPECS, source, tokenizer, global_batch=8, microbatches=2, cells=2)
    return BatchSpec(data=DataSpec(config, task=task), packer=packer, seed=seed, global_batch=8)


def encode(batch: StepBatch) -> tuple[bytes, np.ndarray]:
    """Header and block of `batch`, as a server sends them."""
    offsets = place_arrays(batch)
    block = np.zeros(offsets.size, np.uint8)
    return fill(offsets, block.data), block


def _reshaped(batch: StepBatch) -> StepBatch:
    first, *rest = batch.microbatches
    llm = {**first.inputs["llm"], "tokens": first.inputs["llm"]["tokens"][:, 1:]}
    return replace(batch, microbatches=(replace(first, inputs={**first.inputs, "llm": llm}), *rest))


def _retyped(batch: StepBatch) -> StepBatch:
    first, *rest = batch.microbatches
    llm = {**first.inputs["llm"], "weights": first.inputs["llm"]["weights"].astype(np.float64)}
    return replace(batch, microbatches=(replace(first, inputs={**first.inputs, "llm": llm}), *rest))


def _in_bucket(batch: StepBatch, at: Any) -> StepBatch:
    first, *rest = batch.microbatches
    return replace(batch, microbatches=(replace(first, bucket={"vision": at}), *rest))


def _other_cells(batch: StepBatch) -> StepBatch:
    """Rows of cell 0 where those of cell 1 are wanted, or of all."""
    first, *rest = batch.microbatches
    tokens = np.asarray(first.inputs["llm"]["tokens"])
    held = PartialArray((0,), tokens.shape, 2, tokens[: len(tokens) // 2].copy())
    inputs = {**first.inputs, "llm": {**first.inputs["llm"], "tokens": held}}
    return replace(batch, microbatches=(replace(first, inputs=inputs), *rest))


BATCHES: dict[str, Callable[[StepBatch], StepBatch]] = {
    "shapes": _reshaped,
    "types": _retyped,
    "microbatches": lambda batch: replace(batch, microbatches=batch.microbatches[:1]),
    "bucket": lambda batch: _in_bucket(batch, 7),
    "other bucket": lambda batch: _in_bucket(batch, 1 - batch.microbatches[0].bucket["vision"]),
    "other cells": _other_cells,
    "not a number": lambda batch: replace(batch, denominators={"llm": float("nan")}),
    "no denominator": lambda batch: replace(batch, denominators={}),
    "broken samples without a reason": lambda batch: replace(batch, broken=(("images", "1.jpg"),)),
    "more broken samples than a step has": lambda batch: replace(
        batch, broken=(("images", "1.jpg", "torn", "", ""),) * 9
    ),
    "a broken sample with a long name": lambda batch: replace(batch, broken=(("images", "1" * 5000, "torn", "", ""),)),
    "other counts": lambda batch: replace(batch, counts={**batch.counts, "more": 1}),
}
"""Lies about the batch, whose encoding is right."""


def _no_class(header: dict[str, Any]) -> dict[str, Any]:
    return {**header, "batch": {"Popen": {"dict": {"args": "true"}}}}


def _far_array(header: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(header["batch"]).replace('"<i4", [', '"<i4", [9999999, ', 1)
    return {**header, "batch": json.loads(text)}


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no class": _no_class,
    "far array": _far_array,
    "huge": lambda header: {**header, "size": 1 << 50},
    "negative": lambda header: {**header, "size": -1},
    "a list": lambda header: [header],
    "another checksum": lambda header: {**header, "crc32": header["crc32"] ^ 1},
}
"""Lies in the header."""

BLOCKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "truncated": lambda block: block[:-64],
    "nothing": lambda block: block[:0],
    "too much": lambda block: np.append(block, block[:64]),
    "a flipped bit": lambda block: np.concatenate([block[:1000], block[1000:1001] ^ 1, block[1001:]]),
}
"""Lies in the block."""

LIES = ("step", "no header", "schema", *BATCHES, *HEADERS, *BLOCKS)


class BentServer(flight.FlightServerBase):
    """A server that makes batches in this process, and bends them: `lie` is one of LIES, or "" for none.

    from_step: the first step that it lies about. delay: seconds until it answers. described: another identity.
    """

    def __init__(
        self,
        spec: BatchSpec,
        lie: str = "",
        *,
        port: int = 0,
        delay: float = 0.0,
        from_step: int = 0,
        maker: Callable[[int], StepBatch] | None = None,
    ):
        own = spec.maker()
        self.maker: Any = maker or own
        self.packer = spec.packer
        self.described = identity(spec, own.source)
        self.lie, self.delay, self.from_step = lie, delay, from_step
        self.asked: list[int] = []
        self.shards: list[ProcessRows | None] = []
        super().__init__(f"grpc://127.0.0.1:{port}")

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        health = {"identity": digest(self.described), "workers": 2}
        return iter([json.dumps(health if action.type == protocol.HEALTH else self.described).encode()])

    def do_get(self, context: Any, ticket: Any) -> Any:
        request = Request.from_bytes(ticket.ticket)
        step = request.step
        self.asked.append(step)
        own = protocol.read_shard(request.shard, self.packer)
        self.shards.append(own)
        lie = self.lie if step >= self.from_step else ""
        if lie == "schema":
            return flight.RecordBatchStream(pa.table({"x": [1, 2]}))
        return flight.GeneratorStream(SCHEMA, self._send(context, step, lie, own))

    def _send(self, context: Any, step: int, lie: str, own: ProcessRows | None) -> Iterator[Any]:
        end = time.monotonic() + self.delay
        while time.monotonic() < end and not context.is_cancelled():
            time.sleep(0.01)
        maker = replace(self.maker, process_rows=own) if isinstance(self.maker, StepMaker) else self.maker
        batch = maker(step + (lie == "step"))
        header, block = encode(BATCHES.get(lie, lambda b: b)(batch))
        described = HEADERS.get(lie, lambda h: h)(json.loads(header))
        block = BLOCKS.get(lie, lambda b: b)(block)
        record = pa.record_batch([pa.array(block)], SCHEMA)
        if lie == "one message":
            record = pa.record_batch([pa.array(np.zeros(protocol.MESSAGE_LIMIT + 1, np.uint8))], SCHEMA)
        yield record if lie == "no header" else (record, json.dumps(described).encode())
