"""The modules on devices of one kind: the layouts that each may have, and the best of their combinations at a pace.

A *row* of the table of a module is a pair (tp, dp); its pp is left open. With the LLM's dp fixed, a row's warm-up
("work") is fixed too, and its stage time is work / pp. So if stages may take `pace` seconds, a row has
pp = ceil(work / pace), or more if memory needs it. It remains to choose a row for each module: the least work on the
available devices.

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
class DegreeTable:
    """A module's rows (tp, dp), the least work first; arrays of shape [R].

    Attributes:
      tp, dp: degrees.
      work: warm-up seconds of all stages together, without communication.
      load: seconds of all stages together for a microbatch, with its share of the communication of once a step.
      hop: seconds in which a stage sends a microbatch to the next.
      lead: warm-up seconds of each stage in which it sends a microbatch to the next.
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
        """Devices of one stage of each row, [R]."""
        return self.tp * self.dp

    @cached_property
    def fewest(self) -> float:
        """The fewest devices that the module can have, a whole number unless pp may be real."""
        return float((self.unit * self.least).min())

    def stages(self, pace: float, real_from: float = math.inf) -> np.ndarray:
        """The least pp of each row with stages of at most `pace` seconds, float [R]; infinite where no pp is enough.

        From `real_from` on it may be any real number, as in `allowed`.
        """
        return allowed(self.depths, real_from, np.maximum(self.least, self.least_real(pace)))

    def least_real(self, pace: float) -> np.ndarray:
        """The least real pp of each row with stages of at most `pace` seconds, [R]; infinite where no pp is enough.

        It may be below 1, and ignores `least`.
        """
        room = pace * (1 + ROUNDING) - self.hop if self.hop.any() else np.full(len(self.load), pace)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.load > 0, np.where(room > 0, self.load / room, np.inf), 0.0)

    def taken(self, keep: np.ndarray) -> DegreeTable:
        """A table of the rows that `keep` selects, a mask [R] or indices; `depths` stays."""
        names = ("tp", "dp", "work", "load", "hop", "lead", "least")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})

    def degrees(self, row: int, pace: float) -> Degrees:
        """Degrees of the row of this index with the least pp at `pace`, which must be finite."""
        return Degrees(tp=int(self.tp[row]), dp=int(self.dp[row]), pp=math.ceil(self.stages(pace)[row]))


def first_real(depths: np.ndarray, real_from: float) -> float:
    """The first pp from `real_from` on that a module may have; from there on any real number is allowed.

    Args:
      depths: every pp that the module may have, ascending, [P]; empty if it may have any whole number.
      real_from: the least pp that may be a real number.

    Returns:
      The first of `depths` that is no smaller, infinite if all are smaller; for empty `depths`, `real_from` rounded up.
    """
    if not len(depths):
        return float(np.ceil(real_from))
    return float(np.append(depths, np.inf)[np.searchsorted(depths, real_from)])


def allowed(depths: np.ndarray, real_from: float, stages: np.ndarray) -> np.ndarray:
    """Rounds each number of stages up to the next that a module may have, as a float; infinite where there is none.

    From `first_real` on any real number is allowed, up to the last of `depths`.

    Args:
      depths: every pp that the module may have, ascending, [P]; empty if it may have any whole number.
      real_from: the pp from which on it may be any real number; infinite for whole numbers only.
      stages: real numbers of stages, of any shape, as the result.
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
    """The modules on devices of one kind, for a fixed dp of the LLM.

    Attributes:
      devices: number of devices; if pp may be real, with a rounding error added.
      rows: table by module name.
      real_from: the pp from which on it may be any real number.
    """

    devices: float
    rows: dict[str, DegreeTable]
    real_from: float = math.inf

    @cached_property
    def least_work(self) -> float:
        """A lower bound on the work (warm-up seconds) of every combination."""
        return sum(float(rows.work[0]) for rows in self.rows.values())

    @cached_property
    def least_pace(self) -> float:
        """A lower bound on the pace: below it even real numbers of stages need more devices than available."""
        return sum(float((rows.unit * rows.load).min()) for rows in self.rows.values()) / self.devices

    @cached_property
    def slowest_pace(self) -> float:
        """The pace, in seconds, at which every row has its fewest stages; a slower pace allows no other combination."""
        return max(float((rows.load / rows.least + rows.hop).max()) for rows in self.rows.values())

    def least_with(self, share: float) -> float:
        """The least sum over modules of (work + `share` · load · devices of a stage).

        With the further microbatches of a step over the devices as `share` it is a lower bound on the step in seconds.
        """
        return sum(float((rows.work + share * rows.load * rows.unit).min()) for rows in self.rows.values())

    def least_work_at(self, pace: float) -> float:
        """The least work (warm-up seconds) of a combination with stages of at most `pace` seconds, or infinity."""
        front: Front | None = None
        fronts = self._module_fronts(pace)
        if fronts is None:
            return math.inf
        for module_front in fronts[:-1]:
            front = module_front if front is None else merged(front, module_front, self.devices)
        last = fronts[-1]
        if front is None:
            return float(last.work[0])
        # Each combination takes the last module's row of least work that still fits.
        row = np.searchsorted(-last.devices, front.devices - self.devices, side="left")
        fits = row < len(last.work)
        return float((front.work[fits] + last.work[row[fits]]).min()) if fits.any() else math.inf

    def fronts(self, pace: float) -> list[Front]:
        """The fronts at `pace` of the first module, of the first two, and so on to all modules; [] if nothing fits."""
        joint: list[Front] = []
        for front in self._module_fronts(pace) or ():
            joint.append(front if not joint else merged(joint[-1], front, self.devices))
        return joint if joint and len(joint[-1].work) else []

    def chosen(self, fronts: list[Front], index: int, pace: float) -> dict[str, Degrees]:
        """Degrees by module name, in the order of `rows`, of combination `index` of the last of `fronts` at `pace`."""
        chosen = {}
        for (name, rows), front in zip(reversed(self.rows.items()), reversed(fronts), strict=True):
            chosen[name] = rows.degrees(int(front.row[index]), pace)
            index = int(front.before[index])
        return dict(reversed(chosen.items()))

    def pruned(self) -> Group:
        """The same group without rows that no best plan needs."""
        spare = self.devices - sum(rows.fewest for rows in self.rows.values())
        rows = {name: _undominated(rows, spare + rows.fewest) for name, rows in self.rows.items()}
        return replace(self, rows=rows)

    def paces(self, fastest: float, slowest: float) -> np.ndarray:
        """Every stage time from `fastest` to `slowest` seconds that a row can have, in no order; some are repeated."""
        paces = []
        for rows in self.rows.values():
            if len(rows.depths):
                pace_RP = rows.load[:, None] / rows.depths + rows.hop[:, None]
                inside = (pace_RP >= fastest * (1 - ROUNDING)) & (pace_RP <= slowest * (1 + ROUNDING))
                paces.append(pace_RP[inside & (rows.depths >= rows.least[:, None])])
                continue
            low = np.maximum(rows.least, np.ceil(rows.least_real(slowest) * (1 - ROUNDING)))
            high = np.minimum(self.devices // rows.unit, np.floor(rows.least_real(fastest) * (1 + ROUNDING)))
            high = np.where(rows.load > 0, high, low)  # a row without load has one pace, 0
            counts = np.maximum(high - low + 1, 0).astype(np.int64)
            starts = np.repeat(np.cumsum(counts) - counts, counts)
            stages = np.repeat(low, counts) + np.arange(counts.sum()) - starts
            paces.append(np.repeat(rows.load, counts) / stages + np.repeat(rows.hop, counts))
        return np.concatenate(paces)

    def _module_fronts(self, pace: float) -> list[Front] | None:
        fewest = [rows.fewest for rows in self.rows.values()]
        fronts = []
        for rows, least_devices in zip(self.rows.values(), fewest, strict=True):
            stages = rows.stages(pace, self.real_from)
            work, order = rows.work, np.arange(len(stages))
            if rows.lead.any():
                work = rows.work + rows.lead * stages
                order = np.lexsort((rows.unit * stages, work))
            devices = (rows.unit * stages)[order]
            front = _front(work[order], devices, np.zeros(len(devices), int), order)
            keep = front.devices <= self.devices - (sum(fewest) - least_devices)
            if not keep.any():
                return None
            fronts.append(_taken(front, keep))
        return fronts


def _undominated(rows: DegreeTable, devices: float) -> DegreeTable:
    """The rows that fit on `devices` and that no other row matches or beats in seconds, unit and least pp."""
    keep = np.flatnonzero(rows.unit * rows.least <= devices)
    # Rows are sorted by work, so only an earlier row can be as good or better.
    columns = (column[keep] for column in (rows.unit, rows.least, rows.load, rows.hop, rows.lead))
    better = np.logical_and.reduce([column[None, :] <= column[:, None] for column in columns])
    keep = keep[~np.tril(better, -1).any(axis=1)]
    return rows.taken(keep)


def _front(work: np.ndarray, devices: np.ndarray, before: np.ndarray, row: np.ndarray) -> Front:
    """The front of combinations that are sorted by work."""
    least = np.minimum.accumulate(devices)
    keep = np.concatenate(([True], devices[1:] < least[:-1]))
    return _taken(Front(work=work, devices=devices, before=before, row=row), keep)


def _taken(front: Front, keep: np.ndarray) -> Front:
    return Front(work=front.work[keep], devices=front.devices[keep], before=front.before[keep], row=front.row[keep])


def merged(front: Front, module: Front, devices: float) -> Front:
    """The front of every combination of `front` with one of `module`, on at most `devices` devices.

    A `Front` has Pareto-optimal combinations as arrays: `work`, in ascending order, `devices`, `before` and `row`. Work
    and devices of the result are sums; `before` is an index into `front`, from 0, and `row` is that of `module`. All
    arrays are empty if no combination fits.

    Args:
      front: the combinations of the modules so far, [F].
      module: those of one further module, such as one of `Group.fronts(pace)`.
      devices: the most devices of a combination, infinite for no bound.
    """
    total = front.devices[:, None] + module.devices[None, :]
    before, index = np.nonzero(total <= devices)
    work = front.work[before] + module.work[index]
    order = np.lexsort((total[before, index], work))
    before, index = before[order], index[order]
    if not len(order):
        return Front(work=work, devices=work, before=before, row=index)
    return _front(work[order], total[before, index], before, module.row[index])
