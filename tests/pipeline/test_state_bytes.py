"""Bytes of states by what is trained, the dtype, shards and offload, by hand."""

from __future__ import annotations

import pytest

from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.state_bytes import Sharded, state_bytes


@pytest.mark.parametrize(
    ("item", "shards", "copies", "served", "masters", "moments", "reduced"),
    [
        (2, 1, 2 * 60, 2 * 40, 4 * 60 + 2 * 40, 8 * 60, 0),  # reduced in place; what is frozen serves
        (2, 4, 2 * 100, 0, 60 + 20, 2 * 60, 60),
        (4, 4, 4 * 100, 0, 100, 2 * 60, 60),
        (4, 1, 0, 4 * 100, 4 * 100, 8 * 60, 0),  # all masters serve
    ],
)
def test_bytes_of_a_hundred_parameters_of_which_sixty_are_trained(
    item: int, shards: int, copies: int, served: int, masters: int, moments: int, reduced: int
) -> None:
    held, optimizer = state_bytes(100, 60, item=item, shards=shards), masters + moments
    assert (held.copies, held.optimizer, held.sums, held.reduced) == (copies, optimizer, 4 * 60, reduced)
    assert (held.masters, held.moments, held.direct) == (masters, moments, served)
    assert held.frozen == 40 * item / shards
    assert state_bytes(100, 60, item=item, gradient=2, shards=shards).sums == 2 * 60
    kinds = ({}, {"optimizer": True}, {"parameters": True}, {"optimizer": True, "parameters": True})
    away = [held.offloaded(OffloadConfig(**own)) for own in kinds]
    gone, parameters = optimizer - served, copies + served
    assert away == [(0, 0), (gone, 0), (0, parameters), (gone, parameters)]


def test_ranks_with_different_parameters_share_none_of_them() -> None:
    """Of eight ranks four have different experts, so two share each: of 100 on each rank."""
    apart, two = state_bytes(100, 60, item=2, shards=8, apart=4), state_bytes(100, 60, item=2, shards=2)
    assert apart == two and apart.optimizer == (12 * 60 + 2 * 40) / 2
    everything = Sharded(sums=True, parameters=True)
    sharded = state_bytes(100, 60, item=2, shards=8, apart=4, sharded=everything)
    assert (sharded.parameters, sharded.sums, sharded.reduced) == (2 * 100 / 2, 4 * 60 / 2, 0)
    # Alone with its experts, a rank still prepares copies of them, since other masters of the module are shards.
    alone = state_bytes(100, 60, item=4, shards=4, apart=4)
    assert (alone.copies, alone.direct, alone.masters, alone.reduced) == (400, 0, 400, 240)
    assert (alone + two).copies == alone.copies + two.copies and (alone + two).parameters == 400 + 200


@pytest.mark.parametrize(
    ("item", "shards", "optimizer", "copies"), [(2, 1, 200, 0), (2, 2, 100, 200), (4, 2, 200, 400)]
)
def test_what_is_frozen_is_held_as_what_is_computed_with(item: int, shards: int, optimizer: int, copies: int) -> None:
    held = state_bytes(100, 0, item=item, shards=shards)
    assert (held.optimizer, held.moments, held.sums, held.reduced) == (optimizer, 0, 0, 0)
    assert held.copies == copies and held.parameters == item * 100


@pytest.mark.parametrize(
    ("item", "frozen", "shards", "optimizer", "copies", "served"),
    [
        (4, 2, 1, 200, 0, 200),  # widened where it is used
        (4, 2, 4, 50, 200, 0),
        (2, 4, 1, 400, 200, 0),  # a rounded copy beside the numbers of the file
        (2, 4, 4, 100, 200, 0),
    ],
)
def test_what_is_frozen_may_be_held_in_another_dtype(
    item: int, frozen: int, shards: int, optimizer: int, copies: int, served: int
) -> None:
    held = state_bytes(100, 0, item=item, shards=shards, frozen=frozen)
    assert (held.optimizer, held.frozen, held.copies, held.direct) == (optimizer, optimizer, copies, served)
