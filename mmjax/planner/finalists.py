"""The fastest candidates that fit into memory, by closed form.

They have as little recompute, and as few shards and arrays in host memory, as they need.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from mmjax.configurable import ConfigError
from mmjax.mesh.layout import SHARDS, cell_count
from mmjax.planner.candidates import Candidate, leaner
from mmjax.planner.cost import ROUNDING
from mmjax.planner.estimate import Estimate
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.fleet import Fleet
from mmjax.planner.state_layouts import expert_parallel, more_shards, most_shards
from mmjax.planner.variants import everything_offloaded, offloaded
from mmjax.planner.work import Work

RowShapes = Mapping[str, tuple[float, int]]
"""By module name, rows of a microbatch, those of all ranks together and padding included, and positions of a row."""
RowsOf = Callable[[Candidate], RowShapes]
"""Gives the rows of a candidate's microbatches; raises `ConfigError` if a run would refuse the candidate."""
FINALISTS = 4
"""The number of candidates of a mode that are simulated."""
RELIEVED = 1
"""The number of further candidates of a mode that are simulated because they are faster but fit only with offload."""
FEW = 400
"""With more layouts whose lower bound on memory is too large, these are not tried with offload if another one fits."""
ALIKE = 2
"""The most finalists with the same layouts, which differ only in microbatches, windows or remat."""
TIE = 0.005
"""Relative difference up to which steps count as equal; among equal ones, fewer kinds, then fewer devices win."""


def exact(work: Work, fleet: Fleet, candidate: Candidate, rows_of: RowsOf) -> list[Estimate]:
    """The estimate of a candidate as a list of one; [] if `rows_of` refuses it, or if it does not fit into memory.

    work, fleet, rows_of: such as `read_work(recipe)`, `Fleet(kinds={"": kind})` and `proportional(work)`.
    candidate: the layouts and the schedule, such as one of those that `homogeneous` yields.
    """
    try:
        estimate = estimated(work, fleet, candidate, rows_of)
    except ConfigError:
        return []
    return [estimate] if missing(fleet, estimate) <= 0 else []


def estimated(work: Work, fleet: Fleet, candidate: Candidate, rows_of: RowsOf) -> Estimate:
    """The estimate of a candidate in seconds and bytes, with the times of its devices, whether or not it fits.

    work, fleet, rows_of: such as `read_work(recipe)`, `Fleet(kinds={"": kind})` and `proportional(work)`.
    candidate: the layouts and the schedule, such as one of those that `homogeneous` yields. Raises `ConfigError` if
      `rows_of` refuses it.
    """
    work = work.with_remat(candidate.remat)
    clock = fleet.clocks(candidate.kinds).computing(work)
    return Estimate(work=work, clock=clock, candidate=candidate, rows=rows_of(candidate))


def missing(fleet: Fleet, estimate: Estimate) -> float:
    """Bytes that the device with the largest lack is short of; zero or negative if all devices have enough.

    fleet, estimate: the devices with their memory, and an estimate on them, as `estimated` gives it.
    """
    rooms = {node.ranks[0]: _room(fleet, estimate, node.name) for node in estimate.graph.stages}
    return max(size - rooms[rank] for rank, size in estimate.memory.items())


def _room(fleet: Fleet, estimate: Estimate, stage: str) -> float:
    """Bytes of memory of a stage's devices."""
    return fleet.kind(estimate.candidate.kinds, stage.rpartition(".")[0]).memory


def proportional(work: Work) -> RowsOf:
    """A function from a candidate to its rows, in proportion to the samples of a cell; it refuses no candidate.

    It returns (rows on all ranks, positions of a row) by module: {"llm": (8, 4096)}. Rows are whole in each cell, since
    packing crosses no cell: a candidate with more dp has rows that are padded. Rows of ranks of cp that have whole
    media are wider. The work is that of a model on its data, as `read_work(recipe)` gives it.
    """

    def rows_of(candidate: Candidate) -> RowShapes:
        samples, cells = work.global_batch // candidate.microbatches, cell_count(candidate.layouts.values())
        shapes: dict[str, tuple[float, int]] = {}
        for name, module in work.modules.items():
            layout = candidate.layouts[name]
            wide = layout.cp if module.has_whole_media(layout, layout.cp * module.width) else 1
            in_cell = module.rows * samples / (cells * wide)
            shapes[name] = cells * math.ceil(in_cell * (1 - ROUNDING)), wide * module.width
        return shapes

    return rows_of


def finalists(work: Work, fleet: Fleet, candidates: Iterable[Candidate], *, shards: bool = False) -> list[Candidate]:
    """The fastest candidates, by closed form, that fit into memory: up to `FINALISTS`, the fastest first.

    Modules whose `remat` the plan chooses recompute more where a candidate does not fit otherwise. Behind them are up
    to `RELIEVED` that fit only with offload, have as little of it as they need, and are no slower than the first
    (`TIE`). If none fits without offload, the result is up to `FINALISTS` that fit with it. Rows are `proportional`.

    work, fleet: such as `read_work(recipe)` and `Fleet(kinds={"": kind})`.
    candidates: candidates in any order, such as `homogeneous(work, 16, 8)`.
    shards: whether what does not fit is tried with shards of sums and parameters, in place of offload.

    Raises:
      DoesNotFit: none fits; the message names a module of the candidate that lacks least.
    """
    rows_of = proportional(work)
    with_experts = (c for candidate in candidates for c in expert_parallel(work, candidate))
    chosen = (replace(c, remat={**work.fastest_remat, **c.remat}) for c in with_experts)
    distinct = {(c.describe(), *c.remat.values(), c.microbatches, c.schedule, c.window): c for c in chosen}
    estimates = [estimated(work, fleet, c, rows_of) for c in distinct.values()]
    largest_memory = max(kind.memory for kind in fleet.kinds.values())
    if shards:
        estimates = [estimate for estimate in estimates if _lightest(fleet, estimate) <= largest_memory]
    fitting, unfitting, too_large = _first(fleet, estimates, FINALISTS, shards=shards)
    limit = fitting[0].quick * (1 + TIE) if fitting else math.inf
    to_offload = [*unfitting, *too_large] if len(too_large) <= FEW or not fitting else unfitting
    offloaded_estimates = [] if shards else _offloaded(to_offload, largest_memory, limit)
    most = RELIEVED if fitting else FINALISTS
    fitting_offloaded, unfitting_offloaded, _ = _first(fleet, offloaded_estimates, most)
    if fitting or fitting_offloaded:
        reduced = [offloaded(estimate, lambda e: missing(fleet, e) <= 0) for estimate in fitting_offloaded]
        return [*(estimate.candidate for estimate in fitting), *(candidate for candidate in reduced if candidate)]
    leanest = min((*unfitting, *unfitting_offloaded), key=lambda estimate: missing(fleet, estimate), default=None)
    leanest = leanest or min(too_large, key=lambda estimate: estimate.least, default=None)
    if leanest is None:
        raise DoesNotFit("there is none on so many devices that divides the batch, the layers and all sizes")
    raise DoesNotFit(_misses(fleet, leanest))


def _lightest(fleet: Fleet, estimate: Estimate) -> float:
    """A lower bound on the bytes of the fullest device with all shards; infinite for layouts without ranks to share."""
    most = most_shards(estimate)
    if most.layouts == estimate.candidate.layouts:
        return math.inf
    return _changed(fleet, estimate, most).least


def _first(
    fleet: Fleet, estimates: Iterable[Estimate], count: int, *, shards: bool = False
) -> tuple[list[Estimate], list[Estimate], list[Estimate]]:
    """The `count` fastest in closed form that fit, the faster ones that do not, and those too large by a lower bound.

    At most `ALIKE` of the fitting ones have the same layouts, but for ep and shards. What does not fit is tried again
    with more recompute, which takes longer: so the fastest first is exact, and bytes with recompute are traced only
    where they decide.

    shards: whether what does not fit is also tried with shards of sums and parameters.
    """
    fitting, missed, too_large = list[Estimate](), list[Estimate](), list[Estimate]()
    largest_memory = max(kind.memory for kind in fleet.kinds.values())
    alike, numbers = Counter[str](), itertools.count()
    queue = [(_order(estimate), next(numbers), estimate) for estimate in estimates]
    heapq.heapify(queue)
    while queue and len(fitting) < count:
        *_, estimate = heapq.heappop(queue)
        layouts = _degrees(estimate.candidate)
        if alike[layouts] == ALIKE:
            continue
        offloads = bool(estimate.candidate.offloads)
        if not offloads and estimate.least > largest_memory:
            too_large.append(estimate)
        elif missing(fleet, estimate) > 0:
            missed.append(estimate)
        else:
            fitting.append(estimate)
            alike[layouts] += 1
            continue
        for lean in () if offloads else _leaner(fleet, estimate, shards=shards):
            heapq.heappush(queue, (_order(lean), next(numbers), lean))
    return fitting, missed, too_large


def _leaner(fleet: Fleet, estimate: Estimate, *, shards: bool) -> Iterator[Estimate]:
    """Estimates of the same candidate in which a module recomputes more, or with `shards` shares more."""
    candidate = estimate.candidate
    if all(layout.shard == SHARDS[0] for layout in candidate.layouts.values()):  # so that each is reached once
        yield from (_changed(fleet, estimate, lean) for lean in leaner(estimate.work, candidate))
    if shards:
        yield from (_changed(fleet, estimate, lean) for lean in more_shards(estimate))


def _changed(fleet: Fleet, estimate: Estimate, candidate: Candidate) -> Estimate:
    """The estimate of a candidate with the rows of another one, from which it differs in remat or shards."""
    return estimated(estimate.work, fleet, candidate, lambda _: estimate.rows)


def _degrees(candidate: Candidate) -> str:
    """The layouts of a candidate in words, without ep and shards."""
    layouts = {
        name: layout
        if layout.ep == 1 and layout.shard == SHARDS[0]
        else replace(layout, ep=1, expert_tp=0, shard=SHARDS[0])
        for name, layout in candidate.layouts.items()
    }
    return replace(candidate, layouts=layouts, remat={}).describe()


def _order(estimate: Estimate) -> tuple[float, int, int, int, int]:
    """Sort key: the fastest in closed form first; of equal ones, fewer microbatches, fewer lanes, less cp and ep."""
    layouts = estimate.candidate.layouts.values()
    lanes, cp, ep = (max(getattr(layout, name) for layout in layouts) for name in ("lanes", "cp", "ep"))
    return float(f"{estimate.quick:.3g}"), estimate.candidate.microbatches, lanes, cp, ep


def _offloaded(estimates: Iterable[Estimate], memory: float, limit: float) -> list[Estimate]:
    """Estimates with all possible offload that may fit and take at most `limit` seconds in closed form."""
    everything = (everything_offloaded(estimate) for estimate in estimates if estimate.lightest <= memory)
    return [estimate for estimate in everything if estimate.candidate.offloads and estimate.quick <= limit]


def _misses(fleet: Fleet, estimate: Estimate) -> str:
    by_stage = estimate.device_bytes
    stage, need = max(by_stage.items(), key=lambda item: item[1].total - _room(fleet, estimate, item[0]))
    over, room = missing(fleet, estimate), _room(fleet, estimate, stage)
    remedies = ["more devices", f"devices of {(over + room) / 1e9:.3g} GB"]
    if any(module.backward.layer and not module.recompute.layer for module in estimate.work.modules.values()):
        remedies.append("remat='full'")
    return (
        f"{stage.rpartition('.')[0]} misses by {over / 1e9:.3g} GB a device: {stage} needs "
        f"{need.total / 1e9:.3g} GB (weights {need.weights / 1e9:.3g}, gradients {need.gradients / 1e9:.3g}, "
        f"activations {need.activations / 1e9:.3g}, temporaries {need.temporaries / 1e9:.3g}) in the leanest layout "
        f"({estimate.candidate.describe()}) and a device has {room / 1e9:.3g} GB; what would make it fit: "
        f"{', '.join(remedies[:-1])}, or {remedies[-1]}"
    )
