"""The modules on devices of one kind: the layouts that each may have, and the best of their combinations at a pace.

A *row* is a pair (tp, dp) of a module; its pp is left open. With the LLM's dp fixed, a row's warm-up ("work") is fixed
too, and its stage time is work / pp. So where stages may take `pace` seconds, a row has pp = ceil(work / pace), or
more where memory needs it. It remains to choose a row for each module: the least work on the devices that there are.

With communication a stage takes load / pp + hop seconds, and each stage adds `lead` to the warm-up. The least pp is
still the best at a pace: more stages take more devices and a longer warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mmjax.planner.cost import ROUNDING, Degrees


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """A module's rows, the least work first; arrays of shape [R].

    Attributes:
      tp, dp: degrees.
      work: warm-up seconds of all stages together, without what they pass on.
      load: seconds that all stages together work for a microbatch, with a microbatch's share of what a step sends once.
      hop: seconds in which a stage passes a microbatch on.
      lead: warm-up seconds of each stage, in which it passes a microbatch on.
      least: the smallest pp that memory allows.
      depths: every pp that the module may have, ascending, [P]; empty if it may have any.
    """

    tp: np.ndarray
    dp: np.ndarray
    work: np.ndarray
    load: np.ndarray
    hop: np.ndarray
    lead: np.ndarray
    least: np.ndarray
    depths: np.ndarray

    @cached_property
    def unit(self) -> np.ndarray:
        """Devices of one stage."""
        return self.tp * self.dp

    @cached_property
    def fewest(self) -> float:
        """The fewest devices that the module can have."""
        return float((self.unit * self.least).min())

    def stages(self, pace: float, real_from: float = math.inf) -> np.ndarray:
        """The least pp of each row with stages of at most `pace` seconds; from `real_from` on it may be any real."""
        return allowed(self.depths, real_from, np.maximum(self.least, self.needed(pace)))

    def needed(self, pace: float) -> np.ndarray:
        """The least real pp of each row with stages of at most `pace` seconds; infinite where no pp is enough."""
        left = pace * (1 + ROUNDING) - self.hop if self.hop.any() else np.full(len(self.load), pace)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.load > 0, np.where(left > 0, self.load / left, np.inf), 0.0)

    def taken(self, keep: np.ndarray) -> Rows:
        """Some of the rows, by mask or index."""
        names = ("tp", "dp", "work", "load", "hop", "lead", "least")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})

    def degrees(self, row: int, pace: float) -> Degrees:
        """The layout of one row at `pace`."""
        return Degrees(tp=int(self.tp[row]), dp=int(self.dp[row]), pp=math.ceil(self.stages(pace)[row]))


def first_real(depths: np.ndarray, real_from: float) -> float:
    """The first pp from `real_from` on that a module may have; from there on any real number is allowed."""
    if not len(depths):
        return float(np.ceil(real_from))
    return float(np.append(depths, np.inf)[np.searchsorted(depths, real_from)])


def allowed(depths: np.ndarray, real_from: float, stages: np.ndarray) -> np.ndarray:
    """Rounds each number of stages up to the next that a module may have; infinite where there is none.

    From `first_real` on any real number is allowed, up to the last of `depths` (see `Rows`).
    """
    start = first_real(depths, real_from)
    if not len(depths):
        return np.where(stages >= start, stages, np.ceil(stages * (1 - ROUNDING)))
    padded = np.concatenate((depths, [np.inf]))
    following = padded[np.searchsorted(depths, stages * (1 - ROUNDING))]
    return np.where((stages >= start) & (stages <= depths[-1]), stages, following)


@dataclass(frozen=True, kw_only=True, eq=False)
class Front:
    """Pareto-optimal combinations, the least work first: each has fewer devices than all before; arrays of [F].

    Attributes:
      work, devices: sums over the modules so far.
      before: index of the combination of the modules before the last one.
      row: index of the last module's row.
    """

    work: np.ndarray
    devices: np.ndarray
    before: np.ndarray
    row: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The modules on devices of one kind, once the LLM's dp is fixed.

    Attributes:
      devices: number of devices; where pp may be real, a rounding error more.
      rows: rows by module.
      real_from: the pp from which on it may be any real number.
    """

    devices: float
    rows: dict[str, Rows]
    real_from: float = math.inf

    @cached_property
    def least_work(self) -> float:
        """A lower bound on the work of every combination."""
        return sum(float(rows.work[0]) for rows in self.rows.values())

    @cached_property
    def least_pace(self) -> float:
        """A lower bound on the pace: below it even real numbers of stages need more devices than there are."""
        return sum(float((rows.unit * rows.load).min()) for rows in self.rows.values()) / self.devices

    @cached_property
    def slowest_pace(self) -> float:
        """The pace at which every row has its fewest stages; a slower one gives no further choice."""
        return max(float((rows.load / rows.least + rows.hop).max()) for rows in self.rows.values())

    def least_with(self, share: float) -> float:
        """The least sum of work + `share` · load · devices of a stage, over the modules."""
        return sum(float((rows.work + share * rows.load * rows.unit).min()) for rows in self.rows.values())

    def least_work_at(self, pace: float) -> float:
        """The least work of a combination whose stages take at most `pace`; infinite where there is none."""
        front: Front | None = None
        fronts = self._module_fronts(pace)
        if fronts is None:
            return math.inf
        for one in fronts[:-1]:
            front = one if front is None else merged(front, one, self.devices)
        last = fronts[-1]
        if front is None:
            return float(last.work[0])
        # Each combination takes, of the last module's rows that still fit, the one of least work.
        row = np.searchsorted(-last.devices, front.devices - self.devices, side="left")
        fits = row < len(last.work)
        return float((front.work[fits] + last.work[row[fits]]).min()) if fits.any() else math.inf

    def fronts(self, pace: float) -> list[Front]:
        """The fronts at `pace` of the first module, the first two, and so on; empty where nothing fits."""
        made: list[Front] = []
        for one in self._module_fronts(pace) or ():
            made.append(one if not made else merged(made[-1], one, self.devices))
        return made if made and len(made[-1].work) else []

    def chosen(self, fronts: list[Front], index: int, pace: float) -> dict[str, Degrees]:
        """The layouts of combination `index` of the last front."""
        chosen = {}
        for (name, rows), front in zip(reversed(self.rows.items()), reversed(fronts), strict=True):
            chosen[name] = rows.degrees(int(front.row[index]), pace)
            index = int(front.before[index])
        return dict(reversed(chosen.items()))

    def pruned(self) -> Group:
        """The same group without rows that no best plan needs."""
        left = self.devices - sum(rows.fewest for rows in self.rows.values())
        rows = {name: _undominated(rows, left + rows.fewest) for name, rows in self.rows.items()}
        return replace(self, rows=rows)

    def paces(self, fastest: float, slowest: float) -> np.ndarray:
        """Every stage time from `fastest` to `slowest` that a row can have, in no order."""
        found = []
        for rows in self.rows.values():
            if len(rows.depths):
                each_RP = rows.load[:, None] / rows.depths + rows.hop[:, None]
                inside = (each_RP >= fastest * (1 - ROUNDING)) & (each_RP <= slowest * (1 + ROUNDING))
                found.append(each_RP[inside & (rows.depths >= rows.least[:, None])])
                continue
            low = np.maximum(rows.least, np.ceil(rows.needed(slowest) * (1 - ROUNDING)))
            high = np.minimum(self.devices // rows.unit, np.floor(rows.needed(fastest) * (1 + ROUNDING)))
            high = np.where(rows.load > 0, high, low)  # a row without load has one pace, 0
            counts = np.maximum(high - low + 1, 0).astype(np.int64)
            starts = np.repeat(np.cumsum(counts) - counts, counts)
            stages = np.repeat(low, counts) + np.arange(counts.sum()) - starts
            found.append(np.repeat(rows.load, counts) / stages + np.repeat(rows.hop, counts))
        return np.concatenate(found)

    def _module_fronts(self, pace: float) -> list[Front] | None:
        fewest = [rows.fewest for rows in self.rows.values()]
        fronts = []
        for rows, own in zip(self.rows.values(), fewest, strict=True):
            stages = rows.stages(pace, self.real_from)
            work, order = rows.work, np.arange(len(stages))
            if rows.lead.any():
                work = rows.work + rows.lead * stages
                order = np.lexsort((rows.unit * stages, work))
            devices = (rows.unit * stages)[order]
            front = _front(work[order], devices, np.zeros(len(devices), int), order)
            keep = front.devices <= self.devices - (sum(fewest) - own)
            if not keep.any():
                return None
            fronts.append(_taken(front, keep))
        return fronts


def _undominated(rows: Rows, devices: float) -> Rows:
    """The rows that fit on `devices`, without each that another one matches or beats in seconds, unit and least pp."""
    keep = np.flatnonzero(rows.unit * rows.least <= devices)
    # Rows are sorted by work, so only an earlier row can be as good or better.
    others = (own[keep] for own in (rows.unit, rows.least, rows.load, rows.hop, rows.lead))
    better = np.logical_and.reduce([own[None, :] <= own[:, None] for own in others])
    keep = keep[~np.tril(better, -1).any(axis=1)]
    return rows.taken(keep)


def _front(work: np.ndarray, devices: np.ndarray, before: np.ndarray, row: np.ndarray) -> Front:
    """The front of combinations that are sorted by work."""
    least = np.minimum.accumulate(devices)
    keep = np.concatenate(([True], devices[1:] < least[:-1]))
    return _taken(Front(work=work, devices=devices, before=before, row=row), keep)


def _taken(front: Front, keep: np.ndarray) -> Front:
    return Front(work=front.work[keep], devices=front.devices[keep], before=front.before[keep], row=front.row[keep])


def merged(front: Front, other: Front, devices: float) -> Front:
    """The front of every combination of `front` with a row of `other` on at most `devices`."""
    total = front.devices[:, None] + other.devices[None, :]
    before, index = np.nonzero(total <= devices)
    work = front.work[before] + other.work[index]
    order = np.lexsort((total[before, index], work))
    before, index = before[order], index[order]
    if not len(order):
        return Front(work=work, devices=work, before=before, row=index)
    return _front(work[order], total[before, index], before, other.row[index])
