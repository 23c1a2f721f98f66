"""Why a problem has no plan: which module misses by how much, and what would make it fit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from mmjax.models.config import LLM
from mmjax.planner.cost import activation_bytes, weight_bytes
from mmjax.planner.json_values import MOST as MOST_MEMORY
from mmjax.planner.problem import MOST_DEVICES, MixedProblem, Problem
from mmjax.planner.space import Grids, spaces

GIGA = 1e9
MUCH = 10_000
"""The most that a remedy asks for: devices of a kind, or times what there is."""
NEARLY = 1e-3
"""Relative precision of the least memory, or number of devices, of a kind, where there are several kinds."""


class DoesNotFit(ValueError):
    """No plan exists. The message is one line."""


def why(problem: Problem | MixedProblem) -> str:
    """One line that says why a problem has no plan, and what would make it fit."""
    if isinstance(problem, MixedProblem):
        return _why_mixed(problem)
    fewest = {name: min(costs.seconds) * costs.least_pp for name, costs in problem.modules.items()}
    if sum(fewest.values()) > problem.devices:
        return _too_few(problem, fewest)
    memory = least_memory(problem)
    name = _short(problem, memory, problem.llm_degrees)
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
    """The fewest bytes of a device, a whole number, with which a plan exists on the problem's devices.

    There must be enough devices: no fewer than the sum of the modules' least tp.
    """
    found = _least(lambda memory: _fits(replace(problem, memory=memory)))
    assert found is not None, "with enough memory there is a plan"
    return found


def _least(
    enough: Callable[[int], bool], *, above: int = 0, most: float = math.inf, within: float = 1e-12
) -> int | None:
    """The least whole number that is enough, to a relative precision of `within`; None if none up to `most` is.

    above: a number that is not enough.
    """
    low, high = above, max(1, 2 * above)
    while not enough(high):
        low, high = high, 2 * high
        if low >= most:
            return None
    while high - low > max(1, high * within):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
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


def _fits(problem: Problem | MixedProblem) -> bool:
    return any(spaces(problem))


def _short(problem: Problem, memory: float, llm_degrees: Iterable[int]) -> str:
    """The module that sets the least memory: the one that needs most on the devices that the others leave it."""
    needs: dict[str, float] = {}
    grids = Grids(replace(problem, memory=memory))
    for dp in llm_degrees:
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
    """Bytes of a device of module `name` in its leanest layout on at most `devices` devices."""
    costs, best = problem.modules[name], math.inf
    for tp in costs.seconds:
        for dp in [llm_dp] if name == LLM else problem.degrees:
            stages = devices // (tp * dp)
            if costs.depths:
                stages = max((depth for depth in costs.depths if depth <= stages), default=0)
            if stages >= costs.least_pp:
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
        f"({parts}: the least tp and pp of each), devices={problem.devices}; what would make it fit: {remedy}"
    )


# ---- several kinds of device -----------------------------------------------------------------------------------------


def _why_mixed(problem: MixedProblem) -> str:
    """One line for several kinds; remedies are more memory or devices of one kind, or of every kind if none does."""
    memories = {kind: _least_of(problem, kind, "memory") for kind in problem.kinds}
    devices = {kind: _least_of(problem, kind, "devices") for kind in problem.kinds}
    remedies = [f"kinds.{kind}.memory={least}" for kind, least in memories.items() if least]
    remedies += [f"kinds.{kind}.devices={least}" for kind, least in devices.items() if least]
    grown = {kind: least / problem.kinds[kind].memory for kind, least in memories.items() if least}
    if not grown:
        have = ", ".join(f"{own.devices} {kind}" for kind, own in problem.kinds.items())
        every = {name: [own.modules[name] for own in _having(problem, name)] for name in problem.names}
        fewest = {name: min(min(one.seconds) * one.least_pp for one in own) for name, own in every.items()}
        name = max(fewest, key=fewest.__getitem__)
        parts = ", ".join(f"{one} {number}" for one, number in fewest.items())
        cure = " or ".join(remedies) or _everywhere(problem)
        return (
            f"modules.{name} misses by devices or memory of several kinds: there are {have}, and the modules need at "
            f"least {sum(fewest.values())} ({parts}: the least tp and pp of each); what would make it fit: {cure}"
        )
    kind = min(grown, key=grown.__getitem__)
    own, memory = problem.kinds[kind], memories[kind]
    assert memory is not None
    space = next(spaces(_with(problem, kind, memory=memory)))
    here = replace(own, modules={name: own.modules[name] for name in space.groups[kind].rows})
    name = _short(here, memory, (space.llm_dp,))
    return (
        f"modules.{name} misses by {_bytes(memory - own.memory)} a device: with what others leave of {own.devices} "
        f"{kind} it needs {_bytes(memory)}, kinds.{kind}.memory is {_bytes(own.memory)}; what would make it fit: "
        f"{' or '.join(remedies)}"
    )


def _having(problem: MixedProblem, name: str) -> list[Problem]:
    """The problems of the kinds on which a module has times."""
    return [own for own in problem.kinds.values() if name in own.modules]


def _with(problem: MixedProblem, kind: str, **changes: float) -> MixedProblem:
    changed: Problem = replace(problem.kinds[kind], **changes)  # type: ignore[arg-type]
    return replace(problem, kinds={**problem.kinds, kind: changed})


def _least_of(problem: MixedProblem, kind: str, what: str) -> int | None:
    """The least memory, or the fewest devices, of a kind with which a plan exists; None where no amount would do."""
    most = MOST_MEMORY if what == "memory" else MUCH
    # A plan that exists with less of a kind exists with more of it, so the largest amount is tried first.
    if not _fits(_with(problem, kind, **{what: most})):
        return None
    above = math.floor(getattr(problem.kinds[kind], what))
    return _least(lambda least: _fits(_with(problem, kind, **{what: least})), above=above, within=NEARLY)


def _everywhere(problem: MixedProblem) -> str:
    """A remedy in words: how many times the memory, the devices, or both, of every kind would do."""

    def enough(times: int, devices: bool, memory: bool) -> bool:
        more = {
            kind: replace(
                own,
                devices=min(own.devices * times, MOST_DEVICES) if devices else own.devices,
                memory=own.memory * times if memory else own.memory,
            )
            for kind, own in problem.kinds.items()
        }
        return _fits(replace(problem, kinds=more))

    for what, changes in (("memory", (False, True)), ("devices", (True, False)), ("devices and memory", (True, True))):
        if times := _least(functools.partial(lambda own, times: enough(times, *own), changes), most=MUCH):
            return f"{times} times the {what} of every kind"
    return "other modules"
