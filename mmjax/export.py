"""`python -m mmjax.export --run_dir=D --out=PATH [--step=N]`: a checkpoint's parameters alone, for any Orbax reader.

`from orbax.checkpoint import v1 as ocp; ocp.load("/absolute/PATH")` gives nested dicts by the parameters' logical
names: `{"llm": {"embed": [V, D], "layers": {"000": ...}, ...}, "vision": ...}`. What is printed last is a command for
it. A new run starts from PATH with `--gin.Checkpoint.init_from=PATH`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mmjax.config.flags import Flag, one_line_errors, parse_flags, run_command
from mmjax.configurable import ConfigError
from mmjax.flags import importing

if TYPE_CHECKING:  # see `importing`
    import jax

    from mmjax.checkpoint import Checkpointer

FLAGS = (
    Flag(name="run_dir", doc="the directory of a training run.", required=True),
    Flag(name="out", doc="the directory to make; it must not exist.", required=True),
    Flag(name="step", doc="which checkpoint; 0 takes the newest.", default=0),
)
PREFIX = "params/"


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
      step: the checkpoint's step.
      leaves: how many leaves were written.
      parameters: the elements of all leaves.
    """

    step: int
    leaves: int
    parameters: int


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the parameters of one checkpoint; returns the exit status."""
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, "python -m mmjax.export", gin=False)
        out = str(flags.values["out"])
        done = export_run(str(flags.values["run_dir"]), out, int(flags.values["step"]))
        print(f"{out}: {done.parameters:,} parameters of step {done.step} in {done.leaves} leaves; to read them:")
        print(reading_command(out))
    return 0


def reading_command(out: str | Path) -> str:
    """A command for a shell that reads an export with Orbax alone, which takes no relative path."""
    path = str(Path(out).absolute())
    code = f"from orbax.checkpoint import v1 as ocp; parameters = ocp.load({path!r}); print(*parameters)"
    return f"python -c {shlex.quote(code)}"


def export_run(run_dir: str | Path, out: str | Path, step: int = 0) -> Exported:
    """Copies the parameters of checkpoint `step` (0: the newest) of `run_dir` into a new Orbax checkpoint `out`.

    Leaves keep their logical names ("llm/layers/000/attn/q"), one nested dict per "/". No device but the host is used.

    Raises:
      ConfigError: there is no such run or checkpoint, or `out` exists.
      CheckpointError: the checkpoint cannot be read.
    """
    if step < 0:
        raise ConfigError(f"--step={step}: must be 0 or more, such as 0 for the newest checkpoint")
    if Path(out).exists():
        raise ConfigError(f"--out={str(out)!r} exists: remove it or name another path")
    with importing():
        import jax

        from mmjax.checkpoint import Checkpointer, export
    checkpointer = Checkpointer(Path(run_dir) / "checkpoints")
    step = _chosen(checkpointer, run_dir, step)
    metadata = checkpointer.metadata(step)
    place = _host()
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        for name, leaf in metadata.leaves.items()
        if name.startswith(PREFIX)
    }
    leaves = checkpointer.restore(step, targets, prefix=PREFIX)
    named = {name.removeprefix(PREFIX): leaf for name, leaf in leaves.items()}
    about = {name: getattr(metadata, name) for name in ("step", "seed", "config", "versions")} | {"extra": {}}
    try:
        export(named, out, about=about)
    except OSError as error:
        raise ConfigError(f"--out={str(out)!r}: cannot be written ({error.strerror}); name another path") from None
    return Exported(step, len(named), sum(prod(leaf.shape) for leaf in named.values()))


def _chosen(checkpointer: Checkpointer, run_dir: str | Path, step: int) -> int:
    steps = checkpointer.steps()
    if not steps:
        missing = "has no readable checkpoint" if Path(run_dir).is_dir() else "is no directory"
        raise ConfigError(
            f"--run_dir={str(run_dir)!r} {missing}: name the directory of a run, such as 'runs/digits_vlm'"
        )
    if step and step not in steps:
        raise ConfigError(f"--step={step}: there is no such checkpoint; use one of {', '.join(map(str, steps))}")
    return step or steps[-1]


def _host() -> jax.sharding.SingleDeviceSharding:
    """A sharding on the CPU: parameters pass through the host's memory, whatever accelerator is here."""
    import jax

    from mmjax import jax_compat

    if not jax_compat.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
    return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])


if __name__ == "__main__":
    run_command(main)
