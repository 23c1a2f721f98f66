"""``python -m mmjax.plan``: the best layouts of a configuration on some devices, or of given times and bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmjax.configurable import ConfigError
from mmjax.flags import Flag, Flags, entry, help_text, one_line_errors, parse_flags, run_plain
from mmjax.planner.accelerators import accelerator
from mmjax.planner.cost import Plan
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.problem import read_problem
from mmjax.planner.search import best_plan

FLAGS = (
    Flag(name="devices", doc="how many there are; those of the configuration's own layouts unless given.", default=0),
    Flag(name="accelerator", doc="what they are, without a profile: a100, h100 or another by name.", default="h100"),
    Flag(name="profile", doc="times that were measured by python -m mmjax.profile, instead of a datasheet's."),
    Flag(name="out", doc="gin file for the plan, to give after the planned one; its timeline is drawn beside it."),
    Flag(name="json", doc="prints one line of JSON.", default=False),
    Flag(
        name="problem",
        doc="instead of a gin file: JSON with devices, global_batch, microbatch, memory and modules; see "
        "docs/planner.md.",
    ),
    Flag(name="bound", doc="with --problem: also bounds from below what any plan takes.", default=False),
)
USAGE = "python -m mmjax.plan"
GIGA = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the best plan; the exit status is 1 where nothing fits, and 2 where something given is not legal."""
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, USAGE, gin=True, helped=_help)
        problem = str(flags.values["problem"])
        if problem:
            _only(flags, "problem", ("problem", "bound", "json"))
        elif flags.gin_files or flags.bindings:
            _only(flags, "gin_file", ("devices", "accelerator", "profile", "out", "json"))
        else:
            raise ConfigError("--gin_file is missing: what is to be planned; write --gin_file=F, or --problem=FILE")
        try:
            return _plan_problem(flags) if problem else _plan_config(flags)
        except DoesNotFit as reason:
            print(f"error: {reason}", file=sys.stderr)
            return 1


def _help() -> str:
    gin = (
        entry("  --gin_file", "a gin file of the run to plan; repeat it, later files override earlier ones."),
        entry("  --gin.KEY=VALUE", "sets one field; see python -m mmjax.train --help."),
    )
    return help_text(FLAGS, USAGE, gin=gin)


def _only(flags: Flags, what: str, legal: Sequence[str]) -> None:
    """Requires that flags of the other kind of planning were left out."""
    if what == "problem" and (flags.gin_files or flags.bindings):
        raise ConfigError("--problem: plans from numbers alone; leave --gin_file out")
    for flag in FLAGS:
        if flag.name not in legal and flags.values[flag.name] != flag.default:
            raise ConfigError(f"--{flag.name}: does not go with --{what}; leave it out")


# ---- a configuration -------------------------------------------------------------------------------------------------


def _plan_config(flags: Flags) -> int:
    from mmjax.config import load_config
    from mmjax.planner import output
    from mmjax.planner.choose import choose
    from mmjax.planner.clock import AnalyticClock, Clock
    from mmjax.planner.from_config import read_work
    from mmjax.planner.measured import MeasuredClock
    from mmjax.planner.profile import read_profile
    from mmjax.run.assembly import open_source

    devices, out = int(flags.values["devices"]), str(flags.values["out"])
    if devices < 0:
        raise ConfigError(f"--devices={devices}: must be 1 or more, such as 8")
    if out and (not Path(out).parent.is_dir() or Path(out).suffix != ".gin"):
        raise ConfigError(f"--out={out}: must be a gin file in a directory that is there, such as plan.gin")
    config = load_config(flags.gin_files, flags.bindings)
    kind, profile = accelerator(str(flags.values["accelerator"])), None
    if flags.values["profile"]:
        profile = read_profile(str(flags.values["profile"]), config)
    source = open_source(config, split="train")
    work = read_work(config, source)
    clock: Clock = AnalyticClock(work=work, accelerator=kind)
    if profile:
        work, clock = work.limited(profile.tps), MeasuredClock(profile=profile)
    choice = choose(work, clock, devices or config.devices, rows_of=output.rows_by_candidate(config, source))
    if out:
        Path(out).write_text(output.gin_text(config, choice, choice.best, source), encoding="utf-8")
        output.draw(choice.best, Path(out).with_suffix(".png"))
    if flags.values["json"]:
        print(json.dumps(output.as_json(choice)))
    else:
        print("\n".join(output.table(choice)))
        if out:
            files = " ".join(f"--gin_file={file}" for file in (*flags.gin_files, out))
            print(f"train it: python -m mmjax.train {files}; its timeline: {Path(out).with_suffix('.png')}")
    return 0


# ---- numbers alone ---------------------------------------------------------------------------------------------------


def _plan_problem(flags: Flags) -> int:
    plan = best_plan(read_problem(str(flags.values["problem"])))
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
