"""A planning problem in numbers: times and bytes of each module, numbers of devices, a batch.

``read_problem`` reads it from JSON. Every error is one line with the field, its value, and a legal value.
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
from mmjax.planner.json_values import fields, number, read_json, shown, whole_number

MOST_DEVICES = 1_000_000
MOST_BATCH = 1_000_000_000
MOST_LAYERS = 100_000
MOST_ASSIGNMENTS = 256
"""The most assignments of modules to kinds of device: enough for four modules on four kinds, or eight on two."""
KIND, TIMES, OPTIONAL = ("devices", "memory"), ("fwd", "bwd"), ("layers", "chunks", "sent_bytes")
NEEDED, ANY = SHARDS_WHEN = ("needed", "any")
"""When a search tries shards of sums and parameters: if the fastest layout without them offloads, or always."""
TP_KEY = re.compile(r"[1-9][0-9]{0,5}")


def divisors(number: int, most: int) -> list[int]:
    """The divisors of `number` from 1 up to `most`, ascending."""
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


@dataclass(frozen=True, kw_only=True)
class ModuleCosts:
    """Seconds and bytes of a module.

    Attributes:
      forward: by tp, seconds of the whole module's forward for one sample, tp communication included.
      backward: by tp, seconds of its backward; 0 for a frozen module without a trained module before it.
      param_bytes: bytes of all parameters and gradients.
      optimizer_bytes: bytes of all optimizer states.
      activation_bytes: bytes that the whole module keeps from forward to backward for `Problem.microbatch` samples.
      layers: number of equal layers, which pp·chunks divides; 0 allows any pp.
      chunks: stages on each device, as in interleaved 1F1B; with several chunks, pp is 2 or more.
      sent_bytes: bytes of one sample's activation from a stage to the next.
      stages: every pp that it may have, ascending, in place of the divisors of `layers`.
      activation_bytes_by_tp: by tp, bytes that a device with all stages keeps; if empty, `activation_bytes` / tp.
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
    activation_bytes_by_tp: Mapping[int, float] = field(default_factory=dict, hash=False)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Every pp that the module may have, ascending; empty if it may have any."""
        least, degrees = 1 + (self.chunks > 1), divisors(self.layers, self.layers)
        return self.stages or tuple(pp for pp in degrees if pp >= least and self.layers % (pp * self.chunks) == 0)

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
      bandwidth: bytes per second that a device sends; infinite if communication is left out.
      dp_divides_samples: whether the dp of each module must divide the samples of a microbatch of all LLM replicas.
    """

    devices: int
    global_batch: int
    microbatch: int
    memory: float
    modules: Mapping[str, ModuleCosts] = field(hash=False)
    bandwidth: float = math.inf
    dp_divides_samples: bool = False

    @property
    def kinds(self) -> dict[str, Problem]:
        """This problem under the name "", as in `MixedProblem.kinds`."""
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
        """Every dp of the LLM with which a step has a whole number of microbatches."""
        return tuple(dp for dp in self.degrees if self.global_batch % (dp * self.microbatch) == 0)


@dataclass(frozen=True, kw_only=True)
class MixedProblem:
    """A planning problem on devices of several kinds: each module goes to one of them.

    Attributes:
      names: names of the modules, in order; one is "llm".
      kinds: by name of a kind, the problem on its devices alone, with the modules that have times there. All have the
        same global batch and microbatch.

    Raises:
      ConfigError: there are more than `MOST_ASSIGNMENTS` assignments of modules to kinds.
    """

    names: tuple[str, ...]
    kinds: Mapping[str, Problem] = field(hash=False)

    def __post_init__(self) -> None:
        counts = [sum(name in on_kind.modules for on_kind in self.kinds.values()) for name in self.names]
        if (count := math.prod(counts)) > MOST_ASSIGNMENTS:
            raise ConfigError(
                f"kinds: {len(self.kinds)} of them for {len(self.names)} modules are {count} ways to place these, more "
                f"than {MOST_ASSIGNMENTS}; give fewer kinds of device"
            )

    @property
    def microbatch(self) -> int:
        """Samples of one microbatch for one dp replica of the LLM."""
        return next(iter(self.kinds.values())).microbatch

    def microbatches(self, llm_dp: int) -> int:
        """Microbatches of a step when the LLM has `llm_dp` replicas."""
        return next(iter(self.kinds.values())).microbatches(llm_dp)


def read_problem(path: str | Path) -> Problem | MixedProblem:
    """The problem in a JSON file: a `MixedProblem` if it has the field "kinds", else a `Problem`.

    ``docs/planner.md`` and `parse_problem` describe the fields: "devices", "global_batch", "microbatch", "memory" and
    "modules", and "kinds" in place of "devices" and "memory" for several kinds of device.

    Raises:
      ConfigError: the file cannot be read, is not JSON, or a value in it is not legal.
    """
    data = read_json("--problem", path)
    return parse_mixed_problem(data) if isinstance(data, dict) and "kinds" in data else parse_problem(data)


def parse_problem(data: Any) -> Problem:
    """The problem on devices of one kind in parsed JSON; ``docs/planner.md`` describes the fields.

    Required are "devices", "global_batch", "microbatch", "memory" (bytes) and "modules": by name, "llm" among them,
    each has "fwd" and "bwd" (seconds of a sample by tp: {"1": 0.12}), "param_bytes", "optimizer_bytes" and
    "activation_bytes". Optional are "bandwidth" and, in a module, "layers", "chunks" and "sent_bytes".

    data: a dict, as `json.load` gives it.

    Raises:
      ConfigError: a field is unknown, missing, or not legal.
    """
    names = ("devices", "global_batch", "microbatch", "memory", "modules")
    values = fields(data, "", names, ("kinds", "bandwidth"), top="the problem")
    kind = _kind("", values)
    batch, microbatch = _batch(values)
    modules = _modules(values["modules"], {"": kind})
    return kind.problem(batch, microbatch, {name: costs[""] for name, costs in modules.items()})


def parse_mixed_problem(data: Any) -> MixedProblem:
    """The problem on several kinds of device in parsed JSON; ``docs/planner.md`` describes the fields.

    In place of "devices" and "memory" there is "kinds": {"h100": {"devices": 64, "memory": 80e9}}, each with an
    optional "bandwidth". In place of "fwd" and "bwd" a module has "kinds": {"h100": {"fwd": {"4": 0.3}, "bwd": {"4":
    0.6}}}, with the kinds on which it may be. Required are also "global_batch", "microbatch" and "modules", by name,
    with "param_bytes", "optimizer_bytes" and "activation_bytes"; a module may have "layers", "chunks", "sent_bytes".

    data: a dict, as `json.load` gives it.

    Raises:
      ConfigError: a field is unknown, missing, or not legal, or there are too many kinds and modules.
    """
    values = fields(data, "", ("kinds", "global_batch", "microbatch", "modules"), top="the problem")
    kinds = _kinds(values["kinds"])
    batch, microbatch = _batch(values)
    modules = _modules(values["modules"], kinds)
    problems = {
        name: kind.problem(
            batch, microbatch, {module: costs[name] for module, costs in modules.items() if name in costs}
        )
        for name, kind in kinds.items()
    }
    return MixedProblem(names=tuple(modules), kinds=problems)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The devices of one kind as a file describes them; bandwidth is None if it is absent."""

    devices: int
    memory: float
    bandwidth: float | None

    def problem(self, batch: int, microbatch: int, modules: Mapping[str, ModuleCosts]) -> Problem:
        """The problem on these devices."""
        return Problem(
            devices=self.devices,
            global_batch=batch,
            microbatch=microbatch,
            memory=self.memory,
            modules=modules,
            bandwidth=math.inf if self.bandwidth is None else self.bandwidth,
        )


def _batch(values: Mapping[str, Any]) -> tuple[int, int]:
    """Samples of a step and of a microbatch."""
    batch = whole_number("global_batch", values["global_batch"], MOST_BATCH)
    microbatch = whole_number("microbatch", values["microbatch"], MOST_BATCH)
    if batch % microbatch:
        legal = max(size for size in range(1, min(microbatch, batch) + 1) if batch % size == 0)
        raise ConfigError(f"microbatch={microbatch}: must divide global_batch ({batch}), such as {legal}")
    return batch, microbatch


def _kinds(data: Any) -> dict[str, _Kind]:
    if not isinstance(data, dict) or not data or "" in data:
        example = '{"h100": {"devices": 64, "memory": 80e9}}'
        raise ConfigError(f"kinds={shown(data)}: must be an object of devices and memory by name, such as {example}")
    return {
        name: _kind(f"kinds.{name}.", fields(kind, f"kinds.{name}", KIND, ("bandwidth",)))
        for name, kind in data.items()
    }


def _kind(where: str, values: Mapping[str, Any]) -> _Kind:
    devices = whole_number(f"{where}devices", values["devices"], MOST_DEVICES)
    memory = number(f"{where}memory", values["memory"], least=1)
    has_bandwidth = "bandwidth" in values
    bandwidth = number(f"{where}bandwidth", values["bandwidth"], least=1) if has_bandwidth else None
    return _Kind(devices=devices, memory=memory, bandwidth=bandwidth)


def _modules(data: Any, kinds: Mapping[str, _Kind]) -> dict[str, dict[str, ModuleCosts]]:
    """Costs by module and kind."""
    if not isinstance(data, dict) or LLM not in data:
        has = ", ".join(map(repr, data)) if isinstance(data, dict) and data else shown(data)
        raise ConfigError(f'modules: has {has}; give an object with "{LLM}", the backbone, such as {{"{LLM}": …}}')
    if "" in data:
        raise ConfigError('modules: a module is called ""; give it a name, such as "vision"')
    return {name: _module(f"modules.{name}", costs, kinds) for name, costs in data.items()}


def _module(where: str, data: Any, kinds: Mapping[str, _Kind]) -> dict[str, ModuleCosts]:
    """Costs of a module by kind of device, for the kinds on which it has times."""
    sizes, one_kind = ("param_bytes", "optimizer_bytes", "activation_bytes"), set(kinds) == {""}
    values = fields(data, where, (*(TIMES if one_kind else ("kinds",)), *sizes), OPTIONAL)
    times = {"": _times(where, values)} if one_kind else _times_by_kind(where, values["kinds"], kinds)
    param_bytes, optimizer_bytes, activation_bytes = (
        number(f"{where}.{name}", values[name], least=0) for name in sizes
    )
    layers = whole_number(f"{where}.layers", values["layers"], MOST_LAYERS) if "layers" in values else 0
    chunks = whole_number(f"{where}.chunks", values["chunks"], MOST_LAYERS) if "chunks" in values else 1
    sent_bytes = 0.0
    if "sent_bytes" in values:
        sent_bytes = number(f"{where}.sent_bytes", values["sent_bytes"], least=0)
        _check_bandwidth(where, {kind: kinds[kind] for kind in times})
    by_kind = {
        kind: ModuleCosts(
            forward=forward,
            backward=backward,
            param_bytes=param_bytes,
            optimizer_bytes=optimizer_bytes,
            activation_bytes=activation_bytes,
            layers=layers,
            chunks=chunks,
            sent_bytes=sent_bytes,
        )
        for kind, (forward, backward) in times.items()
    }
    for costs in by_kind.values():
        if costs.layers and not costs.depths:
            fix = f"no pp of 2 or more times chunks divides layers ({costs.layers}); use 1"
            raise ConfigError(f"{where}.chunks={costs.chunks}: {fix}")
    return by_kind


def _check_bandwidth(where: str, kinds: Mapping[str, _Kind]) -> None:
    """Requires the bandwidth of every kind on which a module sends activations."""
    for name, kind in kinds.items():
        if kind.bandwidth is None:
            missing = f"kinds.{name}.bandwidth" if name else "bandwidth"
            raise ConfigError(f"{where}.sent_bytes: is read beside {missing}, which is missing; give both, or neither")


_Times = tuple[dict[int, float], dict[int, float]]
"""Seconds of forward, and of backward, by tp."""


def _times_by_kind(where: str, data: Any, kinds: Mapping[str, _Kind]) -> dict[str, _Times]:
    if not isinstance(data, dict) or not data:
        example = f'{{"{next(iter(kinds))}": {{"fwd": …, "bwd": …}}}}'
        raise ConfigError(f"{where}.kinds={shown(data)}: must be an object of times, such as {example}")
    times = {}
    for kind, on_kind in data.items():
        if kind not in kinds:
            raise ConfigError(f"{where}.kinds.{kind}: there is no such kind; {suggest(kind, kinds)}")
        times[kind] = _times(f"{where}.kinds.{kind}", fields(on_kind, f"{where}.kinds.{kind}", TIMES))
    return times


def _times(where: str, values: Mapping[str, Any]) -> _Times:
    forward = _by_tp(f"{where}.fwd", values["fwd"], positive=True)
    if not forward:
        raise ConfigError(f'{where}.fwd={{}}: give seconds per sample for at least one tp, such as {{"1": 0.01}}')
    backward = _by_tp(f"{where}.bwd", values["bwd"], positive=False) or dict.fromkeys(forward, 0.0)
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
