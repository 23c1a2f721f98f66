"""`Data.reorder`, and LLM rows of several samples: where a sample goes changes nothing of what a step computes."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import Future
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from trial_runs import Command, assert_same_training, train_flags, write_tiny

from mmjax.assembly.assembly import place, plan, planned_batch_spec
from mmjax.assembly.batches import batch_spec
from mmjax.assembly.buckets import build_packer
from mmjax.assembly.model import encoder_specs
from mmjax.assembly.orders import order_of, pair_costs, step_order
from mmjax.assembly.packers import one_bucket
from mmjax.assembly.parts import Assembly
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.loader import StepLoader, StepMaker, make_source
from mmjax.data.process_rows import ProcessRows
from mmjax.data.reorder import METHODS
from mmjax.data.service.identity import difference, identity
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import StepBatch
from mmjax.mesh.world import World
from mmjax.parity.compare import Run, compare
from mmjax.parity.dense import run_reference
from mmjax.parity.engine import check
from mmjax.parity.product import Session, initial_parameters
from mmjax.pipeline.executor import StepResult
from mmjax.recipe import Recipe
from mmjax.schedule.simulate import Costs, simulate
from mmjax.train.metrics import read_metrics
from mmjax.train.results import PendingStep
from mmjax.train.trainer import Trainer

STEPS = 2
UNEVEN = (
    f"Train.steps={STEPS}",
    "Optimizer.warmup=0",
    "Train.global_batch=16",
    "Train.microbatches=4",
    "Digits.images=(1, 4)",
    "Digits.digits=(1, 4)",
    "Digits.scale=(1.0, 2.0)",
    # Two samples a cell, both in one LLM row.
    "Data.sequence_length=320",
    "llm/Packing.buckets=((2, 320),)",
    "vision/Packing.buckets=((4, 64), (16, 64))",
)

FROZEN = ("vision/Optimizer.frozen=True", "vision_projector/Optimizer.frozen=True")
SPLIT = ("llm/Layout.pp=2", "llm/Layout.tp=1", "Train.schedule='zb-h1'")
SHARED = ("vision/Layout.rank_offset=0", "llm/Layout.tp=1", "llm/Layout.dp=2")


def uneven(folder: Path, *more: str) -> Recipe:
    return load_config([write_tiny(folder)], [*UNEVEN, *more])


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """The uneven digits in buckets, assembled."""
    config = uneven(tmp_path_factory.mktemp("uneven"))
    packer = build_packer(config, make_tokenizer("", tuple(config.model.encoders)), one_bucket=one_bucket(config))
    return Session(config, packer)


def maker(recipe: Recipe, parts: Assembly, method: str) -> StepMaker:
    specs = encoder_specs(recipe)
    source = make_source(recipe.data, specs, seed=recipe.train.seed, split="train")
    order = step_order(replace(recipe, data=recipe.data.with_settings(reorder=method)), parts)
    return StepMaker(source=source, packer=parts.packer, global_batch=recipe.train.global_batch, order=order)


@pytest.fixture(scope="module")
def runs(session: Session) -> tuple[dict[str, Run], dict[str, list[StepBatch]]]:
    """For each method, a run from the same parameters, and its batches."""
    session.executor.compile()
    found, batches = {}, {}
    for method in METHODS:
        make = maker(session.recipe, session.parts, method)
        session.batches = batches[method] = [make(step) for step in range(STEPS)]
        session.executor.initialise(session.recipe.train.seed)
        found[method] = session.run()
    return found, batches


@pytest.mark.long
def test_losses_gradients_and_updates_do_not_depend_on_the_order(runs):
    found, batches = runs
    for step in range(STEPS):
        none, best = batches["none"][step], batches["best"][step]
        assert [m.bucket for m in none.microbatches] != [m.bucket for m in best.microbatches]
        assert best.denominators == pytest.approx(none.denominators)
        assert best.counts["vision_patches"] == none.counts["vision_patches"]
        assert best.counts["vision_patches_padded"] < none.counts["vision_patches_padded"]
    want = found["none"]
    for run in (found["disttrain"], found["best"]):
        assert_same_training(run, want)


@pytest.mark.long
def test_a_perturbed_neighbour_changes_nothing_bit_for_bit(session, runs):
    """The second sample of every row has no loss: other words and images in it change no loss and no gradient."""
    batch, outcomes = runs[1]["none"][0], []
    spec = session.parts.packer.encoders["vision"]
    changed = 0
    for shift in (0, 1):
        microbatches = []
        for part in batch.microbatches:
            llm, vision = ({name: array.copy() for name, array in part.inputs[m].items()} for m in ("llm", "vision"))
            second = llm["segments"] == 2
            llm["weights"][second] = 0
            text = second & (llm["vision_index"] < 0)
            llm["tokens"][text] = (llm["tokens"][text] + shift) % 200
            patches_CNE = vision["patches"].reshape(2, -1, spec.patch_values)
            for cell, (index, own) in enumerate(zip(llm["vision_index"], second, strict=True)):
                tokens = index[own & (index >= 0)]
                for patch in range(spec.patches_per_token):
                    patches_CNE[cell, tokens * spec.patches_per_token + patch] += shift
                changed += shift * len(tokens)
            microbatches.append(replace(part, inputs={"llm": llm, "vision": vision}))
        session.batches = [replace(batch, microbatches=tuple(microbatches))]
        session.executor.initialise(session.recipe.train.seed)
        outcomes.append(session.run())
    plain, perturbed = outcomes
    assert changed > 20 and plain.losses == perturbed.losses and plain.norms == perturbed.norms
    for name, leaf in plain.leaves[1].items():
        assert np.array_equal(leaf, perturbed.leaves[1][name]), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_they_are_those_of_the_dense_reference(session, runs):
    config, source = session.recipe, maker(session.recipe, session.parts, "none").source
    samples = tuple(tuple(source.sample(16 * step + i) for i in range(16)) for step in range(STEPS))
    initial = initial_parameters(config, session.parts.packer)
    want = run_reference(session.placed.model, config.model.optimizers, initial, samples, config.train.clip_norm)
    for method in METHODS:
        found = compare(runs[0][method], want, config.model.optimizers, clip_norm=config.train.clip_norm)
        assert found.ok, (method, {quantity: found.largest(quantity) for quantity in found.limits})


def test_every_worker_and_process_finds_the_same_order(session):
    """A worker is sent the order's maker before it has ordered anything, or after."""
    make = maker(session.recipe, session.parts, "best")
    assert make.order is not None
    metas = [make.source.meta(i) for i in range(16)]
    sent = pickle.loads(pickle.dumps(make.order))
    first = make.order(metas, make.packer)
    assert sorted(first.order) == list(range(16)) and first.order != tuple(range(16))
    assert sent(metas, make.packer) == first == pickle.loads(pickle.dumps(make.order))(metas, make.packer)


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("vision/Optimizer.frozen=True",), id="projector"),
        pytest.param(FROZEN, id="frozen", marks=pytest.mark.slow),
        pytest.param(SPLIT, id="split", marks=pytest.mark.slow),
        pytest.param(("vision/Layout.dp=3",), id="empty rows", marks=pytest.mark.slow),
        pytest.param(SHARED, id="one bucket", marks=pytest.mark.slow),
    ],
)
def test_a_simulated_step_never_takes_longer(tmp_path, more):
    vision = "vision/Packing.buckets=((2, 64), (4, 64), (6, 64), (8, 64), (12, 64), (16, 64))"
    config = uneven(tmp_path, vision, "llm/Packing.buckets=((2, 160), (2, 320))", *more)
    parts = plan(config)
    assert step_order(config, parts) is None
    spans = {}
    for method in METHODS[1:]:
        make = maker(config, parts, method)
        assert make.order is not None
        metas = [make.source.meta(i) for i in range(16)]
        found = make.order(metas, make.packer)
        assert sorted(found.order) == list(range(16))
        spans["none"] = make.order.makespan(metas, make.packer)
        spans[method] = make.order.makespan([metas[i] for i in found.order], make.packer)
        assert found.figures["reorder_gain"] == spans["none"] / spans[method]
    assert spans["best"] <= min(spans.values())
    # Where all microbatches take the largest one's bucket, there may be nothing to gain.
    assert spans["best"] < spans["none"] or parts.packer.one_bucket


def test_microbatches_take_the_time_of_their_buckets(session):
    """Simulated anew: every microbatch of a stage with the seconds of its bucket."""
    make = maker(session.recipe, session.parts, "disttrain")
    assert make.order is not None
    batch, packer, overrides = make(0), session.parts.packer, {}
    assert set(make.order.modules) == {"vision", "llm"}
    for name, cost in make.order.modules.items():
        shapes = [packer.buckets_of(name)[part.bucket[name]] for part in batch.microbatches]
        seconds = [cost.seconds([width] * rows) for rows, width in shapes]
        assert len(set(seconds)) == (2 if name == "vision" else 1)
        overrides |= {(k, f"{name}.0", False, m): own[i] for m, own in enumerate(seconds) for i, k in enumerate("FB")}
    costs = {(k, n, w): own for k, n, w, own in make.order.costs}
    want = simulate(session.parts.schedule, Costs(seconds=costs, overrides=overrides)).makespan
    metas = [make.source.meta(i) for i in range(16)]
    found = make.order(metas, make.packer)
    assert make.order.makespan([metas[i] for i in found.order], make.packer) == pytest.approx(want, rel=1e-9)
    seconds = make.order.seconds(metas)
    loads = np.array(
        [[sum(own[cell].sum() for own in seconds.values()) for cell in cells] for cells in cells_of(found.order)]
    )
    assert found.figures["imbalance_nominal"] == pytest.approx(loads.max(axis=1).sum() / loads.mean(axis=1).sum())
    assert found.figures == batch.figures and found.figures["imbalance_given"] > 1


def cells_of(order):
    """Four microbatches of two cells of two samples."""
    return [[list(order[4 * m + 2 * c :][:2]) for c in range(2)] for m in range(4)]


def test_a_process_fills_the_rows_of_the_batch_that_all_have_planned(session):
    """Each of two halves, and a loader that starts at the second step, as after a resume."""
    make = maker(session.recipe, session.parts, "best")
    whole = make(1)
    inputs = {module: tuple(arrays) for module, arrays in whole.microbatches[0].inputs.items()}
    for cell in range(2):
        own = ProcessRows(cells={module: dict.fromkeys(names, (cell,)) for module, names in inputs.items()})
        with StepLoader(replace(make, process_rows=own), steps=2, start_step=1) as batches:
            (batch,) = list(batches)
        assert batch.figures == whole.figures and batch.denominators == whole.denominators
        for mine, all_rows in zip(batch.microbatches, whole.microbatches, strict=True):
            for module, names in inputs.items():
                for name in names:
                    want = np.split(all_rows.inputs[module][name], 2)[cell]
                    rows = slice(cell * len(want), (cell + 1) * len(want))
                    np.testing.assert_array_equal(mine.inputs[module][name][rows], want)


@pytest.mark.long
def test_a_row_of_metrics_says_what_reordering_changed(tmp_path):
    config = uneven(tmp_path, "Data.reorder=best")
    with Trainer(config, style="silent") as trainer, trainer._loader(1) as batches:
        batch = next(batches)
        result = StepResult({}, None, {}, {}, ())
        pending = PendingStep(step=1, result=result, batch=batch, data={}, ended=Future())
        row = pending.row(trainer.parts, trainer._throughput, 1.0, updates=0)
    assert {name: row[name] for name in batch.figures} == dict(batch.figures)
    assert row["imbalance_nominal"] < row["imbalance_given"] and row["reorder_gain"] > 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_and_a_resumed_run_take_the_same_orders(tmp_path, monkeypatch):
    """Three steps in two processes and then two more in one, with a worker; and five in one."""
    for name in ("JAX_NUM_CPU_DEVICES", "NPROC"):  # what several processes set themselves
        monkeypatch.delenv(name, raising=False)
    gin = write_tiny(tmp_path, Train_eval_samples=0)
    flags = [f"--gin.{binding}" for binding in (*UNEVEN[1:], "Data.reorder=best", "Optimizer.schedule=constant")]
    two, one = ([*train_flags(gin, tmp_path / name), *flags] for name in ("two", "one"))
    run_command("launch", ["-n", "2", "-m", "mmjax.train", *two, "--gin.Train.steps=3"], tmp_path / "first.txt")
    run_command("train", [*two, "--gin.Train.steps=5", "--gin.Data.workers=1"], tmp_path / "second.txt")
    run_command("train", [*one, "--gin.Train.steps=5"], tmp_path / "whole.txt")
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one")]
    assert [row["step"] for row in rows[0]] == [1, 2, 3, 4, 5]
    for mine, whole in zip(*rows, strict=True):
        for name in ("imbalance_nominal", "imbalance_given", "reorder_gain"):
            assert mine[name] == whole[name] >= 1
        assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_check_packs_the_llm_s_rows_where_the_configuration_does(tmp_path):
    report = check(uneven(tmp_path, "llm/Packing.buckets=((2, 160), (2, 320))"), steps=2, style="silent")
    assert report is not None and report.ok, report
    assert report.shrunk.recipe.model["llm"].packing.buckets == ((2, 40), (4, 40))


def run_command(name: str, flags: list[str], output: Path) -> None:
    command = Command(name, flags, output)
    try:
        assert command.end(600) == 0, command.text()
    finally:
        command.stop()


def test_an_encoder_costs_what_its_attention_and_the_rest_cost(session):
    """A full bucket costs what it costs nominally; pairs weigh as in the FLOPs of the encoder."""
    config, parts = session.recipe, session.parts
    order = step_order(replace(config, data=config.data.with_settings(reorder="best")), parts)
    assert order is not None
    vit = config.model["vision"].settings
    attention = 4 * vit.layers * vit.width
    rest = vit.layers * 2 * (4 * vit.width**2 + 2 * vit.width * vit.mlp) + 2 * vit.patch**2 * vit.channels * vit.width
    cost = order.modules["vision"]
    assert cost.pairs == pytest.approx(attention / rest)
    forward, backward = cost.seconds([3, 5])
    assert forward == pytest.approx((8 + cost.pairs * 34) * cost.forward["vision.0"])
    assert backward == 2 * forward
    inputs = next(iter(parts.shapes.values()))
    full = prod(inputs["vision"]["segments"].shape)
    nominal = parts.placed.nominal_costs(inputs).seconds["F", "vision.0", False]
    assert cost.forward["vision.0"] * full / parts.packer.cells == pytest.approx(nominal)
    assert np.isclose(cost.backward["vision.0"], 2 * cost.forward["vision.0"])


def test_a_generator_has_costs_of_its_own(tmp_path):
    """A module behind the LLM takes time by what is drawn in a sample, and none where nothing is."""
    draws = ("Model.generators={'painter': 'dit'}", "Digits.draw=1.0", "painter/Packing.buckets=((2, 64), (4, 64))")
    small = ("painter/DiT.layers=2", "painter/DiT.width=16", "painter/DiT.heads=2", "painter/DiT.mlp=16")
    config = uneven(tmp_path, *draws, *small, "painter/Layout.rank_offset=4", "World.transport=device_put")
    packer = build_packer(config, make_tokenizer("", config.model.media))
    parts = place(config, packer, World.planned(config.devices))
    order = order_of(config, parts, "best")
    assert set(order.modules) == {"vision", "llm", "painter"}
    inputs = next(iter(parts.shapes.values()))
    nominal, own = parts.placed.nominal_costs(inputs).seconds, order.modules["painter"]
    positions = prod(inputs["painter"]["segments"].shape) / packer.cells
    assert own.forward["painter.0"] * positions == pytest.approx(nominal["F", "painter.0", False])
    assert own.backward["painter.0"] == pytest.approx(2 * own.forward["painter.0"])
    assert own.pairs == pytest.approx(pair_costs(config)["painter"]) != order.modules["llm"].pairs
    source = open_source(config, split="train")
    metas = [source.meta(i) for i in range(16)]
    drawn = np.array([sum(meta.patches.get("painter", ())) for meta in metas])
    seconds = order.seconds(metas)
    assert 0 < (drawn > 0).sum() < 16 and np.array_equal(seconds["painter"][:, 0] > 0, drawn > 0)
    assert len(np.unique(seconds["painter"][drawn > 0], axis=0)) == 1 < len(np.unique(seconds["llm"], axis=0))
    # So small a one works while the LLM does; one that takes fifty times as long does not, and is worth ordering for.
    slow = replace(own, forward={"painter.0": 50 * own.forward["painter.0"]})
    heavy = replace(order, modules={**order.modules, "painter": slow})
    spans = [heavy.makespan([metas[i] for i in chosen], packer) for chosen in (range(16), heavy(metas, packer).order)]
    assert spans[1] < spans[0] > 1.2 * order.makespan(metas, packer)


@pytest.mark.long
def test_a_data_server_finds_the_order_of_the_run(session):
    """From the configuration alone, in a process without the run's devices, however these pass activations on."""
    config = replace(session.recipe, data=session.recipe.data.with_settings(reorder="best"))
    own = batch_spec(config, session.parts.packer, step_order(config, session.parts))
    met = replace(config, world=replace(config.world, transport="collective"))
    assert {edge.kind for edge in plan(met).placed.graph.edges} == {"rendezvous"}
    for there in (config, met):
        served = BatchSpec.from_json(json.loads(json.dumps(planned_batch_spec(there).to_json())))
        assert replace(served, data=own.data) == own
    assert own.order
    source = own.maker().source
    assert identity(served, source) == identity(own, source)
    other = replace(own, order=replace(own.order, constant_scale=2.0))
    assert f"reorder: constant_scale is {own.order.constant_scale} here and 2.0 there" == difference(
        *(identity(s, source) for s in (own, other))
    )
    for mine, theirs in zip(own.maker()(1).microbatches, served.maker()(1).microbatches, strict=True):
        assert mine.bucket == theirs.bucket
        assert np.array_equal(mine.inputs["llm"]["tokens"], theirs.inputs["llm"]["tokens"])
    assert not np.array_equal(
        own.maker()(1).microbatches[0].inputs["llm"]["tokens"],
        replace(own, order=None).maker()(1).microbatches[0].inputs["llm"]["tokens"],
    )
