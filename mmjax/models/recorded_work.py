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
      products: FLOPs of products with weights, and others in proportion to tokens, over all rows and tokens.
      per_pair: FLOPs of attention for each pair of query and visible key, by mask.
    """

    products: int = 0
    per_pair: Counter[Mask] = field(default_factory=Counter)


_record: ContextVar[RecordedWork | None] = ContextVar("record", default=None)


@contextlib.contextmanager
def recording() -> Iterator[RecordedWork]:
    """A context that records the work of all functions that are traced in it; gives the record.

    ``with recording() as work`` gives a ``RecordedWork``: afterwards ``work.products`` are FLOPs of products with
    weights, and ``work.per_pair`` FLOPs of attention for each pair of query and key, by mask.
    """
    record = RecordedWork()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def record_product(x: Any, weight: Any) -> None:
    """Records ``x @ weight``, 2 FLOPs a number of ``x`` and column; does nothing outside of ``recording``.

    ``x`` is ``[..., D]``, ``weight`` ``[D, F]``; of both the shape alone is read.
    """
    if record := _record.get():
        record.products += 2 * x.size * weight.shape[-1]


def record_work(flops: int) -> None:
    """Records FLOPs, over all rows and tokens, that grow in proportion to the tokens. Does nothing outside of
    ``recording``.
    """
    if record := _record.get():
        record.products += flops


def record_attention(q: Any, v: Any, mask: Mask) -> None:
    """Records attention of queries to values under a mask. Does nothing outside of ``recording``.

    ``q`` is ``[B, T, H, K]``, ``v`` ``[B, T, G, V]``, of which the shapes are read; ``mask`` is such as
    ``Mask("causal")``.
    """
    if record := _record.get():
        record.per_pair[mask] += 2 * q.shape[2] * (q.shape[3] + v.shape[3])
