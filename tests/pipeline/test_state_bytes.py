"""Bytes of states by what is trained, the dtype, shards and offload, by hand."""

from __future__ import annotations

import pytest

from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.state_bytes import state_bytes


@pytest.mark.parametrize(
    ("item", "shards", "copies", "optimizer", "reduced"),
    [
        (2, 1, 2 * 100, 4 * 100 + 8 * 60, 0),  # reduced in place
        (2, 4, 2 * 100, 100 + 2 * 60, 60),
        (4, 4, 4 * 100, 100 + 2 * 60, 60),
        (4, 1, 0, 4 * 100 + 8 * 60, 0),  # masters serve
    ],
)
def test_bytes_of_a_hundred_parameters_of_which_sixty_are_trained(
    item: int, shards: int, copies: int, optimizer: int, reduced: int
) -> None:
    held = state_bytes(100, 60, item=item, shards=shards)
    assert (held.copies, held.optimizer, held.sums, held.reduced) == (copies, optimizer, 4 * 60, reduced)
    assert held.masters + held.moments == held.optimizer and held.masters == 400 / shards
    assert state_bytes(100, 60, item=item, gradient=2, shards=shards).sums == 2 * 60
    kinds = ({}, {"optimizer": True}, {"parameters": True}, {"optimizer": True, "parameters": True})
    away = [held.away(OffloadConfig(**own)) for own in kinds]
    serve = copies == 0
    gone, parameters = (held.moments, held.masters) if serve else (optimizer, copies)
    assert away == [(0, 0), (gone, 0), (0, parameters), (gone, parameters)]


def test_what_is_frozen_has_masters_alone() -> None:
    held = state_bytes(100, 0, item=2, shards=2)
    assert (held.optimizer, held.moments, held.sums, held.reduced) == (200, 0, 0, 0)
