"""Writes a small dataset of dialogues about handwritten digits in every layout that `Source.kind` reads.

    python -m mmjax.sample_data --out=data/digits        # or: make sample-data

Images of uneven sizes and formats, dialogues about none, one or several of them. The same samples are written as
`llava/data.json` with images, `webdataset/*.tar`, `data.array_record` and `data.parquet`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mmjax.configurable import ConfigError, require
from mmjax.data.sources.writers import write_all
from mmjax.data.tasks.digits.dialogues import digit_dialogues
from mmjax.flags import Flag, one_line_errors, parse_flags, run_plain

USAGE = "python -m mmjax.sample_data"
FLAGS = (
    Flag(name="out", doc="folder that is written to; made if missing.", default="data/digits"),
    Flag(name="samples", doc="how many dialogues.", default=400),
    Flag(name="seed", doc="of the dialogues.", default=0),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the data, and prints each path with its kind; returns the exit status 0.

    Args:
      argv: the arguments, without the program's name, such as ["--out=data/digits", "--samples=400", "--seed=0"], which
        are the defaults; by default this process's.

    Raises:
      SystemExit: with status 2, after a line on stderr about a wrong flag or a folder that cannot be written.
    """
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, USAGE).values
        out, samples, seed = str(flags["out"]), int(flags["samples"]), int(flags["seed"])
        require(samples > 0, "--samples", samples, "must be above 0, such as 400")
        require(seed >= 0, "--seed", seed, "must be 0 or more, such as 0")
        try:
            paths = write_all(Path(out), digit_dialogues(samples, seed))
        except OSError as error:
            cause = error.strerror or type(error).__name__
            raise ConfigError(f"--out={out!r}: cannot be written ({cause}); name another, such as 'digits'") from None
        for kind, path in paths.items():
            print(f"{kind:<13} {path}")
    return 0


if __name__ == "__main__":
    run_plain(main)
