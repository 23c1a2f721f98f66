"""``python -m mmjax.plan --problem=FILE [--json]``: the best layouts for given times and bytes of each module."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from mmjax.flags import Flag, one_line_errors, parse_flags, run_plain
from mmjax.planner.cost import Plan
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.problem import read_problem
from mmjax.planner.search import best_plan

FLAGS = (
    Flag(
        name="problem",
        doc="JSON file with devices, global_batch, microbatch, memory and modules; see docs/planner.md.",
        required=True,
    ),
    Flag(name="json", doc="prints one line of JSON.", default=False),
    Flag(name="bound", doc="also bounds from below what any plan takes, by a convex program.", default=False),
)
GIGA = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the best plan; the exit status is 1 where nothing fits, and 2 where the problem is not legal."""
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, "python -m mmjax.plan")
        problem = read_problem(str(flags.values["problem"]))
        try:
            plan = best_plan(problem)
        except DoesNotFit as reason:
            print(f"error: {reason}", file=sys.stderr)
            return 1
        bound = _bound(plan) if flags.values["bound"] else None
    if flags.values["json"]:
        print(json.dumps(plan.as_json() | ({} if bound is None else {"bound": bound})))
    else:
        print("\n".join(table(plan, bound)))
    return 0


def _bound(plan: Plan) -> float:
    from mmjax.planner.relaxation import relax  # cvxpy takes seconds to import

    relaxed = relax(plan.problem)
    assert relaxed is not None, "where a plan exists, so does one on real numbers of stages"
    return relaxed.bound


def table(plan: Plan, bound: float | None = None) -> Iterator[str]:
    """The lines that a person reads."""
    width = max(map(len, plan.modules)) + 2
    yield f"{'':<{width}}{'devices':>8}{'tp':>5}{'dp':>7}{'pp':>5}{'stage ms':>11}{'GB a device':>13}"
    for name, degrees in plan.modules.items():
        yield (
            f"{name:<{width}}{degrees.devices:>8}{degrees.tp:>5}{degrees.dp:>7}{degrees.pp:>5}"
            f"{plan.stage_seconds(name) * 1e3:>11.4g}{plan.memory(name) / GIGA:>13.4g}"
        )
    yield (
        f"a step takes {plan.objective:.6g} s: {plan.warm_up:.4g} s until the first microbatch is through, then "
        f"{plan.microbatches - 1} more at the pace of {plan.bottleneck}"
    )
    yield f"{plan.devices} of {plan.problem.devices} devices are used"
    if bound is not None:
        more = (plan.objective / bound - 1) * 100
        yield f"no plan takes less than {bound:.6g} s: this one takes at most {more:.2g} % more"


if __name__ == "__main__":
    run_plain(main)
