"""A record of the products and the attention of traced functions, for counts of FLOPs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mmjax.attention.mask import Mask


@dataclass
class RecordedWork:
    """The work of the functions that were traced.

    Attributes:
      products: FLOPs of products with weights, over all rows and tokens of their inputs.
      per_pair: FLOPs of attention for each pair of query and visible key, by mask.
    """

    products: int = 0
    per_pair: Counter[Mask] = field(default_factory=Counter)


_record: ContextVar[RecordedWork | None] = ContextVar("record", default=None)


@contextlib.contextmanager
def recording() -> Iterator[RecordedWork]:
    """A context that records the work of all functions that are traced in it; gives the record."""
    record = RecordedWork()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def record_product(x: Any, weight: Any) -> None:
    """Records ``x @ weight``; of ``[..., D]`` and ``[D, F]``. Does nothing outside of ``recording``."""
    if record := _record.get():
        record.products += 2 * x.size * weight.shape[-1]


def record_attention(q: Any, v: Any, mask: Mask) -> None:
    """Records attention of queries ``[B, T, H, K]`` to values ``[B, T, G, V]`` under a mask: scores and their sums."""
    if record := _record.get():
        record.per_pair[mask] += 2 * q.shape[2] * (q.shape[3] + v.shape[3])
