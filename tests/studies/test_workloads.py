"""The study `workloads`: every configuration of `configs/paper` is a workload of its paper, and its boundary counts."""

from __future__ import annotations

import re
from functools import cache

import pytest

from mmjax.assembly.model import build_model
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.loader import tokenizer_of
from mmjax.mesh.layout import Layout
from mmjax.models import flops
from mmjax.planner.candidates import Candidate
from mmjax.recipe import Recipe
from studies.__main__ import main
from studies.cornstarch.tables import PAIRS
from studies.nvidia.tables import RANKINGS
from studies.workloads.bridge import BRIDGES, Bridge, table
from studies.workloads.cases import CONFIGS, WORKLOADS, Published, Quantity, Workload, chosen, measured
from studies.workloads.predicted import predictions

WITHIN = 0.2
"""A name such as "14B" and the number of parameters differ by this share at most: the paper has no shapes."""
NAMES = {workload.file.stem: workload for workload in WORKLOADS}
BILLIONS = {"VLM-S": (1, 8), "VLM-M": (8, 8), "VLM-L": (18, 8), "ALM-S": (1.4, 8), "ALM-M": (7, 8), "ALM-L": (15, 8)}
BILLIONS |= {"VALM-S": (1, 1.4, 8), "VALM-M": (8, 7, 8), "VALM-L": (18, 15, 8)}
BILLIONS |= {"MLLM-9B": (0.63, 7, 1), "MLLM-15B": (0.63, 13, 1), "MLLM-72B": (0.63, 70, 1)}
BILLIONS |= {"MLLM-Understanding": (1.3, 30), "MLLM-Generation": (1.3, 30, 20)}
"""Parameters of the modules in the papers, in the order of the graph."""


@cache
def recipe(workload: Workload) -> Recipe:
    return load_config([workload.file])


def test_every_file_is_a_workload_and_every_workload_has_a_file() -> None:
    files = {path.stem for path in (CONFIGS / "paper").glob("*.gin")}
    assert files == {name for name, workload in NAMES.items() if workload.config.startswith("paper/")}
    assert all(workload.file.is_file() for workload in WORKLOADS)
    assert all(not workload.base or workload.base in {one.config for one in WORKLOADS} for workload in WORKLOADS)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one.file.stem)
def test_a_workload_is_legal_and_has_its_number_of_devices(workload: Workload) -> None:
    loaded = recipe(workload)  # validates layouts, schedule and batch
    layouts, devices = loaded.model.layouts, loaded.devices
    text = workload.file.read_text()
    if workload.paper == "NVIDIA":
        found, pages = measured(workload.model, workload.kind), {"NC": 1}
        ranking = next((r for r in RANKINGS if f"{r.encoder}+{r.llm}" == workload.model and r.vision == 50), None)
        if found:
            row, run = found
            assert devices == row.devices[pages.get(workload.kind, 0)] and loaded.train.global_batch == row.batch
            assert degrees(layouts["llm"]) == degrees(run.llm) and degrees(layouts["vision"]) == degrees(run.encoder)
            assert layouts["vision"].optimizer_instances == run.encoder.optimizer_instances
        else:
            assert ranking and devices == ranking.devices[2] and layouts["vision"] == ranking.island
        assert loaded.train.global_batch // loaded.train.microbatches == layouts["llm"].dp
    elif workload.paper == "Cornstarch":
        assert devices <= 24 and all(layout.tp == 2 for layout in layouts.values())
        if pair := next((one for one in PAIRS if one.name == f"LLM-M {workload.model}{workload.model[-1]}"), None):
            assert pair.modality == tuple(layouts[name].pp for name in ("llm", "vision", "audio"))
    else:
        assert devices == int(
            re.findall(r"(\d+) (?:devices|of 96)", text)[0] if "paper/" in workload.config else devices
        )


def degrees(layout: Layout) -> tuple[int, int, int, int]:
    return layout.tp, layout.cp, layout.pp, layout.dp


@pytest.mark.parametrize("model", list(dict.fromkeys(workload.model for workload in WORKLOADS)))
@pytest.mark.long
def test_a_model_has_as_many_parameters_as_its_name_says(model: str) -> None:
    loaded = recipe(next(workload for workload in WORKLOADS if workload.model == model))
    billions = BILLIONS.get(model) or tuple(float(size) for size in re.findall(r"([\d.]+)B", model))
    built = build_model(loaded, tokenizer_of(loaded.data.settings, loaded.model.media))
    counts = flops.parameter_count(built)
    assert [counts[name] / 1e9 for name in built.nodes] == pytest.approx(billions, rel=WITHIN)


def test_names_choose_workloads() -> None:
    assert len(chosen("")) == len(WORKLOADS)
    assert {workload.paper for workload in chosen("bigmac,cornstarch_valm")} == {"BigMac", "Cornstarch"}
    assert {workload.kind for workload in chosen("nvidia_3b_70b")} == {"H", "C", "NC"}
    with pytest.raises(ConfigError, match=r"--only=bigmc: no workload is called 'bigmc'; did you mean 'bigmac'\?"):
        chosen("bigmc")


def test_a_flag_of_the_study_goes_with_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["nvidia", "--only=bigmac"], ["--dry_run"], ["workloads", "nvidia", "--plan"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert "is of workloads alone; name it: python -m studies workloads" in capsys.readouterr().err


def test_a_ratio_is_to_the_nearest_end() -> None:
    published = Published(where="", quantity=Quantity.BEHIND, low=1.4, high=2.8)
    assert [published.ratio(value) for value in (0.7, 1.4, 2.0, 5.6)] == pytest.approx([0.5, 1.0, 1.0, 2.0])


@pytest.mark.long
def test_a_prediction_is_the_planners_estimate() -> None:
    (small,) = predictions([NAMES["nvidia_1b_7b_c"]])
    assert small.estimate.candidate == Candidate(
        mode="configured", layouts=small.recipe.model.layouts, microbatches=2, schedule="three-phase",
        offloads=small.recipe.model.offloads,
    )  # fmt: skip
    assert small.estimate.rows == {"llm": (4, 16384), "vision": (16, 2048)}
    assert small.value and small.value == pytest.approx(1.221, rel=0.15) and small.ratio == small.value / 1.221
    assert small.estimate.most == pytest.approx(small.dry_run, rel=0.1)
    assert small.estimate.padding == 0  # MFU counts full rows
    assert small.throughput == 8 / small.estimate.seconds


# ---- Figure 8 --------------------------------------------------------------------------------------------------------

TOTAL = 256 * 4096 * 8192 * 2
"""Bytes of a step's features: 256 samples of 4,096 vision tokens, 8,192 numbers each."""


@pytest.mark.parametrize("bridge", BRIDGES, ids=lambda one: one.name)
def test_bytes_of_the_boundary_by_hand(bridge: Bridge) -> None:
    payloads = [bridge.payload(direction) for direction in ("forward", "backward")]
    assert payloads == [TOTAL / bridge.llm.dp, TOTAL / bridge.encoder.dp]
    if bridge.once_a_step:  # leaders of the first stage hear from ranks of both, of which one is the leader itself
        assert bridge.arriving("forward") == TOTAL / 16
        assert bridge.busiest("forward") == bridge.busiest("backward") == TOTAL / 16
    elif bridge.mode == "C":  # a rank has half of what it needs, and all that goes back
        assert [bridge.arriving(direction) for direction in ("forward", "backward")] == [TOTAL / 32, 0]
        assert bridge.busiest("forward") == bridge.busiest("backward") == 0
    else:  # a rank of the island sends to two leaders, and hears from both
        assert [bridge.arriving(direction) for direction in ("forward", "backward")] == payloads
        assert bridge.busiest("forward") == bridge.busiest("backward") == TOTAL / 8


def test_the_boundary_takes_less_than_a_percent_and_ncs_forward_is_the_longest() -> None:
    seconds = {(one.name, way): one.by_routes(way) for one in BRIDGES for way in ("forward", "backward")}
    shares = [seconds[one.name, way] / one.step for one in BRIDGES for way in ("forward", "backward")]
    assert max(shares) < 0.01
    assert max(seconds, key=lambda key: seconds[key]) == ("NC", "forward")
    assert seconds["C", "backward"] == 0


def test_the_page_has_every_workload_and_figure_8() -> None:
    page = (CONFIGS.parent / "docs" / "workloads.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in page] == []
    for line in list(table({"C": 10.7, "NC": 10.5}))[2:]:
        assert "|".join(line.split("|")[:7]) in page, "bytes and seconds by routes; programs need a compiler"
