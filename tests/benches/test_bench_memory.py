"""Bytes of stages as plans have them against compiled programs: within 10 % in total, by stage and device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from runs import write_tiny

from mmjax.benches import memory as bench
from mmjax.config import load_config
from mmjax.run.work import read_work


def assert_near(stages: Mapping[str, bench.Compared], within: float = bench.WITHIN) -> None:
    for name, one in stages.items():
        assert one.temporaries > 0
        assert one.uncounted < 0.03, name  # tables of pointers
        assert one.predicted.total == pytest.approx(one.total, rel=within), name
        # All but temporaries is the same, whatever those are from.
        assert replace(one.predicted, temporaries=0.0) == replace(one.traced, temporaries=0.0), name


def test_a_plan_from_a_profile_has_the_bytes_of_compiled_programs(tmp_path: Path) -> None:
    """Both stages of the LLM are others than those that were tried: one has two layers and an end, one a single one."""
    changes = ("llm/Decoder.layers=3", "llm/Layout.pp=2", "vision/Layout.rank_offset=4", "Train.lowering='ops'")
    config = load_config([str(write_tiny(tmp_path))], changes)
    clock = bench.compiled_clock(config, [config.layouts], shapes=1)
    stages = bench.compare(config, read_work(config), clock)
    assert set(stages) == {"vision.0", "llm.0", "llm.1"}
    assert_near(stages)
    # Nothing of it would be seen if temporaries were too small to matter.
    assert any(one.temporaries > bench.WITHIN * one.total for one in stages.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bindings", "cases"),
    [
        pytest.param((), bench.CASES, id="fp32"),
        pytest.param(bench.REMAT, bench.CASES[::2], id="recomputed"),
        pytest.param(bench.HALF, bench.CASES[:5], id="bf16"),
        pytest.param(("vision/Optimizer.frozen=True",), bench.CASES[3:5], id="frozen encoder"),
    ],
)
def test_layouts_of_the_digits_model_have_the_bytes_of_compiled_programs(
    bindings: tuple[str, ...], cases: tuple[bench.Case, ...]
) -> None:
    compared = [stages for _, stages in bench.digits(cases, bindings)]
    assert len(compared) == len(cases)
    for stages in compared:
        assert_near(stages)
    every = [one for stages in compared for one in stages.values()]
    assert any(one.temporaries > bench.WITHIN * one.total for one in every), "it would pass without temporaries"


@pytest.mark.slow
def test_stages_of_llavas_proportions_have_the_bytes_of_compiled_programs() -> None:
    stages = bench.llava()
    assert {"vision.0", "llm.0", "llm.1"} == set(stages)
    assert_near(stages)
