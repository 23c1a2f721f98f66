"""Two runs side by side: relative norms of their differences, module by module and step by step.

A leaf's name says its module and, in a whole state, its kind: "params/llm/embed", "adam_m/vision/norm/bias".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mmjax.optimizer_config import OptimizerConfig

Leaves = dict[str, np.ndarray]
MOMENTS = ("adam_m", "adam_v")
QUANTITIES = ("grad", "update", "moments", "leaf")
LEAST_SHARE = 0.1
"""A leaf's difference is relative to its gradient's norm, but at least to this share of its module's norm.

Some leaves have next to no gradient."""
LIMITS = {
    "float32": {"loss": 1e-5, "grad": 1e-5, "update": 1e-4, "moments": 1e-4},
    "bfloat16": {"loss": 2e-2, "grad": 5e-2, "update": 2e-1, "moments": 5e-2, "leaf": 8e-2},
}
"""Limits on relative differences from the reference in fp32, by the dtype that stages compute in.

In bf16 they are at least twice what correct configurations show (docs/adr/0048 has the figures). There a module's
gradient may hide a wrong leaf, so the largest difference of a single leaf counts too.
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Losses, norms and leaves of a run.

    Attributes:
      losses: loss of each step.
      norms: for each step, the gradient norm of each trained module before clipping.
      leaves: logical leaves with both moments, before the first step and after each step.
    """

    losses: list[float]
    norms: list[dict[str, float]]
    leaves: list[Leaves]


@dataclass(frozen=True, kw_only=True)
class Expected(Run):
    """The dense reference's run, with the gradients before clipping of every step."""

    gradients: list[Leaves]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Relative norms of differences; infinite where a number is not finite or a frozen module moved.

    Attributes:
      loss: difference of the loss at each step.
      modules: by module and quantity, the difference at each step.
      initial: by module, the difference of the parameters before the first step.
      limits: limit by quantity; see ``LIMITS``.
    """

    loss: list[float]
    modules: dict[str, dict[str, list[float]]]
    initial: dict[str, float]
    limits: Mapping[str, float]

    def largest(self, quantity: str, module: str | None = None) -> float:
        """The largest difference over the steps, of one module or of all."""
        if quantity == "loss":
            return max(self.loss)
        return max(max(table[quantity]) for name, table in self.modules.items() if module in (None, name))

    @property
    def quantities(self) -> tuple[str, ...]:
        """The quantities that are compared module by module."""
        return tuple(quantity for quantity in QUANTITIES if quantity in self.limits)

    @property
    def ok(self) -> bool:
        """Whether the runs agree: they start from the same parameters, and no difference is beyond its limit."""
        within = all(self.largest(quantity) <= limit for quantity, limit in self.limits.items())
        return within and not any(self.initial.values())

    def first_off(self) -> tuple[int, list[str]] | None:
        """The first step (from 1; 0 is the start) at which the runs differ, and what differs: "loss", "vision grad", …

        Updates and moments are named only where loss and gradients are right: wrong gradients make wrong updates.
        """
        if found := [f"{module} parameters" for module, value in self.initial.items() if value]:
            return 0, found
        for step in range(len(self.loss)):
            found = [] if self.loss[step] <= self.limits["loss"] else ["loss"]
            found += [*self._off("grad", step), *self._off("leaf", step)]
            if found := found or [*self._off("update", step), *self._off("moments", step)]:
                return step + 1, found
        return None

    def _off(self, quantity: str, step: int) -> list[str]:
        limit = self.limits.get(quantity, math.inf)
        return [f"{m} {quantity}" for m, table in self.modules.items() if not table[quantity][step] <= limit]


def compare(
    got: Run, want: Expected, optimizers: Mapping[str, OptimizerConfig], clip_norm: float, dtype: str = "float32"
) -> Comparison:
    """Compares a run with the reference's. A frozen module must not move at all, and has neither norm nor moments.

    ``dtype`` is what the run computes in.
    """
    start = [of_kind(run.leaves[0], "params") for run in (got, want)]
    modules: dict[str, dict[str, list[float]]] = {m: {q: [] for q in QUANTITIES} for m in optimizers}
    gradients = recovered_gradients(got, optimizers, clip_norm)
    for step in range(len(want.losses)):
        for module, optimizer in optimizers.items():
            table = modules[module]
            table["grad"].append(_gradient_gap(module, got, want, gradients[step], step))
            table["leaf"].append(_leaf_gap(of_module(gradients[step], module), of_module(want.gradients[step], module)))
            table["update"].append(_update_gap(module, got, want, step, frozen=optimizer.frozen))
            after, wanted = got.leaves[step + 1], want.leaves[step + 1]
            gaps = [
                relative(of_module(of_kind(after, k), module), of_module(of_kind(wanted, k), module)) for k in MOMENTS
            ]
            table["moments"].append(max(gaps))
    return Comparison(
        loss=[relative_number(a, b) for a, b in zip(got.losses, want.losses, strict=True)],
        modules=modules,
        initial={module: relative(*(of_module(leaves, module) for leaves in start)) for module in optimizers},
        limits=LIMITS[dtype],
    )


def _gradient_gap(module: str, got: Run, want: Expected, gradients: Leaves, step: int) -> float:
    """Relative difference of a module's gradient or of its norm, whichever is larger."""
    norm_gap = relative_number(got.norms[step].get(module, 0.0), want.norms[step].get(module, 0.0))
    if not want.norms[step].get(module, 0.0):
        return norm_gap  # rounding of the moments would look like a gradient
    return max(norm_gap, relative(of_module(gradients, module), of_module(want.gradients[step], module)))


def _leaf_gap(got: Leaves, want: Leaves) -> float:
    """Relative difference of the gradient of the leaf that differs most (see ``LEAST_SHARE``)."""
    if got.keys() != want.keys():
        return math.inf
    least = LEAST_SHARE * norm(want.values())
    gaps = difference(got, want)
    return max((_ratio(norm([gaps[n]]), max(norm([want[n]]), least)) for n in want), default=0.0)


def _update_gap(module: str, got: Run, want: Run, step: int, *, frozen: bool) -> float:
    pairs = [[of_module(of_kind(run.leaves[s], "params"), module) for s in (step, step + 1)] for run in (got, want)]
    moved, wanted = (difference(after, before) for before, after in pairs)
    if frozen and any(leaf.any() for leaf in moved.values()):
        return math.inf
    return relative(moved, wanted)


def recovered_gradients(run: Run, optimizers: Mapping[str, OptimizerConfig], clip_norm: float) -> list[Leaves]:
    """The gradients before clipping of every step, read off the first moments: g = (m − b1·m') / (1 − b1).

    So the programs that train are checked as they are. Only the rounding of the moments is lost, about 1e-7 / (1 - b1)
    of the moments' norm.
    """
    result = []
    for step, norms in enumerate(run.norms):
        whole = math.sqrt(sum(value**2 for value in norms.values()))
        scale = clip_norm / whole if clip_norm and whole > clip_norm else 1.0
        before, after = (of_kind(leaves, "adam_m") for leaves in run.leaves[step : step + 2])
        gradients = {}
        for name, m in after.items():
            b1 = optimizers[module_of(name)].b1
            gradients[name] = (m.astype(np.float64) - b1 * before[name].astype(np.float64)) / ((1 - b1) * scale)
        result.append(gradients)
    return result


# ---- leaves ----------------------------------------------------------------------------------------------------------


def module_of(name: str) -> str:
    """Module of a logical leaf whose name has no kind."""
    return name.partition("/")[0]


def of_kind(leaves: Mapping[str, np.ndarray], kind: str) -> Leaves:
    """Leaves of one kind, without the kind in their names."""
    return {name.removeprefix(f"{kind}/"): leaf for name, leaf in leaves.items() if name.startswith(f"{kind}/")}


def of_module(leaves: Mapping[str, np.ndarray], module: str) -> Leaves:
    """Leaves of one module."""
    return {name: leaf for name, leaf in leaves.items() if module_of(name) == module}


def difference(after: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray]) -> Leaves:
    """Difference of each leaf, in float64."""
    with np.errstate(invalid="ignore"):  # infinity - infinity is NaN, which ``_ratio`` makes infinite
        return {name: after[name].astype(np.float64) - before[name].astype(np.float64) for name in after}


def norm(arrays: Iterable[np.ndarray]) -> float:
    """Euclidean norm over all elements."""
    return math.sqrt(sum(float(np.sum(np.square(a.astype(np.float64)))) for a in arrays))


def relative(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> float:
    """‖got − want‖ / ‖want‖ over all leaves; 0 where both are 0, infinite where it is not a finite number.

    Infinite too where only one side has a leaf, or shapes differ.
    """
    if got.keys() != want.keys() or any(got[name].shape != want[name].shape for name in want):
        return math.inf
    return _ratio(norm(difference(got, want).values()), norm(want.values()))


def relative_number(got: float, want: float) -> float:
    """|got − want| / |want|, with the same exceptions."""
    return _ratio(abs(got - want), abs(want))


def _ratio(gap: float, whole: float) -> float:
    if gap == 0 and math.isfinite(whole):
        return 0.0
    ratio = gap / whole if whole else math.inf
    return ratio if math.isfinite(ratio) else math.inf
