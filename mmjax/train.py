"""``python -m mmjax.train --gin_file=F [--gin.scope/Class.field=value …] [--run_dir=D]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mmjax.config import Config, default_run_dir, load_config
from mmjax.config.flags import INTERRUPTED, Flag, one_line_errors, parse_flags, run_command
from mmjax.config.validate import advise
from mmjax.run.trainer import Trainer, TrainResult

FLAGS = (Flag(name="run_dir", doc="where everything is written; runs/<config name> unless given."),)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, or continues the run that is in the directory; returns the exit status."""
    with one_line_errors("interrupted; the same command continues from the last checkpoint"):
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, "python -m mmjax.train")
        config = load_config(flags.gin_files, flags.bindings)
        return _train(config, str(flags.values["run_dir"]) or str(default_run_dir(flags.gin_files)))


def _train(config: Config, run_dir: str) -> int:
    with Trainer(config, run_dir) as trainer:
        for name, layout in config.layouts.items():
            print(f"{name}: {layout.describe()}")
        for line in advise(config):
            print(line)
        stages, programs = len(trainer.parts.placed.stages), len(trainer.executor.programs())
        print(f"{stages} stages, {programs} programs, run directory {run_dir}")
        if trainer.resumed:
            print(f"continuing after step {trainer.step}")
        if trainer.step >= config.train.steps:
            print(f"already trained for {trainer.step} steps; raise --gin.Train.steps or choose another --run_dir")
        sys.stdout.flush()
        result = trainer.train()
        if result.interrupted:
            print(_stopped(trainer))
            return INTERRUPTED
        if result.evaluation:
            print(_summary(result))
            print(f"see {run_dir}/predictions.png, curves.png and timeline.png")
    return 0


def _stopped(trainer: Trainer) -> str:
    saved = trainer.latest_checkpoint()
    again = f"continues after step {saved}" if saved else "starts again"
    return f"stopped after step {trainer.step}; the same command {again}"


def _summary(result: TrainResult) -> str:
    assert result.evaluation is not None
    text = (
        f"held-out images, free-running: {result.evaluation.digit_accuracy:.1%} of digits read right, "
        f"{result.evaluation.exact_match:.1%} of answers"
    )
    return f"{text}; with exchanged images {result.swapped.digit_accuracy:.1%}" if result.swapped else text


if __name__ == "__main__":
    run_command(main)
