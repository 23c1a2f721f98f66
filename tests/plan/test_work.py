"""Work read from a configuration: FLOPs and parameters are the model's, graphs and bytes those of the run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mmjax.assembly.assembly import plan
from mmjax.assembly.buckets import build_packer
from mmjax.assembly.model import build_model
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.data.loader import StepMaker
from mmjax.data.process_rows import ProcessRows
from mmjax.data.tokenizer import make_tokenizer
from mmjax.mesh.world import World
from mmjax.models import flops
from mmjax.pipeline.memory import memory_by_stage
from mmjax.pipeline.peak import Peak, fullest
from mmjax.plan.configured import configured
from mmjax.plan.work import mask_pairs, module_work, padded_rows, read_work, real_work
from mmjax.planner.accelerators import H100
from mmjax.planner.clock import AnalyticClock
from mmjax.planner.estimate import Estimate
from mmjax.planner.work import Work
from mmjax.recipe import Recipe
from mmjax.train.throughput import Throughput

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ("Data.workers=0", "llm/Decoder.remat='full'", "Train.dtype='bfloat16'")


@cache
def read(name: str, *bindings: str) -> tuple[Recipe, Work]:
    config = load_config((str(CONFIGS / name),), bindings)
    return config, read_work(config)


def estimate(recipe: Recipe, work: Work) -> tuple[Estimate, dict, Peak]:
    parts = plan(recipe)
    clock = AnalyticClock(work=work, accelerator=H100)
    one = Estimate(work=work, clock=clock, candidate=configured(recipe), rows=padded_rows(recipe, parts.packer))
    assert one.graph == parts.placed.graph
    held = (parts.placed, parts.schedule, parts.shapes.values())
    return one, memory_by_stage(*held), fullest(*held)


def assert_bytes_of_the_run(recipe: Recipe, work: Work, within: float) -> None:
    one, run, peak = estimate(recipe, work)
    if any(need.host for need in one.device_bytes.values()):
        assert one.most == pytest.approx(peak.bytes, rel=within)
    for stage, memory in run.items():
        need = one.device_bytes[stage]
        assert need.weights == pytest.approx(memory.parameters + memory.optimizer, rel=0.02), stage
        assert need.gradients == pytest.approx(memory.gradients, rel=0.02), stage
        # What a checkpointed norm and head keep of their inputs is counted once by a part alone, twice by a stage.
        assert need.activations == pytest.approx(memory.activations, rel=within), stage
        assert need.total == pytest.approx(memory.total, rel=within), stage
        assert need.host == pytest.approx(memory.host, rel=0.02), stage


def test_flops_and_parameters_are_the_models() -> None:
    config = load_config((str(CONFIGS / "digits_vlm.gin"),), (*SMALL, "vision/Optimizer.frozen=True"))
    model = build_model(config, make_tokenizer(config.data.settings.tokenizer, config.model.media))
    counts = flops.parameter_count(model)
    vision, llm = (module_work(config, model, name, width) for name, width in (("vision", 168), ("llm", 88)))
    for module, projector in ((vision, "vision_projector"), (llm, None)):
        name = module.name
        assert module.parameters.of(module.whole) == counts[name] + (counts[projector] if projector else 0)
        lengths = flops.forward_flops(model, {name: [module.width]})
        assert module.forward.of(module.whole) == lengths[name] + (lengths[projector] if projector else 0)
        # Segments of one token have no attention but that of each to itself.
        alone = flops.forward_flops(model, {name: [1] * module.width})[name]
        config, itself = model.nodes[name].config, module.layers * module.width * 4 * module.model_width
        assert module.attention * module.layers - itself == lengths[name] - alone > 0
        assert module.heads == (config.heads, getattr(config, "kv_heads", config.heads))
        assert module.ring == 2 * 2 * module.width * module.model_width * module.heads[1] / module.heads[0]
    # The encoder is frozen and its projector trained, so the encoder has no backward. The LLM's recomputes all.
    assert vision.trained.layer == vision.backward.layer == 0 and vision.backward.last == 2 * vision.forward.last
    assert llm.backward.layer == 3 * llm.forward.layer and llm.backward.last == 3 * llm.forward.last
    assert (llm.recompute.layer, llm.recompute.last) == (llm.forward.layer, llm.forward.last)
    assert llm.sums == (2, 5) and vision.sums == (2, 3)


WORDS = ("llm/Decoder.mask='cornstarch'", "llm/Decoder.chunk=20", "llm/Decoder.full_every=2")


@pytest.mark.long
@pytest.mark.parametrize("mask", [(), WORDS], ids=["causal", "words"])
def test_model_flops_and_positions_are_those_of_the_metrics(mask: tuple[str, ...]) -> None:
    """Sums over all steps of a short run agree. Samples differ in length; padding and recompute do not count."""
    short = ("Train.steps=2", "Optimizer.warmup=0", "Train.global_batch=32", "vision/Optimizer.frozen=True")
    config = load_config((str(CONFIGS / "digits_vlm.gin"),), (*SMALL, *short, *mask))
    tokenizer, source = make_tokenizer("", tuple(config.model.media)), open_source(config, split="train")
    model = build_model(config, tokenizer).with_vocab(tokenizer.vocab_size)
    packer = build_packer(config, tokenizer, source=source)
    make = StepMaker(source=source, packer=packer, global_batch=32)
    throughput = Throughput(model, World.planned(config.devices), {"vision"}, peak_tflops=1.0)
    batches = [make(step) for step in range(2)]
    pairs = mask_pairs(model, packer, source, range(64))
    assert bool(pairs) == bool(mask)
    real = real_work(config, model, [source.meta(index) for index in range(64)], pairs)
    counted = sum(map(throughput.flops, batches))
    if mask:  # fewer pairs than a causal mask's
        assert counted < 64 * sum(
            own.flops for own in real_work(config, model, [*map(source.meta, range(64))]).values()
        )
        # A process with the rows of some cells takes the others for like these.
        own = ProcessRows(cells={"llm": dict.fromkeys(packer.inputs["llm"], (0,))})
        some = throughput.flops(replace(make, process_rows=own)(0))
        assert packer.cells > 1 and some != throughput.flops(batches[0]) == pytest.approx(some, rel=0.02)
        none = replace(make, process_rows=ProcessRows(cells={"llm": {}}))(0)
        assert throughput.flops(none) > throughput.flops(batches[0])  # without any it takes them for causal
    assert 64 * sum(own.flops for own in real.values()) == pytest.approx(counted, rel=1e-12)
    for name, count in (("llm", "llm_tokens"), ("vision", "vision_patches")):
        assert 64 * real[name].positions == pytest.approx(sum(batch.counts[count] for batch in batches))
    assert len({meta.tokens for meta in map(source.meta, range(64))}) > 1


def test_rows_have_the_share_of_pairs_that_samples_have() -> None:
    """Of each mask: what a sample's window leaves of its causal pairs is what is computed of a row's."""
    config = load_config((str(CONFIGS / "digits_vlm.gin"),), (*SMALL, *WORDS, "llm/Decoder.layers=4"))
    model = build_model(config, make_tokenizer(config.data.settings.tokenizer, config.model.media))
    masks, width, llm = model.nodes["llm"].module.masks, 88, model.llm
    shares = {mask: 0.5 if mask.grid_window else 0.75 for _, mask in masks}
    plain, counted = (module_work(config, model, "llm", width, own).forward for own in (None, shares))
    chunks = [*[20] * 4, 8]
    causal = [sum(n * (n + 1) // 2 for n in (chunks if mask.grid_window else [width])) for _, mask in masks]
    seen = [round(shares[mask] * width * (width + 1) / 2) for _, mask in masks]
    more = sum(layers * (new - old) for (layers, _), new, old in zip(masks, seen, causal, strict=True))
    assert counted.layer - plain.layer == pytest.approx(4 * more * llm.heads * llm.head_width / llm.layers)
    assert (counted.first, counted.last) == (plain.first, plain.last)


@pytest.mark.long
def test_graph_and_bytes_are_the_runs() -> None:
    config, work = read("digits_vlm.gin", *SMALL, "vision/Packing.buckets=((8, 168), (12, 168))")
    vision, llm = work.modules["vision"], work.modules["llm"]
    assert (vision.rows, vision.width, llm.rows, llm.width) == (0.75, 168, 1.0, 64) and work.item == 2
    assert tuple(vision.memory) == tuple(llm.memory) == (1, 2, 4)
    assert llm.after == ("vision",) and work.encoders == ("vision",) and work.generators == ()
    assert_bytes_of_the_run(config, work, within=0.07)


@pytest.mark.slow
def test_bytes_of_another_tp() -> None:
    config, work = read("digits_vlm.gin", *SMALL)
    layouts = {"llm": replace(config.model["llm"].layout, pp=1), "vision": replace(config.model["vision"].layout, tp=2)}
    assert_bytes_of_the_run(replace(config, model=config.model.with_layouts(layouts)), work, within=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("digits_vlm.gin", "digits_vlm_colocated.gin", "digits_vlm_homogeneous.gin", "digits_valm.gin"),
        *("digits_draw.gin", "llava15_homogeneous.gin"),
    ],
)
def test_graph_and_bytes_of_every_configuration(name: str) -> None:
    config, work = read(name)
    assert_bytes_of_the_run(config, work, within=0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_graph_and_bytes_of_a_generator_in_lanes() -> None:
    lanes = ("Layout.lanes=2", "Layout.rank_offset=0", "Layout.dp=4")
    spread = tuple(f"{name}/{one}" for name in ("vision", "audio", "painter") for one in lanes)
    config, work = read("digits_draw.gin", *spread, "Train.schedule='nested'", "Train.microbatches=8")
    assert_bytes_of_the_run(config, work, within=0.1)


THREE = ("llm/Layout.dp=2", "llm/Layout.tp=2", "llm/Layout.pp=2", "Train.schedule='three-phase'")
NESTED = (*THREE[:3], "Train.schedule='nested'", "vision/Layout.dp=2", "vision/Layout.tp=2", "vision/Layout.lanes=2")
WIDER = ("Train.microbatches=8", "Train.global_batch=128")
LEAN = ("llm/Decoder.remat='full'", "Train.microbatches=8")
COLOCATED, APART, TOGETHER = "digits_vlm_colocated.gin", "digits_vlm.gin", "digits_vlm_homogeneous.gin"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "bindings"),
    [
        (COLOCATED, (*THREE, "vision/Offload.parameters=True")),
        (COLOCATED, (*THREE, *WIDER, "vision/Layout.microbatches=0")),
        (COLOCATED, (*THREE, *WIDER, "Train.window=4", "vision/Layout.microbatches=2")),
        (COLOCATED, (*THREE, "vision/Offload.optimizer=True", "llm/Offload.optimizer=True")),
        (COLOCATED, (*THREE, "vision/Offload.parameters=True", "llm/Offload.optimizer=True", "Train.dtype='bfloat16'")),
        (APART, ("vision/Offload.optimizer=True", "llm/Offload.optimizer=True")),
        (APART, ("vision/Layout.optimizer_instances=2",)),
        # How many W's a split backward defers follows from costs, which are nominal in a run, so few cases are alike.
        (APART, ("Train.schedule='zb-h1'",)),
        (APART, ("Train.schedule='eager-1f1b'", "Train.microbatches=8")),
        (TOGETHER, ("Train.schedule='interleaved'", "llm/Layout.chunks=4", "llm/Decoder.layers=8")),
        (COLOCATED, (*NESTED, "Train.microbatches=8")),
        (APART, ("llm/Layout.tp=1", "llm/Layout.cp=2", "vision/Layout.dp=2", "vision/Layout.cp=2")),
        (COLOCATED, (*NESTED, "Train.inner='zb-h1'", *LEAN)),
        (COLOCATED, (*NESTED, "vision/Layout.optimizer_instances=2", "vision/Offload.optimizer=True")),
    ],
)
def test_graph_and_bytes_of_what_plans_may_have(name: str, bindings: tuple[str, ...]) -> None:
    # What a layer needs does not depend on layouts and schedules: as few readings as there are models.
    model = tuple(one for one in bindings if "Decoder" in one or "dtype" in one)
    config = load_config((str(CONFIGS / name),), ("Data.workers=0", *bindings))
    work = read(APART, "Data.workers=0", *model)[1]
    assert_bytes_of_the_run(config, replace(work, global_batch=config.train.global_batch), within=0.1)
