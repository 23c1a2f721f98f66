"""``python -m mmjax.train --gin_file=F [--gin.scope/Class.field=value …] [--run_dir=D]``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mmjax.config import default_run_dir, load_config
from mmjax.flags import Flag, one_line_errors, parse_flags

FLAGS = (Flag(name="run_dir", doc="Where everything is written; runs/<config name> unless given."),)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, or continues the run that is in the directory; returns the exit status."""
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, "python -m mmjax.train")
        config = load_config(flags.gin_files, flags.bindings)
        run_dir = str(flags.values["run_dir"]) or str(default_run_dir(flags.gin_files))
        return _train(config, run_dir)


def _train(config, run_dir: str) -> int:
    from mmjax.trainer import Trainer

    with Trainer(config, run_dir) as trainer:
        placed = trainer.parts.placed
        for name, layout in config.layouts.items():
            print(f"{name}: {layout.describe()}")
        print(f"{len(placed.stages)} stages, {len(trainer.executor.programs())} programs, run directory {run_dir}")
        if trainer.resumed:
            print(f"continuing after step {trainer.step}")
        if trainer.step >= config.train.steps:
            print(f"already trained for {trainer.step} steps; raise --gin.Train.steps or choose another --run_dir")
            return 0
        result = trainer.train()
        if result.interrupted:
            print(f"stopped after step {result.step}; the same command continues")
            return 130
        if result.evaluation and result.swapped:
            print(
                f"held-out images, free-running: {result.evaluation.digit_accuracy:.1%} of digits read right, "
                f"{result.evaluation.exact_match:.1%} of answers; with exchanged images {result.swapped.digit_accuracy:.1%}"
            )
            print(f"see {run_dir}/predictions.png, curves.png and timeline.png")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status) if status == 130 else sys.exit(status)
