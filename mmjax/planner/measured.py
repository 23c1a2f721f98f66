"""Times and temporaries that were measured: a profile as a `Clock`.

Times. A stage of n layers takes c + n·L, plus F for the first end and B for the last if it has them. A stage of a
single layer is compiled without a loop and takes S instead of c + n·L. All five depend on tp and on the shape of the
input. Trials time stages of one, two and three layers with both ends, and of one layer with one end. Each kind of trial
gives a curve over positions, piecewise linear; the five unknowns follow from these curves.

Temporaries. A program needs the bytes of its fullest moment, and these are not the sum of the bytes of its parts. If
that moment is in the loop over layers, each layer adds its gradients and the copies and conversions that the compiler
makes for all iterations. If it is in the last end, as with a large vocabulary, layers add nothing. So bytes are linear
in layers among stages with the same ends. Stages with both ends, and with only the first, are compiled with one, two
and three layers. A stage without the first end needs fewer bytes: by the difference between stages of one layer with
both ends and with the last alone. Trials with one row are separate: compilers drop an axis of size one, so their
figures do not apply to two rows.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmjax.configurable import ConfigError
from mmjax.planner.clock import PassSeconds
from mmjax.planner.profile_file import Compiled, Profile, ProfiledStage, Samples
from mmjax.planner.work import StagePart, Work

_LEAST = 0.1
"""The least share of a program's seconds, from its call to its end, that counts as work of its devices."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds, or bytes, as a function of a size: linear between the measured points.

    Beyond the last point it is extended from the last two points, and before the first from the first two. There it
    never falls as the size grows, and at size 0 it is not below 0. With a single point it is proportional to the size.

    Attributes:
      sizes: ascending.
      values: seconds or bytes, one for each size.
    """

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, size: float) -> float:
        """The value at a size of 0 or more."""
        sizes, values = self.sizes, self.values
        if len(sizes) == 1:
            return values[0] * size / sizes[0]
        above = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        (x0, x1), (y0, y1) = sizes[above - 1 : above + 1], values[above - 1 : above + 1]
        slope = (y1 - y0) / (x1 - x0)
        if size < x0:
            return y0 - min(max(slope, 0.0), y0 / x0) * (x0 - size)
        if size > x1:
            return y1 + max(slope, 0.0) * (size - x1)
        return y0 + slope * (size - x0)


@dataclass(frozen=True, kw_only=True)
class Lines:
    """One figure of the trials with one part and tp: for each width of a row, a line over all positions of the rows.

    Attributes:
      widths: ascending.
      lines: one for each width.
    """

    widths: tuple[int, ...]
    lines: tuple[Line, ...]

    def at(self, positions: float, width: int) -> float:
        """The value for `positions` positions in all, in rows of `width`.

        Between two measured widths it is linear, since attention grows with the width; beyond them it is the value at
        the nearest width.
        """
        above = bisect_left(self.widths, width)
        if above == len(self.widths):
            return self.lines[-1].at(positions)
        if above == 0 or self.widths[above] == width:
            return self.lines[above].at(positions)
        low, high = self.widths[above - 1 : above + 1]
        share = (width - low) / (high - low)
        return (1 - share) * self.lines[above - 1].at(positions) + share * self.lines[above].at(positions)


Table = Mapping[str, Mapping[StagePart, Lines]]
"""Lines by direction ("forward" or "backward") and part."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredClock:
    """The times and temporaries of a profile.

    Nothing was measured between nodes: moves and gathers across nodes take as long as within one.

    Attributes:
      profile: the measurements.
      peak: FLOPs per second of a device; 0 where it is not known.
      process: as in `Clock`; 0 where no sender waits.
    """

    profile: Profile
    peak: float = 0.0
    process: int = 0

    @property
    def source(self) -> str:
        """One line that names the source of times and temporaries."""
        return self.profile.source

    def computing(self, work: Work) -> MeasuredClock:
        """This clock: a profile is of one value of `remat`."""
        del work
        return self

    @property
    def memory(self) -> float:
        """Bytes of a device that a run may take, as JAX told them."""
        return self.profile.device.memory

    @property
    def platform(self) -> str:
        """Platform of the devices, such as "cpu"."""
        return self.profile.device.platform

    @property
    def node(self) -> int:
        """Devices of a node: the number of devices of the profile."""
        return self.profile.device.count

    @property
    def op(self) -> float:
        """Seconds that the host spends on an op."""
        return self.profile.op

    @property
    def shared(self) -> float:
        """The number of devices that work at a time where they share processors; 0 where each has its own."""
        return self.profile.shared if self.profile.shared < self.profile.device.count else 0.0

    def of(self, module: str) -> MeasuredClock:
        """This clock, for every module."""
        return self

    def stage(
        self, module: str, part: StagePart, *, rows: float, width: int, tp: int, expert_share: float = 1.0
    ) -> PassSeconds:
        """Seconds of a microbatch in a stage, without the host's part; arguments as for `Clock.stage`.

        Stages were timed with all experts on each device, so `expert_share` changes nothing.

        Raises:
          ConfigError: the module was not timed, or not with this tp.
        """
        del expert_share
        forward, backward = (
            float(_counts(part) @ unknowns) for unknowns in self._solved(module, tp, rows * width, width)
        )
        return PassSeconds(
            forward=self._device_seconds(forward),
            backward=self._device_seconds(backward) if backward else 0.0,
        )

    def temporaries(self, module: str, part: StagePart, *, rows: float, width: int, tp: int) -> float:
        """Bytes that the larger of a stage's compiled programs needs on a device; arguments as for `Clock.stage`.

        Raises:
          ConfigError: the module was not compiled, or not with this tp.
        """
        table = self._lines("compiled" if rows <= 1 else "compiled in rows", module, tp)

        def compiled(direction: str, layers: int, *, first: bool, last: bool) -> float:
            stage = StagePart(layers=layers, first=first, last=last)
            if stage not in table[direction]:
                raise ConfigError(f"profile: compiled has no {stage} of {module!r}; make another with mmjax.profile")
            return table[direction][stage].at(rows * width, width)

        def needed(direction: str) -> float:
            size = compiled(direction, min(part.layers, 2), first=True, last=part.last)
            if part.layers > 2:
                layer = compiled(direction, 3, first=True, last=part.last) - size
                size += (part.layers - 2) * max(0.0, layer)
            if part.first:
                return max(0.0, size)
            first_end = compiled(direction, 1, first=True, last=True) - compiled(direction, 1, first=False, last=True)
            return max(0.0, size - max(0.0, first_end))

        return max(map(needed, table))

    def move(self, size: float, *, across: bool) -> float:
        """Seconds in which a device sends `size` bytes to another; `across` changes nothing.

        Raises:
          ConfigError: the profile has no moves.
        """
        return _line(self.profile.moves, "moves").at(size)

    def copy(self, size: float) -> float:
        """Seconds in which a device copies `size` bytes to its host's memory, or back; infinite without copies."""
        return _line(self.profile.copies, "copies").at(size) if self.profile.copies else math.inf

    def gather(self, size: float, ranks: int, *, across: bool) -> float:
        """Seconds of an all-gather or reduce-scatter over `ranks` devices of `size` bytes in all; 0 for one rank.

        `across` changes nothing. Between two measured numbers of ranks the seconds are linear. Beyond them they are
        those of the nearest number, scaled by (ranks - 1)/ranks, the share of the bytes that a ring moves.

        Raises:
          ConfigError: the profile has no gathers.
        """
        return self._collective(self.profile.gathers, size, ranks)

    def all_to_all(self, size: float, ranks: int, *, across: bool) -> float:
        """Seconds of an all-to-all of `size` bytes of each of `ranks` devices; else as `gather`.

        A profile that has no all-to-alls, such as an older one, has the times of gathers, which move as many bytes.

        Raises:
          ConfigError: the profile has no gathers either.
        """
        return self._collective(self.profile.all_to_alls or self.profile.gathers, size, ranks)

    def _collective(self, measured: Mapping[int, Samples], size: float, ranks: int) -> float:
        """Seconds of a collective over `ranks` devices, from times by number of ranks and bytes."""
        if ranks == 1:
            return 0.0
        table = {count: _line(samples, "gathers").at(size) for count, samples in measured.items()}
        if not table:
            raise ConfigError("gathers: the profile has none, since it was made on one device; make one on two or more")
        counts = sorted(table)
        nearest = min(max(ranks, counts[0]), counts[-1])
        above = next(count for count in counts if count >= nearest)
        below = max((count for count in counts if count <= nearest), default=above)
        share = 0.0 if above == below else (nearest - below) / (above - below)
        seconds = (1 - share) * table[below] + share * table[above]
        return seconds * (1 - 1 / ranks) / (1 - 1 / nearest)

    def _solved(self, module: str, tp: int, positions: float, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of forward and backward for each entry of `_counts`; cached, since many candidates need them."""
        key = (module, tp, positions, width)
        if key not in self._solutions:
            table = self._lines("trials", module, tp)
            self._solutions[key] = (
                _fit(table["forward"], positions, width),
                _fit(table["backward"], positions, width),
            )
        return self._solutions[key]

    @cached_property
    def _solutions(self) -> dict[tuple[str, int, float, int], tuple[np.ndarray, np.ndarray]]:
        return {}

    def _device_seconds(self, seconds: float) -> float:
        """Seconds of a program without the host's part, which `op` counts; at least the share `_LEAST` of `seconds`."""
        return max(seconds - self.op, _LEAST * seconds)

    def _lines(self, which: str, module: str, tp: int) -> Table:
        """The lines of a module at `tp`; `which` is "trials", "compiled" or "compiled in rows" (`_in_rows`).

        Raises:
          ConfigError: the module was not timed, or not with this tp.
        """
        if (which, module, tp) not in self._tables:
            tps = sorted(size for kind, name, size in self._tables if (kind, name) == (which, module))
            if not tps:
                raise ConfigError(f"profile: module {module!r} was not timed; make another with mmjax.profile")
            has = ", ".join(map(str, tps))
            raise ConfigError(
                f"{module}/Layout.tp={tp}: the profile has {which.split()[0]} for tp {has}; use one of them"
            )
        return self._tables[which, module, tp]

    @cached_property
    def _tables(self) -> dict[tuple[str, str, int], Table]:
        by_key: dict[tuple[str, str, int], list[ProfiledStage]] = {}
        compiled = self.profile.compiled
        several = _in_rows(compiled)
        for which, stages in (("trials", self.profile.trials), ("compiled", compiled), ("compiled in rows", several)):
            for stage in stages:
                by_key.setdefault((which, stage.module, stage.tp), []).append(stage)
        return {key: _table(stages) for key, stages in by_key.items()}


def _table(stages: Sequence[ProfiledStage]) -> Table:
    """The lines of stages of one module and tp."""
    table: dict[str, dict[StagePart, Lines]] = {}
    for direction in ("forward", "backward"):
        samples: dict[StagePart, list[tuple[int, int, float]]] = {}
        for stage in stages:
            samples.setdefault(stage.part, []).append((stage.width, stage.rows, getattr(stage, direction)))
        table[direction] = {part: _by_width(part_samples) for part, part_samples in samples.items()}
    return table


def _in_rows(compiled: Sequence[Compiled]) -> list[Compiled]:
    """The stages with several rows, and stages with one row that were not compiled with two larger numbers of rows."""

    def key(stage: Compiled) -> tuple[str, int, StagePart, int]:
        return stage.module, stage.tp, stage.part, stage.width

    counts = Counter(key(stage) for stage in compiled if stage.rows > 1)
    return [stage for stage in compiled if stage.rows > 1 or counts[key(stage)] < 2]


def _by_width(samples: Sequence[tuple[int, int, float]]) -> Lines:
    """Lines through samples of (width, rows, value)."""
    widths = sorted({width for width, *_ in samples})
    lines = []
    for width in widths:
        points = sorted((float(rows * width), value) for w, rows, value in samples if w == width)
        lines.append(Line(sizes=tuple(size for size, _ in points), values=tuple(value for _, value in points)))
    return Lines(widths=tuple(widths), lines=tuple(lines))


def _counts(part: StagePart) -> np.ndarray:
    """The numbers of single layers, loops, layers in a loop, first ends and last ends of a stage, [5]."""
    loop = part.layers > 1
    return np.array([not loop, loop, part.layers * loop, part.first, part.last], float)


def _fit(times: Mapping[StagePart, Lines], positions: float, width: int) -> np.ndarray:
    """Seconds of each entry of `_counts`: the non-negative least-squares fit to the lines."""
    seconds = np.array([lines.at(positions, width) for lines in times.values()])
    return non_negative(np.array([_counts(part) for part in times]), seconds)


def non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Non-negative least squares: the x ≥ 0, [K], for which matrix·x is closest to `target`.

    `matrix` is [N, K], `target` [N]. Tries every set of unknowns that may be above 0, the largest sets first; there are
    few unknowns. The result is float, all zeros if nothing is closer.
    """
    count = matrix.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for size in range(count, 0, -1):
        for chosen in itertools.combinations(range(count), size):
            x = np.zeros(count)
            x[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            if (x < 0).any():
                continue
            off = matrix @ x - target
            if off @ off < least * (1 - 1e-9):
                best, least = x, float(off @ off)
    return best


def _line(samples: Sequence[tuple[float, float]], name: str) -> Line:
    if not samples:
        raise ConfigError(f"{name}: the profile has none, since it was made on one device; make one on two or more")
    return Line(sizes=tuple(size for size, _ in samples), values=tuple(seconds for _, seconds in samples))
