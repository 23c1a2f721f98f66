"""Layouts: the arithmetic of ranks, layers and cells."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout, ModuleSizes, cell_count, show_range, split_layers

steady = settings(derandomize=True, deadline=None)

DEGREES = st.integers(1, 4)
LAYOUTS = st.builds(Layout, dp=DEGREES, pp=DEGREES, cp=DEGREES, tp=DEGREES, rank_offset=st.integers(0, 9))
CHUNKED = st.builds(Layout, dp=DEGREES, pp=st.integers(2, 4), chunks=DEGREES, tp=DEGREES, rank_offset=st.integers(0, 9))


def test_sizes_are_products_of_the_degrees():
    layout = Layout(dp=2, pp=3, cp=5, tp=7, ep=10, rank_offset=4)
    assert (layout.replica_size, layout.stage_size, layout.size) == (35, 70, 210)
    assert layout.ranks == tuple(range(4, 214))


def test_rows_divide_among_ranks_that_share_their_tokens():
    assert (Layout(cp=3, tp=4).row_multiple, Layout(cp=3, tp=4, sp=False).row_multiple, Layout(dp=2).row_multiple) == (
        12,
        3,
        1,
    )
    assert [Layout(tp=tp, sp=sp).shares_tokens for tp, sp in ((1, True), (2, True), (2, False))] == [False, True, False]
    with pytest.raises(ConfigError, match=r"Layout\.overlap=True: ranks that share no tokens exchange none"):
        Layout(tp=2, sp=False, overlap=True)


def test_the_default_is_the_first_device():
    assert (Layout().ranks, Layout().size) == ((0,), 1)


@steady
@given(LAYOUTS)
def test_a_rank_counts_pp_then_dp_then_cp_then_tp(layout):
    for pp, dp, cp, tp in itertools.product(*(range(n) for n in (layout.pp, layout.dp, layout.cp, layout.tp))):
        within = (dp * layout.cp + cp) * layout.tp + tp
        rank = layout.rank_offset + ((pp * layout.dp + dp) * layout.cp + cp) * layout.tp + tp
        assert layout.stage_ranks(pp)[within] == rank


@steady
@given(LAYOUTS)
def test_stages_are_consecutive_and_cover_the_module(layout):
    stages = [layout.stage_ranks(stage) for stage in range(layout.pp)]
    assert tuple(itertools.chain.from_iterable(stages)) == layout.ranks
    assert {len(stage) for stage in stages} == {layout.stage_size}


@steady
@given(CHUNKED)
def test_chunks_go_round_the_stage_submeshes_and_take_no_ranks(layout):
    plain = dataclasses.replace(layout, chunks=1)
    assert (layout.stages, layout.size, layout.ranks) == (layout.pp * layout.chunks, plain.size, plain.ranks)
    for stage in range(layout.stages):
        assert layout.stage_ranks(stage) == plain.stage_ranks(stage % layout.pp)
        if stage:  # so an edge inside the module never stays on its submesh, nor does a tie of its ends
            assert not set(layout.stage_ranks(stage)) & set(layout.stage_ranks(stage - 1))
    assert not set(layout.stage_ranks(0)) & set(layout.stage_ranks(layout.stages - 1))


@pytest.mark.parametrize(("stage", "chunks"), [(-1, 1), (2, 1), (-1, 3), (6, 3)])
def test_a_stage_that_the_layout_lacks_is_refused(stage, chunks):
    fix = rf"pp=2, chunks={chunks}: use a stage from 0 to {2 * chunks - 1}"
    with pytest.raises(IndexError, match=rf"^stage {stage} of Layout\.{fix}$"):
        Layout(dp=2, pp=2, chunks=chunks).stage_ranks(stage)


def test_chunks_want_several_stage_submeshes():
    with pytest.raises(ConfigError, match=r"^Layout\.chunks=2: .* Layout\.pp=1 has one; set it to 1$"):
        Layout(dp=2, chunks=2)
    assert Layout(pp=2, tp=2, chunks=3).describe() == "pp=2 chunks=3 tp=2 on ranks 0-3"


@pytest.mark.parametrize("field", ["dp", "pp", "chunks", "copies", "cp", "tp", "ep", "optimizer_instances"])
@pytest.mark.parametrize("value", [0, -2])
def test_degrees_start_at_one(field, value):
    with pytest.raises(ConfigError, match=rf"^Layout\.{field}={value}: must be at least 1; set it to 1$"):
        Layout(**{field: value})


def test_the_offset_starts_at_zero():
    with pytest.raises(ConfigError, match=r"^Layout\.rank_offset=-1: must be at least 0; set it to 0$"):
        Layout(rank_offset=-1)


def test_degrees_are_named_and_cannot_be_changed():
    with pytest.raises(TypeError, match="positional"):
        Layout(2)  # pyright: ignore[reportCallIssue]
    layout = Layout(dp=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.dp = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_copies_are_of_a_whole_module():
    layout = Layout(copies=3, dp=2, tp=2, rank_offset=1)
    assert (layout.size, layout.stage_ranks(0), layout.optimizer_shards) == (12, tuple(range(1, 13)), 2)
    assert layout.describe() == "dp=2 copies=3 tp=2 on ranks 1-12"
    for other in ("pp", "lanes"):
        fix = rf"^Layout\.copies=2: .* Layout\.{other}=2; set {other} to 1$"
        with pytest.raises(ConfigError, match=fix):
            dataclasses.replace(Layout(copies=2), **{other: 2})


def test_ep_divides_dp_times_cp():
    assert Layout(dp=2, cp=3, ep=6).size == 6
    with pytest.raises(ConfigError, match=r"^Layout\.ep=4: must divide dp\*cp=6; set it to 1$"):
        Layout(dp=2, cp=3, tp=4, ep=4)


def test_lanes_are_runs_of_ranks_that_all_together_are_one_layout():
    layout = Layout(lanes=3, dp=2, tp=2, rank_offset=4, optimizer_instances=2)
    assert (layout.size, layout.ranks, layout.optimizer_shards) == (12, tuple(range(4, 16)), 3)
    assert [layout.lane(k).ranks for k in range(3)] == [(4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert all((layout.lane(k).dp, layout.lane(k).tp, layout.lane(k).lanes) == (2, 2, 1) for k in range(3))
    assert (layout.across_lanes.dp, layout.across_lanes.lanes, layout.across_lanes.ranks) == (6, 1, layout.ranks)
    assert layout.across_lanes.optimizer_shards == layout.optimizer_shards
    assert cell_count([layout, Layout(dp=3)]) == 6
    plain = Layout(dp=2)
    assert plain.across_lanes == plain.lane(0) == plain


def test_lanes_are_of_one_stage():
    with pytest.raises(ConfigError, match=r"^Layout\.lanes=2: .*Layout\.pp=3; set pp to 1$"):
        Layout(lanes=2, pp=3)
    with pytest.raises(ConfigError, match=r"must divide Layout\.lanes\*Layout\.dp \(6\)"):
        Layout(lanes=3, dp=2, optimizer_instances=4)


def test_optimizer_instances_divide_dp():
    layout = Layout(dp=8, tp=2, optimizer_instances=4)
    assert (layout.optimizer_shards, layout.size) == (2, 16)
    assert layout.describe() == "dp=8 tp=2 optimizer_instances=4 on ranks 0-15"
    with pytest.raises(ConfigError, match=r"^Layout\.optimizer_instances=3: must divide Layout\.dp \(8\), such as 4$"):
        Layout(dp=8, optimizer_instances=3)
    with pytest.raises(ConfigError, match=r"^Layout\.optimizer_instances=2: must divide Layout\.dp \(1\), such as 1$"):
        Layout(optimizer_instances=2)


def test_describe_names_degrees_above_one_and_ranks():
    assert Layout(tp=2, pp=2).describe() == "pp=2 tp=2 on ranks 0-3"
    assert Layout(dp=4, cp=2, ep=2, rank_offset=4).describe() == "dp=4 cp=2 ep=2 on ranks 4-11"
    everything = Layout(dp=6, pp=3, cp=4, tp=5, ep=2)
    assert everything.describe() == "dp=6 pp=3 cp=4 tp=5 ep=2 on ranks 0-359"
    assert Layout(pp=2, chunks=3, cp=2).describe() == "pp=2 chunks=3 cp=2 on ranks 0-3"
    assert Layout(dp=4, ep=2, optimizer_instances=2).describe() == "dp=4 ep=2 optimizer_instances=2 on ranks 0-3"
    experts = Layout(dp=2, tp=2, ep=2, ep_way="all-to-all", expert_tp=1)
    assert experts.describe() == "dp=2 tp=2 ep=2 ep_way=all-to-all expert_tp=1 on ranks 0-3"
    assert Layout(rank_offset=3).describe() == "one device on rank 3"
    split = Layout(cp=2, cp_way="need", cp_tokens="segments")
    assert split.describe() == "cp=2 cp_way=need cp_tokens=segments on ranks 0-1"


@steady
@given(st.integers(0, 90), st.integers(1, 12))
def test_layers_are_split_into_contiguous_runs_as_equal_as_possible(layers, stages):
    runs = split_layers(layers, stages)
    sizes = [len(run) for run in runs]
    assert len(runs) == stages
    assert list(itertools.chain.from_iterable(runs)) == list(range(layers))
    assert max(sizes) - min(sizes) <= 1


@steady
@given(st.integers(0, 90), st.integers(1, 12))
def test_spare_layers_go_to_the_middle_then_to_the_first_stage(layers, stages):
    base, surplus = divmod(layers, stages)
    extra = [len(run) - base for run in split_layers(layers, stages)]
    middle = extra[1:-1]
    assert middle == sorted(middle, reverse=True)
    assert sum(middle) == min(surplus, len(middle))
    assert extra[-1] == 0 or surplus == stages


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (7, 1, [7]),
        (8, 4, [2, 2, 2, 2]),
        (5, 2, [3, 2]),
        (9, 4, [2, 3, 2, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
    ],
)
def test_split_of_known_cases(layers, stages, sizes):
    assert [len(run) for run in split_layers(layers, stages)] == sizes


@steady
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans())
def test_given_layers_are_contiguous_runs_in_order(counts, chunked):
    pp, chunks = (len(counts) // 2, 2) if chunked and len(counts) in (4, 6) else (len(counts), 1)
    layout = Layout(pp=pp, chunks=chunks, layers=tuple(counts))
    runs = layout.runs(sum(counts))
    assert [len(run) for run in runs] == counts
    assert list(itertools.chain.from_iterable(runs)) == list(range(sum(counts)))
    assert layout.describe().endswith(f"layers={'+'.join(map(str, counts))} on {show_range(0, pp - 1)}")


def test_layers_are_split_equally_unless_given():
    assert Layout(pp=3).runs(8) == split_layers(8, 3) == (range(3), range(3, 6), range(6, 8))
    assert Layout(pp=3, layers=(2, 2, 4)).runs(8) == (range(2), range(2, 4), range(4, 8))


@pytest.mark.parametrize(
    ("layers", "fix"),
    [
        ((3, 5), r"must have a number for each of the pp \* chunks = 4 stages; use \(2, 2, 2, 2\)"),
        ((3,), r"must have a number for each of the pp \* chunks = 4 stages; use \(\)"),
        ((1, 1, 1, 1, 1), r"must have a number for each of the pp \* chunks = 4 stages; use \(1, 2, 1, 1\)"),
        ((3, 0, 1, 1), r"a stage needs a layer; use \(1, 2, 1, 1\)"),
        ((9, 1, 1, -1), r"a stage needs a layer; use \(2, 3, 3, 2\)"),
    ],
)
def test_every_stage_has_a_number_of_layers(layers, fix):
    with pytest.raises(ConfigError, match=rf"^Layout\.layers={re.escape(repr(layers))}: {fix}$"):
        Layout(pp=2, chunks=2, layers=layers)


@steady
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_cells_are_the_least_common_multiple_of_all_dp(degrees):
    count = cell_count(Layout(dp=dp, tp=3, pp=2) for dp in degrees)
    assert all(count % dp == 0 for dp in degrees)
    assert not any(all(n % dp == 0 for dp in degrees) for n in range(1, min(count, math.prod(degrees))))


SIZES = ModuleSizes(
    layers=4, heads=8, by_tp={"m/D.heads": 8, "m/D.kv_heads": 2, "m/D.mlp": 12}, replicable=["m/D.kv_heads"]
)


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(tp=2, cp=4, cp_way="all-to-all"), Layout(tp=2, cp=3)])
def test_layouts_that_divide_a_module(layout):
    layout.check("m", SIZES)
    Layout().check("m", ModuleSizes(layers=1))


EXPERTS = ModuleSizes(layers=4, heads=8, experts=6, by_tp={"m/D.heads": 8}, by_expert_tp={"m/D.expert_mlp": 9})


@pytest.mark.parametrize("layout", [Layout(dp=4, ep=2), Layout(dp=2, cp=3, ep=6), Layout(tp=2, expert_tp=1)])
def test_layouts_that_divide_experts(layout):
    layout.check("m", EXPERTS)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(dp=4, ep=4), "m/Layout.ep=4: 4 ranks share 6 experts, which it must divide; use another"),
        (
            Layout(dp=2, tp=2, ep=2, expert_tp=1),
            "m/Layout.ep=2: 4 ranks share 6 experts, which it must divide; use another",
        ),
        (Layout(tp=2), "m/Layout.tp=2: must divide m/D.expert_mlp (9); use 1"),
    ],
)
def test_layouts_that_do_not_divide_experts(layout, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        layout.check("m", EXPERTS)


@pytest.mark.parametrize(
    ("degrees", "parts"),
    [
        ({"dp": 4, "ep": 2}, (2, 1)),
        ({"cp": 4, "ep": 2}, (1, 2)),
        ({"dp": 2, "cp": 2, "ep": 4}, (2, 2)),
        ({"dp": 3, "cp": 2, "ep": 3}, (3, 1)),
        ({"dp": 2, "cp": 6, "ep": 4}, (2, 2)),
    ],
)
def test_ep_takes_ranks_of_cp_first(degrees, parts):
    assert Layout(**degrees).ep_degrees == parts


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(dp=2, ep=2), "m/Layout.ep=2: the module has no experts; set it to 1"),
        (Layout(tp=8), "m/Layout.tp=8: must divide m/D.mlp (12); use 2"),
        (Layout(tp=3), "m/Layout.tp=3: must divide m/D.heads (8); use 2"),
        (
            Layout(tp=2, cp=3, cp_way="all-to-all"),
            "m/Layout.cp_way='all-to-all': cp=3 does not divide the 4 ",
        ),
        (Layout(pp=5), "m/Layout.pp=5: a stage needs a layer and there are 4"),
        (Layout(pp=2, chunks=3), "m/Layout.chunks=3: pp * chunks = 6 stages need a layer each and there are 4; use 2"),
        (Layout(pp=2, layers=(2, 3)), "m/Layout.layers=(2, 3): sums to 5 and there are 4; use (2, 2)"),
    ],
)
def test_layouts_that_do_not_divide_a_module(layout, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        layout.check("m", SIZES)


def test_a_lane_computes_with_whole_parameters():
    """Its ranks share masters with those of other lanes, and never each other's parameters."""
    layout = Layout(lanes=2, dp=2, optimizer_instances=4, shard="parameters")
    assert not layout.gathers_layers and not layout.lane(1).gathers_layers and not layout.lane(1).scatters_gradients
