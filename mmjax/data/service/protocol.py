"""The protocol between trainers and servers: requests, limits, and kinds of refusals. Batches are in `encoding`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from mmjax.data.loader import MOST_STEPS
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows

SCHEMA = pa.schema([("bytes", pa.uint8())])
"""A batch's block travels as record batches of one column; the header is the metadata of the first."""
CHUNK = 16 << 20
"""Bytes of a message."""
MESSAGE_LIMIT = CHUNK + (9 << 20)
"""Bytes of a message with its header: a client receives no larger one."""
REQUEST_LIMIT = 64 << 10
"""Bytes of a request."""
HEALTH, CONFIGURATION = "health", "configuration"
"""Actions: the state of the server, and the identity of its batches."""
WRONG_CONFIGURATION, WRONG_REQUEST, NO_BATCH, BUSY = b"configuration", b"request", b"batch", b"busy"
"""Kinds of refusals, as the error's extra information."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for a batch.

    Attributes:
      identity: hash of all that batches depend on, see `identity.digest`.
      seed: the run's seed.
      step: the step, from 0.
      shard: the wanted rows, as `write_shard` writes them; None for all. To be read only after the configurations
        have been found to be the same.
    """

    identity: str
    seed: int
    step: int
    shard: Any = None

    def to_bytes(self) -> bytes:
        """The request as JSON bytes."""
        return json.dumps(vars(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Request:
        """Reads a request. Raises ValueError if it is too long, no JSON, or has other names and types than these."""
        if len(data) > REQUEST_LIMIT:
            raise ValueError(f"{len(data)} bytes, where {REQUEST_LIMIT} are allowed")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise ValueError("no JSON") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(value, dict) or sorted(value) != sorted(names):
            raise ValueError(f"no object of {', '.join(names)}")
        step, seed = value["step"], value["seed"]
        if type(step) is not int or not 0 <= step < MOST_STEPS:
            raise ValueError(f"step={step!r:.80} is not 0 or more")
        if type(seed) is not int or not isinstance(value["identity"], str):
            raise ValueError(f"seed={seed!r:.80}")
        return cls(**value)


def write_shard(process_rows: ProcessRows | None) -> Any:
    """Rows as JSON: {module: {input: [[first cell, cell after the last], …]}}, or None for all rows.

    {"llm": {"tokens": [[0, 2]]}} has cells 0 and 1. Rows that differ from microbatch to microbatch are a list of such
    objects, for microbatches in turn.

    process_rows: the rows, as `own_rows` gives them, such as ProcessRows(cells={"llm": {"tokens": (0, 1)}}).
    """
    if process_rows is None:
        return None
    if process_rows.turns:
        return [write_shard(turn) for turn in process_rows.turns]
    return {
        module: {name: _runs(cells) for name, cells in process_rows.cells[module].items()}
        for module in process_rows.cells
    }


def read_shard(value: Any, packer: Packer) -> ProcessRows | None:
    """The rows that `write_shard` wrote, for microbatches of `packer`. Raises ValueError for anything else.

    A few characters may name very many cells. So a run is expanded only if the packer has its module, input and last
    cell: the result takes no more memory than the largest shard of this configuration.

    value: such as {"llm": {"tokens": [[0, 2]]}}; None, for all rows, gives None.
    """
    if value is None:
        return None
    if isinstance(value, list) and 2 <= len(value) <= packer.microbatches:
        return ProcessRows.in_turns([_read_turn(turn, packer) for turn in value])
    return _read_turn(value, packer)


def _read_turn(value: Any, packer: Packer) -> ProcessRows:
    if not isinstance(value, dict) or not all(isinstance(inputs, dict) for inputs in value.values()):
        raise ValueError(
            f"shard={value!r:.80} is not null or cells by module and input, or such for microbatches in turn"
        )
    for module, inputs in value.items():
        if module not in packer.inputs:
            raise ValueError(f"shard: no module {module!r:.40}")
        if strangers := inputs.keys() - packer.inputs[module]:
            raise ValueError(f"shard: {module} has no input {min(strangers)!r:.40}")
    return ProcessRows(
        cells={
            module: {name: _cells(runs, packer.cells) for name, runs in inputs.items()}
            for module, inputs in value.items()
        }
    )


def _runs(cells: tuple[int, ...]) -> list[list[int]]:
    """Consecutive cells as [first, after the last]: a process has few runs, however many cells."""
    runs: list[list[int]] = []
    for cell in cells:
        if runs and runs[-1][1] == cell:
            runs[-1][1] += 1
        else:
            runs.append([cell, cell + 1])
    return runs


def _cells(runs: Any, most: int) -> tuple[int, ...]:
    wrong, cells = ValueError(f"cells {runs!r:.80} are not runs [[first, after the last], …] of {most}"), list[int]()
    if not isinstance(runs, list):
        raise wrong
    for run in runs:
        if not isinstance(run, list) or [type(end) for end in run] != [int, int]:
            raise wrong
        least = cells[-1] + 1 if cells else 0
        if not least <= run[0] < run[1] <= most:
            raise wrong
        cells += range(*run)
    return tuple(cells)
