"""The first steps of the digits configurations are those of earlier versions, as nearly as machines agree."""

from __future__ import annotations

import json

import goldens
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", goldens.NAMES)
def test_twenty_steps(name: str) -> None:
    want = json.loads(goldens.KEPT.read_text())[name]
    assert not goldens.difference(goldens.golden(name), want, exact=False)


def test_a_difference_is_named() -> None:
    want = json.loads(goldens.KEPT.read_text())["digits_vlm"]
    leaf = "params/llm/head"
    losses = [*want["losses"][:6], 1.01 * want["losses"][6], *want["losses"][7:]]
    nudged = [want["losses"][0] * (1 + 1e-9), *want["losses"][1:]]
    initial = want["initial"] | {leaf: want["initial"][leaf] * 1.001}
    assert not goldens.difference(want, want, exact=True)
    assert goldens.difference(want | {"losses": nudged}, want, exact=True) == "losses differ"
    assert not goldens.difference(want | {"losses": nudged}, want, exact=False)
    assert goldens.difference(want | {"losses": losses}, want, exact=False) == "the loss of step 7 is 1.0e-02 off"
    found = goldens.difference(want | {"initial": initial}, want, exact=False)
    assert found == f"{leaf} starts with a norm that is 1.0e-03 off"
