"""Work of made-up models, whose numbers are easy to follow."""

from __future__ import annotations

import json
import math
from typing import Any

from mmjax.planner.accelerators import Accelerator
from mmjax.planner.candidates import MODES, NESTED
from mmjax.planner.clock import AnalyticClock, Efficiency
from mmjax.planner.work import ModuleWork, Shares, StageMemory, Work

TERA, GIGA = 1e12, 1e9
MISSING = object()
"""In place of a value: the field is left out."""
PLAIN = Accelerator(
    name="plain",
    flops=TERA,
    memory=80 * GIGA,
    bandwidth=TERA,
    link=TERA,
    node=8,
    network=TERA,
    host=TERA,
    source="made up",
)
"""A second of it is a TFLOP; what it sends takes next to nothing."""
SIMPLE = tuple(mode for mode in MODES if mode != NESTED)
"""The modes whose schedules are quickly made."""
WHOLE = Efficiency(compute=1.0, memory=math.inf, link=1.0, network=1.0)
"""All of an accelerator's figures, and memory that nothing waits for."""


def module(name: str, layers: int, seconds: float, **fields: Any) -> ModuleWork:
    """A trained module whose layers take so many seconds in forward and twice that in backward, for a sample."""
    sizes: dict[str, Any] = {
        "forward": Shares(layer=seconds * TERA),
        "backward": Shares(layer=2 * seconds * TERA),
        "parameters": Shares(layer=GIGA / 100),
        "trained": Shares(layer=GIGA / 100),
        "memory": {tp: StageMemory(residuals=Shares(layer=GIGA / 10 / tp)) for tp in (1, 2, 4)},
        "sums": (0, 0),
    }
    return ModuleWork(name=name, layers=layers, model_width=1, width=1, rows=1.0, **sizes | fields)


def model(*modules: ModuleWork, global_batch: int = 16) -> Work:
    """Modules that feed each other: encoders, "llm", generators."""
    return Work(modules={module.name: module for module in modules}, global_batch=global_batch)


def clock(work: Work, accelerator: Accelerator = PLAIN) -> AnalyticClock:
    """The times of an accelerator that reaches all of its figures."""
    return AnalyticClock(work=work, accelerator=accelerator, efficiency=WHOLE)


def spoilt(good: Any, path: str, value: Any) -> Any:
    """JSON with another value at a path such as "trials.1.backward"; without the field where the value is MISSING."""
    wrong = json.loads(json.dumps(good))
    at: Any = wrong
    *parents, last = path.split(".")
    for key in parents:
        at = at[int(key) if isinstance(at, list) else key]
    where: Any = int(last) if isinstance(at, list) else last
    if value is MISSING:
        del at[where]
    else:
        at[where] = value
    return wrong
