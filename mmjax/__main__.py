"""``mmjax COMMAND …``, the same as ``python -m mmjax.COMMAND …``. It imports nothing but the command.

The descriptions of the commands are here because reading them from the modules would import JAX for `--help`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from mmjax.configurable import ConfigError, suggest
from mmjax.flags import entry, one_line_errors, run_plain
from mmjax.version import __version__

COMMANDS = {
    "train": "trains a model, or continues a run; with --dry_run shows layout, memory and programs.",
    "check": "compares a layout with one device: loss, gradients and updates.",
    "inspect": "shows the data of a configuration: samples, lengths, padding, and records that are left out.",
    "eval": "evaluates a run, on its own held-out data or on data of yours.",
    "generate": "answers messages about images and sounds.",
    "export": "writes the parameters of a run, for Orbax or as a folder of Hugging Face.",
    "plan": "finds the best layouts of a configuration for a number of devices, simulated.",
    "compile": "compiles the programs of a step for GPUs that are not here: memory, work and a predicted step.",
    "profile": "measures a configuration's layers, for plans.",
    "launch": "starts several processes on this host: mmjax launch -n 4 mmjax train …",
    "serve": "prepares batches on CPU hosts, for trainers with Data.servers.",
    "latents": "makes the latents of pictures ahead, for generators of latents.",
    "train_autoencoder": "trains an autoencoder of pictures, whose latents a generator makes.",
    "reorder": "orders the samples of a step so that encoders do not wait.",
    "sample_data": "writes dialogues about digits in each layout of data that mmjax reads.",
    "bench": "benchmarks.",
}
USAGE = "usage: mmjax COMMAND [flags]; mmjax COMMAND --help lists the flags"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command as `python -m` would, which ends the process; `--help` and `--version` return the status.

    Args:
      argv: the command, such as "train", and its arguments; by default this process's.
    """
    command, *words = [*(sys.argv[1:] if argv is None else argv), ""]
    if command in ("", "-h", "--help"):
        print("\n".join([USAGE, "", *(entry(f"  {name}", text) for name, text in COMMANDS.items())]))
        return 0 if command else 2
    if command == "--version":
        print(f"mmjax {__version__}")
        return 0
    if command not in COMMANDS:
        with one_line_errors():
            raise ConfigError(f"{command!r} is no command: {suggest(command, COMMANDS)}")
    sys.argv[1:] = words[:-1]
    runpy.run_module(f"mmjax.{command}", run_name="__main__", alter_sys=True)
    return 0


def script() -> None:
    """The installed command `mmjax`: runs `main` with this process's arguments, and ends the process."""
    run_plain(main)


if __name__ == "__main__":
    script()
