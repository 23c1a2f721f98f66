"""Noise processes, weights and dropped conditions train as on one device, also where tokens go by lists."""

from __future__ import annotations

from typing import Any

import pytest
from test_layouts import assert_equal
from tiny import HAND, Changes

STEPPED: Changes = {
    "painter/DiT.process": "ddpm",
    "painter/DiT.prediction": "v",
    "painter/DiT.sampler": "ddim",
    "painter/DiT.min_snr": 5.0,
    "painter/DiT.zero_snr": True,
    "painter/DiT.drop_condition": 0.5,
}
SHIFTED: Changes = {
    "painter/DiT.times": "logit_normal",
    "painter/DiT.dynamic_shift": True,
    "painter/DiT.base_patches": 4,
    "painter/DiT.max_patches": 40,
    "painter/DiT.drop_condition": 0.5,
}


def drawn(painter: Changes, **layouts: Any) -> Changes:
    places = {"llm/Layout.pp": 2, "vision/Layout.rank_offset": 2, "painter/Layout.rank_offset": 4}
    return HAND | places | painter | {name.replace("__", "/Layout."): value for name, value in layouts.items()}


MATRIX = {
    "a ddpm, by lists to ranks of cp": drawn(STEPPED, painter__cp=2),
    "shifted times, in two stages": drawn(SHIFTED, painter__pp=2),
    "noise, zb-h1": drawn(STEPPED, painter__tp=2)
    | {"painter/DiT.prediction": "noise", "painter/DiT.zero_snr": False, "Train.schedule": "zb-h1"},
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=pytest.mark.long if number == 0 else pytest.mark.slow)
        for number, (name, changes) in enumerate(MATRIX.items())
    ],
)
def test_generators_of_every_process_train_as_one_device_does(changes: Changes) -> None:
    assert_equal(changes)
