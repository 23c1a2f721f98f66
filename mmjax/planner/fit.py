"""Why a problem has no plan: which module misses by how much, and what would make it fit."""

from __future__ import annotations

import math
from dataclasses import replace

from mmjax.planner.cost import activation_bytes, weight_bytes
from mmjax.planner.problem import LLM, MOST_DEVICES, Problem
from mmjax.planner.space import Grids

GIGA = 1e9


class DoesNotFit(ValueError):
    """No plan exists. The message is one line."""


def why(problem: Problem) -> str:
    """One line for a problem without a plan."""
    fewest = {name: min(costs.seconds) for name, costs in problem.modules.items()}
    if sum(fewest.values()) > problem.devices:
        return _too_few(problem, fewest)
    memory = least_memory(problem)
    name = _short(problem, memory)
    remedies = [f"memory={memory}"]
    if devices := least_devices(problem):
        remedies.append(f"devices={devices}")
    if problem.modules[name].activation_bytes and problem.microbatch > 1:
        remedies.append("a smaller microbatch")
    return (
        f"modules.{name} misses by {_bytes(memory - problem.memory)} a device: with what the others leave of "
        f"{problem.devices} devices it needs {_bytes(memory)}, memory is {_bytes(problem.memory)}; "
        f"what would make it fit: {' or '.join(remedies)}"
    )


def _bytes(number: float) -> str:
    return f"{number / GIGA:.4g} GB" if number >= GIGA / 100 else f"{number:,.0f} bytes"


def least_memory(problem: Problem) -> int:
    """The least whole number of bytes of a device with which a plan exists on the problem's devices.

    The modules must fit as to devices: the sum of their least tp is no more than there are.
    """
    low, high = 0, 1
    while not _fits(problem, high):
        low, high = high, 2 * high
    while high - low > max(1, high // 10**12):
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(problem, middle) else (middle, high)
    return high


def least_devices(problem: Problem) -> int | None:
    """The fewest devices on which a plan exists with the problem's memory; None where no number would do."""
    # More devices allow more dp, up to the batch.
    most = problem.global_batch * max(max(costs.seconds) for costs in problem.modules.values())
    wide = replace(problem, devices=min(most, MOST_DEVICES))
    totals = []
    grids = Grids(wide)
    for dp in wide.llm_degrees:
        rows = [grids.rows(name, dp) for name in wide.modules]
        totals.append(sum(one.fewest if one else math.inf for one in rows))
    best = min(totals)
    return int(best) if math.isfinite(best) else None


def _fits(problem: Problem, memory: float) -> bool:
    grids = Grids(problem, memory)
    return any(grids.space(dp) is not None for dp in problem.llm_degrees)


def _short(problem: Problem, memory: float) -> str:
    """The module that sets the least memory: with what the others leave it, it needs most."""
    needs: dict[str, float] = {}
    grids = Grids(problem, memory)
    for dp in problem.llm_degrees:
        rows = {name: grids.rows(name, dp) for name in problem.modules}
        fewest = {name: one.fewest for name, one in rows.items() if one}
        if len(fewest) < len(rows) or sum(fewest.values()) > problem.devices:
            continue
        left = problem.devices - sum(fewest.values())
        for name, own in fewest.items():
            need = _least_bytes(problem, name, dp, own + left)
            needs[name] = min(needs.get(name, math.inf), need)
    return max(needs, key=needs.__getitem__)


def _least_bytes(problem: Problem, name: str, llm_dp: int, devices: float) -> float:
    """Bytes of a device of module `name` in the layout that needs least of at most `devices`."""
    costs, best = problem.modules[name], math.inf
    for tp in costs.seconds:
        for dp in [llm_dp] if name == LLM else problem.degrees:
            stages = devices // (tp * dp)
            if costs.depths:
                stages = max((depth for depth in costs.depths if depth <= stages), default=0)
            if stages >= 1:
                weights = weight_bytes(costs, tp, dp) / stages
                best = min(best, weights + activation_bytes(costs, tp, llm_dp / dp))
    return best


def _too_few(problem: Problem, fewest: dict[str, int]) -> str:
    name = max(fewest, key=fewest.__getitem__)
    total = sum(fewest.values())
    parts = ", ".join(f"{one} {number}" for one, number in fewest.items())
    devices = least_devices(problem)
    remedy = f"devices={devices}"
    if devices is None:
        remedy = f"devices={total} and memory={least_memory(replace(problem, devices=total))}"
    return (
        f"modules.{name} misses by devices, {total - problem.devices} of them: the modules need at least {total} "
        f"({parts}: the least tp of each), devices={problem.devices}; what would make it fit: {remedy}"
    )
