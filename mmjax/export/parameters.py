"""Exports of parameters alone, as an Orbax checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from mmjax.configurable import ConfigError
from mmjax.export.checkpoints import chosen_step, host_memory, require_out
from mmjax.flags import importing
from mmjax.models.lora.merging import merged_adapters, require_adapters


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


def export_run(run_dir: str | Path, out: str | Path, step: int = 0, *, merge_lora: bool = False) -> Exported:
    """Copies the parameters of checkpoint `step` (0: the newest) of `run_dir` into a new Orbax checkpoint `out`.

    Of modules with `Optimizer.ema` these are the running means. Leaves keep their logical names
    ("llm/layers/000/attn/q"), one nested dict per "/". With `merge_lora` low-rank adapters are added to their weights
    and are no module any more. No device but the host is used.

    The result has `step`, the number of `leaves` and that of their elements, `parameters`.

    Raises:
      ConfigError: there is no such run or checkpoint, `out` exists, or there are no adapters to merge.
      CheckpointError: the checkpoint cannot be read.
    """
    require_out(out, step)
    with importing():
        import jax

        from mmjax.checkpoint import Checkpointer, SavedParameters, export
    checkpointer = Checkpointer(Path(run_dir) / "checkpoints")
    step = chosen_step(checkpointer, run_dir, step)
    saved, place = SavedParameters.find(str(checkpointer.directory / f"{step:08d}"), means=True), host_memory()
    metadata = saved.metadata
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place) for name, leaf in saved.leaves.items()
    }
    named = saved.read(targets)
    if merge_lora:
        merged = merged_adapters(named, metadata.config)
        require_adapters(named.keys() - merged.keys(), merge=merge_lora)
        named = {name: jax.device_put(leaf, place) for name, leaf in merged.items()}
    origin = {name: getattr(metadata, name) for name in ("step", "seed", "config", "versions")} | {"extra": {}}
    try:
        export(named, out, metadata=origin)
    except OSError as error:
        raise ConfigError(f"--out={str(out)!r}: cannot be written ({error.strerror}); name another path") from None
    return Exported(step, len(named), sum(prod(leaf.shape) for leaf in named.values()))
