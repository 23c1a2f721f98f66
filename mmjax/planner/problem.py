"""A planning problem in numbers: times and bytes of each module, a number of devices, a batch.

Read from JSON by ``read_problem``. Every wrong value is one line: the field, its value, and one that is legal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.planner.json_values import fields, number, read_json, shown, whole

LLM = "llm"
"""The name of the backbone."""
MOST_DEVICES = 1_000_000
MOST_BATCH = 1_000_000_000
MOST_LAYERS = 100_000
TP_KEY = re.compile(r"[1-9][0-9]{0,5}")


@dataclass(frozen=True, kw_only=True)
class ModuleCosts:
    """What a module takes.

    Attributes:
      forward, backward: by tp, seconds of the whole module for one sample, tp communication included. A backward of 0
        is a frozen module's with nothing trained before it.
      param_bytes: of all parameters and gradients.
      optimizer_bytes: of all optimizer states.
      activation_bytes: what the whole module keeps from forward to backward for `Problem.microbatch` samples.
      layers: how many equal ones it has; pp divides their number. 0: any pp.
      stages: every pp that it may have, ascending, in place of the divisors of `layers`.
      held: by tp, what a device with all stages keeps, where that is not `activation_bytes` / tp.
    """

    forward: Mapping[int, float] = field(hash=False)
    backward: Mapping[int, float] = field(hash=False)
    param_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    layers: int = 0
    stages: tuple[int, ...] = ()
    held: Mapping[int, float] = field(default_factory=dict, hash=False)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Every pp that the module may have, ascending; empty if it may have any."""
        return self.stages or tuple(pp for pp in range(1, self.layers + 1) if self.layers % pp == 0)

    @cached_property
    def seconds(self) -> dict[int, float]:
        """Forward and backward of one sample by tp."""
        return {tp: seconds + self.backward[tp] for tp, seconds in sorted(self.forward.items())}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be planned.

    Attributes:
      devices: how many there are.
      global_batch: samples of a step.
      microbatch: samples of one microbatch for one dp replica of the LLM.
      memory: bytes of one device.
      modules: by name; one is "llm".
      whole: whether every dp divides the samples of a microbatch of all LLM replicas, so that no sample is shared.
    """

    devices: int
    global_batch: int
    microbatch: int
    memory: float
    modules: Mapping[str, ModuleCosts] = field(hash=False)
    whole: bool = False

    def microbatches(self, llm_dp: int) -> int:
        """Microbatches of a step when the LLM has `llm_dp` replicas."""
        return self.global_batch // (llm_dp * self.microbatch)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Every dp that a module may have: the divisors of the batch, up to the number of devices."""
        return tuple(dp for dp in range(1, min(self.devices, self.global_batch) + 1) if self.global_batch % dp == 0)

    @cached_property
    def llm_degrees(self) -> tuple[int, ...]:
        """Every dp of the LLM: those with a whole number of microbatches."""
        return tuple(dp for dp in self.degrees if self.global_batch % (dp * self.microbatch) == 0)


def read_problem(path: str | Path) -> Problem:
    """The problem in a JSON file.

    Raises:
      ConfigError: the file cannot be read, is not JSON, or a value in it is not legal.
    """
    return parse_problem(read_json("--problem", path))


def parse_problem(data: Any) -> Problem:
    """The problem in parsed JSON (see ``docs/planner.md``).

    Raises:
      ConfigError: something is unknown, missing, or not legal.
    """
    given = fields(data, "", ("devices", "global_batch", "microbatch", "memory", "modules"), top="the problem")
    devices = whole("devices", given["devices"], MOST_DEVICES)
    batch = whole("global_batch", given["global_batch"], MOST_BATCH)
    microbatch = whole("microbatch", given["microbatch"], MOST_BATCH)
    if batch % microbatch:
        legal = max(size for size in range(1, min(microbatch, batch) + 1) if batch % size == 0)
        raise ConfigError(f"microbatch={microbatch}: must divide global_batch ({batch}), such as {legal}")
    memory = number("memory", given["memory"], least=1)
    modules = given["modules"]
    if not isinstance(modules, dict) or LLM not in modules:
        has = ", ".join(map(repr, modules)) if isinstance(modules, dict) and modules else shown(modules)
        raise ConfigError(f'modules: has {has}; give an object with "{LLM}", the backbone, such as {{"{LLM}": …}}')
    if "" in modules:
        raise ConfigError('modules: a module is called ""; give it a name, such as "vision"')
    parsed = {name: _module(f"modules.{name}", costs) for name, costs in modules.items()}
    return Problem(devices=devices, global_batch=batch, microbatch=microbatch, memory=memory, modules=parsed)


def _module(where: str, data: Any) -> ModuleCosts:
    sizes = ("param_bytes", "optimizer_bytes", "activation_bytes")
    given = fields(data, where, ("fwd", "bwd", *sizes), ("layers",))
    forward = _by_tp(f"{where}.fwd", given["fwd"], positive=True)
    if not forward:
        raise ConfigError(f'{where}.fwd={{}}: give seconds per sample for at least one tp, such as {{"1": 0.01}}')
    backward = _by_tp(f"{where}.bwd", given["bwd"], positive=False) or dict.fromkeys(forward, 0.0)
    if set(forward) != set(backward):
        tp = min(set(forward) ^ set(backward))
        has, lacks = ("fwd", "bwd") if tp in forward else ("bwd", "fwd")
        raise ConfigError(f'{where}.{lacks}: has no tp "{tp}", which {has} has; give both, or neither')
    numbers: Any = {name: number(f"{where}.{name}", given[name], least=0) for name in sizes}
    layers = whole(f"{where}.layers", given["layers"], MOST_LAYERS) if "layers" in given else 0
    return ModuleCosts(forward=forward, backward=backward, layers=layers, **numbers)


def _by_tp(where: str, data: Any, *, positive: bool) -> dict[int, float]:
    if not isinstance(data, dict):
        raise ConfigError(f'{where}={shown(data)}: must be an object of seconds by tp, such as {{"1": 0.01}}')
    for key in data:
        if not TP_KEY.fullmatch(key):
            raise ConfigError(f'{where}: tp {shown(key)} must be a whole number of 1 or more, such as "8"')
    return {int(key): number(f"{where}.{key}", value, least=0, positive=positive) for key, value in data.items()}
