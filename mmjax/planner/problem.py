"""A planning problem in numbers: times and bytes of each module, a number of devices, a batch.

Read from JSON by ``read_problem``. Every wrong value is one line: the field, its value, and one that is legal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError, suggest

LLM = "llm"
"""The name of the backbone."""
MOST_DEVICES = 1_000_000
MOST_BATCH = 1_000_000_000
MOST_LAYERS = 100_000
MOST = 1e18
"""Of seconds and bytes; beyond it a number is a slip."""
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
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no UTF-8 text"
        raise ConfigError(f"--problem={path}: {reason or error}; give a JSON file") from None
    try:
        data = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--problem={path}: no JSON in line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise ConfigError(f"--problem={path}: {reason}") from None
    return parse_problem(data)


def parse_problem(data: Any) -> Problem:
    """The problem in parsed JSON (see ``docs/planner.md``).

    Raises:
      ConfigError: something is unknown, missing, or not legal.
    """
    fields = _fields(data, "", ("devices", "global_batch", "microbatch", "memory", "modules"))
    devices = _whole("devices", fields["devices"], MOST_DEVICES)
    batch = _whole("global_batch", fields["global_batch"], MOST_BATCH)
    microbatch = _whole("microbatch", fields["microbatch"], MOST_BATCH)
    if batch % microbatch:
        legal = max(size for size in range(1, min(microbatch, batch) + 1) if batch % size == 0)
        raise ConfigError(f"microbatch={microbatch}: must divide global_batch ({batch}), such as {legal}")
    memory = _number("memory", fields["memory"], least=1)
    modules = fields["modules"]
    if not isinstance(modules, dict) or LLM not in modules:
        has = ", ".join(map(repr, modules)) if isinstance(modules, dict) and modules else _shown(modules)
        raise ConfigError(f'modules: has {has}; give an object with "{LLM}", the backbone, such as {{"{LLM}": …}}')
    if "" in modules:
        raise ConfigError('modules: a module is called ""; give it a name, such as "vision"')
    parsed = {name: _module(f"modules.{name}", costs) for name, costs in modules.items()}
    return Problem(devices=devices, global_batch=batch, microbatch=microbatch, memory=memory, modules=parsed)


def _module(where: str, data: Any) -> ModuleCosts:
    sizes = ("param_bytes", "optimizer_bytes", "activation_bytes")
    fields = _fields(data, where, ("fwd", "bwd", *sizes), ("layers",))
    forward = _by_tp(f"{where}.fwd", fields["fwd"], positive=True)
    if not forward:
        raise ConfigError(f'{where}.fwd={{}}: give seconds per sample for at least one tp, such as {{"1": 0.01}}')
    backward = _by_tp(f"{where}.bwd", fields["bwd"], positive=False) or dict.fromkeys(forward, 0.0)
    if set(forward) != set(backward):
        tp = min(set(forward) ^ set(backward))
        has, lacks = ("fwd", "bwd") if tp in forward else ("bwd", "fwd")
        raise ConfigError(f'{where}.{lacks}: has no tp "{tp}", which {has} has; give both, or neither')
    numbers: Any = {name: _number(f"{where}.{name}", fields[name], least=0) for name in sizes}
    layers = _whole(f"{where}.layers", fields["layers"], MOST_LAYERS) if "layers" in fields else 0
    return ModuleCosts(forward=forward, backward=backward, layers=layers, **numbers)


def _by_tp(where: str, data: Any, *, positive: bool) -> dict[int, float]:
    if not isinstance(data, dict):
        raise ConfigError(f'{where}={_shown(data)}: must be an object of seconds by tp, such as {{"1": 0.01}}')
    for key in data:
        if not TP_KEY.fullmatch(key):
            raise ConfigError(f'{where}: tp {_shown(key)} must be a whole number of 1 or more, such as "8"')
    return {int(key): _number(f"{where}.{key}", value, least=0, positive=positive) for key, value in data.items()}


def _fields(data: Any, where: str, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The members of a JSON object that has `names` and may have `optional`."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where or 'the problem'}={_shown(data)}: must be an object with {', '.join(names)}")
    for name in data:
        if name not in (*names, *optional):
            raise ConfigError(f"{_join(where, name)}: no such field; {suggest(name, (*names, *optional))}")
    for name in names:
        if name not in data:
            raise ConfigError(f"{_join(where, name)}: is missing; an object here has {', '.join(names)}")
    return data


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _whole(where: str, value: Any, most: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{where}={_shown(value)}: must be a whole number from 1 to {most}")
    return value


def _number(where: str, value: Any, *, least: float, positive: bool = False) -> float:
    legal = "a number above 0" if positive else f"a number of {least:g} or more"
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST:
        raise ConfigError(f"{where}={_shown(value)}: must be {legal}, up to {MOST:g}")
    if positive and value < 1 / MOST:
        raise ConfigError(f"{where}={_shown(value)}: must be {legal}, such as 0.01")
    return float(value)


def _shown(value: Any) -> str:
    """`value` as JSON, cut so that a message stays one line."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _no_key_twice(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"{_shown(key)} is there twice in one object; keep one")
        made[key] = value
    return made


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number; give a finite one")
