"""Assembly: settings of the configuration reach the parts that they are meant for."""

from __future__ import annotations

import numpy as np
import pytest
from trial_runs import write_tiny

from mmjax import jax_compat
from mmjax.assembly.assembly import assemble, place
from mmjax.assembly.batches import own_rows
from mmjax.assembly.buckets import build_packer
from mmjax.assembly.model import build_modules, splits_of
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.loader import tokenizer_of
from mmjax.jax_compat import PlannedDevice
from mmjax.mesh.routing import LeaderRouting, SlicedRouting
from mmjax.mesh.world import World


@pytest.mark.parametrize(
    ("settings", "kind", "routing"),
    [
        ((), "async", LeaderRouting),
        (("World.transport='collective'", "World.route='sliced'"), "rendezvous", SlicedRouting),
    ],
    ids=str,
)
def test_the_world_s_transport_and_route_reach_every_boundary(tmp_path, settings, kind, routing):
    """Vision, dp=2 on ranks 2-3, hands over to the LLM, tp=2 on ranks 0-1."""
    parts = place(load_config([write_tiny(tmp_path)], settings))
    (boundary,) = parts.placed.trace(next(iter(parts.shapes.values()))).boundaries.values()
    assert boundary.kind == kind
    assert type(boundary.forward.routing) is routing
    assert {edge.kind for edge in parts.placed.graph.edges} == {kind}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # Vision on ranks 2-3 is the other process's, the LLM on ranks 0-1 is this one's: every cell.
        ([], {"llm": {"tokens": (0, 1), "targets": (0, 1), "vision_index": (0, 1)}}),
        # Ranks 0-3 hold both modules. Of four cells two are this process's, in either layout.
        (
            ["vision/Layout.dp=4", "vision/Layout.rank_offset=0", "llm/Layout.dp=2"],
            {"vision": {"patches": (0, 1), "segments": (0, 1)}, "llm": {"tokens": (0, 1), "weights": (0, 1)}},
        ),
        # Of vision's ranks 2-4 this process has the first, of the LLM's ranks 0-1 all.
        (
            ["vision/Layout.dp=3", "llm/Layout.dp=2", "llm/Layout.tp=1"],
            {"vision": {"patches": (0, 1)}, "llm": {"tokens": (0, 1, 2, 3, 4, 5)}},
        ),
        # The LLM's last stage is the other process's: of what enters there this one reads nothing.
        (
            ["vision/Layout.rank_offset=0", "llm/Layout.dp=2", "llm/Layout.tp=1", "llm/Layout.pp=2"],
            {"vision": {"patches": (0, 1)}, "llm": {"tokens": (0, 1), "positions": (0, 1), "targets": None}},
        ),
    ],
    ids=["apart", "colocated", "shared", "stages"],
)
def test_a_process_reads_the_rows_of_its_own_devices(tmp_path, settings, wanted):
    """There are two processes; this one has the lower half of the ranks."""
    config = load_config([write_tiny(tmp_path)], settings)
    half = -(-config.devices // 2)
    world = World(PlannedDevice(rank, process_index=rank // half) for rank in range(config.devices))
    parts = place(config, world=world)
    own = own_rows(parts.placed, parts.packer.inputs, config.train.microbatches)
    assert own is not None
    for module, inputs in wanted.items():
        for name, cells in inputs.items():
            assert own.cells[module].get(name) == cells, (module, name)
    assert own.cells.keys() == wanted.keys()


def test_in_one_process_all_rows_are_its_own(tmp_path):
    assert own_rows(place(load_config([write_tiny(tmp_path)])).placed, {}, 2) is None


def test_a_pipeline_in_one_program_is_refused_to_several_processes(tmp_path, monkeypatch):
    """In one line, before any device is touched."""
    settings = ["Train.lowering='single'", "vision/Layout.rank_offset=0", "llm/Layout.pp=2", "llm/Layout.tp=1"]
    config = load_config([write_tiny(tmp_path)], settings)
    monkeypatch.setattr(jax_compat, "process_count", lambda: 4)
    monkeypatch.setattr(World, "create", lambda *_, **__: pytest.fail("a device was touched"))
    fix = "a pipeline is one program in one process, this run has 4; set it to 'auto'"
    with pytest.raises(ConfigError, match=f"^Train.lowering='single': {fix}$"):
        assemble(config)


def test_rows_are_as_wide_as_ranks_of_cp_and_tp_can_share(tmp_path):
    """In encoders into whole tokens of the LLM, for every bucket."""
    degrees = ("llm/Layout.cp=3", "vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.rank_offset=6")
    config = load_config([write_tiny(tmp_path)], degrees)
    splits = splits_of(config)
    (merge,) = {build_modules(config)["vision"].patches_per_token}
    assert (splits["llm"].ranks, splits["llm"].unit) == (3, 2)
    assert (splits["vision"].ranks, splits["vision"].unit) == (1, 2 * merge) and not splits["vision"].permutes
    unshared = load_config([write_tiny(tmp_path)], (*degrees, "vision/Layout.sp=False", "llm/Layout.sp=False"))
    assert {name: (own.ranks, own.unit) for name, own in splits_of(unshared).items()} == {"llm": (3, 1)}
    shapes = place(config).shapes.values()
    assert all(of["llm"]["tokens"].shape[1] % 6 == of["vision"]["patches"].shape[1] % (2 * merge) == 0 for of in shapes)


@pytest.mark.parametrize("buckets", [(), 1, 4], ids=["derived", "one bucket", "four buckets"])
def test_ranks_of_cp_have_whole_media_in_rows_that_are_not_given(tmp_path, buckets):
    """With a row for each medium, every medium would lie on all ranks, and these would exchange its keys."""
    degrees = ("vision/Layout.dp=1", "vision/Layout.cp=2", "vision/Layout.cp_tokens='segments'")
    config = load_config([write_tiny(tmp_path)], (*degrees, f"vision/Packing.buckets={buckets}"))
    source = open_source(config, split="train")
    packer = build_packer(config, tokenizer_of(config.data.settings, config.model.media), source=source)
    metas = [source.meta(index) for index in range(config.train.global_batch // config.train.microbatches)]
    plan = packer.plan_microbatch(metas, len(metas)).encoders["vision"]
    (places,), (rows, width) = plan.places, packer.buckets_of("vision")[plan.bucket]
    sizes = [size for meta in metas for size in meta.segments("vision")]
    assert len(places) == len(sizes) > rows > 0
    segments_RT = np.zeros((rows, width), np.int32)
    for number, ((row, start), size) in enumerate(zip(places, sizes, strict=True)):
        segments_RT[row, start : start + size] = number + 1
    for segments_T in segments_RT:
        ranks = segments_T[packer.splits["vision"].order_of_row({"segments": segments_T})].reshape(2, -1)
        assert not set(ranks[0][ranks[0] > 0]) & set(ranks[1])
