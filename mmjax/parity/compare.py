"""Compares two runs: relative norms of their differences by module and step.

A leaf's name starts with its module, in a complete state after its kind: "params/llm/embed", "adam_m/vision/norm/bias".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.optimizer_config import OptimizerConfig

Leaves = dict[str, np.ndarray]
"""Arrays by a leaf's name, with its kind ("params/llm/embed") or without ("llm/embed")."""
MOMENTS = ("adam_m", "adam_v")
QUANTITIES = ("grad", "update", "moments", "leaf")
LEAST_SHARE = 0.1
"""A leaf's difference is relative to its gradient's norm, or to this share of its module's norm if that is larger.

Some leaves have almost no gradient."""
MOMENT_SHARE = 0.05
"""A module's gradient difference is relative to its norm, or to this share of its first moment's if that is larger.

Gradients are computed from moments, whose rounding is all there is of a gradient that is far smaller: that of a
projector in a step that drops the condition of all but one picture."""
LIMITS = {
    "float32": {"loss": 1e-5, "grad": 1e-5, "update": 1e-4, "moments": 1e-4},
    "bfloat16": {"loss": 2e-2, "grad": 5e-2, "update": 2e-1, "moments": 5e-2, "leaf": 8e-2},
}
"""Limits on relative differences from the fp32 reference, by the dtype in which stages compute.

In bf16 they are at least twice the differences of correct configurations (docs/adr/0048 has the figures). In bf16 a
module's gradient may hide a wrong leaf, so the largest difference of a single leaf has a limit too.
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Losses, norms and leaves of a run.

    Attributes:
      losses: loss of each step.
      norms: for each step, by module, the gradient norm before clipping; frozen modules may be absent.
      leaves: logical leaves of parameters and both moments, with their kinds in their names, before the first step and
        after each step: one more than steps.
    """

    losses: list[float]
    norms: list[dict[str, float]]
    leaves: list[Leaves]


@dataclass(frozen=True, kw_only=True)
class Expected(Run):
    """The dense reference's run.

    Attributes:
      gradients: for each step, gradients before clipping by a leaf's name without a kind; frozen modules have none.
      starts: for each step, the leaves that it began with; () for those after the step before.
    """

    gradients: list[Leaves]
    starts: Sequence[Leaves] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Relative norms of differences; infinite if a number is not finite or a frozen module changed.

    Attributes:
      loss: difference of the loss at each step.
      modules: by module, then by each of ``QUANTITIES``, the difference at each step.
      initial: by module, the difference of the parameters before the first step; 0 if they are equal.
      limits: limit by quantity, "loss" among them; see ``LIMITS``.
    """

    loss: list[float]
    modules: dict[str, dict[str, list[float]]]
    initial: dict[str, float]
    limits: Mapping[str, float]

    def largest(self, quantity: str, module: str | None = None) -> float:
        """The largest difference over the steps of "loss" or one of ``QUANTITIES``, of one module or of all (None).

        Of the loss it is always that of all.
        """
        if quantity == "loss":
            return max(self.loss)
        return max(max(table[quantity]) for name, table in self.modules.items() if module in (None, name))

    @property
    def quantities(self) -> tuple[str, ...]:
        """The quantities that are compared module by module: those of ``QUANTITIES`` that have a limit."""
        return tuple(quantity for quantity in QUANTITIES if quantity in self.limits)

    @property
    def ok(self) -> bool:
        """Whether the runs agree: they start from the same parameters, and no difference is beyond its limit."""
        within = all(self.largest(quantity) <= limit for quantity, limit in self.limits.items())
        return within and not any(self.initial.values())

    def first_off(self) -> tuple[int, list[str]] | None:
        """Finds the first step at which the runs differ.

        Returns:
          The step (from 1; 0 is the start), and names of the quantities that differ: "loss", "vision grad", …, or at
          the start "vision parameters". Updates and moments are named only if loss and gradients agree, because wrong
          gradients make wrong updates. None if the runs agree.
        """
        if quantities := [f"{module} parameters" for module, value in self.initial.items() if value]:
            return 0, quantities
        for step in range(len(self.loss)):
            quantities = [] if self.loss[step] <= self.limits["loss"] else ["loss"]
            quantities += [*self._off("grad", step), *self._off("leaf", step)]
            if quantities := quantities or [*self._off("update", step), *self._off("moments", step)]:
                return step + 1, quantities
        return None

    def _off(self, quantity: str, step: int) -> list[str]:
        limit = self.limits.get(quantity, math.inf)
        return [f"{m} {quantity}" for m, table in self.modules.items() if not table[quantity][step] <= limit]


def compare(
    actual: Run,
    expected: Expected,
    optimizers: Mapping[str, OptimizerConfig],
    *,
    clip_norm: float,
    dtype: str = "float32",
) -> Comparison:
    """Compares a run with the reference's. A frozen module must not change at all, and has neither norm nor moments.

    Args:
      actual: the run, as `Session.run` gives it.
      expected: the reference's run, of as many steps, as `run_reference` gives it.
      optimizers: by module, of all modules that have parameters: `recipe.model.optimizers`.
      clip_norm: largest norm of all modules' gradients together; 0 does not clip.
      dtype: dtype in which the run computes, "float32" or "bfloat16", which sets the limits.

    Returns:
      Relative differences: `loss` at each step, and `modules["llm"]["grad"]` at each step, for each of `QUANTITIES`.
    """
    start = [of_kind(run.leaves[0], "params") for run in (actual, expected)]
    modules: dict[str, dict[str, list[float]]] = {m: {q: [] for q in QUANTITIES} for m in optimizers}
    gradients = recovered_gradients(actual, optimizers, clip_norm)
    for step in range(len(expected.losses)):
        for module, optimizer in optimizers.items():
            table = modules[module]
            pair = of_module(gradients[step], module), of_module(expected.gradients[step], module)
            table["grad"].append(_gradient_gap(module, actual, expected, gradients[step], step))
            table["leaf"].append(_leaf_gap(*pair))
            table["update"].append(_update_gap(module, actual, expected, step, frozen=optimizer.frozen))
            table["moments"].append(_moments_gap(module, actual, expected, step))
    return Comparison(
        loss=[relative_number(a, b) for a, b in zip(actual.losses, expected.losses, strict=True)],
        modules=modules,
        initial={module: relative(*(of_module(leaves, module) for leaves in start)) for module in optimizers},
        limits=LIMITS[dtype],
    )


def _gradient_gap(module: str, actual: Run, expected: Expected, gradients: Leaves, step: int) -> float:
    """Relative difference of a module's gradient or of its norm, whichever is larger."""
    norms = [run.norms[step].get(module, 0.0) for run in (actual, expected)]
    norm_gap = relative_number(*norms)
    if not norms[1]:
        return norm_gap  # rounding of the moments would look like a gradient
    moments = of_module(of_kind(actual.leaves[step + 1], "adam_m"), module)
    least = MOMENT_SHARE * norm(moments.values())
    pair = of_module(gradients, module), of_module(expected.gradients[step], module)
    return max(norm_gap, relative(*pair, least=least))


def _leaf_gap(actual: Leaves, expected: Leaves) -> float:
    """Relative difference of the gradient of the leaf that differs most (see ``LEAST_SHARE``)."""
    if actual.keys() != expected.keys():
        return math.inf
    least = LEAST_SHARE * norm(expected.values())
    gaps = difference(actual, expected)
    return max((_ratio(norm([gaps[n]]), max(norm([expected[n]]), least)) for n in expected), default=0.0)


def _update_gap(module: str, actual: Run, expected: Expected, step: int, *, frozen: bool) -> float:
    """Relative difference of a module's update; infinite for a frozen module that changed."""
    updates = []
    for starts, run in ((actual.leaves, actual), (expected.starts or expected.leaves, expected)):
        pair = starts[step], run.leaves[step + 1]
        before, after = (of_module(of_kind(leaves, "params"), module) for leaves in pair)
        updates.append(difference(after, before))
    if frozen and any(leaf.any() for leaf in updates[0].values()):
        return math.inf
    return relative(*updates)


def _moments_gap(module: str, actual: Run, expected: Run, step: int) -> float:
    """The larger relative difference of a module's two moments after a step."""
    runs = (actual.leaves[step + 1], expected.leaves[step + 1])
    return max(relative(*(of_module(of_kind(leaves, kind), module) for leaves in runs)) for kind in MOMENTS)


def recovered_gradients(run: Run, optimizers: Mapping[str, OptimizerConfig], clip_norm: float) -> list[Leaves]:
    """Computes the gradients before clipping of every step from the first moments: g = (m − b1·m') / (1 − b1).

    So the programs of training are checked unchanged. The error is the rounding of the moments, about 1e-7 / (1 - b1)
    of their norm.

    Args:
      run: the run, as `Session.run` gives it.
      optimizers: by module, such as `recipe.model.optimizers`.
      clip_norm: largest norm of all modules' gradients together; 0 does not clip.

    Returns:
      For each step, float64 gradients by a leaf's name without a kind, such as "llm/embed"; leaves without moments are
      absent.
    """
    result = []
    for step, norms in enumerate(run.norms):
        total = math.sqrt(sum(value**2 for value in norms.values()))
        scale = clip_norm / total if clip_norm and total > clip_norm else 1.0
        before, after = (of_kind(leaves, "adam_m") for leaves in run.leaves[step : step + 2])
        gradients = {}
        for name, m in after.items():
            b1 = optimizers[module_of(name)].b1
            gradients[name] = (m.astype(np.float64) - b1 * before[name].astype(np.float64)) / ((1 - b1) * scale)
        result.append(gradients)
    return result


# ---- leaves ----------------------------------------------------------------------------------------------------------


def module_of(name: str) -> str:
    """The module in a leaf's name, which has no kind such as "params" in front: "llm" for "llm/embed"."""
    return name.partition("/")[0]


def of_kind(leaves: Mapping[str, np.ndarray], kind: str) -> Leaves:
    """Leaves of one kind, such as "params", without it in their names: "llm/embed" for "params/llm/embed"."""
    return {name.removeprefix(f"{kind}/"): leaf for name, leaf in leaves.items() if name.startswith(f"{kind}/")}


def of_module(leaves: Mapping[str, np.ndarray], module: str) -> Leaves:
    """Leaves of one module, such as "llm", with their names; these have no kind: "llm/embed"."""
    return {name: leaf for name, leaf in leaves.items() if module_of(name) == module}


def difference(after: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray]) -> Leaves:
    """``after`` − ``before`` of each leaf of ``after``, in float64; ``before`` has them too, in the same shapes."""
    with np.errstate(invalid="ignore"):  # infinity - infinity is NaN, which ``_ratio`` makes infinite
        return {name: after[name].astype(np.float64) - before[name].astype(np.float64) for name in after}


def norm(arrays: Iterable[np.ndarray]) -> float:
    """Euclidean norm over all elements of all arrays together, summed in float64; 0 without arrays."""
    return math.sqrt(sum(float(np.sum(np.square(a.astype(np.float64)))) for a in arrays))


def relative(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], *, least: float = 0.0) -> float:
    """‖actual − expected‖ / ‖expected‖ over all leaves; 0 if both are 0, infinite if it is not a finite number.

    Infinite too if only one side has a leaf, or shapes differ. Both are arrays by name, such as "llm/embed".

    least: a smaller ‖expected‖ counts as this much.
    """
    if actual.keys() != expected.keys() or any(actual[name].shape != expected[name].shape for name in expected):
        return math.inf
    return _ratio(norm(difference(actual, expected).values()), max(norm(expected.values()), least))


def relative_number(actual: float, expected: float) -> float:
    """|actual − expected| / |expected|; 0 if both are 0, infinite if it is not a finite number."""
    return _ratio(abs(actual - expected), abs(expected))


def _ratio(gap: float, reference: float) -> float:
    if gap == 0 and math.isfinite(reference):
        return 0.0
    ratio = gap / reference if reference else math.inf
    return ratio if math.isfinite(ratio) else math.inf
