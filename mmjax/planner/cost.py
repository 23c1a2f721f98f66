r"""The cost of a plan: seconds of a step and bytes of a device.

From Zhang et al., "DistTrain" (SIGCOMM '25), §4.2. Module m has layout (tp, dp, pp) on tp·dp·pp devices of its own. M
is the microbatch of one LLM replica, BS the global batch, n = BS / (dp_llm·M) the microbatches of a step, and C_m(tp)
the forward *and* backward seconds of the whole module for one sample. The stage time of a microbatch is

    T_m = (dp_llm / dp_m) · M · C_m(tp_m) / pp_m

since each LLM replica has M samples of it, together dp_llm·M, and a module shares them among its dp_m replicas. Then

    warm-up  = Σ_m T_m · pp_m                (1)   the first microbatch passes through every stage
    steady   = (n - 1) · max_m T_m           (2)   the others follow it at the pace of the slowest stage
    step     = warm-up + steady

A device holds

    P / (tp·pp)  +  S / (tp·dp·pp)  +  (dp_llm / dp_m) · L / tp   ≤   memory

where P is parameters and gradients, S optimizer states (sharded over dp: ZeRO-1) and L the activations of M samples
in the whole module: in 1F1B the first of pp stages keeps pp microbatches of L / pp each.

Choices where the paper is silent or general:

* Any number of modules beside the LLM; each is an encoder or generator and counts as the paper's does.
* The paper takes L for the LLM and calls other modules similar. The microbatch of a module has dp_llm·M / dp_m samples,
  so its activations are L in that proportion, as its time is.
* n is whole: dp_llm·M divides BS. The dp of another module only has to divide BS, as in the paper; where
  dp_llm·M / dp_m is not whole, times and activations are taken in proportion.
* A tie is broken by the fewest devices.

The communication of tp is part of C. The communication of dp and pp is the volume over the bandwidth β ("modeled as the
communication volume divided by the bandwidth") if β is given, and otherwise left out:

* pp: a stage sends an activation of A bytes a sample, and receives a gradient as large if there is a backward.
  1F1B keeps no more microbatches in flight than it has stages, so a move delays every round: T_m has
  (dp_llm / dp_m)·M·(1 or 2)·A / β beside its computation.
* dp: ZeRO-1 reduces gradients and gathers parameters, P / (tp·pp) bytes of a device in all; the share (dp - 1)/dp of
  them goes over β in D_m seconds. This is once a step, after a module's last microbatch and beside the other modules:
  steady = max_m ((n - 1)·T_m + D_m). D_m is 0 for modules without optimizer states.
* chunks (VPP): a device works on one of its chunks before the first microbatch moves on, so a module's share of the
  warm-up is divided by the number of chunks ("we proportionally reduce the warm-up time based on VPP-size"). A stage
  sends an activation for each chunk. The further activations in flight are left out, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmjax.models.config import LLM
from mmjax.planner.problem import MixedProblem, ModuleCosts, Problem

ROUNDING = 1e-12
"""Relative difference in floating point of two numbers that are equal in theory."""


def weight_bytes(costs: ModuleCosts, tp: Any, dp: Any) -> Any:
    """P / tp + S / (tp·dp): bytes of parameters, gradients and optimizer states of a device with all stages.

    Args:
      costs: the module's costs, such as `problem.modules["llm"]`.
      tp: its tp, a number or an array.
      dp: its dp, a number or an array of the same shape, as the result.
    """
    return costs.param_bytes / tp + costs.optimizer_bytes / (tp * dp)


def activation_bytes(costs: ModuleCosts, tp: Any, share: Any) -> Any:
    """Bytes of activations on a device of a module, for any pp.

    Args:
      costs: the module's costs, such as `problem.modules["llm"]`.
      tp: its tp, a number or an array.
      share: the LLM's dp over the module's, a number or an array of the same shape, as the result.
    """
    if costs.activation_bytes_by_tp:
        sizes = [costs.activation_bytes_by_tp[int(size)] for size in np.ravel(tp)]
        return share * (np.array(sizes) if np.ndim(tp) else sizes[0])
    return share * costs.activation_bytes / tp


def passing_seconds(problem: Problem, costs: ModuleCosts, share: Any) -> Any:
    """Seconds in which a stage sends the activation of a microbatch and, with a backward, receives its gradient.

    They are 0 if the problem's bandwidth is infinite.

    Args:
      problem: has the bandwidth and the samples of a microbatch.
      costs: the module's costs, such as `problem.modules["llm"]`.
      share: the LLM's dp over the module's, a number or an array, as the result.
    """
    directions = 2 if any(costs.backward.values()) else 1
    return share * problem.microbatch * costs.chunks * directions * costs.sent_bytes / problem.bandwidth


def reducing_seconds(problem: Problem, costs: ModuleCosts, tp: Any, dp: Any) -> Any:
    """D·pp: seconds of a step in which a device with all stages would reduce gradients and gather parameters.

    They are 0 for a module without optimizer states, for a dp of 1, and if the problem's bandwidth is infinite.

    Args:
      problem: has the bandwidth.
      costs: the module's costs, such as `problem.modules["llm"]`.
      tp: its tp, a number or an array.
      dp: its dp, a number or an array of the same shape, as the result.
    """
    reduced = costs.param_bytes if costs.optimizer_bytes else 0.0
    return reduced / tp * (dp - 1) / dp / problem.bandwidth


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Parallel degrees of one module."""

    tp: int
    dp: int
    pp: int

    @property
    def devices(self) -> int:
        """Number of devices of the module."""
        return self.tp * self.dp * self.pp


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees by module, in the order of the problem.

    Attributes:
      problem: the problem that it solves.
      modules: degrees by module name.
      kinds: kind of device by module; a module that is not in it is on the one kind of a `Problem`.
    """

    problem: Problem | MixedProblem
    modules: Mapping[str, Degrees] = field(hash=False)
    kinds: Mapping[str, str] = field(default_factory=dict, hash=False)

    def costs(self, name: str) -> ModuleCosts:
        """Costs of module `name` on its kind of device."""
        return self._problem(name).modules[name]

    def _problem(self, name: str) -> Problem:
        """The problem on the kind of device that module `name` is on."""
        return self.problem.kinds[self.kinds.get(name, "")]

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return sum(degrees.devices for degrees in self.modules.values())

    def devices_of(self, kind: str) -> int:
        """Number of devices in use of a kind; "" is the one kind of a `Problem`."""
        return sum(degrees.devices for name, degrees in self.modules.items() if self.kinds.get(name, "") == kind)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.problem.microbatches(self.modules[LLM].dp)

    @property
    def objective(self) -> float:
        """Seconds of a step: Eq. 1 and 2."""
        return self.warm_up + self.steady

    @property
    def warm_up(self) -> float:
        """Seconds until the first microbatch has passed through every stage: Eq. 1."""
        return math.fsum(
            self.stage_seconds(name) * degrees.pp / self.costs(name).chunks for name, degrees in self.modules.items()
        )

    @property
    def steady(self) -> float:
        """Seconds of all further microbatches and of the slowest module's dp communication: Eq. 2."""
        return self._steady(self.bottleneck)

    def _steady(self, name: str) -> float:
        return (self.microbatches - 1) * self.stage_seconds(name) + self.reducing_seconds(name)

    @property
    def bottleneck(self) -> str:
        """Name of the module whose stages take longest, its dp communication included."""
        return max(self.modules, key=lambda name: (self._steady(name), self.stage_seconds(name)))

    def stage_seconds(self, name: str) -> float:
        """T of module `name`: seconds of forward and backward of one microbatch on one of its stages."""
        degrees, costs = self.modules[name], self.costs(name)
        share = self.modules[LLM].dp / degrees.dp
        computed = share * self.problem.microbatch * costs.seconds[degrees.tp] / degrees.pp
        return computed + passing_seconds(self._problem(name), costs, share)

    def reducing_seconds(self, name: str) -> float:
        """D of module `name`: seconds in which its dp groups reduce gradients and gather parameters."""
        degrees = self.modules[name]
        return reducing_seconds(self._problem(name), self.costs(name), degrees.tp, degrees.dp) / degrees.pp

    def memory(self, name: str) -> float:
        """Bytes on a device of module `name`: parameters, gradients, optimizer states and activations."""
        degrees, costs = self.modules[name], self.costs(name)
        weights = weight_bytes(costs, degrees.tp, degrees.dp) / degrees.pp
        return weights + activation_bytes(costs, degrees.tp, self.modules[LLM].dp / degrees.dp)

    def as_json(self) -> dict[str, object]:
        """``{"objective": seconds, "modules": {name: {"devices": 8, "tp": 4, "dp": 2, "pp": 1}}}``.

        With several kinds of device each module has its "kind" too.
        """
        modules = {
            name: self._kind(name) | {"devices": degrees.devices, "tp": degrees.tp, "dp": degrees.dp, "pp": degrees.pp}
            for name, degrees in self.modules.items()
        }
        return {"objective": self.objective, "modules": modules}

    def _kind(self, name: str) -> dict[str, object]:
        return {"kind": self.kinds[name]} if self.kinds.get(name) else {}
