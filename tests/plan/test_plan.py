"""``python -m mmjax.plan`` of a configuration: tables, JSON, a gin file that a run takes, and wrong flags."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planner.models import clock, model, module
from trial_runs import REPOSITORY, write_tiny

from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.data.source import Source
from mmjax.mesh.layout import Layout
from mmjax.parity.engine import check
from mmjax.pipeline.config import OffloadConfig
from mmjax.plan import __main__ as plan
from mmjax.plan import choice as plan_choice
from mmjax.plan import work as plan_work
from mmjax.plan.planned import as_json, gin_text, planned, rows_by_candidate, table
from mmjax.plan.traced import trace_memory
from mmjax.plan.work import read_work
from mmjax.planner.accelerators import H100
from mmjax.planner.candidates import MODES, Candidate
from mmjax.planner.choose import PlanChoice, choose
from mmjax.planner.clock import AnalyticClock
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import proportional
from mmjax.planner.work import StageMemory, Work
from mmjax.recipe import Recipe
from mmjax.train.trainer import Trainer

VLM = REPOSITORY / "configs" / "digits_vlm.gin"


def losses(files: tuple[Path, ...], run: Path, *bindings: str) -> list[float]:
    config = load_config(tuple(map(str, files)), bindings)
    with Trainer(config, run, style="silent") as trainer:
        trainer.train()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


@pytest.mark.long
def test_a_plan_is_printed_written_and_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny, out = write_tiny(tmp_path, Train_eval_samples=0, Train_steps=3, Checkpoint_every=0), tmp_path / "plan.gin"
    job, jobs = tmp_path / "job.sh", tmp_path / "job.yaml"
    files = (f"--out={out}", f"--slurm={job}", f"--jobset={jobs}")
    assert plan.main([f"--gin_file={tiny}", "--devices=4", "--accelerator=A40", *files]) == 0
    text = capsys.readouterr().out
    assert f"--gin_file={out}" in job.read_text() and f"--gin_file={out}" in jobs.read_text()
    assert f"sbatch {job}" in text and f"kubectl apply -f {jobs}" in text
    assert "times: analytic: A40" in text and "nothing was measured" in text
    assert "plan: " in text and f"--gin_file={tiny} --gin_file={out}" in text
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    said = out.read_text().splitlines()[2]
    assert (
        said.startswith("# MFU ") and " of the positions are padding, " in said and "% of the FLOPs recompute" in said
    )
    config = load_config((str(tiny), str(out)), ())
    assert config.devices <= 4
    want = losses((tiny,), tmp_path / "alone")
    assert losses((tiny, out), tmp_path / "planned") == pytest.approx(want, rel=1e-5) and len(want) == 3


@pytest.mark.slow
def test_a_plan_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = write_tiny(tmp_path)
    assert plan.main([f"--gin_file={tiny}", "--devices=2", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["devices"] == 2 and found["plan"] in found["simulated"] and found["why"]
    assert found["plan"]["step_seconds"] == min(one["step_seconds"] for one in found["modes"].values())
    assert set(found["plan"]["layouts"]) == {"vision", "llm"} and found["plan"]["stages"]["llm.0"]["bytes"]
    assert 0 < found["plan"]["padding"] < 1 and 0 < found["plan"]["recompute"] < 0.2  # logits


@pytest.mark.long
def test_a_plan_on_two_kinds_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny, out = write_tiny(tmp_path, Data_workers=0), tmp_path / "plan.gin"
    job, jobs = tmp_path / "job.sh", tmp_path / "job.yaml"
    files = (f"--out={out}", f"--slurm={job}", f"--jobset={jobs}", "--json")
    assert plan.main([f"--gin_file={tiny}", "--devices=A40:2,l20:2", *files]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 4 and found["kinds"] == {"a40": 2, "l20": 2}
    assert {"homogeneous on a40", "colocated on l20"} <= {*found["modes"], *found["without_a_plan"]}
    first = out.read_text().splitlines()[0]
    for kind, own in found["plan"]["kinds"].items():
        ranks = "ranks {}-{}".format(*own["ranks"])
        assert f"{ranks} are {kind}" in first and f"{own['devices']} of 2 {kind}" in first
        assert all(found["plan"]["layouts"][name]["rank_offset"] >= own["ranks"][0] for name in own["modules"])
    several = [one for one in found["simulated"] if len(one["kinds"]) == 2]
    assert several and all(set(one["layouts"]) == {"vision", "llm"} for one in several)
    assert load_config((str(tiny), str(out)), ()).devices <= 4
    for kind in found["plan"]["kinds"]:
        assert f"--gpus-per-node={kind}:" in job.read_text() and f'"mmjax/accelerator": "{kind}"' in jobs.read_text()


@pytest.mark.slow
def test_what_does_not_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ("--gin.llm/Decoder.width=8192", "--gin.llm/Decoder.mlp=65536", "--gin.vision/Layout.dp=1")
    assert plan.main([f"--gin_file={write_tiny(tmp_path)}", *large, "--devices=1", "--accelerator=l20"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: homogeneous: llm misses by ") and error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--gin_file is missing: what is to be planned"),
        (["--gin_file={tiny}", "--problem=p.json"], "--problem: plans from numbers alone; leave --gin_file out"),
        (["--gin_file={tiny}", "--bound"], "--bound: does not go with --gin_file; leave it out"),
        (["--problem=p.json", "--out=plan.gin"], "--out: does not go with --problem; leave it out"),
        (["--gin_file={tiny}", "--accelerator=h10"], "did you mean 'h100'"),
        (["--gin_file={tiny}", "--devices=-3"], "--devices=-3: must be 1 or more, such as 8"),
        (["--gin_file={tiny}", "--devices=h100"], "--devices=h100: must be a number, such as 8, or one of each kind"),
        (["--gin_file={tiny}", "--devices=4.5"], "--devices=4.5: must be a number, such as 8, or one of each kind"),
        (["--gin_file={tiny}", "--devices=h10:4,l20:4"], "--devices=h10:4,l20:4: there is no accelerator 'h10'; did"),
        (["--gin_file={tiny}", "--devices=h100:4,"], "--devices=h100:4,: there is no accelerator ''; "),
        (["--gin_file={tiny}", "--devices=h100:0,l20:4"], "h100:0 must have a number of 1 or more, such as h100:8"),
        (["--gin_file={tiny}", "--devices=l20:4,l20:8"], "--devices=l20:4,l20:8: l20 is there twice; write l20:12"),
        (
            ["--gin_file={tiny}", "--devices=h100:4,l20:4", "--accelerator=a40"],
            "--accelerator=a40: --devices says what they are; leave it out",
        ),
        (
            ["--gin_file={tiny}", "--devices=h100:4,l20:4", "--profile=p.json"],
            "--profile: is of devices of one kind, which it names; write --devices=8",
        ),
        (
            ["--gin_file={tiny}", "--strategy=nest"],
            "--strategy=nest: there is none of this name; did you mean 'nested'",
        ),
        (["--gin_file={tiny}", "--strategy=nested,exact"], "--strategy=nested,exact: exact goes with no other; leave"),
        (["--problem=p.json", "--strategy=nested"], "--strategy=nested: there is none of this name; use 'exact' or"),
        (["--gin_file={tiny}", "--shards=none"], "--shards"),
        (["--gin_file={tiny}", "--fullest=0.5"], "--fullest=0.5: must be 1 or more, the fullest rank's rows over"),
        (["--gin_file={tiny}", "--fullest=inf"], "--fullest=inf: must be 1 or more"),
        (["--gin_file={tiny}", "--fullest=most"], "--fullest=most: must be 1 or more"),
        (["--gin_file={tiny}", "--out=plan.json"], "--out=plan.json: must be a .gin file in a directory that is there"),
        (["--gin_file={tiny}", "--slurm=plan.sh"], "--slurm: starts a run of the plan, which has to be written too"),
        (
            ["--gin_file={tiny}", "--out=plan.gin", "--jobset=plan.json"],
            "--jobset=plan.json: must be a .yaml file in a",
        ),
        (["--gin_file={tiny}", "--profile=none.json"], "none.json"),
        (["--gin_file={tiny}", "--gin.llm/Layout.pp=9"], "llm/Layout.pp=9"),
    ],
)
def test_wrong_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    tiny = write_tiny(tmp_path)
    with pytest.raises(SystemExit) as caught:
        plan.main([flag.format(tiny=tiny) for flag in flags])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1, error


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_plans_equal_one_device() -> None:
    """The plans cover every mode; chunks, windows, unequal stages and inner schedules are among them."""
    config = load_config((str(VLM),), ("Data.workers=0",))
    source = open_source(config, split="train")
    work = read_work(config, source)
    clock = AnalyticClock(work=work, accelerator=H100)
    found = [
        one.candidate
        for devices in (8, 6)
        for one in choose(work, clock, devices, rows_of=rows_by_candidate(config, source)).estimates
    ]
    several = {
        (one.mode, one.schedule, one.inner, bool(one.window), bool(one.layouts["llm"].layers)): one for one in found
    }
    some = [*several.values(), *(one for one in found if one not in several.values())][:10]
    assert len(some) == 10 and {one.mode for one in some} == set(MODES)
    for candidate in some:
        report = check(planned(config, candidate), steps=2, style="silent")
        assert report is not None and report.ok, (candidate.describe(), report)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("llm", "vision", "schedule", "offloads"),
    [
        (Layout(pp=2, dp=2), Layout(dp=4, rank_offset=4), "zb-h1", {"llm": OffloadConfig(optimizer=True)}),
        (
            Layout(pp=2, dp=2, optimizer_instances=2),
            Layout(dp=2, lanes=2, optimizer_instances=2),
            "nested",
            {"vision": OffloadConfig(optimizer=True)},
        ),
        (Layout(pp=2, dp=4, optimizer_instances=2), Layout(dp=4, optimizer_instances=4), "eager-1f1b", {}),
        (Layout(pp=2, dp=2, tp=2, chunks=4), Layout(dp=2, tp=2), "interleaved", {}),
        (Layout(pp=2, dp=2, cp=2, cp_way="all-to-all"), Layout(dp=2, cp=4), "three-phase", {}),
        (
            Layout(pp=2, dp=2, tp=2, optimizer_instances=2),
            Layout(dp=8, optimizer_instances=2),
            "three-phase",
            {"vision": OffloadConfig(parameters=True, optimizer=True), "llm": OffloadConfig(optimizer=True)},
        ),
    ],
)
def test_what_a_plan_may_have_equals_one_device(
    tmp_path: Path, llm: Layout, vision: Layout, schedule: str, offloads: dict[str, OffloadConfig]
) -> None:
    """Offload, optimizer instances, and the schedules that finalists are tried with, written to a file and read."""
    more = ("llm/Decoder.layers=8", "Train.global_batch=32")
    tiny, out = write_tiny(tmp_path), tmp_path / "plan.gin"
    config = load_config((str(tiny),), more)
    source = open_source(config, split="train")
    about = {"schedule": schedule, "inner": "zb-h1" if schedule == "nested" else "1f1b", "offloads": offloads}
    candidate = Candidate(mode="any", layouts={"vision": vision, "llm": llm}, microbatches=4, **about)
    work = read_work(config, source)
    rows = rows_by_candidate(config, source)(candidate)
    one = Estimate(work=work, clock=AnalyticClock(work=work, accelerator=H100), candidate=candidate, rows=rows)
    out.write_text(gin_text(config, PlanChoice(devices=8, estimates=[one]), one))
    written = load_config((str(tiny), str(out)), more)
    assert written.model.layouts == candidate.layouts
    assert (written.train.schedule, written.train.inner) == (schedule, candidate.inner)
    assert {n.name: n.offload for n in written.model.nodes.values() if n.offload != OffloadConfig()} == offloads
    report = check(written, steps=2, style="silent")
    assert report is not None and report.ok, report


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plan_trains_the_digits_model_to_the_same_loss(tmp_path: Path) -> None:
    out = tmp_path / "plan.gin"
    assert plan.main([f"--gin_file={VLM}", "--devices=8", f"--out={out}"]) == 0
    few = ("Train.steps=12", "Train.eval_samples=0", "Optimizer.warmup=2", "Checkpoint.every=0", "Data.workers=0")
    want, got = losses((VLM,), tmp_path / "a", *few), losses((VLM, out), tmp_path / "b", *few)
    assert got == pytest.approx(want, rel=2e-4) and len(want) == 12


# ---- what the recipe leaves to the devices ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bindings", "options", "said"),
    [
        (
            (),
            {"vision": ("dots", "full"), "llm": ("dots", "full")},
            "vision/ViT.remat='dots', llm/Decoder.remat='full'",
        ),
        (("llm/Decoder.remat=none",), {"vision": ("dots", "full")}, "vision/ViT.remat='dots'"),
        (("llm/Decoder.remat=none", "vision/ViT.remat=dots"), {}, ""),
    ],
)
def test_remat_is_chosen_where_the_recipe_leaves_it_open(
    bindings: tuple[str, ...], options: dict[str, tuple[str, ...]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, lines, tried = load_config([], list(bindings)), list[str](), []
    chosen = {name: values[name == "llm"] for name, values in options.items()}

    def read_options(_recipe: Recipe, _source: Source, *, options: dict[str, tuple[str, ...]], fullest: float) -> Work:
        tried.append(options)
        assert fullest == 1
        return WORK

    monkeypatch.setattr(plan_choice, "read_work", read_options)
    monkeypatch.setattr(plan_choice, "choose_on", lambda *_, **__: choice_with(chosen))
    source = open_source(recipe, split="train")
    choice = plan_choice.choose_plan(recipe, source, {"h100": 8}, say=lines.append)
    assert tried == [options] and choice.best.candidate.remat == chosen
    assert lines == ([f"the plan has {said}, chosen with the layouts"] if said else [])


WORK = model(module("vision", 2, 0.1), module("llm", 2, 1.0, after=("vision",)), global_batch=8)


def choice_with(remat: dict[str, str]) -> PlanChoice:
    """A plan on one device."""
    candidate = Candidate(
        mode="homogeneous", layouts={"vision": Layout(), "llm": Layout()}, microbatches=2, remat=remat
    )
    estimate = Estimate(work=WORK, clock=clock(WORK), candidate=candidate, rows=proportional(WORK)(candidate))
    return PlanChoice(devices=1, estimates=[estimate])


def test_the_remat_of_a_plan_is_in_its_file(tmp_path: Path) -> None:
    tiny, out = write_tiny(tmp_path), tmp_path / "plan.gin"
    choice = choice_with({"vision": "dots", "llm": "full"})
    out.write_text(gin_text(load_config((str(tiny),), ()), choice, choice.best))
    again = load_config((str(tiny), str(out)), ())
    assert [again.model[name].settings.remat for name in ("vision", "llm")] == ["dots", "full"]
    assert as_json(choice)["plan"]["remat"] == {"vision": "dots", "llm": "full"}
    assert any("llm one device on rank 0, all recomputed" in line for line in table(choice))


@pytest.mark.slow
def test_bytes_with_recompute_are_traced_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_config((str(write_tiny(tmp_path)),), ())
    traced = list[str]()

    def trace(recipe: Recipe, *arguments: Any) -> Callable[[str, int], StageMemory]:
        traced.append(recipe.model["llm"].settings.remat)
        return trace_memory(recipe, *arguments)

    monkeypatch.setattr(plan_work, "trace_memory", trace)
    work = read_work(recipe, options={"vision": ("dots", "full"), "llm": ("dots", "full")})
    dots, full = work.options["llm"].values()
    assert work.modules["llm"] is dots and full.computed > dots.computed and not traced
    for name, options in work.options.items():
        first, second = (options[value].memory[1] for value in ("dots", "full"))
        assert second.residuals.layer < first.residuals.layer, name
    assert traced == ["dots", "full"]
    assert read_work(recipe, options={"llm": ("full",)}).modules["llm"].memory[1] == full.memory[1]
