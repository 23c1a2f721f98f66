"""The four modes in which modules may share devices, and the layouts to try in each.

* homogeneous: one tp and dp for all, as in a trainer without a layout per module. Encoders are on the LLM's first
  stage, generators on its last.
* colocated: encoders are on all of the LLM's devices, in their own layout. Every replica holds a whole encoder, so
  more dp takes the place of the LLM's tp and pp. With LLM pp > 1, encoder forward and backward are separate phases
  (Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training", §3.3).
* non-colocated: every module on devices of its own (Zhang et al., "DistTrain", §4).
* nested: encoders or generators, or both, in lanes over all of the LLM's devices, each lane on one of its submeshes or
  on an equal part of one; their ops are nested in the LLM's own schedule ("BigMac", §3.1).

Every dp divides the samples of a microbatch, so that no row is padding; a tp group never crosses a node. A module whose
rows are long may have cp (`contexts`), each module its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.pipeline.config import OffloadConfig
from mmjax.planner.cost import Plan
from mmjax.planner.fleet import Fleet
from mmjax.planner.needs import HOME
from mmjax.planner.problem import divisors
from mmjax.planner.work import ModuleWork, Work
from mmjax.schedule.schedules import ONE_F_ONE_B, ScheduleTraits, combined

HOMOGENEOUS, COLOCATED, NON_COLOCATED, NESTED = "homogeneous", "colocated", "non-colocated", "nested"
MODES = (HOMOGENEOUS, COLOCATED, NON_COLOCATED, NESTED)
MOST_STAGES = 64
"""The most stages of a module; a module with fewer layers has at most one for each."""
FEW = 64
"""The most devices with which stages may have unequal numbers of layers."""
SAMPLES = tuple(range(1, 17))
"""Numbers of samples of a microbatch on one replica of the LLM that are tried."""
WINDOWS = (1, 2, 4)
"""Windows of three-phase schedules that are tried, in multiples of the LLM's pp, beside the whole step."""
MOST_LANES = 32
"""The most lanes of a module on an LLM of fewer stages; on more stages it has a lane for each. Long units are slow to
fill."""
LEAST_TOKENS = 2048
"""The fewest positions of a row on each cp rank: products of fewer are small, and dp can share samples instead."""
LARGEST = 3
"""The number of dp, the largest ones, that are tried for each tp, pp and number of samples."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to place all modules and to cut and schedule a step.

    Attributes:
      mode: "homogeneous", "colocated", "non-colocated" or "nested".
      layouts: layout by module name, "llm" among them.
      microbatches: microbatches of a step.
      schedule: a name in `SCHEDULES`, as `Train.schedule`.
      window: as `Train.window`, microbatches of a three-phase schedule's window; 0 is the whole step.
      inner: as `Train.inner`, the LLM's schedule inside a nested or three-phase one.
      offloads: by module name, the arrays that are offloaded; a module that offloads nothing may be absent.
      kinds: by module name, the kind of its devices, such as "h100"; empty where there is one kind.
      remat: by module name, the `remat` of the modules whose `remat` the plan chooses.
    """

    mode: str
    layouts: Mapping[str, Layout] = field(hash=False)
    microbatches: int
    schedule: str = ONE_F_ONE_B
    window: int = 0
    inner: str = ONE_F_ONE_B
    offloads: Mapping[str, OffloadConfig] = field(default_factory=dict, hash=False)
    kinds: Mapping[str, str] = field(default_factory=dict, hash=False)
    remat: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def span(self) -> int:
        """Microbatches of a window; of the whole step without windows."""
        return min(self.window or self.microbatches, self.microbatches)

    def together(self, module: str) -> int:
        """Microbatches that an op of a module takes together, from `Layout.microbatches`, such as 1; at most `span`."""
        return self.layouts[module].op_microbatches(self.span)

    @property
    def traits(self) -> ScheduleTraits:
        """The properties of the candidate's schedule, with those of its inner one."""
        return combined(self.schedule, self.inner)

    @property
    def has_inner(self) -> bool:
        """Whether a table names the LLM's own schedule too: where lanes are nested in it, or it is not 1F1B."""
        return self.traits.nests or self.inner != ONE_F_ONE_B

    @property
    def is_pipelined_1f1b(self) -> bool:
        """Whether the LLM has several stages and runs 1F1B, so that another schedule may be shorter."""
        llm_schedule = self.inner if self.traits.surrounds else self.schedule
        return llm_schedule == ONE_F_ONE_B and self.layouts[LLM].pp > 1

    def rescheduled(self, schedule: str) -> Candidate:
        """A copy whose LLM has another of `SCHEDULES`, inside the candidate's schedule if that is put around one."""
        return replace(self, inner=schedule) if self.traits.surrounds else replace(self, schedule=schedule)

    def phases(self, work: Work) -> tuple[str, ...]:
        """The modules that do not run while other modules do: the encoders if the schedule has phases, otherwise ()."""
        return work.encoders if self.traits.phases else ()

    @property
    def devices(self) -> int:
        """Number of ranks that some module has."""
        return len({rank for layout in self.layouts.values() for rank in layout.ranks})

    def offload(self, module: str) -> OffloadConfig:
        """The offload of a module; nothing is offloaded unless `offloads` has the module."""
        return self.offloads.get(module, HOME)

    @property
    def used_kinds(self) -> tuple[str, ...]:
        """The kinds of devices in use, in the order of their ranks; ("",) where there is one kind."""
        return tuple(dict.fromkeys(self.kinds[name] for name in sorted(self.kinds, key=self.kind_start))) or ("",)

    @property
    def on_kinds(self) -> str:
        """The kinds in use for messages, such as " on h100 and l20"; empty where there is one kind."""
        return f" on {' and '.join(self.used_kinds)}" if self.kinds else ""

    @property
    def label(self) -> str:
        """The mode, with the kinds of devices in use where there are several: "nested", or "nested on h100 and l20"."""
        return self.mode + self.on_kinds

    @property
    def world(self) -> int:
        """Number of ranks from 0 to the last in use, unused ones between them included."""
        return max(layout.rank_offset + layout.size for layout in self.layouts.values())

    def ranks(self, kind: str) -> set[int]:
        """Ranks in use on devices of a kind; "" is the kind of all devices where there is one."""
        layouts = (layout for name, layout in self.layouts.items() if self.kinds.get(name, "") == kind)
        return {rank for layout in layouts for rank in layout.ranks}

    def kind_start(self, module: str) -> int:
        """The first rank of the module's kind of device, 0 where there is one kind; nodes of the kind start there."""
        if not self.kinds:
            return 0
        return min(self.layouts[name].rank_offset for name, kind in self.kinds.items() if kind == self.kinds[module])

    def describe(self) -> str:
        """One line such as "vision dp=4 on ranks 0-3 (l20); llm tp=2 pp=2 on ranks 4-7 (h100), optimizer offloaded".

        It says which modules recompute all, and not which keep their products.
        """
        notes = {name: f" ({kind})" for name, kind in self.kinds.items() if kind}
        for name in (name for name, remat in self.remat.items() if remat == "full"):
            notes[name] = notes.get(name, "") + ", all recomputed"
        for name, offload in self.offloads.items():
            arrays = " and ".join(array for array, on in vars(offload).items() if on)
            notes[name] = notes.get(name, "") + (f", {arrays} offloaded" if arrays else "")
        return "; ".join(f"{name} {layout.describe()}{notes.get(name, '')}" for name, layout in self.layouts.items())


def leaner(work: Work, candidate: Candidate) -> Iterator[Candidate]:
    """Yields the candidate with the next value of `remat`, which recomputes more, for one module.

    From a candidate with the first value of each module, repeated, it reaches every combination once.

    Args:
      work: `Work`, whose `options` has the values of each module whose `remat` a plan chooses.
      candidate: the layouts and the schedule, with a `remat` for each of these modules.
    """
    options = {name: list(values) for name, values in work.options.items()}
    places = [values.index(candidate.remat[name]) for name, values in options.items()]
    last_changed = max((number for number, place in enumerate(places) if place), default=0)
    for (name, values), place in list(zip(options.items(), places, strict=True))[last_changed:]:
        if place + 1 < len(values):
            yield replace(candidate, remat={**candidate.remat, name: values[place + 1]})


def _llm_layouts(work: Work, devices: int, node: int, tps: Sequence[int]) -> Iterator[tuple[Layout, int]]:
    """Layouts of the LLM on at most `devices` devices, each with the microbatches of a step.

    Only the largest few dp are tried for each tp, cp and pp: fewer replicas only mean more microbatches.
    """
    pps = depths(work.modules[LLM], devices)
    for tp in (tp for tp in tps if tp <= node):
        for cp in contexts(work.modules[LLM], devices // tp):
            for pp in (pp for pp in pps if pp * cp * tp <= devices):
                for size in (size for size in SAMPLES if work.global_batch % size == 0):
                    for dp in divisors(work.global_batch // size, devices // (tp * cp * pp))[-LARGEST:]:
                        yield Layout(tp=tp, cp=cp, dp=dp, pp=pp), work.global_batch // (dp * size)


def contexts(module: ModuleWork, devices: int) -> list[int]:
    """Every cp to try for a module on at most `devices` devices, ascending from 1: powers of two, such as [1, 2, 4].

    Each leaves a rank `LEAST_TOKENS` positions of a row or more. It is [1] for a module whose cp ranks share no rows.

    module: what it computes, such as `read_work(recipe).modules["llm"]`.
    """
    most = min(devices, module.width // LEAST_TOKENS if module.ring else 1)
    return [1 << power for power in range(max(1, most).bit_length())]


def depths(module: ModuleWork, devices: int) -> list[int]:
    """Every pp to try for a module, ascending, from 1 to at most its layers and `MOST_STAGES`, such as [1, 2, 3, 4].

    If there are more than `FEW` devices in all, only divisors of its layers are tried.

    Args:
      module: what it computes, such as `read_work(recipe).modules["llm"]`.
      devices: number of devices in all, which only chooses between all numbers and divisors.
    """
    if devices > FEW:
        return divisors(module.layers, MOST_STAGES)
    return list(range(1, min(module.layers, MOST_STAGES) + 1))


def homogeneous(work: Work, devices: int, node: int) -> Iterator[Candidate]:
    """Yields candidates with the LLM's tp and dp for all modules, encoders on its first stage, generators on its last.

    Where the LLM has stages and cp, other modules may have more dp, or tp, on the ranks of one stage (`_end_layouts`).

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      devices: the most devices in use; their ranks start at 0.
      node: devices of a node, and so the largest tp.
    """
    common = sorted(set.intersection(*(set(module.memory) for module in work.modules.values())))
    for llm, microbatches in _llm_layouts(work, devices, node, common):
        samples = work.global_batch // microbatches
        for split in (True, False)[: 1 + (llm.cp > 1)]:
            ends = _end_layouts(work, llm, samples, node, split=split)
            alike = all((end.tp, end.cp, end.dp) == (llm.tp, llm.cp, llm.dp) for end in ends.values())
            if len(ends) == len(work.modules) - 1 and (alike or llm.pp > 1):  # else it is colocated
                layouts = _in_order(work, {**ends, LLM: llm})
                yield Candidate(mode=HOMOGENEOUS, layouts=layouts, microbatches=microbatches)


def _end_layouts(work: Work, llm: Layout, samples: int, node: int, *, split: bool = True) -> dict[str, Layout]:
    """Encoders on the LLM's first stage and generators on its last, with its tp and dp; modules that do not fit are
    left out.

    A module has the LLM's cp too, if `split` and its rows are long enough. Else the ranks of cp are ranks of dp, or of
    tp where the samples are too few. Where tp does not fit either, it has the LLM's cp for rows of any length.
    """
    first, last = replace(llm, pp=1), replace(llm, pp=1, rank_offset=(llm.pp - 1) * llm.stage_size)
    layouts = {}
    for name, end in (*((name, first) for name in work.encoders), *((name, last) for name in work.generators)):
        module = work.modules[name]
        if end.cp == 1 or (split and end.cp in contexts(module, end.cp)):
            layouts[name] = end
        elif layout := _filling(module, end.stage_size, samples, node, least=end.tp):
            layouts[name] = replace(layout, rank_offset=end.rank_offset)
        elif split and module.ring:
            layouts[name] = end
    return layouts


def colocated(work: Work, devices: int, node: int) -> Iterator[Candidate]:
    """Yields candidates with encoders on all devices of the LLM and generators on those of its last stage.

    Each of these modules has a layout of its own, of one stage, with tp, cp and dp that may differ from the LLM's.

    Where the LLM has several stages, encoders have phases of their own, in windows of several sizes. They are tried
    with dp over the media of all microbatches of a window too (`Layout.microbatches`), and in lanes that take
    microbatches in turn: then more ranks than a microbatch has samples need no tp.

    Where the LLM has one stage, or there are no encoders, layouts with the same tp, cp and dp for all modules are left
    out.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      devices: the most devices that a candidate may have; the LLM is tried on each smaller number too.
      node: devices of a node, in which the ranks of tp lie.
    """
    for llm, microbatches in _llm_layouts(work, devices, node, sorted(work.modules[LLM].memory)):
        is_phased = llm.pp > 1 and bool(work.encoders)
        longer = (times * llm.pp for times in WINDOWS if times * llm.pp < microbatches)
        for window in sorted({0, *longer}) if is_phased else (0,):
            candidate = Candidate(mode=COLOCATED, layouts={}, microbatches=microbatches, window=window)
            tried: list[dict[str, Layout]] = []
            for layouts in _on_ranks_of(work, llm, candidate, node, is_phased=is_phased):
                if len(layouts) < len(work.modules) or layouts in tried:
                    continue
                tried.append(layouts)
                placed = replace(candidate, layouts=_in_order(work, layouts))
                degrees = {(layout.tp, layout.cp, layout.dp) for layout in layouts.values()}
                if is_phased:
                    yield replace(placed, schedule="three-phase")
                elif llm.pp == 1 and len(degrees) > 1:
                    yield placed


def _on_ranks_of(
    work: Work, llm: Layout, candidate: Candidate, node: int, *, is_phased: bool
) -> Iterator[dict[str, Layout]]:
    """Layouts of all modules on the LLM's ranks, generators on those of its last stage; modules may be missing.

    candidate: has the microbatches and the window. is_phased: whether encoders have phases of their own.
    """
    samples, last = work.global_batch // candidate.microbatches, (llm.pp - 1) * llm.stage_size

    def filled(names: Iterable[str], size: int, samples: int, *, split: bool = False) -> dict[str, Layout]:
        layouts = {name: _filling(work.modules[name], size, samples, node, split=split) for name in names}
        return {name: layout for name, layout in layouts.items() if layout}

    def shared(*, split: bool) -> dict[str, Layout]:
        generators = filled(work.generators, llm.stage_size, samples, split=split)
        behind = {name: replace(layout, rank_offset=last) for name, layout in generators.items()}
        return {LLM: llm, **filled(work.encoders, llm.size, samples, split=split), **behind}

    whole = shared(split=False)
    yield whole
    yield shared(split=True)
    if not is_phased:
        return
    if candidate.span > 1 and work.joins_microbatches:
        sources = [name for name in work.encoders if not work.modules[name].after]
        wide = filled(sources, llm.size, samples * candidate.span)
        yield whole | {
            name: replace(layout, microbatches=0)
            for name, layout in wide.items()
            if name not in whole or layout.dp > whole[name].dp
        }
    laned = [
        _in_lanes(work, name, llm, candidate.microbatches, most_tp=min(work.modules[name].memory))
        for name in work.encoders
    ]
    for chosen in itertools.product(*laned):
        yield whole | dict(zip(work.encoders, chosen, strict=True))


def _filling(
    module: ModuleWork, devices: int, samples: int, node: int, *, least: int = 1, split: bool = False
) -> Layout | None:
    """The layout of one stage on exactly `devices` devices with the most dp and the least tp that fit, or None.

    least: the least tp.
    split: whether it has cp in place of tp if its rows are long enough.
    """
    tps = [tp for tp in module.memory if least <= tp <= node]
    pairs = [(tp * cp, tp) for tp in tps for cp in (contexts(module, devices // tp) if split else (1,))]
    for replica, tp in sorted(pairs):
        if devices % replica == 0 and samples % (devices // replica) == 0:
            return Layout(tp=tp, cp=replica // tp, dp=devices // replica)
    return None


def nested(work: Work, devices: int, node: int) -> Iterator[Candidate]:
    """Yields candidates with modules in lanes over the LLM's devices: encoders, generators or both; the LLM runs 1F1B.

    The LLM always has several stages. An encoder without lanes is on its first stage, a generator on its last. Less tp
    sends less, and more tp means fewer activations a device, so every tp is tried. The LLM's submeshes are cut into the
    fewest lanes in which a module fits, since each lane has microbatches of its own. If LLM rows hold several samples,
    ranks of a lane are also tried with the media of the LLM's cells in place of samples of their own.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      devices: the most devices in use; their ranks start at 0.
      node: devices of a node, and so the largest tp.
    """
    laned_sets = _laned_sets(work)
    pipelines = _llm_layouts(work, devices, node, sorted(work.modules[LLM].memory))
    for llm, microbatches in (pair for pair in pipelines if pair[0].pp > 1):
        for laned in laned_sets:
            unlaned = {
                name: layout
                for name, layout in _end_layouts(work, llm, work.global_batch // microbatches, node).items()
                if name not in laned
            }
            if any(layout.tp not in work.modules[name].memory for name, layout in unlaned.items()):
                continue
            if len(laned) + len(unlaned) < len(work.modules) - 1:
                continue
            for tp in sorted({tp for name in laned for tp in work.modules[name].memory if tp <= node}):
                in_lanes = [_in_lanes(work, name, llm, microbatches, most_tp=tp) for name in laned]
                for chosen in itertools.product(*in_lanes):
                    ordered = _in_order(work, {**unlaned, **dict(zip(laned, chosen, strict=True)), LLM: llm})
                    yield Candidate(mode=NESTED, layouts=ordered, microbatches=microbatches, schedule="nested")


def _laned_sets(work: Work) -> list[tuple[str, ...]]:
    """The sets of modules that may have lanes together: encoders, generators, or both.

    An encoder that feeds a generator directly has no lanes together with the generator.
    """
    feeding = {source for name in work.generators for source in work.modules[name].after}
    both = (*work.encoders, *work.generators) if not feeding & set(work.encoders) else ()
    return sorted(names for names in {work.encoders, work.generators, both} if names)


def _in_lanes(work: Work, name: str, llm: Layout, microbatches: int, *, most_tp: int) -> list[Layout]:
    """Layouts of a module with the fewest lanes over the LLM's ranks and its largest tp up to `most_tp`.

    There are up to two: ranks of a lane share samples, or the media of the LLM's cells (`_with_whole_media`).
    """
    samples = work.global_batch // microbatches
    dealt = list[Layout]()
    tp = max((tp for tp in work.modules[name].memory if tp <= most_tp), default=0)
    most_parts = min(microbatches, max(llm.pp, MOST_LANES)) // llm.pp
    for parts in divisors(llm.stage_size, most_parts) if tp else ():
        dp, remainder = divmod(llm.stage_size, parts * tp)
        if remainder:
            continue
        layout = Layout(tp=tp, dp=dp, lanes=llm.pp * parts)
        dealt = dealt or _with_whole_media(work, name, layout, llm, samples)
        if samples % dp == 0:
            return [layout, *dealt]
    return dealt


def _with_whole_media(work: Work, name: str, layout: Layout, llm: Layout, samples: int) -> list[Layout]:
    """The layout with cp in place of the dp that the LLM does not have, whose ranks each have whole media; or nothing.

    Packing crosses no cell, so LLM rows that several samples share are padded if an encoder has more dp than the LLM.
    With cp, the media of a cell are shared instead. There have to be enough of them.

    samples: samples of a microbatch.
    """
    module, dp = work.modules[name], math.gcd(layout.dp, llm.dp)
    cp = layout.dp // dp
    enough = module.rows * samples >= cp * llm.dp
    if cp == 1 or not module.ring or not module.longest or not enough or work.modules[LLM].rows >= 1:
        return []
    return [replace(layout, dp=dp, cp=cp, cp_way="need", cp_tokens="segments")]


def apart(work: Work, plan: Plan, fleet: Fleet) -> Candidate:
    """The non-colocated candidate of a plan, with 1F1B: ranks of a kind are neighbours, those of the LLM's kind first.

    A kind that spans several nodes takes full nodes before the next kind begins, so that no node has two kinds.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      plan: a plan whose `kinds` has every module, as those of `best_plans(problem)` have; `problems` gives the problem.
      fleet: the devices, a `Fleet`; its kinds have the names in the plan.
    """
    kinds = {name: kind for name, kind in plan.kinds.items() if kind}
    start, layouts, home = 0, dict[str, Layout](), plan.kinds[LLM]
    for kind in (home, *(kind for kind in fleet.kinds if kind != home and kind in plan.kinds.values())):
        block = _block(plan, [name for name in plan.modules if plan.kinds[name] == kind], start)
        layouts |= block
        used, node = sum(layout.size for layout in block.values()), fleet.kinds[kind].clock.node
        start += used if used <= node else min(-(-used // node) * node, fleet.kinds[kind].devices)
    ordered = _in_order(work, layouts)
    return Candidate(mode=NON_COLOCATED, layouts=ordered, microbatches=plan.microbatches, kinds=kinds)


def _block(plan: Plan, names: Sequence[str], start: int) -> dict[str, Layout]:
    """Layouts of modules from rank `start` on, the largest tp first: tp groups stay within nodes without gaps.

    The LLM comes first if its number of devices is a multiple of the largest tp, so that this still holds.
    """
    by_tp = sorted(names, key=lambda name: (-plan.modules[name].tp, name != LLM))
    most = plan.modules[by_tp[0]].tp
    if LLM in names and plan.modules[LLM].devices % most == 0:
        by_tp.sort(key=lambda name: name != LLM)
    layouts: dict[str, Layout] = {}
    for name in by_tp:
        degrees = plan.modules[name]
        layouts[name] = Layout(tp=degrees.tp, dp=degrees.dp, pp=degrees.pp, rank_offset=start)
        start += degrees.devices
    return layouts


def _in_order(work: Work, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    return {name: layouts[name] for name in work.modules}
