"""Trees of parameters by module, and parts of them."""

from __future__ import annotations

from mmjax.pipeline.trees import Part, by_name

TREE = {"llm": {"norm": 1, "embed": 2, "block": {"w": 3, "b": 4}}, "eye": {"w": 5}}
OTHER = {"llm": {"norm": 10, "embed": 20, "block": {"w": 30, "b": 40}}, "eye": {"w": 50}}


def test_a_part_is_selected_and_put_back() -> None:
    part = Part.of(TREE, lambda name: name.endswith("w"))
    assert part.select(TREE) == {"llm": {"block": {"w": 3}}, "eye": {"w": 5}}
    assert by_name(part.put(TREE, part.select(OTHER))) == by_name(TREE) | {"llm/block/w": 30, "eye/w": 50}
    assert part.put(part.put(OTHER, part.select(TREE)), part.select(OTHER)) == OTHER


def test_a_part_may_be_empty_or_the_whole() -> None:
    nothing, everything = Part.of(TREE, lambda name: False), Part.of(TREE, lambda name: True)
    assert (nothing.select(TREE), nothing.put(TREE, {})) == ({}, TREE)
    assert (everything.select(TREE), everything.put(TREE, OTHER)) == (TREE, OTHER)
