"""Shuffling and mixing are bijections and proportions that hold exactly, at any index, without memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.data.sources.mixing import Mixing, held_out, in_turn, key_of, nth_trained, permuted, quotas


@given(size=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_permutation(size, key):
    assert sorted(permuted(at, size, key) for at in range(size)) == list(range(size))


def test_permutations_differ_and_look_random():
    orders = {tuple(permuted(at, 50, key_of(0, 2, 0, epoch)) for at in range(50)) for epoch in range(40)}
    assert len(orders) == 40
    # Where the first of 10 goes, and its distance to the second, over many keys: near uniform.
    firsts = Counter(permuted(0, 10, key_of(key)) for key in range(4000))
    steps = Counter((permuted(1, 10, key_of(key)) - permuted(0, 10, key_of(key))) % 10 for key in range(4000))
    assert min(firsts.values()) > 320 and max(firsts.values()) < 480
    assert 0 not in steps and min(steps.values()) > 350 and max(steps.values()) < 540


def test_large_sizes_cost_nothing():
    assert 0 <= permuted(10**15, 10**15 + 7, 3) < 10**15 + 7


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ({"a": 1.0}, (1,)),
        ({"a": 0.7, "b": 0.3}, (7, 3)),
        ({"a": 2, "b": 1, "c": 1}, (2, 1, 1)),
        ({"a": 1 / 3, "b": 2 / 3}, (1, 2)),
        ({"a": 0.33333, "b": 0.66667}, (3333, 6667)),
        ({"a": 0.9999, "b": 0.0001}, (9999, 1)),
    ],
)
def test_quotas(weights, wanted):
    assert quotas(weights) == wanted


def test_a_weight_too_small_is_refused():
    with pytest.raises(ConfigError, match=r"'b' gets fewer than one of 10000 samples"):
        quotas({"a": 1.0, "b": 1e-6})


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_every_epoch_has_every_record_once_and_blocks_have_their_quotas(sizes, seed, data):
    block_quotas = data.draw(st.lists(st.integers(1, 7), min_size=len(sizes), max_size=len(sizes)))
    mixing, block = Mixing(sizes, block_quotas, seed), sum(block_quotas)
    blocks = max(2 * -(-size // quota) for size, quota in zip(sizes, block_quotas, strict=True))
    drawn = [mixing(index) for index in range(blocks * block)]
    for first in range(0, len(drawn), block):
        assert Counter(source for source, _ in drawn[first : first + block]) == dict(enumerate(block_quotas))
    for source, size in enumerate(sizes):
        # An epoch's records come in whole blocks, which may be in any order inside.
        records = Counter(record for number, record in drawn if number == source)
        total = blocks * block_quotas[source]
        assert set(records) == set(range(size))
        assert all(total // size <= count <= -(-total // size) for count in records.values())


def test_seeds_and_epochs_reshuffle():
    first, again, other_seed = Mixing([30], [1], 0), Mixing([30], [1], 0), Mixing([30], [1], 1)
    epochs = [[first(30 * epoch + at) for at in range(30)] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert [again(at) for at in range(30)] == epochs[0] != [other_seed(at) for at in range(30)]


@given(size=st.integers(1, 200), data=st.data())
def test_held_out_records_are_spread_and_never_trained_on(size, data):
    held_out_numbers = held_out(size, data.draw(st.integers(0, size - 1)))
    trained = [nth_trained(held_out_numbers, at) for at in range(size - len(held_out_numbers))]
    assert sorted([*trained, *held_out_numbers.tolist()]) == list(range(size)) and trained == sorted(trained)
    assert not len(held_out_numbers) or np.diff([*held_out_numbers, held_out_numbers[0] + size]).max() <= -(
        -size // len(held_out_numbers)
    )


def test_sources_in_turn():
    sources, records = in_turn([4, 2])
    assert list(zip(sources.tolist(), records.tolist(), strict=True)) == [
        (0, 0),
        (1, 0),
        (0, 1),
        (0, 2),
        (1, 1),
        (0, 3),
    ]
