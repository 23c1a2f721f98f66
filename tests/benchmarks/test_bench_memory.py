"""Bytes of stages as plans have them against compiled programs: within 10 % in total, by stage and device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trial_runs import write_tiny

from benchmarks import memory as bench
from mmjax.assembly.assembly import assemble
from mmjax.config import load_config
from mmjax.plan.work import padded_rows
from mmjax.planner.work import StagePart
from mmjax.profile.trials import ONE, TWO

FROZEN_WITHIN = 0.12


def assert_near(stages: Mapping[str, bench.Compared], within: float = bench.WITHIN) -> None:
    for name, one in stages.items():
        assert one.temporaries > 0
        assert one.uncounted < 0.03, name  # tables of pointers
        assert one.predicted.total == pytest.approx(one.total, rel=within), name
        # All but temporaries is the same, whatever those are from.
        assert replace(one.predicted, temporaries=0.0) == replace(one.traced, temporaries=0.0), name


@pytest.mark.long
def test_trials_have_the_temporaries_of_the_programs_that_train(tmp_path: Path) -> None:
    """On one device as in dp, by tp and rows of a replica; the figures between trials are tested by the slow ones."""
    config = load_config([str(write_tiny(tmp_path))], ["Train.lowering='ops'"])
    parts = assemble(config)
    clock = bench.compiled_clock(config, [config.model.layouts], shapes=1, cuts=(ONE, TWO))
    rows = padded_rows(config, parts.packer)
    for name, programs in bench.stage_programs(parts).items():
        stage = parts.placed.stages[name]
        layout, (count, width) = stage.submesh.layout, rows[stage.model.module]
        whole = StagePart(layers=config.model[stage.model.module].settings.layers, first=True, last=True)
        shape: Any = {"rows": count / layout.dp, "width": width}
        needed = clock.temporaries(stage.model.module, whole, tp=layout.tp, **shape)
        # A profile's rows are those of a whole microbatch; vision's are cut over a dp of 2.
        largest = max(program.compiled_temporary_bytes() for program in programs)
        assert needed == pytest.approx(largest, rel=0.01 if layout.dp == 1 else 0.1), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bindings", "cases", "within"),
    [
        pytest.param((), bench.CASES, bench.WITHIN, id="fp32"),
        pytest.param(bench.REMAT, bench.CASES[::4], bench.WITHIN, id="recomputed"),
        pytest.param(bench.HALF, bench.CASES[1:5], bench.WITHIN, id="bf16"),
        # Planned up to 11 % too high; why was not found.
        pytest.param(("vision/Optimizer.frozen=True",), bench.CASES[3:5], FROZEN_WITHIN, id="frozen encoder"),
    ],
)
def test_layouts_of_the_digits_model_have_the_bytes_of_compiled_programs(
    bindings: tuple[str, ...], cases: tuple[bench.Case, ...], within: float
) -> None:
    compared = [stages for _, stages in bench.digits(cases, bindings)]
    assert len(compared) == len(cases)
    for stages in compared:
        assert_near(stages, within)
    every = [one for stages in compared for one in stages.values()]
    assert any(one.temporaries > bench.WITHIN * one.total for one in every), "it would pass without temporaries"


@pytest.mark.slow
def test_stages_of_llavas_proportions_have_the_bytes_of_compiled_programs() -> None:
    stages = bench.llava()
    assert {"vision.0", "llm.0", "llm.1"} == set(stages)
    assert_near(stages)
