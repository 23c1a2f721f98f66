"""Tables A2 to A5 of NVIDIA's heterogeneous-parallelism paper: the planner's predictions beside the published figures.

Every run is an estimate of the planner (`model`) from datasheet figures of the H100 and three efficiencies: of FLOPs in
products, of FLOPs in attention and of all communication (`clock`). These are fitted to every second row of Tables A2 to
A4, by least squares on the logarithm of step times in closed form. Predictions are simulated; the other rows and Table
A5 are scored. Nothing was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from statistics import correlation, median

import numpy as np

from mmjax.bench.rows import Row as Result
from mmjax.mesh.layout import Layout
from mmjax.planner.accelerators import H100
from studies.nvidia.checks import contradictions, memory_contradictions, sign, upside_down
from studies.nvidia.clock import Reached
from studies.nvidia.model import LLMS, MegatronEstimate, Workload, encoder_work, estimate
from studies.nvidia.tables import RANKINGS, ROWS, MeasuredRun, ModeRanking, Row

LEAST, START = 0.05, 0.5
"""Lower bound, and start, of each efficiency in a fit; the upper bound is 1."""
DEGREES = (1, 2, 4, 8)
"""tp and pp that are tried for NC's LLM where no table prints its layout."""


# ---- what is predicted of a row --------------------------------------------------------------------------------------


def workload(row: Row | ModeRanking) -> Workload:
    """The workload of a row."""
    tokens, batch = (row.tokens, row.batch) if isinstance(row, Row) else (8192, row.rows[0].batch)
    vision = round(tokens * row.vision / 100)
    return Workload(encoder=row.encoder, llm=row.llm, tokens=tokens, vision_tokens=vision, batch=batch)


def predicted(row: Row, run: MeasuredRun, reached: Reached, *, whole_step: bool = False) -> MegatronEstimate:
    """The estimate of a run, timed as in its table (Table A3: forward and backward alone), or of the `whole_step`."""
    passes = row.table == "A3" and not whole_step
    return estimate(workload(row), run.mode, run.encoder, run.llm, reached, passes_only=passes)


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """A row beside its prediction."""

    row: Row
    reached: Reached

    @cached_property
    def runs(self) -> tuple[tuple[MeasuredRun, MegatronEstimate], ...]:
        """Both runs with their estimates."""
        return tuple((run, predicted(self.row, run, self.reached)) for run in (self.row.base, self.row.compared))

    @cached_property
    def gain(self) -> float:
        """Predicted gain in tokens per second of whole steps, percent."""
        base, compared = (
            predicted(self.row, run, self.reached, whole_step=True) for run in (self.row.base, self.row.compared)
        )
        return (base.seconds / compared.seconds - 1) * 100

    @property
    def gain_error(self) -> float:
        """Predicted less published gain, in percentage points."""
        return self.gain - self.row.measured

    @property
    def same_sign(self) -> bool:
        """Whether predicted and published gain have the same `sign`."""
        return sign(self.gain) == sign(self.row.measured)

    @cached_property
    def step_errors(self) -> tuple[float, float]:
        """Errors of the predicted steps of both runs, percent."""
        base, compared = ((estimated.seconds / run.step - 1) * 100 for run, estimated in self.runs)
        return base, compared

    @cached_property
    def memory_errors(self) -> tuple[float, float]:
        """Errors of the predicted peaks of memory of both runs, percent."""
        base, compared = ((estimated.most / (run.memory * 1e9) - 1) * 100 for run, estimated in self.runs)
        return base, compared


# ---- which rows ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def left_out() -> Mapping[str, tuple[str, ...]]:
    """Rows that are in no score, by name, with the reasons."""
    return contradictions()


def above_the_peak() -> Mapping[str, str]:
    """NC rows, with why, whose step is too short for a recomputed encoder with a backward at its devices' peak."""
    reasons = {}
    for row in (row for row in ROWS if row.compared.mode == "NC"):
        run, load = row.compared, workload(row)
        work = encoder_work(replace(load, recompute=False), run.encoder)
        trained = work.forward.of(work.whole) + work.backward.of(work.whole) + work.layers * work.forward.layer
        least = trained * row.batch / run.encoder.size / H100.flops
        if least > run.step:
            devices = f"{run.encoder.size} devices' peak"
            reasons[row.name] = (
                f"its encoder would take {least:.1f} s at 100 % of {devices}, the step takes {run.step:.1f} s"
            )
    return reasons


def kept_rows() -> tuple[Row, ...]:
    """The rows of Tables A2 to A4 that are not left out."""
    return tuple(row for row in ROWS if row.name not in left_out())


def fitted_rows() -> tuple[Row, ...]:
    """The rows that are fitted: every second kept row of each table, from the first on."""
    return tuple(row for table in ("A2", "A3", "A4") for row in [r for r in kept_rows() if r.table == table][::2])


def scored_rows() -> tuple[Row, ...]:
    """The rows that are scored: kept rows that are not fitted."""
    fitted = set(fitted_rows())
    return tuple(row for row in kept_rows() if row not in fitted)


# ---- fit and score ---------------------------------------------------------------------------------------------------


def errors(three: Sequence[float], rows: Sequence[Row]) -> list[float]:
    """Logarithm of predicted over published seconds of both runs of each row, in closed form."""
    reached = _reached(three)
    runs = [(row, run) for row in rows for run in (row.base, row.compared)]
    return [float(np.log(predicted(row, run, reached).quick / run.step)) for row, run in runs]


def _reached(three: Sequence[float]) -> Reached:
    products, attention, communication = three
    return Reached(products=products, attention=attention, communication=communication)


def fit(rows: Sequence[Row]) -> Reached:
    """The efficiencies with the least squares of `errors`."""
    from scipy.optimize import least_squares

    start, least = np.log([START] * 3), np.log(LEAST)
    solution = least_squares(lambda logs: errors(np.exp(logs), rows), start, bounds=(least, 0.0))
    return _reached([float(np.exp(log)) for log in solution.x])


@lru_cache(maxsize=1)
def fitted() -> Reached:
    """The efficiencies fitted to `fitted_rows`, rounded to three decimals."""
    efficiencies = fit(fitted_rows())
    return _reached(
        [round(rate, 3) for rate in (efficiencies.products, efficiencies.attention, efficiencies.communication)]
    )


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well some rows are predicted.

    Attributes:
      rows: number of rows.
      signs: how many of them have a gain of the published sign.
      always: how many would, if all were predicted to gain.
      correlation: correlation of predicted and published gains.
      step: median absolute error of steps, percent.
      gain: median absolute error of gains, percentage points.
      memory: median absolute error of peaks of memory, percent.
    """

    rows: int
    signs: int
    always: int
    correlation: float
    step: float
    gain: float
    memory: float


def score(predictions: Sequence[PredictedRow]) -> Score:
    """The score of some rows; a peak of memory of H that two tables print differently does not count."""
    twice = memory_contradictions()
    memory = [abs(e) for p in predictions for e in p.memory_errors[p.row.name in twice :]]
    return Score(
        rows=len(predictions),
        signs=sum(p.same_sign for p in predictions),
        always=sum(sign(p.row.measured) > 0 for p in predictions),
        correlation=correlation([p.gain for p in predictions], [p.row.measured for p in predictions]),
        step=median(abs(e) for p in predictions for e in p.step_errors),
        gain=median(abs(p.gain_error) for p in predictions),
        memory=median(memory),
    )


# ---- Table A5 --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A workload of Table A5 beside its prediction: gains of TFLOPS per device over H, in percent."""

    ranking: ModeRanking
    c: float
    nc: float
    layout: Layout

    @property
    def best(self) -> str:
        """The mode that is predicted to be best. H is a case of C."""
        return "NC" if self.nc > self.c else "C"

    @property
    def right(self) -> bool:
        """Whether that mode is one of those published as the best."""
        return self.best in self.ranking.best


def chosen(ranking: ModeRanking, reached: Reached) -> Chosen:
    """Predicts a workload of Table A5, with the layouts of H and C of Table A2.

    H is a case of C, so the gain of C is at least 0, and 0 where C is H. Where Table A4 has no row of the workload, the
    LLM of NC gets the layout that is predicted to be its best.
    """
    by_mode = {row.compared.mode: row for row in ranking.rows}
    base, load = by_mode["C"].base, workload(ranking)
    devices = ranking.devices
    h = estimate(load, "H", base.encoder, base.llm, reached).seconds
    c = h
    if ranking.colocated is not None:
        colocated_estimate = estimate(load, "C", ranking.colocated, by_mode["C"].compared.llm, reached)
        c = min(h, colocated_estimate.seconds)
    layout = by_mode["NC"].compared.llm if "NC" in by_mode else _best_beside(ranking, reached)
    nc = estimate(load, "NC", ranking.island, layout, reached).seconds
    gains = ((h / took * devices[0] / count - 1) * 100 for took, count in ((c, devices[1]), (nc, devices[2])))
    return Chosen(ranking=ranking, c=next(gains), nc=next(gains), layout=layout)


def _best_beside(ranking: ModeRanking, reached: Reached) -> Layout:
    """The fastest layout of the LLM, in closed form, that fits on the devices that the encoder leaves."""
    load, devices = workload(ranking), ranking.island.rank_offset
    layouts: list[tuple[float, Layout]] = []
    for tp in DEGREES:
        for pp in DEGREES:
            dp, remainder = divmod(devices, tp * pp)
            if remainder or not dp or load.batch % dp or pp > LLMS[ranking.llm].layers:
                continue
            layout = Layout(tp=tp, pp=pp, dp=dp)
            estimated = estimate(load, "NC", ranking.island, layout, reached)
            if estimated.most <= H100.memory:
                layouts.append((estimated.quick, layout))
    return min(layouts, key=lambda pair: pair[0])[1]


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows() -> Iterator[Result]:
    """All rows: efficiencies, errors of each row of the tables, rows left out, scores."""
    reached = fitted()
    for efficiency, share in asdict(reached).items():
        yield _row(f"efficiency: {efficiency}", share, "ratio")
    for row in ROWS:
        yield from _rows_of(PredictedRow(row=row, reached=reached))
    for ranking in RANKINGS:
        estimated = chosen(ranking, reached)
        yield _row(f"{ranking.name}: C a device, predicted", estimated.c, "%")
        yield _row(f"{ranking.name}: NC a device, predicted", estimated.nc, "%")
        yield _row(
            f"{ranking.name}: best predicted {estimated.best}, published {'/'.join(ranking.best)}",
            estimated.right,
            "right",
        )
    for name, texts in left_out().items():
        yield _row(f"left out: {name}: {'; '.join(texts)}", len(texts), "reasons")
    yield _row("islands above the peak if recomputed encoders had a backward", len(above_the_peak()), "rows")
    yield _row("pairs of runs in which less work takes longer", len(upside_down()), "pairs")
    for name, score in scores(reached).items():
        yield _row(f"{name}: signs right of {score.rows}", score.signs, "rows")
        yield _row(f"{name}: signs right of {score.rows} if all were said to gain", score.always, "rows")
        yield _row(f"{name}: correlation of gains", score.correlation, "ratio")
        yield _row(f"{name}: median error of steps", score.step, "%")
        yield _row(f"{name}: median error of gains", score.gain, "points")
        yield _row(f"{name}: median error of memory", score.memory, "%")
    yield _row(f"best mode of A5: right of {len(kept_rankings())}", right_modes(reached), "rows")


def kept_rankings() -> tuple[ModeRanking, ...]:
    """The workloads of Table A5 that are not left out."""
    return tuple(ranking for ranking in RANKINGS if ranking.name not in left_out())


def right_modes(reached: Reached) -> int:
    """Number of kept workloads of Table A5 whose best mode is predicted."""
    return sum(chosen(ranking, reached).right for ranking in kept_rankings())


def scores(reached: Reached) -> dict[str, Score]:
    """Scores by name: of the scored half, of its rows by table, of the fitted half, and of all rows, none left out."""
    groups = {"scored": scored_rows()}
    groups |= {f"scored, {table}": [r for r in scored_rows() if r.table == table] for table in ("A2", "A3", "A4")}
    groups |= {"fitted": fitted_rows(), "all, none left out": ROWS}
    return {name: score([PredictedRow(row=row, reached=reached) for row in rows]) for name, rows in groups.items()}


def _rows_of(estimated: PredictedRow) -> Iterator[Result]:
    name, modes = estimated.row.name, [run.mode for run, _ in estimated.runs]
    for mode, step, memory in zip(modes, estimated.step_errors, estimated.memory_errors, strict=True):
        yield _row(f"{name}: step of {mode}, error", step, "%")
        yield _row(f"{name}: memory of {mode}, error", memory, "%")
    yield _row(f"{name}: gain, predicted", estimated.gain, "%")
    yield _row(f"{name}: gain, error", estimated.gain_error, "points")


def _row(case: str, value: float, unit: str) -> Result:
    return Result(bench="nvidia", case=case, value=float(value), unit=unit)
