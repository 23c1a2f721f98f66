"""Remat as a part of a plan: as good as trying every value in every layout, recomputed only where memory wants it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from planner.models import GIGA, PLAIN, TERA, clock, model, module

from mmjax.mesh.layout import Layout
from mmjax.planner.candidates import HOMOGENEOUS, NON_COLOCATED, Candidate, homogeneous, leaner
from mmjax.planner.choose import choose, choose_on
from mmjax.planner.clock import AnalyticClock, Efficiency
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import estimated, missing, proportional
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.fleet import DeviceKind, Fleet
from mmjax.planner.work import ModuleWork, Shares, Work

SIZES = {"none": 2.0, "dots": 1.0, "full": 0.1}
"""Residuals of a layer over those of `module`."""


def with_remat(plain: ModuleWork, remat: str) -> ModuleWork:
    recompute = Shares(layer=plain.forward.layer * (remat == "full"))
    memory = {tp: replace(m, residuals=m.residuals.times(SIZES[remat])) for tp, m in plain.memory.items()}
    return replace(plain, backward=plain.backward + recompute, recompute=recompute, memory=memory)


def open_model(*modules: ModuleWork, values: tuple[str, ...] = ("dots", "full")) -> Work:
    """Modules whose remat a plan chooses."""
    options = {plain.name: {value: with_remat(plain, value) for value in values} for plain in modules}
    work = model(*(by_value[values[0]] for by_value in options.values()), global_batch=8)
    return replace(work, options=options)


def fleet_of(work: Work, devices: int, memory: float) -> Fleet:
    return Fleet(kinds={"": DeviceKind(clock=clock(work), devices=devices, memory=memory)})


def apart(devices: int) -> list[Candidate]:
    """Every layout of two modules on devices of their own, with few stages."""
    degrees = itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 3))
    layouts = [Layout(tp=tp, dp=dp, pp=pp) for tp, dp, pp in degrees if tp * dp * pp < devices]
    return [
        Candidate(
            mode=NON_COLOCATED,
            layouts={"vision": replace(vision, rank_offset=llm.size), "llm": llm},
            microbatches=8 // (llm.dp * samples),
        )
        for llm, vision, samples in itertools.product(layouts, layouts, (1, 2, 4, 8))
        if llm.size + vision.size <= devices and 8 % (llm.dp * samples) == 0 and llm.dp * samples % vision.dp == 0
    ]


def best_of_all(mode: str, work: Work, devices: int, memory: float) -> Estimate | None:
    """The shortest step of every layout with every value of remat of every module."""
    candidates = list(homogeneous(work, devices, 8)) if mode == HOMOGENEOUS else apart(devices)
    fleet, rows_of = fleet_of(work, devices, memory), proportional(work)
    estimates = (
        estimated(work, fleet, replace(candidate, remat=remat), rows_of)
        for candidate in candidates
        for remat in work.remat_choices
    )
    fitting = [estimate for estimate in estimates if estimate.least <= memory and missing(fleet, estimate) <= 0]
    return min(fitting, key=lambda estimate: estimate.seconds, default=None)


@pytest.mark.long
@pytest.mark.parametrize("mode", [HOMOGENEOUS, NON_COLOCATED])
@pytest.mark.parametrize("memory", [1.2, 0.75, 0.5, 0.35])
def test_the_plan_is_as_good_as_every_remat_in_every_layout(mode: str, memory: float) -> None:
    """'none' is never better: it takes no less time than 'dots', and more memory."""
    no_states: dict = {"parameters": Shares(layer=GIGA / 500), "trained": Shares(layer=GIGA / 500)}
    modules = module("vision", 2, 0.4, **no_states), module("llm", 4, 1.0, after=("vision",), **no_states)
    best = best_of_all(mode, open_model(*modules, values=("none", "dots", "full")), 4, memory * GIGA)
    work = open_model(*modules)
    assert best is not None
    choice = choose(work, clock(work), 4, memory=memory * GIGA, modes=[mode])
    assert choice.best.seconds <= best.seconds * 1.02 and choice.best.most <= memory * GIGA
    chosen = choice.best.candidate.remat
    assert set(chosen) == {"vision", "llm"} and ("full" in chosen.values()) == ("full" in best.candidate.remat.values())


def test_every_combination_is_reached_once() -> None:
    work = open_model(
        module("vision", 2, 1.0), module("llm", 2, 1.0, after=("vision",)), values=("none", "dots", "full")
    )
    first = Candidate(mode="any", layouts={}, microbatches=1, remat=work.fastest_remat)
    reached, queue = [], [first]
    while queue:
        candidate = queue.pop()
        reached.append(dict(candidate.remat))
        queue += leaner(work, candidate)
    assert len(reached) == 9 and all(remat in reached for remat in work.remat_choices)


class Counted(Mapping[int, object]):
    """Bytes that count how often they are read."""

    def __init__(self, sizes: Mapping[int, object]) -> None:
        self.sizes, self.reads = sizes, 0

    def __getitem__(self, tp: int) -> object:
        self.reads += 1
        return self.sizes[tp]

    def __iter__(self):
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def test_bytes_of_recomputing_layers_are_read_where_memory_is_scarce_alone() -> None:
    work = open_model(module("vision", 2, 0.4), module("llm", 4, 1.0, after=("vision",)))
    for memory, remat in ((PLAIN.memory, {"dots"}), (0.9 * GIGA, {"full", "dots"})):
        counted = {name: Counted(options["full"].memory) for name, options in work.options.items()}
        options = {
            name: {**values, "full": replace(values["full"], memory=counted[name])}
            for name, values in work.options.items()
        }
        counting = replace(work, options=options)
        choice = choose_on(counting, fleet_of(counting, 4, memory), modes=[HOMOGENEOUS, NON_COLOCATED])
        assert any(sizes.reads for sizes in counted.values()) == ("full" in remat)
        assert set(choice.best.candidate.remat.values()) <= remat


def test_what_a_recipe_has_set_stays_and_a_misfit_proposes_it() -> None:
    modules = module("vision", 2, 0.2), module("llm", 4, 1.0, after=("vision",))
    work = model(*modules)
    with pytest.raises(DoesNotFit, match="or remat='full'"):
        choose(work, clock(work), 4, memory=GIGA / 100)
    opened = open_model(*modules)
    with pytest.raises(DoesNotFit, match="more devices, or devices of ") as refused:
        choose(opened, clock(opened), 4, memory=GIGA / 100)
    assert "remat" not in str(refused.value)


def test_small_microbatches_wait_for_the_sums_of_gradients() -> None:
    """A sum is read and written once a microbatch, in fp32: 8 bytes a weight, whatever the number of tokens."""
    flops: dict = {"forward": Shares(layer=2 * GIGA), "backward": Shares(layer=4 * GIGA)}
    work = model(module("llm", 2, 0.0, **flops, parameters=Shares(layer=GIGA), trained=Shares(layer=GIGA)))
    llm = work.modules["llm"]
    times = AnalyticClock(work=work, accelerator=PLAIN, efficiency=Efficiency(compute=1.0, memory=0.8))

    def milliseconds(rows: float, tp: int = 1) -> float:
        return 1e3 * times.stage("llm", llm.whole, rows=rows, width=1, tp=tp).backward

    sums, other_products = 2 * 8 * GIGA / (0.8 * TERA) * 1e3, 2 * 2
    assert milliseconds(1) == pytest.approx(other_products + sums) == pytest.approx(24)
    assert milliseconds(1, tp=2) == pytest.approx(12)
    assert milliseconds(8) == pytest.approx(64) and milliseconds(16) == pytest.approx(128)
    frozen = replace(llm, trained=Shares(), backward=Shares(layer=2 * GIGA))
    frozen_times = replace(times, work=model(frozen))
    assert frozen_times.stage("llm", llm.whole, rows=1, width=1, tp=1).backward == pytest.approx(4e-3)
