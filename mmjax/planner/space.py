"""Spaces of plans: a space fixes the kind of device of each module and the LLM's dp; all other degrees are open.

With both fixed, modules on devices of one kind compete only for these devices (`mmjax.planner.group`). The pace is all
that groups share, so at a fixed pace the least warm-up is the sum of the groups' least warm-ups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mmjax.models.config import LLM
from mmjax.planner.cost import (
    ROUNDING,
    Degrees,
    activation_bytes,
    passing_seconds,
    reducing_seconds,
    weight_bytes,
)
from mmjax.planner.group import DegreeTable, Group, allowed, merged
from mmjax.planner.problem import MixedProblem, ModuleCosts, Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """Every (tp, dp) of a module, for one LLM replica; arrays of [R], the least work first.

    Attributes:
      rows: the rows without communication; `least` is the least pp that the module may have.
      weights: bytes of weights on a device with all stages.
      activations: bytes of activations on a device.
    """

    rows: DegreeTable
    weights: np.ndarray
    activations: np.ndarray


def make_grid(problem: Problem, name: str) -> Grid:
    """Every (tp, dp) that a module may have beside one LLM replica, as arrays of [R], the least work first.

    The LLM has a dp of 1 in it. `Grid.rows` has the columns `tp`, `dp` and seconds; `weights`, `activations` are bytes.

    Args:
      problem: a problem on devices of one kind, as `read_problem` gives it.
      name: a module of it, such as "vision".
    """
    costs = problem.modules[name]
    degrees = (1,) if name == LLM else problem.degrees
    sizes = [tp for tp in costs.seconds if tp <= problem.devices]
    tp, dp = (axis.ravel() for axis in np.meshgrid(np.array(sizes, dtype=int), np.array(degrees, dtype=int)))
    work = problem.microbatch / dp * np.tile([costs.seconds[tp] for tp in sizes], len(degrees))
    order = np.lexsort((tp * dp, work))
    tp, dp, work = tp[order], dp[order], work[order]
    return Grid(
        rows=DegreeTable(
            tp=tp,
            dp=dp,
            work=work / costs.chunks,
            load=work,
            hop=np.zeros(len(tp)),
            lead=np.zeros(len(tp)),
            least=np.full(len(tp), float(costs.least_pp)),
            depths=np.array(costs.depths),
        ),
        weights=weight_bytes(costs, tp, dp),
        activations=activation_bytes(costs, tp, 1 / dp),
    )


class Grids:
    """The grids of a problem on devices of one kind, and the groups of each dp of the LLM, which are made from them.

    Args:
      problem: the problem on these devices.
      real_from: the pp from which on it may be any real number; infinite for whole numbers only.
    """

    def __init__(self, problem: Problem, real_from: float = math.inf) -> None:
        self.problem, self.real_from = problem, real_from
        self._grids = {name: make_grid(problem, name) for name in problem.modules}
        self._groups: dict[tuple[tuple[str, ...], int], Group | None] = {}

    def rows(self, name: str, llm_dp: int) -> DegreeTable | None:
        """The rows of module `name` that fit into memory on some number of stages; None if none does.

        Seconds are for one microbatch of each of the `llm_dp` LLM replicas, shared among the module's dp. The LLM's
        rows have `llm_dp` as dp.
        """
        grid, costs = self._grids[name], self.problem.modules[name]
        rows, weights = grid.rows, grid.weights
        dp, replicas, activations = rows.dp, llm_dp, grid.activations * llm_dp
        if name == LLM:
            # Each replica has a microbatch of its own; ZeRO-1 shards over all of them.
            dp, replicas, activations = dp * llm_dp, 1, grid.activations
            weights = weight_bytes(costs, rows.tp, llm_dp)
        rows = self._with_communication(replace(rows, dp=dp, work=rows.work * replicas), costs, llm_dp)
        room = self.problem.memory * (1 + ROUNDING) - activations
        with np.errstate(divide="ignore", invalid="ignore"):
            stages = allowed(rows.depths, self.real_from, np.maximum(weights / room, rows.least))
        least = np.where(room > 0, stages, np.inf)
        weightless = (room >= 0) & (weights == 0)
        least[weightless] = allowed(rows.depths, self.real_from, rows.least)[weightless]
        keep = np.isfinite(least)
        if self.problem.dp_divides_samples:
            keep &= llm_dp * self.problem.microbatch % dp == 0
        if not keep.any():
            return None
        return replace(rows, least=least).taken(keep)

    def _with_communication(self, rows: DegreeTable, costs: ModuleCosts, llm_dp: int) -> DegreeTable:
        """The rows with load, hop and lead; with a single microbatch, the load is the communication of dp groups."""
        steps, problem = self.problem.microbatches(llm_dp) - 1, self.problem
        passing = passing_seconds(problem, costs, llm_dp / rows.dp)
        once = reducing_seconds(problem, costs, rows.tp, rows.dp)
        if not steps and math.isfinite(problem.bandwidth):
            return replace(rows, load=once, lead=passing / costs.chunks)
        load = rows.work * costs.chunks + once / max(steps, 1)
        return replace(rows, load=load, hop=passing, lead=passing / costs.chunks)

    def group(self, names: Collection[str], llm_dp: int) -> Group | None:
        """The group of the modules of these names; None if one does not fit, or all together need too many devices."""
        key = (tuple(names), llm_dp)
        if key not in self._groups:
            self._groups[key] = self._group(*key)
        return self._groups[key]

    def _group(self, names: tuple[str, ...], llm_dp: int) -> Group | None:
        tables: dict[str, DegreeTable] = {}
        # Sums of real numbers of devices are not exact; a plan on all devices must not be lost.
        devices = self.problem.devices * (1.0 if math.isinf(self.real_from) else 1 + ROUNDING)
        spare = devices
        for name in names:
            rows = self.rows(name, llm_dp)
            if rows is None:
                return None
            tables[name] = rows
            spare -= rows.fewest
        if spare < 0:
            return None
        return Group(devices=devices, rows=tables, real_from=self.real_from)


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """All plans with fixed kinds of devices and a fixed dp of the LLM.

    Attributes:
      llm_dp: the LLM's dp.
      steps: number of microbatches after the first; 1 for a single microbatch that is followed by dp communication.
      groups: the groups of modules by kind of device, without empty ones; "" is the one kind of a `Problem`.
    """

    llm_dp: int
    steps: int
    groups: dict[str, Group]

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each module's devices, by module name."""
        return {name: kind for kind, group in self.groups.items() for name in group.rows}

    def step(self, work: Any, pace: float) -> Any:
        """Seconds of a step with this work (warm-up seconds, a number or an array) and pace (seconds of a stage).

        With one microbatch the pace does not matter, and may be infinite.
        """
        return work + self.steps * pace if self.steps else work

    @cached_property
    def least_work(self) -> float:
        """A lower bound on the work (warm-up seconds) of every combination."""
        return sum(group.least_work for group in self.groups.values())

    @cached_property
    def least_pace(self) -> float:
        """A lower bound on the pace: below it even real numbers of stages need more devices than available."""
        return max(group.least_pace for group in self.groups.values())

    @cached_property
    def slowest_pace(self) -> float:
        """The pace, in seconds, at which every row has its fewest stages; a slower pace allows no other combination."""
        return max(group.slowest_pace for group in self.groups.values())

    @cached_property
    def bound(self) -> float:
        """A lower bound on the seconds of every plan of this space.

        The pace is at least the sum of (devices of a stage · work) over a group's modules, divided by its devices; the
        same holds for all groups and all devices together.
        """
        groups = list(self.groups.values())
        share = self.steps / sum(group.devices for group in groups)
        bounds = [sum(group.least_with(share) for group in groups)]
        for group in groups if len(groups) > 1 else ():
            with_pace = group.least_with(self.steps / group.devices)
            bounds.append(self.least_work - group.least_work + with_pace)
        return max(bounds)

    def least_work_at(self, pace: float) -> float:
        """The least work (warm-up seconds) of a combination with stages of at most `pace` seconds, or infinity."""
        return sum(group.least_work_at(pace) for group in self.groups.values())

    def chosen(self, pace: float, limit: float) -> tuple[int, dict[str, Degrees]]:
        """Number of devices, and degrees by module name, of the best combination at `pace`.

        It is the one on fewest devices among those whose step takes at most `limit` seconds. If no step is so short, it
        is the one with least work. There must be a combination at this pace.
        """
        by_group = [group.fronts(pace) for group in self.groups.values()]
        joint = [replace(by_group[0][-1], row=np.arange(len(by_group[0][-1].work)))]
        for fronts in by_group[1:]:
            of_group = replace(fronts[-1], row=np.arange(len(fronts[-1].work)))
            joint.append(merged(joint[-1], of_group, math.inf))
        last = joint[-1]
        tied = np.flatnonzero(self.step(last.work, pace) <= limit)
        at = int(tied[np.argmin(last.devices[tied])]) if len(tied) else 0
        devices, degrees = int(last.devices[at]), dict[str, Degrees]()
        for group, fronts, front in zip(
            reversed(self.groups.values()), reversed(by_group), reversed(joint), strict=True
        ):
            degrees |= group.chosen(fronts, int(front.row[at]), pace)
            at = int(front.before[at])
        return devices, degrees

    def pruned(self) -> Space:
        """The same space without rows that no best plan needs."""
        return replace(self, groups={kind: group.pruned() for kind, group in self.groups.items()})

    def paces(self, fastest: float, slowest: float) -> np.ndarray:
        """Every stage time in seconds from `fastest` to `slowest` that a row can have, ascending, each once."""
        paces = np.unique(np.concatenate([group.paces(fastest, slowest) for group in self.groups.values()]))
        return paces[np.diff(paces, prepend=-1) > paces * ROUNDING]


def spaces(problem: Problem | MixedProblem, real_from: float = math.inf, kinds: int = 1) -> Iterator[Space]:
    """Every space that has a plan: for each assignment of modules to kinds of device, for each dp of the LLM.

    A `Space` has the possible tp, dp and pp of every other module for this assignment and dp, which a search goes
    through. Yields none if no plan fits.

    Args:
      problem: as `read_problem` gives it.
      real_from: the pp from which on it may be any real number; infinite for whole numbers only.
      kinds: the least number of kinds in use.
    """
    grids = {kind: Grids(on_kind, real_from) for kind, on_kind in problem.kinds.items()}
    for assignment in assignments(problem):
        if len(assignment) < kinds:
            continue
        home = next(on_kind for kind, on_kind in problem.kinds.items() if LLM in assignment.get(kind, ()))
        for llm_dp in home.llm_degrees:
            groups: dict[str, Group] = {}
            for kind, names in assignment.items():
                if (group := grids[kind].group(names, llm_dp)) is None:
                    break
                groups[kind] = group
            else:
                sends = any(math.isfinite(on_kind.bandwidth) for on_kind in problem.kinds.values())
                yield Space(llm_dp=llm_dp, steps=max(problem.microbatches(llm_dp) - 1, int(sends)), groups=groups)


def assignments(problem: Problem | MixedProblem) -> Iterator[dict[str, tuple[str, ...]]]:
    """Every assignment of modules to kinds of device on which they have times.

    Yields the names of the modules by kind, without empty kinds: {"h100": ("llm",), "l20": ("vision",)}. The one kind
    of a `Problem` is "". problem: as `read_problem` gives it.
    """
    choices = [[kind for kind, on_kind in problem.kinds.items() if name in on_kind.modules] for name in problem.names]
    for kinds in itertools.product(*choices):
        by_kind = {
            kind: tuple(n for n, k in zip(problem.names, kinds, strict=True) if k == kind) for kind in problem.kinds
        }
        yield {kind: names for kind, names in by_kind.items() if names}
