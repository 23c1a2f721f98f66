"""`python -m mmjax.inspect --gin_file=F [--steps=8] [--text=3] [--out=DIR] [--json]`: shows the training data.

Prints samples, lengths, how well they fill the static shapes, and the simulated time of steps under each method of
reordering; then the text of some samples, with the answers that the model learns in colour. It reads metadata: few
media are opened, nothing is compiled, and no device is needed. The status is 1 if more records of a dataset than
`Data.max_broken` cannot be used, so that a run would be refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mmjax.config import load_config
from mmjax.config.flags import Flag, one_line_errors, parse_flags, require_gin_file, run_command
from mmjax.configurable import ConfigError
from mmjax.flags import importing

FLAGS = (
    Flag(name="steps", doc="training steps to look at.", default=8),
    Flag(name="out", doc="folder for data.png, samples.png and mask.png; none by default.", default=""),
    Flag(name="text", doc="samples whose text is printed, learned answers in colour; 0 prints none.", default=3),
    Flag(name="json", doc="prints one line of JSON.", default=False),
)

MOSTLY_BROKEN = 1
"""Exit status if too many records cannot be used."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures, and draws them into the folder `--out`; returns 1 if a run would be refused, else 0.

    Args:
      argv: the arguments without the program's name, such as ["--gin_file=run.gin", "--out=pictures"]; by default those
        of this process.

    Raises:
      SystemExit: 2 after a mistake, with one line on stderr; 130 after Ctrl-C or SIGTERM; 0 after --help.
    """
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, "python -m mmjax.inspect")
        steps, out = int(flags.values["steps"]), str(flags.values["out"])
        text = int(flags.values["text"])
        if text < 0:
            raise ConfigError(f"--text={text}: must be 0 or more, such as 3")
        if steps < 1:
            raise ConfigError(f"--steps={steps}: must be 1 or more, such as 8")
        require_gin_file(flags)
        recipe = load_config(flags.gin_files, flags.bindings, allow_code=flags.allow_code)
        if out and Path(out).exists() and not Path(out).is_dir():
            raise ConfigError(f"--out={out!r}: is a file; name a folder")
        with importing():
            from mmjax.inspect.inspection import draw, draw_samples, inspect
            from mmjax.inspect.sample_text import write_samples
            from mmjax.viz.mask import draw_mask, first_row
        report = inspect(recipe, steps)
    print(json.dumps(report.numbers()) if flags.values["json"] else "\n".join(report.describe()))
    if text and not flags.values["json"]:
        write_samples(recipe, text)
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        draw(report, Path(out) / "data.png")
        draw_samples(recipe, Path(out) / "samples.png")
        draw_mask(first_row(recipe), Path(out) / "mask.png")
    return MOSTLY_BROKEN if report.mostly_broken else 0


if __name__ == "__main__":
    run_command(main)
