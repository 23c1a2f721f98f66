"""``python -m mmjax.train --gin_file=F [--gin.scope/Class.field=value …] [--run_dir=D] [--dry_run [--json]]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmjax.config import default_run_dir, load_config
from mmjax.config.flags import (
    INCOMPLETE,
    INTERRUPTED,
    PROCESS_FLAGS,
    Flag,
    join_processes,
    one_line_errors,
    parse_flags,
    process_settings,
    run_command,
)
from mmjax.configurable import ConfigError
from mmjax.flags import counted, importing
from mmjax.mesh import gpu
from mmjax.mesh.process_group import give_up, has_peers, planned_count
from mmjax.recipe import Recipe, advise
from mmjax.recipe.targets import require_targets

if TYPE_CHECKING:  # see `importing`
    from mmjax.train.trainer import Trainer

FLAGS = (
    Flag(name="run_dir", doc="where everything is written; runs/<config name> unless given."),
    Flag(
        name="dry_run",
        default=False,
        doc="show layout, memory per device, programs and compile time, and end; no device is needed or touched. "
        "--num_processes plans as many processes. With --run_dir also writes layout.png and timeline.png there.",
    ),
    Flag(
        name="from_scratch",
        default=False,
        doc="begin again in a run directory that has steps in metrics.jsonl and has lost its checkpoints.",
    ),
    Flag(name="json", default=False, doc="with --dry_run: one line of JSON instead of text."),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, or continues the run that is in the directory; returns the exit status.

    0 is a finished run, 1 one that could not go on, write all files or evaluate, and 130 one that was interrupted.

    Args:
      argv: the arguments without the program's name, such as ["--gin_file=run.gin", "--run_dir=runs/a"]; by default
        those of this process.

    Raises:
      SystemExit: 2 after a mistake, with one line on stderr; 130 after Ctrl-C or SIGTERM; 0 after --help.
    """
    with one_line_errors("interrupted; the same command continues from the last checkpoint"):
        flags = parse_flags(sys.argv[1:] if argv is None else argv, (*FLAGS, *PROCESS_FLAGS), "python -m mmjax.train")
        recipe = load_config(flags.gin_files, flags.bindings, allow_code=flags.allow_code)
        require_targets(recipe)
        run_dir, dry, as_json = str(flags.values["run_dir"]), flags.values["dry_run"], flags.values["json"]
        if as_json and not dry:
            raise ConfigError("--json: only a dry run has it; add --dry_run or leave it out")
        if dry:
            processes = planned_count(process_settings(flags))
            return _dry_run(recipe, run_dir, processes=processes, as_json=bool(as_json))
        join_processes(flags)
        again = bool(flags.values["from_scratch"])
        return _train(recipe, run_dir or str(default_run_dir(flags.gin_files)), from_scratch=again)


def _dry_run(recipe: Recipe, run_dir: str, *, processes: int, as_json: bool) -> int:
    with importing():
        from mmjax.train.dry_run import dry_run
        from mmjax.train.files import made_run_dir

    forecast = dry_run(recipe, processes=processes)
    if run_dir:
        forecast.draw(made_run_dir(run_dir))
    print(json.dumps(forecast.as_json()) if as_json else forecast.describe())
    if run_dir and not as_json:
        print(f"see {run_dir}/layout.png and timeline.png")
    return 0


def _train(recipe: Recipe, run_dir: str, *, from_scratch: bool) -> int:
    with importing():
        from mmjax.data.types import NoBatchError
        from mmjax.eval.scores import describe
        from mmjax.mesh.processes import is_first
        from mmjax.pipeline.finite import NonFiniteError
        from mmjax.progress import announced
        from mmjax.train.trainer import Trainer
        from mmjax.train.warm_up import ends_where_down

    say = print if is_first() else lambda line: None
    with announced("building the model and tracing its programs"):
        opened = Trainer(recipe, run_dir, from_scratch=from_scratch, watched=True)
    with opened as trainer:
        for name, layout in recipe.model.layouts.items():
            say(f"{name}: {layout.describe()}")
        if trainer.parts.world.platform == "gpu":
            say(gpu.describe())
        for line in (*advise(recipe), *trainer.data, *trainer.chosen):
            say(line)
        stages, programs = len(trainer.parts.placed.stages), len(trainer.programs())
        say(f"{counted(stages, 'stage')}, {counted(programs, 'program')} to compile, run directory {run_dir}")
        if recipe.train.debug_nans:
            say("debug_nans: one program per op, and every op's outputs are waited for and checked; this is slow")
        if trainer.resumed:
            say(f"continuing after step {trainer.step}")
        for line in trainer.started:
            say(line)
        if trainer.step >= trainer.recipe.train.steps:
            say(f"already trained for {trainer.step} steps; raise --gin.Train.steps or choose another --run_dir")
        sys.stdout.flush()
        try:
            with ends_where_down():
                result = trainer.train()
        except (NonFiniteError, NoBatchError) as error:
            if has_peers():
                give_up(str(error))  # at once: a save would wait for the other processes, which end on this news
            print(f"error: {error}", file=sys.stderr)
            say(_stopped(trainer))
            return 1
        if result.unusable:
            say(f"{result.unusable} samples of the data cannot be used: see {run_dir}/skipped.jsonl")
        for line in result.unwritten:
            say(f"not written: {line}")
        if result.interrupted:
            say(_stopped(trainer))
            return INTERRUPTED
        if result.ending:
            say(f"ended after step {result.step}: {result.ending}")
        if result.evaluation_failure:
            say(f"the last evaluation has failed: {result.evaluation_failure}")
        if result.evaluation and not result.scores_shown:
            say(f"step {result.step}: {describe(result.evaluation, result.swapped)}")
        if result.evaluation:
            say(f"see {run_dir}/predictions.png, curves.png and timeline.png")
    return INCOMPLETE if result.unwritten or result.evaluation_failure else 0


def _stopped(trainer: Trainer) -> str:
    saved = trainer.latest_checkpoint()
    again = f"continues after step {saved}" if saved else "begins again"
    return f"stopped after step {trainer.step}; the same command {again}"


if __name__ == "__main__":
    run_command(main)
