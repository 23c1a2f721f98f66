"""Programs and steps of a configuration, compiled for CPUs that stand in for GPUs; the command; wrong flags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest

from mmjax.compile import __main__ as command
from mmjax.compile import targets
from mmjax.compile.executables import SUFFIX, Compiler
from mmjax.compile.forecast import forecast
from mmjax.compile.programs import STEP, Programs
from mmjax.compile.report import misfit, step_figures
from mmjax.compile.roofline import pair_arrays
from mmjax.compile.step import Step
from mmjax.compile.targets import TARGETS, Target, has_compiler, target
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.models.flops import training_flops
from mmjax.pipeline.memory import shard_bytes
from mmjax.plan import __main__ as plan
from mmjax.recipe import Recipe
from mmjax.schedule.ops import Op

pytestmark = pytest.mark.long

SETTINGS = (
    *("llm/Decoder.layers=4", "llm/Decoder.width=64", "llm/Decoder.heads=2", "llm/Decoder.mlp=96"),
    *("llm/Layout.pp=4", "vision/Layout.rank_offset=4", "vision/ViT.layers=1", "vision/ViT.width=32"),
    *("vision/ViT.heads=2", "Train.microbatches=4", "Train.global_batch=4", "Train.steps=2", "Train.eval_samples=0"),
    *("llm/Packing.buckets=()", "vision/Packing.buckets=1", "Train.unroll=False"),
    *("llm/Decoder.remat='none'", "vision/ViT.remat='none'"),
)


@dataclass(frozen=True, kw_only=True)
class Here(Target):
    """CPUs in place of GPUs."""

    def devices(self, count: int) -> list[Any]:
        return jax.devices("cpu")[:count]


HERE = Here(**vars(TARGETS["h100"]))


def recipe_of(*settings: str) -> Recipe:
    return load_config([], [*SETTINGS, *settings])


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(HERE)


@pytest.fixture
def programs(compiler: Compiler) -> Programs:
    return Programs(recipe_of(), HERE, compiler=compiler)


def test_equal_programs_are_compiled_once(programs: Programs) -> None:
    distinct = programs.distinct()
    assert programs.compiler.compiled <= len(distinct) < len(programs.names)
    by_name = {name: compiled.names for compiled in distinct for name in compiled.names}
    assert set(by_name) == set(programs.names)
    assert {name.split()[0] for name in by_name} >= {"F", "B", "reduce", "update", "norm"}
    kinds = {(use.kind, use.name, use.backward) for use in programs.uses}
    assert {("F", "llm.1", False), ("B", "vision.0", False), ("update", "llm.3", False)} <= kinds


def test_a_last_backward_that_reduces_is_in_the_step(compiler: Compiler) -> None:
    settings = "llm/Layout.pp=1", "llm/Layout.dp=2", "vision/Layout.rank_offset=2", "Train.unroll=True"
    programs = Programs(recipe_of(*settings, "Train.overlap_grad_reduce=True"), HERE, compiler=compiler)
    (use,) = (use for use in programs.uses if use.kind == "B+reduce")
    assert use.program.name == "B+reduce llm.0" and "reduce llm.0" not in programs.names
    step = Step(programs)
    timeline = step.timeline(HERE.rates)
    assert timeline
    seconds = {op: end - start for op, (start, end) in timeline.spans.items()}
    *_, last = (op for op in timeline.schedule.for_stage("llm.0") if op.kind == "B")
    assert seconds[last] == pytest.approx(programs.work(use, HERE.rates).ordered)
    assert seconds[Op("reduce", "llm.0")] == 0 < seconds[Op("B", "llm.0", 0)] < seconds[last]
    assert step.fullest.bytes and programs.of(use).model_flops.causal


def test_a_step_has_all_of_its_ops(programs: Programs) -> None:
    """A step's seconds follow from the schedule: longer than any rank's work, shorter than all ranks' together."""
    step = Step(programs)
    timeline = step.timeline(HERE.rates)
    assert timeline and 0 < timeline.bubble < 1 and step.seconds(HERE.rates) == timeline.makespan
    assert step.seconds(HERE.fast_rates) < step.seconds(HERE.rates)
    moves = [op for op in timeline.schedule.ops if op.kind == "move"]
    assert moves and all(timeline.span(op)[1] > timeline.span(op)[0] for op in moves)
    updates = [op for op in timeline.schedule.ops if op.kind == "update"]
    assert all(timeline.span(op)[1] > timeline.span(op)[0] for op in updates)


def test_model_flops_of_stages_are_the_models(programs: Programs) -> None:
    """Rows of one segment and full width: the stages' FLOPs add up to those of the formula."""
    model, shapes = programs.assembly.placed.model, next(iter(programs.assembly.shapes.values()))
    lengths = {name: [inputs["segments"].shape[1]] * inputs["segments"].shape[0] for name, inputs in shapes.items()}
    special = model.nodes["vision"].module.medium
    assert special
    lengths["vision"] = [length - special.special for length in lengths["vision"]]
    counted = sum(
        programs.of(use).model_flops.causal for use in programs.uses if use.kind in ("F", "B", "W") and use.signature
    )
    assert counted == pytest.approx(sum(training_flops(model, lengths).values()))
    step = Step(programs)
    assert 0 < step.flops.causal < step.flops.full


def test_the_fullest_device_and_what_takes_most(programs: Programs) -> None:
    figures = step_figures(programs, step := Step(programs))
    memory = figures["memory"]
    assert memory["fits"] and 0 < memory["bytes"] <= sum(memory["kinds"].values())
    small = Programs(programs.recipe, replace(HERE, memory=10_000), compiler=programs.compiler)
    fullest = Step(small).fullest
    assert not fullest.fits and fullest.bytes == step.fullest.bytes
    text = misfit(fullest)
    assert f"rank {fullest.rank} holds" in text and fullest.blame.program in text and "\n" not in text
    assert fullest.blame.kind in memory["kinds"]
    assert max(memory["kinds"].values()) == fullest.blame.bytes


def test_a_step_of_one_program(compiler: Compiler) -> None:
    one = ("llm/Layout.pp=1", "vision/Layout.rank_offset=0", "Train.schedule='gpipe'", "Train.lowering='single'")
    programs = Programs(recipe_of(*one), HERE, compiler=compiler)
    assert {use.kind for use in programs.uses} == {STEP}
    step = Step(programs)
    figures = step_figures(programs, step)
    assert figures["bubble"] == 0 and figures["predicted_seconds"] > 0 and step.timeline(HERE.rates) is None
    (compiled,) = programs.distinct()
    assert compiled.executable.bytes == figures["memory"]["bytes"]
    assert compiled.model_flops.causal >= step.flops.causal  # rows are padded


def test_a_second_run_finds_the_programs(programs: Programs, tmp_path: Path) -> None:
    use = next(use for use in programs.uses if use.kind == "reduce")
    first = Compiler(HERE, tmp_path)
    made = first(use.program)
    second = Compiler(HERE, tmp_path)
    assert second(use.program) == made and (first.compiled, second.compiled) == (1, 0)
    (file,) = tmp_path.glob(f"*{SUFFIX}")
    file.write_bytes(file.read_bytes()[:100])
    third = Compiler(HERE, tmp_path)
    assert third(use.program).text == made.text and third.compiled == 1
    assert Compiler(replace(HERE, memory=1), tmp_path).key(use.program) != third.key(use.program)
    assert made.arguments > 0 and made.aliased <= made.results


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(command, "target", lambda name: HERE)
    monkeypatch.setattr(command, "require_compiler", lambda: None)
    yield


def test_the_command_says_what_programs_need(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gin = tmp_path / "run.gin"
    gin.write_text("\n".join(setting.replace("=", " = ", 1) for setting in SETTINGS), encoding="utf-8")
    hlo = tmp_path / "hlo"
    arguments = [f"--gin_file={gin}", f"--hlo={hlo}"]
    assert command.main([*arguments, "--json"]) == 0
    *found, step = map(json.loads, capsys.readouterr().out.splitlines())
    assert {"F vision.0", "B llm.0", "update llm.0"} <= {name for one in found for name in one["programs"]}
    assert all(one["memory"]["total"] > 0 and one["launches"] > 0 for one in found)
    assert step["program"] == "step" and step["devices"] == 5 and step["memory"]["fits"]
    assert step["samples_per_second"] == pytest.approx(4 / step["predicted_seconds"])
    assert 0 < step["mfu"] < step["mfu_full_attention"]
    text = (hlo / "B_llm.0.hlo.txt").read_text()
    assert text.startswith("HloModule") and len(list(hlo.glob("*.hlo.txt"))) == len(found)
    monkeypatch.setattr(command, "target", lambda name: replace(HERE, memory=10_000))
    assert command.main(arguments) == 1
    out = capsys.readouterr().out
    assert "does not fit: rank " in out and "; most is " in out and "F llm.1" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--for=h10"], "error: --for=h10: nothing compiles for it; did you mean 'h100'?\n"),
        (["--for=tpu"], "error: --for=tpu: nothing compiles for it; use 'h100' or 'h200' or 'a100'\n"),
        ([], "error: --gin_file is missing: name a configuration, such as --gin_file=digits_vlm\n"),
        (["--fr=h100"], "error: --fr=h100: no flag --fr; did you mean '--for'?\n"),
        (["--hlo=setup.py"], "error: --hlo='setup.py': is a file; name a folder\n"),
    ],
)
def test_a_wrong_command_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2 and capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile_for=tpu"], "--compile_for=tpu: nothing compiles for it; use 'h100' or 'h200' or 'a100'"),
        (
            ["--compile_for=a100"],
            "--compile_for=a100: the devices are h100; write --accelerator=a100",
        ),
        (["--compile_for=h100"], "jax has no compiler for CUDA here: pip install 'jax[cuda12]'; no GPU is needed"),
    ],
)
def test_plans_are_compiled_for_the_devices_that_they_are_for(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "has_compiler", lambda: False)
    with pytest.raises(SystemExit) as end:
        plan.main(["--gin_file=digits_vlm", "--devices=4", *arguments])
    assert end.value.code == 2 and capsys.readouterr().err == f"error: {message}\n"


def test_without_a_compiler_for_cuda_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "has_compiler", lambda: False)
    with pytest.raises(SystemExit) as end:
        command.main(["--gin_file=digits_vlm"])
    assert end.value.code == 2
    assert "pip install 'jax[cuda12]'; no GPU is needed" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"jax has no compiler for CUDA here"):
        target("H100").devices(1)


# ---- for GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize(("way", "kernel"), [("auto", "__cudnn$fmhaSoftmax"), ("blockwise", ""), ("dense", "")])
def test_a_configuration_compiled_for_h100s(way: str, kernel: str) -> None:
    """A stage at tp 2: the way's kernels or none, arrays of all pairs in the oracle alone, reduce-scatters counted."""
    sizes = ["llm/Decoder.layers=2", "llm/Decoder.width=256", "llm/Decoder.mlp=512", f"llm/Decoder.attention='{way}'"]
    run = ["Train.dtype='bfloat16'", "Train.microbatches=2", "Train.global_batch=2", "vision/Layout.rank_offset=2"]
    rows = ["Data.sequence_length=1120", "llm/Packing.buckets=()", "llm/Layout.tp=2", "llm/Decoder.remat='none'"]
    programs = Programs(load_config([], [*sizes, *run, *rows, "Train.unroll=False"]))
    for name, runs in (("F llm.0", 2), ("B llm.0", 2)):
        compiled = programs.compiled(name)
        work = compiled.work()
        found = {one.removesuffix("Backward"): times for one, times in work.targets.items() if "fmha" in one}
        assert found == ({kernel: runs} if kernel else {})
        assert bool(pair_arrays(compiled.module, 1120)) == (way == "dense")
        assert work.collectives["reduce-scatter"].count >= 2 * runs and work.total > work.hidden
    step = Step(programs)
    assert 0 < step.seconds(programs.target.rates, hidden=True) < step.seconds(programs.target.rates)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("buckets", "mask"), [("()", "CAUSAL"), ("((2, 512),)", "PADDING_CAUSAL")], ids=["whole rows", "packed rows"]
)
def test_no_program_waits_for_a_branch(buckets: str, mask: str) -> None:
    """XLA copies the index of a conditional to the host, and waits; F, B and W have none."""
    sizes = [f"llm/Decoder.{name}" for name in ("layers=2", "width=256", "mlp=512", "remat='full'")]
    sizes += ["vision/ViT.width=128", "vision/ViT.heads=2", "Data.sequence_length=512"]
    run = ["Train.dtype='bfloat16'", "Train.microbatches=2", "Train.global_batch=8", "Train.schedule='zb-h1'"]
    layouts = ["vision/Layout.rank_offset=2", "llm/Layout.pp=2"]
    programs = Programs(load_config([], [*sizes, *run, *layouts, f"llm/Packing.buckets={buckets}"]))
    names = [name for name in programs.names if name[0] in "FBW"]
    assert {name[0] for name in names} == set("FBW")
    for name in names:
        compiled = programs.compiled(name)
        assert not compiled.work().conditionals, name
        kernels = [one.text for one in compiled.module.instructions.values() if "__cudnn$fmha" in one.text]
        assert bool(kernels) == (name[0] != "W")
        assert all(f'"mask_type": "{mask}"' in text for text in kernels if "llm" in name)


@pytest.mark.compiled
def test_a_last_backward_hides_its_reduction() -> None:
    """Of four layers all but the first one's reductions lie beside products, in no more memory and without a copy."""
    sizes = [f"llm/Decoder.{name}" for name in ("layers=4", "width=2048", "heads=16", "mlp=5632", "remat='dots'")]
    sizes += ["vision/ViT.layers=1", "Data.sequence_length=2048", "llm/Packing.buckets=()", "Train.unroll=True"]
    run = ["Train.dtype='bfloat16'", "Train.microbatches=2", "Train.global_batch=32", "vision/Layout.rank_offset=4"]
    programs = Programs(load_config([], [*sizes, *run, "llm/Layout.dp=4"]))
    assert "reduce llm.0" not in programs.names
    alone, both = programs.compiled("B llm.0"), programs.compiled("B+reduce llm.0")
    work = both.work()
    assert work.collectives["reduce-scatter"].count and work.shown < 0.5 * work.seconds["collectives"]
    assert work.accumulating == alone.work().accumulating
    assert both.temporary_bytes < 1.05 * alone.temporary_bytes
    counted = forecast(programs, both.use)
    assert counted and abs(counted.error) < 0.1


@pytest.mark.compiled
def test_needed_blocks_travel_without_a_branch() -> None:
    """Each program has the transfers of its reach: two arrays over each distance, or none."""
    sizes = ["llm/Decoder.layers=1", "llm/Decoder.width=256", "llm/Decoder.mlp=512", "llm/Decoder.remat='none'"]
    layout = ["llm/Layout.cp=4", "llm/Layout.tp=1", "llm/Layout.cp_way='need'", "llm/Layout.cp_tokens='contiguous'"]
    run = ["Train.dtype='bfloat16'", "Train.microbatches=2", "Train.global_batch=8", "Data.sequence_length=512"]
    buckets = ["llm/Packing.buckets=((2, 512),)", "llm/Layout.dp=1", "llm/Layout.pp=1", "vision/Layout.rank_offset=4"]
    programs = Programs(load_config([], [*sizes, *layout, *run, *buckets]))
    transfers = dict[tuple[str, int], float]()
    for use in programs.uses:
        if use.program.name in ("F llm.0", "B llm.0"):
            work = programs.of(use).work()
            assert not work.conditionals, use
            sent = work.collectives.get("collective-permute")
            transfers[use.kind, dict(use.signature or ())["llm.reach"]] = sent.count if sent else 0
    assert {reach for (_, reach), count in transfers.items() if not count} == {0, 3}  # 3: one all-gather
    assert all(0 < transfers[kind, 1] < transfers[kind, 2] for kind in "FB"), transfers


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("tower", "of_layer", "beside"),
    [
        ((), 10, 22),
        (
            ("vision/ViT.preset='siglip-so400m-14-384'", "Digits.scale=(47.25, 47.25)", "Data.sequence_length=768"),
            9,
            21,
        ),
    ],
    ids=["CLIP, 577 tokens", "SigLIP, 729 tokens"],
)
def test_a_frozen_tower_copies_nothing_around_its_products(tower: tuple[str, ...], of_layer: int, beside: int) -> None:
    """A layer has six products, attention, two norms, and CLIP's activation, which cuBLASLt does not have."""
    layers = 4
    settings = [f"vision/ViT.layers={layers}", "llm/Decoder.layers=7"]
    work = Programs(load_config(["llava15"], [*settings, *tower])).compiled("F vision.0").work()
    assert sum(work.products.values()) == 6 * layers + 4  # patches, positions, and the projector's two
    assert work.kernels == work.launches <= of_layer * layers + beside


@pytest.mark.compiled
def test_a_step_that_does_not_fit_names_the_buffer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Embedding and head of 16 GiB in fp32, with moments, sums and copies: more than an H100 has."""
    sizes = [f"--gin.llm/Decoder.{name}" for name in ("layers=1", "width=8192", "mlp=64", "heads=64", "vocab=262144")]
    run = ["Train.dtype='bfloat16'", "Train.microbatches=2", "Train.global_batch=2", "vision/Layout.rank_offset=1"]
    arguments = ["--gin_file=digits_vlm", *sizes, *(f"--gin.{setting}" for setting in run), "--gin.llm/Layout.tp=1"]
    rows = ["--gin.llm/Packing.buckets=()", "--gin.llm/Layout.pp=1", f"--cache={tmp_path}", "--for=H100"]
    assert command.main([*arguments, *rows]) == 1
    out = capsys.readouterr().out
    assert "does not fit: rank 0 holds " in out and "most is optimizer of" in out and "['master']['llm']" in out
    assert "at faster rates" in out and "add to an accumulator" in out and "mmjax/models/" in out
    assert list(tmp_path.glob(f"*{SUFFIX}"))


@pytest.mark.compiled
@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_understood(name: str) -> None:
    """XLA reads the description, and compiles a product."""
    chosen = target(name)
    (device,) = chosen.devices(1)
    assert has_compiler() and device.device_kind == chosen.device_kind and device.platform == "gpu"
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = jax.ShapeDtypeStruct((256, 256), jax.numpy.bfloat16, sharding=sharding)
    text = jax.jit(lambda x: x @ x).lower(array).compile().as_text()
    assert text and "HloModule" in text


@pytest.mark.compiled
@pytest.mark.parametrize(
    "settings",
    [
        ("llm/Layout.pp=2", "llm/Layout.dp=2", "vision/Layout.rank_offset=4", "llm/Decoder.remat='none'"),
        ("llm/Layout.tp=2", "vision/Layout.rank_offset=2", "llm/Decoder.remat='dots'", "vision/Layout.dp=2"),
        ("llm/Layout.cp=2", "vision/Layout.rank_offset=2", "llm/Decoder.remat='dots'", "Data.sequence_length=4096"),
    ],
    ids=["dp 2, all kept", "tp 2, products kept", "cp 2, attention by blocks, products kept"],
)
def test_a_dry_run_counts_what_programs_take(settings: tuple[str, ...]) -> None:
    """Within 10 %; and no argument lies in another one's memory, which `memory_analysis` would leave out."""
    sizes = [f"llm/Decoder.{name}" for name in ("layers=4", "width=2048", "heads=16", "kv_heads=16", "mlp=5504")]
    sizes += ["vision/ViT.width=1024", "vision/ViT.heads=16", "Data.sequence_length=1024", "llm/Packing.buckets=()"]
    run = ["Train.dtype='bfloat16'", "Train.microbatches=2", "Train.global_batch=16", "Train.unroll=True"]
    programs = Programs(load_config([], [*sizes, *run, *settings]))
    found = {use.program.name: (use, memory) for use in programs.uses if (memory := forecast(programs, use))}
    assert {name.split()[0] for name in found} == {"F", "B", "reduce", "update"}
    for name, (use, memory) in found.items():
        assert abs(memory.error) < 0.1, (name, memory)
        read = zip(jax.tree.leaves(use.program.avals), use.program.reads(), strict=True)
        counted = shard_bytes([aval for aval, is_read in read if is_read])
        assert programs.executable(use).arguments == pytest.approx(counted, rel=1e-4), name


@pytest.mark.compiled
def test_experts_beside_an_encoder_with_another_layout_have_no_loops() -> None:
    """One program of modules with different meshes, cuDNN's attention, and kernels for products of experts."""
    sizes = ["llm/Decoder.layers=1", "llm/Decoder.width=256", "llm/Decoder.heads=4", "vision/ViT.layers=1"]
    experts = ["llm/Decoder.experts=8", "llm/Decoder.experts_per_token=2", "llm/Decoder.expert_mlp=128"]
    layouts = ["llm/Layout.dp=4", "llm/Layout.tp=2", "llm/Layout.ep=4", "llm/Layout.ep_way='all-to-all'"]
    run = ["vision/Layout.dp=8", "Train.dtype='bfloat16'", "Train.microbatches=1", "Train.global_batch=8"]
    programs = Programs(load_config([], [*sizes, *experts, *layouts, *run, "Data.sequence_length=512"]))
    compiled = programs.distinct()[0]
    assert compiled.use and compiled.use.kind == STEP
    work = compiled.work()
    assert work.flops["grouped"] and work.flops["attention"] and not work.conditionals
    assert all(instruction.kind != "while" for _, _, instruction in compiled.module.run(0, 1.0))
    assert compiled.routed == pytest.approx(1 / 4)  # a buffer holds all tokens of a rank, and one of four has experts
