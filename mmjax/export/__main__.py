"""`python -m mmjax.export --run_dir=D --out=PATH [--step=N] [--best] [--format=safetensors] [--merge_lora]`: the
parameters of a checkpoint alone.

`from orbax.checkpoint import v1 as ocp; ocp.load("/absolute/PATH")` gives nested dicts by the parameters' logical
names: `{"llm": {"embed": [V, D], "layers": {"000": ...}, ...}, "vision": ...}`. What is printed last is a command for
it. A new run starts from PATH with `--gin.Checkpoint.init_from=PATH`.

`--format=safetensors` writes what `transformers` loads: the folder that the run's modules started from, with the run's
parameters, in the folder's dtypes. A run of modules from several folders gives a LLaVA, where that has such modules,
else a folder for each, PATH/<module>; a language model of new values becomes a folder too. The status is 1 where a
module is in none of them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mmjax.config.flags import Flag, one_line_errors, parse_flags, run_command
from mmjax.configurable import ConfigError, one_of
from mmjax.export.checkpoints import best_step
from mmjax.export.folders import ExportedFolders
from mmjax.export.formats import FORMATS, export
from mmjax.flags import ALLOW_CODE
from mmjax.models.config import lora_name

FLAGS = (
    Flag(name="run_dir", doc="the directory of a training run.", required=True),
    Flag(name="out", doc="the directory to make; it must not exist.", required=True),
    Flag(name="step", doc="which checkpoint; 0 takes the newest.", default=0),
    Flag(name="best", doc="takes the checkpoint that is best by the run's Checkpoint.best.", default=False),
    Flag(
        name="format",
        doc="orbax, safetensors for folders that transformers loads, or peft for low-rank adapters alone.",
        default="orbax",
    ),
    Flag(name="merge_lora", doc="whether low-rank adapters are added to the weights that they adapt.", default=False),
    ALLOW_CODE,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the parameters of one checkpoint; returns the exit status: 1 if a module was not written, else 0.

    Args:
      argv: the arguments without the program's name, such as ["--run_dir=runs/a", "--out=export"]; by default those of
        this process.

    Raises:
      SystemExit: 2 after a mistake, with one line on stderr; 130 after Ctrl-C or SIGTERM; 0 after --help.
    """
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, "python -m mmjax.export", gin=False)
        run_dir, out, step = str(flags.values["run_dir"]), str(flags.values["out"]), int(flags.values["step"])
        form, merge = str(flags.values["format"]), bool(flags.values["merge_lora"])
        one_of("--format", form, FORMATS)
        if flags.values["best"]:
            if step:
                raise ConfigError(f"--step={step}: --best chooses the checkpoint; leave one of them out")
            step = best_step(run_dir, allow_code=bool(flags.values[ALLOW_CODE.name]))
        exported = export(run_dir, out, form, step, allow_code=bool(flags.values[ALLOW_CODE.name]), merge_lora=merge)
        if isinstance(exported, list):
            for folder, name in exported:
                print(f"{folder}: {lora_name(name)}, which PeftModel.from_pretrained adds to its model")
            return 0
        if isinstance(exported, ExportedFolders):
            for folder, (modules, tensors) in exported.tensors.items():
                print(f"{folder}: {', '.join(modules)} of step {exported.step} in {tensors} tensors")
            if exported.images:
                print(f"without preprocessor_config.json, transformers has no such images: {exported.images}")
            if exported.apart:
                print(f"not one folder of a whole model: {exported.apart}")
            if exported.without:
                print(f"not written: {', '.join(exported.without)}; --format=orbax has all modules")
            return int(bool(exported.without))
        leaves = f"{exported.parameters:,} parameters of step {exported.step} in {exported.leaves} leaves"
        print(f"{out}: {leaves}; to read them:")
        print(reading_command(out))
    return 0


def reading_command(out: str | Path) -> str:
    """A command for a shell that reads an export with Orbax alone, which takes no relative path: "python -c …".

    out: the directory of the export, made absolute in the command; it need not exist.
    """
    path = str(Path(out).absolute())
    code = f"from orbax.checkpoint import v1 as ocp; parameters = ocp.load({path!r}); print(*parameters)"
    return f"python -c {shlex.quote(code)}"


if __name__ == "__main__":
    run_command(main)
