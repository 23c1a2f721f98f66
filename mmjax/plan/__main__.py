"""``python -m mmjax.plan``: finds the best layouts of a configuration on some devices, or for given times and bytes."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mmjax.configurable import ConfigError, one_of, suggest
from mmjax.flags import Flag, Flags, entry, help_text, importing, one_line_errors, parse_flags, run_plain
from mmjax.planner.accelerators import ACCELERATORS, accelerator
from mmjax.planner.cluster_files import DEVICE, NODE, PROCESSES_PER, ClusterJob, jobset_file, slurm_file, train_command
from mmjax.planner.cost import Plan
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.fullest import FULLEST, read_fullest
from mmjax.planner.loosely_coupled import best_coupled, simulated_seconds
from mmjax.planner.problem import NEEDED, SHARDS_WHEN, MixedProblem, Problem, read_problem
from mmjax.planner.search import best_plan

if TYPE_CHECKING:  # plans from numbers alone need none of these, and start at once
    from mmjax.compile.targets import Target
    from mmjax.planner.choose import PlanChoice
    from mmjax.planner.node_processes import ProcessSeconds
    from mmjax.recipe import Recipe

FLAGS = (
    Flag(
        name="devices",
        doc="how many there are, or how many of each kind: h100:64,l20:16; those of the configuration's own layouts "
        "unless given.",
    ),
    Flag(
        name="accelerator",
        doc="their type, without a profile or kinds: a100, h100 or another by name.",
        default="h100",
    ),
    Flag(
        name="profile",
        doc="times that were measured by python -m mmjax.profile, instead of a datasheet's; of devices of one kind.",
    ),
    Flag(name="out", doc="gin file for the plan, to give after the planned one; its timeline is drawn beside it."),
    Flag(name="slurm", doc="with --out: a Slurm batch file, such as plan.sh, that trains the plan."),
    Flag(name="jobset", doc="with --out: a Kubernetes JobSet, such as plan.yaml, that trains the plan."),
    Flag(
        name="processes",
        doc="what has a process, node or device, in the plan and in its Slurm file: the one with the shorter step "
        "unless given. Pods and nodes of several kinds have one process each.",
    ),
    Flag(
        name="compile_for",
        doc="compiles the three best plans for GPUs that are not here, h100, h200 or a100; says whether they fit by the"
        " compiler.",
    ),
    Flag(
        name="shards",
        doc="when Layout.shard is chosen too: needed, if the fastest layout without it offloads, or any, also where a"
        " step is shorter.",
        default=NEEDED,
    ),
    FULLEST,
    Flag(name="json", doc="prints one line of JSON.", default=False),
    Flag(
        name="problem",
        doc="instead of a gin file: JSON with devices, global_batch, microbatch, memory and modules; see "
        "docs/planner.md.",
    ),
    Flag(
        name="strategy",
        doc="exact: the best layouts; with a gin file also some ways to place modules alone, with commas: homogeneous, "
        "colocated, non-colocated, nested; loosely-coupled: every module on devices of its own, encoders in stages as "
        "long as the LLM's (Cornstarch's Algorithm 1).",
        default="exact",
    ),
    Flag(name="bound", doc="with --problem: also bounds from below what any plan takes.", default=False),
)
USAGE = "python -m mmjax.plan"
NUMBER = re.compile(r"-?[0-9]{1,7}")
KINDS = "h100:64,l20:16"
EXACT, COUPLED = "exact", "loosely-coupled"
STRATEGIES = (EXACT, COUPLED)
WHOLE_BELOW = 64
"""Numbers of stages below this stay integers in the bound, which would be loose with few stages as real numbers."""
FILES = {"out": ".gin", "slurm": ".sh", "jobset": ".yaml"}
"""Suffixes of the files that flags name."""
GIGA = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the best plan and writes the files of the flags; returns the exit status: 0, or 1 if nothing fits.

    argv: the arguments without the program's name, such as ["--gin_file=run.gin", "--devices=h100:16"]; None takes the
      process's.

    Raises:
      SystemExit: the input is not legal (status 2), or Ctrl-C (130); also after --help.
    """
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, USAGE, gin=True, make_help=_help)
        problem = str(flags.values["problem"])
        if problem:
            _require_only(flags, "problem", ("problem", "strategy", "bound", "json"))
        elif flags.gin_files or flags.bindings:
            _require_only(
                flags,
                "gin_file",
                (
                    "devices",
                    "accelerator",
                    "profile",
                    "strategy",
                    "processes",
                    "fullest",
                    "shards",
                    *FILES,
                    "compile_for",
                    "json",
                ),
            )
        else:
            raise ConfigError("--gin_file is missing: what is to be planned; write --gin_file=F, or --problem=FILE")
        read_strategy(flags)
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


def _require_only(flags: Flags, source: str, legal: Sequence[str]) -> None:
    """Requires that no flags were set but those that go with a source: "problem" or "gin_file"."""
    if source == "problem" and (flags.gin_files or flags.bindings):
        raise ConfigError("--problem: plans from numbers alone; leave --gin_file out")
    for flag in FLAGS:
        if flag.name not in legal and flags.values[flag.name] != flag.default:
            raise ConfigError(f"--{flag.name}: does not go with --{source}; leave it out")


# ---- a configuration -------------------------------------------------------------------------------------------------


def _plan_config(flags: Flags) -> int:
    from mmjax.config import load_config
    from mmjax.planner.profile_file import read_profile

    kinds, strategy = read_devices(flags), read_strategy(flags)
    target = read_target(flags, kinds)
    _check_files(flags)
    processes, fullest = _read_processes(flags, kinds), read_fullest(flags)
    shards = str(flags.values["shards"])
    one_of("--shards", shards, SHARDS_WHEN)
    recipe = load_config(flags.gin_files, flags.bindings, allow_code=flags.allow_code)
    profile = read_profile(str(flags.values["profile"]), recipe) if flags.values["profile"] else None
    with importing():
        from mmjax.assembly.epochs import with_steps
        from mmjax.assembly.samples import open_source
        from mmjax.plan import planned
        from mmjax.plan.choice import choose_plan
        from mmjax.plan.compiled import compile_plans
        from mmjax.plan.compiled import lines as compiled_lines
        from mmjax.planner.node_processes import seconds_by_process
    source = open_source(recipe, split="train")
    recipe = with_steps(recipe, source)
    if sys.stderr.isatty():
        print("counting what every module does and keeps, some seconds …", file=sys.stderr)
    lines = list[str]()
    choice = choose_plan(
        recipe,
        source,
        kinds,
        strategy=strategy,
        profile=profile,
        processes=processes or NODE,
        fullest=fullest,
        shards=shards,
        say=lines.append,
    )
    alternatives = seconds_by_process(choice.best, recipe.world.transport)
    processes = processes or min(alternatives, key=lambda step: step.seconds).per if alternatives else NODE
    written = list(_written(flags, choice, recipe, processes))
    plans = compile_plans(recipe, source, choice, target, fullest=fullest) if target else []
    if flags.values["json"]:
        compiled = {"compiled": [plan.as_json() for plan in plans]} if target else {}
        by_process = {"processes": processes, "processes_seconds": {step.per: asdict(step) for step in alternatives}}
        figures = {"strategy": flags.values["strategy"], **planned.as_json(choice), **by_process, **compiled}
        print(json.dumps(figures))
    else:
        lines += [*planned.table(choice), *_processes_lines(alternatives, processes)]
        print("\n".join([*lines, *compiled_lines(plans), *written]))
    return 0


def read_target(flags: Flags, kinds: Mapping[str, int]) -> Target | None:
    """The GPU of --compile_for; None without the flag.

    Args:
      flags: the parsed command line, as `parse_flags(argv, FLAGS, USAGE, gin=True)` gives it.
      kinds: the devices, as `read_devices(flags)` gives them.

    Raises:
      ConfigError: nothing compiles for it, the devices are others, or JAX has no CUDA compiler here.
    """
    from mmjax.compile.targets import require_compiler, target

    name = str(flags.values["compile_for"])
    if not name:
        return None
    chosen = target(name, "compile_for")
    if list(kinds) != [chosen.name]:
        raise ConfigError(
            f"--compile_for={name}: the devices are {', '.join(kinds)}; write --accelerator={chosen.name}"
        )
    require_compiler()
    return chosen


def read_devices(flags: Flags) -> dict[str, int]:
    """The number of devices by accelerator, such as {"h100": 64, "l20": 16}, from --devices and --accelerator.

    Without --devices the number is 0, which means that of the configuration's own layouts.

    flags: the parsed command line, as `parse_flags(argv, FLAGS, USAGE, gin=True)` gives it.

    Raises:
      ConfigError: --devices is not legal, or does not go with --accelerator or --profile.
    """
    text, accelerator_name = str(flags.values["devices"]), str(flags.values["accelerator"])
    if ":" not in text:
        if text and not NUMBER.fullmatch(text):
            raise ConfigError(f"--devices={text}: must be a number, such as 8, or one of each kind, such as {KINDS}")
        if text and int(text) < 1:
            raise ConfigError(f"--devices={text}: must be 1 or more, such as 8")
        accelerator(accelerator_name)
        return {accelerator_name: int(text or 0)}
    kinds: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.lower().partition(":")
        if name not in ACCELERATORS:
            raise ConfigError(f"--devices={text}: there is no accelerator {name!r}; {suggest(name, ACCELERATORS)}")
        if not NUMBER.fullmatch(count) or int(count) < 1:
            raise ConfigError(f"--devices={text}: {part} must have a number of 1 or more, such as {name}:8")
        if name in kinds:
            raise ConfigError(f"--devices={text}: {name} is there twice; write {name}:{kinds[name] + int(count)}")
        kinds[name] = int(count)
    if accelerator_name != "h100":
        raise ConfigError(f"--accelerator={accelerator_name}: --devices says what they are; leave it out")
    if flags.values["profile"]:
        raise ConfigError(
            f"--profile: is of devices of one kind, which it names; write --devices={sum(kinds.values())}"
        )
    return kinds


def read_strategy(flags: Flags) -> tuple[str, ...]:
    """The modes to try, in the order of `MODES`: all of them, or those of --strategy; () for loose coupling.

    Such as ("homogeneous", "nested"). With --problem they are always ().

    flags: the parsed command line, as `parse_flags(argv, FLAGS, USAGE, gin=True)` gives it.

    Raises:
      ConfigError: there is no such strategy; a problem in numbers has no modes.
    """
    from mmjax.planner.candidates import MODES

    strategy, modes = str(flags.values["strategy"]), () if flags.values["problem"] else MODES
    if strategy in STRATEGIES:
        return modes if strategy == EXACT else ()
    for name in strategy.split(","):
        if name in STRATEGIES and modes:
            raise ConfigError(f"--strategy={strategy}: {name} goes with no other; leave the others out")
        if name not in modes:
            legal = suggest(name, (*STRATEGIES, *modes))
            raise ConfigError(f"--strategy={strategy}: there is none of this name; {legal}")
    return tuple(mode for mode in modes if mode in strategy.split(","))


def _read_processes(flags: Flags, kinds: Mapping[str, int]) -> str:
    """--processes, checked: "node", "device", or "" where the plan chooses."""
    processes = str(flags.values["processes"])
    if processes:
        one_of("--processes", processes, PROCESSES_PER)
    if processes == DEVICE and len(kinds) > 1:
        raise ConfigError("--processes=device: nodes of several kinds of device have one process each; leave it out")
    if processes == DEVICE and flags.values["jobset"]:
        raise ConfigError("--processes=device: a pod has one process with all devices of its node; leave --jobset out")
    return processes


def _check_files(flags: Flags) -> None:
    """Raises ConfigError for files that cannot be written, before anything takes time."""
    for name, ending in FILES.items():
        file = Path(str(flags.values[name]))
        if flags.values[name] and (not file.parent.is_dir() or file.suffix != ending):
            fix = f"must be a {ending} file in a directory that is there, such as plan{ending}"
            raise ConfigError(f"--{name}={file}: {fix}")
    for name in (name for name in FILES if name != "out"):
        if flags.values[name] and not flags.values["out"]:
            raise ConfigError(f"--{name}: starts a run of the plan, which has to be written too; add --out=plan.gin")


def _processes_lines(alternatives: Sequence[ProcessSeconds], processes: str) -> Iterator[str]:
    if alternatives:
        yield f"processes: one a {processes}; a step takes {', '.join(map(str, alternatives))}"


def _written(flags: Flags, choice: PlanChoice, recipe: Recipe, processes: str) -> Iterator[str]:
    """Writes the files that flags name; yields lines about them."""
    from mmjax.plan import planned

    if not flags.values["out"]:
        return
    out = Path(str(flags.values["out"]))
    out.write_text(planned.gin_text(recipe, choice, choice.best), encoding="utf-8")
    planned.draw(choice.best, out.with_suffix(".png"))
    files = (*flags.gin_files, str(out))
    command = train_command(files, flags.bindings, allow_code=flags.allow_code)
    yield f"train it: {shlex.join(command)}; its timeline: {out.with_suffix('.png')}"
    jobs = [
        ClusterJob(
            name=out.stem,
            kind=kind,
            devices=ranks,
            per_node=node,
            command=command,
            grace=recipe.checkpoint.grace_seconds,
            process_per=processes,
        )
        for kind, ranks, node in planned.blocks(choice.best)
    ]
    for name, make, submit in (("slurm", slurm_file, "sbatch"), ("jobset", jobset_file, "kubectl apply -f")):
        if file := str(flags.values[name]):
            Path(file).write_text(make(*jobs), encoding="utf-8")
            yield f"on a cluster: {submit} {file}"


# ---- numbers alone ---------------------------------------------------------------------------------------------------


def _plan_problem(flags: Flags) -> int:
    problem, coupled = read_problem(str(flags.values["problem"])), flags.values["strategy"] == COUPLED
    for flag in (*(("--bound",) if flags.values["bound"] else ()), *((f"--strategy={COUPLED}",) if coupled else ())):
        _check_plain(problem, flag)
    plan = best_coupled(problem) if coupled else best_plan(problem)
    simulated = {"simulated": simulated_seconds(plan)} if coupled else {}
    bound = _bound(plan) if flags.values["bound"] else None
    if flags.values["json"]:
        print(json.dumps(plan.as_json() | simulated | ({} if bound is None else {"bound": bound})))
    else:
        text = "simulated, with all other modules before the llm, it takes"
        print("\n".join([*table(plan, bound), *(f"{text} {seconds:.6g} s" for seconds in simulated.values())]))
    return 0


def _check_plain(problem: Problem | MixedProblem, flag: str) -> None:
    """Requires a problem without communication and chunks, which `flag` does not support."""
    fix = f"{flag}: is for problems without communication and chunks; leave it out, or"
    for kind, resources in problem.kinds.items():
        if math.isfinite(resources.bandwidth):
            raise ConfigError(f"{fix} {f'kinds.{kind}.' if kind else ''}bandwidth={resources.bandwidth:g}")
        for name, costs in resources.modules.items():
            if costs.chunks > 1:
                raise ConfigError(f"{fix} modules.{name}.chunks={costs.chunks}")


def _bound(plan: Plan) -> float:
    from mmjax.planner.relaxation import relax  # cvxpy takes seconds to import

    relaxed = relax(plan.problem, WHOLE_BELOW)
    assert relaxed is not None, "where a plan exists, so does one on real numbers of stages"
    return relaxed.bound


def table(plan: Plan, bound: float | None = None) -> Iterator[str]:
    """Yields the plan as lines of text without newlines: a heading, a line for each module, and the seconds of a step.

    Args:
      plan: degrees of each module, as `best_plan(problem)` gives it.
      bound: seconds that no plan's step goes below, which get a line too; None where they are not known.
    """
    width = max(map(len, plan.modules)) + 2
    kinds = {name: kind for name, kind in plan.kinds.items() if kind}
    wide = max(map(len, kinds.values()), default=-2) + 2
    head = f"{'kind':<{wide}}" if kinds else ""
    yield f"{'':<{width}}{head}{'devices':>8}{'tp':>5}{'dp':>7}{'pp':>5}{'stage ms':>11}{'GB a device':>13}"
    for name, degrees in plan.modules.items():
        yield (
            f"{name:<{width}}{kinds.get(name, ''):<{wide}}{degrees.devices:>8}{degrees.tp:>5}{degrees.dp:>7}"
            f"{degrees.pp:>5}{plan.stage_seconds(name) * 1e3:>11.4g}{plan.memory(name) / GIGA:>13.4g}"
        )
    yield (
        f"a step takes {plan.objective:.6g} s: {plan.warm_up:.4g} s until the first microbatch is through, then "
        f"{plan.microbatches - 1} more at the pace of {plan.bottleneck}{_reduced(plan)}"
    )
    yield f"{_used(plan)} are used"
    if bound is not None:
        excess = (plan.objective / bound - 1) * 100
        yield f"no plan takes less than {bound:.6g} s: this one takes at most {excess:.2g} % more"


def _reduced(plan: Plan) -> str:
    """A clause about the seconds of the slowest module's dp collectives; "" if it has none."""
    seconds = plan.reducing_seconds(plan.bottleneck)
    return f", and {seconds:.4g} s for its gradients and parameters" if seconds else ""


def _used(plan: Plan) -> str:
    """The numbers of used and of all devices of each kind, as text."""
    counts = {kind: (plan.devices_of(kind), resources.devices) for kind, resources in plan.problem.kinds.items()}
    return " and ".join(f"{used} of {total} {kind or 'devices'}" for kind, (used, total) in counts.items())


if __name__ == "__main__":
    run_plain(main)
