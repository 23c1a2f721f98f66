"""The workloads: configurations of `configs/`, their devices, and the figures that papers print for them.

Figures of NVIDIA's paper and of Cornstarch are those of `studies.nvidia.tables` and `studies.cornstarch`, not copied
here; DistTrain and BigMac print ranges in their text. What a paper shows in a figure alone has no number here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mmjax.configurable import ConfigError, suggest
from studies.cornstarch.frozen import MODELS
from studies.cornstarch.tables import PAIRS
from studies.nvidia.tables import RANKINGS, ROWS, MeasuredRun, Row

CONFIGS = Path(__file__).parents[2] / "configs"


class Quantity(StrEnum):
    """Quantities that papers print. {base} stands for the name of another workload."""

    STEP = "step, s"
    PASSES = "forward and backward, s"
    GAIN = "throughput over {base}"
    BEHIND = "throughput of {base} over it"
    MFU = "MFU"
    STAGE = "LLM stage, forward and backward, ms"
    THROUGHPUT = "inputs/s a device"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A paper's figures of a workload.

    Attributes:
      where: table or section.
      quantity: what it is; None where a figure shows it and no number is printed.
      low, high: the printed range, or the same number twice.
      memory: GB of the fullest device; 0 where it is not printed.
    """

    where: str
    quantity: Quantity | None = None
    low: float = 0.0
    high: float = 0.0
    memory: float = 0.0

    def ratio(self, value: float) -> float:
        """A predicted value over the nearest end of the range; 1 within it."""
        return value / min(max(value, self.low), self.high)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload in one layout.

    Attributes:
      paper: short name of its paper.
      config: name of its configuration in `configs/`, without the suffix.
      model: the model, which workloads of equal modules share.
      kind: "H", "C" or "NC", or the name of a system.
      chip: the devices, by a name of `ACCELERATORS`.
      published: the paper's figure.
      base: configuration of the workload with which gains are compared; "" without one.
      fills: whether samples fill the rows in the paper, and are padded to them here.
    """

    paper: str
    config: str
    model: str
    kind: str
    chip: str
    published: Published
    base: str = ""
    fills: bool = False

    @property
    def name(self) -> str:
        """The name in rows and tables, such as "3B+70B, NC"."""
        return f"{self.model}, {self.kind}"

    @property
    def file(self) -> Path:
        """The gin file."""
        return CONFIGS / f"{self.config}.gin"


# ---- NVIDIA ----------------------------------------------------------------------------------------------------------

_PAIRS = ("1B+7B", "1B+14B", "3B+32B", "3B+70B", "3B+120B", "6B+120B", "12B+120B")
_WITHOUT = {("1B+7B", "NC"), ("6B+120B", "C")}
"""Not in the paper: the first has no row, and of the second C is H (Table A5)."""


def measured(model: str, kind: str) -> tuple[Row, MeasuredRun] | None:
    """The row of Tables A2 to A4 with the run of a model, half of whose tokens are vision tokens, and that run.

    None where only Table A5 has it. The first table that has the model counts.

    Args:
      model: such as "3B+70B".
      kind: "H", "C" or "NC".
    """
    for row in ROWS:
        smallest = row.tokens == (16384 if row.llm == "7B" else 8192) and row.devices[0] <= 256
        if f"{row.encoder}+{row.llm}" == model and row.vision == 50 and smallest:
            for run in (row.base, row.compared):
                if run.mode == kind:
                    return row, run
    return None


def _of_nvidia() -> Iterator[Workload]:
    for model in _PAIRS:
        stem = f"paper/nvidia_{model.lower().replace('+', '_')}"
        for kind in (kind for kind in ("H", "C", "NC") if (model, kind) not in _WITHOUT):
            base = f"{stem}_h"
            if row_and_run := measured(model, kind):
                row, run = row_and_run
                quantity = Quantity.PASSES if row.table == "A3" else Quantity.STEP
                published = Published(
                    where=f"Table {row.table}", quantity=quantity, low=run.step, high=run.step, memory=run.memory
                )
            else:
                ranking = next(r for r in RANKINGS if f"{r.encoder}+{r.llm}" == model and r.vision == 50)
                gain = 1 + ranking.nc.both[0] / 100
                published = Published(where="Table A5", quantity=Quantity.GAIN, low=gain, high=gain)
            yield Workload(
                paper="NVIDIA", config=f"{stem}_{kind.lower()}", model=model, kind=kind, chip="h100",
                published=published, base=base if published.quantity == Quantity.GAIN else "", fills=True,
            )  # fmt: skip


# ---- DistTrain, Cornstarch, BigMac -----------------------------------------------------------------------------------


def _of_distrain() -> Iterator[Workload]:
    over = Published(where="§7.2", quantity=Quantity.BEHIND, low=1.4, high=2.7)
    mfu = Published(where="§7.1, 1,056 to 1,216 devices", quantity=Quantity.MFU, low=0.518, high=0.547)
    for size in ("9b", "15b", "72b"):
        model, config = f"MLLM-{size.upper()}", f"paper/distrain_{size}"
        yield Workload(paper="DistTrain", config=config, model=model, kind="DistTrain", chip="a800", published=mfu)
        for kind, name in (("Megatron-LM", "megatron"), ("DistMM*", "distmm")):
            yield Workload(
                paper="DistTrain", config=f"{config}_{name}", model=model, kind=kind, chip="a800",
                published=over, base=config,
            )  # fmt: skip


def _of_cornstarch() -> Iterator[Workload]:
    for encoder in ("VLM", "ALM"):
        for size in "SML":
            case = next(model for model in MODELS if model.name == f"LLM-M {encoder}-{size}").aware
            stage = case.forward[1] + case.backward[1]
            yield _cornstarch(
                f"{encoder}-{size}", Published(where="Table 3", quantity=Quantity.STAGE, low=stage, high=stage)
            )
    for size in "SML":
        pair = next(pair for pair in PAIRS if pair.name == f"LLM-M VALM-{size}{size}")
        rate = pair.throughputs[1]
        yield _cornstarch(f"VALM-{size}", Published(where="Table 2", quantity=Quantity.THROUGHPUT, low=rate, high=rate))


def _cornstarch(model: str, published: Published) -> Workload:
    config = f"paper/cornstarch_{model.lower().replace('-', '_')}"
    return Workload(
        paper="Cornstarch", config=config, model=model, kind="Cornstarch", chip="a40", published=published, fills=True
    )  # fmt: skip


def _of_bigmac() -> Iterator[Workload]:
    cases = (
        ("MLLM-Understanding", "bigmac_understanding", "paper/bigmac_understanding_megatron", 1.6, 1.9, "Figure 9"),
        ("MLLM-Generation", "bigmac_generation_mmdit", "paper/bigmac_generation_megatron", 1.5, 1.9, "Figure 10"),
    )
    for model, config, baseline, low, high, figure in cases:
        in_figure = Published(where=figure)
        over = Published(where="§4.2", quantity=Quantity.BEHIND, low=low, high=high)
        yield Workload(paper="BigMac", config=config, model=model, kind="BigMac", chip="h800", published=in_figure)
        yield Workload(
            paper="BigMac", config=baseline, model=model, kind="Megatron-DistTrain", chip="h800", published=over,
            base=config,
        )  # fmt: skip


WORKLOADS = (*_of_nvidia(), *_of_distrain(), *_of_cornstarch(), *_of_bigmac())


def chosen(only: str) -> tuple[Workload, ...]:
    """The workloads of papers or configurations, by names or their beginnings, with commas; all for "".

    only: such as "bigmac" or "nvidia_3b_70b,distrain", in small letters or capital ones.

    Raises:
      ConfigError: a name is of none.
    """
    names = [name.lower() for name in only.split(",") if name]
    for name in names:
        if not any(_is_named(workload, name) for workload in WORKLOADS):
            legal = {word for workload in WORKLOADS for word in (workload.paper.lower(), workload.file.stem)}
            raise ConfigError(f"--only={only}: no workload is called {name!r}; {suggest(name, sorted(legal))}")
    return tuple(workload for workload in WORKLOADS if not names or any(_is_named(workload, name) for name in names))


def _is_named(workload: Workload, name: str) -> bool:
    return workload.paper.lower() == name or workload.file.stem.startswith(name)
