"""A planning problem in numbers: times and bytes of each module, numbers of devices, a batch.

Read from JSON by ``read_problem``. Every wrong value is one line: the field, its value, and one that is legal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError, suggest
from mmjax.models.config import LLM
from mmjax.planner.json_values import fields, number, read_json, shown, whole

MOST_DEVICES = 1_000_000
MOST_BATCH = 1_000_000_000
MOST_LAYERS = 100_000
MOST_WAYS = 256
"""The most ways to give modules a kind of device: enough for four modules on four kinds, or eight on two."""
KIND, TIMES, MORE = ("devices", "memory"), ("fwd", "bwd"), ("layers", "chunks", "sent_bytes")
TP_KEY = re.compile(r"[1-9][0-9]{0,5}")


def divisors(number: int, most: int) -> list[int]:
    """The divisors of `number` up to `most`, ascending."""
    return [one for one in range(1, min(number, most) + 1) if number % one == 0]


@dataclass(frozen=True, kw_only=True)
class ModuleCosts:
    """Seconds and bytes of a module.

    Attributes:
      forward: by tp, seconds of the whole module's forward for one sample, tp communication included.
      backward: the same for its backward; 0 for a frozen module with nothing trained before it.
      param_bytes: bytes of all parameters and gradients.
      optimizer_bytes: bytes of all optimizer states.
      activation_bytes: bytes that the whole module keeps from forward to backward for `Problem.microbatch` samples.
      layers: number of equal layers, which pp·chunks divides; 0 allows any pp.
      chunks: stages on each device, as in interleaved 1F1B; with several pp is 2 or more.
      sent_bytes: bytes of one sample's activation on its way from a stage to the next.
      stages: every pp that it may have, ascending, in place of the divisors of `layers`.
      held: by tp, bytes that a device with all stages keeps, where that is not `activation_bytes` / tp.
    """

    forward: Mapping[int, float] = field(hash=False)
    backward: Mapping[int, float] = field(hash=False)
    param_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    layers: int = 0
    chunks: int = 1
    sent_bytes: float = 0.0
    stages: tuple[int, ...] = ()
    held: Mapping[int, float] = field(default_factory=dict, hash=False)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Every pp that the module may have, ascending; empty if it may have any."""
        least, own = 1 + (self.chunks > 1), divisors(self.layers, self.layers)
        return self.stages or tuple(pp for pp in own if pp >= least and self.layers % (pp * self.chunks) == 0)

    @property
    def least_pp(self) -> int:
        """The least pp that it may have; with chunks at least 2, since one stage submesh has nothing to interleave."""
        return min(self.depths, default=1 + (self.chunks > 1))

    @cached_property
    def seconds(self) -> dict[int, float]:
        """Seconds of forward and backward of one sample, by tp."""
        return {tp: seconds + self.backward[tp] for tp, seconds in sorted(self.forward.items())}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A planning problem on devices of one kind.

    Attributes:
      devices: number of devices.
      global_batch: samples of a step.
      microbatch: samples of one microbatch for one dp replica of the LLM.
      memory: bytes of one device.
      modules: costs by module name; one is "llm".
      bandwidth: bytes per second that a device sends; infinite where communication is left out.
      whole: whether every dp divides the samples of a microbatch of all LLM replicas, so that no sample is shared.
    """

    devices: int
    global_batch: int
    microbatch: int
    memory: float
    modules: Mapping[str, ModuleCosts] = field(hash=False)
    bandwidth: float = math.inf
    whole: bool = False

    @property
    def kinds(self) -> dict[str, Problem]:
        """This problem under the name "", as `MixedProblem.kinds` has them by kind of device."""
        return {"": self}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules, in order."""
        return tuple(self.modules)

    def microbatches(self, llm_dp: int) -> int:
        """Microbatches of a step when the LLM has `llm_dp` replicas."""
        return self.global_batch // (llm_dp * self.microbatch)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Every dp that a module may have: the divisors of the batch, up to the number of devices."""
        return tuple(divisors(self.global_batch, self.devices))

    @cached_property
    def llm_degrees(self) -> tuple[int, ...]:
        """Every dp of the LLM: those with a whole number of microbatches."""
        return tuple(dp for dp in self.degrees if self.global_batch % (dp * self.microbatch) == 0)


@dataclass(frozen=True, kw_only=True)
class MixedProblem:
    """A planning problem on devices of several kinds: each module goes to one of them.

    Attributes:
      names: names of the modules, in order; one is "llm".
      kinds: by name of a kind, the problem on its devices alone, with the modules that have times there. All have the
        same global batch and microbatch.

    Raises:
      ConfigError: there are more than `MOST_WAYS` ways to give modules a kind.
    """

    names: tuple[str, ...]
    kinds: Mapping[str, Problem] = field(hash=False)

    def __post_init__(self) -> None:
        ways = math.prod(sum(name in own.modules for own in self.kinds.values()) for name in self.names)
        if ways > MOST_WAYS:
            raise ConfigError(
                f"kinds: {len(self.kinds)} of them for {len(self.names)} modules are {ways} ways to place these, more "
                f"than {MOST_WAYS}; give fewer kinds of device"
            )

    @property
    def microbatch(self) -> int:
        """Samples of one microbatch for one dp replica of the LLM."""
        return next(iter(self.kinds.values())).microbatch

    def microbatches(self, llm_dp: int) -> int:
        """Microbatches of a step when the LLM has `llm_dp` replicas."""
        return next(iter(self.kinds.values())).microbatches(llm_dp)


def read_problem(path: str | Path) -> Problem | MixedProblem:
    """The problem in a JSON file.

    Raises:
      ConfigError: the file cannot be read, is not JSON, or a value in it is not legal.
    """
    data = read_json("--problem", path)
    return parse_mixed_problem(data) if isinstance(data, dict) and "kinds" in data else parse_problem(data)


def parse_problem(data: Any) -> Problem:
    """The problem on devices of one kind in parsed JSON (see ``docs/planner.md``).

    Raises:
      ConfigError: something is unknown, missing, or not legal.
    """
    names = ("devices", "global_batch", "microbatch", "memory", "modules")
    given = fields(data, "", names, ("kinds", "bandwidth"), top="the problem")
    about = _kind("", given)
    batch, microbatch = _batch(given)
    modules = _modules(given["modules"], {"": about})
    own = {name: costs[""] for name, costs in modules.items()}
    return Problem(global_batch=batch, microbatch=microbatch, modules=own, **about)


def parse_mixed_problem(data: Any) -> MixedProblem:
    """The problem on several `kinds` of devices in parsed JSON (see ``docs/planner.md``).

    Raises:
      ConfigError: something is unknown, missing, or not legal.
    """
    given = fields(data, "", ("kinds", "global_batch", "microbatch", "modules"), top="the problem")
    kinds = _kinds(given["kinds"])
    batch, microbatch = _batch(given)
    modules = _modules(given["modules"], kinds)
    problems = {}
    for kind, about in kinds.items():
        own = {name: costs[kind] for name, costs in modules.items() if kind in costs}
        problems[kind] = Problem(global_batch=batch, microbatch=microbatch, modules=own, **about)
    return MixedProblem(names=tuple(modules), kinds=problems)


def _batch(given: Mapping[str, Any]) -> tuple[int, int]:
    """Samples of a step and of a microbatch."""
    batch = whole("global_batch", given["global_batch"], MOST_BATCH)
    microbatch = whole("microbatch", given["microbatch"], MOST_BATCH)
    if batch % microbatch:
        legal = max(size for size in range(1, min(microbatch, batch) + 1) if batch % size == 0)
        raise ConfigError(f"microbatch={microbatch}: must divide global_batch ({batch}), such as {legal}")
    return batch, microbatch


def _kinds(data: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(data, dict) or not data or "" in data:
        example = '{"h100": {"devices": 64, "memory": 80e9}}'
        raise ConfigError(f"kinds={shown(data)}: must be an object of devices and memory by name, such as {example}")
    return {
        name: _kind(f"kinds.{name}.", fields(own, f"kinds.{name}", KIND, ("bandwidth",))) for name, own in data.items()
    }


def _kind(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Devices, memory and, where it is given, bandwidth of a kind."""
    devices = whole(f"{where}devices", given["devices"], MOST_DEVICES)
    about = {"devices": devices, "memory": number(f"{where}memory", given["memory"], least=1)}
    if "bandwidth" in given:
        about["bandwidth"] = number(f"{where}bandwidth", given["bandwidth"], least=1)
    return about


def _modules(data: Any, kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, ModuleCosts]]:
    """Costs by module and kind."""
    if not isinstance(data, dict) or LLM not in data:
        has = ", ".join(map(repr, data)) if isinstance(data, dict) and data else shown(data)
        raise ConfigError(f'modules: has {has}; give an object with "{LLM}", the backbone, such as {{"{LLM}": …}}')
    if "" in data:
        raise ConfigError('modules: a module is called ""; give it a name, such as "vision"')
    return {name: _module(f"modules.{name}", costs, kinds) for name, costs in data.items()}


def _module(where: str, data: Any, kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleCosts]:
    """Costs of a module by kind of device, for the kinds that it has times on."""
    sizes, alone = ("param_bytes", "optimizer_bytes", "activation_bytes"), set(kinds) == {""}
    given = fields(data, where, (*(TIMES if alone else ("kinds",)), *sizes), MORE)
    if alone:
        times = {"": _times(where, given)}
    else:
        if not isinstance(given["kinds"], dict) or not given["kinds"]:
            example = f'{{"{next(iter(kinds))}": {{"fwd": …, "bwd": …}}}}'
            raise ConfigError(f"{where}.kinds={shown(given['kinds'])}: must be an object of times, such as {example}")
        times = {}
        for kind, own in given["kinds"].items():
            if kind not in kinds:
                raise ConfigError(f"{where}.kinds.{kind}: there is no such kind; {suggest(kind, kinds)}")
            times[kind] = _times(f"{where}.kinds.{kind}", fields(own, f"{where}.kinds.{kind}", TIMES))
    numbers: Any = {name: number(f"{where}.{name}", given[name], least=0) for name in sizes}
    numbers |= {name: whole(f"{where}.{name}", given[name], MOST_LAYERS) for name in MORE[:2] if name in given}
    if "sent_bytes" in given:
        numbers["sent_bytes"] = number(f"{where}.sent_bytes", given["sent_bytes"], least=0)
        _check_bandwidth(where, {kind: kinds[kind] for kind in times})
    made = {
        kind: ModuleCosts(forward=forward, backward=backward, **numbers) for kind, (forward, backward) in times.items()
    }
    for costs in made.values():
        if costs.layers and not costs.depths:
            fix = f"no pp of 2 or more times chunks divides layers ({costs.layers}); use 1"
            raise ConfigError(f"{where}.chunks={costs.chunks}: {fix}")
    return made


def _check_bandwidth(where: str, kinds: Mapping[str, Mapping[str, Any]]) -> None:
    """Requires the bandwidth of every kind on which a module sends something."""
    for kind, about in kinds.items():
        if "bandwidth" not in about:
            missing = f"kinds.{kind}.bandwidth" if kind else "bandwidth"
            raise ConfigError(f"{where}.sent_bytes: is read beside {missing}, which is missing; give both, or neither")


def _times(where: str, given: Mapping[str, Any]) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of forward, and of backward, by tp."""
    forward = _by_tp(f"{where}.fwd", given["fwd"], positive=True)
    if not forward:
        raise ConfigError(f'{where}.fwd={{}}: give seconds per sample for at least one tp, such as {{"1": 0.01}}')
    backward = _by_tp(f"{where}.bwd", given["bwd"], positive=False) or dict.fromkeys(forward, 0.0)
    if set(forward) != set(backward):
        tp = min(set(forward) ^ set(backward))
        has, lacks = ("fwd", "bwd") if tp in forward else ("bwd", "fwd")
        raise ConfigError(f'{where}.{lacks}: has no tp "{tp}", which {has} has; give both, or neither')
    return forward, backward


def _by_tp(where: str, data: Any, *, positive: bool) -> dict[int, float]:
    if not isinstance(data, dict):
        raise ConfigError(f'{where}={shown(data)}: must be an object of seconds by tp, such as {{"1": 0.01}}')
    for key in data:
        if not TP_KEY.fullmatch(key):
            raise ConfigError(f'{where}: tp {shown(key)} must be a whole number of 1 or more, such as "8"')
    return {int(key): number(f"{where}.{key}", value, least=0, positive=positive) for key, value in data.items()}
