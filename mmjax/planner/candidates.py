"""The ways in which modules may share devices, and every layout of each.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.pipeline.config import OffloadConfig
from mmjax.planner.cost import Plan
from mmjax.planner.fleet import Fleet
from mmjax.planner.needs import HOME
from mmjax.planner.problem import divisors
from mmjax.planner.work import ModuleWork, Work
from mmjax.schedule.schedules import ONE_F_ONE_B, SCHEDULES, ScheduleTraits

HOMOGENEOUS, COLOCATED, NON_COLOCATED, NESTED = "homogeneous", "colocated", "non-colocated", "nested"
MODES = (HOMOGENEOUS, COLOCATED, NON_COLOCATED, NESTED)
MOST_STAGES = 64
"""The most stages of a module; a module with fewer layers has at most one for each."""
FEW = 64
"""The most devices with which stages may have unequal numbers of layers."""
SAMPLES = (1, 2, 4, 8, 16)
"""Samples of a microbatch on one replica of the LLM that are tried."""
WINDOWS = (1, 2, 4)
"""Windows of three-phase schedules that are tried, in multiples of the LLM's pp, beside the whole step."""
MOST_LANES = 32
"""The most lanes of a module on an LLM of fewer stages; on more it has a lane for each. Long units are slow to fill."""
LEAST_TOKENS = 2048
"""The fewest positions of a row on each rank of cp. Products of fewer are small, and samples are there to be shared."""
LARGEST = 3
"""How many dp, the largest ones, are tried for each tp, pp and number of samples."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to place all modules and to cut and schedule a step.

    Attributes:
      mode: "homogeneous", "colocated", "non-colocated" or "nested".
      layouts: layout by module.
      microbatches: microbatches of a step.
      schedule: as `Train.schedule`.
      window: as `Train.window`.
      inner: as `Train.inner`.
      offloads: the arrays that each module offloads, for modules that offload any.
      kinds: kind of device by module; empty where there is one kind.
    """

    mode: str
    layouts: Mapping[str, Layout] = field(hash=False)
    microbatches: int
    schedule: str = ONE_F_ONE_B
    window: int = 0
    inner: str = ONE_F_ONE_B
    offloads: Mapping[str, OffloadConfig] = field(default_factory=dict, hash=False)
    kinds: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def span(self) -> int:
        """Microbatches of a window; of the whole step without windows."""
        return min(self.window or self.microbatches, self.microbatches)

    @property
    def traits(self) -> ScheduleTraits:
        """The properties of the candidate's schedule; where it is nested, also those that it has of the inner one."""
        own, inner = SCHEDULES[self.schedule], SCHEDULES[self.inner]
        if not own.nests:
            return own
        return replace(own, chunks=inner.chunks, splits=inner.splits, settles=max(own.settles, inner.settles))

    @property
    def plain(self) -> bool:
        """Whether another schedule may be shorter: the LLM has several stages and runs plain 1F1B."""
        own = self.inner if self.traits.nests else self.schedule
        return own == ONE_F_ONE_B and self.layouts[LLM].pp > 1

    def rescheduled(self, schedule: str) -> Candidate:
        """The candidate with another schedule of the LLM: the inner one where the candidate's is nested."""
        return replace(self, inner=schedule) if self.traits.nests else replace(self, schedule=schedule)

    def phases(self, work: Work) -> tuple[str, ...]:
        """The modules that do not run while others do: encoders, where the schedule has phases."""
        return work.encoders if self.traits.phases else ()

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return len({rank for layout in self.layouts.values() for rank in layout.ranks})

    def offload(self, module: str) -> OffloadConfig:
        """The offload of a module; nothing unless `offloads` has it."""
        return self.offloads.get(module, HOME)

    @property
    def used(self) -> tuple[str, ...]:
        """The kinds of devices in use, in the order of their ranks; ("",) where there is one kind."""
        return tuple(dict.fromkeys(self.kinds[name] for name in sorted(self.kinds, key=self.block))) or ("",)

    @property
    def on(self) -> str:
        """The kinds in use for messages, such as " on h100 and l20"; empty where there is one kind."""
        return f" on {' and '.join(self.used)}" if self.kinds else ""

    @property
    def label(self) -> str:
        """The mode and the kinds of devices in use."""
        return self.mode + self.on

    @property
    def world(self) -> int:
        """Number of ranks up to the last in use."""
        return max(own.rank_offset + own.size for own in self.layouts.values())

    def ranks(self, kind: str) -> set[int]:
        """Ranks in use on devices of a kind."""
        return {rank for name, own in self.layouts.items() if self.kinds.get(name, "") == kind for rank in own.ranks}

    def block(self, module: str) -> int:
        """The first rank on a module's kind of device; ranks of a kind are neighbours, and its nodes start there."""
        if not self.kinds:
            return 0
        return min(self.layouts[name].rank_offset for name, kind in self.kinds.items() if kind == self.kinds[module])

    def describe(self) -> str:
        """Layouts in one line, with the kinds of their devices and what is offloaded."""
        said = {name: f" ({kind})" for name, kind in self.kinds.items() if kind}
        for name, own in self.offloads.items():
            away = " and ".join(kind for kind, on in vars(own).items() if on)
            said[name] = said.get(name, "") + (f", {away} offloaded" if away else "")
        return "; ".join(f"{name} {layout.describe()}{said.get(name, '')}" for name, layout in self.layouts.items())


def _llm_layouts(work: Work, devices: int, node: int, tps: Sequence[int]) -> Iterator[tuple[Layout, int]]:
    """Layouts of the LLM on at most so many devices, each with the microbatches of a step.

    Only the largest few dp are tried for each tp, cp and pp: fewer replicas only mean more microbatches.
    """
    deep = depths(work.modules[LLM], devices)
    for tp in (tp for tp in tps if tp <= node):
        for cp in contexts(work.modules[LLM], devices // tp):
            for pp in (pp for pp in deep if pp * cp * tp <= devices):
                for size in (size for size in SAMPLES if work.global_batch % size == 0):
                    for dp in divisors(work.global_batch // size, devices // (tp * cp * pp))[-LARGEST:]:
                        yield Layout(tp=tp, cp=cp, dp=dp, pp=pp), work.global_batch // (dp * size)


def contexts(module: ModuleWork, devices: int) -> list[int]:
    """Every cp of a module that is tried on so many devices: powers of two that leave each rank enough of a row."""
    most = min(devices, module.width // LEAST_TOKENS if module.ring else 1)
    return [1 << power for power in range(max(1, most).bit_length())]


def depths(module: ModuleWork, devices: int) -> list[int]:
    """Every pp of a module that is tried; on more than `FEW` devices only those with equally many layers a stage."""
    if devices > FEW:
        return divisors(module.layers, MOST_STAGES)
    return list(range(1, min(module.layers, MOST_STAGES) + 1))


def homogeneous(work: Work, devices: int, node: int) -> Iterator[Candidate]:
    """All modules with the LLM's tp and dp, encoders on its first stage and generators on its last.

    Where the LLM has stages and cp, others may have more dp, or tp, on the ranks of one stage (`_ends`).
    """
    common = sorted(set.intersection(*(set(module.held) for module in work.modules.values())))
    for llm, microbatches in _llm_layouts(work, devices, node, common):
        samples = work.global_batch // microbatches
        for split in (True, False)[: 1 + (llm.cp > 1)]:
            ends = _ends(work, llm, samples, node, split=split)
            alike = all((own.tp, own.cp, own.dp) == (llm.tp, llm.cp, llm.dp) for own in ends.values())
            if len(ends) == len(work.modules) - 1 and (alike or llm.pp > 1):  # else it is colocated
                layouts = _ordered(work, {**ends, LLM: llm})
                yield Candidate(mode=HOMOGENEOUS, layouts=layouts, microbatches=microbatches)


def _ends(work: Work, llm: Layout, samples: int, node: int, *, split: bool = True) -> dict[str, Layout]:
    """Encoders on the LLM's first stage and generators on its last, with its tp and dp, without those that do not fit.

    A module has the LLM's cp too, if `split` and its rows are long enough; else the ranks of cp are ranks of dp, or of
    tp where the samples are too few. Where tp does not fit either, it has the LLM's cp whatever its rows.
    """
    first, last = replace(llm, pp=1), replace(llm, pp=1, rank_offset=(llm.pp - 1) * llm.stage_size)
    found = {}
    for name, end in (*((name, first) for name in work.encoders), *((name, last) for name in work.generators)):
        module = work.modules[name]
        if end.cp == 1 or (split and end.cp in contexts(module, end.cp)):
            found[name] = end
        elif own := _filling(module, end.stage_size, samples, node, least=end.tp):
            found[name] = replace(own, rank_offset=end.rank_offset)
        elif split and module.ring:
            found[name] = end
    return found


def colocated(work: Work, devices: int, node: int) -> Iterator[Candidate]:
    """Encoders in layouts of their own on all devices of the LLM, generators on those of its last stage."""
    for llm, microbatches in _llm_layouts(work, devices, node, sorted(work.modules[LLM].held)):
        samples = work.global_batch // microbatches
        last = (llm.pp - 1) * llm.stage_size
        places = [(name, llm.size, 0) for name in work.encoders]
        places += [(name, llm.stage_size, last) for name in work.generators]
        seen: list[dict[str, Layout]] = []
        for split in (False, True):
            layouts = {LLM: llm}
            for name, size, start in places:
                if own := _filling(work.modules[name], size, samples, node, split=split):
                    layouts[name] = replace(own, rank_offset=start)
            if len(layouts) == len(work.modules) and layouts not in seen:
                seen.append(layouts)
                one = Candidate(mode=COLOCATED, layouts=_ordered(work, layouts), microbatches=microbatches)
                yield from _colocated(work, one)


def _colocated(work: Work, one: Candidate) -> Iterator[Candidate]:
    """A colocated candidate as it is, or with encoders in phases of their own, where it is not homogeneous."""
    llm = one.layouts[LLM]
    if llm.pp == 1 or not work.encoders:
        if any((own.tp, own.cp, own.dp) != (llm.tp, llm.cp, llm.dp) for own in one.layouts.values()):
            yield one
        return
    for window in sorted({0, *(times * llm.pp for times in WINDOWS if times * llm.pp < one.microbatches)}):
        yield replace(one, schedule="three-phase", window=window)


def _filling(
    module: ModuleWork, devices: int, samples: int, node: int, *, least: int = 1, split: bool = False
) -> Layout | None:
    """The layout of one stage on exactly `devices` devices with the most dp and the least tp that fit, or None.

    least: the least tp.
    split: whether it has cp in place of tp, where its rows are long enough.
    """
    tps = [tp for tp in module.held if least <= tp <= node]
    pairs = [(tp * cp, tp) for tp in tps for cp in (contexts(module, devices // tp) if split else (1,))]
    for replica, tp in sorted(pairs):
        if devices % replica == 0 and samples % (devices // replica) == 0:
            return Layout(tp=tp, cp=replica // tp, dp=devices // replica)
    return None


def nested(work: Work, devices: int, node: int) -> Iterator[Candidate]:
    """Modules in lanes over the LLM's devices: all encoders and generators, and either alone with the others as in
    `homogeneous`. The LLM runs 1F1B.

    Less tp sends less, and more of it means fewer activations a device. So every tp is tried, and of the ways to cut
    the LLM's submeshes into lanes the coarsest in which it fits, since each lane has microbatches of its own.
    """
    ways = _ways(work)
    pipelines = _llm_layouts(work, devices, node, sorted(work.modules[LLM].held))
    for llm, microbatches in (one for one in pipelines if one[0].pp > 1):
        for spread in ways:
            rest = {
                name: own
                for name, own in _ends(work, llm, work.global_batch // microbatches, node).items()
                if name not in spread
            }
            if any(own.tp not in work.modules[name].held for name, own in rest.items()):
                continue
            for tp in sorted({tp for name in spread for tp in work.modules[name].held if tp <= node}):
                laned = {name: _laned(work, name, llm, microbatches, tp) for name in spread}
                layouts = rest | {name: own for name, own in laned.items() if own} | {LLM: llm}
                if len(layouts) == len(work.modules):
                    placed = _ordered(work, layouts)
                    yield Candidate(mode=NESTED, layouts=placed, microbatches=microbatches, schedule="nested")


def _ways(work: Work) -> list[tuple[str, ...]]:
    """The modules that have lanes, in each way. What feeds a generator beside the LLM has none together with it."""
    fed = {source for name in work.generators for source in work.modules[name].after}
    ways = {work.encoders, work.generators, (*work.encoders, *work.generators) if not fed & set(work.encoders) else ()}
    return sorted(way for way in ways if way)


def _laned(work: Work, name: str, llm: Layout, microbatches: int, most: int) -> Layout | None:
    """The layout of a module with the fewest lanes over the LLM's ranks and its largest tp up to `most`, or None."""
    held, samples = work.modules[name].held, work.global_batch // microbatches
    tp = max((tp for tp in held if tp <= most), default=0)
    most_parts = min(microbatches, max(llm.pp, MOST_LANES)) // llm.pp
    for parts in divisors(llm.stage_size, most_parts) if tp else ():
        dp, rest = divmod(llm.stage_size, parts * tp)
        if not rest and samples % dp == 0:
            return Layout(tp=tp, dp=dp, lanes=llm.pp * parts)
    return None


def apart(work: Work, plan: Plan, fleet: Fleet) -> Candidate:
    """The candidate of a plan: devices of a kind are neighbours, those of the LLM's kind first.

    A kind that spans several nodes takes whole ones before the next kind begins, so that no node has two kinds.
    """
    kinds = {name: kind for name, kind in plan.kinds.items() if kind}
    start, layouts, home = 0, dict[str, Layout](), plan.kinds[LLM]
    for kind in (home, *(kind for kind in fleet.kinds if kind != home and kind in plan.kinds.values())):
        block = _block(plan, [name for name in plan.modules if plan.kinds[name] == kind], start)
        layouts |= block
        used, own = sum(layout.size for layout in block.values()), fleet.kinds[kind]
        start += used if used <= own.clock.node else min(-(-used // own.clock.node) * own.clock.node, own.devices)
    placed = _ordered(work, layouts)
    return Candidate(mode=NON_COLOCATED, layouts=placed, microbatches=plan.microbatches, kinds=kinds)


def _block(plan: Plan, names: Sequence[str], start: int) -> dict[str, Layout]:
    """Layouts of modules from rank `start` on, the largest tp first: tp groups stay within nodes without gaps.

    The LLM comes first where its number of devices is a multiple of the largest tp, so that this still holds.
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


def _ordered(work: Work, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    return {name: layouts[name] for name in work.modules}
