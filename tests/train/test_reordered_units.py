"""`Data.reorder` where an encoder has lanes: samples change places among units, and nothing changes in a step."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trial_runs import assert_same_training, write_tiny

from mmjax.assembly.assembly import place
from mmjax.assembly.buckets import build_packer
from mmjax.assembly.model import encoder_specs
from mmjax.assembly.orders import order_of, step_order
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.data.loader import StepMaker, make_source
from mmjax.data.reorder import METHODS
from mmjax.data.tokenizer import make_tokenizer
from mmjax.mesh.world import World
from mmjax.parity.product import Session
from mmjax.recipe import Recipe

STEPS = 2
# An encoder on both ranks of an LLM of two stages, four samples a microbatch, all in LLM rows of their own.
NESTED = (
    *("llm/Layout.pp=2", "llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.lanes=2"),
    *("vision/Layout.rank_offset=0", "World.devices=2", "Train.schedule='nested'"),
    *(f"Train.steps={STEPS}", "Optimizer.warmup=0", "Train.global_batch=32", "Train.microbatches=8"),
    *("Digits.images=(1, 4)", "Digits.digits=(1, 4)", "Digits.scale=(1.0, 2.0)", "Data.sequence_length=160"),
)


def nested(folder: Path, *more: str) -> Recipe:
    return load_config([write_tiny(folder)], [*NESTED, *more])


def test_a_run_s_order_is_of_units_and_a_lane_has_the_encoder_s_costs_alone(tmp_path):
    buckets = "vision/Packing.buckets=((3, 64), (4, 64), (5, 64), (6, 64), (7, 64), (8, 64), (9, 64))"
    config = nested(tmp_path, buckets, "vision/ViT.width=64", "vision/ViT.mlp=64", "Train.inner='zb-h1'")
    packer = build_packer(config, make_tokenizer("", config.model.media))
    parts = place(config, packer, World.planned(config.devices))
    order = order_of(config, parts, "best")
    assert order.schedule == "nested" and order.inner == "zb-h1"
    inputs = next(iter(parts.shapes.values()))
    spread, nominal = order.modules["vision"], parts.placed.nominal_costs(inputs).seconds["F", "vision.0", False]
    # A microbatch runs on one rank, as it does where the encoder has a rank of its own.
    assert spread.forward["vision.0"] * inputs["vision"]["segments"].size == pytest.approx(nominal)
    source = open_source(config, split="train")
    metas = [source.meta(i) for i in range(32)]
    found = order(metas, packer)
    assert sorted(found.order) == list(range(32))
    assert found == pickle.loads(pickle.dumps(order))(metas, packer)
    seconds = order.seconds(metas)["vision"].sum(axis=1)
    loads_UL = seconds[np.array(found.order)].reshape(4, 2, 4).sum(axis=-1)
    given_UL = seconds.reshape(4, 2, 4).sum(axis=-1)
    for figure, own_UL in (("imbalance_nominal", loads_UL), ("imbalance_given", given_UL)):
        assert found.figures[figure] == pytest.approx(own_UL.max(axis=1).sum() / own_UL.mean(axis=1).sum())
    assert found.figures["imbalance_nominal"] < found.figures["imbalance_given"] and found.figures["reorder_gain"] > 1
    spans = [order.makespan([metas[i] for i in chosen], packer) for chosen in (range(32), found.order)]
    assert spans[0] / spans[1] == found.figures["reorder_gain"]


WINDOWED = (
    *("vision/Layout.lanes=1", "vision/Layout.dp=2", "vision/Layout.microbatches=2"),
    *("Train.schedule='three-phase'", "Train.window=2"),
)
"""The encoder with dp over both ranks, for two microbatches at a time."""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [(), WINDOWED], ids=["nested", "windows"])
def test_losses_gradients_and_updates_of_a_step_do_not_depend_on_the_order(tmp_path, more):
    buckets = "vision/Packing.buckets=((8, 64), (24, 64))"
    config = nested(tmp_path, buckets, "Train.global_batch=16", "Train.microbatches=4", *more)
    session = Session(config, build_packer(config, make_tokenizer("", tuple(config.model.encoders))))
    session.executor.compile()
    source = make_source(config.data, encoder_specs(config), seed=config.train.seed, split="train")
    runs, batches = {}, {}
    for method in METHODS:
        order = step_order(replace(config, data=config.data.with_settings(reorder=method)), session.parts)
        make = StepMaker(source=source, packer=session.parts.packer, global_batch=16, order=order)
        session.batches = batches[method] = [make(step) for step in range(STEPS)]
        session.executor.initialise(config.train.seed)
        runs[method] = session.run()
    for step in range(STEPS):
        none, best = batches["none"][step], batches["best"][step]
        given, found = (np.stack([m.inputs["llm"]["tokens"] for m in batch.microbatches]) for batch in (none, best))
        assert not np.array_equal(given, found)
        assert sorted(given.reshape(16, -1).tolist()) == sorted(found.reshape(16, -1).tolist())
        assert best.denominators == pytest.approx(none.denominators)
    for method in METHODS[1:]:
        assert_same_training(runs[method], runs["none"])


def test_a_position_costs_as_much_in_an_op_of_several_microbatches(tmp_path):
    """Over a position of the LLM. Alone a microbatch has a cell on each of two ranks; an op's one cell is on both."""

    def over_llm(*more: str) -> float:
        config = nested(tmp_path, "vision/Packing.buckets=((8, 64), (24, 64))", *WINDOWED, *more)
        parts = place(config, None, World.planned(config.devices))
        order = order_of(config, parts, "best")
        costs = {(kind, name): seconds for kind, name, _, seconds in order.costs}
        return order.modules["vision"].forward["vision.0"] / parts.packer.cells / costs["F", "llm.0"]

    alone = over_llm("vision/Layout.microbatches=1")
    assert over_llm() == pytest.approx(alone)
    assert over_llm("vision/Layout.microbatches=0", "Train.window=0") == pytest.approx(alone)


def test_ranks_of_cp_share_costs_and_wait_for_the_fullest(tmp_path):
    """Positions cost half on two ranks; pairs too, where both see as many, and 3/4 where the last half sees most."""
    given = ("llm/Layout.tp=1", "llm/Packing.buckets=((2, 320),)", "Data.sequence_length=320", "World.devices=6")
    given = (*given, "vision/Layout.dp=1", "vision/Layout.rank_offset=4", "vision/Packing.buckets=((16, 64),)")

    def costs(*more: str) -> Any:
        config = load_config([write_tiny(tmp_path)], [*given, *more])
        parts = place(config, None, World.planned(config.devices))
        return order_of(config, parts, "best").modules

    whole, both = costs(), costs("llm/Layout.cp=2", "vision/Layout.cp=2")
    runs = costs("llm/Layout.cp=2", "llm/Layout.cp_tokens='contiguous'")
    pairs = whole["llm"].pairs
    assert both["vision"].pairs == whole["vision"].pairs and runs["llm"].pairs == pytest.approx(1.5 * pairs, rel=0.01)
    assert pairs <= both["llm"].pairs < 1.05 * pairs
    one_sided = costs("llm/Layout.cp=2")

    def over_vision(modules: dict) -> float:
        return modules["llm"].seconds([100, 60])[0] / modules["vision"].seconds([100, 60])[0]

    seen, imbalance = pairs * (100**2 + 60**2), one_sided["llm"].pairs / pairs
    wanted = (160 + imbalance * seen) / (160 + seen) / 2
    assert over_vision(one_sided) / over_vision(whole) == pytest.approx(wanted)
