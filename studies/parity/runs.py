"""The runs of the study, with the layouts and the settings of the paper's Tables A6 to A8. Imports no JAX.

The triples of the tables are (tp, pp, dp). Runs that are not colocated have the LLM on ranks 0 to 3 and the tower on
ranks 4 to 7; colocated ones have both on ranks 0 to 7, with twice the dp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from mmjax.configurable import ConfigError, near_misses

GIN_FILE = Path(__file__).with_name("parity.gin")
RANKS = 4
"""Ranks of a module that is not colocated."""


@dataclass(frozen=True)
class Degrees:
    """Degrees of a module, as a row of Tables A7 and A8 has them."""

    tp: int
    pp: int
    dp: int

    @property
    def ranks(self) -> int:
        """How many ranks the module has."""
        return self.tp * self.pp * self.dp

    def doubled(self) -> Degrees:
        """The same with twice the dp."""
        return Degrees(self.tp, self.pp, 2 * self.dp)

    def bindings(self, module: str, offset: int = 0) -> tuple[str, ...]:
        """The layout as settings."""
        degrees = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "rank_offset": offset}
        return tuple(f"{module}/Layout.{name}={value}" for name, value in degrees.items())


SINGLE = Degrees(1, 1, 1)
A7: Mapping[str, tuple[Degrees, Degrees]] = {
    "tp4_both": (Degrees(4, 1, 1), Degrees(4, 1, 1)),
    "tp2_dp2_both": (Degrees(2, 1, 2), Degrees(2, 1, 2)),
    "tp2_pp2_llm_tp4_vision": (Degrees(2, 2, 1), Degrees(4, 1, 1)),
    "tp1_dp4_both": (Degrees(1, 1, 4), Degrees(1, 1, 4)),
    "pp4_llm_tp4_vision": (Degrees(1, 4, 1), Degrees(4, 1, 1)),
    "pp4_llm_dp4_vision": (Degrees(1, 4, 1), Degrees(1, 1, 4)),
    "pp2_dp2_llm_tp2_dp2": (Degrees(1, 2, 2), Degrees(2, 1, 2)),
    "tp4_llm_dp4_vision": (Degrees(4, 1, 1), Degrees(1, 1, 4)),
    "tp2_pp2_llm_tp2_dp2_vis": (Degrees(2, 2, 1), Degrees(2, 1, 2)),
    "tp2_dp2_llm_dp4_vision": (Degrees(2, 1, 2), Degrees(1, 1, 4)),
}
"""Degrees of the LLM and of the tower, with a frozen LLM."""
A8: Mapping[str, tuple[Degrees, Degrees]] = {
    "tp4_both": (Degrees(4, 1, 1), Degrees(4, 1, 1)),
    "tp2_dp2_both": (Degrees(2, 1, 2), Degrees(2, 1, 2)),
    "tp2_pp2_llm_tp4_vision": (Degrees(2, 2, 1), Degrees(4, 1, 1)),
    "tp2_pp2_llm_tp2_dp2_vis": (Degrees(2, 2, 1), Degrees(2, 1, 2)),
    "pp4_llm_tp4_vision": (Degrees(1, 4, 1), Degrees(4, 1, 1)),
    "pp4_llm_tp2dp2_vision": (Degrees(1, 4, 1), Degrees(2, 1, 2)),
    "pp2_dp2_llm_tp2dp2_vis": (Degrees(1, 2, 2), Degrees(2, 1, 2)),
    "tp4_llm_tp2dp2_vision": (Degrees(4, 1, 1), Degrees(2, 1, 2)),
}
"""The same with a trained LLM."""
PLACEMENTS = {
    "homogeneous": (Degrees(4, 1, 1), Degrees(4, 1, 1), 0),
    "colocated": (Degrees(4, 1, 1), Degrees(1, 1, 4), 0),
    "noncolocated": (Degrees(4, 1, 1), Degrees(4, 1, 1), RANKS),
}
"""Figures 6, 10 and 11: degrees of the LLM and of the tower, and the tower's first rank."""
ORDERS = 5
"""Runs on one device that differ in the order in which the samples of a step are summed."""
SPREADS = 3
"""The bound of a run's losses, in multiples of the spread of those runs."""
CONTROLS = ("exchanged", "half_scaled", "all_scaled")
"""Wrong routes of ``studies.parity.controls``, under the layouts of ``CONTROLLED``."""
CONTROLLED = "tp2_pp2_llm_tp2_dp2_vis"
RATES = {False: (1e-3, 2e-5), True: (1e-4, 1e-5)}
"""Highest and last learning rate, by whether the LLM is trained."""
STEPS = {"float32": 100, "bfloat16": 1000}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of the study.

    Attributes:
      name: its name on the command line and of its file.
      group: "layout", "order" or "control".
      trained: whether the LLM is trained.
      llm, vision: degrees.
      offset: the tower's first rank.
      dtype: dtype of the computation.
      order: see ``CaptionsConfig``.
      control: a name of ``CONTROLS``; "" for none.
    """

    name: str
    group: str
    trained: bool
    llm: Degrees = SINGLE
    vision: Degrees = SINGLE
    offset: int = 0
    dtype: str = "float32"
    order: int = 0
    control: str = ""

    @property
    def steps(self) -> int:
        """Steps of the paper's run."""
        return STEPS[self.dtype]

    @property
    def reference(self) -> str:
        """The name of the run on one device that it is compared with."""
        return order_name(self.dtype, 0, trained=self.trained)

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return max(self.llm.ranks, self.offset + self.vision.ranks)

    def describe(self) -> str:
        """Its layouts and its trained modules, in words."""
        trained = "projector and LLM" if self.trained else "projector"
        modules = {"LLM": (self.llm, 0), "tower": (self.vision, self.offset)}
        layouts = [f"{name} {d.tp}/{d.pp}/{d.dp} from rank {first}" for name, (d, first) in modules.items()]
        return f"{', '.join(layouts)}; {self.dtype}, {trained} trained"

    def bindings(self) -> tuple[str, ...]:
        """Its settings beside those of ``parity.gin``."""
        rate, final = RATES[self.trained]
        lines = [*self.llm.bindings("llm"), *self.vision.bindings("vision", self.offset)]
        lines += [f"llm/Optimizer.frozen={not self.trained}", f"Train.dtype='{self.dtype}'"]
        lines += [f"Train.steps={self.steps}", f"Train.clip_norm={float(self.dtype == 'bfloat16')}"]
        lines += [f"Optimizer.learning_rate={rate}", f"Optimizer.final_learning_rate={final}"]
        lines += [f"Captions.order={self.order}"]
        lines += [f"vision/Callbacks.projected='studies.parity.controls:{self.control}'"] if self.control else []
        return tuple(lines)


def order_name(dtype: str, order: int, *, trained: bool) -> str:
    """The name of a run on one device."""
    return f"single-{dtype}-{_case(trained=trained)}-order{order}"


def _case(*, trained: bool) -> str:
    return "trained" if trained else "frozen"


def _all_runs() -> tuple[Run, ...]:
    runs: list[Run] = []
    for dtype in STEPS:
        for trained in (False, True):
            for order in range(ORDERS):
                name = order_name(dtype, order, trained=trained)
                runs.append(Run(name=name, group="order", trained=trained, dtype=dtype, order=order))
    for trained, table in ((False, A7), (True, A8)):
        title = "A8" if trained else "A7"
        for name, (llm, vision) in table.items():
            shared = {"group": "layout", "trained": trained}
            apart = Run(name=f"{title}-{name}-noncolocated", llm=llm, vision=vision, offset=RANKS, **shared)
            both = Run(name=f"{title}-{name}-colocated", llm=llm.doubled(), vision=vision.doubled(), **shared)
            runs += [apart, both]
        llm, vision = table[CONTROLLED]
        for control in CONTROLS:
            name = f"control-{_case(trained=trained)}-{control}"
            layouts = {"llm": llm, "vision": vision, "offset": RANKS}
            runs.append(Run(name=name, group="control", trained=trained, control=control, **layouts))
    for trained in (False, True):
        for placement, (llm, vision, offset) in PLACEMENTS.items():
            name = f"bfloat16-{_case(trained=trained)}-{placement}"
            layouts = {"llm": llm, "vision": vision, "offset": offset}
            runs.append(Run(name=name, group="layout", trained=trained, dtype="bfloat16", **layouts))
    return tuple(sorted(runs, key=lambda run: run.dtype == "bfloat16"))


RUNS = {run.name: run for run in _all_runs()}
"""Every run by name: fp32 before bf16, each with the runs on one device first."""


def chosen(patterns: str) -> tuple[Run, ...]:
    """The runs whose names fit one of the patterns, separated by commas; all for "".

    Raises:
      ConfigError: a pattern fits none.
    """
    if not patterns:
        return tuple(RUNS.values())
    names: set[str] = set()
    for pattern in patterns.split(","):
        fitting = {name for name in RUNS if fnmatchcase(name, pattern)}
        if not fitting:
            near = [f"did you mean {name!r}?" for name in near_misses(pattern, RUNS)[:1]]
            fix = near[0] if near else "python -m studies parity lists them, and patterns are such as 'A7-*'"
            raise ConfigError(f"--only={pattern}: no run has such a name; {fix}")
        names |= fitting
    return tuple(run for name, run in RUNS.items() if name in names)
