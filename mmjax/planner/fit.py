"""Reasons why a problem has no plan: the module that does not fit, the missing bytes or devices, and remedies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from mmjax.models.config import LLM
from mmjax.planner.cost import activation_bytes, weight_bytes
from mmjax.planner.json_values import MOST as MOST_MEMORY
from mmjax.planner.problem import MOST_DEVICES, MixedProblem, ModuleCosts, Problem
from mmjax.planner.space import Grids, spaces

GIGA = 1e9
MUCH = 10_000
"""The most that a remedy suggests: devices of a kind, or a multiple of the present devices or memory."""
NEARLY = 1e-3
"""Relative precision of the least memory, or number of devices, of a kind if there are several kinds."""


class DoesNotFit(ValueError):
    """No plan exists. The message is one line."""


def why(problem: Problem | MixedProblem) -> str:
    """One line with the reason why a problem has no plan, and with remedies; the problem must have none.

    It begins with the module that lacks something, such as "modules.llm misses by 12.5 GB a device: …". problem: as
    `read_problem` gives it.
    """
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
    """The fewest bytes of a device, a whole number such as 21474836480, with which a plan exists on its devices.

    `problem.memory` is ignored. There must be enough devices: no fewer than the sum of the modules' least tp.
    problem: as `read_problem` gives it, for devices of one kind.
    """
    memory = _least(lambda memory: _fits(replace(problem, memory=memory)))
    assert memory is not None, "with enough memory there is a plan"
    return memory


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
    """The fewest devices on which a plan exists with the problem's memory; None if no number is enough.

    `problem.devices` is ignored; up to `MOST_DEVICES` are tried. problem: as `read_problem` gives it, for one kind.
    """
    # More devices allow more dp, up to the batch.
    most = problem.global_batch * max(max(costs.seconds) for costs in problem.modules.values())
    enlarged = replace(problem, devices=min(most, MOST_DEVICES))
    totals = []
    grids = Grids(enlarged)
    for dp in enlarged.llm_degrees:
        rows = [grids.rows(name, dp) for name in enlarged.modules]
        totals.append(sum(table.fewest if table else math.inf for table in rows))
    best = min(totals)
    return int(best) if math.isfinite(best) else None


def _fits(problem: Problem | MixedProblem) -> bool:
    return any(spaces(problem))


def _short(problem: Problem, memory: float, llm_degrees: Iterable[int]) -> str:
    """The module that sets the least memory: it needs most on the devices that the other modules leave."""
    needs: dict[str, float] = {}
    grids = Grids(replace(problem, memory=memory))
    for dp in llm_degrees:
        rows = {name: grids.rows(name, dp) for name in problem.modules}
        fewest = {name: table.fewest for name, table in rows.items() if table}
        if len(fewest) < len(rows) or sum(fewest.values()) > problem.devices:
            continue
        spare = problem.devices - sum(fewest.values())
        for name, devices in fewest.items():
            need = _least_bytes(problem, name, dp, devices + spare)
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
    parts = ", ".join(f"{module} {number}" for module, number in fewest.items())
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
    """One line for several kinds; remedies are more memory or devices of one kind, or else of every kind."""
    memories = {kind: _least_of(problem, kind, "memory") for kind in problem.kinds}
    devices = {kind: _least_of(problem, kind, "devices") for kind in problem.kinds}
    remedies = [f"kinds.{kind}.memory={least}" for kind, least in memories.items() if least]
    remedies += [f"kinds.{kind}.devices={least}" for kind, least in devices.items() if least]
    grown = {kind: least / problem.kinds[kind].memory for kind, least in memories.items() if least}
    if not grown:
        have = ", ".join(f"{on_kind.devices} {kind}" for kind, on_kind in problem.kinds.items())
        fewest = {
            name: min(min(costs.seconds) * costs.least_pp for costs in _costs_by_kind(problem, name))
            for name in problem.names
        }
        name = max(fewest, key=fewest.__getitem__)
        parts = ", ".join(f"{module} {number}" for module, number in fewest.items())
        cure = " or ".join(remedies) or _everywhere(problem)
        return (
            f"modules.{name} misses by devices or memory of several kinds: there are {have}, and the modules need at "
            f"least {sum(fewest.values())} ({parts}: the least tp and pp of each); what would make it fit: {cure}"
        )
    kind = min(grown, key=grown.__getitem__)
    on_kind, memory = problem.kinds[kind], memories[kind]
    assert memory is not None
    space = next(spaces(_with(problem, kind, memory=memory)))
    placed = replace(on_kind, modules={name: on_kind.modules[name] for name in space.groups[kind].rows})
    name = _short(placed, memory, (space.llm_dp,))
    return (
        f"modules.{name} misses by {_bytes(memory - on_kind.memory)} a device: with what others leave of "
        f"{on_kind.devices} {kind} it needs {_bytes(memory)}, kinds.{kind}.memory is {_bytes(on_kind.memory)}; what "
        f"would make it fit: {' or '.join(remedies)}"
    )


def _costs_by_kind(problem: MixedProblem, name: str) -> list[ModuleCosts]:
    """The costs of a module on each kind on which it has times."""
    return [on_kind.modules[name] for on_kind in problem.kinds.values() if name in on_kind.modules]


def _with(problem: MixedProblem, kind: str, **changes: float) -> MixedProblem:
    changed: Problem = replace(problem.kinds[kind], **changes)  # type: ignore[arg-type]
    return replace(problem, kinds={**problem.kinds, kind: changed})


def _least_of(problem: MixedProblem, kind: str, field: str) -> int | None:
    """The least memory, or the fewest devices, of a kind with which a plan exists; None if no amount is enough.

    field: "memory" or "devices".
    """
    most = MOST_MEMORY if field == "memory" else MUCH
    # A plan that exists with less of a kind exists with more of it, so the largest amount is tried first.
    if not _fits(_with(problem, kind, **{field: most})):
        return None
    above = math.floor(getattr(problem.kinds[kind], field))
    return _least(lambda least: _fits(_with(problem, kind, **{field: least})), above=above, within=NEARLY)


def _everywhere(problem: MixedProblem) -> str:
    """A remedy in words: a multiple of the memory, the devices, or both, of every kind that is enough."""

    def enough(times: int, fields: tuple[str, ...]) -> bool:
        scaled = {
            kind: replace(
                on_kind,
                devices=min(on_kind.devices * times, MOST_DEVICES) if "devices" in fields else on_kind.devices,
                memory=on_kind.memory * times if "memory" in fields else on_kind.memory,
            )
            for kind, on_kind in problem.kinds.items()
        }
        return _fits(replace(problem, kinds=scaled))

    for fields in (("memory",), ("devices",), ("devices", "memory")):
        if times := _least(functools.partial(enough, fields=fields), most=MUCH):
            return f"{times} times the {' and '.join(fields)} of every kind"
    return "other modules"
