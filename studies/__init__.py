"""Studies by name: figures that mmjax simulates or computes, beside those that a paper prints; one trains."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.bench.rows import Row


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study.

    Attributes:
      rows: "module:function" for its rows, each as soon as it is known.
      tables: "module:function" for the tables of its documentation in Markdown, by name.
      doc: one sentence for ``--help``.
      options: flags of ``python -m studies`` that both functions take, by name.
    """

    rows: str
    tables: str
    doc: str
    options: tuple[str, ...] = ()


STUDIES = {
    "nvidia": Study(
        rows="studies.nvidia.predictions:rows",
        tables="studies.nvidia.report:tables",
        doc="Steps, gains and memory of NVIDIA's homogeneous, colocated and non-colocated runs, predicted; errors.",
    ),
    "distrain": Study(
        rows="studies.distrain:rows",
        tables="studies.distrain:tables",
        doc="The best plan against a monolithic layout and devices by FLOPs, predicted, beside DistTrain's figures.",
    ),
    "drawing": Study(
        rows="studies.drawing:rows",
        tables="studies.drawing:tables",
        doc="Steps of DistTrain's and BigMac's models by module, simulated in the layouts of their configurations.",
    ),
    "cornstarch": Study(
        rows="studies.cornstarch.report:rows",
        tables="studies.cornstarch.report:tables",
        doc="Cornstarch's gains from frozen-aware stages and modality parallelism, predicted, beside its measurements.",
    ),
    "h100": Study(
        rows="studies.h100.report:rows",
        tables="studies.h100.report:tables",
        doc="Programs compiled for H100s without one: arrays, collectives and a roofline by way of attention.",
    ),
    "decoupled": Study(
        rows="studies.h100.decoupled:rows",
        tables="studies.h100.decoupled:tables",
        doc="An encoder with the cp that the LLM has, and with a layout of its own, compiled for H100s without one.",
    ),
    "reductions": Study(
        rows="studies.h100.reductions:rows",
        tables="studies.h100.reductions:tables",
        doc="A last backward that reduces gradients layer by layer, against two programs, compiled for H100s.",
    ),
    "workloads": Study(
        rows="studies.workloads.report:rows",
        tables="studies.workloads.report:tables",
        doc="The papers' workloads as configurations: step, MFU and memory as estimated, beside what is printed.",
        options=("only", "dry_run", "plan"),
    ),
    "parity": Study(
        rows="studies.parity.report:rows",
        tables="studies.parity.report:tables",
        doc="NVIDIA's runs of equal losses (Appendix C), 36 in fp32 and 6 in bf16: a row each. --curves trains.",
    ),
}
"""Every study by name, in the order in which they run."""


def rows_of(name: str, options: Mapping[str, str | int | bool]) -> Iterator[Row]:
    """The rows of a study.

    Args:
      name: the study.
      options: values of flags by name; the study gets those in its `Study.options`.
    """
    return _function(STUDIES[name].rows)(**_options_of(name, options))


def tables_of(name: str, options: Mapping[str, str | int | bool]) -> dict[str, str]:
    """The tables of a study's documentation in Markdown, by name. options: as for `rows_of`."""
    return _function(STUDIES[name].tables)(**_options_of(name, options))


def _options_of(name: str, options: Mapping[str, str | int | bool]) -> dict[str, str | int | bool]:
    return {option: options[option] for option in STUDIES[name].options}


def _function(where: str) -> Callable[[], Any]:
    module, _, function = where.partition(":")
    return getattr(importlib.import_module(module), function)
