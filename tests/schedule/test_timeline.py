"""Pictures and traces of timelines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image
from stage_graphs import TIE, chain, colocated, connect, offloaded, stage, two_encoders

from mmjax.schedule.ops import PARAMETER_COPIES
from mmjax.schedule.schedules import forward_only, gpipe, make_schedule, one_f_one_b
from mmjax.schedule.simulate import Costs, Timeline, simulate
from mmjax.schedule.timeline import draw_timeline, write_trace


def _timeline(graph, microbatches: int = 4, make=one_f_one_b, **nominal) -> Timeline:
    costs = Costs.nominal(graph, **nominal)
    return simulate(make(graph, microbatches, costs), costs)


def _spanning():
    """A frozen encoder over the submeshes of two LLM stages."""
    nodes = [stage("vision.0", range(4), backward=False), stage("llm.0", (0, 1)), stage("llm.1", (2, 3))]
    return connect(nodes, [("vision.0", "llm.0"), ("llm.0", "llm.1")], "rendezvous")


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved while a test runs."""
    saved = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure, *args, **kwargs):
        saved.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return saved


def test_a_picture_shows_rows_numbers_and_figures_of_the_step(tmp_path, figures):
    timeline = _timeline(two_encoders(), move=0.1, once=0.3)
    draw_timeline(timeline, tmp_path / "timeline.png")
    axes = figures[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["one.0\nrank 0", "one.1\nrank 1"]
    title = figures[0].get_suptitle()
    assert "1f1b, simulated: 6 stages × 4 microbatches" in title
    assert f"bubble {timeline.bubble:.1%}" in title and f"makespan {timeline.makespan:.4g} s" in title
    numbers = [text.get_text() for text in axes.texts]
    assert sorted(numbers) == sorted(str(m) for m in range(4) for _ in range(12))  # F and B of six stages
    (legend,) = figures[0].legends
    labels = {text.get_text() for text in legend.get_texts()}
    assert labels == {f"{m} {way}" for m in ("one", "two", "llm") for way in ("forward", "backward")} | {
        "prepare", "reduce", "update", "idle", "move"
    }  # fmt: skip


def test_a_picture_has_ink_of_every_module(tmp_path):
    draw_timeline(_timeline(two_encoders()), tmp_path / "timeline.png")
    with Image.open(tmp_path / "timeline.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    for colour in ("2f6db5", "e07b29", "3a9a5b"):  # backward of the first three modules
        rgb = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)])
        assert (np.abs(pixels.astype(int) - rgb).sum(axis=1) == 0).mean() > 0.01


def test_an_encoder_over_two_submeshes_is_on_both_rows(tmp_path, figures):
    draw_timeline(_timeline(_spanning()), tmp_path / "timeline.png")
    axes = figures[0].axes[0]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["vision.0, llm.0\nranks 0–1", "vision.0, llm.1\nranks 2–3"]
    assert len(axes.texts) == 4 * (2 + 2 + 2)  # the encoder's F on both rows, F and B of the two LLM stages
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert "vision forward" in labels and "vision backward" not in labels


@pytest.mark.parametrize(
    ("graph", "microbatches", "make"),
    [(chain(1), 1, gpipe), (colocated(2), 3, one_f_one_b), (chain(3), 2, forward_only), (chain(4), 8, gpipe)],
)
def test_pictures_of_all_kinds_are_written(tmp_path, graph, microbatches, make):
    draw_timeline(_timeline(graph, microbatches, make), tmp_path / "timeline.png")
    with Image.open(tmp_path / "timeline.png") as image:
        assert image.format == "PNG" and image.width >= 9 * 100


def test_a_step_without_time_can_be_drawn(tmp_path):
    draw_timeline(_timeline(chain(2), forward=0.0), tmp_path / "timeline.png")
    with Image.open(tmp_path / "timeline.png") as image:
        assert image.width > 0


def test_a_wide_picture_stays_within_limits(tmp_path, figures):
    draw_timeline(_timeline(chain(2), 60), tmp_path / "timeline.png")
    width, height = figures[0].get_size_inches()
    assert width == 40 and 2 < height < 4
    draw_timeline(_timeline(chain(3), 4), tmp_path / "timeline.png")
    assert 9 <= figures[1].get_size_inches()[0] < 14


def _trace(timeline: Timeline, path) -> dict[str, list[dict]]:
    write_trace(timeline, path)
    events = json.loads(path.read_text())["traceEvents"]
    phases = defaultdict(list)
    for event in events:
        phases[event["ph"]].append(event)
    return phases


def test_a_trace_has_a_process_per_module_and_a_thread_per_rank(tmp_path):
    phases = _trace(_timeline(_spanning(), once=0.3), tmp_path / "trace.json")
    names = {e["args"]["name"]: e["pid"] for e in phases["M"] if e["name"] == "process_name"}
    assert list(names) == ["vision", "llm", "world"]
    threads = defaultdict(list)
    for event in phases["M"]:
        if event["name"] == "thread_name":
            threads[event["pid"]].append(event["tid"])
    assert threads == {names["vision"]: [0, 1, 2, 3], names["llm"]: [0, 1, 2, 3], names["world"]: [0, 1, 2, 3]}


def test_a_trace_has_a_slice_per_op_and_rank_in_microseconds(tmp_path):
    timeline = _timeline(_spanning(), move=0.1)
    phases = _trace(timeline, tmp_path / "trace.json")
    slices = [e for e in phases["X"] if e["name"] == "F llm.1 microbatch 2"]
    start, end = next(span for op, span in timeline.spans.items() if str(op) == "F llm.1 microbatch 2")
    assert [e["tid"] for e in slices] == [2, 3]
    for event in slices:
        assert event["ts"] == pytest.approx(start * 1e6) and event["dur"] == pytest.approx((end - start) * 1e6)
        assert event["cat"] == "F" and event["args"] == {"stage": "llm.1", "microbatch": 2}
    # A rendezvous is a slice on both sides.
    moves = [e for e in phases["X"] if e["name"] == "move llm.0->llm.1 microbatch 0"]
    assert sorted(e["tid"] for e in moves) == [0, 1, 2, 3]


@pytest.mark.parametrize("move", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["async", "rendezvous"])
def test_a_trace_has_a_flow_per_move_between_slices(tmp_path, kind, move):
    graph = chain(3, kind)
    phases = _trace(_timeline(graph, 3, move=move), tmp_path / "trace.json")
    starts, ends = ({e["id"]: e for e in phases[phase]} for phase in "sf")
    assert len(starts) == len(ends) == 2 * 2 * 3
    assert starts.keys() == ends.keys()
    spans = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in phases["X"] if e["dur"]]
    for flow in (*starts.values(), *ends.values()):
        inside = [1 for pid, tid, a, b in spans if (pid, tid) == (flow["pid"], flow["tid"]) and a <= flow["ts"] <= b]
        assert inside
    assert all(abs(starts[i]["tid"] - ends[i]["tid"]) == 1 and starts[i]["ts"] <= ends[i]["ts"] for i in starts)
    spans_of_their_own = len(phases["b"])
    assert spans_of_their_own == len(phases["e"]) == (12 if kind == "async" else 0)


@pytest.mark.parametrize("once", [0.0, 0.2])
def test_a_trace_shows_a_weight_come_and_its_gradient_go(tmp_path, once):
    """The way to the borrower is the first thing in a step: without a time of its own it starts at no slice."""
    timeline = _timeline(chain(3, tied=True), 3, move=0.1, once=once)
    phases = _trace(timeline, tmp_path / "trace.json")
    spans = {event["name"]: event["ts"] / 1e6 for event in phases["b"]}
    assert spans[f"move {TIE}"] == 0 and spans[f"move {TIE} backward"] > 0
    flows = {e["id"]: e for e in phases["s"]}
    assert len(flows) == len(phases["f"]) == 2 * 2 * 3 + 1
    boxes = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in phases["X"] if e["dur"]]
    for flow in (*flows.values(), *phases["f"]):
        assert any((p, t) == (flow["pid"], flow["tid"]) and a <= flow["ts"] <= b for p, t, a, b in boxes)


def test_a_picture_has_an_arrow_for_each_way_of_a_tie(tmp_path, figures):
    for tied in (False, True):
        draw_timeline(_timeline(chain(3, tied=tied), 3, move=0.1), tmp_path / "timeline.png")
    plain, tied = (next(c for c in figure.axes[0].collections if hasattr(c, "U")) for figure in figures)
    assert tied.N == plain.N + 2
    assert sorted(tied.V)[0] < -1 and sorted(tied.V)[-1] > 1  # over a row between


def test_nothing_imports_jax_or_pyplot(tmp_path):
    program = (
        "import sys\n"
        "from mmjax.schedule import graph, ops, schedules, simulate, timeline, validate\n"
        "assert 'matplotlib' not in sys.modules, 'matplotlib was imported before anything was drawn'\n"
        "nodes = graph.StageNode(name='llm.0', module='llm', index=0, ranks=(0,))\n"
        "one = graph.StageGraph(stages=(nodes,))\n"
        "costs = simulate.Costs.nominal(one)\n"
        "timeline.draw_timeline(simulate.simulate(schedules.gpipe(one, 1, costs), costs), sys.argv[1])\n"
        "assert not {'jax', 'matplotlib.pyplot'} & set(sys.modules), 'jax or pyplot was imported'\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "one.png")], check=True, timeout=120)


def test_weights_and_copies_have_marks_of_their_own(tmp_path, figures):
    graph = replace(offloaded(), stages=tuple(replace(node, split=True) for node in offloaded().stages))
    seconds = {(kind, "e0.0", False): 1.0 for kind in PARAMETER_COPIES}
    costs = Costs.nominal(graph)
    costs = Costs(seconds={**costs.seconds, **seconds})
    timeline = simulate(make_schedule("three-phase", graph, 3, costs), costs)
    draw_timeline(timeline, tmp_path / "timeline.png")
    labels = {text.get_text() for text in figures[0].legends[0].get_texts()}
    assert {"e0 forward", "e0 backward", "e0 weights", "e0 copies to and from the host", "llm weights"} <= labels
    assert "llm copies to and from the host" not in labels
    (axes,) = figures[0].axes[:1]
    stripes = [box for box in axes.collections if box.get_paths() and box.get_paths()[0].get_extents().height < 0.1]
    assert sum(len(box.get_paths()) for box in stripes) == 2  # an offload and a reload on the one row
    write_trace(timeline, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    free = {event["name"] for event in events if event["ph"] == "b"}
    assert free >= {f"{kind} e0.0 microbatch 0" for kind in PARAMETER_COPIES}


LONG = ("an_encoder_whose_name_somebody_chose_at_length", "another_encoder_with_a_name_of_many_words")


def _many(names):
    nodes = [stage(f"{name}.0", range(2)) for name in names] + [stage("llm.0", range(2)), stage("llm.1", (2, 3))]
    return connect(nodes, [*((f"{name}.0", "llm.0") for name in names), ("llm.0", "llm.1")], "async")


@pytest.mark.long
@pytest.mark.parametrize(
    ("graph", "microbatches"),
    [
        (chain(1), 1),
        (two_encoders(), 2),
        (_many(LONG), 2),
        (_many([f"encoder{i}" for i in range(8)]), 2),
        (chain(8), 32),
    ],
)
def test_nothing_of_a_picture_is_cut_off(tmp_path, figures, graph, microbatches):
    """The steps drawn are a short one, one with long names, one with many encoders and one of the greatest width."""
    source = (
        "simulated, the first 8 of 64 microbatches; analytic profile of an accelerator with a long name, network too"
    )
    draw_timeline(
        _timeline(graph, microbatches), tmp_path / "t.png", source=source, unit="forwards of the costliest stage"
    )
    (figure,) = figures
    page, renderer = figure.bbox, figure.canvas.get_renderer()
    axes = figure.axes[0]
    texts = [figure._suptitle, *axes.get_yticklabels(), *axes.child_axes[0].get_yticklabels()]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    for text in texts:
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0 and box.x1 <= page.x1 and box.y0 >= 0 and box.y1 <= page.y1, (text.get_text(), box, page)
    title = figure.get_suptitle().replace("\n", " ")
    assert source in title and title.endswith(f"bubble {_timeline(graph, microbatches).bubble:.1%}")
    assert axes.get_position().width > 0.5
